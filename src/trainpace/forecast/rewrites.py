"""Rewrites of a traced workload: replace operators by others that compute the same result.

A rewrite shows the effect of other software without another trace. It also updates the memory that
is kept between operators. This module contains the mechanism and three rewrites: unfused attention,
the optimizer update, and cross-entropy over a vocabulary. `software` applies them.

Shapes: a `Pair` has shape (2,), the constant part and the part per sample of a size that is affine
in the batch size. Columns of a table of operators have one row per operator, and columns of sizes
one `Pair` per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from trainpace.core.software import CrossEntropy, OptimizerImplementation
from trainpace.forecast.fusion import UNCOMPILED
from trainpace.workload import (
    ATTENTION,
    ATTENTION_KINDS,
    GEMM,
    MOST_SIZES,
    OTHER,
    Blocks,
    Floats,
    Form,
    MemoryProfile,
    Operators,
    OtherBlocks,
    TracedForm,
    Workload,
)

_AnyBlocks = TypeVar("_AnyBlocks", Blocks, OtherBlocks)
Pair = Floats
"""Size that is affine in the batch size: (constant, per sample)."""


def fixed(size: float) -> Pair:
    """Return a size that does not depend on the batch."""
    return np.array([size, 0.0])


class Part(NamedTuple):
    """New operators of one kind that replace an operator of the trace.

    They inherit its phase, module and role.

    Attributes:
        kind: Kind of the operators.
        function: Name of the function.
        half: True for 16-bit operators.
        flops: FLOPs of one operator.
        read_bytes: Bytes that one operator reads.
        written_bytes: Bytes that one operator writes.
        sizes: Sizes of one operator, in the order of its kind.
        each: Number of these operators per replaced operator.
        launches: Kernel launches of one operator.
    """

    kind: str
    function: str
    half: bool
    flops: Pair
    read_bytes: Pair
    written_bytes: Pair
    sizes: tuple[Pair, ...]
    each: int = 1
    launches: int = 1

    @property
    def dims(self) -> Floats:
        """Sizes in the shape of a row of `Operators.dims`."""
        padded = np.zeros((MOST_SIZES, 2))
        padded[: len(self.sizes)] = np.reshape(self.sizes, (-1, 2))
        return padded


def passes(
    kind: str,
    function: str,
    elements: Pair,
    read: float,
    written: float,
    *,
    half: bool | None = None,
    extent: float = 0.0,
    each: int = 1,
    also_in: Pair | None = None,
    also_read: Pair | None = None,
) -> Part:
    """Return an operator that reads and writes `elements` once.

    Args:
        kind: Kind of the operator.
        function: Name of the function.
        elements: Number of elements of the result.
        read: Bytes read per element.
        written: Bytes written per element.
        half: True for a 16-bit operator. By default, True if it writes 2 bytes per element.
        extent: Length of the rows that it normalizes.
        each: Number of such operators.
        also_in: Number of elements of other operands.
        also_read: Bytes read from other operands.
    """
    into = elements if also_in is None else elements + also_in
    read_bytes = read * elements if also_read is None else read * elements + also_read
    is_half = written == 2.0 if half is None else half
    dims = into, elements, fixed(extent)
    return Part(kind, function, is_half, elements, read_bytes, written * elements, dims, each)


def replaced(form: TracedForm, parts: Mapping[int, Sequence[Part]]) -> TracedForm:
    """Return the form with some rows replaced.

    Args:
        form: Traced form.
        parts: New operators by row index. An empty sequence removes the row.
    """
    if not parts:
        return form
    old, blocks = form.operators, form.blocks
    kept: Sequence[Part | None] = (None,)
    picks = [(i, part) for i in range(len(old)) for part in parts.get(i, kept)]

    def column(name: str) -> list[Any]:
        values = getattr(old, name)
        return [getattr(part, name) if part else values[i] for i, part in picks]

    rows = np.array([i for i, _ in picks])
    each = np.array([part.each if part else 1 for _, part in picks])
    floats = ("flops", "read_bytes", "written_bytes", "dims")
    operators = Operators(
        kind=tuple(column("kind")),
        function=tuple(column("function")),
        phase=tuple(old.phase[i] for i in rows),
        module=tuple(old.module[i] for i in rows),
        count=old.count[rows] * each,
        half=np.array(column("half")),
        launches=np.array(column("launches")),
        **{name: np.array(column(name), dtype=np.float64) for name in floats},
    )
    if blocks is not None:
        roles = tuple(blocks.roles[i] for i in rows)
        blocks = blocks.with_counts(lambda counts: counts[rows] * each, roles=roles)
    return replace(form, operators=operators, blocks=blocks)


def _with_more(blocks: _AnyBlocks, more: Mapping[str, Pair]) -> _AnyBlocks:
    """Return the blocks with more bytes in some fields. `more` may be negative."""
    pairs = {
        field: tuple(np.maximum(np.array(getattr(blocks, field)) + size, 0.0).tolist())
        for field, size in more.items()
    }
    return replace(blocks, **pairs)


def _remembered(memory: MemoryProfile, change: Callable[[Floats], None]) -> MemoryProfile:
    """Return the memory profile after a change of the rows of `peaks` and of `moments`.

    Args:
        memory: Profile of the trace.
        change: Function that changes an array of rows in place. The last two columns are the
            activation bytes: the constant, and the part per sample.
    """
    tables = {name: getattr(memory, name).astype(np.float64) for name in ("peaks", "moments")}
    for rows in tables.values():
        if rows.size:
            change(rows)
    return replace(memory, **tables)


def _keeping(
    memory: MemoryProfile, blocks: Blocks | None, kept: Pair, at_once: Pair
) -> MemoryProfile:
    """Return the memory profile with more bytes for activations.

    Args:
        memory: Profile of the trace.
        blocks: Repeated blocks of the model, or None.
        kept: Bytes that all layers together keep in addition for the backward pass. May be
            negative. At each moment, the same share of them is alive as of the other activations.
        at_once: Bytes that are alive in addition at every moment of the passes.
    """

    def change(rows: Floats) -> None:
        slopes = rows[:, -1]
        most = slopes.max() if blocks is None else blocks.all_saved_bytes[1]
        alive = np.clip(slopes / max(most, 1.0), 0.0, 1.0)
        more = alive[:, None] * kept + (slopes > 0)[:, None] * at_once
        rows[:, -2:] = np.maximum(rows[:, -2:] + more, 0.0)

    return _remembered(memory, change)


# ---- attention in kernels of its own (transformers' attn_implementation="eager")

COPIES = 4
"""Number of copies of queries, keys, values and the result per pass.

There are half as many if keys and values were copied before.
"""
VIEWS = 10
"""Number of reshapes and transposes of one attention per pass."""
LOG_SUM_BYTES = 4.0
"""Bytes of the log-sum-exp in fp32 that a fused kernel saves per query instead of the scores."""


class _Attention(NamedTuple):
    """Sizes of one attention operator, and options of its unfused kernels.

    Attributes:
        heads: Number of samples times heads.
        scores: Elements of the score matrix. of_queries, of_keys, of_values and of_results are the
            elements of the other tensors.
        queries: Number of queries per head.
        keys: Number of keys per head.
        head: Size of a head of queries and keys.
        value: Size of a head of values.
        width: Bytes per element of the operands.
        softmax: Bytes per element in the softmax.
        autocast: True if the form was traced under autocast.
        drops_out: True if attention has dropout.
    """

    heads: Pair
    scores: Pair
    of_queries: Pair
    of_keys: Pair
    of_values: Pair
    of_results: Pair
    queries: float
    keys: float
    head: float
    value: float
    width: float
    softmax: float
    autocast: bool
    drops_out: bool

    @property
    def kept_per_score(self) -> float:
        """Bytes kept per score for the backward pass.

        These are the result of the softmax, its cast for the matmul, and the result and the mask of
        dropout.
        """
        if self.drops_out:
            return self.softmax + self.width + 1.0
        return self.softmax + (self.width if self.softmax != self.width else 0.0)

    def matmul(self, m: float, n: float, k: float, read: Pair, written: Pair) -> Part:
        w = self.width
        dims = self.heads, fixed(m), fixed(n), fixed(k)
        flops = 2.0 * self.heads * m * n * k
        return Part("gemm", "bmm", w == 2.0, flops, read * w, written * w, dims)


def eager(form: TracedForm, name: Form, checkpointed: bool) -> TracedForm:
    """Return the form with every fused attention replaced by separate operators.

    The forward pass makes queries, keys and values contiguous. It then runs Q K^T, scale, mask,
    softmax, dropout and the matmul with V. The backward pass has four matmuls instead of five,
    because the scores were kept, and the gradients of softmax and dropout between them. All
    operators work on the full score matrix (batch x heads x queries x keys), including masked
    scores.

    The operators are those that torch 2.13 with transformers 5 calls for BERT, GPT-2 and Llama. The
    softmax is in fp32 under autocast and in models with RMS norm (Llama and later models). The
    trace does not record the dropout probability of attention. Attention is assumed to have dropout
    if the model has dropout elsewhere.

    Args:
        form: Traced form with fused attention.
        name: Name of the form.
        checkpointed: True if the trace recomputes its blocks.
    """
    operators, blocks = form.operators, form.blocks
    rows = np.flatnonzero(np.isin(operators.kind, ATTENTION_KINDS)).tolist()
    if not rows:
        return form
    has_backward = "backward" in operators.phase
    kept, block_kept, scores_kept, at_work = (np.zeros(2) for _ in range(4))
    others_kept = [np.zeros(2) for _ in (() if blocks is None else blocks.others)]
    parts: dict[int, list[Part]] = {}
    for i in rows:
        a = _attention(operators, i, name)
        copies = _copies(operators, i, a)
        if operators.kind[i] != "attention":
            parts[i] = _backward(a, copies)
            continue
        parts[i] = _forward(a, copies, _has_mask(operators, i, a))
        at_work = np.maximum(at_work, 2 * a.softmax * a.scores)
        if operators.phase[i] != "forward" or not has_backward:
            continue
        each = a.scores * a.kept_per_score
        more = each - LOG_SUM_BYTES * a.of_queries / a.head
        kept += operators.count[i] * more
        if blocks is not None:
            share = blocks.operator_counts[i] / blocks.count
            block_kept, scores_kept = block_kept + share * more, scores_kept + share * each
            for one, of_one in zip(blocks.others, others_kept, strict=True):
                of_one += one.operator_counts[i] / one.count * more
    result = replaced(form, parts)
    alive = block_kept if checkpointed and blocks is not None else kept
    memory = _keeping(form.memory, blocks, alive, np.zeros(2) if has_backward else at_work)
    if result.blocks is None:
        return replace(result, memory=memory)
    kept_bytes = {
        "saved_bytes": block_kept,
        "sharded_saved_bytes": block_kept,
        "attention_saved_bytes": scores_kept,
    }

    def working(old: tuple[float, float]) -> tuple[float, float]:
        constant, slope = np.maximum(old, at_work).tolist()
        return constant, slope

    others = tuple(
        replace(_with_more(one, {"saved_bytes": more}), working_bytes=working(one.working_bytes))
        for one, more in zip(result.blocks.others, others_kept, strict=True)
    )
    more_blocks = replace(
        _with_more(result.blocks, kept_bytes),
        working_bytes=working(result.blocks.working_bytes),
        others=others,
    )
    return replace(result, memory=memory, blocks=more_blocks)


def _attention(operators: Operators, i: int, name: Form) -> _Attention:
    """Return the sizes of an attention operator. Only samples and heads grow with the batch."""
    dims = operators.dims[i].astype(np.float64)
    b, h, q, k, d, _, v, _ = (dims[at] for at in ATTENTION)
    v = v if v.any() else d
    heads = np.array([b[0] * h[0], b[0] * h[1] + b[1] * h[0]])
    sizes: list[Any] = [
        heads * rows[0] * columns[0] for rows, columns in ((q, k), (q, d), (k, d), (k, v), (q, v))
    ]
    sizes += [float(length[0]) for length in (q, k, d, v)]
    width = 2.0 if operators.half[i] else 4.0
    upcasts = name == "half" and "native_layer_norm" not in operators.function
    softmax = 4.0 if upcasts or name == "amp" else width
    drops_out = "native_dropout" in operators.function
    return _Attention(*[heads, *sizes, width, softmax, name == "amp", drops_out])


def _has_mask(operators: Operators, i: int, a: _Attention) -> bool:
    """Return True if attention `i` is causal, or reads more than queries, keys and values."""
    plain = float((a.of_queries + a.of_keys + a.of_values).sum()) * a.width
    return (
        operators.dims[i, [ATTENTION.causal, ATTENTION.seen]].sum() > 0
        or float(operators.read_bytes[i].sum()) > plain * 1.001
    )


def _copies(operators: Operators, i: int, a: _Attention) -> int:
    """Return the number of copies in a forward pass.

    Keys and values are already contiguous if the model concatenated or repeated them before.
    """
    same = (np.array(operators.module) == operators.module[i]) & (
        np.array(operators.kind) == "copy"
    )
    width = np.where(operators.half, 2.0, 4.0)
    as_large = np.isclose(operators.written_bytes, width[:, None] * a.of_keys).all(axis=1)
    before = int(operators.count[same & as_large].sum())
    return COPIES // 2 if before >= 2 * operators.count[i] else COPIES


def _view() -> Part:
    none = np.zeros(2)
    return Part("view", "view", False, none, none, none, (), each=VIEWS, launches=0)


def _forward(a: _Attention, copies: int, masked: bool) -> list[Part]:
    s, x, w = a.scores, a.of_queries, a.width
    q, k, d, v = a.queries, a.keys, a.head, a.value
    parts = [
        _view(),
        passes("copy", "clone", x, w, w, each=copies),
        a.matmul(q, k, d, x + a.of_keys, s),
        passes("elementwise", "mul", s, w, w),
    ]
    wide = w
    if masked:
        # Under autocast, the mask is in fp32, and so is the sum.
        wide = 4.0 if a.autocast else w
        mask = fixed(q * k)
        parts.append(
            passes("elementwise", "add", s, w, wide, also_in=mask, also_read=fixed(wide * q * k))
        )
    if a.softmax != wide:
        parts.append(passes("copy", "_to_copy", s, wide, a.softmax))
    parts.append(passes("softmax", "_softmax", s, a.softmax, a.softmax, extent=k))
    if a.softmax != w:
        parts.append(passes("copy", "_to_copy", s, a.softmax, w))
    if a.drops_out:
        parts.append(passes("elementwise", "native_dropout", s, w, w + 1.0, half=w == 2.0))
    return [*parts, a.matmul(q, v, k, s + a.of_values, a.of_results)]


def _backward(a: _Attention, copies: int) -> list[Part]:
    s, x, y, w, wide = a.scores, a.of_queries, a.of_keys, a.width, a.softmax
    q, k, d, v = a.queries, a.keys, a.head, a.value
    parts = [
        _view(),
        passes("copy", "clone", x, w, w, each=copies if copies == COPIES else 1),
        a.matmul(k, v, q, s + a.of_results, a.of_values),
        a.matmul(q, k, v, a.of_results + a.of_values, s),
    ]
    if a.drops_out:
        parts.append(passes("elementwise", "native_dropout_backward", s, w + 1.0, w, also_in=s))
    softmax = passes("softmax", "_softmax_backward_data", s, 2 * wide, wide, extent=k, also_in=s)
    if wide == w:
        parts.append(softmax)
    else:
        parts += [passes("copy", "_to_copy", s, w, wide), softmax]
        parts.append(passes("copy", "_to_copy", s, wide, w))
    parts.append(passes("elementwise", "mul", s, w, w))
    return [*parts, a.matmul(q, d, k, s + y, x), a.matmul(d, k, q, x + s, y)]


# ---- the optimizer's update (torch.optim: foreach, fused, tensor by tensor)

ALGORITHMS: dict[str, tuple[tuple[str, int], ...]] = {
    "sgd": (("add_", 2),),
    "sgd_momentum": (("mul_", 1), ("add_", 2), ("add_", 2)),
    "adam": (
        ("lerp_", 2),
        ("mul_", 1),
        ("addcmul_", 3),
        ("sqrt", 1),
        ("div_", 1),
        ("add_", 1),
        ("addcdiv_", 3),
    ),
}
ALGORITHMS["adamw"] = (("mul_", 1), *ALGORITHMS["adam"])
"""Calls of torch.optim by algorithm, as (name, values read per parameter).

Each call writes one value per parameter.
"""
FUSED_NAMES = {
    "sgd": "_fused_sgd_",
    "sgd_momentum": "_fused_sgd_",
    "adam": "_fused_adam_",
    "adamw": "_fused_adamw_",
}

TENSORS_PER_LAUNCH = 36
ELEMENTS_PER_LAUNCH = 320 * 65536
"""Limits of one multi-tensor launch with four lists (ATen/native/cuda/MultiTensorApply.cuh)."""
GRADIENTS = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 2,
    "native_batch_norm_backward": 2,
    "_fused_rms_norm_backward": 1,
    "embedding_dense_backward": 1,
    "conv_bias_backward": 1,
    "sum": 1,
}
"""Number of parameter tensors whose gradient a call in the backward pass computes."""


def traced_implementations(workload: Workload) -> set[str]:
    """Return the set of "fused" and "foreach" that the traced update contains.

    The set is empty if the update processes one tensor at a time.
    """
    rows = [
        name
        for form in workload.forms.values()
        for name, phase in zip(form.operators.function, form.operators.phase, strict=True)
        if phase == "optimizer" and name.startswith(("_foreach_", "_fused_"))
    ]
    return {"fused" if name.startswith("_fused_") else "foreach" for name in rows}


def can_be(workload: Workload, implementation: OptimizerImplementation) -> bool:
    """Return True if the update can be rewritten to this implementation.

    The optimizer must have the implementation, and the trace must have another one.
    """
    now = traced_implementations(workload)
    return workload.optimizer in ALGORITHMS and bool(now) and now != {implementation}


def updated(
    workload: Workload, form: TracedForm, implementation: OptimizerImplementation
) -> TracedForm:
    """Return the form with another implementation of the optimizer update.

    With foreach and for_loop, an algorithm makes the same passes over parameters, gradients and
    states. foreach launches them for many tensors at once, for_loop for one tensor at a time. A
    fused update reads everything only once.

    For updates of many tensors, the tracer counts a fourth of the read bytes as written. This
    function does the same, and `kernels.UPDATES_MOVED` corrects both. With that, AdamW on an H100
    updates 383 million bytes of parameters per millisecond if fused, and 134 million with foreach.
    The measured values are 356 and 131 (n 4, 2; fitting/data).
    """
    operators = form.operators
    phase = np.array(operators.phase) == "optimizer"
    rows = [i for i in np.flatnonzero(phase).tolist() if operators.kind[i] == "optimizer"]
    if not rows:
        return form
    numbers = float(workload.trainable_parameters)
    width = 2.0 if operators.half[rows].any() else 4.0
    # Each algorithm makes one of its calls only once. Put the new operators in place of its row.
    once = min(rows, key=lambda i: operators.count[i])
    parts: dict[int, Sequence[Part]] = dict.fromkeys(rows, ())
    parts[once] = _update_parts(workload.optimizer, implementation, numbers, width, operators)
    result = replaced(form, parts)
    if "_foreach_sqrt" not in operators.function or implementation == "foreach":
        return result
    # Only a foreach update keeps the square roots of all parameters alive at once.
    peaks = form.memory.peaks.astype(np.float64)
    updates = peaks[:, 2] == 0
    peaks[updates, 1] = np.maximum(peaks[updates, 1] - numbers * width, 0.0)
    return replace(result, memory=replace(form.memory, peaks=peaks))


def _update_parts(
    optimizer: str,
    implementation: OptimizerImplementation,
    numbers: float,
    width: float,
    operators: Operators,
) -> list[Part]:
    tensors = tensors_of(operators)
    launches = max(
        math.ceil(tensors / TENSORS_PER_LAUNCH), math.ceil(numbers / ELEMENTS_PER_LAUNCH)
    )
    kind, prefix, calls = "optimizer", "", ALGORITHMS[optimizer]
    if implementation == "fused":
        calls = ((FUSED_NAMES[optimizer], {"sgd": 2, "sgd_momentum": 3}.get(optimizer, 4)),)
    elif implementation == "foreach":
        prefix = "_foreach_"
    else:
        kind, launches = "elementwise", tensors
    parts = []
    for name, reads in calls:
        writes = 1.0 if kind == "elementwise" else reads / 4
        read, written = fixed(numbers * width * reads), fixed(numbers * width * writes)
        dims = fixed(int(numbers * reads)), fixed(int(numbers * writes)), fixed(0.0)
        flops, half = fixed(numbers * reads), width < 4
        parts.append(Part(kind, prefix + name, half, flops, read, written, dims, launches=launches))
    return parts


def tensors_of(operators: Operators) -> int:
    """Estimate the number of parameter tensors of a model.

    The table does not contain it. Each tensor has a gradient in the backward pass, so count those.
    """
    backward, dims = np.array(operators.phase) == "backward", operators.dims
    # The gradient of a weight is a matmul that sums over a size that grows with the batch.
    weights = (
        (np.array(operators.kind) == "gemm") & (dims[:, GEMM.k, 1] > 0) & (dims[:, GEMM.m, 1] == 0)
    )
    weights &= dims[:, GEMM.batch, 1] == 0
    weights |= np.array(operators.kind) == "conv_wgrad"
    each = weights + np.array([GRADIENTS.get(name, 0) for name in operators.function])
    return max(1, int((operators.count * each)[backward].sum()))


# ---- cross-entropy over a vocabulary
#
# - plain: the loss as traced. It casts logits to fp32 and keeps their log-softmax. The backward
#   pass makes two more tensors of the same size.
# - uncompiled: the same loss, but torch.compile does not compile it.
# - fused: one kernel reads the logits twice, for maximum and sum and for the gradient. It writes
#   the gradient in place of the logits. The backward pass has nothing left to do (Liger's
#   cross_entropy).
# - fused_fp32: the same for a model that casts logits to fp32 before the loss, as in transformers.
# - chunked: head, loss and gradients of the head process a chunk of tokens at a time. The number of
#   chunks is vocabulary / hidden size, rounded up. The gradient of the head's weight is summed over
#   the chunks (Liger's fused_linear_cross_entropy, release 0.8.5; Hsu et al. 2024,
#   arXiv:2410.10989, section 3.2).

FP32 = 4.0
"""Bytes of an fp32 number."""
PLAIN_COPIES = 3.0
"""Number of tensors of the logits' size that the plain loss keeps: log-softmax and two gradients.
"""
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


def logits_bytes(operators: Operators, copies: float = PLAIN_COPIES) -> Pair:
    """Return the bytes of the logits and of all tensors of their size at the loss.

    They are 0 without a cross-entropy over a vocabulary.

    Args:
        operators: Operators of the model.
        copies: Number of tensors of this size in the plain loss.
    """
    if (loss := _loss(operators)) is not None:
        return copies * loss.plain_width * loss.elements
    fused = np.array(operators.function) == "cross_entropy"
    return np.asarray(operators.written_bytes[fused].sum(axis=0))


def with_loss(form: TracedForm, kernels: CrossEntropy, name: Form = "half") -> TracedForm:
    """Return the form with another implementation of cross-entropy.

    Args:
        form: Traced form.
        kernels: Implementation (see the module's docstring).
        name: Name of the form. Some implementations make different copies in each form.
    """
    operators, loss = form.operators, _loss(form.operators)
    if loss is None or kernels == "plain":
        return form
    if kernels == "uncompiled":
        return _left_uncompiled(form, loss)
    parts: Parts = dict.fromkeys(loss.others, ())
    kept = _KERNELS[kernels](operators, loss, parts, name)
    result = replaced(form, parts)
    if form.blocks is None or result.blocks is None:
        return result
    one = loss.plain_width * loss.elements
    before = _Bytes(one, (PLAIN_COPIES - 1.0) * one)
    more = {
        "outside_saved_bytes": kept.saved - before.saved,
        "after_saved_bytes": kept.saved - before.saved,
        "after_working_bytes": kept.working - before.working,
    }
    memory = _without_logits(form.memory, form.blocks, before.most, kept.most)
    return replace(result, memory=memory, blocks=_with_more(result.blocks, more))


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


_KERNELS: dict[str, Callable[[Operators, _Loss, Parts, Form], _Bytes]] = {
    "fused": _fused,
    "fused_fp32": _fused_in_fp32,
    "chunked": _chunked,
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
    least = blocks.all_saved_bytes + np.maximum(np.array(blocks.working_bytes), kept)

    def change(rows: Floats) -> None:
        at_loss = rows[:, -1] > least[1]
        rows[at_loss, -1] = np.maximum(rows[at_loss, -1] - logits[1] + kept[1], least[1])
        rows[at_loss, -2] += kept[0]

    return _remembered(memory, change)
