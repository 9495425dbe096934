"""A recorded training script: the parts of its step, what is odd, and its timeline in characters, as a picture and as a page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainpace.core.child import ending_of
from trainpace.core.records import to_jsonable
from trainpace.diagnose import clocks_in_words
from trainpace.journal import Guarded, Pace
from trainpace.report.among_ranks import print_among_ranks
from trainpace.report.charts import tick_step
from trainpace.report.pages import NONE, asset, page, rendered
from trainpace.report.phrases import bracketed, duration, listed, number, percent, plural
from trainpace.report.plots import along
from trainpace.report.terminal import (
    Column,
    console,
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.watch import (
    PARTS,
    STEP_IN_WORDS,
    Lane,
    Rank,
    Recording,
    Timeline,
    batches_per_step,
    coarsened,
    untraced_in_words,
)

if TYPE_CHECKING:
    from markupsafe import Markup

WAITING = "data"
LOOK = {
    "data": (".", "#b3261e", "waiting for data"),
    "loader_start": ("s", "#d98a92", "starting the loader"),
    "host_to_device": ("h", "#35748a", "copies to the device"),
    "forward": ("F", "#0063a8", "forward"),
    "backward": ("B", "#c06a10", "backward"),
    "optimizer": ("O", "#00795a", "optimizer"),
    "communication": ("c", "#7a3fa8", "communication between ranks"),
    "synchronisation": ("y", "#806a00", "waiting for the device (.item())"),
    "logging": ("l", "#c2b280", "logging"),
    "checkpoint": ("k", "#7a5230", "checkpoints"),
    "evaluation": ("e", "#4f5fc4", "evaluation"),
    "trainpace": ("t", "#5b6773", "Trainpace's own overhead"),
    "other": ("-", "#c3cbd3", "the script's own code"),
    "fetch": ("#", "#2a8c8c", "preparing a batch"),
}
"""Letter, colour and words of every part."""

NEXT_BATCH = "="
"""Every second batch of a worker, so that two without a gap are told apart."""
WIDTH, RIGHT, TOP = 920, 16, 34
ROW, BAR, GROUP_GAP = 26, 20, 30
DOT = 0.5
LETTER_FROM = 13.0
MOST_RANKS = 8


def print_recording(recording: Recording, folder: str) -> None:
    ranks = recording.ranks
    if not ranks:
        print_verdict(f"No training step was seen. {recording.seen}".rstrip(), good=False)
        print_lines(STEP_IN_WORDS)
        return
    step_ms = fmean(r.step_ms for r in ranks)
    columns = [words("part of a step", least=18), Column("ms"), Column("share"), words("", 1, 8)]
    columns += [Column(f"rank {r.rank}", 2) for r in ranks[:MOST_RANKS] if len(ranks) > 1]
    print_lines(
        f"{' '.join(recording.command)}: trained {trained_on(ranks[0])}, recorded in {folder}"
    )
    rows = _rows(ranks, step_ms)
    each = duration(step_ms / 1000)
    after = f" after {ranks[0].warm_up} of warm-up" if ranks[0].warm_up else ""
    print_verdict(
        f"{plural(ranks[0].steps, 'step')}{after}, {each} each; the largest part is {rows[0][0]}"
        f" ({rows[0][2]})."
    )
    print_table(columns, rows)
    print_among_ranks(recording)
    print_notes(*_remarks(recording, step_ms))
    print_lines(*_doubts(recording))
    if any(r.blocks for r in ranks):  # of the diagnose that made it
        print_next(
            ["trainpace", "diagnose", folder], "reads this recording again, and says what to change"
        )
    else:
        print_next(recording.proved_by, "proves what slows it down, and says what to change")


def trained_on(rank: Rank) -> str:
    return (
        f"on {rank.accelerator}"
        if rank.accelerator
        else f"on the CPU ({plural(rank.threads, 'thread')})"
    )


def print_guarded(guarded: Guarded) -> None:
    ratio, between, faster = guarded.ratio, "", ""
    if ratio.low is not None and ratio.high is not None:
        between = f" ({100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %)"
        faster = f", {1 / ratio.ratio:.3g} times as fast" if ratio.high < 1 else ""
    print_verdict(
        f"{'Regressed' if guarded.regressed else 'No regression'}: the median step takes"
        f" {_pace(guarded.now)}, and {_pace(guarded.baseline)} in {guarded.baseline.run}:"
        f" {100 * (ratio.ratio - 1):+.1f} %{between}{faster}; up to {100 * guarded.tolerance:g} %"
        " beyond the noise is tolerated.",
        good=not guarded.regressed,
    )


def _pace(pace: Pace) -> str:
    return f"{number(pace.step_ms)} ms{bracketed(pace.interval_ms)}"


def step_in_words(rank: Rank) -> str:
    """What makes up a step of this training; empty for one batch and one optimizer."""
    if rank.optimizer == "LBFGS":
        return (
            f"an update by LBFGS, which evaluates the loss {number(rank.micro_steps)} times on"
            " average"
        )
    batches = round(batches_per_step(rank))
    parts = [f"{batches} micro-batches"] if batches > 1 else []
    if rank.optimizers > 1:
        parts.append(f"updates by {rank.optimizers} optimizers")
    elif rank.optimizers == 0:
        parts.append("an update by the script's own code, without a torch optimizer")
    return " and ".join(parts)


def _rows(ranks: tuple[Rank, ...], step_ms: float) -> list[list[str | float]]:
    means = {part: fmean([r.parts_ms[part] for r in ranks]) for part in PARTS}
    return [
        [
            LOOK[part][2],
            number(ms),
            f"{100 * ms / step_ms:.1f} %",
            ms / step_ms,
            *(number(r.parts_ms[part]) for r in ranks[:MOST_RANKS] if len(ranks) > 1),
        ]
        for part, ms in sorted(means.items(), key=lambda item: -item[1])
        if ms >= 0.0005 * step_ms
    ]


def _remarks(recording: Recording, step_ms: float) -> list[str]:
    first = recording.ranks[0]
    lines = [f"A step is {step_in_words(first)}."] if step_in_words(first) else []
    if first.samples_per_step:
        total = sum(r.samples_per_step for r in recording.ranks)
        lines.append(f"{number(1000 * total / step_ms)} samples/s, {total:.0f} samples a step.")
    top = next((line for line in first.lines if line.part == "other"), None)
    if top is not None and first.parts_ms["other"] > 0.1 * step_ms:
        called = f", in {top.called}" if top.called else ""
        lines.append(f"Of the script's own code, {top.share:.0%} is at {top.line}{called}.")
    after = [
        (LOOK[part][2], first.after_last_ms.get(part, 0.0)) for part in ("evaluation", "checkpoint")
    ]
    if told := [f"{duration(ms / 1000)} of {name}" for name, ms in after if ms > step_ms]:
        lines.append(f"After the last step came {listed(told)}, which is in no row.")
    if first.accelerator:
        lines.append(
            "Times are the host's: the device works asynchronously, until something waits for it."
        )
    return lines


def _doubts(recording: Recording) -> list[str]:
    """What the recording lacks."""
    first, code = recording.ranks[0], recording.exit_code
    lines = []
    if code:
        lines.append(f"The command {ending_of(code)}.")
    elif code is None or not all(r.complete for r in recording.ranks):
        lines.append("A process was killed; what it did until then is counted.")
    if len(recording.ranks) < first.world_size:
        lines.append(f"{len(recording.ranks)} of {first.world_size} ranks were recorded here.")
    if first.no_workload:
        lines.append(untraced_in_words(first))
    lines += [f"{line[:1].upper()}{line[1:]}" for line in clocks_in_words(recording.together)]
    return [*lines, recording.seen] if recording.seen else lines


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
        share = (
            f"{percent(waited / shown)} of the time ({number(waited / len(training.steps))} ms a"
            " step)"
        )
        if workers:
            busy = math.fsum(lane.ms_of("fetch") for lane in workers) / (
                timeline.duration_ms * len(workers)
            )
            many = (
                f"its {len(workers)} worker processes prepare"
                if len(workers) > 1
                else "its worker process prepares"
            )
            starting = training.ms_of("loader_start") / shown
            begins = f" and for the loader's start {percent(starting)}" if starting > 0.01 else ""
            lines.append(
                f"{who} waits for data {share}{begins}; {many} batches {percent(busy)} of the time."
            )
        else:
            lines.append(f"{who} spends {share} loading data in the main process, without workers.")
    if len(timeline.ranks) > 1:
        lines.append("A rank that waits for another does so in its backward pass or communication.")
    if timeline.on_gpu:
        lines.append(
            "Bars are host time: what the host starts on the GPU goes on after the bar ends."
        )
    return lines


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
    which = (
        f"steps {timeline.first_step} to {timeline.last_step}"
        if count > 1
        else f"step {timeline.first_step}"
    )
    return (
        f"{which}: {number(timeline.duration_ms)} ms, {number(timeline.after_s)} s after the first"
        " began"
    )


def print_timeline(timeline: Timeline) -> None:
    """Rows as wide as the terminal. Letters tell the parts apart where there are no colours."""
    from rich.text import Text

    out = console()
    labels = [label_of(lane, timeline) for lane in timeline.lanes]
    indent = max(map(len, labels)) + 1
    width = max(20, out.width - indent - 2)
    out.print(Text(f"timeline of {heading(timeline)}", style="bold"), soft_wrap=True)
    for lane, label in zip(timeline.lanes, labels, strict=True):
        if lane.kind == "training":
            out.print(
                Text(" " * indent + _step_row(lane, timeline.duration_ms, width), style="dim"),
                no_wrap=True,
            )
        row = Text(f"{label:<{indent}}")
        for letter, part in cells(lane, timeline.duration_ms, width):
            row.append(letter, style=_style(part))
        out.print(row, no_wrap=True)
    for line in _axis(timeline.duration_ms, width):
        out.print(" " * indent + line, no_wrap=True, markup=False)
    key, used = Text(), 0
    for part in parts_of(timeline):
        letters = f"{LOOK[part][0]}{NEXT_BATCH}" if part == "fetch" else LOOK[part][0]
        name = f" {part_words(part, timeline)}   "
        used += len(letters) + len(name)
        if used > out.width:
            key.append("\n")
            used = len(letters) + len(name)
        key.append(letters, style=_style(part))
        key.append(name)
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
    spent: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in range(width)]
    for i, bar in enumerate(lane.bars):
        letter = NEXT_BATCH if bar.part == "fetch" and i % 2 else LOOK[bar.part][0]
        for cell in range(int(bar.start_ms / size), min(width, math.ceil(bar.end_ms / size))):
            ms = min(bar.end_ms, (cell + 1) * size) - max(bar.start_ms, cell * size)
            spent[cell][letter, bar.part] += max(0.0, ms)
    idle = [size - math.fsum(within.values()) for within in spent]
    most = [
        max(within.items(), key=lambda item: item[1], default=((" ", ""), 0.0)) for within in spent
    ]
    return [part if ms > rest else (" ", "") for (part, ms), rest in zip(most, idle, strict=True)]


def _step_row(lane: Lane, duration_ms: float, width: int) -> str:
    """Where steps begin, with their numbers where these fit."""
    at = [min(width - 1, int(mark.start_ms / duration_ms * width)) for mark in lane.steps]
    row = [" "] * width
    for begin, end, mark in zip(at, (*at[1:], width), lane.steps, strict=True):
        name = str(mark.number)
        shown = f"|{name}" if begin + len(name) < end else "|"
        row[begin : begin + len(shown)] = shown
    return "".join(row).rstrip()


def _axis(duration_ms: float, width: int) -> tuple[str, str]:
    marked = ticks(duration_ms, width // 12)
    at = [min(width - 1, int(ms / duration_ms * width)) for ms in marked]
    labels = dict(zip(at, map(number, marked), strict=True))
    labels[at[-1]] += " ms"
    return "".join("+" if i in labels else "-" for i in range(width)), along(labels, width + 2, 0.0)


def timeline_page(timeline: Timeline, title: str) -> str:
    return page(
        "timeline.html",
        title,
        findings(timeline),
        (),
        to_jsonable(timeline),
        styles=("timeline.css",),
        heading=heading(timeline).capitalize(),
        timeline=timeline_context(timeline),
    )


def timeline_context(timeline: Timeline) -> dict[str, Any]:
    lanes = {
        kind: [lane for lane in timeline.lanes if lane.kind == kind]
        for kind in ("training", "worker")
    }
    return {
        "findings": findings(timeline),
        "picture": timeline_svg(timeline),
        "parts": [row for lane in lanes["training"] for row in _part_rows(lane, timeline)],
        "workers": (
            [_worker_row(lane, timeline.duration_ms) for lane in lanes["worker"]]
            if has_workers(timeline)
            else []
        ),
    }


def _part_rows(lane: Lane, timeline: Timeline) -> Iterator[Sequence[str]]:
    """The longest first."""
    whole = math.fsum(b.end_ms - b.start_ms for b in lane.bars)
    for ms, part in sorted(
        ((lane.ms_of(part), part) for part in {b.part for b in lane.bars}), reverse=True
    ):
        each = number(ms / len(lane.steps))
        yield (
            str(lane.rank),
            str(len(lane.steps)),
            part_words(part, timeline),
            each,
            percent(ms / whole),
        )


def _worker_row(lane: Lane, duration_ms: float) -> Sequence[str]:
    whole = [b.end_ms - b.start_ms for b in lane.bars if b.start_ms > 0 and b.end_ms < duration_ms]
    mean = number(math.fsum(whole) / len(whole)) if whole else NONE
    return (
        str(lane.rank),
        lane.label,
        str(len(lane.bars)),
        mean,
        percent(lane.ms_of("fetch") / duration_ms),
    )


def timeline_svg(timeline: Timeline) -> Markup:
    """A picture that stands alone: rows on a time axis, steps marked, waiting for data hatched."""
    labels = [label_of(lane, timeline) for lane in timeline.lanes]
    left = 16 + 7.2 * max(map(len, labels))
    scale = (WIDTH - left - RIGHT) / timeline.duration_ms
    tops, bottom = [], float(TOP)
    for i, lane in enumerate(timeline.lanes):
        bottom += GROUP_GAP if i and lane.kind == "training" else 0
        tops.append(bottom)
        bottom += ROW
    last = {lane.rank: y + BAR for lane, y in zip(timeline.lanes, tops, strict=True)}
    rows = [
        {
            "label": label,
            "y": y,
            "last": last[lane.rank],
            "bars": _bars(lane, left, scale, timeline),
            "marks": _marks(lane, left, scale) if lane.kind == "training" else (),
        }
        for lane, label, y in zip(timeline.lanes, labels, tops, strict=True)
    ]
    key, height = _key(timeline, left, bottom + 44)
    return rendered(
        "timeline.svg",
        title=f"Timeline of {heading(timeline)}",
        findings=findings(timeline),
        style=asset("timeline.css"),
        width=WIDTH,
        height=height,
        left=round(left, 1),
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=bottom,
        rows=rows,
        key=key,
        ticks=[(round(left + ms * scale, 1), number(ms)) for ms in ticks(timeline.duration_ms, 10)],
    )


def _paint(part: str, odd: bool = False) -> str:
    if part == WAITING:
        return 'fill="url(#timeline-waiting)"'
    colour = "var(--rest)" if part == "other" else LOOK[part][1]
    return f'fill="{colour}"' + (' opacity="0.72"' if odd else "")


def _letter(part: str) -> str:
    return "" if part in (WAITING, "other", "fetch") else LOOK[part][0]


def _bars(
    lane: Lane, left: float, scale: float, timeline: Timeline
) -> Iterator[tuple[float, float, str, str, str]]:
    for i, bar in enumerate(coarsened(lane.bars, DOT / scale)):
        ms = bar.end_ms - bar.start_ms
        named = f" ({bar.name})" if bar.name and bar.name != bar.part else ""
        tip = f"{part_words(bar.part, timeline)}{named}: {number(ms)} ms"
        letter = _letter(bar.part) if ms * scale >= LETTER_FROM else ""
        paint = _paint(bar.part, bar.part == "fetch" and i % 2 == 1)
        yield round(left + bar.start_ms * scale, 2), round(ms * scale, 2), paint, tip, letter


def _marks(lane: Lane, left: float, scale: float) -> Iterator[tuple[float, str]]:
    starts = [left + mark.start_ms * scale for mark in lane.steps]
    for i, (x, after) in enumerate(zip(starts, (*starts[1:], WIDTH - RIGHT), strict=True)):
        name = str(lane.steps[i].number)
        texts = (f"step {name}", name) if i == 0 else (name,)
        yield round(x, 1), next((t for t in texts if 7 * len(t) + 3 <= after - x), "")


def _key(
    timeline: Timeline, left: float, y: float
) -> tuple[list[tuple[float, float, str, str, str]], float]:
    """With the height that the picture needs."""
    entries, x = [], left
    for part in parts_of(timeline):
        name = part_words(part, timeline)
        if x + 40 + 7 * len(name) > WIDTH:
            x, y = left, y + 20
        entries.append((round(x, 1), y, _paint(part), _letter(part), name))
        x += 42 + 7 * len(name)
    return entries, y + 24
