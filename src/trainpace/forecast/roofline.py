"""Operators against the roofs of a device (Williams, Waterman and Patterson 2009): work per byte, and the rate it reaches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainpace.execution import Execution
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.forecast.sharding import rank_operators
from trainpace.forecast.stages import rank_times
from trainpace.forecast.timings import MachineModel
from trainpace.hardware.cluster import Cluster
from trainpace.workload import Workload, at_batch

MOST_OPERATORS = 40


class RooflinePoint(NamedTuple):
    """A row of alike operators: FLOP/byte, TFLOP/s as forecast, milliseconds of a step."""

    name: str
    intensity: float
    tflops: float
    time_ms: float


class Roofline(NamedTuple):
    """The heaviest operators that do arithmetic, heaviest first, under the datasheet's roofs. `share`: of the device's time, what
    these operators take."""

    points: tuple[RooflinePoint, ...]
    peak_tflops: float
    bandwidth_gb_per_s: float
    share: float


def roofline(
    workload: Workload, execution: Execution, cluster: Cluster, model: MachineModel | None = None
) -> Roofline | None:
    """Of one rank; None where a roof is not known, or the device cannot compute this."""
    form, device = workload.form(execution.precision), cluster.device
    operators = rank_operators(form.operators, form.blocks, execution.tp, execution.cp, execution.sequence_parallel)
    peaks = [matrix_peak(device, execution.precision, bool(half)) for half in np.unique(operators.half)]
    rates = [peak.flop_per_s for peak in peaks if isinstance(peak, Peak)]
    if not rates or device.memory_bandwidth_gb_per_s is None:
        return None
    timed = rank_times(
        operators, np.array([float(execution.micro_batch)]), execution.precision, device, model, 1.0, execution.channels_last,
        execution.compile,
    )  # fmt: skip
    if isinstance(timed, str):
        return None
    # the table after fusion by torch.compile, where there is any
    table, seconds = timed.operators, np.broadcast_arrays(*timed.times)[0][0]
    count = table.count
    flops = at_batch(table.flops, execution.micro_batch) * count
    moved = (
        at_batch(table.read_bytes, execution.micro_batch) + at_batch(table.written_bytes, execution.micro_batch)
    ) * count
    works = (flops > 0) & (moved > 0) & (seconds > 0)
    heaviest = [int(i) for i in np.argsort(-seconds) if works[i]][:MOST_OPERATORS]
    points = tuple(
        RooflinePoint(
            name=f"{table.module[i] or table.function[i]}, {table.kind[i]}, {table.phase[i]}",
            intensity=float(flops[i] / moved[i]), tflops=float(flops[i] / seconds[i] / 1e12), time_ms=1e3 * float(seconds[i]),
        )
        for i in heaviest
    )  # fmt: skip
    if not points:
        return None
    bandwidth = device.memory_bandwidth_gb_per_s.value
    return Roofline(points, max(rates) / 1e12, bandwidth, float(seconds[heaviest].sum() / seconds.sum()))
