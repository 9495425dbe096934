"""Report sections for forecasts: verdict, table, breakdown, jumps, assumptions, next commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainpace.core.outcome import STEP_PARTS, Forecast
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
    Section,
    Table,
    brief,
    details,
    words,
)
from trainpace.verbs.forecast import ForecastRequest, Forecasts, Sweep
from trainpace.verbs.measure import MeasureRequest
from trainpace.verbs.plan import PlanRequest
from trainpace.verbs.request import as_typed, fields_of, forwarded, not_forwarded
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
SURE = 0.99
"""Probability of fitting in memory above which it is not printed."""
FITS = {None: "?", True: "yes", False: "NO"}


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
    yield Lines([_about(rows, workload)])
    yield Headline(*verdict(rows, answer.trends))
    yield Lines(answer.recorded)
    yield Charts(lambda: forecast_pictures(answer))
    yield from _table(answer, several)
    yield from _packing_sections(answer.padded)
    if len(done) == 1:
        yield from _breakdown(done[0])
    if not several:
        yield from _sweeps(answer)
    reasons = dict.fromkeys(f"Not forecast: {row.reason}" for row in rows if row.reason)
    yield Lines(list(reasons)) if done else next(details("", Lines(list(reasons))))
    if not done:
        return
    if len(rows) <= MOST_WARNINGS:
        warned = (
            f"Warning: {r.device}, {_size(r, several)}: {w}." for r in done for w in r.warnings[:1]
        )
        yield Lines(list(dict.fromkeys(warned)))
    if not several:  # With several values the table has a column for them.
        yield from details("the largest batches that fit", Lines(list(_largest(done))))
    notes = _notes(answer, done)
    yield from brief(Notes([*notes, *nearest_in_brief(answer.evidence)]))
    yield from details("", Notes(notes))
    yield from evidence_sections(answer.evidence)
    if not answer.padded:  # No other command supports packed rows.
        yield from _next(done, workload, asked)


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
    rows: Sequence[Forecast], trends: Mapping[str, Trend] | None = None
) -> tuple[str, bool | None]:
    """Return the answer in one to three sentences, and its status.

    The second value is False if nothing fits or nothing can be forecast, else None.
    """
    done = [row for row in rows if row.step is not None]
    fitting = [row for row in done if row.fits is not False]
    if not done:
        return f"No forecast is possible. {sentence(rows[0].reason)}", False
    if not fitting:
        return _misfit(done), False
    if steps.lengths_of(rows):
        return _lengths_verdict(fitting), None
    if len(fitting) == 1 == len(rows):
        return _only(fitting[0]), None
    if fitting[0].cost_usd is not None:
        return _cheapest_and_fastest(fitting), None
    best = steps.best_of(fitting) or fitting[0]
    return _fastest(best, (trends or {}).get(best.device)), None


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


def _only(f: Forecast) -> str:
    fits = "" if f.fits is None else " It fits in memory."
    if f.fit_probability is not None and f.fits and f.fit_probability < SURE:
        fits = f" It fits in memory with a probability of {percent(f.fit_probability)}."
    rate = rate_in_words(f.samples_per_second, f.sequence_length)
    answer = f"A step takes {_step(f)}: {rate}.{fits}"
    job = f.training_time
    if job is None:
        return answer
    parts = {"data loading": job.data_wait_s, "evaluation": job.evaluation_s}
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
        f" allocator{device_has}."
    )
    if len(done) == 1:
        return f"No: it does not fit in memory. {place(f)} {need}"
    return f"No: none of them fits in memory. The closest, {place(f)}, {need}"


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
    bests = [steps.best_of(swept) for swept in steps.by_device(rows).values()]
    best = [i for i, row in enumerate(shown) if any(row is one for one in bests)]
    keep = best if len(bests) < MOST_KEPT else []
    cells = [_cells(row, priced, several) for row in shown]
    table = Table(_columns(priced, several), cells, keep=keep, best=best)
    if len(rows) > 1:
        yield table
    else:
        yield from brief(
            Lines([_in_a_line(row) for row in rows if row.step and row.fits is not False])
        )
        yield from details("", table)
    if len(shown) < len(rows):
        note = (
            f"The table has {len(shown)} of {len(rows)} batch sizes; the plot and --json have all."
        )
        yield from details("", Lines([note]))


def _columns(priced: bool, several: bool) -> list[Column]:
    # With prices, memory matters less than the job, and utilization matters least.
    return [
        words("GPU"),
        *([Column("tokens")] if several else []),
        Column("batch"),
        Column("step ms"),
        Column("90% interval", 1),
        Column("tokens/s" if several else "samples/s", 5),
        Column("GiB", 4),
        words("fits", 3, least=3),
        Column("MFU", 6),
        *([Column("largest batch", 2)] if several else []),
        *([Column("training"), Column("cost")] if priced else []),
        words("from", 7, least=6),
    ]


def _in_a_line(f: Forecast) -> str:
    capacity = "" if f.capacity_gib is None else f" of {number(f.capacity_gib)}"
    memory = "" if f.memory is None else f", {number(f.memory.allocated_gib)}{capacity} GiB"
    return f"{sentence(place(f))}{memory}{'' if f.mfu is None else f', MFU {percent(f.mfu)}'}."


def _deciding(rows: Sequence[Forecast], trends: Mapping[str, Trend]) -> list[Forecast]:
    """Reduce a long sweep to ends, powers of two, the best, the knee and the largest that fits."""
    groups: dict[tuple[str, int | None], list[Forecast]] = {}
    for row in rows:
        groups.setdefault((row.device, row.sequence_length), []).append(row)
    if max(map(len, groups.values())) <= MOST_ROWS:
        return list(rows)
    shown: list[Forecast] = []
    for (device, _), swept in groups.items():
        fitting = [row for row in swept if row.step is not None and row.fits is not False]
        marked = (swept[0], swept[-1], steps.best_of(swept) or swept[0], *fitting[-1:])
        sizes = {row.execution.micro_batch for row in marked} | {2**i for i in range(31)}
        if device in trends:
            sizes.add(trends[device].knee_batch)
        shown += [row for row in swept if row.execution.micro_batch in sizes]
    return shown


def _cells(f: Forecast, priced: bool, several: bool) -> list[str]:
    training = None if f.training_time is None else f.training_time.total_s
    return [
        fleet(f),
        *([f"{f.sequence_length:,}"] if several else []),
        f"{f.execution.micro_batch:,}",
        "-" if f.step is None else number(f.step.total_ms),
        interval(f.step_time_interval_ms),
        number(f.tokens_per_second if several else f.samples_per_second),
        "-" if f.memory is None else number(f.memory.allocated_gib),
        FITS[f.fits],
        percent(f.mfu),
        *([number(f.largest_micro_batch)] if several else []),
        *([duration(training), usd(f.cost_usd)] if priced else []),
        f.provenance if f.step is not None else "",
    ]


def _largest(done: Sequence[Forecast]) -> Iterator[str]:
    largest = {
        fleet(row): row.largest_micro_batch for row in done if row.largest_micro_batch is not None
    }
    fits = [f"{batch:,} on {name}" for name, batch in largest.items() if batch]
    if fits:
        yield f"Largest batch per GPU that fits: {', '.join(fits)}."
    none = [name for name, batch in largest.items() if not batch]
    if none:
        yield f"Not even one sample fits on {', '.join(none)}."


def _sweeps(answer: Forecasts) -> Iterator[Section]:
    """Plot the sweep of each device, and describe its jumps and trend."""
    for name, swept in steps.by_device(answer.rows).items():
        points = [(f.execution.micro_batch, f.step.total_ms) for f in swept if f.step is not None]
        if len(points) < steps.FEWEST_FOR_A_PLOT:
            continue
        jumps, trend = answer.jumps.get(name, ()), answer.trends.get(name)
        title = f"{name}: step time in ms over the batch size{', ▲ after a jump' if jumps else ''}"
        marked = {jump.batch for jump in jumps}
        yield from details("the plot", Plot(title, (), marked, points))
        batches = [f.execution.micro_batch for f in swept]
        if jumps:
            rates = {f.execution.micro_batch: f.samples_per_second for f in swept}
            yield from brief(Lines([f"{name}: {steps.jumps_in_brief(jumps)}"]))
            causes = Lines(steps.jumps_in_words(jumps, rates))
            yield from details("what causes the jumps", causes)
        elif name not in answer.jumps:
            yield Lines(
                ["Jumps are not forecast here; trainpace measure finds those of this machine."]
            )
        elif steps.is_whole(batches):
            yield from brief(Lines([f"{name}: no jumps."]))
            yield from details("", Lines([steps.no_jumps(batches, trend)]))
        else:
            yield Lines([steps.no_jumps(batches, trend)])
        if trend is not None:
            line = Lines(steps.trend_in_words(trend))
            yield from details("whether the step time is linear", line)


def _packing_sections(padded: Sequence[PaddedBatch]) -> Iterator[Section]:
    """Compare packed rows with padded batches of the same documents."""
    if not padded:
        return
    columns = (
        words("padded instead, on"),
        Column("documents"),
        Column("tokens"),
        Column("padding"),
        Column("step ms"),
        Column("90% interval", 2),
        Column("GiB", 3),
        words("fits", 1, least=3),
        Column("packing saves"),
    )
    rows = []
    for one in padded:
        # Columns: device, batch, step, interval, throughput, memory, fits.
        device, _, step, between, _, gib, fits, *_ = _cells(one.padded, False, False)
        sizes = [f"{one.documents:,}", f"{one.length:,}", percent(one.padding)]
        rows.append([device, *sizes, step, between, gib, fits, percent(one.saved)])
    yield Table(columns, rows)
    yield Lines([_packing_in_words(padded)])


def _packing_in_words(padded: Sequence[PaddedBatch]) -> str:
    """Describe what packing saves for the fastest packed rows, and what the result depends on."""
    timed = [one for one in padded if one.saved is not None]
    if not timed:
        return f"Padded batches have no forecast: {padded[0].padded.reason}"
    fitting = [
        one for one in timed if one.packed.fits is not False and one.padded.fits is not False
    ]
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
_SHARE = (Column("share"), words("", 1, 8))
_HEAVIEST = (
    words("heaviest operators"),
    words("kind"),
    words("phase", 1),
    Column("count", 3),
    Column("ms"),
    Column("share", 2),
    words("bound by", 4, 7),
    Column("of its roof", 5),
)


def _breakdown(f: Forecast) -> Iterator[Section]:
    """Show the parts of a step, of the whole training, and of the memory."""
    assert f.step is not None
    total = f.step.total_ms
    rows = [
        (steps.part_words(name), number(ms), percent(ms / total), ms / total)
        for name in STEP_PARTS
        if (ms := getattr(f.step, name)) > 0
    ]
    largest = sorted(range(len(rows)), key=lambda i: -rows[i][3])[:MOST_KEPT_PARTS]
    yield Table((words("part of the step"), Column("ms"), *_SHARE), rows, keep=largest)
    if f.training_time is not None and 0 < f.training_time.total_s < float("inf"):
        whole = f.training_time.total_s
        shares = {text: getattr(f.training_time, name) / whole for name, text in JOB_WORDS.items()}
        parts = [
            (text, duration(share * whole), percent(share), share)
            for text, share in shares.items()
            if share >= SHOWN_SHARE
        ]
        columns = (words("part of the training"), Column("time"), *_SHARE)
        yield from details(
            "the parts of the training", Table(columns, parts if len(parts) > 1 else [])
        )
    heavy = [
        (
            alike(o.module, o.count) or "-",
            o.kind,
            o.phase,
            str(o.count),
            number(o.time_ms),
            percent(o.time_ms / total),
            o.bound,
            percent(o.share_of_roof),
        )
        for o in f.heaviest[:10]
    ]
    by_role = roles_in_words(f)
    if by_role:
        yield from brief(Lines([f"Most device time: {'; '.join(by_role[:MOST_KEPT_PARTS])}."]))
        role_line = f"Device time by the role of layers: {'; '.join(by_role)}."
        yield from details("all operators", Lines([role_line]))
    yield from details("all operators", Table(_HEAVIEST, heavy))
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
    if f.step is None or f.num_devices == 1:
        return
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
    yield from details("the layout and its communication", Lines(lines))
    if f.scaling_efficiency is None:
        yield Lines(["Scaling efficiency: unknown, because fewer devices cannot hold this model."])
        return
    than = f"{f.scaling_reference_devices} devices, the fewest that fit"
    reference = "one device alone" if f.scaling_reference_devices == 1 else than
    yield Lines(
        [
            f"Scaling efficiency: {percent(f.scaling_efficiency)} per device, relative to"
            f" {reference}.",
            *[WHY_ABOVE_ONE] * (f.scaling_efficiency >= ABOVE_ONE),
        ]
    )


def _memory_in_words(f: Forecast) -> list[str]:
    m = f.memory
    if m is None:
        return []
    total = f"{number(m.allocated_gib)} allocated, in all"
    if m.device_gib > m.reserved_gib:  # A CPU has no driver context.
        # torch's allocator keeps freed memory while there is room, so a step that fits may fill the card.
        full = f.fits and f.capacity_gib is not None and m.device_gib > f.capacity_gib
        shown = "all of the card" if full else f"{number(m.device_gib)} on the card"
        total = (
            f"{number(m.allocated_gib)} allocated, {number(m.reserved_gib)} reserved, {shown}"
            " (nvidia-smi)"
        )
    return [
        f"Memory at the peak: parameters {number(m.parameters_gib)}, gradients"
        f" {number(m.gradients_gib)}, optimizer states {number(m.optimizer_states_gib)},"
        f" activations {number(m.activations_gib)} GiB; {total}."
    ]


def forecast_pictures(answer: Forecasts) -> list[Picture | None]:
    """Return all charts of an answer, the most informative first."""
    rows = answer.rows
    over_lengths = steps.lengths_chart(rows)
    pictures: list[Picture | None] = [
        over_lengths or steps.forecast_sweep(rows, answer.jumps, answer.evidence)
    ]
    bests = [
        (g, steps.best_of(g.rows) or next((r for r in g.rows if r.step is not None), None))
        for g in answer.sweeps
    ]
    shown = [(group, f) for group, f in bests if f is not None]
    if shown:
        forecasts = [f for _, f in shown]
        many = over_lengths is not None
        bars = [(f"{fleet(f)}, {_size(f, many)}", f) for f in forecasts[:MOST_BARS]]
        best = steps.best_of(forecasts)
        pictures += steps.step_and_memory(bars, steps.provenance(forecasts))
        pictures += _inside(*next((pair for pair in shown if pair[1] is best), shown[0]))
    return pictures


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
    " data_gb download sample_bytes storage loader_rate workers data_from by deadline budget"
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


def _next(
    done: Sequence[Forecast], workload: Workload, asked: ForecastRequest | None
) -> Iterator[Next]:
    """Suggest measuring the best forecast, or a setup that fits. Keeps the request's conditions."""
    spec, several = workload.model if asked is None else asked.model_name, steps.lengths_of(done)
    best = steps.best_of(done)
    row = best or max(done, key=lambda row: row.largest_micro_batch or 0)
    batch = row.execution.micro_batch
    fixed = ["gpu", "calibrated", "batch", "precision", *(["sequence_length"] if several else [])]
    form = ["--precision", row.execution.precision]
    form += ["--sequence-length", str(row.sequence_length)] if several else []
    device = _device_words(row, asked)
    again = ["trainpace", "forecast", spec, *device, *form]
    if best is None:
        yield from _next_that_fits(row, again, spec, asked, fixed)
    elif best.num_devices > 1:
        if not not_forwarded(asked, PlanRequest, fixed):
            job = [] if asked is not None and asked.samples else ["--max-steps", "1000"]
            command = [*("trainpace", "plan", spec), *device, "--batch", str(batch), *form]
            why = f"what to change, and what it saves{' in 1,000 steps' if job else ''}"
            yield Next([*command, *forwarded(asked, PlanRequest, fixed), *job], why)
    elif can_be_measured(spec, asked, fixed):
        same = forwarded(asked, MeasureRequest, [*fixed, "timeout"])
        command = ["trainpace", "measure", spec, "--batch", str(batch), *form, *same]
        yield _next_measurement(best, command)
    elif workload.only_batch is None and all(f.execution.micro_batch == batch for f in done):
        batches = f"1:{max(2, min(best.largest_micro_batch or 64, 128))}"
        same = forwarded(asked, ForecastRequest, fixed)
        why = "a range of batch sizes, and where the step time jumps"
        yield Next([*again, *same, "--batch", batches], why)


def _next_measurement(best: Forecast, command: Sequence[str]) -> Next:
    if _is_this_machine(best):
        return Next(command, "real steps on this machine, beside the forecast")
    why = f"real steps, on a machine with this GPU: {best.device}"
    return Next([*command, "--device", "cuda"], why)


def _next_that_fits(
    row: Forecast,
    again: Sequence[str],
    spec: str,
    asked: ForecastRequest | None,
    fixed: Sequence[str],
) -> Iterator[Next]:
    """Suggest the largest batch that fits, or recomputation if not even one sample fits."""
    if row.largest_micro_batch:
        command = [*again, *forwarded(asked, ForecastRequest, fixed)]
        why = "the largest batch that fits; --accumulate keeps the global batch"
        yield Next([*command, "--batch", str(row.largest_micro_batch)], why)
    elif row.execution.activation_checkpointing == "none" and ModelSpec.of(spec).can_checkpoint:
        same = forwarded(asked, ForecastRequest, [*fixed, "checkpointing"])
        batch = []
        if asked is not None and asked.batch:
            batch = as_typed(fields_of(ForecastRequest)["batch"], asked.batch)
        why = "recomputes activations, which needs less memory"
        yield Next([*again, *same, "--checkpointing", "full", *batch], why)


def _is_this_machine(f: Forecast) -> bool:
    # A corrected forecast of this machine has no host, because the machine has its own profile.
    return f.provenance == "calibrated" or (f.provenance == "transferred" and not f.host)


def _device_words(f: Forecast, asked: ForecastRequest | None) -> list[str]:
    if not _is_this_machine(f):
        return ["--gpu", f.device]
    by_name = asked is None or any(gpu.casefold() == "cpu" for gpu in asked.gpu)
    if asked is not None and asked.calibrated and not by_name:
        return ["--calibrated", asked.calibrated]
    return ["--gpu", "cpu"]
