"""The table of measured speed-ups, rung by rung: for the terminal, as JSON, in Markdown, as pictures and as a page."""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from trainpace.core.outcome import Interval
from trainpace.core.records import Record, to_jsonable
from trainpace.job import assumed_in_words
from trainpace.report.charts import Bar, BarChart, BarGroup, Picture, bar
from trainpace.report.pages import page
from trainpace.report.phrases import (
    duration,
    interval,
    noise_scale,
    number,
    plural,
    span,
    to_the_same_loss,
    usd,
)
from trainpace.report.screen import in_details
from trainpace.report.terminal import (
    Column,
    console,
    fits,
    print_bars,
    print_lines,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.run import (
    NOT_ASKED,
    LadderResult,
    LadderRow,
    RungPreview,
    epoch_s,
    job_time,
    noise_scale_of,
    rows_of,
    words_of,
)

PAIRED = (
    "A rung's speed-up compares its trials with those of the setup kept before it, run one after"
    " the other; the total is the product of the kept rungs' speed-ups. Steps, epochs and jobs are"
    " of each rung's own trials."
)
IN_TURN = (
    "The total speed-up, the epoch and the whole job in these notes compare the first and the last"
    " setup, which ran in turn after the climb. In the table, a rung's speed-up compares its trials"
    " with those of the setup kept before it, and its total is the product of the kept rungs'"
    " speed-ups; steps, epochs and jobs there are of each rung's own trials."
)
HELD = "Forecast intervals that contain the measurement: {held} of {judged}."


class LadderTable(Record):
    """`what` is timed. `verdict` in sentences, the most important first; then what next. `total`: how many times as fast the
    last kept setup is as the first, where they were measured in turn; the product of the rungs stands in the rows.
    """

    title: str
    rows: tuple[LadderRow, ...]
    verdict: tuple[str, ...] = ()
    what: str = "a step"
    total: float | None = None


def table_of(result: LadderResult) -> LadderTable:
    ladder, start = result.ladder, result.start
    rows = rows_of(result)
    batch = ladder.start.execution.global_batch
    machine = start.environment.get("gpu") or start.environment.get("cpu") or ""
    return LadderTable(
        title=f"{ladder.name}{f' on {machine}' if machine else ''}, global batch {batch}",
        rows=tuple(rows),
        verdict=tuple(_verdict(result, rows)),
        total=None if result.end_to_end is None else result.end_to_end.gain.ratio,
    )


def _verdict(result: LadderResult, rows: Sequence[LadderRow]) -> list[str]:
    first = rows[0]
    last = next((r for r in reversed(rows) if r.kept and r.total is not None), first)
    assert last.total is not None
    assert last.measured_ms is not None
    assert first.measured_ms is not None
    lines = ["No rung helped: the training stays as it is."]
    if last is not first:
        lines = _whole(result, first.measured_ms, last.measured_ms, last.total)
    job = job_time(result.ladder, result.baseline.tried[0], last.measured_ms)
    lines += [assumed_in_words(job.assumed)] if job is not None and job.assumed else []
    if any(r.ratio is not None for r in rows):
        lines.append(PAIRED if result.end_to_end is None else IN_TURN)
    lines += [*_forecasts(result), *_without_forecast(rows), *_noise_scale(result)]
    lines += [f"{r.title}: undone, {r.why.rstrip('.')}." for r in rows if not r.kept]
    if result.stopped:
        lines.append(f"Rungs not run: {result.stopped}.")
    return [
        *lines,
        f"Next: use the settings that were kept in your training: {words_of(result.kept[0])}.",
    ]


def _whole(result: LadderResult, first_ms: float, last_ms: float, total: float) -> list[str]:
    """What all kept rungs make of a step, an epoch and the whole job: as measured from end to end, else as the last kept rung has
    it."""
    how = ""
    if (ends := result.end_to_end) is not None:
        first_ms, last_ms, total = (
            statistics.median(ends.first_ms),
            statistics.median(ends.last_ms),
            ends.gain.ratio,
        )
        how = f" ({span(ends.gain.low, ends.gain.high)})"
    ladder, setups = result.ladder, (result.baseline.tried[0], result.kept_attempt)
    now, before = duration(last_ms / 1e3), duration(first_ms / 1e3)
    lines = [
        f"{total:.1f}x in total{how}: a step takes {now} instead of {before}, {100 / total:.3g} %"
        " of the time."
    ]
    before_s, now_s = (
        epoch_s(ladder, a, ms) for a, ms in zip(setups, (first_ms, last_ms), strict=True)
    )
    if before_s is not None and now_s is not None:
        lines.append(
            f"An epoch{_validation(result)}: {duration(now_s)} instead of {duration(before_s)}."
        )
    prepared_s = sum(rung.precompute_s for rung in result.rungs if rung.kept)
    before_job, now_job = (
        job_time(ladder, setups[0], first_ms),
        job_time(ladder, setups[1], last_ms, prepared_s),
    )
    if before_job is not None and now_job is not None:
        cost = (
            "" if now_job.usd is None else f", {usd(now_job.usd)} instead of {usd(before_job.usd)}"
        )
        lines.append(
            f"The whole job: {duration(now_job.total_s)} instead of"
            f" {duration(before_job.total_s)}{cost}."
        )
    return lines


def _validation(result: LadderResult) -> str:
    """How an epoch's validation is counted."""
    c, foreseen = result.ladder.conditions, result.kept_attempt.foreseen
    if c.evaluate_every_steps is not None and c.evaluation_s:
        return " with its validation, whose time was given"
    if not c.evaluation_samples:
        return ""
    share = f"forward passes, forecast as {foreseen.evaluating_share:.0%} of a step".replace(
        "%", " %"
    )
    how = (
        share
        if foreseen.evaluating_share < 1
        else "whole steps, for want of a forecast of the forward passes"
    )
    return f" with {c.evaluation_samples:,} samples validated (as {how})"


def _without_forecast(rows: Sequence[LadderRow]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if _none(row):
            reasons.setdefault(row.no_forecast.rstrip("."), []).append(row.title)
    return [f"No forecast of {', '.join(titles)}: {reason}." for reason, titles in reasons.items()]


def _forecasts(result: LadderResult) -> list[str]:
    judged = [
        (r.title, t, t.measured, t.foreseen.interval_ms)
        for r in (result.baseline, *result.rungs)
        for t in r.tried
        if t.measured is not None and t.foreseen.interval_ms is not None
    ]
    missed = [row for row in judged if not row[1].foreseen.holds(row[2].step_time_ms)]
    held = HELD.format(held=len(judged) - len(missed), judged=len(judged))
    return [held] * bool(judged) + [
        f"{title} ({words_of(tried.setup)}): {number(measured.step_time_ms)} ms is outside"
        f" {interval(foreseen)} ms, forecast from {tried.foreseen.basis}."
        for title, tried, measured, foreseen in missed
    ]


def _noise_scale(result: LadderResult) -> list[str]:
    """What the gradient noise scale says of more data parallelism, where the trials could tell."""
    gathered = noise_scale_of(result)
    if gathered is None:
        return []
    setup, scale = gathered
    batch = setup.execution.global_batch
    if "samples" not in scale:
        few = f"{scale['steps']:.0f} steps of {batch} samples"
        return [
            f"Gradient noise scale: too large to be estimated from {few}; run more steps"
            " (--seconds)."
        ]
    samples = scale["samples"]
    measured = noise_scale(samples, scale.get("low", 0.0), scale.get("high"), scale["steps"], batch)
    return [
        f"{measured}. Beyond a global batch of that size more data parallelism saves few steps.",
        f"To the same loss: {to_the_same_loss(batch, 2 * batch, samples)}",
    ]


def head_and_rows(t: LadderTable) -> tuple[list[str], list[list[str]]]:
    """Without the columns that are empty in every row."""
    columns = {
        "rung": [r.title for r in t.rows],
        "forecast": [_timed(r.forecast_ms, r.forecast_interval_ms) or _none(r) for r in t.rows],
        f"{t.what}, measured": [_timed(r.measured_ms, r.measured_interval_ms) for r in t.rows],
        "an epoch": [duration(r.epoch_s, "") for r in t.rows],
        "whole job": [duration(r.job_s, "") for r in t.rows],
        "cost": [usd(r.cost_usd, "") for r in t.rows],
        "rung speed-up": ["" if r.ratio is None else f"{r.ratio:.2f}x" for r in t.rows],
        "total speed-up": ["" if r.total is None else f"{r.total:.2f}x" for r in t.rows],
        "of the first": ["" if r.total is None else f"{100 / r.total:.3g} %" for r in t.rows],
        "GiB": [number(r.memory_gib, "") for r in t.rows],
        "losses": [r.losses for r in t.rows],
        "result": ["" if i == 0 else "kept" if r.kept else "undone" for i, r in enumerate(t.rows)],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return list(filled), [list(row) for row in zip(*filled.values(), strict=True)]


def _none(row: LadderRow) -> str:
    """That there is no forecast, unless that was asked for."""
    return "" if not row.no_forecast or row.no_forecast in NOT_ASKED else "none"


def _timed(ms: float | None, between: Interval | None) -> str:
    if ms is None:
        return ""
    if between is None or between.low == between.high:
        return duration(ms / 1e3)
    unit, size = ("s", 1e3) if ms >= 1e3 else ("ms", 1.0)
    return f"{number(ms / size)} {unit} ({span(between.low / size, between.high / size)})"


_RANKS = {
    "rung speed-up": 1,
    "result": 2,
    "of the first": 3,
    "forecast": 4,
    "an epoch": 5,
    "losses": 6,
    "cost": 7,
    "whole job": 8,
    "GiB": 9,
}
"""The column of the highest rank gives way first where the terminal is narrow."""
MOST_KEPT = 10
"""Rungs that stay where the table is cut."""
_WORDS = ("rung", "losses", "result")


def print_ladder(t: LadderTable) -> None:
    """What came of it, the table, the speed-ups as bars, and how each rung did. In a narrow terminal the intervals give way
    first, then the columns that decide least."""
    head, rows = head_and_rows(t)
    print_lines(t.title)
    print_verdict(t.verdict[0])
    columns = [(words if name in _WORDS else Column)(name, _RANKS.get(name, 0)) for name in head]
    if not fits(columns, rows):
        timed = [i for i, name in enumerate(head) if name in ("forecast", f"{t.what}, measured")]
        rows = [
            [cell.partition(" (")[0] if i in timed else cell for i, cell in enumerate(row)]
            for row in rows
        ]
    print_table(columns, rows, keep=range(min(len(rows), MOST_KEPT)))
    chart = speedups(t)
    if chart is not None:
        lines = [
            (b.label, b.total, b.said, b.segments[0].name == "kept") for b in chart.groups[0].bars
        ]
        with in_details("the speed-ups as bars"):
            print_bars("Speed-up over the baseline", lines)
    print_notes(*t.verdict[1:-1])
    print_lines(*t.verdict[1:][-1:])


def markdown(t: LadderTable) -> str:
    head, rows = head_and_rows(t)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return (
        "\n".join([f"{t.title}", "", *lines, "", *(f"- {line}" for line in t.verdict)]).rstrip()
        + "\n"
    )


def ladder_json(result: LadderResult) -> dict[str, Any]:
    t = table_of(result)
    return {**to_jsonable(result), "rows": msgspec.to_builtins(t.rows), "verdict": list(t.verdict)}


def print_ahead(ahead: Sequence[RungPreview], texts: Sequence[Sequence[str]]) -> None:
    """A dry run: every rung's setups, the forecast of each, and what would be started."""
    rows = []
    for rung in ahead:
        for attempt in rung.attempts:
            settings, forecast = (
                ("not possible" if attempt.failure else words_of(attempt.setup)),
                attempt.foreseen,
            )
            step_time = _timed(forecast.step_ms, forecast.interval_ms) or f"none: {forecast.reason}"
            rows.append([rung.title, settings, step_time])
    print_table(
        ("rung", "setup", "forecast of a step"),
        rows,
        left=3,
        title="Nothing is measured (--dry-run)",
    )
    for text in (text for each in texts for text in each):
        console().print(text, markup=False, soft_wrap=True)  # to be copied whole


def ahead_json(ahead: Sequence[RungPreview], texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "record": "LadderPreview",
        "schema_version": 1,
        "rungs": [
            {
                "title": rung.title,
                "started": list(started),
                "alternatives": [
                    {
                        "setup": a.failure or msgspec.to_builtins(a.setup),
                        "forecast": msgspec.to_builtins(a.foreseen),
                    }
                    for a in rung.attempts
                ],
            }
            for rung, started in zip(ahead, texts, strict=True)
        ],
    }


def ladder_page(t: LadderTable, data: object) -> str:
    head, rows = head_and_rows(t)
    kept = [i > 0 and row.kept for i, row in enumerate(t.rows)]
    marked = list(zip(kept, rows, strict=True))
    return page("ladder.html", t.title, t.verdict, ladder_pictures(t), data, head=head, rows=marked)


def ladder_pictures(t: LadderTable) -> list[Picture | None]:
    faster, times = speedups(t), rung_times(t)
    foreseen = any(r.forecast_ms is not None for r in t.rows)
    return [faster, times if times.groups and (faster is None or foreseen) else None]


def speedups(t: LadderTable) -> BarChart | None:
    """Times as fast as the baseline. None where nothing but the baseline was measured."""
    measured = [r for r in t.rows if r.total is not None]
    if len(measured) < 2:
        return None
    tried, helped = plural(len(measured) - 1, "change"), sum(r.kept for r in measured) - 1
    best = t.total or max((r.total or 0.0 for r in measured if r.kept), default=1.0)
    looks = {True: ("kept", "best"), False: ("undone", "muted")}
    outcome = "was kept; it makes" if helped == 1 else "were kept; together they make"
    finding = f"{helped} of {tried} {outcome} {t.what} {best:.1f} times as fast."
    return BarChart(
        title="How many times as fast as the baseline",
        finding=finding if helped else f"None of {tried} was kept.",
        label="times as fast as the baseline",
        groups=(
            BarGroup(
                bars=tuple(
                    bar(
                        r.title,
                        f"{r.total:.2f}x{'' if r.kept else ', undone'}",
                        [(*looks[r.kept], r.total or 0.0)],
                    )
                    for r in measured
                )
            ),
        ),
        note="Measured, each on top of what was kept before it."
        + (
            " The number above compares the first and the last setup, run in turn."
            if t.total
            else ""
        ),
    )


def rung_times(t: LadderTable) -> BarChart:
    groups = []
    for r in t.rows:
        forecast = _time_bar("forecast", r.forecast_ms, r.forecast_interval_ms)
        both = forecast + _time_bar("measured", r.measured_ms, r.measured_interval_ms)
        groups += [BarGroup(title=r.title, bars=both)] if both else []
    judged = [
        i.low <= r.measured_ms <= i.high
        for r in t.rows
        if r.measured_ms is not None and (i := r.forecast_interval_ms) is not None
    ]
    return BarChart(
        title=f"Forecast and measured: {t.what}",
        finding=(
            HELD.format(held=sum(judged), judged=len(judged))
            if judged
            else "Measured, without forecasts."
        ),
        label=f"time of {t.what}",
        unit="s",
        groups=tuple(groups),
        note="Whiskers: the 90 % interval of the forecast, and that of a repeated measurement.",
    )


def _time_bar(name: str, ms: float | None, between: Interval | None) -> tuple[Bar, ...]:
    """A bar in seconds, none where there is no time; `name` is its tone, too."""
    if ms is None:
        return ()
    in_s = None
    if between is not None and between.low < between.high:
        in_s = replace(between, low=between.low / 1e3, high=between.high / 1e3)
    return (bar(name, _timed(ms, between), [(name, name, ms / 1e3)], in_s),)
