"""Matrix products in tiles: how long one runs that is cut into thread blocks over the SMs of a device.

A product of m x n x k is cut into tiles of the output, one thread block each, and blocks into rounds ("waves") over the
SMs; a last wave that is not full costs as much as a full one. Large tiles reuse what they load (their rate is higher),
small ones fill the device; where blocks are few and k is long, k is split over several blocks. The fastest candidate is
taken, as the libraries' heuristics try to. Model after NVIDIA's "Matrix Multiplication Background User's Guide".
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64))
"""Tile sizes of the output, either way round. Kernel names in gpu_ops_fp32 show 128x128 down to 32x32."""
K_UNIT = 16.0
MOST_SPLITS = 32.0
SHORTEST_SPLIT = 128.0
"""Splitting below this length of k is not worth its reduction."""


class TileModel(NamedTuple):
    """Constants of one family of matrix kernels. Each may be an array that broadcasts against the products."""

    efficiency: Floats
    """Share of the rate that very large tiles reach."""
    half_intensity: Floats
    """m n / (m + n) of the tile at which the rate is half of that."""
    prologue: Floats
    """Start and end of a block, in units of k."""
    quantisation: Floats
    """How much of a last, partly filled wave is paid: 1 all of it, 0 only its share."""


def product_s(batch: Floats, m: Floats, n: Floats, k: Floats, rate: Floats, sms: Floats, model: TileModel) -> Floats:
    """Seconds of arithmetic of `batch` products m x n x k at `rate` FLOP/s, best tile of TILES. Arrays broadcast."""
    padded_k = np.ceil(k / K_UNIT) * K_UNIT
    best: Floats | None = None
    long, short = np.maximum(m, n), np.minimum(m, n)
    per_sm = rate / sms
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
        seconds = waves * (2.0 * big * small) * (padded_k / splits + model.prologue) / speed
        best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    return best
