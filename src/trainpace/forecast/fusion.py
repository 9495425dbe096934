"""What torch.compile leaves of a table: the share of its bytes that each row still moves, and of its kernels.

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

from collections import Counter
from typing import NamedTuple

import numpy as np

from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    CONVOLUTION_KINDS,
    GEMM,
    OTHER,
    Flags,
    Floats,
    Operators,
    Phase,
    at_batch,
)

REFERENCE_BATCH = 16
"""Samples at which sizes are compared; shares hold for every batch, as bytes that matter grow with it."""
SAME_SIZE = 1.01
"""Tensors whose sizes differ by less are taken for one: norms write a few statistics besides their result."""
BOUNDS = frozenset(("gemm", "embedding", "pool", *CONVOLUTION_KINDS, *ATTENTION_KINDS))
"""Kinds of operators that stay kernels of their own."""
HOST_ALONE = ("view", "module")
UNCOMPILED = " (not compiled)"
"""How the module of rows ends that run outside of what is compiled."""


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
        self.row, self.unread, self.is_bound, self.bounds, self.written = (
            row,
            count,
            is_bound,
            bounds,
            0.0,
        )


class _Read(NamedTuple):
    """An operand of `size` bytes that an operator of a row reads so many times; `elements`: the class of its length."""

    row: int
    times: float
    size: float
    elements: int


class _Operand(NamedTuple):
    size: float
    elements: float


def fused(operators: Operators) -> Fused:
    """The shares that torch.compile leaves of every row; 1 for rows that it does not fuse."""
    n, count = len(operators), operators.count
    read, wrote = (
        at_batch(column, REFERENCE_BATCH)
        for column in (operators.read_bytes, operators.written_bytes)
    )
    dims = at_batch(operators.dims, REFERENCE_BATCH).tolist()
    bounds = [kind in BOUNDS for kind in operators.kind]
    rows = [
        i
        for i in range(n)
        if operators.kind[i] not in HOST_ALONE
        and operators.phase[i] != "optimizer"
        and not operators.module[i].endswith(UNCOMPILED)
    ]
    operands = {i: _operands(operators, i, dims[i], float(read[i])) for i in rows}
    results = {i: _result(operators.function[i], dims[i], float(wrote[i])) for i in rows}
    sizes = _SizeClasses([o.size for i in rows for o in operands[i]] + [results[i] for i in rows])
    lengths = _SizeClasses([o.elements for i in rows for o in operands[i]])
    kept, kernels = np.zeros(n), np.zeros(n)
    read_before: dict[int, float] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        chains = _Pass(operators, bounds, sizes, lengths)
        for i in rows:
            if operators.phase[i] == phase:
                chains.add(i, operands[i], results[i])
        chains.match_the_rest()
        for each in chains.from_bounds:
            kept[each.row] += each.times * each.size
        for each in chains.from_other_chains:
            saved = (
                read_before.get(each.elements, 0.0) / chains.unsupplied[each.elements]
                if phase == "backward"
                else 1.0
            )
            kept[each.row] += each.times * each.size * min(1.0, saved)
        for tensor in chains.results():
            kept[tensor.row] += tensor.written * wrote[tensor.row]
            kernels[tensor.row] = tensor.written
        if phase == "forward":
            for each in (*chains.from_bounds, *chains.from_other_chains):
                read_before[each.elements] = (
                    read_before.get(each.elements, 0.0) + each.times * each.size
                )
    joined = np.array([i in operands and not bound for i, bound in enumerate(bounds)])
    twice = joined & np.array(
        ["batch_norm" in name and "inference" not in name for name in operators.function]
    )
    kept = np.where(twice, 2.0 * read * count + kernels * wrote, kept)
    moved = read + wrote
    most = np.where(twice, moved + read, moved) * count
    share = np.divide(np.minimum(kept, most), moved * count, out=np.zeros(n), where=moved > 0)
    launched = np.where(twice, 1.0, np.minimum(kernels / count, 1.0))
    return Fused(np.where(joined, share, 1.0), np.where(joined, launched, 1.0), joined)


class _Pass:
    """The rows of one pass in their order, each matched with what it reads."""

    def __init__(
        self, operators: Operators, bounds: list[bool], sizes: _SizeClasses, lengths: _SizeClasses
    ) -> None:
        self._operators, self._bounds, self._sizes, self._lengths = (
            operators,
            bounds,
            sizes,
            lengths,
        )
        self._written: dict[int, list[_Tensor]] = {}
        self._at_hand: Counter[int] = Counter()
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
        adds = self._operators.function[row] in ("add", "add_")
        if bound:
            self._at_hand.clear()
            self._bounds_run += count
        own: Counter[int] = Counter()
        for operand in operands:
            size = self._sizes.of(operand.size)
            read = _Read(row, count, operand.size, self._lengths.of(operand.elements))
            own[size] += 1
            left = self._taken(size, read, bound, adds)
            if left and bound:
                self._late_bounds[size] = self._late_bounds.get(size, 0.0) + left
            elif left and adds:
                self._late_residuals.setdefault(size, []).append(read._replace(times=left))
            elif left and self._at_hand[size] >= own[size]:
                continue
            elif left:
                self._late.setdefault(size, []).append(read._replace(times=left))
            if not bound:
                self._at_hand[size] = max(self._at_hand[size], own[size])
        if result:
            size = self._sizes.of(result)
            self._written.setdefault(size, []).append(_Tensor(row, count, bound, self._bounds_run))
            if not bound:
                self._at_hand[size] += 1

    def _taken(self, size: int, read: _Read, bound: bool, adds: bool) -> float:
        """Instances that are left after those that were written before and not read, the last first.

        What is added and was written before a bound ran is a residual, as many times as bounds ran since.
        """
        left = read.times
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
                self.from_bounds.append(read._replace(times=taken))
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
            wanted, apart = sum(read.times for read in late), sum(read.times for read in residuals)
            by_bounds = self._late_bounds.get(size, 0.0)
            from_bounds = min(wanted, of_bounds)
            joined = min(wanted - from_bounds, fused_ones)
            strangers = wanted - from_bounds - joined
            for read in late:
                if from_bounds:
                    self.from_bounds.append(read._replace(times=read.times * from_bounds / wanted))
                if strangers:
                    self._from_elsewhere(read._replace(times=read.times * strangers / wanted))
            for read in residuals:
                self._from_elsewhere(read)
            apart += strangers
            # what another chain, a bound or nobody reads has to be written
            written = min(fused_ones, apart + by_bounds) + max(
                0.0, fused_ones - joined - apart - by_bounds
            )
            for tensor in unread:
                if not tensor.is_bound:
                    tensor.written += tensor.unread * min(1.0, written / fused_ones)

    def _from_elsewhere(self, read: _Read) -> None:
        self.from_other_chains.append(read)
        self.unsupplied[read.elements] = (
            self.unsupplied.get(read.elements, 0.0) + read.times * read.size
        )

    def results(self) -> list[_Tensor]:
        """What leaves the fused kernels."""
        return [
            tensor
            for tensors in self._written.values()
            for tensor in tensors
            if not tensor.is_bound and tensor.written
        ]


class _SizeClasses:
    """Sizes that are the same but for statistics and biases. A size within 1 % of the next smaller one is of its class, so that a
    row of such sizes is one class, whatever lies between its ends."""

    def __init__(self, sizes: list[float]) -> None:
        distinct = np.unique(np.array(sizes, dtype=np.float64))
        apart = distinct[1:] > SAME_SIZE * distinct[:-1]
        classes = np.concatenate([[0], np.cumsum(apart)]) if len(distinct) else np.zeros(0)
        self._of = dict(zip(distinct.tolist(), classes.astype(int).tolist(), strict=True))

    def of(self, size: float) -> int:
        return self._of[size]


MOST_OPERANDS = 5
_WIDTHS = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bytes of an element of two operands, by their sum, where they differ."""


def _operands(operators: Operators, i: int, dims: list[float], read: float) -> list[_Operand]:
    """The large operands of one operator of row i, which has these sizes and reads these bytes."""
    kind, width = operators.kind[i], 2.0 if operators.half[i] else 4.0
    if kind == "gemm":
        b, m, n, k = dims[: len(GEMM)]
        return [_Operand(b * m * k * width, b * m * k), _Operand(b * k * n * width, b * k * n)]
    if kind == "attention":
        b, h, q, k, d, _, v, _ = dims[: len(ATTENTION)]
        return [
            _Operand(b * h * size * width, b * h * size) for size in (q * d, k * d, k * (v or d))
        ]
    if not read or kind in BOUNDS:
        return [_Operand(read, read)] if read else []
    elements, out = dims[OTHER.elements_in], dims[OTHER.elements_out]
    number = round(elements / out) if out else 1
    if number == 1 and 0 < out < elements:  # beside a mask, a bias or weights
        return [_Operand(read * out / elements, out)]
    if not 1 < number < MOST_OPERANDS:  # more are a sum's
        return [_Operand(read, elements)]
    each = elements / number
    widths = _WIDTHS.get(round(read / each), (1,) * number) if number == 2 else (1,) * number
    return [_Operand(read * width / sum(widths), each) for width in widths]


def _result(function: str, dims: list[float], written: float) -> float:
    """Bytes of what one operator writes, dropout's mask of a byte an element left out."""
    return written - dims[OTHER.elements_out] / 2 if function == "native_dropout" else written
