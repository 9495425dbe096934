"""Verdict, why, next for the terminal."""

from __future__ import annotations

from trainpace.diagnose import Advice, Diagnosis
from trainpace.diagnose.shares import IN_WORDS
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_duration, format_number

LEAST_SHARE = 0.005
BAR = 24


def print_diagnosis(d: Diagnosis, folder: str) -> None:
    """The shares, the verdict with its reasons, and what to change, each with what it saves."""
    rows = [
        [s.in_words, "█" * round(BAR * s.share), format_number(s.ms), f"{s.share:.1%}", "yes" if s.proved else ""]
        for s in d.shares
        if s.share >= LEAST_SHARE
    ]
    title = (
        f"a step of {format_number(d.step_ms)} ms ({format_number(d.step_ms_low)} to {format_number(d.step_ms_high)})"
    )
    print_table(["where it goes", "", "ms", "share", "proved"], rows, left=2, title=title)
    print_lines(f"Verdict: {IN_WORDS[d.verdict]}." + (_roof(d) if d.verdict == "compute" else ""))
    print_lines(*(f"Why: {line}" for line in d.why))
    print_lines(*(f"note: {line}" for line in d.warnings))
    if d.advice:
        rows = [[a.title, *_saved(a, d)] for a in d.advice]
        print_table(["what to change", "saves a step", "an epoch", "the job", "at most"], rows)
        print_lines(*(f"{a.title}: {a.how}" for a in d.advice))
    for a in d.not_worth:
        print_lines(f"Not worth it: {a.title} saves {_in_epoch(a.saves_ms, d)}.")
    if not d.advice:
        print_lines(
            "Next: nothing here is worth changing; a faster device, fewer FLOPs or a lower precision would help."
        )
    print_lines(f"Recorded in {folder}.")


def _roof(d: Diagnosis) -> str:
    if d.share_of_roof is None:
        return ""
    return f" Forward and backward reach {d.share_of_roof:.0%} of the rate of one large product of matrices here."


def _saved(a: Advice, d: Diagnosis) -> list[str]:
    epoch = d.seconds_an_epoch(a.saves_ms)
    job = None if epoch is None or d.epochs is None else epoch * d.epochs
    return [
        f"{format_number(a.saves_ms)} ms ({a.saves_ms / d.step_ms:.0%})",
        "" if epoch is None else format_duration(epoch),
        "" if job is None else format_duration(job),
        f"{format_number(a.ceiling_ms)} ms",
    ]


def _in_epoch(ms: float, d: Diagnosis) -> str:
    epoch = d.seconds_an_epoch(ms)
    return f"{format_number(ms)} ms a step" if epoch is None else f"{format_duration(epoch)} an epoch"
