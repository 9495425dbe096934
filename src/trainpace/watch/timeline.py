"""A watched run over time: the parts of each rank's training, and the batches that its workers prepare. A window of it gives bars
for a picture, all of it a file in the Trace Event Format for Perfetto or chrome://tracing."""

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
from trainpace.watch.event_logs import ProcessLog, fetches_of, process_logs, readable, records_of
from trainpace.watch.inside.event_log import OTHER, PARTS, TRIALS, Fetch, Span, Step
from trainpace.watch.inside.recorder import COVERING
from trainpace.watch.stragglers import WARM_UP_STEPS, common, offsets, rank_steps

STEPS_SHOWN = 10
TYPICAL = 1.25
"""A window is shown by itself if it takes at most this many times the median window, so that no evaluation dwarfs the rest."""


class WorkerLane(NamedTuple):
    """The trails of successive worker processes with one number, oldest first. `loader` numbers simultaneous ones from
    1, because they belong to different loaders."""

    worker: int
    loader: int
    paths: tuple[Path, ...]
    first_ns: int
    last_ns: int

    def fetches(self) -> Iterator[Fetch]:
        for path in self.paths:
            yield from fetches_of(path)

    @property
    def label(self) -> str:
        return f"worker {self.worker}" + (f" of loader {self.loader}" if self.loader > 1 else "")


class Process(NamedTuple):
    """A process that imported torch. `shift_ns` added to its times gives the first rank's clock; `steps` counts all
    optimizer steps, `detailed` holds those with spans, in order."""

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
    """The folder's processes by rank, without launchers and helpers where others trained.

    Raises UnreadableInput for a folder without a trail, or a file that is not one.
    """
    processes = [_process(log) for log in process_logs(folder)]
    if not processes:
        raise UnreadableInput(
            f"{folder} holds no recording.", "Make one: trainpace watch -- python train.py"
        )
    processes = [p for p in processes if p[0].steps] or processes
    processes.sort(key=lambda pair: (pair[0].rank, pair[0].first_ns))
    (first, zero), *_ = processes
    seen = _seen_apart_ns([p for p, _ in processes])
    # clocks of one host agree better than its processes' readings of the wall clock
    return [
        p._replace(
            shift_ns=(
                0
                if p.host == first.host
                else -seen[p.host]
                if p.host in seen
                else int(clock) - int(zero)
            )
        )
        for p, clock in processes
    ]


def _seen_apart_ns(processes: Sequence[Process]) -> dict[str, int]:
    """What the clocks of hosts are ahead of the first rank's, by the collectives that all ranks left together; empty where there
    are none, and then the wall clocks stand for it."""
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
    known = offsets(steps, {rank: p.host for rank, p in longest.items()})
    return {host: o.at_ns[len(o.at_ns) // 2] for host, o in known.items()}


def _process(log: ProcessLog) -> tuple[Process, float]:
    """The process, and the offset of its clock from the wall clock."""
    with readable(log.path):
        return _process_of(*log)


def _process_of(
    path: Path, header: dict[str, Any], workers: list[tuple[Path, int]]
) -> tuple[Process, float]:
    rank, steps, first, spans = header.get("rank"), 0, None, False
    detailed = []
    for r in records_of(path):
        if isinstance(r, Span):
            spans |= r.thread == 0
            first = r.start_ns if first is None or (not steps and r.start_ns < first) else first
        elif isinstance(r, Step):
            if spans:
                detailed.append(r)
            first = r.start_ns if not steps else first
            steps, spans = steps + 1, False
        elif isinstance(r, dict) and "rank" in r:
            rank = r["rank"]
    process = Process(
        path,
        int(rank or 0),
        int(header["pid"]),
        str(header["host"]),
        0,
        first or 0,
        steps,
        tuple(detailed),
        _worker_lanes(workers),
    )
    return process, int(header.get("clock_to_wall_ns", 0))


def _worker_lanes(workers: Sequence[tuple[Path, int]]) -> tuple[WorkerLane, ...]:
    """Lanes of workers: workers with one number share a lane unless two loaders had them at the same time."""
    lives = []
    for path, worker in workers:
        fetches = fetches_of(path)
        if first := next(fetches, None):
            last = deque(fetches, maxlen=1) or [first]
            lives.append(WorkerLane(worker, 1, (path,), first.start_ns, last[0].end_ns))
    lanes: list[WorkerLane] = []
    for life in sorted(lives, key=lambda w: w.first_ns):
        free = next(
            (
                i
                for i, w in enumerate(lanes)
                if w.worker == life.worker and w.last_ns <= life.first_ns
            ),
            None,
        )
        if free is None:
            lanes.append(life._replace(loader=1 + sum(w.worker == life.worker for w in lanes)))
        else:
            lanes[free] = lanes[free]._replace(
                paths=(*lanes[free].paths, *life.paths), last_ns=life.last_ns
            )
    return tuple(sorted(lanes, key=lambda w: (w.loader, w.worker)))


class Bar(Record):
    """A stretch of one part (one of `PARTS`, or "fetch" for a worker's batch), in milliseconds from the window's start."""

    part: str
    name: str
    start_ms: float
    end_ms: float


class StepMark(Record):
    """One optimizer step's place, clipped to the window, and its trial."""

    number: int
    start_ms: float
    end_ms: float
    trial: str


class Lane(Record):
    """A row of bars that are in order and do not overlap. Training's bars fill every step; a worker's leave its idle
    time free. Only training's rows have `steps`."""

    rank: int
    kind: Literal["training", "worker"]
    label: str
    bars: tuple[Bar, ...]
    steps: tuple[StepMark, ...] = ()

    def ms_of(self, part: str) -> float:
        return math.fsum(b.end_ms - b.start_ms for b in self.bars if b.part == part)


class Timeline(Record):
    """A window over steps `first_step` to `last_step` of the lowest rank. `after_s`: seconds from the start of that
    rank's first step to the window. `on_gpu`: bars show when the host was busy, and the device goes on working after them.
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
        """One bar, clipped to the window; none outside of it."""
        if start_ns < self.end_ns and end_ns > self.start_ns:
            yield Bar(part=part, name=name, start_ms=self.ms(start_ns), end_ms=self.ms(end_ns))


def timeline_of(folder: Path, steps: range | None = None) -> Timeline:
    """The timeline of a folder of trails: the requested steps, else about ten typical ones from the middle.

    Raises UnreadableInput for a folder without trails, TrainpaceError where no requested step has detailed spans.
    """
    processes = read_processes(folder)
    first = processes[0]
    if not first.detailed:
        raise TrainpaceError(
            f"no training step was recorded in {folder}.", "A timeline needs steps of an optimizer."
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


# ---- which steps


def _runs(steps: Iterable[Step]) -> list[list[Step]]:
    """Runs of consecutive step numbers; spans are not kept for every step."""
    grouped = groupby(enumerate(steps), key=lambda item: item[1].number - item[0])
    return [[step for _, step in run] for _, run in grouped]


def _requested_steps(detailed: Sequence[Step], requested: range) -> Sequence[Step]:
    runs = _runs(step for step in detailed if step.number in requested)
    if not runs:
        stretches = [f"{run[0].number} to {run[-1].number}" for run in _runs(detailed)]
        some = ", ".join(stretches[:4]) + (
            f" and {len(stretches) - 4} more stretches" if len(stretches) > 4 else ""
        )
        which = (
            f"steps {requested[0]} to {requested[-1]} were"
            if len(requested) > 1
            else f"step {requested.start} was"
        )
        raise TrainpaceError(f"{which} not kept in detail.", f"These were: {some}.")
    return max(runs, key=len)


def _typical(detailed: Sequence[Step]) -> Sequence[Step]:
    """The window of consecutive plain steps after the warm-up that is nearest the middle and not unusually long."""
    plain = [s for s in detailed if s.trial == 0] or list(detailed)
    warm = [s for s in plain if s.number >= WARM_UP_STEPS] or plain
    runs = _runs(warm)
    size = min(STEPS_SHOWN, max(map(len, runs)))
    windows = [run[i : i + size] for run in runs for i in range(len(run) - size + 1)]
    lengths = sorted(w[-1].end_ns - w[0].start_ns for w in windows)
    usual = TYPICAL * lengths[len(lengths) // 2]
    middle = warm[len(warm) // 2].number - size // 2
    return min(
        (w for w in windows if w[-1].end_ns - w[0].start_ns <= usual),
        key=lambda w: abs(w[0].number - middle),
    )


# ---- lanes


def _lanes(process: Process, window: _Window) -> Iterable[Lane]:
    """Rows of training and of the workers alive in the window; none for a process without a step in it."""
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
            fetches = (
                (f"{r.samples} sample{'' if r.samples == 1 else 's'}", r) for r in lane.fetches()
            )
            bars = tuple(
                bar for name, r in fetches for bar in own.bars("fetch", name, r.start_ns, r.end_ns)
            )
            yield Lane(rank=process.rank, kind="worker", label=lane.label, bars=bars)


def _training_bars(path: Path, steps: Sequence[Step], window: _Window) -> Iterable[Bar]:
    within: list[list[Span]] = [[] for _ in steps]
    starts, ends = [s.start_ns for s in steps], [s.end_ns for s in steps]
    names: dict[int, str] = {}
    for r in records_of(path):
        if isinstance(r, Span) and r.thread == 0:
            for i in range(bisect_left(ends, r.start_ns + 1), bisect_left(starts, r.end_ns)):
                within[i].append(r)
        elif isinstance(r, dict) and "number" in r:
            names[r["number"]] = r["name"]
    for step, spans in zip(steps, within, strict=True):
        for part, number, start, end in charged(step, spans):
            yield from window.bars(PARTS[part], names.get(number, ""), start, end)


Stretch = tuple[int, int, int, int]
"""Part, number of its name, start_ns, end_ns."""


def charged(step: Step, spans: Sequence[Span]) -> list[Stretch]:
    """A step cut into stretches without overlaps or gaps, each charged as the recorder charges it: to the innermost
    span unless one of `KEEPS` is around it, or to `other` outside all spans. Nested stretches of one part are merged.
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
    """Bars for a picture: neighbours narrower than a dot are merged into one bar, of the part with the largest share."""
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


# ---- the Trace Event Format: complete events (X) in microseconds, which must nest within a track, and metadata (M) for names

STEPS, TRAINING, FIRST_WORKER, FIRST_THREAD = 1, 2, 10, 1000
_HELD = 20_000
APART_NS = 2
"""Gap between events that would touch: a viewer that rounds microseconds to nanoseconds must not see an overlap."""
Event = dict[str, Any]


def write_trace(folder: Path, path: Path) -> int:
    """Write a folder of trails as trace JSON, compressed for names in .gz, whole or not at all; returns the number of events.

    Holds one step's spans at a time. Raises UnreadableInput for a folder without trails, or where it cannot write.
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
    """Trace events. A rank's process number is the rank + 1: Perfetto reserves 0 for the kernel
    (google/perfetto#394)."""
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
    """Trails list a span when it ends; viewers take the first of two that begin together as the outer one."""
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
    """The name of a process or a thread, and its place among the others."""
    for what, value in (("name", name), ("sort_index", place)):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": {what: value}}
