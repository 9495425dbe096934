"""Forecasts beside measurements, several models and devices on one page."""

from collections.abc import Sequence

import msgspec

from trainpace.outcome import Interval, StepTime
from trainpace.records import Record
from trainpace.report.charts.breakdown import Timed, step_breakdown
from trainpace.report.pages.render import page
from trainpace.units import format_number


class Pair(Record):
    model: str
    batch: int
    device: str
    forecast: StepTime
    interval_ms: Interval
    measured: StepTime | None = None
    measured_ms: float | None = None

    @property
    def error_percent(self) -> float | None:
        """(forecast - measured) / measured."""
        return None if self.measured_ms is None else 100 * (self.forecast.total_ms / self.measured_ms - 1)


HEAD = ("model", "batch", "device", "forecast ms", "90 % interval", "measured ms", "error")


def side_by_side_page(title: str, meaning: Sequence[str], pairs: Sequence[Pair]) -> str:
    """The page as text. `meaning` is said first, in plain words."""
    steps = []
    for pair in pairs:
        group = f"{pair.model}, batch {pair.batch}"
        steps.append(Timed(group, f"{pair.device}, forecast", pair.forecast, pair.interval_ms))
        if pair.measured is not None:
            steps.append(Timed(group, f"{pair.device}, measured", pair.measured))
    data = msgspec.to_builtins(list(pairs))
    return page(
        "side_by_side.html", title, meaning, [step_breakdown(steps)], data, head=HEAD, rows=cells_of_pairs(pairs)
    )


def cells_of_pairs(pairs: Sequence[Pair]) -> list[list[str]]:
    """Text, row by row, under `HEAD`."""
    return [
        [p.model, str(p.batch), p.device, format_number(p.forecast.total_ms),
         f"{format_number(p.interval_ms.low)} to {format_number(p.interval_ms.high)}",
         "" if p.measured_ms is None else format_number(p.measured_ms),
         "" if p.error_percent is None else f"{p.error_percent:+.0f} %"]
        for p in pairs
    ]  # fmt: skip
