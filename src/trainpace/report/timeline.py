"""A watched run's timeline in characters, a row a lane, for a terminal or a log; and what it shows in words."""

import math

from trainpace.report.chart import tick_step
from trainpace.units import format_number
from trainpace.watch import Lane, Timeline

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
    "trainpace": ("t", "#5b6773", "overhead of trainpace"),
    "other": ("-", "#c3cbd3", "other"),
    "fetch": ("#", "#2a8c8c", "preparing a batch"),
}
"""Letter, colour and words of every part."""

NEXT_BATCH = "="
"""Every second batch of a worker, so that two without a gap are told apart."""


def part_words(part: str, timeline: Timeline) -> str:
    """What a part is called; without workers the training process does not wait for its data but prepares it."""
    if part == WAITING and not has_workers(timeline):
        return "loading data in the main process"
    return LOOK[part][2]


def has_workers(timeline: Timeline) -> bool:
    return any(lane.kind == "worker" for lane in timeline.lanes)


def findings(timeline: Timeline) -> list[str]:
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
            lines.append(f"{who} spends {share} loading data in the main process, without workers.")
    if len(timeline.ranks) > 1:
        lines.append("A rank that waits for another does so in its backward pass or communication.")
    if timeline.on_gpu:
        lines.append("Bars are host time: what the host starts on the GPU goes on after the bar ends.")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def label_of(lane: Lane, timeline: Timeline) -> str:
    return f"rank {lane.rank} {lane.label}" if len(timeline.ranks) > 1 else lane.label


def ticks(duration_ms: float, at_most: int) -> list[float]:
    step = tick_step(max(duration_ms, 1e-6), max(1, at_most))
    return [i * step for i in range(int(duration_ms / step + 1e-9) + 1)]


def parts_of(timeline: Timeline) -> list[str]:
    drawn = {bar.part for lane in timeline.lanes for bar in lane.bars}
    return [part for part in LOOK if part in drawn]


def heading(timeline: Timeline) -> str:
    count = timeline.last_step - timeline.first_step + 1
    which = f"steps {timeline.first_step} to {timeline.last_step}" if count > 1 else f"step {timeline.first_step}"
    return (
        f"{which}: {format_number(timeline.duration_ms)} ms, {format_number(timeline.after_s)} s after the first began"
    )


def print_timeline(timeline: Timeline) -> None:
    """Rows as wide as the terminal. Letters tell the parts apart where there are no colours."""
    from rich.text import Text

    from trainpace.report.terminal import console

    out = console()
    labels = [label_of(lane, timeline) for lane in timeline.lanes]
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
    for part in parts_of(timeline):
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
    marked = ticks(duration_ms, width // 12)
    for i, ms in enumerate(marked):
        at = min(width - 1, int(ms / duration_ms * width))
        text = format_number(ms) + (" ms" if i == len(marked) - 1 else "")
        line[at] = "+"
        start = max(0, min(at, width + 2 - len(text)))
        numbers[start : start + len(text)] = text
    return "".join(line), "".join(numbers).rstrip()
