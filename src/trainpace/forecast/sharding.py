"""The operators that one rank runs under tensor, sequence and context parallelism, as a table of the same rows.

Tensor parallelism divides a column's weight by outputs and a row's by inputs (Shoeybi et al. 2019), and whatever lies
between them by heads or features. Sequence parallelism divides the rest along the sequence (Korthikanti et al. 2022).
Context parallelism divides the tokens everywhere; attention keeps whole keys and values. Sizes shrink in the table itself, so
that small products are as slow as small products are. Limits: keys and values are divided by as much as queries, although
more ranks than key-value heads hold copies; under context parallelism their reads are divided although they are whole.
"""

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.workload import ATTENTION, ATTENTION_KINDS, CONVOLUTION_KINDS, GEMM, Blocks, Operators

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def rank_operators(operators: Operators, blocks: Blocks | None, tp: int, cp: int, sequence_parallel: bool) -> Operators:
    """What one of tp x cp ranks computes of every row. Optimizer rows stay whole."""
    if blocks is None or tp * cp == 1:
        return operators
    kind, role = np.array(operators.kind), np.array(blocks.roles)
    works = np.array(operators.phase) != "optimizer"
    dims = operators.dims.astype(np.float64)
    if cp > 1:
        _divide_tokens(dims, kind, works, cp)
    tokens = np.where(works, float(cp), 1.0)
    tables = {
        name: getattr(operators, name) / np.stack([np.ones_like(tokens), tokens], axis=1)
        for name in ("flops", "read_bytes", "written_bytes")
    }
    if tp > 1:
        _divide_features(
            dims, tables, kind, np.where(works, role, ""), np.array(operators.phase), tp, sequence_parallel
        )
    return replace(operators, dims=dims, **tables)


def _divide_tokens(dims: Floats, kind: NDArray[np.str_], works: Flags, cp: int) -> None:
    products = (kind == "gemm") & works
    batched = products & (dims[:, GEMM.batch, 1] > 0)  # products inside attention, one a sample and head
    dims[batched, GEMM.m] /= cp
    for axis in (GEMM.m, GEMM.k):  # tokens are the rows of an output, or what a weight's gradient sums over
        dims[products & ~batched, axis, 1] /= cp
    dims[np.isin(kind, ATTENTION_KINDS), ATTENTION.queries] /= cp


def _divide_features(
    dims: Floats,
    tables: dict[str, Floats],
    kind: NDArray[np.str_],
    role: NDArray[np.str_],
    phase: NDArray[np.str_],
    tp: int,
    sequence_parallel: bool,
) -> None:
    weight = (kind == "gemm") & np.isin(role, ("column", "row")) & (dims[:, GEMM.batch, 1] == 0)
    of_weight = weight & (dims[:, GEMM.k, 1] > 0) & (dims[:, GEMM.m, 1] == 0)  # a weight's gradient sums over tokens
    forward = weight & (phase == "forward")
    column, row = role == "column", role == "row"
    m, n, k = GEMM.m, GEMM.n, GEMM.k
    axis = np.select(
        [forward & column, forward & row, of_weight & column, of_weight & row, weight & column], [n, k, m, n, k], n
    )
    old_read, old_written = _product(dims, m, k) + _product(dims, k, n), _product(dims, m, n)
    rows = np.flatnonzero(weight)
    dims[rows, axis[rows]] /= tp
    new_read, new_written = _product(dims, m, k) + _product(dims, k, n), _product(dims, m, n)
    for name, old, new in (("read_bytes", old_read, new_read), ("written_bytes", old_written, new_written)):
        share = np.divide(new, old, out=np.full_like(new, 1.0), where=old > 0)
        tables[name][weight] *= share[weight]
    tables["flops"][weight] /= tp
    divided = (role == "sharded") | (column & ~weight)
    if sequence_parallel:
        divided |= (role == "replicated") | (row & ~weight)
    divided &= ~np.isin(kind, CONVOLUTION_KINDS)
    dims[divided & (kind == "gemm"), GEMM.batch] /= tp
    dims[divided & np.isin(kind, ATTENTION_KINDS), ATTENTION.heads] /= tp
    for table in tables.values():
        table[divided] /= tp


def _product(dims: Floats, a: int, b: int) -> Floats:
    """Coefficients of the product of two sizes of which at most one grows with the batch."""
    x, y = dims[:, a], dims[:, b]
    return np.stack([x[:, 0] * y[:, 0], x[:, 0] * y[:, 1] + x[:, 1] * y[:, 0]], axis=1)
