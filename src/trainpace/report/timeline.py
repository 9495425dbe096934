"""A watched run's timeline: a row a lane, in characters for a terminal or a log, and as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from trainpace.units import format_number
from trainpace.watch import Lane, Timeline, coarsened

WAITING = "data"
LOOK = {
    "data": (".", "#b3261e", "waiting for data"),
    "loader_start": ("s", "#d98a92", "starting the loader"),
    "host_to_device": ("h", "#35748a", "copying to the device"),
    "forward": ("F", "#0063a8", "forward"),
    "backward": ("B", "#c06a10", "backward"),
    "optimizer": ("O", "#00795a", "optimizer"),
    "communication": ("c", "#7a3fa8", "communication"),
    "synchronisation": ("y", "#806a00", "waiting for the device"),
    "logging": ("l", "#c2b280", "logging"),
    "checkpoint": ("k", "#7a5230", "checkpoint"),
    "evaluation": ("e", "#4f5fc4", "evaluation"),
    "trainpace": ("t", "#5b6773", "trainpace's own"),
    "other": ("-", "#c3cbd3", "other"),
    "fetch": ("#", "#2a8c8c", "preparing a batch"),
}
"""Letter, colour and words of every part."""

NEXT_BATCH = "="
"""Every second batch of a worker, so that two without a gap are told apart."""


def part_words(part: str, timeline: Timeline) -> str:
    """What a part is called; without workers the training process does not wait for its data but prepares it."""
    if part == WAITING and not has_workers(timeline):
        return "preparing data itself"
    return LOOK[part][2]


def has_workers(timeline: Timeline) -> bool:
    """Whether any worker process prepared data in the window."""
    return any(lane.kind == "worker" for lane in timeline.lanes)


def findings(timeline: Timeline) -> list[str]:
    """What the picture shows, in sentences with figures."""
    lines = []
    for rank in timeline.ranks:
        mine = [lane for lane in timeline.lanes if lane.rank == rank]
        training, workers = mine[0], mine[1:]
        shown = math.fsum(b.end_ms - b.start_ms for b in training.bars)
        waited = training.ms_of(WAITING)
        who = f"Rank {rank}" if len(timeline.ranks) > 1 else "Training"
        share = f"{_percent(waited / shown)} of the time ({format_number(waited / len(training.steps))} ms a step)"
        if workers:
            busy = math.fsum(lane.ms_of("fetch") for lane in workers) / (timeline.duration_ms * len(workers))
            many = f"its {len(workers)} worker processes prepare" if len(workers) > 1 else "its worker process prepares"
            starting = training.ms_of("loader_start") / shown
            begins = f" and for the loader's start {_percent(starting)}" if starting > 0.01 else ""
            lines.append(f"{who} waits for data {share}{begins}; {many} batches {_percent(busy)} of the time.")
        else:
            lines.append(f"{who} prepares its data itself {share}, without workers.")
    if len(timeline.ranks) > 1:
        lines.append("Where a rank waits for another, it does so in its backward or communication.")
    if timeline.on_gpu:
        lines.append("Bars are the host's time: what it starts on the GPU goes on after the bar ends.")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _label(lane: Lane, timeline: Timeline) -> str:
    return f"rank {lane.rank} {lane.label}" if len(timeline.ranks) > 1 else lane.label


def _ticks(duration_ms: float, at_most: int) -> list[float]:
    """Round milliseconds from 0 on."""
    rough = duration_ms / max(1, at_most)
    size = 10.0 ** math.floor(math.log10(max(rough, 1e-6)))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    return [i * step for i in range(int(duration_ms / step + 1e-9) + 1)]


def _used(timeline: Timeline) -> list[str]:
    drawn = {bar.part for lane in timeline.lanes for bar in lane.bars}
    return [part for part in LOOK if part in drawn]


def heading(timeline: Timeline) -> str:
    """Which steps, how long, and when."""
    count = timeline.last_step - timeline.first_step + 1
    which = f"steps {timeline.first_step} to {timeline.last_step}" if count > 1 else f"step {timeline.first_step}"
    return (
        f"{which}: {format_number(timeline.duration_ms)} ms, {format_number(timeline.after_s)} s after the first began"
    )


# ---- in characters


def print_timeline(timeline: Timeline) -> None:
    """Rows as wide as the terminal. Letters tell the parts apart where there are no colours."""
    from rich.text import Text

    from trainpace.report.terminal import console

    out = console()
    labels = [_label(lane, timeline) for lane in timeline.lanes]
    indent = max(map(len, labels)) + 1
    width = max(20, out.width - indent - 2)
    out.print(Text(f"timeline of {heading(timeline)}", style="bold"), soft_wrap=True)
    for lane, label in zip(timeline.lanes, labels, strict=True):
        if lane.kind == "training":
            out.print(Text(" " * indent + _step_row(lane, timeline.duration_ms, width), style="dim"), no_wrap=True)
        row = Text(f"{label:<{indent}}")
        for letter, part in cells(lane, timeline.duration_ms, width):
            row.append(letter, style=_style(part))
        out.print(row, no_wrap=True)
    for line in _axis(timeline.duration_ms, width):
        out.print(" " * indent + line, no_wrap=True, markup=False)
    key, used = Text(), 0
    for part in _used(timeline):
        letters = f"{LOOK[part][0]}{NEXT_BATCH}" if part == "fetch" else LOOK[part][0]
        words = f" {part_words(part, timeline)}   "
        used += len(letters) + len(words)
        if used > out.width:
            key.append("\n")
            used = len(letters) + len(words)
        key.append(letters, style=_style(part))
        key.append(words)
    out.print(key)
    for line in findings(timeline):
        out.print(line, markup=False)


def _style(part: str) -> str:
    """What is no work has no block behind it, so that the gaps show."""
    if part in ("", "other"):
        return "dim"
    return LOOK[WAITING][1] if part == WAITING else f"#ffffff on {LOOK[part][1]}"


def cells(lane: Lane, duration_ms: float, width: int) -> list[tuple[str, str]]:
    """(letter, part) a cell: of what takes most of it; a space and "" where that is nothing."""
    size = duration_ms / width
    spent: list[dict[tuple[str, str], float]] = [{} for _ in range(width)]
    for i, bar in enumerate(lane.bars):
        letter = NEXT_BATCH if bar.part == "fetch" and i % 2 else LOOK[bar.part][0]
        for cell in range(int(bar.start_ms / size), min(width, math.ceil(bar.end_ms / size))):
            ms = min(bar.end_ms, (cell + 1) * size) - max(bar.start_ms, cell * size)
            spent[cell][letter, bar.part] = spent[cell].get((letter, bar.part), 0.0) + max(0.0, ms)
    out = []
    for within in spent:
        letter_and_part = max(within, key=within.__getitem__) if within else (" ", "")
        idle = size - math.fsum(within.values())
        out.append(letter_and_part if within.get(letter_and_part, 0.0) > idle else (" ", ""))
    return out


def _step_row(lane: Lane, duration_ms: float, width: int) -> str:
    """Where steps begin, with their numbers where these fit."""
    at = [min(width - 1, int(mark.start_ms / duration_ms * width)) for mark in lane.steps]
    row = [" "] * width
    for begin, end, mark in zip(at, (*at[1:], width), lane.steps, strict=True):
        number = str(mark.number)
        shown = f"|{number}" if begin + len(number) < end else "|"
        row[begin : begin + len(shown)] = shown
    return "".join(row).rstrip()


def _axis(duration_ms: float, width: int) -> tuple[str, str]:
    line, numbers = ["-"] * width, [" "] * (width + 2)
    ticks = _ticks(duration_ms, width // 12)
    for i, ms in enumerate(ticks):
        at = min(width - 1, int(ms / duration_ms * width))
        text = format_number(ms) + (" ms" if i == len(ticks) - 1 else "")
        line[at] = "+"
        start = max(0, min(at, width + 2 - len(text)))
        numbers[start : start + len(text)] = text
    return "".join(line), "".join(numbers).rstrip()


# ---- as a picture

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


def timeline_svg(timeline: Timeline) -> str:
    """A picture that stands alone or in a page: rows on a time axis, steps marked, waiting for data hatched."""
    labels = [_label(lane, timeline) for lane in timeline.lanes]
    left = 16 + 7.2 * max(map(len, labels))
    scale = (WIDTH - left - RIGHT) / timeline.duration_ms
    rows, at = [], float(TOP)
    for i, lane in enumerate(timeline.lanes):
        at += GROUP_GAP if i and lane.kind == "training" else 0
        rows.append(at)
        at += ROW
    parts = [f'<rect width="{WIDTH}" height="{at + 74:.0f}" fill="var(--page)"/>', _grid(timeline, left, scale, at)]
    for lane, label, y in zip(timeline.lanes, labels, rows, strict=True):
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 15:.1f}" text-anchor="end">{html.escape(label)}</text>')
        parts += _drawn(lane, left, scale, y, timeline)
        if lane.kind == "training":
            last = max((r for other, r in zip(timeline.lanes, rows, strict=True) if other.rank == lane.rank), default=y)
            parts += _marked(lane, left, scale, y, last + BAR)
    key, height = _legend(timeline, left, at + 44)
    title = html.escape(f"Timeline of {heading(timeline)}")
    said = html.escape(" ".join(findings(timeline)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        f' aria-labelledby="timeline-title timeline-said"><title id="timeline-title">{title}</title>'
        f'<desc id="timeline-said">{said}</desc><style>{TIMELINE_STYLE}</style>{_hatch()}{"".join(parts)}{key}</svg>'
    )


def _hatch() -> str:
    return (
        '<defs><pattern id="timeline-waiting" width="6" height="6" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--wait)" opacity="0.12"/>'
        '<rect width="2" height="6" fill="var(--wait)"/></pattern></defs>'
    )


def _fill(part: str, odd: bool = False) -> str:
    if part == WAITING:
        return 'fill="url(#timeline-waiting)"'
    colour = "var(--rest)" if part == "other" else LOOK[part][1]
    return f'fill="{colour}"' + (' opacity="0.72"' if odd else "")


def _drawn(lane: Lane, left: float, scale: float, y: float, timeline: Timeline) -> Iterable[str]:
    line = y + BAR / 2
    yield f'<line x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}" stroke="var(--line)"/>'
    for i, bar in enumerate(coarsened(lane.bars, DOT / scale)):
        x, width = left + bar.start_ms * scale, (bar.end_ms - bar.start_ms) * scale
        named = f" ({bar.name})" if bar.name and bar.name != bar.part else ""
        tip = f"{part_words(bar.part, timeline)}{named}: {format_number(bar.end_ms - bar.start_ms)} ms"
        odd = bar.part == "fetch" and i % 2 == 1
        yield (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR}" {_fill(bar.part, odd)}>'
            f"<title>{html.escape(tip)}</title></rect>"
        )
        if width >= LETTER_FROM and bar.part not in (WAITING, "other", "fetch"):
            yield f'<text class="in" x="{x + width / 2:.1f}" y="{y + 14:.1f}">{LOOK[bar.part][0]}</text>'


def _marked(lane: Lane, left: float, scale: float, y: float, bottom: float) -> Iterable[str]:
    at = [left + mark.start_ms * scale for mark in lane.steps]
    for i, (x, after) in enumerate(zip(at, (*at[1:], WIDTH - RIGHT), strict=True)):
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:.1f}" y2="{bottom:.1f}" stroke="var(--ink)" stroke-width="1"/>'
        number = str(lane.steps[i].number)
        texts = (f"step {number}", number) if i == 0 else (number,)
        text = next((t for t in texts if 7 * len(t) + 3 <= after - x), None)
        if text is not None:
            yield f'<text class="small" x="{x + 3:.1f}" y="{y - 3:.1f}">{text}</text>'


def _grid(timeline: Timeline, left: float, scale: float, bottom: float) -> str:
    parts = []
    for ms in _ticks(timeline.duration_ms, 10):
        x = left + ms * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}" stroke="var(--line)"/>')
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{format_number(ms)}</text>'
        )
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(f'<text class="small" x="{middle:.1f}" y="{bottom + 30:.1f}" text-anchor="middle">milliseconds</text>')
    return "".join(parts)


def _legend(timeline: Timeline, left: float, y: float) -> tuple[str, float]:
    """With the height that the picture needs."""
    parts, x = [], left
    for part in _used(timeline):
        words = part_words(part, timeline)
        if x + 40 + 7 * len(words) > WIDTH:
            x, y = left, y + 20
        letter = LOOK[part][0] if part not in (WAITING, "other", "fetch") else ""
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="16" height="14" rx="2" {_fill(part)}/>')
        parts.append(f'<text class="in" x="{x + 8:.1f}" y="{y + 11:.1f}">{letter}</text>')
        parts.append(f'<text x="{x + 21:.1f}" y="{y + 12:.1f}">{words}</text>')
        x += 42 + 7 * len(words)
    return "".join(parts), y + 24
