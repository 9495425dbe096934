"""A CPU or GPU under training: optimizer steps of one process, the device's own clock, and the peak memory."""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainpace.errors import TrainpaceError
from trainpace.execution import NUMBER_FORMATS, Execution, Precision
from trainpace.trace import map_tensors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What clears VmHWM (Linux, Documentation/filesystems/proc.rst)."""

Loss = Callable[[Any, Any], torch.Tensor]
"""(model, batch) -> the mean loss of the batch."""


def set_up_device(device: str, precision: Precision) -> None:
    """Let products and convolutions use TF32 in every precision but fp32, and convolutions alone in torch_fp32.

    Raises TrainpaceError where this torch or this kind of device does not have the precision.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainpaceError("this torch sees no CUDA device.", "Use --device cpu, or install a CUDA build of torch.")
    if device == "cpu" and precision in ("tf32", "fp8"):
        raise TrainpaceError(f"{precision} is for GPUs.", "On a CPU measure fp32, or a format of 16 bits.")
    if precision == "fp8":
        raise TrainpaceError("measuring fp8 needs an engine of its own.", "Measure amp_bf16 or bf16.")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision not in ("fp32", "torch_fp32")


def _weights_dtype(precision: Precision) -> torch.dtype | None:
    """The format that a model and its inputs are converted to; None where they stay as they are."""
    number_format = NUMBER_FORMATS[precision]
    return _DTYPES.get(number_format.products) if number_format.form == "half" else None


def place_batch(batch: Any, device: Any, precision: Precision, channels_last: bool) -> Any:
    """The batch on the device, floating-point inputs in the weights' own format. Pinned memory is copied without waiting."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        dtype = _weights_dtype(precision) if tensor.is_floating_point() else None
        tensor = tensor.to(device=device, dtype=dtype, non_blocking=True)
        return tensor.to(memory_format=torch.channels_last) if channels_last and tensor.dim() == 4 else tensor

    return map_tensors(place, batch)


class PlainEngine:
    """A model and its optimizer in one process. The model is moved in place, so that its optimizer keeps its parameters."""

    def __init__(self, execution: Execution, device: str, model: Any, optimizer: Any) -> None:
        self._execution = e = execution
        self.device = torch.device(device)
        memory_format = torch.channels_last if e.channels_last else torch.preserve_format
        model = model.to(device=device, dtype=_weights_dtype(e.precision), memory_format=memory_format)
        self.model: Any = torch.compile(model) if e.compile else model
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device) if e.precision == "amp_fp16" else None

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by until the update: a GradScaler's factor, or 1."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def place(self, batch: Any) -> Any:
        """The batch on the device, in the number format that the model takes."""
        return place_batch(batch, self.device, self._execution.precision, self._execution.channels_last)

    def forward(self, loss: Loss, batch: Any) -> torch.Tensor:
        number_format = NUMBER_FORMATS[self._execution.precision]
        if number_format.form != "amp":
            return loss(self.model, batch)
        with torch.autocast(self.device.type, _DTYPES[number_format.products]):
            return loss(self.model, batch)

    def backward(self, value: torch.Tensor) -> None:
        part = value / self._execution.accumulation
        (part if self._scaler is None else self._scaler.scale(part)).backward()

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        """Run forward and backward, and return the batch's own loss, detached. `last`: the last micro-batch of this step."""
        value = self.forward(loss, batch)
        self.backward(value)
        return value.detach()

    def update(self) -> None:
        """Step the optimizer, and clear the gradients."""
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)


class StepClock:
    """Moments within steps, and in `spans_ms` the milliseconds between those of each settled step.

    On a GPU they are events in its stream, since the host runs ahead of it; on a CPU the host's clock counts.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._moments: list[list[Any]] = []
        self.spans_ms: list[list[float]] = []

    def start_step(self) -> None:
        self._moments.append([])
        self.mark()

    def mark(self) -> None:
        moment: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            moment.record()
        self._moments[-1].append(moment)

    def wait(self) -> None:
        """Wait until the device has done all of its work."""
        if self._cuda:
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Wait for the device, and turn the moments into `spans_ms`."""
        self.wait()
        for moments in self._moments:
            pairs = itertools.pairwise(moments)
            self.spans_ms.append([a.elapsed_time(b) if self._cuda else 1e3 * (b - a) for a, b in pairs])
        self._moments.clear()


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
