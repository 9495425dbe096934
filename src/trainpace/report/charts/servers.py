"""What the whole job costs against how long it takes, one point a server, with the Pareto front."""

import math
from collections.abc import Sequence

from trainpace.offers import Match, Rejected
from trainpace.report.charts.chart import Axis, Chart, Mark, Series
from trainpace.report.phrases import devices, span
from trainpace.units import format_duration, format_usd

MOST_POINTS = 400
"""Beside the front; the cheapest of the rest."""


def cost_against_time(matches: Sequence[Match]) -> Chart | None:
    """None where nothing finishes."""
    able = [m for m in matches if math.isfinite(m.mean_hours) and math.isfinite(m.mean_usd) and m.mean_usd > 0]
    front = sorted((m for m in able if m.on_front), key=lambda m: m.mean_hours)
    if not front:
        return None
    rest = sorted((m for m in able if not m.on_front), key=lambda m: m.mean_usd)[:MOST_POINTS]
    cheapest, fastest = front[-1], front[0]
    hours, usd = tuple(m.mean_hours for m in front), tuple(m.mean_usd for m in front)
    series = [_points("worse in both time and cost", "muted", rest)] if rest else []
    series += [
        Series(name="no other is both faster and cheaper", kind="line", tone="best", x=hours, y=usd),
        _points("the same, with the 90 % interval of the cost", "best", front, spread=True),
    ]
    marks = [_named("cheapest", cheapest)] + ([] if fastest is cheapest else [_named("fastest", fastest)])
    shown = f"all {len(able)}"
    if len(able) > len(front) + len(rest):
        shown = f"{len(front)} on the front and the {len(rest)} cheapest others of {len(able)}"
    return Chart(
        title="Cost against time",
        finding=" ".join(cheapest_and_fastest(able)),
        x=Axis(label="hours of the whole job", unit="h", scale="log10"),
        y=Axis(label="cost of the whole job", unit="$", scale="log10"),
        series=tuple(series),
        marks=tuple(marks),
        nearest="point",
        note=f"Shown: {shown}. Forecasts, not measurements.",
    )


def cheapest_and_fastest(matches: Sequence[Match]) -> list[str]:
    best, fastest = min(matches, key=lambda m: m.mean_usd), min(matches, key=lambda m: m.mean_hours)
    between = span(3600 * best.hours.low, 3600 * best.hours.high, format_duration)
    sentences = [f"Cheapest: {server(best)}, {usd_and_hours(best)} ({between} in 9 of 10 cases)."]
    return sentences if fastest is best else [*sentences, f"Fastest: {server(fastest)}, {usd_and_hours(fastest)}."]


def usd_and_hours(m: Match) -> str:
    return f"{format_usd(m.mean_usd)} in {format_duration(3600 * m.mean_hours)}"


def server(choice: Match | Rejected) -> str:
    nodes = f"{choice.nodes} x " if choice.nodes > 1 else ""
    spot = ", spot" if isinstance(choice, Match) and choice.spot else ""
    offer = choice.offer
    return f"{nodes}{offer.provider} {offer.instance_type} ({devices(offer.count, offer.device)}{spot})"


def _named(what: str, m: Match) -> Mark:
    return Mark(axis="point", at=m.mean_hours, y=m.mean_usd, text=f"{what}: {server(m)}", tone="best")


def _points(name: str, tone: str, matches: Sequence[Match], spread: bool = False) -> Series:
    return Series(
        name=name,
        kind="points",
        tone=tone,
        x=tuple(m.mean_hours for m in matches),
        y=tuple(m.mean_usd for m in matches),
        labels=tuple(map(server, matches)),
        low=tuple(m.usd.low for m in matches) if spread else (),
        high=tuple(m.usd.high if math.isfinite(m.usd.high) else m.mean_usd for m in matches) if spread else (),
    )
