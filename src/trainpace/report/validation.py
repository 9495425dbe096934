"""Errors of forecasts against measured runs, for the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence

from trainpace.report.columns import Column, words
from trainpace.report.phrases import devices, number
from trainpace.report.terminal import print_lines, print_table, print_verdict
from trainpace.validation import Row, Summary

WORST = 10


def print_validation(rows: Sequence[Row], overall: Summary, groups: Mapping[str, Sequence[Summary]]) -> None:
    print_verdict(_verdict(overall), good=None if overall.n else False)
    for name, group in groups.items():
        columns = (
            words(name, least=16), Column("runs"), Column("mean %"), Column("median %"), Column("95th %", 2), Column("bias %", 1),
            Column("in interval %"), Column("half width %", 4), Column("memory %", 3),
        )  # fmt: skip
        shown = [*(s for s in group if s.n or s.unsupported), *([overall] if name == "file" else [])]
        print_table(columns, [_cells(s) for s in shown], spaced=name == "file")
    failed = sorted((row for row in rows if row.error_pct is not None), key=lambda row: -abs(row.error_pct or 0.0))
    worst = [
        (row.model, devices(row.num_gpus, row.gpu), row.precision, str(row.batch), number(row.measured_ms),
         number(row.forecast_ms), f"{row.error_pct:+.0f}")
        for row in failed[:WORST]
    ]  # fmt: skip
    worst_columns = (
        words("worst", least=16), words("GPU"), words("precision", 1), Column("batch", 2), Column("measured ms"),
        Column("forecast ms"), Column("error %"),
    )  # fmt: skip
    print_table(worst_columns, worst, spaced=False)
    reasons = Counter(row.unsupported for row in rows if row.unsupported)
    for reason, count in reasons.most_common(8):
        print_lines(f"{count} not forecast: {reason}")
    print_lines(
        "Errors are (forecast - measured) / measured. In interval: share of measurements inside the forecast's 90 % interval."
    )


def _verdict(s: Summary) -> str:
    if s.mape is None or s.median is None or s.bias is None:
        return f"No: none of {s.unsupported} runs could be forecast."
    held = "" if s.coverage is None else f"; {s.coverage:.0f} % of the measurements lie in the 90 % interval"
    return (
        f"{s.n:,} forecasts are off by {s.mape:.1f} % on average (median {s.median:.1f} %, typically {abs(s.bias):.1f} % too"
        f" {'long' if s.bias > 0 else 'short'}){held}."
    )


def _cells(s: Summary) -> tuple[str, ...]:
    numbers = (s.mape, s.median, s.p95, s.bias, s.coverage, s.half_width, s.memory_mape)
    return (s.name, f"{s.n}", *("-" if value is None else f"{value:.1f}" for value in numbers))
