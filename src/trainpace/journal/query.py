"""Filters on runs, shared by all verbs, as SQL; and pages of a long list, in bounded time over a million runs.

A page starts after the last run of the previous page (keyset paging), so the thousandth costs as much as the first. A
filter that few runs match has to examine all runs; the index `runs_list` holds all filtered columns in order of time,
so that this reads a tenth of the table. A part of a name is first looked up among the few names.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, false, func, literal, select, tuple_

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, from_json
from trainpace.journal.database import runs
from trainpace.journal.entry import KINDS, OUTCOMES, Entry, is_text, utc_text

if TYPE_CHECKING:
    from trainpace.journal.store import Journal

MOST_COUNTED = 200
"""Matching runs are counted up to this number."""
MOST_NAMES = 2000
"""With more models or devices than this, a part of a name is looked for in every run."""
LARGEST = 1e308
"""More than any step time, and within the range of a database's numbers."""

_BEGINNING = re.compile("[0-9A-Fa-f]{1,31}")
"""The first digits of an id."""

ORDERS: dict[str, tuple[str, ...]] = {
    "time": ("created_at", "id"),
    "model": ("model", "created_at", "id"),
    "device": ("device", "created_at", "id"),
    "step": ("step_time_ms", "id"),
}
"""Orders of a list, as columns. Runs without a step time do not appear in the order by step."""
INDEXES = {"model": "runs_model_newest", "device": "runs_device", "step": "runs_step"}


class Query(Record):
    """Filters that all must hold. `model` and `device` match a part of the name in any case, or with `exact` the whole
    name; `source` matches a part of the source's name; `sweep` is an id or its first digits; `text` is searched in names, notes,
    reason, command and source; `since` is a time in UTC."""

    model: str = ""
    device: str = ""
    exact: bool = False
    precision: str = ""
    optimizer: str = ""
    micro_batch: int | None = None
    kind: str = ""
    outcome: str = ""
    mode: str = ""
    source: str = ""
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
        raise TrainpaceError(
            f"{text!r} is not a date.", "Write 2026-11-21 or 2026-11-21T08:30."
        ) from None


def conditions(query: Query) -> list[ColumnElement[bool]]:
    filters: list[ColumnElement[bool]] = []
    for name in (
        "model",
        "device",
        "precision",
        "optimizer",
        "kind",
        "outcome",
        "sweep",
        "workload_key",
    ):
        column, wanted = runs.c[name], getattr(query, name)
        if name == "sweep" and _BEGINNING.fullmatch(wanted):
            filters += [column >= wanted.lower(), column < wanted.lower() + "g"]
        elif wanted:
            is_part = name in ("model", "device") and not query.exact
            filters.append(
                column.icontains(wanted, autoescape=True) if is_part else column == wanted
            )
    if query.micro_batch is not None:
        filters.append(runs.c.micro_batch == query.micro_batch)
    if query.since:
        filters.append(runs.c.created_at >= since_text(query.since))
    if query.text:
        filters.append(runs.c.words.contains(query.text.casefold(), autoescape=True))
    if query.mode:  # these two have no column of their own: they are where the record has them
        filters.append(runs.c.record.contains(f'"mode":{json.dumps(query.mode)}', autoescape=True))
    if query.source:
        part = json.dumps(query.source, ensure_ascii=False)[1:-1]
        part = part.replace("/", "//").replace("%", "/%").replace("_", "/_")
        filters.append(runs.c.record.ilike(f'%"source":"%{part}%","workload/_key":%', escape="/"))
    if query.with_forecast:
        filters.append(runs.c.forecast_ms.is_not(None))
    return filters


class Page(NamedTuple):
    """Runs in order; how many match the query from here on (None: more than `most`); and the position after which the
    next page starts ("" on the last page)."""

    entries: list[Entry]
    matches: int | None
    after: str


def page(
    journal: Journal,
    query: Query,
    order: str = "time",
    descending: bool = True,
    after: str = "",
    size: int = 25,
    most: int = MOST_COUNTED,
) -> Page:
    """A page of the runs of a query. Raises TrainpaceError for an `after` that is not from a page of this order."""
    names = ORDERS[order]
    columns = [runs.c[name] for name in names]
    wanted = [*_narrowed(journal, query)]
    if order == "step":
        wanted.append(runs.c.step_time_ms.is_not(None))
    filters = bool(wanted) and query != Query()
    if after:
        here, there = tuple_(*columns), tuple_(*_position(after, names))
        wanted.append(here < there if descending else here > there)
    chosen = (
        select(*columns).where(*wanted).order_by(*(c.desc() if descending else c for c in columns))
    )
    index = "runs_list" if filters or order == "time" else INDEXES[order]
    chosen = chosen.with_hint(runs, f"INDEXED BY {index}", "sqlite").limit(most + 1)

    def read(connection: Connection) -> tuple[list[Any], dict[str, str]]:
        keys = connection.execute(chosen).all()
        shown = [key.id for key in keys[:size]]
        records = connection.execute(select(runs.c.id, runs.c.record).where(runs.c.id.in_(shown)))
        return list(keys), {row.id: row.record for row in records}

    keys, records = journal.read(read)
    entries = [
        from_json(records[key.id], Entry, f"a run in {journal.place}")
        for key in keys[:size]
        if key.id in records
    ]
    more = _text_of(tuple(keys[size - 1])) if len(keys) > size else ""
    return Page(entries, None if len(keys) > most else len(keys), more)


def names_of(journal: Journal, column: str) -> list[str] | None:
    """All models or devices in the journal, sorted; None where there are more than MOST_NAMES."""
    name = runs.c[column]
    first = select(func.min(name).label("name"))
    walk = first.cte("names", recursive=True)
    following = select(func.min(name)).where(name > walk.c.name).scalar_subquery()
    walk = walk.union_all(select(following).where(walk.c.name.is_not(None)))
    chosen = select(walk.c.name).where(walk.c.name.is_not(None)).limit(MOST_NAMES + 1)
    names = journal.read(lambda connection: list(connection.execute(chosen).scalars()))
    return None if len(names) > MOST_NAMES else names


def _narrowed(journal: Journal, query: Query) -> list[ColumnElement[bool]]:
    """The conditions of a query, with parts of names replaced by the full names that contain them."""
    narrowed, rest = [], {}
    for column in ("model", "device"):
        part: str = getattr(query, column)
        if not part or query.exact:
            continue
        names = names_of(journal, column)
        if names is None:
            continue
        having = [name for name in names if part.lower() in name.lower()]
        rest[column] = ""
        if len(having) < len(names):
            narrowed.append(runs.c[column].in_(having) if having else false())
    # the cheap ones first: SQLite asks them in this order
    return [*conditions(replace(query, **rest)), *narrowed]


def _text_of(key: tuple[Any, ...]) -> str:
    return (
        base64.urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode())
        .decode()
        .rstrip("=")
    )


def _position(after: str, names: tuple[str, ...]) -> list[ColumnElement[Any]]:
    """The values of the columns where the previous page ended."""
    kinds = tuple(float if name == "step_time_ms" else str for name in names)
    try:
        text = base64.b64decode(after.encode() + b"=" * (-len(after) % 4), b"-_", validate=True)
        values = msgspec.json.decode(text, type=tuple[kinds])  # type: ignore[valid-type]
        Query(
            text="".join(value for value in values if isinstance(value, str))
        )  # refuses what no database takes
    except (binascii.Error, ValueError, RecursionError):
        values = ()
    if not values or not all(isinstance(value, str) or abs(value) < LARGEST for value in values):
        raise TrainpaceError(
            "after is not where a page of this list ended.", "Start again at the first page."
        )
    return [literal(value, runs.c[name].type) for value, name in zip(values, names, strict=True)]
