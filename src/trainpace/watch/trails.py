"""A folder of trails as streams on one clock, with the rank of each process and the workers that prepared its data."""

import contextlib
import mmap
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.core.errors import UnreadableInput, os_reason
from trainpace.watch.clocks import offsets
from trainpace.watch.exchanges import common, rank_steps
from trainpace.watch.inside.trail import Fetch, Span, Step, read_header, records_from


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


class ProcessTrail(NamedTuple):
    """The trail of a process that imported torch, its header, and the trails of its loaders' workers with their numbers."""

    path: Path
    header: dict[str, Any]
    workers: list[tuple[Path, int]]


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
    processes = [_process(trail) for trail in trails_of(folder)]
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


def trails_of(folder: Path) -> list[ProcessTrail]:
    workers = defaultdict(list)
    for path in sorted(folder.glob("worker-*.trail")):
        with readable(path):
            if header := header_of(path):
                workers[header["host"], header["parent"]].append((path, int(header["worker"])))
    trails = []
    for path in sorted(folder.glob("process-*.trail")):
        with readable(path):
            if header := header_of(path):
                trails.append(ProcessTrail(path, header, workers[header["host"], header["pid"]]))
    return trails


def header_of(path: Path) -> dict[str, Any] | None:
    """A trail's header; None where the disk was full before it was written. Raises UnreadableInput for another file."""
    with readable(path):
        with path.open("rb") as file:
            line = file.readline()
        return read_header(line) if line.endswith(b"\n") or len(line) > 100_000 else None


def records_of(path: Path) -> Iterator[Step | Span | Fetch | dict[str, Any]]:
    """A trail's records, read one at a time; without a record that a killed process left incomplete."""
    with (
        readable(path),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield from records_from(data, data.find(b"\n") + 1)


def fetches_of(path: Path) -> Iterator[Fetch]:
    return (r for r in records_of(path) if isinstance(r, Fetch))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around what reads a trail: bytes that were changed can break any of it, and are told as a damaged file."""
    try:
        yield
    except UnreadableInput:
        raise
    except OSError as error:
        raise UnreadableInput(f"cannot read {path}: {os_reason(error)}.") from None
    except (ValueError, RecursionError) as error:
        is_text = type(error) is ValueError
        what = str(error) if is_text else "not JSON"
        raise UnreadableInput(
            f"{path} cannot be read ({what}).", "Record the command again."
        ) from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        msgspec.ValidationError,
        struct.error,
    ):
        raise UnreadableInput(
            f"{path} cannot be read (it is damaged).", "Record the command again."
        ) from None


def _process(trail: ProcessTrail) -> tuple[Process, float]:
    """The process, and the offset of its clock from the wall clock."""
    with readable(trail.path):
        return _process_of(*trail)


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
        _lanes(workers),
    )
    return process, int(header.get("clock_to_wall_ns", 0))


def _lanes(workers: Sequence[tuple[Path, int]]) -> tuple[WorkerLane, ...]:
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
