"""A diagnosis as a page: the verdict and why, what takes the step, the proofs, what to change, and the timeline."""

from __future__ import annotations

from trainpace.diagnose import IN_WORDS, Advice, Diagnosis
from trainpace.records import to_jsonable
from trainpace.report.charts.causes import proofs_chart, shares_chart
from trainpace.report.charts.chart import Picture
from trainpace.report.pages.figure import drawn, lines, section, table
from trainpace.report.pages.frame import document
from trainpace.report.pages.timeline import timeline_figure
from trainpace.report.timeline import TIMELINE_STYLE
from trainpace.units import format_duration, format_number
from trainpace.watch import Timeline


def diagnosis_page(d: Diagnosis, command: str, timeline: Timeline | None = None) -> str:
    """The page as text. `command`: what was run."""
    low, high = format_number(d.step_ms_low), format_number(d.step_ms_high)
    said = [
        f"What slows it down: {IN_WORDS[d.verdict]}. A step takes {format_number(d.step_ms)} ms ({low} to {high}).",
        *d.why,
    ]
    body = "".join(drawn(picture) for picture in diagnosis_pictures(d)) + section("What to change", _advice(d))
    if timeline is not None:
        body += section("Timeline of data against steps", timeline_figure(timeline))
    body += section("Notes", lines(d.warnings))
    styles = () if timeline is None else (TIMELINE_STYLE,)
    return document(f"What slows it down: {command}", said, body, to_jsonable(d), styles=styles)


def diagnosis_pictures(d: Diagnosis) -> list[Picture]:
    """The shares, and the interventions where any was tried."""
    proved = proofs_chart(d)
    return [shares_chart(d), *([] if proved is None else [proved])]


def _advice(d: Diagnosis) -> str:
    if not d.advice:
        return lines(["Nothing here is worth changing; a faster device, fewer FLOPs or a lower precision would help."])
    rows = [[a.title, *_saved(a, d), a.how] for a in d.advice]
    not_worth = [f"Not worth it: {a.title} saves {format_number(a.saves_ms)} ms a step." for a in d.not_worth]
    return table(["change", "saves a step", "an epoch", "the job", "at most", "how"], rows, words=(5,)) + lines(
        not_worth, "soft"
    )


def _saved(a: Advice, d: Diagnosis) -> list[str]:
    epoch = d.seconds_an_epoch(a.saves_ms)
    job = None if epoch is None or d.epochs is None else epoch * d.epochs
    return [
        f"{format_number(a.saves_ms)} ms ({a.saves_ms / d.step_ms:.0%})", "" if epoch is None else format_duration(epoch),
        "" if job is None else format_duration(job), f"{format_number(a.ceiling_ms)} ms",
    ]  # fmt: skip
