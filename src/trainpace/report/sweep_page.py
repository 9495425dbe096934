"""A measured sweep as one HTML file: the verdict, the curve with its jumps beside the forecast, the table, the data."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

from trainpace.measure.analysis import SweepAnalysis
from trainpace.measure.changes import MeasuredJump
from trainpace.outcome import Forecast, Jump, Measurement
from trainpace.report.html import document, table
from trainpace.report.measurement import sweep_json, verdict
from trainpace.units import format_number

WIDTH, HEIGHT = 920, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 50
MEASURED, FORECAST, JUMP = "#2f6fb3", "#d9822b", "#b03a48"
TICKS = 6
Scale = Callable[[float], float]


def render_sweep(
    measured: Sequence[Measurement], a: SweepAnalysis, foreseen: Mapping[int, Forecast], causes: Sequence[Jump] = ()
) -> str:
    """The page as text."""
    first = measured[0]
    title = f"{first.model} on {first.device}: step time over the batch size"
    e = first.execution
    meaning = [
        f"Measured with {e.precision} and {e.optimizer}, {sum(p.probes for p in a.points)} probes.",
        *verdict(a, causes),
    ]
    head = ["batch", "step ms", "90 % of repeats", "samples/s", "memory GiB", "probes", "forecast ms"]
    rows = []
    for p in a.points:
        there = foreseen.get(p.batch)
        rows.append([
            str(p.batch), format_number(p.step_ms),
            f"{format_number(p.interval_ms.low)} to {format_number(p.interval_ms.high)}", format_number(p.samples_per_second),
            "" if p.peak_memory_gib is None else format_number(p.peak_memory_gib), str(p.probes),
            "" if there is None or there.step is None else format_number(there.step.total_ms),
        ])  # fmt: skip
    body = f"<h2>Step time</h2>{sweep_chart(a, foreseen)}<h2>Figures</h2>{table(head, rows)}"
    return document(title, meaning, body, sweep_json(measured, a, foreseen, None))


def sweep_chart(a: SweepAnalysis, foreseen: Mapping[int, Forecast]) -> str:
    """An SVG: points with the interval of a repeat, the fitted segments, jumps named, and the forecast with its interval."""
    there = [(b, f) for b, f in sorted(foreseen.items()) if f.step is not None and f.step_time_interval_ms is not None]
    right = float(a.points[-1].batch)
    left = float(a.points[0].batch) if a.points[0].batch > right / 4 else 0.0
    top = 1.05 * max([p.interval_ms.high for p in a.points] + [f.step.total_ms for _, f in there if f.step is not None])

    def x(batch: float) -> float:
        return LEFT + (batch - left) / max(right - left, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - min(ms, top) / top * (HEIGHT - TOP - BOTTOM)

    parts = _axes(left, right, top, x, y)
    if there:
        upper = [f"{x(b):.1f},{y(f.step_time_interval_ms.high):.1f}" for b, f in there if f.step_time_interval_ms]
        lower = [
            f"{x(b):.1f},{y(f.step_time_interval_ms.low):.1f}" for b, f in reversed(there) if f.step_time_interval_ms
        ]
        line = [f"{x(b):.1f},{y(f.step.total_ms):.1f}" for b, f in there if f.step is not None]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{FORECAST}" opacity="0.15"/>')
        parts.append(
            f'<polyline points="{" ".join(line)}" fill="none" stroke="{FORECAST}" stroke-width="2" stroke-dasharray="6 4"/>'
        )
    for segment in a.curve.segments:
        ends = [(b, a.curve.at(b)) for b in (segment.first_batch, segment.last_batch)]
        (x1, y1), (x2, y2) = [(x(b), y(ms)) for b, ms in ends]
        where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        parts.append(f'<line {where} stroke="{MEASURED}" stroke-width="1.5" opacity="0.6"/>')
    for p in a.points:
        tip = f"batch {p.batch}: {format_number(p.step_ms)} ms, {format_number(p.samples_per_second)} samples/s"
        parts.append(
            f'<line x1="{x(p.batch):.1f}" x2="{x(p.batch):.1f}" y1="{y(p.interval_ms.low):.1f}"'
            f' y2="{y(p.interval_ms.high):.1f}" stroke="{MEASURED}" opacity="0.5"/>'
            f'<circle cx="{x(p.batch):.1f}" cy="{y(p.step_ms):.1f}" r="3.5" fill="{MEASURED}">'
            f"<title>{tip}</title></circle>"
        )
    parts += [_named(jump, x, y, a) for jump in a.curve.jumps]
    key = [("measured, with where a repeat should fall", MEASURED)]
    key += [("forecast, with its 90 % interval", FORECAST)] if there else []
    key += [("jump", JUMP)] if a.curve.jumps else []
    legend = "".join(f'<span style="background:{colour}"></span>{text}' for text, colour in key)
    label = "Step time in milliseconds over the batch size"
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f'<p class="key soft">{legend}</p>{drawing}'


def _axes(left: float, right: float, top: float, x: Scale, y: Scale) -> list[str]:
    parts = []
    for i in range(TICKS + 1):
        ms, batch = top * i / TICKS, left + (right - left) * i / TICKS
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(ms):.1f}" y2="{y(ms):.1f}" stroke="var(--line)"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{format_number(float(f"{ms:.3g}"))}</text>'
        )
        parts.append(f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{batch:.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">batch size</text>')
    parts.append(f'<text x="{LEFT - 60}" y="{TOP - 12}">step time in ms</text>')
    return parts


def _named(jump: MeasuredJump, x: Scale, y: Scale, a: SweepAnalysis) -> str:
    at = (x(jump.before) + x(jump.after)) / 2
    name = html.escape(f"{jump.before} to {jump.after}: {jump.percent:+.0f} %")
    height = y(a.curve.at(jump.after))
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{JUMP}" stroke-dasharray="2 3"/>'
        f'<text x="{at - 6:.1f}" y="{max(TOP + 12, height - 14):.1f}" text-anchor="end" style="fill:{JUMP}">{name}</text>'
    )
