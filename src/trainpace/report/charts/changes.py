"""What changes bring: a plan's, foretold for the whole job, and a ladder's, measured rung by rung."""

from collections.abc import Sequence

from trainpace.outcome import Interval
from trainpace.plan import Outlook, Plan
from trainpace.report.charts.chart import Axis, Bar, BarChart, BarGroup, Chart, Mark, Segment, Series, ideal_line
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
    return BarChart(
        title="The whole job, change by change",
        finding=_brought(plan.start_fits, len(saved), left[0], target.job_s),
        label="hours of the whole job",
        unit="h",
        groups=(BarGroup(title="", bars=tuple(bars)),),
        note="Forecasts, not measurements. Each change is applied on top of those before it.",
    )


def _brought(start_fits: bool, n: int, before_s: float, after_s: float) -> str:
    if not start_fits:  # there is no job as it is to compare with
        return f"As it is, it does not fit in memory. With {_changes(n)} it does, and the job takes {format_duration(after_s)}."
    share = after_s / before_s - 1
    return (
        f"{_changes(n)} {'brings' if n == 1 else 'bring'} the job from {format_duration(before_s)} to {format_duration(after_s)},"
        f" {abs(share):.0%} {'more' if share > 0 else 'less'}."
    )


def _changes(n: int) -> str:
    return f"{n} change{'' if n == 1 else 's'}"


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
        title="Time of the job against the number of GPUs",
        finding=f"{int(x[-1])} GPUs take {format_duration(some[-1].job_s)}, {int(x[0])} take {format_duration(some[0].job_s)}:"
        f" {kept:.0%} of a perfect speed-up.",
        x=Axis(label="GPUs", scale="log2"),
        y=Axis(label="hours of the whole job", unit="h", scale="log10"),
        series=(
            ideal_line(x, tuple(y[0] * x[0] / n for n in x)),
            Series(name="the fastest option", kind="points", tone="forecast", x=x, y=y, labels=labels),
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
    helped = sum(kept for _, _, kept in measured) - 1
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
        finding=_kept(helped, len(measured) - 1, what, best),
        groups=(BarGroup(title="", bars=bars),),
        note="Measured, each on top of what was kept before it.",
    )


def _kept(helped: int, tried: int, what: str, best: float) -> str:
    if not helped:
        return f"None of {_changes(tried)} was kept."
    said = "was kept; it makes" if helped == 1 else "were kept; together they make"
    return f"{helped} of {_changes(tried)} {said} {what} {best:.1f} times as fast."


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
    said = (
        f"Forecast intervals that contain the measurement: {held} of {judged}"
        if judged
        else "Measured, without forecasts"
    )
    return BarChart(
        title=f"Forecast and measured: {what}",
        finding=f"{said}.",
        label=f"time of {what}",
        unit="s",
        groups=tuple(groups),
        note="Whiskers: the 90 % interval of the forecast, and that of a repeated measurement.",
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
