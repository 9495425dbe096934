"""The search behind `changes.py`: which level changes, bends and lone points explain a noisy curve.

The curve is a line plus terms:

    level t:   1[i >= t]              a jump; the slope goes on
    bend t:    (x - x_t)+             the slope changes, the level does not
    both t:    level and bend at once
    point t:   1[i == t]              a disturbed measurement
    smooth k:  x^2, x^3 or log x      curvature, which must not pass for jumps
    odd:       1[batch is odd]        padding to even batches

The best set of terms minimises (n + v) log((R + v) / (n + v)) + the price of its terms. R is the sum of squared
residuals over their standard deviations, and v says how many observations the given deviations are worth: few where
they are a guess, many where they are known. The search starts from nothing, from smooth terms, and from the optimal
partition into lines with slopes of their own (dynamic programming; Jackson et al. 2005), then adds, swaps and removes
one term at a time, each time the best of all kinds and places, and adds two levels at once, until nothing helps.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Kind(IntEnum):
    """What a term changes."""

    LEVEL = 0
    BEND = 1
    BOTH = 2
    POINT = 3
    SMOOTH = 4
    ODD = 5


class Term(NamedTuple):
    """A change of `kind` from the point `place` on; for SMOOTH, the number of the function; for ODD, 0."""

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
"""Price of a term: constant + factor x log n. Calibrated by simulation, docs/measured_jumps.md."""
SHORT, NOT_SHORT = 40, 60
CHEAPER_LEVEL, DEARER_SMOOTH = 1.0, 1.0
"""What a level costs less and smooth curvature more up to SHORT points, and nothing from NOT_SHORT on: there a jump is often
taken for curvature, and the constants above find 0.91 of them, these 0.93, on seeds that neither was set with."""
FEW = 7.0
"""Price of a term rises by this over the observations that the noise rests on."""
LEAST_POINTS = 2
"""Points on either side of a level change; a lone point could as well be disturbed."""
LEAST_POINTS_SLOPE = 3
"""Points on either side of a slope change, at the ends of the curve ..."""
SLOPE_SPACING = 5
"""... and between a slope change and a jump with one: else a steep slope between two points would pass for a jump."""
BEND_SPACING = 8
"""Points between bends: two that are closer make a ramp, which would pass for a level change."""
_SMOOTH = 3
_MOST_ROUNDS = 30
_DEPENDENT = 1e-7
_BETTER = 1e-9


class Search:
    """A weighted curve: ascending batch sizes `x`, step times `y` and deviations `sigma`, each (n,), n >= 4."""

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
        # the fewer observations the deviations rest on, the longer the tail of what chance can do
        self.price *= 1 + FEW / (n + worth)
        u, w = self.position, self.weight[:, None]
        self._base = np.stack([np.ones(n), u], axis=1) * w
        self._level, self._level_size = _unit(np.tri(n) * w)
        self._bend, self._bend_size = _unit(np.maximum(u[:, None] - u, 0) * w)
        self._both = np.concatenate([self._level, self._bend], axis=1)
        self._level_bend = np.einsum("it,it->t", self._level, self._bend)
        self._level_level = self._level.T @ self._level
        odd = x % 2
        self._whole, self._whole_size = _unit(np.stack([u**2, u**3, np.log(x), odd], axis=1) * w)
        self.bend_spacing = BEND_SPACING
        place = np.arange(n)
        self._allowed = np.ones((len(Kind), n), dtype=bool)
        self._allowed[Kind.LEVEL] = (place >= LEAST_POINTS) & (place <= n - LEAST_POINTS)
        slope = (place >= LEAST_POINTS_SLOPE) & (place <= n - LEAST_POINTS_SLOPE)
        self._allowed[Kind.BEND] = self._allowed[Kind.BOTH] = slope
        self._allowed[Kind.SMOOTH] = place < _SMOOTH
        self._allowed[Kind.ODD] = (place == 0) & (0.25 <= odd.mean() <= 0.75)

    def columns(self, terms: list[Term]) -> Floats:
        """Weighted columns of the line and then of the terms, (n, 2 + terms + one more for each BOTH): for a line and
        a bend slopes are per unit of `position`, for BOTH the level comes before the bend.
        """
        columns = []
        for kind, t in terms:
            if kind in (Kind.LEVEL, Kind.BOTH):
                columns.append(self._level[:, t] * self._level_size[t])
            if kind in (Kind.BEND, Kind.BOTH):
                columns.append(self._bend[:, t] * self._bend_size[t])
            if kind == Kind.POINT:
                columns.append(np.where(np.arange(self.n) == t, self.weight, 0.0))
            if kind in (Kind.SMOOTH, Kind.ODD):
                k = t if kind == Kind.SMOOTH else _SMOOTH
                columns.append(self._whole[:, k] * self._whole_size[k])
        return np.column_stack([self._base, *columns]) if columns else self._base

    def cost(self, terms: list[Term]) -> float:
        return self._misfit(self.squares(terms)) + self._price_of(terms)

    def squares(self, terms: list[Term]) -> float:
        """The sum of squared residuals over their deviations."""
        return self._residual(terms)[2]

    def least_levels(self, terms: list[Term]) -> tuple[Floats, float]:
        """(milliseconds of a level change from each place on (n) for a root of squares of one, infinite where none may be; the
        root of squares that pays for it)."""
        q, residual, squares = self._residual(terms)
        shadow = q.T @ self._level
        left = np.maximum(1 - np.einsum("pt,pt->t", shadow, shadow), 0.0)
        allowed = np.isfinite(self._gains(terms, q, residual)[Kind.LEVEL]) & (left > _DEPENDENT)
        size = np.where(
            allowed, 1 / (self._level_size * np.sqrt(np.where(allowed, left, 1.0))), np.inf
        )
        pays = (squares + self.worth) * math.expm1(
            float(self.price[Kind.LEVEL]) / (self.n + self.worth)
        )
        return size, math.sqrt(pays)

    def best(self) -> tuple[float, list[Term]]:
        """(the lowest criterion, its terms in order of place)."""
        pieces = self._partition()
        starts: list[list[Term]] = [[], [Term(Kind.SMOOTH, 0), Term(Kind.SMOOTH, 1)]]
        if pieces:
            starts += [[Term(kind, t) for t in pieces] for kind in (Kind.BOTH, Kind.LEVEL)]
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
        """Add, swap and remove terms of these kinds, but the fixed ones, until nothing lowers the criterion."""
        terms = list(terms)
        cost = self.cost(terms)
        for _ in range(_MOST_ROUNDS):
            before = cost
            for term in [t for t in terms if t not in fixed]:
                rest = [t for t in terms if t != term]
                q, residual, squares = self._residual(rest)
                bare = self._misfit(squares) + self._price_of(rest)
                best, new = self._best_term(rest, kinds, self._gains(rest, q, residual), squares)
                if min(bare, best) < cost - _BETTER:
                    terms, cost = (rest, bare) if bare <= best else ([*rest, new], best)
            q, residual, squares = self._residual(terms)
            gains = self._gains(terms, q, residual)
            best, new = self._best_term(terms, kinds, gains, squares)
            if best < cost - _BETTER:
                terms, cost = [*terms, new], best
            elif Kind.LEVEL in kinds:
                best, pair = self._best_pair(terms, gains, q, residual, squares)
                if best < cost - _BETTER:
                    terms, cost = [*terms, *pair], best
            if cost >= before - _BETTER:
                break
        return cost, terms

    def _misfit(self, squares: float) -> float:
        count = self.n + self.worth
        return count * math.log((max(squares, 0.0) + self.worth) / count)

    def _price_of(self, terms: list[Term]) -> float:
        return float(sum(self.price[kind] for kind, _ in terms))

    def _residual(self, terms: list[Term]) -> tuple[Floats, Floats, float]:
        """(an orthonormal basis of the terms, the target's residual, the residual's sum of squares)."""
        q = np.linalg.qr(self.columns(terms))[0]
        residual = self.target - q @ (q.T @ self.target)
        return q, residual, float(residual @ residual)

    def _gains(self, terms: list[Term], q: Floats, residual: Floats) -> Floats:
        """The fall of the squares with one more term of each kind at each place, (kinds, n); -inf where it is not allowed."""
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
            if kind in (Kind.LEVEL, Kind.BOTH):
                gains[
                    [Kind.LEVEL, Kind.BOTH], max(0, t - LEAST_POINTS + 1) : t + LEAST_POINTS
                ] = -np.inf
                gains[[Kind.BEND, Kind.BOTH], max(0, t - LEAST_POINTS_SLOPE + 1) : t + 1] = -np.inf
            if kind in (Kind.BEND, Kind.BOTH):
                gains[
                    [Kind.BEND, Kind.BOTH], max(0, t - SLOPE_SPACING + 1) : t + SLOPE_SPACING
                ] = -np.inf
                gains[Kind.LEVEL, t : t + LEAST_POINTS_SLOPE] = -np.inf
            if kind == Kind.BEND:
                gains[
                    Kind.BEND, max(0, t - self.bend_spacing + 1) : t + self.bend_spacing
                ] = -np.inf
        return gains

    def _best_term(
        self, rest: list[Term], kinds: frozenset[Kind], gains: Floats, squares: float
    ) -> tuple[float, Term]:
        places = gains.argmax(axis=1)
        spent = self._price_of(rest)
        costs = {
            kind: self._misfit(squares - gains[kind, places[kind]]) + spent + self.price[kind]
            for kind in kinds
            if gains[kind, places[kind]] > 0
        }
        if not costs:
            return math.inf, Term(Kind.POINT, 0)
        kind = min(costs, key=lambda k: (costs[k], k))
        return costs[kind], Term(kind, int(places[kind]))

    def _best_pair(
        self, terms: list[Term], gains: Floats, q: Floats, residual: Floats, squares: float
    ) -> tuple[float, list[Term]]:
        """The best two level changes at once: neither end of a short plateau helps alone."""
        shadow = q.T @ self._level
        gram = self._level_level - shadow.T @ shadow
        size, dot = gram.diagonal(), residual @ self._level
        det = np.outer(size, size) - gram**2
        gain = np.outer(dot**2, size)
        gain = gain + gain.T - 2 * np.outer(dot, dot) * gram
        usable = np.isfinite(gains[Kind.LEVEL])
        good = np.triu(usable[:, None] & usable, LEAST_POINTS) & (det > 1e-5 * np.outer(size, size))
        if not good.any():
            return math.inf, []
        gain = np.where(good, gain / np.where(good, det, 1.0), -np.inf)
        i, j = divmod(int(gain.argmax()), self.n)
        cost = (
            self._misfit(squares - gain[i, j])
            + self._price_of(terms)
            + 2 * float(self.price[Kind.LEVEL])
        )
        return cost, [Term(Kind.LEVEL, i), Term(Kind.LEVEL, j)]

    def _partition(self) -> list[int]:
        """The first points of the optimal pieces, without the first piece; each piece is a line of its own."""
        n, least, price = self.n, LEAST_POINTS_SLOPE, self.price[Kind.BOTH]
        x, y = self.position, self.target / self.weight
        sums = np.zeros((6, n + 1))
        np.cumsum(
            self.weight**2 * np.stack([np.ones(n), x, y, x * x, x * y, y * y]),
            axis=1,
            out=sums[:, 1:],
        )
        best = np.full(n + 1, np.inf)
        best[0] = -price
        last = np.zeros(n + 1, dtype=int)
        for end in range(least, n + 1):
            w, wx, wy, wxx, wxy, wyy = sums[:, end, None] - sums[:, : end - least + 1]
            squares = (
                wyy - wy**2 / w - (wxy - wx * wy / w) ** 2 / np.maximum(wxx - wx**2 / w, 1e-300)
            )
            totals = best[: end - least + 1] + np.maximum(squares, 0) + price
            last[end] = int(totals.argmin())
            best[end] = totals[last[end]]
        starts, end = [], int(last[n])
        while end > 0:
            starts.append(end)
            end = int(last[end])
        return starts[::-1]


def _unit(columns: Floats) -> tuple[Floats, Floats]:
    """(columns scaled to length one, their lengths before)."""
    size = np.sqrt((columns**2).sum(axis=0))
    return columns / np.where(size > 0, size, 1.0), size
