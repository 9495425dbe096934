"""The nouns that `plan` makes and `run` carries out."""

import math
from typing import Literal

import msgspec

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import Record
from trainpace.job import ASSUMED, JobConditions, Schedule

Effort = Literal["config key", "code change", "infrastructure"]
Risk = Literal["none", "low", "medium"]
"""To convergence. none: the same training, up to the order of sums. low: rounds differently, as many trainings do without
harm. medium: known to need care, such as a new learning rate."""


class DataPath(Record):
    """How fast samples reach one rank: `ms_per_sample` of its loader, all workers together, and whether they are made
    `beside` the computation or between computations (no workers)."""

    workers: int | None = None
    ms_per_sample: float = 0.0
    beside: bool = True
    precomputed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ms_per_sample < float("inf"):
            raise TrainpaceError(
                f"a sample takes {self.ms_per_sample} ms to load; that should be 0 or more."
            )


NO_WAIT = DataPath()
"""Data that is always there: what a forecast assumes where nothing is known of the loader."""


class Choice(Record):
    """One way to train: an execution and its data path."""

    execution: Execution
    data: DataPath = NO_WAIT


class Change(Record):
    """One rung: the execution after it, and the seconds that it is forecast to save in the whole job.

    `settings` are the keys to set, named as torchrun, Hugging Face's TrainingArguments or DeepSpeed name them; `code` is the same
    in lines of PyTorch.
    `makes_fit`: what was before does not fit in memory, so that there is no time that it could save. saved_at_least_s: what it
    saves in 9 of 10 cases, by how well forecasts of two executions are told apart (`plan.resolution`); below 0 it may cost.
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


class Outlook(Record):
    """A choice and what it is forecast to take: the step (with data waits), the whole job, one device's memory. job_low_s,
    job_high_s: the ends of the job's 90 % interval."""

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
    """A change that is forecast to save something beside the recommendation, but less than forecasts can tell apart.

    saved_s: forecast, of the whole job. told_apart: the share of the job that it would have to save. title: of one knob, or of
    all that the fastest choice has and the recommended one has not. settings: as in `Change`.
    """

    title: str
    saved_s: float
    told_apart: float
    settings: dict[str, int | str | bool] = msgspec.field(default_factory=dict)
    fastest: bool = False


class Rejected(Record):
    """Something that was looked at and not chosen; `lost_s`: how much longer the job would take with the best that has it."""

    title: str
    why: str
    lost_s: float | None = None


class Sensitivity(Record):
    """What happens to the choice when one number is wrong by a factor between `low` and `high`.

    `flips_to` names what would be chosen then, where that differs; `regret` is how much longer today's choice would take than
    that, as a share, at the worse end. `still_fits`: today's choice would still fit in memory.
    """

    number: str
    low: float
    high: float
    basis: str
    flips_to: str = ""
    regret: float = 0.0
    still_fits: bool = True


NOISE = 0.05
"""Share of the job's time after its start below which a change is noise: a measurement that is repeated differs by as much, so
that no forecast tells two executions apart more finely."""


class Plan(Record):
    """An ordered list of changes to an execution, and what else was looked at.

    best: the recommended choice, the simplest of those that forecasts cannot tell from the `fastest`; `because` says in a
    sentence why, `cautions` what may go wrong with it. maybe: what is worth a measurement, what saves most first. `model` is the
    spec it was made for; `assumed` is what nobody said of the job, `corrected` which measured runs corrected the forecasts, in
    words; `job` and `conditions` are the whole training that its times are of. `in_code`: no settings
    file takes the changes, so that they are lines of PyTorch.
    """

    start: Execution
    changes: tuple[Change, ...]
    now: Outlook | None = None
    best: Outlook | None = None
    fastest: Outlook | None = None
    because: str = ""
    cautions: tuple[str, ...] = ()
    maybe: tuple[Maybe, ...] = ()
    pareto: tuple[Outlook, ...] = ()
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
    def target(self) -> Outlook | None:
        """The choice to which the changes lead."""
        if (
            self.best is not None
            and self.fastest is not None
            and self.changes
            and self.end != self.best.choice.execution
        ):
            return self.fastest
        return self.best

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
