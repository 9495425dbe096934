"""A watched run's timeline as a picture that stands alone, and as a page: what it shows, and the milliseconds of every row."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainpace.records import to_jsonable
from trainpace.report import timeline as strip
from trainpace.report.pages.render import NONE, page, rendered
from trainpace.units import format_number
from trainpace.watch import Lane, Timeline, coarsened

WIDTH, RIGHT, TOP = 920, 16, 34
ROW, BAR, GROUP_GAP = 26, 20, 30
DOT = 0.5
LETTER_FROM = 13.0
TIMELINE_STYLE = (
    "svg.timeline{--ink:#1b2530;--soft:#566270;--line:#dde3e9;--page:#ffffff;--rest:#c3cbd3;--wait:#b3261e}"
    "@media (prefers-color-scheme:dark){svg.timeline{--ink:#e8edf2;--soft:#a3b0bd;--line:#36414c;--page:#14191f;"
    "--rest:#55616d;--wait:#ff8a80}}"
    "svg.timeline text{fill:var(--ink);font:13px system-ui,sans-serif}"
    "svg.timeline text.small{fill:var(--soft);font-size:11px}"
    "svg.timeline text.in{fill:#ffffff;font-size:11px;text-anchor:middle;pointer-events:none}"
)
"""Inside of the picture, so that it stands alone; a page allows it by name."""


def timeline_page(timeline: Timeline, title: str) -> str:
    return page(
        "timeline.html", title, strip.findings(timeline), (), to_jsonable(timeline), styles=(TIMELINE_STYLE,),
        heading=strip.heading(timeline).capitalize(), timeline=timeline_context(timeline),
    )  # fmt: skip


def timeline_context(timeline: Timeline) -> dict[str, Any]:
    """What timeline_parts.html shows."""
    lanes = {kind: [lane for lane in timeline.lanes if lane.kind == kind] for kind in ("training", "worker")}
    return {
        "findings": strip.findings(timeline), "picture": rendered("timeline.svg", **_geometry(timeline)),
        "parts": [row for lane in lanes["training"] for row in _part_rows(lane, timeline)],
        "workers": [_worker_row(lane, timeline.duration_ms) for lane in lanes["worker"]] if strip.has_workers(timeline) else [],
    }  # fmt: skip


def _part_rows(lane: Lane, timeline: Timeline) -> Iterator[Sequence[str]]:
    """The longest first."""
    whole = math.fsum(b.end_ms - b.start_ms for b in lane.bars)
    for ms, part in sorted(((lane.ms_of(part), part) for part in {b.part for b in lane.bars}), reverse=True):
        each = format_number(ms / len(lane.steps))
        yield str(lane.rank), str(len(lane.steps)), strip.part_words(part, timeline), each, f"{100 * ms / whole:.0f} %"


def _worker_row(lane: Lane, duration_ms: float) -> Sequence[str]:
    whole = [b.end_ms - b.start_ms for b in lane.bars if b.start_ms > 0 and b.end_ms < duration_ms]
    mean = format_number(math.fsum(whole) / len(whole)) if whole else NONE
    return str(lane.rank), lane.label, str(len(lane.bars)), mean, f"{100 * lane.ms_of('fetch') / duration_ms:.0f} %"


def timeline_svg(timeline: Timeline) -> str:
    """A picture that stands alone: rows on a time axis, steps marked, waiting for data hatched."""
    return str(rendered("timeline.svg", **_geometry(timeline)))


def _geometry(timeline: Timeline) -> dict[str, Any]:
    labels = [strip.label_of(lane, timeline) for lane in timeline.lanes]
    left = 16 + 7.2 * max(map(len, labels))
    scale = (WIDTH - left - RIGHT) / timeline.duration_ms
    tops, bottom = [], float(TOP)
    for i, lane in enumerate(timeline.lanes):
        bottom += GROUP_GAP if i and lane.kind == "training" else 0
        tops.append(bottom)
        bottom += ROW
    last = {lane.rank: y + BAR for lane, y in zip(timeline.lanes, tops, strict=True)}
    rows = [
        {"label": label, "y": y, "last": last[lane.rank], "bars": _bars(lane, left, scale, timeline),
         "marks": _marks(lane, left, scale) if lane.kind == "training" else ()}
        for lane, label, y in zip(timeline.lanes, labels, tops, strict=True)
    ]  # fmt: skip
    key, height = _key(timeline, left, bottom + 44)
    return {
        "title": f"Timeline of {strip.heading(timeline)}", "findings": strip.findings(timeline), "style": TIMELINE_STYLE,
        "width": WIDTH, "height": height, "left": round(left, 1), "right": WIDTH - RIGHT, "top": TOP, "bottom": bottom,
        "rows": rows, "key": key,
        "ticks": [(round(left + ms * scale, 1), format_number(ms)) for ms in strip.ticks(timeline.duration_ms, 10)],
    }  # fmt: skip


def _paint(part: str, odd: bool = False) -> str:
    if part == strip.WAITING:
        return 'fill="url(#timeline-waiting)"'
    colour = "var(--rest)" if part == "other" else strip.LOOK[part][1]
    return f'fill="{colour}"' + (' opacity="0.72"' if odd else "")


def _letter(part: str) -> str:
    return "" if part in (strip.WAITING, "other", "fetch") else strip.LOOK[part][0]


def _bars(lane: Lane, left: float, scale: float, timeline: Timeline) -> Iterator[tuple[float, float, str, str, str]]:
    for i, bar in enumerate(coarsened(lane.bars, DOT / scale)):
        ms = bar.end_ms - bar.start_ms
        named = f" ({bar.name})" if bar.name and bar.name != bar.part else ""
        tip = f"{strip.part_words(bar.part, timeline)}{named}: {format_number(ms)} ms"
        letter = _letter(bar.part) if ms * scale >= LETTER_FROM else ""
        paint = _paint(bar.part, bar.part == "fetch" and i % 2 == 1)
        yield round(left + bar.start_ms * scale, 2), round(ms * scale, 2), paint, tip, letter


def _marks(lane: Lane, left: float, scale: float) -> Iterator[tuple[float, str]]:
    starts = [left + mark.start_ms * scale for mark in lane.steps]
    for i, (x, after) in enumerate(zip(starts, (*starts[1:], WIDTH - RIGHT), strict=True)):
        number = str(lane.steps[i].number)
        texts = (f"step {number}", number) if i == 0 else (number,)
        yield round(x, 1), next((t for t in texts if 7 * len(t) + 3 <= after - x), "")


def _key(timeline: Timeline, left: float, y: float) -> tuple[list[tuple[float, float, str, str, str]], float]:
    """With the height that the picture needs."""
    entries, x = [], left
    for part in strip.parts_of(timeline):
        words = strip.part_words(part, timeline)
        if x + 40 + 7 * len(words) > WIDTH:
            x, y = left, y + 20
        entries.append((round(x, 1), y, _paint(part), _letter(part), words))
        x += 42 + 7 * len(words)
    return entries, y + 24
