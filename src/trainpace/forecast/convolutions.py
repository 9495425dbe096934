"""Seconds of arithmetic of convolutions: products too (implicit GEMM), except in groups, depthwise, and by Winograd with the
batch that cuDNN pads."""

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.cuts import Algorithm, Cut
from trainpace.forecast.operator_sizes import OperatorSizes, part
from trainpace.forecast.rates import Rates
from trainpace.forecast.tiles import TileModel, tile_model, tiled
from trainpace.workload import CONV, Flags, Floats

FP32_BYTES = 4.0
WINOGRAD_IMAGES = 16.0
WINOGRAD_FUSED_BLOCKS = ((1, 8, 16), (2, 8, 8), (4, 4, 8))
"""Images, rows and columns of a block, from the names of cuDNN's kernels and their grids in gpu_ops_fp32.parquet."""


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


def convolved(
    kind: str,
    sizes: OperatorSizes,
    rows: Flags,
    grouped: Flags,
    half: Flags,
    rates: Rates,
    c: KernelConstants,
) -> tuple[Floats, Cut]:
    """(seconds of arithmetic, how the work is cut): implicit GEMM, or Winograd for 3x3 at stride 1 on CUDA cores where that is
    faster."""
    (
        images,
        groups,
        c_in,
        c_out,
        in_d,
        in_h,
        in_w,
        out_d,
        out_h,
        out_w,
        k_d,
        k_h,
        k_w,
        s_h,
        s_w,
        speed,
        units,
        sms,
    ) = sizes.of(rows, *CONV[: CONV.channels_last])
    suffix = kind.removeprefix("conv")
    positions_out = images * out_d * out_h * out_w
    window, strides = k_d * k_h * k_w, s_h * s_w
    inputs, outputs = c_in / groups, c_out / groups
    padded = np.where(
        units, np.ceil(inputs / 8) * 8, inputs
    )  # matrix units take channels eight at a time
    if kind == "conv":
        m, n, k = positions_out, outputs, padded * window
    elif kind == "conv_dgrad":
        m, n, k = images * in_d * in_h * in_w, padded, outputs * np.maximum(1.0, window / strides)
    else:
        m, n, k = outputs, padded * window, positions_out
    tensor_share = np.where(
        half, getattr(c, f"conv_tensor{suffix}"), getattr(c, f"conv_tf32{suffix}")
    )
    # images of 3 channels are padded to 4 or 8 by kernels made for them; other odd numbers are not
    odd_channels = (np.mod(outputs, 8) != 0) | ((np.mod(inputs, 8) != 0) & (inputs > 4))
    tensor_share = np.where(odd_channels, tensor_share * c.conv_misaligned, tensor_share)
    share = np.where(units, tensor_share, getattr(c, f"conv_plain{suffix}"))
    model = tile_model(share, units, c, "conv_tile")
    if grouped.any():  # whose own shares were fitted beside the tiles of products
        pairs = zip(tile_model(share, units, c), model, strict=True)
        model = TileModel(*(np.where(grouped, products, dense) for products, dense in pairs))
    direct, waves = tiled(groups, m, n, k, speed, sms, model)
    if grouped.any():
        # cuDNN's fast NHWC kernels take groups in 32s, of as many inputs as outputs, a power of two
        odd = (
            (np.mod(groups, 32) != 0)
            | (inputs != outputs)
            | (np.mod(np.log2(np.maximum(inputs, 1)), 1) != 0)
        )
        odd = odd & sizes.channels_last[..., rows] & (np.asarray(units) > 0)
        factor = np.where(
            units, getattr(c, f"grouped{suffix}"), getattr(c, f"grouped_plain{suffix}")
        )
        factor = np.where(odd, getattr(c, f"grouped_odd_nhwc{suffix}"), factor)
        power = np.where(odd, c.grouped_odd_nhwc_channels, c.grouped_channels)
        group_share = np.minimum(factor * (inputs / 16.0) ** power, 1.0)
        in_groups = 2.0 * groups * inputs * outputs * window * positions_out / (speed * group_share)
        direct = np.where(grouped, np.maximum(direct, in_groups), direct)
    square = (
        (k_h == 3)
        & (k_w == 3)
        & (strides == 1)
        & ~grouped
        & (k_d == 1)
        & ~np.asarray(units, dtype=bool)
    )
    if not square.any():
        return direct, Cut(np.asarray(Algorithm.GEMM), images, waves, np.asarray(8.0))
    padded, in_one = _winograd_s(
        kind, images, out_h, out_w, inputs, outputs, speed, sms, part(rates.bytes_per_s, rows), c
    )
    winograd = np.minimum(padded, in_one)
    pads = (padded <= in_one) & (kind != "conv_wgrad")
    by_winograd = np.where(pads, Algorithm.PADDED_WINOGRAD, Algorithm.WINOGRAD)
    algorithm = np.where(square & (winograd < direct), by_winograd, Algorithm.GEMM)
    waves = np.where(algorithm == Algorithm.GEMM, waves, 0.0)
    return np.where(square, np.minimum(direct, winograd), direct), Cut(
        algorithm, images, waves, np.asarray(8.0)
    )


def _winograd_s(
    kind: str,
    images: Floats,
    h: Floats,
    w: Floats,
    inputs: Floats,
    outputs: Floats,
    speed: Floats,
    sms: Floats,
    bytes_per_s: Floats,
    c: KernelConstants,
) -> tuple[Floats, Floats]:
    """Seconds of cuDNN's two Winograd kernels for 3x3 at stride 1 (Lavin and Gray 2015), the separate ones and the fused one.

    F(4x4, 3x3) in separate kernels: 36 products of (tiles x inputs x outputs), whose tiles are those of a batch **padded to
    16 images**; F(2x2, 3x3) in one kernel, in blocks of a few images. docs/jumps.md has the evidence from kernel grids.
    """
    suffix = kind.removeprefix("conv")
    padded = images if kind == "conv_wgrad" else np.ceil(images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES
    tiles = padded * np.ceil(h / 4) * np.ceil(w / 4)
    product = (outputs, inputs, tiles) if kind == "conv_wgrad" else (tiles, outputs, inputs)
    model = tile_model(
        np.asarray(getattr(c, f"winograd{suffix}")), np.asarray(False), c, "conv_tile"
    )
    moved = 2.0 * FP32_BYTES * 36.0 * (tiles * (inputs + outputs) + inputs * outputs)
    separate = tiled(np.asarray(36.0), *product, speed, sms, model)[0] + moved / (
        bytes_per_s * c.traffic_matrix
    )
    if kind == "conv_wgrad":
        return separate, np.asarray(np.inf)
    positions = np.minimum.reduce(
        [
            np.ceil(images / n) * n * np.ceil(h / rows) * rows * np.ceil(w / columns) * columns
            for n, rows, columns in WINOGRAD_FUSED_BLOCKS
        ]
    )
    work = 2.0 * 9.0 / 2.25 * positions * inputs * np.ceil(outputs / 32) * 32
    return separate, work / (speed * getattr(c, f"winograd_fused{suffix}"))
