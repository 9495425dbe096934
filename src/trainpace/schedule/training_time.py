"""Training time = steps x step time + everything that is not a step."""

from __future__ import annotations

import math

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.records import Record
from trainpace.schedule.failures import Interruption, segment_s
from trainpace.schedule.work import Schedule, total_steps


class TrainingTime(Record):
    """The wall-clock time of all repeats together, in parts that add up to `total_s`."""

    steps: int
    repeats: int
    stepping_s: float
    startup_s: float
    evaluation_s: float
    checkpoint_s: float
    failures_s: float

    @property
    def total_s(self) -> float:
        """All parts together; infinite where failures come faster than the run recovers from them."""
        return self.stepping_s + self.startup_s + self.evaluation_s + self.checkpoint_s + self.failures_s


def training_time(schedule: Schedule, execution: Execution, step_time_s: float) -> TrainingTime:
    """Time for the whole schedule at `step_time_s` a step. A partial last batch is counted as a whole step."""
    return time_of_steps(schedule, total_steps(schedule, execution), step_time_s)


def time_of_steps(schedule: Schedule, steps: int, step_time_s: float) -> TrainingTime:
    """Time for `steps` updates of each repeat.

    Evaluations and checkpoints happen after every k-th step. Failures arrive at a constant rate 1 / MTBF; each costs the
    restart and the work since the last checkpoint (all of the run's where there are none). `failures` has the formula, which is
    exact for such failures; the start-up is taken to succeed.
    """
    if not (math.isfinite(step_time_s) and step_time_s > 0):
        raise TrainpaceError(f"the step time is {step_time_s} s; it must be above 0.")
    stepping = steps * step_time_s
    evaluation = _times(steps, schedule.evaluate_every_steps) * schedule.evaluation_s
    checkpoint = _times(steps, schedule.checkpoint_every_steps) * schedule.checkpoint_s
    failures = 0.0
    if schedule.mean_time_between_failures_s is not None:
        failing = (
            Interruption(mean_time_between_s=schedule.mean_time_between_failures_s, restart_s=schedule.restart_s),
        )
        work = stepping + evaluation
        segments = _times(steps, schedule.checkpoint_every_steps)
        rest = steps - segments * (schedule.checkpoint_every_steps or 0)
        each = work * ((steps - rest) / segments / steps) if segments else 0.0
        expected = segments * segment_s(each + schedule.checkpoint_s, failing) + segment_s(work * rest / steps, failing)
        failures = max(0.0, expected - work - checkpoint)
    n = schedule.repeats
    return TrainingTime(
        steps=steps,
        repeats=n,
        stepping_s=n * stepping,
        startup_s=n * schedule.startup_s,
        evaluation_s=n * evaluation,
        checkpoint_s=n * checkpoint,
        failures_s=n * failures,
    )


def _times(steps: int, every: int | None) -> int:
    return steps // every if every else 0
