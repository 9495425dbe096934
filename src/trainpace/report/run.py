"""Report sections for tried changes: measured speed-ups by step, and equivalence of trainings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from trainpace.core.outcome import Interval
from trainpace.core.records import Record, to_jsonable
from trainpace.job import assumed_in_words
from trainpace.report.charts import Bar, BarChart, BarGroup, Picture, bar
from trainpace.report.phrases import (
    duration,
    given,
    interval,
    listed,
    noise_scale,
    number,
    percent,
    plural,
    span,
    to_the_same_loss,
    usd,
)
from trainpace.report.sections import (
    Charts,
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    Table,
    Verbatim,
    say,
    tabulate,
    words,
)
from trainpace.run import (
    NOT_ASKED,
    Change,
    Equivalence,
    LadderResult,
    LadderRow,
    RungPreview,
    StepForecast,
    WayResult,
    epoch_s,
    job_time,
    noise_scale_of,
    rows_of,
    words_of,
)
from trainpace.verbs.checks import VerifyRequest
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.request import forwarded

PAIRED = (
    "A rung's speed-up compares its trials with those of the setup before it, run alternately; the"
    " total is the product of the speed-ups of all adopted rungs. Steps, epochs and jobs are from"
    " each rung's own trials."
)
IN_TURN = (
    "The total speed-up, the epoch and the whole job in these notes compare the first and the last"
    " setup, which ran alternately at the end. In the table, a rung's speed-up compares its trials"
    " with those of the setup before it, and its total is the product of the speed-ups of all"
    " adopted rungs; steps, epochs and jobs there are from each rung's own trials."
)
HELD = "Forecast intervals that contain the measurement: {held} of {judged}."


class LadderTable(Record):
    """Table of an experiment.

    Attributes:
        what: The thing that is timed.
        verdict: Sentences. The most important one is first, and the next step is last.
        total: Speed-up of the last setup over the first, if both were measured alternately. The
            totals in the rows are products of the rungs' speed-ups.
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
    lines += [*_compared(result, rows), *_forecasts(result), *_without_forecast(rows)]
    lines += [*_noise_scale(result)]
    lines += [f"{r.title}: undone, {r.why.rstrip('.')}." for r in rows if not r.kept]
    lines += filter(None, [given(result.stopped, "Rungs not run: {}.")])
    return [*lines, f"Next: use the adopted settings in your training: {words_of(result.kept[0])}."]


def _compared(result: LadderResult, rows: Sequence[LadderRow]) -> list[str]:
    if all(r.ratio is None for r in rows):
        return []
    return [PAIRED if result.end_to_end is None else IN_TURN]


def _whole(result: LadderResult, first_ms: float, last_ms: float, total: float) -> list[str]:
    """Compare a step, an epoch and the whole job before and after all adopted rungs."""
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
        f"{total:.1f}x in total{how}: a step takes {now} instead of {before}, {100 / total:.3g}%"
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
    """Describe how an epoch's validation is counted."""
    c, foreseen = result.ladder.conditions, result.kept_attempt.foreseen
    if c.evaluate_every_steps is not None and c.evaluation_s:
        return " with its validation, whose time was given"
    if not c.evaluation_samples:
        return ""
    how = "whole steps, because forward passes have no forecast"
    if foreseen.evaluating_share < 1:
        how = f"forward passes, forecast as {percent(foreseen.evaluating_share)} of a step"
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
    """Describe what the gradient noise scale, if measured, means for more data parallelism."""
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


MOST_KEPT = 10
"""Number of rungs that stay in a truncated table."""


def ladder_table(t: LadderTable) -> Table:
    """Return the table of rungs without the columns that are empty in every row."""
    columns = (
        words("rung", cell="title"),
        Column("forecast", 4, cell=lambda r: _time(r.forecast_ms) or _none(r)),
        Column("90% interval", 11, cell=lambda r: _range(r.forecast_ms, r.forecast_interval_ms)),
        Column(f"{t.what}, measured", cell="measured_ms", form=_time),
        Column("of repeats", 10, cell=lambda r: _range(r.measured_ms, r.measured_interval_ms)),
        Column("an epoch", 5, cell=lambda r: duration(r.epoch_s, "")),
        Column("whole job", 8, cell=lambda r: duration(r.job_s, "")),
        Column("cost", 7, cell=lambda r: usd(r.cost_usd, "")),
        Column("rung speed-up", 1, cell=lambda r: given(r.ratio, "{:.2f}x")),
        Column("total speed-up", cell=lambda r: given(r.total, "{:.2f}x")),
        Column("of the first", 3, cell=lambda r: given(r.total and 100 / r.total, "{:.3g}%")),
        Column("GiB", 9, cell=lambda r: number(r.memory_gib, "")),
        words("losses", 6, cell="losses"),
        words("result", 2, cell=lambda r: _outcome(r, t.rows[0])),
    )
    adopted = [i for i, row in enumerate(t.rows) if i and row.kept]
    return tabulate(
        t.rows, columns, filled=True, keep=range(min(len(t.rows), MOST_KEPT)), best=adopted
    )


def _outcome(row: LadderRow, first: LadderRow) -> str:
    if row is first:
        return ""
    return "kept" if row.kept else "undone"


def _none(row: LadderRow) -> str:
    """Return "none" if a forecast was requested and is missing, else ""."""
    return "" if not row.no_forecast or row.no_forecast in NOT_ASKED else "none"


def _time(ms: float | None) -> str:
    return "" if ms is None else duration(ms / 1e3)


def _range(ms: float | None, between: Interval | None) -> str:
    """Format an interval in the unit of its time."""
    if ms is None or between is None or between.low == between.high:
        return ""
    unit, size = ("s", 1e3) if ms >= 1e3 else ("ms", 1.0)
    return f"{span(between.low / size, between.high / size)} {unit}"


def result_sections(result: LadderResult) -> Iterator[Section]:
    return ladder_sections(table_of(result))


def ladder_sections(t: LadderTable) -> Iterator[Section]:
    yield say(t.title)
    yield Headline(t.verdict[0])
    yield Charts(lambda: ladder_pictures(t))
    yield ladder_table(t)
    yield Notes(t.verdict[1:-1])
    yield Lines(t.verdict[1:][-1:])


def markdown(t: LadderTable) -> str:
    table = ladder_table(t)
    lines = [f"| {' | '.join(c.name for c in table.columns)} |", f"|{'---|' * len(table.columns)}"]
    lines += [f"| {' | '.join(str(c).replace('|', '/') for c in row)} |" for row in table.rows]
    notes = [f"- {line}" for line in t.verdict]
    return "\n".join([t.title, "", *lines, "", *notes]).rstrip() + "\n"


def ladder_json(result: LadderResult) -> dict[str, Any]:
    t = table_of(result)
    return {**to_jsonable(result), "rows": msgspec.to_builtins(t.rows), "verdict": list(t.verdict)}


def ahead_sections(
    ahead: Sequence[RungPreview], texts: Sequence[Sequence[str]]
) -> Iterator[Section]:
    """Show a dry run: the setups of every rung, their forecasts, and their commands."""
    attempts = [(rung.title, attempt) for rung in ahead for attempt in rung.attempts]
    columns = [
        words("rung", cell=lambda row: row[0]),
        words(
            "setup", cell=lambda row: (row[1].failure and "not possible") or words_of(row[1].setup)
        ),
        words("forecast of a step", cell=lambda row: _foreseen(row[1].foreseen)),
    ]
    yield tabulate(attempts, columns, title="Nothing is measured (--dry-run)")
    yield from (Verbatim(text) for each in texts for text in each)


def _foreseen(f: StepForecast) -> str:
    step = _time(f.step_ms) or f"none: {f.reason}"
    return step + given(_range(f.step_ms, f.interval_ms), " ({})")


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


def ladder_pictures(t: LadderTable) -> list[Picture | None]:
    faster, times = speedups(t), rung_times(t)
    foreseen = any(r.forecast_ms is not None for r in t.rows)
    return [faster, times if times.groups and (faster is None or foreseen) else None]


def speedups(t: LadderTable) -> BarChart | None:
    """Draw speed-ups over the baseline. None if only the baseline was measured."""
    measured = [r for r in t.rows if r.total is not None]
    if len(measured) < 2:
        return None
    kept = [r for r in measured if r.kept]
    tried, helped = plural(len(measured) - 1, "change"), len(kept) - 1
    best = t.total or max(map(attrgetter("total"), kept))
    outcome = "was kept; it makes" if helped == 1 else "were kept; together they make"
    finding = f"{helped} of {tried} {outcome} {t.what} {best:.1f} times as fast."
    ends = " The number above compares the first and the last setup, run alternately."
    return BarChart(
        title="How many times as fast as the baseline",
        finding=finding if helped else f"None of {tried} was kept.",
        label="times as fast as the baseline",
        groups=(BarGroup(bars=tuple(map(_speedup_bar, measured))),),
        note=f"Measured, each on top of the adopted rungs before it.{given(t.total, ends)}",
    )


def _speedup_bar(r: LadderRow) -> Bar:
    total = r.total or 0.0
    if r.kept:
        return bar(r.title, f"{total:.2f}x", [("kept", "best", total)])
    return bar(r.title, f"{total:.2f}x, undone", [("undone", "muted", total)])


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
        note="Whiskers: the 90% intervals of the forecast and of a repeated measurement.",
    )


def _time_bar(name: str, ms: float | None, between: Interval | None) -> tuple[Bar, ...]:
    """Return a bar in seconds, or () without a time. `name` is also its tone."""
    if ms is None:
        return ()
    in_s = None
    if between is not None and between.low < between.high:
        in_s = replace(between, low=between.low / 1e3, high=between.high / 1e3)
    end = _time(ms) if in_s is None else f"{_time(ms)} ({_range(ms, between)})"
    return (bar(name, end, [(name, name, ms / 1e3)], in_s),)


CAUSES: dict[Change, str] = {
    "fp32": "the number format: in fp32 they agree",
    "weight_by_samples": (
        "parts of unequal size whose mean losses are averaged without weights: weighted by samples"
        " they agree"
    ),
    "weight_by_targets": (
        "parts with unequal numbers of targets whose mean losses are averaged without weights:"
        " weighted by targets they agree"
    ),
    "sum": "a loss that sums over samples, and is averaged over parts: added up they agree",
    "no_hooks": (
        "hooks on gradients (such as clipping), which act on every part: without them they agree"
    ),
    "whole_batch_norm": (
        "BatchNorm, which normalises each part by its own statistics: with the whole batch's they"
        " agree"
    ),
    "no_dropout": "dropout, which draws different masks for parts: without it they agree",
    "fp64": "rounding that training amplifies: in fp64 they agree",
}
_MOST = 100
"""Factor by which a change must reduce a difference to count as a part of its cause."""
_LOSS_ROUNDING = {"fp32": 2e-6, "bf16": 1e-2, "amp_bf16": 1e-2}
"""Relative difference of the losses of a batch and of its parts that rounding explains."""
ADVICE: dict[Change, str] = {
    "fp32": (
        "Rounding of this size is normal for the format, and not an error of accumulation or"
        " parallelism."
    ),
    "weight_by_samples": (
        "Use a batch that divides evenly (drop_last), or weight each loss by its share of the"
        " samples."
    ),
    "weight_by_targets": (
        "Sum the loss over targets and divide by the number of targets in the whole batch."
    ),
    "sum": (
        "Do not divide the loss by the accumulation steps; with several ranks multiply it by their"
        " number, because the engine divides by it."
    ),
    "no_hooks": "Clip once a step, after the last backward pass and before the optimizer.",
    "whole_batch_norm": (
        "On GPUs torch.nn.SyncBatchNorm shares the statistics between ranks; accumulation needs"
        " GroupNorm or LayerNorm, or frozen statistics."
    ),
    "no_dropout": (
        "The masks are equally random either way, so the training is as good; only the draw"
        " differs."
    ),
    "fp64": (
        "Not an error of accumulation or parallelism: the optimizer or the model magnifies"
        " rounding."
    ),
}
WAY_IN_WORDS = {
    "accumulate": "accumulation",
    "data_parallel": "DataParallel (emulated)",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed ZeRO-2",
}


def equivalence_sections(
    result: Equivalence, asked: VerifyRequest | None = None
) -> Iterator[Section]:
    """Convert the comparison of equivalent trainings to sections."""
    q = result.question
    trained = f"{q.steps} steps of {q.batch} samples in {q.precision}"
    yield say(f"{q.model}: {trained}, against one process and the whole batch")
    lines = equivalence_verdict(result)
    if result.equal:
        first, *lines = lines
        yield Headline(f"Yes: {first[0].lower()}{first[1:]}", good=True)
    else:
        differing = listed(WAY_IN_WORDS[way.way] for way in result.ways if not way.equal)
        yield Headline(f"No: not equivalent training with {differing}.", good=False)
    columns = (
        words("trained as", cell="way", form=WAY_IN_WORDS.get),
        words("parts", cell=_parts),
        Column(
            "largest relative difference",
            cell=lambda way: "" if way.difference is None else f"{way.difference:.1e}",
        ),
        words("where", 1, cell="worst"),
        words("verdict", least=7, cell=_way_verdict),
    )
    yield tabulate(result.ways, columns)
    yield Lines(lines)
    yield from _equivalence_next(result, asked)


def _parts(way: WayResult) -> str:
    if len(way.sizes) <= 4:
        return " + ".join(map(str, way.sizes))
    return f"{len(way.sizes)} x {way.sizes[0]}"


def _way_verdict(way: WayResult) -> str:
    if way.failed:
        return "failed"
    return "equal" if way.equal else "differs"


def _equivalence_next(result: Equivalence, asked: VerifyRequest | None) -> Iterator[Next]:
    q = result.question
    if result.equal:
        beside = {"gpu": "A100", "batch": max(q.sizes("ddp"))}
        same = forwarded(asked, ForecastRequest, ["accumulate", "timeout"], beside)
        why = "a part on a GPU; for the training, every way to divide the batch is equally good"
        yield Next(["trainpace", "forecast", q.model, *same], why)
    elif not result.repeated and not any(way.failed for way in result.ways):
        same = forwarded(asked, VerifyRequest, beside={"batch": q.batch, "accumulate": q.parts})
        yield Next(["trainpace", "verify", q.model, *same], "again, after that change")


def equivalence_verdict(result: Equivalence) -> list[str]:
    q = result.question
    if result.equal:
        moved = min(way.moved or 0.0 for way in result.ways)
        return [
            f"Equivalent training: the results differ by rounding only (at most {q.tolerance:g}),"
            f" while the weights moved by {moved:.1e}."
        ]
    lines = []
    if result.repeated:
        lines.append(
            "The model does not train the same way twice, even in one process: the difference is"
            f" {result.repeated:.1e}. Something draws random numbers outside the seeds of torch,"
            " numpy and random; make that reproducible first."
        )
    lines += [f"{WAY_IN_WORDS[way.way]}: {_explanation(way, result)}" for way in result.ways]
    advised = dict.fromkeys(change for way in result.ways for change in way.cause)
    return lines + [ADVICE[change] for change in advised]


def _explanation(way: WayResult, result: Equivalence) -> str:
    if way.failed:
        return f"could not train. {way.failed}"
    if way.equal:
        return "the same training."
    if way.cause:
        return _cause(way)
    if way.difference is None:
        return "the weights or the loss became NaN: lower the learning rate."
    if way.difference <= result.question.tolerance:
        moved = f"{way.moved or 0.0:.1e}"
        return f"the weights moved by only {moved}: too little to tell. Use more --steps."
    if result.repeated:
        return "differs."
    return _part_of_cause(way) or f"no cause was found. {_first_loss(way, result)}"


def _cause(way: WayResult) -> str:
    left = next(tried.difference for tried in way.tried if tried.changes == way.cause)
    return f"{_named(way.cause)} ({left:.1e})."


def _part_of_cause(way: WayResult) -> str:
    """Return the changes that remove most of the difference, or "" if none do."""
    tried = [one for one in way.tried if one.difference is not None]
    best = min(tried, key=lambda one: one.difference or 0.0, default=None)
    if best is None or way.difference is None or _MOST * (best.difference or 0.0) > way.difference:
        return ""
    return (
        f"{_named(best.changes)} up to {best.difference:.1e}, where they differed by"
        f" {way.difference:.1e}; the rest has another cause."
    )


def _named(changes: Iterable[Change]) -> str:
    return ", and ".join(CAUSES[change] for change in changes)


def _first_loss(way: WayResult, result: Equivalence) -> str:
    if way.first_loss is None or not result.facts.losses:
        return ""
    whole, rounding = result.facts.losses[0], _LOSS_ROUNDING[result.question.precision]
    if abs(whole - way.first_loss) <= rounding * abs(whole):
        return "The first loss is still the same: the gradients are not."
    parts, once = _with_differing_digits(way.first_loss, whole)
    return (
        f"Already the first loss differs, {parts} in parts and {once} at once: the loss of a batch"
        " is not the mean of its parts' (a contrastive loss, say)."
    )


def _with_differing_digits(a: float, b: float) -> tuple[str, str]:
    """Write two different numbers with as many digits as it takes to tell them apart."""
    pairs = ((f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(3, 18))
    return next((pair for pair in pairs if pair[0] != pair[1]), (repr(a), repr(b)))


def equivalence_json(result: Equivalence) -> dict[str, Any]:
    return {**to_jsonable(result), "equal": result.equal, "verdict": equivalence_verdict(result)}
