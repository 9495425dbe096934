"""The records that `plan` makes and `run` carries out."""

import math
from typing import Literal

import msgspec

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import Record
from trainpace.job import ASSUMED, JobConditions, Schedule

Effort = Literal["config key", "code change", "infrastructure"]
Risk = Literal["none", "low", "medium"]
"""Risk to convergence. none: the same training, up to the order of sums. low: rounds differently,
as many trainings do without harm. medium: needs care, such as a new learning rate."""
NOISE = 0.05
"""Share of the job's time after its start below which a change is noise. Repeated measurements
differ by as much, so no forecast distinguishes two executions more finely."""


class DataPath(Record):
    """Data path of one rank.

    `ms_per_sample` is the time of its loader, all workers together. Samples are made `beside` the
    computation or, without workers, between computations.
    """

    workers: int | None = None
    ms_per_sample: float = 0.0
    beside: bool = True
    precomputed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ms_per_sample < float("inf"):
            raise TrainpaceError(
                f"a sample takes {self.ms_per_sample} ms to load; it must be 0 or more."
            )


NO_WAIT = DataPath()
"""Data without waits, the assumption of forecasts if nothing is known of the loader."""


class Choice(Record):
    """One way to train: an execution and its data path."""

    execution: Execution
    data: DataPath = NO_WAIT


class Change(Record):
    """One change: the execution after it, and the seconds that it is forecast to save in the job.

    settings: the keys to set, as torchrun, Hugging Face's TrainingArguments or DeepSpeed name them.
    code: the same as lines of PyTorch. makes_fit: the execution before does not fit in memory, so
    no saving can be given. saved_at_least_s: the saving in 90% of cases, by the resolution of
    forecasts; below 0 the change may cost time.
    """

    title: str
    execution: Execution
    forecast_saved_s: float
    data: DataPath = NO_WAIT
    effort: Effort = "config key"
    risk: Risk = "none"
    risk_reason: str = ""
    settings: dict[str, int | str | bool] = msgspec.field(default_factory=dict)
    makes_fit: bool = False
    saved_at_least_s: float | None = None
    code: str = ""


class Projection(Record):
    """Forecast cost of a choice: a step with data waits, the whole job, memory of one
    device.

    job_low_s and job_high_s are the ends of the job's 90% interval.
    """

    choice: Choice
    changes: int
    step_ms: float
    job_s: float
    needed_gib: float
    num_devices: int
    cost_usd: float | None = None
    job_low_s: float | None = None
    job_high_s: float | None = None


class Maybe(Record):
    """A change that may save time, but less than forecasts can distinguish.

    saved_s: the forecast saving in the whole job. told_apart: the share of the job that it would
    have to save to be distinguishable. title: of one setting, or of all in which the fastest choice
    differs from the recommended one. settings: as in `Change`.
    """

    title: str
    saved_s: float
    told_apart: float
    settings: dict[str, int | str | bool] = msgspec.field(default_factory=dict)
    fastest: bool = False


class Rejected(Record):
    """An alternative that was not chosen.

    `lost_s` is how much longer the job takes with the best choice that has it.
    """

    title: str
    why: str
    lost_s: float | None = None


class Sensitivity(Record):
    """Sensitivity of the choice to a number that is wrong by a factor between `low` and `high`.

    flips_to: the new choice, if it differs. regret: how much longer the old choice would take than
    the new one, as a share, at the worse end. still_fits: the old choice would still fit in memory.
    """

    number: str
    low: float
    high: float
    basis: str
    flips_to: str = ""
    regret: float = 0.0
    still_fits: bool = True


class Plan(Record):
    """An ordered list of changes to an execution, and the alternatives.

    best: the recommended choice, the simplest one that forecasts cannot distinguish from the
    `fastest`. because: the reason, in a sentence. cautions: what may go wrong with it. maybe:
    changes worth a measurement, the largest saving first. model: the spec. assumed: assumptions
    about the job. corrected: the measured runs that corrected the forecasts, in words. job and
    conditions: the whole training that the times are of. in_code: no settings file expresses the
    changes, so they are given as lines of PyTorch.
    """

    start: Execution
    changes: tuple[Change, ...]
    now: Projection | None = None
    best: Projection | None = None
    fastest: Projection | None = None
    because: str = ""
    cautions: tuple[str, ...] = ()
    maybe: tuple[Maybe, ...] = ()
    pareto: tuple[Projection, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    searched: int = 0
    fitting: int = 0
    start_fits: bool = True
    reason: str = ""
    nearest: str = ""
    model: str = ""
    assumed: tuple[str, ...] = ()
    corrected: str = ""
    job: Schedule | None = None
    conditions: JobConditions = ASSUMED
    in_code: bool = False

    @property
    def end(self) -> Execution:
        return self.changes[-1].execution if self.changes else self.start

    @property
    def target(self) -> Projection | None:
        """The choice to which the changes lead."""
        if self.best is None or self.fastest is None or not self.changes:
            return self.best
        return self.best if self.end == self.best.choice.execution else self.fastest

    @property
    def left_s(self) -> list[float]:
        """Forecast seconds of the whole job before the first change, and after each."""
        assert self.target is not None
        saved = [change.forecast_saved_s for change in self.changes]
        return [self.target.job_s + math.fsum(saved[i:]) for i in range(len(saved) + 1)]

    @property
    def saved_s(self) -> float:
        """Seconds that all changes together save in the whole job."""
        return sum(change.forecast_saved_s for change in self.changes)
