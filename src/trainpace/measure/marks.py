"""Moments on a device's own clock: the host's for a CPU, events in the stream for a GPU, where the host runs ahead."""

import time
from typing import Any, Protocol

import torch


class Marks(Protocol):
    """Takes moments, and tells the time between two of them once they have happened."""

    def now(self) -> Any: ...

    def wait(self) -> None:
        """Wait until all marks have happened."""
        ...

    def span_ms(self, first: Any, second: Any) -> float:
        """The time between two marks, after `wait`."""
        ...


def marks_of(device: str) -> Marks:
    """The marks of the device ``cpu`` or ``cuda``."""
    return _CudaMarks() if device == "cuda" else _CpuMarks()


class _CpuMarks:
    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def span_ms(self, first: float, second: float) -> float:
        return 1e3 * (second - first)


class _CudaMarks:
    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def span_ms(self, first: Any, second: Any) -> float:
        span: float = first.elapsed_time(second)
        return span
