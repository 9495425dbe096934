"""The cross-entropy of a vocabulary by other kernels than the framework's own, after their sources.

plain, as it is traced: logits are cast to fp32, their log-softmax is kept, and the backward pass makes two more tensors of
their size; uncompiled: the same, left alone by torch.compile. fused: one kernel reads the logits twice, for the maximum with
the sum and for the gradient, which it writes in their place; the backward pass has nothing left to do (Liger's cross_entropy).
fused_fp32: the same, in a model whose code casts logits to fp32 before it calls the loss, as transformers' does.
vocab_parallel: casts, then works in place, so that the softmax becomes the gradient (Megatron-LM's VocabParallelCrossEntropy,
core/tensor_parallel/cross_entropy.py); tensor-parallel ranks divide it as they divide the logits. chunked: head, loss and the
head's gradients go over a few tokens at a time, in as many chunks as the vocabulary has times the hidden size, and the gradient
of the head's weight is added up over them (Liger's fused_linear_cross_entropy, release 0.8.5; Hsu et al. 2024,
arXiv:2410.10989, section 3.2). cut: the head's product keeps no logits but the logarithm of their sum, and the backward pass
makes each block of them again for the gradients (Wijmans et al. 2025, arXiv:2411.09009). It skips blocks whose gradients round
to nothing; how many depends on what the model has learned, so that none are skipped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import Form
from trainpace.core.software import CrossEntropy
from trainpace.forecast.fusion import UNCOMPILED
from trainpace.forecast.rewriting import Pair, Part, exchanged, fixed, passes
from trainpace.workload import GEMM, OTHER, Blocks, Floats, MemoryProfile, Operators, TracedForm

FP32 = 4.0
"""Bytes of a number."""
LOSS = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
SMALLEST_VOCABULARY = 2048
"""Fewer classes are a classifier's, whose loss costs nothing."""


class _Loss(NamedTuple):
    """Rows of one loss. elements: of the logits; width: of their numbers in bytes as the head makes them; plain_width: as the
    plain loss takes them; is_copied: logits without their last token's are a copy, as transformers 4.45 makes it;
    is_returned_wide: the model returns another copy in fp32, as accelerate does; head: rows of the product before it, with its
    two gradients."""

    start: int
    others: tuple[int, ...]
    elements: Pair
    width: float
    plain_width: float
    is_copied: bool
    is_returned_wide: bool
    vocabulary: float
    head: tuple[int, ...]


def has_vocabulary_loss(operators: Operators) -> bool:
    """Whether there is a cross-entropy to exchange."""
    return _loss(operators) is not None


def is_in_16_bits(operators: Operators) -> bool:
    """Whether the head of that cross-entropy multiplies 16-bit numbers."""
    loss = _loss(operators)
    return loss is not None and loss.width == 2.0


class _Held(NamedTuple):
    """Bytes of a loss. saved: from the loss to the backward pass; working: more at its fullest moment."""

    saved: Pair
    working: Pair

    @property
    def most(self) -> Pair:
        return self.saved + self.working


def with_loss(form: TracedForm, kernels: CrossEntropy, name: Form = "half") -> TracedForm:
    """The form with its cross-entropy made by `kernels`. `name`: of the form, on which the copies that kernels make depend."""
    operators, loss = form.operators, _loss(form.operators)
    if loss is None or kernels == "plain" or (kernels == "cut" and loss.width != 2.0):
        return form
    if kernels == "uncompiled":
        outside = {loss.start, *loss.others}
        module = tuple(
            name + UNCOMPILED if i in outside else name for i, name in enumerate(operators.module)
        )
        return replace(form, operators=replace(operators, module=module))
    parts: dict[int, Sequence[Part]] = dict.fromkeys(loss.others, ())
    if kernels == "fused_fp32":
        held = _fused_in_fp32(operators, loss, parts)
    elif kernels == "chunked":
        held = _chunked(operators, loss, parts, name)
    elif kernels == "cut":
        held = _cut(operators, loss, parts)
    elif kernels == "vocab_parallel":
        held = _vocab_parallel(operators, loss, parts)
    else:
        held = _fused(operators, loss, parts)
    result = exchanged(form, parts)
    if form.blocks is None or result.blocks is None:
        return result
    before = _Held(loss.plain_width * loss.elements, 2.0 * loss.plain_width * loss.elements)
    more = {
        "outside_saved_bytes": held.saved - before.saved,
        "after_saved_bytes": held.saved - before.saved,
    }
    more["after_working_bytes"] = held.working - before.working
    pairs = {
        field: tuple(np.maximum(np.array(getattr(form.blocks, field)) + by, 0.0).tolist())
        for field, by in more.items()
    }
    memory = _without_logits(form.memory, form.blocks, before.most, held.most)
    return replace(result, memory=memory, blocks=replace(result.blocks, **pairs))


def _fused(
    operators: Operators, loss: _Loss, parts: dict[int, Sequence[Part]], chunks: int = 1
) -> _Held:
    """The gradient takes the place of the logits."""
    s, w = loss.elements / chunks, loss.width
    parts[loss.start] = [
        passes(
            "softmax",
            "cross_entropy",
            w == 2.0,
            s,
            2 * w * s,
            w * s,
            extent=loss.vocabulary,
            each=chunks,
        )
    ]
    return _with_copies(loss, _Held(w * s, 0.0 * s), w)


def _fused_in_fp32(operators: Operators, loss: _Loss, parts: dict[int, Sequence[Part]]) -> _Held:
    """The model's own casts of the logits stay."""
    s, w = loss.elements, loss.width
    if w < FP32:
        for i in loss.others:
            if operators.function[i] == "_to_copy":
                del parts[i]
    parts[loss.start] = [
        passes("softmax", "cross_entropy", False, s, 2 * FP32 * s, FP32 * s, extent=loss.vocabulary)
    ]
    # the gradient of what was cast, and its own cast
    return _with_copies(loss, _Held(FP32 * s, (w if w < FP32 else 0.0) * s), FP32)


def _with_copies(loss: _Loss, held: _Held, width: float) -> _Held:
    """With the gradient of a copy beside that of what was copied, and the logits in fp32 that the model returns."""
    s = loss.elements
    working = width * s if loss.is_copied else held.working
    if loss.is_returned_wide:
        working = np.maximum(working, (FP32 + loss.width * loss.is_copied) * s)
    return _Held(held.saved, working)


def _chunked(
    operators: Operators, loss: _Loss, parts: dict[int, Sequence[Part]], name: Form
) -> _Held:
    """The gradients of input and weight are made beside one chunk's logits, and wait for the backward pass."""
    chunks = _chunks(operators, loss)
    logits = _fused(
        operators, loss._replace(is_copied=False, is_returned_wide=False), parts, chunks
    )
    if chunks > 1:
        parts |= {i: _in_chunks(operators, i, chunks) for i in loss.head}
    numbers = _weight(operators, loss)
    trained = any(
        operators.dims[i, GEMM.k, 1] for i in loss.head
    )  # a frozen head's gradient sums over no tokens
    weight = (2.0 if name == "half" else FP32) * numbers * trained
    # autocast keeps no cast of a view (cached_cast in aten/src/ATen/autocast_mode.cpp), and products take the weight transposed
    cast = fixed(2.0 * numbers if name == "amp" else 0.0)
    return _Held(loss.width * _hidden(operators, loss) + fixed(weight), logits.most + cast)


def _cut(operators: Operators, loss: _Loss, parts: dict[int, Sequence[Part]]) -> _Held:
    """One number a token is kept; each product of the backward pass needs the logits' blocks again, which one kernel shares."""
    tokens = loss.elements / loss.vocabulary
    parts[loss.start] = [
        passes("reduction", "indexed_dot", True, tokens, 2 * FP32 * tokens, FP32 * tokens)
    ]
    again: list[Part] = []
    for i in loss.head:
        d = operators.dims[i].astype(np.float64)
        sizes = tuple(d[at] for at in (GEMM.batch, GEMM.m, GEMM.n, GEMM.k))
        is_forward = operators.phase[i] == "forward"
        written = FP32 * tokens if is_forward else operators.written_bytes[i].astype(np.float64)
        read = operators.read_bytes[i].astype(np.float64)
        if not is_forward:  # of hidden states and weight: gradients of logits never leave the chip
            read = np.maximum(read - loss.width * loss.elements, 0.0)
        function = operators.function[i]
        one = Part(
            "gemm", function, True, operators.flops[i].astype(np.float64), read, written, sizes
        )
        if is_forward:
            again = [one]
        parts[i] = [one]
    first = next((i for i in loss.head if operators.phase[i] == "backward"), None)
    if first is not None:
        parts[first] = [*again, *parts[first]]
    return _Held(FP32 * tokens, 0.0 * tokens)


def _vocab_parallel(operators: Operators, loss: _Loss, parts: dict[int, Sequence[Part]]) -> _Held:
    """In fp32 and in place: maximum, difference, exponential, sum and quotient; the backward pass scales what is left."""
    s, w = loss.elements, loss.width
    tokens, whole = s / loss.vocabulary, FP32 * s

    def in_place(function: str) -> Part:
        return passes("elementwise", function, False, s, whole, whole)

    def over_words(function: str) -> Part:
        return Part("reduction", function, False, s, whole, FP32 * tokens, (s, tokens, fixed(0.0)))

    widened = [passes("copy", "_to_copy", False, s, w * s, whole)] if w == 2.0 else []
    narrowed = [passes("copy", "_to_copy", True, s, whole, w * s)] if w == 2.0 else []
    steps = (
        over_words("amax"),
        in_place("sub_"),
        in_place("exp"),
        over_words("sum"),
        in_place("div_"),
    )
    parts[loss.start] = [*widened, *steps]
    last = next((i for i in loss.others if operators.phase[i] == "backward"), None)
    if last is not None:
        parts[last] = [in_place("mul_"), *narrowed]
    return _Held(whole, w * s if narrowed else 0.0 * s)


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
    plain = 2.0 if operators.half[start] else 4.0
    is_copied = bool(((function == "clone") & same).any())
    logits = np.isclose(operators.dims[:, OTHER.elements_in], elements, rtol=0.01).all(axis=1)
    widened = (
        (function == "_to_copy")
        & logits
        & ~operators.half
        & (np.array(operators.phase) == "forward")
    )
    is_returned_wide = operators.count[widened].sum() > 1  # the loss takes one
    return _Loss(
        start,
        rows,
        elements,
        2.0 if half else 4.0,
        plain,
        is_copied,
        bool(is_returned_wide),
        float(vocabulary),
        tuple(int(i) for i in head),
    )


def _chunks(operators: Operators, loss: _Loss) -> int:
    """As many as the vocabulary has times the hidden size, so that a chunk's logits are as large as the hidden states."""
    sizes = [operators.dims[i, [GEMM.m, GEMM.n, GEMM.k]] for i in loss.head]
    hidden = [
        float(size[0])
        for three in sizes
        for size in three
        if size[1] == 0 and size[0] not in (1, loss.vocabulary)
    ]
    return math.ceil(loss.vocabulary / min(hidden)) if hidden else 1


def _weight(operators: Operators, loss: _Loss) -> float:
    """Numbers of the head's weight."""
    fixed_sizes = [operators.dims[i, [GEMM.m, GEMM.n, GEMM.k], 0] for i in loss.head]
    hidden = [
        float(size)
        for sizes in fixed_sizes
        for size in sizes
        if size > 1 and size != loss.vocabulary
    ]
    return loss.vocabulary * max(hidden, default=0.0)


def _hidden(operators: Operators, loss: _Loss) -> Pair:
    """Numbers of the hidden states that the head takes."""
    result: Pair = loss.elements * (_weight(operators, loss) / loss.vocabulary**2)
    return result


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
    if k[1]:
        read = read + width * fixed(
            float(m[0] * n[0])
        )  # the weight's gradient adds up over the chunks (addmm)
    return [Part("gemm", name, half, flops, read, written, sizes, each=chunks)]


def _without_logits(
    memory: MemoryProfile, blocks: Blocks, logits: Pair, kept: Pair
) -> MemoryProfile:
    """The moments of head and loss, which hold more than what all blocks keep and one works with, by as much smaller. kept: bytes
    that are alive there in place of the `logits`."""
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
