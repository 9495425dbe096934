"""What verbs answer where no other room has a record for it: several forecasts, a measured sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from trainpace.measure import SweepAnalysis
from trainpace.outcome import FailedProbe, Forecast, Measurement
from trainpace.records import Record, Table


class MeasuredSweep(Record, Table):
    """What was measured over batch sizes. Iterates over `measurements`, which are in order of batch size.

    `failed`: batch sizes that could not be measured, and why. `analysis`: medians, jumps, the best batch, the largest that fits.
    `forecasts`: those made for this machine, by batch size. `sweep`: its id in the journal.
    """

    measurements: tuple[Measurement, ...]
    failed: tuple[FailedProbe, ...]
    analysis: SweepAnalysis
    forecasts: dict[int, Forecast]
    sweep: str | None = None

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def __getitem__(self, i: int) -> Measurement:
        return self.measurements[i]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row a batch size, over all its probes, with what was forecast for it."""
        rows = []
        for point in self.analysis.points:
            foreseen = self.forecasts.get(point.batch)
            step = None if foreseen is None else foreseen.step
            row = {**msgspec.to_builtins(point), "samples_per_second": point.samples_per_second}
            row |= {"step_ms_low": point.interval_ms.low, "step_ms_high": point.interval_ms.high}
            row.pop("interval_ms")
            rows.append({**row, "forecast_ms": None if step is None else step.total_ms})
        return rows
