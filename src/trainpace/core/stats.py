"""Statistics of step times: medians, intervals, noise, warm-up, and trends over batch sizes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainpace.core.outcome import Interval
from trainpace.core.records import Record

Z_95 = 1.6448536
"""95th percentile of the standard normal distribution."""
DRIFT = 0.05
"""Half-width of an interval that remains with any number of steps, as a share of a step.

The speed of machines changes over minutes. The number is an assumption, checked against real runs
in benchmarks/results/time_left.md.
"""


def student_t_95(degrees: int) -> float:
    """Return the 95th percentile of Student's t distribution.

    Source: Abramowitz and Stegun 26.7.5. The error is below 1%.

    Args:
        degrees: Degrees of freedom.
    """
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
    """Return the 90% interval (low, high) of the median, by order statistics.

    The ends have the ranks n/2 -+ z sqrt(n)/2 (Conover 1999, section 3.2). The interval assumes
    independent steps, and does not include drift between runs.

    Args:
        values: Step times.
        z: Normal quantile. The default gives 90%.
    """
    ordered = sorted(values)
    n = len(ordered)
    half = z * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - half), math.ceil(n / 2 + half)
    return ordered[max(0, min(low, n - 1))], ordered[max(0, min(high, n - 1))]


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 90% interval by Student's t.

    For a single value, the half-width is the value itself.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, abs(mean)
    return mean, student_t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def consecutive_blocks(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """Split values into at most `count` consecutive blocks of nearly equal length."""
    count = min(count, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def warmup_steps(times: Sequence[float], tolerance: float = 0.25, least: int = 2) -> int:
    """Return the number of warm-up steps: the slow steps at the start.

    Only the first half of the steps can be warm-up.

    Args:
        times: Step times in order.
        tolerance: A step is slow if it takes longer than usual by more than this share.
        least: Minimum number of warm-up steps.
    """
    half = len(times) // 2
    if half < least:
        return 0
    steady = median(times[half:])
    slow = [i for i in range(half) if times[i] > steady * (1 + tolerance)]
    # a single slow step later on is noise; only consecutive slow steps from the start are warm-up
    warm = least
    for i in slow:
        if i > warm:
            break
        warm = i + 1
    return min(max(warm, least), half)


def has_settled(times: Sequence[float], window: int, tolerance: float) -> bool:
    """Return True if the medians of the last two windows agree within a relative `tolerance`."""
    if len(times) < 2 * window:
        return False
    before, now = median(times[-2 * window : -window]), median(times[-window:])
    return abs(before - now) <= tolerance * now


class Noise(Record):
    """Relative standard deviation of the median of one process, with its degrees of freedom."""

    relative: float
    degrees: int


def noise_of(medians: Mapping[int, Sequence[float]]) -> Noise | None:
    """Estimate the noise from repeated measurements, pooled over batch sizes.

    Args:
        medians: {batch size: median of each process}.

    Returns:
        The noise, computed from logarithms. None if no batch size was repeated.
    """
    squares, degrees = 0.0, 0
    for values in medians.values():
        if len(values) > 1:
            logs = np.log(values)
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(values) - 1
    return Noise(relative=math.sqrt(squares / degrees), degrees=degrees) if degrees else None


def repeat_interval(medians: Sequence[float], noise: Noise) -> Interval:
    """Return the 90% prediction interval for the median of one more process.

    It uses Student's t and the pooled noise (Hahn and Meeker 1991, chapter 4). It includes the
    spread of the new process and of the measured ones. The center is the median of the measured
    processes. From three processes on, its variance is pi/2 times that of the mean.
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


# ---- step time over the batch size

Floats = NDArray[np.float64]

FEWEST_BATCHES = 4
"""Minimum number of batch sizes for a trend. Any curve fits fewer points."""
CLOSE = 0.03
"""Largest mean error of a fit, as a share of the step time, for step times that follow a curve."""
KNEE = 0.05
"""Largest loss of throughput at the knee, as a share of the best throughput."""
WINDOW = 8
"""Number of neighboring gaps on each side that define the usual cost of a sample."""
MOST_UNEVEN = 4
Shape = Literal["linear", "quadratic", "cubic", "none of these"]


class Trend(Record):
    """Least-squares fits of the step time over the batch size.

    The fitted line is fixed_ms + ms_per_sample x batch.

    Attributes:
        mean_errors: Mean of |fit / step - 1| for polynomials of degree 1, 2 and 3.
        worst_error: Largest error of the line, with its sign.
        worst_batch: Batch size with the largest error.
        best_batch: Batch size with the highest throughput.
        knee_batch: Smallest batch size with at most 5% less throughput.
        uneven: Pairs (batch size, excess), at most 4. After this size, one more sample costs more
            than usual around there. The excess is a share of the step.
    """

    first_batch: int
    last_batch: int
    fixed_ms: float
    ms_per_sample: float
    r_squared: float
    mean_errors: tuple[float, float, float]
    worst_error: float
    worst_batch: int
    best_batch: int
    best_samples_per_second: float
    knee_batch: int
    knee_samples_per_second: float
    uneven: tuple[tuple[int, float], ...]
    noise: float = 0.0
    """Relative standard deviation of a step time."""

    @property
    def shape(self) -> Shape:
        """Lowest-degree polynomial that fits the step time within its noise."""
        shapes: tuple[Shape, ...] = ("linear", "quadratic", "cubic")
        limit = max(CLOSE, self.noise)
        close = (
            shape for shape, error in zip(shapes, self.mean_errors, strict=True) if error <= limit
        )
        return next(close, "none of these")


def trend_of(
    batches: Sequence[int],
    step_ms: Sequence[float] | Floats,
    samples_per_second: Sequence[float] | Floats,
    noise: float = 0.0,
) -> Trend | None:
    """Fit the trend of step times over batch sizes in ascending order.

    Returns None for fewer than FEWEST_BATCHES sizes.
    """
    if len(batches) < FEWEST_BATCHES:
        return None
    x, y, rate = (
        np.asarray(values, dtype=float) for values in (batches, step_ms, samples_per_second)
    )
    u = x / x[-1]  # scaled to 1, because powers of large batch sizes would lose digits
    fits = [np.polynomial.polynomial.polyfit(u, y, degree) for degree in (1, 2, 3)]
    lines = [np.polynomial.polynomial.polyval(u, fit) for fit in fits]
    errors = [line / y - 1 for line in lines]
    spread = float(((y - y.mean()) ** 2).sum())
    worst, best = int(np.abs(errors[0]).argmax()), int(rate.argmax())
    knee = int(np.flatnonzero(rate >= (1 - KNEE) * rate[best])[0])
    share = excesses(batches, y)[0] / y[:-1]
    return Trend(
        first_batch=batches[0],
        last_batch=batches[-1],
        fixed_ms=float(fits[0][0]),
        ms_per_sample=float(fits[0][1] / x[-1]),
        r_squared=1 - float(((y - lines[0]) ** 2).sum()) / spread if spread else 1.0,
        mean_errors=tuple(float(np.abs(error).mean()) for error in errors),  # type: ignore[arg-type]
        worst_error=float(errors[0][worst]),
        worst_batch=batches[worst],
        best_batch=batches[best],
        best_samples_per_second=float(rate[best]),
        knee_batch=batches[knee],
        knee_samples_per_second=float(rate[knee]),
        noise=noise,
        uneven=tuple(
            (batches[i], float(share[i]))
            for i in sorted(np.argsort(-share)[:MOST_UNEVEN].tolist())
            if share[i] > 0
        ),
    )


def excesses(batches: Sequence[int], step_ms: Floats) -> tuple[Floats, Floats]:
    """Return (excess, usual slope) for each gap between neighboring batch sizes.

    Args:
        batches: n batch sizes in ascending order.
        step_ms: n step times in milliseconds.

    Returns:
        n - 1 increases of the step time beyond the usual slope in milliseconds, and n - 1 usual
        slopes in milliseconds per sample.
    """
    width = np.diff(np.asarray(batches, dtype=float))
    slope = np.diff(step_ms) / width
    usual = np.array(
        [
            max(
                float(
                    np.median(
                        np.concatenate(
                            [slope[max(0, i - WINDOW) : i], slope[i + 1 : i + 1 + WINDOW]]
                        )
                    )
                ),
                0.0,
            )
            for i in range(len(slope))
        ]
    )
    return (slope - usual) * width, usual
