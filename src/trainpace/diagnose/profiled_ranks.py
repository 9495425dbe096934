"""One rank's trace summed up: its steps, what they consist of, and its heaviest kernels. Small, where the trace may be large."""

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
from trainpace.diagnose.traces import Spans, Times, Trace, closed, own_us, sweep, union, union_of
from trainpace.measure import (
    DATA_RANGE,
    KERNEL_KINDS,
    OPTIMIZER_RANGE,
    STEP_RANGE,
    exchanges,
    kind_of,
    kind_of_copy,
    short,
    waits_for_data,
    waits_for_device,
)

MOST_KERNELS = 30


class Kernel(Record):
    """Kernels of one name: their milliseconds and their number in a step. They may overlap with others."""

    name: str
    kind: str
    ms: float
    count: float


class RankShares(Record):
    """One rank. `causes_ms` are means of its steps and add up to `step_ms`; `compute_ms` are kinds of kernels within computing.

    `median_ms` with its 90 % interval is of single steps. Of the others, which overlap: `communication_ms` and `copies_ms` hold
    hidden ones too, `busy_ms` is the device with any work, `waits_ms` the host in its loader ("data"), waiting for the device
    ("logging") and launching ("launch"). `told_by`: what told the steps; "" where nothing did, and all of the trace is one.
    `with_operators`: whether the trace says what the host did between the calls of the device's library.
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
        """Communication while kernels compute."""
        return max(0.0, self.communication_ms - self.causes_ms["communication"])


def rank_shares(trace: Trace, number: int) -> RankShares:
    """One rank's trace summed up, so that the trace can be let go. `number`: its rank where the trace does not say."""
    windows = windows_of(trace)
    if not (windows.end_us > windows.start_us).all():
        raise UnreadableInput(
            f"{trace.source} has no stretch of time: all that it holds happened in one moment."
        )
    parts = split(trace, windows)
    means: dict[str, float] = {part: float(ms.mean()) for part, ms in parts.parts_ms.items()}
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


def _heaviest(trace: Trace, windows: Windows) -> tuple[tuple[Kernel, ...], float]:
    """Kernels by name, those that take longest first; operators where no device computed. And the number of kernels in a step."""
    spans = trace.kernels if len(trace.kernels) else trace.operators
    steps = len(windows.start_us)
    at = np.searchsorted(windows.start_us, spans.start_us, side="right") - 1
    chosen = (at >= 0) & (spans.start_us < windows.end_us[np.maximum(at, 0)])
    inside = spans.where(chosen)
    took_us = inside.end_us - inside.start_us if len(trace.kernels) else own_us(spans)[chosen]
    length = np.bincount(inside.name, took_us, len(trace.names)) / 1e3 / steps
    count = np.bincount(inside.name, minlength=len(trace.names)) / steps
    grouped: dict[tuple[str, str], list[float]] = {}
    for number in np.flatnonzero(count):
        name = trace.names[number]
        key = (short(name), kind_of(name)) if len(trace.kernels) else (name[:60], "")
        both = grouped.setdefault(key, [0.0, 0.0])
        both[0] += float(length[number])
        both[1] += float(count[number])
    found = [
        Kernel(name=name, kind=kind, ms=ms, count=n) for (name, kind), (ms, n) in grouped.items()
    ]
    return tuple(sorted(found, key=lambda k: -k.ms)[:MOST_KERNELS]), float(count.sum())


BETWEEN_OPERATORS_US = 100.0
"""Python between two operators is a part of launching them."""
PARTS = (
    *KERNEL_KINDS,
    "communication",
    "host_to_device",
    "optimizer",
    "data",
    "logging",
    "launch",
    "own_code",
)
"""Of a step, in the words of `diagnose`; computing by kinds of kernels."""

Mask = npt.NDArray[np.bool_]


class Split(NamedTuple):
    """Milliseconds by window. `parts` add up to `step_ms`. Of the others, which overlap: `communication_ms` and `copies_ms` are
    all of these, hidden ones too; `busy_ms` is the device with work of any kind; `waits_ms` what the host spent in its loader
    ("data"), waiting for the device ("logging") and launching ("launch"), the device busy or not.
    """

    step_ms: npt.NDArray[np.float64]
    parts_ms: dict[str, npt.NDArray[np.float64]]
    communication_ms: npt.NDArray[np.float64]
    copies_ms: npt.NDArray[np.float64]
    busy_ms: npt.NDArray[np.float64]
    waits_ms: dict[str, npt.NDArray[np.float64]]


def split(trace: Trace, windows: Windows) -> Split:
    """The parts of each window."""
    by_kind = {kind: union(*spans) for kind, spans in _device_work(trace).items()}
    waiting = union_of(_named(trace, trace.calls, waits_for_device))
    data = union_of(_named(trace, trace.ranges, waits_for_data))
    # a call that waits for the device is no launch
    launching = _named(trace, trace.calls, lambda name: not waits_for_device(name))
    host = closed(
        union(
            *(np.concatenate(pair) for pair in zip(launching[:2], trace.operators[:2], strict=True))
        ),
        BETWEEN_OPERATORS_US,
    )
    update = union_of(
        _named(trace, trace.ranges, lambda name: name.lower().startswith(OPTIMIZER_RANGE))
    )
    exchange = union_of(_named(trace, trace.operators, exchanges))
    sets = [*by_kind.values(), data, waiting, host, update, exchange]
    low, high = float(windows.start_us[0]), float(windows.end_us[-1])
    cut = sweep(low, high, sets, np.concatenate((windows.start_us, windows.end_us)))
    *on_device, in_data, in_wait, in_host, in_update, in_exchange = cut.within
    work = dict(zip(by_kind, on_device, strict=True))
    if len(trace.kernels):
        masks = _on_device(work)
        masks |= _idle(~(np.logical_or.reduce(list(work.values()))), in_data, in_wait, in_host)
    else:
        masks = _on_host(in_data, in_update, in_exchange, in_host)
    number = np.searchsorted(windows.start_us, cut.start_us, side="right") - 1
    inside = (number >= 0) & (cut.start_us < windows.end_us[np.maximum(number, 0)])

    def ms(mask: Mask) -> npt.NDArray[np.float64]:
        chosen = mask & inside
        return np.bincount(
            number[chosen], cut.width_us[chosen] / 1e3, len(windows.start_us)
        ).astype(np.float64)

    everything = np.ones(len(cut.start_us), bool)
    none = np.zeros(len(cut.start_us), bool)
    return Split(
        step_ms=ms(everything),
        parts_ms={part: ms(masks.get(part, none)) for part in PARTS},
        communication_ms=ms(work["communication"]),
        copies_ms=ms(work["copy"]),
        busy_ms=ms(np.logical_or.reduce(list(work.values()))),
        waits_ms={
            "data": ms(in_data),
            "logging": ms(in_wait & ~in_data),
            "launch": ms(in_host & ~in_wait & ~in_data),
        },
    )


def _device_work(
    trace: Trace,
) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Starts and ends by kind: of kernels that compute, of communication and of copies."""
    kinds = (*KERNEL_KINDS, "communication", "copy")
    of_kernels, of_copies = (
        np.array([of(name) for name in trace.names] or [""]) for of in (kind_of, kind_of_copy)
    )
    found = {}
    for kind in kinds:
        pairs = (trace.kernels, of_kernels), (trace.copies, of_copies)
        spans = [column.where(kinds_of[column.name] == kind) for column, kinds_of in pairs]
        found[kind] = (
            np.concatenate([s.start_us for s in spans]),
            np.concatenate([s.end_us for s in spans]),
        )
    return found


def _named(trace: Trace, spans: Spans, counts: Callable[[str], bool]) -> Spans:
    return spans.of(i for i, name in enumerate(trace.names) if counts(name))


def _on_device(work: dict[str, Mask]) -> dict[str, Mask]:
    masks, taken = {}, np.zeros_like(work["communication"])
    for kind in (*KERNEL_KINDS, "communication", "copy"):
        masks["host_to_device" if kind == "copy" else kind] = work[kind] & ~taken
        taken = taken | work[kind]
    return masks


def _idle(idle: Mask, in_data: Mask, in_wait: Mask, in_host: Mask) -> dict[str, Mask]:
    """Idle pieces by the host's reason."""
    begins = idle & ~np.concatenate(([False], idle[:-1]))
    run = np.cumsum(begins) - 1
    waited = in_wait[begins]
    after_wait = idle & (waited[np.maximum(run, 0)] if len(waited) else idle)
    data = idle & in_data
    logging = after_wait & ~data
    launch = idle & in_host & ~data & ~logging
    return {
        "data": data,
        "logging": logging,
        "launch": launch,
        "own_code": idle & ~data & ~logging & ~launch,
    }


def _on_host(in_data: Mask, in_update: Mask, in_exchange: Mask, in_host: Mask) -> dict[str, Mask]:
    """A step without a device: what the host computes is all that there is."""
    data, update = in_data, in_update & ~in_data
    exchange = in_exchange & ~data & ~update
    other = in_host & ~data & ~update & ~exchange
    rest = ~(data | update | exchange | other)
    return {
        "data": data,
        "optimizer": update,
        "communication": exchange,
        "other": other,
        "own_code": rest,
    }


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
    steps = _ranges_named(trace, STEP_RANGE)
    if len(steps):
        return _between(trace, steps.start_us, steps.end_us, "ProfilerStep spans of torch.profiler")
    updates = _ranges_named(trace, OPTIMIZER_RANGE)
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


def _ranges_named(trace: Trace, prefix: str) -> Spans:
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
