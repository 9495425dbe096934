"""Attention in kernels of its own (transformers' attn_implementation="eager") in the place of a fused kernel.

Forward: copies that make queries, keys and values contiguous, Q K^T, scale, mask, softmax, dropout, times V; backward: five
products become four, since the scores were kept, with softmax's and dropout's gradients between them. Each works on all of the
scores: batch x heads x queries x keys, masked ones included. The operators are those that torch 2.13 with transformers 5 calls
for BERT, GPT-2 and Llama; softmax runs in fp32 under autocast, and in models with RMS norm (Llama and those after it).

The trace does not hold the probability of dropout inside attention: it is taken to drop out where the model does elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.forecast.rewriting import Pair, Part, exchanged, fixed, keeping, passes, times
from trainpace.workload import ATTENTION, ATTENTION_KINDS, Form, Operators, TracedForm

COPIES = 4
"""Queries, keys, values and the result, in each pass; half of them where keys and values were copied before."""
VIEWS = 10
"""Reshapes and transposes of one attention in one pass."""
LOG_SUM_BYTES = 4.0
"""What a fused kernel keeps for each query, in place of the scores: the logarithm of a sum of exponentials in fp32."""


class _Style(NamedTuple):
    """What surrounds the products."""

    form: Form
    upcasts: bool
    drops_out: bool


class _Sizes(NamedTuple):
    """Of one attention: `products` over samples and heads, the scores, the elements of queries, keys, values and results; and
    the lengths of queries, keys, heads and values."""

    products: Pair
    scores: Pair
    of_queries: Pair
    of_keys: Pair
    of_values: Pair
    of_results: Pair
    queries: float
    keys: float
    head: float
    value: float


def has_fused_attention(operators: Operators) -> bool:
    """Whether there is attention to take apart."""
    return bool(np.isin(operators.kind, ATTENTION_KINDS).any())


def eager(form: TracedForm, name: Form, checkpointed: bool) -> TracedForm:
    """The form with every fused attention taken apart. `checkpointed`: the trace recomputes its blocks."""
    operators, blocks = form.operators, form.blocks
    if not has_fused_attention(operators):
        return form
    has_backward = "backward" in operators.phase
    style = _Style(
        form=name,
        upcasts=name == "half" and "native_layer_norm" not in operators.function,
        drops_out="native_dropout" in operators.function,
    )
    kept, block_kept, scores_kept, at_work = (np.zeros(2) for _ in range(4))
    parts: dict[int, list[Part]] = {}
    for i in np.flatnonzero(np.isin(operators.kind, ATTENTION_KINDS)).tolist():
        sizes = _sizes(operators, i)
        if sizes is None:
            continue
        half, copies = bool(operators.half[i]), _copies(operators, i, sizes)
        width = 2.0 if half else 4.0
        in_softmax = 4.0 if style.upcasts or name == "amp" else width
        if operators.kind[i] == "attention":
            parts[i] = _forward(sizes, half, style, copies, _has_mask(operators, i, sizes, width))
            each = sizes.scores * _kept_of_a_score(style, width, in_softmax)
            less = LOG_SUM_BYTES * sizes.of_queries / sizes.head
            at_work = np.maximum(at_work, 2 * in_softmax * sizes.scores)
            if operators.phase[i] == "forward" and has_backward:
                kept += operators.count[i] * (each - less)
                if blocks is not None:
                    share = blocks.operator_counts[i] / blocks.count
                    block_kept, scores_kept = (
                        block_kept + share * (each - less),
                        scores_kept + share * each,
                    )
        else:
            parts[i] = _backward(sizes, half, style, copies)
    result = exchanged(form, parts)
    alive = block_kept if checkpointed and blocks is not None else kept
    memory = keeping(form.memory, blocks, alive, np.zeros(2) if has_backward else at_work)
    if blocks is None or result.blocks is None:
        return replace(result, memory=memory)
    more = {
        "saved_bytes": block_kept,
        "sharded_saved_bytes": block_kept,
        "attention_saved_bytes": scores_kept,
    }
    pairs = {
        field: tuple(np.maximum(getattr(blocks, field) + size, 0.0).tolist())
        for field, size in more.items()
    }
    pairs["working_bytes"] = tuple(np.maximum(blocks.working_bytes, at_work).tolist())
    return replace(result, memory=memory, blocks=replace(result.blocks, **pairs))


def _sizes(operators: Operators, i: int) -> _Sizes | None:
    dims = operators.dims[i].astype(np.float64)
    b, h, q, k, d, _, v, _ = (dims[at] for at in ATTENTION)
    v = v if v.any() else d
    products = times(b, h)
    if products is None or (q[1], k[1], d[1], v[1]) != (0, 0, 0, 0):
        return None  # several lengths that grow with the batch: no model of ours has any
    lengths = (float(length[0]) for length in (q, k, d, v))
    elements = (
        products * rows[0] * columns[0]
        for rows, columns in ((q, k), (q, d), (k, d), (k, v), (q, v))
    )
    return _Sizes(products, *elements, *lengths)


def _has_mask(operators: Operators, i: int, sizes: _Sizes, width: float) -> bool:
    """Causal, or an operator that reads more than queries, keys and values."""
    plain = float((sizes.of_queries + sizes.of_keys + sizes.of_values).sum()) * width
    return (
        operators.dims[i, [ATTENTION.causal, ATTENTION.seen]].sum() > 0
        or float(operators.read_bytes[i].sum()) > plain * 1.001
    )


def _copies(operators: Operators, i: int, sizes: _Sizes) -> int:
    """Copies in a forward pass: keys and values that were put together or repeated by the model are contiguous already."""
    same = (np.array(operators.module) == operators.module[i]) & (
        np.array(operators.kind) == "copy"
    )
    width = np.where(operators.half, 2.0, 4.0)
    as_large = np.isclose(operators.written_bytes, width[:, None] * sizes.of_keys).all(axis=1)
    before = int(operators.count[same & as_large].sum())
    return COPIES // 2 if before >= 2 * operators.count[i] else COPIES


def _kept_of_a_score(style: _Style, width: float, in_softmax: float) -> float:
    """Bytes that are kept for the backward pass: softmax's result, its cast for the product, dropout's result and its mask."""
    cast = width if in_softmax != width else 0.0
    return in_softmax + (width + 1.0 if style.drops_out else cast)


def _product(
    sizes: _Sizes, half: bool, m: float, n: float, k: float, read: Pair, written: Pair
) -> Part:
    flops, width = 2.0 * sizes.products * m * n * k, 2.0 if half else 4.0
    return Part(
        "gemm",
        "bmm",
        half,
        flops,
        read * width,
        written * width,
        (sizes.products, fixed(m), fixed(n), fixed(k)),
    )


def _view() -> Part:
    return Part(
        "view", "view", False, np.zeros(2), np.zeros(2), np.zeros(2), (), each=VIEWS, launches=0
    )


def _forward(sizes: _Sizes, half: bool, style: _Style, copies: int, masked: bool) -> list[Part]:
    s, x, w = sizes.scores, sizes.of_queries, 2.0 if half else 4.0
    q, k, d, v = sizes.queries, sizes.keys, sizes.head, sizes.value
    parts = [
        _view(),
        passes("copy", "clone", half, x, w * x, w * x, each=copies),
        _product(sizes, half, q, k, d, x + sizes.of_keys, s),
        passes("elementwise", "mul", half, s, w * s, w * s),
    ]
    wide = w
    if masked:
        wide = (
            4.0 if style.form == "amp" else w
        )  # the mask is in fp32 under autocast, and so is the sum
        parts.append(
            passes(
                "elementwise",
                "add",
                half and wide == 2.0,
                s,
                w * s + fixed(wide * q * k),
                wide * s,
                also_in=fixed(q * k),
            )
        )
    softmax = 4.0 if style.upcasts or style.form == "amp" else w
    if softmax != wide:
        parts.append(passes("copy", "_to_copy", False, s, wide * s, softmax * s))
    parts.append(
        passes("softmax", "_softmax", softmax == 2.0, s, softmax * s, softmax * s, extent=k)
    )
    if softmax != w:
        parts.append(passes("copy", "_to_copy", half, s, softmax * s, w * s))
    if style.drops_out:
        parts.append(passes("elementwise", "native_dropout", half, s, w * s, (w + 1.0) * s))
    return [*parts, _product(sizes, half, q, v, k, s + sizes.of_values, sizes.of_results)]


def _backward(sizes: _Sizes, half: bool, style: _Style, copies: int) -> list[Part]:
    s, x, y, w = sizes.scores, sizes.of_queries, sizes.of_keys, 2.0 if half else 4.0
    q, k, d, v = sizes.queries, sizes.keys, sizes.head, sizes.value
    values, results = sizes.of_values, sizes.of_results
    parts = [
        _view(),
        passes("copy", "clone", half, x, w * x, w * x, each=copies if copies == COPIES else 1),
        _product(sizes, half, k, v, q, s + results, values),
        _product(sizes, half, q, k, v, results + values, s),
    ]
    if style.drops_out:
        parts.append(
            passes(
                "elementwise", "native_dropout_backward", half, s, (w + 1.0) * s, w * s, also_in=s
            )
        )
    softmax = 4.0 if style.upcasts or style.form == "amp" else w
    casts = softmax != w
    if casts:
        parts.append(passes("copy", "_to_copy", False, s, w * s, softmax * s))
    parts.append(
        passes(
            "softmax",
            "_softmax_backward_data",
            softmax == 2.0,
            s,
            2 * softmax * s,
            softmax * s,
            extent=k,
            also_in=s,
        )
    )
    if casts:
        parts.append(passes("copy", "_to_copy", half, s, softmax * s, w * s))
    parts.append(passes("elementwise", "mul", half, s, w * s, w * s))
    return [
        *parts,
        _product(sizes, half, q, d, k, s + y, x),
        _product(sizes, half, d, k, q, x + s, y),
    ]
