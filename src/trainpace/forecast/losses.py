"""The cross-entropy of a vocabulary by other kernels than the framework's own.

- plain, as it is traced: logits are cast to fp32, their log-softmax is kept, and the backward pass
  makes two more tensors of their size. uncompiled: the same, which torch.compile leaves alone.
- fused: one kernel reads the logits twice, for the maximum with the sum and for the gradient, which
  it writes in their place; the backward pass has nothing left to do (Liger's cross_entropy).
  fused_fp32: the same in a model whose code casts logits to fp32 before it calls the loss, as
  transformers' does.
- vocab_parallel: casts, then works in place, so that the softmax becomes the gradient
  (Megatron-LM's VocabParallelCrossEntropy, core/tensor_parallel/cross_entropy.py); tensor-parallel
  ranks divide it as they divide the logits.
- chunked: head, loss and the head's gradients process a few tokens at a time, in as many chunks as
  the vocabulary has times the hidden size, and add up the gradient of the head's weight over them
  (Liger's fused_linear_cross_entropy, release 0.8.5; Hsu et al. 2024, arXiv:2410.10989, section
  3.2).
- cut: the head's matmul keeps no logits but the logarithm of their sum, and the backward pass makes
  each block of them again for the gradients (Wijmans et al. 2025, arXiv:2411.09009). It skips
  blocks whose gradients round to nothing; their number depends on what the model has learned, so
  none are skipped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import Form
from trainpace.core.software import CrossEntropy
from trainpace.forecast.fusion import UNCOMPILED
from trainpace.forecast.rewrites import Pair, Part, fixed, passes, replaced
from trainpace.workload import GEMM, OTHER, Blocks, Floats, MemoryProfile, Operators, TracedForm

FP32 = 4.0
"""Bytes of a number."""
LOSS = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
SMALLEST_VOCABULARY = 2048
"""Fewer classes are a classifier's, whose loss costs nothing."""
MATMUL_SIZES = [GEMM.m, GEMM.n, GEMM.k]


class _Loss(NamedTuple):
    """Rows of one loss, and its logits.

    others: its rows besides the first. elements: of the logits. width: of their numbers in bytes as
    the head makes them; plain_width: as the plain loss takes them. is_copied: logits without their
    last token's are a copy, as transformers 4.45 makes it. is_returned_wide: the model returns
    another copy in fp32, as accelerate does. head: rows of the matmul before it, with its two
    gradients.
    """

    start: int
    others: tuple[int, ...]
    elements: Pair
    width: float
    plain_width: float
    is_copied: bool
    is_returned_wide: bool
    vocabulary: float
    head: tuple[int, ...]

    @property
    def tokens(self) -> Pair:
        result: Pair = self.elements / self.vocabulary
        return result


class _Bytes(NamedTuple):
    """Bytes of a loss.

    saved: from the loss to the backward pass; working: more at its fullest moment.
    """

    saved: Pair
    working: Pair

    @property
    def most(self) -> Pair:
        return self.saved + self.working


Parts = dict[int, Sequence[Part]]


def has_vocabulary_loss(operators: Operators) -> bool:
    """Return True if there is a cross-entropy over a vocabulary."""
    return _loss(operators) is not None


def is_in_16_bits(operators: Operators) -> bool:
    """Return True if the head of that cross-entropy multiplies 16-bit numbers."""
    loss = _loss(operators)
    return loss is not None and loss.width == 2.0


def with_loss(form: TracedForm, kernels: CrossEntropy, name: Form = "half") -> TracedForm:
    """Return the form with its cross-entropy made by `kernels`.

    `name` is that of the form, on which the copies that kernels make depend.
    """
    operators, loss = form.operators, _loss(form.operators)
    if loss is None or kernels == "plain" or (kernels == "cut" and loss.width != 2.0):
        return form
    if kernels == "uncompiled":
        return _left_uncompiled(form, loss)
    parts: Parts = dict.fromkeys(loss.others, ())
    kept = _KERNELS[kernels](operators, loss, parts, name)
    result = replaced(form, parts)
    if form.blocks is None or result.blocks is None:
        return result
    before = _Bytes(loss.plain_width * loss.elements, 2.0 * loss.plain_width * loss.elements)
    more = {
        "outside_saved_bytes": kept.saved - before.saved,
        "after_saved_bytes": kept.saved - before.saved,
        "after_working_bytes": kept.working - before.working,
    }
    pairs = {
        field: tuple(np.maximum(np.array(getattr(form.blocks, field)) + by, 0.0).tolist())
        for field, by in more.items()
    }
    memory = _without_logits(form.memory, form.blocks, before.most, kept.most)
    return replace(result, memory=memory, blocks=replace(result.blocks, **pairs))


def _left_uncompiled(form: TracedForm, loss: _Loss) -> TracedForm:
    operators, outside = form.operators, {loss.start, *loss.others}
    module = tuple(
        name + UNCOMPILED if i in outside else name for i, name in enumerate(operators.module)
    )
    return replace(form, operators=replace(operators, module=module))


def _fused(operators: Operators, loss: _Loss, parts: Parts, name: Form, chunks: int = 1) -> _Bytes:
    """The gradient takes the place of the logits."""
    s, w = loss.elements / chunks, loss.width
    parts[loss.start] = [
        passes("softmax", "cross_entropy", s, 2 * w, w, extent=loss.vocabulary, each=chunks)
    ]
    return _with_copies(loss, _Bytes(w * s, 0.0 * s), w)


def _fused_in_fp32(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """The model's own casts of the logits stay."""
    s, w = loss.elements, loss.width
    if w < FP32:
        for i in loss.others:
            if operators.function[i] == "_to_copy":
                del parts[i]
    parts[loss.start] = [
        passes("softmax", "cross_entropy", s, 2 * FP32, FP32, extent=loss.vocabulary)
    ]
    # the gradient of what was cast, and its own cast
    return _with_copies(loss, _Bytes(FP32 * s, (w if w < FP32 else 0.0) * s), FP32)


def _with_copies(loss: _Loss, kept: _Bytes, width: float) -> _Bytes:
    """Add the gradient of a copy of the logits, and the fp32 logits that the model returns."""
    s = loss.elements
    working = width * s if loss.is_copied else kept.working
    if loss.is_returned_wide:
        working = np.maximum(working, (FP32 + loss.width * loss.is_copied) * s)
    return _Bytes(kept.saved, working)


def _chunked(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """The gradients of input and weight are made beside one chunk's logits, and then wait."""
    sizes = operators.dims[list(loss.head)][:, MATMUL_SIZES].reshape(-1, 2)
    others = (sizes[:, 0] > 1) & (sizes[:, 0] != loss.vocabulary)
    # as many chunks as make their logits as large as the hidden states
    hidden = sizes[others & (sizes[:, 1] == 0), 0]
    chunks = math.ceil(loss.vocabulary / float(hidden.min())) if len(hidden) else 1
    plain = loss._replace(is_copied=False, is_returned_wide=False)
    logits = _fused(operators, plain, parts, name, chunks)
    if chunks > 1:
        parts |= {i: [_in_chunks(operators, i, chunks)] for i in loss.head}
    # of the head's weight
    numbers = loss.vocabulary * float(sizes[others, 0].max(initial=0.0))
    # a frozen head's gradient sums over no tokens
    trained = any(operators.dims[i, GEMM.k, 1] for i in loss.head)
    weight = (2.0 if name == "half" else FP32) * numbers * trained
    # autocast keeps no cast of a view (cached_cast in aten/src/ATen/autocast_mode.cpp), and matmuls
    # take the weight transposed
    cast = fixed(2.0 * numbers if name == "amp" else 0.0)
    hidden_states = loss.elements * (numbers / loss.vocabulary**2)
    return _Bytes(loss.width * hidden_states + fixed(weight), logits.most + cast)


def _cut(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """One number per token is kept.

    Each matmul of the backward pass needs the logits' blocks again, which one kernel shares.
    """
    tokens = loss.tokens
    parts[loss.start] = [passes("reduction", "indexed_dot", tokens, 2 * FP32, FP32, half=True)]
    again: list[Part] = []
    for i in loss.head:
        dims = tuple(operators.dims[i, : len(GEMM)].astype(np.float64))
        is_forward = operators.phase[i] == "forward"
        written = FP32 * tokens if is_forward else operators.written_bytes[i].astype(np.float64)
        read = operators.read_bytes[i].astype(np.float64)
        if not is_forward:  # it reads hidden states and weight: the gradients stay on the chip
            read = np.maximum(read - loss.width * loss.elements, 0.0)
        flops = operators.flops[i].astype(np.float64)
        parts[i] = [Part("gemm", operators.function[i], True, flops, read, written, dims)]
        again = list(parts[i]) if is_forward else again
    first = next((i for i in loss.head if operators.phase[i] == "backward"), None)
    if first is not None:
        parts[first] = [*again, *parts[first]]
    return _Bytes(FP32 * tokens, 0.0 * tokens)


def _vocab_parallel(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """Maximum, difference, exponential, sum and quotient, in fp32 and in place.

    The backward pass scales the result.
    """
    s, w = loss.elements, loss.width

    def in_place(function: str) -> Part:
        return passes("elementwise", function, s, FP32, FP32)

    def over_words(function: str) -> Part:
        dims = s, loss.tokens, fixed(0.0)
        return Part("reduction", function, False, s, FP32 * s, FP32 * loss.tokens, dims)

    casts = w == 2.0
    widened = [passes("copy", "_to_copy", s, w, FP32)] if casts else []
    narrowed = [passes("copy", "_to_copy", s, FP32, w)] if casts else []
    maximum, total = over_words("amax"), over_words("sum")
    steps = maximum, in_place("sub_"), in_place("exp"), total, in_place("div_")
    parts[loss.start] = [*widened, *steps]
    last = next((i for i in loss.others if operators.phase[i] == "backward"), None)
    if last is not None:
        parts[last] = [in_place("mul_"), *narrowed]
    return _Bytes(FP32 * s, w * s if casts else 0.0 * s)


_KERNELS: dict[str, Callable[[Operators, _Loss, Parts, Form], _Bytes]] = {
    "fused": _fused,
    "fused_fp32": _fused_in_fp32,
    "chunked": _chunked,
    "cut": _cut,
    "vocab_parallel": _vocab_parallel,
}
"""Functions that put the operators of a loss into `parts`, and return what it keeps."""


def _loss(operators: Operators) -> _Loss | None:
    function = np.array(operators.function)
    starts = np.flatnonzero(function == "_log_softmax")
    if len(starts) != 1:
        return None
    start = int(starts[0])
    elements = operators.dims[start, OTHER.elements_in].astype(np.float64)
    vocabulary = operators.dims[start, OTHER.extent].sum()
    if vocabulary < SMALLEST_VOCABULARY:
        return None

    def as_many(tolerance: float) -> Floats:
        counts = operators.dims[:, OTHER.elements_in]
        return np.isclose(counts, elements, rtol=tolerance).all(axis=1)

    casts, same = function == "_to_copy", as_many(1e-6)
    others = np.flatnonzero((casts & same) | np.isin(function, LOSS))
    matmuls = np.array(operators.kind) == "gemm"
    sizes = operators.dims[:, MATMUL_SIZES].sum(axis=2)
    head = np.flatnonzero(matmuls & (sizes == vocabulary).any(axis=1))
    half = bool(operators.half[head].any()) if len(head) else bool(operators.half[start])
    forward = np.array(operators.phase) == "forward"
    widened = casts & as_many(0.01) & ~operators.half & forward
    return _Loss(
        start=start,
        others=tuple(int(i) for i in others if i != start),
        elements=elements,
        width=2.0 if half else 4.0,
        plain_width=2.0 if operators.half[start] else 4.0,
        is_copied=bool(((function == "clone") & same).any()),
        is_returned_wide=bool(operators.count[widened].sum() > 1),  # the loss takes one
        vocabulary=float(vocabulary),
        head=tuple(int(i) for i in head),
    )


def _in_chunks(operators: Operators, i: int, chunks: int) -> Part:
    """Return a matmul of the head over the tokens of one chunk at a time."""
    dims = operators.dims[i].astype(np.float64)
    m, n, k = (dims[at] for at in MATMUL_SIZES)
    half, width = bool(operators.half[i]), 2.0 if operators.half[i] else 4.0
    m, n, k = (size / chunks if size[1] else size for size in (m, n, k))

    def bytes_of(a: Pair, b: Pair) -> Floats:
        return width * np.array([a[0] * b[0], a[0] * b[1] + a[1] * b[0]])

    flops = operators.flops[i] / chunks
    read, written = bytes_of(m, k) + bytes_of(k, n), bytes_of(m, n)
    if k[1]:
        # the weight's gradient adds up over the chunks (addmm)
        read = read + width * fixed(float(m[0] * n[0]))
    sizes = dims[GEMM.batch], m, n, k
    return Part("gemm", operators.function[i], half, flops, read, written, sizes, each=chunks)


def _without_logits(
    memory: MemoryProfile, blocks: Blocks, logits: Pair, kept: Pair
) -> MemoryProfile:
    """Return the profile with smaller moments of head and loss.

    These hold more than what all blocks keep and one works with. `kept` bytes are alive there in
    place of the `logits`.
    """
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
