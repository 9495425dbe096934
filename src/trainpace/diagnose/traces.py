"""What a profiler's trace holds of one process, as columns of times: the one record that every reader gives."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainpace.core.errors import TrainpaceError
from trainpace.core.intake import GZIP, SQLITE, first_bytes

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
LARGEST_IDENTITY = 1 << 62
LONGEST_NAME = 500
"""Characters of a kernel's name that are kept; templates of C++ can make it longer than a page."""


class Spans(NamedTuple):
    """Stretches of time in microseconds, in any order; `name` numbers the trace's names."""

    start_us: Times
    end_us: Times
    name: Numbers

    def __len__(self) -> int:  # of the stretches, where a tuple would count its fields
        return len(self.start_us)

    def of(self, names: Iterable[int]) -> Spans:
        """Those with one of these names."""
        return self.where(np.isin(self.name, np.fromiter(names, np.int64)))

    def where(self, mask: npt.NDArray[np.bool_]) -> Spans:
        return Spans(self.start_us[mask], self.end_us[mask], self.name[mask])

    def in_order(self) -> Spans:
        """By their starts."""
        order = np.argsort(self.start_us, kind="stable")
        return Spans(self.start_us[order], self.end_us[order], self.name[order])


class Trace(NamedTuple):
    """One process of a training, as its profiler saw it, on one clock.

    `kernels` and `copies` are the device's work, `kernels_launched_us` and `copies_launched_us` when the host asked for each
    (NaN where the trace does not say). `operators` are the framework's on the host, `calls` those of the device's runtime
    library, `ranges` what somebody named: steps, the loader, the optimizer, NVTX. `made_by`: the profiler, in words.
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


class Names:
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        return self._numbers.setdefault(name, len(self._numbers)) if found is None else found

    def __len__(self) -> int:
        return len(self._numbers)

    def all(self) -> tuple[str, ...]:
        return tuple(
            name.encode("utf-8", "replace").decode()[:LONGEST_NAME] for name in self._numbers
        )


class Column:
    """Spans as they are read: 32 bytes each, since a trace may hold ten million. `id` joins a call with what it started."""

    def __init__(self) -> None:
        self._start_us, self._end_us, self._name, self._id = (
            array("d"),
            array("d"),
            array("q"),
            array("q"),
        )

    def add(self, start_us: float, end_us: float, name: int, identity: int = -1) -> None:
        self._start_us.append(start_us)
        self._end_us.append(end_us)
        self._name.append(name)
        self._id.append(identity)

    def spans(self) -> Spans:
        return Spans(
            np.array(self._start_us), np.array(self._end_us), np.array(self._name, np.int64)
        )

    def ids(self) -> Numbers:
        return np.array(self._id, np.int64)


def identity_of(value: object) -> int:
    """The number by which a call and its work are joined; -1 for what is none."""
    return value if isinstance(value, int) and 0 < value < LARGEST_IDENTITY else -1


def launched(ids: Numbers, calls: Spans, call_ids: Numbers) -> Times:
    """When each thing with one of `ids` was asked for: the start of the call with the same number; NaN where there is none."""
    if not len(call_ids):
        return np.full(len(ids), np.nan)
    order = np.argsort(call_ids, kind="stable")
    at = np.minimum(np.searchsorted(call_ids[order], ids), len(order) - 1)
    same = (call_ids[order][at] == ids) & (ids >= 0)
    return np.where(same, calls.start_us[order][at], np.nan)


class Intervals(NamedTuple):
    """Stretches of time that neither overlap nor touch, in order."""

    start_us: Times
    end_us: Times

    def total_us(self) -> float:
        return float((self.end_us - self.start_us).sum())


class Segments(NamedTuple):
    """Time cut wherever anything begins or ends: `start_us` and `width_us` of each piece; for each set, whether it covers it."""

    start_us: Times
    width_us: Times
    within: tuple[npt.NDArray[np.bool_], ...]


def union(start_us: Times, end_us: Times) -> Intervals:
    """What the stretches cover together; those without length cover nothing."""
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
    """The same with gaps of at most `gap_us` filled."""
    if not len(of.start_us):
        return of
    apart = of.start_us[1:] - of.end_us[:-1] > gap_us
    return Intervals(
        of.start_us[np.concatenate(([True], apart))], of.end_us[np.concatenate((apart, [True]))]
    )


def sweep(low_us: float, high_us: float, sets: Sequence[Intervals], marks_us: Times) -> Segments:
    """The time from `low_us` to `high_us` in pieces, cut at the `marks_us` too."""
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
    """What each stretch takes without those that lie within it, as operators call others. Of one thread."""
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


ENDINGS = (".json", ".json.gz", ".sqlite")
UNEXPORTED = (".nsys-rep", ".qdrep")
LOOKED_AT_BYTES = 1 << 16
"""Of a file, for the word that tells a trace: properties of its devices may stand before it."""
MOST_FILES = 4096


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder looks like a trace to be read here, by its beginning or its name. No other is opened whole."""
    place = Path(path)
    try:
        if place.is_dir():
            return not (place / "command.json").is_file() and any(
                is_trace(file) for file in trace_files(place)
            )
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
    told = b'"traceEvents"' in begins or b'"deviceProperties"' in begins
    return place.suffix == ".json" and (
        told or (begins.lstrip().startswith(b"[") and b'"ph"' in begins)
    )


def trace_files(folder: Path) -> list[Path]:
    found = sorted(
        file for file in folder.iterdir() if file.name.endswith(ENDINGS) and file.is_file()
    )
    return found[:MOST_FILES]
