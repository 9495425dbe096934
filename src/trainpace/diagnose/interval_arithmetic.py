"""Arithmetic of intervals: what they cover together, and which of several sets cover each moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainpace.diagnose.spans import Spans, Times


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


def union_of(spans: Spans) -> Intervals:
    return union(spans.start_us, spans.end_us)


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
