"""How long a device is busy, by the profiler's record of its kernels."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainpace.accelerator.devices import synchronize


def busy_ms(kind: str) -> Callable[[], float | None] | None:
    """Begin to record the kernels of the device; the result, called, ends it and gives the milliseconds that the device was busy.

    Kernels that exchange between ranks do not count, since they mostly wait. None where the script has a profiler of its own,
    which a second one would end, and where torch's profiler does not record this kind.
    """
    activity: Any = getattr(torch.profiler.ProfilerActivity, kind.upper(), None)
    recorded: Any = getattr(torch.autograd.DeviceType, kind.upper(), None)
    if torch.autograd._profiler_enabled() or activity is None or recorded is None or kind == "cpu":
        return None
    synchronize(kind)
    profiler = torch.profiler.profile(activities=[activity])
    profiler.start()

    def end() -> float | None:
        synchronize(kind)
        profiler.stop()
        with warnings.catch_warnings():  # the profiler's own, which the script did not ask for
            warnings.simplefilter("ignore")
            events = profiler.events() or ()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == recorded
            and not any(library in event.name.lower() for library in ("nccl", "rccl", "oneccl"))
        ]
        return covered(spans) / 1e3 if spans else None

    return end


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    busy, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
