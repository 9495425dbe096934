"""The public journal for the terminal, and how far its runs are from their forecasts, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from trainpace.report.charts import Axis, Chart, Series
from trainpace.report.phrases import devices, number, plural, span
from trainpace.report.screen import in_details
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_named,
    print_next,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried

if TYPE_CHECKING:
    from trainpace.forecast import PublicRun, Score, ScoreLine, Summary
    from trainpace.verbs.request import Request

MOST_POINTS = 3000
"""More would lie on top of each other, and make a page of a megabyte."""

_IN_DETAILS = ("card", "kind of model", "source")
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


def print_public_runs(runs: Sequence[PublicRun], total: int) -> None:
    if not runs:
        print_verdict("No such runs in the public journal.")
        print_next("trainpace journal list --public", "all of them")
        return
    shown = "" if total == len(runs) else f", of which {len(runs)} are shown"
    print_verdict(f"{plural(total, 'run')} of others in the public journal{shown}.")
    print_table(_LISTED, [_line(run) for run in runs])
    if any(run.in_fit for run in runs):
        print_lines(
            "* constants of Trainpace were fitted on such a run, so that its error says little."
        )
    print_next(
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
    """Of a sample: the side of its image, or its length."""
    sizes = [(run.image_size, "px"), (run.sequence_length, "tokens")]
    return ", ".join(f"{size:,} {unit}" for size, unit in sizes if size) or "-"


def public_facts(run: PublicRun) -> list[tuple[str, str]]:
    """(name, value) of everything that is known of a run, its source and licence included."""
    r = run
    forecast = r.why_no_forecast
    if r.forecast_ms is not None and r.low_ms is not None and r.high_ms is not None:
        forecast = (
            f"{number(r.forecast_ms)} ms ({span(r.low_ms, r.high_ms)} at 90 %), off by"
            f" {r.error_pct or 0.0:+.0f} %"
        )
    facts = [
        ("id", f"public:{r.id}"),
        ("model", f"{r.model} ({r.model_kind})"),
        ("device", devices(r.gpus, r.device)),
        ("nodes", str(r.nodes) if r.nodes > 1 else ""),
        ("mode", r.mode),
        ("micro-batch", f"{r.micro_batch:,}" if r.micro_batch else "not stated"),
        ("accumulation", str(r.accumulation) if r.accumulation > 1 else ""),
        ("sequence length", str(r.sequence_length or "")),
        ("image", str(r.image_size or "")),
        ("precision", r.precision or "not stated"),
        ("optimizer", r.optimizer or ""),
        ("compile", r.compile),
        ("memory format", r.memory_format),
        ("parallelism", r.parallelism or ""),
        ("software", r.software),
        ("throughput", f"{number(r.samples_per_second)} samples/s" if r.samples_per_second else ""),
        (
            "memory",
            f"peak {number(r.peak_memory_gib)} GiB" if r.peak_memory_gib is not None else "",
        ),
        ("forecast", forecast),
        ("assumed for it", r.assumed),
        (
            "in the fit",
            "yes: constants were fitted on it, so that its error says little" if r.in_fit else "no",
        ),
        ("source", r.source),
        ("address", r.url),
        ("licence", r.licence),
        ("date", r.date or "not stated"),
        ("trust", f"{r.trust}: {TRUST[r.trust]}" if r.trust in TRUST else r.trust),
        ("notes", r.notes),
    ]
    return [(name, value) for name, value in facts if value]


def print_public_run(run: PublicRun, asked: Request | None = None) -> None:
    print_verdict(f"A step took {number(run.step_time_ms)} ms, as {run.source} measured it.")
    print_named("", public_facts(run))
    from trainpace.verbs.journal import JournalRequest

    place = [] if asked is None else carried(asked, JournalRequest)
    print_next(
        ["trainpace", "journal", "compare", f"public:{run.id}", "mine", *place],
        "with your newest run that is most like it",
    )


def print_public_score(score: Score) -> None:
    """The accuracy of the installed version: runs that no constant was fitted on first."""
    s = score.not_in_fit if score.not_in_fit.n else score.in_fit
    if s.mape is None or s.median is None:
        print_verdict("None of the public runs can be forecast.", good=False)
        return
    which = (
        "that no constant was fitted on"
        if s is score.not_in_fit
        else "that constants were fitted on"
    )
    held = (
        ""
        if s.coverage is None
        else f"; {s.coverage:.0f} % of the measured times lie inside of their 90 % interval"
    )
    print_verdict(
        f"{s.n:,} forecasts of public runs {which} are off by {s.mape:.1f} % on average (median"
        f" {s.median:.1f} %){held}."
    )
    print_lines(
        "Columns: runs that no constant was fitted on, then fitted runs; inside: their share in the"
        " 90 % interval."
    )
    whole = _whole(score)
    groups = {
        "what was run": (*score.by_way, whole),
        "card": score.by_card,
        "kind of model": score.by_model_kind,
        "source": score.by_source,
    }
    for title, lines in groups.items():
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
        rows = [(line.name, *_figures(line.not_in_fit), *_figures(line.in_fit)) for line in lines]
        with (
            in_details("cards, kinds of models and sources")
            if title in _IN_DETAILS
            else nullcontext()
        ):
            print_table(columns, rows, spaced=title == "what was run")
    print_lines(
        score_meaning(),
        f"{score.without_forecast:,} public runs have no forecast; show public:ID says why.",
    )
    print_next(
        "trainpace serve", "the same as a picture, by card and kind of model, on the page Accuracy"
    )


def score_meaning() -> str:
    """What the two halves of an accuracy table tell."""
    return (
        "Not in the fit: no constant of Trainpace was fitted on these runs. A run of your own"
        " should be forecast about as well as those of its kind: look at the lines of what you run,"
        " of your card and of your kind of model. In the fit: constants or intervals were fitted on"
        " these runs, so that their errors are smaller than yours will be."
    )


def _whole(score: Score) -> ScoreLine:
    from trainpace.forecast import ScoreLine  # late, as it forecasts

    return ScoreLine(name="all", in_fit=score.in_fit, not_in_fit=score.not_in_fit)


def _figures(s: Summary) -> tuple[str, ...]:
    shares = ("-" if value is None else f"{value:.1f}" for value in (s.mape, s.median, s.coverage))
    return (f"{s.n:,}" if s.n else "-", *shares)


def accuracy_chart(
    runs: Sequence[PublicRun], title: str = "Forecast against measured"
) -> Chart | None:
    """Every run a point at its measured and its forecast step; on the diagonal they are the same. None without two runs."""
    known = [run for run in runs if run.forecast_ms]
    if len(known) < 2:
        return None
    step = math.ceil(len(known) / MOST_POINTS)
    shown = known[::step]
    low = min(min(run.step_time_ms, run.forecast_ms or math.inf) for run in known)
    high = max(max(run.step_time_ms, run.forecast_ms or 0.0) for run in known)
    ends = (low / 1.3, high * 1.3)
    near = sum(0.8 <= (run.forecast_ms or 0.0) / run.step_time_ms <= 1.25 for run in known)
    groups = [
        ("not in the fit", "measured", [r for r in shown if not r.in_fit]),
        ("in the fit", "muted", [r for r in shown if r.in_fit]),
    ]
    points = tuple(
        Series(
            name=name,
            kind="points",
            tone=tone,
            x=tuple(run.step_time_ms for run in group),
            y=tuple(run.forecast_ms for run in group),
            labels=tuple(map(_label, group)),
        )
        for name, tone, group in reversed(groups)
        if group
    )
    diagonals = tuple(
        Series(
            name=name,
            kind="line",
            tone=tone,
            dashed=tone == "ideal",
            x=ends,
            y=tuple(at * factor for at in ends),
        )
        for name, tone, factor in (
            ("as measured", "forecast", 1.0),
            ("a quarter longer", "ideal", 1.25),
            ("a fifth shorter", "ideal", 0.8),
        )
    )
    return Chart(
        title=title,
        finding=(
            f"{near:,} of {plural(len(known), 'forecast')} lie from a fifth below to a quarter"
            " above what was measured."
        ),
        x=Axis(label="measured step", unit="ms", scale="log10", low=ends[0], high=ends[1]),
        y=Axis(label="forecast step", unit="ms", scale="log10", low=ends[0], high=ends[1]),
        series=(*diagonals, *points),
        nearest="point",
        note=f"One run in {step} is drawn." if step > 1 else "",
    )


def _label(run: PublicRun) -> str:
    batch = f", batch {run.micro_batch:,}" if run.micro_batch else ""
    return f"{run.model} on {devices(run.gpus, run.device)}{batch}, {run.precision} ({run.id})"
