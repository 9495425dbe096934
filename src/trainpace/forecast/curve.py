"""A step over many batch sizes at once, with intervals: what `forecast` gives one by one, for a picture that follows a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.executions import grid_from
from trainpace.forecast.grid import forecast_grid
from trainpace.forecast.intervals import spread_of
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.sharding import rank_operators
from trainpace.forecast.stages import rank_times
from trainpace.forecast.timings import MachineModel, machine_spread
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import STEP_PARTS, StepTime
from trainpace.workload import Workload

Floats = NDArray[np.float64]
MOST_AT_ONCE = 64


class BatchCurve(NamedTuple):
    """Step times in milliseconds with the ends of their intervals, peak memory in GiB, and whether it fits, n each."""

    step_ms: Floats
    low_ms: Floats
    high_ms: Floats
    allocated_gib: Floats
    fits: NDArray[np.bool_]


def batch_curve(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    batches: Sequence[int],
    model: MachineModel | KernelConstants | None = None,
) -> BatchCurve | str:
    """The same execution at every micro-batch of `batches`; or the reason why it has no times."""
    form = workload.form(execution.precision)
    found = forecast_grid(workload, execution, grid_from(execution, micro_batch=list(batches)), cluster, model)
    if found.reasons:
        return next(iter(found.reasons.values()))
    if found.clash.any():
        return "these sizes do not go together"
    sequence = execution.sequence_parallel and execution.tp > 1
    operators = rank_operators(form.operators, form.blocks, execution.tp, execution.cp, sequence)
    lows, highs = np.empty(len(batches)), np.empty(len(batches))
    for start in range(0, len(batches), MOST_AT_ONCE):
        some = np.asarray(batches[start : start + MOST_AT_ONCE], dtype=np.float64)
        timed = rank_times(
            operators, some, execution.precision, cluster.device, model, 1.0, execution.channels_last, execution.compile
        )
        if isinstance(timed, str):
            return timed
        whole = np.broadcast_arrays(*timed.times)
        for i in range(len(some)):
            at = start + i
            step = StepTime(**{name: float(found.parts[name][at]) for name in STEP_PARTS})
            times = KernelTimes(*(seconds[i] for seconds in whole))
            if isinstance(model, MachineModel):
                spread = machine_spread(model, times, timed.log_sd)
            else:
                spread = spread_of(step, operators, times, replace(execution, micro_batch=int(some[i])), cluster)
            lows[at], highs[at] = spread.low, spread.high
    return BatchCurve(
        found.step_ms, found.step_ms * lows, found.step_ms * highs, found.memory.allocated_gib, found.fits
    )
