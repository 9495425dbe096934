"""Storage of the journal: adding, finding and changing runs, on SQLite and PostgreSQL alike."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from msgspec.structs import replace
from sqlalchemy import URL, ColumnElement, Connection, Engine, Select, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.records import from_json
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
    tidy,
    url_of,
    writing,
)
from trainpace.journal.entry import Entry, Sweep, now_utc
from trainpace.journal.place import default_place
from trainpace.journal.query import Query, conditions

CHUNK = 1000
MANY = 10_000
"""After this many new runs the database refreshes the statistics from which it chooses indexes."""
ALL = Query()
T = TypeVar("T")
R = TypeVar("R", Entry, Sweep)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """An open journal, for one process and one ``with`` block.

    Errors of the database (a full disk, a server that is down, a file that is no journal) raise UnreadableInput.
    """

    def __init__(self, engine: Engine, url: URL) -> None:
        self._engine = engine
        self._url = url

    @classmethod
    def open(cls, where: str | None = None, create: bool = True, read_only: bool = False) -> Self:
        """Open the journal at a path or URL, by default the user's own.

        Without `create`, a journal that does not exist is an error. With `read_only`, the database then refuses every change.
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
        self._engine.dispose()

    @property
    def place(self) -> str:
        """A path, or a URL without its password."""
        return shown(self._url)

    @property
    def database(self) -> str:
        return self._engine.dialect.name

    def add(self, record: Entry | Sweep) -> bool:
        """Store a run or a sweep; False if its id is there already. On return it is on disk."""
        return self.add_many((record,)) == 1

    def add_many(self, entries: Iterable[Entry | Sweep]) -> int:
        """Store runs and sweeps in one transaction, all or none; returns how many were new. An error raised by
        `entries` stores none."""
        remaining = iter(entries)
        first = list(itertools.islice(remaining, CHUNK))
        begun = False

        def work(connection: Connection) -> int:
            nonlocal begun
            if begun:  # `remaining` cannot be read twice
                raise UnreadableInput(
                    "another process was in the way; nothing was kept.", "Try again."
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
            if new >= MANY:
                tidy(self._engine)
        self._check_there()
        return new

    def _check_there(self) -> None:
        """SQLite goes on in a file that somebody removed, which nobody will find again."""
        if self._url.drivername == "sqlite" and not os.path.exists(str(self._url.database)):
            raise JournalUnusable(
                f"the journal at {self.place} was removed meanwhile; what was to be kept is lost."
            )

    def get(self, id_or_prefix: str) -> Entry:
        """The run with this id or unique beginning of an id. Raises UnknownName, or TrainpaceError where several match."""
        prefix = id_or_prefix.strip().lower()
        entries = []
        if re.fullmatch(r"[0-9a-f]{1,32}", prefix):
            matching = (
                select(runs.c.record).where(runs.c.id >= prefix, runs.c.id < prefix + "g").limit(2)
            )
            entries = self._records(matching, Entry)
        if not entries:
            raise UnknownName(
                "run", id_or_prefix, (), f"trainpace journal list shows the ids in {self.place}."
            )
        if len(entries) > 1:
            raise TrainpaceError(
                f"several runs start with {prefix}.", "Give more digits of the id."
            )
        return entries[0]

    def find(
        self, query: Query = ALL, limit: int | None = 20, offset: int = 0, newest_first: bool = True
    ) -> list[Entry]:
        """Runs that match a query, in order of time; `limit` None for all."""
        order = [
            column.desc() if newest_first else column for column in (runs.c.created_at, runs.c.id)
        ]
        chosen = select(runs.c.record).where(*conditions(query)).order_by(*order)
        return self._records(chosen.limit(limit).offset(offset), Entry)

    def with_ids(self, ids: Iterable[str]) -> list[Entry]:
        """The runs with these ids, of those that are there."""
        return self._where_in(runs.c.id, ids)

    def with_step_times(self, step_times_ms: Iterable[float]) -> list[Entry]:
        """The runs with exactly these step times."""
        return self._where_in(runs.c.step_time_ms, step_times_ms)

    def every(self, query: Query = ALL) -> Iterator[Entry]:
        """All runs that match a query, the oldest first, read in chunks."""
        chosen = (
            select(runs.c.record).where(*conditions(query)).order_by(runs.c.created_at, runs.c.id)
        )
        with plainly(self._url), self._engine.begin() as connection:
            for (record,) in connection.execution_options(yield_per=CHUNK).execute(chosen):
                yield from_json(record, Entry, f"a run in {self.place}")

    def count(self, query: Query = ALL) -> int:
        counted = select(func.count()).select_from(runs).where(*conditions(query))
        return self.read(lambda connection: connection.execute(counted).scalar_one())

    def annotate(self, id_or_prefix: str, notes: str) -> Entry:
        """Replace the notes of a run; returns the changed run."""
        return self._changed(runs, self.get(id_or_prefix), notes=notes)

    def delete(self, id_or_prefix: str) -> Entry:
        """Delete a run; returns it."""
        entry = self.get(id_or_prefix)
        with plainly(self._url):
            writing(
                self._engine,
                lambda connection: connection.execute(runs.delete().where(runs.c.id == entry.id)),
            )
        return entry

    def open_sweep(self, key: str) -> Sweep | None:
        """The newest unfinished sweep with this key."""
        unfinished = select(sweeps.c.record).where(
            sweeps.c.key == key, sweeps.c.finished_at.is_(None)
        )
        newest = unfinished.order_by(sweeps.c.created_at.desc(), sweeps.c.id.desc()).limit(1)
        return next(iter(self._records(newest, Sweep)), None)

    def finish_sweep(self, sweep: Sweep) -> Sweep:
        """Mark a sweep as finished; returns it."""
        return self._changed(sweeps, sweep, finished_at=now_utc())

    def newest_sweeps(self, limit: int, offset: int = 0) -> list[Sweep]:
        chosen = select(sweeps.c.record).order_by(sweeps.c.created_at.desc(), sweeps.c.id.desc())
        return self._records(chosen.limit(limit).offset(offset), Sweep)

    def sweeps(self, prefix: str = "") -> list[Sweep]:
        """Sweeps whose id starts with `prefix`, the oldest first."""
        chosen = select(sweeps.c.record).order_by(sweeps.c.created_at, sweeps.c.id)
        if prefix:
            chosen = chosen.where(sweeps.c.id.startswith(prefix.lower(), autoescape=True))
        return self._records(chosen, Sweep)

    def sweep_entries(self, id_: str) -> list[Entry]:
        """The runs of a sweep in the order in which they were measured."""
        return self.find(Query(sweep=id_), limit=None, newest_first=False)

    def read(self, question: Callable[[Connection], T]) -> T:
        """Run `question` in a transaction that only reads."""
        with plainly(self._url), self._engine.begin() as connection:
            return question(connection)

    def run_or_sweep(self, id_: str) -> list[Entry]:
        """The run with an id, or the runs of the sweep with it; the first digits are enough. Raises UnknownName, or
        TrainpaceError where several match or a sweep has no runs."""
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
        """Change fields of a stored record; returns it as it is stored now. Raises UnknownName where it is not there."""

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

    def _where_in(self, column: ColumnElement[Any], values: Iterable[Any]) -> list[Entry]:
        wanted = sorted(values)
        parts = (wanted[i : i + CHUNK] for i in range(0, len(wanted), CHUNK))
        return [
            entry
            for part in parts
            for entry in self._records(select(runs.c.record).where(column.in_(part)), Entry)
        ]

    def _records(self, chosen: Select[Any], kind: type[R]) -> list[R]:
        source = f"a {'run' if kind is Entry else 'sweep'} in {self.place}"
        return [
            from_json(text, kind, source)
            for text in self.read(lambda c: list(c.execute(chosen).scalars()))
        ]


def _insert(connection: Connection, records: list[Entry | Sweep]) -> int:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    new = 0
    for table, kind in ((runs, Entry), (sweeps, Sweep)):
        if rows := [row_of(record) for record in records if isinstance(record, kind)]:
            statement = (
                dialect.insert(table)
                .on_conflict_do_nothing(index_elements=["id"])
                .returning(table.c.id)
            )
            new += len(
                connection.execute(statement, rows).all()
            )  # drivers disagree on the rowcount of many rows
    return new
