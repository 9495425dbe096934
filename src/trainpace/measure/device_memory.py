"""Memory of a process under training: what it has at most, and what the device's allocator says."""

import contextlib
from pathlib import Path

import torch

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
