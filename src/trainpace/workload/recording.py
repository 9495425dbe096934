"""Recorded steps, and workloads at sequence lengths between the traced ones.

A `Recording` lists every operator of a step in order. Each number is affine in the batch size.
`Recording.form` computes three things from it: a table in which equal operators share a row, the
moments that can be the memory peak, and the repeated blocks. The module does not import torch, so
workloads at other lengths can be computed without it.

A `Family` computes workloads at other sequence lengths. As long as the same operators run, every
number of a step (FLOPs, bytes, sizes, bytes alive) is a polynomial of degree 2 at most in the
sequence length. Recordings at three lengths determine the polynomial, and a fourth checks it. If
the check fails, for example because a sliding window starts to matter in between, the lengths are
not a family. The numbers are integers, so the result equals a trace at that length to the last bit.

Some models pad sequences to whole chunks (Mamba-2 to 256 tokens). They have one polynomial at
multiples of the chunk, and others in between. A family therefore only contains lengths in steps of
the greatest common divisor of the differences between its traced lengths.
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
"""Batch sizes of the three traced steps.

Size 1 is not used, because torch then drops dimensions and skips copies.
"""
MOMENTS = 64
"""Maximum number of moments of a step in a workload's memory chart.

They include the peaks for small and large batches.
"""
READ = slice(1, 3)
"""Columns of bytes read and bytes written in `Recording.numbers`."""
GRADIENTS, ACTIVATIONS, A_SAMPLE = range(3)
"""Columns of `Recording.alive`."""
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
"""Names of the fields of `Blocks` in bytes.

Fields that end in working_bytes are the maximum over several moments.
"""


class BlockSizes(Record):
    """Sizes of the repeated blocks at the first two of `BATCHES`.

    Attributes:
        fixed: Fields of `Blocks` that do not depend on the batch size.
        sizes: Bytes, of shape (2, number of `BLOCK_BYTES`). Working bytes are 0 here.
        working: Working bytes of a block at each moment, of shape (2, moments).
        after_working: Working bytes after the blocks at each moment, of shape (2, moments).
    """

    fixed: dict[str, int | str]
    sizes: np.ndarray
    working: np.ndarray
    after_working: np.ndarray


class Recording(Record):
    """Recorded step: n calls, of which g are distinct, and the bytes alive at each call.

    Attributes:
        kind: Kind of each distinct call.
        function: ATen name of each distinct call.
        phase: Phase of each distinct call.
        module: Module of each distinct call.
        half: True for each distinct call with arithmetic in 16 bits.
        launches: Kernels of each distinct call.
        inside: True for each distinct call in the repeated blocks.
        role: `Role` of each distinct call. Empty without blocks.
        numbers: Array of shape (g, 19, 2). FLOPs, bytes read, bytes written and 16 sizes, each as
            (constant, slope over the batch size).
        order: Index of the distinct call for each of the n calls.
        alive: Array of shape (n, 3). Bytes of gradients, constant bytes of activations, and bytes
            of activations per sample.
        states: Bytes of parameters, optimizer states, paged states and frozen parameters.
        blocks: Sizes of the repeated blocks, or None.
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
        """Return the operator table, memory profile and blocks of a workload."""
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
        """Return the operator table, and the index of the first distinct call of each row."""
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
        """Return (index of the first call, number of calls) for each row of the table.

        A row contains calls that differ in their module at most. Rows are in order of first
        appearance.
        """
        same = _numbered([key[:3] + key[4:] for key in self.keys()])
        _, heads, counts = np.unique(same[self.order], return_index=True, return_counts=True)
        by_appearance = np.argsort(heads)
        return heads[by_appearance], counts[by_appearance]

    def keys(self) -> list[tuple[Any, ...]]:
        """Return a tuple of all properties for each distinct call. The module is the fourth."""
        places: Sequence[Any] = [None] * len(self.kind)
        if self.role:
            places = list(zip(self.inside.tolist(), self.role, strict=True))
        numbers = [row.tobytes() for row in self.numbers]
        columns = (self.kind, self.function, self.phase, self.module)
        plain = (self.half.tolist(), self.launches.tolist(), places, numbers)
        return list(zip(*columns, *plain, strict=True))

    def _moments(self) -> np.ndarray:
        """Return the moments for the memory chart, as in `MemoryProfile.moments`.

        The step is split into stretches of operators, and each contributes its peak. The position
        of a moment within its phase is the share of bytes moved until then.
        """
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
    """Number the distinct keys in order of first appearance, and return the number of each key."""
    number_of: dict[Any, int] = {}
    return np.array([number_of.setdefault(key, len(number_of)) for key in keys])


def together(recording: Recording, numbers: Floats) -> Recording:
    """Return the recording with equal calls stored once.

    Args:
        recording: The recording.
        numbers: Further numbers by which calls may differ, of shape (calls, any).
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
    """Return the moments that are the memory peak at some batch size.

    They are the upper envelope of gradient bytes + constant + slope x batch size. A moment with all
    gradients is added if none of them has it, since the total size of gradients is read from it.

    Args:
        gradient: Bytes of gradients at each moment.
        constant: Constant bytes of activations at each moment.
        slope: Bytes of activations per sample at each moment.

    Returns:
        Array of shape (k, 3) with the three numbers of each moment.
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
    # the maximum over moments is convex in the batch size, so the fitted constant may be negative
    slope = np.maximum((sizes[1] - sizes[0]) / (BATCHES[1] - BATCHES[0]), 0.0)
    constant = np.maximum(sizes[0] - slope * BATCHES[0], 0.0)
    pairs = [(float(c), float(s)) for c, s in zip(constant, slope, strict=True)]
    fields: dict[str, Any] = {**blocks.fixed, **dict(zip(BLOCK_BYTES, pairs, strict=True))}
    return Blocks(**fields, operator_counts=np.where(inside, counts, 0), roles=roles)


GRID = 32
"""Divisor of the differences between the lengths of a family, in tokens.

Memory-efficient attention pads its saved sums to 32 queries (kAlignLSE in
ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h).
"""
MEMBERS = 4
"""Number of traced lengths of a family: three for the polynomials, and one to check them."""
TOLERANCE = 1e-12, 1e-6
"""Relative and absolute tolerance of the check. Tokens per expert are not always integers."""
_SHARED = ("kind", "function", "phase", "module", "role")
_SAME = ("half", "launches", "inside")

Traced = tuple[Workload, Mapping[Form, Recording]]
"""Pair of a workload and the recordings of its number formats."""


class Family(Record):
    """Workloads of one model at a range of sequence lengths.

    Attributes:
        least: Smallest length in tokens.
        most: Largest length in tokens.
        step: Difference between neighboring lengths in tokens.
        lengths: The three lengths of the recordings.
        first: Workload at the first of `lengths`.
        sample_bytes: Bytes per sample at each of `lengths`.
        recordings: {number format: recordings at `lengths`}.
    """

    least: int
    most: int
    step: int
    lengths: tuple[int, ...]
    first: Workload
    sample_bytes: tuple[float, ...]
    recordings: dict[str, tuple[Recording, ...]]

    def holds(self, length: int) -> bool:
        """Return True if a length belongs to the family."""
        return self.least <= length <= self.most and (length - self.least) % self.step == 0

    @property
    def size(self) -> int:
        """Number of lengths in the family."""
        return (self.most - self.least) // self.step + 1

    def at(self, length: int) -> Workload:
        """Return the workload at a length of the family."""
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
    """Return the lengths to trace for a family: both ends, and two in between."""
    last = len(lengths) - 1
    return tuple(dict.fromkeys(lengths[round(last * i / (MEMBERS - 1))] for i in range(MEMBERS)))


def family_of(traced: Mapping[int, Traced]) -> Family | None:
    """Return the family of `MEMBERS` traces.

    Args:
        traced: {length: traced workload}.

    Returns:
        The family, or None if the check fails or there are not `MEMBERS` lengths.
    """
    lengths = sorted(traced)
    if len(lengths) != MEMBERS or len({length % GRID for length in lengths}) > 1:
        return None
    # the checked length is the second of four, so a threshold in the range makes the check fail
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
    """Return True if two workloads differ only in the sequence length and the sample size."""
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
    """Return True if a recording agrees with the polynomials of the others at its length."""
    if any(_structure(one) != _structure(some[0]) for one in (*some[1:], found)):
        return False
    relative, absolute = TOLERANCE
    pairs = zip(_arrays(_between(some, lengths, length)), _arrays(found), strict=True)
    return all(np.allclose(a, b, rtol=relative, atol=absolute) for a, b in pairs)


def _sample(workload: Workload, length: int | None) -> str:
    """Return the description of a sample of another length."""
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
    """Evaluate the polynomials through values at three lengths (Newton's divided differences).

    The coefficients are multiples of 1/2. Results are therefore exact below 2^53, or below 2^63 if
    a long double has enough digits.

    Args:
        values: Arrays of equal shape, one for each of `lengths`.
        lengths: The three lengths.
        length: The length at which to evaluate the polynomials.
    """
    x0, x1, x2 = (np.longdouble(x) for x in lengths)
    y0, y1, y2 = (np.asarray(value, dtype=np.longdouble) for value in values)
    slope, next_slope = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (next_slope - slope) / (x2 - x0)
    at = np.longdouble(length)
    result: np.ndarray = np.asarray(y0 + (at - x0) * (slope + (at - x1) * curve), dtype=np.float64)
    return result


class Lengths(Record):
    """Workloads of one model at several sequence lengths.

    Attributes:
        traced: Workloads at the traced lengths.
        families: Families that contain the other lengths.
    """

    traced: tuple[Workload, ...]
    families: tuple[Family, ...] = ()

    def at(self, length: int) -> Workload:
        """Return the workload at one of the lengths."""
        for workload in self.traced:
            if workload.sequence_length == length:
                return workload
        return next(family for family in self.families if family.holds(length)).at(length)


def cover(lengths: Sequence[int], trace: Callable[[int], Traced]) -> Lengths:
    """Return workloads at several sequence lengths, from as few traces as possible.

    A range of lengths is traced at four of them. If the four are not a family, the lower and the
    upper half of the range are tried separately. Ranges of four or fewer lengths are traced in
    full. Lengths inside the range that are not on the steps of the family are tried next.

    Args:
        lengths: Sequence lengths in tokens.
        trace: Function that traces a length.
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
