"""Step time and throughput against the batch size (forecast, measured, jumps, what fits, what is best) and over devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainpace.core.outcome import Forecast, Jump
from trainpace.report.charts import (
    MOST_INTERVAL,
    SERIES_TONES,
    Axis,
    Chart,
    Mark,
    Series,
    ideal_line,
    series,
)
from trainpace.report.phrases import listed, number, sentence

if TYPE_CHECKING:
    from trainpace.forecast import Nearness
    from trainpace.measure import SweepAnalysis

BATCH = Axis(label="micro-batch size")
BEYOND = 1.25
"""Times the number of batch sizes that fit, which a curve shows."""
FEWEST, FEWEST_FOR_A_PLOT = 3, 8
"""Batch sizes that make a curve, and a plot in characters."""
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
    """A line a GPU with its band; where there is one GPU, jumps are named, and what others measured of the same model on it
    (`evidence`) stands over the line. None with fewer than three batch sizes."""
    groups = list(by_device(rows).items())[: len(SERIES_TONES)]
    curves = {name: _near_what_fits(some) for name, some in groups if len(some) >= FEWEST}
    if not curves:
        return None
    alone = len(curves) == 1
    lines, marks, findings, jumped = [], [], [], []
    for tone, (name, some) in zip(SERIES_TONES, curves.items(), strict=False):
        prefix = "" if alone else f"{name}: "
        lines.append(_line(name, "forecast" if alone else tone, some, banded=len(curves) < 4))
        best = best_of(some)
        if best is not None and best.step is not None:
            batch = best.execution.micro_batch
            text, own = f"{prefix}best throughput that fits", "best" if alone else tone
            marks.append(Mark(axis="point", at=batch, y=best.step.total_ms, text=text, tone=own))
            rate = number(best.samples_per_second or 0.0)
            findings.append(f"{prefix}batch {batch} has the best throughput, {rate} samples/s")
        largest = some[-1].largest_micro_batch
        if largest is not None and largest < some[-1].execution.micro_batch:
            marks.append(_out_of_memory(largest, prefix))
        if alone:
            marks += [_jump(jump) for jump in jumps.get(name, ())]
            jumped = [jump.before for jump in jumps.get(name, ())]
            lines += _measured_by_others(some, evidence)
    return Chart(
        title="Step time against the batch size",
        finding=sentence(
            f"{'; '.join(findings) or 'no batch size fits'}.{_jumps_in_words(jumped)}"
        ),
        x=BATCH,
        y=_step_axis(lines),
        series=tuple(lines),
        marks=tuple(marks),
        note=provenance([row for some in curves.values() for row in some]),
    )


SAME = {"the same operators", "the same card"}
_SAME_BUT_FOR = re.compile("Keras|batch [\\d,]+ instead of [\\d,]+")


def _measured_by_others(rows: Sequence[Forecast], evidence: Sequence[Nearness]) -> list[Series]:
    """Public measurements of the same operators on the same card under the same conditions, at their own batch sizes."""
    sizes = [f.execution.micro_batch for f in rows]
    runs = [
        near.run
        for nearness in evidence
        for near in nearness.runs
        if nearness.device == rows[0].device
        and set(near.alike) >= SAME
        and all(map(_SAME_BUT_FOR.fullmatch, near.unlike))
        and near.run.global_batch == (near.run.micro_batch or 0) * near.run.gpus
        and sizes[0] <= (near.run.micro_batch or 0) <= sizes[-1]
    ]
    if not runs or any(f.execution.accumulation > 1 for f in rows):
        return []
    points = [(run.micro_batch or 0, run.step_time_ms) for run in runs]
    labels = tuple(f"measured by others ({run.model}, {run.source})" for run in runs)
    return [
        series(
            "measured by others: the same model on this GPU",
            "points",
            "measured",
            points,
            labels=labels,
        )
    ]


def _near_what_fits(rows: Sequence[Forecast]) -> list[Forecast]:
    """By batch size, without those far beyond the memory, whose long steps would flatten all that can be trained."""
    ordered = sorted(rows, key=lambda f: f.execution.micro_batch)
    fitting = sum(f.fits is not False for f in ordered)
    return ordered[: max(FEWEST, math.ceil(BEYOND * fitting))] if fitting else ordered


def measured_sweep(
    a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> Chart:
    """Points with the interval of a repeat, the fitted pieces, jumps with their causes according to the forecast."""
    forecasts = [foreseen[b] for b in sorted(foreseen) if foreseen[b].step is not None]
    shown = (
        [_line("forecast, 90 % interval", "forecast", forecasts, banded=True)] if forecasts else []
    )
    segments = [s for s in a.curve.segments if s.first_batch < s.last_batch]
    ends = [(s, batch) for s in segments for batch in (s.first_batch, s.last_batch, None)]
    pieces = [
        (s.last_batch, None) if batch is None else (batch, s.line(batch)) for s, batch in ends
    ]
    shown += [series("fitted", "line", "muted", pieces)] if pieces else []
    steps, spread = [(p.batch, p.step_ms) for p in a.points], [p.interval_ms for p in a.points]
    shown.append(series("measured, with 90 % of repeats", "points", "measured", steps, spread))
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
            f"{jump.before} to {jump.after}: {jump.percent:+.0f}"
            f" %{_cause(jump.cause_among(causes))}"
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
        + _jumps_in_words([jump.before for jump in a.curve.jumps]),
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
        finding=f"Batch {best.batch} gives {number(rate)} samples a second{more}.",
        x=BATCH,
        y=Axis(label="throughput", unit="samples/s", low=0),
        series=tuple(shown),
        marks=(Mark(axis="point", at=best.batch, y=rate, text=f"batch {best.batch}", tone="best"),),
    )


def scaling_chart(rows: Sequence[Forecast]) -> Chart | None:
    """Throughput of the same micro-batches on ever more devices. None with fewer than two that can be forecast."""
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
            series("forecast, 90 % interval", "line", "forecast", points, bounds),
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
    """The rows that could be forecast, by device in the order in which they come."""
    able = [row for row in rows if row.step is not None]
    return {
        name: [row for row in able if row.device == name]
        for name in dict.fromkeys(row.device for row in able)
    }


def best_of(rows: Sequence[Forecast]) -> Forecast | None:
    """The one with the highest throughput among those that fit, in tokens where lengths differ."""
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
    """From 0, and not so far up that a wide band hides what the curves do."""
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
        name = f"{name}, forecast with its 90 % interval"
    steps = [(f.execution.micro_batch, f.step.total_ms) for f in rows if f.step is not None]
    return series(name, "line", tone, steps, intervals if banded else (), dashed=tone == "forecast")


def _out_of_memory(largest: int, prefix: str = "") -> Mark:
    return Mark(
        axis="x", at=largest + 0.5, text=f"{prefix}out of memory after {largest}", tone="limit"
    )


def _jump(jump: Jump) -> Mark:
    text = (
        f"{jump.before} to {jump.batch}: {100 * (jump.after_ms / jump.before_ms - 1):+.0f}"
        f" %{_cause(jump)}"
    )
    return Mark(axis="x", at=(jump.before + jump.batch) / 2, text=text, tone="jump")


def _cause(jump: Jump | None) -> str:
    """Its cause in two or three words, behind a comma."""
    return f", {jump.mechanism}" if jump is not None and jump.mechanism else ""


def _jumps_in_words(batches: Sequence[int]) -> str:
    """A sentence that names the first six."""
    if not batches:
        return ""
    more = [f"{len(batches) - 6} more"] if len(batches) > 6 else []
    return f" The step jumps after batch {listed([*map(str, batches[:6]), *more])}."
