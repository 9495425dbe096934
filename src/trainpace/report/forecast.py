"""Forecasts for the terminal, and as the rows of `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainpace.outcome import STEP_PARTS, Forecast, Jump
from trainpace.report.chart import chart
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_count, format_duration, format_number, format_usd
from trainpace.workload import Workload

FEWEST_FOR_A_PICTURE = 8


def print_forecasts(workload: Workload, rows: Sequence[Forecast]) -> None:
    """A table, where the time goes in the first one, and how far to trust it."""
    first = rows[0]
    n, trained = workload.parameters, workload.trainable_parameters
    frozen = "" if trained == n else f" ({format_count(trained)} trained)"
    title = f"{workload.model}: {format_count(n)} parameters{frozen}, {workload.sample}, {first.execution.precision},"
    print_lines(f"{title} {first.execution.optimizer}")
    with_cost = any(row.training_time is not None for row in rows)
    columns = ["GPU", "batch", "step ms", "90 % interval", "samples/s", "GiB", "fits", "MFU"]
    columns += ["training", "cost"] if with_cost else []
    print_table(columns, [_cells(row, with_cost) for row in rows])
    done = [row for row in rows if row.step is not None]
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        print_lines(f"Not forecast: {reason}")
    for warning in dict.fromkeys(
        f"{r.device}, batch {r.execution.micro_batch}: {w}" for r in done for w in r.warnings[:1]
    ):
        print_lines(f"Warning: {warning}.") if len(rows) <= 12 else None
    if len(done) == 1:
        _print_breakdown(done[0])
    fitting = [row for row in done if row.fits is not False]
    if len(fitting) > 1:
        best = max(fitting, key=lambda row: row.samples_per_second or 0.0)
        print_lines(
            f"Best throughput that fits: {best.device}, batch {best.execution.micro_batch},"
            f" {format_number(best.samples_per_second or 0.0)} samples/s."
        )
    if done:
        where = {
            "fitted": "datasheet figures and constants fitted on public measurements",
            "transferred": "a measurement of the same model on another card",
            "calibrated": "this machine's micro-benchmarks",
        }
        for name, largest in dict.fromkeys((row.device, row.largest_micro_batch) for row in done):
            if largest is not None:
                print_lines(
                    f"Largest batch per GPU that fits on {name}: {largest:,}."
                    if largest
                    else f"Not even one sample fits on {name}."
                )
        sources = " and ".join(where[p] for p in dict.fromkeys(row.provenance for row in done))
        print_lines(f"A forecast, not a measurement: from {sources}. The interval should hold 9 of 10 cases.")


def print_jumps(rows: Sequence[Forecast], jumps: Mapping[str, Sequence[Jump]]) -> None:
    """Step time over the batch size as a picture, its discontinuities and what causes them."""
    by_device: dict[str, list[Forecast]] = {}
    for row in rows:
        if row.step is not None:
            by_device.setdefault(row.device, []).append(row)
    for name, swept in by_device.items():
        if len(swept) < FEWEST_FOR_A_PICTURE:
            continue
        found = jumps.get(name, ())
        points = [(row.execution.micro_batch, row.step.total_ms) for row in swept if row.step is not None]
        print_lines(*chart(points, {jump.batch for jump in found}, f"{name}: step time in ms over the batch size"))
        if not found:
            print_lines("No jumps: every sample costs about the same.")
        for jump in found:
            print_lines(
                f"Jump at batch {jump.batch}: {format_number(jump.before_ms)} to {format_number(jump.after_ms)} ms,"
                f" {format_number(jump.excess_ms)} ms more than a sample usually costs. {'; '.join(jump.causes)}."
            )


def row_json(f: Forecast) -> dict[str, Any]:
    """One row of the documented contract of `forecast --json`."""
    interval = f.step_time_interval_ms
    return {
        "model": f.model,
        "gpu": f.device,
        "num_gpus": f.num_devices,
        "precision": f.execution.precision,
        "batch": f.execution.micro_batch,
        "step_time_ms": None if f.step is None else f.step.total_ms,
        "step_time_ms_low": None if interval is None else interval.low,
        "step_time_ms_high": None if interval is None else interval.high,
        "samples_per_second": f.samples_per_second,
        "peak_memory_gib": None if f.memory is None else f.memory.allocated_gib,
        "fits": f.fits,
        "largest_batch": f.largest_micro_batch,
        "mfu": f.mfu,
        "exposed_ms": dict(f.exposed_ms),
        "scaling_efficiency": f.scaling_efficiency,
        "scaling_reference_devices": f.scaling_reference_devices,
        "breakdown_ms": {} if f.step is None else {name: getattr(f.step, name) for name in STEP_PARTS},
        "provenance": f.provenance,
        "warnings": list(f.warnings),
        "reason": f.reason,
        "training_time_s": None if f.training_time is None else f.training_time.total_s,
        "cost_usd": f.cost_usd,
    }


def _cells(f: Forecast, with_cost: bool) -> list[str]:
    device = f.device if f.num_devices == 1 else f"{f.num_devices} x {f.device}"
    memory = "-" if f.memory is None else format_number(f.memory.allocated_gib)
    fits = "?" if f.fits is None else "yes" if f.fits else "NO"
    if f.step is None or f.step_time_interval_ms is None:
        return [
            device,
            str(f.execution.micro_batch),
            "-",
            "-",
            "-",
            memory,
            fits,
            "-",
            *(["-", "-"] if with_cost else []),
        ]
    interval = f.step_time_interval_ms
    cells = [
        device, str(f.execution.micro_batch), format_number(f.step.total_ms),
        f"{format_number(interval.low)} to {format_number(interval.high)}", format_number(f.samples_per_second or 0.0),
        memory, fits, "-" if f.mfu is None else f"{100 * f.mfu:.0f} %",
    ]  # fmt: skip
    if with_cost:
        cells.append("-" if f.training_time is None else format_duration(f.training_time.total_s))
        cells.append("-" if f.cost_usd is None else format_usd(f.cost_usd))
    return cells


def _print_scaling(f: Forecast) -> None:
    """Which exchanges nothing hides, the pipeline's bubble, and what is left of so many devices."""
    if f.step is None or f.num_devices == 1:
        return
    total, e = f.step.total_ms, f.execution
    sizes = {"tensor": e.tp, "pipeline": e.pp, "context": e.cp}
    shape = [f"{e.data_parallel_size} data-parallel", *(f"{size} {name}" for name, size in sizes.items() if size > 1)]
    print_lines(f"Ranks: {' x '.join(shape)}; global batch {e.global_batch:,}.")
    kinds = [(kind.replace("_", " "), ms) for kind, ms in sorted(f.exposed_ms.items(), key=lambda item: -item[1])]
    if kinds:
        shown = ", ".join(f"{kind} {format_number(ms)} ms ({100 * ms / total:.0f} %)" for kind, ms in kinds)
        print_lines(f"Exchanges that nothing hides: {shown}.")
    if f.step.idle_ms > 0:
        print_lines(f"Pipeline bubble: {format_number(f.step.idle_ms)} ms ({100 * f.step.idle_ms / total:.0f} %).")
    print_lines(_scaling(f))


def _scaling(f: Forecast) -> str:
    """The efficiency, and against what."""
    if f.scaling_efficiency is None:
        return "Scaling efficiency: none, as no fewer devices hold this to compare with."
    share = f"Scaling efficiency: {100 * f.scaling_efficiency:.0f} %"
    if f.scaling_reference_devices == 1:
        return f"{share} of {f.num_devices} devices that each worked alone."
    return f"{share} of the throughput a device of {f.scaling_reference_devices}, the fewest that hold this."


def _print_breakdown(f: Forecast) -> None:
    assert f.step is not None
    total = f.step.total_ms
    parts = [(name.removesuffix("_ms").replace("_", " "), getattr(f.step, name)) for name in STEP_PARTS]
    rows = [
        (name, format_number(ms), f"{100 * ms / total:.0f} %", "#" * round(40 * ms / total))
        for name, ms in parts
        if ms > 0
    ]
    print_table(("part of the step", "ms", "share", ""), [(r[0], r[1], r[2], r[3]) for r in rows])
    _print_scaling(f)
    if f.memory is not None:
        m = f.memory
        on_gpu = m.device_gib > m.reserved_gib  # by the driver's context, which a CPU has not
        shown = f"; nvidia-smi would show about {format_number(m.device_gib)} GiB" if on_gpu else ""
        if f.fits and f.capacity_gib is not None and m.device_gib > f.capacity_gib:
            shown = "; nvidia-smi would show the card full, for torch's allocator keeps what it once took while there is room"
        print_lines(
            f"Memory at the peak: parameters {format_number(m.parameters_gib)}, gradients {format_number(m.gradients_gib)},"
            f" optimizer {format_number(m.optimizer_states_gib)}, activations {format_number(m.activations_gib)} GiB{shown}."
        )
    heavy = [
        (
            o.module or "-",
            o.kind,
            o.phase,
            str(o.count),
            format_number(o.time_ms),
            f"{100 * o.time_ms / total:.0f} %",
            o.bound,
        )
        for o in f.heaviest[:10]
    ]
    print_table(("heaviest operators", "kind", "phase", "count", "ms", "share", "bound by"), heavy, left=3)
