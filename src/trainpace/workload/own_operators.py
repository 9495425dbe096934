"""Define stand-in operators for GPU kernels that have no meta implementation.

Sparse matmul: a sparse matrix, such as a graph's adjacency matrix, times a dense one. On a GPU, one
kernel reads a row of the dense matrix for each value of the sparse matrix. The kernel is limited by
memory traffic, and computes two FLOPs per number that it reads. The gradient of the dense matrix is
a matmul with the transposed sparse matrix. Trainable sparse matrices are not supported.

Attention that skips masked keys: windows and chunks in FlashAttention, and block masks in
FlexAttention. These kernels exist only on GPUs. The operator stores the mean number of keys that a
query sees. This number is counted by evaluating the mask, since a mask is a function of positions
and needs no values.

Mamba's selective scan: mamba-ssm runs it as one kernel, which keeps the states on the chip. It
counts as limited by memory traffic. transformers' torch code runs several operators per token.
"""

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trainpace.core.errors import TrainpaceError

SPARSE_PRODUCT = "sparse_product"
_library = torch.library.Library("trainpace", "FRAGMENT")


def define_operator(name: str, signature: str, on_meta: Callable[..., Any]) -> None:
    """Define an operator of torch.ops.trainpace that runs on the meta device."""
    _library.define(f"{name}{signature}")
    _library.impl(name, on_meta, "Meta")


define_operator(
    SPARSE_PRODUCT,
    "(Tensor indices, Tensor values, Tensor dense, int rows) -> Tensor",
    lambda indices, values, dense, rows: dense.new_empty(rows, *dense.shape[1:]),
)
_PRODUCTS = {
    torch.spmm,
    torch.mm,
    torch.matmul,
    torch.sparse.mm,
    torch.Tensor.mm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mv,
    torch.dsmm,
    torch.hspmm,
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, values: torch.Tensor, dense: torch.Tensor, rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(indices, values)
        ctx.rows = dense.shape[0]
        out: torch.Tensor = getattr(torch.ops.trainpace, SPARSE_PRODUCT)(
            indices, values, dense, rows
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        indices, values = ctx.saved_tensors
        return (
            None,
            None,
            getattr(torch.ops.trainpace, SPARSE_PRODUCT)(indices, values, gradient, ctx.rows),
            None,
        )


def sparse_call(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a substitute for a matmul whose first matrix is sparse, or None for other calls."""
    if (
        func not in _PRODUCTS
        or not args
        or not isinstance(args[0], torch.Tensor)
        or args[0].layout is torch.strided
    ):
        return None
    return _product


def _product(matrix: torch.Tensor, dense: torch.Tensor) -> Any:
    if matrix.requires_grad or dense.layout is not torch.strided:
        raise TrainpaceError(
            "a matmul of two sparse matrices, or of a trained one, is not counted yet."
        )
    if matrix.shape[1] != dense.shape[0]:
        raise RuntimeError(
            f"cannot multiply a matrix of {tuple(matrix.shape)} by one of {tuple(dense.shape)}"
        )
    return _Product.apply(
        matrix._indices(), matrix._values(), dense.to(matrix.dtype), matrix.shape[0]
    )


SKIPPING_ATTENTION = "scaled_dot_product_skipping_attention"
UNKNOWN = -1.0
"""Value of `seen` if the mask depends on values, such as the document of each token."""
ROWS = 1024
"""Maximum number of queries whose masks are evaluated. They are evenly spaced."""
POSITIONS, AT_ONCE = 2**23, 2**20
"""Maximum number of (query, key) pairs that are evaluated in total, and at a time.

For long sequences fewer queries are evaluated, so time and memory do not grow with the length.
"""
NAME = "trainpace_skipping"
"""Name under which the attention and its masks are registered with transformers."""


def _forward_result(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float
) -> tuple[torch.Tensor, ...]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


define_operator(
    SKIPPING_ATTENTION,
    "(Tensor query, Tensor key, Tensor value, float seen) -> (Tensor, Tensor)",
    _forward_result,
)
define_operator(
    f"{SKIPPING_ATTENTION}_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " float seen) -> (Tensor, Tensor, Tensor)",
    lambda _, *tensors: tuple(map(torch.empty_like, tensors[:3])),
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: float
    ) -> torch.Tensor:
        out, logsumexp = getattr(torch.ops.trainpace, SKIPPING_ATTENTION)(query, key, value, seen)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.seen = seen
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        backward = getattr(torch.ops.trainpace, f"{SKIPPING_ATTENTION}_backward")
        return *backward(gradient, *ctx.saved_tensors, ctx.seen), None


def skipping_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: float
) -> torch.Tensor:
    """Run the stand-in for attention that skips masked keys.

    Under autocast the inputs are cast, as transformers does for FlashAttention.

    Args:
        query: Queries of shape (batch, heads, queries, head size).
        key: Keys. They may have fewer heads.
        value: Values. They may have fewer heads.
        seen: Mean number of keys that a query sees.

    Returns:
        An empty result of shape (batch, heads, queries, value size).
    """
    if torch.is_autocast_enabled("meta"):
        query, key, value = (t.to(torch.get_autocast_dtype("meta")) for t in (query, key, value))
    out: torch.Tensor = _Attention.apply(query, key, value, seen)
    return out


def keys_seen(mask: Callable[..., Any], queries: int, keys: int) -> float:
    """Return the mean number of keys that a query sees under a mask.

    Args:
        mask: Function of (batch, head, query, key) indices that is True for visible keys.
        queries: Number of queries.
        keys: Number of keys.

    Returns:
        The mean number, or UNKNOWN if the mask depends on values, on the sample or on the head.
    """
    step = max(1, queries // max(1, min(ROWS, POSITIONS // max(1, keys))))
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            rows, columns = (
                torch.arange(*span, device="cpu")
                for span in ((step // 2, queries, step), (0, keys, 1))
            )
            first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
            unpadded, total = _without_padding(mask), 0
            for some in rows.split(max(1, AT_ONCE // max(1, keys))):
                seen = unpadded(
                    first, first, some[None, None, :, None], columns[None, None, None, :]
                )
                total += int(seen.expand(1, 1, len(some), keys).sum(dtype=torch.int64))
            return total / len(rows)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return UNKNOWN


class _NoPadding:
    """Stand-in for the left padding of a batch: 0 tokens for every sample."""

    def __getitem__(self, _: Any) -> int:
        return 0


def _without_padding(function: Any) -> Any:
    """Return a mask function with a left padding of 0 tokens, since the padding has no values.

    The mask functions in its closure are replaced too.
    """
    if isinstance(function, tuple):
        return tuple(map(_without_padding, function))
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    names = function.__code__.co_freevars
    inside = (cell.cell_contents for cell in function.__closure__)
    cells = (
        _NoPadding() if n == "left_padding" else _without_padding(c)
        for n, c in zip(names, inside, strict=True)
    )
    closure = tuple(map(types.CellType, cells))
    return types.FunctionType(
        function.__code__, function.__globals__, None, function.__defaults__, closure
    )


class Seen(NamedTuple):
    """Stand-in for a mask: the mean number of keys that a query sees."""

    keys: float


def _mask(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Any:
    """Return the stand-in for a mask of transformers, or None for causal and full masks.

    Padding is ignored, because FlashAttention removes it from the batch.
    """
    plain = local_size is None or local_size >= kv_length
    if plain and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return None
    return Seen(keys_seen(mask_function, q_length, kv_length))


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # the kernel applies attention sinks, score caps and biases itself, at no known cost
    if isinstance(attention_mask, Seen):
        out = skipping_attention(query, key, value, attention_mask.keys)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=bool(causal) and query.shape[2] > 1,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def offer_to_transformers(transformers: Any) -> str:
    """Register the stand-in attention and its masks with transformers, and return their name."""
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    return NAME


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    return_lse: bool,
    return_aux: Any,
) -> Any:
    """Stand-in for torch.nn.attention.flex_attention.flex_attention.

    score_mod has no argument here, because the kernel applies it at no known cost.
    """
    seen = float(key.shape[-2])
    if block_mask is not None:
        seen = keys_seen(block_mask.mask_mod, query.shape[-2], key.shape[-2])
    out = skipping_attention(query, key, value, seen)
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if return_aux is not None:
        return out, sys.modules["torch.nn.attention.flex_attention"].AuxOutput(
            lse=sums, max_scores=sums
        )
    return (out, sums) if return_lse else out


SELECTIVE_SCAN = "selective_scan"
define_operator(
    SELECTIVE_SCAN, "(Tensor[] inputs) -> Tensor", lambda inputs: torch.empty_like(inputs[0])
)
define_operator(
    f"{SELECTIVE_SCAN}_backward",
    "(Tensor gradient, Tensor[] inputs) -> Tensor[]",
    lambda _, inputs: [*map(torch.empty_like, inputs)],
)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        out: torch.Tensor = getattr(torch.ops.trainpace, SELECTIVE_SCAN)(inputs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        backward = getattr(torch.ops.trainpace, f"{SELECTIVE_SCAN}_backward")
        return tuple(backward(gradient, ctx.saved_tensors))


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    *others: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Stand-in for `mamba_selective_scan` of transformers, with its arguments."""
    more = (t for t in (*others, D, z, delta_bias) if t is not None)
    out = _Scan.apply(hidden_states, dt, A, *more)
    return (out, out.new_empty(*out.shape[:2], A.shape[-1])) if return_last_state else out
