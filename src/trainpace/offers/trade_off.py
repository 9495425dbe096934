"""Of all servers the three that somebody who pays asks for: the cheapest, the fastest, and the knee between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from trainpace.core.records import Record
from trainpace.offers.match import Match

Z_90, Z_ONE_SIDED = 1.645, 1.282
"""Half width of a 90 % interval in standard deviations, and where 9 of 10 cases lie below."""
KNEE_GAIN = 0.1
"""How far below the straight line between its ends, on logarithmic axes from 0 to 1, a front must come to have a knee."""


class Pick(Record):
    """One of the three. hours_less, usd_more: beside the next cheaper pick, and hour_less_usd what every hour less costs so; None
    for the cheapest.

    as_fast: a cheaper server whose time forecasts cannot tell from this one's.
    """

    name: Literal["cheapest", "knee", "fastest"]
    match: Match
    hours_less: float | None = None
    usd_more: float | None = None
    as_fast: Match | None = None

    @property
    def hour_less_usd(self) -> float | None:
        return (
            self.usd_more / self.hours_less
            if self.usd_more is not None and self.hours_less
            else None
        )


def picks(matches: Sequence[Match]) -> tuple[Pick, ...]:
    """The cheapest first; fewer than three where one server is two of them, or the front has no knee."""
    able = [m for m in matches if math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd)]
    if not able:
        return ()
    front = sorted((m for m in able if m.on_front), key=lambda m: m.mean_hours)
    cheapest, fastest = front[-1], front[0]
    chosen: list[tuple[Literal["cheapest", "knee", "fastest"], Match]] = [("cheapest", cheapest)]
    if (middle := knee(front)) is not None:
        chosen.append(("knee", middle))
    if fastest is not cheapest:
        chosen.append(("fastest", fastest))
    made = []
    for i, (name, match) in enumerate(chosen):
        before = chosen[i - 1][1] if i else None
        made.append(
            Pick(
                name=name,
                match=match,
                hours_less=None if before is None else before.mean_hours - match.mean_hours,
                usd_more=None if before is None else match.mean_usd - before.mean_usd,
                as_fast=_as_fast(match, front) if name == "fastest" else None,
            )
        )
    return tuple(made)


def knee(front: Sequence[Match]) -> Match | None:
    """The match of a front, in order of its hours, that lies farthest below the straight line between its ends, where both axes
    are logarithmic and go from 0 to 1 (Satopää et al. 2011, Kneedle); None where the front is nearly straight.
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
    """The cheapest of a front that is faster than `match` in 1 of 10 cases or more: forecasts of two servers err apart."""
    others = [m for m in front if m is not match and _behind(m, match) < Z_ONE_SIDED]
    return min(others, key=lambda m: m.mean_usd, default=None)


def _behind(slower: Match, faster: Match) -> float:
    """By how many standard deviations of both forecasts together."""
    deviation = math.hypot(
        *(
            math.log(max(m.hours.high, 1e-12) / max(m.hours.low, 1e-12)) / (2 * Z_90)
            for m in (slower, faster)
        )
    )
    return math.log(slower.mean_hours / faster.mean_hours) / max(deviation, 1e-9)
