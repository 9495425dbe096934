"""Implementations of cross-entropy over a vocabulary, as rewrites of a traced loss.

- plain: the loss as traced. It casts logits to fp32 and keeps their log-softmax. The backward pass
  makes two more tensors of the same size.
- uncompiled: the same loss, but torch.compile does not compile it.
- fused: one kernel reads the logits twice, for maximum and sum and for the gradient. It writes the
  gradient in place of the logits. The backward pass has nothing left to do (Liger's cross_entropy).
- fused_fp32: the same for a model that casts logits to fp32 before the loss, as in transformers.
- vocab_parallel: casts logits and then works in place. The softmax becomes the gradient
  (Megatron-LM's VocabParallelCrossEntropy, core/tensor_parallel/cross_entropy.py). Tensor-parallel
  ranks divide it like the logits.
- chunked: head, loss and gradients of the head process a chunk of tokens at a time. The number of
  chunks is vocabulary / hidden size, rounded up. The gradient of the head's weight is summed over
  the chunks (Liger's fused_linear_cross_entropy, release 0.8.5; Hsu et al. 2024, arXiv:2410.10989,
  section 3.2).
- cut: the matmul of the head keeps only the log-sum-exp of the logits. The backward pass computes
  each block of logits again (Wijmans et al. 2025, arXiv:2411.09009). The real kernel skips blocks
  whose gradients round to zero. Their number depends on the trained model, so none are skipped
  here.

Sizes are of type `rewrites.Pair`, shape (2,): the constant and the part per sample.
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
"""Bytes of an fp32 number."""
LOSS = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
SMALLEST_VOCABULARY = 2048
"""Smallest number of classes of a vocabulary. The loss of a classifier with fewer is negligible."""
MATMUL_SIZES = [GEMM.m, GEMM.n, GEMM.k]


class _Loss(NamedTuple):
    """Rows of a traced loss, and properties of its logits.

    Attributes:
        start: First row of the loss.
        others: Its other rows.
        elements: Number of logits.
        width: Bytes per logit as the head computes them.
        plain_width: Bytes per logit in the plain loss.
        is_copied: True if the logits without those of the last token are a copy, as in transformers
            4.45.
        is_returned_wide: True if the model returns another copy in fp32, as accelerate does.
        vocabulary: Size of the vocabulary.
        head: Rows of the head's matmul and its two gradients.
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
    """Memory of a loss in bytes.

    Attributes:
        saved: Bytes that are kept from the loss to the backward pass.
        working: Further bytes at the moment of highest memory.
    """

    saved: Pair
    working: Pair

    @property
    def most(self) -> Pair:
        return self.saved + self.working


Parts = dict[int, Sequence[Part]]


def has_vocabulary_loss(operators: Operators) -> bool:
    """Return True if the table has a cross-entropy over a vocabulary."""
    return _loss(operators) is not None


def is_in_16_bits(operators: Operators) -> bool:
    """Return True if the head of that cross-entropy multiplies 16-bit numbers."""
    loss = _loss(operators)
    return loss is not None and loss.width == 2.0


def with_loss(form: TracedForm, kernels: CrossEntropy, name: Form = "half") -> TracedForm:
    """Return the form with another implementation of cross-entropy.

    Args:
        form: Traced form.
        kernels: Implementation (see the module's docstring).
        name: Name of the form. Some implementations make different copies in each form.
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
    """Put the fused loss into `parts`. The gradient replaces the logits in memory."""
    s, w = loss.elements / chunks, loss.width
    parts[loss.start] = [
        passes("softmax", "cross_entropy", s, 2 * w, w, extent=loss.vocabulary, each=chunks)
    ]
    return _with_copies(loss, _Bytes(w * s, 0.0 * s), w)


def _fused_in_fp32(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """Put the fused loss in fp32 into `parts`. The model's casts of the logits stay."""
    s, w = loss.elements, loss.width
    if w < FP32:
        for i in loss.others:
            if operators.function[i] == "_to_copy":
                del parts[i]
    parts[loss.start] = [
        passes("softmax", "cross_entropy", s, 2 * FP32, FP32, extent=loss.vocabulary)
    ]
    # The gradient of the cast logits is alive, and its cast to the width of the head.
    return _with_copies(loss, _Bytes(FP32 * s, (w if w < FP32 else 0.0) * s), FP32)


def _with_copies(loss: _Loss, kept: _Bytes, width: float) -> _Bytes:
    """Add the gradient of a copy of the logits, and the fp32 logits that the model returns."""
    s = loss.elements
    working = width * s if loss.is_copied else kept.working
    if loss.is_returned_wide:
        working = np.maximum(working, (FP32 + loss.width * loss.is_copied) * s)
    return _Bytes(kept.saved, working)


def _chunked(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """Put the chunked loss into `parts`.

    The gradients of input and weight are computed next to the logits of one chunk. They are then
    kept until the backward pass.
    """
    sizes = operators.dims[list(loss.head)][:, MATMUL_SIZES].reshape(-1, 2)
    others = (sizes[:, 0] > 1) & (sizes[:, 0] != loss.vocabulary)
    # There are enough chunks to make the logits of one chunk as large as the hidden states.
    hidden = sizes[others & (sizes[:, 1] == 0), 0]
    chunks = math.ceil(loss.vocabulary / float(hidden.min())) if len(hidden) else 1
    plain = loss._replace(is_copied=False, is_returned_wide=False)
    logits = _fused(operators, plain, parts, name, chunks)
    if chunks > 1:
        parts |= {i: [_in_chunks(operators, i, chunks)] for i in loss.head}
    # Elements of the head's weight.
    numbers = loss.vocabulary * float(sizes[others, 0].max(initial=0.0))
    # Without a gradient matmul that sums over tokens, the head is frozen.
    trained = any(operators.dims[i, GEMM.k, 1] for i in loss.head)
    weight = (2.0 if name == "half" else FP32) * numbers * trained
    # Matmuls read the transposed weight, which is a view. Autocast does not cache casts of views
    # (cached_cast in aten/src/ATen/autocast_mode.cpp).
    cast = fixed(2.0 * numbers if name == "amp" else 0.0)
    hidden_states = loss.elements * (numbers / loss.vocabulary**2)
    return _Bytes(loss.width * hidden_states + fixed(weight), logits.most + cast)


def _cut(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """Put the cut loss into `parts`. It keeps one number per token.

    The backward pass computes the blocks of logits again. One kernel shares them for both
    gradients.
    """
    tokens = loss.tokens
    parts[loss.start] = [passes("reduction", "indexed_dot", tokens, 2 * FP32, FP32, half=True)]
    again: list[Part] = []
    for i in loss.head:
        dims = tuple(operators.dims[i, : len(GEMM)].astype(np.float64))
        is_forward = operators.phase[i] == "forward"
        written = FP32 * tokens if is_forward else operators.written_bytes[i].astype(np.float64)
        read = operators.read_bytes[i].astype(np.float64)
        if not is_forward:  # It reads hidden states and weight. Logit gradients stay on the chip.
            read = np.maximum(read - loss.width * loss.elements, 0.0)
        flops = operators.flops[i].astype(np.float64)
        parts[i] = [Part("gemm", operators.function[i], True, flops, read, written, dims)]
        again = list(parts[i]) if is_forward else again
    first = next((i for i in loss.head if operators.phase[i] == "backward"), None)
    if first is not None:
        parts[first] = [*again, *parts[first]]
    return _Bytes(FP32 * tokens, 0.0 * tokens)


def _vocab_parallel(operators: Operators, loss: _Loss, parts: Parts, name: Form) -> _Bytes:
    """Put the vocabulary-parallel loss into `parts`.

    It computes maximum, difference, exponential, sum and quotient, in fp32 and in place. The
    backward pass scales the result.
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
"""Functions that put the operators of a loss into `parts`, and return its memory."""


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
        is_returned_wide=bool(operators.count[widened].sum() > 1),  # One cast is for the loss.
        vocabulary=float(vocabulary),
        head=tuple(int(i) for i in head),
    )


def _in_chunks(operators: Operators, i: int, chunks: int) -> Part:
    """Return the matmul of row `i` of the head, split into chunks of tokens."""
    dims = operators.dims[i].astype(np.float64)
    m, n, k = (dims[at] for at in MATMUL_SIZES)
    half, width = bool(operators.half[i]), 2.0 if operators.half[i] else 4.0
    m, n, k = (size / chunks if size[1] else size for size in (m, n, k))

    def bytes_of(a: Pair, b: Pair) -> Floats:
        return width * np.array([a[0] * b[0], a[0] * b[1] + a[1] * b[0]])

    flops = operators.flops[i] / chunks
    read, written = bytes_of(m, k) + bytes_of(k, n), bytes_of(m, n)
    if k[1]:
        # The gradient of the weight is summed over the chunks (addmm), so it is also read.
        read = read + width * fixed(float(m[0] * n[0]))
    sizes = dims[GEMM.batch], m, n, k
    return Part("gemm", operators.function[i], half, flops, read, written, sizes, each=chunks)


def _without_logits(
    memory: MemoryProfile, blocks: Blocks, logits: Pair, kept: Pair
) -> MemoryProfile:
    """Return the memory profile with less memory during head and loss.

    Moments of head and loss are those with more bytes than all blocks keep and one block works
    with.

    Args:
        memory: Profile of the trace.
        blocks: Repeated blocks of the model.
        logits: Bytes of the traced loss.
        kept: Bytes of the new loss, which replace them.
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
