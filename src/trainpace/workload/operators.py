"""Convert one dispatched ATen call to rows, one for each kernel that CUDA would run for it.

A row has a kind, FLOPs, bytes, launches and sizes. `trainpace.workload.workload` names the sizes of
each kind. Rows of kind `view` (calls that change metadata) and `module` (modules entered) cost time
on the host only.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
"""Tensors per launch of a foreach kernel.

ATen's multi_tensor_apply passes 110 to 30 tensors per launch for 1 to 5 lists of tensors. Adam has
4 lists, and so 36 tensors.
"""
FOREACH_ELEMENTS_PER_LAUNCH = 320 * 65536
"""Elements per launch of a foreach kernel: 320 blocks of 65536 elements.

Source: ATen/native/cuda/MultiTensorApply.cuh.
"""


class Row(NamedTuple):
    """Operator at one batch size.

    Attributes:
        kind: Name of a `kinds.Kind`.
        function: Name of the ATen call.
        half: True for arithmetic in 16 bits.
        launches: Number of kernels. 0 if only the host works.
        flops: FLOPs.
        read_bytes: Bytes that the kernels read.
        written_bytes: Bytes that the kernels write.
        dims: Sizes, in the order of the kind's named tuple in `workload`.
    """

    kind: str
    function: str
    half: bool
    launches: int
    flops: float
    read_bytes: float
    written_bytes: float
    dims: tuple[float, ...]


class Call(NamedTuple):
    """ATen call, with the tensors among its arguments and results."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    def row(
        self, kind: str, launches: int, of: torch.Tensor, flops: float, sizes: tuple[float, ...]
    ) -> Row:
        """Return a row that reads all inputs and writes all outputs. `of` decides the format."""
        half, read, written = _is_half([of]), _bytes(self.inputs), _bytes(self.outputs)
        return Row(kind, self.name, half, launches, flops, read, written, sizes)


_GEMMS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_CONVOLUTIONS = ("convolution", "_convolution")
_FREE = {"detach", "alias"}
_ON_THE_HOST = _FREE | set(
    "empty empty_like empty_strided new_empty new_empty_strided lift_fresh resize_ _unsafe_view"
    " _local_scalar_dense".split()
)
"""Calls that touch no memory of the device, such as allocations."""
_VIEW = Row("view", "view", False, 0, 0.0, 0.0, 0.0, ())


def rows_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Row]:
    """Return the rows of one ATen call. The list is empty for calls without cost.

    Args:
        func: The ATen operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    name = func._schema.name.partition("::")[2]
    if func.is_view or name in _ON_THE_HOST:
        return [] if name in _FREE else [_VIEW]
    inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(out))
    if not any(t.device.type == "meta" for t in (*inputs, *outputs)):
        return []  # a host scalar, such as an optimizer's step counter
    return _rows_for(name, args)(Call(func, name, args, kwargs, out, inputs, outputs))


def _rows_for(name: str, args: Sequence[Any]) -> Callable[[Call], list[Row]]:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith("_cudnn_rnn"):
        return _recurrent
    if "scaled_dot_product" in name:
        return _attention
    if name.startswith(("_foreach", "_fused_")) and isinstance(args[0], list | tuple):
        return _foreach
    return _memory_bound


def _memory_bound(call: Call) -> list[Row]:
    name = _function_of(call)
    kind = FUNCTIONS.get(name, KINDS["elementwise"])
    read, written = _traffic(call, name)
    if kind.name == "fill":
        read = 0.0
    inputs, outputs = call.inputs, call.outputs
    sizes = OtherSizes(sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
    if kind.extent is not None:
        sizes = sizes._replace(extent=kind.extent(name, call.args, inputs))
    flops = sum(sizes[:2]) / 2
    return [Row(kind.name, name, _is_half(outputs or inputs), 1, flops, read, written, sizes)]


def _function_of(call: Call) -> str:
    """Return the name of a call. Some arguments change how a call runs, and so its name."""
    if call.name == "native_batch_norm" and call.args[5] is False:
        # inference knows the means and needs one pass over the input; training needs two
        return "native_batch_norm_inference"
    if call.name == "add_" and isinstance(call.args[1], torch.Tensor):
        return "sparse_add_" if call.args[1].layout is torch.sparse_coo else "add_"
    return call.name


def _traffic(call: Call, name: str) -> tuple[float, float]:
    """Return the bytes (read, written)."""
    read, written = _bytes(call.inputs), _bytes(call.outputs)
    if name == "sparse_add_":  # touches only the table rows that have a gradient
        rows = _bytes(tensors_in(call.args[1]))
        return 2 * rows, rows
    if name == "blockwise_update_":  # writes everything except the gradient
        written = read - _bytes(call.inputs[1:2])
    elif call.func._schema.is_mutable and not call.outputs:
        written = _bytes(call.inputs[:1])
    if name.startswith("_embedding_bag") and "backward" not in name:
        table, ids = call.args[:2]  # only the rows looked up are read, not the table
        read = _bytes([ids]) + ids.numel() * table.shape[1] * table.element_size()
    return read, written


def _recurrent(call: Call) -> list[Row]:
    """Return a row for each kernel of a recurrent layer."""
    x, rows = call.args[0], []
    half, width = _is_half([x]), x.element_size()
    for part in parts_of(call.name, call.args):
        if part.matmul is not None:
            batch, m, n, k = part.matmul
            read, written = float(width * (m * k + k * n)), float(width * m * n)
            flops = 2.0 * batch * m * n * k
            row = Row("gemm", call.name, half, 1, flops, read, written, part.matmul)
        else:
            size = float(width * part.elements) / 2
            sizes, flops = OtherSizes(part.elements // 2, part.elements // 2), float(part.elements)
            row = Row("elementwise", call.name, half, 1, flops, size, size, sizes)
        rows += [row] * part.runs
    return rows


def _gemm(call: Call) -> list[Row]:
    a, b = (call.args[i] for i in _GEMMS[call.name])
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return [call.row("gemm", 1, a, 2.0 * batch * m * n * k, GemmSizes(batch, m, n, k))]


def _triangular_solve(call: Call) -> list[Row]:
    """Return the row of a triangular solve: half the FLOPs of a matmul of the same matrices."""
    matrix, right = call.args[:2]
    n, columns = matrix.shape[-1], right.numel() // max(1, math.prod(matrix.shape[:-1]))
    batch = matrix.numel() // max(1, n * n)
    sizes = GemmSizes(batch, n, columns, n)
    return [call.row("gemm", 1, matrix, float(batch * n * n * columns), sizes)]


def offsets_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor of end offsets of the groups of a grouped matmul, or None."""
    return args[2] if len(args) > 2 else kwargs.get("offs")


def _grouped_gemm(call: Call) -> list[Row]:
    """Return the row of a grouped matmul, one matmul per group.

    The groups are assumed to be equally large, because routing depends on values. If `b` has a
    matrix per group, the groups divide the rows of the result. If `a` has one, they divide its
    columns. If neither has, they divide the summed dim, as in the gradient of the experts' weights.
    """
    a, b = call.args[:2]
    offsets = offsets_of(call.args, call.kwargs)
    groups = a.shape[0] if offsets is None else offsets.numel()
    m, k, n = map(float, (a.shape[-2], a.shape[-1], b.shape[-1]))
    if a.dim() == b.dim() == 2:
        k /= groups
    elif a.dim() == 2:
        m /= groups
    elif b.dim() == 2:
        n /= groups
    # bf16 has one kernel for all groups, other dtypes one per group (_grouped_mm_fallback)
    launches = 1 if a.dtype == torch.bfloat16 else groups
    return [call.row("gemm", launches, a, 2.0 * groups * m * n * k, (groups, m, n, k))]


def _convolution(call: Call) -> list[Row]:
    x, weight, bias, stride = call.args[:4]
    transposed, groups, out = call.args[6], call.args[8], call.out
    row = _convolution_row("conv", x, weight, stride, transposed, groups, out)
    if bias is None:
        return [row]
    # after cuDNN's convolution, another kernel adds the bias
    size, n = _bytes([out]), out.numel()
    sizes, half = OtherSizes(n, n), _is_half([out])
    return [row, Row("elementwise", "conv_bias", half, 1, float(n), size, size, sizes)]


def _convolution_row(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    transposed: bool,
    groups: int,
    y: torch.Tensor,
) -> Row:
    """Return the row of a convolution or of one of its gradients. All have the same FLOPs."""
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

    lengths = [n for t in (x, y, weight) for n in three(t.shape[2:])]
    shape = (x.shape[0], groups, x.shape[1], y.shape[1])
    sizes = ConvSizes._make((*shape, *lengths, *three(stride)[1:], int(_is_channels_last(x))))
    return Row(kind, kind, _is_half([x]), 1, flops, read, _bytes([written]), sizes)


def _is_channels_last(x: torch.Tensor) -> bool:
    # element-wise operators keep the strides of a permuted tensor, so parts of a model may run in
    # NHWC without memory_format=torch.channels_last
    if x.dim() != 4 or x.shape[1] == 1 or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) or x.stride(1) == 1


def _convolution_backward(call: Call) -> list[Row]:
    grad, x, weight, _, stride = call.args[:5]
    transposed, groups, (of_input, of_weight, of_bias) = (call.args[i] for i in (7, 9, 10))
    kinds = ["conv_dgrad"] * of_input + ["conv_wgrad"] * of_weight
    rows = [_convolution_row(kind, x, weight, stride, transposed, groups, grad) for kind in kinds]
    if of_bias:
        sizes, flops = OtherSizes(grad.numel(), 1), float(grad.numel())
        read, written, half = _bytes([grad]), _bytes([call.out[2]]), _is_half([grad])
        rows.append(Row("reduction", "conv_bias_backward", half, 1, flops, read, written, sizes))
    return rows


def _sparse_product(call: Call) -> list[Row]:
    """Return the row of a sparse matmul.

    For each value of the sparse matrix, the kernel reads a row of the dense one, like an embedding
    lookup.
    """
    indices, values, dense = call.args[:3]
    rows = values.numel() * math.prod(dense.shape[1:])
    read, written = _bytes([indices, values]) + rows * dense.element_size(), _bytes([call.out])
    sizes, half = OtherSizes(rows, call.out.numel()), _is_half([call.out])
    return [Row("embedding", SPARSE_PRODUCT, half, 1, 2.0 * rows, read, written, sizes)]


def _attention(call: Call) -> list[Row]:
    """Return the row of fused attention, with 2 matmuls in the forward and 5 in the backward pass.

    A causal mask halves their FLOPs. For a kernel that skips masked keys, only the keys that a
    query sees count.
    """
    backward = "backward" in call.name
    q, k, v = call.args[1:4] if backward else call.args[:3]
    names = [argument.name for argument in call.func._schema.arguments]
    given = dict(zip(names, call.args, strict=False))
    causal = given.get("is_causal") is True
    batch, heads, q_length, head_dim = q.shape
    k_length, value_dim = k.shape[-2], v.shape[-1]
    kind = "attention_backward" if backward else "attention"
    width = float(attention_widths(kind, head_dim, value_dim))
    seen = max(given.get("seen", 0.0), 0.0)
    flops = 2.0 * batch * heads * q_length * (seen or k_length * (0.5 if causal else 1.0)) * width
    other = 0 if value_dim == head_dim else value_dim
    sizes = AttentionSizes(batch, heads, q_length, k_length, head_dim, int(causal), other, seen)
    name = call.name
    if other and given.get("attn_bias") is None:
        name = name.replace("efficient_", "")  # the kernel for this case differs between cards
    row = call.row(kind, 2 if backward else 1, q, flops, sizes)
    return [row._replace(function=name.strip("_"))]


def _foreach(call: Call) -> list[Row]:
    on_device = [t for t in call.inputs if t.device.type == "meta"]
    if not on_device:
        return []
    lists = max(1, round(len(on_device) / max(1, len({t.shape for t in on_device}))))
    tensors = max(1, len(on_device) // min(lists, 4))
    in_all, outputs = sum(t.numel() for t in on_device), call.outputs
    elements = in_all / min(lists, 4)
    launches = max(
        -(-tensors // FOREACH_TENSORS_PER_LAUNCH), math.ceil(elements / FOREACH_ELEMENTS_PER_LAUNCH)
    )
    in_place = elements * on_device[0].element_size() if call.name.endswith("_") else 0.0
    written = _bytes(outputs) if outputs else in_place
    sizes = OtherSizes(in_all, sum(t.numel() for t in outputs))
    half, read = _is_half(on_device), _bytes(on_device)
    return [Row("optimizer", call.name, half, launches, float(in_all), read, written, sizes)]


_BY_NAME: dict[str, Callable[[Call], list[Row]]] = {
    **dict.fromkeys(_GEMMS, _gemm),
    GROUPED: _grouped_gemm,
    "linalg_solve_triangular": _triangular_solve,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "convolution_backward": _convolution_backward,
    SPARSE_PRODUCT: _sparse_product,
}


def matrices_of(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the two matrices of a matmul or the weight of a convolution. Empty for other calls."""
    if name in _GEMMS or name == GROUPED:
        first, second = _GEMMS.get(name, (0, 1))
        return args[first], args[second]
    return (args[1],) if name in _CONVOLUTIONS else ()


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the bytes that a kernel must touch. Expanded dims (stride 0) count once."""
    total = 0
    for t in tensors:
        if t.device.type == "meta":
            pairs = zip(t.shape, t.stride(), strict=True)
            sizes = (size if stride else min(size, 1) for size, stride in pairs)
            total += math.prod(sizes) * t.element_size()
    return float(total)


def _is_half(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and tensors[0].dtype in (torch.float16, torch.bfloat16)
