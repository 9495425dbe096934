"""Effect of torch.compile on a table: the share of bytes and kernels that remains of each row.

Inductor fuses chains of element-wise operators, casts and reductions into one kernel (Ansel et al.
2024, section 4.4). Tensors between operators of a chain stay in registers. Matmuls, convolutions,
attention, lookups and pooling are boundaries between chains. The optimizer is not compiled. A fused
row therefore reads only tensors from a boundary or another chain. It writes only tensors that a
boundary, another chain or no operator reads. The backward pass reads only tensors of the forward
pass that its fused kernels also read. It recomputes the others (min-cut partitioner of
AOTAutograd).

A table does not contain which operator reads which tensor. It contains the size of every operand,
and rows are in the order in which they first ran. The model therefore matches operands by size:

- An operand is the last unread tensor of its size.
- If there is none, an operand of an addition is a residual from another chain. Other operands may
  be a tensor that the same chain has read before.
- Rows of equal operators are merged, so some rows come before the tensors that they read. These
  are matched at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
"""Batch size at which tensor sizes are compared.

The resulting shares hold for every batch size, because bytes grow with it.
"""
SAME_SIZE = 1.01
"""Ratio of sizes below which two tensors count as equal.

Norms write a few statistics in addition to their result.
"""
BOUNDARIES = frozenset(("gemm", "embedding", "pool", *CONVOLUTION_KINDS, *ATTENTION_KINDS))
"""Kinds of operators that are not fused with others."""
HOST_ALONE = ("view", "module")
"""Kinds of rows that launch no kernel."""
UNCOMPILED = " (not compiled)"
"""Suffix of the module names of rows that are not compiled."""


class Fused(NamedTuple):
    """Effect of torch.compile on the rows of a table. All arrays have shape (rows,).

    A batch norm reads its input twice, for its statistics and to normalize. The table counts one
    read. Its traffic can therefore be up to (2 read + written) / (read + written), which is above
    1.

    Attributes:
        traffic: Share of the bytes that remains, from 0 to 1 except for batch norms.
        launches: Share of the kernels that remains, from 0 to 1.
        joined: Mask of rows that are compiled and are not boundaries.
    """

    traffic: Floats
    launches: Floats
    joined: Flags


class _Tensor:
    """Output of one row, which stands for `count` equal operators.

    Attributes:
        row: Index of the row.
        unread: Number of instances that no row has read yet.
        written: Number of instances that a boundary or another chain reads.
        is_boundary: True if the row is a boundary.
        boundaries: Number of boundaries that ran before.
    """

    __slots__ = ("boundaries", "is_boundary", "row", "unread", "written")

    def __init__(self, row: int, count: float, is_boundary: bool, boundaries: float) -> None:
        self.row, self.unread, self.written = row, count, 0.0
        self.is_boundary, self.boundaries = is_boundary, boundaries


class _Operand(NamedTuple):
    size: float
    elements: float


class _Read(NamedTuple):
    """Operand of a row.

    Attributes:
        row: Index of the row.
        times: Number of times that the row reads such an operand.
        size: Bytes of the operand.
        elements: Class of its number of elements (`_Graph.lengths`).
    """

    row: int
    times: float
    size: float
    elements: int

    @property
    def bytes(self) -> float:
        return self.times * self.size


class _Graph(NamedTuple):
    """Compiled rows of a table in their order, with their operands and results."""

    operators: Operators
    rows: list[int]
    is_boundary: list[bool]
    operands: dict[int, list[_Operand]]
    results: dict[int, float]
    sizes: dict[float, int]
    """Class of each size in bytes. Sizes of one class count as equal."""
    lengths: dict[float, int]
    """Class of each number of elements."""


def fused(operators: Operators) -> Fused:
    """Return the effect of torch.compile on every row. Shares are 1 for rows that are not fused."""
    n, count = len(operators), operators.count
    read, wrote = (
        at_batch(column, REFERENCE_BATCH)
        for column in (operators.read_bytes, operators.written_bytes)
    )
    graph = _graph(operators, read, wrote)
    kept, kernels = _kept(graph, wrote)
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


def _kept(graph: _Graph, wrote: Floats) -> tuple[Floats, Floats]:
    """Return the bytes that each row still moves, and the kernels that still write its result."""
    kept, kernels = np.zeros(len(wrote)), np.zeros(len(wrote))
    forward = _Pass(graph, "forward")
    read_before: defaultdict[int, float] = defaultdict(float)
    for each in (*forward.from_boundaries, *forward.from_other_chains):
        read_before[each.elements] += each.bytes
    for chains in (forward, _Pass(graph, "backward")):
        for each in chains.from_boundaries:
            kept[each.row] += each.bytes
        for each in chains.from_other_chains:
            needed = 1.0
            if chains is not forward:
                needed = read_before[each.elements] / chains.unsupplied[each.elements]
            kept[each.row] += each.bytes * min(1.0, needed)
        for tensor in chains.results():
            kept[tensor.row] += tensor.written * wrote[tensor.row]
            kernels[tensor.row] = tensor.written
    return kept, kernels


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
    """Match the rows of one pass with the tensors that they read, in the order of the rows."""

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
        self.unsupplied: defaultdict[int, float] = defaultdict(float)
        for row in graph.rows:
            if graph.operators.phase[row] == phase:
                self._add(row)
        for size in sorted(self._written.keys() | self._late.keys() | self._late_residuals.keys()):
            self._match_the_rest(size)

    def _add(self, row: int) -> None:
        """Match the operands of the next row, and store its result for later rows."""
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
        """Match the `number`-th operand of a size with written tensors, or store it for later."""
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
        """Match a read with the unread tensors of its size, from last to first.

        If an added operand was written before a boundary ran, one instance per boundary since then
        is a residual.

        Returns:
            Number of times for which no tensor was found.
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
        """Match the reads that come before their tensors, and residuals from other chains.

        A read comes too early if its row was merged with an equal row that ran earlier.
        """
        tensors = self._written.get(size, [])
        chains = [tensor for tensor in tensors if tensor.unread and not tensor.is_boundary]
        in_chains = sum(tensor.unread for tensor in chains)
        of_boundaries = sum(tensor.unread for tensor in tensors if tensor.is_boundary)
        late, residuals = self._late.get(size, []), self._late_residuals.get(size, [])
        wanted, apart = sum(read.times for read in late), sum(read.times for read in residuals)
        by_boundaries = self._late_boundaries.get(size, 0.0)
        from_boundaries = min(wanted, of_boundaries)
        joined = min(wanted - from_boundaries, in_chains)
        strangers = wanted - from_boundaries - joined
        self.from_boundaries += _part_of(late, from_boundaries, wanted)
        for read in (*_part_of(late, strangers, wanted), *residuals):
            self.from_other_chains.append(read)
            self.unsupplied[read.elements] += read.bytes
        apart += strangers
        # A result is written if another chain, a boundary or no row reads it.
        unclaimed = max(0.0, in_chains - joined - apart - by_boundaries)
        written = min(in_chains, apart + by_boundaries) + unclaimed
        for tensor in chains:
            tensor.written += tensor.unread * min(1.0, written / in_chains)

    def results(self) -> Iterator[_Tensor]:
        """Yield the tensors that fused kernels write to memory."""
        for tensors in self._written.values():
            yield from (t for t in tensors if not t.is_boundary and t.written)


def _part_of(reads: list[_Read], part: float, whole: float) -> list[_Read]:
    """Return the reads with `part / whole` of their times, or no reads if the part is 0."""
    return [read._replace(times=read.times * part / whole) for read in reads] if part else []


def _classes(sizes: list[float]) -> dict[float, int]:
    """Group sizes into classes of almost equal sizes, and return the class of each size.

    A size belongs to the class of the next smaller one if they differ by at most 1%. The smallest
    and the largest size of a class can differ by more.
    """
    distinct = np.unique(np.array(sizes, dtype=np.float64))
    apart = distinct[1:] > SAME_SIZE * distinct[:-1]
    classes = np.concatenate([[0], np.cumsum(apart)]) if len(distinct) else np.zeros(0)
    return dict(zip(distinct.tolist(), classes.astype(int).tolist(), strict=True))


MOST_OPERANDS = 5
_WIDTHS = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
"""Bytes per element of two operands, by the sum of both."""


def _operands(operators: Operators, i: int, dims: list[float], read: float) -> list[_Operand]:
    """Return the large operands of one operator of row `i`.

    Args:
        operators: Table of operators.
        i: Index of the row.
        dims: Sizes of the operator.
        read: Bytes that the operator reads.
    """
    kind, width = operators.kind[i], 2.0 if operators.half[i] else 4.0
    if kind == "gemm":
        b, m, n, k = dims[: len(GEMM)]
        return [_Operand(size * width, size) for size in (b * m * k, b * k * n)]
    if kind == "attention":
        b, h, q, k, d, _, v, _ = dims[: len(ATTENTION)]
        sizes = q * d, k * d, k * (v or d)
        return [_Operand(b * h * size * width, b * h * size) for size in sizes]
    if not read:
        return []
    if kind in BOUNDARIES:
        return [_Operand(read, read)]
    return _streamed(dims[OTHER.elements_in], dims[OTHER.elements_out], read)


def _streamed(elements: float, out: float, read: float) -> list[_Operand]:
    """Return the large operands of an operator that reads `elements` in `read` bytes."""
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
    """Return the bytes that one operator writes, without the mask of a dropout.

    The mask has one byte per element.
    """
    return written - dims[OTHER.elements_out] / 2 if function == "native_dropout" else written
