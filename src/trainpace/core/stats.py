"""Small statistics: medians and intervals, noise of repeats, steady states, trends over batch
sizes."""

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
"""The 95th percentile of the standard normal distribution."""
DRIFT = 0.05
"""Half-width of an interval, as a share of a step, that more steps do not narrow, because machines
change their speed over minutes. An assumption, checked against real runs in
benchmarks/results/time_left.md."""


def student_t_95(degrees: int) -> float:
    """Return the 95th percentile of Student's t (Abramowitz and Stegun 26.7.5, within 1%)."""
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
    """Return the 90% interval of the median by order statistics.

    Ranks n/2 -+ z sqrt(n)/2 (Conover 1999, section 3.2). It assumes independent steps, and does not
    include drift between runs.
    """
    ordered = sorted(values)
    n = len(ordered)
    half = z * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - half), math.ceil(n / 2 + half)
    return ordered[max(0, min(low, n - 1))], ordered[max(0, min(high, n - 1))]


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 90% interval by Student's t.

    The half-width of a single value is the value itself.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, abs(mean)
    return mean, student_t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def consecutive_blocks(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """Split values into at most `count` blocks of nearly the same length, in order."""
    count = min(count, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def warmup_steps(times: Sequence[float], tolerance: float = 0.25, least: int = 2) -> int:
    """Return the number of warm-up steps: the slow steps at the start of the first half."""
    half = len(times) // 2
    if half < least:
        return 0
    steady = median(times[half:])
    slow = [i for i in range(half) if times[i] > steady * (1 + tolerance)]
    # one slow step in the middle is noise; consecutive ones from the start are warm-up
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
    """Relative standard deviation of one process' median, with its degrees of freedom."""

    relative: float
    degrees: int


def noise_of(medians: Mapping[int, Sequence[float]]) -> Noise | None:
    """Pool the noise over batch sizes with repeats, in logarithms. None without repeats."""
    squares, degrees = 0.0, 0
    for values in medians.values():
        if len(values) > 1:
            logs = np.log(values)
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(values) - 1
    return Noise(relative=math.sqrt(squares / degrees), degrees=degrees) if degrees else None


def repeat_interval(medians: Sequence[float], noise: Noise) -> Interval:
    """Return the 90% prediction interval of the median of one more process.

    By Student's t on the pooled noise (Hahn and Meeker 1991, chapter 4), with the spread of the
    repeat and of the measured processes. The center is the median, whose variance is pi/2 of the
    mean's from three processes on.
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


# ---- the step time over the batch size

Floats = NDArray[np.float64]

FEWEST_BATCHES = 4
"""Least batch sizes for a trend. Fewer fit every curve."""
CLOSE = 0.03
"""Largest mean error, as a share of the step, of a step time that follows a curve."""
KNEE = 0.05
"""Share of the best throughput that the knee may lack."""
WINDOW = 8
"""Number of neighboring gaps on either side for the usual cost of a sample."""
MOST_UNEVEN = 4
Shape = Literal["linear", "quadratic", "cubic", "none of these"]


class Trend(Record):
    """Least-squares fits of a sweep's step times over the batch size.

    The line is fixed_ms + ms_per_sample x batch. mean_errors: the mean of |fit / step - 1| for
    polynomials of degree 1, 2 and 3. worst_error: the line's largest signed error, at
    `worst_batch`. best_batch: the size with the highest throughput. knee_batch: the smallest size
    with at most 5% less. uneven: the sizes after which one more sample costs far more than around
    there, with the excess as a share of the step.
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
        """Simplest polynomial that the step time follows within its noise."""
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
    """Return the trend over ascending batch sizes, or None for fewer than FEWEST_BATCHES."""
    if len(batches) < FEWEST_BATCHES:
        return None
    x, y, rate = (
        np.asarray(values, dtype=float) for values in (batches, step_ms, samples_per_second)
    )
    u = x / x[-1]  # powers of large batches would lose digits
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
    """Return (milliseconds beyond the usual slope, usual milliseconds per sample) between
    neighbors."""
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
