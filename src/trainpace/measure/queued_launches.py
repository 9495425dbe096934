"""A step's time on the device alone: with every launch queued before it begins, so that the device never waits for the host."""

import math
import time
from collections.abc import Callable

import torch

from trainpace.measure.devices import synchronize

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
