"""Nsight Systems exports, generated from the documented schema because no real export was available."""

import sqlite3

import pytest

import made_traces as made
from trainpace.core.errors import UnreadableInput
from trainpace.diagnose import read_profiled
from trainpace.diagnose.trace_formats import read_nsight


def changed(path, *statements):
    with sqlite3.connect(path) as base:
        for statement in statements:
            base.execute(statement)
    base.close()
    return path


def shares(training):
    return {s.cause: round(s.ms, 2) for s in training.shares if s.ms > 0.005}


def test_nvtx_ranges_mark_steps_with_same_shares_as_kineto(tmp_path):
    found = read_profiled(made.write_nsight(tmp_path / "r.sqlite", [made.EXCHANGING]))
    assert shares(found) == {"compute": 5.0, "communication": 5.0}
    [rank] = found.ranks
    assert (rank.told_by, rank.steps, rank.device) == (
        "ranges named step #",
        7,
        "NVIDIA A100-SXM4-80GB",
    )
    assert rank.hidden_ms == pytest.approx(1.0)
    assert found.kernels[0].name == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def test_runtime_calls_reveal_waiting_for_device(tmp_path):
    found = read_profiled(made.write_nsight(tmp_path / "r.sqlite", [made.SYNCHRONISING]))
    assert found.verdict == "logging"
    assert shares(found) == {"logging": 6.21, "compute": 3.79}


def test_unexplained_idle_time_is_reported_as_such(tmp_path):
    found = read_profiled(made.write_nsight(tmp_path / "r.sqlite", [made.WAITING_FOR_DATA]))
    assert found.shares[0].in_words == "the device idle, for reasons not recorded"


def test_each_process_becomes_a_rank(tmp_path):
    found = read_profiled(
        made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING, made.EXCHANGING])
    )
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert [rank.communication_ms for rank in found.ranks] == pytest.approx([0.0, 6.0])


def test_two_reports_become_two_nodes(tmp_path):
    for node in "ab":
        made.write_nsight(tmp_path / f"{node}.sqlite", [made.COMPUTING, made.COMPUTING])
    assert [rank.rank for rank in read_profiled(tmp_path).ranks] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE NVTX_EVENTS",
        "DROP TABLE TARGET_INFO_GPU",
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY",
        "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "DROP TABLE StringIds",
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN demangledName",
        "UPDATE StringIds SET value = CAST(x'ff00fe' AS TEXT)",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = 'p', correlationId = 'c'",
    ],
)
def test_missing_tables_and_columns_are_tolerated(statement, tmp_path):
    file = changed(made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING]), statement)
    found = read_profiled(file)
    assert found.on_device
    assert found.verdict == "compute"


def test_unmarked_trace_is_one_step(tmp_path):
    found = read_profiled(made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING], nvtx=""))
    assert (found.ranks[0].told_by, round(found.step_ms)) == ("", 80)
    assert any("does not mark steps" in line for line in found.warnings)


def test_impossible_kernel_times_are_skipped_and_counted(tmp_path):
    file = made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING], steps=3)
    changed(
        file,
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE correlationId = 1",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 1 WHERE correlationId = 2",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807 WHERE correlationId = 3",
    )
    [trace] = read_nsight(file)
    assert (len(trace.kernels), trace.skipped) == (6, 3)


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",),
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n)"
            " SELECT start, start AS end FROM n",
        ),
    ],
)
def test_database_without_kernels_is_rejected(statements, tmp_path):
    file = changed(made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING]), *statements)
    with pytest.raises(UnreadableInput, match="no GPU kernels"):
        read_nsight(file)


def test_damaged_database_is_unreadable_input(tmp_path):
    file = made.write_nsight(tmp_path / "r.sqlite", [made.COMPUTING])
    whole = file.read_bytes()
    for content in (
        whole[:5000],
        whole[:4096] + b"\x00" * 4096 + whole[8192:],
        b"SQLite format 3\x00" + b"\xff" * 5000,
        b"no",
    ):
        file.write_bytes(content)
        with pytest.raises(UnreadableInput):
            read_nsight(file)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
