"""What libraries ask of a tensor's values or device, answered for tensors that have no values."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainpace.trace.cuda_mapping import replaced
from trainpace.workload import Form


@contextlib.contextmanager
def answered(form: Form, pads: bool) -> Iterator[None]:
    """Let a step run on the meta device. `pads`: whether batches hold padding, so that attention takes a mask."""
    optimizers = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it behind another name
    replacements = [
        (optimizers, {"_get_fused_kernels_supported_devices": lambda: ["cuda", "cpu", "meta"]}),
        (torch, _autocast(form)),
        (sys.modules.get("transformers.masking_utils"), _masks(pads)),
        (sys.modules.get("trl.kernels.chunked_logprob"), _FUSED_HEAD),
    ]
    with contextlib.ExitStack() as stack:
        for owner, values in replacements:
            stack.enter_context(replaced(owner, **values))
        yield


def _autocast(form: Form) -> dict[str, Any]:
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(*device: str) -> bool:
        return form == "amp" if device == ("meta",) else is_on(*device)

    def dtype(device: str) -> torch.dtype:
        return torch.bfloat16 if device == "meta" else dtype_of(device)

    return {"is_autocast_enabled": is_enabled, "get_autocast_dtype": dtype}


def _masks(pads: bool) -> dict[str, Any]:
    """transformers leaves out a mask that masks nothing, and looks at its values to find out."""

    def ignored(mask: Any, length: int, window: int | None = None) -> bool:
        return not (pads and mask is not None) and (window is None or length < window)

    return {"fast_all": lambda _: not pads, "_ignore_bidirectional_mask_sdpa": ignored}


_FUSED_HEAD = {
    "TOKEN_CHUNK_SIZE": sys.maxsize,
    "_forward_tile": lambda tile, *_, **__: tile.amax(-1),
    "_backward_tile": lambda tile, *_, **__: tile.neg_(),
    "_addmm_fp32": lambda total, a, b: total.add_(torch.mm(a, b)),
}
"""TRL's language-model head with its loss. Its Triton kernels pass once over each tile of logits, which its functions in torch do
ten times; and all tokens are one tile, since the number of tiles would grow in steps."""


def holds_padding(batch: Any) -> bool:
    """Whether a real batch's attention mask leaves something out."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, torch.Tensor) and mask.device.type != "meta" and not bool(mask.bool().all())
