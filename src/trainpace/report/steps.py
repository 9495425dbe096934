"""Charts and sentences about steps.

The module covers sweeps over batch sizes, then sequence lengths and scaling, then the time and
memory inside one step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from trainpace.core.outcome import STEP_PARTS, Forecast, Interval, Jump, Memory, StepTime
from trainpace.core.stats import KNEE, Trend
from trainpace.report.charts import (
    MOST_INTERVAL,
    SERIES_TONES,
    Axis,
    Bar,
    BarChart,
    BarGroup,
    Chart,
    Mark,
    Segment,
    Series,
    bar,
    ideal_line,
    series,
)
from trainpace.report.phrases import bracketed, change, listed, number, plural, sentence

if TYPE_CHECKING:
    from trainpace.forecast import MemoryOverStep, Near, Nearness, Roofline
    from trainpace.measure import SweepAnalysis

BATCH = Axis(label="micro-batch size")
BEYOND = 1.25
"""Length of a curve, as a multiple of the number of batch sizes that fit in memory."""
FEWEST, FEWEST_FOR_A_PLOT = 3, 8
"""Minimum number of batch sizes for a curve, and for a plot in characters."""
PROVENANCE = {
    "measured": "measured",
    "transferred": "earlier measurements of this or of similar runs",
    "calibrated": "this machine's micro-benchmarks",
    "fitted": "datasheet figures and constants fitted on public measurements",
    "datasheet": "datasheet figures",
}


def forecast_sweep(
    rows: Sequence[Forecast], jumps: Mapping[str, Sequence[Jump]], evidence: Sequence[Nearness] = ()
) -> Chart | None:
    """Draw step time over batch size, as a line with its interval for each GPU.

    A single GPU also gets its jumps, and public measurements of the same model (`evidence`). None
    for fewer than three batch sizes.
    """
    groups = list(by_device(rows).items())[: len(SERIES_TONES)]
    curves = {name: _near_what_fits(some) for name, some in groups if len(some) >= FEWEST}
    if not curves:
        return None
    alone = next(iter(curves)) if len(curves) == 1 else None
    lines, marks, findings = [], [], []
    for tone, (name, some) in zip(SERIES_TONES, curves.items(), strict=False):
        prefix = "" if alone else f"{name}: "
        lines.append(_line(name, "forecast" if alone else tone, some, banded=len(curves) < 4))
        best = best_of(some)
        if best is not None and best.step is not None:
            batch, rate = best.execution.micro_batch, number(best.samples_per_second or 0.0)
            text, own = f"{prefix}best throughput that fits", "best" if alone else tone
            marks.append(Mark(axis="point", at=batch, y=best.step.total_ms, text=text, tone=own))
            findings.append(f"{prefix}batch {batch} has the best throughput, {rate} samples/s")
        marks += _memory_limit(some, prefix)
    of_one = () if alone is None else jumps.get(alone, ())
    marks += [_jump_mark(jump) for jump in of_one]
    lines += [] if alone is None else _measured_by_others(curves[alone], evidence)
    where = _where_it_jumps([jump.before for jump in of_one])
    return Chart(
        title="Step time against the batch size",
        finding=sentence(f"{'; '.join(findings) or 'no batch size fits'}.{where}"),
        x=BATCH,
        y=_step_axis(lines),
        series=tuple(lines),
        marks=tuple(marks),
        note=provenance([row for some in curves.values() for row in some]),
    )


SAME = {"the same operators", "the same card"}
_SAME_BUT_FOR = re.compile("Keras|batch [\\d,]+ instead of [\\d,]+")


def _measured_by_others(rows: Sequence[Forecast], evidence: Sequence[Nearness]) -> list[Series]:
    """Return public measurements with the same operators, card and conditions, by batch size."""
    near = [near for n in evidence if n.device == rows[0].device for near in n.runs]
    runs = [one.run for one in near if _is_comparable(one, rows)]
    if not runs or any(f.execution.accumulation > 1 for f in rows):
        return []
    return [
        series(
            "measured by others: the same model on this GPU",
            "points",
            "measured",
            [(run.micro_batch or 0, run.step_time_ms) for run in runs],
            labels=tuple(f"measured by others ({run.model}, {run.source})" for run in runs),
        )
    ]


def _is_comparable(near: Near, rows: Sequence[Forecast]) -> bool:
    """Return True if a run differs only in batch size, and this size lies within the sweep."""
    batch = near.run.micro_batch or 0
    return (
        set(near.alike) >= SAME
        and all(map(_SAME_BUT_FOR.fullmatch, near.unlike))
        and near.run.global_batch == batch * near.run.gpus
        and rows[0].execution.micro_batch <= batch <= rows[-1].execution.micro_batch
    )


def _near_what_fits(rows: Sequence[Forecast]) -> list[Forecast]:
    """Return rows by batch size.

    Sizes far beyond the memory are dropped, because they would flatten the plot.
    """
    ordered = sorted(rows, key=lambda f: f.execution.micro_batch)
    fitting = sum(f.fits is not False for f in ordered)
    return ordered[: max(FEWEST, math.ceil(BEYOND * fitting))] if fitting else ordered


def measured_sweep(
    a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> Chart:
    """Draw a measured sweep.

    It shows measured points with the interval of a repeat, fitted lines, and jumps with their
    forecast causes.
    """
    forecasts = [foreseen[b] for b in sorted(foreseen) if foreseen[b].step is not None]
    shown = (
        [_line("forecast, 90% interval", "forecast", forecasts, banded=True)] if forecasts else []
    )
    segments = [s for s in a.curve.segments if s.first_batch < s.last_batch]
    ends = [(s, batch) for s in segments for batch in (s.first_batch, s.last_batch, None)]
    pieces = [
        (s.last_batch, None) if batch is None else (batch, s.line(batch)) for s, batch in ends
    ]
    shown += [series("fitted", "line", "muted", pieces)] if pieces else []
    steps, spread = [(p.batch, p.step_ms) for p in a.points], [p.interval_ms for p in a.points]
    shown.append(series("measured, 90% of repeats", "points", "measured", steps, spread))
    best = a.best.best
    marks = [
        Mark(
            axis="point",
            at=best.batch,
            y=dict(steps)[best.batch],
            text="best throughput",
            tone="best",
        )
    ]
    for jump in a.curve.jumps:
        text = (
            f"{jump.before} to {jump.after}: {jump.percent:+.0f}%{_cause(jump.cause_among(causes))}"
        )
        marks.append(Mark(axis="x", at=(jump.before + jump.after) / 2, text=text, tone="jump"))
    if a.largest_that_fits is not None:
        marks.append(_out_of_memory(a.largest_that_fits))
    return Chart(
        title="Step time against the batch size",
        finding=(
            f"Batch {best.batch} has the best throughput,"
            f" {number(best.measured_samples_per_second)} samples/s."
        )
        + _where_it_jumps([jump.before for jump in a.curve.jumps]),
        x=BATCH,
        y=_step_axis(shown),
        series=tuple(shown),
        marks=tuple(marks),
        note="Measured on this machine; each point is the median of its probes."
        + (f" {provenance(forecasts, 'The forecast is from')}" if forecasts else ""),
    )


def throughput(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> Chart:
    rates = [
        (b, f.samples_per_second)
        for b, f in sorted(foreseen.items())
        if f.samples_per_second is not None
    ]
    shown = [series("forecast", "line", "forecast", rates, dashed=True)] if rates else []
    shown.append(
        series(
            "measured", "points", "measured", [(p.batch, p.samples_per_second) for p in a.points]
        )
    )
    best, last = a.best.best, a.points[-1]
    rate = best.measured_samples_per_second
    gain = rate / last.samples_per_second - 1
    more = (
        ""
        if best.batch == last.batch or gain < 0.01
        else f", {gain:.0%} more than batch {last.batch}, the largest"
    )
    return Chart(
        title="Throughput against the batch size",
        finding=f"Batch {best.batch} gives {number(rate)} samples/s{more}.",
        x=BATCH,
        y=Axis(label="throughput", unit="samples/s", low=0),
        series=tuple(shown),
        marks=(Mark(axis="point", at=best.batch, y=rate, text=f"batch {best.batch}", tone="best"),),
    )


def scaling_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Draw throughput over the number of devices, at the same micro-batch.

    None for fewer than two forecasts.
    """
    done = sorted(
        (f for f in rows if f.samples_per_second is not None), key=lambda f: f.num_devices
    )
    if len(done) < 2:
        return None
    points = [(f.num_devices, f.samples_per_second or 0.0) for f in done]
    bounds = []
    for f in done:
        i, samples = f.step_time_interval_ms, 1e3 * f.execution.global_batch
        bounds.append(None if i is None else replace(i, low=samples / i.high, high=samples / i.low))
    (fewest, slowest), (most, fastest) = points[0], points[-1]

    def share(n: int, rate: float) -> float:
        return rate / (slowest / fewest * n)

    def said(point: tuple[int, float]) -> str:
        return f"forecast, efficiency {share(*point):.0%}"

    efficiency = share(most, fastest)
    return Chart(
        title="Scaling over devices",
        finding=(
            f"{most} devices give {number(fastest)} samples/s, {efficiency:.0%} of {most // fewest}"
            f" times the throughput of {'one' if fewest == 1 else fewest}."
        ),
        x=Axis(label="devices", scale="log2"),
        y=Axis(label="throughput", unit="samples/s", scale="log2"),
        series=(
            ideal_line((n, slowest / fewest * n) for n, _ in points),
            series("forecast, 90% interval", "line", "forecast", points, bounds),
            series(
                "forecast, with its efficiency",
                "points",
                "forecast",
                points,
                labels=tuple(map(said, points)),
            ),
        ),
        marks=tuple(
            Mark(axis="point", at=n, y=rate, text=f"{share(n, rate):.0%}", tone="forecast")
            for n, rate in points[1:]
        ),
        note=(
            "The same micro-batch on every device, so that the global batch grows with them."
            f" {provenance(done)}"
        ),
    )


def by_device(rows: Sequence[Forecast]) -> dict[str, list[Forecast]]:
    """Group the rows that have a forecast by device."""
    able = [row for row in rows if row.step is not None]
    return {
        name: [row for row in able if row.device == name]
        for name in dict.fromkeys(row.device for row in able)
    }


def best_of(rows: Sequence[Forecast]) -> Forecast | None:
    """Return the fitting row with the highest throughput, in tokens if samples have tokens."""
    able = [row for row in rows if row.step is not None and row.fits is not False]
    return max(
        able, key=lambda row: row.tokens_per_second or row.samples_per_second or 0.0, default=None
    )


def sources(rows: Sequence[Forecast]) -> str:
    return " and ".join(PROVENANCE[p] for p in dict.fromkeys(row.provenance for row in rows))


def provenance(rows: Sequence[Forecast], start: str = "From") -> str:
    bases = dict.fromkeys(
        f.step_time_interval_ms.basis for f in rows if f.step_time_interval_ms is not None
    )
    intervals = f"; intervals from {', '.join(list(bases)[:3])}" if bases else ""
    return f"{start} {sources(rows)}{intervals}."


def _step_axis(shown: Sequence[Series]) -> Axis:
    """Return an axis from 0. Wide intervals are truncated; they would flatten the curves."""
    top = max((y for s in shown for y in s.y if y is not None), default=1.0)
    band = max((high for s in shown for high in s.high), default=top)
    return Axis(
        label="step time",
        unit="ms",
        low=0,
        high=MOST_INTERVAL * top if band > MOST_INTERVAL * top else None,
    )


def _line(name: str, tone: str, rows: Sequence[Forecast], banded: bool) -> Series:
    intervals = [f.step_time_interval_ms for f in rows]
    if banded and None not in intervals and "interval" not in name:
        name = f"{name}, forecast with its 90% interval"
    steps = [(f.execution.micro_batch, f.step.total_ms) for f in rows if f.step is not None]
    return series(name, "line", tone, steps, intervals if banded else (), dashed=tone == "forecast")


def _memory_limit(some: Sequence[Forecast], prefix: str) -> list[Mark]:
    largest = some[-1].largest_micro_batch
    if largest is None or largest >= some[-1].execution.micro_batch:
        return []
    return [_out_of_memory(largest, prefix)]


def _out_of_memory(largest: int, prefix: str = "") -> Mark:
    return Mark(
        axis="x", at=largest + 0.5, text=f"{prefix}out of memory after {largest}", tone="limit"
    )


def _jump_mark(jump: Jump) -> Mark:
    ratio = jump.after_ms / jump.before_ms
    text = f"{jump.before} to {jump.batch}: {change(ratio)}{_cause(jump)}"
    return Mark(axis="x", at=(jump.before + jump.batch) / 2, text=text, tone="jump")


def _cause(jump: Jump | None) -> str:
    """Return the cause of a jump in two or three words, after a comma."""
    return f", {jump.mechanism}" if jump is not None and jump.mechanism else ""


def _where_it_jumps(batches: Sequence[int]) -> str:
    """Name the first six jumps in a sentence."""
    return f" The step jumps after batch {listed(batches, 6)}." if batches else ""


def lengths_of(rows: Sequence[Forecast]) -> tuple[int, ...]:
    """Return the sequence lengths of the rows, shortest first. () if there is only one."""
    lengths = sorted({row.sequence_length for row in rows if row.sequence_length is not None})
    return tuple(lengths) if len(lengths) > 1 else ()


def lengths_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Draw tokens/s over the sequence length, each at the best batch that fits.

    There is one line for each GPU on which something fits. If there are more GPUs than tones, the
    note names the rest. None for fewer than two lengths.
    """
    if not lengths_of(rows):
        return None
    lines, marks, findings, drawn = [], [], [], []
    for name, some in by_device(rows).items():
        bests = [
            best_of([f for f in some if f.sequence_length == length]) for length in lengths_of(some)
        ]
        points = [
            (f.sequence_length or 0, f.tokens_per_second or 0.0) for f in bests if f is not None
        ]
        drawn += [(name, points, len(points) < len(bests))] if points else []
    for tone, (name, points, ends) in zip(SERIES_TONES, drawn, strict=False):
        lines.append(series(name, "line", tone, points))
        (longest, rate), fastest = points[-1], max(rate for _, rate in points)
        findings.append(
            f"{name}: {number(rate)} tokens/s at {longest:,} tokens, of {number(fastest)} at most"
        )
        if ends:
            marks.append(
                Mark(axis="x", at=longest, text=f"{name}: longest that fits", tone="limit")
            )
    if not lines:
        return None
    left_out = [name for name, *_ in drawn[len(lines) :]]
    said = f" Not drawn: {', '.join(left_out)}." if left_out else ""
    return Chart(
        title="Throughput against the sequence length",
        finding=sentence(f"{'; '.join(findings)}."),
        x=Axis(label="sequence length", unit="tokens", scale="log2"),
        y=Axis(label="throughput", unit="tokens/s", low=0),
        series=tuple(lines),
        marks=tuple(marks),
        note=provenance(rows) + said,
    )


MOST_JUMPS = 6
"""Maximum number of jumps that are described one by one."""
ROUNDS_TO_1 = 0.99995


def jumps_in_words(jumps: Sequence[Jump], rates: Mapping[int, float | None]) -> list[str]:
    """Describe each jump with its cause and better sizes. `rates` is samples/s by batch size."""
    lines = [_jump_in_words(jump, rates) for jump in jumps[:MOST_JUMPS]]
    others = [str(jump.before) for jump in jumps[MOST_JUMPS:]]
    if others:
        more = f"{plural(len(others), 'more jump')}, after batch {', '.join(others)}"
        lines.append(f"{more}; --json has the causes of each.")
    return lines


def jumps_in_brief(jumps: Sequence[Jump]) -> str:
    """Describe the position and size of the jumps in one sentence."""
    shown = [
        f"{jump.before:,} (+{100 * jump.excess_ms / jump.before_ms:.1f}%)"
        for jump in jumps[:MOST_JUMPS]
    ]
    more = f" and {len(jumps) - MOST_JUMPS} more" if len(jumps) > MOST_JUMPS else ""
    return (
        f"a step jumps after batch {', '.join(shown)}{more}, beyond what one more sample usually"
        " costs."
    )


def _jump_in_words(jump: Jump, rates: Mapping[int, float | None]) -> str:
    def rate(batch: int, unit: str = "") -> str:
        known = rates.get(batch)
        return "" if known is None else f" ({number(known)}{unit})"

    causes = "".join(
        f" {'Also' if i else 'Cause'}: {cause}." for i, cause in enumerate(jump.causes)
    )
    good = jump.next_good
    onward = (
        f"the next good batch size is {good or 0:,}"
        if good
        else "no larger size of the sweep that fits does as well"
    )
    # If the step time hardly grows at all, the size after a jump may still be better.
    pays = jump.before / jump.before_ms > jump.batch / jump.after_ms
    before, after = (
        f"batch {jump.before:,}{rate(jump.before, ' samples/s')}",
        f"{jump.batch:,}{rate(jump.batch)}",
    )
    advice = (
        f"Better than {after}: {before}"
        if pays
        else f"Throughput at {after} is still that of {before}"
    )
    added = jump.batch - jump.before
    where, usual = f"after batch {jump.before:,}", "one more sample usually costs"
    if added > 1:
        where, usual = (
            f"between batch {jump.before:,} and {jump.batch:,}",
            f"{added:,} more samples usually cost",
        )
    return (
        f"Jump {where}: from {number(jump.before_ms)} to {number(jump.after_ms)} ms at batch"
        f" {jump.batch:,}, {number(jump.excess_ms)} ms ({100 * jump.excess_ms / jump.before_ms:.1f}"
        f"%) more than {usual}.{causes} {advice}; {onward}{rate(good or 0)}."
    )


def is_whole(batches: Sequence[int]) -> bool:
    """Return True if every batch size between the ends is present."""
    return batches[-1] - batches[0] < len(batches)


def no_jumps(batches: Sequence[int], trend: Trend | None) -> str:
    """Describe a forecast curve without jumps."""
    first, last = batches[0], batches[-1]
    if not is_whole(batches):
        return f"No jumps at these batch sizes. --batch {first}:{last} checks every size."
    steps = (
        []
        if trend is None
        else [f"{100 * share:.1f}% after batch {before}" for before, share in trend.uneven]
    )
    most = f" The largest steps beyond the usual: {', '.join(steps)}." if steps else ""
    return (
        "No jumps: nowhere does one more sample cost three times what it costs around it, and 2%"
        f" of the step.{most}"
    )


def trend_in_words(t: Trend) -> list[str]:
    """Describe the shape of the step time over batch size, and where throughput stops growing."""
    best = (
        f"Throughput is best at batch {t.best_batch:,} ({number(t.best_samples_per_second)}"
        " samples/s)"
    )
    if t.knee_batch == t.best_batch:
        return [shape_in_words(t), f"{best}; every smaller batch has over {100 * KNEE:.0f}% less."]
    return [
        shape_in_words(t),
        f"{best} and hardly grows from batch {t.knee_batch:,} on, {knee(t)}.",
    ]


def shape_in_words(t: Trend) -> str:
    """Describe if the step time is linear, and how well a line fits."""
    line, parabola, cubic = (f"{100 * error:.1f}%" for error in t.mean_errors)
    shape = {"none of these": "neither linear nor quadratic nor cubic"}.get(t.shape, t.shape)
    r_squared = f"{t.r_squared:.4f}" if t.r_squared < ROUNDS_TO_1 else "over 0.9999"
    return (
        f"Step time over batch {t.first_batch:,} to {t.last_batch:,} is {shape}. Fitted line:"
        f" {number(t.fixed_ms)} ms + {number(t.ms_per_sample)} ms per sample (R² {r_squared}), {line}"
        f" off on average and {100 * abs(t.worst_error):.0f}% at most, at batch {t.worst_batch:,};"
        f" a quadratic curve is {parabola} off, a cubic one {cubic}."
    )


def knee(t: Trend) -> str:
    """Describe the smallest batch size with nearly the best throughput."""
    return (
        f"the smallest within {100 * KNEE:.0f}% of it ({number(t.knee_samples_per_second)}"
        " samples/s)"
    )


MOST_NAMED = 4
_NAMES = {
    "communication_ms": "exposed communication",
    "data_wait_ms": "waiting for data",
    "host_to_device_ms": "copies to the device",
}
_TONES = {"data_wait_ms": "data"}


class Timed(NamedTuple):
    """A step with its name and interval. Bars of the same group are compared with each other."""

    group: str
    label: str
    step: StepTime
    interval: Interval | None = None


def step_breakdown(steps: Sequence[Timed], note: str = "") -> BarChart | None:
    """Draw the parts of steps in groups, with the fastest step of each group first.

    None if there are no steps.
    """
    if not steps:
        return None
    groups: dict[str, list[Bar]] = {timed.group: [] for timed in steps}
    for timed in sorted(steps, key=lambda timed: timed.step.total_ms):
        parts = [
            (part_words(p), _TONES.get(p, p.removesuffix("_ms")), getattr(timed.step, p))
            for p in STEP_PARTS
        ]
        end = f"{number(timed.step.total_ms)} ms{bracketed(timed.interval)}"
        groups[timed.group].append(bar(timed.label, end, parts, timed.interval))
    fastest = min(steps, key=lambda timed: timed.step.total_ms)
    part = max(STEP_PARTS, key=lambda name: getattr(fastest.step, name))
    share = getattr(fastest.step, part) / fastest.step.total_ms
    name = f"{', '.join(filter(None, (fastest.group, fastest.label)))}: " if len(steps) > 1 else ""
    return BarChart(
        title="Where a step's time goes",
        finding=sentence(
            f"{name}{part_words(part)} takes the largest part of the step, {share:.0%}."
        ),
        label="step time",
        unit="ms",
        groups=tuple(BarGroup(title=name, bars=tuple(bars)) for name, bars in groups.items()),
        one_scale=len(groups) == 1,
        note=note,
    )


LEAST_WAIT = 0.01
MOST_DRAWN = 8
"""Maximum number of micro-steps that a Gantt chart draws one by one. More are drawn as one pass."""


def step_gantt(f: Forecast, where: str) -> BarChart | None:
    """Draw when data loading, host, device and links work in a step.

    None if the device hardly waits.
    """
    if f.step is None:
        return None
    step, m = f.step, f.execution.accumulation if f.execution.accumulation <= MOST_DRAWN else 1
    rows: dict[str, list[Segment]] = {"data": [], "links": [], "host": [], "device": []}
    at = 0.0

    def then(row: str, part: str, ms: float) -> None:
        nonlocal at
        if ms > 0:
            tone = _TONES.get(part, part.removesuffix("_ms"))
            rows[row].append(Segment(name=part_words(part), tone=tone, value=ms, at=at))
            at += ms

    then("data", "data_wait_ms", step.data_wait_ms)
    for _ in range(m):
        then("links", "host_to_device_ms", step.host_to_device_ms / m)
        then("host", "host_overhead_ms", step.host_overhead_ms / m)
        then("device", "forward_ms", step.forward_ms / m)
        then("device", "backward_ms", step.backward_ms / m)
    then("links", "communication_ms", step.communication_ms)
    then("device", "optimizer_ms", step.optimizer_ms)
    then("device", "idle_ms", step.idle_ms)
    shown = {row: parts for row, parts in rows.items() if parts}
    busy = {row: sum(s.value for s in parts if s.tone != "idle") for row, parts in shown.items()}
    waits = 1 - busy.get("device", 0.0) / step.total_ms
    if len(shown) < 2 or waits < LEAST_WAIT:
        return None
    return BarChart(
        title="A step over data, host, device and links",
        finding=sentence(
            f"on {where} the device computes {1 - waits:.0%} of the step and waits {waits:.0%}."
        ),
        label="time in the step",
        unit="ms",
        groups=(
            BarGroup(
                bars=tuple(
                    Bar(
                        label=row,
                        segments=tuple(parts),
                        said=f"{number(busy[row])} ms ({busy[row] / step.total_ms:.0%})",
                    )
                    for row, parts in shown.items()
                )
            ),
        ),
        note=(
            "Transfers, launches and loading that run beside the device's work are not drawn. The"
            " forecast has the length of each part; its place in the step is schematic."
        ),
    )


LEAST_OF_A_ROLE = 0.01
"""Minimum share of device time for a role to have its own bar."""


def role_chart(f: Forecast, where: str) -> BarChart | None:
    """Draw the device time of layers by role, the longest first.

    None if there is only one role.
    """
    whole = sum(role.time_ms for role in f.roles)
    shown = [role for role in f.roles if role.time_ms >= LEAST_OF_A_ROLE * whole]
    if len(shown) < 2:
        return None
    names = [f"{role.role}{f', {role.layers} layers' if role.layers else ''}" for role in shown]
    bars = [
        bar(
            name,
            f"{number(role.time_ms)} ms ({role.time_ms / whole:.0%})",
            [("device time", "first", role.time_ms)],
        )
        for name, role in zip(names, shown, strict=True)
    ]
    rest = whole - sum(role.time_ms for role in shown)
    small = (
        f" Roles below {LEAST_OF_A_ROLE:.0%} have no bar; together they take {number(rest)} ms."
        if rest > 0
        else ""
    )
    return BarChart(
        title="Device time by the role of layers",
        label="device time in the step",
        unit="ms",
        groups=(BarGroup(bars=tuple(bars)),),
        finding=sentence(
            f"on {where} {names[0]} take {shown[0].time_ms / whole:.0%} of the device's time."
        ),
        note=(
            "Forward and backward passes together; the optimizer counts as a role of its"
            f" own.{small}"
        ),
    )


def part_words(part: str) -> str:
    return _NAMES.get(part, part.removesuffix("_ms").replace("_", " "))


def memory_at_peak(forecasts: Sequence[tuple[str, Forecast]]) -> BarChart | None:
    """Draw peak memory by kind, and the memory that allocator and driver reserve.

    None if there are no forecasts.
    """
    memories = [(name, f.memory, f.capacity_gib) for name, f in forecasts if f.memory is not None]
    if not memories:
        return None
    bars = []
    for name, m, capacity_gib in memories:
        device_has = "" if capacity_gib is None else f" of {number(capacity_gib)}"
        taken = (
            m.device_gib
            if capacity_gib is None
            else min(m.device_gib, max(capacity_gib, m.allocated_gib))
        )
        reserve = ("reserved by allocator and driver", "reserve", max(taken - m.allocated_gib, 0.0))
        bars.append(
            bar(name, f"{number(m.allocated_gib)}{device_has} GiB", [*_kinds_gib(m), reserve])
        )
    name, first, _ = memories[0]
    most, allocated = max(_kinds_gib(first), key=lambda kind: kind[2]), number(first.allocated_gib)
    return BarChart(
        title="Memory at the step's peak",
        finding=sentence(
            f"{name}: {most[0]} take the largest part, {number(most[2])} of {allocated} GiB"
            " allocated."
        ),
        label="memory of one device",
        unit="GiB",
        groups=(BarGroup(bars=tuple(bars)),),
        note="Live tensors hold allocated memory. Grey: reserved by allocator and driver.",
    )


def _kinds_gib(m: Memory) -> list[tuple[str, str, float]]:
    """Return (name, tone, GiB) of each kind of memory at the peak."""
    return [
        ("parameters", "parameters", m.parameters_gib),
        ("gradients", "gradients", m.gradients_gib),
        ("optimizer states", "states", m.optimizer_states_gib),
        ("activations", "activations", m.activations_gib),
    ]


def step_and_memory(
    forecasts: Sequence[tuple[str, Forecast]], note: str = ""
) -> list[BarChart | None]:
    """Draw the parts of the step and the peak memory, for named forecasts."""
    timed = [
        Timed("", name, f.step, f.step_time_interval_ms)
        for name, f in forecasts
        if f.step is not None
    ]
    return [step_breakdown(timed, note), memory_at_peak(forecasts)]


def memory_chart(
    m: MemoryOverStep, capacity_gib: float | None, phase_ends_ms: tuple[float, float]
) -> Chart:
    """Draw memory over the time of a step, by kind.

    `phase_ends_ms` are the ends of the forward and the backward pass.
    """
    at = tuple(map(float, m.at_ms))
    kinds = [
        ("parameters", "parameters", [m.parameters_gib] * len(at)),
        ("optimizer states", "states", [m.optimizer_states_gib] * len(at)),
        ("gradients", "gradients", m.gradients_gib.tolist()),
        ("activations and temporaries", "activations", m.activations_gib.tolist()),
    ]
    areas, below = [], [0.0] * len(at)
    for name, tone, values in kinds:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            areas.append(
                Series(name=name, kind="area", tone=tone, x=at, low=tuple(below), high=tuple(above))
            )
        below = above
    peak = max(range(len(at)), key=below.__getitem__)
    where = ("forward pass", "backward pass", "optimizer update")[
        sum(at[peak] >= end for end in phase_ends_ms)
    ]
    marks = [
        Mark(axis="x", at=phase_ends_ms[0], text="backward pass begins", tone="ideal"),
        Mark(axis="x", at=phase_ends_ms[1], text="update begins", tone="ideal"),
        Mark(
            axis="point",
            at=at[peak],
            y=below[peak],
            text=f"peak: {number(below[peak])} GiB",
            tone="best",
        ),
    ]
    device_has = "" if capacity_gib is None else f"the device has {number(capacity_gib)}"
    if capacity_gib is not None and capacity_gib < MOST_INTERVAL * below[peak]:
        marks.append(Mark(axis="y", at=capacity_gib, text=f"{device_has} GiB", tone="limit"))
    return Chart(
        title="Memory over the step",
        finding=(
            f"Memory peaks in the {where}: {number(below[peak])}"
            f" GiB{device_has and f'; {device_has}'}. At the peak:"
            f" {_owners([(name, values[peak]) for name, _, values in kinds], below[peak])}."
        ),
        x=Axis(label="time in the step", unit="ms", low=0),
        y=Axis(label="memory allocated", unit="GiB", low=0),
        series=tuple(areas),
        marks=tuple(marks),
        note=(
            "From the trace: live tensors at each operator. Times within a phase are estimated from"
            " the bytes moved."
        ),
    )


def _owners(kinds: Sequence[tuple[str, float]], whole: float) -> str:
    """Name the kinds of memory with their shares, the largest first."""
    held = sorted(((gib, name) for name, gib in kinds if gib > 0.005 * whole), reverse=True)
    return ", ".join(f"{name} {number(gib)} GiB ({gib / whole:.0%})" for gib, name in held)


def roofline_chart(r: Roofline, device: str) -> Chart:
    """Draw a roofline chart: operators as points below the limits of bandwidth and arithmetic.

    The size of a point is its share of time.
    """
    ridge = r.peak_tflops * 1e3 / r.bandwidth_gb_per_s
    left = min(ridge / 4, *(p.intensity for p in r.points)) / 1.5
    right = max(ridge * 4, *(p.intensity for p in r.points)) * 1.5
    roof = [(x, min(r.peak_tflops, x * r.bandwidth_gb_per_s / 1e3)) for x in (left, ridge, right)]
    longest = max(p.time_ms for p in r.points)
    shown, tones = (
        [series("roofs of the datasheet", "line", "ideal", roof)],
        {False: "first", True: "second"},
    )
    for computing, limit in ((False, "memory bandwidth"), (True, "compute")):
        operators = [p for p in r.points if (p.intensity >= ridge) is computing]
        if operators:
            shown.append(
                series(
                    f"operators bound by {limit}",
                    "points",
                    tones[computing],
                    [(p.intensity, p.tflops) for p in operators],
                    labels=tuple(f"{p.name}: {number(p.time_ms)} ms" for p in operators),
                    sizes=tuple(p.time_ms / longest for p in operators),
                )
            )
    by_memory = sum(p.time_ms for p in r.points if p.intensity < ridge) / sum(
        p.time_ms for p in r.points
    )
    return Chart(
        title=f"Roofline of {device}",
        finding=(
            f"Of these operators' time, {by_memory:.0%} is bound by memory bandwidth and"
            f" {1 - by_memory:.0%} by compute."
        ),
        x=Axis(label="arithmetic intensity", unit="FLOP/byte", scale="log10"),
        y=Axis(label="rate", unit="TFLOP/s", scale="log10"),
        series=tuple(shown),
        nearest="point",
        marks=tuple(
            Mark(
                axis="point",
                at=p.intensity,
                y=p.tflops,
                text=p.name,
                tone=tones[p.intensity >= ridge],
            )
            for p in r.points[:MOST_NAMED]
        ),
        note=(
            f"The {len(r.points)} heaviest groups of similar operators, {r.share:.0%} of the"
            " device's forecast time; larger points take longer. Roofs of the datasheet:"
            f" {number(r.peak_tflops)} TFLOP/s and {number(r.bandwidth_gb_per_s)} GB/s. Caches, and"
            " algorithms with fewer multiplications (Winograd), can lift a point above a roof."
        ),
    )
