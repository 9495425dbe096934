"""What a whole training does besides its steps, and what it runs on: one record, for every verb."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.records import Record, check_fields
from trainpace.core.units import format_duration, format_number
from trainpace.job.work import MAX_COUNT

STARTUP_S = 60.0
"""Until the first step: imports, process groups, the first batch. Assumed."""
COMPILING_S = 60.0
"""What torch.compile takes before the first step. Assumed: ten seconds for a small network, several minutes for a large model;
with it a job of seconds is not told to compile."""
DEVICE_MTBF_H = 50_000.0
"""Hours of one GPU between unexpected interruptions of a job: 419 in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783,
table 5) is 50,676; Meta's A100 clusters had 6.5 in 1,000 node-days, so 29,500 (Kokolis et al., arXiv:2410.21680)."""
RESTART_S = 600.0
"""Until the job trains again: MegaScale finds and replaces a failed node within 10 minutes (Jiang et al., NSDI 2024)."""
PREEMPTION_MEAN_H = 24.0
"""Hours between preemptions of one spot instance: an assumption, as providers publish none. Google's preemptible machines
live at most 24 h; others last from hours to weeks (Wu et al., "Can't Be Late", NSDI 2024)."""
STORAGE_GB_PER_S = 1.0
"""Bandwidth of the shared storage that checkpoints go to: an assumption, one client's share of a cloud's network file system."""
CORE_SPREAD = 1.4
"""How many times as fast, or as slow, a server's core may prepare samples as the one that was timed: an assumption. From
memory, single-core results of the processors that clouds rent differ by about twice between the oldest and the newest."""
DOWNLOAD_GB_PER_S = 0.125
"""Bandwidth into the cloud: an assumption, 1 Gbit/s."""


class JobConditions(Record):
    """Everything about a whole training besides its steps. Times in seconds, bandwidths in GB/s.

    The defaults are what forecast, match, plan, run and the what-if page assume where nobody said otherwise; `ONLY_STEPS` is
    a job of steps alone, which `trainpace schedule` starts from.

    - Start: `startup_s` once a run, and `compiling_s` where the execution compiles; `preparing_s` once before all runs.
    - Evaluation: `evaluation_s` after every `evaluate_every_steps`, or the forward passes of `evaluation_samples` after every
      epoch.
    - Checkpoints: every `checkpoint_every_steps`, or every `checkpoint_every_s` of work, else at the interval that costs
      least, else, with `checkpoints` off, none. One takes `checkpoint_s`; None: the model's state over `storage_gb_per_s`.
    - Failures: one device fails every `device_mtbf_h` (None: never), or the whole job every `mean_time_between_failures_s`,
      which goes first; one `spot` instance is taken away every `preemption_mean_h`. A restart takes `restart_s`.
    - Stragglers: `step_variation` is the standard deviation of a node's step over its mean.
    - Data: `sample_bytes` is what one sample reads from storage, `samples_per_cpu_s` how many one processor prepares
      (`trainpace loader` measures it), beside the steps or, without `loads_beside`, between them; 0: loading is hidden behind
      the steps. `data_gb` are copied to the servers before
      they train, at `download_gb_per_s`.
    - `repeats`: models, folds or seeds trained one after another.
    - `stated`: fields that somebody gave, though they are as the defaults; the other defaults are named as assumed.
    - Money: `price_usd_per_device_hour`, electricity for what the devices draw, and `egress_usd` for leaving another cloud.
    """

    startup_s: float = STARTUP_S
    compiling_s: float = COMPILING_S
    preparing_s: float = 0.0
    evaluate_every_steps: int | None = None
    evaluation_s: float = 0.0
    evaluation_samples: int = 0
    checkpoints: bool = True
    checkpoint_every_steps: int | None = None
    checkpoint_every_s: float | None = None
    checkpoint_s: float | None = None
    storage_gb_per_s: float = STORAGE_GB_PER_S
    device_mtbf_h: float | None = DEVICE_MTBF_H
    mean_time_between_failures_s: float | None = None
    restart_s: float = RESTART_S
    spot: bool = False
    preemption_mean_h: float = PREEMPTION_MEAN_H
    step_variation: float = 0.0
    sample_bytes: float = 0.0
    samples_per_cpu_s: float = 0.0
    loads_beside: bool = True
    data_gb: float = 0.0
    download_gb_per_s: float = DOWNLOAD_GB_PER_S
    repeats: int = 1
    price_usd_per_device_hour: float | None = None
    electricity_usd_per_kwh: float = 0.0
    egress_usd: float = 0.0
    stated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(
            self, _COUNTS, lambda count: 1 <= count <= MAX_COUNT, "a whole number from 1 to 1e18"
        )
        check_fields(self, _FROM_0, lambda value: 0 <= value < math.inf, "0 or more")
        check_fields(self, _ABOVE_0, lambda value: 0 < value < math.inf, "above 0")
        if self.evaluation_s > 0 and self.evaluate_every_steps is None:
            raise TrainpaceError(
                "evaluation_s is given, but not evaluate_every_steps.",
                "Say after how many steps it happens.",
            )
        if self.evaluate_every_steps is not None and self.evaluation_samples:
            raise Contradiction(
                "both evaluate_every_steps and evaluation_samples say when the model is evaluated.",
                "Give one of them.",
            )
        every = self.checkpoint_every_steps, self.checkpoint_every_s
        if every == (None, None) and self.checkpoint_s and not self.checkpoints:
            raise TrainpaceError(
                "checkpoint_s is given, but not checkpoint_every_steps.",
                "Say after how many steps it happens.",
            )
        if None not in every:
            raise Contradiction(
                "checkpoints come every so many steps or every so many seconds.",
                "Give one of them.",
            )


_COUNTS = ("evaluate_every_steps", "checkpoint_every_steps", "repeats")
_FROM_0 = (
    "startup_s",
    "compiling_s",
    "preparing_s",
    "evaluation_s",
    "evaluation_samples",
    "checkpoint_s",
    "restart_s",
    "step_variation",
    "sample_bytes",
    "samples_per_cpu_s",
    "data_gb",
    "price_usd_per_device_hour",
    "electricity_usd_per_kwh",
    "egress_usd",
)
_ABOVE_0 = (
    "checkpoint_every_s",
    "storage_gb_per_s",
    "device_mtbf_h",
    "mean_time_between_failures_s",
    "preemption_mean_h",
    "download_gb_per_s",
)

ASSUMED = JobConditions()
"""What is assumed where nobody said otherwise."""
ONLY_STEPS = JobConditions(
    startup_s=0.0,
    compiling_s=0.0,
    checkpoints=False,
    checkpoint_s=0.0,
    device_mtbf_h=None,
    restart_s=0.0,
    stated=("startup_s", "compiling_s", "restart_s"),
)
"""A job of steps alone."""


def stated_conditions(given: Mapping[str, Any]) -> JobConditions:
    """The conditions that somebody gave, where not None, and the defaults for the rest."""
    stated = {name: value for name, value in given.items() if value is not None}
    return JobConditions(**stated, stated=tuple(stated))


def assumptions(conditions: JobConditions, compiles: bool = False) -> tuple[str, ...]:
    """What nobody said and counts in the hours, in words."""

    def assumed(name: str) -> bool:
        return name not in conditions.stated and getattr(conditions, name) == getattr(ASSUMED, name)

    c, lines = conditions, []
    if assumed("startup_s"):
        lines.append(f"a start takes {format_duration(STARTUP_S)}")
    if compiles and assumed("compiling_s"):
        lines.append(f"compiling takes {format_duration(COMPILING_S)}")
    if c.device_mtbf_h and c.mean_time_between_failures_s is None and assumed("device_mtbf_h"):
        restart = (
            f" and is replaced in {format_duration(RESTART_S)}" if assumed("restart_s") else ""
        )
        lines.append(f"a GPU fails every {format_number(DEVICE_MTBF_H)} h{restart}")
    if c.spot and assumed("preemption_mean_h"):
        lines.append(f"a spot server is taken away every {format_number(PREEMPTION_MEAN_H)} h")
    if c.checkpoint_s is None and assumed("storage_gb_per_s"):
        lines.append(f"checkpoints go to storage of {format_number(STORAGE_GB_PER_S)} GB/s")
    if c.samples_per_cpu_s:
        lines.append(
            f"a core prepares samples up to {format_number(CORE_SPREAD)} times as fast or as slow"
            " as stated"
        )
    return tuple(lines)


def assumed_in_words(assumed: Sequence[str]) -> str:
    """One sentence; empty for nothing."""
    return f"Assumed: {', '.join(assumed)}." if assumed else ""
