"""Names from before `Forecaster`, kept until the last user has moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainpace.execution import EXECUTION_FIELDS, Execution, Precision
from trainpace.forecast import shapes
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.forecaster import Forecaster
from trainpace.forecast.forecasts import Forecasts
from trainpace.forecast.grid import Floats, Grid
from trainpace.forecast.intervals import Spread, class_spread, run_class
from trainpace.forecast.kernels import KernelTable, KernelTimes
from trainpace.forecast.roofline import Roofline
from trainpace.forecast.stages import RankTable
from trainpace.forecast.target import CalibratedKernels, FittedKernels, RankTimes, Target
from trainpace.forecast.timings import MachineModel
from trainpace.hardware.cluster import Cluster
from trainpace.hardware.device import Device
from trainpace.outcome import Forecast, Jump, StepTime
from trainpace.schedule import Schedule
from trainpace.workload import Operators, Workload

Model = MachineModel | KernelConstants | None
CHECKPOINTINGS = EXECUTION_FIELDS["activation_checkpointing"].choices
SCHEDULES = EXECUTION_FIELDS["pipeline_schedule"].choices


class GridForecast(Forecasts):
    """`Forecasts` whose `reasons` are by the code of their precision."""

    reasons: Any


_last: tuple[Workload, Model, float, Forecaster] | None = None


def _forecaster(workload: Workload, cluster: Cluster, model: Model, host_factor: float = 1.0) -> Forecaster:
    global _last
    last = _last
    if last is not None and last[0] is workload and last[1] is model and last[2] == host_factor:
        return last[3].on(cluster)
    kernels = CalibratedKernels(model) if isinstance(model, MachineModel) else FittedKernels(model, host_factor)
    made = Forecaster(workload, Target(cluster, kernels))
    _last = (workload, model, host_factor, made)
    return made


def forecast(
    workload: Workload, execution: Execution, cluster: Cluster, schedule: Schedule | None = None, model: Model = None,
    host_factor: float = 1.0,
) -> Forecast:  # fmt: skip
    """The old name of `Forecaster(workload, target).forecast(execution, schedule)`."""
    return _forecaster(workload, cluster, model, host_factor).forecast(execution, schedule)


def forecast_grid(
    workload: Workload, base: Execution, grid: Grid, cluster: Cluster, model: Model = None, host_factor: float = 1.0,
    memory: Any = None,
) -> GridForecast:  # fmt: skip
    """The old name of `Forecaster(workload, target).at(grid)`."""
    f = _forecaster(workload, cluster, model, host_factor).at(grid)
    reasons: Any = {int(grid.precision[f.why == code][0]): text for code, text in enumerate(f.reasons) if code}
    return GridForecast(
        f.forecaster, grid, f.step_ms, f.parts, f.exposed, f.memory, f.fits, f.clash, f.uneven, f.why, reasons
    )


def rank_times(
    operators: Operators, batches: Floats, precision: Precision, device: Device, model: Model, host_factor: float,
    channels_last: bool, compiled: bool,
) -> RankTimes | str:  # fmt: skip
    """The old name of `KernelModel.rank_times`, on one device."""
    kernels = FittedKernels(None, host_factor)
    return kernels.rank_times(KernelTable(operators), batches, device, precision, channels_last, compiled)


def spread_of(
    step: StepTime, operators: Operators, times: KernelTimes, execution: Execution, cluster: Cluster
) -> Spread:
    """The old name of `class_spread`."""
    table = RankTable(operators, None)
    return class_spread(run_class(step, execution, times.device_s, table.grouped, table.half), cluster.device)


def grid_from(base: Execution, **varied: Any) -> Grid:
    """The old name of `Grid.vary`; `world_size` stands for processes on one node."""
    if "world_size" in varied:
        varied = {"nnodes": 1, "nproc_per_node": varied.pop("world_size"), **varied}
    return Grid.vary(base, **varied)


def execution_at(grid: Grid, i: int, base: Execution, cluster: Cluster) -> Execution:
    """The old name of `Grid.execution`."""
    columns: dict[str, Any] = {
        **grid.at([i])._columns,
        "nnodes": cluster.nodes,
        "nproc_per_node": cluster.devices_per_node,
    }
    return Grid.vary(base, **columns).execution(0)


class BatchCurve(NamedTuple):
    """Step times in milliseconds with the ends of their intervals, peak memory in GiB, and whether it fits, n each."""

    step_ms: Floats
    low_ms: Floats
    high_ms: Floats
    allocated_gib: Floats
    fits: Any


def batch_curve(
    workload: Workload, execution: Execution, cluster: Cluster, batches: Sequence[int], model: Model = None
) -> BatchCurve | str:
    """The old name of `Forecaster.over_batches`."""
    f = _forecaster(workload, cluster, model).over_batches(execution, batches)
    reason = next((f.reason(i) for i in range(len(f)) if f.reason(i)), "")
    return reason or BatchCurve(f.step_ms, f.low_ms, f.high_ms, f.memory.allocated_gib, f.fits)


def jumps_of(
    workload: Workload, execution: Execution, device: Device, batches: Sequence[int], step_ms: Sequence[float]
) -> tuple[Jump, ...]:
    """The old name of `Forecaster.jumps`."""
    cluster = Cluster(device=device, nodes=execution.nnodes, devices_per_node=execution.nproc_per_node)
    forecaster = _forecaster(workload, cluster, None)
    return forecaster.jumps_in(execution, batches, np.asarray(step_ms))


def roofline(workload: Workload, execution: Execution, cluster: Cluster, model: Model = None) -> Roofline | None:
    """The old name of `Forecaster.roofline`."""
    return _forecaster(workload, cluster, model).roofline(execution)


def fewer_devices(
    workload: Workload, execution: Execution, cluster: Cluster, model: Model = None
) -> tuple[Forecast, ...]:
    """The old name of `Forecaster.fewer_devices`."""
    return _forecaster(workload, cluster, model).fewer_devices(execution)


CLASHES = shapes.CLASHES
