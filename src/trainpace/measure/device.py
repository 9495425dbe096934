"""A device under training: formats of a model and its batches, moments on the device's own clock, and the peak memory."""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from trainpace.errors import TrainpaceError
from trainpace.execution import NUMBER_FORMATS, Precision
from trainpace.trace import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What clears VmHWM (Linux, Documentation/filesystems/proc.rst)."""


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
    number_format = NUMBER_FORMATS[precision]
    if number_format.form != "amp":
        return contextlib.nullcontext()
    return torch.autocast(device, _DTYPES[number_format.products])


def _weights_dtype(precision: Precision) -> torch.dtype | None:
    """The format that a model and its inputs are converted to; None where they stay as they are."""
    number_format = NUMBER_FORMATS[precision]
    return _DTYPES.get(number_format.products) if number_format.form == "half" else None


def place_model(model: Any, device: str, precision: Precision, channels_last: bool) -> Any:
    """Move the model to the device in place, so that an optimizer made before holds the same parameters."""
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    return model.to(device=device, dtype=_weights_dtype(precision), memory_format=memory_format)


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """The batch on the device, floating-point inputs in the weights' own format. Pinned memory is copied without waiting."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = _weights_dtype(precision) if tensor.is_floating_point() else None
        tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        return tensor.to(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor

    return map_tensors(place, batch)


class Marks:
    """Moments on a device's own clock, and the milliseconds between two of them once they have happened: the host's for a CPU."""

    def now(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until all marks have happened."""

    def span_ms(self, first: Any, second: Any) -> float:
        """The time between two marks, after `wait`."""
        return float(1e3 * (second - first))


class _CudaMarks(Marks):
    """Events in the stream, for the host runs ahead of a GPU."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def span_ms(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second))


def marks_of(device: str) -> Marks:
    """The marks of the device ``cpu`` or ``cuda``."""
    return _CudaMarks() if device == "cuda" else Marks()


class MemoryMeter:
    """The peak memory of this process. Start it before the model is made.

    On CUDA the allocator knows: live tensors, and what it keeps. On a CPU the operating system is asked: how much the process
    grew, and its whole size; with freed pages that the C library keeps, so it is an upper bound of live tensors.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before_gib = _status_gib("VmRSS")

    def peak_gib(self) -> tuple[float | None, float | None]:
        """(allocated, reserved) in GiB; None where the system does not tell."""
        if self._cuda:
            return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
        peak = _status_gib("VmHWM")
        if peak is None or self._before_gib is None:
            return None, None
        return max(0.0, peak - self._before_gib), peak


def _status_gib(field: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{field}:")), None)
