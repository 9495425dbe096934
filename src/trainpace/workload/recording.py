"""A recorded step, and workloads at sequence lengths between those that were traced.

[recorded_operators] One form of a step as it was recorded: every operator in its order, each number affine in the batch size.

From it follow the table in which alike operators share a row, the moments that can be the peak of memory, and the blocks. It
needs no torch, so that a recording can be made of others at other sequence lengths (`trainpace.workload.recording`) wherever a
workload is read.

[family] One trace for any sequence length: workloads of a model between lengths at which it was traced.

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

# --- recorded_operators
BATCHES = (2, 3, 5)
"""The batch sizes of the three steps that are traced. At size 1 torch drops dimensions and copies."""
MOMENTS = 64
"""The number of a step's moments that a workload holds for its page, the peaks for a batch of 1 and of many among them."""
READ = slice(1, 3)
"""Where the bytes read and written stand among a row's numbers: FLOPs, both, then its sizes."""
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
"""The fields of `Blocks` that are bytes; those that end in working_bytes are the most of several moments."""


class BlockSizes(Record):
    """What a recording holds of the repeated blocks. `fixed`: the fields of `Blocks` that are neither bytes nor rows.

    sizes: bytes at the first two of BATCHES, 2 x the fields of `BLOCK_BYTES`, 0 for the working bytes, of which there are as many
    as moments: `working`, `after_working`, 2 x moments each.
    """

    fixed: dict[str, int | str]
    sizes: np.ndarray
    working: np.ndarray
    after_working: np.ndarray


class Recording(Record):
    """A step's operators of n calls, of which g differ, and what is alive at each.

    kind, function, phase, module, half, launches: of the different ones. inside, role: whether they run in the repeated blocks,
    and their `Role`; role is empty where there are no blocks. numbers: g x 19 x 2, FLOPs, bytes read and written and sizes, each
    with its constant and its slope over the batch size. order: which of them each of the n calls is. alive: n x 3, bytes of
    gradients, of activations, and of activations a sample. states: bytes of parameters, optimizer states, paged ones, and frozen
    parameters.
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
        """The workload's form that such a step is."""
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
        """The table, and which operator is the first of each of its rows."""
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
        """(the first call, the calls) of each row: alike operators together, in order of first appearance.

        Those inside and outside of the blocks are kept apart, and those of different roles.
        """
        keys = []
        for i in range(len(self.kind)):
            place = (bool(self.inside[i]), self.role[i]) if self.role else None
            said = (
                self.kind[i],
                self.function[i],
                self.phase[i],
                bool(self.half[i]),
                int(self.launches[i]),
                place,
            )
            keys.append((said, self.numbers[i].tobytes()))
        number_of: dict[Any, int] = {}
        same = np.array([number_of.setdefault(key, len(number_of)) for key in keys])
        of_call = same[self.order]
        _, heads, counts = np.unique(of_call, return_index=True, return_counts=True)
        by_appearance = np.argsort(heads)
        return heads[by_appearance], counts[by_appearance]

    def _moments(self) -> np.ndarray:
        """The fullest moment of each stretch of operators, and where it lies in its phase by the bytes that operators moved."""
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


def together(recording: Recording, numbers: Floats | None = None) -> Recording:
    """The recording with operators that are the same kept once. `numbers`: more of each by which they may differ, n x any."""
    r = recording
    more = [b""] * len(r.kind) if numbers is None else [row.tobytes() for row in numbers]
    number_of: dict[Any, int] = {}
    firsts: list[int] = []
    same = []
    for i in range(len(r.kind)):
        place = (bool(r.inside[i]), r.role[i]) if r.role else None
        said = (
            r.kind[i],
            r.function[i],
            r.phase[i],
            r.module[i],
            bool(r.half[i]),
            int(r.launches[i]),
            place,
        )
        number = number_of.setdefault((said, r.numbers[i].tobytes(), more[i]), len(firsts))
        if number == len(firsts):
            firsts.append(i)
        same.append(number)
    kept = np.array(firsts)
    words: dict[str, Any] = {
        name: tuple(getattr(r, name)[i] for i in firsts)
        for name in ("kind", "function", "phase", "module", *(["role"] if r.role else []))
    }
    columns = {name: getattr(r, name)[kept] for name in ("half", "launches", "inside", "numbers")}
    return msgspec.structs.replace(r, **words, **columns, order=np.array(same)[r.order])


def _peaks(gradient: np.ndarray, constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The moments on the upper envelope of total bytes over the batch size: the others are never the peak. And one with all
    gradients, which tells how many there are."""
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
    # a maximum over moments is convex in the batch size, so that its line may cross zero
    slope = np.maximum((sizes[1] - sizes[0]) / (BATCHES[1] - BATCHES[0]), 0.0)
    constant = np.maximum(sizes[0] - slope * BATCHES[0], 0.0)
    pairs = [(float(c), float(s)) for c, s in zip(constant, slope, strict=True)]
    fields: dict[str, Any] = {**blocks.fixed, **dict(zip(BLOCK_BYTES, pairs, strict=True))}
    return Blocks(**fields, operator_counts=np.where(inside, counts, 0), roles=roles)


# --- family
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
