"""The time of steps by the device's own clock."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainpace.core.errors import TrainpaceError, UnknownName

if TYPE_CHECKING:
    from trainpace.core.execution import (
        Precision,  # which imports msgspec, and a script may lack it
    )


class StepClock:
    """Moments within steps, and in `spans_ms` the milliseconds between those of each settled step.

    On an accelerator they are events in its stream, since the host runs ahead of it; on a CPU the host's clock counts.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._moments: list[list[Any]] = []
        self.spans_ms: list[list[float]] = []

    def start_step(self) -> None:
        self._moments.append([])
        self.mark()

    def mark(self) -> None:
        if self._kind == "cpu":
            self._moments[-1].append(time.perf_counter())
            return
        event = torch.Event(self._kind, enable_timing=True)
        event.record()
        self._moments[-1].append(event)

    def wait(self) -> None:
        """Wait until the device has done all of its work."""
        synchronize(self._kind)

    def settle(self) -> None:
        """Wait for the device, and turn the moments into `spans_ms`."""
        self.wait()
        for moments in self._moments:
            pairs = itertools.pairwise(moments)
            self.spans_ms.append(
                [1e3 * (b - a) if self._kind == "cpu" else a.elapsed_time(b) for a, b in pairs]
            )
        self._moments.clear()


COPIED_BYTES = 64 * 2**20
HEAD_START = 2.0
"""How long the device is kept busy beforehand, in times of what the host needs to launch the step."""
SHORTEST_COPY_MS = 0.05
MOST_COPIES = 500


def launch_ms(kind: str, step: Callable[[], object]) -> float:
    """The host's milliseconds to launch one step on an idle device, without waiting for it."""
    synchronize(kind)
    start = time.perf_counter()
    step()
    launched = time.perf_counter()
    synchronize(kind)
    return 1e3 * (launched - start)


def queued_ms(kind: str, step: Callable[[], object], host_ms: float) -> float | None:
    """The device's milliseconds for a step that is launched while copies from pinned memory keep its stream busy. None where the
    device began before all was launched: where copies take no time, or hold the host, and where a step has more launches than
    the device queues (about a thousand on CUDA).
    """
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=kind)

    def copies(count: int) -> None:
        for _ in range(count):
            device.copy_(host, non_blocking=True)

    copies(1)
    copy_ms, _ = _span(kind, lambda: copies(1), lambda: None)
    if copy_ms < SHORTEST_COPY_MS or HEAD_START * host_ms / copy_ms > MOST_COPIES:
        return None
    ms, queued = _span(kind, step, lambda: copies(1 + math.ceil(HEAD_START * host_ms / copy_ms)))
    return ms if queued else None


def _span(kind: str, work: Callable[[], object], before: Callable[[], None]) -> tuple[float, bool]:
    """(ms between events around `work`, whether all of it was launched before the device came to it), after `before`."""
    synchronize(kind)
    begin, end = (torch.Event(kind, enable_timing=True) for _ in range(2))
    before()
    begin.record()
    work()
    end.record()
    queued = not begin.query()
    synchronize(kind)
    return float(begin.elapsed_time(end)), queued


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What clears VmHWM (Linux, Documentation/filesystems/proc.rst)."""


class MemoryMeter:
    """The peak memory of this process. Start it before the model is made.

    On an accelerator the allocator knows: live tensors, and what it keeps. On a CPU the operating system is asked: how much the
    process grew, and its whole size; with freed pages that the C library keeps, so it is an upper bound of live tensors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        if kind != "cpu":
            if _has_statistics(kind):
                torch.get_device_module(kind).reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before_gib = _status_gib("VmRSS")

    def peak_gib(self) -> tuple[float | None, float | None]:
        """(allocated, reserved) in GiB; None where the system does not tell, as on Apple's MPS."""
        if self._kind != "cpu":
            return peak_allocated_gib(self._kind), _gib(self._kind, "max_memory_reserved")
        peak = _status_gib("VmHWM")
        if peak is None or self._before_gib is None:
            return None, None
        return max(0.0, peak - self._before_gib), peak


def peak_allocated_gib(kind: str) -> float | None:
    """GiB of live tensors at most, by the device's allocator; None where it keeps no peak."""
    return _gib(kind, "max_memory_allocated")


def reserved_gib(kind: str) -> float | None:
    """GiB that the device's allocator holds now; None where it does not tell."""
    return _gib(kind, "memory_reserved")


def free_gib(kind: str) -> float | None:
    """GiB of the device that nobody holds now, cached blocks of this process counted as held; None where it does not tell."""
    ask = getattr(torch.get_device_module(kind), "mem_get_info", None)
    return None if ask is None else float(ask()[0]) / 2**30


def allocator_retries(kind: str) -> int:
    """How often the allocator had to give cached blocks back to find room; 0 where it does not count."""
    statistics = getattr(torch.get_device_module(kind), "memory_stats", None)
    return int(statistics().get("num_alloc_retries", 0)) if statistics is not None else 0


def _has_statistics(kind: str) -> bool:
    return hasattr(torch.get_device_module(kind), "reset_peak_memory_stats")


def _gib(kind: str, statistic: str) -> float | None:
    ask = getattr(torch.get_device_module(kind), statistic, None)
    return None if ask is None else float(ask()) / 2**30


def _status_gib(field: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{field}:")), None
    )


KINDS = {
    "cuda": "Install a build of torch for CUDA, or for ROCm on an AMD GPU",
    "xpu": "Install a build of torch for Intel GPUs",
    "mps": "MPS is for Apple silicon under macOS",
}
"""Kinds of devices that torch brings along beside the CPU, and what to do where this torch has none."""


def accelerator_here() -> str | None:
    """The kind of accelerator that this torch was built for and finds a device of."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and torch.accelerator.is_available() else None


def check_device(kind: str) -> None:
    """Raises TrainpaceError unless this torch has a device of that kind, with what to do about it."""
    if kind == "cpu" or accelerator_here() == kind:
        return
    if kind not in KINDS:
        raise UnknownName("device", kind, ("cpu", *KINDS))
    here = accelerator_here()
    instead = f"use --device {here}, which is here" if here else "use --device cpu"
    raise TrainpaceError(
        f"this torch sees no {kind.upper()} device.", f"{KINDS[kind]}; or {instead}."
    )


def set_up_device(kind: str, precision: "Precision") -> None:
    """Let products and convolutions use TF32 in every precision but fp32, and convolutions alone in torch_fp32.

    Raises TrainpaceError where this torch or this kind of device does not have the precision.
    """
    check_device(kind)
    if precision in ("tf32", "fp8") and kind != "cuda":
        raise TrainpaceError(
            f"{precision} is for CUDA GPUs.", "Measure fp32, or a format of 16 bits."
        )
    if precision == "fp8":
        raise TrainpaceError(
            "measuring fp8 needs an engine of its own.", "Measure amp_bf16 or bf16."
        )
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision not in ("fp32", "torch_fp32")


def count_devices(kind: str) -> int:
    """How many devices of that kind this process can use; 1 for the CPU."""
    return (
        1
        if kind == "cpu"
        else torch.accelerator.device_count()
        if accelerator_here() == kind
        else 0
    )


def use_device(kind: str, index: int) -> None:
    """Make one device of that kind the one that this process trains on. Nothing on a CPU."""
    if kind != "cpu":
        torch.accelerator.set_device_index(index)


def collective_backend(kind: str) -> str:
    """torch.distributed's backend for exchanges between devices of that kind: gloo, nccl (also of ROCm), xccl.

    Raises TrainpaceError where no backend is known for it, as for MPS.
    """
    try:
        return str(torch.distributed.get_default_backend_for_device(kind))
    except ValueError:
        raise TrainpaceError(
            f"torch has no library for exchanges between {kind} devices.", "Train on one of them."
        ) from None


def synchronize(kind: str) -> None:
    """Wait until the device in use has done all of its work."""
    if kind != "cpu":
        torch.accelerator.synchronize()


def finish_stream() -> None:
    """Wait until the current stream of the accelerator in use has done all of its work; other streams go on."""
    torch.accelerator.current_stream().synchronize()


def is_capturing(kind: str) -> bool:
    """Whether the device's present stream records a graph, during which nobody may wait for it."""
    if kind == "cpu":
        return False
    capturing = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def in_use() -> str:
    """The kind of accelerator that this process has begun to use; "cpu" before, and where there is none.

    Asking does not begin it: a script that only imports torch must not get a context on the device from being watched.
    """
    kind = accelerator_here()
    if kind is None:
        return "cpu"
    module: Any = torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", None)
    if begun is None:  # as of MPS, whose own memory tells whether a tensor was put there
        allocated = getattr(module, "current_allocated_memory", None)
        return kind if allocated is None or allocated() > 0 else "cpu"
    return kind if begun() else "cpu"


def device_name(kind: str) -> str:
    """What the device in use calls itself; "" on a CPU, and where its kind does not say."""
    if kind == "cpu":
        return ""
    if kind == "mps":  # its name is the whole chip's, which the CPU has too
        named = getattr(torch.backends.mps, "get_name", None)  # from torch 2.8 on
        return f"{named()} GPU" if named is not None else "Apple GPU"
    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(named()) if named is not None else ""


def driver_id(kind: str) -> str:
    """The UUID by which the driver knows the device in use, "" where its kind has none. It goes into no record."""
    if kind == "cpu":
        return ""
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if properties is None:
        return ""
    return str(getattr(properties(torch.accelerator.current_device_index()), "uuid", ""))


def versions(kind: str) -> dict[str, str]:
    """Names and versions of the device and its libraries, as a measurement's environment holds them."""
    if kind == "cpu":
        return {}
    found: dict[str, Any] = {"gpu": device_name(kind) or None}
    if kind == "cuda":
        toolkit = {"rocm": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        found |= {**toolkit, "cudnn": torch.backends.cudnn.version()}
    if kind == "xpu":
        found["oneapi"] = torch.version.xpu
    return {name: str(value) for name, value in found.items() if value is not None}
