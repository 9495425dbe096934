"""The distance between two sets of parameters."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FLOOR = 1e-3
"""Share of the model's root mean square that is the least size that a tensor's difference is held against. A tensor that starts
at 0 and whose gradient is 0 but for rounding (a key's bias in attention) holds nothing but noise."""


class Difference(NamedTuple):
    """The largest relative difference, NaN where a number is, and the tensor that has it."""

    relative: float
    tensor: str


def difference(a: Mapping[str, NDArray[np.floating]], b: Mapping[str, NDArray[np.floating]]) -> Difference:
    """Largest over tensors of max |a - b| / max(|a|, |b|), 2 at most.

    A tensor counts as no smaller than FLOOR x the root mean square of all a.
    """
    names = sorted(a)
    assert names == sorted(b), "two trainings of one model have the same parameters"
    count, squares = 0, 0.0
    for name in names:
        count += a[name].size
        squares += float(np.sum(np.square(a[name], dtype=np.float64)))
    floor = FLOOR * math.sqrt(squares / max(1, count))
    worst = Difference(0.0, names[0] if names else "")
    for name in names:
        if not a[name].size:
            continue
        apart = float(np.max(np.abs(a[name].astype(np.float64) - b[name])))
        scale = max(float(np.max(np.abs(a[name]))), float(np.max(np.abs(b[name]))), floor)
        relative = apart / scale if scale else apart
        if not math.isfinite(relative):
            return Difference(math.nan, name)
        if relative > worst.relative:
            worst = Difference(relative, name)
    return worst


def difference_of_files(a: Path, b: Path) -> Difference:
    """The difference of two ``.npz`` files, read a tensor at a time."""
    with np.load(a) as left, np.load(b) as right:
        return difference(left, right)
