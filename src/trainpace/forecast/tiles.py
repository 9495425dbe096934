"""The tile-and-wave form of matrix kernels.

A product of m x n x k is cut into tiles of the output, one thread block each, and blocks into rounds ("waves") over the
SMs; a last wave that is not full costs as much as a full one. Large tiles reuse what they load (their rate is higher),
small ones fill the device; where blocks are few and k is long, k is split over several blocks. The fastest candidate is
taken, as the libraries' heuristics try to. Model after NVIDIA's "Matrix Multiplication Background User's Guide".
"""

from typing import NamedTuple

import numpy as np

from trainpace.forecast.constants import KernelConstants
from trainpace.workload import Flags, Floats

TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64))
"""Tile sizes of the output, either way round. Kernel names in gpu_ops_fp32 show 128x128 down to 32x32."""
K_UNIT = 16.0
MOST_SPLITS = 32.0
SHORTEST_SPLIT = 128.0
"""The reduction of a split k costs more than it gains below this length."""


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


def tile_model(share: Floats, units: Flags, c: KernelConstants, family: str = "tile") -> TileModel:
    """The tile constants of a family on matrix units or CUDA cores, at a share of the rate. Convolutions have their own
    ("conv_tile"): they load through their windows."""
    own = (
        np.where(units, getattr(c, f"{family}_tensor_{name}"), getattr(c, f"{family}_plain_{name}"))
        for name in TileModel._fields[1:]
    )
    return TileModel(share, *own)


def tiled(
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    rate: Floats,
    sms: Floats,
    model: TileModel,
    tiles: tuple[tuple[int, int], ...] = TILES,
) -> tuple[Floats, Floats]:
    """(seconds of arithmetic of `batch` products m x n x k at `rate` FLOP/s, waves) of the best tile. Arrays broadcast."""
    padded_k = np.ceil(k / K_UNIT) * K_UNIT
    long, short = np.maximum(m, n), np.minimum(m, n)
    per_sm = rate / sms
    least_s = best_waves = np.asarray(np.inf)
    for big, small in tiles:
        # the longer side of the tile lies along the longer side of the output
        blocks = batch * np.ceil(long / big) * np.ceil(short / small)
        splits = np.clip(
            np.floor(sms / blocks),
            1.0,
            np.minimum(MOST_SPLITS, np.maximum(1.0, padded_k / SHORTEST_SPLIT)),
        )
        waves = blocks * splits / sms
        paid = np.maximum(waves + model.quantisation * (np.ceil(waves) - waves), 1.0)
        intensity = big * small / (big + small)
        speed = per_sm * model.efficiency * (intensity / (intensity + model.half_intensity))
        seconds = paid * (2.0 * big * small) * (padded_k / splits + model.prologue) / speed
        best_waves = np.where(seconds < least_s, waves, best_waves)
        least_s = np.minimum(least_s, seconds)
    return np.asarray(least_s), np.asarray(best_waves)
