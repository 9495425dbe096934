"""A script that is only looked at: it trains as it always does, and is ended after some seconds of steps.

Only `trainpace look` asks for it. All ranks end after the same step, since a rank that stopped alone would leave the others
waiting for it until a timeout.
"""

from collections.abc import Mapping
from typing import Any

from trainpace.watch.inside.recorder import Recorder, now_ns
from trainpace.watch.inside.together import agreed, is_distributed
from trainpace.watch.inside.trail import STOP_AFTER, Step
from trainpace.watch.inside.trials import end

SETTLED_STEPS = 3
"""Steps after which the pace is known; the first ones compile, allocate and open files."""
LEAST_STEPS = 8
"""A script whose steps are long is still given so many, for a mean with an interval."""


def seconds_of(environment: Mapping[str, str]) -> float | None:
    given = environment.get(STOP_AFTER, "")
    return float(given) if given else None


class Stopping:
    """Ends the process after the step that was agreed upon, or, alone, after the first that ends too late."""

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self.recorder, self.limit_ns = recorder, int(seconds * 1e9)
        self.began_ns: int | None = None
        self.last_step: int | None = None

    def at_step(self, step: Step) -> None:
        if self.began_ns is None:
            self.began_ns = step.end_ns
        if is_distributed():
            if self.last_step is None and step.number >= SETTLED_STEPS:
                self.last_step = int(
                    agreed("last-step", self._planned(step), self.limit_ns / 1e9 + 600)
                )
            over = self.last_step is not None and step.number >= self.last_step
        else:
            over = step.number + 1 >= LEAST_STEPS and now_ns() - self.began_ns >= self.limit_ns
        if over:
            self._end()

    def _planned(self, step: Step) -> int:
        """The number of the step with which the time is over, at the pace of those after the first."""
        assert self.began_ns is not None
        each_ns = max(1, (step.end_ns - self.began_ns) // step.number)
        return max(
            LEAST_STEPS, step.number + (self.limit_ns - (step.end_ns - self.began_ns)) // each_ns
        )

    def _end(self) -> None:
        recorder: Any = self.recorder
        recorder.trail.note({"stopped": True})
        end(recorder, with_workload=True)
