"""Step time, memory and job time of executions.

Single executions go through `forecast`, and many executions are evaluated as arrays. Both give the
same numbers.
"""

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
    usable_gib,
)
from trainpace.job import (
    ASSUMED,
    CORE_SPREAD,
    JobConditions,
    Schedule,
    Training,
    samples_factor,
    state_bytes,
    total_steps,
    training_of,
    with_data_ms,
)
from trainpace.plan.changes import NOISE, Choice, Projection
from trainpace.workload import Flags, Floats, Workload


class Problem(NamedTuple):
    """Inputs that stay constant during a search.

    Attributes:
        noise_scale: Gradient noise scale in samples. If it is given, the work ends at the loss that
            the current training reaches, and not after a fixed number of samples.
        knowledge: Measured runs that correct the forecasts.
        forecaster: Forecaster whose evaluated kernels are reused.
        proven_gib: Memory that the current training needs, or 0 if it does not fit. The training
            runs, so whatever needs no more memory fits too.
    """

    workload: Workload
    cluster: Cluster
    schedule: Schedule
    noise_scale: float | None = None
    conditions: JobConditions = ASSUMED
    forecaster: Forecaster | None = None
    software: Software = TODAY
    knowledge: Knowledge | None = None
    proven_gib: float = 0.0

    def on_part(self, nnodes: int, nproc_per_node: int) -> Forecaster:
        """Return the forecaster for the part of the cluster that an execution uses."""
        forecaster = self.forecaster
        if forecaster is None:
            target = Target(self.cluster, FittedKernels(), software=self.software)
            forecaster = Forecaster(self.workload, target, knowledge=self.knowledge)
        return forecaster.on(part_of(self.cluster, nnodes, nproc_per_node))

    def with_forecaster(self) -> Problem:
        whole = self.on_part(self.cluster.nodes, self.cluster.devices_per_node)
        return self._replace(forecaster=whole)

    def noise_s(self, job_s: float) -> float:
        """Return the difference in seconds below which two choices count as equal.

        The job's start does not count, because it takes equally long with both choices.
        """
        return NOISE * max(0.0, job_s - self.conditions.startup_s)


class Evaluation(NamedTuple):
    """Step time and memory of every execution of a grid.

    Attributes:
        step_ms: Step time without data waits. NaN if the execution cannot be forecast, or if its
            states alone do not fit.
        evaluating_ms: Time of the step's forward passes, without data waits. NaN as `step_ms`.
        needed_gib: Memory that each device must have. If the states do not fit, only the states.
        fits: True if the memory fits the device with probability `FITS_AT`.
        reason: Index into `reasons` for each execution; 0 means no reason.
    """

    step_ms: Floats
    evaluating_ms: Floats
    needed_gib: Floats
    fits: Flags
    reason: NDArray[np.int64]
    reasons: tuple[str, ...]

    @property
    def timed_gib(self) -> Floats:
        """`needed_gib`, with infinity for executions that cannot be forecast."""
        return np.where(self.reason > 0, np.inf, self.needed_gib)

    def why_not(self, rows: NDArray[np.int64]) -> str:
        """Return the first reason among the given executions, or ""."""
        return next((self.reasons[code] for code in self.reason[rows].tolist() if code), "")


def part_of(cluster: Cluster, nnodes: int, nproc_per_node: int) -> Cluster:
    """Return a part of a cluster. The used devices of a node share its whole network bandwidth."""
    per_device = cluster.network_gb_per_s_per_device
    if per_device is not None:
        per_device *= cluster.devices_per_node / nproc_per_node
    return replace(
        cluster,
        nodes=nnodes,
        devices_per_node=nproc_per_node,
        network_gb_per_s_per_device=per_device,
    )


def forecast_of(problem: Problem, execution: Execution) -> Forecast:
    """Return the forecast of one execution on its part of the cluster, without the job time."""
    return problem.on_part(execution.nnodes, execution.nproc_per_node).forecast(execution)


def with_start(problem: Problem, start: Execution) -> Problem:
    """Return the problem with the memory that the current training needs.

    Raises:
        TrainpaceError: The current execution cannot be forecast.
    """
    current = forecast_of(problem, start)
    if current.step is None:
        raise TrainpaceError(f"cannot forecast the current setup on these GPUs: {current.reason}")
    if current.memory is None or not current.may_fit:
        return problem
    return problem._replace(proven_gib=float(needed_gib(current.memory)))


def device_room_gib(cluster: Cluster) -> float:
    """Return the most memory in GiB that fits a device with probability `FITS_AT`.

    The limit is lower with torch.compile. Infinity if the device's memory is unknown.
    """
    memory = cluster.device.memory_gib
    return math.inf if memory is None else float(room_gib(memory.value))


def evaluate(problem: Problem, grid: Grid) -> Evaluation:
    """Evaluate every execution of a grid.

    If the parameters, gradients and optimizer states of an execution do not fit, its step is not
    computed. `needed_gib` is then the size of these states.
    """
    step, evaluating, needed = (np.full(len(grid), np.nan) for _ in range(3))
    reason, fits = np.zeros(len(grid), dtype=np.int64), np.zeros(len(grid), dtype=bool)
    memory, reasons = problem.cluster.device.memory_gib, [""]
    usable = math.inf if memory is None else usable_gib(memory.value)
    for nnodes, nproc_per_node in sorted(
        {*zip(grid.nnodes.tolist(), grid.nproc_per_node.tolist(), strict=True)}
    ):
        rows = np.flatnonzero((grid.nnodes == nnodes) & (grid.nproc_per_node == nproc_per_node))
        forecaster = problem.on_part(nnodes, nproc_per_node)
        needed[rows] = least = forecaster.least_gib(grid.at(rows))
        rows = rows[least <= usable]
        if not len(rows):
            continue
        forecasts = forecaster.at(grid.at(rows))
        timed = forecasts.timed
        step[rows] = np.where(timed, forecasts.step_ms, np.nan)
        evaluating[rows] = np.where(
            timed, evaluating_ms(forecasts.parts, forecasts.step_ms), np.nan
        )
        needed[rows], fits[rows] = needed_gib(forecasts.memory), forecasts.fits
        for code, text in enumerate(forecasts.reasons[1:], start=1):
            reason[rows[forecasts.why == code]] = len(reasons)
            reasons.append(text)
        for clash in np.unique(forecasts.clash[forecasts.clash > 0]).tolist():
            reason[rows[forecasts.clash == clash]] = len(reasons)
            name = CLASHES[clash]
            reasons.append(
                "the model has no chain of repeated blocks to divide"
                if name == "no blocks"
                else f"its {name} clashes with the model or the cluster"
            )
    return Evaluation(step, evaluating, needed, fits, reason, tuple(reasons))


def job_seconds(
    problem: Problem, start: Execution, grid: Grid, evaluation: Evaluation, step_ms: Floats
) -> Floats:
    """Return the seconds of the whole job, with the shape (executions, data paths) of `step_ms`."""
    kinds = 4 * grid.precision + grid.zero_stage  # ZeRO stages are 0 to 3
    _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
    states = np.array([state_bytes(problem.workload, grid.execution(row)) for row in first])[kind]
    steps, batch = _job_steps(problem, start, grid), grid.global_batch
    passes = steps * batch / (problem.schedule.samples_per_epoch or np.inf)
    training = Training(
        steps=steps[:, None],
        epochs=passes[:, None],
        samples_per_step=batch[:, None],
        nodes=grid.nnodes[:, None],
        devices=grid.world_size[:, None],
        compiles=grid.compile[:, None],
        conditions=problem.conditions,
        state_bytes=states[:, None],
    )
    return training.total_s(
        step_ms / 1e3, np.broadcast_to(evaluation.evaluating_ms[:, None] / 1e3, step_ms.shape)
    )


def _job_steps(problem: Problem, start: Execution, grid: Grid) -> Floats:
    """Return the number of updates for every execution. Infinite if no full step is possible."""

    def steps_of(execution: Execution) -> float:
        try:
            return float(total_steps(same_work(problem, execution, start), execution))
        except TrainpaceError:
            return math.inf

    ranks = grid.data_parallel_size
    batches, batch = np.unique(grid.global_batch, return_inverse=True)
    key = (grid.micro_batch * (ranks.max() + 1) + ranks) * len(batches) + batch
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return np.array([steps_of(grid.execution(int(row))) for row in first])[inverse]


def same_work(problem: Problem, execution: Execution, start: Execution) -> Schedule:
    """Return the schedule for an execution with another global batch.

    Without a noise scale the number of samples stays the same. With one, the schedule has the
    samples needed to reach the same loss. That is an estimate for training from scratch: it assumes
    that each batch uses its own best learning rate, and that the noise scale is constant.
    """
    schedule, old, new = problem.schedule, start.global_batch, execution.global_batch
    if new == old:
        return schedule
    more = 1.0 if problem.noise_scale is None else samples_factor(problem.noise_scale, old, new)
    if schedule.epochs is not None and more != 1.0:
        schedule = replace(schedule, epochs=schedule.epochs * more)
    if schedule.max_steps is not None:
        schedule = replace(schedule, max_steps=math.ceil(schedule.max_steps * more * old / new))
    return schedule


class Evaluator:
    """Forecasts of single choices. Each forecast is computed once and cached."""

    def __init__(self, problem: Problem, start: Execution) -> None:
        self.problem = problem
        self.start = start
        self._forecasts: dict[Execution, Forecast | None] = {}

    def forecast(self, execution: Execution) -> Forecast | None:
        """Return the forecast, or None if it has no step."""
        if execution not in self._forecasts:
            try:
                found = forecast_of(self.problem, execution)
            except TrainpaceError:
                found = None
            self._forecasts[execution] = None if found is None or found.step is None else found
        return self._forecasts[execution]

    def fits(self, choice: Choice) -> bool:
        f = self.forecast(choice.execution)
        if f is None or f.memory is None or f.fits is not False:
            return f is not None
        return bool(needed_gib(f.memory) <= self.problem.proven_gib)

    def fit_probability(self, choice: Choice) -> float:
        """Return the probability that a choice fits in memory, or 1 if it is unknown."""
        f = self.forecast(choice.execution)
        return 1.0 if f is None or f.fit_probability is None else f.fit_probability

    def step_ms(self, choice: Choice) -> float:
        """Return the step time including data, or infinity if it cannot be forecast."""
        f = self.forecast(choice.execution)
        if f is None or f.step is None:
            return math.inf
        return self._with_data_ms(f.step.total_ms, choice)

    def _with_data_ms(self, step_ms: float, choice: Choice) -> float:
        e = choice.execution
        return float(with_data_ms(step_ms, e.micro_batch * e.accumulation, choice.data))

    def job(self, choice: Choice, step_ms: float | None = None) -> JobTime | None:
        """Return the time and cost of the whole job, or None if the choice is impossible.

        `step_ms` replaces the forecast time of a step without data waits.
        """
        problem, e, f = self.problem, choice.execution, self.forecast(choice.execution)
        if f is None or f.step is None:
            return None
        try:
            schedule = same_work(problem, e, self.start)
            price = problem.cluster.price_usd_per_device_hour
            conditions = replace(problem.conditions, price_usd_per_device_hour=price)
            training = training_of(schedule, e, conditions, state_bytes(problem.workload, e))
        except TrainpaceError:
            return None
        step_ms = f.step.total_ms if step_ms is None else step_ms
        evaluating_ms = f.step.evaluating_ms * step_ms / f.step.total_ms
        return training.time(self._with_data_ms(step_ms, choice) / 1e3, evaluating_ms / 1e3)

    def job_s(self, choice: Choice) -> float:
        """Return the seconds of the whole job, or infinity if the choice is impossible."""
        time = self.job(choice)
        return math.inf if time is None else time.total_s

    def _ends_s(self, choice: Choice, f: Forecast) -> tuple[float | None, float | None]:
        """Return the job's seconds at both ends of the step's 90% interval. None if unknown."""
        ends = f.step_time_interval_ms
        if ends is None or not math.isfinite(ends.high):
            return None, None
        low, high = (
            self.job(replace(choice, data=choice.data.slower(factor)), ms)
            for ms, factor in ((ends.low, 1 / CORE_SPREAD), (ends.high, CORE_SPREAD))
        )
        return (None, None) if low is None or high is None else (low.total_s, high.total_s)

    def projection(self, choice: Choice, changes: int) -> Projection:
        """Return the forecast time, memory and cost of a choice, with its data path."""
        f = self.forecast(choice.execution)
        assert f is not None
        time = self.job(choice)
        low_s, high_s = self._ends_s(choice, f)
        return Projection(
            choice=choice,
            changes=changes,
            step_ms=self.step_ms(choice),
            num_devices=choice.execution.world_size,
            job_s=math.inf if time is None else time.total_s,
            cost_usd=None if time is None else time.usd,
            needed_gib=0.0 if f.memory is None else float(needed_gib(f.memory)),
            job_low_s=low_s,
            job_high_s=high_s,
            fit_probability=f.fit_probability,
        )
