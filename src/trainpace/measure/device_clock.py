"""The time of steps by the device's own clock."""

import itertools
import time
from typing import Any

import torch

from trainpace.measure.devices import synchronize


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
