"""Report sections for the journal: the user's own runs, and public measurements by others.

Public runs are shown next to a forecast, as a list, and compared with forecasts of this version.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainpace.core.outcome import STEP_PARTS
from trainpace.journal import printable
from trainpace.report.charts import Axis, Chart, Series, series
from trainpace.report.phrases import (
    change,
    devices,
    given,
    interval,
    listed,
    number,
    percent,
    plural,
    sentence,
    span,
    stated,
    when,
)
from trainpace.report.sections import (
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    Table,
    Verbatim,
    details,
    named,
    say,
    tabulate,
    words,
)
from trainpace.verbs.request import Request, forwarded

if TYPE_CHECKING:
    from trainpace.core.execution import Execution
    from trainpace.forecast import Near, Nearness, PublicRun, Row, Score, ScoreLine, Summary
    from trainpace.journal import (
        Comparison,
        Difference,
        Entry,
        Imported,
        Lesson,
        Lessons,
        Scores,
        Sweep,
    )


def _text(value: str | float) -> str:
    return printable(str(value))


def _batch(x: Execution) -> str:
    return f"{x.micro_batch} x {x.accumulation}" if x.accumulation > 1 else str(x.micro_batch)


def _size(run: PublicRun) -> str:
    """Return the size of a sample: image side or sequence length."""
    sizes = [(run.image_size, "px"), (run.sequence_length, "tokens")]
    return ", ".join(f"{size:,} {unit}" for size, unit in sizes if size) or "-"


_LISTED = (
    words("id", least=8, cell="{.id:.8}"),
    words("when (UTC)", 5, 16, "created_at", when),
    words("model", least=14, cell="model", form=_text),
    words("device", 2, 20, lambda e: _text(devices(e.num_devices, e.device))),
    Column("batch", cell="execution", form=_batch),
    words("precision", 4, cell="execution.precision"),
    words("optimizer", 6, cell="execution.optimizer", form=_text),
    Column("step ms", cell="step_time_ms"),
    Column("interval", 1, cell="interval_ms", form=interval),
    Column("GiB", 7, cell="peak_memory_gib"),
    words("outcome", 3, 7, "outcome"),
)
_MAYBE_ALIKE = ("device", "precision", "optimizer", "outcome")
"""Columns that are merged into one line if all rows agree."""


def entries_sections(
    entries: Sequence[Entry], total: int, place: str, asked: Request | None = None
) -> Iterator[Section]:
    """Show one line per run."""
    if not entries:
        yield Headline(f"No such runs in {place}.")
        yield say(
            "The journal stores what trainpace measure, run, look, watch and diagnose measured."
        )
        return
    shown = "" if total == len(entries) else f", {len(entries)} of them shown"
    yield Headline(f"{plural(total, 'run')} in {place}{shown}.")
    yield from _entries_table(entries)
    yield Next(
        ["trainpace", "journal", "show", entries[0].id[:8], *_place(asked)],
        "everything about one run; --limit and --offset list others",
    )


def _entries_table(entries: Sequence[Entry]) -> Iterator[Section]:
    """Show runs as a table. Columns with the same value in all rows become one line."""
    cells = {column: {column.of(entry) for entry in entries} for column in _LISTED}
    same = [
        column
        for column in _LISTED
        if column.name in _MAYBE_ALIKE and len(cells[column]) == 1 < len(entries)
    ]
    yield tabulate(entries, (column not in same and column for column in _LISTED))
    yield say(same and f"All: {', '.join(str(column.of(entries[0])) for column in same)}.")


def _place(asked: Request | None) -> list[str]:
    """Return the journal option of the request if it is not the default journal."""
    from trainpace.verbs.journal import JournalRequest

    return [] if asked is None else forwarded(asked, JournalRequest)


def sweeps_sections(sweeps: Sequence[Sweep], asked: Request | None = None) -> Iterator[Section]:
    yield Headline(f"{plural(len(sweeps), 'sweep')}.")
    columns = (
        words("id", least=8, cell="{.id:.8}"),
        words("when (UTC)", 2, 16, "created_at", when),
        words("model", least=14, cell="model", form=_text),
        words("device", 3, 20, "device", _text),
        words("batches", cell=lambda s: ", ".join(map(str, s.batches))),
        words("finished", 1, 16, lambda s: when(s.finished_at, "not finished")),
    )
    yield tabulate(sweeps, columns)
    if sweeps:
        yield Next(
            ["trainpace", "journal", "list", "--sweep", sweeps[0].id[:8], *_place(asked)],
            "the runs of one sweep",
        )


def entry_sections(e: Entry, asked: Request | None = None) -> Iterator[Section]:
    """Show everything about one run."""
    step = _step_in_words(e)
    timed = (step or "nothing was timed") if e.outcome == "ok" else printable(e.reason)
    yield Headline(f"{e.outcome}: {timed}")
    yield named("", [(_text(name), _text(value)) for name, value in _facts(e, step) if value])
    yield Next(
        ["trainpace", "journal", "compare", e.id[:8], "ID", *_place(asked)],
        "this run with another: do they differ by more than the noise?",
    )


def _step_in_words(e: Entry) -> str:
    step = "" if e.step_time_ms is None else f"{number(e.step_time_ms)} ms"
    if step and (i := e.interval_ms) is not None:
        step += f" ({span(i.low, i.high)} at {percent(i.coverage)}, {i.basis})"
    return step


def _facts(e: Entry, step: str) -> list[tuple[str, str]]:
    timed = given(len(e.step_times_ms), f"{{}} after {len(e.warmup_ms)} of warm-up")
    shape = {"sequence length": e.sequence_length, "image": e.image_size}
    parts = {name.removesuffix("_ms"): getattr(e.step, name, 0.0) for name in STEP_PARTS}
    memory = {"peak": e.peak_memory_gib, "reserved": e.reserved_memory_gib}
    always = ("micro_batch", "precision", "optimizer")
    return [
        ("id", e.id),
        ("made", f"{e.created_at} by {e.kind}"),
        ("model", e.model),
        ("device", devices(e.num_devices, e.device)),
        ("execution", _with_names(stated(e.execution, always))),
        ("shape", _with_names(shape.items())),
        ("mode", e.mode),
        ("loss", given(e.loss)),
        ("outcome", f"{e.outcome}{given(e.reason, ': {}')}"),
        ("step", step),
        ("parts", _with_names((name, given(ms and number(ms))) for name, ms in parts.items())),
        ("steps timed", timed),
        ("throughput", given(number(e.samples_per_second, ""), "{} samples/s")),
        (
            "memory",
            _with_names((name, given(number(gib, ""), "{} GiB")) for name, gib in memory.items()),
        ),
        ("forecast", _forecast(e)),
        ("sweep", given(e.sweep)),
        ("seed", "" if e.seed is None else str(e.seed)),
        ("commit", given(e.commit)),
        ("command", e.command),
        ("source", e.source),
        ("workload", given(e.workload_key)),
        *sorted(e.environment.items()),
        ("notes", e.notes),
    ]


def _with_names(items: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items if value not in (None, "", 0))


def comparison_sections(c: Comparison) -> Iterator[Section]:
    """Convert a comparison of two runs or sweeps to sections."""
    yield Headline(_verdict(c))
    if not c.conditions:
        yield say("A and B ran under the same conditions, as far as these were recorded.")
    for head, rows in (
        (words("differs"), c.conditions),
        (words("part, ms"), c.parts_ms),
        (words("memory, GiB"), c.memory_gib),
    ):
        kind = words if rows is c.conditions else Column
        yield Table((head, kind("A"), kind("B")), [_difference(d) for d in rows])
    yield tabulate(c.ratios, _RATIOS)
    if c.samples_per_second is not None and len(c.ratios) > 1:
        _, a, b = _difference(c.samples_per_second)
        yield say(f"Best throughput: A {a}, B {b} samples/s.")


def imported_sections(
    imported: Sequence[Imported], place: str, asked: Request | None = None
) -> Iterator[Section]:
    new = sum(one.new for one in imported)
    there = sum(one.already_there for one in imported)
    if imported:
        yield Headline(f"{plural(new, 'new run')} in {place}, {there:,} there already.")
    for one in imported:
        left_out = given(sum(one.skipped.values()), ", {:,} skipped")
        head = f"{one.file} ({one.format}): {one.new:,} new, {one.already_there:,} there already"
        reasons = (f"  {n:,} skipped: {printable(reason)}" for reason, n in one.skipped.items())
        yield Notes([f"{head}{left_out}", *reasons])
        if one.lessons is not None:
            yield from lessons_sections(one.lessons)
    if imported:
        yield Next(["trainpace", "journal", "list", *_place(asked)], "the newest runs")


def scores_sections(scores: Scores, asked: Request | None = None) -> Iterator[Section]:
    """Convert scores of forecasts to sections."""
    s = scores.overall
    if s.mean_pct is None:
        yield Headline("No run in the journal has a forecast that was made before it.")
        yield Next(
            ["trainpace", "measure", "resnet50", *_place(asked)],
            "measures resnet50 beside a forecast; give FILE.py:FUNCTION for a model of your own",
        )
        return
    yield Headline(f"{s.n:,} forecasts {_off_by('were', s.mean_pct, s.median_pct, s.bias_pct)}.")
    for title, group in (("device", scores.by_device), ("model", scores.by_model)):
        columns = (
            words(title, least=16, cell="name", form=_text),
            Column("runs", cell="{.n}"),
            _errors("mean error %", 0, "mean_pct"),
            _errors("median %", 1, "median_pct"),
            _errors("bias %", 2, "bias_pct"),
            _errors("in interval %", 0, "coverage_pct"),
        )
        yield tabulate(group, columns)
    if s.coverage_pct is not None:
        inside = f"{s.coverage_pct:.0f}% of the measured steps were inside it"
        yield say(f"Of {s.n_with_interval:,} with an interval, {inside}.")
    if scores.lately.n < s.n and scores.lately.mean_pct is not None:
        last = f"The last {scores.lately.n} were off by {scores.lately.mean_pct:.1f}% on average."
        yield say(last)
    yield Next("trainpace calibrate", "measures this machine again, on which its forecasts rest")


def _forecast(e: Entry) -> str:
    if e.forecast_ms is None:
        return ""
    low, high = e.forecast_low_ms, e.forecast_high_ms
    ends = "" if low is None else f" ({span(low, high or math.inf)})"
    off = f", off by {change(e.forecast_ms / e.step_time_ms, 1)}" if e.step_time_ms else ""
    basis = f", {e.forecast_basis}" if e.forecast_basis else ""
    return f"{number(e.forecast_ms)} ms{ends}{off}{basis}"


def _difference(d: Difference) -> tuple[str, str, str]:
    a, b = (number(v) if isinstance(v, float) else _text(v) or "-" for v in (d.a, d.b))
    return _text(d.name), a, b


_NOISE = {None: "noise unknown", True: "beyond the noise", False: "within the noise"}
_RATIOS = (
    Column("batch", cell="{.batch}"),
    Column("A ms", cell="a_ms"),
    Column("B ms", cell="b_ms"),
    Column("B / A", cell="{.ratio:.3f}"),
    Column("90% interval", cell=lambda r: "-" if r.low is None else f"{r.low:.3f} to {r.high:.3f}"),
    words("", 1, cell="beyond_noise", form=_NOISE.get),
)


def _verdict(c: Comparison) -> str:
    if c.median_ratio is None:
        return "Nothing was timed on both sides, so the two cannot be compared."
    per_cent = 100 * (c.median_ratio - 1)
    answer = f"B takes {abs(per_cent):.1f}% {'more' if per_cent > 0 else 'less'} time per step"
    beyond = [r.beyond_noise for r in c.ratios]
    if not any(beyond):
        unknown = all(one is None for one in beyond)
        return (
            f"{answer}; the noise is unknown."
            if unknown
            else f"{answer}, which is within the noise of the steps."
        )
    where = "" if len(beyond) == 1 else f" at {sum(map(bool, beyond))} of {len(beyond)} batch sizes"
    return (
        f"{answer}, beyond the noise of the steps{where}; runs on different days may differ more."
    )


WORST = 10


def validation_sections(
    rows: Sequence[Row], overall: Summary, groups: Mapping[str, Sequence[Summary]]
) -> Iterator[Section]:
    """Convert forecasts of measured runs to sections: errors overall and by group."""
    if overall.mape is None:
        yield Headline(f"No: none of {overall.unsupported} runs could be forecast.", good=False)
    else:
        c = overall.coverage
        held = "" if c is None else f"; {c:.0f}% of the measurements lie in the 90% interval"
        yield Headline(
            f"{overall.n:,} forecasts"
            f" {_off_by('are', overall.mape, overall.median, overall.bias)}{held}."
        )
    for name, group in groups.items():
        shown = list(filter(lambda s: s.n or s.unsupported, group))
        if name == "file":
            yield _summaries(name, [*shown, overall])
        else:
            yield from details(f"the errors by {name}", _summaries(name, shown))
    yield _worst(rows)
    reasons = Counter(row.unsupported for row in rows if row.unsupported)
    yield Notes([f"{count} not forecast: {reason}" for reason, count in reasons.most_common(8)])
    yield say(
        "Errors are (forecast - measured) / measured. In interval: share of measurements inside"
        " the forecast's 90% interval."
    )


def _summaries(name: str, group: Sequence[Summary]) -> Table:
    columns = (
        words(name, least=16, cell="name"),
        Column("runs", cell="{.n}"),
        _errors("mean %", 0, "mape"),
        _errors("median %", 0, "median"),
        _errors("95th %", 2, "p95"),
        _errors("bias %", 1, "bias"),
        _errors("in interval %", 0, "coverage"),
        _errors("half width %", 4, "half_width"),
        _errors("memory %", 3, "memory_mape"),
    )
    return tabulate(group, columns)


def _worst(rows: Sequence[Row]) -> Table:
    """Show the runs with the largest errors."""
    known = [row for row in rows if row.error_pct is not None]
    known.sort(key=lambda row: -abs(row.error_pct or 0.0))
    columns = (
        words("worst", least=16, cell="model"),
        words("GPU", cell=lambda row: devices(row.num_gpus, row.gpu)),
        words("precision", 1, cell="precision"),
        Column("batch", 2, cell="{.batch}"),
        Column("measured ms", cell="measured_ms"),
        Column("forecast ms", cell="forecast_ms"),
        Column("error %", cell="{.error_pct:+.0f}"),
    )
    return tabulate(known[:WORST], columns)


def _off_by(were: str, mean: float, median: float | None, bias: float | None) -> str:
    assert median is not None
    assert bias is not None
    too = "long" if bias > 0 else "short"
    return (
        f"{were} off by {mean:.1f}% on average (median {median:.1f}%, typically {abs(bias):.1f}%"
        f" too {too})"
    )


def _errors(name: str, rank: int, field: str) -> Column:
    """Return a column with a percentage of each record."""
    return Column(name, rank, cell=field, form=given_pct)


def given_pct(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)


MOST_SHOWN = 20
MOST_BATCHES = 6


def shared_sections(
    text: str, runs: int, left_out: Mapping[str, int], written: bool = True, again: str = ""
) -> Iterator[Section]:
    """Show the exact content of a shared file.

    If the file is not written yet, `again` is the command that writes it.
    """
    yield Verbatim(text.removesuffix("\n"))
    yield Lines(shared_notes(runs, left_out, written))
    if again:
        yield Next(again, "write this to a file, which you may hand on")


def shared_notes(runs: int, left_out: Mapping[str, int], written: bool = True) -> list[str]:
    """Return notes about the contents of a shared file, and about runs that it omits."""
    count = plural(runs, "run")
    if written:
        note = f"The file holds nothing else: {count}. Nothing is sent anywhere; you may share it."
    else:
        note = f"The file would hold nothing else: {count}. Nothing is written or sent anywhere."
    return [
        note,
        *(f"Not included: {plural(n, 'run')} {reason}." for reason, n in left_out.items()),
    ]


def lessons_sections(lessons: Lessons) -> Iterator[Section]:
    """Show a file of shared runs: its contents, its oddities, and the forecasts that it changes."""
    columns = (
        words("model", least=14, cell="model"),
        words("device", least=10, cell="device"),
        Column("new", cell="{.new}"),
        words("batches", cell=lambda one: listed(one.batches, MOST_BATCHES)),
        Column("forecast off %", cell=lambda one: given_pct(one.forecast_off_pct, "{:+.0f}")),
    )
    yield tabulate(lessons.by[:MOST_SHOWN], columns)
    if len(lessons.by) > MOST_SHOWN:
        yield say(f"and {len(lessons.by) - MOST_SHOWN:,} more pairs of model and device")
    yield Notes([*_corrected(lessons.by), *_odd(lessons)])
    if lessons.unchecked:
        yield say(
            f"{plural(lessons.unchecked, 'new run')} could not be compared with a forecast of"
            " this version: the model is the sharer's own, or could not be traced here."
        )


def _corrected(lessons: Sequence[Lesson]) -> list[str]:
    teaching = [one for one in lessons if one.corrects]
    if not teaching:
        return ["No forecast will be corrected by them."] if lessons else []
    of_models = sorted({one.model for one in teaching if one.traced})
    cards = sorted({one.device for one in teaching})
    named = "forecasts of {} will be corrected by them, the more the nearer the card; "
    named = given(listed(of_models, MOST_BATCHES), named)
    others = f"forecasts of other models on {listed(cards, MOST_BATCHES)}"
    return [sentence(f"{named}{others} will be corrected a little.")]


def _odd(lessons: Lessons) -> list[str]:
    if not lessons.odd:
        return []
    n, verb = len(lessons.odd), "is" if len(lessons.odd) == 1 else "are"
    head = f"{plural(n, 'run')} {verb} 3 times off the forecast or more"
    kept = (
        ", imported nevertheless:"
        if lessons.accepted_odd
        else "; not imported, --accept-odd imports them too:"
    )
    lines = [
        f"  {odd.model} on {odd.device}, batch {odd.batch:,}, {odd.precision}:"
        f" {number(odd.measured_ms)} ms, forecast {number(odd.forecast_ms)} ms"
        for odd in lessons.odd[:MOST_SHOWN]
    ]
    more = [f"  and {n - MOST_SHOWN:,} more"] if n > MOST_SHOWN else []
    return [head + kept, *lines, *more]


MOST_DIFFERENCES = 3
TITLE = "Measured by others"
_EVIDENCE = (
    words("measured by others", least=20),
    Column("measured"),
    Column("forecast of the same"),
    words("beside this answer", 1, 20),
    words("source", 2, 16),
    words("licence", 3, 8),
    words("trust", 4, 5),
)


def evidence_sections(evidence: Sequence[Nearness]) -> Iterator[Section]:
    """Show the nearest public runs with the forecasts of the same runs.

    If no run is near, name the closest one.
    """
    shown = [near for nearness in evidence for near in nearness.runs]
    far = [n.closest for n in evidence if not n.runs and n.closest is not None]
    rows = [_evidence_row(near) for near in (*shown, *far)]
    in_fit = "* The constants of the forecast were fitted on this run, among others."
    notes = [in_fit] if any(near.run.in_fit for near in (*shown, *far)) else []
    yield from details("measurements by others", Table(_EVIDENCE, rows), Lines(notes))


def nearest_in_brief(evidence: Sequence[Nearness]) -> list[str]:
    """Return the nearest run in one line, or [] if no run is near."""
    near = next((near for nearness in evidence for near in nearness.runs), None)
    if near is None:
        return []
    measured, forecast = _figures_of(near)
    more = [word for word in near.unlike if not _IN_WHAT.search(word)]
    against = f", forecast {forecast.rstrip('*')}" if forecast != "-" else ""
    in_fit = " It was in the fit." if near.run.in_fit else ""
    return [f"{TITLE}: {what(near.run)}: {'; '.join([measured + against, *more])}.{in_fit}"]


def _figures_of(near: Near) -> tuple[str, str]:
    """Return the measured rate and its forecast. "*" marks a run that the model was fitted on."""
    run = near.run
    measured, unit = rate(run, run.step_time_ms)
    if run.forecast_ms is None:
        return f"{number(measured)} {unit}", "-"
    forecast, _ = rate(run, run.forecast_ms)
    star = "*" if run.in_fit else ""
    return f"{number(measured)} {unit}", f"{number(forecast)} ({change(forecast / measured)}){star}"


def _evidence_row(near: Near) -> list[str]:
    run = near.run
    source = f"{run.source}{f', {run.date}' if run.date else ''}: {run.url}"
    beside = f"{'' if near.is_near else 'not near: '}{differences(near)}"
    return [what(run), *_figures_of(near), beside, source, run.licence, run.trust]


def what(run: PublicRun) -> str:
    """Describe the main conditions of a run."""
    mode = {"inference": ", forward", "forward_backward": ", no optimizer"}.get(run.mode, "")
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision}{mode}"


def rate(run: PublicRun, ms: float) -> tuple[float, str]:
    """Return (number, unit) for a step time.

    The number is the throughput of all GPUs, or milliseconds if the batch size is unknown.
    """
    if not run.global_batch:
        return ms, "ms per step"
    samples = 1e3 * run.global_batch / ms
    if run.sequence_length:
        return samples * run.sequence_length, "tokens/s"
    return samples, "images/s" if run.image_size else "samples/s"


def differences(near: Near) -> str:
    """Describe what a run has in common with the request, and the largest differences."""
    return ", ".join((*near.alike, *near.unlike[:MOST_DIFFERENCES])) or "the same"


_IN_WHAT = re.compile(
    r"^(batch [\d,]+|[\d,]+ GPUs?|\w*(16|32|8)) instead of | card\b|^a card|a forward pass|the"
    r" optimizer$"
)
"""Differences that the text of `what` already shows."""


MOST_POINTS = 3000
"""Maximum points of an accuracy chart. More would overlap, and the page would exceed a megabyte."""
_PUBLIC_LISTED = (
    words("id", least=17, cell="public:{.id}"),
    words("model", least=14, cell="model"),
    words("device", 2, 12, lambda run: devices(run.gpus, run.device)),
    Column("batch", cell=lambda run: given(run.micro_batch, "{:,}") or "-"),
    Column("size", 1, cell=_size),
    words("precision", 3, cell=lambda run: run.precision or "-"),
    words("mode", 5, cell="mode"),
    Column("step ms", cell="step_time_ms"),
    Column("forecast ms", 1, cell="forecast_ms"),
    Column("off %", cell=lambda run: given_pct(run.error_pct, f"{{:+.0f}}{'*' * run.in_fit}")),
    words("source", 4, 16, "source"),
)
TRUST = {
    "A": "repeated or well documented, under stated conditions",
    "B": "single readings, a vendor's own figures, or conditions partly inferred",
    "C": "read off a chart, or derived from another figure",
}


def public_runs_sections(runs: Sequence[PublicRun], total: int) -> Iterator[Section]:
    if not runs:
        yield Headline("No such runs in the public journal.")
        yield Next("trainpace journal list --public", "all of them")
        return
    shown = "" if total == len(runs) else f", {len(runs)} of them shown"
    yield Headline(f"{plural(total, 'run')} of others in the public journal{shown}.")
    yield tabulate(runs, _PUBLIC_LISTED)
    if any(run.in_fit for run in runs):
        yield say("* Trainpace's constants were fitted on this run, so its error says little.")
    yield Next(
        f"trainpace journal show public:{runs[0].id}",
        "everything about one run, with its source and licence",
    )


def public_facts(run: PublicRun) -> list[tuple[str, str]]:
    """Return (name, value) of all known facts about a run, including source and license."""
    r, unknown = run, "not stated"
    in_fit = {True: "yes: constants were fitted on it, so its error says little", False: "no"}
    facts = [
        ("id", f"public:{r.id}"),
        ("model", f"{r.model} ({r.model_kind})"),
        ("device", devices(r.gpus, r.device)),
        ("nodes", given(r.nodes if r.nodes > 1 else 0)),
        ("mode", r.mode),
        ("micro-batch", given(r.micro_batch, "{:,}") or unknown),
        ("accumulation", given(r.accumulation if r.accumulation > 1 else 0)),
        ("sequence length", given(r.sequence_length)),
        ("image", given(r.image_size)),
        ("precision", r.precision or unknown),
        ("optimizer", given(r.optimizer)),
        ("compile", r.compile),
        ("memory format", r.memory_format),
        ("parallelism", given(r.parallelism)),
        ("software", r.software),
        ("throughput", given(number(r.samples_per_second, ""), "{} samples/s")),
        ("memory", given(number(r.peak_memory_gib, ""), "peak {} GiB")),
        ("forecast", _forecast_of(r)),
        ("assumed for it", r.assumed),
        ("in the fit", in_fit[r.in_fit]),
        ("source", r.source),
        ("address", r.url),
        ("licence", r.licence),
        ("date", r.date or unknown),
        ("trust", f"{r.trust}{given(TRUST.get(r.trust), ': {}')}"),
        ("notes", r.notes),
    ]
    return [(name, value) for name, value in facts if value]


def _forecast_of(r: PublicRun) -> str:
    if r.forecast_ms is None or r.low_ms is None or r.high_ms is None:
        return r.why_no_forecast
    between = span(r.low_ms, r.high_ms)
    off = r.error_pct or 0.0
    return f"{number(r.forecast_ms)} ms (90% interval {between}), off by {off:+.0f}%"


def public_run_sections(run: PublicRun, asked: Request | None = None) -> Iterator[Section]:
    from trainpace.verbs.journal import JournalRequest, has_counterpart

    yield Headline(f"A step took {number(run.step_time_ms)} ms, as {run.source} measured it.")
    yield named("", public_facts(run))
    if isinstance(asked, JournalRequest) and has_counterpart(run, asked):
        command = ["trainpace", "journal", "compare", f"public:{run.id}", "mine", *_place(asked)]
        yield Next(command, "with your newest run that is most like it")


def public_score_sections(score: Score) -> Iterator[Section]:
    """Show the accuracy of the installed version, first on runs that no constant was fitted on."""
    s = score.not_in_fit if score.not_in_fit.n else score.in_fit
    if s.mape is None or s.median is None:
        yield Headline("None of the public runs can be forecast.", good=False)
        return
    which = "no constant was" if s is score.not_in_fit else "constants were"
    inside = (
        ""
        if s.coverage is None
        else f"; {s.coverage:.0f}% of the measured times lie inside the 90% interval"
    )
    yield Headline(
        f"{s.n:,} forecasts of public runs that {which} fitted on are off by {s.mape:.1f}% on"
        f" average (median {s.median:.1f}%){inside}."
    )
    yield say(
        "Columns: runs that no constant was fitted on, then fitted runs; inside: their share in"
        " the 90% interval."
    )
    yield _score_table("what was run", (*score.by_way, _whole(score)))
    yield from details(
        "cards, kinds of models and sources",
        _score_table("card", score.by_card),
        _score_table("kind of model", score.by_model_kind),
        _score_table("source", score.by_source),
    )
    yield say(
        score_meaning(),
        f"{score.without_forecast:,} public runs have no forecast; show public:ID says why.",
    )
    yield Next(
        "trainpace serve", "the same as a chart, by card and kind of model, on the page Accuracy"
    )


def _score_table(title: str, lines: Sequence[ScoreLine]) -> Table:
    columns = (
        words(title, least=16, cell="name"),
        Column("runs", cell=lambda line: given(line.not_in_fit.n, "{:,}") or "-"),
        _errors("mean %", 0, "not_in_fit.mape"),
        _errors("median %", 0, "not_in_fit.median"),
        _errors("inside %", 0, "not_in_fit.coverage"),
        Column("fitted runs", 1, cell=lambda line: given(line.in_fit.n, "{:,}") or "-"),
        _errors("their mean %", 1, "in_fit.mape"),
        _errors("their median %", 2, "in_fit.median"),
        _errors("their inside %", 1, "in_fit.coverage"),
    )
    return tabulate(lines, columns)


def score_meaning() -> str:
    """Explain the two halves of the accuracy table."""
    return (
        "Not in the fit: no constant of Trainpace was fitted on these runs. A run of your own"
        " should be forecast about as well as those of its kind: look at the lines of what you run,"
        " of your card and of your kind of model. In the fit: constants or intervals were fitted on"
        " these runs, so their errors are smaller than yours will be."
    )


def _whole(score: Score) -> ScoreLine:
    from trainpace.forecast import ScoreLine

    return ScoreLine(name="all", in_fit=score.in_fit, not_in_fit=score.not_in_fit)


def accuracy_chart(runs: Sequence[PublicRun]) -> Chart | None:
    """Draw the measured and forecast step of every run. None for fewer than two runs."""
    known = [(run, run.forecast_ms) for run in runs if run.forecast_ms]
    if len(known) < 2:
        return None
    every = math.ceil(len(known) / MOST_POINTS)
    times = [ms for run, forecast_ms in known for ms in (run.step_time_ms, forecast_ms)]
    low, high = min(times) / 1.3, max(times) * 1.3
    near = sum(0.8 <= forecast_ms / run.step_time_ms <= 1.25 for run, forecast_ms in known)
    shown = [run for run, _ in known[::every]]
    drawn = (
        *_diagonals(low, high),
        _points("in the fit", "muted", shown, in_fit=True),
        _points("not in the fit", "measured", shown, in_fit=False),
    )
    axis = Axis(label="measured step", unit="ms", scale="log10", low=low, high=high)
    return Chart(
        title="Forecast against measured",
        finding=(
            f"{near:,} of {plural(len(known), 'forecast')} lie from a fifth below to a quarter"
            " above what was measured."
        ),
        x=axis,
        y=replace(axis, label="forecast step"),
        series=tuple(filter(lambda one: one.x, drawn)),
        nearest="point",
        note=given(every > 1 and every, "One run in {} is drawn."),
    )


def _diagonals(low: float, high: float) -> list[Series]:
    lines = (
        ("as measured", "forecast", 1.0),
        ("a quarter longer", "ideal", 1.25),
        ("a fifth shorter", "ideal", 0.8),
    )
    return [
        series(name, "line", tone, [(at, at * factor) for at in (low, high)], dashed=factor != 1.0)
        for name, tone, factor in lines
    ]


def _points(name: str, tone: str, runs: Sequence[PublicRun], in_fit: bool) -> Series:
    shown = [run for run in runs if run.in_fit is in_fit]
    points = [(run.step_time_ms, run.forecast_ms) for run in shown]
    return series(name, "points", tone, points, labels=tuple(map(_label, shown)))


def _label(run: PublicRun) -> str:
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision} ({run.id})"
