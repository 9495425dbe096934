"""What executions take: one by one through `forecast`, many through arrays, with the same numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.errors import TrainpaceError
from trainpace.execution import PRECISIONS, Execution
from trainpace.forecast import forecast
from trainpace.forecast.executions import CHECKPOINTINGS, SCHEDULES
from trainpace.forecast.grid import Grid
from trainpace.forecast.memory import needed_gib, room_gib
from trainpace.forecast.old import CLASHES, forecast_grid, grid_from
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import Forecast
from trainpace.plan.changes import Choice, DataPath, Outlook
from trainpace.plan.space import Space
from trainpace.schedule import Schedule, samples_factor, total_steps, training_time
from trainpace.units import hours_from_s
from trainpace.workload import Workload

Floats = NDArray[np.float64]

COMPILING_S = 60.0
"""What torch.compile takes before the first step, at every start. Assumed: ten seconds for a small network, several minutes for
a large model; with it a job of seconds is not told to compile."""


class Setting(NamedTuple):
    """What stays the same over a search. `host_factor` as in `forecast`. `noise_scale`, in samples: with it the work is done
    when the loss is reached that the present training reaches, not when its samples are seen."""

    workload: Workload
    cluster: Cluster
    schedule: Schedule
    host_factor: float = 1.0
    noise_scale: float | None = None


class Evaluation(NamedTuple):
    """Of every row of a space: milliseconds of a step whose data is there (NaN where there is a reason why not), and GiB
    that one device must have room for. reason: positions in `reasons`, 0 for none."""

    step_ms: Floats
    needed_gib: Floats
    reason: NDArray[np.int64]
    reasons: tuple[str, ...]

    def why_not(self, rows: NDArray[np.int64]) -> str:
        """The first reason among some rows."""
        return next((self.reasons[code] for code in self.reason[rows].tolist() if code), "")


def part_of(cluster: Cluster, execution: Execution) -> Cluster:
    """The part of a cluster that an execution uses. A node's network is shared by those of its devices that are used."""
    per_device = cluster.network_gb_per_s_per_device
    if per_device is not None:
        per_device *= cluster.devices_per_node / execution.nproc_per_node
    return replace(
        cluster, nodes=execution.nnodes, devices_per_node=execution.nproc_per_node, network_gb_per_s_per_device=per_device
    )  # fmt: skip


def forecast_of(setting: Setting, execution: Execution) -> Forecast:
    """The forecast of one execution on its part of the cluster, without the job."""
    cluster = part_of(setting.cluster, execution)
    return forecast(setting.workload, execution, cluster, host_factor=setting.host_factor)


def device_room_gib(cluster: Cluster) -> float:
    """What one device has room for; infinite where nobody says."""
    capacity = cluster.device.memory_gib
    return math.inf if capacity is None else room_gib(capacity.value)


def evaluate(setting: Setting, space: Space) -> Evaluation:
    """Every row of a space, those on the same part of the cluster together."""
    c, n = space.columns, len(space)
    step, needed, reason = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n, dtype=np.int64)
    reasons = [""]
    part = c["nnodes"] << 32 | c["nproc_per_node"] << 1 | c["channels_last"]
    for key in np.unique(part):
        rows = np.flatnonzero(part == key)
        some = space.rows(rows)
        base = some.execution(0)
        cluster = part_of(setting.cluster, base)
        grid = _grid(some)
        found = forecast_grid(setting.workload, base, grid, cluster, host_factor=setting.host_factor)
        possible = (found.clash == 0) & np.isfinite(found.step_ms)
        step[rows] = np.where(possible, found.step_ms, np.nan)
        needed[rows] = needed_gib(found.memory)
        for code, text in found.reasons.items():
            reason[rows[(grid.precision == code) & ~possible]] = len(reasons)
            reasons.append(text)
        for clash in np.unique(found.clash[found.clash > 0]).tolist():
            reason[rows[found.clash == clash]] = len(reasons)
            reasons.append(_clash(CLASHES[clash]))
    return Evaluation(step, needed, reason, tuple(reasons))


def _clash(name: str) -> str:
    if name == "no blocks":
        return "the model has no chain of alike blocks that could be divided"
    return f"its {name} clashes with the model or the cluster"


def _grid(space: Space) -> Grid:
    columns = dict(space.columns)
    columns["world_size"] = columns.pop("nnodes") * columns.pop("nproc_per_node")
    del columns["channels_last"]
    for name, names in (("precision", PRECISIONS), ("activation_checkpointing", CHECKPOINTINGS),
                        ("pipeline_schedule", SCHEDULES)):  # fmt: skip
        column = columns[name]
        columns[name] = np.select([column == value for value in names], list(range(len(names))))
    return grid_from(space.base, **columns)


def with_data_ms(step_ms: Floats | float, samples_a_rank: NDArray[np.int64] | int, data: DataPath) -> Floats:
    """A step together with its data: the later of both where samples are made beside the computation, else one after
    the other (the pipeline model of `loader.model`, from the pace that it gave)."""
    wait_ms = np.asarray(samples_a_rank * data.ms_per_sample, dtype=np.float64)
    together: Floats = np.maximum(step_ms, wait_ms) if data.beside else np.asarray(step_ms) + wait_ms
    return together


def steps_of(setting: Setting, space: Space) -> Floats:
    """Optimizer updates of the job for every row; infinite where nothing would be left to train on."""
    c = space.columns
    ranks = space.data_parallel_size()
    batches, batch = np.unique(c["micro_batch"] * c["accumulation"] * ranks, return_inverse=True)
    key = (c["micro_batch"] * (ranks.max() + 1) + ranks) * len(batches) + batch
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    steps: Floats = np.array([job_steps(setting, space.execution(int(row)), space.base) for row in first])[inverse]
    return steps


def job_steps(setting: Setting, execution: Execution, start: Execution) -> float:
    """Updates of the job under another global batch."""
    try:
        return float(total_steps(same_work(setting, execution, start), execution))
    except TrainpaceError:
        return math.inf


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
    """Forecasts choices one by one and remembers them."""

    def __init__(self, setting: Setting, start: Execution) -> None:
        self.setting = setting
        self.start = start
        self._forecasts: dict[Execution, Forecast | str] = {}

    def forecast(self, execution: Execution) -> Forecast | str:
        """The forecast, or the reason why there is none."""
        if execution not in self._forecasts:
            try:
                found: Forecast | str = forecast_of(self.setting, execution)
            except TrainpaceError as error:
                found = str(error)
            self._forecasts[execution] = found
        return self._forecasts[execution]

    def fits(self, choice: Choice) -> bool:
        """Can it be done at all?"""
        f = self.forecast(choice.execution)
        return not isinstance(f, str) and f.step is not None and f.fits is not False

    def step_ms(self, choice: Choice) -> float:
        """The step with its data; infinite where there is none."""
        f, e = self.forecast(choice.execution), choice.execution
        if isinstance(f, str) or f.step is None:
            return math.inf
        return float(with_data_ms(f.step.total_ms, e.micro_batch * e.accumulation, choice.data))

    def job_s(self, choice: Choice) -> float:
        """The whole job, start-up, evaluations, checkpoints and failures included."""
        step_ms = self.step_ms(choice)
        if not math.isfinite(step_ms):
            return math.inf
        work = same_work(self.setting, choice.execution, self.start)
        if choice.execution.compile:
            work = replace(work, startup_s=work.startup_s + COMPILING_S)
        try:
            return training_time(work, choice.execution, step_ms / 1e3).total_s
        except TrainpaceError:
            return math.inf

    def outlook(self, choice: Choice, changes: int) -> Outlook:
        """A choice that can be forecast, with its figures."""
        f = self.forecast(choice.execution)
        assert not isinstance(f, str)
        job_s = self.job_s(choice)
        price, devices = self.setting.cluster.price_usd_per_device_hour, choice.execution.world_size
        return Outlook(
            choice=choice, changes=changes, step_ms=self.step_ms(choice), job_s=job_s, num_devices=devices,
            needed_gib=0.0 if f.memory is None else float(needed_gib(f.memory)),
            cost_usd=None if price is None else price * devices * hours_from_s(job_s),
        )  # fmt: skip
