"""What a device does, by the profiler's record of its kernels."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from trainpace.measure.devices import synchronize

_FROM_HOST = ("htod", "hosttodevice")
"""In the names of copies from the host, in small letters: CUDA's and ROCm's."""
_EXCHANGES = ("nccl", "rccl", "oneccl")


class DeviceWork(NamedTuple):
    """Milliseconds that a device was busy, of them those in which it only took copies from the host, and those of each kernel by
    its name."""

    busy_ms: float
    copies_ms: float
    kernels_ms: dict[str, float]


def device_work(kind: str) -> Callable[[], DeviceWork | None] | None:
    """Begin to record the kernels of the device; the result, called, ends it and gives what the device did.

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

    def end() -> DeviceWork | None:
        synchronize(kind)
        profiler.stop()
        with warnings.catch_warnings():  # the profiler's own, which the script did not ask for
            warnings.simplefilter("ignore")
            events = profiler.events() or ()
        return work_of(
            (event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == recorded
        )

    return end


def work_of(events: Iterable[tuple[str, float, float]]) -> DeviceWork | None:
    """What the kernels and copies say, each as (name, start, end) in microseconds; None where there are none."""
    copies, computing = [], []
    kernels_ms: defaultdict[str, float] = defaultdict(float)
    for name, start, end in events:
        low = name.lower()
        if any(library in low for library in _EXCHANGES):
            continue
        if any(word in low for word in _FROM_HOST):
            copies.append((start, end))
        else:
            computing.append((start, end))
            kernels_ms[name] += (end - start) / 1e3
    busy = covered([*copies, *computing])
    return (
        DeviceWork(busy / 1e3, (busy - covered(computing)) / 1e3, dict(kernels_ms))
        if busy
        else None
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    busy, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
