"""Forecasts for the terminal, and as the rows of `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainpace.forecast.memory import needed_gib
from trainpace.job import assumed_in_words
from trainpace.outcome import STEP_PARTS, Forecast, Jump
from trainpace.report.chart import chart
from trainpace.report.columns import Column, bar, words
from trainpace.report.terminal import (
    BAR_WIDTH,
    console,
    print_head,
    print_lines,
    print_next,
    print_plot,
    print_table,
    print_verdict,
)
from trainpace.units import format_count, format_duration, format_number, format_usd
from trainpace.workload import Workload

FEWEST_FOR_A_PICTURE = 8
MOST_ROWS = 24
"""Of a range of batch sizes on one device; beyond it the table has those that decide, the plot all."""
MOST_WARNINGS = 12
SOURCES = {
    "fitted": "datasheet figures and constants fitted on public measurements",
    "transferred": "a measurement of the same model on another card",
    "calibrated": "this machine's micro-benchmarks",
}


def print_forecasts(
    workload: Workload,
    rows: Sequence[Forecast],
    jumps: Mapping[str, Sequence[Jump]] | None = None,
    said: Sequence[str] = (),
    spec: str | None = None,
) -> None:
    """The answer, a table, where the time goes in a single one, the jumps over a range, how far to trust it, and what next.

    `said`: what the journal knows beside it. `spec`: how the user named the model.
    """
    e = rows[0].execution
    n, trained = workload.parameters, workload.trainable_parameters
    frozen = "" if trained == n else f" ({format_count(trained)} trained)"
    print_head(
        f"{workload.model}: {format_count(n)} parameters{frozen}, {workload.sample}, {e.precision}, {e.optimizer}"
    )
    done = [row for row in rows if row.step is not None]
    _print_verdict(rows, done)
    shown = _deciding(rows)
    priced = any(row.training_time is not None for row in rows)
    print_table(_columns(priced), [_cells(row, priced) for row in shown])
    if len(shown) < len(rows):
        print_lines(f"{len(shown)} of {len(rows)} batch sizes; the plot has all, and so has --json.", "")
    if len(done) == 1:
        _print_breakdown(done[0])
    print_jumps(rows, jumps or {})
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        print_lines(f"Not forecast: {reason}")
    if len(rows) <= MOST_WARNINGS:
        warned = (f"{r.device}, batch {r.execution.micro_batch}: {w}" for r in done for w in r.warnings[:1])
        print_lines(*(f"Warning: {warning}." for warning in dict.fromkeys(warned)))
    if done:
        _print_largest(done)
        print_lines(*said, *dict.fromkeys(assumed_in_words(f.training_time.assumed) for f in done if f.training_time))
        sources = " and ".join(SOURCES[p] for p in dict.fromkeys(row.provenance for row in done))
        print_lines(f"A forecast, not a measurement: from {sources}. The interval should hold 9 of 10 cases.")
        _print_next(done, spec or workload.model)


def _print_verdict(rows: Sequence[Forecast], done: Sequence[Forecast]) -> None:
    fitting = [row for row in done if row.fits is not False]
    if not done:
        print_verdict("No: none of this can be forecast; the reason is below.", good=False)
    elif not fitting:
        print_verdict(_misfit(done), good=False)
    elif len(fitting) == 1 == len(rows):
        print_verdict(_one(fitting[0]))
    elif fitting[0].cost_usd is not None:
        cheap, fast = min(fitting, key=_cost), min(fitting, key=_seconds)
        print_verdict(f"Cheapest: {_where(cheap)}, {_job(cheap)}." if cheap is fast else
                      f"Cheapest: {_where(cheap)}, {_job(cheap)}. Fastest: {_where(fast)}, {_job(fast)}.")  # fmt: skip
    else:
        best = max(fitting, key=_throughput)
        print_verdict(
            f"Best throughput that fits: {_where(best)}, {format_number(_throughput(best))} samples/s."
            f" A step takes {_step(best)}."
        )


def _one(f: Forecast) -> str:
    assert f.step is not None
    fits = "" if f.fits is None else " It fits in memory."
    said = f"A step takes {_step(f)}: {format_number(_throughput(f))} samples/s.{fits}"
    return said if f.training_time is None else f"{said} The whole training: {_job(f)}, without loading and evaluation."


def _job(f: Forecast) -> str:
    if f.training_time is None:
        return ""
    over, total_s = f.training_time_interval_s, f.training_time.total_s
    between = "" if over is None else f" ({format_duration(over.low)} to {format_duration(over.high)})"
    return f"{format_duration(total_s)}{between}" + ("" if f.cost_usd is None else f" for {format_usd(f.cost_usd)}")


def _misfit(done: Sequence[Forecast]) -> str:
    needed = [(f, float(needed_gib(f.memory))) for f in done if f.memory is not None]
    if not needed:
        return "No: nothing here fits in memory."
    f, gib = min(needed, key=lambda row: row[1])
    has = "" if f.capacity_gib is None else f" of {format_number(f.capacity_gib)} GiB"
    which = "it does not fit" if len(done) == 1 else "none of them fits; at the least"
    return f"No: {which}: {_where(f)} needs {format_number(gib)}{has}, with what the driver and the allocator keep at the least."


def _step(f: Forecast) -> str:
    assert f.step is not None
    i = f.step_time_interval_ms
    between = "" if i is None else f" ({format_number(i.low)} to {format_number(i.high)} in 9 of 10 cases)"
    return f"{format_number(f.step.total_ms)} ms{between}"


def _where(f: Forecast) -> str:
    return f"{_device(f)} at batch {f.execution.micro_batch:,}"


def _device(f: Forecast) -> str:
    return f.device if f.num_devices == 1 else f"{f.num_devices} x {f.device}"


def _throughput(f: Forecast) -> float:
    return f.samples_per_second or 0.0


def _cost(f: Forecast) -> float:
    return f.cost_usd or 0.0


def _seconds(f: Forecast) -> float:
    return 0.0 if f.training_time is None else f.training_time.total_s


def _deciding(rows: Sequence[Forecast]) -> list[Forecast]:
    """All of a few; of many the ends, the powers of two, the best and the largest that fits."""
    by_device: dict[str, list[Forecast]] = {}
    for row in rows:
        by_device.setdefault(row.device, []).append(row)
    if max(map(len, by_device.values())) <= MOST_ROWS:
        return list(rows)
    kept = []
    for swept in by_device.values():
        sizes = {2**i for i in range(31)} | {swept[0].execution.micro_batch, swept[-1].execution.micro_batch}
        fitting = [row for row in swept if row.step is not None and row.fits is not False]
        if fitting:
            sizes |= {max(fitting, key=_throughput).execution.micro_batch, fitting[-1].execution.micro_batch}
        kept += [row for row in swept if row.execution.micro_batch in sizes]
    return kept


def _print_largest(done: Sequence[Forecast]) -> None:
    largest = {_device(row): row.largest_micro_batch for row in done if row.largest_micro_batch is not None}
    fits = [f"{batch:,} on {name}" for name, batch in largest.items() if batch]
    if fits:
        print_lines(f"Largest batch per GPU that fits: {', '.join(fits)}.")
    none = [name for name, batch in largest.items() if not batch]
    if none:
        print_lines(f"Not even one sample fits on {', '.join(none)}.")


def _print_next(done: Sequence[Forecast], spec: str) -> None:
    """Real steps where the best one fits; where nothing does, the largest batch that would."""
    fitting = [row for row in done if row.fits is not False]
    if not fitting:
        best = max(done, key=lambda row: row.largest_micro_batch or 0)
        if best.largest_micro_batch:
            command = [*_forecast_command(best, spec), "--batch", str(best.largest_micro_batch)]
            print_next(command, "the largest batch that fits; --accumulate keeps the global batch")
        elif best.execution.activation_checkpointing == "none":
            print_next(
                [*_forecast_command(best, spec), "--checkpointing", "full"],
                "recomputes activations, to need less memory",
            )
        return
    best = max(fitting, key=_throughput)
    e = best.execution
    if best.num_devices > 1:
        command = [
            "trainpace",
            "plan",
            *_forecast_command(best, spec)[2:],
            "--batch",
            str(e.micro_batch),
            "--max-steps",
            "1000",
        ]
        print_next(command, "what to change, and what that saves in a thousand steps")
    elif spec.endswith(".json") and not spec.startswith("transformers:"):
        command = [*_forecast_command(best, spec), "--batch", f"1:{min(best.largest_micro_batch or 64, 128)}"]
        print_next(command, "every batch size of a range, and where step time jumps")
    else:
        command = ["trainpace", "measure", spec, "--batch", str(e.micro_batch), "--precision", e.precision]
        if best.provenance == "calibrated":
            print_next(command, "real steps on this machine, beside the forecast")
        else:
            print_next([*command, "--device", "cuda"], f"real steps, where there is such a card: {best.device}")


def _forecast_command(f: Forecast, spec: str) -> list[str]:
    e = f.execution
    fleet = [] if e.world_size == 1 else ["--num-gpus", str(e.nproc_per_node)]
    return ["trainpace", "forecast", spec, "--gpu", f.device, *fleet, "--precision", e.precision]


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
        title = f"{name}: step time in ms over the batch size" + (", ▲ after a jump" if found else "")
        print_plot([*chart(points, {jump.batch for jump in found}, title, width=console().width), ""])
        if not found:
            print_lines("No jumps: every sample costs about the same.")
        for jump in found:
            print_lines(
                f"Jump at batch {jump.batch}: {format_number(jump.before_ms)} to {format_number(jump.after_ms)} ms,"
                f" {format_number(jump.excess_ms)} ms more than a sample usually costs. {'; '.join(jump.causes)}."
            )


def _columns(priced: bool) -> list[Column]:
    """Memory matters less where money is asked for, and utilisation least."""
    columns = [
        words("GPU"), Column("batch"), Column("step ms"), Column("90 % interval", 1), Column("samples/s", 5), Column("GiB", 4),
        words("fits", 3, least=3), Column("MFU", 6),
    ]  # fmt: skip
    return [*columns, Column("training"), Column("cost")] if priced else columns


def _cells(f: Forecast, priced: bool) -> list[str]:
    memory = "-" if f.memory is None else format_number(f.memory.allocated_gib)
    fits = "?" if f.fits is None else "yes" if f.fits else "NO"
    step, interval, rate, mfu = "-", "-", "-", "-"
    if f.step is not None and f.step_time_interval_ms is not None:
        i = f.step_time_interval_ms
        step, interval = format_number(f.step.total_ms), f"{format_number(i.low)} to {format_number(i.high)}"
        rate, mfu = format_number(_throughput(f)), "-" if f.mfu is None else f"{100 * f.mfu:.0f} %"
    cells = [_device(f), f"{f.execution.micro_batch:,}", step, interval, rate, memory, fits, mfu]
    if priced:
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
        (name, format_number(ms), f"{100 * ms / total:.0f} %", "█" * round(BAR_WIDTH * ms / total))
        for name, ms in parts
        if ms > 0
    ]
    print_table((words("part of the step"), Column("ms"), Column("share"), bar(1)), rows, spaced=False)
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
    columns = (
        words("heaviest operators"), words("kind"), words("phase", 1), Column("count", 3), Column("ms"), Column("share", 2),
        words("bound by", 4, 7),
    )  # fmt: skip
    if heavy:
        print_table(columns, heavy, spaced=False)
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
