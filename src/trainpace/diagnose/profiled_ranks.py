"""Summary of one rank's trace: steps, time per part of a step, and the longest kernels.

Each moment of a step counts once. If the device works, it counts for the first of these that runs:

1. a compute kernel,
2. a communication kernel (this is *exposed* communication),
3. a copy.

If the device is idle, the host's activity gives the reason. The first match counts:

1. The host waits for its data loader.
2. The idle time began in a synchronization (`.item()`, `cudaStreamSynchronize`), so the host could
   not launch kernels ahead.
3. The host launches kernels: an operator or runtime call runs, or the gap between two of them is at
   most 0.1 ms.
4. The host does something that the trace does not show.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainpace.core.errors import UnreadableInput
from trainpace.core.records import Record
from trainpace.core.stats import median, median_interval
from trainpace.diagnose.traces import (
    Intervals,
    Spans,
    Times,
    Trace,
    closed,
    own_us,
    sweep,
    union_of,
)
from trainpace.measure import (
    DATA_RANGE,
    KERNEL_KINDS,
    OPTIMIZER_RANGE,
    STEP_RANGE,
    is_collective,
    kind_of,
    kind_of_copy,
    short,
    waits_for_data,
    waits_for_device,
)

MOST_KERNELS = 30
BETWEEN_OPERATORS_US = 100.0
"""Longest gap between two operators that counts as launch overhead, in microseconds."""
ON_DEVICE = (*KERNEL_KINDS, "communication", "host_to_device")
PARTS = (*ON_DEVICE, "optimizer", "data", "logging", "launch", "own_code")
"""Parts of a step, named as in `diagnose`. Computing is divided into kinds of kernels."""
PAUSE = 0.5
"""Longest pause between two steps, as a share of a step.

If the pause is longer, the profiler skipped steps, and the pause does not count.
"""
LEAST_COVERED = 0.5
"""Minimum share of the trace that recurring ranges must cover to count as steps."""
_DIGITS = re.compile(r"\d+")
_NAMED_STEP = re.compile(r"\b(step|iter|iteration|batch)\b|training_step|train_step", re.IGNORECASE)

Mask = npt.NDArray[np.bool_]


class Kernel(Record):
    """Milliseconds and count per step of all kernels with one name. Kernels may overlap."""

    name: str
    kind: str
    ms: float
    count: float


class RankShares(Record):
    """Step-time statistics of one rank. Times are means per step, except the median.

    Attributes:
        made_by: Program that wrote the trace.
        step_ms: Mean step time.
        median_ms: Median over single steps, with the 90% interval `median_ms_low` to
            `median_ms_high`.
        causes_ms: Time by cause. The causes sum to `step_ms`.
        compute_ms: Computing by kind of kernel.
        communication_ms: Exposed and hidden communication.
        copies_ms: All copies, including those hidden behind kernels.
        busy_ms: Time with any work on the device.
        waits_ms: Host time in the loader ("data"), in synchronization ("logging") and in launching
            ("launch"). It overlaps with the other times.
        told_by: What marks the steps. Empty if the whole trace counts as one step.
        with_operators: True if the trace shows the host's operators between runtime calls.
    """

    rank: int
    source: str
    made_by: str
    device: str
    world_size: int | None
    steps: int
    told_by: str
    step_ms: float
    median_ms: float
    median_ms_low: float
    median_ms_high: float
    causes_ms: dict[str, float]
    compute_ms: dict[str, float]
    communication_ms: float
    copies_ms: float
    busy_ms: float
    waits_ms: dict[str, float]
    kernels: float
    heaviest: tuple[Kernel, ...]
    on_device: bool
    with_operators: bool
    skipped: int = 0

    @property
    def hidden_ms(self) -> float:
        """Communication hidden behind compute kernels, in milliseconds."""
        return max(0.0, self.communication_ms - self.causes_ms["communication"])


def rank_shares(trace: Trace, number: int) -> RankShares:
    """Summarize the trace of one rank. `number` is its rank if the trace does not contain it."""
    windows = windows_of(trace)
    if not (windows.end_us > windows.start_us).all():
        raise UnreadableInput(f"everything in {trace.source} happens at the same moment.")
    parts = split(trace, windows)
    means = {part: float(ms.mean()) for part, ms in parts.parts_ms.items()}
    compute = {kind: means.pop(kind) for kind in KERNEL_KINDS}
    times = parts.step_ms.tolist()
    low, high = median_interval(times)
    heaviest, kernels = _heaviest(trace, windows)
    return RankShares(
        rank=number if trace.rank is None else trace.rank,
        source=trace.source,
        made_by=trace.made_by,
        device=trace.device,
        world_size=trace.world_size,
        steps=len(times),
        told_by=windows.told_by,
        step_ms=fmean(times),
        median_ms=median(times),
        median_ms_low=low,
        median_ms_high=high,
        causes_ms={"compute": math.fsum(compute.values())} | means,
        compute_ms=compute,
        communication_ms=float(parts.communication_ms.mean()),
        copies_ms=float(parts.copies_ms.mean()),
        busy_ms=float(parts.busy_ms.mean()),
        waits_ms={name: float(ms.mean()) for name, ms in parts.waits_ms.items()},
        kernels=kernels,
        heaviest=heaviest,
        on_device=bool(len(trace.kernels)),
        with_operators=bool(len(trace.operators)),
        skipped=trace.skipped,
    )


class Split(NamedTuple):
    """Milliseconds in each window (step). `RankShares` explains the fields."""

    step_ms: Times
    parts_ms: dict[str, Times]
    communication_ms: Times
    copies_ms: Times
    busy_ms: Times
    waits_ms: dict[str, Times]


def split(trace: Trace, windows: Windows) -> Split:
    """Split the time of each window by part."""
    on, starts, widths = _masks(trace, windows)
    number, inside = windows.at(starts)

    def ms(mask: Mask) -> Times:
        chosen = mask & inside
        sums = np.bincount(number[chosen], widths[chosen] / 1e3, len(windows.start_us))
        return sums.astype(np.float64)

    everything = np.ones(len(starts), bool)
    busy = np.logical_or.reduce([on[part] for part in ON_DEVICE])
    reasons = {
        "data": on["data"],
        "optimizer": on["update"],
        "communication": on["collective"],
        "other": on["host"],
    }
    if len(trace.kernels):
        reasons = {part: on[part] for part in (*ON_DEVICE, "data")}
        reasons |= {"logging": _paused_in(~busy, on["waiting"]), "launch": on["host"]}
    parts, left = dict.fromkeys(PARTS, np.zeros_like(everything)), everything
    for part, mask in (reasons | {"own_code": everything}).items():
        parts[part], left = mask & left, left & ~mask
    return Split(
        step_ms=ms(everything),
        parts_ms={part: ms(mask) for part, mask in parts.items()},
        communication_ms=ms(on["communication"]),
        copies_ms=ms(on["host_to_device"]),
        busy_ms=ms(busy),
        waits_ms={
            "data": ms(on["data"]),
            "logging": ms(on["waiting"] & ~on["data"]),
            "launch": ms(on["host"] & ~on["waiting"] & ~on["data"]),
        },
    )


def _masks(trace: Trace, windows: Windows) -> tuple[dict[str, Mask], Times, Times]:
    """Cut the trace into time slices with constant activity.

    Returns:
        Masks over the slices by device part or host activity, the start of each slice, and the
        width of each slice.
    """
    sets: dict[str, Intervals] = {}
    for part in ON_DEVICE:
        kind = "copy" if part == "host_to_device" else part
        kernels = trace.kernels.of(i for i, n in enumerate(trace.names) if kind_of(n) == kind)
        copies = trace.copies.of(i for i, n in enumerate(trace.names) if kind_of_copy(n) == kind)
        sets[part] = union_of(kernels, copies)
    launching = _named(trace, trace.calls, lambda name: not waits_for_device(name))
    sets |= {
        "data": union_of(_named(trace, trace.ranges, waits_for_data)),
        "waiting": union_of(_named(trace, trace.calls, waits_for_device)),
        "host": closed(union_of(launching, trace.operators), BETWEEN_OPERATORS_US),
        "update": union_of(_ranges(trace, OPTIMIZER_RANGE)),
        "collective": union_of(_named(trace, trace.operators, is_collective)),
    }
    marks = np.concatenate((windows.start_us, windows.end_us))
    cut = sweep(float(windows.start_us[0]), float(windows.end_us[-1]), list(sets.values()), marks)
    return dict(zip(sets, cut.within, strict=True)), cut.start_us, cut.width_us


def _named(trace: Trace, spans: Spans, counts: Callable[[str], bool]) -> Spans:
    return spans.of(i for i, name in enumerate(trace.names) if counts(name))


def _ranges(trace: Trace, prefix: str) -> Spans:
    return _named(trace, trace.ranges, lambda name: name.lower().startswith(prefix)).in_order()


def _paused_in(idle: Mask, waiting: Mask) -> Mask:
    """Return a mask of the idle slices in pauses that began while the host was `waiting`."""
    begins = idle & ~np.concatenate(([False], idle[:-1]))
    pause = np.maximum(np.cumsum(begins) - 1, 0)
    return idle & waiting[begins][pause] if begins.any() else idle


def _heaviest(trace: Trace, windows: Windows) -> tuple[tuple[Kernel, ...], float]:
    """Return (kernels with the longest total time, number of kernels per step).

    If no device computed, operators on the host are counted instead.
    """
    on_device, steps = bool(len(trace.kernels)), len(windows.start_us)
    spans = trace.kernels if on_device else trace.operators
    _, inside = windows.at(spans.start_us)
    took_us = spans.end_us - spans.start_us if on_device else own_us(spans)
    length = np.bincount(spans.name[inside], took_us[inside], len(trace.names)) / 1e3 / steps
    count = np.bincount(spans.name[inside], minlength=len(trace.names)) / steps
    grouped: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number in np.flatnonzero(count):
        name = trace.names[number]
        both = grouped[(short(name), kind_of(name)) if on_device else (name[:60], "")]
        both[0] += float(length[number])
        both[1] += float(count[number])
    found = [
        Kernel(name=name, kind=kind, ms=ms, count=n) for (name, kind), (ms, n) in grouped.items()
    ]
    return tuple(sorted(found, key=lambda k: -k.ms)[:MOST_KERNELS]), float(count.sum())


class Windows(NamedTuple):
    """Non-overlapping steps in time order.

    `told_by` says what marks them, or is empty for the whole trace.
    """

    start_us: Times
    end_us: Times
    told_by: str

    def at(self, times_us: Times) -> tuple[npt.NDArray[np.int64], Mask]:
        """Return the window that contains each time.

        Returns:
            The index of the last window that began by each time, and a mask that is True if the
            window has not ended yet. Both have the shape of `times_us`.
        """
        number = np.searchsorted(self.start_us, times_us, side="right") - 1
        return number, (number >= 0) & (times_us < self.end_us[np.maximum(number, 0)])


def windows_of(trace: Trace) -> Windows:
    """Find the steps of a trace.

    Steps are marked by the profiler's own spans, else by updates of the optimizer, else by
    recurring ranges.

    The device runs behind the host. So a step lasts from the first kernel that the host launched in
    it to the first kernel of the next step. A loader wait at the start of a step then counts for
    the previous step.
    """
    steps = _working(trace, _ranges(trace, STEP_RANGE))
    if len(steps):
        return _between(trace, steps.start_us, steps.end_us, "ProfilerStep spans of torch.profiler")
    updates = _ranges(trace, OPTIMIZER_RANGE)
    if len(updates):
        names, counts = np.unique(updates.name, return_counts=True)
        ends = np.sort(updates.of([int(names[counts.argmax()])]).end_us)
        if len(ends) > 1:  # from the end of an update to the end of the next
            return _between(trace, ends[:-1], ends[1:], "updates by the optimizer")
    recurring, name = _recurring(trace)
    if len(recurring):
        return _between(trace, recurring.start_us, recurring.end_us, f"ranges named {name}")
    low, high = _extent_us(trace)
    return Windows(np.array([low]), np.array([high]), "")


def _working(trace: Trace, steps: Spans) -> Spans:
    """Drop the steps in which the host does nothing, unless it does nothing in all of them.

    The profiler opens its last step after the loop has ended.
    """
    begun = np.sort(np.concatenate((trace.operators.start_us, trace.calls.start_us)))
    work = np.searchsorted(begun, steps.end_us) > np.searchsorted(begun, steps.start_us)
    return steps.where(work) if work.any() else steps


def _extent_us(trace: Trace) -> tuple[float, float]:
    """Return the start and end of device work, or of host work if no kernel ran."""
    spans = trace.kernels if len(trace.kernels) else trace.operators
    return float(spans.start_us.min()), float(spans.end_us.max())


def _recurring(trace: Trace) -> tuple[Spans, str]:
    """Find recurring ranges that mark steps. Return the ranges and their name.

    The ranges do not overlap, share a name except for digits, and cover most of the trace. Ranges
    with "step" in their name are preferred, then the longest ones.
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for number in np.unique(trace.ranges.name):
        name = trace.names[number]
        if not name.lower().startswith((DATA_RANGE, OPTIMIZER_RANGE)):
            groups[_DIGITS.sub("#", name)].append(int(number))
    low, high = _extent_us(trace)
    best = (False, LEAST_COVERED * (high - low), "", trace.ranges.of(()))
    for name, numbers in groups.items():
        spans = trace.ranges.of(numbers).in_order()
        apart = bool((spans.start_us[1:] >= spans.end_us[:-1]).all())
        covered = union_of(spans).total_us()
        if len(spans) > 1 and apart and covered >= LEAST_COVERED * (high - low):
            found = (bool(_NAMED_STEP.search(name)), covered, name, spans)
            best = max(best, found, key=lambda c: c[:2])
    return best[3], best[2][:40]


def _between(trace: Trace, starts: Times, ends: Times, told_by: str) -> Windows:
    launched = np.concatenate((trace.kernels_launched_us, trace.copies_launched_us))
    begins = starts
    if len(trace.kernels) and np.isfinite(launched).any():
        begins = _first_work(trace, launched, starts)
    pauses = starts[1:] - ends[:-1] > PAUSE * np.median(ends - starts)
    # On the device, a step before a pause has no end. On the host, its own end is known.
    until = np.where(pauses & (not len(trace.kernels)), ends[:-1], begins[1:])
    windows = [
        (a, b)
        for a, b, pause in zip(begins[:-1], until, pauses, strict=True)
        if b > a and not (pause and len(trace.kernels))
    ]
    if not len(trace.kernels) or not windows:  # the last step, or the only one
        start = max(float(begins[-1]), windows[-1][1]) if windows else float(starts[-1])
        done = np.concatenate((trace.kernels.end_us, trace.copies.end_us))
        of_step = done[(launched >= starts[-1]) & (launched <= ends[-1])]
        windows.append((start, max(float(ends[-1]), float(of_step.max(initial=-np.inf)))))
    windows = [(a, b) for a, b in windows if b > a] or [_extent_us(trace)]
    return Windows(np.array([a for a, _ in windows]), np.array([b for _, b in windows]), told_by)


def _first_work(trace: Trace, launched: Times, starts: Times) -> Times:
    """Return the start time of the first device work that the host launched after each start.

    The result is the start itself if there is no work before the next start.
    """
    began = np.concatenate((trace.kernels.start_us, trace.copies.start_us))
    order = np.argsort(launched, kind="stable")[: np.isfinite(launched).sum()]
    launched, began = launched[order], began[order]
    at = np.searchsorted(launched, starts)
    until = np.append(starts[1:], np.inf)
    there = np.minimum(at, len(launched) - 1)
    found = (at < len(launched)) & (launched[there] < until)
    return np.maximum.accumulate(np.where(found, np.maximum(began[there], starts), starts))
