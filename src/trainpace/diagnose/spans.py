"""What a profiler's trace holds of one process, as columns of times: the one record that every reader gives."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
