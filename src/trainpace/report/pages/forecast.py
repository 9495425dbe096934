"""A forecast as a page: the verdict, step time over the batch size, where time and memory go, roofline, scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainpace.forecast.fewer_devices import fewer_devices
from trainpace.forecast.over_step import memory_over_step
from trainpace.forecast.roofline import roofline
from trainpace.forecast.timings import MachineModel
from trainpace.hardware import Cluster
from trainpace.outcome import Forecast, Jump, forecast_row
from trainpace.records import to_jsonable
from trainpace.report.charts.breakdown import Held, Timed, memory_at_peak, step_breakdown
from trainpace.report.charts.chart import Picture, sentence
from trainpace.report.charts.memory import memory_chart
from trainpace.report.charts.roofline import roofline_chart
from trainpace.report.charts.scaling import scaling_chart
from trainpace.report.charts.step_time import best_of, forecast_sweep, provenance
from trainpace.report.pages.figure import drawn, folded, lines, section, table
from trainpace.report.pages.frame import document
from trainpace.units import format_count, format_duration, format_number, format_usd
from trainpace.workload import Workload

MOST_BARS = 12


class Asked(NamedTuple):
    """What was forecast on one cluster, over batch sizes. `machine`: its own calibration, where it has one."""

    workload: Workload
    cluster: Cluster
    machine: MachineModel | None
    rows: Sequence[Forecast]


def forecast_page(asked: Sequence[Asked], jumps: Mapping[str, Sequence[Jump]], said: Sequence[str] = ()) -> str:
    """The page as text. `said`: further sentences, as on what the journal knows."""
    rows = [row for one in asked for row in one.rows]
    workload, first = asked[0].workload, rows[0]
    e = first.execution
    title = f"{workload.model}: {'how long a step takes' if first.training_time is None else 'how long training takes'}"
    what = (
        f"{format_count(workload.parameters)} parameters, {workload.sample}, {e.precision}, {e.optimizer}"
        f"{f', {e.accumulation} micro-batches a step' if e.accumulation > 1 else ''}."
    )
    pictures = "".join(drawn(picture) for picture in forecast_pictures(asked, jumps))
    best = best_of(rows)
    body = (
        lines([what], "soft")
        + pictures
        + section("All forecasts", folded(_table(rows, best), len(rows)), _reasons(rows))
    )
    body += _heaviest(best or first)
    data = {
        "record": "Forecasts", "schema_version": 1, "rows": [forecast_row(row) for row in rows], "journal": list(said),
        "jumps": {name: [to_jsonable(jump) for jump in found] for name, found in jumps.items()},
    }  # fmt: skip
    return document(title, [*_verdict(rows, best), *said], body, data, best is not None)


def forecast_pictures(asked: Sequence[Asked], jumps: Mapping[str, Sequence[Jump]]) -> list[Picture]:
    """Those that there is something to show for, the most telling first."""
    rows = [row for one in asked for row in one.rows]
    found: list[Picture | None] = [forecast_sweep(rows, jumps)]
    bests = [(one, best_of(one.rows) or next((r for r in one.rows if r.step is not None), None)) for one in asked]
    shown = [(one, best) for one, best in bests if best is not None and best.step is not None]
    if not shown:
        return [picture for picture in found if picture is not None]
    of_time = [
        Timed("", _label(best), best.step, best.step_time_interval_ms) for _, best in shown if best.step is not None
    ]
    if of_time:
        found.append(step_breakdown(of_time[:MOST_BARS], provenance([best for _, best in shown])))
    held = [Held(_label(best), best.memory, best.capacity_gib) for _, best in shown if best.memory is not None]
    if held:
        found.append(memory_at_peak(held[:MOST_BARS]))
    best = best_of([row for _, row in shown])
    chosen = next((pair for pair in shown if pair[1] is best), shown[0])
    return [picture for picture in [*found, *_inside(*chosen)] if picture is not None]


def _inside(one: Asked, best: Forecast) -> list[Picture | None]:
    """Of the best cluster alone: what happens within a step, and on fewer devices."""
    assert best.step is not None
    found: list[Picture | None] = []
    form = one.workload.form(best.execution.precision)
    memory = None if best.memory is None else memory_over_step(form, best.execution, best.step, best.memory)
    if memory is not None:
        n = best.execution.accumulation
        ends = best.step.forward_ms / n, (best.step.forward_ms + best.step.backward_ms) / n
        found.append(memory_chart(memory, best.capacity_gib, ends))
    roofs = roofline(one.workload, best.execution, one.cluster, one.machine)
    if roofs is not None:
        found.append(roofline_chart(roofs, f"{best.device}, batch {best.execution.micro_batch}"))
    if one.cluster.num_devices > 1:
        found.append(scaling_chart(fewer_devices(one.workload, best.execution, one.cluster, one.machine)))
    return found


def _verdict(rows: Sequence[Forecast], best: Forecast | None) -> list[str]:
    if best is None or best.step is None or best.step_time_interval_ms is None:
        able = next((row for row in rows if row.step is not None), None)
        if able is None:
            return [f"It cannot be forecast: {rows[0].reason}"]
        needed = "" if able.memory is None else f" It needs {format_number(able.memory.allocated_gib)} GiB"
        has = "" if able.capacity_gib is None else f", and the device has {format_number(able.capacity_gib)}"
        return [f"It does not fit in memory on {_device(able)}.{needed}{has}."]
    i = best.step_time_interval_ms
    chosen = "" if len(rows) == 1 else "The best of these: "
    said = [
        f"{chosen}{_label(best)} takes {format_number(best.step.total_ms)} ms a step ({format_number(i.low)} to"
        f" {format_number(i.high)}), {format_number(best.samples_per_second or 0.0)} samples a second."
    ]
    if best.training_time is not None:
        between = best.training_time_interval_s
        spread = "" if between is None else f" ({format_duration(between.low)} to {format_duration(between.high)})"
        cost = "" if best.cost_usd is None else f", for {format_usd(best.cost_usd)}"
        said.append(f"The whole training takes {format_duration(best.training_time.total_s)}{spread}{cost}.")
    if best.memory is not None and best.capacity_gib is not None:
        largest = best.largest_micro_batch
        more = "" if largest is None else f" The largest batch that fits is {largest:,}."
        said.append(
            f"It needs {format_number(best.memory.allocated_gib)} of {format_number(best.capacity_gib)} GiB.{more}"
        )
    said.append("A forecast, not a measurement: the interval should hold 9 of 10 cases.")
    return said + [sentence(f"{warning}.") for warning in best.warnings]


def _device(f: Forecast) -> str:
    return f.device if f.num_devices == 1 else f"{f.num_devices} x {f.device}"


def _label(f: Forecast) -> str:
    return f"{_device(f)}, batch {f.execution.micro_batch}"


def _table(rows: Sequence[Forecast], best: Forecast | None) -> str:
    with_time = any(row.training_time is not None for row in rows)
    head = ["GPU", "batch", "step ms", "90 % interval", "samples/s", "GiB", "fits", "MFU", "from"]
    head += ["training", "cost"] if with_time else []
    cells = []
    for f in rows:
        i = f.step_time_interval_ms
        row = [
            _device(f), str(f.execution.micro_batch), "-" if f.step is None else format_number(f.step.total_ms),
            "-" if i is None else f"{format_number(i.low)} to {format_number(i.high)}",
            "-" if f.samples_per_second is None else format_number(f.samples_per_second),
            "-" if f.memory is None else format_number(f.memory.allocated_gib),
            "?" if f.fits is None else "yes" if f.fits else "no", "-" if f.mfu is None else f"{f.mfu:.0%}", f.provenance,
        ]  # fmt: skip
        if with_time:
            row += ["-" if f.training_time is None else format_duration(f.training_time.total_s)]
            row += ["-" if f.cost_usd is None else format_usd(f.cost_usd)]
        cells.append(row)
    return table(head, cells, hits=[i for i, row in enumerate(rows) if row is best])


def _reasons(rows: Sequence[Forecast]) -> str:
    return lines([f"Not forecast: {reason}" for reason in dict.fromkeys(row.reason for row in rows if row.reason)])


def _heaviest(f: Forecast) -> str:
    if f.step is None or not f.heaviest:
        return ""
    total = f.step.total_ms
    rows = [
        [o.module or "-", o.kind, o.phase, str(o.count), format_number(o.time_ms), f"{o.time_ms / total:.0%}", o.bound,
         f"{o.share_of_roof:.0%}"]
        for o in f.heaviest
    ]  # fmt: skip
    head = ["first module", "kind", "phase", "count", "ms", "of the step", "bound by", "of its roof"]
    return section(f"The heaviest operators on {_label(f)}", table(head, rows, left=3))
