"""Some rows of an operator table with the rates that they run at, and the constants that go with their unit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.tiles import TileModel

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Pick:
    """The sizes and the rates of some rows, with all leading axes."""

    def __init__(
        self, shape: tuple[int, ...], dims: list[Floats], rate: Floats, tensor: Flags, sms: Floats, channels_last: Flags
    ) -> None:
        self._dims, self._rate, self._tensor, self._sms = dims, rate, tensor, sms
        self.channels_last = np.broadcast_to(channels_last, shape)

    def __call__(self, rows: Flags, *which: int) -> tuple[Any, ...]:
        """The sizes at these positions, then rate, whether a matrix unit gives it, and SMs."""
        parts = [part(self._dims[i], rows) for i in which]
        return (*parts, *(part(array, rows) for array in (self._rate, self._tensor, self._sms)))

    def flag(self, rows: Flags) -> Flags:
        """Which of the rows are channels-last."""
        return self.channels_last[..., rows]


def part(array: Any, rows: Flags) -> Any:
    """The rows of an array that may not have the operators' axis yet, or any before it."""
    return array if array.ndim == 0 or array.shape[-1] == 1 else array[..., rows]


def tile_model(share: Floats, units: Flags, c: KernelConstants) -> TileModel:
    """The tile constants of matrix units or CUDA cores, at a share of the rate."""
    return TileModel(
        share,
        np.where(units, c.tile_tensor_half_intensity, c.tile_plain_half_intensity),
        np.where(units, c.tile_tensor_prologue, c.tile_plain_prologue),
        np.where(units, c.tile_tensor_quantisation, c.tile_plain_quantisation),
    )


def alignment(n: Floats, k: Floats, units: Flags, c: KernelConstants) -> Floats:
    """Matrix units load 16 bytes at a time: rows of another length are loaded in pieces of 8, 4 or 2, each half as wide."""
    halvings = np.maximum(_halvings(n), _halvings(k))
    factor: Floats = np.where(units, c.misaligned**halvings, 1.0)
    return factor


def _halvings(size: Floats) -> Floats:
    """How often 8 numbers have to be halved until they divide a size."""
    result: Floats = np.select([np.mod(size, 8) == 0, np.mod(size, 4) == 0, np.mod(size, 2) == 0], [0.0, 1.0, 2.0], 3.0)
    return result
