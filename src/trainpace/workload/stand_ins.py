"""What libraries ask of a tensor's values or device, answered for tensors that have no values."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from trainpace.workload.cuda_mapping import replaced


@contextlib.contextmanager
def answered(autocast: bool, pads: bool) -> Iterator[None]:
    """Let a step run on the meta device. `pads`: whether batches hold padding, so that attention takes a mask."""
    optimizers = sys.modules[
        torch.optim.Optimizer.__module__
    ]  # torch.optim hides it behind another name
    replacements = [
        (optimizers, {"_get_fused_kernels_supported_devices": lambda: ["cuda", "cpu", "meta"]}),
        (torch, _autocast(autocast)),
        (torch.autocast, _autocast_on_meta()),
        (sys.modules.get("transformers.masking_utils"), _masks(pads)),
        (sys.modules.get("trl.kernels.chunked_logprob"), _FUSED_HEAD),
    ]
    with contextlib.ExitStack() as stack:
        for owner, values in replacements:
            stack.enter_context(replaced(owner, **values))
        stack.enter_context(_flex_attention())
        yield


def _autocast_on_meta() -> dict[str, Any]:
    """torch's own knows no meta device, and transformers 4.45 switches autocast off for rotary positions by their tensors'
    device."""
    enter: Any = torch.autocast.__init__

    def init(region: Any, device_type: str, *settings: Any, **more: Any) -> None:
        enter(region, "cpu" if device_type == "meta" else device_type, *settings, **more)

    return {"__init__": init}


_OF_A_CALL = ("__code__", "__defaults__", "__kwdefaults__")
"""What a function does, with the defaults of its arguments: older torch has other arguments."""


@contextlib.contextmanager
def _flex_attention() -> Iterator[None]:
    """Our own operator in the place of flex_attention, under every name that a model imported it by, compiled or not."""
    function: Any = getattr(
        sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", None
    )
    if function is None:
        yield
        return
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    own = {name: getattr(function, name) for name in _OF_A_CALL}
    for name in _OF_A_CALL:
        setattr(function, name, getattr(_in_its_place, name))
    try:
        with (
            contextlib.nullcontext()
            if compiler is None
            else torch.compiler.set_stance("force_eager")
        ):
            yield
    finally:
        for name, value in own.items():
            setattr(function, name, value)


def _in_its_place(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # runs with the names of torch's own module
    from trainpace.workload.skipping_attention import flex_attention

    return flex_attention(query, key, value, block_mask, return_lse, return_aux)


def _autocast(autocast: bool) -> dict[str, Any]:
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(*device: str) -> bool:
        return autocast if device == ("meta",) else is_on(*device)

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
