"""Where a step's time and memory go: its parts, memory at the peak and over the step, and the roofline of its operators."""

from collections.abc import Sequence
from typing import NamedTuple

from trainpace.core.outcome import STEP_PARTS, Forecast, Interval, Memory, StepTime
from trainpace.forecast import MemoryOverStep, Roofline
from trainpace.report.charts import (
    MOST_INTERVAL,
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    Mark,
    Segment,
    Series,
    bar,
    series,
)
from trainpace.report.phrases import bracketed, number, sentence

MOST_NAMED = 4
_NAMES = {
    "communication_ms": "exposed communication",
    "data_wait_ms": "waiting for data",
    "host_to_device_ms": "copies to the device",
}
_TONES = {"data_wait_ms": "data"}


class Timed(NamedTuple):
    """A step under a name, with its interval where it has one; bars of one group are compared."""

    group: str
    label: str
    step: StepTime
    interval: Interval | None = None


def step_breakdown(steps: Sequence[Timed], note: str = "") -> BarChart | None:
    """Groups in the order given, the fastest bar of each first. None where there are no steps."""
    if not steps:
        return None
    groups: dict[str, list[Bar]] = {timed.group: [] for timed in steps}
    for timed in sorted(steps, key=lambda timed: timed.step.total_ms):
        parts = [
            (part_words(p), _TONES.get(p, p.removesuffix("_ms")), getattr(timed.step, p))
            for p in STEP_PARTS
        ]
        end = f"{number(timed.step.total_ms)} ms{bracketed(timed.interval)}"
        groups[timed.group].append(bar(timed.label, end, parts, timed.interval))
    fastest = min(steps, key=lambda timed: timed.step.total_ms)
    part = max(STEP_PARTS, key=lambda name: getattr(fastest.step, name))
    share = getattr(fastest.step, part) / fastest.step.total_ms
    name = f"{', '.join(filter(None, (fastest.group, fastest.label)))}: " if len(steps) > 1 else ""
    return BarChart(
        title="Where a step's time goes",
        finding=sentence(
            f"{name}{part_words(part)} takes the largest part of the step, {share:.0%}."
        ),
        label="step time",
        unit="ms",
        groups=tuple(BarGroup(title=name, bars=tuple(bars)) for name, bars in groups.items()),
        one_scale=len(groups) == 1,
        note=note,
    )


LEAST_WAIT = 0.01
MOST_DRAWN = 8
"""Micro-steps that a Gantt chart draws one by one; of more it draws all passes as one."""


def step_gantt(f: Forecast, where: str) -> BarChart | None:
    """When data, host, device and links work in a step. None where the device hardly waits for any of them."""
    if f.step is None:
        return None
    step, m = f.step, f.execution.accumulation if f.execution.accumulation <= MOST_DRAWN else 1
    rows: dict[str, list[Segment]] = {"data": [], "links": [], "host": [], "device": []}
    at = 0.0

    def then(row: str, part: str, ms: float) -> None:
        nonlocal at
        if ms > 0:
            tone = _TONES.get(part, part.removesuffix("_ms"))
            rows[row].append(Segment(name=part_words(part), tone=tone, value=ms, at=at))
            at += ms

    then("data", "data_wait_ms", step.data_wait_ms)
    for _ in range(m):
        then("links", "host_to_device_ms", step.host_to_device_ms / m)
        then("host", "host_overhead_ms", step.host_overhead_ms / m)
        then("device", "forward_ms", step.forward_ms / m)
        then("device", "backward_ms", step.backward_ms / m)
    then("links", "communication_ms", step.communication_ms)
    then("device", "optimizer_ms", step.optimizer_ms)
    then("device", "idle_ms", step.idle_ms)
    shown = {row: parts for row, parts in rows.items() if parts}
    busy = {row: sum(s.value for s in parts if s.tone != "idle") for row, parts in shown.items()}
    waits = 1 - busy.get("device", 0.0) / step.total_ms
    if len(shown) < 2 or waits < LEAST_WAIT:
        return None
    return BarChart(
        title="A step over data, host, device and links",
        finding=sentence(
            f"on {where} the device computes {1 - waits:.0%} of the step and waits {waits:.0%}."
        ),
        label="time in the step",
        unit="ms",
        groups=(
            BarGroup(
                bars=tuple(
                    Bar(
                        label=row,
                        segments=tuple(parts),
                        said=f"{number(busy[row])} ms ({busy[row] / step.total_ms:.0%})",
                    )
                    for row, parts in shown.items()
                )
            ),
        ),
        note=(
            "What nothing else hides: transfers, launches and loading that run beside the device's"
            " work are not drawn. The forecast knows how long each part takes; where in the step"
            " the host holds up the device is drawn schematically."
        ),
    )


LEAST_OF_A_ROLE = 0.01
"""Share of the device's time from which a role has a bar of its own."""


def role_chart(f: Forecast, where: str) -> BarChart | None:
    """What layers of each role take of the device's time in a step, the longest first. None where one takes nearly all of it."""
    whole = sum(role.time_ms for role in f.roles)
    shown = [role for role in f.roles if role.time_ms >= LEAST_OF_A_ROLE * whole]
    if len(shown) < 2:
        return None
    names = [f"{role.role}{f', {role.layers} layers' if role.layers else ''}" for role in shown]
    bars = [
        bar(
            name,
            f"{number(role.time_ms)} ms ({role.time_ms / whole:.0%})",
            [("device time", "first", role.time_ms)],
        )
        for name, role in zip(names, shown, strict=True)
    ]
    rest = whole - sum(role.time_ms for role in shown)
    small = (
        f" Roles below {LEAST_OF_A_ROLE:.0%} have no bar; together they take {number(rest)} ms."
        if rest > 0
        else ""
    )
    return BarChart(
        title="What the layers of each role take",
        label="device time in the step",
        unit="ms",
        groups=(BarGroup(bars=tuple(bars)),),
        finding=sentence(
            f"on {where} {names[0]} take {shown[0].time_ms / whole:.0%} of the device's time."
        ),
        note=(
            "Forward and backward passes together; the optimizer counts as a role of its"
            f" own.{small}"
        ),
    )


def part_words(part: str) -> str:
    return _NAMES.get(part, part.removesuffix("_ms").replace("_", " "))


def memory_at_peak(forecasts: Sequence[tuple[str, Forecast]]) -> BarChart | None:
    """A bar each: what lives at the peak by kind, then what the allocator and the driver keep beside it. None where no memory
    was forecast."""
    memories = [(name, f.memory, f.capacity_gib) for name, f in forecasts if f.memory is not None]
    if not memories:
        return None
    bars = []
    for name, m, capacity_gib in memories:
        device_has = "" if capacity_gib is None else f" of {number(capacity_gib)}"
        taken = (
            m.device_gib
            if capacity_gib is None
            else min(m.device_gib, max(capacity_gib, m.allocated_gib))
        )
        reserve = ("reserved by allocator and driver", "reserve", max(taken - m.allocated_gib, 0.0))
        bars.append(
            bar(name, f"{number(m.allocated_gib)}{device_has} GiB", [*_kinds_gib(m), reserve])
        )
    name, first, _ = memories[0]
    most, allocated = max(_kinds_gib(first), key=lambda kind: kind[2]), number(first.allocated_gib)
    return BarChart(
        title="Memory at the step's peak",
        finding=sentence(
            f"{name}: {most[0]} take the largest part, {number(most[2])} of {allocated} GiB"
            " allocated."
        ),
        label="memory of one device",
        unit="GiB",
        groups=(BarGroup(bars=tuple(bars)),),
        note="Allocated memory is held by live tensors; grey: reserved by allocator and driver.",
    )


def _kinds_gib(m: Memory) -> list[tuple[str, str, float]]:
    """(name, tone, GiB) of what lives at the peak."""
    return [
        ("parameters", "parameters", m.parameters_gib),
        ("gradients", "gradients", m.gradients_gib),
        ("optimizer states", "states", m.optimizer_states_gib),
        ("activations", "activations", m.activations_gib),
    ]


def step_and_memory(
    forecasts: Sequence[tuple[str, Forecast]], note: str = ""
) -> list[BarChart | None]:
    """The parts of the step and the memory at its peak, of forecasts under names."""
    timed = [
        Timed("", name, f.step, f.step_time_interval_ms)
        for name, f in forecasts
        if f.step is not None
    ]
    return [step_breakdown(timed, note), memory_at_peak(forecasts)]


def memory_chart(
    m: MemoryOverStep, capacity_gib: float | None, phase_ends_ms: tuple[float, float]
) -> Chart:
    """Memory over the course of a step, stacked by kind. `phase_ends_ms`: where the forward and the backward pass end."""
    at = tuple(map(float, m.at_ms))
    kinds = [
        ("parameters", "parameters", [m.parameters_gib] * len(at)),
        ("optimizer states", "states", [m.optimizer_states_gib] * len(at)),
        ("gradients", "gradients", m.gradients_gib.tolist()),
        ("activations and temporaries", "activations", m.activations_gib.tolist()),
    ]
    areas, below = [], [0.0] * len(at)
    for name, tone, values in kinds:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            areas.append(
                Series(name=name, kind="area", tone=tone, x=at, low=tuple(below), high=tuple(above))
            )
        below = above
    peak = max(range(len(at)), key=below.__getitem__)
    where = ("forward pass", "backward pass", "optimizer update")[
        sum(at[peak] >= end for end in phase_ends_ms)
    ]
    marks = [
        Mark(axis="x", at=phase_ends_ms[0], text="backward pass begins", tone="ideal"),
        Mark(axis="x", at=phase_ends_ms[1], text="update begins", tone="ideal"),
        Mark(
            axis="point",
            at=at[peak],
            y=below[peak],
            text=f"peak: {number(below[peak])} GiB",
            tone="best",
        ),
    ]
    device_has = "" if capacity_gib is None else f"the device has {number(capacity_gib)}"
    if capacity_gib is not None and capacity_gib < MOST_INTERVAL * below[peak]:
        marks.append(Mark(axis="y", at=capacity_gib, text=f"{device_has} GiB", tone="limit"))
    return Chart(
        title="Memory over the step",
        finding=(
            f"Memory peaks in the {where}: {number(below[peak])}"
            f" GiB{device_has and f'; {device_has}'}. At the peak:"
            f" {_owners([(name, values[peak]) for name, _, values in kinds], below[peak])}."
        ),
        x=Axis(label="time in the step", unit="ms", low=0),
        y=Axis(label="memory allocated", unit="GiB", low=0),
        series=tuple(areas),
        marks=tuple(marks),
        note=(
            "From the trace: live tensors at each operator. Times within a phase are estimated from"
            " the bytes moved."
        ),
    )


def _owners(kinds: Sequence[tuple[str, float]], whole: float) -> str:
    """What holds the memory, most first, with shares."""
    held = sorted(((gib, name) for name, gib in kinds if gib > 0.005 * whole), reverse=True)
    return ", ".join(f"{name} {number(gib)} GiB ({gib / whole:.0%})" for gib, name in held)


def roofline_chart(r: Roofline, device: str) -> Chart:
    """Operators as points as large as their share of time, the roofs of memory and of arithmetic, the heaviest named."""
    ridge = r.peak_tflops * 1e3 / r.bandwidth_gb_per_s
    left = min(ridge / 4, *(p.intensity for p in r.points)) / 1.5
    right = max(ridge * 4, *(p.intensity for p in r.points)) * 1.5
    roof = [(x, min(r.peak_tflops, x * r.bandwidth_gb_per_s / 1e3)) for x in (left, ridge, right)]
    longest = max(p.time_ms for p in r.points)
    shown, tones = (
        [series("roofs of the datasheet", "line", "ideal", roof)],
        {False: "first", True: "second"},
    )
    for computing, limit in ((False, "memory bandwidth"), (True, "compute")):
        operators = [p for p in r.points if (p.intensity >= ridge) is computing]
        if operators:
            shown.append(
                series(
                    f"operators bound by {limit}",
                    "points",
                    tones[computing],
                    [(p.intensity, p.tflops) for p in operators],
                    labels=tuple(f"{p.name}: {number(p.time_ms)} ms" for p in operators),
                    sizes=tuple(p.time_ms / longest for p in operators),
                )
            )
    by_memory = sum(p.time_ms for p in r.points if p.intensity < ridge) / sum(
        p.time_ms for p in r.points
    )
    return Chart(
        title=f"Roofline of {device}",
        finding=(
            f"Of these operators' time, {by_memory:.0%} is bound by memory bandwidth and"
            f" {1 - by_memory:.0%} by compute."
        ),
        x=Axis(label="arithmetic intensity", unit="FLOP/byte", scale="log10"),
        y=Axis(label="rate", unit="TFLOP/s", scale="log10"),
        series=tuple(shown),
        nearest="point",
        marks=tuple(
            Mark(
                axis="point",
                at=p.intensity,
                y=p.tflops,
                text=p.name,
                tone=tones[p.intensity >= ridge],
            )
            for p in r.points[:MOST_NAMED]
        ),
        note=(
            f"The {len(r.points)} heaviest groups of similar operators, {r.share:.0%} of the"
            " device's forecast time; larger points take longer. Roofs of the datasheet:"
            f" {number(r.peak_tflops)} TFLOP/s and {number(r.bandwidth_gb_per_s)} GB/s. Caches, and"
            " algorithms with fewer multiplications (Winograd), can lift a point above a roof."
        ),
    )
