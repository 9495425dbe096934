"""Database schema of the run journal, and connections to SQLite or PostgreSQL."""

import itertools
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    Text,
    create_engine,
    event,
    inspect,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.intake import SQLITE, first_bytes
from trainpace.core.records import make_folder, to_json
from trainpace.journal.entry import Entry, Sweep

VERSION = 3
"""Version of the schema. Journals of other versions are rejected."""
LOCK_WAIT_S = 10.0
"""Longest time that a transaction waits for the lock of another process, in seconds."""
_LOCK = 0x7261636B
"""Key of the PostgreSQL advisory lock. Nothing else in the database uses it."""
_PRAGMAS = (
    # FULL makes every commit wait for the disk. That takes milliseconds, and a probe takes seconds.
    # With WAL, NORMAL would survive a killed process but not a power cut.
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    "PRAGMA cache_size=-64000",
)

T = TypeVar("T")

# Sort by bytes, so that timestamps and id prefixes compare the same in every locale.
Words = Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")

_RUN_WORDS = ("created_at", "kind", "outcome", "model", "device", "precision", "optimizer")

_SEARCHED = ("model", "device", "notes", "reason", "command", "source")
metadata = sa.MetaData()
runs = sa.Table(
    "runs",
    metadata,
    Column("id", Words, primary_key=True),
    *(Column(name, Words, nullable=False) for name in _RUN_WORDS),
    Column("micro_batch", sa.BigInteger, nullable=False),
    Column("step_time_ms", Double),
    Column("sweep", Words),
    Column("forecast_ms", Double),
    Column("words", Words, nullable=False),
    Column("record", Text, nullable=False),
    Column("workload_key", Words),
    Column("reserved_memory_gib", Double),
    # On SQLite this index covers all filtered columns in time order, so a filter with few matches
    # does not read the records. PostgreSQL cannot index long text and stores it separately.
    Index(
        "runs_list",
        *"created_at id model device precision optimizer micro_batch kind outcome step_time_ms"
        " forecast_ms sweep words".split(),
    ).ddl_if(dialect="sqlite"),
    Index("runs_newest", "created_at", "id").ddl_if(dialect="postgresql"),
    Index("runs_step", "step_time_ms", "id"),
    Index("runs_model_newest", "model", "created_at", "id"),
    Index("runs_model", "model", "step_time_ms"),
    Index("runs_device", "device", "created_at"),
    Index("runs_sweep", "sweep"),
    Index("runs_workload", "workload_key"),
)
sweeps = sa.Table(
    "sweeps",
    metadata,
    Column("id", Words, primary_key=True),
    Column("created_at", Words, nullable=False),
    Column("key", Words, nullable=False),
    Column("finished_at", Words),
    Column("record", Text, nullable=False),
    Index("sweeps_key", "key", "created_at"),
)
journal_meta = sa.Table("journal_meta", metadata, Column("version", sa.Integer, nullable=False))


def row_of(record: Entry | Sweep) -> dict[str, Any]:
    """Return the table row of a record: its JSON and its searchable columns."""
    table = sweeps if isinstance(record, Sweep) else runs
    row = {name: getattr(record, name) for name in table.c.keys() if hasattr(record, name)}  # noqa: SIM118
    if isinstance(record, Entry):
        words = (getattr(record, name) for name in _SEARCHED)
        row |= {
            name: getattr(record.execution, name)
            for name in ("precision", "optimizer", "micro_batch")
        }
        row["words"] = "\n".join(word for word in words if word).casefold()
    return row | {"record": to_json(record)}


def prepare(engine: Engine) -> None:
    """Create the journal's tables in an empty database. Two processes may call it at once.

    Raises:
        UnreadableInput: If the tables belong to another program or version.
    """
    with engine.begin() as connection:
        if _has_tables(connection):
            return

    def create(connection: Connection) -> None:
        one_writer(connection)
        if not _has_tables(connection):
            metadata.create_all(connection)
            connection.execute(journal_meta.insert().values(version=VERSION))

    writing(engine, create)


def _has_tables(connection: Connection) -> bool:
    """Return True if the journal's tables exist. Raise an error for other tables or versions."""
    tables = set(inspect(connection).get_table_names())
    if "journal_meta" not in tables:
        if tables & {"runs", "sweeps"}:
            raise UnreadableInput(
                "this database has tables of another program.",
                "Use a separate file or database for the journal.",
            )
        return False
    version = connection.execute(select(journal_meta.c.version)).scalar_one_or_none()
    if version != VERSION:
        raise UnreadableInput(
            f"this journal has version {version}, but this trainpace reads version {VERSION}.",
            "Export it with the trainpace that made it, or name another journal with --journal.",
        )
    return True


def one_writer(connection: Connection) -> None:
    """Take the lock that serializes schema creation and bulk imports on PostgreSQL.

    Without the lock, two processes that store the same runs in different orders would deadlock.
    SQLite does not need it, because it allows only one writing transaction at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")


class JournalUnusable(UnreadableInput):
    """Error for an unusable database: a damaged file, a server that is down or a full disk."""


def url_of(where: str) -> URL:
    """Return the SQLAlchemy URL of a path or database URL. ``postgresql://`` uses psycopg.

    Raises:
        TrainpaceError: If the name or URL is invalid, or the journal would be in memory.
    """
    if not where or "\x00" in where:
        raise TrainpaceError(f"{where!r} is not a valid name for a journal.")
    if "://" not in where:
        return URL.create("sqlite", database=os.path.abspath(os.path.expanduser(where)))
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):
        raise TrainpaceError(
            "the journal's URL is invalid.", "Write postgresql://user@host/database, or a path."
        ) from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and (not url.database or url.database == ":memory:"):
        raise TrainpaceError("a journal in memory would be lost; name a file.")
    if url.drivername not in ("postgresql+psycopg", "sqlite"):
        raise TrainpaceError(
            f"a journal cannot be stored in {url.drivername}.",
            "Use a path (SQLite), or postgresql://host/database.",
        )
    return url


def shown(url: URL) -> str:
    """Return the path, or the URL with its password hidden."""
    return (
        str(url.database)
        if url.drivername == "sqlite"
        else url.render_as_string(hide_password=True)
    )


def engine_of(url: URL, create: bool, read_only: bool = False) -> Engine:
    """Return an engine whose writing transactions start with BEGIN IMMEDIATE (see `writing`).

    Args:
        url: Database URL.
        create: If True, create a missing SQLite file and its folder.
        read_only: If True, the database rejects every write.
    """
    if url.drivername == "sqlite":
        _prepare_file(Path(str(url.database)), create)
        engine = create_engine(url, connect_args={"timeout": LOCK_WAIT_S})
        event.listen(engine, "connect", _set_up_sqlite)
        if read_only:
            event.listen(engine, "connect", _only_reads)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        options = {"options": "-c default_transaction_read_only=on"} if read_only else {}
        return create_engine(
            url, connect_args={"connect_timeout": 10, "application_name": "trainpace", **options}
        )
    except ModuleNotFoundError:
        raise TrainpaceError(
            "a journal on PostgreSQL needs psycopg.",
            "pip install 'trainpace[postgresql]', or give a path.",
        ) from None


def writing(engine: Engine, work: Callable[[Connection], T]) -> T:
    """Run `work` in one writing transaction. Retry if another process holds the lock.

    SQLite takes the lock at BEGIN. A transaction that has already read cannot wait for the lock.
    """

    def once() -> T:
        with engine.connect().execution_options(writes=True) as connection, connection.begin():
            return work(connection)

    return _retried(once)


def _retried(work: Callable[[], T]) -> T:
    """Run `work`. While another process holds the lock, retry with random exponential backoff.

    SQLite itself waits for most locks, but not for all, and PostgreSQL ends deadlocks at once.
    """
    until = time.monotonic() + LOCK_WAIT_S
    for attempt in itertools.count():
        try:
            return work()
        except (OperationalError, sqlite3.OperationalError) as error:
            if not _in_the_way(getattr(error, "orig", error)) or time.monotonic() > until:
                raise
            time.sleep(random.uniform(0, 0.05 * 2 ** min(attempt, 6)))
    raise AssertionError("the loop does not end")


@contextmanager
def plainly(url: URL) -> Iterator[None]:
    """Convert database errors into `JournalUnusable` with a one-sentence message."""
    try:
        yield
    except UnicodeDecodeError:
        raise JournalUnusable(
            f"the journal at {shown(url)} is unusable: its text is damaged."
        ) from None
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        if _in_the_way(cause):
            raise JournalUnusable(
                f"the journal at {shown(url)} is locked by another process. Nothing was saved.",
                "Try again when that process has ended, or name another --journal.",
            ) from None
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise JournalUnusable(
            f"the journal at {shown(url)} cannot be used:"
            f" {(lines or [type(cause).__name__])[0].rstrip('.')}.",
            "Check --journal and $TRAINPACE_JOURNAL.",
        ) from None


def _prepare_file(path: Path, create: bool) -> None:
    """Check that a path can be a journal, and create its folder."""
    if path.is_dir():
        raise UnreadableInput(f"{path} is a folder, not a journal.")
    if path.exists():
        # SQLite would report this error only after it has waited for locks.
        if first_bytes(path, len(SQLITE)) not in (b"", SQLITE):
            raise UnreadableInput(
                f"{path} is not a journal.", "Give an SQLite database that Trainpace made."
            )
    elif not create:
        raise UnreadableInput(f"there is no journal at {path}.")
    make_folder(path.parent)


def _set_up_sqlite(connection: Any, record: object) -> None:
    """Set the journal mode and the pragmas of a new connection."""
    connection.isolation_level = None  # _begin_sqlite begins transactions, not the driver
    cursor = connection.cursor()
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        tables = {name for (name,) in cursor.execute("SELECT name FROM sqlite_master")}
        # The mode is stored in the file. Leave files of other programs unchanged.
        if not tables or "journal_meta" in tables:
            # SQLite ignores its timeout if several processes open a new file at the same moment.
            _retried(lambda: cursor.execute("PRAGMA journal_mode=WAL"))
    for pragma in _PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _only_reads(connection: Any, record: object) -> None:
    connection.execute("PRAGMA query_only=ON").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _in_the_way(error: object) -> bool:
    """Return True if another process holds the lock or PostgreSQL reports a deadlock."""
    state = getattr(error, "sqlstate", None)
    text = str(error)
    return state in ("40001", "40P01", "55P03") or "is locked" in text or "busy" in text
