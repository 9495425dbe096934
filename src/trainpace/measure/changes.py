"""Find jumps and bends in a noisy curve of step time over batch size.

While kernel launches bound a step, its time does not depend on the batch size. Then it grows by
about the same time with every sample. If the device switches to another kernel, tile or wave, the
level changes (a jump) or the slope changes (a bend). The noise is relative to the step time.
`docs/measured_jumps.md` describes the method, its accuracy and its limits.

The curve is a line plus terms. `i` is the index of a measured batch size, `x` its position:

    level t:   1[i >= t]              a jump; the slope stays the same
    bend t:    (x - x_t)+             the slope changes, the level does not
    both t:    level and bend at once
    point t:   1[i == t]              a disturbed measurement
    smooth k:  x^2, x^3 or log x      curvature, which must not pass for jumps
    odd:       1[batch is odd]        padding to even batches

The best set of terms minimizes the criterion (n + v) log((R + v) / (n + v)) + prices of the terms.

- n is the number of points.
- R is the sum of squared residuals, each divided by its standard deviation.
- v is the weight of the given deviations in observations: small for a guess, large for known ones.

The search has several starts: no terms, smooth terms, and levels alone. From each start, it adds,
swaps or removes one term at a time, always the best of all kinds and places. It stops when nothing
lowers the criterion.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.core.outcome import Jump
from trainpace.core.records import Record

_Z = 1.645
LEAST_Z = 3.0
"""Minimum size of a jump, in standard deviations."""
FEWEST_POINTS = 6
"""Minimum number of batch sizes to distinguish a jump from a bend."""
GUESS_WORTH = 4.0
SPARSE = 30
CURVED_PRICE = 1.0
"""Price of a bend that replaces a smooth term, as a factor of log n.

Such bends are at least SLOPE_SPACING points apart.
"""
KNOWN_WORTH = 1.0
"""Weight of a known noise level, as a multiple of the number of points.

GUESS_WORTH is the weight of a guessed noise level, in observations.
"""
NOISE_AGREES = 1.6
"""Ratio of the curve's noise to the given noise above which the search tries both.

The given noise should be the noise between processes. Callers may give the noise within a process
by mistake, which is too small.
"""
WIDE_RANGE = 2.5
ADDITIVE_EVIDENCE = 6.0
"""Minimum advantage of constant noise over relative noise, as twice the log-likelihood.

Constant noise is only tried if the largest step time is more than WIDE_RANGE times the smallest.
"""
LEAST_NOISE = 1e-3
"""Minimum relative noise. With less, the misfit of straight segments would pass for jumps."""
MOST_PLACES, CHANCE = 0.75, 2.8
"""Parameters of `least_jump`: the share of places that it holds for, and an allowance for chance.

The allowance is in standard deviations. Both are set so that 9 of 10 planted jumps of size
`least_jump` are found (tests/measure/test_changes.py).
"""
_WINDOW = 9
_TO_DEVIATION = 1.4826 * 1.05 / np.sqrt(2)
"""Factor from the median difference of two points to their standard deviation.

The factor 1.05 restores the 5% that subtracting the local median slope removes.
"""
_PERIODIC = 0.6


class Segment(Record):
    """Straight segment of the curve.

    `first_ms` is the fitted step time at `first_batch`. The 90% interval of the slope is None if
    there are too few points.
    """

    first_batch: int
    last_batch: int
    first_ms: float
    slope_ms_per_sample: float
    slope_low: float | None
    slope_high: float | None

    def line(self, batch: int) -> float:
        """Return the step time in ms on the line through this segment, at any batch size."""
        return self.first_ms + self.slope_ms_per_sample * (batch - self.first_batch)


class MeasuredJump(Record):
    """Jump of the step time between two measured batch sizes.

    Attributes:
        before: Last batch size before the jump.
        after: First batch size after the jump.
        size_ms: Height of the jump, without the growth that the slope before it explains. Its 90%
            interval assumes that the place is known.
        percent: `size_ms` relative to the fitted step time at `before`.
        z: `size_ms` over its standard deviation, if the place is known.
        tight: True if no batch size lies between `before` and `after`.
    """

    before: int
    after: int
    size_ms: float
    low_ms: float
    high_ms: float
    percent: float
    z: float
    tight: bool

    def cause_among(self, causes: Sequence[Jump]) -> Jump | None:
        """Return the forecast jump at the same place that has known causes, or None."""
        return next((c for c in causes if self.before < c.batch <= self.after and c.causes), None)


class StepCurve(Record):
    """Fitted curve of step time over batch size, with its jumps.

    Attributes:
        fitted_ms: Fitted step time at each of `batches`.
        noise: Relative standard deviation of a point, at the median step time.
        odd_extra_ms: Extra time of an odd batch size, included in `fitted_ms`.
        disturbed: Batch sizes that fit neither neighbor. They are not used.
        least_jump: Smallest jump, relative to the step time, that 9 of 10 such sweeps find at most
            of the places. None if there are too few batch sizes, or if noise hides all jumps.
    """

    batches: tuple[int, ...]
    step_ms: tuple[float, ...]
    fitted_ms: tuple[float, ...]
    noise: float
    segments: tuple[Segment, ...]
    jumps: tuple[MeasuredJump, ...]
    disturbed: tuple[int, ...] = ()
    odd_extra_ms: float = 0.0
    least_jump: float | None = None

    def at(self, batch: int) -> float:
        """Return the fitted step time in ms at any batch size.

        Between the two batch sizes of a jump, the line before the jump applies. At a bend, both
        lines are extended to the point where they meet.
        """
        i = max(0, bisect_right([segment.first_batch for segment in self.segments], batch) - 1)
        here = self.segments[i]
        step = here.line(batch)
        if here.last_batch < batch and i + 1 < len(self.segments):
            after = self.segments[i + 1]
            jump = any(jump.after == after.first_batch for jump in self.jumps)
            steeper = after.slope_ms_per_sample > here.slope_ms_per_sample
            if not jump:
                step = max(step, after.line(batch)) if steeper else min(step, after.line(batch))
        return step + self.odd_extra_ms * (batch % 2)


def find_changes(
    batches: Sequence[int], step_ms: Sequence[float], noise: float | Sequence[float] | None = None
) -> StepCurve:
    """Find jumps and bends in a curve of step time over batch size.

    Args:
        batches: Ascending batch sizes.
        step_ms: Positive step times in ms, one per batch size.
        noise: Relative standard deviation of the points if it is known, either one value or one per
            point. It should include differences between processes.
    """
    x, y = np.asarray(batches, dtype=float), np.asarray(step_ms, dtype=float)
    given = None if noise is None else np.asarray(noise, dtype=float)
    assert len(x) == len(y) > 0
    assert x[0] > 0
    assert (np.diff(x) > 0).all()
    if given is not None:
        given = np.broadcast_to(given, x.shape)
    if len(x) < FEWEST_POINTS:
        return _few(batches, x, y, 0.0 if given is None else float(np.median(given)))
    search, terms = _search(x, y, given)
    terms = _straightened(search, terms)
    fit = _certain(search, terms)
    return _curve(batches, x, y, fit)


def _search(x: Floats, y: Floats, given: Floats | None) -> tuple[Search, list[Term]]:
    """Search with each plausible noise level. Return the most likely search and its terms."""
    level = _levels(y)
    guess = _relative_noise(x, y)
    # (deviations, their weight in observations, minimum advantage over the other tries)
    tries: list[tuple[Floats, float, float]] = []
    if given is not None:
        tries.append((np.maximum(given, LEAST_NOISE) * level, KNOWN_WORTH * len(x), 0.0))
    if given is None or guess > NOISE_AGREES * max(float(np.median(given)), LEAST_NOISE):
        tries.append((guess * level, GUESS_WORTH, 0.0))
    if level.max() > WIDE_RANGE * level.min():
        least = 0.0 if given is None else float(np.median(given)) * float(np.median(y))
        tries.append(
            (np.full(len(x), max(_constant_noise(x, y), least)), GUESS_WORTH, ADDITIVE_EVIDENCE)
        )
    best = math.inf
    for sigma, worth, evidence in tries:
        search = Search(x, y, sigma, worth)
        cost, terms = search.best()
        total = cost + 2 * float(np.log(sigma).sum()) + evidence
        if total < best:
            best, chosen = total, (search, terms)
    return chosen


def _relative_noise(x: Floats, y: Floats) -> float:
    """Estimate the relative standard deviation of a point from differences between neighbors.

    The estimate is robust against a few jumps and outliers.
    """
    noise = float(np.median(np.divide(*_differences(x, y, 1))))
    if len(x) >= 12:
        # If odd batches are padded to even ones, neighbors differ in a regular pattern. Differences
        # to the second neighbor do not contain it.
        every_second = float(np.median(np.divide(*_differences(x, y, 2))))
        noise = every_second if every_second < _PERIODIC * noise else noise
    return max(noise * _TO_DEVIATION, LEAST_NOISE)


def _constant_noise(x: Floats, y: Floats) -> float:
    """Estimate the standard deviation of a point in ms, if noise does not grow with the step."""
    return max(
        float(np.median(_differences(x, y, 1)[0])) * _TO_DEVIATION,
        LEAST_NOISE * float(np.median(y)),
    )


def _levels(y: Floats) -> Floats:
    """Return the running median of three points, shape (n,).

    It gives the level of each point, so a single outlier does not determine its own weight.
    """
    padded = np.pad(y, 1, mode="edge")
    return np.asarray(np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0))


def _differences(x: Floats, y: Floats, lag: int) -> tuple[Floats, Floats]:
    """Return the differences between points `lag` apart, and the level at each difference.

    The local median slope is subtracted from the differences. Both have shape (n - lag,).
    """
    width = x[lag:] - x[:-lag]
    slope = (y[lag:] - y[:-lag]) / width
    window = min(_WINDOW, (len(slope) - 1) // 2 * 2 + 1)
    padded = np.pad(slope, window // 2, mode="edge")
    usual = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    return np.abs((slope - usual) * width), (y[lag:] + y[:-lag]) / 2


def _straightened(search: Search, terms: list[Term]) -> list[Term]:
    """Replace smooth terms by bends.

    The search needs smooth terms so that curvature does not pass for jumps. The jumps are fixed
    now, so bends may be closer together. Curves of fewer than SPARSE points get such bends even if
    they have no smooth terms.
    """
    straight = [term for term in terms if term.kind != Kind.SMOOTH]
    if len(straight) == len(terms) and search.n >= SPARSE:
        return terms
    if len(straight) < len(terms):
        search.price[Kind.BEND] = CURVED_PRICE * math.log(search.n)
    search.bend_spacing = SLOPE_SPACING
    fixed = frozenset(term for term in straight if term.kind != Kind.BEND)
    bent = search.improve(straight, frozenset({Kind.BEND}), fixed)[1]
    return sorted(bent, key=lambda term: (term.place, term.kind))


def _certain(search: Search, terms: list[Term]) -> _Fit:
    """Fit the terms, remove uncertain levels and mark the certain ones as jumps.

    The least certain level is removed first, then the fit is repeated. An uncertain term of kind
    BOTH stays, but counts as a bend: two lines that meet between two points look like a small jump.
    """
    while True:
        fit = _Fit(search, terms)
        z = {i: fit.level_z(i) for i, (kind, _) in enumerate(terms) if kind in LEVELS}
        fit.jumps = {i for i in z if z[i] >= LEAST_Z}
        lone = {i: z[i] for i in z.keys() - fit.jumps if terms[i].kind == Kind.LEVEL}
        if not lone:
            return fit
        weakest = min(lone, key=lambda i: lone[i])
        terms = terms[:weakest] + terms[weakest + 1 :]


class _Fit:
    """Least-squares fit of a line and its terms.

    `values` are the coefficients in ms (slopes in ms per unit of position), and `covariance` is
    their covariance matrix.
    """

    def __init__(self, search: Search, terms: list[Term]) -> None:
        self.search, self.terms = search, terms
        self.jumps: set[int] = set()
        columns = search.columns(terms)
        n, p = columns.shape
        self.values = np.linalg.lstsq(columns, search.target, rcond=None)[0]
        residual = search.target - columns @ self.values
        self.free = max(n - p, 0) + search.worth
        self.scale = math.sqrt((float(residual @ residual) + search.worth) / self.free)
        self.covariance = np.linalg.pinv(columns.T @ columns) * self.scale**2
        self.column = np.cumsum([2, *(2 if kind == Kind.BOTH else 1 for kind, _ in terms)])[:-1]
        lone = [c for c, (kind, _) in zip(self.column, terms, strict=True) if kind == Kind.POINT]
        shown = self.values.copy()
        shown[lone] = 0
        self.fitted = columns @ shown / search.weight

    def z(self, column: int, beyond: float = 0.0) -> float:
        """Return the z-score of a coefficient relative to `beyond`.

        The t-score is converted to a normal score (Wallace 1959).
        """
        t = float(self.values[column] - beyond) / math.sqrt(
            max(float(self.covariance[column, column]), 1e-300)
        )
        size = (
            math.sqrt(self.free * math.log1p(t * t / self.free))
            * (8 * self.free + 1)
            / (8 * self.free + 3)
        )
        return math.copysign(size, t)

    def level_z(self, i: int) -> float:
        """Return the absolute z-score of the level of term `i`.

        The level of a term of kind BOTH is compared with what its change of slope explains.
        """
        (kind, place), column = self.terms[i], self.column[i]
        size, explained = self.values[column], 0.0
        if kind == Kind.BOTH:
            width = self.search.position[place] - self.search.position[place - 1]
            explained = self.values[column + 1] * width
        beyond = np.clip(size, min(0.0, explained), max(0.0, explained))
        return abs(self.z(column, float(beyond)))

    def half_width(self, contrast: Floats) -> float:
        """Return half the width of the 90% interval of a linear combination of coefficients.

        Student's t is approximated by its first Cornish-Fisher term.
        """
        quantile = _Z + (_Z**3 + _Z) / (4 * self.free)
        return quantile * math.sqrt(max(float(contrast @ self.covariance @ contrast), 0.0))


def _curve(batches: Sequence[int], x: Floats, y: Floats, fit: _Fit) -> StepCurve:
    odd_ms = sum(
        float(fit.values[column])
        for (kind, _), column in zip(fit.terms, fit.column, strict=True)
        if kind == Kind.ODD
    )
    middle = int(np.argsort(fit.fitted)[len(x) // 2])
    return StepCurve(
        batches=tuple(int(b) for b in batches),
        step_ms=tuple(float(t) for t in y),
        fitted_ms=tuple(float(t) for t in fit.fitted),
        noise=float(fit.scale / fit.search.weight[middle] / fit.fitted[middle]),
        segments=tuple(_segments(batches, x, fit, fit.fitted - odd_ms * (x % 2))),
        jumps=tuple(_jump(batches, fit, i) for i in sorted(fit.jumps)),
        disturbed=tuple(int(batches[t]) for kind, t in fit.terms if kind == Kind.POINT),
        odd_extra_ms=odd_ms,
        least_jump=_least_jump(fit),
    )


def _segments(batches: Sequence[int], x: Floats, fit: _Fit, line: Floats) -> Iterator[Segment]:
    """Yield the straight segments of the fitted `line`."""
    contrast = np.zeros(len(fit.values))
    contrast[1] = 1 / float(x[-1] - x[0])
    slopes = {0: contrast}  # of two changes at the same place, the later one counts
    for (kind, t), column in zip(fit.terms, fit.column, strict=True):
        if kind in SLOPES:
            contrast = contrast.copy()
            contrast[column + (kind == Kind.BOTH)] = contrast[1]
        if kind in LEVELS | SLOPES:
            slopes[t] = contrast
    for (t, contrast), end in zip(slopes.items(), [*list(slopes)[1:], len(x)], strict=True):
        slope, half = float(contrast @ fit.values), fit.half_width(contrast)
        yield Segment(
            first_batch=int(batches[t]),
            last_batch=int(batches[end - 1]),
            first_ms=float(line[t]),
            slope_ms_per_sample=slope,
            slope_low=slope - half,
            slope_high=slope + half,
        )


def _least_jump(fit: _Fit) -> float | None:
    """Return the smallest jump, relative to the step time, that is found at most of the places.

    Even if chance reduces such a jump, it is worth its price and has LEAST_Z deviations. Noise
    grows with the step time, so it is larger after the jump. Returns None if noise hides jumps of
    any size.
    """
    places, least = fit.search.least_levels(fit.terms)
    sizes = (np.maximum(least, LEAST_Z * fit.scale) + CHANCE * fit.scale) * places
    shares = sizes[1:] / fit.fitted[:-1]
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return None
    even = float(np.quantile(shares, MOST_PLACES))
    # Solve share = even x sqrt((1 + (1 + share)^2) / 2). The root contains the mean variance before
    # and after the jump.
    half = even**2 / 2
    return (half + math.sqrt(half * (2 - half))) / (1 - half) if half < 1 else None


def _jump(batches: Sequence[int], fit: _Fit, i: int) -> MeasuredJump:
    t, column = fit.terms[i].place, int(fit.column[i])
    size, z = float(fit.values[column]), fit.z(column)
    half = fit.half_width(np.eye(len(fit.values))[column])
    # A disturbed point next to the jump may lie on either side of it.
    lone = {place for kind, place in fit.terms if kind == Kind.POINT}
    last = next((k for k in range(t - 1, 0, -1) if k not in lone), 0)
    first = next((k for k in range(t, len(batches) - 1) if k not in lone), len(batches) - 1)
    before, after = int(batches[last]), int(batches[first])
    return MeasuredJump(
        before=before,
        after=after,
        size_ms=size,
        low_ms=size - half,
        high_ms=size + half,
        percent=100 * size / float(fit.fitted[last]),
        z=z,
        tight=after == before + 1,
    )


def _few(batches: Sequence[int], x: Floats, y: Floats, noise: float) -> StepCurve:
    """Return a curve of straight segments between the points, if there are too few for a fit."""
    slopes = np.diff(y) / np.diff(x) if len(x) > 1 else np.zeros(1)
    lasts = [*x[:-2], x[-1]]
    segments = tuple(
        Segment(
            first_batch=int(x[i]),
            last_batch=int(lasts[i]),
            first_ms=float(y[i]),
            slope_ms_per_sample=float(slope),
            slope_low=None,
            slope_high=None,
        )
        for i, slope in enumerate(slopes)
    )
    times = tuple(float(t) for t in y)
    return StepCurve(
        batches=tuple(int(b) for b in batches),
        step_ms=times,
        fitted_ms=times,
        noise=noise,
        segments=segments,
        jumps=(),
    )


Floats = NDArray[np.float64]


class Kind(IntEnum):
    """Kinds of terms. The module docstring defines them."""

    LEVEL = 0
    BEND = 1
    BOTH = 2
    POINT = 3
    SMOOTH = 4
    ODD = 5


LEVELS = {Kind.LEVEL, Kind.BOTH}
"""Kinds of terms that change the level."""
SLOPES = {Kind.BEND, Kind.BOTH}
"""Kinds of terms that change the slope."""


class Term(NamedTuple):
    """Term of the curve. `place` is the index of the first point that it changes.

    For SMOOTH, `place` is the number of the smooth function. For ODD, it is 0.
    """

    kind: Kind
    place: int


PRICES = {
    Kind.LEVEL: (3.0, 2.0),
    Kind.BEND: (4.0, 1.5),
    Kind.BOTH: (5.0, 2.5),
    Kind.POINT: (6.0, 2.0),
    Kind.SMOOTH: (1.0, 1.0),
    Kind.ODD: (6.0, 2.0),
}
"""Prices of terms as (constant, factor): constant + factor x log n.

They were calibrated by simulation (docs/measured_jumps.md).
"""
SHORT, NOT_SHORT = 40, 60
CHEAPER_LEVEL, DEARER_SMOOTH = 1.0, 1.0
"""Discount of a level and surcharge of smooth terms in curves of up to SHORT points.

Both fall to 0 at NOT_SHORT points. In short curves, a jump often passes for curvature. On held-out
seeds, the prices in PRICES alone find 0.91 of the jumps. With these corrections, they find 0.93.
"""
FEW = 7.0
"""Increase of prices if few observations are behind the noise.

The prices grow by the factor 1 + FEW / (number of observations).
"""
LEAST_POINTS = 2
"""Minimum number of points on either side of a level. A single point may just be disturbed."""
LEAST_POINTS_SLOPE = 3
"""Minimum number of points between a slope change and either end of the curve."""
SLOPE_SPACING = 5
"""Minimum number of points between a slope change and a jump that also changes the slope.

With fewer points, a steep slope between two points could pass for a jump.
"""
BEND_SPACING = 8
"""Minimum number of points between bends. Two closer bends make a ramp, which looks like a jump."""
_SMOOTH = 3
_MOST_ROUNDS = 30
_DEPENDENT = 1e-7
_BETTER = 1e-9


class Search:
    """Search for the best terms of a weighted curve.

    Args:
        x: Ascending batch sizes, shape (n,) with n >= 4.
        y: Step times, shape (n,).
        sigma: Standard deviations of the step times, shape (n,).
        worth: Weight of the deviations in observations (v in the criterion).
    """

    def __init__(self, x: Floats, y: Floats, sigma: Floats, worth: float) -> None:
        n = self.n = len(x)
        self.worth = worth
        self.position = (x - x[0]) / (x[-1] - x[0])
        self.weight = 1 / sigma
        self.target = y * self.weight
        self.price = np.array(
            [constant + factor * math.log(n) for constant, factor in PRICES.values()]
        )
        short = min(max((NOT_SHORT - n) / (NOT_SHORT - SHORT), 0.0), 1.0)
        self.price[Kind.LEVEL] -= CHEAPER_LEVEL * short
        self.price[Kind.SMOOTH] += DEARER_SMOOTH * short
        # If few observations determine the standard deviations, large residuals are more likely.
        self.price *= 1 + FEW / (n + worth)
        u, w = self.position, self.weight[:, None]
        self._base = np.stack([np.ones(n), u], axis=1) * w
        level, bend, odd = np.tri(n) * w, np.maximum(u[:, None] - u, 0) * w, x % 2
        smooth = np.stack([u**2, u**3, np.log(x)], axis=1) * w
        self._columns = {
            Kind.LEVEL: (level,),
            Kind.BEND: (bend,),
            Kind.BOTH: (level, bend),
            Kind.POINT: (np.diag(self.weight),),
            Kind.SMOOTH: (smooth,),
            Kind.ODD: (odd[:, None] * w,),
        }
        self._level, self._bend = _unit(level), _unit(bend)
        self._both = np.concatenate([self._level, self._bend], axis=1)
        self._level_bend = np.einsum("it,it->t", self._level, self._bend)
        self._whole = _unit(np.column_stack([smooth, odd[:, None] * w]))
        self.bend_spacing = BEND_SPACING
        place = np.arange(n)
        self._allowed = np.ones((len(Kind), n), dtype=bool)
        self._allowed[Kind.LEVEL] = (place >= LEAST_POINTS) & (place <= n - LEAST_POINTS)
        slope = (place >= LEAST_POINTS_SLOPE) & (place <= n - LEAST_POINTS_SLOPE)
        self._allowed[Kind.BEND] = self._allowed[Kind.BOTH] = slope
        self._allowed[Kind.SMOOTH] = place < _SMOOTH
        self._allowed[Kind.ODD] = (place == 0) & (0.25 <= odd.mean() <= 0.75)

    def columns(self, terms: list[Term]) -> Floats:
        """Return the weighted design matrix of the line and the terms.

        It has n rows, two columns for the line, and one column per term. BOTH has two columns, the
        level before the bend. Slopes are per unit of `position`.
        """
        columns = [matrix[:, t] for kind, t in terms for matrix in self._columns[kind]]
        return np.column_stack([self._base, *columns])

    def cost(self, terms: list[Term]) -> float:
        """Return the criterion."""
        price = float(sum(self.price[kind] for kind, _ in terms))
        return self._misfit(self.squares(terms)) + price

    def squares(self, terms: list[Term]) -> float:
        """Return the sum of squared residuals, each divided by its standard deviation."""
        return self._residual(terms)[2]

    def least_levels(self, terms: list[Term]) -> tuple[Floats, float]:
        """Return two factors. Their product is the smallest level, in ms, that pays for its price.

        Returns:
            The level in ms at each place whose root sum of squares is 1 after the terms are
            removed, shape (n,), and the root sum of squares that pays for the price. The first is
            infinite at places without room for a level.
        """
        q, residual, squares = self._residual(terms)
        shadow = q.T @ self._level
        left = np.maximum(1 - np.einsum("pt,pt->t", shadow, shadow), 0.0)
        allowed = np.isfinite(self._gains(terms, q, residual)[Kind.LEVEL]) & (left > _DEPENDENT)
        length = np.linalg.norm(self._columns[Kind.LEVEL][0], axis=0)
        size = np.where(allowed, 1 / (length * np.sqrt(np.where(allowed, left, 1.0))), np.inf)
        pays = (squares + self.worth) * math.expm1(
            float(self.price[Kind.LEVEL]) / (self.n + self.worth)
        )
        return size, math.sqrt(pays)

    def best(self) -> tuple[float, list[Term]]:
        """Return the lowest criterion and its terms in order of place."""
        starts: list[list[Term]] = [[], [Term(Kind.SMOOTH, 0), Term(Kind.SMOOTH, 1)]]
        if self.n < NOT_SHORT:
            starts.append(self.improve([], frozenset({Kind.LEVEL, Kind.POINT}))[1])
        cost, terms = min((self.improve(start) for start in starts), key=lambda result: result[0])
        return cost, sorted(terms, key=lambda term: (term.place, term.kind))

    def improve(
        self,
        terms: list[Term],
        kinds: frozenset[Kind] = frozenset(Kind),
        fixed: frozenset[Term] = frozenset(),
    ) -> tuple[float, list[Term]]:
        """Add, swap and remove terms of these kinds until nothing lowers the criterion.

        Terms in `fixed` are never removed. Returns the criterion and the terms.
        """
        cost = self.cost(terms)
        for _ in range(_MOST_ROUNDS):
            before = cost
            for term in [*(t for t in terms if t not in fixed), None]:
                rest = [t for t in terms if t != term]
                found, changed = self._best_with(rest, kinds)
                if found < cost - _BETTER:
                    cost, terms = found, changed
            if cost >= before - _BETTER:
                break
        return cost, terms

    def _best_with(self, rest: list[Term], kinds: frozenset[Kind]) -> tuple[float, list[Term]]:
        """Return the lowest criterion of `rest` alone or with one more term, and the terms."""
        q, residual, squares = self._residual(rest)
        gains = self._gains(rest, q, residual)
        spent = float(sum(self.price[kind] for kind, _ in rest))
        best = (self._misfit(squares) + spent, rest)
        for kind in sorted(kinds):
            place = int(gains[kind].argmax())
            if gains[kind, place] > 0:
                cost = self._misfit(squares - gains[kind, place]) + spent + self.price[kind]
                best = min(best, (cost, [*rest, Term(kind, place)]), key=itemgetter(0))
        return best

    def _misfit(self, squares: float) -> float:
        count = self.n + self.worth
        return count * math.log((max(squares, 0.0) + self.worth) / count)

    def _residual(self, terms: list[Term]) -> tuple[Floats, Floats, float]:
        """Return (orthonormal basis of the terms, residual of the target, its sum of squares)."""
        q = np.linalg.qr(self.columns(terms))[0]
        residual = self.target - q @ (q.T @ self.target)
        return q, residual, float(residual @ residual)

    def _gains(self, terms: list[Term], q: Floats, residual: Floats) -> Floats:
        """Return how much one more term of each kind and place lowers the sum of squares.

        The shape is (kinds, n). Terms that are not allowed have -inf.
        """
        n = self.n
        gains = np.full((len(Kind), n), -np.inf)
        shadow = q.T @ self._both
        size = 1 - np.einsum("pt,pt->t", shadow, shadow)
        dot = residual @ self._both
        with np.errstate(divide="ignore", invalid="ignore"):
            single = np.where(size > _DEPENDENT, dot**2 / size, -np.inf)
            gains[Kind.LEVEL], gains[Kind.BEND] = single[:n], single[n:]
            level, bend, dot_level, dot_bend = size[:n], size[n:], dot[:n], dot[n:]
            cross = self._level_bend - np.einsum("pt,pt->t", shadow[:, :n], shadow[:, n:])
            det = level * bend - cross**2
            both = (
                dot_level**2 * bend - 2 * dot_level * dot_bend * cross + dot_bend**2 * level
            ) / det
            gains[Kind.BOTH] = np.where(
                (det > _DEPENDENT * bend) & (bend > _DEPENDENT), both, -np.inf
            )
            left = 1 - np.einsum("ip,ip->i", q, q)
            gains[Kind.POINT] = np.where(left > 1e-3, residual**2 / left, -np.inf)
            shadow = q.T @ self._whole
            left = 1 - np.einsum("pk,pk->k", shadow, shadow)
            whole = np.where(left > _DEPENDENT, (residual @ self._whole) ** 2 / left, -np.inf)
            gains[Kind.SMOOTH, :_SMOOTH], gains[Kind.ODD, 0] = whole[:_SMOOTH], whole[_SMOOTH]
        gains[~self._allowed] = -np.inf
        for kind, t in terms:
            if kind in LEVELS:
                gains[
                    [Kind.LEVEL, Kind.BOTH], max(0, t - LEAST_POINTS + 1) : t + LEAST_POINTS
                ] = -np.inf
                gains[[Kind.BEND, Kind.BOTH], max(0, t - LEAST_POINTS_SLOPE + 1) : t + 1] = -np.inf
            if kind in SLOPES:
                gains[
                    [Kind.BEND, Kind.BOTH], max(0, t - SLOPE_SPACING + 1) : t + SLOPE_SPACING
                ] = -np.inf
                gains[Kind.LEVEL, t : t + LEAST_POINTS_SLOPE] = -np.inf
            if kind == Kind.BEND:
                gains[
                    Kind.BEND, max(0, t - self.bend_spacing + 1) : t + self.bend_spacing
                ] = -np.inf
        return gains


def _unit(columns: Floats) -> Floats:
    """Return the columns scaled to length one."""
    size = np.linalg.norm(columns, axis=0)
    return columns / np.where(size > 0, size, 1.0)
