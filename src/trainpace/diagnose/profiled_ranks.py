"""One rank's trace summed up: its steps, what they consist of, and its heaviest kernels. Small, where the trace may be large."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from trainpace.core.errors import UnreadableInput
from trainpace.core.records import Record
from trainpace.core.stats import median, median_interval
from trainpace.diagnose.interval_arithmetic import own_us
from trainpace.diagnose.profiled_shares import split
from trainpace.diagnose.profiled_steps import Windows, windows_of
from trainpace.diagnose.spans import Trace
from trainpace.measure import KERNEL_KINDS, kind_of, short

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
