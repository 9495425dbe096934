"""Records that `plan` creates and `run` executes."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.records import Record
from trainpace.job import ASSUMED, NO_WAIT, DataPath, JobConditions, Schedule

Effort = Literal["config key", "code change", "infrastructure"]
Risk = Literal["none", "low", "medium"]
"""Risk of a change to convergence, or of running out of memory.

"none": same training, up to the order of summation. "low": different rounding, which many trainings
use without harm, or memory that is not certain to fit. "medium": needs care, such as a new learning
rate.
"""
NOISE = 0.05
"""Smallest relevant change, as a share of the job's time after its start. Repeated measurements
differ by as much, so no forecast can distinguish two executions more finely.
"""


class Choice(Record):
    """One way to train: an execution and a data path."""

    execution: Execution
    data: DataPath = NO_WAIT


class Change(Record):
    """One change: the execution after it, and the forecast saving in seconds over the whole job.

    Attributes:
        settings: The keys to set, as torchrun, Hugging Face's TrainingArguments or DeepSpeed name
            them.
        code: The same settings as lines of PyTorch.
        makes_fit: True if the execution before the change does not fit in memory. Its saving is
            then unknown.
        saved_at_least_s: The saving reached in 90% of cases, given the resolution of forecasts. If
            it is negative, the change may cost time.
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
    """Forecast of a choice: step time including data waits, the whole job, and memory per device.

    `changes` is the number of settings that differ from the start. `job_low_s` and `job_high_s` are
    the ends of the job's 90% interval. `fit_probability` is None if the device's memory is unknown.
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
    fit_probability: float | None = None


class Maybe(Record):
    """A change that may save time, but less than forecasts can distinguish.

    Attributes:
        title: Title of one setting, or of all settings in which the fastest choice differs from the
            recommended one.
        saved_s: Forecast saving over the whole job, in seconds.
        told_apart: Smallest share of the job that forecasts could distinguish for this change.
        settings: Keys and values, as in `Change`.
    """

    title: str
    saved_s: float
    told_apart: float
    settings: dict[str, int | str | bool] = msgspec.field(default_factory=dict)
    fastest: bool = False


class Rejected(Record):
    """An alternative that was not chosen.

    `lost_s` is the extra time of the job, in seconds, with the best choice of this kind.
    """

    title: str
    why: str
    lost_s: float | None = None


class Plan(Record):
    """An ordered list of changes to an execution, and the alternatives.

    Attributes:
        best: The recommended choice: the simplest one that forecasts cannot distinguish from
            `fastest`.
        because: The reason for the recommendation, in one sentence.
        cautions: Possible problems of the recommended choice.
        maybe: Changes worth a measurement, the largest saving first.
        model: The model spec.
        assumed: Assumptions about the job.
        corrected: Description of the measured runs that corrected the forecasts.
        job: Schedule of the whole training, to which all times refer; `conditions` are its
            conditions.
        time_limit_s: Limit of the batch job, if the settings files have one.
        in_code: True if no settings file can express the changes. They are then given as PyTorch
            code.
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
    time_limit_s: float | None = None
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
        """Forecast seconds of the whole job: before the first change, and after each change."""
        assert self.target is not None
        saved = [change.forecast_saved_s for change in self.changes]
        return [self.target.job_s + math.fsum(saved[i:]) for i in range(len(saved) + 1)]

    @property
    def saved_s(self) -> float:
        """Seconds of the whole job that all changes save together."""
        return sum(change.forecast_saved_s for change in self.changes)


MOST_WORKERS = 16


def data_paths(
    now: int,
    path: Callable[[int, float], DataPath],
    fewest_workers: Callable[[Mapping[int, float]], int],
    collate_ms: float,
    offline_share: float | None,
) -> tuple[DataPath, ...]:
    """Return the current data path, then paths with more workers and with offline preprocessing.

    Args:
        now: Current number of loader workers.
        path: Function of the number of workers and the share of preprocessing that stays online.
        fewest_workers: Function of the times by number of workers. Returns the number beyond which
            they hardly improve.
        collate_ms: Time per sample in ms to collate prepared samples into a batch.
        offline_share: Share of the preprocessing that can be done offline. None means unknown and
            counts as all of it.
    """

    def by_workers(online: float) -> tuple[dict[int, DataPath], int]:
        paths = {workers: path(workers, online) for workers in range(1, MOST_WORKERS + 1)}
        return paths, fewest_workers({w: p.ms_per_sample for w, p in paths.items()})

    paths, enough = by_workers(1.0)
    more = [w for w in dict.fromkeys((1, 2, 4, 8, enough)) if now < w <= enough]
    online = (path(now, 1.0), *(paths[w] for w in more))
    if offline_share == 0:
        return online
    if offline_share in (None, 1):
        workers = max(1, now)
        ready = replace(path(workers, 0.0), ms_per_sample=collate_ms / workers)
        return (*online, ready)
    rest, few = by_workers(1 - offline_share)
    counts = dict.fromkeys((max(1, min(now, MOST_WORKERS)), max(now, few)))
    return (*online, *(rest[w] for w in counts if w in rest))
