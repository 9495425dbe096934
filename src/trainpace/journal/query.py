"""Which runs: the filters that every verb shares, as SQL."""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select

from trainpace.errors import TrainpaceError
from trainpace.journal.entry import KINDS, OUTCOMES, is_text, utc_text
from trainpace.journal.tables import runs
from trainpace.records import Record


class Query(Record):
    """Runs that fulfil all that is stated. `model` and `device` match a part of the name, whatever its case, or with `exact`
    the whole name; `text` is looked for in names, notes, reason, command and source; `since` is a time in UTC."""

    model: str = ""
    device: str = ""
    exact: bool = False
    precision: str = ""
    optimizer: str = ""
    micro_batch: int | None = None
    kind: str = ""
    outcome: str = ""
    sweep: str = ""
    workload_key: str = ""
    since: str = ""
    text: str = ""
    with_forecast: bool = False

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise TrainpaceError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}.")
        if self.outcome and self.outcome not in OUTCOMES:
            raise TrainpaceError(f"outcome {self.outcome!r} is not one of {', '.join(OUTCOMES)}.")
        for name in self.__struct_fields__:
            if isinstance(getattr(self, name), str) and not is_text(getattr(self, name)):
                raise TrainpaceError(f"the filter {name} is no text.")
        if self.micro_batch is not None and not 0 <= self.micro_batch < 2**63:
            raise TrainpaceError(f"micro-batch {self.micro_batch} is no size.")


def since_text(text: str) -> str:
    """``2026-11-21`` or any ISO 8601 time as a journal has it; without a zone it is UTC."""
    try:
        return utc_text(datetime.datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise TrainpaceError(f"{text!r} is not a date.", "Write 2026-11-21 or 2026-11-21T08:30.") from None


def conditions(query: Query) -> list[ColumnElement[bool]]:
    """The filters of a query."""
    found: list[ColumnElement[bool]] = []
    for column in (runs.c.model, runs.c.device):
        wanted: str = getattr(query, column.name)
        if wanted:
            found.append(column == wanted if query.exact else column.icontains(wanted, autoescape=True))
    for column in (
        runs.c.precision, runs.c.optimizer, runs.c.kind, runs.c.outcome, runs.c.sweep, runs.c.workload_key,
    ):  # fmt: skip
        if getattr(query, column.name):
            found.append(column == getattr(query, column.name))
    if query.micro_batch is not None:
        found.append(runs.c.micro_batch == query.micro_batch)
    if query.since:
        found.append(runs.c.created_at >= since_text(query.since))
    if query.text:
        found.append(runs.c.words.contains(query.text.casefold(), autoescape=True))
    if query.with_forecast:
        found.append(runs.c.forecast_ms.is_not(None))
    return found


def filtered(select: Select[Any], query: Query) -> Select[Any]:
    """`select`, narrowed to the runs of a query."""
    return select.where(*conditions(query))
