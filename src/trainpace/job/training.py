"""The steps of a whole training, and its time and cost, computed from one step.

Only this module computes the hours and dollars of a training:

    training = preparing + transfer
               + repeats x (start-up + compiling + E[work with checkpoints and failures])
    work     = steps + data wait + stragglers + evaluations
    dollars  = price x devices x hours + electricity + egress from another cloud

The same array arithmetic is used for one step time, for the ends of its interval and for every
choice of a plan. Their results therefore agree to the last digit.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Forecast, Interval, JobTime, StepTime, sum_of_parts
from trainpace.core.records import Record, check_fields
from trainpace.core.units import format_duration, format_number
from trainpace.workload import Floats, Workload, form_of

# ---- steps

MAX_COUNT = 10**18
"""Largest accepted count. Larger counts are typing mistakes, and their products would exceed the
range of a double.
"""


class Schedule(Record):
    """The amount of work in one run. See `trainpace.job.JobConditions` for everything else.

    The size of an epoch is given as `samples`, or as `tokens` with `sequence_length` (packed into
    tokens // length samples). `epochs` may be fractional, as in Hugging Face's `num_train_epochs`.
    If both `epochs` and `max_steps` are given, the run ends at whichever comes first, as in
    Lightning.

    With `drop_last`, the data loader drops the last micro-batch of an epoch unless it is full.
    `partial_accumulation` tells what the trainer does with micro-batches that remain at the end of
    an epoch: a smaller "step" (Hugging Face, Lightning) or "drop".
    """

    samples: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    drop_last: bool = False
    partial_accumulation: Literal["step", "drop"] = "step"

    def __post_init__(self) -> None:
        counts = ("samples", "tokens", "sequence_length", "max_steps")
        check_fields(self, counts, lambda n: 1 <= n <= MAX_COUNT, "a whole number from 1 to 1e18")
        check_fields(self, ("epochs",), lambda epochs: 0 < epochs <= MAX_COUNT, "above 0")
        if self.samples is not None and self.tokens is not None:
            raise Contradiction(
                f"`samples` ({self.samples}) and `tokens` ({self.tokens}) both give the size of an"
                " epoch.",
                "Give one of them.",
            )
        if self.tokens is not None and self.sequence_length is None:
            raise TrainpaceError("tokens need a sequence length.", "Add `sequence_length`.")

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one epoch, or None if unknown."""
        if self.tokens is None:
            return self.samples
        assert self.sequence_length is not None
        samples = self.tokens // self.sequence_length
        if samples < 1:
            raise Contradiction(
                f"{self.tokens} tokens are fewer than one sample of {self.sequence_length}"
                " (`sequence_length`).",
                "Give more tokens or a shorter sequence.",
            )
        return samples


class EpochSteps(Record):
    """Steps of one epoch under one execution.

    `last_step_samples` is the size of the last update over all ranks.
    """

    steps: int
    micro_steps_per_rank: int
    samples_seen: int
    last_step_samples: int


def epoch_steps(schedule: Schedule, execution: Execution) -> EpochSteps:
    """Count the steps of one epoch.

    If nothing is dropped, every sample counts: steps = ceil(samples / global batch). A distributed
    sampler may repeat samples to fill all ranks. This does not change the number of steps.

    Raises:
        Contradiction: The samples do not fill one step.
    """
    samples = schedule.samples_per_epoch
    if samples is None:
        raise TrainpaceError("the samples of an epoch are unknown.", "Add `samples` or `tokens`.")
    per_micro_step = execution.micro_batch * execution.data_parallel_size
    micro_steps = samples // per_micro_step if schedule.drop_last else -(-samples // per_micro_step)
    whole, left_over = divmod(micro_steps, execution.accumulation)
    drops_left_over = schedule.partial_accumulation == "drop"
    steps = whole if drops_left_over else whole + (left_over > 0)
    if steps == 0:
        what = "partial accumulation dropped" if micro_steps else "drop_last"
        raise Contradiction(
            f"{samples} samples do not fill one step: micro-batch {execution.micro_batch} x"
            f" accumulation {execution.accumulation} x data-parallel size"
            f" {execution.data_parallel_size} = {execution.global_batch} samples, with {what}.",
            "Use a smaller batch, or keep the last batch.",
        )
    used_micro_steps = whole * execution.accumulation if drops_left_over else micro_steps
    seen = min(samples, used_micro_steps * per_micro_step)
    return EpochSteps(
        steps=steps,
        micro_steps_per_rank=used_micro_steps,
        samples_seen=seen,
        last_step_samples=seen - (steps - 1) * execution.global_batch,
    )


def total_steps(schedule: Schedule, execution: Execution) -> int:
    """Return the optimizer updates of one run.

    This is ceil(epochs x steps per epoch), limited to `max_steps`.
    """
    if schedule.epochs is None:
        if schedule.max_steps is None:
            raise TrainpaceError(
                "the length of the run is unknown.", "Add `epochs` or `max_steps`."
            )
        return schedule.max_steps
    exact = schedule.epochs * epoch_steps(schedule, execution).steps
    # In floating point, 1.1 epochs of 50,000 steps are 55,000.00000000001 steps. 55,000 are meant.
    steps = max(1, math.ceil(exact - min(1e-9 * max(1.0, exact), 0.5)))
    return steps if schedule.max_steps is None else min(steps, schedule.max_steps)


def accumulation_for_global_batch(
    global_batch: int, micro_batch: int, data_parallel_size: int
) -> int:
    """Return the number of accumulation steps that gives exactly `global_batch`.

    Raises an error that names the nearest possible batches if there is no such number.
    """
    per_micro_step = micro_batch * data_parallel_size
    whole, rest = divmod(global_batch, per_micro_step)
    if rest == 0 and whole:
        return whole
    nearest = [n * per_micro_step for n in (whole, whole + 1) if n]
    raise Contradiction(
        f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x"
        f" data-parallel size {data_parallel_size} = {per_micro_step}.",
        f"Nearest global batches: {' and '.join(str(n) for n in nearest)};"
        f" or a micro-batch that divides {global_batch}.",
    )


class SpeedUp(Record):
    """A measured speed-up: the ratio of old to new time. Above 1 is faster.

    A ratio of 3.63 means 3.63 times as fast, or 27.5% of the old time. It is written as "363%" of
    the old speed. "Faster by 363%" would mean 4.63 times as fast.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise TrainpaceError(f"a speed-up of {self.ratio} is not above 0.")

    @property
    def share_of_old_time(self) -> float:
        """New time as a share of the old time: 0.0465 for a ratio of 21.53."""
        return 1 / self.ratio

    @property
    def percent_of_old_speed(self) -> float:
        """New speed in percent of the old speed: 2153 for a ratio of 21.53."""
        return 100 * self.ratio

    def new_time_s(self, old_time_s: float) -> float:
        return old_time_s / self.ratio


# ---- conditions

STARTUP_S = 60.0
"""Time until the first step in seconds: imports, process groups and the first batch. Assumed."""
COMPILING_S = 60.0
"""Time of torch.compile before the first step, in seconds. Assumed: a small network takes ten
seconds, a large model several minutes. Because of this cost, a plan never compiles a job that lasts
only seconds.
"""
DEVICE_MTBF_H = 50_000.0
"""Mean hours between unexpected interruptions of a job, per GPU. 419 interruptions in 54 days on
16,384 H100 (Llama 3, arXiv:2407.21783, table 5) give 50,676 h. 6.5 interruptions in 1,000 node-days
on Meta's A100 clusters give 29,500 h (Kokolis et al., arXiv:2410.21680).
"""
RESTART_S = 600.0
"""Seconds from a failure until the job trains again. MegaScale finds and replaces a failed node
within 10 minutes (Jiang et al., NSDI 2024).
"""
PREEMPTION_MEAN_H = 24.0
"""Mean hours between preemptions of one spot instance. Assumed, because providers publish no
number. Google's preemptible machines live at most 24 h. Other spot instances live from hours to
weeks (Wu et al., "Can't Be Late", NSDI 2024).
"""
STORAGE_GB_PER_S = 1.0
"""Bandwidth of checkpoint storage. Assumed: one client's share of a network file system.
"""
CORE_SPREAD = 1.4
"""Factor by which a server's CPU core may be faster or slower than the timed core. Assumed: the
oldest and newest processors that clouds rent differ by a factor of about two per core.
"""
DOWNLOAD_GB_PER_S = 0.125
"""Download bandwidth into the cloud. Assumed: 1 Gbit/s."""


class JobConditions(Record):
    """Conditions of a whole training besides its steps. Times in seconds, bandwidths in GB/s.

    The defaults are the assumptions of forecast, match, plan, run and the what-if page. `trainpace
    schedule` starts from `ONLY_STEPS`, a job without any overhead.

    - Start: `startup_s` once per run, plus `compiling_s` if the execution compiles. `preparing_s`
      once before all runs.
    - Evaluation: `evaluation_s` after every `evaluate_every_steps`, or the forward passes of
      `evaluation_samples` after every epoch.
    - Checkpoints: every `checkpoint_every_steps`, or every `checkpoint_every_s` of work, or else at
      the cheapest interval. There are none if `checkpoints` is False. One checkpoint takes
      `checkpoint_s`, by default the time to write the model's state at `storage_gb_per_s`.
    - Failures: the whole job fails every `mean_time_between_failures_s`. If that is None, one
      device fails every `device_mtbf_h` (None: never). With `spot`, one instance is preempted every
      `preemption_mean_h`. A restart takes `restart_s`.
    - Stragglers: `step_variation` is the standard deviation of a node's step over its mean.
    - Data: each sample reads `sample_bytes` from storage while the step before it computes.
      `data_gb` are copied to the servers at `download_gb_per_s` before training.
    - `repeats`: number of models, folds or seeds that are trained one after another.
    - Money: `price_usd_per_device_hour`, electricity of the devices, and `egress_usd` from another
      cloud.
    - `stated`: names of the fields that the user gave. The other defaults are listed as assumed.
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
                "`evaluation_s` needs `evaluate_every_steps`.",
                "Give the number of steps between evaluations.",
            )
        if self.evaluate_every_steps is not None and self.evaluation_samples:
            raise Contradiction(
                "`evaluate_every_steps` and `evaluation_samples` exclude each other.",
                "Give one of them.",
            )
        every = self.checkpoint_every_steps, self.checkpoint_every_s
        if every == (None, None) and self.checkpoint_s and not self.checkpoints:
            raise TrainpaceError(
                "`checkpoint_s` needs `checkpoint_every_steps`.",
                "Give the number of steps between checkpoints.",
            )
        if None not in every:
            raise Contradiction(
                "`checkpoint_every_steps` and `checkpoint_every_s` exclude each other.",
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
"""Conditions that are used if none are given."""
ONLY_STEPS = JobConditions(
    startup_s=0.0,
    compiling_s=0.0,
    checkpoints=False,
    checkpoint_s=0.0,
    device_mtbf_h=None,
    restart_s=0.0,
    stated=("startup_s", "compiling_s", "restart_s"),
)
"""Conditions of a job that consists of its steps alone."""


def stated_conditions(given: Mapping[str, Any]) -> JobConditions:
    """Return conditions with the given values. A value of None keeps the default."""
    stated = {name: value for name, value in given.items() if value is not None}
    return JobConditions(**stated, stated=tuple(stated))


def assumptions(conditions: JobConditions, compiles: bool = False) -> tuple[str, ...]:
    """Describe the assumed conditions that affect the training time."""

    def assumed(name: str) -> bool:
        return name not in conditions.stated and getattr(conditions, name) == getattr(ASSUMED, name)

    c = conditions
    fails = c.device_mtbf_h is not None and c.mean_time_between_failures_s is None
    replaced = f" and is replaced in {format_duration(RESTART_S)}" * assumed("restart_s")
    counted = (
        (True, "startup_s", f"a start takes {format_duration(STARTUP_S)}"),
        (compiles, "compiling_s", f"compiling takes {format_duration(COMPILING_S)}"),
        (fails, "device_mtbf_h", f"a GPU fails every {format_number(DEVICE_MTBF_H)} h{replaced}"),
        (
            c.spot,
            "preemption_mean_h",
            f"a spot server is preempted every {format_number(PREEMPTION_MEAN_H)} h",
        ),
        (
            c.checkpoint_s is None,
            "storage_gb_per_s",
            f"checkpoints go to storage of {format_number(STORAGE_GB_PER_S)} GB/s",
        ),
    )
    return tuple(sentence for counts, name, sentence in counted if counts and assumed(name))


def assumed_in_words(assumed: Sequence[str]) -> str:
    """Return the assumptions as one sentence, or "" if there are none."""
    return f"Assumed: {', '.join(assumed)}." if assumed else ""


# ---- the host's work beside a step

Numbers = Any
"""A float, or an array of floats."""


class DataPath(Record):
    """Data loading and own code on a rank's host, which the forecast of a bare step lacks.

    Attributes:
        workers: Loader workers of the rank. None if unknown.
        ms_per_sample: The loader's time per sample with all workers together.
        beside: Loading overlaps with the step. Without workers, it happens between steps.
        precomputed: Part of the samples' preparation is done offline.
        own_ms: Time per update in the script's own code, logging, evaluation, checkpoints and
            starts of loader workers.
    """

    workers: int | None = None
    ms_per_sample: float = 0.0
    beside: bool = True
    precomputed: bool = False
    own_ms: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ("ms_per_sample", "own_ms"), lambda ms: 0 <= ms < math.inf, "0 or more")

    def slower(self, factor: float) -> "DataPath":
        """Return the same work on a core that takes `factor` times as long."""
        times = {"ms_per_sample": factor * self.ms_per_sample, "own_ms": factor * self.own_ms}
        return replace(self, **times)


NO_WAIT = DataPath()
"""Data path without any waiting. Forecasts assume it if nothing is known about the host's work."""


def with_data_ms(step_ms: Numbers, samples_a_rank: Numbers, data: DataPath) -> Floats:
    """Return the step time including data loading and the script's own code.

    Own code runs between the updates. Loading that runs beside the computation overlaps with both.
    Other loading adds to the step.
    """
    wait_ms = np.asarray(samples_a_rank * data.ms_per_sample, dtype=np.float64)
    busy_ms = step_ms + data.own_ms
    return np.asarray(np.maximum(busy_ms, wait_ms) if data.beside else busy_ms + wait_ms)


def with_host_work(forecast: Forecast, data: DataPath) -> Forecast:
    """Add the host's work to the step of a forecast.

    At the ends of the interval, the host's core is faster or slower by `CORE_SPREAD`.
    """
    step, ends, e = forecast.step, forecast.step_time_interval_ms, forecast.execution
    if step is None or ends is None or data == replace(NO_WAIT, workers=data.workers):
        return forecast
    samples = e.micro_batch * e.accumulation
    low, middle, high = (
        float(with_data_ms(ms, samples, data.slower(factor)))
        for ms, factor in (
            (ends.low, 1 / CORE_SPREAD),
            (step.total_ms, 1.0),
            (ends.high, CORE_SPREAD),
        )
    )
    return replace(
        forecast,
        step=replace(
            step, own_code_ms=data.own_ms, data_wait_ms=middle - (step.total_ms + data.own_ms)
        ),
        step_time_interval_ms=replace(ends, low=low, high=high),
        mfu=None if forecast.mfu is None else forecast.mfu * step.total_ms / middle,
    )


# ---- failures and checkpoints

# Failures arrive at a constant rate at any moment: during work, while writing a checkpoint, and
# while restarting. A segment of work ends with its checkpoint. A failure within a segment costs a
# restart and the whole segment. A segment of length L then takes M e^(R/M) (e^(L/M) - 1) on
# average, with mean time between failures M and restart time R (J. Daly, FGCS 22(3), 2006, equation
# 13). Young's first-order form (CACM 17(9), 1974) is its limit for L and R well below M. The
# formula holds for exponential times between failures. It does not hold for failures that come in
# bursts. Every number may be an array.

MOST_EXPONENT = 500.0
"""Largest exponent. A run of over e^500 mean times between failures never ends.
"""


class Interruption(NamedTuple):
    """One kind of failure of a whole job, with its restart time."""

    mean_time_between_s: Numbers
    restart_s: float


class FailureRate(NamedTuple):
    """Combined rate of all failures, and the probability that a restart is not interrupted."""

    per_s: Numbers
    restarted: Numbers


def failure_rate(interruptions: Sequence[Interruption]) -> FailureRate:
    """Combine several kinds of failure into one rate.

    Each kind has its own restart time, so e^(R/M) becomes 1 / E[e^(-R/M)].
    """
    for mean_s, restart_s in interruptions:
        if not (np.all(np.asarray(mean_s) > 0) and np.isfinite(restart_s) and restart_s >= 0):
            raise TrainpaceError(
                f"an interruption every {mean_s} s with a restart of {restart_s} s is impossible."
            )
    if not interruptions:
        return FailureRate(np.float64(0.0), np.float64(1.0))
    rate = sum(1.0 / np.asarray(mean_s) for mean_s, _ in interruptions)
    restarted = sum(
        np.exp(-restart_s * rate) / mean_s / rate for mean_s, restart_s in interruptions
    )
    return FailureRate(rate, restarted)


def segment_s(length_s: Numbers, failures: FailureRate) -> Floats:
    """Return the mean seconds until `length_s` of uninterrupted work and checkpoint are done."""
    rate, restarted = failures
    # Computed in logarithms, because e^(rate length) and `restarted` may each overflow or
    # underflow.
    hopeless = (
        length_s * rate - np.log(np.maximum(restarted, np.exp(-MOST_EXPONENT - 1))) > MOST_EXPONENT
    )
    fails = (rate > 0) & ~hopeless
    some_rate = np.where(fails, rate, 1.0)
    with_failures = (
        np.expm1(np.where(fails, length_s, 0.0) * some_rate)
        / some_rate
        / np.where(fails, restarted, 1.0)
    )
    endless = np.where(length_s > 0, np.inf, 0.0)
    return np.where(fails, with_failures, np.where(hopeless, endless, length_s))


def expected_s(
    work_s: Numbers, segments: Numbers, checkpoint_s: Numbers, failures: FailureRate
) -> Floats:
    """Return the mean seconds for `work_s` in equal segments that each end with a checkpoint."""
    return np.asarray(segments * segment_s(work_s / segments + checkpoint_s, failures))


def best_interval_s(checkpoint_s: Numbers, failures: FailureRate) -> Floats:
    """Return the work between checkpoints, in seconds, that minimizes the mean time.

    The result is infinite without failures. x = interval / M is the root of (1 - x) e^x =
    e^(-checkpoint / M). For a short checkpoint, x is Young's sqrt(2 checkpoint / M).
    """
    rate = np.asarray(failures.per_s)
    if not rate.any():
        return np.full(rate.shape, np.inf)
    product, place = np.unique(checkpoint_s * rate, return_inverse=True)
    target = np.exp(-product)
    x = np.clip(np.sqrt(2 * product), 1e-12, 0.999)
    for _ in range(50):  # Newton's method on a decreasing, concave function
        change = ((1 - x) * np.exp(x) - target) / (x * np.exp(x))
        x = np.clip(x + change, 1e-12, 1.0)
        if (np.abs(change) < 1e-12).all():
            break
    with np.errstate(divide="ignore"):
        return np.where(rate > 0, x[place].reshape(np.shape(checkpoint_s * rate)) / rate, np.inf)


def best_segments(work_s: Numbers, checkpoint_s: Numbers, failures: FailureRate) -> Floats:
    """Return the number of segments (at least 1) that minimizes the mean time of `work_s`.

    The cost is convex in the number of segments. The best number is therefore one of the two whole
    numbers next to work / best interval.
    """
    fewer = np.maximum(
        1.0, np.floor(work_s / best_interval_s(np.maximum(checkpoint_s, 1e-3), failures))
    )
    with np.errstate(invalid="ignore"):
        cost_s, cost_of_more_s = (
            expected_s(work_s, count, checkpoint_s, failures) for count in (fewer, fewer + 1)
        )
        return np.where(cost_of_more_s < cost_s, fewer + 1, fewer)


# ---- the whole training

LEAST_CHECKPOINT_S = 1e-3
"""Minimum checkpoint time in seconds at the cheapest interval. Without it, free checkpoints would
have an interval of 0.
"""
IDLE_POWER_SHARE = 0.15
"""Power of an idle GPU as a share of its TDP. nvidia-smi shows 60 W of an A100's 400 W, and 70 to
110 W of an H100's 700 W.
"""


class Training(NamedTuple):
    """A whole training, given everything except the step time.

    Numbers may be arrays with one entry per choice. `state_bytes` is the size of a checkpoint.
    `power_w` is the mean power of all devices, or None if unknown.
    """

    steps: Numbers
    epochs: Numbers
    samples_per_step: Numbers
    nodes: Numbers
    devices: Numbers
    compiles: Numbers
    conditions: JobConditions
    state_bytes: Numbers = 0.0
    power_w: Numbers = None

    def time(self, step_s: float, forward_s: float | None = None) -> JobTime:
        """Return the time and cost at `step_s` seconds per step.

        `forward_s` is the part of a step spent in forward passes. Without it, evaluating a batch
        takes as long as a training step.
        """
        (time,) = self.times(
            np.array([step_s]), None if forward_s is None else np.array([forward_s])
        )
        return _priced(time, self.conditions, self.devices)

    def times(self, step_s: Floats, forward_s: Floats | None = None) -> list[JobTime]:
        """Return the training time for each of several step times, without dollars."""
        parts = self.parts(step_s, forward_s)
        watts = [None] if self.power_w is None else self.power_w
        columns = {
            name: np.broadcast_to(np.asarray(values), step_s.shape).ravel().tolist()
            for name, values in {
                **parts,
                "steps": self.steps,
                "watts": watts,
                "compiles": self.compiles,
            }.items()
        }
        assumed = [assumptions(self.conditions, compiles) for compiles in (False, True)]
        times = []
        for row in zip(*columns.values(), strict=True):
            fields = dict(zip(columns, row, strict=True))
            power, checkpoints = fields.pop("watts"), int(fields.pop("checkpoints"))
            time = JobTime(
                repeats=self.conditions.repeats,
                checkpoints=checkpoints,
                assumed=assumed[fields.pop("compiles")],
                **fields,
            )
            times.append(time if power is None else replace(time, kwh=power * time.total_s / 3.6e6))
        return times

    def total_s(self, step_s: Floats, forward_s: Floats | None = None) -> Floats:
        """Return the seconds of the training for many choices.

        The result is infinite if `step_s` or the number of steps is infinite.
        """
        able = np.isfinite(step_s) & np.isfinite(self.steps)
        counted = self._replace(steps=np.where(np.isfinite(self.steps), self.steps, 1.0))
        forward = forward_s if forward_s is None else np.where(able, forward_s, 1.0)
        parts = counted.parts(np.where(able, step_s, 1.0), forward)
        return np.where(able, sum_of_parts(parts), np.inf)

    def parts(self, step_s: Floats, forward_s: Floats | None) -> dict[str, Floats]:
        """Return the times in JOB_PARTS, the number of checkpoints and the work between them."""
        if not (np.isfinite(step_s) & (step_s > 0)).all():
            raise TrainpaceError(f"the step time is {float(np.min(step_s))} s; it must be above 0.")
        c, steps = self.conditions, np.asarray(self.steps, dtype=np.float64)
        stepping = steps * step_s
        reading = self.samples_per_step * c.sample_bytes / (c.storage_gb_per_s * 1e9)
        data_wait = steps * np.maximum(0.0, reading - step_s)
        stragglers = stepping * slowest_of(self.nodes, c.step_variation)
        evaluation = np.floor_divide(steps, c.evaluate_every_steps or np.inf) * c.evaluation_s
        if c.evaluation_samples:
            forward = step_s if forward_s is None else forward_s
            evaluation = (
                evaluation + self.epochs * c.evaluation_samples / self.samples_per_step * forward
            )
        work = stepping + data_wait + stragglers + evaluation
        segments, each, write, expected = self._cut(steps, work)
        written = segments * write
        n = c.repeats
        return {
            "stepping_s": n * stepping,
            "startup_s": np.full_like(work, n * c.startup_s),
            "compiling_s": n * c.compiling_s * np.asarray(self.compiles),
            "data_wait_s": n * data_wait,
            "stragglers_s": n * stragglers,
            "evaluation_s": n * evaluation,
            "checkpoint_s": n * written,
            "failures_s": n * np.maximum(0.0, expected - work - written),
            "preparing_s": np.full_like(work, c.preparing_s),
            "transfer_s": np.full_like(work, c.data_gb / c.download_gb_per_s),
            "checkpoints": n * segments,
            "checkpoint_interval_s": each,
        }

    def _cut(self, steps: Floats, work: Floats) -> tuple[Floats, Floats, Numbers, Floats]:
        """Return the checkpoint schedule and the expected time.

        Returns:
            Checkpoints per run, work between them, seconds of one checkpoint, mean seconds of a run
                with failures.
        """
        c, failures = self.conditions, self._failures()
        write = (
            self.state_bytes / (c.storage_gb_per_s * 1e9)
            if c.checkpoint_s is None
            else c.checkpoint_s
        )
        if c.checkpoint_every_steps is not None:
            # No checkpoint follows the steps after the last full interval.
            segments = np.floor_divide(steps, c.checkpoint_every_steps)
            saved = segments * c.checkpoint_every_steps / steps
            each = work * saved / np.maximum(1.0, segments)
            rest = work * (1.0 - saved)
            expected = _each(segments, segment_s(each + write, failures)) + segment_s(
                rest, failures
            )
        elif c.checkpoint_every_s is not None:
            # The last segment is shorter and ends by saving the trained model.
            segments = np.maximum(1.0, np.ceil(work / c.checkpoint_every_s))
            each = np.minimum(work, c.checkpoint_every_s)
            last = work - (segments - 1) * each
            expected = _each(segments - 1, segment_s(each + write, failures)) + segment_s(
                last + write, failures
            )
        elif c.checkpoints:
            write = np.maximum(write, LEAST_CHECKPOINT_S)
            segments = best_segments(work, write, failures)
            each, expected = work / segments, expected_s(work, segments, write, failures)
        else:
            segments, each, expected = np.zeros_like(work), work, segment_s(work, failures)
        fails = np.asarray(failures.per_s) > 0
        return (
            np.broadcast_to(segments, work.shape),
            each,
            write,
            np.where(fails, expected, work + segments * write),
        )

    def _failures(self) -> FailureRate:
        c, kinds = self.conditions, []
        if c.mean_time_between_failures_s is not None:
            kinds.append(Interruption(c.mean_time_between_failures_s, c.restart_s))
        elif c.device_mtbf_h is not None:
            kinds.append(Interruption(c.device_mtbf_h * 3600 / self.devices, c.restart_s))
        if c.spot:
            kinds.append(Interruption(c.preemption_mean_h * 3600 / self.nodes, c.restart_s))
        return failure_rate(kinds)


def _each(count: Floats, seconds: Floats) -> Floats:
    """Return `count` times `seconds`, which may be infinite. 0 times infinity is 0."""
    return np.where(count > 0, np.where(count > 0, count, 1.0) * seconds, 0.0)


def training_of(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions = ASSUMED,
    state_bytes: float = 0.0,
    power_w: float | None = None,
) -> Training:
    """Return the training of a schedule under one execution.

    A partial last batch counts as a whole step.
    """
    steps, batch = total_steps(schedule, execution), execution.global_batch
    epochs = epochs_of(schedule, steps, batch) if conditions.evaluation_samples else 0.0
    return Training(
        steps=steps,
        epochs=epochs,
        samples_per_step=batch,
        nodes=execution.nnodes,
        devices=execution.world_size,
        compiles=execution.compile,
        conditions=conditions,
        state_bytes=state_bytes,
        power_w=power_w,
    )


def epochs_of(schedule: Schedule, steps: Numbers, global_batch: Numbers) -> Numbers:
    """Return the number of passes over the data, or 0 if the size of an epoch is unknown."""
    samples = schedule.samples_per_epoch
    if samples is None:
        return schedule.epochs or 0.0
    passes = steps * global_batch / samples
    return passes if schedule.epochs is None else np.minimum(passes, schedule.epochs)


class JobRange(NamedTuple):
    """A training at the forecast step time, with its ranges over the step's 90% interval."""

    time: JobTime
    seconds: Interval
    usd: Interval | None


def job_ranges(forecasts: Sequence[tuple[Training, StepTime, Interval]]) -> list[JobRange]:
    """Return each training at its forecast step time and at both ends of the step's interval.

    At each end, all parts of a step grow or shrink by the same factor. Trainings whose conditions
    differ only in money are computed together.
    """
    groups: dict[JobConditions, list[int]] = {}
    for i, (training, _, _) in enumerate(forecasts):
        groups.setdefault(replace(training.conditions, **_NO_MONEY), []).append(i)
    ranges: dict[int, JobRange] = {}
    for conditions, members in groups.items():
        some = [forecasts[i] for i in members]
        times = iter(
            _together([training for training, _, _ in some], conditions).times(*_ends(some))
        )
        for i, (training, _, interval) in zip(members, some, strict=True):
            ranges[i] = _range(training, interval, [next(times) for _ in range(3)])
    return [ranges[i] for i in range(len(forecasts))]


def _range(training: Training, interval: Interval, times: list[JobTime]) -> JobRange:
    middle, *ends = (_priced(time, training.conditions, training.devices) for time in times)
    seconds = _between([end.total_s for end in ends], interval)
    usd = [end.usd for end in ends if end.usd is not None]
    return JobRange(middle, seconds, _between(usd, interval) if usd else None)


_NO_MONEY = {"price_usd_per_device_hour": None, "electricity_usd_per_kwh": 0.0, "egress_usd": 0.0}


def _together(trainings: Sequence[Training], conditions: JobConditions) -> Training:
    """Stack trainings into one training with a row per input. Each input has a single step time."""
    numbers = (name for name in Training._fields if name not in ("conditions", "power_w"))
    columns = {name: np.array([[getattr(t, name)] for t in trainings]) for name in numbers}
    return Training(
        **columns,
        conditions=conditions,
        power_w=np.array([[t.power_w] for t in trainings], dtype=object),
    )


def _ends(forecasts: Sequence[tuple[Training, StepTime, Interval]]) -> tuple[Floats, Floats]:
    """Return step times and forward-pass times in seconds.

    Returns:
        Two arrays with a row per forecast and the columns middle, low and high.
    """
    ms = np.array([[step.total_ms, interval.low, interval.high] for _, step, interval in forecasts])
    evaluating_ms = np.array([[step.evaluating_ms] for _, step, _ in forecasts])
    return ms / 1e3, evaluating_ms * (ms / ms[:, :1]) / 1e3


def _between(values: list[float], step: Interval) -> Interval:
    return Interval(low=min(values), high=max(values), coverage=step.coverage, basis=step.basis)


def _priced(time: JobTime, conditions: JobConditions, devices: int) -> JobTime:
    c = conditions
    if c.price_usd_per_device_hour is None:
        return time
    usd = math.inf
    if math.isfinite(time.total_s):
        usd = c.price_usd_per_device_hour * devices * time.hours
        usd += c.electricity_usd_per_kwh * (time.kwh or 0.0) + c.egress_usd
    return replace(time, usd=usd)


def with_job(
    forecast: Forecast,
    workload: Workload,
    schedule: Schedule | None,
    conditions: JobConditions = ASSUMED,
) -> Forecast:
    """Add the whole training to the forecast of a step.

    Returns the forecast unchanged if it has no step or if `schedule` is None.
    """
    if schedule is None or forecast.step is None or forecast.step_time_interval_ms is None:
        return forecast
    e = forecast.execution
    training = training_of(schedule, e, conditions, state_bytes(workload, e))
    (job,) = job_ranges([(training, forecast.step, forecast.step_time_interval_ms)])
    return replace(
        forecast,
        training_time=job.time,
        training_time_interval_s=job.seconds,
        cost_usd=job.time.usd,
        cost_interval_usd=job.usd,
    )


def state_bytes(workload: Workload, execution: Execution) -> float:
    """Return the size of a checkpoint in bytes: parameters and optimizer states."""
    memory = workload.form(execution.precision).memory
    count = memory.parameter_bytes + memory.optimizer_bytes + memory.paged_bytes
    if (
        form_of(execution.precision) == "half"
        and execution.zero_stage
        and not execution.pure_16_bit
    ):
        count *= 2  # fp32 master weights and moments: 12 bytes per parameter with Adam
    return count


def slowest_of(nodes: Numbers, variation: float) -> Numbers:
    """Return the extra time of the slowest of n nodes, as a share of the mean step time.

    Synchronous training waits for the slowest node. The expected maximum of n normal variables
    (Blom 1958) is within 5% of the exact value for two nodes, and within 1% for eight or more.
    """
    if variation == 0.0:
        return 0.0
    counts, place = np.unique(nodes, return_inverse=True)
    shares = [
        NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in counts.tolist()
    ]
    return variation * np.array(shares)[place].reshape(np.shape(nodes))


def power_w(device: Device, devices: int, step: StepTime) -> float | None:
    """Estimate the power of the GPUs in watts. Returns None if the TDP is unknown.

    Power grows about linearly with utilization (Fan, Weber and Barroso, ISCA 2007). Here it grows
    from idle to TDP with the share of a step in which GPUs compute. Memory-bound kernels draw less
    than TDP, so the estimate is on the high side. It does not include processors, memory, fans and
    cooling.
    """
    if device.tdp_w is None:
        return None
    busy = step.computing_ms / step.total_ms
    return device.tdp_w.value * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * busy) * devices
