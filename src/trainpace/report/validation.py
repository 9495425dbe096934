"""Errors of forecasts against measured runs, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_number
from trainpace.validation.evaluate import Row
from trainpace.validation.summary import Summary

WORST = 10


def print_validation(rows: Sequence[Row], overall: Summary, groups: Mapping[str, Sequence[Summary]]) -> None:
    """A table by file, GPU and family, the worst rows, and why rows could not be forecast."""
    for name, group in groups.items():
        columns = (name, "runs", "mean %", "median %", "95th %", "bias %", "in interval %", "half width %", "memory %")
        shown = [*(s for s in group if s.n or s.unsupported), *([overall] if name == "file" else [])]
        print_table(columns, [_cells(s) for s in shown])
    worst = sorted((row for row in rows if row.error_pct is not None), key=lambda row: -abs(row.error_pct or 0.0))[
        :WORST
    ]
    print_table(
        ("worst", "GPU", "precision", "batch", "measured ms", "forecast ms", "error %"),
        [
            (row.model, row.gpu if row.num_gpus == 1 else f"{row.num_gpus} x {row.gpu}", row.precision, str(row.batch),
             format_number(row.measured_ms or 0.0), format_number(row.forecast_ms or 0.0), f"{row.error_pct:+.0f}")
            for row in worst
        ],
        left=3,
    )  # fmt: skip
    reasons = Counter(row.unsupported for row in rows if row.unsupported)
    for reason, count in reasons.most_common(8):
        print_lines(f"{count} not forecast: {reason}")
    print_lines(
        "Errors are (forecast - measured) / measured. In interval: measurements inside the forecast's 90 % interval.",
    )


def _cells(s: Summary) -> tuple[str, ...]:
    numbers = (s.mape, s.median, s.p95, s.bias, s.coverage, s.half_width, s.memory_mape)
    return (s.name, f"{s.n}", *("-" if value is None else f"{value:.1f}" for value in numbers))
