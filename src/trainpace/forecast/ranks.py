"""Operators of one rank, and their times in the repeated blocks, before them and after them.

Parallelism changes the sizes of the operators in the table. Small matmuls therefore get the time of
small matmuls.

- Tensor parallelism divides the weight of a column-parallel matmul by outputs, and of a
  row-parallel matmul by inputs (Shoeybi et al. 2019). Operators between them are divided by heads
  or features.
- Sequence parallelism divides the other operators along the sequence (Korthikanti et al. 2022).
- Context parallelism divides the tokens. Attention keeps all keys and values. With a causal mask,
  the rank with the last tokens is timed. The forecasts of six of torchtitan's runs of 2024-12 are
  then 9% short to 16% long. If ranks shared the work evenly, they would be 1.2 to 1.7 times as fast
  as measured.

Selective recomputation has two meanings. If attention consists of separate kernels, it repeats
their matmuls, softmax and dropout (Korthikanti et al. 2022, section 5). A fused attention kernel
keeps nothing that could be dropped. Selective then means the same as in torchtitan: the results of
attention and of every second matmul are kept, and everything else is repeated
(models/llama3/parallelize.py, option "op").

Limits: keys and values are divided like queries, although ranks hold copies if there are more ranks
than key-value heads. Under context parallelism, the reads of keys and values are divided, although
each rank reads all of them.

Shapes: a table has one row per operator. Sizes in it are affine in the batch size and have a last
axis of 2: the constant and the part per sample. Arrays of executions have shape (n,).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.uncertainty import OPERATOR_PARTS, parts_of
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    CONVOLUTION_KINDS,
    GEMM,
    GROUPED,
    Blocks,
    Counts,
    Flags,
    Floats,
    Operators,
    multiplies_activations,
)

REPEATED_PRODUCTS = 0.5
"""Share of matmuls that selective recomputation repeats with fused attention."""
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
    """Return the operators of one rank, in a table with the same rows.

    Optimizer rows are unchanged. `step.StepModel` divides their time.

    Args:
        operators: Operators of the whole model.
        blocks: Repeated blocks of the model, or None.
        tp: Size of tensor parallelism.
        cp: Size of context parallelism.
        sequence_parallel: True for sequence parallelism.
        ep: Size of expert parallelism.
        expert_tp: Number of ranks that share one expert.
        expert_load: Tokens on the fullest expert rank, relative to the mean.
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
    # A rank that sends tokens to others knows where they came from. The gradient is therefore a
    # gather instead of a sum by index (Megatron-Core's fused permute and unpermute, DeepEP).
    scattered = (
        np.isin(operators.function, SCATTERS) & works & (blocks.operator_counts > 0) & (ep > 1)
    )
    function = tuple(np.where(scattered, "index_select", operators.function).tolist())
    return replace(operators, function=function, dims=dims, **tables)


def _divide_tokens(dims: Floats, kind: NDArray[np.str_], works: Flags, cp: int) -> None:
    matmuls = (kind == "gemm") & works
    # Batched matmuls inside attention: one per sample and head.
    batched = matmuls & (dims[:, GEMM.batch, 1] > 0)
    dims[batched, GEMM.m] /= cp
    # Tokens are the rows of the output, or the summed size in the gradient of a weight.
    for axis in (GEMM.m, GEMM.k):
        dims[matmuls & ~batched, axis, 1] /= cp
    dims[np.isin(kind, ATTENTION_KINDS), ATTENTION.queries] /= cp


def _divided_axis(column: Flags, forward: Flags, of_weight: Flags) -> NDArray[np.intp]:
    """Return the index of the matmul size that tensor parallelism divides.

    Args:
        column: Mask of column-parallel matmuls. The others are row-parallel.
        forward: Mask of matmuls in the forward pass.
        of_weight: Mask of matmuls that compute the gradient of a weight.
    """
    m, n, k = GEMM.m, GEMM.n, GEMM.k
    cases = [forward & column, forward, of_weight & column, of_weight, column]
    return np.select(cases, [n, k, m, n, k], n)


def _sums_over_tokens(dims: Floats) -> Flags:
    """Return a mask of the matmuls that compute the gradient of a weight."""
    return np.asarray((dims[:, GEMM.k, 1] > 0) & (dims[:, GEMM.m, 1] == 0))


class _Moved:
    """Bytes of matmuls before their sizes change, to scale the bytes of the table."""

    def __init__(self, dims: Floats) -> None:
        self._before = self._bytes(dims)

    @staticmethod
    def _bytes(dims: Floats) -> dict[str, Floats]:
        m, n, k = GEMM.m, GEMM.n, GEMM.k
        read = _product(dims, m, k) + _product(dims, k, n)
        return {"read_bytes": read, "written_bytes": _product(dims, m, n)}

    def shares(self, dims: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield the remaining share of the read bytes, then of the written bytes."""
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
    """Divide the grouped matmuls of experts for one rank, in place.

    ep divides the groups. Each group gets the tokens that all ep ranks have for it. Each
    tensor-parallel rank brings its part of the tokens, as sequence parallelism divides them.
    expert_tp gathers the tokens of that many ranks, and divides each expert like tensor
    parallelism.

    Args:
        dims: Sizes of all operators.
        tables: FLOPs and bytes of all operators, by name.
        role: Role of each operator.
        grouped: Mask of the grouped matmuls.
        phase: Phase of each operator.
        ranks: (tp, ep, expert_tp).
        load: Tokens on the fullest expert rank, relative to the mean.
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
    """Return the affine coefficients of the product of two sizes.

    At most one of them may grow with the batch.
    """
    x, y = dims[:, a], dims[:, b]
    return np.stack([x[:, 0] * y[:, 0], x[:, 0] * y[:, 1] + x[:, 1] * y[:, 0]], axis=1)


def gives_up_attention(blocks: Blocks) -> bool:
    """Return True if attention keeps activations that selective recomputation can drop.

    This is the case if its matmuls and softmax are separate kernels.
    """
    return max(blocks.attention_saved_bytes) > 0


def repeated_share(operators: Operators, blocks: Blocks | None) -> Floats:
    """Return the share of each row that selective recomputation repeats, shape (rows,).

    The share is 0 outside all blocks and outside the forward pass.
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
    inside = blocks.operator_counts + recomputed_counts(blocks) > 0
    return np.where((np.array(operators.phase) == "forward") & inside, share, 0.0)


def recomputed_counts(blocks: Blocks) -> Counts:
    """Return, for each row, the operators in blocks outside the chain that save activations."""
    counts = np.zeros_like(blocks.operator_counts)
    for one in blocks.others:
        if sum(one.saved_bytes) > sum(one.left_bytes):
            counts = counts + one.operator_counts
    return counts


def kept_bytes(operators: Operators, blocks: Blocks) -> tuple[float, float]:
    """Return the bytes that one block keeps under selective recomputation with fused attention.

    These are the block's input and the results that are not repeated.

    Returns:
        (constant bytes, bytes per sample).
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
    """Milliseconds of the pieces of a stage, for n executions.

    Fields that end in `_device` are device time, and fields that end in `_host` are host time.

    Attributes:
        passes_device: One block, the operators before the blocks and those after them, each in the
            forward and the backward pass, shape (n, 3, 2). passes_host likewise.
        others_device: Work in blocks outside the chain that full recomputation repeats, then
            that selective recomputation repeats, shape (n, 2). others_host likewise.
        optimizer_device: Update of the whole model, shape (n,). optimizer_host likewise.
        attention_device: Attention of one block in the forward pass, shape (n,).
        repeated_device: Work of one block that selective recomputation repeats, shape (n,).
            repeated_host likewise.
        start: Host time outside of the phases, shape (n,).
        parts: Device time by the first six of `uncertainty.PARTS`, inside the blocks, then outside
            of them, then in the optimizer, shape (n, 18).
    """

    passes_device: Floats
    optimizer_device: Floats
    attention_device: Floats
    repeated_device: Floats
    others_device: Floats
    passes_host: Floats
    optimizer_host: Floats
    repeated_host: Floats
    others_host: Floats
    start: Floats
    parts: Floats

    @classmethod
    def of(cls, rows: Floats) -> StageCosts:
        """Split the columns of the result of `RankTable.costs`."""
        device, host = (rows[:, i : i + 6].reshape(-1, 3, 2) for i in (0, 11))
        on_device = (device, rows[:, 6], rows[:, 7], rows[:, 8], rows[:, 9:11])
        on_host = (host, rows[:, 17], rows[:, 19], rows[:, 20:22])
        return cls(*on_device, *on_host, rows[:, 22], rows[:, 23:])


class RankTable(KernelTable):
    """Operators of one rank, with the share of each row that runs in each piece of a stage."""

    def __init__(
        self, operators: Operators, blocks: Blocks | None, like: KernelTable | None = None
    ) -> None:
        """Compute the shares of the rows.

        Args:
            operators: Operators of one rank.
            blocks: Repeated blocks of the model, or None.
            like: Table of the same rows for which torch.compile fuses the same rows.
        """
        super().__init__(operators, like=like)
        kind, phase = np.array(operators.kind), np.array(operators.phase)
        forward, backward, self.updates = (
            phase == name for name in ("forward", "backward", "optimizer")
        )
        self.part = parts_of(operators)
        if blocks is None:
            self.inside = block = np.zeros(len(operators))
            first, core = np.ones(len(operators), dtype=bool), np.zeros(len(operators), dtype=bool)
            other = block
        else:
            self.inside = blocks.operator_counts / operators.count
            block = self.inside / blocks.count
            other = recomputed_counts(blocks) / operators.count * forward
            first = (kind == "embedding") | np.array(
                [name.startswith("embedding") for name in operators.function]
            )
            if blocks.heads:
                # In a transformer, convolutions cut the image into patches before the blocks.
                first |= np.isin(kind, CONVOLUTION_KINDS)
            # Rows of attention: fused attention, or matmuls of two activations and their softmax.
            core = multiplies_activations(operators) | np.isin(kind, (*ATTENTION_KINDS, "softmax"))
            core &= (blocks.operator_counts > 0) & forward
        by_place = (block, (1 - self.inside) * first, (1 - self.inside) * ~first)
        self._weights = np.array(
            [
                *(place * phase for place in by_place for phase in (forward, backward)),
                self.updates,
                block * core,
                block * repeated_share(operators, blocks),
                other,
                other * repeated_share(operators, blocks),
            ],
            dtype=np.float64,
        )
        of_part = np.equal.outer(self.part, np.arange(OPERATOR_PARTS))
        where = (self.inside * ~self.updates, (1 - self.inside) * ~self.updates, self.updates)
        self._by_part = np.concatenate([of_part * share[:, None] for share in where], axis=1)

    def costs(self, device_s: Floats, host_ms: Floats, start_ms: float) -> Floats:
        """Return the costs at several batch sizes, as an array for `StageCosts.of`.

        Args:
            device_s: Device seconds of the operators, shape (batches, rows).
            host_ms: Host milliseconds of the operators, shape (rows,).
            start_ms: Host milliseconds per step outside of the phases.

        Returns:
            Milliseconds, shape (batches, columns). A line does not depend on the other lines.
        """
        device = 1e3 * device_s
        columns = [(device * weight).sum(axis=1) for weight in self._weights]
        columns += [np.full(len(device), (host_ms * weight).sum()) for weight in self._weights]
        columns.append(np.full(len(device), start_ms))
        return np.concatenate([np.stack(columns, axis=1), device @ self._by_part], axis=1)
