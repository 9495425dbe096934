"""Tests of writing and reading event logs."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_logs import read_log
from trainpace.watch.inside import event_log
from trainpace.watch.inside.event_log import PARTS, EventLogWriter, Fetch, Span, Step, unused

ns = st.integers(0, 2**62)
STEPS = st.builds(
    Step,
    trial=st.integers(0, 6),
    micro_steps=st.integers(0, 65535),
    number=st.integers(0, 2**31),
    start_ns=ns,
    end_ns=ns,
    samples=st.integers(0, 2**31),
    reserved_gib=st.just(0.5),
    allocator_retries=st.just(2.0),
    parts_ns=st.tuples(*[ns] * len(PARTS)),
)
FETCHES = st.builds(
    Fetch,
    worker=st.integers(-1, 100),
    samples=st.integers(0, 10**6),
    start_ns=ns,
    end_ns=ns,
    cpu_ns=ns,
    collate_ns=ns,
)
NOTES = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3
).filter(lambda d: "name" not in d)


def written(path, records):
    writer = EventLogWriter(str(path), {"role": "process"})
    for record in records:
        {Step: writer.step, Fetch: writer.fetch, dict: lambda r: writer.note(**r)}[type(record)](
            record
        )
    writer.flush()
    return path.read_bytes()


@given(records=st.lists(STEPS | FETCHES | NOTES, max_size=12))
def test_records_survive_a_round_trip(records, tmp_path_factory):
    header, read = read_log(written(tmp_path_factory.mktemp("trail") / "a.trail", records))
    assert header["role"] == "process"
    assert read == records


@given(records=st.lists(STEPS | FETCHES | NOTES, min_size=1, max_size=6), cut=st.integers(1, 150))
def test_truncated_event_log_is_read_up_to_the_cut(records, cut, tmp_path_factory):
    whole = written(tmp_path_factory.mktemp("trail") / "a.trail", records)
    first = whole.index(b"\n") + 1
    read = read_log(whole[: max(first, len(whole) - cut)])[1]
    assert read == records[: len(read)]
    assert len(read) < len(records)


def test_event_log_names_are_unique(tmp_path):
    paths = [unused(str(tmp_path), "process-1-here") for _ in range(3)]
    assert [Path(p).name for p in paths] == [
        "process-1-here.trail",
        "process-1-here-2.trail",
        "process-1-here-3.trail",
    ]
    assert unused(str(tmp_path / "none"), "a") == str(tmp_path / "none" / "a.trail")


def test_span_name_is_written_once(tmp_path):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    for _ in range(3):
        writer.span(4, 0, "Net", 0, 5, 9)
    writer.flush()
    read = read_log((tmp_path / "a").read_bytes())[1]
    assert read == [{"name": "Net", "number": 1}] + [Span(4, 0, 1, 0, 5, 9)] * 3


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b"no json\n", b'{"trail": 99}\n', b'{"trail": 1}\nXYZ']
)
def test_invalid_files_are_rejected(data):
    with pytest.raises(ValueError, match=r"event log|record|Expecting"):
        read_log(data)


def test_full_disk_ends_the_event_log_without_an_error(tmp_path):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    os.close(writer._file)  # writing now fails, as on a full disk
    writer.note(a=1)
    writer.flush()
    writer.note(b=2)
    writer.flush()
    assert read_log((tmp_path / "a").read_bytes())[1] == []


def test_records_are_dropped_after_a_full_disk(tmp_path):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    os.close(writer._file)
    for _ in range(100):
        writer.span(4, 0, "Net", 0, 5, 9)
        writer.flush()
    assert not writer._waiting


def test_closed_writer_drops_records(tmp_path):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    writer.close()
    writer.span(4, 0, "Net", 0, 5, 9)
    assert not writer._waiting


def test_partial_write_ends_the_event_log(tmp_path, monkeypatch):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    writer.fetch(Fetch(0, 1, 2, 3, 4, 5))
    writer.flush()
    monkeypatch.undo()
    writer.fetch(Fetch(0, 1, 2, 3, 4, 5))
    writer.flush()
    assert read_log((tmp_path / "a").read_bytes())[1] == []


def test_thread_can_add_records_during_a_flush(tmp_path, monkeypatch):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    write = os.write

    def meanwhile(file, data):
        with memoryview(data):  # os.write holds the buffer while other threads run
            writer.note(other=1)
        return write(file, data)

    monkeypatch.setattr(os, "write", meanwhile)
    writer.note(first=1)
    writer.flush()
    monkeypatch.undo()
    writer.flush()
    assert read_log((tmp_path / "a").read_bytes())[1] == [{"first": 1}, {"other": 1}]


def test_signal_handler_flush_does_not_deadlock(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "LONGEST_WRITE_S", 0.05)
    writer = EventLogWriter(str(tmp_path / "a"), {})
    writer.note(first=1)
    with writer._writing:  # the signal interrupts this thread during a write
        writer.flush()
        assert read_log((tmp_path / "a").read_bytes())[1] == []
    writer.flush()
    assert read_log((tmp_path / "a").read_bytes())[1] == [{"first": 1}]


def test_close_during_a_flush_raises_nothing(tmp_path, monkeypatch):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    write = os.write

    def meanwhile(file, data):
        writer.close()
        return write(file, data)

    monkeypatch.setattr(os, "write", meanwhile)
    writer.note(first=1)
    writer.flush()
    monkeypatch.undo()
    writer.note(second=2)
    writer.flush()
    assert read_log((tmp_path / "a").read_bytes())[1] == []


def test_spans_beyond_65535_names_have_no_name(tmp_path):
    writer = EventLogWriter(str(tmp_path / "a"), {})
    for i in range(0x10001):
        writer.span(4, 0, f"Net {i}", 0, 5, 9)
    writer.flush()
    spans = [r for r in read_log((tmp_path / "a").read_bytes())[1] if isinstance(r, Span)]
    assert [s.name for s in spans] == [*range(1, 0x10000), 0, 0]
