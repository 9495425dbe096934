"""Where a step's time goes, and what fills the memory at its peak: stacked bars, forecast beside measured."""

from collections.abc import Sequence
from typing import NamedTuple

from trainpace.outcome import STEP_PARTS, Interval, Memory, StepTime
from trainpace.report.charts.chart import Bar, BarChart, BarGroup, Segment, sentence
from trainpace.units import format_number

_TONES = {
    "forward_ms": "forward",
    "backward_ms": "backward",
    "optimizer_ms": "optimizer",
    "communication_ms": "communication",
    "data_wait_ms": "data",
    "host_to_device_ms": "host_to_device",
    "host_overhead_ms": "host_overhead",
    "idle_ms": "idle",
}
_WORDS = {
    "communication_ms": "exposed communication",
    "data_wait_ms": "waiting for data",
    "host_to_device_ms": "copies to the device",
    "host_overhead_ms": "host overhead",
}


class Timed(NamedTuple):
    """A step under a name, with its interval where it has one; bars of one group are compared."""

    group: str
    label: str
    step: StepTime
    interval: Interval | None = None


class Held(NamedTuple):
    """Memory at a step's peak under a name, and what the device has."""

    label: str
    memory: Memory
    capacity_gib: float | None


def step_breakdown(steps: Sequence[Timed], note: str = "") -> BarChart:
    """Groups in the order given, the fastest bar of each first."""
    groups: dict[str, list[Timed]] = {}
    for timed in steps:
        groups.setdefault(timed.group, []).append(timed)
    fastest = min(steps, key=lambda timed: timed.step.total_ms)
    part = max(STEP_PARTS, key=lambda name: getattr(fastest.step, name))
    share = getattr(fastest.step, part) / fastest.step.total_ms
    named = ", ".join(filter(None, (fastest.group, fastest.label)))
    who = f"{named}: " if len(steps) > 1 else ""
    return BarChart(
        title="Where a step's time goes",
        finding=sentence(f"{who}{part_words(part)} takes the largest part of the step, {share:.0%}."),
        label="step time",
        unit="ms",
        groups=tuple(
            BarGroup(title=name, bars=tuple(map(_bar, sorted(some, key=lambda timed: timed.step.total_ms))))
            for name, some in groups.items()
        ),
        one_scale=len(groups) == 1,
        note=note,
    )


def part_words(part: str) -> str:
    return _WORDS.get(part, part.removesuffix("_ms").replace("_", " "))


def _bar(timed: Timed) -> Bar:
    interval = timed.interval
    between = "" if interval is None else f" ({format_number(interval.low)} to {format_number(interval.high)})"
    return Bar(
        label=timed.label,
        said=f"{format_number(timed.step.total_ms)} ms{between}",
        segments=tuple(Segment(name=part_words(p), tone=_TONES[p], value=getattr(timed.step, p)) for p in STEP_PARTS),
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
    )


def memory_at_peak(held: Sequence[Held]) -> BarChart:
    """A bar each: what lives at the peak by kind, then what the allocator and the driver keep beside it, then what is free."""
    first = held[0]
    kinds = {
        "parameters": first.memory.parameters_gib,
        "gradients": first.memory.gradients_gib,
        "optimizer states": first.memory.optimizer_states_gib,
        "activations": first.memory.activations_gib,
    }
    most = max(kinds, key=lambda kind: kinds[kind])
    return BarChart(
        title="Memory at the step's peak",
        finding=sentence(
            f"{first.label}: {most} take the largest part, {format_number(kinds[most])} of"
            f" {format_number(first.memory.allocated_gib)} GiB allocated."
        ),
        label="memory of one device",
        unit="GiB",
        groups=(BarGroup(title="", bars=tuple(map(_memory_bar, held))),),
        note="Allocated memory is held by live tensors; grey: reserved by allocator and driver.",
    )


def _memory_bar(held: Held) -> Bar:
    m = held.memory
    has = "" if held.capacity_gib is None else f" of {format_number(held.capacity_gib)}"
    kept = m.device_gib if held.capacity_gib is None else min(m.device_gib, max(held.capacity_gib, m.allocated_gib))
    segments = [
        Segment(name="parameters", tone="parameters", value=m.parameters_gib),
        Segment(name="gradients", tone="gradients", value=m.gradients_gib),
        Segment(name="optimizer states", tone="states", value=m.optimizer_states_gib),
        Segment(name="activations", tone="activations", value=m.activations_gib),
        Segment(name="reserved by allocator and driver", tone="reserve", value=max(kept - m.allocated_gib, 0.0)),
    ]
    return Bar(label=held.label, segments=tuple(segments), said=f"{format_number(m.allocated_gib)}{has} GiB")
