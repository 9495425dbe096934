"""A measured sweep as a page: the verdict, the curve with its jumps beside the forecast, throughput, the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainpace.measure.analysis import SweepAnalysis
from trainpace.outcome import Forecast, Jump, Measurement
from trainpace.report.charts.breakdown import Timed, step_breakdown
from trainpace.report.charts.chart import Picture
from trainpace.report.charts.step_time import measured_sweep, throughput
from trainpace.report.measurement import sweep_json, verdict
from trainpace.report.pages.figure import drawn, folded, lines, section, table
from trainpace.report.pages.frame import document
from trainpace.units import format_number


def sweep_page(
    measured: Sequence[Measurement], a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> str:
    """The page as text."""
    first = measured[0]
    e = first.execution
    title = f"{first.model} on {first.device}: step time over the batch size"
    what = f"Measured with {e.precision} and {e.optimizer}, {sum(p.probes for p in a.points)} probes in processes of their own."
    pictures = "".join(drawn(picture) for picture in sweep_pictures(measured, a, foreseen, causes))
    where = [f"{name}: {value}" for name, value in sorted(first.environment.items())]
    body = (
        pictures
        + section("Figures", folded(_table(a, foreseen), len(a.points)))
        + section("Where it was measured", lines(where, "soft"))
    )
    return document(title, verdict(a, causes), lines([what], "soft") + body, sweep_json(measured, a, foreseen, None))


def sweep_pictures(
    measured: Sequence[Measurement], a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> list[Picture]:
    """The curve, the throughput, and the step's parts at the best batch and at the ends."""
    found: list[Picture] = [measured_sweep(a, foreseen, causes)]
    if len(a.points) > 1:
        found.append(throughput(a, foreseen))
    shown = sorted({a.points[0].batch, a.best.best.batch, a.points[-1].batch})
    steps = []
    for batch in shown:
        one = next((m for m in measured if m.execution.micro_batch == batch), None)
        if one is not None:
            steps.append(Timed(f"batch {batch}", "measured", one.step, one.interval_ms))
        there = foreseen.get(batch)
        if there is not None and there.step is not None:
            steps.append(Timed(f"batch {batch}", "forecast", there.step, there.step_time_interval_ms))
    if steps:
        found.append(step_breakdown(steps))
    return found


def _table(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> str:
    head = ["batch", "step ms", "90 % of repeats", "samples/s", "memory GiB", "probes", "forecast ms", "error"]
    rows = []
    for p in a.points:
        there = foreseen.get(p.batch)
        step = None if there is None or there.step is None else there.step.total_ms
        rows.append([
            str(p.batch), format_number(p.step_ms),
            f"{format_number(p.interval_ms.low)} to {format_number(p.interval_ms.high)}", format_number(p.samples_per_second),
            "" if p.peak_memory_gib is None else format_number(p.peak_memory_gib), str(p.probes),
            "" if step is None else format_number(step), "" if step is None else f"{step / p.step_ms - 1:+.0%}",
        ])  # fmt: skip
    best = [i for i, p in enumerate(a.points) if p.batch == a.best.best.batch]
    failed = lines([f"Batch {failure.batch}: {failure.reason}" for failure in a.failures])
    return table(head, rows, left=0, hits=best) + failed
