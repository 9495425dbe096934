"""Recommend three servers of a ranking: the cheapest, the fastest, and the knee between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.offers.match import Match

Z_90, Z_ONE_SIDED = 1.645, 1.282
"""Standard normal quantiles: half-width of a two-sided 90% interval, and the one-sided 90% point.
"""
KNEE_GAIN = 0.1
"""Least depth of a knee below the straight line between the ends of the front.

Both axes are logarithmic and scaled to 0 to 1.
"""


class Pick(Record):
    """A recommended server, compared with the next cheaper pick.

    Attributes:
        hours_less: Hours saved against the next cheaper pick. None for the cheapest.
        usd_more: Additional cost against the next cheaper pick. None for the cheapest.
        as_fast: A cheaper server that is as fast within the forecasts' error, or None.
    """

    name: Literal["cheapest", "knee", "fastest"]
    match: Match
    hours_less: float | None = None
    usd_more: float | None = None
    as_fast: Match | None = None

    @property
    def hour_less_usd(self) -> float | None:
        """Price of each saved hour, or None if no hours are saved."""
        return (
            self.usd_more / self.hours_less
            if self.usd_more is not None and self.hours_less
            else None
        )


def picks(matches: Sequence[Match]) -> tuple[Pick, ...]:
    """Return the recommended servers, the cheapest first.

    There are fewer than three if one server is two of them, or if the front has no knee.
    """
    able = [m for m in matches if math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd)]
    front = sorted((m for m in able if m.on_front), key=lambda m: m.mean_hours)
    if not able:
        return ()
    middle = knee(front)
    made = [Pick(name="cheapest", match=front[-1])]
    if middle is not None:
        made.append(_pick("knee", middle, made[-1].match))
    if len(front) > 1:
        fastest = _pick("fastest", front[0], made[-1].match)
        made.append(replace(fastest, as_fast=_as_fast(front[0], front)))
    return tuple(made)


def _pick(name: Literal["knee", "fastest"], match: Match, before: Match) -> Pick:
    return Pick(
        name=name,
        match=match,
        hours_less=before.mean_hours - match.mean_hours,
        usd_more=match.mean_usd - before.mean_usd,
    )


def knee(front: Sequence[Match]) -> Match | None:
    """Return the knee of a front, or None if the front is nearly straight.

    The knee is the match farthest below the straight line between the ends. Both axes are
    logarithmic and scaled to 0 to 1 (Satopää et al. 2011, Kneedle).

    Args:
        front: Matches of the Pareto front, sorted by hours.
    """
    if len(front) < 3:
        return None
    hours, usd = (
        [math.log(max(value, 1e-12)) for value in values]
        for values in ([m.mean_hours for m in front], [m.mean_usd for m in front])
    )
    wide, high = hours[-1] - hours[0], usd[0] - usd[-1]
    if wide <= 0 or high <= 0:
        return None
    below = [
        1 - (h - hours[0]) / wide - (u - usd[-1]) / high for h, u in zip(hours, usd, strict=True)
    ]
    best = max(range(len(front)), key=below.__getitem__)
    return front[best] if below[best] >= KNEE_GAIN else None


def _as_fast(match: Match, front: Sequence[Match]) -> Match | None:
    """Return the cheapest match that has at least a 10% chance of being faster than `match`.

    The forecasts of two servers have independent errors. None if no match is likely enough.
    """
    others = [m for m in front if m is not match and _behind(m, match) < Z_ONE_SIDED]
    return min(others, key=lambda m: m.mean_usd, default=None)


def _behind(slower: Match, faster: Match) -> float:
    """Return how much slower a match is, in standard deviations of the difference."""
    deviation = math.hypot(
        *(
            math.log(max(m.hours.high, 1e-12) / max(m.hours.low, 1e-12)) / (2 * Z_90)
            for m in (slower, faster)
        )
    )
    return math.log(slower.mean_hours / faster.mean_hours) / max(deviation, 1e-9)
