"""One HTML file that opens offline: what it means first, then the table, the step breakdown and the data."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from trainpace.outcome import STEP_PARTS, StepTime
from trainpace.records import Record
from trainpace.units import format_number

_COLOURS = {
    "forward_ms": "#2f6fb3", "backward_ms": "#d9822b", "optimizer_ms": "#3b8f5a", "communication_ms": "#8c4fb0",
    "data_wait_ms": "#b03a48", "host_to_device_ms": "#6b7a88", "host_overhead_ms": "#a58a2c", "idle_ms": "#9aa4ad",
}  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6773; --line: #d9dfe5; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #9aa7b4; --line: #3a4550; --page: #161c22; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
th { color: var(--soft); font-weight: 600; } .soft { color: var(--soft); }
.key span { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
@media print { body { margin: 0; max-width: none; } }
"""


class ReportRow(Record):
    """One line of the report: a forecast, and what was measured where it was."""

    model: str
    batch: int
    device: str
    forecast_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float | None
    forecast_step: StepTime
    measured_step: StepTime | None

    @property
    def error_percent(self) -> float | None:
        """(forecast - measured) / measured."""
        return None if self.measured_ms is None else 100 * (self.forecast_ms / self.measured_ms - 1)


def render(title: str, meaning: Sequence[str], rows: Sequence[ReportRow]) -> str:
    """The page as text. `meaning` is said first, in plain words."""
    body = f"<h2>Forecast and measurement</h2>{_table(rows)}<h2>Where a step's time goes</h2>{_key(rows)}{_bars(rows)}"
    return document(title, meaning, body, [_plain(row) for row in rows])


def document(title: str, meaning: Sequence[str], body: str, data: object) -> str:
    """The whole file: title, what it means, the body, and the data for a program to read."""
    said = "".join(f"<p>{html.escape(line)}</p>" for line in meaning)
    inside = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{html.escape(title)}</h1><h2>What this means</h2>{said}{body}"
        f'<script type="application/json" id="rows">{inside}</script></body></html>\n'
    )


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table with a header row."""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells)
    heads = "".join(f'<th scope="col">{h}</th>' for h in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _table(rows: Sequence[ReportRow]) -> str:
    head = ("model", "batch", "device", "forecast ms", "90 % interval", "measured ms", "error")
    cells = [
        (r.model, str(r.batch), r.device, format_number(r.forecast_ms),
         f"{format_number(r.low_ms)} to {format_number(r.high_ms)}",
         "" if r.measured_ms is None else format_number(r.measured_ms),
         "" if r.error_percent is None else f"{r.error_percent:+.0f} %")
        for r in rows
    ]  # fmt: skip
    return table(head, cells)


def _key(rows: Sequence[ReportRow]) -> str:
    steps = [s for r in rows for s in (r.forecast_step, r.measured_step) if s is not None]
    used = [name for name in STEP_PARTS if any(getattr(step, name) > 0 for step in steps)]
    spans = "".join(f'<span style="background:{_COLOURS[name]}"></span>{_words(name)}' for name in used)
    return f'<p class="key soft">{spans}</p>'


def _bars(rows: Sequence[ReportRow]) -> str:
    """Per model and batch one scale, so that devices compare; forecast above, measurement below it."""
    groups: dict[tuple[str, int], list[ReportRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.batch), []).append(row)
    return "".join(_group(model, batch, members) for (model, batch), members in groups.items())


def _group(model: str, batch: int, rows: Sequence[ReportRow]) -> str:
    bars = [(f"{r.device}, forecast", r.forecast_step) for r in rows]
    bars += [(f"{r.device}, measured", r.measured_step) for r in rows if r.measured_step is not None]
    bars.sort(key=lambda bar: bar[1].total_ms)
    longest = max(step.total_ms for _, step in bars)
    parts = []
    for i, (label, step) in enumerate(bars):
        y, x = 26 * i, 340.0
        parts.append(f'<text x="330" y="{y + 15}" text-anchor="end">{html.escape(_shortened(label))}</text>')
        for name in STEP_PARTS:
            width = 480 * getattr(step, name) / longest
            if width > 0:
                tip = f"{_words(name)}: {format_number(getattr(step, name))} ms"
                parts.append(
                    f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="18" fill="{_COLOURS[name]}">'
                    f"<title>{tip}</title></rect>"
                )
                x += width
        parts.append(f'<text x="{x + 6:.2f}" y="{y + 15}">{format_number(step.total_ms)} ms</text>')
    name = html.escape(f"{model}, batch {batch}")
    return (
        f"<h3>{name}</h3>"
        f'<svg viewBox="0 0 920 {26 * len(bars) + 4}" role="img" aria-label="Step time by part: {name}">{"".join(parts)}</svg>'
    )


def _plain(row: ReportRow) -> dict[str, object]:
    import msgspec

    return dict(msgspec.to_builtins(row))


def _words(part: str) -> str:
    return part.removesuffix("_ms").replace("_", " ")


def _shortened(label: str) -> str:
    return label if len(label) <= 44 else f"{label[:28]}...{label[-13:]}"
