"""Runs on their way to others and from them, for the terminal: what leaves, in whole, and what a file of others taught."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainpace.report.phrases import number, plural
from trainpace.report.streams import tell
from trainpace.report.terminal import (
    Column,
    print_lines,
    print_next,
    print_notes,
    print_table,
    words,
)

if TYPE_CHECKING:
    from trainpace.journal import Lesson, Lessons

MOST_SHOWN = 20
MOST_BATCHES = 6


def print_shared(
    text: str,
    runs: int,
    left_out: Mapping[str, int],
    as_json: bool = False,
    written: bool = True,
    again: str = "",
) -> None:
    """The file's text to the letter, and what is to be said of it, which goes to stderr beside JSON. `written`: whether there is
    a file; `again`: else the command that writes it."""
    tell(text, nl=False)
    said = [
        (
            f"This is all that the file holds: {plural(runs, 'run')}. Nothing is sent anywhere; you"
            " may hand the file on."
            if written
            else (
                f"This is all that the file would hold: {plural(runs, 'run')}. Nothing is written"
                " or sent anywhere."
            )
        )
    ]
    said += [f"Left out: {plural(count, 'run')} {reason}." for reason, count in left_out.items()]
    if as_json:
        for line in said:
            tell(line, err=True)
    else:
        print_lines("", *said)
        if again:
            print_next(again, "write this to a file, which you may hand on")


def print_lessons(lessons: Lessons) -> None:
    """What a file of shared runs brought, by card and model; what was odd; which forecasts change."""
    rows = [
        (one.model, one.device, str(one.new), _listed(one.batches), _off(one.forecast_off_pct))
        for one in lessons.by[:MOST_SHOWN]
    ]
    if rows:
        columns = (
            words("model", least=14),
            words("device", least=10),
            Column("new"),
            words("batches"),
            Column("forecast off %"),
        )
        print_table(columns, rows)
    if len(lessons.by) > MOST_SHOWN:
        print_lines(f"and {len(lessons.by) - MOST_SHOWN:,} more pairs of model and device")
    print_notes(*_corrected(lessons.by), *_odd(lessons))
    if lessons.unchecked:
        print_lines(
            f"{plural(lessons.unchecked, 'new run')} could not be held against a forecast of this"
            " version: the model is the sharer's own, or could not be traced here."
        )


def _corrected(lessons: Sequence[Lesson]) -> list[str]:
    teaching = [one for one in lessons if one.corrects]
    if not teaching:
        return ["No forecast will be corrected by them."] if lessons else []
    of_models = sorted({one.model for one in teaching if one.traced})
    cards = sorted({one.device for one in teaching})
    named = (
        f"Forecasts of {_listed(of_models)} will be corrected by them, the more the nearer the"
        " card; "
        if of_models
        else ""
    )
    others = f"forecasts of other models on {_listed(cards)} will be corrected a little."
    return [named + (others if named else others.capitalize())]


def _odd(lessons: Lessons) -> list[str]:
    if not lessons.odd:
        return []
    n, verb = len(lessons.odd), "is" if len(lessons.odd) == 1 else "are"
    head = f"{plural(n, 'run')} {verb} 3 times off the forecast or more"
    kept = (
        ", taken all the same:"
        if lessons.accepted_odd
        else " and stayed apart, in the file; --accept-odd takes them too:"
    )
    lines = [
        f"  {odd.model} on {odd.device}, batch {odd.batch:,}, {odd.precision}:"
        f" {number(odd.measured_ms)} ms, forecast {number(odd.forecast_ms)} ms"
        for odd in lessons.odd[:MOST_SHOWN]
    ]
    more = [f"  and {n - MOST_SHOWN:,} more"] if n > MOST_SHOWN else []
    return [head + kept, *lines, *more]


def _off(per_cent: float | None) -> str:
    return "-" if per_cent is None else f"{per_cent:+.0f}"


def _listed(items: Sequence[object]) -> str:
    more = f" and {len(items) - MOST_BATCHES} more" if len(items) > MOST_BATCHES else ""
    return ", ".join(str(item) for item in items[:MOST_BATCHES]) + more
