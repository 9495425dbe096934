"""Operators of one rank and their kernel times: in the repeated blocks, before and after them.

Tensor parallelism divides a column's weight by outputs and a row's by inputs (Shoeybi et al. 2019),
and whatever lies between them by heads or features. Sequence parallelism divides the rest along the
sequence (Korthikanti et al. 2022). Context parallelism divides the tokens everywhere; attention
keeps whole keys and values, and under a causal mask the rank with the last tokens is timed:
forecasts of six of torchtitan's runs of 2024-12 are then 9% short to 16% long, while ranks that
share the work evenly would be 1.2 to 1.7 times as fast as measured. Sizes shrink in the table
itself, so small matmuls get the time of small matmuls. Limits: keys and values are divided by as
much as queries, although more ranks than key-value heads hold copies; under context parallelism
their reads are divided although they are whole.

Selective recomputation repeats attention's matmuls, softmax and dropout if these are kernels of
their own (Korthikanti et al. 2022, section 5). If attention is one fused kernel it keeps nothing
that could be dropped; selective then means the same as in torchtitan: the results of attention and
of every second matmul are kept, all else is repeated (models/llama3/parallelize.py, option "op").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.forecast.intervals import OPERATOR_PARTS, parts_of
from trainpace.forecast.kernels import KernelTable
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    CONVOLUTION_KINDS,
    GEMM,
    GROUPED,
    Blocks,
    Flags,
    Floats,
    Operators,
    multiplies_activations,
)

REPEATED_PRODUCTS = 0.5
SCATTERS = ("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_")


def rank_operators(
    operators: Operators,
    blocks: Blocks | None,
    tp: int,
    cp: int,
    sequence_parallel: bool,
    ep: int = 1,
    expert_tp: int = 1,
    expert_load: float = 1.0,
) -> Operators:
    """Return the operators of one of tp x cp ranks, in a table of the same rows.

    Optimizer rows stay whole. The rank has the experts of one of ep x expert_tp ranks, the fullest
    if the router is not balanced.
    """
    if blocks is None or tp * cp * ep * expert_tp == 1:
        return operators
    kind, phase = np.array(operators.kind), np.array(operators.phase)
    works = phase != "optimizer"
    dims = operators.dims.astype(np.float64)
    if cp > 1:
        _divide_tokens(dims, kind, works, cp)
    tokens = np.where(works, float(cp), 1.0)
    tables = {
        name: getattr(operators, name) / np.stack([np.ones_like(tokens), tokens], axis=1)
        for name in ("flops", "read_bytes", "written_bytes")
    }
    role = np.where(works, np.array(blocks.roles), "")
    grouped = (np.array(operators.function) == GROUPED) & works & (blocks.operator_counts > 0)
    if tp > 1:
        _divide_features(
            dims, tables, kind, np.where(grouped, "", role), phase, tp, sequence_parallel
        )
    load = expert_load if ep > 1 else 1.0
    for table in tables.values():
        table[role == "expert"] *= load
    _divide_experts(dims, tables, role, grouped, phase, (tp, ep, expert_tp), load)
    # a rank that sends tokens to others knows where they came from: its gradient is a gather too,
    # not a sum by index (Megatron-Core's fused permute and unpermute, DeepEP)
    scattered = (
        np.isin(operators.function, SCATTERS) & works & (blocks.operator_counts > 0) & (ep > 1)
    )
    function = tuple(np.where(scattered, "index_select", operators.function).tolist())
    return replace(operators, function=function, dims=dims, **tables)


def _divide_tokens(dims: Floats, kind: NDArray[np.str_], works: Flags, cp: int) -> None:
    matmuls = (kind == "gemm") & works
    # matmuls inside attention, one for each sample and head
    batched = matmuls & (dims[:, GEMM.batch, 1] > 0)
    dims[batched, GEMM.m] /= cp
    # tokens are the rows of an output, or what a weight's gradient sums over
    for axis in (GEMM.m, GEMM.k):
        dims[matmuls & ~batched, axis, 1] /= cp
    dims[np.isin(kind, ATTENTION_KINDS), ATTENTION.queries] /= cp


def _divided_axis(column: Flags, forward: Flags, of_weight: Flags) -> NDArray[np.intp]:
    """Return which size of a matmul tensor parallelism divides.

    It depends on whether the weight is a column's or a row's, and on the pass.
    """
    m, n, k = GEMM.m, GEMM.n, GEMM.k
    cases = [forward & column, forward, of_weight & column, of_weight, column]
    return np.select(cases, [n, k, m, n, k], n)


def _sums_over_tokens(dims: Floats) -> Flags:
    """Return the matmuls that make a weight's gradient."""
    return np.asarray((dims[:, GEMM.k, 1] > 0) & (dims[:, GEMM.m, 1] == 0))


class _Moved:
    """The bytes of matmuls before their sizes change, to scale those of the table."""

    def __init__(self, dims: Floats) -> None:
        self._before = self._bytes(dims)

    @staticmethod
    def _bytes(dims: Floats) -> dict[str, Floats]:
        m, n, k = GEMM.m, GEMM.n, GEMM.k
        read = _product(dims, m, k) + _product(dims, k, n)
        return {"read_bytes": read, "written_bytes": _product(dims, m, n)}

    def shares(self, dims: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield what is left of the read and the written bytes."""
        for name, new in self._bytes(dims).items():
            old = self._before[name]
            yield name, np.divide(new, old, out=np.full_like(new, 1.0), where=old > 0)


def _divide_features(
    dims: Floats,
    tables: dict[str, Floats],
    kind: NDArray[np.str_],
    role: NDArray[np.str_],
    phase: NDArray[np.str_],
    tp: int,
    sequence_parallel: bool,
) -> None:
    column, row = role == "column", role == "row"
    weight = (kind == "gemm") & (column | row) & (dims[:, GEMM.batch, 1] == 0)
    axis = _divided_axis(column, phase == "forward", _sums_over_tokens(dims))
    rows, moved = np.flatnonzero(weight), _Moved(dims)
    dims[rows, axis[rows]] /= tp
    for name, share in moved.shares(dims):
        tables[name][weight] *= share[weight]
    tables["flops"][weight] /= tp
    divided = np.isin(role, ("sharded", "expert")) | (column & ~weight)
    if sequence_parallel:
        divided |= (role == "replicated") | (row & ~weight)
    divided &= ~np.isin(kind, CONVOLUTION_KINDS)
    dims[divided & (kind == "gemm"), GEMM.batch] /= tp
    dims[divided & np.isin(kind, ATTENTION_KINDS), ATTENTION.heads] /= tp
    for table in tables.values():
        table[divided] /= tp


def _divide_experts(
    dims: Floats,
    tables: dict[str, Floats],
    role: NDArray[np.str_],
    grouped: Flags,
    phase: NDArray[np.str_],
    ranks: tuple[int, int, int],
    load: float,
) -> None:
    """Divide grouped matmuls for one of (tp, ep, expert_tp) ranks.

    ep divides the groups, and sends each of them the rows that all ep ranks have for it. A
    tensor-parallel rank brings its part of the tokens, as sequence parallelism divides them;
    expert_tp gathers those of that many ranks, and divides each expert as tensor parallelism does.
    """
    tp, ep, expert_tp = ranks
    rows, moved = np.flatnonzero(grouped), _Moved(dims)
    of_weight = _sums_over_tokens(dims)[rows]
    feature = _divided_axis(role[rows] == "column", phase[rows] == "forward", of_weight)
    dims[rows, GEMM.batch] /= ep
    dims[rows, np.where(of_weight, GEMM.k, GEMM.m)] *= load * ep * expert_tp / tp
    dims[rows, feature] /= expert_tp
    for name, share in moved.shares(dims):
        tables[name][rows] *= share[rows] / ep
    tables["flops"][rows] *= load / tp


def _product(dims: Floats, a: int, b: int) -> Floats:
    """Return the coefficients of the product of two sizes; one of them may grow with the batch."""
    x, y = dims[:, a], dims[:, b]
    return np.stack([x[:, 0] * y[:, 0], x[:, 0] * y[:, 1] + x[:, 1] * y[:, 0]], axis=1)


def gives_up_attention(blocks: Blocks) -> bool:
    """Return True if attention keeps matmuls and softmax, which can be recomputed selectively."""
    return max(blocks.attention_saved_bytes) > 0


def repeated_share(operators: Operators, blocks: Blocks | None) -> Floats:
    """Return the share of each row's forward operators in the blocks that is repeated (n).

    This is under selective recomputation, from 0 to 1.
    """
    if blocks is None:
        return np.zeros(len(operators))
    kind = np.array(operators.kind)
    if gives_up_attention(blocks):
        share = (
            multiplies_activations(operators) | np.isin(kind, ("attention", "softmax"))
        ).astype(np.float64)
    else:
        share = np.select([kind == "attention", kind == "gemm"], [0.0, REPEATED_PRODUCTS], 1.0)
    return np.where(
        (np.array(operators.phase) == "forward") & (blocks.operator_counts > 0), share, 0.0
    )


def kept_bytes(operators: Operators, blocks: Blocks) -> tuple[float, float]:
    """Return the bytes that one block keeps under selective recomputation with fused attention.

    These are its input and the results that are not repeated: (constant, per sample).
    """
    kind = np.array(operators.kind)
    results = (np.array(operators.phase) == "forward") & np.isin(kind, ("gemm", "attention"))
    share = (
        np.where(kind == "attention", 1.0, 1 - REPEATED_PRODUCTS)
        * results
        * blocks.operator_counts
        / blocks.count
    )
    constant, slope = (share[:, None] * operators.written_bytes).sum(axis=0).tolist()
    return blocks.input_bytes[0] + constant, blocks.input_bytes[1] + slope


class StageCosts(NamedTuple):
    """Milliseconds of each execution, n, or n x 2 for forward and backward.

    Device and host time of one block, of what lies before and after the blocks, and of the whole
    optimizer step; of a block's attention (device, forward), and of what selective recomputation
    repeats of a block. start: the host's time outside of the phases. parts: the device's time by
    the first of `intervals.PARTS`: inside the blocks, outside of them, and in the optimizer
    (n x (3 x 6)).
    """

    block_device: Floats
    first_device: Floats
    last_device: Floats
    optimizer_device: Floats
    attention_device: Floats
    repeated_device: Floats
    block_host: Floats
    first_host: Floats
    last_host: Floats
    optimizer_host: Floats
    repeated_host: Floats
    start: Floats
    parts: Floats

    @classmethod
    def of(cls, rows: Floats) -> StageCosts:
        """Return the costs in rows as `RankTable.costs` makes them."""
        device, host = rows[:, :9], rows[:, 9:18]
        passes = [side[:, i : i + 2] for side in (device, host) for i in (0, 2, 4)]
        columns = [*passes[:3], *(device[:, i] for i in (6, 7, 8))]
        columns += [*passes[3:], *(host[:, i] for i in (6, 8)), rows[:, 18], rows[:, 19:]]
        return cls(*columns)


class RankTable(KernelTable):
    """The operators of one rank, and the share of each row that runs in each part of a stage."""

    def __init__(
        self, operators: Operators, blocks: Blocks | None, like: KernelTable | None = None
    ) -> None:
        """`like` is a table of the same rows, for which torch.compile fuses the same ones."""
        super().__init__(operators, like=like)
        kind, phase = np.array(operators.kind), np.array(operators.phase)
        forward, backward, self.updates = (
            phase == name for name in ("forward", "backward", "optimizer")
        )
        self.part = parts_of(operators)
        if blocks is None:
            self.inside = block = np.zeros(len(operators))
            first, core = np.ones(len(operators), dtype=bool), np.zeros(len(operators), dtype=bool)
        else:
            self.inside = blocks.operator_counts / operators.count
            block = self.inside / blocks.count
            first = (kind == "embedding") | np.array(
                [name.startswith("embedding") for name in operators.function]
            )
            if blocks.heads:
                first |= np.isin(kind, CONVOLUTION_KINDS)  # that cut an image into patches
            # attention's own rows: fused, or its matmuls of two activations and their softmax
            core = multiplies_activations(operators) | np.isin(kind, (*ATTENTION_KINDS, "softmax"))
            core &= (blocks.operator_counts > 0) & forward
        by_place = (block, (1 - self.inside) * first, (1 - self.inside) * ~first)
        self._weights = np.array(
            [
                *(place * phase for place in by_place for phase in (forward, backward)),
                self.updates,
                block * core,
                block * repeated_share(operators, blocks),
            ],
            dtype=np.float64,
        )
        of_part = np.equal.outer(self.part, np.arange(OPERATOR_PARTS))
        where = (self.inside * ~self.updates, (1 - self.inside) * ~self.updates, self.updates)
        self._by_part = np.concatenate([of_part * share[:, None] for share in where], axis=1)

    def costs(self, device_s: Floats, host_ms: Floats, start_ms: float) -> Floats:
        """Return the rows that `StageCosts.of` reads, one for each row of `device_s`.

        The numbers of a row do not depend on the other rows.
        """
        device = 1e3 * device_s
        columns = [(device * weight).sum(axis=1) for weight in self._weights]
        columns += [np.full(len(device), (host_ms * weight).sum()) for weight in self._weights]
        columns.append(np.full(len(device), start_ms))
        return np.concatenate([np.stack(columns, axis=1), device @ self._by_part], axis=1)
