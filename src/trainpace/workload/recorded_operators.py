"""One form of a step as it was recorded: every operator in its order, each number affine in the batch size.

From it follow the table in which alike operators share a row, the moments that can be the peak of memory, and the blocks. It
needs no torch, so that a recording can be made of others at other sequence lengths (`trainpace.workload.family`) wherever a
workload is read.
"""

from typing import Any

import msgspec
import numpy as np

from trainpace.core.records import Record
from trainpace.workload.workload import (
    PHASES,
    Blocks,
    Floats,
    MemoryProfile,
    Operators,
    Role,
    TracedForm,
)

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
