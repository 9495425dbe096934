"""Discontinuities of step time over the batch size, and the operators that make them.

A step grows by about the same time with every sample. Where one more sample costs far more (another wave of thread
blocks, another tile, another algorithm), there is a jump: the batch before it is the better choice.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainpace.workload import Operators

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


def jump_causes(operators: Operators, growth: Floats) -> tuple[str, ...]:
    """The rows that grow most, by the seconds of their `growth` beyond proportion."""
    order = np.argsort(-growth)[:MOST_CAUSES]
    return tuple(
        f"{operators.module[j] or operators.kind[j]} ({operators.kind[j]}, {operators.phase[j]})"
        for j in order
        if growth[j] > 0.1 * max(growth[order[0]], 1e-12)
    )
