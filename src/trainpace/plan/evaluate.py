"""What executions take: one by one through `forecast`, many through arrays, with the same numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import Forecast, JobTime, evaluating_ms
from trainpace.core.software import TODAY, Software
from trainpace.forecast import (
    CLASHES,
    FittedKernels,
    Forecaster,
    Grid,
    Knowledge,
    Target,
    needed_gib,
    room_gib,
)
from trainpace.job import (
    ASSUMED,
    JobConditions,
    Schedule,
    Training,
    samples_factor,
    state_bytes,
    total_steps,
    training_of,
)
from trainpace.plan.changes import NOISE, Choice, DataPath, Outlook
from trainpace.workload import Floats, Workload


class Setting(NamedTuple):
    """What stays the same over a search. `host_factor` is how much slower than its CPU says a host launches kernels.
    `noise_scale`, in samples: with it the work is done when the loss is reached that the present training reaches, not when
    its samples are seen. `knowledge`: measured runs that correct the forecasts.
    `forecaster`: whose evaluated kernels are shared."""

    workload: Workload
    cluster: Cluster
    schedule: Schedule
    host_factor: float = 1.0
    noise_scale: float | None = None
    conditions: JobConditions = ASSUMED
    forecaster: Forecaster | None = None
    software: Software = TODAY
    knowledge: Knowledge | None = None

    def on_part(self, nnodes: int, nproc_per_node: int) -> Forecaster:
        """The forecaster of the part of the cluster that executions of so many processes use."""
        cluster = part_of(self.cluster, nnodes, nproc_per_node)
        if self.forecaster is None:
            target = Target(
                cluster, FittedKernels(host_factor=self.host_factor), software=self.software
            )
            return Forecaster(self.workload, target, knowledge=self.knowledge)
        return self.forecaster.on(cluster)

    def with_forecaster(self) -> Setting:
        return self._replace(
            forecaster=self.on_part(self.cluster.nodes, self.cluster.devices_per_node)
        )

    def with_host_factor(self, factor: float) -> Setting:
        slower = FittedKernels(host_factor=factor)
        forecaster = (
            None
            if self.forecaster is None
            else self.forecaster.on(Target(self.cluster, slower, software=self.software))
        )
        return self._replace(host_factor=factor, forecaster=forecaster)

    def noise_s(self, job_s: float) -> float:
        """Seconds of a job that are too few to tell two choices apart: its start takes as long with each."""
        return NOISE * max(0.0, job_s - self.conditions.startup_s)

    @property
    def priced(self) -> JobConditions:
        return replace(
            self.conditions, price_usd_per_device_hour=self.cluster.price_usd_per_device_hour
        )


class Evaluation(NamedTuple):
    """The step and memory of every execution of a grid: milliseconds of a step whose data is there (NaN where there is a reason
    why not), and of its forward passes; GiB that one device must have room for. reason: positions in `reasons`, 0 for none.
    """

    step_ms: Floats
    evaluating_ms: Floats
    needed_gib: Floats
    reason: NDArray[np.int64]
    reasons: tuple[str, ...]

    @property
    def timed_gib(self) -> Floats:
        """`needed_gib`, infinite where there is a reason why not."""
        return np.where(self.reason > 0, np.inf, self.needed_gib)

    def why_not(self, rows: NDArray[np.int64]) -> str:
        """The first reason among some executions."""
        return next((self.reasons[code] for code in self.reason[rows].tolist() if code), "")


def part_of(cluster: Cluster, nnodes: int, nproc_per_node: int) -> Cluster:
    """A part of a cluster. A node's network is shared by those of its devices that are used."""
    per_device = cluster.network_gb_per_s_per_device
    if per_device is not None:
        per_device *= cluster.devices_per_node / nproc_per_node
    return replace(
        cluster,
        nodes=nnodes,
        devices_per_node=nproc_per_node,
        network_gb_per_s_per_device=per_device,
    )


def forecast_of(setting: Setting, execution: Execution) -> Forecast:
    """The forecast of one execution on its part of the cluster, without the job."""
    return setting.on_part(execution.nnodes, execution.nproc_per_node).forecast(execution)


def device_room_gib(cluster: Cluster) -> float:
    """The memory of one device that a training can use; infinite where its size is not known."""
    return (
        math.inf if cluster.device.memory_gib is None else room_gib(cluster.device.memory_gib.value)
    )


def evaluate(setting: Setting, grid: Grid) -> Evaluation:
    """Every execution of a grid, those on the same part of the cluster together. One whose lasting states do not fit gets no
    step, and these states for what it needs."""
    step, evaluating, needed = (np.full(len(grid), np.nan) for _ in range(3))
    reason = np.zeros(len(grid), dtype=np.int64)
    reasons = [""]
    for nnodes, nproc_per_node in sorted(
        {*zip(grid.nnodes.tolist(), grid.nproc_per_node.tolist(), strict=True)}
    ):
        rows = np.flatnonzero((grid.nnodes == nnodes) & (grid.nproc_per_node == nproc_per_node))
        forecaster = setting.on_part(nnodes, nproc_per_node)
        needed[rows] = least = forecaster.least_gib(grid.at(rows))
        rows = rows[least <= device_room_gib(setting.cluster)]
        if not len(rows):
            continue
        forecasts = forecaster.at(grid.at(rows))
        timed = forecasts.timed
        step[rows] = np.where(timed, forecasts.step_ms, np.nan)
        evaluating[rows] = np.where(
            timed, evaluating_ms(forecasts.parts, forecasts.step_ms), np.nan
        )
        needed[rows] = needed_gib(forecasts.memory)
        for code, text in enumerate(forecasts.reasons[1:], start=1):
            reason[rows[forecasts.why == code]] = len(reasons)
            reasons.append(text)
        for clash in np.unique(forecasts.clash[forecasts.clash > 0]).tolist():
            reason[rows[forecasts.clash == clash]] = len(reasons)
            name = CLASHES[clash]
            reasons.append(
                "the model has no chain of alike blocks that could be divided"
                if name == "no blocks"
                else f"its {name} clashes with the model or the cluster"
            )
    return Evaluation(step, evaluating, needed, reason, tuple(reasons))


def with_data_ms(
    step_ms: Floats | float, samples_a_rank: NDArray[np.int64] | int, data: DataPath
) -> Floats:
    """A step together with its data: the later of both where samples are made beside the computation, else one after
    the other (the pipeline model of `loader.costs`, from the pace that it gave)."""
    wait_ms = np.asarray(samples_a_rank * data.ms_per_sample, dtype=np.float64)
    return np.asarray(np.maximum(step_ms, wait_ms) if data.beside else step_ms + wait_ms)


def job_seconds(
    setting: Setting, start: Execution, grid: Grid, evaluation: Evaluation, step_ms: Floats
) -> Floats:
    """Seconds of the whole job for every execution at its step with the data of each path, executions x paths."""
    kinds = 4 * grid.precision + grid.zero_stage  # the stages of ZeRO are 0 to 3
    _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
    states = np.array([state_bytes(setting.workload, grid.execution(row)) for row in first])[kind]
    steps, batch = _job_steps(setting, start, grid), grid.global_batch
    passes = steps * batch / (setting.schedule.samples_per_epoch or np.inf)
    training = Training(
        steps=steps[:, None],
        epochs=passes[:, None],
        samples_per_step=batch[:, None],
        nodes=grid.nnodes[:, None],
        devices=grid.world_size[:, None],
        compiles=grid.compile[:, None],
        conditions=setting.conditions,
        state_bytes=states[:, None],
    )
    return training.total_s(
        step_ms / 1e3, np.broadcast_to(evaluation.evaluating_ms[:, None] / 1e3, step_ms.shape)
    )


def _job_steps(setting: Setting, start: Execution, grid: Grid) -> Floats:
    """Optimizer updates of the job for every execution; infinite where nothing would be left to train on."""

    def steps_of(execution: Execution) -> float:
        try:
            return float(total_steps(same_work(setting, execution, start), execution))
        except TrainpaceError:
            return math.inf

    ranks = grid.data_parallel_size
    batches, batch = np.unique(grid.global_batch, return_inverse=True)
    key = (grid.micro_batch * (ranks.max() + 1) + ranks) * len(batches) + batch
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return np.array([steps_of(grid.execution(int(row))) for row in first])[inverse]


def same_work(setting: Setting, execution: Execution, start: Execution) -> Schedule:
    """The schedule under another global batch: the same samples, or with a noise scale those to the same loss.

    The law holds from the first weights to a loss, each batch at its own best learning rate, while the noise scale stays what
    it is (`schedule.noise_scale`): an estimate.
    """
    schedule, old, new = setting.schedule, start.global_batch, execution.global_batch
    if new == old:
        return schedule
    more = 1.0 if setting.noise_scale is None else samples_factor(setting.noise_scale, old, new)
    if schedule.epochs is not None and more != 1.0:
        schedule = replace(schedule, epochs=schedule.epochs * more)
    if schedule.max_steps is not None:
        schedule = replace(schedule, max_steps=math.ceil(schedule.max_steps * more * old / new))
    return schedule


class Judge:
    def __init__(self, setting: Setting, start: Execution) -> None:
        self.setting = setting
        self.start = start
        self._forecasts: dict[Execution, Forecast | str] = {}

    def forecast(self, execution: Execution) -> Forecast | str:
        """The forecast, or the reason why there is none."""
        if execution not in self._forecasts:
            try:
                self._forecasts[execution] = forecast_of(self.setting, execution)
            except TrainpaceError as error:
                self._forecasts[execution] = str(error)
        return self._forecasts[execution]

    def fits(self, choice: Choice) -> bool:
        f = self.forecast(choice.execution)
        return not isinstance(f, str) and f.step is not None and f.fits is not False

    def step_ms(self, choice: Choice) -> float:
        """The step with its data; infinite where there is none."""
        f, e = self.forecast(choice.execution), choice.execution
        if isinstance(f, str) or f.step is None:
            return math.inf
        return float(with_data_ms(f.step.total_ms, e.micro_batch * e.accumulation, choice.data))

    def job(self, choice: Choice) -> JobTime | None:
        """The whole job; None where it cannot be done."""
        f = self.forecast(choice.execution)
        if isinstance(f, str) or f.step is None:
            return None
        return self._job_at(choice, self.step_ms(choice), f.step.evaluating_ms)

    def _job_at(self, choice: Choice, step_ms: float, evaluating_ms: float) -> JobTime | None:
        setting, e = self.setting, choice.execution
        try:
            schedule = same_work(setting, e, self.start)
            training = training_of(schedule, e, setting.priced, state_bytes(setting.workload, e))
        except TrainpaceError:
            return None
        return training.time(step_ms / 1e3, evaluating_ms / 1e3)

    def job_s(self, choice: Choice) -> float:
        """Seconds of the whole job; infinite where it cannot be done."""
        time = self.job(choice)
        return math.inf if time is None else time.total_s

    def outlook(self, choice: Choice, changes: int) -> Outlook:
        f = self.forecast(choice.execution)
        assert not isinstance(f, str)
        time = self.job(choice)
        low_s, high_s = self._ends_s(choice, f)
        return Outlook(
            choice=choice,
            changes=changes,
            step_ms=self.step_ms(choice),
            num_devices=choice.execution.world_size,
            job_s=math.inf if time is None else time.total_s,
            cost_usd=None if time is None else time.usd,
            needed_gib=0.0 if f.memory is None else float(needed_gib(f.memory)),
            job_low_s=low_s,
            job_high_s=high_s,
        )

    def _ends_s(self, choice: Choice, f: Forecast) -> tuple[float | None, float | None]:
        """The job at the ends of the step's 90 % interval; the data are as they are."""
        ends, e = f.step_time_interval_ms, choice.execution
        if ends is None or f.step is None or not math.isfinite(ends.high):
            return None, None
        low, high = (
            self._job_at(
                choice,
                float(with_data_ms(ms, e.micro_batch * e.accumulation, choice.data)),
                f.step.evaluating_ms,
            )
            for ms in (ends.low, ends.high)
        )
        return (None, None) if low is None or high is None else (low.total_s, high.total_s)
