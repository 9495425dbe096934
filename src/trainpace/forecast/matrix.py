"""Seconds of arithmetic of matrix products, convolutions and fused attention.

A product of m x n x k is cut into tiles of the output, one thread block each, and blocks into rounds ("waves") over the
SMs; a last wave that is not full costs as much as a full one. Large tiles reuse what they load (their rate is higher),
small ones fill the device; where blocks are few and k is long, k is split over several blocks. The fastest candidate is
taken, as the libraries' heuristics try to. Model after NVIDIA's "Matrix Multiplication Background User's Guide".

Convolutions are products too (implicit GEMM), except in groups, depthwise, and by Winograd with the batch that cuDNN pads.
"""

from typing import Any, NamedTuple

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.rates import Rates
from trainpace.workload import ATTENTION, CONV, GEMM, Flags, Floats

TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64))
"""Tile sizes of the output, either way round. Kernel names in gpu_ops_fp32 show 128x128 down to 32x32."""
K_UNIT = 16.0
MOST_SPLITS = 32.0
SHORTEST_SPLIT = 128.0
"""The reduction of a split k costs more than it gains below this length."""
MISALIGNED = 0.7
"""Share of the fp32 rate that batched 16-bit products reach on an A100's CUDA cores where rows are no multiples of 16 bytes:
cuBLAS 11 seems to have no kernels on matrix units for them, in fp16 as in bf16. Set so that bigscience's runs with heads of 150
numbers err as aligned ones do; those with 108 then do too (docs/log.md). Unknown for later versions of cuBLAS."""
ATTENTION_BLOCK_ROWS = 128.0
"""Query rows of one thread block of fused attention (FlashAttention-2, arXiv:2307.08691)."""
FP32_BYTES = 4.0
WINOGRAD_IMAGES = 16.0
WINOGRAD_FUSED_BLOCKS = ((1, 8, 16), (2, 8, 8), (4, 4, 8))
"""Images, rows and columns of a block, from the names of cuDNN's kernels and their grids in gpu_ops_fp32.parquet."""


class TileModel(NamedTuple):
    """Constants of one family of matrix kernels. Each may be an array that broadcasts against the products.

    efficiency: share of the rate that very large tiles reach. half_intensity: m n / (m + n) of the tile at which the rate is
    half of that. prologue: start and end of a block, in units of k. quantisation: the share that is paid of the empty part of a
    last wave, 1 for all of it.
    """

    efficiency: Floats
    half_intensity: Floats
    prologue: Floats
    quantisation: Floats


def tile_model(share: Floats, units: Flags, c: KernelConstants) -> TileModel:
    """The tile constants of matrix units or CUDA cores, at a share of the rate."""
    return TileModel(
        share,
        np.where(units, c.tile_tensor_half_intensity, c.tile_plain_half_intensity),
        np.where(units, c.tile_tensor_prologue, c.tile_plain_prologue),
        np.where(units, c.tile_tensor_quantisation, c.tile_plain_quantisation),
    )


class OperatorSizes:
    """The sizes of an operator table's rows, and the rates at which they run."""

    def __init__(
        self, shape: tuple[int, ...], dims: list[Floats], rate: Floats, tensor: Flags, sms: Floats, channels_last: Flags
    ) -> None:
        self._dims, self._rates = dims, (rate, tensor, sms)
        self.channels_last = np.broadcast_to(channels_last, shape)

    def of(self, rows: Flags, *positions: int) -> tuple[Any, ...]:
        """The sizes of some rows at these positions, then their rate, whether a matrix unit gives it, and SMs."""
        return tuple(part(array, rows) for array in (*(self._dims[i] for i in positions), *self._rates))


def part(array: Any, rows: Flags) -> Any:
    """Some rows of an array, which may lack the operators' axis or have others before it."""
    return array if array.ndim == 0 or array.shape[-1] == 1 else array[..., rows]


def tiled_s(batch: Floats, m: Floats, n: Floats, k: Floats, rate: Floats, sms: Floats, model: TileModel) -> Floats:
    """Seconds of arithmetic of `batch` products m x n x k at `rate` FLOP/s, best tile of TILES. Arrays broadcast."""
    padded_k = np.ceil(k / K_UNIT) * K_UNIT
    long, short = np.maximum(m, n), np.minimum(m, n)
    per_sm = rate / sms
    seconds = []
    for big, small in TILES:
        # the longer side of the tile lies along the longer side of the output
        blocks = batch * np.ceil(long / big) * np.ceil(short / small)
        splits = np.clip(
            np.floor(sms / blocks), 1.0, np.minimum(MOST_SPLITS, np.maximum(1.0, padded_k / SHORTEST_SPLIT))
        )
        waves = blocks * splits / sms
        waves = np.maximum(waves + model.quantisation * (np.ceil(waves) - waves), 1.0)
        intensity = big * small / (big + small)
        speed = per_sm * model.efficiency * (intensity / (intensity + model.half_intensity))
        seconds.append(waves * (2.0 * big * small) * (padded_k / splits + model.prologue) / speed)
    return np.asarray(np.minimum.reduce(seconds))


def products_s(sizes: OperatorSizes, rows: Flags, half: Flags, rates: Rates, c: KernelConstants) -> Floats:
    """Matrix products. Matrix units load 16 bytes at a time: rows of another length are loaded in pieces of 8, 4 or 2
    numbers, each half as wide."""
    b, m, n, k, speed, units, sms = sizes.of(rows, *GEMM)
    scalar = half & units & (b > 1) & (part(rates.aligned_only, rows) > 0) & ((n % 8 > 0) | (k % 8 > 0))
    speed, units = np.where(scalar, MISALIGNED * part(rates.plain, rows), speed), units & ~scalar
    tensor_share = np.where(half, c.gemm_tensor, c.gemm_tf32)
    share = np.where(units, np.where(b > 1, c.batched_tensor * tensor_share, tensor_share), c.gemm_plain)
    halvings = np.select([(n % width == 0) & (k % width == 0) for width in (8, 4, 2)], [0.0, 1.0, 2.0], 3.0)
    share = share * np.where(units, c.misaligned**halvings, 1.0)
    return tiled_s(b, m, n, k, speed, sms, tile_model(share, units, c))


def attention_s(
    kind: str, sizes: OperatorSizes, rows: Flags, flops: Floats, half: Flags, rates: Rates, c: KernelConstants
) -> Floats:
    """Fused attention: a share of the rate, less where its blocks of query rows do not fill the device."""
    b, heads, q, speed, _, sms = sizes.of(rows, ATTENTION.batch, ATTENTION.heads, ATTENTION.queries)
    speed = np.where(half, part(rates.attention, rows), speed)
    waves = b * heads * np.ceil(q / ATTENTION_BLOCK_ROWS) / sms
    fill = waves / np.maximum(1.0, waves + 0.5 * (np.ceil(waves) - waves))
    share = np.where(half, getattr(c, kind), getattr(c, kind.replace("attention", "attention_full")))
    return np.asarray(flops / (speed * share * np.minimum(fill, 1.0)))


def depthwise_s(
    kind: str, sizes: OperatorSizes, rows: Flags, flops: Floats, rates: Rates, c: KernelConstants
) -> Floats:
    """One filter a channel, on CUDA cores: a share of their rate that depends on the pass, the layout and the window."""
    suffix = kind.removeprefix("conv")
    nhwc = sizes.channels_last[..., rows]
    share = np.where(nhwc, getattr(c, f"depthwise_nhwc{suffix}"), getattr(c, f"depthwise{suffix}"))
    depth, height, width, *_ = sizes.of(rows, CONV.kernel_d, CONV.kernel_h, CONV.kernel_w)
    name = "wgrad_window" if suffix == "_wgrad" else "window"
    power = np.where(nhwc, getattr(c, f"depthwise_nhwc_{name}"), getattr(c, f"depthwise_{name}"))
    share = share * (depth * height * width / 9.0) ** (power - 1.0)
    return np.asarray(flops / (part(rates.plain, rows) * share))


def convolution_s(
    kind: str, sizes: OperatorSizes, rows: Flags, grouped: Flags, half: Flags, rates: Rates, c: KernelConstants
) -> Floats:
    """Implicit GEMM, or Winograd for 3x3 at stride 1 on CUDA cores where that is faster."""
    (images, groups, c_in, c_out, in_d, in_h, in_w, out_d, out_h, out_w, k_d, k_h, k_w, s_h, s_w, speed, units, sms) = (
        sizes.of(rows, *CONV[: CONV.channels_last])
    )
    suffix = kind.removeprefix("conv")
    positions_out = images * out_d * out_h * out_w
    window, strides = k_d * k_h * k_w, s_h * s_w
    inputs, outputs = c_in / groups, c_out / groups
    padded = np.where(units, np.ceil(inputs / 8) * 8, inputs)  # matrix units take channels eight at a time
    if kind == "conv":
        m, n, k = positions_out, outputs, padded * window
    elif kind == "conv_dgrad":
        m, n, k = images * in_d * in_h * in_w, padded, outputs * np.maximum(1.0, window / strides)
    else:
        m, n, k = outputs, padded * window, positions_out
    tensor_share = np.where(half, getattr(c, f"conv_tensor{suffix}"), getattr(c, f"conv_tf32{suffix}"))
    # images of 3 channels are padded to 4 or 8 by kernels made for them; other odd numbers are not
    odd_channels = (np.mod(outputs, 8) != 0) | ((np.mod(inputs, 8) != 0) & (inputs > 4))
    tensor_share = np.where(odd_channels, tensor_share * c.conv_misaligned, tensor_share)
    share = np.where(units, tensor_share, getattr(c, f"conv_plain{suffix}"))
    direct = tiled_s(groups, m, n, k, speed, sms, tile_model(share, units, c))
    if grouped.any():
        # cuDNN's fast NHWC kernels take groups in 32s, of as many inputs as outputs, a power of two
        odd = (np.mod(groups, 32) != 0) | (inputs != outputs) | (np.mod(np.log2(np.maximum(inputs, 1)), 1) != 0)
        odd = odd & sizes.channels_last[..., rows] & (np.asarray(units) > 0)
        factor = np.where(units, getattr(c, f"grouped{suffix}"), getattr(c, f"grouped_plain{suffix}"))
        factor = np.where(odd, getattr(c, f"grouped_odd_nhwc{suffix}"), factor)
        power = np.where(odd, c.grouped_odd_nhwc_channels, c.grouped_channels)
        group_share = np.minimum(factor * (inputs / 16.0) ** power, 1.0)
        in_groups = 2.0 * groups * inputs * outputs * window * positions_out / (speed * group_share)
        direct = np.where(grouped, np.maximum(direct, in_groups), direct)
    square = (k_h == 3) & (k_w == 3) & (strides == 1) & ~grouped & (k_d == 1) & ~np.asarray(units, dtype=bool)
    if not square.any():
        return direct
    winograd = _winograd_s(kind, images, out_h, out_w, inputs, outputs, speed, sms, part(rates.bytes_per_s, rows), c)
    return np.where(square, np.minimum(direct, winograd), direct)


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
    product = (outputs, inputs, tiles) if kind == "conv_wgrad" else (tiles, outputs, inputs)
    model = tile_model(np.asarray(getattr(c, f"winograd{suffix}")), np.asarray(False), c)
    moved = 2.0 * FP32_BYTES * 36.0 * (tiles * (inputs + outputs) + inputs * outputs)
    separate = tiled_s(np.asarray(36.0), *product, speed, sms, model) + moved / (bytes_per_s * c.traffic_matrix)
    if kind == "conv_wgrad":
        return separate
    positions = np.minimum.reduce([
        np.ceil(images / n) * n * np.ceil(h / rows) * rows * np.ceil(w / columns) * columns
        for n, rows, columns in WINOGRAD_FUSED_BLOCKS
    ])  # fmt: skip
    work = 2.0 * 9.0 / 2.25 * positions * inputs * np.ceil(outputs / 32) * 32
    return np.minimum(separate, work / (speed * getattr(c, f"winograd_fused{suffix}")))
