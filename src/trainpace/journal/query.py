"""Filters on runs, shared by all verbs, as SQL."""

import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select

from trainpace.errors import TrainpaceError
from trainpace.journal.entry import KINDS, OUTCOMES, is_text, utc_text
from trainpace.journal.tables import runs
from trainpace.records import Record


class Query(Record):
    """Filters that all must hold. `model` and `device` match a part of the name in any case, or with `exact` the whole
    name; `text` is searched in names, notes, reason, command and source; `since` is a time in UTC."""

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
                raise TrainpaceError(f"the filter {name} is not valid text.")
        if self.micro_batch is not None and not 0 <= self.micro_batch < 2**63:
            raise TrainpaceError(f"micro-batch {self.micro_batch} is not a valid size.")


def since_text(text: str) -> str:
    """``2026-11-21`` or any ISO 8601 time in the journal's form; UTC where it states no time zone."""
    try:
        return utc_text(datetime.datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise TrainpaceError(f"{text!r} is not a date.", "Write 2026-11-21 or 2026-11-21T08:30.") from None


def conditions(query: Query) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    for column in (runs.c.model, runs.c.device):
        wanted: str = getattr(query, column.name)
        if wanted:
            filters.append(column == wanted if query.exact else column.icontains(wanted, autoescape=True))
    for column in (
        runs.c.precision, runs.c.optimizer, runs.c.kind, runs.c.outcome, runs.c.sweep, runs.c.workload_key,
    ):  # fmt: skip
        if getattr(query, column.name):
            filters.append(column == getattr(query, column.name))
    if query.micro_batch is not None:
        filters.append(runs.c.micro_batch == query.micro_batch)
    if query.since:
        filters.append(runs.c.created_at >= since_text(query.since))
    if query.text:
        filters.append(runs.c.words.contains(query.text.casefold(), autoescape=True))
    if query.with_forecast:
        filters.append(runs.c.forecast_ms.is_not(None))
    return filters


def filtered(select: Select[Any], query: Query) -> Select[Any]:
    return select.where(*conditions(query))
