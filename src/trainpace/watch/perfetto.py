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
        yield _name("process_name", pid, 0, f"rank {process.rank} (process {process.pid} on {process.host})")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": process.rank}}
        yield from _thread(pid, STEPS, "steps")
        yield from _thread(pid, TRAINING, "training")
        yield from _process_events(process, pid, process.shift_ns - zero_ns)
        for i, lane in enumerate(process.workers):
            yield from _thread(pid, FIRST_WORKER + i, lane.label)
            for r in lane.fetches():
                yield _fetch(r, pid, FIRST_WORKER + i, process.shift_ns - zero_ns)


def _process_events(process: Process, pid: int, shift_ns: int) -> Iterator[Event]:
    names: dict[int, str] = {}
    threads: dict[int, int] = {}
    held: list[Event] = []
    for r in records_of(process.path):
        if isinstance(r, Span):
            if r.thread not in threads:
                threads[r.thread] = TRAINING if r.thread == 0 else FIRST_THREAD + len(threads)
                if r.thread:
                    yield from _thread(pid, threads[r.thread], f"thread {r.thread}")
            held.append(_span(r, names.get(r.name, PARTS[r.part]), pid, threads[r.thread], shift_ns))
        elif isinstance(r, Fetch):
            held.append(_fetch(r, pid, TRAINING, shift_ns))
        elif isinstance(r, Step):
            yield _step(r, pid, shift_ns)
        elif "number" in r:
            names[r["number"]] = r["name"]
        if isinstance(r, Step) or len(held) > _HELD:
            yield from _outer_first(held)
            held = []
    yield from _outer_first(held)


def _outer_first(events: list[Event]) -> list[Event]:
    """Trails list a span when it ends; viewers take the first of two that begin together as the outer one."""
    return sorted(events, key=lambda e: (e["ts"], -e["dur"]))


def _step(r: Step, pid: int, shift_ns: int) -> Event:
    parts = {f"{part}_ms": ns / 1e6 for part, ns in zip(PARTS, r.parts_ns, strict=True) if ns}
    about = {"trial": TRIALS[r.trial], "samples": r.samples, "micro_steps": r.micro_steps, **parts}
    return _complete(r, f"step {r.number}", "step", pid, STEPS, shift_ns, about, APART_NS)


def _span(r: Span, name: str, pid: int, tid: int, shift_ns: int) -> Event:
    return _complete(r, name, PARTS[r.part], pid, tid, shift_ns, {"part": PARTS[r.part]})


def _fetch(r: Fetch, pid: int, tid: int, shift_ns: int) -> Event:
    about = {"samples": r.samples, "cpu_ms": r.cpu_ns / 1e6, "collate_ms": r.collate_ns / 1e6}
    return _complete(r, "fetch", "fetch", pid, tid, shift_ns, about)


def _complete(
    r: Step | Span | Fetch, name: str, category: str, pid: int, tid: int, shift_ns: int, about: Event, cut_ns: int = 0
) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": (r.start_ns + shift_ns) / 1e3,
        "dur": max(0, r.end_ns - cut_ns - r.start_ns) / 1e3, "args": about,
    }  # fmt: skip


def _thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield _name("thread_name", pid, tid, name)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
