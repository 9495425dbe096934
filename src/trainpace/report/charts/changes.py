"""What changes bring: a plan's, foretold for the whole job, and a ladder's, measured rung by rung."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from trainpace.outcome import Interval
from trainpace.plan import Plan
from trainpace.plan.changes import Outlook
from trainpace.report.charts.chart import Axis, Bar, BarChart, BarGroup, Chart, Mark, Segment, Series
from trainpace.units import format_duration, format_usd


def plan_ladder(plan: Plan, target: Outlook) -> BarChart:
    """The job after each change, down to `target`: what is left of it, and what the change takes away."""
    saved = [change.forecast_saved_s for change in plan.changes]
    left = [target.job_s + sum(saved[i:]) for i in range(len(saved) + 1)]
    bars = []
    if plan.start_fits:
        bars.append(Bar(label="as it is", segments=(_left(left[0]),), said=format_duration(left[0])))
    for i, (change, before, after) in enumerate(zip(plan.changes, left, left[1:], strict=False), 1):
        gone = max(before - after, 0.0)
        what = (
            "makes it fit"
            if change.makes_fit
            else f"{'-' if before >= after else '+'}{format_duration(abs(before - after))}"
        )
        bars.append(
            Bar(
                label=f"{i}. {change.title}",
                said=f"{format_duration(after)} ({what})",
                segments=(_left(after), Segment(name="saved by this change", tone="best", value=gone / 3600)),
            )
        )
    whole = left[0] - target.job_s
    return BarChart(
        title="The whole job, change by change",
        finding=f"{len(saved)} changes bring the job from {format_duration(left[0])} to {format_duration(target.job_s)},"
        f" {whole / left[0]:.0%} less.",
        label="hours of the whole job",
        unit="h",
        groups=(BarGroup(title="", bars=tuple(bars)),),
        note="Forecasts, not measurements. Each change is applied on top of those before it.",
    )


def _left(seconds: float) -> Segment:
    return Segment(name="left of the job", tone="first", value=seconds / 3600)


def fleet_chart(points: Sequence[Outlook]) -> Chart | None:
    """The fastest choice with each number of GPUs: hours against GPUs, beside what perfect scaling would give."""
    if len(points) < 2:
        return None
    some = sorted(points, key=lambda p: p.num_devices)
    x, y = tuple(float(p.num_devices) for p in some), tuple(p.job_s / 3600 for p in some)
    kept = y[0] * x[0] / (y[-1] * x[-1])
    labels = tuple(
        f"{p.num_devices} GPUs: {format_duration(p.job_s)}"
        + ("" if p.cost_usd is None else f", {format_usd(p.cost_usd)}")
        for p in some
    )
    return Chart(
        title="The job against the number of GPUs",
        finding=f"{int(x[-1])} GPUs take {format_duration(some[-1].job_s)}, {int(x[0])} take {format_duration(some[0].job_s)}:"
        f" {kept:.0%} of a perfect speed-up.",
        x=Axis(label="GPUs", scale="log2"),
        y=Axis(label="hours of the whole job", unit="h", scale="log10"),
        series=(
            Series(
                name="ideal: in proportion",
                kind="line",
                tone="ideal",
                x=x,
                y=tuple(y[0] * x[0] / n for n in x),
                dashed=True,
            ),
            Series(name="the fastest with so many", kind="points", tone="forecast", x=x, y=y, labels=labels),
        ),
        marks=(Mark(axis="point", at=x[-1], y=y[-1], text=format_duration(some[-1].job_s), tone="best"),),
        nearest="point",
        note="Forecasts, not measurements.",
    )


def speedups(what: str, rungs: Sequence[tuple[str, float | None, bool]]) -> BarChart | None:
    """The ladder: (title, times as fast as the baseline, kept). None where nothing but the baseline was measured."""
    measured = [(title, total, kept) for title, total, kept in rungs if total is not None]
    if len(measured) < 2:
        return None
    best = max((total for _, total, kept in measured if kept), default=1.0)
    so_far = list(accumulate((total if kept else 0.0 for _, total, kept in measured), max))
    bars = tuple(
        Bar(
            label=title,
            said=f"{total:.2f}x{'' if kept else ', undone'}",
            segments=(Segment(name="kept" if kept else "undone", tone="best" if kept else "muted", value=total),),
        )
        for title, total, kept in measured
    )
    return BarChart(
        title="How many times as fast as the baseline",
        label="times as fast as the baseline",
        unit="",
        finding=f"{sum(kept for _, _, kept in measured) - 1} of {len(measured) - 1} changes were kept; together they make {what}"
        f" {max(best, so_far[-1]):.1f} times as fast.",
        groups=(BarGroup(title="", bars=bars),),
        note="Measured, each on top of what was kept before it.",
    )


def rung_times(
    what: str, rungs: Sequence[tuple[str, float | None, Interval | None, float | None, Interval | None]]
) -> BarChart:
    """Forecast above, measured below, for each rung: (title, forecast ms, its interval, measured ms, its interval)."""
    groups, held, judged = [], 0, 0
    for title, foreseen, between, measured, spread in rungs:
        bars = []
        if foreseen is not None:
            bars.append(_timed("forecast", "forecast", foreseen, between))
        if measured is not None:
            bars.append(_timed("measured", "measured", measured, spread))
        if bars:
            groups.append(BarGroup(title=title, bars=tuple(bars)))
        if measured is not None and between is not None:
            judged += 1
            held += between.low <= measured <= between.high
    said = f"{held} of {judged} forecasts held what was then measured" if judged else "Measured, without forecasts"
    return BarChart(
        title=f"Forecast and measured: {what}",
        finding=f"{said}.",
        label=f"time of {what}",
        unit="s",
        groups=tuple(groups),
        note="Whiskers: the forecast's 90 % interval, and where a repeat of the measurement should fall.",
    )


def _timed(label: str, tone: str, ms: float, interval: Interval | None) -> Bar:
    between = ""
    if interval is not None and interval.low < interval.high:
        between = f" ({format_duration(interval.low / 1e3)} to {format_duration(interval.high / 1e3)})"
    return Bar(
        label=label,
        segments=(Segment(name=label, tone=tone, value=ms / 1e3),),
        said=f"{format_duration(ms / 1e3)}{between}",
        low=None if not between or interval is None else interval.low / 1e3,
        high=None if not between or interval is None else interval.high / 1e3,
    )
