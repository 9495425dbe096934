"""Charts and sentences about steps.

The module covers sweeps over batch sizes, then sequence lengths and scaling, then the time and
memory inside one step.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
    Series,
    bar,
    ideal_line,
    series,
)
from trainpace.report.phrases import bracketed, change, given, listed, number, plural, sentence

if TYPE_CHECKING:
    from trainpace.forecast import MemoryOverStep, Near, Nearness, Roofline, RooflinePoint
    from trainpace.measure import MeasuredJump, SweepAnalysis

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
    if len(curves) == 1:
        ((name, some),) = curves.items()
        shown = jumps.get(name, ())
        lines = [_line(name, "forecast", some), *_measured_by_others(some, evidence)]
        marks, found = _best_and_limit(some, "best")
        for jump in shown:
            text = f"{change(jump.after_ms / jump.before_ms)}{_cause(jump)}"
            marks.append(_jump_mark(jump.before, jump.batch, text))
        findings, where = [found], _where_it_jumps(shown)
    else:
        lines, marks, findings, where = [], [], [], ""
        for tone, (name, some) in zip(SERIES_TONES, curves.items(), strict=False):
            lines.append(_line(name, tone, some, banded=len(curves) < 4))
            more, found = _best_and_limit(some, tone, f"{name}: ")
            marks += more
            findings.append(found)
    return Chart(
        title="Step time against the batch size",
        finding=sentence(f"{'; '.join(findings)}.{where}"),
        x=BATCH,
        y=_step_axis(lines),
        series=lines,
        marks=marks,
        note=provenance([row for some in curves.values() for row in some]),
    )


def _best_and_limit(
    rows: Sequence[Forecast], tone: str, prefix: str = ""
) -> tuple[list[Mark], str]:
    """Return marks for the best batch size and the memory limit, and the finding."""
    marks, finding = [], f"{prefix}no batch size fits"
    best, largest = best_of(rows), rows[-1].largest_micro_batch
    if best is not None and best.step is not None:
        batch, rate = best.execution.micro_batch, number(best.samples_per_second or 0.0)
        text = f"{prefix}best throughput that fits"
        marks.append(Mark("point", batch, text, tone, best.step.total_ms))
        finding = f"{prefix}batch {batch} has the best throughput, {rate} samples/s"
    if largest is not None and largest < rows[-1].execution.micro_batch:
        marks.append(_out_of_memory(largest, prefix))
    return marks, finding


SAME = {"the same operators", "the same card"}
_SAME_BUT_FOR = re.compile("Keras|batch [\\d,]+ instead of [\\d,]+")


def _measured_by_others(rows: Sequence[Forecast], evidence: Sequence[Nearness]) -> list[Series]:
    """Return public measurements with the same operators, card and conditions, by batch size."""
    near = [near for n in evidence if n.device == rows[0].device for near in n.runs]
    runs = [one.run for one in near if _is_comparable(one, rows)]
    points = [(run.micro_batch or 0, run.step_time_ms) for run in runs]
    labels = [f"measured by others ({run.model}, {run.source})" for run in runs]
    name = "measured by others: the same model on this GPU"
    return [series(name, "points", "measured", points, labels=labels)] if runs else []


def _is_comparable(near: Near, rows: Sequence[Forecast]) -> bool:
    """Return True if a run differs only in batch size, and this size lies within the sweep."""
    batch = near.run.micro_batch or 0
    return (
        set(near.alike) >= SAME
        and all(map(_SAME_BUT_FOR.fullmatch, near.unlike))
        and near.run.global_batch == batch * near.run.gpus
        and rows[0].execution.accumulation == 1
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
    shown = [_line("forecast, 90% interval", "forecast", forecasts)] if forecasts else []
    fitted = series("fitted", "line", "muted", _fitted(a))
    shown += [fitted] if fitted.x else []
    steps, spread = [(p.batch, p.step_ms) for p in a.points], [p.interval_ms for p in a.points]
    shown.append(series("measured, 90% of repeats", "points", "measured", steps, spread))
    best = a.best.best
    marks = [Mark("point", best.batch, "best throughput", "best", dict(steps)[best.batch])]
    for jump in a.curve.jumps:
        cause = _cause(jump.cause_among(causes))
        marks.append(_jump_mark(jump.before, jump.after, f"{jump.percent:+.0f}%{cause}"))
    if a.largest_that_fits is not None:
        marks.append(_out_of_memory(a.largest_that_fits))
    source = f" {provenance(forecasts, 'The forecast is from')}" if forecasts else ""
    return Chart(
        title="Step time against the batch size",
        finding=(
            f"Batch {best.batch} has the best throughput,"
            f" {number(best.measured_samples_per_second)} samples/s."
            f"{_where_it_jumps(a.curve.jumps)}"
        ),
        x=BATCH,
        y=_step_axis(shown),
        series=shown,
        marks=marks,
        note=f"Measured on this machine; each point is the median of its probes.{source}",
    )


def _fitted(a: SweepAnalysis) -> Iterator[tuple[float, float | None]]:
    """Yield the ends of each fitted line, followed by a gap."""
    for s in a.curve.segments:
        if s.first_batch < s.last_batch:
            yield s.first_batch, s.line(s.first_batch)
            yield s.last_batch, s.line(s.last_batch)
            yield s.last_batch, None


def throughput(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> Chart:
    rates = [(b, f.samples_per_second) for b, f in sorted(foreseen.items()) if f.step is not None]
    shown = [series("forecast", "line", "forecast", rates, dashed=True)] if rates else []
    points = [(p.batch, p.samples_per_second) for p in a.points]
    shown.append(series("measured", "points", "measured", points))
    best, last = a.best.best, a.points[-1]
    rate = best.measured_samples_per_second
    gain = rate / last.samples_per_second - 1
    more = f", {gain:.0%} more than batch {last.batch}, the largest"
    return Chart(
        title="Throughput against the batch size",
        finding=(
            f"Batch {best.batch} gives {number(rate)} samples/s"
            f"{more if best.batch != last.batch and gain >= 0.01 else ''}."
        ),
        x=BATCH,
        y=Axis("throughput", "samples/s", low=0),
        series=shown,
        marks=[Mark("point", best.batch, f"batch {best.batch}", "best", rate)],
    )


def scaling_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Draw throughput over the number of devices, at the same micro-batch.

    None for fewer than two forecasts.
    """
    done = sorted((f for f in rows if f.step is not None), key=lambda f: f.num_devices)
    if len(done) < 2:
        return None
    points = [(f.num_devices, f.samples_per_second or 0.0) for f in done]
    (fewest, slowest), (most, fastest) = points[0], points[-1]
    efficiency = [f"{rate / (slowest / fewest * n):.0%}" for n, rate in points]
    labels = [f"forecast, efficiency {share}" for share in efficiency]
    return Chart(
        title="Scaling over devices",
        finding=(
            f"{most} devices give {number(fastest)} samples/s, {efficiency[-1]} of {most // fewest}"
            f" times the throughput of {plural(fewest, 'device')}."
        ),
        x=Axis("devices", scale="log2"),
        y=Axis("throughput", "samples/s", "log2"),
        series=[
            ideal_line((n, slowest / fewest * n) for n, _ in points),
            series("forecast, 90% interval", "line", "forecast", points, map(_rates, done)),
            series("forecast, with its efficiency", "points", "forecast", points, labels=labels),
        ],
        marks=[
            Mark("point", n, share, "forecast", rate)
            for share, (n, rate) in zip(efficiency[1:], points[1:], strict=True)
        ],
        note=(
            "The same micro-batch on every device, so that the global batch grows with them."
            f" {provenance(done)}"
        ),
    )


def _rates(f: Forecast) -> Interval | None:
    """Return the interval of the throughput."""
    i, samples = f.step_time_interval_ms, 1e3 * f.execution.global_batch
    return None if i is None else replace(i, low=samples / i.high, high=samples / i.low)


def by_device(rows: Sequence[Forecast]) -> dict[str, list[Forecast]]:
    """Group the rows that have a forecast by device."""
    able = [row for row in rows if row.step is not None]
    return {
        name: [row for row in able if row.device == name]
        for name in dict.fromkeys(row.device for row in able)
    }


def best_of(rows: Sequence[Forecast]) -> Forecast | None:
    """Return the fitting row with the highest throughput, in tokens if samples have tokens."""
    able = [row for row in rows if row.can_run]
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
    highest = max((high for s in shown for high in s.high), default=top)
    most = MOST_INTERVAL * top
    return Axis("step time", "ms", low=0, high=most if highest > most else None)


def _line(name: str, tone: str, rows: Sequence[Forecast], banded: bool = True) -> Series:
    intervals = [f.step_time_interval_ms for f in rows]
    if banded and None not in intervals and "interval" not in name:
        name = f"{name}, forecast with its 90% interval"
    steps = [(f.execution.micro_batch, f.step.total_ms) for f in rows if f.step is not None]
    return series(name, "line", tone, steps, intervals if banded else (), dashed=tone == "forecast")


def _out_of_memory(largest: int, prefix: str = "") -> Mark:
    return Mark("x", largest + 0.5, f"{prefix}out of memory after {largest}", "limit")


def _jump_mark(before: int, after: int, text: str) -> Mark:
    return Mark("x", (before + after) / 2, f"{before} to {after}: {text}", "jump")


def _cause(jump: Jump | None) -> str:
    """Return the cause of a jump in two or three words, after a comma."""
    return f", {jump.mechanism}" if jump is not None and jump.mechanism else ""


def _where_it_jumps(jumps: Sequence[Jump] | Sequence[MeasuredJump]) -> str:
    """Name the first six jumps in a sentence."""
    batches = listed((jump.before for jump in jumps), 6)
    return given(batches, " The step jumps after batch {}.")


def lengths_of(rows: Sequence[Forecast]) -> tuple[int, ...]:
    """Return the sequence lengths of the rows, shortest first. () if there is only one."""
    lengths = sorted({row.sequence_length for row in rows if row.sequence_length is not None})
    return tuple(lengths) if len(lengths) > 1 else ()


def lengths_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Draw tokens/s over the sequence length, each at the best batch that fits.

    There is one line for each GPU on which something fits. If there are more GPUs than tones, the
    note names the rest. None for fewer than two lengths.
    """
    lengths = lengths_of(rows)
    curves = [(name, _by_length(some, lengths)) for name, some in by_device(rows).items()]
    drawn = [curve for curve in curves if curve[1]]
    if not drawn:
        return None
    lines, marks, findings = [], [], []
    for tone, (name, points) in zip(SERIES_TONES, drawn, strict=False):
        lines.append(series(name, "line", tone, points))
        (longest, rate), fastest = points[-1], max(rate for _, rate in points)
        findings.append(
            f"{name}: {number(rate)} tokens/s at {longest:,} tokens, of {number(fastest)} at most"
        )
        if longest < lengths[-1]:
            marks.append(Mark("x", longest, f"{name}: longest that fits", "limit"))
    left_out = ", ".join(name for name, _ in drawn[len(lines) :])
    return Chart(
        title="Throughput against the sequence length",
        finding=sentence(f"{'; '.join(findings)}."),
        x=Axis("sequence length", "tokens", "log2"),
        y=Axis("throughput", "tokens/s", low=0),
        series=lines,
        marks=marks,
        note=f"{provenance(rows)}{given(left_out, ' Not drawn: {}.')}",
    )


def _by_length(rows: Sequence[Forecast], lengths: Sequence[int]) -> list[tuple[int, float]]:
    """Return tokens/s at the best batch size of each sequence length on which something fits."""
    bests = ((n, best_of([f for f in rows if f.sequence_length == n])) for n in lengths)
    return [(n, best.tokens_per_second or 0.0) for n, best in bests if best is not None]


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
        return given(number(rates.get(batch), ""), f" ({{}}{unit})")

    causes = "".join(
        f" {'Also' if i else 'Cause'}: {cause}." for i, cause in enumerate(jump.causes)
    )
    onward = "no larger size of the sweep that fits does as well"
    if jump.next_good:
        onward = f"the next good batch size is {jump.next_good:,}{rate(jump.next_good)}"
    # If the step time hardly grows at all, the size after a jump may still be better.
    pays = jump.before / jump.before_ms > jump.batch / jump.after_ms
    advice = "Better than {}: {}" if pays else "Throughput at {} is still that of {}"
    before = f"batch {jump.before:,}{rate(jump.before, ' samples/s')}"
    advice = advice.format(f"{jump.batch:,}{rate(jump.batch)}", before)
    added = jump.batch - jump.before
    where, usual = f"after batch {jump.before:,}", "one more sample usually costs"
    if added > 1:
        where = f"between batch {jump.before:,} and {jump.batch:,}"
        usual = f"{added:,} more samples usually cost"
    return (
        f"Jump {where}: from {number(jump.before_ms)} to {number(jump.after_ms)} ms at batch"
        f" {jump.batch:,}, {number(jump.excess_ms)} ms ({100 * jump.excess_ms / jump.before_ms:.1f}"
        f"%) more than {usual}.{causes} {advice}; {onward}."
    )


def is_whole(batches: Sequence[int]) -> bool:
    """Return True if every batch size between the ends is present."""
    return batches[-1] - batches[0] < len(batches)


def no_jumps(batches: Sequence[int], trend: Trend | None) -> str:
    """Describe a forecast curve without jumps."""
    first, last = batches[0], batches[-1]
    if not is_whole(batches):
        return f"No jumps at these batch sizes. --batch {first}:{last} checks every size."
    uneven = trend.uneven if trend else ()
    steps = ", ".join(f"{100 * share:.1f}% after batch {before}" for before, share in uneven)
    most = given(steps, " The largest steps beyond the usual: {}.")
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
    end = f" and hardly grows from batch {t.knee_batch:,} on, {knee(t)}."
    if t.knee_batch == t.best_batch:
        end = f"; every smaller batch has over {100 * KNEE:.0f}% less."
    return [shape_in_words(t), f"{best}{end}"]


def shape_in_words(t: Trend) -> str:
    """Describe if the step time is linear, and how well a line fits."""
    line, parabola, cubic = (f"{100 * error:.1f}%" for error in t.mean_errors)
    shape = {"none of these": "neither linear nor quadratic nor cubic"}.get(t.shape, t.shape)
    r_squared = f"{t.r_squared:.4f}" if t.r_squared < ROUNDS_TO_1 else "over 0.9999"
    return (
        f"Step time over batch {t.first_batch:,} to {t.last_batch:,} is {shape}. Fitted line:"
        f" {number(t.fixed_ms)} ms + {number(t.ms_per_sample)} ms per sample (R² {r_squared}),"
        f" {line} off on average and {100 * abs(t.worst_error):.0f}% at most, at batch"
        f" {t.worst_batch:,}; a quadratic curve is {parabola} off, a cubic one {cubic}."
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
    "own_code_ms": "own code, evaluation, checkpoints",
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
        groups=[BarGroup(bars, name) for name, bars in groups.items()],
        one_scale=len(groups) == 1,
        note=note,
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
        of = given(number(capacity_gib, ""), " of {}")
        room = m.device_gib if capacity_gib is None else capacity_gib
        reserved = max(min(m.device_gib, room) - m.allocated_gib, 0.0)
        parts = [*_kinds_gib(m), ("reserved by allocator and driver", "reserve", reserved)]
        bars.append(bar(name, f"{number(m.allocated_gib)}{of} GiB", parts))
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
        groups=[BarGroup(bars)],
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
    at = list(map(float, m.at_ms))
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
            areas.append(Series(name, "area", tone, at, low=below, high=above))
        below = above
    peak = max(range(len(at)), key=below.__getitem__)
    phases = ("forward pass", "backward pass", "optimizer update")
    where = phases[sum(at[peak] >= end for end in phase_ends_ms)]
    marks = [
        Mark("x", phase_ends_ms[0], "backward pass begins", "ideal"),
        Mark("x", phase_ends_ms[1], "update begins", "ideal"),
        Mark("point", at[peak], f"peak: {number(below[peak])} GiB", "best", below[peak]),
    ]
    device_has = given(number(capacity_gib, ""), "the device has {}")
    if capacity_gib is not None and capacity_gib < MOST_INTERVAL * below[peak]:
        marks.append(Mark("y", capacity_gib, f"{device_has} GiB", "limit"))
    return Chart(
        title="Memory over the step",
        finding=(
            f"Memory peaks in the {where}: {number(below[peak])}"
            f" GiB{device_has and f'; {device_has}'}. At the peak:"
            f" {_owners([(name, values[peak]) for name, _, values in kinds], below[peak])}."
        ),
        x=Axis("time in the step", "ms", low=0),
        y=Axis("memory allocated", "GiB", low=0),
        series=areas,
        marks=marks,
        note=(
            "From the trace: live tensors at each operator. Times within a phase are estimated from"
            " the bytes moved."
        ),
    )


def _owners(kinds: Sequence[tuple[str, float]], whole: float) -> str:
    """Name the kinds of memory with their shares, the largest first."""
    held = sorted(((gib, name) for name, gib in kinds if gib > 0.005 * whole), reverse=True)
    return ", ".join(f"{name} {number(gib)} GiB ({gib / whole:.0%})" for gib, name in held)


def _operators(limit: str, tone: str, points: Sequence[RooflinePoint], r: Roofline) -> Series:
    longest = r.points[0].time_ms
    return series(
        f"operators bound by {limit}",
        "points",
        tone,
        [(p.intensity, p.tflops) for p in points],
        labels=[f"{p.name}: {number(p.time_ms)} ms" for p in points],
        sizes=[p.time_ms / longest for p in points],
    )


def roofline_chart(r: Roofline, device: str) -> Chart:
    """Draw a roofline chart: operators as points below the limits of bandwidth and arithmetic.

    The size of a point is its share of time.
    """
    ridge = r.peak_tflops * 1e3 / r.bandwidth_gb_per_s
    points = sorted(r.points, key=lambda p: p.intensity)
    left, right = min(ridge / 4, points[0].intensity), max(ridge * 4, points[-1].intensity)
    ends = left / 1.5, ridge, right * 1.5
    roof = [(x, min(r.peak_tflops, x * r.bandwidth_gb_per_s / 1e3)) for x in ends]
    split = bisect.bisect_left(points, ridge, key=lambda p: p.intensity)
    whole_ms, by_memory_ms = (sum(p.time_ms for p in ps) for ps in (points, points[:split]))
    by_memory = by_memory_ms / whole_ms
    shown = [
        series("roofs of the datasheet", "line", "ideal", roof),
        _operators("memory bandwidth", "first", points[:split], r),
        _operators("compute", "second", points[split:], r),
    ]
    marks = [
        Mark("point", p.intensity, p.name, "first" if p.intensity < ridge else "second", p.tflops)
        for p in r.points[:MOST_NAMED]
    ]
    return Chart(
        title=f"Roofline of {device}",
        finding=(
            f"Of these operators' time, {by_memory:.0%} is bound by memory bandwidth and"
            f" {1 - by_memory:.0%} by compute."
        ),
        x=Axis("arithmetic intensity", "FLOP/byte", "log10"),
        y=Axis("rate", "TFLOP/s", "log10"),
        series=[s for s in shown if s.x],
        nearest="point",
        marks=marks,
        note=(
            f"The {len(r.points)} heaviest groups of similar operators, {r.share:.0%} of the"
            " device's forecast time; larger points take longer. Roofs of the datasheet:"
            f" {number(r.peak_tflops)} TFLOP/s and {number(r.bandwidth_gb_per_s)} GB/s. Caches, and"
            " algorithms with fewer multiplications (Winograd), can lift a point above a roof."
        ),
    )
