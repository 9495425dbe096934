"""The rows of a recorded step, alike ones together, as a table of operators."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainpace.trace.blocks import Layout
from trainpace.trace.recorder import BEFORE, Recorded
from trainpace.workload import MOST_SIZES, Operators


def numbers_of(recorded: Recorded) -> list[float]:
    """A row's numbers, and the bytes alive meanwhile: of gradients, of activations."""
    row = recorded.row
    sizes = [*map(float, row.dims), *([0.0] * (MOST_SIZES - len(row.dims)))]
    alive = (recorded.gradient_bytes, recorded.activation_bytes)
    return [row.flops, row.read_bytes, row.written_bytes, *sizes, *alive]


def alike(
    recorded: Sequence[Recorded], constant: np.ndarray, slope: np.ndarray, layout: Layout | None
) -> tuple[Operators, np.ndarray]:
    """Alike operators into one row with a count, in order of first appearance, and the first of each.

    Those inside and outside of the blocks are kept apart, and those of different roles.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, r in enumerate(recorded):
        place = layout and (r.origin.place > BEFORE, layout.role(r.row.kind, r.row.function, r.origin))
        numbers = (constant[i, :-2].tobytes(), slope[i, :-2].tobytes())
        key = (r.row.kind, r.row.function, r.phase, r.row.half, r.row.launches, place, *numbers)
        groups.setdefault(key, []).append(i)
    heads = np.array([members[0] for members in groups.values()])
    both = np.stack([constant[heads], slope[heads]], axis=-1)
    first = [recorded[i] for i in heads]
    operators = Operators(
        kind=tuple(r.row.kind for r in first), function=tuple(r.row.function for r in first),
        phase=tuple(r.phase for r in first), module=tuple(r.module for r in first),
        half=np.array([r.row.half for r in first]), launches=np.array([r.row.launches for r in first]),
        count=np.array([len(members) for members in groups.values()]),
        flops=both[:, 0], read_bytes=both[:, 1], written_bytes=both[:, 2], dims=both[:, 3 : 3 + MOST_SIZES],
    )  # fmt: skip
    return operators, heads
