"""An older journal opens and is brought up to date; a newer one is refused."""

import json
import multiprocessing

import pytest
from sqlalchemy import inspect, text

from entries import entry, sweep, whole_entry
from trainpace.errors import UnreadableInput
from trainpace.journal import Journal, Query
from trainpace.journal.connect import engine_of, url_of, writing
from trainpace.journal.tables import MIGRATIONS, VERSION, row_of
from trainpace.records import to_json

SPAWN = multiprocessing.get_context("spawn")
VERSION_1 = """
CREATE TABLE runs (
  id TEXT{c} NOT NULL PRIMARY KEY, created_at TEXT{c} NOT NULL, kind TEXT{c} NOT NULL, outcome TEXT{c} NOT NULL, model TEXT{c} NOT NULL,
  device TEXT{c} NOT NULL, precision TEXT{c} NOT NULL, optimizer TEXT{c} NOT NULL, micro_batch BIGINT NOT NULL,
  step_time_ms {d}, sweep TEXT{c}, forecast_ms {d}, words TEXT{c} NOT NULL, record TEXT NOT NULL);
CREATE INDEX runs_newest ON runs (created_at, id);
CREATE INDEX runs_model ON runs (model, step_time_ms);
CREATE INDEX runs_device ON runs (device, created_at);
CREATE INDEX runs_sweep ON runs (sweep);
CREATE TABLE sweeps (id TEXT{c} NOT NULL PRIMARY KEY, created_at TEXT{c} NOT NULL, key TEXT{c} NOT NULL, finished_at TEXT{c}, record TEXT NOT NULL);
CREATE INDEX sweeps_key ON sweeps (key, created_at);
CREATE TABLE journal_meta (version INTEGER NOT NULL);
INSERT INTO journal_meta VALUES (1)
"""
NEW_IN_2 = ("workload_key", "reserved_memory_gib")


def make_version_1(place, entries, sweeps=()):
    def work(connection):
        collation = ' COLLATE "C"' if connection.dialect.name == "postgresql" else ""
        double = "DOUBLE PRECISION" if collation else "DOUBLE"
        for statement in VERSION_1.format(c=collation, d=double).split(";"):
            connection.execute(text(statement))
        for e in entries:
            row = {key: value for key, value in row_of(e).items() if key not in NEW_IN_2}
            row["record"] = json.dumps({k: v for k, v in json.loads(to_json(e)).items() if k not in NEW_IN_2})
            connection.execute(
                text(f"INSERT INTO runs ({', '.join(row)}) VALUES ({', '.join(f':{k}' for k in row)})"), row
            )
        for s in sweeps:
            row = row_of(s)
            connection.execute(
                text(f"INSERT INTO sweeps ({', '.join(row)}) VALUES ({', '.join(f':{k}' for k in row)})"), row
            )

    engine = engine_of(url_of(place), create=True)
    writing(engine, work)
    engine.dispose()


def schema(place):
    engine = engine_of(url_of(place), create=False)
    with engine.begin() as connection:
        found = inspect(connection)
        tables = {
            name: {(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name)}
            for name in found.get_table_names()
        }
        indexes = {i["name"] for name in tables for i in found.get_indexes(name)}
        version = connection.execute(text("SELECT version FROM journal_meta")).scalars().all()
    engine.dispose()
    return tables, indexes, version


def test_version_1_becomes_the_present_one(place, tmp_path):
    kept, begun = [whole_entry(), entry(step_time_ms=None)], sweep()
    make_version_1(place, kept, [begun])
    with Journal.open(place) as journal:
        assert journal.find(newest_first=False) == kept
        assert journal.open_sweep("k") == begun
        new = entry(workload_key="abc", reserved_memory_gib=3.0)
        assert journal.add(new)
        assert journal.find(Query(workload_key="abc")) == [new]
    with Journal.open(place) as journal:
        assert journal.count() == 3


def test_a_migrated_journal_has_the_schema_of_a_new_one(place, tmp_path, request):
    make_version_1(place, [])
    Journal.open(place).close()
    migrated = schema(place)
    if place.startswith("postgresql"):
        import postgres

        fresh = postgres.create_database(request.getfixturevalue("postgres_server"), "fresh")
    else:
        fresh = str(tmp_path / "fresh.db")
    Journal.open(fresh).close()
    assert schema(fresh) == migrated
    assert migrated[2] == [VERSION]


def open_at(place, barrier, answers):
    barrier.wait()
    try:
        with Journal.open(place) as journal:
            journal.add(entry())
            answers.put("")
    except Exception as error:
        answers.put(repr(error))


@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_several_open_a_journal_at_once(place, old):
    if old:
        make_version_1(place, [whole_entry()])
    barrier, answers = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=open_at, args=(place, barrier, answers)) for _ in range(4)]
    for p in processes:
        p.start()
    assert [answers.get(timeout=60) for _ in processes] == [""] * 4
    for p in processes:
        p.join()
    with Journal.open(place) as journal:
        assert journal.count() == 4 + old
    assert schema(place)[2] == [VERSION]


def test_a_migration_that_fails_changes_nothing(place, monkeypatch):
    make_version_1(place, [whole_entry()])
    before = schema(place)

    def fails(connection):
        MIGRATIONS[0](connection)
        raise UnreadableInput("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("trainpace.journal.tables.MIGRATIONS", (fails,))
        with pytest.raises(UnreadableInput, match="disk is full"):
            Journal.open(place)
    assert schema(place) == before
    with Journal.open(place) as journal:
        assert journal.count() == 1


def test_a_newer_journal_is_refused_and_not_touched(place):
    with Journal.open(place) as journal:
        journal.add(entry())
    engine = engine_of(url_of(place), create=False)
    writing(engine, lambda connection: connection.execute(text("UPDATE journal_meta SET version = 99")))
    engine.dispose()
    with pytest.raises(UnreadableInput, match=rf"version 99.*up to {VERSION}.*Update trainpace"):
        Journal.open(place)
    assert schema(place)[2] == [99]
