"""Is one setup faster than another, beyond the noise of both?"""

import math
import statistics
from collections.abc import Sequence

from trainpace.forecast import student_t_95
from trainpace.medians import noise_of
from trainpace.records import Record

BETWEEN_PROCESSES = 0.05
"""Relative standard deviation that one trial's median is taken to have to the next process', where one of each was run. An
assumption, which decides nothing: a ratio below `CLEAR` is repeated, and one above is beyond it."""
CLEAR = 1.5
"""A ratio above it, or below its inverse, needs no repeats."""


class Gain(Record):
    """Old time / new time, and the 90 % interval that the spread of trials leaves it. Above 1 is faster."""

    ratio: float
    low: float
    high: float
    trials: int

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond the noise."""
        return self.low > 1

    @property
    def clear(self) -> bool:
        """Whether it is so far from 1 that a repeat would not change the answer."""
        return self.ratio >= CLEAR or self.ratio <= 1 / CLEAR


def gain_of(old_ms: Sequence[float], new_ms: Sequence[float]) -> Gain:
    """The gain from the medians of trials, each in a process of its own, at least one of either setup.

    With one trial of each the noise is taken to be `BETWEEN_PROCESSES`; with more it is pooled from their repeats, in logarithms,
    and the difference of the means is judged by Student's t (Welch's would need more trials than a ladder has).
    """
    noise = noise_of({0: old_ms, 1: new_ms})
    logs = [statistics.fmean(math.log(v) for v in values) for values in (old_ms, new_ms)]
    each = 1 / len(old_ms) + 1 / len(new_ms)
    if noise is None:
        half = 1.645 * BETWEEN_PROCESSES * math.sqrt(each)
    else:
        half = student_t_95(noise.degrees) * noise.relative * math.sqrt(each)
    middle = logs[0] - logs[1]
    return Gain(
        ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half),
        trials=len(old_ms) + len(new_ms),
    )  # fmt: skip
