"""Discontinuities of step time over the batch size, and the operators that make them.

A step grows by about the same time with every sample. Where one more sample costs far more (another wave of thread
blocks, another tile, another algorithm), there is a jump: the batch before it is the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.rates import sustained_rates
from trainpace.hardware.device import Device
from trainpace.outcome import Jump
from trainpace.workload import Workload

Floats = NDArray[np.float64]

LEAST_SHARE = 0.02
"""A jump is at least this share of the step ..."""
LEAST_OVER_SLOPE = 3.0
"""... and this many times what a sample usually costs around it."""
WINDOW = 8
"""Samples on either side over which the usual cost is taken."""
MOST_CAUSES = 3


def find_jumps(batches: Sequence[int], step_ms: Floats) -> list[tuple[int, float]]:
    """(index of the first batch after the jump, milliseconds beyond the usual slope), for ascending batch sizes."""
    if len(batches) < 4:
        return []
    sizes = np.asarray(batches, dtype=float)
    slope = np.diff(step_ms) / np.diff(sizes)
    jumps = []
    for i, here in enumerate(slope):
        around = np.concatenate([slope[max(0, i - WINDOW) : i], slope[i + 1 : i + 1 + WINDOW]])
        usual = max(float(np.median(around)), 0.0)
        excess = (here - usual) * (sizes[i + 1] - sizes[i])
        if excess > LEAST_SHARE * step_ms[i] and here > LEAST_OVER_SLOPE * max(usual, 1e-9):
            jumps.append((i + 1, float(excess)))
    return jumps


def jumps_of(
    workload: Workload,
    execution: Execution,
    device: Device,
    batches: Sequence[int],
    step_ms: Sequence[float],
    constants: KernelConstants | None = None,
) -> tuple[Jump, ...]:
    """The jumps of forecast steps over ascending batch sizes, with the operators that grow most beyond proportion there."""
    found = find_jumps(batches, np.asarray(step_ms))
    if not found:
        return ()
    c = constants or fitted_constants()
    operators = workload.form(execution.precision).operators
    rates = sustained_rates(device, execution.precision, bool((~operators.half).any()), bool(operators.half.any()), c)
    assert not isinstance(rates, str), "steps were forecast at these rates"
    table = KernelTable(operators)
    jumps = []
    for i, excess in found:
        pair = np.asarray([batches[i - 1], batches[i]], dtype=float)[:, None]
        device_s = table.times(pair, rates, c, execution.channels_last, execution.compile).device_s
        growth = device_s[1] - device_s[0] * batches[i] / batches[i - 1]
        order = np.argsort(-growth)[:MOST_CAUSES]
        causes = tuple(
            f"{operators.module[j] or operators.kind[j]} ({operators.kind[j]}, {operators.phase[j]})"
            for j in order
            if growth[j] > 0.1 * max(growth[order[0]], 1e-12)
        )
        jumps.append(
            Jump(
                batch=batches[i],
                before_ms=float(step_ms[i - 1]),
                after_ms=float(step_ms[i]),
                excess_ms=excess,
                causes=causes,
            )
        )
    return tuple(jumps)
