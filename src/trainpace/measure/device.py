"""Access to the accelerator of this process: kind, name, synchronization, timing and memory.

A watched script imports this module, so it needs only torch.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainpace.core.errors import TrainpaceError, UnknownName

if TYPE_CHECKING:
    from trainpace.core.execution import Precision  # imports msgspec, which a script may lack

KINDS = {
    "cuda": "Install a build of torch for CUDA, or for ROCm on an AMD GPU",
    "xpu": "Install a build of torch for Intel GPUs",
    "mps": "MPS is for Apple silicon under macOS",
}
"""Kinds of accelerators that torch supports, with a hint for a torch that does not find one."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Value for clear_refs that resets VmHWM (Linux, Documentation/filesystems/proc.rst)."""


def accelerator_here() -> str | None:
    """Return the kind of accelerator that this torch supports and finds."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and torch.accelerator.is_available() else None


def check_device(kind: str) -> None:
    """Raise TrainpaceError unless this torch has a device of that kind."""
    here = accelerator_here()
    if kind in ("cpu", here):
        return
    if kind not in KINDS:
        raise UnknownName("device", kind, ("cpu", *KINDS))
    instead = f"use --device {here}, which is here" if here else "use --device cpu"
    raise TrainpaceError(
        f"this torch sees no {kind.upper()} device.", f"{KINDS[kind]}; or {instead}."
    )


def set_up_device(kind: str, precision: "Precision") -> None:
    """Check the device and set torch's TF32 flags for a precision.

    Matmuls and convolutions may use TF32 in every precision except fp32. In torch_fp32, only
    convolutions may use it, which is torch's default.

    Raises:
        TrainpaceError: If this torch or this kind of device does not support the precision.
    """
    check_device(kind)
    if precision in ("tf32", "fp8") and kind != "cuda":
        raise TrainpaceError(
            f"{precision} is for CUDA GPUs.", "Use fp32 or a 16-bit precision, such as bf16."
        )
    if precision == "fp8":
        raise TrainpaceError("fp8 cannot be measured yet.", "Measure amp_bf16 or bf16.")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision not in ("fp32", "torch_fp32")


def count_devices(kind: str) -> int:
    """Return the number of devices of that kind that this process can use, or 1 for the CPU."""
    if kind == "cpu":
        return 1
    return torch.accelerator.device_count() if accelerator_here() == kind else 0


def use_device(kind: str, index: int) -> None:
    """Make one device of that kind the current one. Does nothing on a CPU."""
    if kind != "cpu":
        torch.accelerator.set_device_index(index)


def collective_backend(kind: str) -> str:
    """Return the torch.distributed backend for devices of that kind.

    The backend is gloo, nccl (also for ROCm) or xccl.

    Raises:
        TrainpaceError: If torch has no backend for the device, for example MPS.
    """
    try:
        return str(torch.distributed.get_default_backend_for_device(kind))
    except ValueError:
        raise TrainpaceError(
            f"torch has no collective backend for {kind} devices.", "Train on one of them."
        ) from None


def synchronize(kind: str) -> None:
    """Wait until the current device has done all of its work."""
    if kind != "cpu":
        torch.accelerator.synchronize()


def finish_stream() -> None:
    """Wait until the accelerator's current stream has done all of its work.

    Other streams continue.
    """
    torch.accelerator.current_stream().synchronize()


def _ask(kind: str, name: str, *arguments: Any) -> Any:
    """Call a function of the device's torch module, such as torch.cuda.

    Returns None if the module does not have the function.
    """
    function = getattr(torch.get_device_module(kind), name, None)
    return None if function is None else function(*arguments)


def is_capturing(kind: str) -> bool:
    """Return True while the current stream captures a graph. Synchronizing is then an error."""
    return kind != "cpu" and bool(_ask(kind, "is_current_stream_capturing"))


def in_use() -> str:
    """Return the kind of accelerator that this process already uses, or "cpu".

    The call does not initialize the device. A script that only imports torch must not get a context
    on the device.
    """
    kind = accelerator_here()
    if kind is None:
        return "cpu"
    begun = _ask(kind, "is_initialized")
    if begun is None:  # MPS has no is_initialized; allocated memory shows that it is in use
        begun = _ask(kind, "current_allocated_memory") != 0
    return kind if begun else "cpu"


def device_name(kind: str) -> str:
    """Return the name of the current device, or an empty string if it has none (such as a CPU)."""
    if kind == "cpu":
        return ""
    if kind == "mps":  # MPS reports the name of the whole chip, which is the CPU's name too
        named = getattr(torch.backends.mps, "get_name", None)  # from torch 2.8 on
        return f"{named()} GPU" if named is not None else "Apple GPU"
    return str(_ask(kind, "get_device_name") or "")


def driver_id(kind: str) -> str:
    """Return the driver's UUID of the current device, or an empty string.

    For privacy, records do not contain it.
    """
    if kind == "cpu":
        return ""
    index = torch.accelerator.current_device_index()
    return str(getattr(_ask(kind, "get_device_properties", index), "uuid", ""))


def versions(kind: str) -> dict[str, str]:
    """Return the name of the device and the versions of its libraries.

    They become part of a measurement's environment.
    """
    if kind == "cpu":
        return {}
    found: dict[str, Any] = {"gpu": device_name(kind) or None}
    if kind == "cuda":
        toolkit = {"rocm": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        found |= {**toolkit, "cudnn": torch.backends.cudnn.version()}
    if kind == "xpu":
        found["oneapi"] = torch.version.xpu
    return {name: str(value) for name, value in found.items() if value is not None}


class StepClock:
    """Timer for the parts of steps.

    `spans_ms` has a list per step after warm-up: the milliseconds between successive marks.

    On an accelerator, marks are events in its stream, because the host runs ahead of the device. On
    a CPU, marks are times of the host's clock.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._moments: list[list[Any]] = []
        self.spans_ms: list[list[float]] = []

    def start_step(self) -> None:
        """Start a step and set its first mark."""
        self._moments.append([])
        self.mark()

    def mark(self) -> None:
        """Set a mark between two parts of the current step, or at its end."""
        moment: Any = time.perf_counter()
        if self._kind != "cpu":
            moment = torch.Event(self._kind, enable_timing=True)
            moment.record()
        self._moments[-1].append(moment)

    def wait(self) -> None:
        """Wait until the device has done all of its work."""
        synchronize(self._kind)

    def settle(self) -> None:
        """Wait for the device, and append the times between marks to `spans_ms`."""
        self.wait()
        for moments in self._moments:
            pairs = itertools.pairwise(moments)
            self.spans_ms.append(
                [1e3 * (b - a) if self._kind == "cpu" else a.elapsed_time(b) for a, b in pairs]
            )
        self._moments.clear()


def launch_ms(kind: str, step: Callable[[], object]) -> float:
    """Return the host's time to launch one step on an idle device, in ms.

    The time for the device to finish the step is not included.
    """
    synchronize(kind)
    start = time.perf_counter()
    step()
    launched = time.perf_counter()
    synchronize(kind)
    return 1e3 * (launched - start)


class MemoryMeter:
    """Meter of this process's peak memory. Create it before the model.

    On an accelerator, the allocator reports live tensors and reserved memory. On a CPU, the
    operating system reports the growth of the process and its total size. Both include freed pages
    that the C library keeps, so they are upper bounds of live tensors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        if kind != "cpu":
            _ask(kind, "reset_peak_memory_stats")
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before_gib = _status_gib("VmRSS")

    def peak_gib(self) -> tuple[float | None, float | None]:
        """Return peak (allocated, reserved) memory in GiB, with None for an unknown value."""
        if self._kind != "cpu":
            return peak_allocated_gib(self._kind), _gib(_ask(self._kind, "max_memory_reserved"))
        peak = _status_gib("VmHWM")
        if peak is None or self._before_gib is None:
            return None, None
        return max(0.0, peak - self._before_gib), peak


def peak_allocated_gib(kind: str) -> float | None:
    """Return the peak memory of live tensors in GiB, or None if it is unknown."""
    return _gib(_ask(kind, "max_memory_allocated"))


def reserved_gib(kind: str) -> float | None:
    """Return the memory that the device's allocator holds now in GiB, or None if it is unknown."""
    return _gib(_ask(kind, "memory_reserved"))


def free_gib(kind: str) -> float | None:
    """Return the device's free memory in GiB, or None if it is unknown.

    Memory that this process's allocator caches does not count as free.
    """
    return _gib((_ask(kind, "mem_get_info") or (None,))[0])


def allocator_retries(kind: str) -> int:
    """Return the number of times that the allocator had to free cached blocks and retry.

    Returns 0 if the allocator does not count them.
    """
    return int((_ask(kind, "memory_stats") or {}).get("num_alloc_retries", 0))


def _gib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else float(size_bytes) / 2**30


def _status_gib(field: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{field}:")), None
    )
