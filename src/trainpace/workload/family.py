"""One trace for any sequence length: workloads of a model between lengths at which it was traced.

Every number of a step (FLOPs, bytes, sizes, bytes alive) is a polynomial of degree 2 at most in the length, as long as the same
operators run. Recordings at three lengths give the polynomial; a fourth, which is as long or as short as any that is asked for,
shows that it holds. Where it does not (a sliding window that begins to matter in between, say) there is no family. Numbers are
whole, so that what comes out is the trace at that length to the last bit.

A model that fills its sequences up to whole chunks (Mamba-2 to 256 tokens) has one polynomial at multiples of the chunk and
others between them. A family therefore speaks only for lengths as far apart as the traced ones are: in steps of the greatest
common divisor of the differences between them.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.workload.recorded_operators import BlockSizes, Recording, together
from trainpace.workload.workload import Form, Workload

GRID = 32
"""Lengths of a family differ by multiples of it: memory-efficient attention keeps sums of 32 queries at a time, the last ones
filled up (kAlignLSE in ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)."""
MEMBERS = 4
"""Lengths that are traced for a family: three for the polynomials, and one to check them."""
TOLERANCE = 1e-12, 1e-6
"""Relative and absolute, for the few numbers that are not whole: rows that are divided evenly among experts."""
_SHARED = ("kind", "function", "phase", "module", "role")
_SAME = ("half", "launches", "inside")

Traced = tuple[Workload, Mapping[Form, Recording]]
"""A workload, and the recordings that its forms were made of."""


class Family(Record):
    """Workloads of one model at lengths from `least` to `most`, in steps of `step` tokens.

    lengths: of `recordings`, of which every form has one a length. first: the workload at the first of them; sample_bytes: at
    each of them.
    """

    least: int
    most: int
    step: int
    lengths: tuple[int, ...]
    first: Workload
    sample_bytes: tuple[float, ...]
    recordings: dict[str, tuple[Recording, ...]]

    def holds(self, length: int) -> bool:
        return self.least <= length <= self.most and (length - self.least) % self.step == 0

    @property
    def size(self) -> int:
        """How many lengths it holds."""
        return (self.most - self.least) // self.step + 1

    def at(self, length: int) -> Workload:
        """The workload at a length that it holds."""
        forms = {
            name: _between(some, self.lengths, length).form()
            for name, some in self.recordings.items()
        }
        sample_bytes = _polynomial(
            [np.array(size) for size in self.sample_bytes], self.lengths, length
        )
        return replace(
            self.first,
            sample=_sample(self.first, length),
            sequence_length=length,
            sample_bytes=float(sample_bytes),
            forms=forms,
        )


def points_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Those of ascending lengths at which a family of them is traced: the ends, and two between."""
    last = len(lengths) - 1
    return tuple(dict.fromkeys(lengths[round(last * i / (MEMBERS - 1))] for i in range(MEMBERS)))


def family_of(traced: Mapping[int, Traced]) -> Family | None:
    """The family of as many traces as MEMBERS, by their lengths; None where they are not of one."""
    lengths = sorted(traced)
    if len(lengths) != MEMBERS or len({length % GRID for length in lengths}) > 1:
        return None
    *known, checked = (
        lengths[0],
        lengths[-1],
        lengths[2],
        lengths[1],
    )  # a threshold within the range shows in one of them
    heads = [replace(traced[length][0], forms={}) for length in lengths]
    if any(
        _aside(head) != _aside(heads[0]) or head.sample != _sample(heads[0], head.sequence_length)
        for head in heads
    ):
        return None
    first = traced[known[0]][0]
    recordings: dict[str, tuple[Recording, ...]] = {}
    for form in first.forms:
        some = [traced[length][1][form] for length in known]
        there = traced[checked][1][form]
        if any(_structure(one) != _structure(some[0]) for one in (*some[1:], there)):
            return None
        if not _agree(_between(some, known, checked), there):
            return None
        numbers = np.concatenate([one.numbers.reshape(len(one.kind), -1) for one in some], axis=1)
        recordings[form] = tuple(together(one, numbers) for one in some)
    return Family(
        least=lengths[0],
        most=lengths[-1],
        step=math.gcd(*(length - lengths[0] for length in lengths)),
        lengths=tuple(known),
        first=first,
        sample_bytes=tuple(traced[length][0].sample_bytes for length in known),
        recordings=recordings,
    )


def _sample(workload: Workload, length: int | None) -> str:
    """The words for a sample of that length."""
    return re.sub(rf"\b{workload.sequence_length}\b", str(length), workload.sample)


def _aside(workload: Workload) -> Workload:
    """What has to be the same at every length."""
    return replace(workload, sample="", sequence_length=None, sample_bytes=0.0)


def _structure(r: Recording) -> tuple[Any, ...]:
    blocks = (
        None
        if r.blocks is None
        else (r.blocks.fixed, r.blocks.working.shape, r.blocks.after_working.shape)
    )
    columns = [getattr(r, name).tobytes() for name in (*_SAME, "order")]
    return *(getattr(r, name) for name in _SHARED), *columns, r.numbers.shape, r.alive.shape, blocks


def _arrays(r: Recording) -> list[np.ndarray]:
    blocks = [] if r.blocks is None else [r.blocks.sizes, r.blocks.working, r.blocks.after_working]
    return [r.numbers, r.alive, np.array(r.states), *blocks]


def _between(some: Sequence[Recording], lengths: Sequence[int], length: int) -> Recording:
    columns = zip(*map(_arrays, some), strict=True)
    numbers, alive, states, *sizes = (_polynomial(column, lengths, length) for column in columns)
    blocks = some[0].blocks
    if blocks is not None:
        blocks = BlockSizes(
            fixed=blocks.fixed, sizes=sizes[0], working=sizes[1], after_working=sizes[2]
        )
    parameters, optimizer, paged, frozen = states.tolist()
    return replace(
        some[0],
        numbers=numbers,
        alive=alive,
        states=(parameters, optimizer, paged, frozen),
        blocks=blocks,
    )


def _polynomial(values: Sequence[np.ndarray], lengths: Sequence[int], length: int) -> np.ndarray:
    """The value at a length of the polynomial through the values at three others (Newton's divided differences).

    Coefficients are whole numbers or halves of them, so that nothing is rounded below 2^53, or below 2^63 where a long double
    has the digits for it.
    """
    x0, x1, x2 = (np.longdouble(x) for x in lengths)
    y0, y1, y2 = (np.asarray(value, dtype=np.longdouble) for value in values)
    slope, next_slope = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (next_slope - slope) / (x2 - x0)
    at = np.longdouble(length)
    result: np.ndarray = np.asarray(y0 + (at - x0) * (slope + (at - x1) * curve), dtype=np.float64)
    return result


def _agree(expected: Recording, found: Recording) -> bool:
    relative, absolute = TOLERANCE
    pairs = zip(_arrays(expected), _arrays(found), strict=True)
    return all(np.allclose(a, b, rtol=relative, atol=absolute) for a, b in pairs)


class Lengths(Record):
    """Workloads of one model at several sequence lengths: those that were traced, and families that hold the others."""

    traced: tuple[Workload, ...]
    families: tuple[Family, ...] = ()

    def at(self, length: int) -> Workload:
        for workload in self.traced:
            if workload.sequence_length == length:
                return workload
        return next(family for family in self.families if family.holds(length)).at(length)


def cover(lengths: Sequence[int], trace: Callable[[int], Traced]) -> Lengths:
    """Traces as few of these lengths as tell all of them.

    Where four of them make no family, those below and those above the middle are tried apart; four or fewer are all traced. What
    a family leaves out, because its lengths are further apart, is tried among itself.
    """
    traced: dict[int, Traced] = {}
    families: list[Family] = []
    left = [
        [n for n in lengths if n % GRID == rest] for rest in sorted({n % GRID for n in lengths})
    ]
    while left:
        some = sorted(left.pop())
        if not some:
            continue
        points = points_of(some)
        for length in points:
            if length not in traced:
                traced[length] = trace(length)
        family = family_of({length: traced[length] for length in points})
        if family is not None:
            families.append(family)
            left += [[n for n in some if n not in traced and not family.holds(n)]]
        elif len(some) > MEMBERS:
            left += [some[: len(some) // 2], some[len(some) // 2 :]]
    return Lengths(
        traced=tuple(traced[length][0] for length in sorted(traced)), families=tuple(families)
    )
