"""Report sections for recorded training scripts: first look, parts of a step, and timeline."""

from __future__ import annotations

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainpace.core.child import ending_of
from trainpace.core.host import home_folder
from trainpace.core.outcome import Interval
from trainpace.core.units import format_duration
from trainpace.diagnose import (
    WORTH,
    Diagnosis,
    Share,
    clocks_in_words,
    unseen_in_words,
    workers_beside,
)
from trainpace.journal import Guarded, Pace
from trainpace.report.charts import label_line, tick_step
from trainpace.report.diagnosis import recorded_ranks_sections, saved_ms
from trainpace.report.pages import asset, rendered
from trainpace.report.phrases import (
    bracketed,
    change,
    duration,
    given,
    interval_90,
    listed,
    number,
    percent,
    plural,
    rate_in_words,
    sentence,
    span,
    usd,
)
from trainpace.report.sections import (
    Column,
    Drawing,
    Headline,
    Lines,
    Next,
    Notes,
    Section,
    say,
    shares_table,
    tabulate,
    words,
)
from trainpace.verbs.diagnose import DiagnoseRequest
from trainpace.verbs.look import Elsewhere, Looked, LookRequest
from trainpace.verbs.request import forwarded
from trainpace.watch import (
    NOT_RESTORED,
    PARTS,
    STEP_IN_WORDS,
    Lane,
    Line,
    Rank,
    Recording,
    Timeline,
    batches_per_step,
    coarsened,
    untraced_in_words,
)

if TYPE_CHECKING:
    from markupsafe import Markup

    from trainpace.offers import Match

WAITING = "data"
APPEARANCE = {
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
"""Letter, color and name of each part of a step."""

NEXT_BATCH = "="
"""Letter of every second batch of a worker, to distinguish adjacent batches."""
WIDTH, RIGHT, TOP = 920, 16, 34
"""Width, right margin and top margin of the SVG in pixels."""
ROW, BAR, GROUP_GAP = 26, 20, 30
"""Heights of a row and of a bar, and the gap between ranks, in pixels."""
DOT = 0.5
"""Width in pixels below which adjacent bars are merged."""
LETTER_FROM = 13.0
"""Width in pixels from which a bar gets a letter."""
MOST_RANKS = 8
"""Maximum number of ranks with a column of their own."""


def recording_sections(recording: Recording, folder: str = "") -> Iterator[Section]:
    """Convert a recording to sections: the parts of a step, the ranks, and warnings."""
    ranks = recording.ranks
    if not ranks:
        yield Headline(f"No training step was seen. {recording.seen}".rstrip(), good=False)
        yield Lines([STEP_IN_WORDS])
        return
    first, step_ms = ranks[0], fmean(r.step_ms for r in ranks)
    trained = given(" ".join(recording.command), "{}: trained") or "Trained"
    yield say(f"{trained} {trained_on(first)}{given(folder, ', recorded in {}')}")
    means = [
        (APPEARANCE[part][2], fmean([r.parts_ms[part] for r in ranks]), part) for part in PARTS
    ]
    parts = sorted(means, key=lambda mean: -mean[1])
    largest, ms, _ = parts[0]
    yield Headline(
        f"{plural(first.steps, 'step')}{given(first.warm_up, ' after {} of warm-up')},"
        f" {duration(step_ms / 1000)} each; the largest part is {largest}"
        f" ({percent(ms / step_ms, digits=1)})."
    )
    each = map(_rank_column, ranks[:MOST_RANKS] if len(ranks) > 1 else ())
    yield shares_table("part of a step", parts, step_ms, *each, digits=1, least=0.0005)
    yield from recorded_ranks_sections(recording)
    yield Notes(_remarks(recording, step_ms))
    yield say(*_doubts(recording))
    diagnosed = any(r.blocks for r in ranks)  # `trainpace diagnose` made this recording.
    if folder and diagnosed:
        why = "reads this recording again, and says what to change"
        yield Next(["trainpace", "diagnose", folder], why)
    else:
        yield Next(recording.proved_by, "proves what slows it down, and says what to change")


def _rank_column(rank: Rank) -> Column:
    return Column(f"rank {rank.rank}", 2, cell=lambda part: number(rank.parts_ms[part[2]]))


def trained_on(rank: Rank) -> str:
    if rank.accelerator:
        return f"on {rank.accelerator}"
    more = f" on {plural(rank.cpus, 'core')}" if rank.threads > rank.cpus else ""
    by = given(os.path.basename(rank.threads_by).partition(" ")[0], ", set by {}")
    return f"on the CPU ({plural(rank.threads, 'thread')}{more}{by})"


def guarded_sections(guarded: Guarded) -> Iterator[Section]:
    """Report whether the training became slower than its baseline."""
    ratio, between, faster = guarded.ratio, "", ""
    if ratio.low is not None and ratio.high is not None:
        between = f" ({change(ratio.low, 1).removesuffix('%')} to {change(ratio.high, 1)})"
        faster = f", {1 / ratio.ratio:.3g} times as fast" if ratio.high < 1 else ""
    yield Headline(
        f"{'Regressed' if guarded.regressed else 'No regression'}: the median step takes"
        f" {_pace(guarded.now)}, compared with {_pace(guarded.baseline)} in the baseline"
        f" {guarded.baseline.run}: {change(ratio.ratio, 1)}{between}{faster}. A slowdown of up to"
        f" {100 * guarded.tolerance:g}% beyond the noise is accepted.",
        good=not guarded.regressed,
    )


def _pace(pace: Pace) -> str:
    return f"{number(pace.step_ms)} ms{bracketed(pace.interval_ms)}"


def step_in_words(rank: Rank) -> str:
    """Describe the batches and optimizers of a step. "" for one batch and one optimizer."""
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


COLLECTS = "The script's own code includes collecting experience for the next updates."
HOST_TIMES = "Times are the host's: the device works asynchronously, until something waits for it."


def _remarks(recording: Recording, step_ms: float) -> list[str]:
    first = recording.ranks[0]
    own, samples = first.parts_ms["other"], sum(r.samples_per_step for r in recording.ranks)
    per_s = number(1000 * samples / step_ms)
    top = next((line for line in first.lines if line.part == "other"), None)
    after = {part: first.after_last_ms.get(part, 0.0) for part in ("evaluation", "checkpoint")}
    shown = [
        f"{duration(ms / 1000)} of {APPEARANCE[part][2]}"
        for part, ms in after.items()
        if ms > step_ms
    ]
    lines = [
        given(step_in_words(first), "A step is {}."),
        given(samples, f"{per_s} samples/s, {{:.0f}} samples per step."),
        _own_code(top) if top is not None and own > 0.1 * step_ms else "",
        given(first.collects_experience and COLLECTS),
        given(listed(shown), "After the last step came {}, which is not in the table."),
        given(first.accelerator and HOST_TIMES),
    ]
    return list(filter(None, lines))


def _own_code(top: Line) -> str:
    called = given(top.called, ", in {}")
    return f"Of the script's own code, {top.share:.0%} is at {top.line}{called}."


def _doubts(recording: Recording) -> Iterator[str]:
    """Yield warnings about missing parts of a recording."""
    first, code, seen = recording.ranks[0], recording.exit_code, len(recording.ranks)
    if code:
        yield f"The command {ending_of(code)}."
    elif code is None or not all(r.complete for r in recording.ranks):
        yield "A process was killed. What it recorded before that is included."
    if seen < first.world_size:
        yield f"{seen} of {first.world_size} ranks were recorded here."
    if first.no_workload:
        yield untraced_in_words(first)
    yield from map(sentence, clocks_in_words(recording.together))
    yield recording.seen


def part_words(part: str, timeline: Timeline) -> str:
    """Return the name of a part.

    Without workers, the training process loads its data itself.
    """
    if part == WAITING and not has_workers(timeline):
        return "loading data in the main process"
    return APPEARANCE[part][2]


def has_workers(timeline: Timeline) -> bool:
    return any(lane.kind == "worker" for lane in timeline.lanes)


def findings(timeline: Timeline) -> list[str]:
    """Describe how long each rank waits for data, and how busy its workers are."""
    lines = []
    several = len(timeline.ranks) > 1
    for rank in timeline.ranks:
        training, *workers = (lane for lane in timeline.lanes if lane.rank == rank)
        who = f"Rank {rank}" if several else "Training"
        lines.append(f"{who} {_waiting(training, workers, timeline.duration_ms)}")
    if several:
        lines.append("A rank that waits for another does so in its backward pass or communication.")
    if timeline.on_gpu:
        lines.append(
            "Bars are host time: what the host starts on the GPU goes on after the bar ends."
        )
    return lines


def _waiting(training: Lane, workers: Sequence[Lane], duration_ms: float) -> str:
    """Describe how long a training process waits for data, and how busy its workers are."""
    shown, waited = _total_ms(training), training.ms_of(WAITING)
    per_step = number(waited / len(training.steps))
    share = f"{percent(waited / shown)} of the time ({per_step} ms per step)"
    if not workers:
        return f"spends {share} loading data in the main process, without workers."
    busy = percent(fmean(lane.ms_of("fetch") for lane in workers) / duration_ms)
    many = "its worker process prepares"
    if len(workers) > 1:
        many = f"its {len(workers)} worker processes prepare"
    starting = training.ms_of("loader_start") / shown
    begins = f" and for the loader's start {percent(starting)}" if starting > 0.01 else ""
    return f"waits for data {share}{begins}; {many} batches {busy} of the time."


def _total_ms(lane: Lane) -> float:
    return math.fsum(b.end_ms - b.start_ms for b in lane.bars)


def label_of(lane: Lane, timeline: Timeline) -> str:
    return f"rank {lane.rank} {lane.label}" if len(timeline.ranks) > 1 else lane.label


def ticks(duration_ms: float, at_most: int) -> list[float]:
    step = tick_step(max(duration_ms, 1e-6), max(1, at_most))
    return [i * step for i in range(int(duration_ms / step + 1e-9) + 1)]


def parts_of(timeline: Timeline) -> list[str]:
    drawn = {bar.part for lane in timeline.lanes for bar in lane.bars}
    return [part for part in APPEARANCE if part in drawn]


def heading(timeline: Timeline) -> str:
    which = f"step {timeline.first_step}"
    if timeline.last_step > timeline.first_step:
        which = f"steps {timeline.first_step} to {timeline.last_step}"
    return (
        f"{which}: {number(timeline.duration_ms)} ms, {number(timeline.after_s)} s after the first"
        " began"
    )


def timeline_sections(timeline: Timeline) -> Iterator[Section]:
    """Draw a timeline: letters as wide as the terminal, or a picture with tables on a page."""
    yield Drawing(
        html=lambda: timeline_svg(timeline),
        text=lambda width: _timeline_text(timeline, width),
        style="timeline.css",
        aside="timeline of data against steps",
    )
    yield Lines(findings(timeline), only="page")
    training = [lane for lane in timeline.lanes if lane.kind == "training"]
    parts = [
        (lane, ms, part_words(part, timeline))
        for lane in training
        for ms, part in sorted(((lane.ms_of(part), part) for part in APPEARANCE), reverse=True)
        if ms
    ]
    columns = (
        words("rank", cell=lambda row: str(row[0].rank)),
        words("steps", cell=lambda row: str(len(row[0].steps))),
        words("part", cell=lambda row: row[2]),
        Column("ms per step", cell=lambda row: number(row[1] / len(row[0].steps))),
        Column("share", cell=lambda row: percent(row[1] / _total_ms(row[0]))),
    )
    yield tabulate(parts, columns, only="page", aside="where the steps' time goes")


def _timeline_text(timeline: Timeline, width: int) -> Iterator[Any]:
    """Yield lines of rich text. Letters distinguish the parts if there are no colors."""
    from rich.text import Text

    labels = [label_of(lane, timeline) for lane in timeline.lanes]
    indent = max(map(len, labels)) + 1
    across = max(20, width - indent - 2)
    yield Text(f"timeline of {heading(timeline)}", style="bold")
    for lane, label in zip(timeline.lanes, labels, strict=True):
        if lane.kind == "training":
            row = " " * indent + _step_row(lane, timeline.duration_ms, across)
            yield Text(row, style="dim")
        bars = Text(f"{label:<{indent}}")
        for letter, part in cells(lane, timeline.duration_ms, across):
            bars.append(letter, style=_style(part))
        yield bars
    for line in _axis(timeline.duration_ms, across):
        yield Text(" " * indent + line)
    key, used = Text(), 0
    for part in parts_of(timeline):
        letters = f"{APPEARANCE[part][0]}{NEXT_BATCH}" if part == "fetch" else APPEARANCE[part][0]
        name = f" {part_words(part, timeline)}   "
        used += len(letters) + len(name)
        if used > width:
            key.append("\n")
            used = len(letters) + len(name)
        key.append(letters, style=_style(part))
        key.append(name)
    yield key
    yield from findings(timeline)


def _style(part: str) -> str:
    """Return the style of a part.

    Waiting for data and the script's own code have no background color, so they look like gaps.
    """
    if part in ("", "other"):
        return "dim"
    return APPEARANCE[WAITING][1] if part == WAITING else f"#ffffff on {APPEARANCE[part][1]}"


def cells(lane: Lane, duration_ms: float, width: int) -> list[tuple[str, str]]:
    """Return the (letter, part) with the largest share of each cell, or (" ", "") if it is idle."""
    size = duration_ms / width
    spent: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in range(width)]
    for i, bar in enumerate(lane.bars):
        letter = NEXT_BATCH if bar.part == "fetch" and i % 2 else APPEARANCE[bar.part][0]
        for cell in range(int(bar.start_ms / size), min(width, math.ceil(bar.end_ms / size))):
            ms = min(bar.end_ms, (cell + 1) * size) - max(bar.start_ms, cell * size)
            spent[cell][letter, bar.part] += max(0.0, ms)
    idle = [size - math.fsum(within.values()) for within in spent]
    most = [
        max(within.items(), key=lambda item: item[1], default=((" ", ""), 0.0)) for within in spent
    ]
    return [part if ms > rest else (" ", "") for (part, ms), rest in zip(most, idle, strict=True)]


def _step_row(lane: Lane, duration_ms: float, width: int) -> str:
    """Return a line that marks the beginning of each step, with step numbers if they fit."""
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
    line = "".join("+" if i in labels else "-" for i in range(width))
    return line, label_line(labels, width + 2, 0.0)


def timeline_svg(timeline: Timeline) -> Markup:
    """Return the timeline as SVG: lanes on a time axis, marked steps, and hatched data waits."""
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
    colour = "var(--rest)" if part == "other" else APPEARANCE[part][1]
    return f'fill="{colour}"' + (' opacity="0.72"' if odd else "")


def _letter(part: str) -> str:
    return "" if part in (WAITING, "other", "fetch") else APPEARANCE[part][0]


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
    """Return the entries of the legend, and the height of the whole picture."""
    entries, x = [], left
    for part in parts_of(timeline):
        name = part_words(part, timeline)
        if x + 40 + 7 * len(name) > WIDTH:
            x, y = left, y + 20
        entries.append((round(x, 1), y, _paint(part), _letter(part), name))
        x += 42 + 7 * len(name)
    return entries, y + 24


MOST_CAUSES = 4
MOST_CHANGES = 3
ENOUGH_STEPS = 8
"""Number of steps below which a longer recording is recommended."""
LEAST_SHARE = 0.02
"""Minimum share of a step for a cause to be listed."""
LEAST_UNTESTED = 0.1
"""Minimum share of a step at which the suggestion to run `trainpace diagnose` names a cause."""
NOTHING_SEEN = f"This recording alone suggests no change that saves {percent(WORTH)} or more."
_NAMES = {"compute": "forward and backward"}
"""Names of causes in a look. Only diagnose can tell launching operators from computing."""


def look_sections(looked: Looked, asked: LookRequest | None = None) -> Iterator[Section]:
    """Convert a first look at a script to sections.

    `asked` is the original request. Its options go into the suggested next command.
    """
    d, recording = looked.diagnosis, looked.watched.recording
    step = Interval(low=d.step_ms_low, high=d.step_ms_high, coverage=0.9, basis="blocks of steps")
    yield Headline(f"{_whole(looked)} A step takes {number(d.step_ms)} ms{bracketed(step)}.")
    yield Lines(_conditions(looked))
    causes = [(_NAMES.get(s.cause, s.in_words), s.ms) for s in d.shares if s.share >= LEAST_SHARE]
    yield shares_table("where a step's time goes", causes[:MOST_CAUSES], d.step_ms)
    yield _advice(looked)
    yield from _elsewhere(looked)
    command = [*forwarded(asked, DiagnoseRequest, ["output"]), "--", *recording.command]
    names = " and ".join(
        f"{_NAMES.get(s.cause, s.in_words)} ({percent(s.share)})" for s in untested(d)
    )
    proves = "proves the cause by removing one suspect at a time"
    why = f"tests changes to {names}" if names else proves
    yield Next(["trainpace", "diagnose", *command], why)
    yield Lines([f"Recorded in {from_home(looked.watched.folder)}"])
    if (steps := recording.ranks[0].steps) < ENOUGH_STEPS:
        was = "was" if steps == 1 else "were"
        more = "--for 60s gives a more precise answer."
        yield Lines([f"Only {plural(steps, 'step')} {was} recorded. {more}"])


def untested(d: Diagnosis) -> list[Share]:
    """Return the large causes without advice that only `trainpace diagnose` can test."""
    causes = {"compute", "optimizer"} - {a.cause for a in d.advice}
    return [s for s in d.shares if s.share >= LEAST_UNTESTED and s.cause in causes]


def _advice(looked: Looked) -> Section:
    d, length = looked.diagnosis, looked.length
    if not d.advice:
        return Lines([NOTHING_SEEN])
    of = {"training": "in all", "epoch": "per epoch", "steps": f"of {plural(length.steps, 'step')}"}
    columns = (
        words("what to change (estimated)", least=20, cell="title"),
        Column("saved per step", cell=saved_ms),
        Column("share", 2, cell=lambda a: percent(a.saves_ms / d.step_ms)),
        Column(of[length.of], cell=lambda a: duration(looked.seconds * a.saves_ms / d.step_ms)),
    )
    return tabulate(d.advice[:MOST_CHANGES], columns)


def _whole(looked: Looked) -> str:
    between = interval_90(looked.interval_s, format_duration)
    took = f"{format_duration(looked.seconds)}{between} on this machine"
    length = looked.length
    steps = plural(length.steps, "step")
    if length.of == "steps":
        return f"{steps} take {took}."
    if length.of == "epoch":
        return f"An epoch of {steps} takes {took}."
    epochs = "" if length.epochs is None else f"{plural(length.epochs, 'epoch')}, "
    return f"The whole training ({epochs}{steps}) takes {took}."


def _conditions(looked: Looked) -> list[str]:
    """Return lines about the basis of the answer and its limits."""
    recording = looked.watched.recording
    ranks, first = recording.ranks, recording.ranks[0]
    samples = sum(rank.samples_per_step for rank in ranks)
    tokens = looked.elsewhere[0].match.forecast.sequence_length if looked.elsewhere else None
    rate = rate_in_words(1000 * samples / looked.diagnosis.step_ms, tokens) if samples else ""
    who = f", {len(ranks)} ranks" if len(ranks) > 1 else ""
    lines = [
        f"{shlex.join(recording.command)}: {plural(first.steps, 'step')} {trained_on(first)}{who}"
        f"{given(rate, ', {}')}.",
        *_length_in_words(looked),
    ]
    by_input = "batch size {}, the first dimension of the model's input."
    notes = [
        "" if samples else given(first.model_batch, by_input),
        looked.busy,
        workers_beside(ranks),
        *restored_notes(recording, looked.watched.folder),
    ]
    return lines + [f"Note: {note}" for note in notes if note]


def _length_in_words(looked: Looked) -> Iterator[str]:
    """Yield the source of the training's length, and the occasional parts that it omits."""
    length = looked.length
    if length.of == "steps":
        yield "The number of steps is unknown. Pass --max-steps N."
    elif length.of == "epoch":
        yield "The length of the training is unknown. Pass --epochs N."
    else:
        unseen = unseen_in_words(looked.watched.recording.ranks[0])
        source = f"Length {'' if length.words == 'as given' else 'by '}{length.words}"
        yield f"{source}; {unseen} was recorded or included." if unseen else f"{source}."


def _elsewhere(looked: Looked) -> Iterator[Section]:
    """Show the same training on rented GPUs."""
    if not looked.elsewhere:
        yield Lines([f"No forecast for rented GPUs: {looked.not_elsewhere}"])
        return

    def hours(m: Match) -> str:
        return span(3600 * m.hours.low, 3600 * m.hours.high, format_duration)

    def cost(c: Elsewhere) -> str:
        paid = c.match.mean_usd
        if not paid:
            return "no price"
        return usd(paid) if paid >= 0.01 else "< 1 cent"

    columns = (
        words("another card", least=12, cell="match.offer.device"),
        words("", 3, 8, "role"),
        Column("step ms", 2, cell="match.forecast.step.total_ms"),
        Column("time", cell=lambda c: duration(3600 * c.match.mean_hours)),
        Column("90% interval", 1, cell=lambda c: hours(c.match)),
        Column("cost", cell=cost),
    )
    yield tabulate(looked.elsewhere, columns)
    startup_s = looked.elsewhere[0].match.time.startup_s
    line = "Forecasts, with {} for starting the machine."
    said = [given(startup_s and duration(startup_s), line), *looked.elsewhere[0].included]
    yield say(" ".join(filter(None, said)))


def restored_notes(recording: Recording, folder: Path) -> Iterator[str]:
    """Report which overwritten files of earlier runs were restored, and which were not."""
    if recording.restored:
        have = "has" if len(recording.restored) == 1 else "have"
        yield (
            f"{_files(recording.restored)} of an earlier run, which the script overwrote, {have}"
            " been restored."
        )
    if recording.left:
        one = len(recording.left) == 1
        was, them, their = ("was", "it", "Its") if one else ("were", "them", "Their")
        yield (
            f"{_files(recording.left)} {was} not restored, because another program may be writing"
            f" to {them}. {their} earlier content is in {from_home(folder / NOT_RESTORED)}."
        )


def _files(paths: Sequence[str]) -> str:
    names = [os.path.relpath(path) for path in paths]
    return listed([*names[:2], *([plural(len(names) - 2, "other file")] if len(names) > 2 else [])])


def from_home(folder: Path) -> str:
    """Return a path for a shell. It starts with ~ if that needs no quotes."""
    home = home_folder()
    if home is not None and folder.is_relative_to(home):
        short = folder.relative_to(home).as_posix()
        if short == shlex.quote(short):
            return f"~/{short}"
    return shlex.quote(str(folder))
