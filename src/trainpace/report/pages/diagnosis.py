"""A diagnosis as a page: the verdict and why, what takes the step, the proofs, what to change, and the timeline."""

from trainpace.diagnose import IN_WORDS, Diagnosis
from trainpace.records import to_jsonable
from trainpace.report.charts.causes import proofs_chart, shares_chart
from trainpace.report.charts.chart import Picture
from trainpace.report.diagnosis import NOTHING_WORTH, savings
from trainpace.report.pages.render import page
from trainpace.report.pages.timeline import TIMELINE_STYLE, timeline_context
from trainpace.units import format_number
from trainpace.watch import Timeline


def diagnosis_page(d: Diagnosis, command: str, timeline: Timeline | None = None) -> str:
    """The page as text. `command`: what was run."""
    low, high = format_number(d.step_ms_low), format_number(d.step_ms_high)
    answer = f"What slows it down: {IN_WORDS[d.verdict]}. A step takes {format_number(d.step_ms)} ms ({low} to {high})."
    return page(
        "diagnosis.html", f"What slows it down: {command}", [answer, *d.why], diagnosis_pictures(d), to_jsonable(d),
        styles=() if timeline is None else (TIMELINE_STYLE,), d=d, advice=[[a.title, *savings(a, d), a.how] for a in d.advice],
        not_worth=[f"Not worth it: {a.title} saves {format_number(a.saves_ms)} ms a step." for a in d.not_worth],
        nothing=NOTHING_WORTH, timeline=None if timeline is None else timeline_context(timeline),
    )  # fmt: skip


def diagnosis_pictures(d: Diagnosis) -> list[Picture]:
    proved = proofs_chart(d)
    return [shares_chart(d), *([] if proved is None else [proved])]
