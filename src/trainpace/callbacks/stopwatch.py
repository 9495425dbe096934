"""A stopwatch for a training's kinds of work: the time between two marks is charged to the work that ends at the second."""

from collections import deque
from collections.abc import Callable
from typing import Literal

Work = Literal["step", "evaluation", "checkpoint", "epoch"]

KEPT_STEPS = 4096
KEPT_TIMES = 64


class Stopwatch:
    """Collects the times of the latest steps and of other work between them. `clock` gives monotonic seconds.

    A step may be charged in pieces (its data before an evaluation, its computation after); `done` completes it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = self.begun = clock()
        self.pending: dict[Work, float] = {}
        """Seconds charged to work that is not complete."""
        self.times: dict[Work, deque[float]] = {
            "step": deque(maxlen=KEPT_STEPS), "evaluation": deque(maxlen=KEPT_TIMES), "checkpoint": deque(maxlen=KEPT_TIMES),
            "epoch": deque(maxlen=KEPT_TIMES),
        }  # fmt: skip
        self.total_s: dict[Work, float] = dict.fromkeys(self.times, 0.0)
        self.count: dict[Work, int] = dict.fromkeys(self.times, 0)

    def mark(self, work: Work) -> float:
        """Charge the time since the last mark to `work`; returns the present time."""
        now = self._clock()
        self.pending[work] = self.pending.get(work, 0.0) + now - self._last
        self._last = now
        return now

    def done(self, work: Work) -> None:
        """Complete one `work` with all time charged to it since the last one."""
        seconds = self.pending.pop(work, None)
        if seconds is None:
            return
        self.times[work].append(seconds)
        self.total_s[work] += seconds
        self.count[work] += 1

    def forget(self, work: Work) -> None:
        """Drop charged time of incomplete work that is not expected again."""
        self.pending.pop(work, None)

    @property
    def since_s(self) -> float:
        return self._clock() - self._last

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.begun
