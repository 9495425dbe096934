"""A watched run's timeline as a page: what it shows, the picture, the milliseconds of every row."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from trainpace.records import to_jsonable
from trainpace.report.pages.figure import section, table
from trainpace.report.pages.frame import document
from trainpace.report.timeline import TIMELINE_STYLE, findings, has_workers, heading, part_words, timeline_svg
from trainpace.units import format_number
from trainpace.watch import Lane, Timeline


def timeline_page(timeline: Timeline, title: str) -> str:
    """The page as text."""
    body = section(heading(timeline).capitalize(), timeline_figure(timeline))
    return document(title, findings(timeline), body, to_jsonable(timeline), styles=(TIMELINE_STYLE,))


def timeline_figure(timeline: Timeline) -> str:
    """The picture with its figures."""
    training = [lane for lane in timeline.lanes if lane.kind == "training"]
    rows = [row for lane in training for row in _part_rows(lane, timeline)]
    tables = (
        f"<h3>Where the steps' time goes</h3>{table(['rank', 'steps', 'part', 'ms a step', 'share'], rows, left=3)}"
    )
    if has_workers(timeline):
        workers = [lane for lane in timeline.lanes if lane.kind == "worker"]
        busy = [_worker_row(lane, timeline.duration_ms) for lane in workers]
        tables += f"<h3>Workers</h3>{table(['rank', 'row', 'batches', 'ms a batch', 'busy'], busy, left=2)}"
    said = html.escape(" ".join(findings(timeline)))
    return f"<figure><figcaption><p>{said}</p></figcaption>{timeline_svg(timeline)}</figure>{tables}"


def _part_rows(lane: Lane, timeline: Timeline) -> Iterable[Sequence[str]]:
    """The longest first."""
    whole = math.fsum(b.end_ms - b.start_ms for b in lane.bars)
    spent = sorted(((lane.ms_of(part), part) for part in {b.part for b in lane.bars}), reverse=True)
    for ms, part in spent:
        each = format_number(ms / len(lane.steps))
        yield str(lane.rank), str(len(lane.steps)), part_words(part, timeline), each, f"{100 * ms / whole:.0f} %"


def _worker_row(lane: Lane, duration_ms: float) -> Sequence[str]:
    whole = [b for b in lane.bars if b.start_ms > 0 and b.end_ms < duration_ms]
    mean = math.fsum(b.end_ms - b.start_ms for b in whole) / len(whole) if whole else None
    busy = f"{100 * lane.ms_of('fetch') / duration_ms:.0f} %"
    return [str(lane.rank), lane.label, str(len(lane.bars)), "" if mean is None else format_number(mean), busy]
