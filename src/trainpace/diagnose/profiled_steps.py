"""Which stretches of a trace are steps: by the profiler's own spans, by updates of an optimizer, or by ranges that recur."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from trainpace.diagnose.interval_arithmetic import union_of
from trainpace.diagnose.spans import Spans, Times, Trace
from trainpace.measure import DATA_RANGE, OPTIMIZER_RANGE, STEP_RANGE

PAUSE = 0.5
"""Between two steps, relative to a step: a longer one is no part of either, as where a profiler skips steps."""
LEAST_COVERED = 0.5
"""Of the trace, by ranges that count as steps without being called so."""
_DIGITS = re.compile(r"\d+")
_NAMED_STEP = re.compile(r"\b(step|iter|iteration|batch)\b|training_step|train_step", re.IGNORECASE)


class Windows(NamedTuple):
    """Steps that do not overlap, in order. `told_by`: what told them, in words; "" where nothing did, and all is one window."""

    start_us: Times
    end_us: Times
    told_by: str


def windows_of(trace: Trace) -> Windows:
    """The steps. Where a device computes behind the host, a step goes from the first work that the host launched in it to the
    first that it launched in the next, so that a loader's wait at the start of a step counts to the one before.
    """
    steps = _named(trace, STEP_RANGE)
    if len(steps):
        return _between(trace, steps.start_us, steps.end_us, "ProfilerStep spans of torch.profiler")
    updates = _named(trace, OPTIMIZER_RANGE)
    if len(updates) > 1:
        names, counts = np.unique(updates.name, return_counts=True)
        often = updates.of([int(names[counts.argmax()])])
        if len(often) > 1:
            # from the end of an update to the end of the next
            ends = np.sort(often.end_us)
            return _between(trace, ends[:-1], ends[1:], "updates by the optimizer")
    recurring, name = _recurring(trace)
    if len(recurring):
        return _between(trace, recurring.start_us, recurring.end_us, f"ranges named {name}")
    low, high = extent_us(trace)
    return Windows(np.array([low]), np.array([high]), "")


def extent_us(trace: Trace) -> tuple[float, float]:
    """When the device began and ended; the host, where no device computed."""
    spans = trace.kernels if len(trace.kernels) else trace.operators
    return float(spans.start_us.min()), float(spans.end_us.max())


def _named(trace: Trace, prefix: str) -> Spans:
    return trace.ranges.of(
        i for i, name in enumerate(trace.names) if name.lower().startswith(prefix)
    ).in_order()


def _recurring(trace: Trace) -> tuple[Spans, str]:
    """Ranges whose names differ in numbers alone, one after another, which cover most of the trace: those called a step, or else
    the longest."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for number in np.unique(trace.ranges.name):
        name = trace.names[number]
        if not name.lower().startswith((DATA_RANGE, OPTIMIZER_RANGE)):
            groups[_DIGITS.sub("#", name)].append(int(number))
    low, high = extent_us(trace)
    candidates = []
    for name, numbers in groups.items():
        spans = trace.ranges.of(numbers).in_order()
        apart = bool((spans.start_us[1:] >= spans.end_us[:-1]).all())
        covered = union_of(spans).total_us()
        if len(spans) > 1 and apart and covered >= LEAST_COVERED * (high - low):
            candidates.append((bool(_NAMED_STEP.search(name)), covered, name, spans))
    if not candidates:
        return trace.ranges.of(()), ""
    _, _, name, spans = max(candidates, key=lambda c: (c[0], c[1]))
    return spans, name[:40]


def _between(trace: Trace, starts: Times, ends: Times, told_by: str) -> Windows:
    has_device = bool(len(trace.kernels))
    launched = np.sort(np.concatenate((trace.kernels_launched_us, trace.copies_launched_us)))
    begins = _first_work(trace, starts) if has_device and np.isfinite(launched).any() else starts
    pauses = starts[1:] - ends[:-1] > PAUSE * np.median(ends - starts)
    windows = [
        (a, b)
        for a, b, pause in zip(begins[:-1], begins[1:], pauses, strict=True)
        if not pause and b > a
    ]
    if not has_device or not windows:  # the last one, or the only one
        done = max(float(ends[-1]), _last_work(trace, float(starts[-1]), float(ends[-1])))
        windows.append(
            (float(starts[-1]) if not windows else max(float(begins[-1]), windows[-1][1]), done)
        )
    windows = [(a, b) for a, b in windows if b > a] or [extent_us(trace)]
    return Windows(np.array([a for a, _ in windows]), np.array([b for _, b in windows]), told_by)


def _first_work(trace: Trace, starts: Times) -> Times:
    """For each start, when the device began the first work that the host launched after it; the start itself where there is none
    before the next."""
    launched = np.concatenate((trace.kernels_launched_us, trace.copies_launched_us))
    began = np.concatenate((trace.kernels.start_us, trace.copies.start_us))
    known = np.isfinite(launched)
    order = np.argsort(launched[known], kind="stable")
    launched, began = launched[known][order], began[known][order]
    at = np.searchsorted(launched, starts)
    until = np.append(starts[1:], np.inf)
    there = np.minimum(at, len(launched) - 1)
    found = (at < len(launched)) & (launched[there] < until)
    return np.maximum.accumulate(np.where(found, np.maximum(began[there], starts), starts))


def _last_work(trace: Trace, start: float, end: float) -> float:
    """When the device was done with what the host launched from `start` to `end`."""
    launched = np.concatenate((trace.kernels_launched_us, trace.copies_launched_us))
    ends = np.concatenate((trace.kernels.end_us, trace.copies.end_us))
    of_step = ends[(launched >= start) & (launched <= end)]
    return float(of_step.max()) if len(of_step) else end
