"""Operators against the roofs of a device (Williams, Waterman and Patterson 2009): work per byte, and the rate it reaches."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.hardware import Device
from trainpace.workload import Operators, at_batch

Floats = NDArray[np.float64]

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


def roofline_of(table: Operators, seconds: Floats, execution: Execution, device: Device) -> Roofline | None:
    """A rank's operators, which take `seconds`; None where a roof is not known."""
    peaks = [matrix_peak(device, execution.precision, bool(half)) for half in np.unique(table.half)]
    rates = [peak.flop_per_s for peak in peaks if isinstance(peak, Peak)]
    if not rates or device.memory_bandwidth_gb_per_s is None:
        return None
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
