"""The journal behaves the same on SQLite and on a real PostgreSQL."""

import datetime
import multiprocessing
import os
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import entries as strategies
from entries import entry, sweep, whole_entry
from nouns import measurement
from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.outcome import FailedProbe
from trainpace.journal import Entry, Journal, Query, entry_of, may_know, new_id, probe_of
from trainpace.journal.entry import utc_text

SPAWN = multiprocessing.get_context("spawn")


def test_added_entry_is_returned_unchanged(journal):
    one = whole_entry()
    assert journal.add(one)
    assert journal.get(one.id) == one
    assert not journal.add(replace(one, notes="another"))
    assert journal.get(one.id[:9].upper()) == one
    assert journal.count() == 1


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(strategies.entries(), max_size=4, unique_by=lambda e: e.id))
def test_any_entry_round_trips_through_database(journal, several):
    before = journal.count()
    new = [
        e
        for e in several
        if not journal.find(Query(), limit=None)
        or e.id not in {f.id for f in journal.find(limit=None)}
    ]
    assert journal.add_many(several) == len(new)
    assert journal.count() == before + len(new)
    for e in new:
        assert journal.get(e.id) == e
        assert e in journal.find(
            Query(model=e.model, device=e.device, exact=True, optimizer=e.execution.optimizer),
            limit=None,
        )


def test_measurements_round_trip_through_entries(journal):
    m = replace(
        measurement(),
        reserved_memory_gib=2.0,
        losses=(1.0, float("nan"), float("inf")),
        device="T4",
    )
    journal.add(entry_of(m, forecast_ms=3.0))
    back = probe_of(journal.find()[0])
    assert replace(back, losses=()) == replace(m, losses=())
    assert back.losses[0] == 1.0
    assert back.losses[1] != back.losses[1]
    probe = FailedProbe(
        model="m",
        device="d",
        execution=Execution(micro_batch=512),
        failure="out_of_memory",
        reason="no\x00\x1b[31m memory",
        environment={},
    )
    failed = entry_of(probe)
    assert journal.add(failed)
    assert (failed.outcome, failed.step_time_ms) == ("out_of_memory", None)
    assert "\x1b" not in failed.reason
    with pytest.raises(TrainpaceError):
        probe_of(replace(entry_of(m), step=None))


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "../../x"},
        {"created_at": "2026-11-21"},
        {"created_at": "2026-11-21T00:00:00Z"},
        {"model": "a\0b"},
        {"environment": {"\0": ""}},
        {"step_times_ms": (float("nan"),)},
        {"peak_memory_gib": float("inf")},
        {"seed": 2**60},
        {"step_time_ms": -1.0},
        {"outcome": "crashed"},
        {"outcome": "fine"},
        {"kind": "guess"},
        {"notes": "\ud800"},
    ],
)
def test_entry_rejects_values_that_do_not_round_trip(wrong):
    with pytest.raises(TrainpaceError) as error:
        replace(entry(), **wrong) and entry(**wrong)
    assert "\n" not in str(error.value)


def test_find_applies_every_filter(journal):
    old = entry(
        created_at="2020-01-01T00:00:00.000000Z", device="A100", batch=64, notes="Straße 100% _odd_"
    )
    other = entry(
        model="vgg16",
        execution=Execution(precision="bf16", optimizer="adamw"),
        sweep=new_id(),
        kind="import",
    )
    failed = entry(step_time_ms=None, outcome="out_of_memory", reason="too large", workload_key="w")
    assert journal.add_many([old, other, failed]) == 3

    def ids(**query):
        return {e.id for e in journal.find(Query(**query))}

    assert ids(model="RESNET") == {old.id, failed.id}
    assert ids(model="resnet", exact=True) == set()
    assert ids(model="vgg16", exact=True) == {other.id}
    assert ids(device="a10") == {old.id}
    assert (
        ids(precision="bf16")
        == ids(optimizer="adamw")
        == ids(kind="import")
        == ids(sweep=other.sweep)
        == {other.id}
    )
    assert ids(sweep=other.sweep[:8]) == ids(sweep=other.sweep[:8].upper()) == {other.id}
    assert ids(sweep="x" + other.sweep[:7]) == ids(sweep=other.sweep[:31] + "%") == set()
    assert ids(micro_batch=64) == {old.id}
    assert (
        ids(outcome="out_of_memory")
        == ids(workload_key="w")
        == ids(text="TOO LARGE")
        == {failed.id}
    )
    assert ids(since="2020-01-02") == {other.id, failed.id}
    assert ids(since="2020-01-01T01:00:00+01:00") == {old.id, other.id, failed.id}
    assert ids(text="STRASSE") == ids(text="100%") == ids(text="_odd_") == {old.id}
    assert ids(text="1%0") == ids(text="record") == set()
    assert ids(model="%") == ids(model="re_net") == set()
    for wrong in ({"kind": "x"}, {"outcome": "x"}, {"text": "\0"}, {"micro_batch": 2**70}):
        with pytest.raises(TrainpaceError):
            Query(**wrong)
    with pytest.raises(TrainpaceError):
        ids(since="someday")


def test_since_accepts_today_and_yesterday(journal):
    now = datetime.datetime.now(datetime.UTC)
    made = [
        entry(id=f"{i:032x}", created_at=utc_text(now - datetime.timedelta(days=i)))
        for i in range(4)
    ]
    journal.add_many(made)
    assert {e.id for e in journal.find(Query(since="Yesterday"))} == {e.id for e in made[:2]}
    assert {e.id for e in journal.find(Query(since="today"))} == {made[0].id}


def test_find_pages_and_get_accepts_id_prefixes(journal):
    made = [
        entry(
            id=f"{'ab' if i < 2 else 'cd'}{i:030x}", created_at=f"2026-01-01T00:00:{i:02}.000000Z"
        )
        for i in range(10)
    ]
    journal.add_many(made)
    assert [e.id for e in journal.find(limit=3, offset=2)] == [e.id for e in made[7:4:-1]]
    assert journal.find(limit=None, newest_first=False) == made == list(journal.every())
    with pytest.raises(TrainpaceError, match="several"):
        journal.get("ab")
    for wrong in ("ef", "", "%", "ab%", "x' OR 1=1", "\0"):
        with pytest.raises(UnknownName):
            journal.get(wrong)


def test_entries_are_annotated_and_deleted(journal):
    one, two = whole_entry(), whole_entry()
    journal.add_many([one, two])
    assert journal.annotate(one.id[:12], "warm room").notes == "warm room"
    assert journal.get(one.id) == replace(one, notes="warm room")
    assert journal.find(Query(text="warm")) == [replace(one, notes="warm room")]
    assert journal.delete(two.id) == two
    assert journal.count() == 1
    with pytest.raises(UnknownName):
        journal.delete(two.id)


def test_open_sweep_is_found_until_finished(journal):
    first, second = (
        sweep(created_at="2026-01-01T00:00:00.000000Z"),
        sweep(created_at="2026-01-02T00:00:00.000000Z"),
    )
    assert journal.open_sweep("k") is None
    assert journal.add(first)
    assert journal.add(second)
    assert not journal.add(first)
    assert journal.open_sweep("k") == second
    assert journal.open_sweep("K") is None
    runs = [
        entry(sweep=second.id, batch=b, created_at=f"2026-01-03T00:00:0{b}.000000Z") for b in (1, 2)
    ]
    journal.add_many([*reversed(runs), entry()])
    assert journal.sweep_entries(second.id) == runs
    assert journal.finish_sweep(second).finished_at
    assert journal.open_sweep("k") == first
    assert [s.id for s in journal.sweeps()] == [first.id, second.id]
    assert journal.sweeps(second.id[:10])[0].finished_at
    with pytest.raises(UnknownName):
        journal.finish_sweep(replace(second, id=new_id()))


def test_add_many_is_atomic(journal):
    def broken():
        for i in range(2500):
            if i == 2400:
                raise UnreadableInput("damaged.")
            yield entry()

    with pytest.raises(UnreadableInput):
        journal.add_many(broken())
    assert journal.count() == 0
    assert journal.add_many(entry() for _ in range(2500)) == 2500


def write(place, worker, count):
    with Journal.open(place) as journal:
        for i in range(count):
            assert journal.add(entry(notes=f"{worker} {i}"))
        journal.add(entry(id="f" * 32, notes="the same from all"))


def test_concurrent_writers_neither_lose_nor_duplicate_runs(place):
    writers = [SPAWN.Process(target=write, args=(place, w, 60)) for w in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(120)
    assert [w.exitcode for w in writers] == [0] * 4
    with Journal.open(place) as journal:
        notes = [e.notes for e in journal.find(limit=None)]
    assert sorted(notes) == sorted(
        [f"{w} {i}" for w in range(4) for i in range(60)] + ["the same from all"]
    )


def bring_in(place, backwards):
    same = [entry(id=f"{i:032x}") for i in range(3000)]
    with Journal.open(place) as journal:
        journal.add_many(reversed(same) if backwards else same)


def test_concurrent_imports_in_reverse_order_do_not_deadlock(place):
    writers = [
        SPAWN.Process(target=bring_in, args=(place, backwards)) for backwards in (True, False)
    ]
    for w in writers:
        w.start()
    for w in writers:
        w.join(120)
    assert [w.exitcode for w in writers] == [0, 0]
    with Journal.open(place) as journal:
        assert journal.count() == 3000


def test_reader_is_not_blocked_by_open_write(place):
    """A writer that has not finished does not block a reader."""
    with Journal.open(place) as writer, Journal.open(place) as reader:
        writer.add(entry())

        def slowly():
            for i in range(1500):
                if i == 1200:
                    assert reader.count() == 1
                yield entry()

        writer.add_many(slowly())
        assert reader.count() == 1501


def test_other_files_are_not_opened_as_journal(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be one " * 100)
    foreign = tmp_path / "mlflow.db"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE runs (run_uuid TEXT)")
    connection.close()
    truncated = tmp_path / "half.db"
    truncated.write_bytes(b"SQLite format 3\x00" + b"\xff" * 300)
    for wrong in (
        text,
        foreign,
        truncated,
        tmp_path,
        "mysql://host/x",
        "sqlite://",
        "postgresql://:::",
        "nul\0",
        text / "x",
    ):
        before = text.read_bytes(), foreign.read_bytes(), truncated.read_bytes()
        with pytest.raises(TrainpaceError) as error:
            Journal.open(str(wrong))
        assert "\n" not in str(error.value)
        assert (text.read_bytes(), foreign.read_bytes(), truncated.read_bytes()) == before
    with pytest.raises(UnreadableInput):
        Journal.open(str(tmp_path / "none.db"), create=False)
    assert not (tmp_path / "none.db").exists()


def test_connection_error_does_not_show_password(tmp_path):
    with pytest.raises(UnreadableInput) as error:
        Journal.open(f"postgresql://ann:hunter2@/x?host={tmp_path}")
    assert "hunter2" not in str(error.value)
    assert "\n" not in str(error.value)


def test_journal_location_follows_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINPACE_JOURNAL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with Journal.open() as journal:
        assert journal.place == str(tmp_path / "data" / "trainpace" / "journal.db")
    monkeypatch.setenv("TRAINPACE_JOURNAL", str(tmp_path / "mine.db"))
    with Journal.open() as journal:
        assert journal.place == str(tmp_path / "mine.db")
    assert os.path.exists(tmp_path / "mine.db")


def test_entries_are_ordered_by_creation_time(journal):
    odd = [
        entry(created_at=t)
        for t in (
            "0001-01-01T00:00:00.000000Z",
            "2026-11-21T07:45:36.000001Z",
            "9999-12-31T23:59:59.999999Z",
        )
    ]
    journal.add_many(odd[::-1])
    assert journal.find(newest_first=False) == odd
    assert isinstance(journal.find()[0], Entry)


def test_may_know_checks_for_device_before_opening(tmp_path):
    place = str(tmp_path / "journal.db")
    assert may_know(place, {"T4"})  # whatever is wrong with it is said when it is opened
    with Journal.open(place) as opened:
        assert not may_know(place, {"T4"})
        opened.add(entry(device="T4", outcome="ok"))
        opened.add(entry(device="V100", outcome="out_of_memory", step_time_ms=None, reason="no."))
        assert may_know(place, {"A100", "T4"})
        assert not may_know(place, {"A100", "V100"})
    assert may_know(place, {"T4"})
    (tmp_path / "damaged.db").write_text("no database")
    assert may_know(str(tmp_path / "damaged.db"), {"T4"})
    assert may_know("postgresql://host/database", {"T4"})
