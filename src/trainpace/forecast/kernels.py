"""Device time of every operator: a physical form per class, bounded by the device's sustained figures.

    time = (compute^p + memory^p)^(1/p) + launches x latency        p = SMOOTHNESS

Matrix products and convolutions compute in tiles (`tiles`); convolutions choose between implicit GEMM and Winograd, grouped ones
run as many small products, depthwise ones on CUDA cores. Everything else moves bytes at a share of the bandwidth that
its class reaches, more where it fits in L2. Every array broadcasts: operators along the last axis, batch sizes and devices along
axes before it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.rates import Rates
from trainpace.forecast.tiles import TileModel, product_s
from trainpace.workload import Operators

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SMOOTHNESS = 5.0
FP32_BYTES, HALF_BYTES = 4.0, 2.0
WINOGRAD_IMAGES = 16.0
WINOGRAD_FUSED_BLOCKS = ((1, 8, 16), (2, 8, 8), (4, 4, 8))
"""Images, rows and columns of a block; names of cuDNN's kernels and their grids in gpu_ops_fp32.parquet."""
ATTENTION_BLOCK_ROWS = 128.0
"""Query rows of one thread block of fused attention (FlashAttention-2, arXiv:2307.08691)."""

_TRAFFIC = {
    "native_batch_norm": "batch_norm", "cudnn_batch_norm": "batch_norm", "_native_batch_norm_legit": "batch_norm",
    "native_batch_norm_inference": "batch_norm_inference",
    "native_batch_norm_backward": "batch_norm_backward",
    "native_layer_norm": "layer_norm", "native_group_norm": "layer_norm", "_fused_rms_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward", "native_group_norm_backward": "layer_norm_backward",
    "_fused_rms_norm_backward": "layer_norm_backward",
    "_softmax_backward_data": "softmax_backward", "_log_softmax_backward_data": "softmax_backward",
    "max_pool2d_with_indices_backward": "pool_backward", "avg_pool2d_backward": "pool_backward",
    "_adaptive_avg_pool2d_backward": "pool_backward",
    **dict.fromkeys(("embedding_dense_backward", "scatter", "scatter_add", "index_put", "index_put_", "index_add",
                     "index_add_", "_index_put_impl_"), "embedding_backward"),
}  # fmt: skip
_TRAFFIC_OF_KIND = {"norm": "batch_norm", "view": "fill", "module": "fill"}
_CONVOLUTIONS = ("conv", "conv_dgrad", "conv_wgrad")


class KernelTimes(NamedTuple):
    """Seconds per row (all of its `count` operators together), and what bounds them."""

    device_s: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


class KernelTable:
    """The operators of a workload, sorted into classes once, evaluated at any batch size, device and set of constants."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._kind = np.array(operators.kind)
        self._groups = operators.dims[:, 1].sum(axis=1)
        channels = operators.dims[:, 2].sum(axis=1)
        self._is_convolution = np.isin(self._kind, _CONVOLUTIONS)
        self._depthwise = self._is_convolution & (self._groups > 1) & (channels == self._groups)
        self._grouped = self._is_convolution & (self._groups > 1) & ~self._depthwise

    @cached_property
    def traffic(self) -> NDArray[np.str_]:
        """The class of every row's memory traffic: a name of the constants' `traffic_*`."""
        names = []
        for kind, function in zip(self.operators.kind, self.operators.function, strict=True):
            names.append(_TRAFFIC.get(function) or _TRAFFIC_OF_KIND.get(kind, kind))
        return np.array(names)

    def times(
        self,
        batch: Floats,
        rates: Rates,
        c: KernelConstants,
        channels_last: Flags | bool = False,
        compiled: Flags | bool = False,
    ) -> KernelTimes:
        """Times at `batch`, which broadcasts against the operators in the last axis, as do the rates' arrays and the flags."""
        table = self.operators
        batch = np.asarray(batch, dtype=np.float64)

        def at(coefficients: Floats) -> Floats:
            value: Floats = coefficients[..., 0] + coefficients[..., 1] * batch
            return value

        shape = np.broadcast_shapes(batch.shape, rates.sms.shape, self._groups.shape)
        half = table.half
        bytes_moved = at(table.read_bytes) + at(table.written_bytes)
        compute = np.zeros(shape)
        rate = np.where(half, rates.half, rates.full)
        tensor = np.where(half, rates.half_on_tensor_cores, rates.full_on_tensor_cores) > 0
        dims = [at(table.dims[:, i]) for i in range(16)]
        # torch.compile turns convolutions to channels-last by itself (torch._inductor.config.layout_optimization)
        turned: Flags = np.asarray(channels_last) | (self._is_convolution & ((dims[15] > 0) | np.asarray(compiled)))
        pick = _Pick(shape, dims, rate, tensor, rates.sms, turned)

        products = self._kind == "gemm"
        if products.any():
            b, m, n, k, speed, units, sms = pick(products, 0, 1, 2, 3)
            tensor_share = np.where(half[products], c.gemm_tensor, c.gemm_tf32)
            share = np.where(units, np.where(b > 1, c.batched_tensor * tensor_share, tensor_share), c.gemm_plain)
            share = share * _alignment(n, k, units, c)
            compute[..., products] = product_s(b, m, n, k, speed, sms, _tiles(share, units, c))
        for kind in _CONVOLUTIONS:
            dense = (self._kind == kind) & ~self._depthwise
            if dense.any():
                compute[..., dense] = _convolution_s(kind, pick, dense, self._grouped[dense], half[dense], rates, c)
            thin = (self._kind == kind) & self._depthwise
            if thin.any():
                suffix = kind.removeprefix("conv")
                share = np.where(
                    pick.flag(thin), getattr(c, f"depthwise_nhwc{suffix}"), getattr(c, f"depthwise{suffix}")
                )
                window = _part(dims[10] * dims[11] * dims[12], thin, shape)
                name = "wgrad_window" if suffix == "_wgrad" else "window"
                power = np.where(pick.flag(thin), getattr(c, f"depthwise_nhwc_{name}"), getattr(c, f"depthwise_{name}"))
                share = share * (window / 9.0) ** (power - 1.0)
                compute[..., thin] = _part(at(table.flops), thin, shape) / (_part(rates.plain, thin, shape) * share)
        for kind in ("attention", "attention_backward"):
            rows = self._kind == kind
            if rows.any():
                b, heads, q, speed, _, sms = pick(rows, 0, 1, 2)
                speed = np.where(half[rows], _part(rates.attention, rows, shape), speed)
                blocks = b * heads * np.ceil(q / ATTENTION_BLOCK_ROWS)
                waves = blocks / sms
                fill = waves / np.maximum(1.0, waves + 0.5 * (np.ceil(waves) - waves))
                flops = _part(at(table.flops), rows, shape)
                full = kind.replace("attention", "attention_full")
                share = np.where(half[rows], getattr(c, kind), getattr(c, full))
                compute[..., rows] = flops / (speed * share * np.minimum(fill, 1.0))
        share = self._traffic_shares(pick.channels_last, c)
        # NCHW convolutions on matrix units are transposed to NHWC and back
        transposed = self._is_convolution & ~self._depthwise & tensor & ~pick.channels_last
        bytes_moved = np.where(transposed, bytes_moved * (1.0 + 2.0 * c.transposes), bytes_moved)
        cached = 1.0 / (1.0 + (bytes_moved / rates.l2_bytes) ** 2)
        memory = bytes_moved / (rates.bytes_per_s * share * (1.0 + c.l2_gain * cached))
        other = ~np.isin(self._kind, ("gemm", "attention", "attention_backward", *_CONVOLUTIONS))
        compute = np.where(other, at(table.flops) / (rates.plain * 0.5), compute)
        fused = np.asarray(compiled) & other
        memory = np.where(fused & (self._kind != "optimizer"), memory * c.compile_traffic, memory)
        count = table.count
        launches = table.launches * np.where(fused, c.compile_launches, 1.0)
        latency = np.broadcast_to(count * launches * c.latency_us * 1e-6, shape)
        busy = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS)
        return KernelTimes(count * busy + latency, count * compute, count * memory, latency)

    def _traffic_shares(self, channels_last: Flags, c: KernelConstants) -> Floats:
        matrix = np.isin(self.traffic, ("gemm", "attention", "attention_backward", *_CONVOLUTIONS))
        shares = np.array([c.traffic_matrix if is_matrix else getattr(c, f"traffic_{name}")
                           for name, is_matrix in zip(self.traffic, matrix, strict=True)])  # fmt: skip
        nhwc = np.array(
            [getattr(c, f"traffic_{name}_nhwc", share) for name, share in zip(self.traffic, shares, strict=True)]
        )
        result: Floats = np.where(channels_last, nhwc, shares)
        return result


class _Pick:
    """The named dims and the rates of some rows, with all leading axes."""

    def __init__(
        self, shape: tuple[int, ...], dims: list[Floats], rate: Floats, tensor: Flags, sms: Floats, channels_last: Flags
    ) -> None:
        self._shape, self._dims, self._rate, self._tensor, self._sms = shape, dims, rate, tensor, sms
        self.channels_last = np.broadcast_to(channels_last, shape)

    def __call__(self, rows: Flags, *which: int) -> tuple[Any, ...]:
        parts = [_part(self._dims[i], rows, self._shape) for i in which]
        return (*parts, *(_part(array, rows, self._shape) for array in (self._rate, self._tensor, self._sms)))

    def flag(self, rows: Flags) -> Flags:
        return self.channels_last[..., rows]


def _part(array: Any, rows: Flags, shape: tuple[int, ...]) -> Any:
    """The rows of an array that may not have the operators' axis yet, or any before it."""
    if array.ndim == 0:
        return array
    if array.shape[-1] == 1:
        return array
    return array[..., rows]


def _tiles(share: Floats, units: Flags, c: KernelConstants) -> TileModel:
    return TileModel(
        share,
        np.where(units, c.tile_tensor_half_intensity, c.tile_plain_half_intensity),
        np.where(units, c.tile_tensor_prologue, c.tile_plain_prologue),
        np.where(units, c.tile_tensor_quantisation, c.tile_plain_quantisation),
    )


def _alignment(n: Floats, k: Floats, units: Flags, c: KernelConstants) -> Floats:
    """Matrix units load 16 bytes at a time: rows of another length are loaded piece by piece."""
    odd = (np.mod(n, 8) != 0) | (np.mod(k, 8) != 0)
    factor: Floats = np.where(units & odd, c.misaligned, 1.0)
    return factor


def _convolution_s(
    kind: str, pick: _Pick, rows: Flags, grouped: Flags, half: Flags, rates: Rates, c: KernelConstants
) -> Floats:
    """Implicit GEMM, or Winograd for 3x3 at stride 1 on CUDA cores where that is faster."""
    (images, groups, c_in, c_out, in_d, in_h, in_w, out_d, out_h, out_w, k_d, k_h, k_w, s_h, s_w, speed, units, sms) = (
        pick(rows, *range(15))
    )
    suffix = kind.removeprefix("conv")
    positions_out = images * out_d * out_h * out_w
    positions_in = images * in_d * in_h * in_w
    window = k_d * k_h * k_w
    strides = s_h * s_w
    inputs, outputs = c_in / groups, c_out / groups
    padded = np.where(units, np.ceil(inputs / 8) * 8, inputs)  # matrix units take channels eight at a time
    if kind == "conv":
        m, n, k = positions_out, outputs, padded * window
    elif kind == "conv_dgrad":
        m, n, k = positions_in, padded, outputs * np.maximum(1.0, window / strides)
    else:
        m, n, k = outputs, padded * window, positions_out
    tensor_share = np.where(half, getattr(c, f"conv_tensor{suffix}"), getattr(c, f"conv_tf32{suffix}"))
    # images of 3 channels are padded to 4 or 8 by kernels made for them; other odd numbers are not
    odd_channels = (np.mod(outputs, 8) != 0) | ((np.mod(inputs, 8) != 0) & (inputs > 4))
    tensor_share = np.where(odd_channels, tensor_share * c.conv_misaligned, tensor_share)
    share = np.where(units, tensor_share, getattr(c, f"conv_plain{suffix}"))
    direct = product_s(groups, m, n, k, speed, sms, _tiles(share, units, c))
    if grouped.any():
        # cuDNN's fast NHWC kernels take groups in 32s, of as many inputs as outputs, a power of two
        odd = (np.mod(groups, 32) != 0) | (inputs != outputs) | (np.mod(np.log2(np.maximum(inputs, 1)), 1) != 0)
        odd = odd & pick.flag(rows) & (np.asarray(units) > 0)
        factor = np.where(units, getattr(c, f"grouped{suffix}"), getattr(c, f"grouped_plain{suffix}"))
        factor = np.where(odd, getattr(c, f"grouped_odd_nhwc{suffix}"), factor)
        power = np.where(odd, c.grouped_odd_nhwc_channels, c.grouped_channels)
        group_share = np.minimum(factor * (c_in / groups / 16.0) ** power, 1.0)
        in_groups = 2.0 * groups * (c_in / groups) * (c_out / groups) * window * positions_out / (speed * group_share)
        direct = np.where(grouped, np.maximum(direct, in_groups), direct)
    square = (k_h == 3) & (k_w == 3) & (strides == 1) & ~grouped & (k_d == 1)
    square = square & ~np.asarray(units, dtype=bool)
    if not square.any():
        return direct
    winograd = _winograd_s(
        kind, images, out_h, out_w, inputs, outputs, speed, sms, _part(rates.bytes_per_s, rows, ()), c
    )
    result: Floats = np.where(square, np.minimum(direct, winograd), direct)
    return result


def _winograd_s(
    kind: str, images: Floats, h: Floats, w: Floats, inputs: Floats, outputs: Floats, speed: Floats, sms: Floats,
    bytes_per_s: Floats, c: KernelConstants,
) -> Floats:  # fmt: skip
    """The faster of cuDNN's two Winograd kernels for 3x3 at stride 1 (Lavin and Gray 2015).

    F(4x4, 3x3) in separate kernels: 36 products of (tiles x inputs x outputs), whose tiles are those of a batch **padded to
    16 images**; F(2x2, 3x3) in one kernel, in blocks of a few images. docs/jumps.md has the evidence from kernel grids.
    """
    suffix = kind.removeprefix("conv")
    padded = images if kind == "conv_wgrad" else np.ceil(images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES
    tiles = padded * np.ceil(h / 4) * np.ceil(w / 4)
    sizes = (outputs, inputs, tiles) if kind == "conv_wgrad" else (tiles, outputs, inputs)
    model = _tiles(np.asarray(getattr(c, f"winograd{suffix}")), np.asarray(False), c)
    moved = 2.0 * FP32_BYTES * 36.0 * (tiles * (inputs + outputs) + inputs * outputs)
    separate = product_s(np.asarray(36.0), *sizes, speed, sms, model) + moved / (bytes_per_s * c.traffic_matrix)
    if kind == "conv_wgrad":
        return separate
    positions = np.minimum.reduce([
        np.ceil(images / n) * n * np.ceil(h / rows) * rows * np.ceil(w / columns) * columns
        for n, rows, columns in WINOGRAD_FUSED_BLOCKS
    ])  # fmt: skip
    work = 2.0 * 9.0 / 2.25 * positions * inputs * np.ceil(outputs / 32) * 32
    fused = work / (speed * getattr(c, f"winograd_fused{suffix}"))
    result: Floats = np.minimum(separate, fused)
    return result
