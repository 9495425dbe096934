"""A workload as other software would run it than the torch of today that it was traced under.

Operators of the trace are exchanged for others that do the same work, and the bytes that are kept between them follow; nothing is
traced again. What a step computes for its loss stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.workload import MOST_SIZES, Blocks, Floats, MemoryProfile, Operators, TracedForm

Pair = Floats
"""A size that is affine in the batch size: (constant, per sample)."""


def times(*sizes: Pair | float) -> Pair | None:
    """The product of sizes, or None where several of them grow with the batch."""
    constant, slope = 1.0, 0.0
    for size in sizes:
        c, s = (
            (float(size), 0.0)
            if isinstance(size, float | int)
            else (float(size[0]), float(size[1]))
        )
        if slope and s:
            return None
        constant, slope = constant * c, constant * s + slope * c
    return np.array([constant, slope])


def fixed(size: float) -> Pair:
    """A size that does not depend on the batch."""
    return np.array([size, 0.0])


class Part(NamedTuple):
    """`each` operators of one kind in the place of one of the trace, whose phase, module and role they take over.

    flops, read_bytes, written_bytes and the sizes `dims`, in the order of the kind's, are of one operator.
    """

    kind: str
    function: str
    half: bool
    flops: Pair
    read_bytes: Pair
    written_bytes: Pair
    dims: tuple[Pair, ...]
    each: int = 1
    launches: int = 1


def passes(
    kind: str,
    function: str,
    half: bool,
    elements: Pair,
    read: Pair,
    written: Pair,
    extent: float = 0.0,
    each: int = 1,
    also_in: Pair | None = None,
) -> Part:
    """An operator that moves bytes: `elements` come out, and as many go in, with those of its other operands (`also_in`)."""
    into = elements if also_in is None else elements + also_in
    return Part(
        kind, function, half, elements, read, written, (into, elements, fixed(extent)), each
    )


def exchanged(form: TracedForm, parts: Mapping[int, Sequence[Part]]) -> TracedForm:
    """The form with other operators in the place of some rows; an empty sequence leaves a row out."""
    if not parts:
        return form
    old, blocks = form.operators, form.blocks
    picks: list[tuple[int, Part | None]] = []
    for i in range(len(old)):
        picks += [(i, part) for part in parts[i]] if i in parts else [(i, None)]
    rows = np.array([i for i, _ in picks])
    each = np.array([1 if part is None else part.each for _, part in picks])
    columns = {name: np.array(getattr(old, name)[rows]) for name in ("half", "launches")}
    wide = {
        name: getattr(old, name)[rows].astype(np.float64)
        for name in ("flops", "read_bytes", "written_bytes", "dims")
    }
    kind, function = [old.kind[i] for i in rows], [old.function[i] for i in rows]
    for position, (_, part) in enumerate(picks):
        if part is None:
            continue
        kind[position], function[position] = part.kind, part.function
        columns["half"][position], columns["launches"][position] = part.half, part.launches
        for name in ("flops", "read_bytes", "written_bytes"):
            wide[name][position] = getattr(part, name)
        wide["dims"][position] = np.zeros((MOST_SIZES, 2))
        wide["dims"][position, : len(part.dims)] = np.reshape(part.dims, (-1, 2))
    operators = Operators(
        kind=tuple(kind),
        function=tuple(function),
        phase=tuple(old.phase[i] for i in rows),
        module=tuple(old.module[i] for i in rows),
        count=old.count[rows] * each,
        **columns,
        **wide,
    )
    if blocks is not None:
        blocks = replace(
            blocks,
            operator_counts=blocks.operator_counts[rows] * each,
            roles=tuple(blocks.roles[i] for i in rows),
        )
    return replace(form, operators=operators, blocks=blocks)


def keeping(
    memory: MemoryProfile, blocks: Blocks | None, kept: Pair, at_once: Pair
) -> MemoryProfile:
    """The profile with `kept` more bytes that all layers together keep for the backward pass (fewer where it is below 0), and
    `at_once` more at every moment of the passes.

    How much of `kept` is alive at a moment follows from the activations that are: all of it where they are as many as the blocks
    keep, less as the backward pass uses them up.
    """

    def with_more(rows: Floats) -> Floats:
        if not rows.size:
            return rows
        rows = rows.astype(np.float64)
        slopes = rows[:, -1]
        most = slopes.max() if blocks is None else blocks.count * blocks.saved_bytes[1]
        alive = np.clip(slopes / max(most, 1.0), 0.0, 1.0)
        more = alive[:, None] * kept + (slopes > 0)[:, None] * at_once
        rows[:, -2:] = np.maximum(rows[:, -2:] + more, 0.0)
        return rows

    return replace(memory, peaks=with_more(memory.peaks), moments=with_more(memory.moments))
