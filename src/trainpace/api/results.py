"""What verbs answer where no other room has a record for it: several forecasts, a measured sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainpace.outcome import Forecast, Jump
from trainpace.records import Record, Table


class Forecasts(Record, Table):
    """A forecast for each GPU and batch size, in the order asked for. Iterates over `rows`.

    `jumps`: by device, where one more sample costs far more than usual. `notes`: what runs in the journal did to the forecasts.
    """

    rows: tuple[Forecast, ...]
    jumps: dict[str, tuple[Jump, ...]]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Forecast]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Forecast:
        return self.rows[i]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row a forecast: the columns of `trainpace forecast --json`."""
        from trainpace.report.forecast import row_json

        return [row_json(row) for row in self.rows]
