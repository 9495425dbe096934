"""What torch.compile leaves of a table's element-wise operators: which share of its bytes each row still moves, and how many kernels.

Inductor joins chains of element-wise operators, casts and reductions into one kernel (Ansel et al. 2024, section 4.4): what one
of them writes and the next reads stays in registers. Products, convolutions, attention, lookups and pooling bound the chains,
and the optimizer is not compiled. So a fused row reads only what comes from a bound or from another chain, and writes only what
a bound, another chain or nobody reads. What the backward pass reads again of the forward pass is no more than what the fused
kernels read there: the rest is computed again (the min-cut partitioner of AOTAutograd).

A table does not say which operator reads what, but how large every operand is, and rows stand in the order in which they first
ran. An operand is taken to be the last tensor of its size that nothing has read yet. What is added and is not such a tensor is a
residual; for all others a tensor that the same chain has read before will do. Rows that are alike are merged, so that some
readers stand before what they read: those are matched at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainpace.workload import ATTENTION_KINDS, CONVOLUTION_KINDS, OTHER, Flags, Floats, Operators, Phase, at_batch

REFERENCE_BATCH = 16.0
"""Samples at which sizes are compared; shares hold for every batch, as bytes that matter grow with it."""
SAME_SIZE = 1.01
"""Tensors whose sizes differ by less are taken for one: norms write a few statistics besides their result."""
BOUNDS = frozenset(("gemm", "embedding", "pool", *CONVOLUTION_KINDS, *ATTENTION_KINDS))
"""Kinds of operators that stay kernels of their own."""
HOST_ALONE = ("view", "module")


class Fused(NamedTuple):
    """By row: the share of its table's bytes that is still moved, and of its kernels that are still launched.

    Both are 0 to 1, but for the traffic of a batch norm: it reads everything for its statistics before it reads it again to
    normalise, which the table counts once, so that its share may be (2 read + written) / (read + written), as it is without
    torch.compile. joined: rows that are compiled, and not bounds.
    """

    traffic: Floats
    launches: Floats
    joined: Flags


class _Tensor:
    """What one row writes: `unread` of its instances, of which a bound or another chain reads `written`; `bounds` ran before."""

    __slots__ = ("bounds", "is_bound", "row", "unread", "written")

    def __init__(self, row: int, count: float, is_bound: bool, bounds: float) -> None:
        self.row, self.unread, self.is_bound, self.bounds, self.written = row, count, is_bound, bounds, 0.0


class _Read(NamedTuple):
    """Instances of an operand of `size` bytes and `elements` (both classes) that nothing before them wrote."""

    row: int
    count: float
    size: float
    elements: int


class _Operand(NamedTuple):
    size: float
    elements: float


def fused(operators: Operators) -> Fused:
    """The shares that torch.compile leaves of every row; 1 for rows that it does not fuse."""
    n = len(operators)
    moved = operators.moved_bytes(REFERENCE_BATCH)
    bounds = [kind in BOUNDS for kind in operators.kind]
    rows = [i for i in range(n) if operators.kind[i] not in HOST_ALONE and operators.phase[i] != "optimizer"]
    operands, results = {i: _operands(operators, i) for i in rows}, {i: _result(operators, i) for i in rows}
    sizes = _Classes([o.size for i in rows for o in operands[i]] + [results[i] for i in rows])
    lengths = _Classes([o.elements for i in rows for o in operands[i]])
    kept, kernels = np.zeros(n), np.zeros(n)
    read_before: dict[int, float] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        chain = _Pass(operators, bounds, sizes, lengths)
        for i in rows:
            if operators.phase[i] == phase:
                chain.add(i, operands[i], results[i])
        chain.match_the_rest()
        again = {key: 1.0 for key in chain.unsupplied}
        if phase == "backward":
            again = {key: min(1.0, read_before.get(key, 0.0) / size) for key, size in chain.unsupplied.items()}
        for read in chain.from_other_chains:
            kept[read.row] += read.count * read.size * again[read.elements]
        for read in chain.from_bounds:
            kept[read.row] += read.count * read.size
        if phase == "forward":
            for read in (*chain.from_other_chains, *chain.from_bounds):
                read_before[read.elements] = read_before.get(read.elements, 0.0) + read.count * read.size
        for tensor, written in chain.results():
            kept[tensor.row] += written * at_batch(operators.written_bytes[tensor.row], REFERENCE_BATCH)
            kernels[tensor.row] = written
    joined = np.array([i in operands and not bound for i, bound in enumerate(bounds)])
    count, read = operators.count, at_batch(operators.read_bytes, REFERENCE_BATCH)
    twice = joined & np.array(["batch_norm" in name and "inference" not in name for name in operators.function])
    kept = np.where(twice, 2.0 * read * count + kernels * (moved - read), kept)
    most = np.where(twice, moved + read, moved) * count
    share = np.divide(np.minimum(kept, most), moved * count, out=np.zeros(n), where=moved > 0)
    launched = np.where(twice, 1.0, np.minimum(kernels / count, 1.0))
    return Fused(np.where(joined, share, 1.0), np.where(joined, launched, 1.0), joined)


class _Pass:
    """The rows of one pass in their order, each matched with what it reads."""

    def __init__(self, operators: Operators, bounds: list[bool], sizes: _Classes, lengths: _Classes) -> None:
        self._operators, self._bounds, self._sizes, self._lengths = operators, bounds, sizes, lengths
        self._written: dict[int, list[_Tensor]] = {}
        self._at_hand: set[int] = set()
        self._bounds_run = 0.0
        self._late: dict[int, list[_Read]] = {}
        self._late_residuals: dict[int, list[_Read]] = {}
        self._late_bounds: dict[int, float] = {}
        self.from_bounds: list[_Read] = []
        self.from_other_chains: list[_Read] = []
        self.unsupplied: dict[int, float] = {}

    def add(self, row: int, operands: list[_Operand], result: float) -> None:
        """Match the operands of the next row, and keep its result for those that follow."""
        bound, count = self._bounds[row], float(self._operators.count[row])
        adds = self._operators.function[row].startswith("add")
        if bound:
            self._at_hand.clear()
            self._bounds_run += count
        for operand in operands:
            size = self._sizes.of(operand.size)
            read = _Read(row, count, operand.size, self._lengths.of(operand.elements))
            left = self._taken(size, read, bound, adds)
            if left and bound:
                self._late_bounds[size] = self._late_bounds.get(size, 0.0) + left
            elif left and adds:
                self._late_residuals.setdefault(size, []).append(read._replace(count=left))
            elif left and size not in self._at_hand:
                self._late.setdefault(size, []).append(read._replace(count=left))
            if not bound:
                self._at_hand.add(size)
        if result:
            size = self._sizes.of(result)
            self._written.setdefault(size, []).append(_Tensor(row, count, bound, self._bounds_run))
            if not bound:
                self._at_hand.add(size)

    def _taken(self, size: int, read: _Read, bound: bool, adds: bool) -> float:
        """Instances that are left after those that were written before and not read, the last first.

        What is added and was written before a bound ran is a residual, as many times as bounds ran since.
        """
        left = read.count
        for tensor in reversed(self._written.get(size, ())):
            apart = self._bounds_run - tensor.bounds if adds and not tensor.is_bound else 0.0
            taken = min(tensor.unread - apart, left)
            if taken <= 0:
                continue
            tensor.unread -= taken
            left -= taken
            if bound and not tensor.is_bound:
                tensor.written += taken
            elif tensor.is_bound and not bound:
                self.from_bounds.append(read._replace(count=taken))
            if not left:
                break
        return left

    def match_the_rest(self) -> None:
        """Readers that stand before what they read, as a row alike came earlier still; and residuals, from other chains."""
        for size in sorted(self._written.keys() | self._late.keys() | self._late_residuals.keys()):
            unread = [tensor for tensor in self._written.get(size, ()) if tensor.unread]
            fused_ones = sum(tensor.unread for tensor in unread if not tensor.is_bound)
            of_bounds = sum(tensor.unread for tensor in unread if tensor.is_bound)
            late, residuals = self._late.get(size, []), self._late_residuals.get(size, [])
            wanted, apart = sum(read.count for read in late), sum(read.count for read in residuals)
            by_bounds = self._late_bounds.get(size, 0.0)
            from_bounds = min(wanted, of_bounds)
            joined = min(wanted - from_bounds, fused_ones)
            strangers = wanted - from_bounds - joined
            for read in late:
                if from_bounds:
                    self.from_bounds.append(read._replace(count=read.count * from_bounds / wanted))
                if strangers:
                    self._from_elsewhere(read._replace(count=read.count * strangers / wanted))
            for read in residuals:
                self._from_elsewhere(read)
            apart += strangers
            # what another chain, a bound or nobody reads has to be written
            written = min(fused_ones, apart + by_bounds) + max(0.0, fused_ones - joined - apart - by_bounds)
            for tensor in unread:
                if not tensor.is_bound:
                    tensor.written += tensor.unread * min(1.0, written / fused_ones)

    def _from_elsewhere(self, read: _Read) -> None:
        self.from_other_chains.append(read)
        self.unsupplied[read.elements] = self.unsupplied.get(read.elements, 0.0) + read.count * read.size

    def results(self) -> list[tuple[_Tensor, float]]:
        """What fused rows wrote, and how many instances of it leave their kernel."""
        fused_ones = [tensor for tensors in self._written.values() for tensor in tensors if not tensor.is_bound]
        return [(tensor, tensor.written) for tensor in fused_ones if tensor.written]


class _Classes:
    """Sizes that are the same but for statistics and biases: each belongs to the class of the smallest of its run."""

    def __init__(self, sizes: list[float]) -> None:
        distinct = np.unique(np.array(sizes, dtype=np.float64))
        apart = distinct[1:] > SAME_SIZE * distinct[:-1]
        classes = np.concatenate([[0], np.cumsum(apart)]) if len(distinct) else np.zeros(0)
        self._of = dict(zip(distinct.tolist(), classes.astype(int).tolist(), strict=True))

    def of(self, size: float) -> int:
        return self._of[size]


_WIDTHS = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bytes of an element of two operands, by their sum, where they differ."""


def _operands(operators: Operators, i: int) -> list[_Operand]:
    """The large operands of one operator of row i."""
    dims, read = at_batch(operators.dims[i], REFERENCE_BATCH), float(at_batch(operators.read_bytes[i], REFERENCE_BATCH))
    kind = operators.kind[i]
    width = 2.0 if operators.half[i] else 4.0
    if kind == "gemm":
        b, m, n, k = dims[:4].tolist()
        return [_Operand(b * m * k * width, b * m * k), _Operand(b * k * n * width, b * k * n)]
    if kind == "attention":
        b, h, q, k, d = dims[:5].tolist()
        return [_Operand(b * h * length * d * width, b * h * length * d) for length in (q, k, k)]
    elements, out = float(dims[OTHER.elements_in]), float(dims[OTHER.elements_out])
    if not read or kind in BOUNDS:
        return [_Operand(read, read)] if read else []
    number = round(elements / out) if out else 1
    each = elements / max(number, 1)
    of_element = round(read / each) if each else 0
    if number != 2 or of_element < 2:
        return [_Operand(read / max(number, 1), each)] * number if 2 < number < 5 else [_Operand(read, elements)]
    widths = _WIDTHS.get(of_element, (of_element / 2, of_element / 2))
    return [_Operand(read * w / sum(widths), each) for w in widths]


def _result(operators: Operators, i: int) -> float:
    """Bytes of what one operator of row i writes, dropout's mask left out."""
    written = float(at_batch(operators.written_bytes[i], REFERENCE_BATCH))
    if operators.function[i] == "native_dropout":
        return written - float(at_batch(operators.dims[i], REFERENCE_BATCH)[OTHER.elements_out]) / 2
    return written
