"""Storage of the journal: adds, finds, pages and changes runs in SQLite and PostgreSQL.

A filter with few matches must examine all runs. The index `runs_list` has all filtered columns in
order of time, so only a tenth of the table is read.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from msgspec.structs import asdict, replace
from sqlalchemy import URL, ColumnElement, Connection, Engine, Select, Table, and_, func, select
from sqlalchemy.dialects import postgresql, sqlite

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.records import Record, from_json
from trainpace.journal.database import (
    JournalUnusable,
    engine_of,
    one_writer,
    plainly,
    prepare,
    row_of,
    runs,
    shown,
    sweeps,
    url_of,
    writing,
)
from trainpace.journal.entry import (
    KINDS,
    OUTCOMES,
    Entry,
    Sweep,
    default_place,
    is_text,
    now_utc,
    utc_text,
)

MOST_COUNTED = 200
"""Maximum number of matching runs that are counted."""
ORDERS: dict[str, tuple[str, ...]] = {
    "time": ("created_at", "id"),
    "model": ("model", "created_at", "id"),
    "device": ("device", "created_at", "id"),
    "step": ("step_time_ms", "id"),
}
"""Sort orders of a list, as columns. In the order by step, runs without a step time are absent."""


class Query(Record):
    """Filters for runs. All of them must hold.

    `model` and `device` match a part of the name in any case, or the whole name if `exact` is True.
    `source` matches a part of the source's name. `sweep` is an id or its first digits. `text` is
    searched in model, device, notes, reason, command and source. `since` is a time in UTC.
    """

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
        for name, known in (("kind", KINDS), ("outcome", OUTCOMES)):
            value = getattr(self, name)
            if value and value not in known:
                raise TrainpaceError(f"{name} {value!r} is not one of {', '.join(known)}.")
        for name in self.__struct_fields__:
            if isinstance(getattr(self, name), str) and not is_text(getattr(self, name)):
                raise TrainpaceError(f"the filter {name} is not valid text.")
        if self.micro_batch is not None and not 0 <= self.micro_batch < 2**63:
            raise TrainpaceError(f"micro-batch {self.micro_batch} is not a valid size.")


ALL = Query()
"""Query without filters."""


def since_text(text: str) -> str:
    """Return a date like ``2026-11-21``, or any ISO 8601 time, in the journal's form.

    A time without a zone counts as UTC. "today" and "yesterday" are days in UTC.

    Raises:
        TrainpaceError: If the text is not a date.
    """
    days = {"today": 0, "yesterday": 1}.get(text.strip().casefold())
    if days is not None:
        day = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days)
        text = day.isoformat()
    try:
        return utc_text(datetime.datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        raise TrainpaceError(
            f"{text!r} is not a date.", "Write 2026-11-21, 2026-11-21T08:30, today or yesterday."
        ) from None


def conditions(query: Query) -> list[ColumnElement[bool]]:
    """Return the SQL conditions of a query."""
    column, record = runs.c, runs.c.record  # Mode and source have no column.
    by_name: dict[str, Callable[[Any], ColumnElement[bool]]] = {
        "sweep": lambda digits: _begins_with(column.sweep, digits),
        "since": lambda date: column.created_at >= since_text(date),
        "text": lambda text: column.words.contains(text.casefold(), autoescape=True),
        "mode": lambda mode: record.contains(f'"mode":{json.dumps(mode)}', autoescape=True),
        "source": _has_source,
        "with_forecast": lambda _: column.forecast_ms.is_not(None),
    }
    if not query.exact:
        for name in ("model", "device"):
            by_name[name] = partial(column[name].icontains, autoescape=True)
    return [
        by_name[name](value) if name in by_name else column[name] == value
        for name, value in asdict(replace(query, exact=False)).items()
        if value != getattr(ALL, name)
    ]


def _has_source(part: str) -> ColumnElement[bool]:
    text = json.dumps(part, ensure_ascii=False)[1:-1]
    text = text.replace("/", "//").replace("%", "/%").replace("_", "/_")
    return runs.c.record.ilike(f'%"source":"%{text}%","workload/_key":%', escape="/")


def _begins_with(column: ColumnElement[Any], digits: str) -> ColumnElement[bool]:
    """Return the condition for ids that begin with `digits`. An index answers it.

    "g" sorts after all hexadecimal digits.
    """
    return and_(column >= digits.lower(), column < digits.lower() + "g")


class Page(NamedTuple):
    """Page of runs.

    `matches` is the number of matching runs from this page on, or None if there are too many.
    `following` is the position of the next page, or None on the last page.
    """

    entries: list[Entry]
    matches: int | None
    following: int | None


def page(
    journal: Journal,
    query: Query,
    order: str = "time",
    descending: bool = True,
    start: int = 0,
    size: int = 25,
    most: int = MOST_COUNTED,
) -> Page:
    """Return a page of runs.

    Args:
        journal: Open journal.
        query: Filters.
        order: Key of ORDERS.
        descending: If True, start with the newest or largest.
        start: Number of matching runs on the previous pages.
        size: Number of runs per page.
        most: Number of matching runs up to which they are counted.
    """
    wanted = conditions(query)
    if order == "step":
        wanted.append(runs.c.step_time_ms.is_not(None))
    columns = [runs.c[name] for name in ORDERS[order]]
    by = [column.desc() if descending else column for column in columns]
    chosen = select(runs.c.id).where(*wanted).order_by(*by).offset(start).limit(most + 1)
    # Read ids from an index first. Sorting the large records would be slow.
    ids = journal.read(lambda connection: list(connection.execute(chosen).scalars()))
    entries = sorted(journal.where_in("id", ids[:size]), key=lambda entry: ids.index(entry.id))
    return Page(
        entries, None if len(ids) > most else len(ids), start + size if len(ids) > size else None
    )


def names_of(journal: Journal, column: str, most: int | None = None) -> list[str]:
    """Return the models or devices in the journal, sorted. At most `most` are returned."""
    name = runs.c[column]
    chosen = select(name).distinct().order_by(name).limit(most)
    return journal.read(lambda connection: list(connection.execute(chosen).scalars()))


CHUNK = 1000
"""Number of rows read or written at a time."""
T = TypeVar("T")
R = TypeVar("R", Entry, Sweep)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Open journal, for one process and one ``with`` block.

    Errors of the database (a full disk, a server that is down, a damaged file) are raised as
    UnreadableInput.
    """

    def __init__(self, engine: Engine, url: URL) -> None:
        self._engine = engine
        self._url = url

    @classmethod
    def open(cls, where: str | None = None, create: bool = True, read_only: bool = False) -> Self:
        """Open the journal at a path or URL. By default, open the user's own journal.

        Args:
            where: Path or URL.
            create: If True, create a missing journal. If False, a missing journal is an error.
            read_only: If True, the database rejects every write.
        """
        url = url_of(where or default_place())
        with plainly(url):
            engine = engine_of(url, create)
            try:
                prepare(engine)
                if read_only:
                    engine.dispose()
                    engine = engine_of(url, create=False, read_only=True)
            except UnreadableInput as error:
                engine.dispose()
                raise UnreadableInput(f"{shown(url)}: {error.message}", error.hint) from None
            except BaseException:
                engine.dispose()
                raise
        return cls(engine, url)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to the database."""
        self._engine.dispose()

    @property
    def place(self) -> str:
        """Path of the journal, or its URL with the password hidden."""
        return shown(self._url)

    @property
    def database(self) -> str:
        """Name of the database: sqlite or postgresql."""
        return self._engine.dialect.name

    def add(self, record: Entry | Sweep) -> bool:
        """Store a run or a sweep. Return False if its id exists. On return, it is on disk."""
        return self.add_many((record,)) == 1

    def add_many(self, entries: Iterable[Entry | Sweep]) -> int:
        """Store runs and sweeps in one transaction, all or none. Return how many were new."""
        remaining = iter(entries)
        first = list(itertools.islice(remaining, CHUNK))
        begun = False

        def work(connection: Connection) -> int:
            nonlocal begun
            if begun:  # The iterator cannot be read twice.
                raise UnreadableInput(
                    "the journal is locked by another process; nothing was saved.", "Try again."
                )
            if len(first) > 1:
                one_writer(connection)
            new = _insert(connection, first)
            while chunk := list(itertools.islice(remaining, CHUNK)):
                begun = True
                new += _insert(connection, chunk)
            return new

        with plainly(self._url):
            new = writing(self._engine, work)
        self._check_there()
        return new

    def _check_there(self) -> None:
        """Raise an error if the SQLite file was removed.

        SQLite would silently write to the deleted file.
        """
        if self._url.drivername == "sqlite" and not os.path.exists(str(self._url.database)):
            raise JournalUnusable(
                f"the journal at {self.place} was removed in the meantime; the new runs are lost."
            )

    def get(self, id_or_prefix: str) -> Entry:
        """Return the run whose id begins with these digits.

        Raises:
            UnknownName: If no run matches.
            TrainpaceError: If several runs match.
        """
        prefix = id_or_prefix.strip().lower()
        entries = []
        if re.fullmatch(r"[0-9a-f]{1,32}", prefix):
            matching = select(runs.c.record).where(_begins_with(runs.c.id, prefix)).limit(2)
            entries = self._records(matching, Entry)
        if not entries:
            hint = f"trainpace journal list shows the ids in {self.place}."
            raise UnknownName("run", id_or_prefix, (), hint)
        if len(entries) > 1:
            text = f"several runs start with {prefix}."
            raise TrainpaceError(text, "Give more digits of the id.")
        return entries[0]

    def find(
        self, query: Query = ALL, limit: int | None = 20, offset: int = 0, newest_first: bool = True
    ) -> list[Entry]:
        """Return matching runs in order of time. If `limit` is None, all are returned."""
        order = (runs.c.created_at, runs.c.id)
        by = [column.desc() if newest_first else column for column in order]
        chosen = select(runs.c.record).where(*conditions(query)).order_by(*by)
        return self._records(chosen.limit(limit).offset(offset), Entry)

    def where_in(self, column: str, values: Iterable[Any]) -> list[Entry]:
        """Return the runs whose column has one of the values."""
        wanted = sorted(values)
        parts = (wanted[i : i + CHUNK] for i in range(0, len(wanted), CHUNK))
        chosen = (select(runs.c.record).where(runs.c[column].in_(part)) for part in parts)
        return [entry for some in chosen for entry in self._records(some, Entry)]

    def every(self, query: Query = ALL) -> Iterator[Entry]:
        """Yield all matching runs, the oldest first. They are read in chunks."""
        chosen = (
            select(runs.c.record).where(*conditions(query)).order_by(runs.c.created_at, runs.c.id)
        )
        with plainly(self._url), self._engine.begin() as connection:
            for (record,) in connection.execution_options(yield_per=CHUNK).execute(chosen):
                yield from_json(record, Entry, f"a run in {self.place}")

    def count(self, query: Query = ALL) -> int:
        """Return the number of matching runs."""
        counted = select(func.count()).select_from(runs).where(*conditions(query))
        return self.read(lambda connection: connection.execute(counted).scalar_one())

    def annotate(self, id_or_prefix: str, notes: str) -> Entry:
        """Replace the notes of a run, and return the changed run."""
        return self._changed(runs, self.get(id_or_prefix), notes=notes)

    def delete(self, id_or_prefix: str) -> Entry:
        """Delete a run, and return it."""
        entry = self.get(id_or_prefix)
        with plainly(self._url):
            writing(
                self._engine,
                lambda connection: connection.execute(runs.delete().where(runs.c.id == entry.id)),
            )
        return entry

    def open_sweep(self, key: str) -> Sweep | None:
        """Return the newest unfinished sweep with this key, or None."""
        unfinished = select(sweeps.c.record).where(
            sweeps.c.key == key, sweeps.c.finished_at.is_(None)
        )
        newest = unfinished.order_by(sweeps.c.created_at.desc(), sweeps.c.id.desc()).limit(1)
        return next(iter(self._records(newest, Sweep)), None)

    def finish_sweep(self, sweep: Sweep) -> Sweep:
        """Mark a sweep as finished, and return it."""
        return self._changed(sweeps, sweep, finished_at=now_utc())

    def sweeps(self, prefix: str = "") -> list[Sweep]:
        """Return the sweeps whose id starts with `prefix`, the oldest first."""
        chosen = select(sweeps.c.record).order_by(sweeps.c.created_at, sweeps.c.id)
        if prefix:
            chosen = chosen.where(sweeps.c.id.startswith(prefix.lower(), autoescape=True))
        return self._records(chosen, Sweep)

    def sweep_entries(self, id_: str) -> list[Entry]:
        """Return the runs of a sweep in the order of measurement."""
        return self.find(Query(sweep=id_), limit=None, newest_first=False)

    def read(self, question: Callable[[Connection], T]) -> T:
        """Run `question` in a read-only transaction."""
        with plainly(self._url), self._engine.begin() as connection:
            return question(connection)

    def run_or_sweep(self, id_: str) -> list[Entry]:
        """Return a run, or the runs of a sweep, by the first digits of an id.

        Raises:
            UnknownName: If nothing matches.
            TrainpaceError: If several match, or a sweep has no runs.
        """
        try:
            return [self.get(id_)]
        except UnknownName:
            matches = self.sweeps(id_.strip()) if id_.strip().isalnum() else []
        if not matches:
            raise UnknownName(
                "run or sweep", id_, (), f"trainpace journal list shows the ids in {self.place}."
            )
        if len(matches) > 1:
            raise TrainpaceError(f"several sweeps start with {id_}.", "Give more digits of the id.")
        entries = self.sweep_entries(matches[0].id)
        if not entries:
            raise TrainpaceError(f"the sweep {id_} has no runs.")
        return entries

    def _changed(self, table: Table, record: R, **changes: Any) -> R:
        """Change fields of a stored record, and return the changed record.

        Raises:
            UnknownName: If the record does not exist.
        """

        def work(connection: Connection) -> R:
            chosen = select(table.c.record).where(table.c.id == record.id).with_for_update()
            stored = connection.execute(chosen).scalar_one_or_none()
            if stored is None:
                raise UnknownName(type(record).__name__.lower(), record.id, ())
            changed = replace(from_json(stored, type(record)), **changes)
            connection.execute(
                table.update().where(table.c.id == record.id).values(row_of(changed))
            )
            return changed

        with plainly(self._url):
            return writing(self._engine, work)

    def _records(self, chosen: Select[Any], kind: type[R]) -> list[R]:
        source = f"a {'run' if kind is Entry else 'sweep'} in {self.place}"
        return [
            from_json(text, kind, source)
            for text in self.read(lambda c: list(c.execute(chosen).scalars()))
        ]


def _insert(connection: Connection, records: list[Entry | Sweep]) -> int:
    """Insert records whose ids are new, and return their number."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    new = 0
    for table, kind in ((runs, Entry), (sweeps, Sweep)):
        if rows := [row_of(record) for record in records if isinstance(record, kind)]:
            statement = (
                dialect.insert(table)
                .on_conflict_do_nothing(index_elements=["id"])
                .returning(table.c.id)
            )
            # Drivers disagree on the rowcount of many rows.
            new += len(connection.execute(statement, rows).all())
    return new
