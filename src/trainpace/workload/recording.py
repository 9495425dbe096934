"""A recorded step, and workloads at sequence lengths between those that were traced.

A recording holds every operator in order, with each number affine in the batch size. From it follow
the table in which alike operators share a row, the moments that can be the peak of memory, and the
blocks. It needs no torch, so a workload at another length can be computed wherever it is read.

Every number of a step (FLOPs, bytes, sizes, bytes alive) is a polynomial of degree 2 at most in the
sequence length, as long as the same operators run. Recordings at three lengths give the polynomial.
A fourth, at the end of the range, checks it. If it fails (a sliding window begins to matter in
between, for example), there is no family. The numbers are whole, so the result equals a trace at
that length to the last bit.

A model that pads its sequences to whole chunks (Mamba-2 to 256 tokens) has one polynomial at
multiples of the chunk and others in between. A family therefore holds only lengths in steps of the
greatest common divisor of the differences between its traced lengths.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.workload.workload import (
    PHASES,
    Blocks,
    Floats,
    Form,
    MemoryProfile,
    Operators,
    Role,
    TracedForm,
    Workload,
)

BATCHES = (2, 3, 5)
"""Batch sizes of the three traced steps. At size 1 torch drops dimensions and copies."""
MOMENTS = 64
"""Moments of a step that a workload stores for charts, including the peaks for small and large
batches."""
READ = slice(1, 3)
"""Columns of bytes read and written. A row has FLOPs, both, then its sizes."""
GRADIENTS, ACTIVATIONS, A_SAMPLE = range(3)
"""The columns of `Recording.alive`."""
BLOCK_BYTES = (
    "input_bytes",
    "saved_bytes",
    "sharded_saved_bytes",
    "attention_saved_bytes",
    "working_bytes",
    "outside_saved_bytes",
    "after_saved_bytes",
    "after_working_bytes",
    "dispatched_bytes",
    "expert_saved_bytes",
)
"""Fields of `Blocks` in bytes. Those that end in working_bytes are peaks of several moments."""


class BlockSizes(Record):
    """Sizes of the repeated blocks.

    Attributes:
        fixed: Fields of `Blocks` that are neither bytes nor rows.
        sizes: Bytes at the first two of BATCHES, 2 x the fields of `BLOCK_BYTES`. 0 for working
            bytes.
        working, after_working: Working bytes, 2 x moments.
    """

    fixed: dict[str, int | str]
    sizes: np.ndarray
    working: np.ndarray
    after_working: np.ndarray


class Recording(Record):
    """The n calls of a step (g distinct ones), and the bytes alive at each.

    Attributes:
        kind, function, phase, module, half, launches: Of the g different calls.
        inside: True for calls in the repeated blocks.
        role: `Role` of the calls; empty without blocks.
        numbers: g x 19 x 2. FLOPs, bytes read, bytes written and sizes, each with its constant and
            its slope over the batch size.
        order: Index of each of the n calls among the g.
        alive: n x 3. Bytes of gradients, of activations, and of activations per sample.
        states: Bytes of parameters, optimizer states, paged states and frozen parameters.
        blocks: Sizes of the repeated blocks.
    """

    kind: tuple[str, ...]
    function: tuple[str, ...]
    phase: tuple[str, ...]
    module: tuple[str, ...]
    half: np.ndarray
    launches: np.ndarray
    inside: np.ndarray
    role: tuple[Role, ...]
    numbers: np.ndarray
    order: np.ndarray
    alive: np.ndarray
    states: tuple[float, float, float, float]
    blocks: BlockSizes | None = None

    def form(self) -> TracedForm:
        """Return the form of the workload."""
        parameters, optimizer, paged, frozen = self.states
        memory = MemoryProfile(
            parameter_bytes=parameters,
            optimizer_bytes=optimizer,
            paged_bytes=paged,
            frozen_bytes=frozen,
            peaks=_peaks(*self.alive.T),
            moments=self._moments(),
        )
        operators, first = self.operators()
        blocks = None
        if self.blocks is not None:
            blocks = _blocks(
                self.blocks, self.inside[first], tuple(self.role[i] for i in first), operators.count
            )
        return TracedForm(operators=operators, memory=memory, blocks=blocks)

    def operators(self) -> tuple[Operators, np.ndarray]:
        """Return the table, and the first operator of each of its rows."""
        heads, counts = self._alike()
        first = self.order[heads]
        words: dict[str, Any] = {
            name: tuple(getattr(self, name)[i] for i in first)
            for name in ("kind", "function", "phase", "module")
        }
        numbers = self.numbers[first]
        table = Operators(
            **words,
            half=self.half[first],
            launches=self.launches[first],
            count=counts,
            flops=numbers[:, 0],
            read_bytes=numbers[:, 1],
            written_bytes=numbers[:, 2],
            dims=numbers[:, 3:],
        )
        return table, first

    def _alike(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (first call, calls) of each row: alike operators in order of first appearance.

        Operators inside and outside the blocks, or with different roles, have rows of their own.
        """
        same = _numbered([key[:3] + key[4:] for key in self.keys()])
        _, heads, counts = np.unique(same[self.order], return_index=True, return_counts=True)
        by_appearance = np.argsort(heads)
        return heads[by_appearance], counts[by_appearance]

    def keys(self) -> list[tuple[Any, ...]]:
        """Return everything by which the g operators differ: the module comes fourth."""
        places: Sequence[Any] = [None] * len(self.kind)
        if self.role:
            places = list(zip(self.inside.tolist(), self.role, strict=True))
        numbers = [row.tobytes() for row in self.numbers]
        columns = (self.kind, self.function, self.phase, self.module)
        plain = (self.half.tolist(), self.launches.tolist(), places, numbers)
        return list(zip(*columns, *plain, strict=True))

    def _moments(self) -> np.ndarray:
        """Return the peak of each stretch of operators, placed in its phase by bytes moved."""
        codes = np.array([PHASES.index(phase) for phase in self.phase])
        phase = codes[self.order]
        at_second = self.numbers[:, :, 0] + self.numbers[:, :, 1] * BATCHES[1]
        moved = at_second[:, READ].sum(axis=1)[self.order]
        a = self.alive
        total = a[:, GRADIENTS] + a[:, ACTIVATIONS] + a[:, A_SAMPLE] * np.array([[1.0], [1e6]])
        moments = {0, len(phase) - 1, *total.argmax(axis=1).tolist()}
        for stretch in np.array_split(np.arange(len(phase)), MOMENTS - 4):
            if len(stretch):
                moments.add(int(stretch[total[1, stretch].argmax()]))
        rows = np.array(sorted(moments))
        share = np.zeros(len(phase))
        for code in np.unique(phase):
            inside = phase == code
            share[inside] = np.cumsum(moved[inside]) / max(moved[inside].sum(), 1.0)
        alive = [a[rows, GRADIENTS], a[rows, ACTIVATIONS], np.maximum(a[rows, A_SAMPLE], 0.0)]
        return np.stack([phase[rows].astype(float), share[rows], *alive], axis=1)


def _numbered(keys: Sequence[Any]) -> np.ndarray:
    """Return a number for each key, equal for equal keys, in order of first appearance."""
    number_of: dict[Any, int] = {}
    return np.array([number_of.setdefault(key, len(number_of)) for key in keys])


def together(recording: Recording, numbers: Floats) -> Recording:
    """Return the recording with equal operators stored once.

    `numbers` (n x any) are further numbers by which operators may differ.
    """
    r = recording
    more = [row.tobytes() for row in numbers]
    same = _numbered(list(zip(r.keys(), more, strict=True)))
    _, firsts = np.unique(same, return_index=True)
    words: dict[str, Any] = {
        name: tuple(getattr(r, name)[i] for i in firsts)
        for name in ("kind", "function", "phase", "module", *(["role"] if r.role else []))
    }
    columns = {name: getattr(r, name)[firsts] for name in ("half", "launches", "inside", "numbers")}
    return msgspec.structs.replace(r, **words, **columns, order=same[r.order])


def _peaks(gradient: np.ndarray, constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return moments on the upper envelope of total bytes over the batch size.

    Other moments are never the peak. One moment has all gradients, which tells their size.
    """
    slope = np.maximum(slope, 0.0)
    total = gradient + constant
    envelope: list[int] = []
    for i in sorted(range(len(total)), key=lambda i: (-slope[i], -total[i])):
        if not envelope or total[i] > total[envelope[-1]]:
            envelope.append(i)
    if gradient[envelope].max() < gradient.max():
        envelope.append(max(range(len(total)), key=lambda i: (gradient[i], total[i])))
    return np.stack([gradient[envelope], constant[envelope], slope[envelope]], axis=1)


def _blocks(
    blocks: BlockSizes, inside: np.ndarray, roles: tuple[Role, ...], counts: np.ndarray
) -> Blocks:
    sizes = blocks.sizes.astype(np.float64)
    for name, moments in (
        ("working_bytes", blocks.working),
        ("after_working_bytes", blocks.after_working),
    ):
        sizes[:, BLOCK_BYTES.index(name)] = np.max(moments, axis=1, initial=0.0)
    # a maximum over moments is convex in the batch size, so its line may cross zero
    slope = np.maximum((sizes[1] - sizes[0]) / (BATCHES[1] - BATCHES[0]), 0.0)
    constant = np.maximum(sizes[0] - slope * BATCHES[0], 0.0)
    pairs = [(float(c), float(s)) for c, s in zip(constant, slope, strict=True)]
    fields: dict[str, Any] = {**blocks.fixed, **dict(zip(BLOCK_BYTES, pairs, strict=True))}
    return Blocks(**fields, operator_counts=np.where(inside, counts, 0), roles=roles)


GRID = 32
"""Lengths of a family differ by multiples of this. Memory-efficient attention stores sums of 32
queries at a time (kAlignLSE in ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h).
"""
MEMBERS = 4
"""Traced lengths of a family: three for the polynomials, and one to check them."""
TOLERANCE = 1e-12, 1e-6
"""Relative and absolute tolerance. Rows divided evenly among experts are not whole numbers."""
_SHARED = ("kind", "function", "phase", "module", "role")
_SAME = ("half", "launches", "inside")

Traced = tuple[Workload, Mapping[Form, Recording]]
"""A workload, and the recordings of its forms."""


class Family(Record):
    """Workloads of one model at lengths from `least` to `most`, in steps of `step` tokens.

    Attributes:
        lengths: Lengths of the recordings.
        first: Workload at the first of `lengths`.
        sample_bytes: Bytes per sample at each of `lengths`.
        recordings: Recordings of each form at `lengths`.
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
        """Number of lengths in the family."""
        return (self.most - self.least) // self.step + 1

    def at(self, length: int) -> Workload:
        """Return the workload at a length in the family."""
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
    """Return the lengths at which a family is traced: both ends, and two in between."""
    last = len(lengths) - 1
    return tuple(dict.fromkeys(lengths[round(last * i / (MEMBERS - 1))] for i in range(MEMBERS)))


def family_of(traced: Mapping[int, Traced]) -> Family | None:
    """Return the family of MEMBERS traces by length, or None if they are not one."""
    lengths = sorted(traced)
    if len(lengths) != MEMBERS or len({length % GRID for length in lengths}) > 1:
        return None
    # a threshold within the range shows in one of them
    known, checked = (lengths[0], lengths[-1], lengths[2]), lengths[1]
    heads = [replace(traced[length][0], forms={}) for length in lengths]
    if not all(_is_alike(head, heads[0]) for head in heads):
        return None
    first = traced[known[0]][0]
    recordings = {}
    for form in first.forms:
        some = [traced[length][1][form] for length in known]
        if not _is_between(some, known, traced[checked][1][form], checked):
            return None
        numbers = np.concatenate([one.numbers.reshape(len(one.kind), -1) for one in some], axis=1)
        recordings[str(form)] = tuple(together(one, numbers) for one in some)
    return Family(
        least=lengths[0],
        most=lengths[-1],
        step=math.gcd(*(length - lengths[0] for length in lengths)),
        lengths=known,
        first=first,
        sample_bytes=tuple(traced[length][0].sample_bytes for length in known),
        recordings=recordings,
    )


def _is_alike(head: Workload, first: Workload) -> bool:
    """Return True if workloads differ only in what follows from the length."""
    return (
        head.sample == _sample(first, head.sequence_length)
        and replace(
            first,
            sample=head.sample,
            sequence_length=head.sequence_length,
            sample_bytes=head.sample_bytes,
        )
        == head
    )


def _is_between(
    some: Sequence[Recording], lengths: Sequence[int], found: Recording, length: int
) -> bool:
    """Return True if a recording is what the others predict at its length."""
    if any(_structure(one) != _structure(some[0]) for one in (*some[1:], found)):
        return False
    relative, absolute = TOLERANCE
    pairs = zip(_arrays(_between(some, lengths, length)), _arrays(found), strict=True)
    return all(np.allclose(a, b, rtol=relative, atol=absolute) for a, b in pairs)


def _sample(workload: Workload, length: int | None) -> str:
    """Return the description of a sample of that length."""
    return re.sub(rf"\b{workload.sequence_length}\b", str(length), workload.sample)


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
    """Evaluate the polynomial through values at three lengths (Newton's divided differences).

    Coefficients are whole or half numbers, so nothing is rounded below 2^53, or below 2^63 if a
    long double has the digits.
    """
    x0, x1, x2 = (np.longdouble(x) for x in lengths)
    y0, y1, y2 = (np.asarray(value, dtype=np.longdouble) for value in values)
    slope, next_slope = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (next_slope - slope) / (x2 - x0)
    at = np.longdouble(length)
    result: np.ndarray = np.asarray(y0 + (at - x0) * (slope + (at - x1) * curve), dtype=np.float64)
    return result


class Lengths(Record):
    """Workloads of one model at several lengths: traced ones, and families with the others."""

    traced: tuple[Workload, ...]
    families: tuple[Family, ...] = ()

    def at(self, length: int) -> Workload:
        for workload in self.traced:
            if workload.sequence_length == length:
                return workload
        return next(family for family in self.families if family.holds(length)).at(length)


def cover(lengths: Sequence[int], trace: Callable[[int], Traced]) -> Lengths:
    """Trace as few lengths as determine all of them.

    If four lengths make no family, the lower and upper halves are tried separately; four or fewer
    are all traced. Lengths that a family skips, because they lie off its steps, are tried next.
    """
    traced: dict[int, Traced] = {}
    families: list[Family] = []
    rests = sorted({n % GRID for n in lengths})
    todo = [sorted(n for n in lengths if n % GRID == rest) for rest in rests]
    while todo:
        some = todo.pop()
        points = points_of(some)
        for length in points:
            if length not in traced:
                traced[length] = trace(length)
        family = family_of({length: traced[length] for length in points})
        if family is not None:
            families.append(family)
            skipped = [n for n in some if n not in traced and not family.holds(n)]
            todo += [skipped] if skipped else []
        elif len(some) > MEMBERS:
            todo += [some[: len(some) // 2], some[len(some) // 2 :]]
    workloads = tuple(traced[length][0] for length in sorted(traced))
    return Lengths(traced=workloads, families=tuple(families))
