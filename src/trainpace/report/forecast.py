"""Report sections for forecasts: verdict, table, breakdown, jumps, assumptions, next commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainpace.core.outcome import CERTAIN, FITS_AT, STEP_PARTS, Forecast, Memory
from trainpace.core.stats import Trend
from trainpace.core.units import format_count
from trainpace.forecast import alike, memory_over_step, needed_gib
from trainpace.job import assumed_in_words
from trainpace.report import steps
from trainpace.report.charts import Picture
from trainpace.report.journal import evidence_sections, nearest_in_brief
from trainpace.report.phrases import (
    ABOVE_ONE,
    WHY_ABOVE_ONE,
    assumed_hosts,
    duration,
    fleet,
    given,
    interval,
    interval_90,
    listed,
    number,
    percent,
    place,
    rate_in_words,
    sentence,
    software_lines,
    trace_notes,
    usd,
)
from trainpace.report.sections import (
    Charts,
    Column,
    Headline,
    Lines,
    Next,
    Notes,
    Plot,
    Points,
    Section,
    brief,
    details,
    say,
    shares_table,
    tabulate,
    words,
)
from trainpace.verbs.forecast import ForecastRequest, Forecasts, Sweep
from trainpace.verbs.measure import MeasureRequest
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import forwarded, not_forwarded
from trainpace.workload import ModelSpec, Workload

if TYPE_CHECKING:
    from trainpace.verbs.match import MatchRequest
    from trainpace.verbs.traced import PaddedBatch

MOST_ROWS = 24
"""Maximum batch sizes per device in a table. Longer tables keep the most relevant sizes.
"""
MOST_WARNINGS = 12
MOST_BARS = 12
MOST_KEPT = 6
"""Number of devices whose best batch stays in a truncated table."""
LARGE_PART = 0.2
"""Share of the memory from which the logits are worth a setting of their own."""


def fits_in_words(f: Forecast) -> str:
    """Return if a forecast fits in memory, with the probability if it is not certain."""
    word = {None: "?", True: "yes", False: "maybe" if f.may_fit else "NO"}[f.fits]
    certain = f.fit_probability is None or not 1 - CERTAIN < f.fit_probability < CERTAIN
    return word if certain else f"{word}, {percent(f.fit_probability)}"


def forecast_title(answer: Forecasts) -> str:
    whole = any(row.training_time is not None for row in answer.rows)
    return f"{_workload(answer).model}: how long {'training' if whole else 'a step'} takes"


def _workload(answer: Forecasts) -> Workload:
    return answer.sweeps[0].forecaster.workload


def forecast_sections(answer: Forecasts, asked: ForecastRequest | None = None) -> Iterator[Section]:
    """Convert forecasts to sections.

    `asked` is the original request. Its options go into the suggested next command.
    """
    rows, workload = answer.rows, _workload(answer)
    done = [row for row in rows if row.step is not None]
    several = bool(steps.lengths_of(rows))
    reasons = say(*dict.fromkeys(row.reason and f"Not forecast: {row.reason}" for row in rows))
    yield say(_about(rows, workload))
    yield Headline(*verdict(rows, answer.trends, any(sweep.work for sweep in answer.sweeps)))
    yield Lines(answer.recorded)
    yield Charts(lambda: forecast_pictures(answer))
    yield from _table(answer, several)
    yield from _packing_sections(answer.padded)
    if not done:  # The headline has the reason.
        yield from details("", reasons)
        return
    if len(done) == 1:
        yield from _breakdown(done[0])
    if not several:
        yield from _sweeps(answer)
    yield reasons
    yield from _warnings(rows, done, several)
    notes = _notes(answer, done)
    yield from brief(Notes([*notes, *nearest_in_brief(answer.evidence)]))
    yield from details("", Notes(notes))
    yield from evidence_sections(answer.evidence)
    if not answer.padded:  # No other command supports packed rows.
        yield from _next(done, workload, asked, answer.fits_with)


def _warnings(
    rows: Sequence[Forecast], done: Sequence[Forecast], several: bool
) -> Iterator[Section]:
    """Show the first warning of each row, and the largest batches that fit."""
    if len(rows) <= MOST_WARNINGS:
        warned = (
            f"Warning: {r.device}, {_size(r, several)}: {w}." for r in done for w in r.warnings[:1]
        )
        yield say(*dict.fromkeys(warned))
    if not several:  # With several values the table has a column for them.
        yield from details("the largest batches that fit", Lines(list(_largest(done))))


def _about(rows: Sequence[Forecast], workload: Workload) -> str:
    trained, e = workload.trainable_parameters, rows[0].execution
    frozen = "" if trained == workload.parameters else f" ({format_count(trained)} trained)"
    lengths = [f"{length:,}" for length in steps.lengths_of(rows)]
    sample = workload.sample
    if lengths:
        sample = (
            f"{listed(lengths)} tokens"
            if len(lengths) < 7
            else f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens"
        )
    return (
        f"{workload.model}: {format_count(workload.parameters)} parameters{frozen}, {sample},"
        f" {e.precision}, {workload.optimizer_in_words}"
    )


def _size(f: Forecast, several: bool) -> str:
    """Return the batch size, and the sequence length if there are several lengths."""
    batch = f"batch {f.execution.micro_batch}"
    return f"{f.sequence_length:,} tokens, {batch}" if several and f.sequence_length else batch


def _notes(answer: Forecasts, done: Sequence[Forecast]) -> list[str]:
    """Return notes about the accuracy of the answer and its assumptions."""
    jobs = (f.training_time for f in done if f.training_time)
    return [
        f"A forecast, not a measurement: from {steps.sources(done)}. Ranges are 90% intervals.",
        *answer.notes,
        *filter(None, dict.fromkeys(assumed_in_words(job.assumed) for job in jobs)),
        *assumed_hosts(done),
        *software_lines(done),
        *trace_notes(done),
    ]


def verdict(
    rows: Sequence[Forecast], trends: Mapping[str, Trend] | None = None, loads: bool = False
) -> tuple[str, bool | None]:
    """Return the answer in one to three sentences, and its status.

    `loads` is True if the steps include data loading, or if the training is known to load no data.

    The second value is False if nothing fits or nothing can be forecast, else None.
    """
    done = [row for row in rows if row.step is not None]
    fitting = [row for row in rows if row.can_run]
    if not done:
        return f"No forecast is possible. {sentence(rows[0].reason)}", False
    maybe = [row for row in done if row.may_fit]
    if not maybe:
        return _misfit(done), False
    if not fitting and len(rows) > 1:
        return _likeliest(max(maybe, key=lambda row: row.fit_probability or 0.0)), None
    return _recommendation(fitting or maybe, rows, trends or {}, loads), None


def _recommendation(
    fitting: Sequence[Forecast], rows: Sequence[Forecast], trends: Mapping[str, Trend], loads: bool
) -> str:
    if steps.lengths_of(rows):
        return _lengths_verdict(fitting)
    if len(rows) == 1:
        return _only(fitting[0], loads)
    if fitting[0].cost_usd is not None:
        return _cheapest_and_fastest(fitting)
    best = steps.best_of(fitting) or fitting[0]
    return _fastest(best, trends.get(best.device))


def _cheapest_and_fastest(fitting: Sequence[Forecast]) -> str:
    cheap, fast = min(fitting, key=lambda f: f.cost_usd or 0.0), min(fitting, key=_seconds)
    fastest = "" if cheap is fast else f" Fastest: {place(fast)}, {_job(fast)}."
    return f"Cheapest: {place(cheap)}, {_job(cheap)}.{fastest}"


def _fastest(best: Forecast, trend: Trend | None) -> str:
    rate = rate_in_words(best.samples_per_second, best.sequence_length)
    answer = f"Fastest option that fits: {place(best)}, {rate}. A step takes {_step(best)}."
    if trend is not None and trend.knee_batch < best.execution.micro_batch == trend.best_batch:
        answer += f" Batch {trend.knee_batch:,} is {steps.knee(trend)}."
    return answer


def _lengths_verdict(fitting: Sequence[Forecast]) -> str:
    """Describe the longest fitting sequence, and the lengths with fastest and cheapest tokens."""
    longest = max(fitting, key=lambda f: (f.sequence_length or 0, f.tokens_per_second or 0.0))
    best = steps.best_of(fitting) or longest
    answer = (
        f"The longest sequence that fits has {longest.sequence_length:,} tokens: {place(longest)},"
        f" {number(longest.tokens_per_second)} tokens/s."
    )
    if best is longest:
        answer += " No shorter one has more tokens/s."
    else:
        answer += (
            f" Most tokens/s: {number(best.tokens_per_second)} tokens/s with"
            f" {best.sequence_length:,} tokens ({place(best)})."
        )
    if fitting[0].cost_usd is None:
        return answer
    # Compared per token. The whole job is cheapest with the shortest samples, only because they
    # have the fewest tokens.
    cheap = min(fitting, key=lambda f: (f.cost_usd or 0.0) / (f.sequence_length or 1))
    return (
        f"{answer} A token costs least with {cheap.sequence_length:,} tokens: {place(cheap)},"
        f" {_job(cheap)} in all."
    )


def _likeliest(f: Forecast) -> str:
    return (
        f"Maybe: no option fits in memory with a probability of {percent(FITS_AT)} or more. The"
        f" likeliest is {place(f)}, with {percent(f.fit_probability)}. A step takes {_step(f)}."
    )


def _only(f: Forecast, loads: bool) -> str:
    fits = "" if f.fits is None else " It fits in memory."
    if f.fit_probability is not None and f.fit_probability < CERTAIN:
        how = "fits" if f.fits else "may fit"
        fits = f" It {how} in memory, with a probability of {percent(f.fit_probability)}."
    rate = rate_in_words(f.samples_per_second, f.sequence_length)
    answer = f"A step takes {_step(f)}: {rate}.{fits}"
    job = f.training_time
    if job is None or f.step is None:
        return answer
    evaluates = job.evaluation_s or f.step.own_code_ms
    parts = {"data loading": job.data_wait_s or loads, "evaluation": evaluates}
    missing = listed(name for name, seconds in parts.items() if not seconds)
    return f"{answer} The whole training takes {_job(f)}{missing and f', without {missing}'}."


def _job(f: Forecast) -> str:
    cost = "" if f.cost_usd is None else f" for {usd(f.cost_usd)}"
    return f"{duration(_seconds(f))}{interval_90(f.training_time_interval_s, duration)}{cost}"


def _misfit(done: Sequence[Forecast]) -> str:
    needed = [(f, float(needed_gib(f.memory))) for f in done if f.memory is not None]
    if not needed:
        return "No: nothing here fits in memory."
    f, gib = min(needed, key=lambda row: row[1])
    device_has = "" if f.capacity_gib is None else f"; the device has {number(f.capacity_gib)} GiB"
    need = (
        f"needs at least {number(gib)} GiB, including the overhead of driver and"
        f" allocator{device_has}.{_of_logits(f.memory)}"
    )
    if len(done) == 1:
        return f"No: it does not fit in memory. {place(f)} {need}"
    return f"No: none of them fits in memory. The closest, {place(f)}, {need}"


def _of_logits(m: Memory | None) -> str:
    """Return what to do about the logits if they take a large part of the memory, or ""."""
    if m is None or m.logits_gib < LARGE_PART * m.allocated_gib:
        return ""
    return (
        f" The logits take {number(m.logits_gib)} GiB of it. --cross-entropy chunked"
        " (use_liger_kernel=True in Transformers) computes them in pieces."
    )


def _step(f: Forecast) -> str:
    assert f.step is not None
    return f"{number(f.step.total_ms)} ms{interval_90(f.step_time_interval_ms)}"


def _seconds(f: Forecast) -> float:
    return 0.0 if f.training_time is None else f.training_time.total_s


def _table(answer: Forecasts, several: bool) -> Iterator[Section]:
    """Show one row per forecast. The short answer shows a single forecast in one line instead."""
    rows = answer.rows
    shown = _deciding(rows, answer.trends)
    priced = any(row.training_time is not None for row in rows)
    bests = [id(steps.best_of(swept)) for swept in steps.by_device(rows).values()]
    best = [i for i, row in enumerate(shown) if id(row) in bests]
    keep = best if len(bests) < MOST_KEPT else []
    table = tabulate(shown, _columns(priced, several), filled=True, keep=keep, best=best)
    if len(rows) > 1:
        yield table
    else:
        fits = rows[0].can_run
        yield from brief(say(fits and _in_a_line(rows[0])))
        yield from details("", table)
    some = f"The table has {len(shown)} of {len(rows)} batch sizes; the plot and --json have all."
    yield from details("", say(len(shown) < len(rows) and some))


def _columns(priced: bool, several: bool) -> list[Column | Literal[False]]:
    # With prices, memory matters less than the job, and utilization matters least.
    return [
        words("GPU", cell=fleet),
        several and Column("tokens", cell="{.sequence_length:,}"),
        Column("batch", cell="{.execution.micro_batch:,}"),
        Column("step ms", cell="step.total_ms"),
        Column("90% interval", 1, cell="step_time_interval_ms", form=interval),
        Column("tokens/s", 5, cell="tokens_per_second")
        if several
        else Column("samples/s", 5, cell="samples_per_second"),
        Column("GiB", 4, cell="memory.allocated_gib"),
        words("fits", 3, 3, fits_in_words),
        Column("MFU", 6, cell="mfu", form=percent),
        several and Column("largest batch", 2, cell="largest_micro_batch"),
        priced and Column("training", cell=lambda f: duration(_seconds(f))),
        priced and Column("cost", cell="cost_usd", form=usd),
        words("from", 7, 6, lambda f: (f.step and f.provenance) or ""),
    ]


def _in_a_line(f: Forecast) -> str:
    capacity = given(number(f.capacity_gib, ""), " of {}")
    memory = f", {number(f.memory.allocated_gib)}{capacity} GiB" if f.memory else ""
    return f"{sentence(place(f))}{memory}{given(percent(f.mfu, ''), ', MFU {}')}."


def _deciding(rows: Sequence[Forecast], trends: Mapping[str, Trend]) -> list[Forecast]:
    """Reduce a long sweep to ends, powers of two, the best, the knee and the largest that fits."""
    groups: dict[tuple[str, int | None], list[Forecast]] = {}
    for row in rows:
        groups.setdefault((row.device, row.sequence_length), []).append(row)
    if max(map(len, groups.values())) <= MOST_ROWS:
        return list(rows)
    shown: list[Forecast] = []
    for (device, _), swept in groups.items():
        sizes = _sizes_to_show(swept, trends.get(device))
        shown += [row for row in swept if row.execution.micro_batch in sizes]
    return shown


def _sizes_to_show(swept: Sequence[Forecast], trend: Trend | None) -> set[int]:
    fitting = [row for row in swept if row.can_run]
    marked = (swept[0], swept[-1], steps.best_of(swept) or swept[0], *fitting[-1:])
    sizes = {row.execution.micro_batch for row in marked} | {2**i for i in range(31)}
    return sizes | {trend.knee_batch} if trend else sizes


def _largest(done: Sequence[Forecast]) -> Iterator[str]:
    largest = {
        fleet(row): row.largest_micro_batch for row in done if row.largest_micro_batch is not None
    }
    fits = ", ".join(f"{batch:,} on {name}" for name, batch in largest.items() if batch)
    none = ", ".join(name for name, batch in largest.items() if not batch)
    if fits:
        yield f"Largest batch per GPU that fits: {fits}."
    if none:
        yield f"Not even one sample fits on {none}."


def _sweeps(answer: Forecasts) -> Iterator[Section]:
    """Plot the sweep of each device, and describe its jumps and trend."""
    for name, swept in steps.by_device(answer.rows).items():
        points = [(f.execution.micro_batch, f.step.total_ms) for f in swept if f.step is not None]
        if len(points) >= steps.FEWEST_FOR_A_PLOT:
            yield from _sweep(name, swept, points, answer)


def _sweep(
    name: str, swept: Sequence[Forecast], points: Points, answer: Forecasts
) -> Iterator[Section]:
    jumps, trend = answer.jumps.get(name), answer.trends.get(name)
    title = f"{name}: step time in ms over the batch size{', ▲ after a jump' if jumps else ''}"
    marked = {jump.batch for jump in jumps or ()}
    yield from details("the plot", Plot(title, (), marked, points))
    batches = [f.execution.micro_batch for f in swept]
    if jumps is None:
        yield say("Jumps are not forecast here; trainpace measure finds those of this machine.")
    elif jumps:
        rates = {f.execution.micro_batch: f.samples_per_second for f in swept}
        yield from brief(say(f"{name}: {steps.jumps_in_brief(jumps)}"))
        yield from details("what causes the jumps", Lines(steps.jumps_in_words(jumps, rates)))
    elif steps.is_whole(batches):
        yield from brief(say(f"{name}: no jumps."))
        yield from details("", say(steps.no_jumps(batches, trend)))
    else:
        yield say(steps.no_jumps(batches, trend))
    if trend is not None:
        line = Lines(steps.trend_in_words(trend))
        yield from details("whether the step time is linear", line)


def _packing_sections(padded: Sequence[PaddedBatch]) -> Iterator[Section]:
    """Compare packed rows with padded batches of the same documents."""
    if not padded:
        return
    columns = (
        words("padded instead, on", cell="padded", form=fleet),
        Column("documents", cell="{.documents:,}"),
        Column("tokens", cell="{.length:,}"),
        Column("padding", cell="{.padding:.0%}"),
        Column("step ms", cell="padded.step.total_ms"),
        Column("90% interval", 2, cell="padded.step_time_interval_ms", form=interval),
        Column("GiB", 3, cell="padded.memory.allocated_gib"),
        words("fits", 1, 3, "padded", fits_in_words),
        Column("packing saves", cell="saved", form=percent),
    )
    yield tabulate(padded, columns)
    yield say(_packing_in_words(padded))


def _packing_in_words(padded: Sequence[PaddedBatch]) -> str:
    """Describe what packing saves for the fastest packed rows, and what the result depends on."""
    timed = [one for one in padded if one.saved is not None]
    if not timed:
        return f"Padded batches have no forecast: {padded[0].padded.reason}"
    fitting = [one for one in timed if False not in (one.packed.fits, one.padded.fits)]
    one = max(fitting or timed, key=lambda one: one.packed_rate or 0.0)
    saved = one.saved or 0.0
    return (
        f"Packing {'saves' if saved >= 0 else 'costs'} {percent(abs(saved))} of the time that a"
        f" document's token takes in padded batches on {place(one.packed)}:"
        f" {number(one.packed_rate)} tokens of documents/s against {number(one.padded_rate)}."
        f" Padding is {percent(one.padding)} of the padded batch and"
        f" {percent(one.packed_padding)} of packed rows. Padded batches hold documents of the same"
        " lengths, drawn at random. The forecast of their attention does not include the cost of a"
        " mask."
    )


JOB_WORDS = {
    "stepping_s": "steps",
    "data_wait_s": "waiting for data",
    "stragglers_s": "waiting for the slowest node",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoints",
    "failures_s": "failures and restarts",
    "startup_s": "start-up",
    "compiling_s": "compiling",
    "preparing_s": "preparing data",
    "transfer_s": "copying data to the servers",
}
SHOWN_SHARE = 0.005
"""Minimum share of the whole training for a part to be listed."""
SHOWN_ROLE = 0.01
"""Minimum share of device time for a role to be named."""
MOST_KEPT_PARTS = 3


def _breakdown(f: Forecast) -> Iterator[Section]:
    """Show the parts of a step, of the whole training, and of the memory."""
    assert f.step is not None
    total = f.step.total_ms
    parts = [
        (steps.part_words(name), ms) for name in STEP_PARTS if (ms := getattr(f.step, name)) > 0
    ]
    largest = sorted(range(len(parts)), key=lambda i: -parts[i][1])[:MOST_KEPT_PARTS]
    yield shares_table("part of the step", parts, total, keep=largest)
    job = f.training_time
    if job is not None and 0 < job.total_s < float("inf"):
        spent = [(text, getattr(job, name)) for name, text in JOB_WORDS.items()]
        table = shares_table(
            "part of the training",
            spent,
            job.total_s,
            unit="time",
            form=duration,
            least=SHOWN_SHARE,
        )
        if len(table.rows) > 1:
            yield from details("the parts of the training", table)
    by_role = roles_in_words(f)
    if by_role:
        yield from brief(say(f"Most device time: {'; '.join(by_role[:MOST_KEPT_PARTS])}."))
        line = f"Device time by the role of layers: {'; '.join(by_role)}."
        yield from details("all operators", say(line))
    columns = (
        words("heaviest operators", cell=lambda o: alike(o.module, o.count) or "-"),
        words("kind", cell="kind"),
        words("phase", 1, cell="phase"),
        Column("count", 3, cell="{.count}"),
        Column("ms", cell="time_ms"),
        Column("share", 2, cell=lambda o: percent(o.time_ms / total)),
        words("bound by", 4, 7, "bound"),
        Column("of its roof", 5, cell="share_of_roof", form=percent),
    )
    yield from details("all operators", tabulate(f.heaviest[:10], columns))
    yield from _scaling(f)
    yield from details("the memory at its peak", Lines(_memory_in_words(f)))


def roles_in_words(f: Forecast) -> list[str]:
    """Return the share of device time by role of layers, the longest first."""
    whole = sum(role.time_ms for role in f.roles)
    return [
        f"{role.role}{f', {role.layers} layers' if role.layers else ''}:"
        f" {percent(role.time_ms / whole)}"
        for role in f.roles
        if role.time_ms >= SHOWN_ROLE * whole
    ]


def _scaling(f: Forecast) -> Iterator[Section]:
    if f.num_devices == 1:
        return
    yield from details("the layout and its communication", Lines(_communication(f)))
    if f.scaling_efficiency is None:
        yield say("Scaling efficiency: unknown, because fewer devices cannot hold this model.")
        return
    reference = f"{f.scaling_reference_devices} devices, the fewest that fit"
    if f.scaling_reference_devices == 1:
        reference = "one device alone"
    yield say(
        f"Scaling efficiency: {percent(f.scaling_efficiency)} per device, relative to {reference}.",
        f.scaling_efficiency >= ABOVE_ONE and WHY_ABOVE_ONE,
    )


def _communication(f: Forecast) -> list[str]:
    assert f.step is not None
    total, e = f.step.total_ms, f.execution
    sizes = {"data": e.data_parallel_size, "tensor": e.tp, "pipeline": e.pp, "context": e.cp}
    sizes["expert"] = e.ep
    shape = ", ".join(
        f"{name}-parallel size {n}" for name, n in sizes.items() if n > 1 or name == "data"
    )
    lines = [f"Parallelism: {shape}; global batch {e.global_batch:,}."]
    kinds = ", ".join(
        f"{kind.replace('_', ' ')} {number(ms)} ms ({percent(ms / total)})"
        for kind, ms in sorted(f.exposed_ms.items(), key=lambda item: -item[1])
    )
    if kinds:
        lines.append(f"Exposed communication, not overlapped with compute: {kinds}.")
    if (idle := f.step.idle_ms) > 0:
        lines.append(f"Pipeline bubble: {number(idle)} ms ({percent(idle / total)}).")
    return lines


def _memory_in_words(f: Forecast) -> list[str]:
    m = f.memory
    if m is None:
        return []
    total = f"{number(m.allocated_gib)} allocated, in all"
    if m.device_gib > m.reserved_gib:  # A CPU has no driver context.
        # torch's allocator keeps freed memory while there is room, so a step that fits may fill
        # the card.
        full = f.fits and f.capacity_gib is not None and m.device_gib > f.capacity_gib
        shown = "all of the card" if full else f"{number(m.device_gib)} on the card"
        total = (
            f"{number(m.allocated_gib)} allocated, {number(m.reserved_gib)} reserved, {shown}"
            " (nvidia-smi)"
        )
    logits = f" ({number(m.logits_gib)} of them for the logits)" if m.logits_gib else ""
    return [
        f"Memory at the peak: parameters {number(m.parameters_gib)}, gradients"
        f" {number(m.gradients_gib)}, optimizer states {number(m.optimizer_states_gib)},"
        f" activations {number(m.activations_gib)} GiB{logits}; {total}."
    ]


def forecast_pictures(answer: Forecasts) -> list[Picture | None]:
    """Return all charts of an answer, the most informative first."""
    rows = answer.rows
    over_lengths = steps.lengths_chart(rows)
    pictures: list[Picture | None] = [
        over_lengths or steps.forecast_sweep(rows, answer.jumps, answer.evidence)
    ]
    shown = [
        (group, f)
        for group in answer.sweeps
        if (f := steps.best_of(group.rows) or _timed(group.rows)) is not None
    ]
    if shown:
        forecasts = [f for _, f in shown]
        bars = [(f"{fleet(f)}, {_size(f, over_lengths is not None)}", f) for f in forecasts]
        best = steps.best_of(forecasts) or forecasts[0]
        pictures += steps.step_and_memory(bars[:MOST_BARS], steps.provenance(forecasts))
        pictures += _inside(*shown[forecasts.index(best)])
    return pictures


def _timed(rows: Sequence[Forecast]) -> Forecast | None:
    return next((row for row in rows if row.step is not None), None)


def _inside(group: Sweep, best: Forecast) -> list[Picture | None]:
    """Draw the inside of a step on the best cluster, and its scaling over devices."""
    assert best.step is not None
    forecaster, form = group.forecaster, group.forecaster.workload.form(best.execution.precision)
    pictures: list[Picture | None] = []
    if best.memory is not None:
        memory = memory_over_step(form, best.execution, best.step, best.memory)
        n = best.execution.accumulation
        ends = best.step.forward_ms / n, (best.step.forward_ms + best.step.backward_ms) / n
        if memory is not None:
            pictures.append(steps.memory_chart(memory, best.capacity_gib, ends))
    roofs = forecaster.roofline(best.execution)
    if roofs is not None:
        device = f"{best.device}, batch {best.execution.micro_batch}"
        pictures.append(steps.roofline_chart(roofs, device))
    if forecaster.target.cluster.num_devices > 1:
        pictures.append(steps.scaling_chart(forecaster.fewer_devices(best.execution)))
    return pictures


BESIDE_THE_STEP = frozenset(
    "samples epochs max_steps price startup evaluation_samples checkpoint_every mtbf step_variation"
    " data_gb download sample_bytes storage loader_rate workers cores data_from by deadline budget"
    " provider region max_nodes spot preempted_every machines only_machines num_gpus nodes network"
    " network_latency host hardware software attention transfer_from evidence timeout".split()
)
"""Options that do not affect a measured step, or that the machine determines itself."""


def can_be_measured(
    spec: str, asked: ForecastRequest | MatchRequest | None, fixed: Sequence[str]
) -> bool:
    """Return True if `trainpace measure` can run the model under the same conditions."""
    beside = [*fixed, *BESIDE_THE_STEP]
    return not ModelSpec.of(spec).is_saved and not not_forwarded(asked, MeasureRequest, beside)


def spec_of(workload: Workload, asked: ForecastRequest | MatchRequest | None) -> str:
    """Return the model as the user named it."""
    return workload.model if asked is None else asked.model_name


def _next(
    done: Sequence[Forecast],
    workload: Workload,
    asked: ForecastRequest | None,
    fits_with: Mapping[str, str],
) -> Iterator[Next]:
    """Suggest measuring the best forecast, or a setup that fits. Keeps the request's conditions."""
    spec = spec_of(workload, asked)
    best = steps.best_of(done)
    row = best or max(done, key=lambda row: row.largest_micro_batch or 0)
    form: dict[str, Any] = {"precision": row.execution.precision}
    is_open = asked is not None and asked.leaves_batch_open(workload)
    if is_open and asked is not None and asked.leaves_checkpointing_open(workload):
        form["checkpointing"] = row.execution.activation_checkpointing.replace("none", "")
    if steps.lengths_of(done):
        form["sequence_length"] = row.sequence_length
    device, batch = _device_options(row, asked), {"batch": row.execution.micro_batch}
    fixed = ["gpu", "calibrated", "batch", *form]
    if best is None:
        yield from _next_that_fits(row, device | form, spec, asked, fits_with)
    elif best.num_devices > 1:
        yield from _next_plan(spec, device | batch | form, asked, fixed)
    elif not form.pop("checkpointing", "") and can_be_measured(spec, asked, fixed):
        same = forwarded(asked, MeasureRequest, ["gpu", "calibrated", "timeout"], batch | form)
        yield _next_measurement(best, ["trainpace", "measure", spec, *same])
    elif workload.only_batch is None and len({f.execution.micro_batch for f in done}) == 1:
        # Every batch size would need its own accumulation for the same global batch.
        beside = device | form | {"batch": _range(best), "global_batch": None}
        same = forwarded(asked, ForecastRequest, fixed, beside)
        yield Next(
            ["trainpace", "forecast", spec, *same],
            "a range of batch sizes, and where the step time jumps",
        )


def _range(best: Forecast) -> str:
    return f"1:{max(2, min(best.largest_micro_batch or 64, 128))}"


def _next_plan(
    spec: str, beside: Mapping[str, Any], asked: ForecastRequest | None, fixed: Sequence[str]
) -> Iterator[Next]:
    if not not_forwarded(asked, PlanRequest, fixed):
        is_long = asked is not None and asked.whole_training
        why = f"what to change, and what it saves{'' if is_long else ' in 1,000 steps'}"
        job = {} if is_long else {"max_steps": 1000}
        same = forwarded(asked, PlanRequest, fixed, {**beside, **job})
        yield Next(["trainpace", "plan", spec, *same], why)


def _next_measurement(best: Forecast, command: Sequence[str]) -> Next:
    if _is_this_machine(best):
        return Next(command, "real steps on this machine, beside the forecast")
    why = f"real steps, on a machine with this GPU: {best.device}"
    return Next([*command, "--device", "cuda"], why)


def _next_that_fits(
    row: Forecast,
    beside: Mapping[str, Any],
    spec: str,
    asked: ForecastRequest | None,
    fits_with: Mapping[str, str],
) -> Iterator[Next]:
    """Suggest the largest batch that fits, or other settings if not even one sample fits."""
    settings: dict[str, Any] = {**fits_with}
    why = ""
    if row.largest_micro_batch:
        settings = {**beside, "batch": row.largest_micro_batch, "global_batch": None}
        why = "the largest batch that fits; --accumulate keeps the global batch"
    elif "adapter" in fits_with:
        why = "fits: trains small adapters beside frozen weights (LoRA; QLoRA with nf4)"
    elif fits_with:
        why = "fits: recomputes activations"
    if why:
        same = forwarded(asked, ForecastRequest, ["gpu", "calibrated"], settings)
        yield Next(["trainpace", "forecast", spec, *same], why)


def _is_this_machine(f: Forecast) -> bool:
    # A corrected forecast of this machine has no host, because the machine has its own profile.
    return f.provenance == "calibrated" or (f.provenance == "transferred" and not f.host)


def _device_options(f: Forecast, asked: ForecastRequest | None) -> dict[str, Any]:
    if not _is_this_machine(f):
        return {"gpu": f.device}
    by_name = asked is None or any(gpu.casefold() == "cpu" for gpu in asked.gpu)
    if asked is not None and asked.calibrated and not by_name:
        return {"calibrated": asked.calibrated}
    return {"gpu": "cpu"}
