"""Public measurements: beside a forecast, as a list, and against the forecasts of the installed version."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainpace.report.charts import Axis, Chart, Series, series
from trainpace.report.phrases import change, devices, given, number, plural, span
from trainpace.report.sections import (
    Column,
    Headline,
    Lines,
    Named,
    Next,
    Section,
    Table,
    details,
    words,
)
from trainpace.verbs.request import forwarded

if TYPE_CHECKING:
    from trainpace.forecast import Near, Nearness, PublicRun, Score, ScoreLine, Summary
    from trainpace.verbs.request import Request

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
    """Show the nearest runs with the forecast of the same run. If none is near, name the nearest one."""
    shown = [near for nearness in evidence for near in nearness.runs]
    far = [n.closest for n in evidence if not n.runs and n.closest is not None]
    rows = [_evidence_row(near) for near in (*shown, *far)]
    in_fit = "* The constants of the forecast were fitted on this run, among others."
    notes = [in_fit] if any(near.run.in_fit for near in (*shown, *far)) else []
    yield from details("measurements by others", Table(_EVIDENCE, rows), Lines(notes))


def nearest_in_brief(evidence: Sequence[Nearness]) -> list[str]:
    """Return the nearest run in a line. Nothing if no run is near."""
    near = next((near for nearness in evidence for near in nearness.runs), None)
    if near is None:
        return []
    measured, forecast = _figures_of(near)
    more = [word for word in near.unlike if not _IN_WHAT.search(word)]
    against = f", forecast {forecast.rstrip('*')}" if forecast != "-" else ""
    in_fit = " It was in the fit." if near.run.in_fit else ""
    return [f"{TITLE}: {what(near.run)}: {'; '.join([measured + against, *more])}.{in_fit}"]


def _figures_of(near: Near) -> tuple[str, str]:
    """Return the measured rate and its forecast, marked * if the run was in the fit."""
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
    """Return the main conditions of a run."""
    mode = {"inference": ", forward", "forward_backward": ", no optimizer"}.get(run.mode, "")
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision}{mode}"


def rate(run: PublicRun, ms: float) -> tuple[float, str]:
    """Return (number, unit) of a step: throughput of all GPUs, or milliseconds if the batch is unknown."""
    if not run.global_batch:
        return ms, "ms per step"
    samples = 1e3 * run.global_batch / ms
    if run.sequence_length:
        return samples * run.sequence_length, "tokens/s"
    return samples, "images/s" if run.image_size else "samples/s"


def differences(near: Near) -> str:
    """Return what makes a run alike, and its largest differences."""
    return ", ".join((*near.alike, *near.unlike[:MOST_DIFFERENCES])) or "the same"


_IN_WHAT = re.compile(
    r"^(batch [\d,]+|[\d,]+ GPUs?|\w*(16|32|8)) instead of | card\b|^a card|a forward pass|the"
    r" optimizer$"
)
"""Differences that `what` shows already."""


MOST_POINTS = 3000
"""Points of an accuracy chart. More would overlap, and make a page of a megabyte."""
_LISTED = (
    words("id", least=17),
    words("model", least=14),
    words("device", 2, least=12),
    Column("batch"),
    Column("size", 1),
    words("precision", 3),
    words("mode", 5),
    Column("step ms"),
    Column("forecast ms", 1),
    Column("off %"),
    words("source", 4, least=16),
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
    yield Table(_LISTED, [_line(run) for run in runs])
    if any(run.in_fit for run in runs):
        yield Lines(["* Trainpace's constants were fitted on this run, so its error says little."])
    yield Next(
        f"trainpace journal show public:{runs[0].id}",
        "everything about one run, with its source and licence",
    )


def _line(run: PublicRun) -> tuple[str, ...]:
    off = "-" if run.error_pct is None else f"{run.error_pct:+.0f}{'*' * run.in_fit}"
    batch = f"{run.micro_batch:,}" if run.micro_batch else "-"
    return (
        f"public:{run.id}",
        run.model,
        devices(run.gpus, run.device),
        batch,
        _size(run),
        run.precision or "-",
        run.mode,
        number(run.step_time_ms),
        number(run.forecast_ms),
        off,
        run.source,
    )


def _size(run: PublicRun) -> str:
    """Return the size of a sample: the side of its image, or its length."""
    sizes = [(run.image_size, "px"), (run.sequence_length, "tokens")]
    return ", ".join(f"{size:,} {unit}" for size, unit in sizes if size) or "-"


def public_facts(run: PublicRun) -> list[tuple[str, str]]:
    """Return (name, value) of everything that is known of a run, including source and licence."""
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
    from trainpace.verbs.journal import JournalRequest

    yield Headline(f"A step took {number(run.step_time_ms)} ms, as {run.source} measured it.")
    yield Named("", public_facts(run))
    yield Next(
        [
            *("trainpace", "journal", "compare", f"public:{run.id}", "mine"),
            *forwarded(asked, JournalRequest),
        ],
        "with your newest run that is most like it",
    )


def public_score_sections(score: Score) -> Iterator[Section]:
    """Show the accuracy of the installed version, first of runs that no constant was fitted on."""
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
    yield Lines(
        [
            "Columns: runs that no constant was fitted on, then fitted runs; inside: their share in"
            " the 90% interval."
        ]
    )
    yield _score_table("what was run", (*score.by_way, _whole(score)))
    yield from details(
        "cards, kinds of models and sources",
        _score_table("card", score.by_card),
        _score_table("kind of model", score.by_model_kind),
        _score_table("source", score.by_source),
    )
    yield Lines(
        [
            score_meaning(),
            f"{score.without_forecast:,} public runs have no forecast; show public:ID says why.",
        ]
    )
    yield Next(
        "trainpace serve", "the same as a chart, by card and kind of model, on the page Accuracy"
    )


def _score_table(title: str, lines: Sequence[ScoreLine]) -> Table:
    columns = (
        words(title, least=16),
        Column("runs"),
        Column("mean %"),
        Column("median %"),
        Column("inside %"),
        Column("fitted runs", 1),
        Column("their mean %", 1),
        Column("their median %", 2),
        Column("their inside %", 1),
    )
    return Table(
        columns, [(line.name, *_figures(line.not_in_fit), *_figures(line.in_fit)) for line in lines]
    )


def score_meaning() -> str:
    """Explain the two halves of an accuracy table."""
    return (
        "Not in the fit: no constant of Trainpace was fitted on these runs. A run of your own"
        " should be forecast about as well as those of its kind: look at the lines of what you run,"
        " of your card and of your kind of model. In the fit: constants or intervals were fitted on"
        " these runs, so their errors are smaller than yours will be."
    )


def _whole(score: Score) -> ScoreLine:
    from trainpace.forecast import ScoreLine

    return ScoreLine(name="all", in_fit=score.in_fit, not_in_fit=score.not_in_fit)


def _figures(s: Summary) -> tuple[str, ...]:
    shares = ("-" if value is None else f"{value:.1f}" for value in (s.mape, s.median, s.coverage))
    return (f"{s.n:,}" if s.n else "-", *shares)


def accuracy_chart(
    runs: Sequence[PublicRun], title: str = "Forecast against measured"
) -> Chart | None:
    """Draw every run at its measured and its forecast step. None for fewer than two runs."""
    known = [run for run in runs if run.forecast_ms]
    if len(known) < 2:
        return None
    step = math.ceil(len(known) / MOST_POINTS)
    times = [ms for run in known for ms in (run.step_time_ms, run.forecast_ms or run.step_time_ms)]
    ends = (min(times) / 1.3, max(times) * 1.3)
    near = sum(0.8 <= (run.forecast_ms or 0.0) / run.step_time_ms <= 1.25 for run in known)
    shown = known[::step]
    points = [
        _points("in the fit", "muted", [run for run in shown if run.in_fit]),
        _points("not in the fit", "measured", [run for run in shown if not run.in_fit]),
    ]
    diagonals = [
        series(name, "line", tone, [(at, at * factor) for at in ends], dashed=tone == "ideal")
        for name, tone, factor in (
            ("as measured", "forecast", 1.0),
            ("a quarter longer", "ideal", 1.25),
            ("a fifth shorter", "ideal", 0.8),
        )
    ]
    low, high = ends
    return Chart(
        title=title,
        finding=(
            f"{near:,} of {plural(len(known), 'forecast')} lie from a fifth below to a quarter"
            " above what was measured."
        ),
        x=Axis(label="measured step", unit="ms", scale="log10", low=low, high=high),
        y=Axis(label="forecast step", unit="ms", scale="log10", low=low, high=high),
        series=(*diagonals, *(some for some in points if some.x)),
        nearest="point",
        note=f"One run in {step} is drawn." if step > 1 else "",
    )


def _points(name: str, tone: str, runs: Sequence[PublicRun]) -> Series:
    points = [(run.step_time_ms, run.forecast_ms) for run in runs]
    return series(name, "points", tone, points, labels=tuple(map(_label, runs)))


def _label(run: PublicRun) -> str:
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision} ({run.id})"
