"""How noisy a curve of step times is, told from the curve itself, before anything is known about its jumps."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_NOISE = 1e-3
"""Relative. No step time is known better than this: below it, misfit of straight pieces would pass for jumps."""
_WINDOW = 9
_TO_DEVIATION = 1.4826 * 1.05 / np.sqrt(2)
"""Median size of a difference of two points to their deviation; 5 % for what the local median slope takes away."""
_PERIODIC = 0.6


def relative_noise(x: Floats, y: Floats) -> float:
    """Standard deviation of a point relative to its level, >= LEAST_NOISE; a few jumps and outliers do not count."""
    sizes = _differences(x, y, 1)[0] / _differences(x, y, 1)[1]
    noise = float(np.median(sizes))
    if len(x) >= 12:
        # where odd batches cost as much as the next even one, neighbours differ and every second one does not
        size, level = _differences(x, y, 2)
        noise = min(noise, every) if (every := float(np.median(size / level))) < _PERIODIC * noise else noise
    return max(noise * _TO_DEVIATION, LEAST_NOISE)


def constant_noise(x: Floats, y: Floats) -> float:
    """The standard deviation of a point in ms, where the noise does not grow with the step."""
    return max(float(np.median(_differences(x, y, 1)[0])) * _TO_DEVIATION, LEAST_NOISE * float(np.median(y)))


def levels(y: Floats) -> Floats:
    """A running median of three, (n,), so that a lone point does not set its own weight."""
    padded = np.pad(y, 1, mode="edge")
    return np.asarray(np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0))


def _differences(x: Floats, y: Floats, lag: int) -> tuple[Floats, Floats]:
    """(sizes of differences beyond the local median slope, the level at each), each (n - lag,)."""
    width = x[lag:] - x[:-lag]
    slope = (y[lag:] - y[:-lag]) / width
    window = min(_WINDOW, (len(slope) - 1) // 2 * 2 + 1)
    padded = np.pad(slope, window // 2, mode="edge")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    return np.abs((slope - usual) * width), (y[lag:] + y[:-lag]) / 2
