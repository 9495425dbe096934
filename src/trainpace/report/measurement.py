"""Report sections and JSON for measured batch-size sweeps, data loaders and shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trainpace.core.outcome import Forecast, Jump, MeasuredNoiseScale, Measurement, forecast_row
from trainpace.core.records import to_jsonable
from trainpace.measure import (
    LoaderAdvice,
    LoaderComparison,
    LoaderMeasurement,
    MeasuredJump,
    Stage,
    SweepAnalysis,
    SweepPoint,
    run_in_words,
)
from trainpace.report.charts import Picture
from trainpace.report.phrases import (
    change,
    duration,
    given,
    interval,
    noise_scale,
    number,
    percent,
    plural,
    rate_in_words,
    span,
)
from trainpace.report.sections import (
    Charts,
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Plot,
    Section,
    Table,
    details,
    say,
    tabulate,
    words,
)
from trainpace.report.steps import (
    FEWEST_FOR_A_PLOT,
    Timed,
    measured_sweep,
    shape_in_words,
    step_breakdown,
    throughput,
)
from trainpace.shards import Damage, Estimate, Precomputed
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.journal import JournalRequest
from trainpace.verbs.measure import MeasuredSweep
from trainpace.verbs.request import forwarded
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.verbs.measure import MeasureRequest

MOST_LIMIT = 2.0
"""Largest detection limit that is worth printing, as a multiple of the step time."""
MOST_KEPT = 3
"""Number of jumps whose rows stay in a truncated table."""
WORTH_SAYING = 0.03
"""Minimum throughput gain over the largest batch that is reported."""
_FAILURES = {"out_of_memory": "does not fit", "timeout": "took too long", "crashed": "failed"}


def sweep_title(answer: MeasuredSweep) -> str:
    first = answer.measurements[0]
    return f"{first.model} on {first.device}: step time over the batch size"


def sweep_sections(answer: MeasuredSweep, asked: MeasureRequest | None = None) -> Iterator[Section]:
    """Turn a measured sweep into sections.

    `asked` is the original request. Its options go into the suggested next command.
    """
    a, foreseen, causes = answer.analysis, answer.forecasts, answer.causes
    measured, first = answer.measurements, answer.measurements[0]
    e, best = first.execution, a.best.best
    accumulated = f", {e.accumulation} micro-batches per step" if e.accumulation > 1 else ""
    threads = 0 if "gpu" in first.environment else int(first.environment.get("threads", 0))
    where = f"{first.device}, {plural(threads, 'thread')}" if threads else first.device
    yield say(f"{first.model} on {where}: {e.precision}, {e.optimizer}{accumulated}, measured")
    headline, *others = sweep_verdict(a, causes)
    yield Headline(headline)
    if first.sequence_length:
        rate = rate_in_words(best.measured_samples_per_second, first.sequence_length)
        line = f"Batch {best.batch}: {rate}, of {first.sequence_length:,} tokens per sample."
        yield say(line)
    yield Charts(lambda: sweep_pictures(answer))
    yield _table(a, foreseen)
    yield Lines([f"Batch {f.batch} {_FAILURES[f.failure]}: {f.reason}" for f in a.failures])
    if len(a.points) >= FEWEST_FOR_A_PLOT:
        yield from details("the plot", _plot(a, foreseen))
    yield Notes([*others, *_runs_in_words(measured, a)])
    if measured[-1].noise_scale is not None:
        yield Lines(noise_scale_in_words(measured[-1].noise_scale))
    environment = [f"{name}: {value}" for name, value in sorted(first.environment.items())]
    yield Lines(environment, only="page", aside="where it was measured")
    yield _next(answer, asked)


def _table(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> Table:
    best, jumps, marks = a.best.best.batch, a.curve.jumps, _marks(a)
    forecast_ms = {batch: f.step.total_ms for batch, f in foreseen.items() if f.step}
    kept = {a.points[0].batch, best, a.points[-1].batch, *(j.after for j in jumps[:MOST_KEPT])}
    columns = (
        words("batch", least=6, cell=lambda p: f"{p.batch}{marks.get(p.batch, '')}"),
        Column("step ms", cell="step_ms"),
        Column("90% of repeats", 1, cell="interval_ms", form=interval),
        Column("samples/s", cell="samples_per_second"),
        Column("memory GiB", 3, cell=lambda p: number(p.peak_memory_gib, "")),
        Column("probes", 4, cell="{.probes}"),
        bool(foreseen)
        and Column("forecast ms", 2, cell=lambda p: number(forecast_ms.get(p.batch), "")),
        bool(foreseen) and Column("error", 2, cell=lambda p: _error(forecast_ms, p)),
    )
    return tabulate(
        a.points,
        columns,
        keep=[i for i, p in enumerate(a.points) if p.batch in kept],
        best=[i for i, p in enumerate(a.points) if p.batch == best],
    )


def _marks(a: SweepAnalysis) -> dict[int, str]:
    """Return the marks after a batch size: a jump, and the best size."""
    marks, best = {jump.after: " ▲" for jump in a.curve.jumps}, a.best.best.batch
    if len(a.points) > 1 and not a.too_noisy:
        marks[best] = marks.get(best, "") + (" as good" if _measured_above(a) else " best")
    return marks


def _error(forecast_ms: Mapping[int, float], p: SweepPoint) -> str:
    return change(forecast_ms[p.batch] / p.step_ms) if p.batch in forecast_ms else ""


def _plot(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> Plot:
    forecast = [
        (float(b), f.step.total_ms) for b, f in sorted(foreseen.items()) if f.step is not None
    ]
    jumped = ", ▲ after a jump" if a.curve.jumps else ""
    line = ", line: forecast" if forecast else ""
    title = f"Step time in ms over the batch size: ● measured{jumped}{line}"
    dots = [(float(p.batch), p.step_ms) for p in a.points]
    return Plot(title, dots, {float(jump.after) for jump in a.curve.jumps}, forecast)


def _next(answer: MeasuredSweep, asked: MeasureRequest | None) -> Next:
    if answer.sweep:
        command = ["trainpace", "journal", "list", "--sweep", answer.sweep[:8]]
        why = "the runs of this sweep, stored in the journal"
        return Next([*command, *forwarded(asked, JournalRequest)], why)
    first = answer.measurements[0]
    precision = first.execution.precision
    spec = asked.model if asked is not None and asked.model is not None else first.model
    gpu = "A100" if "bf16" in precision or precision == "tf32" else "T4"  # A T4 supports neither.
    beside = {"gpu": gpu, "batch": answer.analysis.best.best.batch, "precision": precision}
    same = forwarded(asked, ForecastRequest, ["timeout", "no_journal"], beside)
    return Next(["trainpace", "forecast", spec, *same], "the same on a GPU that you do not have")


def _measured_above(a: SweepAnalysis) -> SweepPoint | None:
    """Return the point of highest throughput, or None if it is the recommended one."""
    highest = max(a.points, key=lambda p: p.samples_per_second)
    return highest if highest.samples_per_second > a.best.best.measured_samples_per_second else None


def sweep_verdict(a: SweepAnalysis, causes: Sequence[Jump] = ()) -> list[str]:
    """Describe a sweep in sentences, the most important first."""
    fits = given(a.largest_that_fits, "Largest batch that fits: {}.")
    lines = [_best_in_words(a), *([fits] if fits else [])]
    lines += [_jump_in_words(jump, a, causes) for jump in a.curve.jumps]
    lines += [_unresolved_in_words(*gap) for gap in a.unresolved]
    if len(a.points) >= FEWEST_FOR_A_PLOT:
        lines += [_limit_in_words(a), *_shape(a)]
    if a.best.launch_bound_until is not None and not a.too_noisy:
        lines.append(
            f"Up to batch {a.best.launch_bound_until} a larger batch costs next to nothing: the"
            " limit is the host, which launches the operators, not the device."
        )
    return [*lines, _noise_in_words(a)]


def _shape(a: SweepAnalysis) -> list[str]:
    """Describe the slope and the trend of the step time, unless it is too noisy."""
    if a.too_noisy:
        return []
    lines = _slope_in_words(a)
    if a.trend is not None:
        lines.append(shape_in_words(a.trend))
        if (knee := a.trend.knee_batch) < a.best.best.batch:
            lines.append(f"Batch {knee} already reaches 95% of the best throughput.")
    return lines


def _best_in_words(a: SweepAnalysis) -> str:
    best, last = a.best.best, a.points[-1]
    if a.too_noisy:
        return (
            "No batch size can be called the best: the measurements scatter by"
            f" {100 * a.scatter:.0f}%. Stop other programs, or use longer probes (--seconds 10s)"
            " and more of them (--every --repeats 5)."
        )
    if len(a.points) == 1:
        return (
            f"A step of batch {last.batch} takes {number(last.step_ms)} ms"
            f" ({interval(last.interval_ms)}): {number(last.samples_per_second)} samples/s."
        )
    rate = number(best.measured_samples_per_second)
    if (higher := _measured_above(a)) is not None:
        return (
            f"Batch {best.batch} is the smallest that is as good as the best within the noise:"
            f" {rate} samples/s; batch {higher.batch} measured {number(higher.samples_per_second)}."
        )
    gain = best.measured_samples_per_second / last.samples_per_second - 1
    is_more = best.batch != last.batch and gain > WORTH_SAYING
    over = f", {percent(gain)} more than at {last.batch}" if is_more else ""
    return f"Best throughput: batch {best.batch}, {rate} samples/s{over}."


def _slope_in_words(a: SweepAnalysis) -> list[str]:
    slopes = [s for s in a.curve.segments if s.last_batch > s.first_batch]
    if not slopes:
        return []
    widest = max(slopes, key=lambda s: s.last_batch - s.first_batch)
    low, high = widest.slope_low, widest.slope_high
    bounds = "" if low is None or high is None else f" ({span(low, high)})"
    return [
        f"From batch {widest.first_batch} to {widest.last_batch} one more sample costs"
        f" {number(widest.slope_ms_per_sample)} ms{bounds}."
    ]


def _noise_in_words(a: SweepAnalysis) -> str:
    if a.noise is None:
        return (
            "Each batch size was measured once, so the machine's noise is unknown; --repeats 2"
            " measures it."
        )
    repeats = a.noise.degrees + 1
    return (
        f"Repeats in separate processes differ by {100 * a.noise.relative:.1f}% (standard"
        f" deviation of {repeats} repeats)."
    )


def _runs_in_words(measured: Sequence[Measurement], a: SweepAnalysis) -> list[str]:
    """Describe how the device ran at the best batch size."""
    batch = a.best.best.batch
    run = next(
        (m.run for m in measured if m.execution.micro_batch == batch and m.run is not None), None
    )
    lines = [] if run is None else run_in_words(run)
    return [f"Batch {batch}: {line}" for line in lines] if len(a.points) > 1 else lines


def noise_scale_in_words(measured: MeasuredNoiseScale) -> list[str]:
    scale, cost = measured.scale, measured.norms_ms / measured.step_ms
    gathered = (
        "Measuring it in a training loop, two norms per step, would cost"
        f" {percent(cost, digits=1)} of the step."
    )
    if scale.samples is None:
        return [f"Gradient noise scale: {scale.reason} {gathered}"]
    return [
        f"{noise_scale(scale.samples, scale.low or 0.0, scale.high, scale.steps, measured.batch)}.",
        "With a global batch far below it, twice the batch needs half the steps; with one of"
        " that size, training takes twice the fewest possible steps and samples; far beyond it,"
        f" a larger batch saves next to no steps. {gathered}",
    ]


def sweep_json(answer: MeasuredSweep) -> dict[str, Any]:
    """Return what `trainpace measure --json` prints."""
    measured, first = answer.measurements, answer.measurements[0]
    shown = (answer.forecasts[batch] for batch in sorted(answer.forecasts))
    return {
        "record": "MeasuredSweep",
        "schema_version": 1,
        "sweep": answer.sweep,
        "model": first.model,
        "device": first.device,
        "environment": first.environment,
        "execution": msgspec.to_builtins(first.execution),
        "analysis": msgspec.to_builtins(answer.analysis),
        "noise_scale": msgspec.to_builtins(measured[-1].noise_scale),
        "verdict": sweep_verdict(answer.analysis),
        "runs": [
            {"batch": m.execution.micro_batch, **msgspec.to_builtins(m.run)}
            for m in measured
            if m.run is not None
        ],
        "forecasts": [forecast_row(f) for f in shown if f.step is not None],
    }


def _limit_in_words(a: SweepAnalysis) -> str:
    """Describe the smallest jump that the sweep could detect."""
    limit, other = a.curve.least_jump, "other " if a.curve.jumps else ""
    if limit is None or limit > MOST_LIMIT:
        return f"These measurements are too noisy to find any {other}jump."
    found = f"No {other}jumps of {percent(limit, digits=1)} of the step or more were found"
    return f"{found}; smaller ones would be lost in the noise."


def _unresolved_in_words(before: int, after: int) -> str:
    return (
        f"Not resolved: somewhere between batch {before} and {after} the step rises by more than"
        f" usual, but not all sizes there were measured; --batch {before}:{after} --every does"
        " that."
    )


def _jump_in_words(jump: MeasuredJump, a: SweepAnalysis, causes: Sequence[Jump]) -> str:
    between = f"Between batch {jump.before} and {jump.after}"
    where = f"After batch {jump.before}" if jump.tight else between
    low, high = sorted((abs(jump.low_ms), abs(jump.high_ms)))
    text = (
        f"{where} the step takes {number(abs(jump.size_ms))} ms ({abs(jump.percent):.0f}%)"
        f" {'more' if jump.size_ms > 0 else 'less'}, beyond the usual slope ({span(low, high)} ms)."
    )
    cause = jump.cause_among(causes)
    if cause is not None:
        text += f" Its cause by the forecast: {'; '.join(cause.causes)}."
    for choice, behind in zip(a.best.before_jumps, a.best.after_jumps, strict=True):
        if choice.batch == jump.before and jump.size_ms > 0:
            rate = number(choice.measured_samples_per_second)
            next_good = (
                "" if behind is None else f"; the next size that does as well is {behind.batch}"
            )
            text += f" Batch {jump.before} gives {rate} samples/s{next_good}."
    return text


def sweep_pictures(answer: MeasuredSweep) -> list[Picture | None]:
    a, foreseen = answer.analysis, answer.forecasts
    steps = []
    for batch in sorted({a.points[0].batch, a.best.best.batch, a.points[-1].batch}):
        for one in answer.measurements:
            if one.execution.micro_batch == batch:
                steps.append(Timed(f"batch {batch}", "measured", one.step, one.interval_ms))
                break
        there = foreseen.get(batch)
        if there is not None and there.step is not None:
            interval_ms = there.step_time_interval_ms
            steps.append(Timed(f"batch {batch}", "forecast", there.step, interval_ms))
    rates = throughput(a, foreseen) if len(a.points) > 1 else None
    return [measured_sweep(a, foreseen, answer.causes), rates, step_breakdown(steps)]


Pair = tuple[Forecast, Measurement | None]
"""A forecast step and its measurement, if there is one."""
_PAIRS = (
    words("model", cell="{[0].model}"),
    Column("batch", cell="{[0].execution.micro_batch}"),
    words("device", cell="{[0].device}"),
    Column("forecast ms", cell=lambda pair: number(pair[0].step.total_ms)),
    Column("90% interval", cell=lambda pair: interval(pair[0].step_time_interval_ms)),
    Column("measured ms", cell=lambda pair: number(pair[1] and pair[1].median_ms, "")),
    Column(
        "error",
        cell=lambda pair: (pair[1] and change(pair[0].step.total_ms / pair[1].median_ms)) or "",
    ),
)


def side_by_side_sections(meaning: Iterable[str], pairs: Sequence[Pair]) -> Iterator[Section]:
    """Compare forecasts with measurements. `meaning` explains the comparison."""
    steps = []
    for f, measured in pairs:
        assert f.step is not None
        group = f"{f.model}, batch {f.execution.micro_batch}"
        steps.append(Timed(group, f"{f.device}, forecast", f.step, f.step_time_interval_ms))
        if measured is not None:
            steps.append(Timed(group, f"{f.device}, measured", measured.step))
    yield Headline(" ".join(meaning))
    yield Charts(lambda: [step_breakdown(steps)])
    yield tabulate(pairs, _PAIRS)


_WORTH_PRECOMPUTING = 0.2
_WORTH_PRECOMPUTING_MS = 0.05
"""Minimum saving per sample. Reading a few KiB back takes about 0.01 ms and needs disk space."""
MOST_LINES = 100
_SMALL_SHARE = 0.02
_BUSY_SHARE = 0.1


def loader_sections(m: LoaderMeasurement, a: LoaderAdvice) -> Iterator[Section]:
    """Convert a measured DataLoader to sections."""
    dataset = f"{m.dataset} of {m.length:,} samples"
    yield say(f"{m.target}: {dataset}, batch {m.batch_size}, {m.cores:g} cores, loader alone")
    yield Headline(loader_verdict(m, a) + _doubt(m, a))
    steps = a.compute_ms is not None
    columns = (
        words("workers", least=7, cell=lambda p: f"{p.workers}{' ◀' * (p.workers == a.workers)}"),
        Column("batch ms", cell="batch_ms"),
        Column("90% of repeats", 2, cell=lambda p: interval(p.interval_ms, "")),
        Column("samples/s", cell="samples_per_second"),
        Column("model ms", 3, cell=lambda p: number(p.predicted_ms, "")),
        Column("start-up s", 1, cell=lambda p: f"{p.startup_s:.2f}" if p.workers else ""),
        steps and Column("step ms", cell=lambda p: number(a.step_ms_by_workers[p.workers])),
    )
    yield tabulate(m.points, columns)
    stages = (
        words("in a sample", cell=_stage_name),
        Column("ms", cell="wall_ms"),
        Column("share", cell=lambda s: percent(m.share_of(s))),
        Column("CPU ms", 1, cell=lambda s: number(s.cpu_ms, "")),
        words("offline?", cell=_offline),
    )
    yield tabulate(m.stages, stages)
    yield Notes([_sample_in_words(m), *_variants_in_words(m)])
    advice = next_step(m, a)
    if "trainpace precompute" not in advice or not ModelSpec.of(m.target).runs_code:
        yield say(advice)
        return
    yield say(f"To change: {advice.removeprefix('Next: ')}")
    if _is_fixed(m):
        estimate = ["trainpace", "precompute", m.target, "--out", "shards", "--estimate"]
        yield Next(estimate, "what that costs and saves, estimated from some samples")


def loader_verdict(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    """Describe the loader's throughput or waiting time, and what more workers would save."""
    saved = (
        f"{duration(abs(a.saved_s_per_epoch))} per epoch"
        f" ({abs(a.saved_s_per_epoch) / a.epoch_now_s:.0%})"
    )
    if a.saved_s_per_epoch <= 0:
        saved = "nothing"
    step_ms = number(a.step_ms)
    if a.compute_ms is None:
        rate = number(1e3 * m.batch_size / a.step_ms)
        answer = f"Verdict: with {_workers(a.workers)} the loader alone gives {rate} samples/s"
        if a.worth_it:
            answer += (
                f", {a.now_ms / a.step_ms:.1f} times as many as with {_workers(a.workers_now)}"
            )
        answer += (
            "."
            if a.workers == 0
            else f". A step that computes for more than {step_ms} ms hides it."
        )
        return (
            answer
            if a.worth_it or len(m.points) == 1
            else f"{answer} Other numbers of workers would save {saved}."
        )
    data_ms = max(0.0, a.now_ms - a.compute_ms)
    answer = (
        f"Verdict: with {_workers(a.workers_now)} a step takes {number(a.now_ms)} ms, of which"
        f" {number(data_ms)} ms ({data_ms / a.now_ms:.0%}) is waiting for data."
    )
    if a.worth_it:
        return (
            f"{answer} With {_workers(a.workers)} it takes {step_ms} ms, which saves {saved},"
            " start-up included."
        )
    return answer if len(m.points) == 1 else f"{answer} No: other numbers of workers save {saved}."


def next_step(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    """Return one sentence that recommends a loader change."""
    waiting = a.compute_ms is None or a.step_ms > a.compute_ms * 1.05
    changes = _worker_changes(a)
    if waiting:
        changes += _sample_changes(m, a, bool(changes))
    if changes:
        return f"Next: {'; then '.join(changes)}."
    if waiting and a.compute_ms is not None:
        return (
            "Next: make a sample cheaper, as the step waits for data, and other numbers of workers"
            " would save nothing."
        )
    return "Next: nothing to gain from the loader; look at the compute."


def _worker_changes(a: LoaderAdvice) -> list[str]:
    changes = []
    if a.workers != a.workers_now:
        persistent = ", persistent_workers=True" if a.keep_workers else ""
        changes.append(f"DataLoader(..., num_workers={a.workers}{persistent})")
    elif a.keep_workers:
        startup = duration(a.startup_s)
        changes.append(
            f"persistent_workers=True, because starting the workers takes {startup} of every epoch"
        )
    if a.compute_ms is None and a.workers == 0:
        why = "workers load during it, which these figures do not include"
        changes.append(f"give --compute-ms, the compute time of a step: {why}")
    return changes


def _is_fixed(m: LoaderMeasurement) -> bool:
    """Return True if samples are the same in every epoch, as `trainpace precompute` requires."""
    return all(s.offline for s in m.stages)


def _sample_changes(m: LoaderMeasurement, a: LoaderAdvice, others: bool) -> list[str]:
    """Return ways to load a sample faster. `others` is True if other changes come first."""
    if a.offline_share > _WORTH_PRECOMPUTING and a.offline_ms > _WORTH_PRECOMPUTING_MS:
        part = next((f"{s.name} and what follows" for s in m.stages if s.random), "its random part")
        of_what = "" if _is_fixed(m) else f" of the dataset without {part}"
        return [
            f"trainpace precompute{of_what}, which could save up to {number(a.offline_ms)} ms"
            f" ({a.offline_share:.0%}) of every sample, less the cost of reading it back"
        ]
    if not m.stages or (a.limit != "cores" and others):
        return []
    slowest = max(m.stages, key=lambda s: s.wall_ms)
    why = "the cores are fully used"
    if a.limit != "cores":
        why = "other numbers of workers would save nothing"
    return [f"{why}, so make {slowest.name} cheaper: it is {m.share_of(slowest):.0%} of a sample"]


def loader_comparison_sections(c: LoaderComparison) -> Iterator[Section]:
    yield Headline(comparison_verdict(c))
    named = [(part.name, part) for part in c.parts]
    named += [(f"{times.name}, {_workers(workers)}", times) for workers, times in c.alone.items()]
    columns = (
        words("ms per sample", least=16, cell=lambda row: row[0]),
        Column(c.names[0], cell=lambda row: number(row[1].ms[0])),
        Column(c.names[1], cell=lambda row: number(row[1].ms[1])),
        Column("difference", cell="{[1].more_ms:+.3g}"),
        words("", 1, cell=lambda row: given(row[1].is_noise, "within the noise")),
    )
    yield tabulate(named, columns)
    for workers, times in list(c.alone.items())[:1]:
        passes = [
            f"{name} {count:,} samples in {duration(1e-3 * count * ms)}"
            for name, count, ms in zip(c.names, c.samples, times.ms, strict=True)
        ]
        yield say(f"A whole pass with {_workers(workers)}: {', '.join(passes)}.")
    yield Next(
        ["trainpace", "loader", c.names[c.slower]],
        "the slower one alone: how many workers it needs, and what else helps",
    )


def comparison_verdict(c: LoaderComparison) -> str:
    if c.are_alike:
        first, second = map(number, c.sample_ms)
        return f"Verdict: both are as fast: a sample takes {first} and {second} ms on one thread."
    slow, fast, part = c.sample_ms[c.slower], c.sample_ms[1 - c.slower], c.through
    return (
        f"Verdict: {c.names[c.slower]} is the slower one: a sample takes {number(slow)} ms on one"
        f" thread, {number(slow / fast)} times the {number(fast)} ms of {c.names[1 - c.slower]}."
        f" Most of the difference is in {part.name}: {number(abs(part.more_ms))} ms."
    )


def loader_json(m: LoaderMeasurement, a: LoaderAdvice) -> dict[str, Any]:
    return {
        **to_jsonable(m),
        "samples_per_second": {str(p.workers): p.samples_per_second for p in m.points},
        "advice": msgspec.to_builtins(a, str_keys=True),
        "verdict": loader_verdict(m, a),
        "next": next_step(m, a),
    }


def _stage_name(s: Stage) -> str:
    plain = ("", "function", "transform", "transforms")
    return s.name if s.kind in plain else f"{s.name} ({s.kind})"


def _offline(s: Stage) -> str:
    if s.offline:
        return "yes"
    if s.random:
        return "no: random"
    return "no: random, or after it" if s.kind == "function" else "no: after a random one"


def _sample_in_words(m: LoaderMeasurement) -> str:
    s = m.sample
    parts = [f"{number(min(s.cpu_ms, s.wall_ms))} ms of CPU time"]
    if s.wait_ms > _SMALL_SHARE * s.wall_ms:
        parts.append(f"{number(s.wait_ms)} ms of waiting")
    if s.fetch_ms is not None:
        parts.append(
            f"{number(s.fetch_ms)} ms of reading when its {s.file_bytes / 1024:.0f} KiB are not in"
            " memory"
        )
    note, whole_gib = f" Note: {s.note}" if s.note else "", s.file_bytes * m.length / 2**30
    if not note and s.cold_wall_ms is not None and m.memory_gib is not None and whole_gib:
        so = "so memory holds them after the first epoch"
        if whole_gib >= 0.5 * m.memory_gib:
            so = "more than fits in memory: every epoch reads them from disk again"
        note = f" All files together are about {whole_gib:.2g} GiB, {so}."
    if s.delayed_ms > _BUSY_SHARE * s.wall_ms:
        note += f" Other work on this machine delayed it by {number(s.delayed_ms)} ms more."
    return f"A sample takes {', '.join(parts)} ({s.samples} samples, one thread).{note}"


def _variants_in_words(m: LoaderMeasurement) -> list[str]:
    if len(m.variants) < 2:
        return []
    base, gains = m.variants[0], []
    for p in m.variants[1:]:
        gain = p.samples_per_second / base.samples_per_second - 1
        setting = "pin_memory=True"
        if p.batch_size != base.batch_size:
            setting = f"batch {p.batch_size}"
        elif p.prefetch_factor != base.prefetch_factor:
            setting = f"prefetch_factor={p.prefetch_factor}"
        gains.append(f"{setting} {100 * gain:+.0f}%{'' if base.differs_from(p) else ' (noise)'}")
    return [f"Samples/s with {_workers(base.workers)} and one other setting: {', '.join(gains)}."]


def _doubt(m: LoaderMeasurement, a: LoaderAdvice) -> str:
    if m.sample.delayed_ms > _BUSY_SHARE * m.sample.wall_ms:
        return " Other work runs on this machine: measure again when it is idle."
    if a.workers == a.workers_now or m.point(a.workers_now).differs_from(m.point(a.workers)):
        return ""
    return " Repeats differ by as much: measure again on an idle machine."


def _workers(count: int) -> str:
    return plural(count, "worker") if count else "no workers"


def precomputed_sections(done: Precomputed) -> Iterator[Section]:
    """Convert the results of written shards to sections."""
    if done.shards_computed:
        rate = number(done.samples_computed / done.seconds)
        yield Headline(
            f"Computed {done.samples_computed:,} samples in {duration(done.seconds)} ({rate}/s), as"
            f" {done.shards_computed} of {done.shards_planned} shards."
        )
    else:
        yield Headline("There was nothing left to compute.")
    if done.bad:
        line = (
            f"{done.bad:,} bad samples were skipped; bad_samples.jsonl lists indices and reasons."
        )
        yield say(line)
    if done.finished:
        size = format_bytes(done.total_bytes)
        lines = [
            f"{done.folder}: {done.samples:,} samples in {done.shards} shards, {size}.",
            f'To read them: ShardDataset("{done.folder}", transform=...), from trainpace.shards.',
        ]
        yield Lines(lines)
        yield Next(
            ["trainpace", "precompute", "--verify", "--out", str(done.folder)], "checks every byte"
        )
    else:
        written = f"{done.shards} of {done.shards_planned} shards are written"
        yield say(f"{written}. The part that finishes last writes the manifest.")


def damage_sections(shards: int, damaged: Sequence[Damage], folder: str) -> Iterator[Section]:
    if not damaged:
        yield Headline(f"Yes: all {shards} shards are intact.", good=True)
        return
    yield Headline(f"No: {len(damaged)} of {shards} shards are damaged.", good=False)
    more = len(damaged) - MOST_LINES
    lines = [f"{one.file}: {one.problem}" for one in damaged[:MOST_LINES]]
    yield Notes([*lines, *([f"... and {more:,} more"] if more > 0 else [])])
    yield Next(["trainpace", "precompute", "--repair", "--out", folder], "computes them again")


def estimate_sections(e: Estimate) -> Iterator[Section]:
    """Convert the estimated cost and saving of shards to sections."""
    c = e.costs
    rows = [
        ("computing a sample", duration(c.compute_s), "one process"),
        (
            "reading it back",
            duration(c.read_s),
            f"from the page cache; {duration(c.read_cold_s)} from disk",
        ),
        ("precomputing once", duration(e.compute_once_s), f"{e.workers} workers"),
        ("space on disk", format_bytes(e.total_bytes), f"{format_bytes(c.free_bytes)} free"),
        ("an epoch now", duration(e.epoch_now_s), f"{e.workers} workers"),
        (
            "an epoch after",
            duration(e.epoch_after_s),
            "from the page cache" if e.from_cache else "from disk",
        ),
    ]
    shorter = (
        f"every epoch becomes {duration(e.saved_per_epoch_s)} shorter, which pays for itself after"
    )
    yield Headline(
        f"Yes: {shorter} {e.epochs_to_pay:.1f} epochs." if e.pays else f"No: {e.reason}.",
        good=e.pays,
    )
    title = f"{c.samples:,} samples, {c.measured} of them measured"
    yield Table((words(""), Column(""), words("", least=16)), rows, title)


def format_bytes(size: float) -> str:
    """Return a size in MB below 100 MB, else in GB."""
    return f"{number(size / 1e9)} GB" if size >= 1e8 else f"{number(size / 1e6)} MB"
