"""Seconds of arithmetic of matrix products.

A product of m x n x k is cut into tiles of the output, one thread block each, and blocks into rounds ("waves") over the
SMs; a last wave that is not full costs as much as a full one. Large tiles reuse what they load (their rate is higher),
small ones fill the device; where blocks are few and k is long, k is split over several blocks. The fastest candidate is
taken, as the libraries' heuristics try to. Model after NVIDIA's "Matrix Multiplication Background User's Guide".
"""

from typing import Any, NamedTuple

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.rates import Rates
from trainpace.workload import GEMM, Flags, Floats

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
