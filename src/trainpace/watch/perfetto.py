"""A watched run for Perfetto or chrome://tracing: the spans of every thread, the steps, and the workers' batches.

The Trace Event Format: complete events (X) in microseconds, which must nest within a track, and metadata (M) for names.
"""

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainpace.records import written_aside
from trainpace.watch.inside.trail import PARTS, TRIALS, Fetch, Span, Step
from trainpace.watch.trails import Process, read_processes, records_of

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
        gzip.open(aside, "wb", compresslevel=5) if path.suffix == ".gz" else aside.open("wb") as file,
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
        about = {"trial": TRIALS[r.trial], "samples": r.samples, "micro_steps": r.micro_steps, **parts}
        duration_ns = max(0, duration_ns - APART_NS)
    elif isinstance(r, Fetch):
        category = name = "fetch"
        about = {"samples": r.samples, "cpu_ms": r.cpu_ns / 1e6, "collate_ms": r.collate_ns / 1e6}
    else:
        category = PARTS[r.part]
        name, about = name or category, {"part": category}
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": (r.start_ns + shift_ns) / 1e3,
        "dur": duration_ns / 1e3, "args": about,
    }  # fmt: skip


def _named(kind: str, pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    """The name of a process or a thread, and its place among the others."""
    for what, value in (("name", name), ("sort_index", place)):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": pid, "tid": tid, "args": {what: value}}
