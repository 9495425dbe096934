"""Effect of torch.compile on a table: each row's remaining share of bytes and kernels.

Inductor joins chains of element-wise operators, casts and reductions into one kernel (Ansel et al.
2024, section 4.4): what one of them writes and the next reads stays in registers. Matmuls,
convolutions, attention, lookups and pooling are the boundaries of chains, and the optimizer is not
compiled. So a fused row reads only what comes from a boundary or from another chain, and writes
only what a boundary, another chain or nobody reads. The backward pass reads again no more of the
forward pass than what the fused kernels read there: the rest is computed again (the min-cut
partitioner of AOTAutograd).

A table does not say which operator reads what, but how large every operand is, and rows stand in
the order in which they first ran. An operand is assumed to be the last tensor of its size that
nothing has read yet. An added operand that is not such a tensor is a residual; for all others a
tensor that the same chain has read before is enough. Alike rows are merged, so some readers stand
before what they read: those are matched at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
"""Samples at which sizes are compared. Shares hold for every batch, as bytes grow with it."""
SAME_SIZE = 1.01
"""Ratio of sizes below which tensors count as equal: norms write a few statistics besides their
result."""
BOUNDARIES = frozenset(("gemm", "embedding", "pool", *CONVOLUTION_KINDS, *ATTENTION_KINDS))
"""Kinds of operators that stay kernels of their own."""
HOST_ALONE = ("view", "module")
UNCOMPILED = " (not compiled)"
"""End of the module names of rows that run outside of what is compiled."""


class Fused(NamedTuple):
    """Remaining share of bytes and of kernels, by row.

    Both are 0 to 1, except for the traffic of a batch norm: it reads everything for its statistics
    before it reads it again to normalise, which the table counts once, so that its share may be (2
    read + written) / (read + written), as it is without torch.compile. joined: rows that are
    compiled, and not boundaries.
    """

    traffic: Floats
    launches: Floats
    joined: Flags


class _Tensor:
    """The output of one row.

    unread: its instances without a reader yet. written: those that a boundary or another chain
    reads. boundaries: how many ran before.
    """

    __slots__ = ("boundaries", "is_boundary", "row", "unread", "written")

    def __init__(self, row: int, count: float, is_boundary: bool, boundaries: float) -> None:
        self.row, self.unread, self.written = row, count, 0.0
        self.is_boundary, self.boundaries = is_boundary, boundaries


class _Operand(NamedTuple):
    size: float
    elements: float


class _Read(NamedTuple):
    """An operand of `size` bytes that a row reads several times; `elements`: its length's class."""

    row: int
    times: float
    size: float
    elements: int

    @property
    def bytes(self) -> float:
        return self.times * self.size


class _Graph(NamedTuple):
    """The compiled rows of a table in their order, with their operands and results."""

    operators: Operators
    rows: list[int]
    is_boundary: list[bool]
    operands: dict[int, list[_Operand]]
    results: dict[int, float]
    sizes: dict[float, int]
    """The class of every size in bytes."""
    lengths: dict[float, int]
    """The class of every number of elements."""


def fused(operators: Operators) -> Fused:
    """Return the shares that torch.compile leaves of every row; 1 if it does not fuse the row."""
    n, count = len(operators), operators.count
    read, wrote = (
        at_batch(column, REFERENCE_BATCH)
        for column in (operators.read_bytes, operators.written_bytes)
    )
    graph = _graph(operators, read, wrote)
    kept, kernels = np.zeros(n), np.zeros(n)
    forward = _Pass(graph, "forward")
    read_before: dict[int, float] = {}
    for each in (*forward.from_boundaries, *forward.from_other_chains):
        read_before[each.elements] = read_before.get(each.elements, 0.0) + each.bytes
    for chains in (forward, _Pass(graph, "backward")):
        for each in chains.from_boundaries:
            kept[each.row] += each.bytes
        for each in chains.from_other_chains:
            needed = 1.0
            if chains is not forward:
                needed = read_before.get(each.elements, 0.0) / chains.unsupplied[each.elements]
            kept[each.row] += each.bytes * min(1.0, needed)
        for tensor in chains.results():
            kept[tensor.row] += tensor.written * wrote[tensor.row]
            kernels[tensor.row] = tensor.written
    fusible = enumerate(graph.is_boundary)
    joined = np.array([i in graph.operands and not boundary for i, boundary in fusible])
    names = operators.function
    twice = np.array(["batch_norm" in name and "inference" not in name for name in names])
    twice &= joined
    kept = np.where(twice, 2.0 * read * count + kernels * wrote, kept)
    moved = read + wrote
    most = np.where(twice, moved + read, moved) * count
    share = np.divide(np.minimum(kept, most), moved * count, out=np.zeros(n), where=moved > 0)
    launched = np.where(twice, 1.0, np.minimum(kernels / count, 1.0))
    return Fused(np.where(joined, share, 1.0), np.where(joined, launched, 1.0), joined)


def _graph(operators: Operators, read: Floats, wrote: Floats) -> _Graph:
    dims = at_batch(operators.dims, REFERENCE_BATCH).tolist()
    rows = _compiled_rows(operators)
    operands = {i: _operands(operators, i, dims[i], float(read[i])) for i in rows}
    results = {i: _result(operators.function[i], dims[i], float(wrote[i])) for i in rows}
    every = [operand for i in rows for operand in operands[i]]
    sizes = _classes([operand.size for operand in every] + list(results.values()))
    lengths = _classes([operand.elements for operand in every])
    is_boundary = [kind in BOUNDARIES for kind in operators.kind]
    return _Graph(operators, rows, is_boundary, operands, results, sizes, lengths)


def _compiled_rows(operators: Operators) -> list[int]:
    calls = zip(operators.kind, operators.phase, operators.module, strict=True)
    return [
        i
        for i, (kind, phase, module) in enumerate(calls)
        if kind not in HOST_ALONE and phase != "optimizer" and not module.endswith(UNCOMPILED)
    ]


class _Pass:
    """The rows of one pass in their order, each matched with what it reads."""

    def __init__(self, graph: _Graph, phase: Phase) -> None:
        self._graph = graph
        self._written: dict[int, list[_Tensor]] = {}
        self._at_hand: Counter[int] = Counter()
        self._boundaries_run = 0.0
        self._late: dict[int, list[_Read]] = {}
        self._late_residuals: dict[int, list[_Read]] = {}
        self._late_boundaries: dict[int, float] = {}
        self.from_boundaries: list[_Read] = []
        self.from_other_chains: list[_Read] = []
        self.unsupplied: dict[int, float] = {}
        for row in graph.rows:
            if graph.operators.phase[row] == phase:
                self._add(row)
        for size in sorted(self._written.keys() | self._late.keys() | self._late_residuals.keys()):
            self._match_the_rest(size)

    def _add(self, row: int) -> None:
        """Match the operands of the next row, and keep its result for those that follow."""
        graph = self._graph
        boundary, count = graph.is_boundary[row], float(graph.operators.count[row])
        if boundary:
            self._at_hand.clear()
            self._boundaries_run += count
        own: Counter[int] = Counter()
        for operand in graph.operands[row]:
            size = graph.sizes[operand.size]
            own[size] += 1
            read = _Read(row, count, operand.size, graph.lengths[operand.elements])
            self._read(read, size, own[size])
            if not boundary:
                self._at_hand[size] = max(self._at_hand[size], own[size])
        if result := graph.results[row]:
            size = graph.sizes[result]
            tensor = _Tensor(row, count, boundary, self._boundaries_run)
            self._written.setdefault(size, []).append(tensor)
            if not boundary:
                self._at_hand[size] += 1

    def _read(self, read: _Read, size: int, number: int) -> None:
        """Match the `number`-th operand of a size with what was written, or note it for later."""
        boundary = self._graph.is_boundary[read.row]
        adds = self._graph.operators.function[read.row] in ("add", "add_")
        left = self._matched(size, read, boundary, adds)
        if not left:
            return
        if boundary:
            self._late_boundaries[size] = self._late_boundaries.get(size, 0.0) + left
        elif adds:
            self._late_residuals.setdefault(size, []).append(read._replace(times=left))
        elif self._at_hand[size] < number:
            self._late.setdefault(size, []).append(read._replace(times=left))

    def _matched(self, size: int, read: _Read, boundary: bool, adds: bool) -> float:
        """Match a read with the unread tensors of its size, the last first; return what is left.

        An operand that is added and was written before a boundary ran is a residual, as many times
        as boundaries ran since.
        """
        left = read.times
        for tensor in reversed(self._written.get(size, ())):
            residual = adds and not tensor.is_boundary
            apart = self._boundaries_run - tensor.boundaries if residual else 0.0
            matched = min(tensor.unread - apart, left)
            if matched <= 0:
                continue
            tensor.unread -= matched
            left -= matched
            if boundary and not tensor.is_boundary:
                tensor.written += matched
            elif tensor.is_boundary and not boundary:
                self.from_boundaries.append(read._replace(times=matched))
            if not left:
                break
        return left

    def _match_the_rest(self, size: int) -> None:
        """Match readers that stand before what they read, and residuals from other chains.

        A reader stands too early if an alike row, with which it was merged, ran earlier.
        """
        unread = [tensor for tensor in self._written.get(size, ()) if tensor.unread]
        in_chains = sum(tensor.unread for tensor in unread if not tensor.is_boundary)
        of_boundaries = sum(tensor.unread for tensor in unread if tensor.is_boundary)
        late, residuals = self._late.get(size, []), self._late_residuals.get(size, [])
        wanted, apart = sum(read.times for read in late), sum(read.times for read in residuals)
        by_boundaries = self._late_boundaries.get(size, 0.0)
        from_boundaries = min(wanted, of_boundaries)
        joined = min(wanted - from_boundaries, in_chains)
        strangers = wanted - from_boundaries - joined
        for read in late:
            if from_boundaries:
                times = read.times * from_boundaries / wanted
                self.from_boundaries.append(read._replace(times=times))
            if strangers:
                self._from_elsewhere(read._replace(times=read.times * strangers / wanted))
        for read in residuals:
            self._from_elsewhere(read)
        apart += strangers
        # write a result that another chain or a boundary reads, or that nothing reads
        unclaimed = max(0.0, in_chains - joined - apart - by_boundaries)
        written = min(in_chains, apart + by_boundaries) + unclaimed
        for tensor in unread:
            if not tensor.is_boundary:
                tensor.written += tensor.unread * min(1.0, written / in_chains)

    def _from_elsewhere(self, read: _Read) -> None:
        self.from_other_chains.append(read)
        self.unsupplied[read.elements] = self.unsupplied.get(read.elements, 0.0) + read.bytes

    def results(self) -> Iterator[_Tensor]:
        """Yield what leaves the fused kernels."""
        for tensors in self._written.values():
            yield from (t for t in tensors if not t.is_boundary and t.written)


def _classes(sizes: list[float]) -> dict[float, int]:
    """Return the class of every size. Sizes are alike except for statistics and biases.

    A size within 1% of the next smaller one is of its class, so a row of such sizes is one class,
    however far apart its ends are.
    """
    distinct = np.unique(np.array(sizes, dtype=np.float64))
    apart = distinct[1:] > SAME_SIZE * distinct[:-1]
    classes = np.concatenate([[0], np.cumsum(apart)]) if len(distinct) else np.zeros(0)
    return dict(zip(distinct.tolist(), classes.astype(int).tolist(), strict=True))


MOST_OPERANDS = 5
_WIDTHS = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bytes per element of two operands of different widths, by their sum."""


def _operands(operators: Operators, i: int, dims: list[float], read: float) -> list[_Operand]:
    """Return the large operands of one operator of row i, of these sizes and bytes read."""
    kind, width = operators.kind[i], 2.0 if operators.half[i] else 4.0
    if kind == "gemm":
        b, m, n, k = dims[: len(GEMM)]
        return [_Operand(b * m * k * width, b * m * k), _Operand(b * k * n * width, b * k * n)]
    if kind == "attention":
        b, h, q, k, d, _, v, _ = dims[: len(ATTENTION)]
        sizes = q * d, k * d, k * (v or d)
        return [_Operand(b * h * size * width, b * h * size) for size in sizes]
    if not read:
        return []
    if kind in BOUNDARIES:
        return [_Operand(read, read)]
    elements, out = dims[OTHER.elements_in], dims[OTHER.elements_out]
    number = round(elements / out) if out else 1
    if number == 1 and 0 < out < elements:  # besides a mask, a bias or weights
        return [_Operand(read * out / elements, out)]
    if not 1 < number < MOST_OPERANDS:  # more inputs belong to a sum
        return [_Operand(read, elements)]
    each, widths = elements / number, (1,) * number
    if number == 2:
        widths = _WIDTHS.get(round(read / each), widths)
    return [_Operand(read * width / sum(widths), each) for width in widths]


def _result(function: str, dims: list[float], written: float) -> float:
    """Return the bytes that one operator writes, without dropout's mask of a byte per element."""
    return written - dims[OTHER.elements_out] / 2 if function == "native_dropout" else written
