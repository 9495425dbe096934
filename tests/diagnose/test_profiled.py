"""Traces of several ranks, which files are traces, and bounds on possible savings."""

import math

import pytest

import made_traces as made
from made_traces import ADD, ALL_REDUCE, GEMM, Work
from trainpace.core.errors import UnreadableInput
from trainpace.core.records import to_json
from trainpace.diagnose import is_trace, read_profiled


def folder_of(tmp_path, works, name="rank{}.pt.trace.json.gz", world=None):
    for rank, work in enumerate(works):
        trace = made.trace_of(made.events_of(work), rank=rank, world_size=world or len(works))
        made.write(tmp_path / name.format(rank), trace)
    return tmp_path


def late(ms):
    """A rank that computes longer by the given time and keeps the other waiting in its all-reduce."""
    own, waiting = 4000.0 + ms, 4000.0 - ms
    kernels = (
        (GEMM, 10.0, 100.0, 100.0 + own),
        (ALL_REDUCE, 20.0, 100.0 + own, 100.0 + own + waiting + 1000.0),
        (ADD, 30.0, 9100.0, 10_100.0),
    )
    return Work(10_000.0, kernels, operators=(("aten::mm", 5.0, 60.0),))


def test_profiled_straggler_rank_is_named(tmp_path):
    found = read_profiled(folder_of(tmp_path, [late(0), late(0), late(4000), late(0)]))
    assert found.straggler == 2
    shares = {s.cause: s.ms for s in found.shares}
    assert shares["straggler"] == pytest.approx(3.0)  # 4 ms of waiting in three of four ranks
    assert shares["communication"] == pytest.approx(1.0)
    assert math.fsum(shares.values()) == pytest.approx(found.step_ms) == pytest.approx(10.0)
    assert {b.cause: b.at_most_ms for b in found.bounds}["straggler"] == pytest.approx(3.0)


def test_small_difference_is_not_a_straggler(tmp_path):
    found = read_profiled(folder_of(tmp_path, [late(0), late(100)]))
    assert found.straggler is None


@pytest.mark.parametrize(
    "work",
    [
        made.COMPUTING,
        made.WAITING_FOR_DATA,
        made.LAUNCHING,
        made.EXCHANGING,
        made.SYNCHRONISING,
        made.COPYING,
    ],
)
def test_saving_bounds_lie_between_share_and_step(work, tmp_path):
    found = read_profiled(made.write(tmp_path / "t.json", made.trace_of(made.events_of(work))))
    shares = {s.cause: s.ms for s in found.shares}
    busy = found.ranks[0].busy_ms
    for bound in found.bounds:
        assert 0 < bound.at_most_ms <= found.step_ms + 1e-9
        if bound.cause in ("data", "launch", "logging", "own_code"):
            assert bound.at_most_ms <= found.step_ms - busy + 1e-9  # the device's work remains
        if bound.cause != "compute":
            assert bound.at_most_ms >= shares[bound.cause] - 1e-9
    assert found.verdict == max(shares, key=lambda cause: shares[cause])
    assert '"verdict"' in to_json(found)


def test_longest_trace_of_each_rank_is_used(tmp_path):
    for name, steps in (("a", 3), ("b", 6)):
        made.write(
            tmp_path / f"{name}.json",
            made.trace_of(made.events_of(made.COMPUTING, steps), rank=0, world_size=2),
        )
    found = read_profiled(tmp_path)
    assert [rank.steps for rank in found.ranks] == [5]
    assert any("1 more trace" in line for line in found.warnings)
    assert "1 of 2 ranks are here." in found.warnings


def test_damaged_file_in_folder_is_a_warning(tmp_path):
    folder_of(tmp_path, [made.COMPUTING, made.COMPUTING])
    (tmp_path / "rank2.json").write_text('{"traceEvents": [')
    found = read_profiled(tmp_path)
    assert len(found.ranks) == 2
    assert any("1 file could not be read" in line for line in found.warnings)


def test_missing_rank_is_read_from_file_name(tmp_path):
    for rank in (7, 3):
        made.write(
            tmp_path / f"rank-{rank}.Jul_15.pt.trace.json",
            made.trace_of(made.events_of(made.COMPUTING)),
        )
    assert [rank.rank for rank in read_profiled(tmp_path).ranks] == [3, 7]


def test_is_trace_recognizes_supported_files(tmp_path):
    trace = made.trace_of(made.events_of(made.COMPUTING))
    made.write(tmp_path / "t.json", trace)
    made.write(tmp_path / "t.json.gz", trace)
    made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING])
    (tmp_path / "report.nsys-rep").write_bytes(b"\x00")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "runs.csv").write_text("a,b\n")
    (tmp_path / "own.db").write_bytes((tmp_path / "r.sqlite").read_bytes())
    told = {file.name for file in tmp_path.iterdir() if is_trace(file)}
    assert told == {"t.json", "t.json.gz", "r.sqlite", "report.nsys-rep"}
    assert is_trace(tmp_path)
    (tmp_path / "command.json").write_text("{}")
    assert not is_trace(tmp_path)  # a recording
    assert not is_trace(tmp_path / "nothing.json")
    assert not is_trace("\x00")
    assert not is_trace("/dev/zero")


def test_unexported_report_names_export_command(tmp_path):
    (tmp_path / "report.nsys-rep").write_bytes(b"\x00")
    with pytest.raises(UnreadableInput, match=r"nsys export --type sqlite report\.nsys-rep"):
        read_profiled(tmp_path / "report.nsys-rep")


def test_trace_of_zero_duration_is_unreadable(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 0}
    file = made.write(tmp_path / "t.json", {"traceEvents": [event, event]})
    with pytest.raises(UnreadableInput, match="same moment"):
        read_profiled(file)


def test_only_lists_of_events_are_traces(tmp_path):
    made.write(tmp_path / "t.json", made.events_of(made.COMPUTING, 2))
    made.write(tmp_path / "numbers.json", [1, 2, 3])
    assert [is_trace(tmp_path / name) for name in ("t.json", "numbers.json")] == [True, False]


def test_folder_without_traces_is_rejected(tmp_path):
    with pytest.raises(UnreadableInput):
        read_profiled(tmp_path)


def cycle(path, host="vm", steps=4, clock_us=made.CLOCK_US, work=made.COMPUTING, pid=made.PID):
    events = [event | {"pid": pid} for event in made.events_of(work, steps, clock_us)]
    made.write(path, made.trace_of(events) | {"host_name": host})


@pytest.mark.parametrize(
    "work", [made.COMPUTING, Work(10_000.0, operators=(("aten::mm", 5, 9e3),))]
)
def test_cycles_of_one_process_are_one_rank(work, tmp_path):
    cycle(tmp_path / "a_1.pt.trace.json", work=work)
    cycle(tmp_path / "a_2.pt.trace.json", clock_us=made.CLOCK_US + 1e6, work=work)
    found = read_profiled(tmp_path)
    (rank,) = found.ranks
    # Without kernels, the last step of a cycle has a known end and counts.
    assert rank.steps == (6 if work.kernels else 8)
    assert found.step_ms == pytest.approx(10.0, rel=1e-3)
    assert found.warnings == read_profiled(tmp_path / "a_1.pt.trace.json").warnings[-1:]


def test_other_processes_and_hosts_are_other_ranks(tmp_path):
    for name, about in (("a", {}), ("b", {"pid": 7}), ("c", {"pid": 7, "host": "other"})):
        cycle(tmp_path / f"{name}.json", **about)
    assert len(read_profiled(tmp_path).ranks) == 3


def test_step_in_which_the_host_does_nothing_is_not_counted(tmp_path):
    work = Work(178_000.0, operators=(("aten::mm", 5.0, 170_000.0),))
    events = made.events_of(work, steps=1)
    (marked,) = (event for event in events if event["name"].startswith("ProfilerStep"))
    events.append(marked | {"name": "ProfilerStep#1", "ts": marked["ts"] + 178_000.0, "dur": 17.0})
    found = read_profiled(made.write(tmp_path / "t.json", made.trace_of(events)))
    assert [rank.steps for rank in found.ranks] == [1]
    assert found.median_ms == pytest.approx(178.0, rel=1e-3)
