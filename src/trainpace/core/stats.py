"""Medians and their intervals, what repeats of a measurement differ by, and the start of a steady state in a series."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from trainpace.core.outcome import Interval
from trainpace.core.records import Record

Z_95 = 1.6448536
"""The 95th percentile of the standard normal distribution."""
DRIFT = 0.05
"""The half-width, as a share of a step, that more steps do not narrow, since machines speed up and slow down over minutes. An
assumption, checked against real runs in benchmarks/results/time_left.md."""


def student_t_95(degrees: int) -> float:
    """The 95th percentile of Student's t (Abramowitz and Stegun 26.7.5, exact to 1 % from 3 degrees on; below, tabled)."""
    tabled = {1: 6.314, 2: 2.920}
    if degrees in tabled:
        return tabled[degrees]
    z, v = Z_95, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(v) ** (i + 1) for i, term in enumerate(terms))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_interval(values: Sequence[float], z: float = 1.645) -> tuple[float, float]:
    """A 90 % interval of the median by order statistics: ranks n/2 -+ z sqrt(n)/2 (Conover 1999, section 3.2).

    It assumes independent steps; drift between runs is not in it.
    """
    ordered = sorted(values)
    n = len(ordered)
    half = z * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - half), math.ceil(n / 2 + half)
    return ordered[max(0, min(low, n - 1))], ordered[max(0, min(high, n - 1))]


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 90 % interval by Student's t; for one value, half of the interval is the value itself."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, abs(mean)
    return mean, student_t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def consecutive_blocks(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """The values in `count` blocks of nearly the same length, in order; in as many as there are values, where these are fewer."""
    count = min(count, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def warmup_steps(times: Sequence[float], tolerance: float = 0.25, least: int = 2) -> int:
    """The number of warm-up steps: up to the last one of the first half that is far slower than the steady half."""
    half = len(times) // 2
    if half < least:
        return 0
    steady = median(times[half:])
    slow = [i for i in range(half) if times[i] > steady * (1 + tolerance)]
    # one slow step in the middle is noise; a run of them from the start is warm-up
    warm = least
    for i in slow:
        if i > warm:
            break
        warm = i + 1
    return min(max(warm, least), half)


def has_settled(times: Sequence[float], window: int, tolerance: float) -> bool:
    """Do the medians of the last two windows of so many steps agree within `tolerance`, relative to the later?"""
    if len(times) < 2 * window:
        return False
    before, now = median(times[-2 * window : -window]), median(times[-window:])
    return abs(before - now) <= tolerance * now


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
        low=centre * math.exp(-half),
        high=centre * math.exp(half),
        coverage=0.9,
        basis=f"the spread of {noise.degrees + 1} repeats in processes of their own",
    )
