"""A forecast as a page: the verdict, step time over the batch size, where time and memory go, roofline, scaling."""

from collections.abc import Mapping, Sequence

from trainpace.forecast import memory_over_step
from trainpace.outcome import Forecast, Jump, forecast_row
from trainpace.records import to_jsonable
from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
from trainpace.report.charts.chart import Picture, sentence
from trainpace.report.charts.memory import memory_chart
from trainpace.report.charts.roofline import roofline_chart
from trainpace.report.charts.scaling import scaling_chart
from trainpace.report.charts.step_time import best_of, forecast_sweep, provenance
from trainpace.report.forecast import device_and_batch, fleet, verdict
from trainpace.report.pages.render import page
from trainpace.units import format_count, format_number
from trainpace.verbs.forecast import Sweep

MOST_BARS = 12


def forecast_page(
    groups: Sequence[Sweep], jumps: Mapping[str, Sequence[Jump]], journal_notes: Sequence[str] = ()
) -> str:
    """The page as text. `journal_notes`: what the journal knows beside the forecast."""
    rows = [row for group in groups for row in group.rows]
    workload, first, best = groups[0].forecaster.workload, rows[0], best_of(rows)
    e = first.execution
    data = {
        "record": "Forecasts", "schema_version": 1, "rows": [forecast_row(row) for row in rows], "journal": list(journal_notes),
        "jumps": {name: [to_jsonable(jump) for jump in some] for name, some in jumps.items()},
    }  # fmt: skip
    accumulated = f", {e.accumulation} micro-batches a step" if e.accumulation > 1 else ""
    priced = any(row.training_time is not None for row in rows)
    return page(
        "forecast.html", f"{workload.model}: {'how long training takes' if priced else 'how long a step takes'}",
        [verdict(rows)[0], *_trust(best), *journal_notes], forecast_pictures(groups, jumps), data, best is not None,
        f"{format_count(workload.parameters)} parameters, {workload.sample}, {e.precision}, {e.optimizer}{accumulated}.",
        rows=rows, best=best, heaviest=best or first, heaviest_on=device_and_batch(best or first), priced=priced, fleet=fleet,
        reasons=[f"Not forecast: {reason}" for reason in dict.fromkeys(row.reason for row in rows if row.reason)],
    )  # fmt: skip


def forecast_pictures(groups: Sequence[Sweep], jumps: Mapping[str, Sequence[Jump]]) -> list[Picture]:
    """The charts that there are data for, the most telling first."""
    pictures: list[Picture | None] = [forecast_sweep([row for group in groups for row in group.rows], jumps)]
    bests = [(g, best_of(g.rows) or next((r for r in g.rows if r.step is not None), None)) for g in groups]
    shown = [(group, f) for group, f in bests if f is not None]
    timed = [Timed("", device_and_batch(f), f.step, f.step_time_interval_ms) for _, f in shown if f.step is not None]
    if timed:
        pictures.append(step_breakdown(timed[:MOST_BARS], provenance([f for _, f in shown])))
        held = [Held(device_and_batch(f), f.memory, f.capacity_gib) for _, f in shown if f.memory is not None]
        pictures.append(memory_at_peak(held[:MOST_BARS]) if held else None)
        best = best_of([f for _, f in shown])
        pictures += _inside(*next((pair for pair in shown if pair[1] is best), shown[0]))
    return [picture for picture in pictures if picture is not None]


def _inside(group: Sweep, best: Forecast) -> list[Picture | None]:
    """On the best cluster alone: what happens within a step, and on fewer devices."""
    assert best.step is not None
    pictures: list[Picture | None] = []
    form = group.forecaster.workload.form(best.execution.precision)
    memory = None if best.memory is None else memory_over_step(form, best.execution, best.step, best.memory)
    if memory is not None:
        n = best.execution.accumulation
        ends = best.step.forward_ms / n, (best.step.forward_ms + best.step.backward_ms) / n
        pictures.append(memory_chart(memory, best.capacity_gib, ends))
    roofs = group.forecaster.roofline(best.execution)
    if roofs is not None:
        pictures.append(roofline_chart(roofs, f"{best.device}, batch {best.execution.micro_batch}"))
    if group.forecaster.target.cluster.num_devices > 1:
        pictures.append(scaling_chart(group.forecaster.fewer_devices(best.execution)))
    return pictures


def _trust(best: Forecast | None) -> list[str]:
    """Memory, how far to trust the figures, and warnings."""
    if best is None:
        return []
    notes = ["A forecast, not a measurement: the interval should hold in 9 of 10 cases."]
    if best.memory is not None and best.capacity_gib is not None:
        largest = best.largest_micro_batch
        more = "" if largest is None else f" The largest batch that fits is {largest:,}."
        notes.insert(
            0, f"It needs {format_number(best.memory.allocated_gib)} of {format_number(best.capacity_gib)} GiB.{more}"
        )
    return notes + [sentence(f"{warning}.") for warning in best.warnings]
