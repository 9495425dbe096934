"""From one dispatched ATen call to the rows that CUDA would run for it: kind, FLOPs, bytes, launches, sizes.

The sizes of each kind are named in `trainpace.workload`. `view` and `module` rows are the host's alone: metadata calls, and
modules entered.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from trainpace.workload.cuda_mapping import parts_of
from trainpace.workload.kinds import FUNCTIONS, KINDS
from trainpace.workload.meta import tensors_in
from trainpace.workload.own_operators import SPARSE_PRODUCT
from trainpace.workload.workload import (
    GROUPED,
    AttentionSizes,
    ConvSizes,
    GemmSizes,
    OtherSizes,
    attention_widths,
)

FOREACH_TENSORS_PER_LAUNCH = 36
"""ATen's multi_tensor_apply passes 110 to 30 tensors a launch for 1 to 5 lists; 36 is its number for 4 (Adam)."""
FOREACH_ELEMENTS_PER_LAUNCH = 320 * 65536
"""... and 320 blocks of 65536 elements a launch (ATen/native/cuda/MultiTensorApply.cuh)."""


class Row(NamedTuple):
    """One operator at one batch size."""

    kind: str
    function: str
    half: bool
    launches: int
    flops: float
    read_bytes: float
    written_bytes: float
    dims: tuple[float, ...]


_GEMMS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
ELEMENTWISE = KINDS["elementwise"]
_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "resize_",
}


def rows_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Row]:
    """The rows of one ATen call; none for views, allocations and calls that touch no memory of the device."""
    name = func._schema.name.partition("::")[2]
    if (
        func.is_view
        or name in _ALLOCATIONS
        or name in ("detach", "_unsafe_view", "alias", "_local_scalar_dense")
    ):
        return (
            []
            if name in ("detach", "alias")
            else [Row("view", "view", False, 0, 0.0, 0.0, 0.0, ())]
        )
    inputs = list(tensors_in((args, kwargs)))
    outputs = list(tensors_in(out))
    if not any(t.device.type == "meta" for t in (*inputs, *outputs)):
        return []  # a host scalar, such as an optimizer's step counter
    if name in _GEMMS:
        first, second = _GEMMS[name]
        return [_gemm(name, args[first], args[second], inputs, outputs)]
    if name == GROUPED:
        return [_grouped_gemm(name, args[0], args[1], offsets_of(args, kwargs), inputs, outputs)]
    if name in ("convolution", "_convolution"):
        row = _convolution("conv", args[0], args[1], args[3], args[6], args[8], out)
        if args[2] is None:
            return [row]
        size = _bytes([out])  # cuDNN's result gets its bias from a kernel of its own
        sizes = OtherSizes(out.numel(), out.numel())
        return [
            row,
            Row(
                "elementwise",
                "conv_bias",
                _is_half([out]),
                1,
                float(out.numel()),
                size,
                size,
                sizes,
            ),
        ]
    if name == "convolution_backward":
        return _convolution_backward(args, out)
    if name.startswith("_cudnn_rnn"):
        return _recurrent(name, args)
    if name == SPARSE_PRODUCT:
        return [_sparse_product(args, out)]
    if "scaled_dot_product" in name:
        return [_attention(func, name, args, inputs, outputs)]
    if name.startswith(("_foreach", "_fused_")) and isinstance(args[0], list | tuple):
        return _foreach(name, inputs, outputs, mutates=name.endswith("_"))
    read, written = _bytes(inputs), _bytes(outputs)
    if name == "blockwise_update_":  # all but the gradient
        written = read - _bytes(inputs[1:2])
    elif func._schema.is_mutable and not outputs:
        written = _bytes(inputs[:1])
    if name.startswith("_embedding_bag") and "backward" not in name:
        table, ids = args[:2]
        read = (
            _bytes([ids]) + ids.numel() * table.shape[1] * table.element_size()
        )  # the rows looked up, not the table
    if name == "add_" and isinstance(args[1], torch.Tensor) and args[1].layout is torch.sparse_coo:
        name, rows = (
            "sparse_add_",
            _bytes(tensors_in(args[1])),
        )  # rows of a table with a sparse gradient, and no others
        read, written = 2 * rows, rows
    sizes = OtherSizes(sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
    if name == "native_batch_norm" and args[5] is False:
        name = "native_batch_norm_inference"  # one pass with known means, where training takes two
    kind = FUNCTIONS.get(name, ELEMENTWISE)
    if kind.name == "fill":
        read = 0.0
    if kind.extent is not None:
        sizes = sizes._replace(extent=kind.extent(name, args, inputs))
    flops = sum(sizes[:2]) / 2 if kind.flops is None else kind.flops(name, args, inputs, outputs)
    return [Row(kind.name, name, _is_half(outputs or inputs), 1, flops, read, written, sizes)]


def _recurrent(name: str, args: Sequence[Any]) -> list[Row]:
    """The kernels of a recurrent layer, a row for each that runs."""
    half, width, rows = _is_half(args[:1]), args[0].element_size(), []
    for part in parts_of(name, args):
        if part.product is not None:
            batch, m, n, k = part.product
            read, written = float(width * (m * k + k * n)), float(width * m * n)
            row = Row("gemm", name, half, 1, 2.0 * batch * m * n * k, read, written, part.product)
        else:
            size, sizes = (
                float(width * part.elements) / 2,
                OtherSizes(part.elements // 2, part.elements // 2),
            )
            row = Row("elementwise", name, half, 1, float(part.elements), size, size, sizes)
        rows += [row] * part.runs
    return rows


def _gemm(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Row:
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    flops = 2.0 * batch * m * n * k
    return Row(
        "gemm",
        name,
        _is_half([a]),
        1,
        flops,
        _bytes(inputs),
        _bytes(outputs),
        GemmSizes(batch, m, n, k),
    )


def offsets_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Where the groups of a grouped product end."""
    return args[2] if len(args) > 2 else kwargs.get("offs")


def _grouped_gemm(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Row:
    """One product for each group of rows, all groups taken to be as large: which rows go to which expert is data.

    The dim that is divided among the groups: rows of the result where `b` is a matrix a group, its columns where `a` is one, and
    what is summed over where neither is (the gradient of the experts' weights).
    """
    groups = a.shape[0] if offsets is None else offsets.numel()
    m, k, n = map(float, (a.shape[-2], a.shape[-1], b.shape[-1]))
    if a.dim() == b.dim() == 2:
        k /= groups
    elif a.dim() == 2:
        m /= groups
    elif b.dim() == 2:
        n /= groups
    flops = 2.0 * groups * m * n * k
    launches = (
        1 if a.dtype == torch.bfloat16 else groups
    )  # a kernel for all groups, or for each (_grouped_mm_fallback)
    return Row(
        "gemm",
        name,
        _is_half([a]),
        launches,
        flops,
        _bytes(inputs),
        _bytes(outputs),
        (groups, m, n, k),
    )


def _convolution(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    transposed: bool,
    groups: int,
    y: torch.Tensor,
) -> Row:
    """`kind` names which of input, weight and output is written; the FLOPs are the same for all three."""
    positions = x if transposed else y
    per_channel = weight.numel() // weight.shape[0]
    flops = (
        2.0 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.shape[0] * per_channel
    )
    written = {"conv": y, "conv_dgrad": x, "conv_wgrad": weight}[kind]
    read = _bytes(t for t in (x, weight, y) if t is not written)

    def three(sizes: Iterable[int]) -> tuple[int, ...]:
        sizes = tuple(sizes)
        return (1,) * (3 - len(sizes)) + sizes

    lengths = (
        *three(x.shape[2:]),
        *three(y.shape[2:]),
        *three(weight.shape[2:]),
        *three(stride)[1:],
    )
    sizes = ConvSizes._make(
        (x.shape[0], groups, x.shape[1], y.shape[1], *lengths, int(_is_channels_last(x)))
    )
    return Row(kind, kind, _is_half([x]), 1, flops, read, _bytes([written]), sizes)


def _is_channels_last(x: torch.Tensor) -> bool:
    """A permuted tensor keeps its strides through element-wise operators, so a model may be NHWC inside by itself."""
    if x.dim() != 4 or x.shape[1] == 1 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) or x.stride(1) == 1


def _convolution_backward(args: Sequence[Any], out: Any) -> list[Row]:
    grad, x, weight, _, stride = args[:5]
    transposed, groups, mask = args[7], args[9], args[10]
    kinds = [
        kind for kind, wanted in zip(("conv_dgrad", "conv_wgrad"), mask, strict=False) if wanted
    ]
    rows = [_convolution(kind, x, weight, stride, transposed, groups, grad) for kind in kinds]
    if mask[2]:
        sizes, flops = OtherSizes(grad.numel(), 1), float(grad.numel())
        read, written = _bytes([grad]), _bytes([out[2]])
        rows.append(
            Row("reduction", "conv_bias_backward", _is_half([grad]), 1, flops, read, written, sizes)
        )
    return rows


def _sparse_product(args: Sequence[Any], out: torch.Tensor) -> Row:
    """A row of the dense matrix for each value; its kernel works as looking rows up does."""
    indices, values, dense = args[:3]
    rows = values.numel() * math.prod(dense.shape[1:])
    read = _bytes([indices, values]) + rows * dense.element_size()
    sizes = OtherSizes(rows, out.numel())
    return Row(
        "embedding", SPARSE_PRODUCT, _is_half([out]), 1, 2.0 * rows, read, _bytes([out]), sizes
    )


def _attention(
    func: Any,
    name: str,
    args: Sequence[Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Row:
    """Fused attention: 2 products forward, 5 backward, halved where causal, of the keys seen where others are skipped."""
    backward = "backward" in name
    q, k, v = args[1:4] if backward else args[:3]
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    causal = given.get("is_causal") is True
    batch, heads, q_length, head_dim = q.shape
    k_length, value_dim = k.shape[-2], v.shape[-1]
    kind = "attention_backward" if backward else "attention"
    width = float(attention_widths(kind, head_dim, value_dim))
    seen = max(given.get("seen", 0.0), 0.0)
    flops = 2.0 * batch * heads * q_length * (seen or k_length * (0.5 if causal else 1.0)) * width
    other = 0 if value_dim == head_dim else value_dim
    sizes = AttentionSizes(batch, heads, q_length, k_length, head_dim, int(causal), other, seen)
    launches = 2 if backward else 1
    if other and given.get("attn_bias") is None:
        name = name.replace("efficient_", "")  # cards differ in which kernels they have for it
    return Row(
        kind,
        name.strip("_"),
        _is_half([q]),
        launches,
        flops,
        _bytes(inputs),
        _bytes(outputs),
        sizes,
    )


def _foreach(
    name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], mutates: bool
) -> list[Row]:
    on_device = [t for t in inputs if t.device.type == "meta"]
    if not on_device:
        return []
    lists = max(1, round(len(on_device) / max(1, len({t.shape for t in on_device}))))
    tensors = max(1, len(on_device) // min(lists, 4))
    elements = sum(t.numel() for t in on_device) / min(lists, 4)
    launches = max(
        -(-tensors // FOREACH_TENSORS_PER_LAUNCH), math.ceil(elements / FOREACH_ELEMENTS_PER_LAUNCH)
    )
    written = (
        _bytes(outputs) if outputs else (elements * on_device[0].element_size() if mutates else 0.0)
    )
    sizes = OtherSizes(int(sum(t.numel() for t in on_device)), int(sum(t.numel() for t in outputs)))
    flops, read = float(sizes.elements_in), _bytes(on_device)
    return [Row("optimizer", name, _is_half(on_device), launches, flops, read, written, sizes)]


def matrices_of(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The two matrices of a product, the weight of a convolution, nothing for other ATen calls."""
    if name in _GEMMS or name == GROUPED:
        first, second = _GEMMS.get(name, (0, 1))
        return args[first], args[second]
    return (args[1],) if name in ("convolution", "_convolution") else ()


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes that a kernel must touch: an expanded tensor counts once however often it is repeated."""
    total = 0
    for t in tensors:
        if t.device.type == "meta":
            sizes = (
                size if stride else min(size, 1)
                for size, stride in zip(t.shape, t.stride(), strict=True)
            )
            total += math.prod(sizes) * t.element_size()
    return float(total)


def _is_half(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and tensors[0].dtype in (torch.float16, torch.bfloat16)
