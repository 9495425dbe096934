"""Memory over the course of a step, stacked by kind, under the device's limit."""

from trainpace.forecast import MemoryOverStep
from trainpace.report.charts.chart import MOST_INTERVAL, Axis, Chart, Mark, Series
from trainpace.units import format_number


def memory_chart(m: MemoryOverStep, capacity_gib: float | None, phase_ends_ms: tuple[float, float]) -> Chart:
    """`phase_ends_ms`: where the forward and the backward pass end."""
    at = tuple(map(float, m.at_ms))
    kinds = [
        ("parameters", "parameters", [m.parameters_gib] * len(at)),
        ("optimizer states", "states", [m.optimizer_states_gib] * len(at)),
        ("gradients", "gradients", m.gradients_gib.tolist()),
        ("activations and temporaries", "activations", m.activations_gib.tolist()),
    ]
    series, below = [], [0.0] * len(at)
    for name, tone, values in kinds:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            series.append(Series(name=name, kind="area", tone=tone, x=at, low=tuple(below), high=tuple(above)))
        below = above
    peak = max(range(len(at)), key=below.__getitem__)
    where = ("forward pass", "backward pass", "optimizer update")[sum(at[peak] >= end for end in phase_ends_ms)]
    marks = [
        Mark(axis="x", at=phase_ends_ms[0], text="backward pass begins", tone="ideal"),
        Mark(axis="x", at=phase_ends_ms[1], text="update begins", tone="ideal"),
        Mark(axis="point", at=at[peak], y=below[peak], text=f"peak: {format_number(below[peak])} GiB", tone="best"),
    ]
    if capacity_gib is not None and capacity_gib < MOST_INTERVAL * below[peak]:
        marks.append(
            Mark(axis="y", at=capacity_gib, text=f"the device has {format_number(capacity_gib)} GiB", tone="limit")
        )
    has = "" if capacity_gib is None else f"; the device has {format_number(capacity_gib)}"
    return Chart(
        title="Memory over the step",
        finding=f"Memory peaks in the {where}: {format_number(below[peak])} GiB{has}.",
        x=Axis(label="time in the step", unit="ms", low=0),
        y=Axis(label="memory allocated", unit="GiB", low=0),
        series=tuple(series),
        marks=tuple(marks),
        note="From the trace: live tensors at each operator. Times within a phase are estimated from the bytes moved.",
    )
