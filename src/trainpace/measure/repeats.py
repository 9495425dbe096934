"""What repeating a measurement would give: the noise between processes, learnt from a sweep's own repeats."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from trainpace.forecast import student_t_95
from trainpace.outcome import Interval
from trainpace.records import Record


class Noise(Record):
    """Relative standard deviation of one process' median, and the degrees of freedom that it was learnt with."""

    relative: float
    degrees: int


def noise_of(medians: Mapping[int, Sequence[float]]) -> Noise | None:
    """The noise pooled over the batch sizes that were probed more than once, in logarithms; None where none was."""
    squares, degrees = 0.0, 0
    for values in medians.values():
        if len(values) > 1:
            logs = np.log(values)
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(values) - 1
    return Noise(relative=math.sqrt(squares / degrees), degrees=degrees) if degrees else None


def repeat_interval(medians: Sequence[float], noise: Noise) -> Interval:
    """The interval in which the median of one more process falls in 90 of 100 cases, by Student's t on the pooled noise.

    A prediction interval (Hahn and Meeker 1991, chapter 4): it holds the spread of the repeat and of what was measured.
    The centre is the median, whose variance is pi/2 of the mean's from three processes on.
    """
    n = len(medians)
    centre = float(np.median(medians))
    of_centre = (math.pi / 2 if n > 2 else 1.0) / n
    half = student_t_95(noise.degrees) * noise.relative * math.sqrt(1 + of_centre)
    return Interval(
        low=centre * math.exp(-half), high=centre * math.exp(half), coverage=0.9,
        basis=f"the spread of {noise.degrees + 1} repeats in processes of their own",
    )  # fmt: skip
