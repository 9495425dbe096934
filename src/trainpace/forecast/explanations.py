"""What explains a forecast: its heaviest operators, the roofline, memory over the course of a step. The roofline sets operators
against the roofs of a device (Williams, Waterman and Patterson 2009): work per byte, and the rate it reaches.
"""

from typing import NamedTuple

import numpy as np

from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Memory, OperatorShare, StepTime
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.forecast.roles import alike
from trainpace.workload import CONVOLUTION_KINDS, Counts, Floats, Operators, TracedForm, at_batch

MOST_HEAVIEST = 10
MOST_POINTS = 40
AGREES = 0.02
"""Share of the forecast's peak by which a curve's highest moment may differ from it; beyond, the curve is not shown."""


def heaviest(
    operators: Operators, times: KernelTimes, repeats: Counts
) -> tuple[OperatorShare, ...]:
    """The rows that take most device time in a step in which each runs `repeats` times, and what bounds each."""
    shares = []
    for i in np.argsort(-times.device_s * repeats)[:MOST_HEAVIEST]:
        device_s = float(times.device_s[i])
        if device_s <= 0:
            break
        bounds = {"compute": times.compute_s, "memory": times.memory_s, "launch": times.latency_s}
        shares.append(
            OperatorShare(
                module=operators.module[i],
                kind=operators.kind[i],
                phase=operators.phase[i],
                count=int(operators.count[i]),
                time_ms=1e3 * float(times.device_s[i] * repeats[i]),
                bound=max(bounds, key=lambda name: bounds[name][i]),  # type: ignore[arg-type]
                share_of_roof=max(float(times.compute_s[i]), float(times.memory_s[i])) / device_s,
            )
        )
    return tuple(shares)


class RooflinePoint(NamedTuple):
    """A row of alike operators: FLOP/byte, TFLOP/s as forecast, milliseconds of a step."""

    name: str
    intensity: float
    tflops: float
    time_ms: float


class Roofline(NamedTuple):
    """The heaviest operators that do arithmetic, heaviest first, under the datasheet's roofs; they take `share` of the device's
    time."""

    points: tuple[RooflinePoint, ...]
    peak_tflops: float
    bandwidth_gb_per_s: float
    share: float


def peak_flop_per_s(device: Device, operators: Operators, execution: Execution) -> float | None:
    """The rate of the fastest format that the operators use; None where no such rate is known."""
    matrix, convolution = operators.is_matrix, np.isin(operators.kind, CONVOLUTION_KINDS)
    used = set(zip(operators.half[matrix].tolist(), convolution[matrix].tolist(), strict=True)) or {
        (False, False)
    }
    peaks = [matrix_peak(device, execution.precision, *kind) for kind in used]
    return max((peak.flop_per_s for peak in peaks if isinstance(peak, Peak)), default=None)


def roofline_of(
    table: Operators,
    seconds: Floats,
    held: Floats,
    repeats: Counts,
    execution: Execution,
    device: Device,
) -> Roofline | None:
    """A rank's operators, each of which it has a share of (`held`, 0 to 1) that takes `seconds`, and runs `repeats` times a step;
    None where a roof is not known."""
    peak = peak_flop_per_s(device, table, execution)
    if peak is None or device.memory_bandwidth_gb_per_s is None:
        return None
    batch, count = execution.micro_batch, table.count
    flops = at_batch(table.flops, batch) * count * held
    moved = table.moved_bytes(batch) * count * held
    in_step = seconds * repeats
    works = (flops > 0) & (moved > 0) & (seconds > 0)
    rows = [int(i) for i in np.argsort(-in_step) if works[i]][:MOST_POINTS]
    points = tuple(
        RooflinePoint(
            name=(
                f"{alike(table.module[i], int(count[i])) or table.function[i]}, {table.kind[i]},"
                f" {table.phase[i]}"
            ),
            intensity=float(flops[i] / moved[i]),
            tflops=float(flops[i] / seconds[i] / 1e12),
            time_ms=1e3 * float(in_step[i]),
        )
        for i in rows
    )
    if not points:
        return None
    share = float(in_step[rows].sum() / in_step.sum())
    return Roofline(points, peak / 1e12, device.memory_bandwidth_gb_per_s.value, share)


class MemoryOverStep(NamedTuple):
    """GiB alive at ascending milliseconds of the last micro-step and the update; parameters and states stay all the time."""

    at_ms: Floats
    gradients_gib: Floats
    activations_gib: Floats
    parameters_gib: float
    optimizer_states_gib: float

    @property
    def total_gib(self) -> Floats:
        return (
            self.gradients_gib
            + self.activations_gib
            + self.parameters_gib
            + self.optimizer_states_gib
        )


def memory_over_step(
    form: TracedForm, execution: Execution, step: StepTime, memory: Memory
) -> MemoryOverStep | None:
    """The memory at the trace's moments; None where the execution has others (it shards, cuts or recomputes), or the trace has
    none.

    Within a phase a moment lies where the bytes moved up to it lie, which is nearly its time where memory traffic binds.
    """
    moments = form.memory.moments
    if (
        not len(moments)
        or execution.world_size != execution.data_parallel_size
        or execution.zero_stage
    ):
        return None
    m = execution.accumulation
    ends = np.cumsum([step.forward_ms / m, step.backward_ms / m, step.optimizer_ms])
    phase, starts = moments[:, 0].astype(int), np.concatenate([[0.0], ends[:-1]])
    at_ms = starts[phase] + (ends - starts)[phase] * np.clip(moments[:, 1], 0.0, 1.0)
    gradients = moments[:, 2]
    whole = float(form.memory.peaks[:, 0].max())
    if execution.accumulation > 1:
        gradients = np.full_like(gradients, whole)
    if execution.data_parallel_size > 1 and execution.engine != "data_parallel":
        gradients = gradients + whole  # the buckets of DDP
    activations = np.maximum(moments[:, 3] + moments[:, 4] * execution.micro_batch, 0.0)
    curve = MemoryOverStep(
        at_ms,
        gradients / BYTES_PER_GIB,
        activations / BYTES_PER_GIB,
        memory.parameters_gib,
        memory.optimizer_states_gib,
    )
    agrees = (
        abs(float(curve.total_gib.max()) - memory.allocated_gib) <= AGREES * memory.allocated_gib
    )
    return curve if agrees else None
