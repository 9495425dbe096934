"""Data structures for profiler traces.

The module recognizes trace files, holds one process of a trace as columns of times, and computes
with time intervals.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainpace.core.errors import TrainpaceError
from trainpace.core.intake import GZIP, SQLITE, first_bytes

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
LARGEST_IDENTITY = 1 << 62
LONGEST_NAME = 500
"""Maximum length of a name. Longer kernel names are cut, since C++ templates can be very long."""
ENDINGS = (".json", ".json.gz", ".sqlite")
UNEXPORTED = (".nsys-rep", ".qdrep")
LOOKED_AT_BYTES = 1 << 16
"""Number of bytes that are searched for a key of traces. Device properties may precede the key."""
MOST_FILES = 4096


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return True if the path looks like a supported profiler trace.

    Only the first bytes are read.
    """
    place = Path(path)
    try:
        if place.is_dir():
            recorded = (place / "command.json").is_file()
            return not recorded and any(is_trace(file) for file in trace_files(place))
        if not place.is_file():
            return False
        if place.name.endswith(UNEXPORTED):
            return True
        begins = first_bytes(place, LOOKED_AT_BYTES)
    except (TrainpaceError, OSError, ValueError):
        return False
    if begins.startswith(GZIP):
        return place.name.endswith(".json.gz")
    if begins.startswith(SQLITE):
        return place.suffix == ".sqlite"
    return place.suffix == ".json" and _begins_like_kineto(begins)


def _begins_like_kineto(begins: bytes) -> bool:
    is_list = begins.lstrip().startswith(b"[") and b'"ph"' in begins
    return is_list or b'"traceEvents"' in begins or b'"deviceProperties"' in begins


def trace_files(folder: Path) -> list[Path]:
    """Return the files in a folder that look like traces by their names, at most MOST_FILES."""
    files = [f for f in folder.iterdir() if f.name.endswith(ENDINGS) and f.is_file()]
    return sorted(files)[:MOST_FILES]


class Spans(NamedTuple):
    """Spans of time in microseconds, in any order. `name` is an index into the trace's names."""

    start_us: Times
    end_us: Times
    name: Numbers

    def __len__(self) -> int:  # a tuple would count its fields
        return len(self.start_us)

    def of(self, names: Iterable[int]) -> Spans:
        """Return the spans with one of these names."""
        return self.where(np.isin(self.name, np.fromiter(names, np.int64)))

    def where(self, mask: npt.NDArray[np.bool_]) -> Spans:
        return Spans(self.start_us[mask], self.end_us[mask], self.name[mask])

    def in_order(self) -> Spans:
        order = np.argsort(self.start_us, kind="stable")
        return Spans(self.start_us[order], self.end_us[order], self.name[order])


class Trace(NamedTuple):
    """Profiler trace of one process. All times are microseconds on one clock.

    Attributes:
        made_by: Program that wrote the trace.
        kernels: Kernels on the device.
        kernels_launched_us: Times when the host launched the kernels, NaN if unknown.
        copies: Copies on the device.
        copies_launched_us: Times when the host launched the copies, NaN if unknown.
        operators: Operators of the framework on the host.
        calls: Calls of the device's runtime library.
        ranges: Named ranges such as steps, data loading, optimizer updates and NVTX ranges.
        skipped: Number of skipped events.
        process: Host and number of the process, or "" if they are unknown.
    """

    source: str
    made_by: str
    rank: int | None
    world_size: int | None
    device: str
    names: tuple[str, ...]
    kernels: Spans
    kernels_launched_us: Times
    copies: Spans
    copies_launched_us: Times
    operators: Spans
    calls: Spans
    ranges: Spans
    skipped: int = 0
    process: str = ""

    def end_us(self) -> float:
        """Return the end of the last span."""
        columns = (self.kernels, self.copies, self.operators, self.calls, self.ranges)
        return float(max(spans.end_us.max(initial=0.0) for spans in columns))


def joined(traces: Sequence[Trace]) -> Trace:
    """Join the profiling cycles of one process into one trace, with a long pause between them."""
    first = traces[0]
    if len(traces) == 1:
        return first
    names: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    pause = max(trace.end_us() for trace in traces)
    begin = 0.0
    for trace in traces:
        numbers = np.array([names.setdefault(name, len(names)) for name in trace.names], np.int64)
        for name, column in columns.items():
            spans = getattr(trace, name)
            column.append(
                Spans(spans.start_us + begin, spans.end_us + begin, numbers[spans.name])
                if isinstance(spans, Spans)
                else spans + begin
            )
        begin += trace.end_us() + pause
    fields: dict[str, Any] = {
        name: Spans(*map(np.concatenate, zip(*column, strict=True)))
        if isinstance(column[0], Spans)
        else np.concatenate(column)
        for name, column in columns.items()
    }
    skipped = sum(trace.skipped for trace in traces)
    return first._replace(names=tuple(names), skipped=skipped, **fields)


_COLUMNS = (
    "kernels",
    "kernels_launched_us",
    "copies",
    "copies_launched_us",
    "operators",
    "calls",
    "ranges",
)


class Column:
    """Growing column of spans. A span takes only 32 bytes, since a trace may have ten million.

    The identity of a span links a runtime call with the work that it launched.
    """

    def __init__(self) -> None:
        self._times, self._numbers = array("d"), array("q")

    def add(self, start_us: float, end_us: float, name: int, identity: int) -> None:
        self._times.extend((start_us, end_us))
        self._numbers.extend((name, identity))

    def spans(self) -> tuple[Spans, Numbers]:
        """Return the spans and their identities. The identity is -1 for spans without one."""
        times = np.array(self._times).reshape(-1, 2)
        numbers = np.array(self._numbers, np.int64).reshape(-1, 2)
        return Spans(times[:, 0].copy(), times[:, 1].copy(), numbers[:, 0].copy()), numbers[:, 1]


class Events:
    """Collected events of one process.

    Args:
        unit_us: Unit of the times, in microseconds.
    """

    def __init__(self, unit_us: float = 1.0) -> None:
        self._unit_us = unit_us
        self._columns = {
            name: Column() for name in ("kernels", "copies", "operators", "calls", "ranges")
        }
        self._names: dict[str, int] = {}
        self._origin: float | None = None
        self._skipped = 0

    def add(
        self, column: str, start: float | None, length: float | None, name: str, identity: object
    ) -> None:
        """Add a span to a column, or count it as skipped if its times are impossible."""
        if start is None or length is None or length < 0:
            self._skipped += 1
            return
        if self._origin is None:  # subtracted, since a double resolves only 0.25 us in Unix time
            self._origin = start
        begins = (start - self._origin) * self._unit_us
        number = self._names.setdefault(name, len(self._names))
        self._columns[column].add(
            begins, begins + length * self._unit_us, number, identity_of(identity)
        )

    def trace(self, **about: Any) -> Trace:
        """Return the trace of the process. `about` are the other fields of `Trace`."""
        every = [column.spans() for column in self._columns.values()]
        (
            (kernels, kernel_ids),
            (copies, copy_ids),
            (operators, _),
            (calls, call_ids),
            (ranges, _),
        ) = every
        return Trace(
            names=tuple(
                name.encode("utf-8", "replace").decode()[:LONGEST_NAME] for name in self._names
            ),
            kernels=kernels,
            kernels_launched_us=launched(kernel_ids, calls, call_ids),
            copies=copies,
            copies_launched_us=launched(copy_ids, calls, call_ids),
            operators=operators,
            calls=calls,
            ranges=ranges,
            skipped=self._skipped,
            **about,
        )


def identity_of(value: object) -> int:
    """Return the number that links a call with its work, or -1 if the value is not a valid one."""
    return value if isinstance(value, int) and 0 < value < LARGEST_IDENTITY else -1


def launched(ids: Numbers, calls: Spans, call_ids: Numbers) -> Times:
    """Return the start of the call with each id, or NaN for an id without a call."""
    if not len(call_ids):
        return np.full(len(ids), np.nan)
    order = np.argsort(call_ids, kind="stable")
    at = np.minimum(np.searchsorted(call_ids[order], ids), len(order) - 1)
    same = (call_ids[order][at] == ids) & (ids >= 0)
    return np.where(same, calls.start_us[order][at], np.nan)


class Intervals(NamedTuple):
    """Intervals in ascending order that do not overlap or touch."""

    start_us: Times
    end_us: Times

    def total_us(self) -> float:
        return float((self.end_us - self.start_us).sum())


class Segments(NamedTuple):
    """Consecutive pieces of time, cut wherever an interval begins or ends.

    `within` has one mask per set: True for each piece that the set covers.
    """

    start_us: Times
    width_us: Times
    within: tuple[npt.NDArray[np.bool_], ...]


def union(start_us: Times, end_us: Times) -> Intervals:
    """Merge overlapping and touching intervals, and drop empty ones."""
    real = end_us > start_us
    order = np.argsort(start_us[real], kind="stable")
    starts, ends = start_us[real][order], end_us[real][order]
    if not len(starts):
        return Intervals(starts, ends)
    reached = np.maximum.accumulate(ends)
    begins = np.concatenate(([True], starts[1:] > reached[:-1]))
    last = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(starts) - 1]))
    return Intervals(starts[begins], reached[last])


def union_of(*spans: Spans) -> Intervals:
    starts, ends = (np.concatenate([s[i] for s in spans]) for i in (0, 1))
    return union(starts, ends)


def closed(of: Intervals, gap_us: float) -> Intervals:
    """Merge intervals with a gap of at most `gap_us` between them."""
    apart = of.start_us[1:] - of.end_us[:-1] > gap_us
    edge = [True] * min(1, len(of.start_us))
    return Intervals(
        of.start_us[np.concatenate((edge, apart)).astype(bool)],
        of.end_us[np.concatenate((apart, edge)).astype(bool)],
    )


def sweep(low_us: float, high_us: float, sets: Sequence[Intervals], marks_us: Times) -> Segments:
    """Cut the time between two moments at the edges of the sets and at the marks."""
    every = [np.array([low_us, high_us]), marks_us, *(edges for one in sets for edges in one)]
    edges = np.unique(np.clip(np.concatenate(every), low_us, high_us))
    within = []
    for one in sets:
        depth = np.zeros(len(edges), np.int64)
        for times, change in ((one.start_us, 1), (one.end_us, -1)):
            np.add.at(depth, np.searchsorted(edges, np.clip(times, low_us, high_us)), change)
        within.append(np.cumsum(depth)[:-1] > 0)
    return Segments(edges[:-1], np.diff(edges), tuple(within))


def own_us(spans: Spans) -> Times:
    """Return the own time of each span in us, without the spans inside it (called operators).

    All spans must be of one thread.
    """
    order = np.lexsort((-spans.end_us, spans.start_us))
    starts, ends = spans.start_us[order].tolist(), spans.end_us[order].tolist()
    own = [end - start for start, end in zip(starts, ends, strict=True)]
    outer: list[int] = []
    for i, start in enumerate(starts):
        while outer and ends[outer[-1]] <= start:
            outer.pop()
        if outer:
            own[outer[-1]] -= min(ends[i], ends[outer[-1]]) - start
        outer.append(i)
    result = np.empty(len(own))
    result[order] = np.maximum(own, 0.0)
    return result
