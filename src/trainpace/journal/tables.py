"""The tables, and the migrations of older journals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql

from trainpace.errors import UnreadableInput
from trainpace.journal.entry import Entry, Sweep
from trainpace.records import to_json

VERSION = 3
_LOCK = 0x7261636B
"""A number that nothing else in the same database locks."""

# bytewise order on both databases, so that times and prefixes of ids compare alike whatever the server's locale
Words = Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")

metadata = MetaData()
runs = Table(
    "runs",
    metadata,
    Column("id", Words, primary_key=True),
    Column("created_at", Words, nullable=False),
    Column("kind", Words, nullable=False),
    Column("outcome", Words, nullable=False),
    Column("model", Words, nullable=False),
    Column("device", Words, nullable=False),
    Column("precision", Words, nullable=False),
    Column("optimizer", Words, nullable=False),
    Column("micro_batch", BigInteger, nullable=False),
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
        "created_at",
        "id",
        "model",
        "device",
        "precision",
        "optimizer",
        "micro_batch",
        "kind",
        "outcome",
        "step_time_ms",
        "forecast_ms",
        "sweep",
        "words",
    ).ddl_if(dialect="sqlite"),
    Index("runs_newest", "created_at", "id").ddl_if(dialect="postgresql"),
    Index("runs_step", "step_time_ms", "id"),
    Index("runs_model_newest", "model", "created_at", "id"),
    Index("runs_model", "model", "step_time_ms"),
    Index("runs_device", "device", "created_at"),
    Index("runs_sweep", "sweep"),
    Index("runs_workload", "workload_key"),
)
sweeps = Table(
    "sweeps",
    metadata,
    Column("id", Words, primary_key=True),
    Column("created_at", Words, nullable=False),
    Column("key", Words, nullable=False),
    Column("finished_at", Words),
    Column("record", Text, nullable=False),
    Index("sweeps_key", "key", "created_at"),
)
journal_meta = Table("journal_meta", metadata, Column("version", Integer, nullable=False))


def row_of(entry: Entry) -> dict[str, Any]:
    """The row of an entry: the whole record, and the columns that are searched."""
    execution = entry.execution
    words = (entry.model, entry.device, entry.notes, entry.reason, entry.command, entry.source)
    return {
        "id": entry.id, "created_at": entry.created_at, "kind": entry.kind, "outcome": entry.outcome, "model": entry.model,
        "device": entry.device, "precision": execution.precision, "optimizer": execution.optimizer,
        "micro_batch": execution.micro_batch, "step_time_ms": entry.step_time_ms, "sweep": entry.sweep,
        "forecast_ms": entry.forecast_ms, "words": "\n".join(word for word in words if word).casefold(),
        "record": to_json(entry), "workload_key": entry.workload_key, "reserved_memory_gib": entry.reserved_memory_gib,
    }  # fmt: skip


def sweep_row_of(sweep: Sweep) -> dict[str, Any]:
    return {
        "id": sweep.id, "created_at": sweep.created_at, "key": sweep.key, "finished_at": sweep.finished_at,
        "record": to_json(sweep),
    }  # fmt: skip


def version_of(connection: Connection) -> int | None:
    """The version of the journal's tables; None in an empty database. Raises UnreadableInput for tables of another program."""
    tables = set(inspect(connection).get_table_names())
    if "journal_meta" not in tables:
        if tables & {"runs", "sweeps"}:
            raise UnreadableInput(
                "this database has tables that are not a journal's.", "Give the journal a file or database of its own."
            )
        return None
    return connection.execute(select(journal_meta.c.version)).scalar_one_or_none()


def bring_up_to_date(connection: Connection) -> None:
    """Create the tables, or run the missing migrations, in the caller's transaction. Two processes may do so at once."""
    one_writer(connection)
    version = version_of(connection)
    if version is None:
        metadata.create_all(connection)
        connection.execute(journal_meta.insert().values(version=VERSION))
        return
    refuse_newer(version)
    for migration in MIGRATIONS[version - 1 :]:
        migration(connection)
    connection.execute(journal_meta.update().values(version=VERSION))


def one_writer(connection: Connection) -> None:
    """Wait until no other process migrates or stores many runs: on PostgreSQL, two processes that store the same runs
    in different orders would deadlock. On SQLite a writing transaction is the only one."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def refuse_newer(version: int) -> None:
    """Raises UnreadableInput for a journal written by a newer version, whose meaning is unknown here."""
    if version > VERSION:
        raise UnreadableInput(
            f"this journal has version {version}, and this trainpace knows versions up to {VERSION}.",
            "Update trainpace, or name another journal with --journal.",
        )


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
