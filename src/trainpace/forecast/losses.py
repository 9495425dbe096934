"""The cross-entropy of a vocabulary by other kernels than the framework's own.

plain, as it is traced: logits are cast to fp32, their log-softmax is kept, and the backward pass makes two more tensors of
their size; uncompiled: the same, left alone by torch.compile. fused: one kernel reads the logits twice, for the maximum with
the sum and for the gradient, which it writes in their place; the backward pass has nothing left to do. chunked: head, loss and
the head's gradients go over a few tokens at a time, in as many chunks as the vocabulary has times the hidden size, and the
gradient of the head's weight is added up over them (Liger's fused_linear_cross_entropy: Hsu et al. 2024, arXiv:2410.10989,
section 3.2). Liger measured that one on an A100, with 128,256 words of 4,096 numbers: 121, 167, 277 and 511 ms for 4, 8, 16
and 32 thousand tokens, forecast 2 to 13 % longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.forecast.fusion import UNCOMPILED
from trainpace.forecast.rewriting import Pair, Part, exchanged, fixed, passes
from trainpace.software import CrossEntropy
from trainpace.workload import GEMM, OTHER, Blocks, Floats, MemoryProfile, Operators, TracedForm

LOSS = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
SMALLEST_VOCABULARY = 2048
"""Fewer classes are a classifier's, whose loss costs nothing."""
IN_FP32 = 3.0
"""Tensors of the logits' size that are alive at once in fp32: the log-softmax that is kept, and two gradients."""


CHUNK_TENSORS = 5.0
"""Tensors of a chunk's logits that are alive at once where head and loss go over chunks, besides the product for the weight's
gradient, as large as the weight: Liger's fused_linear_cross_entropy takes 54 KiB more a token of 4,096 numbers, of which 16 are
the hidden state and its gradient, and 32 chunks hold all logits (A100, 128,256 words; between 4 and 32 thousand tokens)."""


class _Loss(NamedTuple):
    """Rows of one loss. elements: of the logits; width: of their numbers in bytes; head: rows of the product before it, with its
    two gradients; tokens: a sample's, or so many as the batch has."""

    start: int
    others: tuple[int, ...]
    elements: Pair
    width: float
    vocabulary: float
    head: tuple[int, ...]


def has_vocabulary_loss(operators: Operators) -> bool:
    """Whether there is a cross-entropy to exchange."""
    return _loss(operators) is not None


def with_loss(form: TracedForm, kernels: CrossEntropy) -> TracedForm:
    """The form with its cross-entropy made by `kernels`."""
    operators, loss = form.operators, _loss(form.operators)
    if loss is None or kernels == "plain":
        return form
    if kernels == "uncompiled":
        outside = {loss.start, *loss.others}
        module = tuple(name + UNCOMPILED if i in outside else name for i, name in enumerate(operators.module))
        return replace(form, operators=replace(operators, module=module))
    s, w = loss.elements, loss.width
    chunks = _chunks(operators, loss) if kernels == "chunked" else 1
    kernel = passes("softmax", "cross_entropy", w == 2.0, s / chunks, 2 * w * s / chunks, w * s / chunks,
                    extent=loss.vocabulary, each=chunks)  # fmt: skip
    parts: dict[int, Sequence[Part]] = dict.fromkeys(loss.others, ())
    parts[loss.start] = [kernel]
    if chunks > 1:
        parts |= {i: _in_chunks(operators, i, chunks) for i in loss.head}
    result = exchanged(form, parts)
    if form.blocks is None or result.blocks is None:
        return result
    kept = w * s if chunks == 1 else CHUNK_TENSORS * w * s / chunks + fixed(w * _weight(operators, loss))
    logits = IN_FP32 * 4.0 * s
    pairs = {
        # the logits with their gradient in their place, where a log-softmax in fp32 was kept
        name: tuple(np.maximum(np.array(getattr(form.blocks, name)) - 4.0 * s + kept, 0.0).tolist())
        for name in ("outside_saved_bytes", "after_saved_bytes")
    }
    pairs["after_working_bytes"] = tuple(np.maximum(np.array(form.blocks.after_working_bytes) - 8.0 * s, 0.0).tolist())
    memory = _without_logits(form.memory, form.blocks, logits, kept)
    return replace(result, memory=memory, blocks=replace(result.blocks, **pairs))


def _loss(operators: Operators) -> _Loss | None:
    function = np.array(operators.function)
    starts = np.flatnonzero(function == "_log_softmax")
    if len(starts) != 1:
        return None
    start = int(starts[0])
    elements, vocabulary = (
        operators.dims[start, OTHER.elements_in].astype(np.float64),
        operators.dims[start, OTHER.extent].sum(),
    )
    if vocabulary < SMALLEST_VOCABULARY:
        return None
    same = np.isclose(operators.dims[:, OTHER.elements_in], elements, rtol=1e-6).all(axis=1)
    casts = (function == "_to_copy") & same
    kernels = np.isin(function, LOSS)
    others = np.flatnonzero(casts | kernels)
    products = np.array(operators.kind) == "gemm"
    sizes = operators.dims[:, [GEMM.m, GEMM.n, GEMM.k]].sum(axis=2)
    head = np.flatnonzero(products & (sizes == vocabulary).any(axis=1))
    half = bool(operators.half[head].any()) if len(head) else bool(operators.half[start])
    rows = tuple(int(i) for i in others if i != start)
    return _Loss(start, rows, elements, 2.0 if half else 4.0, float(vocabulary), tuple(int(i) for i in head))


def _chunks(operators: Operators, loss: _Loss) -> int:
    """As many as the vocabulary has times the hidden size, so that a chunk's logits are as large as the hidden states."""
    sizes = [operators.dims[i, [GEMM.m, GEMM.n, GEMM.k]] for i in loss.head]
    hidden = [
        float(size[0]) for three in sizes for size in three if size[1] == 0 and size[0] not in (1, loss.vocabulary)
    ]
    return math.ceil(loss.vocabulary / min(hidden)) if hidden else 1


def _weight(operators: Operators, loss: _Loss) -> float:
    """Numbers of the head's weight."""
    fixed_sizes = [operators.dims[i, [GEMM.m, GEMM.n, GEMM.k], 0] for i in loss.head]
    hidden = [float(size) for sizes in fixed_sizes for size in sizes if size > 1 and size != loss.vocabulary]
    return loss.vocabulary * max(hidden, default=0.0)


def _in_chunks(operators: Operators, i: int, chunks: int) -> Sequence[Part]:
    """A product of the head over the tokens of one chunk at a time."""
    dims = operators.dims[i].astype(np.float64)
    m, n, k = (dims[at] for at in (GEMM.m, GEMM.n, GEMM.k))
    half, width = bool(operators.half[i]), 2.0 if operators.half[i] else 4.0
    m, n, k = (size / chunks if size[1] else size for size in (m, n, k))

    def bytes_of(a: Pair, b: Pair) -> Floats:
        return width * np.array([a[0] * b[0], a[0] * b[1] + a[1] * b[0]])

    flops = operators.flops[i] / chunks
    read, written = bytes_of(m, k) + bytes_of(k, n), bytes_of(m, n)
    name, sizes = operators.function[i], (dims[GEMM.batch], m, n, k)
    product = Part("gemm", name, half, flops, read, written, sizes, each=chunks)
    if k[1] == 0:
        return [product]
    weight = fixed(float(m[0] * n[0]))  # the weight's gradient sums over tokens, and so over the chunks
    return [
        product,
        passes("elementwise", "add_", half, weight, 2 * width * weight, width * weight, each=chunks, also_in=weight),
    ]


def _without_logits(memory: MemoryProfile, blocks: Blocks, logits: Pair, kept: Pair) -> MemoryProfile:
    """The moments of head and loss, which hold more than what all blocks keep and one works with, by as much smaller."""
    base = blocks.count * np.array(blocks.saved_bytes)
    least = base + np.maximum(np.array(blocks.working_bytes), kept)

    def smaller(rows: Floats) -> Floats:
        if not rows.size:
            return rows
        rows = rows.astype(np.float64)
        at_loss = rows[:, -1] > least[1]
        rows[at_loss, -1] = np.maximum(rows[at_loss, -1] - logits[1] + kept[1], least[1])
        rows[at_loss, -2] += kept[0]
        return rows

    return replace(memory, peaks=smaller(memory.peaks), moments=smaller(memory.moments))
