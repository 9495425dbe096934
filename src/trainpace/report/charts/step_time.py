"""Step time against the batch size: what is forecast, what was measured, where it jumps, what fits, what is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainpace.outcome import Forecast, Jump
from trainpace.report.charts.chart import MOST_INTERVAL, Axis, Chart, Mark, Series, sentence
from trainpace.report.charts.palette import SERIES_TONES
from trainpace.units import format_number

if TYPE_CHECKING:
    from trainpace.measure import SweepAnalysis

BATCH = Axis(label="micro-batch size")
FEWEST = 3
"""Batch sizes that make a curve."""
MOST_GPUS = len(SERIES_TONES)


def forecast_sweep(rows: Sequence[Forecast], jumps: Mapping[str, Sequence[Jump]]) -> Chart | None:
    """A line a GPU with its band, jumps named where there is one GPU; None with fewer than three batch sizes."""
    by_device: dict[str, list[Forecast]] = {}
    for row in rows:
        if row.step is not None:
            by_device.setdefault(row.device, []).append(row)
    curves = {name: sorted(some, key=lambda f: f.execution.micro_batch) for name, some in by_device.items()}
    curves = {name: some for name, some in list(curves.items())[:MOST_GPUS] if len(some) >= FEWEST}
    if not curves:
        return None
    alone = len(curves) == 1
    series, marks, said = [], [], []
    for tone, (name, some) in zip(SERIES_TONES, curves.items(), strict=False):
        series.append(_line(name, "forecast" if alone else tone, some, banded=alone or len(curves) < 4))
        best = best_of(some)
        if best is not None and best.step is not None:
            batch, ms = best.execution.micro_batch, best.step.total_ms
            text = f"{'' if alone else f'{name}: '}best throughput that fits"
            marks.append(Mark(axis="point", at=batch, y=ms, text=text, tone="best" if alone else tone))
            said.append(
                f"{'' if alone else f'{name}: '}batch {batch} has the best throughput,"
                f" {format_number(best.samples_per_second or 0.0)} samples/s"
            )
        marks += _memory_end(name, some, alone)
        if alone:
            marks += [_jump(jump, some) for jump in jumps.get(name, ())]
    found = [jump.batch - 1 for name in curves for jump in jumps.get(name, ())] if alone else []
    told = f" The step jumps after batch {_listed(found)}." if found else ""
    return Chart(
        title="Step time against the batch size",
        finding=sentence(f"{'; '.join(said) or 'no batch size fits'}.{told}"),
        x=BATCH,
        y=_step_axis(series),
        series=tuple(series),
        marks=tuple(marks),
        note=provenance([r for c in curves.values() for r in c]),
    )


def measured_sweep(a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()) -> Chart:
    """Points with the interval of a repeat, the fitted pieces, jumps with their causes according to the forecast."""
    there = [foreseen[b] for b in sorted(foreseen) if foreseen[b].step is not None]
    series = [_line("forecast, 90 % interval", "forecast", there, banded=True)] if there else []
    series += _fitted(a)
    p = a.points
    series.append(
        Series(
            name="measured, with 90 % of repeats",
            kind="points",
            tone="measured",
            x=tuple(float(q.batch) for q in p),
            y=tuple(q.step_ms for q in p),
            low=tuple(q.interval_ms.low for q in p),
            high=tuple(q.interval_ms.high for q in p),
        )
    )
    best = a.best.best
    ms = next(q.step_ms for q in p if q.batch == best.batch)
    marks = [Mark(axis="point", at=best.batch, y=ms, text="best throughput", tone="best")]
    for jump in a.curve.jumps:
        known = next((c for c in causes if jump.before < c.batch <= jump.after), None)
        cause = f", {_cause(known)}" if known is not None and known.causes else ""
        at = (jump.before + jump.after) / 2
        marks.append(
            Mark(axis="x", at=at, text=f"{jump.before} to {jump.after}: {jump.percent:+.0f} %{cause}", tone="jump")
        )
    if a.largest_that_fits is not None:
        marks.append(
            Mark(
                axis="x", at=a.largest_that_fits + 0.5, text=f"out of memory after {a.largest_that_fits}", tone="limit"
            )
        )
    jumps = [jump.before for jump in a.curve.jumps]
    told = f" The step jumps after batch {_listed(jumps)}." if jumps else ""
    return Chart(
        title="Step time against the batch size",
        finding=f"Batch {best.batch} has the best throughput, {format_number(best.measured_samples_per_second)} samples/s.{told}",
        x=BATCH,
        y=_step_axis(series),
        series=tuple(series),
        marks=tuple(marks),
        note="Measured on this machine; each point is the median of its probes."
        + (f" {provenance(there, 'The forecast is from')}" if there else ""),
    )


def throughput(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> Chart:
    p = a.points
    series = [
        Series(
            name="measured",
            kind="points",
            tone="measured",
            x=tuple(float(q.batch) for q in p),
            y=tuple(q.samples_per_second for q in p),
        )
    ]
    there = [(b, f.samples_per_second) for b, f in sorted(foreseen.items()) if f.samples_per_second is not None]
    if there:
        x, y = zip(*there, strict=True)
        series.insert(
            0, Series(name="forecast", kind="line", tone="forecast", x=tuple(map(float, x)), y=y, dashed=True)
        )
    best, last = a.best.best, a.points[-1]
    gain = best.measured_samples_per_second / last.samples_per_second - 1
    over = (
        f", {gain:.0%} more than batch {last.batch}, the largest" if best.batch != last.batch and gain >= 0.01 else ""
    )
    return Chart(
        title="Throughput against the batch size",
        finding=f"Batch {best.batch} gives {format_number(best.measured_samples_per_second)} samples a second{over}.",
        x=BATCH,
        y=Axis(label="throughput", unit="samples/s", low=0),
        series=tuple(series),
        marks=(
            Mark(
                axis="point", at=best.batch, y=best.measured_samples_per_second, text=f"batch {best.batch}", tone="best"
            ),
        ),
    )


def best_of(rows: Sequence[Forecast]) -> Forecast | None:
    """The one with the highest throughput among those that fit."""
    able = [row for row in rows if row.step is not None and row.fits is not False]
    return max(able, key=lambda row: row.samples_per_second or 0.0, default=None)


def _fitted(a: SweepAnalysis) -> list[Series]:
    x: list[float] = []
    y: list[float | None] = []
    for segment in a.curve.segments:
        if segment.first_batch < segment.last_batch:
            x += [segment.first_batch, segment.last_batch, segment.last_batch]
            y += [segment.line(segment.first_batch), segment.line(segment.last_batch), None]
    return [Series(name="fitted", kind="line", tone="muted", x=tuple(x), y=tuple(y))] if x else []


def _step_axis(series: Sequence[Series]) -> Axis:
    """From 0, and not so far up that a wide band hides what the curves do."""
    top = max((y for s in series for y in s.y if y is not None), default=1.0)
    band = max((high for s in series for high in s.high), default=top)
    return Axis(label="step time", unit="ms", low=0, high=MOST_INTERVAL * top if band > MOST_INTERVAL * top else None)


def _line(name: str, tone: str, rows: Sequence[Forecast], banded: bool) -> Series:
    steps = [(f.execution.micro_batch, f.step.total_ms, f.step_time_interval_ms) for f in rows if f.step is not None]
    intervals = [interval for _, _, interval in steps if interval is not None]
    whole = banded and len(intervals) == len(steps)
    return Series(
        name=name if not whole or "interval" in name else f"{name}, forecast with its 90 % interval",
        kind="line",
        tone=tone,
        dashed=tone == "forecast",
        x=tuple(float(batch) for batch, _, _ in steps),
        y=tuple(ms for _, ms, _ in steps),
        low=tuple(i.low for i in intervals) if whole else (),
        high=tuple(i.high for i in intervals) if whole else (),
    )


def _memory_end(name: str, rows: Sequence[Forecast], alone: bool) -> list[Mark]:
    largest, last = rows[-1].largest_micro_batch, rows[-1].execution.micro_batch
    if largest is None or not largest < last:
        return []
    text = f"{'' if alone else f'{name}: '}out of memory after {largest}"
    return [Mark(axis="x", at=largest + 0.5, text=text, tone="limit")]


def _jump(jump: Jump, rows: Sequence[Forecast]) -> Mark:
    before = max(
        (f.execution.micro_batch for f in rows if f.execution.micro_batch < jump.batch), default=jump.batch - 1
    )
    cause = f", {_cause(jump)}" if jump.causes else ""
    text = f"{before} to {jump.batch}: {100 * (jump.after_ms / jump.before_ms - 1):+.0f} %{cause}"
    return Mark(axis="x", at=(before + jump.batch) / 2, text=text, tone="jump")


def _cause(jump: Jump) -> str:
    """The first operator in short: "features.0 (conv, forward)" becomes "conv of features.0"."""
    module, _, rest = jump.causes[0].partition(" (")
    kind = rest.partition(",")[0]
    return f"{kind} of {module}" if kind else module


def _listed(batches: Sequence[int]) -> str:
    some = [str(b) for b in batches[:6]]
    rest = f" and {len(batches) - 6} more" if len(batches) > 6 else ""
    return (", ".join(some[:-1]) + f" and {some[-1]}" if len(some) > 1 and not rest else ", ".join(some)) + rest


PROVENANCE = {
    "measured": "measured",
    "transferred": "a measurement of the same model on another card",
    "calibrated": "this machine's micro-benchmarks",
    "fitted": "datasheet figures and constants fitted on public measurements",
    "datasheet": "datasheet figures",
}


def provenance(rows: Sequence[Forecast], start: str = "From") -> str:
    sources = " and ".join(PROVENANCE[p] for p in dict.fromkeys(row.provenance for row in rows))
    bases = dict.fromkeys(f.step_time_interval_ms.basis for f in rows if f.step_time_interval_ms is not None)
    return f"{start} {sources}; intervals from {', '.join(list(bases)[:3])}." if bases else f"{start} {sources}."
