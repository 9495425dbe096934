"""The tables, and the migrations of older journals."""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Double, Index, Text, inspect, select, text
from sqlalchemy.dialects import postgresql

from trainpace.errors import UnreadableInput
from trainpace.journal.entry import Entry, Sweep
from trainpace.records import to_json

VERSION = 3
_LOCK = 0x7261636B
"""A number that nothing else in the same database locks."""

# bytewise order on both databases, so that times and prefixes of ids compare alike whatever the server's locale
Words = Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")

_RUN_WORDS = ("created_at", "kind", "outcome", "model", "device", "precision", "optimizer")
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
    # On SQLite all that runs are filtered by, in order of time: a filter that few runs fulfil reads this, and not the records.
    # PostgreSQL takes no long text into an index, and keeps the records apart from the rows by itself.
    Index(
        "runs_list",
        *"created_at id model device precision optimizer micro_batch kind outcome step_time_ms forecast_ms sweep words".split(),
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
    """The row of a record: the whole record, and the columns that are searched."""
    table = sweeps if isinstance(record, Sweep) else runs
    row = {name: getattr(record, name) for name in table.c.keys() if hasattr(record, name)}  # noqa: SIM118
    if isinstance(record, Entry):
        words = (record.model, record.device, record.notes, record.reason, record.command, record.source)
        row |= {name: getattr(record.execution, name) for name in ("precision", "optimizer", "micro_batch")}
        row["words"] = "\n".join(word for word in words if word).casefold()
    return row | {"record": to_json(record)}


def version_of(connection: Connection) -> int | None:
    """The version of the journal's tables; None in an empty database. Raises UnreadableInput for tables of another program
    or of a newer version, whose meaning is unknown here."""
    tables = set(inspect(connection).get_table_names())
    if "journal_meta" not in tables:
        if tables & {"runs", "sweeps"}:
            raise UnreadableInput(
                "this database has tables that are not a journal's.", "Give the journal a file or database of its own."
            )
        return None
    version = connection.execute(select(journal_meta.c.version)).scalar_one_or_none()
    if version is not None and version > VERSION:
        raise UnreadableInput(
            f"this journal has version {version}, and this trainpace knows versions up to {VERSION}.",
            "Update trainpace, or name another journal with --journal.",
        )
    return version


def bring_up_to_date(connection: Connection) -> None:
    """Create the tables, or run the missing migrations, in the caller's transaction. Two processes may do so at once."""
    one_writer(connection)
    version = version_of(connection)
    if version is None:
        metadata.create_all(connection)
        connection.execute(journal_meta.insert().values(version=VERSION))
        return
    for migration in MIGRATIONS[version - 1 :]:
        migration(connection)
    connection.execute(journal_meta.update().values(version=VERSION))


def one_writer(connection: Connection) -> None:
    """Wait until no other process migrates or stores many runs: on PostgreSQL, two processes that store the same runs
    in different orders would deadlock. On SQLite a writing transaction is the only one."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def _to_2(connection: Connection) -> None:
    """Version 2 adds the workload's key and the allocator's memory."""
    words, number = Words.compile(connection.dialect), Double().compile(connection.dialect)
    connection.execute(text(f"ALTER TABLE runs ADD COLUMN workload_key {words}"))
    connection.execute(text(f"ALTER TABLE runs ADD COLUMN reserved_memory_gib {number}"))
    connection.execute(text("CREATE INDEX runs_workload ON runs (workload_key)"))


def _to_3(connection: Connection) -> None:
    """Version 3 adds indexes for pages of a million runs: one that answers every filter, and one per order."""
    new = ["runs_step", "runs_model_newest"]
    if connection.dialect.name == "sqlite":
        connection.execute(text("DROP INDEX runs_newest"))
        new.append("runs_list")
    for index in runs.indexes:
        if index.name in new:
            index.create(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_to_2, _to_3)
"""Item n - 1 migrates version n to n + 1."""
assert len(MIGRATIONS) == VERSION - 1
