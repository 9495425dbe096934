"""Where a training's time goes, charged on transition: every second goes to the kind of work that ends at a mark."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

Work = Literal["step", "evaluation", "checkpoint", "epoch"]

KEPT_STEPS = 4096
KEPT_TIMES = 64


class Stopwatch:
    """Collects the latest steps and the other work between them. `clock` gives seconds, and never goes back.

    A step may be charged in pieces (its data before, its computation after an evaluation); `done` closes what was charged.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = self.begun = clock()
        self.pending: dict[Work, float] = {}
        """Charged, and not complete."""
        self.times: dict[Work, deque[float]] = {
            "step": deque(maxlen=KEPT_STEPS), "evaluation": deque(maxlen=KEPT_TIMES), "checkpoint": deque(maxlen=KEPT_TIMES),
            "epoch": deque(maxlen=KEPT_TIMES),
        }  # fmt: skip
        self.total_s: dict[Work, float] = dict.fromkeys(self.times, 0.0)
        self.count: dict[Work, int] = dict.fromkeys(self.times, 0)

    def mark(self, work: Work) -> float:
        """Charge the time since the last mark to `work`; the present."""
        now = self._clock()
        self.pending[work] = self.pending.get(work, 0.0) + now - self._last
        self._last = now
        return now

    def done(self, work: Work) -> None:
        """One `work` is complete with what was charged to it since the last one."""
        seconds = self.pending.pop(work, None)
        if seconds is None:
            return
        self.times[work].append(seconds)
        self.total_s[work] += seconds
        self.count[work] += 1

    def forget(self, work: Work) -> None:
        """What was charged and is not complete is not to be expected again."""
        self.pending.pop(work, None)

    @property
    def since_s(self) -> float:
        """Seconds since the last mark."""
        return self._clock() - self._last

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.begun
