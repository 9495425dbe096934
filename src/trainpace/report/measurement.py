"""A measured sweep, and forecasts beside measurements: for the terminal, as JSON, as pictures and as pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trainpace.core.outcome import (
    STEP_PARTS,
    Forecast,
    Jump,
    MeasuredNoiseScale,
    Measurement,
    forecast_row,
)
from trainpace.measure import MeasuredJump, SweepAnalysis, SweepPoint, run_in_words
from trainpace.report.charts import Picture
from trainpace.report.pages import page
from trainpace.report.phrases import (
    interval,
    noise_scale,
    number,
    percent,
    plural,
    rate_in_words,
    span,
)
from trainpace.report.screen import in_details
from trainpace.report.step_charts import Timed, step_breakdown
from trainpace.report.sweep_charts import FEWEST_FOR_A_PLOT, measured_sweep, throughput
from trainpace.report.sweep_words import shape_in_words
from trainpace.report.terminal import (
    Column,
    print_chart,
    print_lines,
    print_next,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.verbs.carried import carried
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.journal import JournalRequest

if TYPE_CHECKING:
    from trainpace.verbs.measure import MeasureRequest

MOST_LIMIT = 2.0
"""Steps, of which a jump would have to be larger to be seen: from here on that is no answer."""
MOST_KEPT = 3
"""Jumps whose sizes stay in a table that is cut."""
WORTH_SAYING = 0.03
"""A batch whose throughput is this much better than the largest's is worth a sentence."""


def print_sweep(
    measured: Sequence[Measurement],
    a: SweepAnalysis,
    foreseen: Mapping[int, Forecast],
    causes: Sequence[Jump] = (),
    sweep: str | None = None,
    asked: MeasureRequest | None = None,
) -> None:
    """`foreseen` maps batch sizes to forecasts; `causes` are the forecast's own jumps, with their operators; `sweep` is its
    name in the journal; `asked` what the next command goes on from."""
    first = measured[0]
    e = first.execution
    accumulated = f", {e.accumulation} micro-batches a step" if e.accumulation > 1 else ""
    threads = int(first.environment.get("threads", 0)) if "gpu" not in first.environment else 0
    where = f"{first.device}, {plural(threads, 'thread')}" if threads else first.device
    print_lines(f"{first.model} on {where}: {e.precision}, {e.optimizer}{accumulated}, measured")
    answer, *others = sweep_verdict(a, causes)
    print_verdict(answer)
    if first.sequence_length:
        best = a.best.best
        rate = rate_in_words(best.measured_samples_per_second, first.sequence_length)
        print_lines(
            f"Batch {best.batch}: {rate}, of {first.sequence_length:,} tokens a sample.", ""
        )
    columns = [
        words("batch", least=6),
        Column("step ms"),
        Column("90 % of repeats", 1),
        Column("samples/s"),
        Column("memory GiB", 3),
        Column("probes", 4),
    ]
    columns += [Column("forecast ms", 2), Column("error", 2)] if foreseen else []
    marks = {p.batch: "" for p in a.points} | {jump.after: " ▲" for jump in a.curve.jumps}
    marks[a.best.best.batch] += (
        ""
        if len(a.points) == 1 or a.too_noisy
        else " best"
        if _measured_above(a) is None
        else " as good"
    )
    told = {
        a.points[0].batch,
        a.best.best.batch,
        a.points[-1].batch,
        *(jump.after for jump in a.curve.jumps[:MOST_KEPT]),
    }
    keep = [i for i, p in enumerate(a.points) if p.batch in told]
    print_table(columns, [_cells(p, foreseen, marks[p.batch]) for p in a.points], keep=keep)
    for failure in a.failures:
        what = {"out_of_memory": "does not fit", "timeout": "took too long", "crashed": "failed"}[
            failure.failure
        ]
        print_lines(f"Batch {failure.batch} {what}: {failure.reason}")
    if len(a.points) >= FEWEST_FOR_A_PLOT:
        behind = [
            (float(b), f.step.total_ms) for b, f in sorted(foreseen.items()) if f.step is not None
        ]
        jumped = ", ▲ after a jump" if a.curve.jumps else ""
        title = (
            "Step time in ms over the batch size: ●"
            f" measured{jumped}{', line: forecast' if behind else ''}"
        )
        dots = [(float(p.batch), p.step_ms) for p in a.points]
        with in_details("the plot"):
            print_chart(dots, {float(jump.after) for jump in a.curve.jumps}, title, behind)
    print_notes(*others, *_runs_in_words(measured, a))
    if measured[-1].noise_scale is not None:
        print_lines(*noise_scale_in_words(measured[-1].noise_scale))
    if sweep:
        place = carried(asked, JournalRequest)
        print_next(
            ["trainpace", "journal", "list", "--sweep", sweep[:8], *place],
            "the runs of this sweep, kept in the journal",
        )
    else:
        spec = asked.model if asked is not None and asked.model is not None else first.model
        gpu = "A100" if "bf16" in e.precision or e.precision == "tf32" else "T4"  # a T4 has neither
        same = carried(asked, ForecastRequest, ["batch", "precision", "timeout", "no_journal"])
        command = ["trainpace", "forecast", spec, "--gpu", gpu, "--batch", str(a.best.best.batch)]
        print_next(
            [*command, "--precision", e.precision, *same], "the same on a GPU that you do not have"
        )


def _measured_above(a: SweepAnalysis) -> SweepPoint | None:
    """The highest point where it is not the one that is recommended: the fit says that the noise lifted it."""
    highest = max(a.points, key=lambda p: p.samples_per_second)
    return highest if highest.samples_per_second > a.best.best.measured_samples_per_second else None


def sweep_verdict(a: SweepAnalysis, causes: Sequence[Jump] = ()) -> list[str]:
    """What the sweep says, in sentences, the most important first."""
    lines = []
    best, last = a.best.best, a.points[-1]
    plotted = len(a.points) >= FEWEST_FOR_A_PLOT
    if a.too_noisy:
        lines.append(
            "No batch size can be called the best: the measurements scatter by"
            f" {100 * a.scatter:.0f} %. Nothing else should run here meanwhile; longer probes"
            " (--seconds 10s) and more of them (--every --repeats 5) help."
        )
    elif len(a.points) == 1:
        lines.append(
            f"A step of batch {last.batch} takes {number(last.step_ms)} ms"
            f" ({interval(last.interval_ms)}): {number(last.samples_per_second)} samples/s."
        )
    else:
        gain = best.measured_samples_per_second / last.samples_per_second - 1
        over = ""
        if best.batch != last.batch and gain > WORTH_SAYING:
            over = f", {percent(gain)} more than at {last.batch}"
        rate = number(best.measured_samples_per_second)
        said = f"Best throughput: batch {best.batch}, {rate} samples/s{over}."
        if (higher := _measured_above(a)) is not None:
            said = (
                f"Batch {best.batch} is the smallest that the noise cannot tell from the best:"
                f" {rate} samples/s, where batch {higher.batch} measured"
                f" {number(higher.samples_per_second)}."
            )
        lines.append(said)
    if a.largest_that_fits is not None:
        lines.append(f"Largest batch that fits: {a.largest_that_fits}.")
    lines += [_jump_in_words(jump, a, causes) for jump in a.curve.jumps]
    lines += [_unresolved_in_words(*gap) for gap in a.unresolved]
    lines += [_limit_in_words(a)] if plotted else []
    slopes = [s for s in a.curve.segments if s.last_batch > s.first_batch]
    if slopes and plotted and not a.too_noisy:
        widest = max(slopes, key=lambda s: s.last_batch - s.first_batch)
        low, high = widest.slope_low, widest.slope_high
        bounds = "" if low is None or high is None else f" ({span(low, high)})"
        lines.append(
            f"From batch {widest.first_batch} to {widest.last_batch} one more sample costs"
            f" {number(widest.slope_ms_per_sample)} ms{bounds}."
        )
    if a.trend is not None and plotted and not a.too_noisy:
        lines.append(shape_in_words(a.trend))
        if a.trend.knee_batch < best.batch:
            lines.append(f"Batch {a.trend.knee_batch} already reaches 95 % of the best throughput.")
    if a.best.launch_bound_until is not None and not a.too_noisy:
        lines.append(
            f"Up to batch {a.best.launch_bound_until} a larger batch costs next to nothing: the"
            " limit is the host, which launches the operators, not the device."
        )
    if a.noise is None:
        noise = (
            "Each batch size was measured once, so the machine's noise is not known; --repeats 2"
            " measures it."
        )
    else:
        spread = (
            f"{100 * a.noise.relative:.1f} % (standard deviation of {a.noise.degrees + 1} repeats)"
        )
        noise = f"Repeats in separate processes differ by {spread}."
    return [*lines, noise]


def _runs_in_words(measured: Sequence[Measurement], a: SweepAnalysis) -> list[str]:
    """How the device ran at the best batch."""
    batch = a.best.best.batch
    run = next(
        (m.run for m in measured if m.execution.micro_batch == batch and m.run is not None), None
    )
    said = [] if run is None else run_in_words(run)
    return [f"Batch {batch}: {sentence}" for sentence in said] if len(a.points) > 1 else said


def noise_scale_in_words(measured: MeasuredNoiseScale) -> list[str]:
    scale, cost = measured.scale, measured.norms_ms / measured.step_ms
    gathered = (
        f"Gathering it in a training loop, two norms a step, would cost {100 * cost:.1f} % of the"
        " step."
    )
    if scale.samples is None:
        return [f"Gradient noise scale: {scale.reason} {gathered}"]
    return [
        f"{noise_scale(scale.samples, scale.low or 0.0, scale.high, scale.steps, measured.batch)}.",
        (
            "With a global batch far below it, twice the batch needs half the steps; with one of"
            " that size, training takes twice the fewest possible steps and samples; far beyond"
            f" it, a larger batch saves next to no steps. {gathered}"
        ),
    ]


def sweep_json(
    measured: Sequence[Measurement],
    a: SweepAnalysis,
    foreseen: Mapping[int, Forecast],
    sweep: str | None,
) -> dict[str, Any]:
    return {
        "record": "MeasuredSweep",
        "schema_version": 1,
        "sweep": sweep,
        "model": measured[0].model,
        "device": measured[0].device,
        "environment": measured[0].environment,
        "execution": msgspec.to_builtins(measured[0].execution),
        "analysis": msgspec.to_builtins(a),
        "noise_scale": msgspec.to_builtins(measured[-1].noise_scale),
        "verdict": sweep_verdict(a),
        "runs": [
            {"batch": m.execution.micro_batch, **msgspec.to_builtins(m.run)}
            for m in measured
            if m.run is not None
        ],
        "forecasts": [
            forecast_row(foreseen[b]) for b in sorted(foreseen) if foreseen[b].step is not None
        ],
    }


def _cells(p: SweepPoint, foreseen: Mapping[int, Forecast], mark: str) -> list[str]:
    cells = [
        f"{p.batch}{mark}",
        number(p.step_ms),
        interval(p.interval_ms),
        number(p.samples_per_second),
        number(p.peak_memory_gib, ""),
        str(p.probes),
    ]
    forecast = foreseen.get(p.batch)
    if forecast is not None and forecast.step is not None:
        ms = forecast.step.total_ms
        return [*cells, number(ms), _error(ms, p.step_ms)]
    return [*cells, "", ""] if foreseen else cells


def _limit_in_words(a: SweepAnalysis) -> str:
    """What jumps the sweep could not have seen."""
    limit, other = a.curve.least_jump, "other " if a.curve.jumps else ""
    if limit is None or limit > MOST_LIMIT:
        return (
            f"No {other}jump could be told from the noise of these measurements, whatever its size."
        )
    seen = f"No {other}jumps of {100 * limit:.1f} % of the step or more were found"
    return f"{seen}; smaller ones would be lost in the noise."


def _unresolved_in_words(before: int, after: int) -> str:
    return (
        f"Not resolved: somewhere between batch {before} and {after} the step rises by more than"
        f" usual, but not all sizes there were measured; --batch {before}:{after} --every does"
        " that."
    )


def _jump_in_words(jump: MeasuredJump, a: SweepAnalysis, causes: Sequence[Jump]) -> str:
    where = (
        f"After batch {jump.before}"
        if jump.tight
        else f"Between batch {jump.before} and {jump.after}"
    )
    low, high = sorted((abs(jump.low_ms), abs(jump.high_ms)))
    sentence = (
        f"{where} the step takes {number(abs(jump.size_ms))} ms ({abs(jump.percent):.0f} %)"
        f" {'more' if jump.size_ms > 0 else 'less'}, beyond the usual slope ({span(low, high)} ms)."
    )
    cause = jump.cause_among(causes)
    if cause is not None:
        sentence += f" Its cause by the forecast: {'; '.join(cause.causes)}."
    pairs = zip(a.best.before_jumps, a.best.after_jumps, strict=True)
    for choice, behind in pairs:
        if choice.batch == jump.before and jump.size_ms > 0:
            sentence += (
                f" Batch {jump.before} gives {number(choice.measured_samples_per_second)} samples/s"
            )
            sentence += (
                "." if behind is None else f"; the next size that does as well is {behind.batch}."
            )
    return sentence


def sweep_page(
    measured: Sequence[Measurement],
    a: SweepAnalysis,
    foreseen: Mapping[int, Forecast],
    causes: Sequence[Jump] = (),
) -> str:
    first = measured[0]
    e, probes = first.execution, sum(p.probes for p in a.points)
    steps = {batch: f.step.total_ms for batch, f in foreseen.items() if f.step is not None}
    return page(
        "sweep.html",
        f"{first.model} on {first.device}: step time over the batch size",
        [*sweep_verdict(a, causes), *_runs_in_words(measured, a)],
        sweep_pictures(measured, a, foreseen, causes),
        sweep_json(measured, a, foreseen, None),
        subtitle=(
            f"Measured with {e.precision} and {e.optimizer}, {probes} probes, each in a process of"
            " its own."
        ),
        points=[(p, steps.get(p.batch)) for p in a.points],
        best=a.best.best.batch,
        failures=a.failures,
        environment=[f"{name}: {value}" for name, value in sorted(first.environment.items())],
    )


def sweep_pictures(
    measured: Sequence[Measurement],
    a: SweepAnalysis,
    foreseen: Mapping[int, Forecast],
    causes: Sequence[Jump] = (),
) -> list[Picture | None]:
    steps = []
    for batch in sorted({a.points[0].batch, a.best.best.batch, a.points[-1].batch}):
        one, there = (
            next((m for m in measured if m.execution.micro_batch == batch), None),
            foreseen.get(batch),
        )
        if one is not None:
            steps.append(Timed(f"batch {batch}", "measured", one.step, one.interval_ms))
        if there is not None and there.step is not None:
            steps.append(
                Timed(f"batch {batch}", "forecast", there.step, there.step_time_interval_ms)
            )
    rates = throughput(a, foreseen) if len(a.points) > 1 else None
    return [measured_sweep(a, foreseen, causes), rates, step_breakdown(steps)]


Pair = tuple[Forecast, Measurement | None]
"""A step as it was forecast, and as it was measured, if it was."""
HEAD = ("model", "batch", "device", "forecast ms", "90 % interval", "measured ms", "error")


def side_by_side_page(title: str, meaning: Sequence[str], pairs: Sequence[Pair]) -> str:
    """The page as text. `meaning` is said first, in plain words."""
    steps = []
    for f, measured in pairs:
        assert f.step is not None
        group = f"{f.model}, batch {f.execution.micro_batch}"
        steps.append(Timed(group, f"{f.device}, forecast", f.step, f.step_time_interval_ms))
        if measured is not None:
            steps.append(Timed(group, f"{f.device}, measured", measured.step))
    data = [forecast_row(f) | _measured_row(m) for f, m in pairs]
    pictures, rows = [step_breakdown(steps)], cells_of_pairs(pairs)
    return page("side_by_side.html", title, meaning, pictures, data, head=HEAD, rows=rows)


def _measured_row(measured: Measurement | None) -> dict[str, Any]:
    if measured is None:
        return {"measured_ms": None, "measured_breakdown_ms": None}
    parts = {name: getattr(measured.step, name) for name in STEP_PARTS}
    return {"measured_ms": measured.median_ms, "measured_breakdown_ms": parts}


def cells_of_pairs(pairs: Sequence[Pair]) -> list[list[str]]:
    rows = []
    for f, measured in pairs:
        assert f.step is not None
        ms = f.step.total_ms
        seen = (
            ["", ""]
            if measured is None
            else [number(measured.median_ms), _error(ms, measured.median_ms)]
        )
        device, batch = f.device, f.execution.micro_batch
        rows.append(
            [f.model, str(batch), device, number(ms), interval(f.step_time_interval_ms), *seen]
        )
    return rows


def _error(forecast_ms: float, measured_ms: float) -> str:
    return f"{100 * (forecast_ms / measured_ms - 1):+.0f} %"
