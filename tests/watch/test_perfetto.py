"""Tests of the Perfetto trace of a recording."""

import gzip
import json
import tracemalloc
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made_logs import MS, START, simple_run, write_process, write_worker
from trainpace.core.errors import UnreadableInput
from trainpace.watch import read_processes, trace_events, write_trace
from trainpace.watch.inside.event_log import DATA, LOGGING, PARTS, EventLogWriter, Fetch


def written(folder, name="trace.json"):
    path = folder / name
    count = write_trace(folder, path)
    content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    trace = json.loads(content)
    assert count == len(trace["traceEvents"])
    return trace["traceEvents"]


def on_track(events, pid, tid):
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]


def assert_nested(events):
    """Check that events of a track are nested or disjoint, also in whole nanoseconds."""
    for track in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        open_until = []
        for event in sorted(
            on_track(events, *track), key=lambda e: e["ts"]
        ):  # a stable sort keeps the written order of ties
            start = int(event["ts"] * 1e3)
            end = start + int(event["dur"] * 1e3)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def test_trace_contains_steps_and_nested_spans(tmp_path):
    spent = [0] * len(PARTS)
    spent[DATA] = 4
    inner = [("logging", "print", 6, 7, 1), ("forward", "Net", 5, 8, 0)]
    write_process(
        tmp_path, [[("data", "next batch", 0, 4, 0), *inner]], [0, 10, 20], rank=3, parts={0: spent}
    )
    events = written(tmp_path)
    assert_nested(events)
    data, forward, logging = on_track(events, 4, 2)
    assert data == {
        "ph": "X",
        "name": "next batch",
        "cat": "data",
        "pid": 4,
        "tid": 2,
        "ts": 0.0,
        "dur": 4000.0,
        "args": {"part": "data"},
    }
    assert (forward["name"], forward["ts"], forward["dur"]) == ("Net", 5000.0, 3000.0)
    assert (logging["name"], logging["cat"]) == ("print", "logging")
    first, second = on_track(events, 4, 1)
    assert (first["name"], second["name"]) == ("step 0", "step 1")
    assert first["args"] == {"trial": "plain", "samples": 8, "micro_steps": 1, "data_ms": 4.0}
    assert first["ts"] + first["dur"] < second["ts"]


def test_processes_and_tracks_have_names(tmp_path):
    simple_run(tmp_path, rank=0, pid=100)
    simple_run(tmp_path, rank=1, pid=101)
    write_worker(tmp_path, 0, [(0, 30)], parent=101, pid=201)
    write_worker(tmp_path, 1, [(10, 40)], parent=101, pid=202)
    events = written(tmp_path)
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] in ("process_name", "thread_name")
    }
    assert names == {
        (1, 0): "rank 0 (process 100 on here)",
        (1, 1): "steps",
        (1, 2): "training",
        (2, 0): "rank 1 (process 101 on here)",
        (2, 1): "steps",
        (2, 2): "training",
        (2, 10): "worker 0",
        (2, 11): "worker 1",
    }
    assert all(e["pid"] > 0 for e in events)
    (fetch,) = on_track(events, 2, 11)
    assert (fetch["ts"], fetch["dur"]) == (10_000.0, 30_000.0)
    assert fetch["args"] == {"samples": 8, "cpu_ms": 1.0, "collate_ms": 0.0}


def test_trace_contains_other_threads_and_main_process_fetches(tmp_path):
    log = EventLogWriter(
        str(tmp_path / "process-1-here.trail"), {"pid": 1, "host": "here", "rank": 0}
    )
    log.fetch(Fetch(-1, 8, 2 * MS, 3 * MS, MS, 0))
    log.span(DATA, 0, "next batch", 0, MS, 4 * MS)
    log.span(LOGGING, 0, "log", 777, 2 * MS, 9 * MS)
    log.flush()
    events = written(tmp_path)
    assert_nested(events)
    assert [e["name"] for e in on_track(events, 1, 2)] == ["next batch", "fetch"]
    (other,) = [e for e in events if e["ph"] == "M" and e["args"].get("name") == "thread 777"]
    assert [e["name"] for e in on_track(events, 1, other["tid"])] == ["log"]


def test_two_processes_of_one_rank_have_separate_tracks(tmp_path):
    simple_run(tmp_path, rank=0, pid=100)
    simple_run(tmp_path, rank=0, pid=101)
    assert len({e["pid"] for e in written(tmp_path)}) == 2


def test_gz_extension_compresses_the_trace(tmp_path):
    simple_run(tmp_path)
    assert written(tmp_path, "trace.json.gz") == written(tmp_path, "trace.json")


def test_failed_trace_keeps_the_previous_file(tmp_path):
    path = simple_run(tmp_path)
    (tmp_path / "trace.json").write_text("before")
    content = bytearray(path.read_bytes())
    content[-1000:] = b"?" * 1000
    path.write_bytes(content)
    with pytest.raises(UnreadableInput):
        write_trace(tmp_path, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == "before"
    assert {p.name for p in tmp_path.iterdir()} == {"trace.json", path.name}


def test_unwritable_folder_raises_unreadable_input(tmp_path):
    simple_run(tmp_path)
    with pytest.raises(UnreadableInput, match="cannot write"):
        write_trace(tmp_path, tmp_path / "none" / "trace.json")


@settings(max_examples=30)
@given(lengths_ns=st.lists(st.integers(100, 10**9), min_size=2, max_size=20))
def test_adjacent_steps_do_not_overlap_in_nanoseconds(tmp_path_factory, lengths_ns):
    folder = tmp_path_factory.mktemp("steps")
    write_process(folder, [], [0.0, *(ns / MS for ns in accumulate(lengths_ns))])
    assert_nested(list(trace_events(read_processes(folder))))


def test_long_event_log_needs_no_more_memory(tmp_path_factory):
    """Ten times the steps need the same peak memory. Spans exist only for the first steps."""
    peaks = []
    for steps in (200, 2000):
        folder = tmp_path_factory.mktemp("long")
        spans = [[("forward", "Net", 10 * i, 10 * i + 5, 0)] for i in range(100)]
        write_process(folder, spans, range(START, START + 10 * steps + 1, 10))
        events = trace_events(read_processes(folder))
        next(events)
        tracemalloc.start()
        count = sum(1 for _ in events)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count > steps
    assert peaks[1] < 1.5 * peaks[0] + 20_000
