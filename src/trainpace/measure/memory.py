"""The peak memory of a probe."""

import contextlib
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What clears VmHWM (Linux, Documentation/filesystems/proc.rst)."""


class MemoryMeter:
    """Start it before the model is made.

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
