"""Normalisation and softmax."""

import math
from collections.abc import Sequence
from typing import Any

from trainpace.kinds.kind import Kind


def _normalised(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Elements that one mean is taken over."""
    x = args[0]
    if "layer_norm" in name or "rms_norm" in name:
        shape = args[2] if "backward" in name else args[1]
        return math.prod(shape) if isinstance(shape, list | tuple) else int(x.shape[-1])
    return int(x.numel() // max(1, int(x.shape[1] if x.dim() > 1 else 1)))


def _summed(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Elements that one sum of exponentials is taken over."""
    x = args[0]
    return int(x.shape[args[2] if "backward" in name else args[1]]) if x.dim() else 1


KINDS = (
    Kind(
        "norm",
        traffic={
            "batch_norm": 0.6, "batch_norm_inference": 0.9, "batch_norm_backward": 0.6, "batch_norm_nhwc": 0.6,
            "batch_norm_backward_nhwc": 0.5, "layer_norm": 0.7, "layer_norm_backward": 0.4,
        },
        functions={
            **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"), "batch_norm"),
            "native_batch_norm_inference": "batch_norm_inference",
            "native_batch_norm_backward": "batch_norm_backward",
            **dict.fromkeys(("native_layer_norm", "native_group_norm", "_fused_rms_norm"), "layer_norm"),
            **dict.fromkeys(
                ("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"), "layer_norm_backward"
            ),
        },
        extent=_normalised,
    ),
    Kind(
        "softmax",
        traffic={"softmax": 0.7, "softmax_backward": 0.7},
        functions=dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), "softmax")
        | dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), "softmax_backward"),
        extent=_summed,
    ),
)  # fmt: skip
