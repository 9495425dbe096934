"""A measured sweep as a page: the verdict, the curve with its jumps beside the forecast, throughput, the parts of a step."""

from collections.abc import Mapping, Sequence

from trainpace.measure import SweepAnalysis
from trainpace.outcome import Forecast, Jump, Measurement
from trainpace.report.charts.breakdown import Timed, step_breakdown
from trainpace.report.charts.chart import Picture
from trainpace.report.charts.step_time import measured_sweep, throughput
from trainpace.report.measurement import sweep_json, verdict
from trainpace.report.pages.render import page


def sweep_page(
    measured: Sequence[Measurement], a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> str:
    first = measured[0]
    e, probes = first.execution, sum(p.probes for p in a.points)
    steps = {batch: f.step.total_ms for batch, f in foreseen.items() if f.step is not None}
    return page(
        "sweep.html", f"{first.model} on {first.device}: step time over the batch size", verdict(a, causes),
        sweep_pictures(measured, a, foreseen, causes), sweep_json(measured, a, foreseen, None),
        subtitle=f"Measured with {e.precision} and {e.optimizer}, {probes} probes, each in a process of its own.",
        points=[(p, steps.get(p.batch)) for p in a.points], best=a.best.best.batch, failures=a.failures,
        environment=[f"{name}: {value}" for name, value in sorted(first.environment.items())],
    )  # fmt: skip


def sweep_pictures(
    measured: Sequence[Measurement], a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> list[Picture]:
    pictures: list[Picture] = [measured_sweep(a, foreseen, causes)]
    if len(a.points) > 1:
        pictures.append(throughput(a, foreseen))
    steps = []
    for batch in sorted({a.points[0].batch, a.best.best.batch, a.points[-1].batch}):
        one, there = next((m for m in measured if m.execution.micro_batch == batch), None), foreseen.get(batch)
        if one is not None:
            steps.append(Timed(f"batch {batch}", "measured", one.step, one.interval_ms))
        if there is not None and there.step is not None:
            steps.append(Timed(f"batch {batch}", "forecast", there.step, there.step_time_interval_ms))
    return [*pictures, step_breakdown(steps)] if steps else pictures
