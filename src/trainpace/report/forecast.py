"""Forecasts for the terminal, as pictures and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainpace.core.outcome import Forecast, Jump
from trainpace.core.stats import Trend
from trainpace.core.units import format_count
from trainpace.forecast import memory_over_step, needed_gib
from trainpace.job import assumed_in_words
from trainpace.report import step_charts, sweep_charts
from trainpace.report.assumptions import assumed_hosts, software_lines, taken_for_granted
from trainpace.report.breakdown import print_breakdown
from trainpace.report.charts import Picture
from trainpace.report.evidence import evidence_rows, nearest_in_brief, print_evidence
from trainpace.report.lengths import (
    lengths_chart,
    lengths_of,
    lengths_verdict,
    place,
    samples_of,
    sizes,
)
from trainpace.report.next_steps import print_next_after_forecast
from trainpace.report.packing import packing_in_words, print_padded
from trainpace.report.pages import page
from trainpace.report.phrases import (
    bracketed,
    devices,
    duration,
    interval,
    number,
    percent,
    rate_in_words,
    sentence,
    usd,
)
from trainpace.report.screen import in_details, is_brief
from trainpace.report.sweep_charts import best_of
from trainpace.report.sweep_words import (
    is_whole,
    jumps_in_brief,
    jumps_in_words,
    knee,
    no_jumps,
    trend_in_words,
)
from trainpace.report.terminal import (
    Column,
    print_chart,
    print_lines,
    print_notes,
    print_table,
    print_verdict,
    words,
)
from trainpace.workload import Workload

if TYPE_CHECKING:
    from trainpace.forecast import Nearness
    from trainpace.verbs.forecast import ForecastRequest, Forecasts, Sweep
    from trainpace.verbs.traced import PaddedBatch

MOST_ROWS = 24
"""Batch sizes on one device that a table lists; of more it has those that decide, and the plot has all."""
MOST_WARNINGS = 12
MOST_BARS = 12
MOST_KEPT = 6
"""Devices of which the best batch stays in a table that is cut."""
SURE = 0.99
"""From here on the probability to fit is not worth a word."""


def print_forecasts(
    workload: Workload,
    rows: Sequence[Forecast],
    jumps: Mapping[str, Sequence[Jump]] | None = None,
    journal_notes: Sequence[str] = (),
    asked: ForecastRequest | None = None,
    trends: Mapping[str, Trend] | None = None,
    padded: Sequence[PaddedBatch] = (),
    evidence: Sequence[Nearness] = (),
    recorded: Sequence[str] = (),
) -> None:
    """The answer, a table, where the time goes in a single one, the jumps over a range, how far to trust it, and what next.

    `journal_notes`: what the journal knows beside it. `asked`: what the next command goes on from. `trends`: of the
    sweeps, by device. `padded`: what packed rows are compared with. `evidence`: what others measured near to them. `recorded`: of
    a workload in a recording, what its loader does to the answer, and what may mislead in it.
    """
    trends = trends or {}
    e, trained = rows[0].execution, workload.trainable_parameters
    frozen = "" if trained == workload.parameters else f" ({format_count(trained)} trained)"
    parameters = f"{format_count(workload.parameters)} parameters{frozen}"
    print_lines(
        f"{workload.model}: {parameters}, {samples_of(rows, workload.sample)}, {e.precision},"
        f" {workload.optimizer_in_words}"
    )
    done = [row for row in rows if row.step is not None]
    print_verdict(*verdict(rows, trends))
    print_lines(*recorded, *[""] * bool(recorded))
    shown = _deciding(rows, trends)
    priced = any(row.training_time is not None for row in rows)
    # memory matters less where money is asked for, and utilisation least
    several = bool(lengths_of(rows))
    columns = [
        words("GPU"),
        *([Column("tokens")] if several else []),
        Column("batch"),
        Column("step ms"),
        Column("90 % interval", 1),
        Column("tokens/s" if several else "samples/s", 5),
        Column("GiB", 4),
        words("fits", 3, least=3),
        Column("MFU", 6),
        *([Column("largest batch", 2)] if several else []),
        *([Column("training"), Column("cost")] if priced else []),
    ]
    best = [best_of(swept) for swept in sweep_charts.by_device(rows).values()]
    keep = (
        [i for i, row in enumerate(shown) if any(row is one for one in best)]
        if len(best) < MOST_KEPT
        else []
    )
    if len(rows) > 1 or not is_brief():
        print_table(columns, [_cells(row, priced, several) for row in shown], keep=keep)
    elif fits_alone := next((row for row in done if row.fits is not False), None):
        print_lines(_in_a_line(fits_alone), "")
    else:
        print_lines("")
    print_padded(padded)
    if len(shown) < len(rows) and not is_brief():
        print_lines(
            f"The table has {len(shown)} of {len(rows)} batch sizes; the plot and --json have all.",
            "",
        )
    if len(done) == 1:
        print_breakdown(done[0])
    if not several:
        _print_sweeps(rows, jumps or {}, trends)
    for reason in dict.fromkeys(
        row.reason for row in rows if row.reason and (done or not is_brief())
    ):
        print_lines(f"Not forecast: {reason}")
    if len(rows) <= MOST_WARNINGS:
        warned = (f"{r.device}, {sizes(r, several)}: {w}" for r in done for w in r.warnings[:1])
        print_lines(*(f"Warning: {warning}." for warning in dict.fromkeys(warned)))
    if done:
        if not several:  # which have a column of it
            with in_details("the largest batches that fit"):
                _print_largest(done)
        assumed = dict.fromkeys(
            assumed_in_words(f.training_time.assumed) for f in done if f.training_time
        )
        sources = sweep_charts.sources(done)
        trust = (
            f"A forecast, not a measurement: from {sources}. The interval should hold in 9 of 10"
            " cases."
        )
        taken = (
            *journal_notes,
            *assumed,
            *assumed_hosts(done),
            *software_lines(done),
            *taken_for_granted(done),
        )
        print_notes(trust, *taken, *(nearest_in_brief(evidence) if is_brief() else ()))
        with in_details("measurements by others"):
            print_evidence(evidence)
        if not padded:  # no other command packs rows
            print_next_after_forecast(done, workload, asked)


def _in_a_line(f: Forecast) -> str:
    """What a table of one row has beside the verdict."""
    capacity = "" if f.capacity_gib is None else f" of {number(f.capacity_gib)}"
    memory = "" if f.memory is None else f", {number(f.memory.allocated_gib)}{capacity} GiB"
    return f"{sentence(place(f))}{memory}{'' if f.mfu is None else f', MFU {percent(f.mfu)}'}."


def verdict(
    rows: Sequence[Forecast], trends: Mapping[str, Trend] | None = None
) -> tuple[str, bool | None]:
    """The answer in a sentence or three, and False where it is no."""
    done = [row for row in rows if row.step is not None]
    fitting = [row for row in done if row.fits is not False]
    if not done:
        return f"No forecast is possible. {sentence(rows[0].reason)}", False
    if not fitting:
        return _misfit(done), False
    if lengths_of(rows):
        return lengths_verdict(fitting) + _cheapest_token(fitting), None
    if len(fitting) == 1 == len(rows):
        return _only(fitting[0]), None
    if fitting[0].cost_usd is not None:
        cheap, fast = min(fitting, key=lambda f: f.cost_usd or 0.0), min(fitting, key=_seconds)
        fastest = "" if cheap is fast else f" Fastest: {_where(fast)}, {_job(fast)}."
        return f"Cheapest: {_where(cheap)}, {_job(cheap)}.{fastest}", None
    best = best_of(fitting) or fitting[0]
    rate = rate_in_words(best.samples_per_second, best.sequence_length)
    trend = (trends or {}).get(best.device)
    enough = ""
    if trend is not None and trend.knee_batch < best.execution.micro_batch == trend.best_batch:
        enough = f" Batch {trend.knee_batch:,} is {knee(trend)}."
    return (
        f"Fastest option that fits: {_where(best)}, {rate}. A step takes {_step(best)}.{enough}",
        None,
    )


def _cheapest_token(fitting: Sequence[Forecast]) -> str:
    """Of as many samples, longer ones have more tokens: what is cheapest as a whole is merely the shortest."""
    if fitting[0].cost_usd is None:
        return ""
    cheap = min(fitting, key=lambda f: (f.cost_usd or 0.0) / (f.sequence_length or 1))
    return (
        f" A token costs least with {cheap.sequence_length:,} tokens: {place(cheap)}, {_job(cheap)}"
        " in all."
    )


def _only(f: Forecast) -> str:
    fits = "" if f.fits is None else " It fits in memory."
    if f.fit_probability is not None and f.fits and f.fit_probability < SURE:
        fits = f" It fits in memory with a probability of {percent(f.fit_probability)}."
    answer = (
        f"A step takes {_step(f)}: {rate_in_words(f.samples_per_second, f.sequence_length)}.{fits}"
    )
    if f.training_time is None:
        return answer
    parts = {
        "data loading": f.training_time.data_wait_s,
        "evaluation": f.training_time.evaluation_s,
    }
    missing = " and ".join(name for name, seconds in parts.items() if not seconds)
    return (
        f"{answer} The whole training takes {_job(f)}{f', without {missing}' if missing else ''}."
    )


def _job(f: Forecast) -> str:
    cost = "" if f.cost_usd is None else f" for {usd(f.cost_usd)}"
    return f"{duration(_seconds(f))}{bracketed(f.training_time_interval_s, duration)}{cost}"


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
        return f"No: it does not fit in memory. {_where(f)} {need}"
    return f"No: none of them fits in memory. The closest, {_where(f)}, {need}"


def _step(f: Forecast) -> str:
    assert f.step is not None
    return (
        f"{number(f.step.total_ms)}"
        f" ms{bracketed(f.step_time_interval_ms, after=' in 9 of 10 cases')}"
    )


def _where(f: Forecast) -> str:
    return place(f)


def fleet(f: Forecast) -> str:
    return devices(f.num_devices, f.device)


def device_and_batch(f: Forecast) -> str:
    return f"{fleet(f)}, batch {f.execution.micro_batch}"


def _seconds(f: Forecast) -> float:
    return 0.0 if f.training_time is None else f.training_time.total_s


def _deciding(rows: Sequence[Forecast], trends: Mapping[str, Trend]) -> list[Forecast]:
    """All of a few; of many the ends, the powers of two, the best, the smallest that is nearly as good, the largest that fits."""
    kinds = dict.fromkeys((row.device, row.sequence_length) for row in rows)
    groups = [[row for row in rows if (row.device, row.sequence_length) == kind] for kind in kinds]
    if max(map(len, groups)) <= MOST_ROWS:
        return list(rows)
    shown: list[Forecast] = []
    for swept in groups:
        sizes = {2**i for i in range(31)} | {
            swept[0].execution.micro_batch,
            swept[-1].execution.micro_batch,
        }
        fitting = [row for row in swept if row.step is not None and row.fits is not False]
        sizes |= {
            row.execution.micro_batch for row in (best_of(swept), *fitting[-1:]) if row is not None
        }
        sizes |= {trends[swept[0].device].knee_batch} if swept[0].device in trends else set()
        shown += [row for row in swept if row.execution.micro_batch in sizes]
    return shown


def _print_largest(done: Sequence[Forecast]) -> None:
    largest = {
        fleet(row): row.largest_micro_batch for row in done if row.largest_micro_batch is not None
    }
    fits = [f"{batch:,} on {name}" for name, batch in largest.items() if batch]
    if fits:
        print_lines(f"Largest batch per GPU that fits: {', '.join(fits)}.")
    none = [name for name, batch in largest.items() if not batch]
    if none:
        print_lines(f"Not even one sample fits on {', '.join(none)}.")


def _print_sweeps(
    rows: Sequence[Forecast], jumps: Mapping[str, Sequence[Jump]], trends: Mapping[str, Trend]
) -> None:
    for name, swept in sweep_charts.by_device(rows).items():
        points = [(f.execution.micro_batch, f.step.total_ms) for f in swept if f.step is not None]
        if len(points) < sweep_charts.FEWEST_FOR_A_PLOT:
            continue
        here = jumps.get(name, ())
        title = f"{name}: step time in ms over the batch size{', ▲ after a jump' if here else ''}"
        with in_details("the plot"):
            print_chart((), {jump.batch for jump in here}, title, points)
        if here:
            with in_details("what causes the jumps"):
                print_lines(
                    *jumps_in_words(
                        here, {f.execution.micro_batch: f.samples_per_second for f in swept}
                    )
                )
            if is_brief():
                print_lines(f"{name}: {jumps_in_brief(here)}")
        elif name in jumps:
            batches = [f.execution.micro_batch for f in swept]
            if is_brief() and is_whole(batches):
                print_lines(f"{name}: no jumps.")
            else:
                print_lines(no_jumps(batches, trends.get(name)))
        else:
            print_lines(
                "Jumps are not forecast here; trainpace measure finds those of this machine."
            )
        if name in trends:
            with in_details("whether the step time is linear"):
                print_lines(*trend_in_words(trends[name]))


def _cells(f: Forecast, priced: bool, several: bool) -> list[str]:
    cells = [
        fleet(f),
        *([f"{f.sequence_length:,}"] if several else []),
        f"{f.execution.micro_batch:,}",
        "-" if f.step is None else number(f.step.total_ms),
        interval(f.step_time_interval_ms),
        number(f.tokens_per_second if several else f.samples_per_second),
        "-" if f.memory is None else number(f.memory.allocated_gib),
        {None: "?", True: "yes", False: "NO"}[f.fits],
        percent(f.mfu),
        *([number(f.largest_micro_batch)] if several else []),
    ]
    training = None if f.training_time is None else f.training_time.total_s
    return [*cells, duration(training), usd(f.cost_usd)] if priced else cells


def forecast_page(answer: Forecasts) -> str:
    """Return the page as text."""
    groups, jumps, trends = answer.sweeps, answer.jumps, answer.trends
    journal_notes, padded = answer.notes, answer.padded
    evidence, recorded = answer.evidence, answer.recorded
    rows = list(answer.rows)
    workload, first, best = groups[0].forecaster.workload, rows[0], best_of(rows)
    e = first.execution
    optimizer = workload.optimizer_in_words
    accumulated = f", {e.accumulation} micro-batches a step" if e.accumulation > 1 else ""
    priced = any(row.training_time is not None for row in rows)
    return page(
        "forecast.html",
        f"{workload.model}: {'how long training takes' if priced else 'how long a step takes'}",
        [
            verdict(rows, trends)[0],
            *recorded,
            *_trust(best),
            *_swept(best, jumps, trends),
            *packing_in_words(padded),
            *journal_notes,
        ],
        forecast_pictures(groups, jumps, evidence),
        answer.as_json(),
        best is not None,
        f"{format_count(workload.parameters)} parameters, {samples_of(rows, workload.sample)},"
        f" {e.precision}, {optimizer}{accumulated}.",
        several=bool(lengths_of(rows)),
        rows=rows,
        best=best,
        heaviest=best or first,
        heaviest_on=device_and_batch(best or first),
        priced=priced,
        fleet=fleet,
        evidence=evidence_rows(evidence),
        reasons=[
            f"Not forecast: {reason}"
            for reason in dict.fromkeys(row.reason for row in rows if row.reason)
        ],
    )


def forecast_pictures(
    groups: Sequence[Sweep], jumps: Mapping[str, Sequence[Jump]], evidence: Sequence[Nearness] = ()
) -> list[Picture | None]:
    """The most telling first."""
    rows = [row for group in groups for row in group.rows]
    over_lengths = lengths_chart(rows)
    pictures: list[Picture | None] = [
        over_lengths or sweep_charts.forecast_sweep(rows, jumps, evidence)
    ]
    bests = [
        (g, best_of(g.rows) or next((r for r in g.rows if r.step is not None), None))
        for g in groups
    ]
    shown = [(group, f) for group, f in bests if f is not None]
    if shown:
        forecasts = [f for _, f in shown]
        many = over_lengths is not None
        bars = [(f"{fleet(f)}, {sizes(f, many)}", f) for f in forecasts[:MOST_BARS]]
        note = sweep_charts.provenance(forecasts)
        best = best_of(forecasts)
        pictures += step_charts.step_and_memory(bars, note)
        pictures += _inside(*next((pair for pair in shown if pair[1] is best), shown[0]))
    return pictures


def _inside(group: Sweep, best: Forecast) -> list[Picture | None]:
    """On the best cluster alone: what happens within a step, and on fewer devices."""
    assert best.step is not None
    where = device_and_batch(best)
    pictures: list[Picture | None] = [
        step_charts.step_gantt(best, where),
        step_charts.role_chart(best, where),
    ]
    form = group.forecaster.workload.form(best.execution.precision)
    memory = (
        None
        if best.memory is None
        else memory_over_step(form, best.execution, best.step, best.memory)
    )
    if memory is not None:
        n = best.execution.accumulation
        ends = best.step.forward_ms / n, (best.step.forward_ms + best.step.backward_ms) / n
        pictures.append(step_charts.memory_chart(memory, best.capacity_gib, ends))
    roofs = group.forecaster.roofline(best.execution)
    if roofs is not None:
        pictures.append(
            step_charts.roofline_chart(roofs, f"{best.device}, batch {best.execution.micro_batch}")
        )
    if group.forecaster.target.cluster.num_devices > 1:
        pictures.append(sweep_charts.scaling_chart(group.forecaster.fewer_devices(best.execution)))
    return pictures


def _swept(
    best: Forecast | None, jumps: Mapping[str, Sequence[Jump]], trends: Mapping[str, Trend]
) -> list[str]:
    """The jumps and the trend of the best device."""
    if best is None or best.device not in trends:
        return []
    return [*jumps_in_words(jumps.get(best.device, ()), {}), *trend_in_words(trends[best.device])]


def _trust(best: Forecast | None) -> list[str]:
    """Memory, how far to trust the figures, and warnings."""
    if best is None:
        return []
    notes = ["A forecast, not a measurement: the interval should hold in 9 of 10 cases."]
    if best.memory is not None and best.capacity_gib is not None:
        largest = best.largest_micro_batch
        more = "" if largest is None else f" The largest batch that fits is {largest:,}."
        notes.insert(
            0,
            f"It needs {number(best.memory.allocated_gib)} of {number(best.capacity_gib)}"
            f" GiB.{more}",
        )
    warnings = [sentence(f"{warning}.") for warning in best.warnings]
    return (
        notes
        + taken_for_granted([best])
        + assumed_hosts([best])
        + software_lines([best])
        + warnings
    )
