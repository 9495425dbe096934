"""Timeline of a watched run: the parts of each rank's steps, and the batches of its workers.

A window of the run becomes bars for a picture. The whole run becomes a file in the Trace Event
Format for Perfetto or chrome://tracing.
"""

import gzip
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.records import Record, written_aside
from trainpace.watch.event_logs import (
    Notes,
    ProcessLog,
    fetches_of,
    process_logs,
    readable,
    records_of,
)
from trainpace.watch.inside.event_log import OTHER, PARTS, PLAIN, TRIALS, Fetch, Span, Step
from trainpace.watch.inside.recorder import COVERING
from trainpace.watch.stragglers import WARM_UP_STEPS, common, offsets_ns, rank_steps

STEPS_SHOWN = 10
"""Steps in a window if no steps are requested."""
TYPICAL = 1.25
"""Largest ratio of a shown window to the median window, so that no evaluation dwarfs the rest."""


class WorkerLane(NamedTuple):
    """Logs of successive worker processes with the same number, oldest first.

    `loader` is 1, or a higher number if workers of several loaders ran at the same time.
    """

    worker: int
    loader: int
    paths: tuple[Path, ...]
    first_ns: int
    last_ns: int

    def fetches(self) -> Iterator[Fetch]:
        """Yield the fetches of all workers in the lane, oldest first."""
        for path in self.paths:
            yield from fetches_of(path)

    @property
    def label(self) -> str:
        return f"worker {self.worker}" + (f" of loader {self.loader}" if self.loader > 1 else "")


class Process(NamedTuple):
    """A process that imported torch.

    Attributes:
        shift_ns: Difference to add to its times to get the first rank's clock.
        steps: Number of all optimizer steps.
        detailed: Steps with recorded spans, in order.
    """

    path: Path
    rank: int
    pid: int
    host: str
    shift_ns: int
    first_ns: int
    steps: int
    detailed: tuple[Step, ...]
    workers: tuple[WorkerLane, ...]


def read_processes(folder: Path) -> list[Process]:
    """Return the processes of a folder, sorted by rank.

    If any process trained, launchers and helpers without steps are left out.

    Raises:
        UnreadableInput: The folder has no event log, or a file is not an event log.
    """
    processes = []
    for log in process_logs(folder):
        with readable(log.path):
            processes.append((_process_of(log), int(log.header.get("clock_to_wall_ns", 0))))
    if not processes:
        raise UnreadableInput(
            f"{folder} holds no recording.", "Make one: trainpace watch -- python train.py"
        )
    processes = [pair for pair in processes if pair[0].steps] or processes
    processes.sort(key=lambda pair: (pair[0].rank, pair[0].first_ns))
    (first, zero_ns), *_ = processes
    ahead_ns = {first.host: 0} | _clock_offsets_ns([process for process, _ in processes])
    # Clocks of one host agree better than wall-clock readings of its processes.
    return [
        process._replace(
            shift_ns=-ahead_ns[process.host] if process.host in ahead_ns else clock_ns - zero_ns
        )
        for process, clock_ns in processes
    ]


def _clock_offsets_ns(processes: Sequence[Process]) -> dict[str, int]:
    """Return how far each host's clock is ahead of the first rank's, in nanoseconds.

    The offsets come from common collectives.

    The result is empty without common collectives. Wall clocks are used then.
    """
    longest = {p.rank: p for p in sorted(processes, key=lambda p: p.steps)}
    if len({p.host for p in longest.values()}) < 2:
        return {}
    recorded = {}
    for rank, process in longest.items():
        with readable(process.path):
            recorded[rank] = rank_steps(records_of(process.path))
    steps = common(recorded)
    if not all(steps.values()):
        return {}
    return offsets_ns(steps, {rank: p.host for rank, p in longest.items()})


def _process_of(log: ProcessLog) -> Process:
    rank, steps, first, has_spans = log.header.get("rank"), 0, 0, False
    detailed = []
    for r in records_of(log.path):
        if isinstance(r, Span):
            has_spans |= r.thread == 0
            if not steps:
                first = min(first or r.start_ns, r.start_ns)
        elif isinstance(r, Step):
            if has_spans:
                detailed.append(r)
            if not steps:
                first = r.start_ns
            steps, has_spans = steps + 1, False
        elif isinstance(r, dict):
            rank = r.get("rank", rank)
    return Process(
        log.path,
        int(rank or 0),
        int(log.header["pid"]),
        str(log.header["host"]),
        0,
        first,
        steps,
        tuple(detailed),
        _worker_lanes(log.workers),
    )


def _worker_lanes(workers: Sequence[tuple[Path, int]]) -> tuple[WorkerLane, ...]:
    """Group workers into lanes.

    Workers with the same number share a lane, unless two loaders had them at the same time.
    """
    lives = []
    for path, worker in workers:
        fetches = fetches_of(path)
        if first := next(fetches, None):
            last = deque(fetches, maxlen=1) or [first]
            lives.append(WorkerLane(worker, 1, (path,), first.start_ns, last[0].end_ns))
    lanes: list[WorkerLane] = []
    for life in sorted(lives, key=lambda w: w.first_ns):
        same = [i for i, lane in enumerate(lanes) if lane.worker == life.worker]
        free = next((i for i in same if lanes[i].last_ns <= life.first_ns), None)
        if free is None:
            lanes.append(life._replace(loader=1 + len(same)))
        else:
            paths = (*lanes[free].paths, *life.paths)
            lanes[free] = lanes[free]._replace(paths=paths, last_ns=life.last_ns)
    return tuple(sorted(lanes, key=lambda lane: (lane.loader, lane.worker)))


class Bar(Record):
    """A stretch of one part, in milliseconds from the start of the window.

    `part` is one of `PARTS`, or "fetch" for a worker's batch.
    """

    part: str
    name: str
    start_ms: float
    end_ms: float


class StepMark(Record):
    """One optimizer step and its trial. Times are clipped to the window."""

    number: int
    start_ms: float
    end_ms: float
    trial: str


class Lane(Record):
    """A row of bars in order, without overlaps.

    Bars of a training lane fill every step. Bars of a worker lane leave its idle time free. Only
    training lanes have `steps`.
    """

    rank: int
    kind: Literal["training", "worker"]
    label: str
    bars: tuple[Bar, ...]
    steps: tuple[StepMark, ...] = ()

    def ms_of(self, part: str) -> float:
        """Return the milliseconds of a part in this lane."""
        return math.fsum(b.end_ms - b.start_ms for b in self.bars if b.part == part)


class Timeline(Record):
    """A window over steps `first_step` to `last_step` of the lowest rank.

    Attributes:
        after_s: Seconds from that rank's first step to the window.
        on_gpu: Bars show when the host was busy. The GPU continues to work after them.
    """

    lanes: tuple[Lane, ...]
    first_step: int
    last_step: int
    after_s: float
    duration_ms: float
    on_gpu: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({lane.rank for lane in self.lanes}))


class _Window(NamedTuple):
    start_ns: int
    end_ns: int

    def ms(self, at_ns: int) -> float:
        return (min(max(at_ns, self.start_ns), self.end_ns) - self.start_ns) / 1e6

    def bars(self, part: str, name: str, start_ns: int, end_ns: int) -> Iterator[Bar]:
        """Yield the bar, clipped to the window. Yield nothing if it is outside."""
        if start_ns < self.end_ns and end_ns > self.start_ns:
            yield Bar(part=part, name=name, start_ms=self.ms(start_ns), end_ms=self.ms(end_ns))


def timeline_of(folder: Path, steps: range | None = None) -> Timeline:
    """Return the timeline of the requested steps, or of about ten typical steps from the middle.

    Args:
        folder: Folder of the recording.
        steps: Numbers of the requested steps. Of these, the longest run with spans is shown.

    Raises:
        UnreadableInput: The folder has no event logs.
        TrainpaceError: None of the requested steps has spans.
    """
    processes = read_processes(folder)
    first = processes[0]
    if not first.detailed:
        raise TrainpaceError(
            f"{folder} contains no training steps.", "A timeline needs steps of an optimizer."
        )
    chosen = _typical(first.detailed) if steps is None else _requested_steps(first.detailed, steps)
    window = _Window(chosen[0].start_ns, chosen[-1].end_ns)
    lanes = [lane for process in processes for lane in _lanes(process, window)]
    return Timeline(
        lanes=tuple(lanes),
        first_step=chosen[0].number,
        last_step=chosen[-1].number,
        after_s=(window.start_ns - first.first_ns) / 1e9,
        duration_ms=(window.end_ns - window.start_ns) / 1e6,
        on_gpu=any(step.reserved_gib > 0 for step in chosen),
    )


# ---- choice of steps


def _runs(steps: Iterable[Step]) -> list[list[Step]]:
    """Return runs of consecutive steps. Steps without spans interrupt a run."""
    grouped = groupby(enumerate(steps), key=lambda item: item[1].number - item[0])
    return [[step for _, step in run] for _, run in grouped]


def _requested_steps(detailed: Sequence[Step], requested: range) -> Sequence[Step]:
    runs = _runs(step for step in detailed if step.number in requested)
    if not runs:
        stretches = [f"{run[0].number} to {run[-1].number}" for run in _runs(detailed)]
        more = f" and {len(stretches) - 4} more stretches" if len(stretches) > 4 else ""
        which = f"step {requested.start} was"
        if len(requested) > 1:
            which = f"steps {requested[0]} to {requested[-1]} were"
        raise TrainpaceError(
            f"{which} not recorded in detail.", f"Choose among {', '.join(stretches[:4])}{more}."
        )
    return max(runs, key=len)


def _typical(detailed: Sequence[Step]) -> Sequence[Step]:
    """Return consecutive plain steps after the warm-up, near the middle and not unusually long."""

    plain = [s for s in detailed if s.trial == PLAIN] or list(detailed)
    warm = [s for s in plain if s.number >= WARM_UP_STEPS] or plain
    runs = _runs(warm)
    size = min(STEPS_SHOWN, max(map(len, runs)))
    windows = [run[i : i + size] for run in runs for i in range(len(run) - size + 1)]
    durations_ns = [window[-1].end_ns - window[0].start_ns for window in windows]
    longest_ns = TYPICAL * sorted(durations_ns)[len(windows) // 2]
    middle = warm[len(warm) // 2].number - size // 2
    pairs = zip(windows, durations_ns, strict=True)
    usual = [window for window, duration_ns in pairs if duration_ns <= longest_ns]
    return min(usual, key=lambda window: abs(window[0].number - middle))


# ---- lanes


def _lanes(process: Process, window: _Window) -> Iterable[Lane]:
    """Yield the rows of a process's training and workers, if it has a step in the window."""
    own = _Window(window.start_ns - process.shift_ns, window.end_ns - process.shift_ns)
    steps = [s for s in process.detailed if s.start_ns < own.end_ns and s.end_ns > own.start_ns]
    if not steps:
        return
    marks = [
        StepMark(
            number=s.number,
            start_ms=own.ms(s.start_ns),
            end_ms=own.ms(s.end_ns),
            trial=TRIALS[s.trial],
        )
        for s in steps
    ]
    bars = tuple(_training_bars(process.path, steps, own))
    yield Lane(rank=process.rank, kind="training", label="training", bars=bars, steps=tuple(marks))
    for lane in process.workers:
        if lane.first_ns < own.end_ns and lane.last_ns > own.start_ns:
            bars = tuple(_fetch_bars(lane, own))
            yield Lane(rank=process.rank, kind="worker", label=lane.label, bars=bars)


def _fetch_bars(lane: WorkerLane, window: _Window) -> Iterator[Bar]:
    for fetch in lane.fetches():
        name = f"{fetch.samples} sample{'' if fetch.samples == 1 else 's'}"
        yield from window.bars("fetch", name, fetch.start_ns, fetch.end_ns)


def _training_bars(path: Path, steps: Sequence[Step], window: _Window) -> Iterable[Bar]:
    within: list[list[Span]] = [[] for _ in steps]
    starts, ends = [s.start_ns for s in steps], [s.end_ns for s in steps]
    notes = Notes()
    for r in records_of(path):
        notes.add(r)
        if isinstance(r, Span) and r.thread == 0:
            for i in range(bisect_left(ends, r.start_ns + 1), bisect_left(starts, r.end_ns)):
                within[i].append(r)
    names = notes.span_names
    for step, spans in zip(steps, within, strict=True):
        for part, number, start, end in charged(step, spans):
            yield from window.bars(PARTS[part], names.get(number, ""), start, end)


Stretch = tuple[int, int, int, int]
"""(part, number of its name, start_ns, end_ns)"""


def charged(step: Step, spans: Sequence[Span]) -> list[Stretch]:
    """Cut a step into stretches without overlaps or gaps, charged as the recorder charges time.

    A stretch belongs to the innermost span, or to a span of `COVERING` around it. Outside of all
    spans it belongs to `other`. Nested stretches of one part are merged.
    """
    out: list[Stretch] = []
    at = step.start_ns
    open_spans = [(OTHER, 0, step.end_ns)]

    def charge(until: int) -> None:
        nonlocal at
        if until <= at:
            return
        part, name, _ = open_spans[-1]
        if out and out[-1][0] == part and out[-1][3] == at:
            out[-1] = (part, out[-1][1] or name, out[-1][2], until)
        else:
            out.append((part, name, at, until))
        at = until

    def close(until: int) -> None:
        while open_spans and open_spans[-1][2] <= until:
            charge(open_spans[-1][2])
            open_spans.pop()

    for span in sorted(
        (s for s in spans if s.start_ns < step.end_ns), key=lambda s: (s.start_ns, -s.end_ns)
    ):
        close(span.start_ns)
        charge(span.start_ns)
        part, name, end = open_spans[-1]
        if part not in COVERING or span.part in COVERING:
            part, name = span.part, span.name
        open_spans.append((part, name, min(span.end_ns, end)))
    close(step.end_ns)
    return out


def coarsened(bars: Sequence[Bar], at_least_ms: float) -> list[Bar]:
    """Merge neighboring bars that are narrower than `at_least_ms`.

    The merged bar gets the part of the longest bar in it.
    """
    out: list[Bar] = []
    group: list[Bar] = []
    for bar, after in pairwise((*bars, None)):
        if bar is None:
            break
        group.append(bar)
        ends = after is None or after.start_ms > bar.end_ms
        if ends or bar.end_ms - group[0].start_ms >= at_least_ms:
            longest = max(group, key=lambda b: b.end_ms - b.start_ms)
            out.append(
                Bar(
                    part=longest.part,
                    name=longest.name,
                    start_ms=group[0].start_ms,
                    end_ms=bar.end_ms,
                )
            )
            group = []
    return out


# ---- the Trace Event Format
#
# Complete events (X) are in microseconds and must nest within a track. Metadata events (M) hold
# the names.

STEPS, TRAINING, FIRST_WORKER, FIRST_THREAD = 1, 2, 10, 1000
_HELD = 20_000
"""Largest number of events that are held for sorting."""
APART_NS = 2
"""Nanoseconds between events that would touch.

A viewer that rounds to nanoseconds would otherwise see an overlap.
"""
Event = dict[str, Any]


def write_trace(folder: Path, path: Path) -> int:
    """Write a folder of event logs as trace JSON and return the number of events.

    The file is compressed if its name ends in .gz. It is written completely or not at all. Memory
    holds the spans of one step at a time.

    Raises:
        UnreadableInput: The folder has no event logs, or the file cannot be written.
    """
    processes = read_processes(folder)
    count, encode = 0, msgspec.json.Encoder().encode
    with (
        written_aside(path) as aside,
        (
            gzip.open(aside, "wb", compresslevel=5) if path.suffix == ".gz" else aside.open("wb")
        ) as file,
    ):
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in trace_events(processes):
            file.write((b"," if count else b"") + encode(event) + b"\n")
            count += 1
        file.write(b"]}\n")
    return count


def trace_events(processes: Iterable[Process]) -> Iterator[Event]:
    """Yield the trace events of all processes.

    The process number of a rank is the rank + 1, because Perfetto reserves 0 for the kernel
    (google/perfetto#394).
    """
    processes = list(processes)
    zero_ns = min(p.first_ns + p.shift_ns for p in processes)
    taken: set[int] = set()
    for process in processes:
        pid = next(n for n in (process.rank + 1, *range(1000, 10**6)) if n not in taken)
        taken.add(pid)
        label = f"rank {process.rank} (process {process.pid} on {process.host})"
        yield from _named("process", pid, 0, label, process.rank)
        for tid, name in ((STEPS, "steps"), (TRAINING, "training")):
            yield from _named("thread", pid, tid, name, tid)
        yield from _process_events(process, pid, process.shift_ns - zero_ns)
        for tid, lane in enumerate(process.workers, FIRST_WORKER):
            yield from _named("thread", pid, tid, lane.label, tid)
            for r in lane.fetches():
                yield _event(r, pid, tid, process.shift_ns - zero_ns)


def _process_events(process: Process, pid: int, shift_ns: int) -> Iterator[Event]:
    names: dict[int, str] = {}
    threads = {0: TRAINING}
    held: list[Event] = []
    for r in records_of(process.path):
        if isinstance(r, Span):
            if r.thread not in threads:
                tid = threads[r.thread] = FIRST_THREAD + len(threads)
                yield from _named("thread", pid, tid, f"thread {r.thread}", tid)
            held.append(_event(r, pid, threads[r.thread], shift_ns, names.get(r.name, "")))
        elif isinstance(r, Fetch):
            held.append(_event(r, pid, TRAINING, shift_ns))
        elif isinstance(r, Step):
            yield _event(r, pid, STEPS, shift_ns)
        elif "number" in r:
            names[r["number"]] = r["name"]
        if isinstance(r, Step) or len(held) > _HELD:
            yield from _outer_first(held)
            held = []
    yield from _outer_first(held)


def _outer_first(events: list[Event]) -> list[Event]:
    """Sort spans by their start.

    Logs list a span when it ends, and viewers need the outer span first.
    """
    return sorted(events, key=lambda e: (e["ts"], -e["dur"]))


def _event(r: Step | Span | Fetch, pid: int, tid: int, shift_ns: int, name: str = "") -> Event:
    duration_ns, about = r.end_ns - r.start_ns, dict[str, Any]()
    if isinstance(r, Step):
        category, name = "step", f"step {r.number}"
        parts = {f"{part}_ms": ns / 1e6 for part, ns in zip(PARTS, r.parts_ns, strict=True) if ns}
        about = {
            "trial": TRIALS[r.trial],
            "samples": r.samples,
            "micro_steps": r.micro_steps,
            **parts,
        }
        duration_ns = max(0, duration_ns - APART_NS)
    elif isinstance(r, Fetch):
        category = name = "fetch"
        about = {"samples": r.samples, "cpu_ms": r.cpu_ns / 1e6, "collate_ms": r.collate_ns / 1e6}
    else:
        category = PARTS[r.part]
        name, about = name or category, {"part": category}
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": (r.start_ns + shift_ns) / 1e3,
        "dur": duration_ns / 1e3,
        "args": about,
    }


def _named(kind: str, pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    """Yield the name of a process or thread, and its position among the others."""
    for what, value in (("name", name), ("sort_index", place)):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": {what: value}}
