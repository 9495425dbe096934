"""Pooling."""

import math
from collections.abc import Sequence
from typing import Any

from trainpace.kinds.kind import Kind


def _window(name: str, args: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Elements that go into one."""
    if "adaptive" in name:
        sizes = [t.numel() for t in inputs]
        return max(1, max(sizes) // max(1, min(sizes)))
    kernel = args[2] if "backward" in name else args[1]
    return math.prod(kernel) if isinstance(kernel, list | tuple) else 1


KINDS = (
    Kind(
        "pool",
        traffic={"pool": 0.6, "pool_backward": 0.3},
        functions=dict.fromkeys(
            ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "max_pool3d_with_indices", "avg_pool3d"),
            "pool",
        )
        | dict.fromkeys(
            ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
            "pool_backward",
        ),
        extent=_window,
    ),
)
