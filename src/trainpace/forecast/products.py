"""Seconds of arithmetic of matrix products by the constants that all GPUs share: on CUDA cores, in TF32, and on the matrix units
of cards that `trainpace.forecast.product_model` does not hold."""

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.operator_sizes import OperatorSizes, part
from trainpace.forecast.rates import Rates
from trainpace.forecast.tiles import tile_model, tiled
from trainpace.workload import GEMM, Flags, Floats

MISALIGNED = 0.7
"""Share of the fp32 rate that batched 16-bit products reach on an A100's CUDA cores where rows are no multiples of 16 bytes:
cuBLAS 11 seems to have no kernels on matrix units for them, in fp16 as in bf16. Set so that bigscience's runs with heads of 150
numbers err as aligned ones do; those with 108 then do too (docs/log.md). Unknown for later versions of cuBLAS."""


def products_s(
    sizes: OperatorSizes, rows: Flags, half: Flags, rates: Rates, c: KernelConstants
) -> tuple[Floats, Floats]:
    """(seconds, waves of tiles) of matrix products. Matrix units load 16 bytes at a time: rows of another length are loaded in
    pieces of 8, 4 or 2 numbers, each half as wide."""
    b, m, n, k, speed, units, sms = sizes.of(rows, *GEMM)
    scalar = (
        half & units & (b > 1) & (part(rates.aligned_only, rows) > 0) & ((n % 8 > 0) | (k % 8 > 0))
    )
    speed, units = np.where(scalar, MISALIGNED * part(rates.plain, rows), speed), units & ~scalar
    tensor_share = np.where(half, c.gemm_tensor, c.gemm_tf32)
    share = np.where(
        units, np.where(b > 1, c.batched_tensor * tensor_share, tensor_share), c.gemm_plain
    )
    halvings = np.select(
        [(n % width == 0) & (k % width == 0) for width in (8, 4, 2)], [0.0, 1.0, 2.0], 3.0
    )
    share = share * np.where(units, c.misaligned**halvings, 1.0)
    return tiled(b, m, n, k, speed, sms, tile_model(share, units, c))
