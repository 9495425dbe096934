"""In which formats a model and its batches lie on a device: precision, TF32, and the order of an image's channels."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from trainpace.errors import TrainpaceError
from trainpace.execution import Precision

_AUTOCAST = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}
_WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_device(device: str, precision: Precision) -> None:
    """Raise TrainpaceError where this torch or this kind of device does not have the precision."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainpaceError("this torch sees no CUDA device.", "Use --device cpu, or install a CUDA build of torch.")
    if device == "cpu" and precision in ("tf32", "amp_fp16", "fp16", "fp8"):
        raise TrainpaceError(f"{precision} is for GPUs.", "On a CPU measure fp32, amp_bf16 or bf16.")
    if precision == "fp8":
        raise TrainpaceError("measuring fp8 needs an engine of its own.", "Measure amp_bf16 or bf16.")


def allow_tf32(precision: Precision) -> None:
    """Let matrix products and convolutions use TF32, in every precision but fp32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"


def autocast(device: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """The context that a forward pass runs in."""
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)


def place_model(model: Any, device: str, precision: Precision, channels_last: bool) -> Any:
    """Move the model to the device in place, so that an optimizer made before holds the same parameters."""
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    return model.to(device=device, dtype=_WEIGHTS.get(precision), memory_format=memory_format)


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """The batch on the device, floating-point inputs in the weights' own format. Pinned memory is copied without waiting."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = _WEIGHTS.get(precision) if tensor.is_floating_point() else None
        tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        return tensor.to(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor

    return map_tensors(place, batch)


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The batch (tensors in dicts, lists and tuples) with `function` applied to every tensor."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    return type(batch)(map_tensors(function, part) for part in batch) if isinstance(batch, list | tuple) else batch
