"""From a step to the whole training: the only place that computes its hours and dollars.

    training = preparing + transfer + repeats x (start-up + compiling + E[work cut by checkpoints and interrupted by failures])
    work     = steps + data wait + stragglers + evaluations
    dollars  = price x devices x hours + electricity + leaving another cloud

The same array arithmetic serves one step time, the ends of its interval, and every choice of a plan, so that they agree to
the last digit.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Forecast, Interval, JobTime, StepTime, sum_of_parts
from trainpace.job.conditions import ASSUMED, CORE_SPREAD, JobConditions, assumptions
from trainpace.job.failures import (
    FailureRate,
    Interruption,
    Numbers,
    best_segments,
    expected_s,
    failure_rate,
    segment_s,
)
from trainpace.job.work import Schedule, total_steps
from trainpace.workload import Floats, Workload, form_of

LEAST_CHECKPOINT_S = 1e-3
"""Where checkpoints come at the interval that costs least, one takes this much at least, or they would never end."""
IDLE_POWER_SHARE = 0.15
"""Share of TDP that a GPU draws while it waits: 60 W of an A100's 400 W, 70 to 110 W of an H100's 700 W in nvidia-smi."""


class Training(NamedTuple):
    """A whole training but for the duration of its step. Numbers may be arrays, of one entry a choice.

    `state_bytes` is what a checkpoint holds; `vcpus` the processors of a node, None or 0: not known, so that preparing
    samples counts nothing; `power_w` what all devices draw on average, None: not known.
    """

    steps: Numbers
    epochs: Numbers
    samples_per_step: Numbers
    nodes: Numbers
    devices: Numbers
    compiles: Numbers
    conditions: JobConditions
    state_bytes: Numbers = 0.0
    vcpus: Numbers = None
    power_w: Numbers = None

    def time(self, step_s: float, forward_s: float | None = None) -> JobTime:
        """The training at `step_s` a step, of which forward passes take `forward_s` (None: all of it, so that evaluations
        are no cheaper than steps)."""
        (time,) = self.times(
            np.array([step_s]), None if forward_s is None else np.array([forward_s])
        )
        return _priced(time, self.conditions, self.devices)

    def times(
        self, step_s: Floats, forward_s: Floats | None = None, core_speed: Numbers = 1.0
    ) -> list[JobTime]:
        """The training at every one of some step times, row by row, without dollars. `core_speed`: how many times as fast as
        stated cores prepare samples."""
        parts = self.parts(step_s, forward_s, core_speed)
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
        """Seconds of the training for many choices at once; infinite where `step_s` or the steps are."""
        able = np.isfinite(step_s) & np.isfinite(self.steps)
        counted = self._replace(steps=np.where(np.isfinite(self.steps), self.steps, 1.0))
        forward = forward_s if forward_s is None else np.where(able, forward_s, 1.0)
        parts = counted.parts(np.where(able, step_s, 1.0), forward)
        return np.where(able, sum_of_parts(parts), np.inf)

    def parts(
        self, step_s: Floats, forward_s: Floats | None, core_speed: Numbers = 1.0
    ) -> dict[str, Floats]:
        """JOB_PARTS, the number of checkpoints and the work between them."""
        if not (np.isfinite(step_s) & (step_s > 0)).all():
            raise TrainpaceError(f"the step time is {float(np.min(step_s))} s; it must be above 0.")
        c, steps = self.conditions, np.asarray(self.steps, dtype=np.float64)
        stepping = steps * step_s
        waiting = self._loading_s(core_speed) - (step_s if c.loads_beside else 0.0)
        data_wait = steps * np.maximum(0.0, waiting)
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

    def _loading_s(self, core_speed: Numbers) -> Numbers:
        """Seconds in which the samples of a step are read and prepared."""
        c = self.conditions
        loading = self.samples_per_step * c.sample_bytes / (c.storage_gb_per_s * 1e9)
        if c.samples_per_cpu_s and self.vcpus is not None:
            rate = (
                c.samples_per_cpu_s * np.asarray(core_speed) * np.asarray(self.vcpus) * self.nodes
            )
            prepared = np.where(
                rate > 0, self.samples_per_step / np.where(rate > 0, rate, 1.0), 0.0
            )
            loading = np.maximum(loading, prepared)
        return loading

    def _cut(self, steps: Floats, work: Floats) -> tuple[Floats, Floats, Numbers, Floats]:
        """(checkpoints of a run, work between two of them, seconds of one, mean seconds with all failures)."""
        c, failures = self.conditions, self._failures()
        write = (
            self.state_bytes / (c.storage_gb_per_s * 1e9)
            if c.checkpoint_s is None
            else c.checkpoint_s
        )
        if (
            c.checkpoint_every_steps is not None
        ):  # steps after the last checkpoint are not kept by one
            segments = np.floor_divide(steps, c.checkpoint_every_steps)
            saved = segments * c.checkpoint_every_steps / steps
            each = work * saved / np.maximum(1.0, segments)
            rest = work * (1.0 - saved)
            expected = _each(segments, segment_s(each + write, failures)) + segment_s(
                rest, failures
            )
        elif (
            c.checkpoint_every_s is not None
        ):  # the last segment is shorter, and ends with the trained model
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
        """What stops the job: any of its devices failing, any of its spot instances being taken away."""
        c, kinds = self.conditions, []
        if c.mean_time_between_failures_s is not None:
            kinds.append(Interruption(c.mean_time_between_failures_s, c.restart_s))
        elif c.device_mtbf_h is not None:
            kinds.append(Interruption(c.device_mtbf_h * 3600 / self.devices, c.restart_s))
        if c.spot:
            kinds.append(Interruption(c.preemption_mean_h * 3600 / self.nodes, c.restart_s))
        return failure_rate(kinds)


def _each(count: Floats, seconds: Floats) -> Floats:
    """`count` times `seconds`, which may be infinite; 0 for none."""
    return np.where(count > 0, np.where(count > 0, count, 1.0) * seconds, 0.0)


def training_of(
    schedule: Schedule,
    execution: Execution,
    conditions: JobConditions = ASSUMED,
    state_bytes: float = 0.0,
    vcpus: int | None = None,
    power_w: float | None = None,
) -> Training:
    """The training of a schedule under one execution. A partial last batch is counted as a whole step."""
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
        vcpus=vcpus,
        power_w=power_w,
    )


def epochs_of(schedule: Schedule, steps: Numbers, global_batch: Numbers) -> Numbers:
    """Passes over the data in so many steps; 0 where nobody said how large an epoch is."""
    samples = schedule.samples_per_epoch
    if samples is None:
        return schedule.epochs or 0.0
    passes = steps * global_batch / samples
    return passes if schedule.epochs is None else np.minimum(passes, schedule.epochs)


class JobRange(NamedTuple):
    """A training at the step's forecast time, and between the ends of its interval."""

    time: JobTime
    seconds: Interval
    usd: Interval | None


def job_ranges(forecasts: Sequence[tuple[Training, StepTime, Interval]]) -> list[JobRange]:
    """Trainings at their forecast steps and at the ends of the steps' intervals, where all parts are longer or shorter alike, and
    samples are prepared by cores that are faster or slower than stated (CORE_SPREAD).

    Those whose conditions differ in money alone are worked out together.
    """
    groups: dict[JobConditions, list[int]] = {}
    for i, (training, _, _) in enumerate(forecasts):
        groups.setdefault(replace(training.conditions, **_NO_MONEY), []).append(i)
    ranges: dict[int, JobRange] = {}
    for conditions, members in groups.items():
        some = [forecasts[i] for i in members]
        times = iter(
            _together([training for training, _, _ in some], conditions).times(
                *_ends(some), _CORE_SPEEDS
            )
        )
        for i, (training, _, interval) in zip(members, some, strict=True):
            middle, *ends = (
                _priced(next(times), training.conditions, training.devices) for _ in range(3)
            )
            usd = [end.usd for end in ends if end.usd is not None]
            ranges[i] = JobRange(
                middle,
                _between([end.total_s for end in ends], interval),
                _between(usd, interval) if usd else None,
            )
    return [ranges[i] for i in range(len(forecasts))]


_CORE_SPEEDS = np.array([[1.0, CORE_SPREAD, 1 / CORE_SPREAD]])
"""At a step's forecast time, and at the low and the high end of its interval."""
_NO_MONEY = {"price_usd_per_device_hour": None, "electricity_usd_per_kwh": 0.0, "egress_usd": 0.0}


def _together(trainings: Sequence[Training], conditions: JobConditions) -> Training:
    """Trainings of one step time each as one, with a row each."""
    numbers = (name for name in Training._fields if name not in ("conditions", "vcpus", "power_w"))
    columns = {name: np.array([[getattr(t, name)] for t in trainings]) for name in numbers}
    return Training(
        **columns,
        conditions=conditions,
        vcpus=np.array([[t.vcpus or 0] for t in trainings]),
        power_w=np.array([[t.power_w] for t in trainings], dtype=object),
    )


def _ends(forecasts: Sequence[tuple[Training, StepTime, Interval]]) -> tuple[Floats, Floats]:
    """(steps, their forward passes) in seconds, a row a forecast: at its time, at the low and at the high end."""
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
    vcpus: int | None = None,
) -> Forecast:
    """The forecast of a step with the whole training that it makes; as it is, where there is no step or no schedule. `vcpus`:
    processors of a node that prepare samples, None: not known."""
    if schedule is None or forecast.step is None or forecast.step_time_interval_ms is None:
        return forecast
    e = forecast.execution
    training = training_of(schedule, e, conditions, state_bytes(workload, e), vcpus)
    (job,) = job_ranges([(training, forecast.step, forecast.step_time_interval_ms)])
    return replace(
        forecast,
        training_time=job.time,
        training_time_interval_s=job.seconds,
        cost_usd=job.time.usd,
        cost_interval_usd=job.usd,
    )


def state_bytes(workload: Workload, execution: Execution) -> float:
    """What a checkpoint holds: parameters and the optimizer's states."""
    memory = workload.form(execution.precision).memory
    count = memory.parameter_bytes + memory.optimizer_bytes + memory.paged_bytes
    if (
        form_of(execution.precision) == "half"
        and execution.zero_stage
        and not execution.pure_16_bit
    ):
        count *= 2  # fp32 masters and moments: 12 bytes a parameter with Adam
    return count


def slowest_of(nodes: Numbers, variation: float) -> Numbers:
    """How much longer than the mean the slowest of n nodes takes, as a share: synchronous training waits for it.

    The largest of n normal variables (Blom 1958), within 5 % of the exact expectation at two nodes, 1 % from eight.
    """
    if variation == 0.0:
        return 0.0
    counts, place = np.unique(nodes, return_inverse=True)
    shares = [
        NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0 for n in counts.tolist()
    ]
    return variation * np.array(shares)[place].reshape(np.shape(nodes))


def power_w(device: Device, devices: int, step: StepTime) -> float | None:
    """An estimate of what the GPUs alone draw: between idle and TDP, by the share of a step in which they compute.

    Power grows about linearly with utilisation (Fan, Weber and Barroso, ISCA 2007). Kernels bound by memory draw less than
    TDP, so this is on the high side; processors, memory, fans and cooling come on top. None without a TDP.
    """
    if device.tdp_w is None:
        return None
    busy = step.computing_ms / step.total_ms
    return device.tdp_w.value * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * busy) * devices
