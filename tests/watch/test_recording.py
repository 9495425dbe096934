"""Tests of summarizing event logs into a recording."""

import json

import pytest

from trainpace.core.errors import UnreadableInput
from trainpace.watch import half_width_ms, read_recording
from trainpace.watch.inside.event_log import (
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOADER_START,
    OTHER,
    PARTS,
    TRIALS,
    EventLogWriter,
    Fetch,
    Step,
)

MS = 1_000_000
LOADER = {
    "loader": 1,
    "dataset": "Data",
    "samples_in_dataset": 160,
    "batches": 10,
    "batch_size": 16,
    "workers": 2,
    "prefetch_factor": 2,
    "pin_memory": False,
    "persistent_workers": False,
}


def write(folder, steps, fetches=(), notes=(LOADER,), seconds=1.0, counted=None, waits_ns=None):
    """Write an event log.

    `steps` holds (trial, {part: ms}). `counted` holds the counts of the last step.
    """
    log = EventLogWriter(
        str(folder / "process-7-here.trail"),
        {"role": "process", "pid": 7, "host": "here", "rank": 0, "world_size": 1, "cpus": 2},
    )
    for note in notes:
        log.note(**note)
    at = 0
    for number, (trial, spent) in enumerate(steps):
        parts = [0] * len(PARTS)
        for part, ms in spent.items():
            parts[part] = int(ms * MS)
        if number in (waits_ns or {}):
            log.note(first_wait_ns=waits_ns[number])
        log.step(
            Step(TRIALS.index(trial), 1, number, at, at + sum(parts), 16, 0.0, 0.0, tuple(parts))
        )
        at += sum(parts)
    if counted is not None:
        log.note(counted={"flops": 0.0, **counted})
    log.note(ended=at)
    log.flush()
    worker = EventLogWriter(
        str(folder / "worker-7-0-8-here.trail"),
        {"role": "worker", "worker": 0, "pid": 8, "parent": 7, "host": "here"},
    )
    for fetch in fetches:
        worker.fetch(fetch)
    worker.flush()
    (folder / "command.json").write_text(
        json.dumps({"command": ["x"], "seconds": seconds, "exit_code": 0})
    )


def test_warm_up_steps_are_excluded(tmp_path):
    write(tmp_path, [("plain", {FORWARD: 1000})] * 3 + [("plain", {FORWARD: 10, DATA: 5})] * 20)
    (rank,) = read_recording(tmp_path).ranks
    assert rank.steps == 20
    assert rank.step_ms == pytest.approx(15)
    assert rank.first_step_ms == pytest.approx(1000)
    assert rank.complete


def test_blocks_exclude_settling_steps_and_average_rare_parts(tmp_path):
    plain, cached = {FORWARD: 10, DATA: 5}, {FORWARD: 10}
    steps = [("plain", plain)] * 8
    for _ in range(2):
        steps += (
            [("settling", {FORWARD: 99})] * 2
            + [("plain", plain)] * 3
            + [("plain", {**plain, CHECKPOINT: 40})]
        )
        steps += [("settling", {FORWARD: 99})] * 2 + [("cached_batch", cached)] * 4
    write(tmp_path, steps, notes=(LOADER, {"programme": ["plain"], "warm_up_steps": 8}))
    (rank,) = read_recording(tmp_path).ranks
    assert [(b.trial, b.steps, round(b.step_ms, 6)) for b in rank.blocks] == [
        ("plain", 4, 15),
        ("cached_batch", 4, 10),
    ] * 2
    assert rank.blocks[0].parts_ms["checkpoint"] == pytest.approx(10)
    assert rank.steps == 8
    # No period is without repeated batches, so 2 of the 20 steps with their own batches count.
    assert rank.parts_ms["checkpoint"] == pytest.approx(2 * 40 / 20)


def test_loader_start_under_trials_counts_once_per_epoch(tmp_path):
    steps = [("plain", {FORWARD: 10})] * 8 + [("settling", {FORWARD: 10})] * 2
    steps += [("plain", {FORWARD: 10, LOADER_START: 50})] + [("plain", {FORWARD: 10})] * 3
    write(tmp_path, steps, notes=(LOADER, {"warm_up_steps": 8}))
    (rank,) = read_recording(tmp_path).ranks
    assert rank.parts_ms["loader_start"] == pytest.approx(50 / 10)
    assert rank.step_ms == pytest.approx(15)


def test_evaluation_under_trials_is_taken_from_plain_steps(tmp_path):
    """One of eleven plain steps has a full evaluation. Steps with a cached batch do not."""
    steps = [("plain", {FORWARD: 10})] * 8
    for _ in range(2):
        steps += (
            [("settling", {FORWARD: 10})] * 2
            + [("plain", {FORWARD: 10})] * 8
            + [("plain", {FORWARD: 10, EVALUATION: 40})]
        )
        steps += [("settling", {FORWARD: 10})] * 2 + [("cached_batch", {FORWARD: 10})] * 8
        steps += [("cached_batch", {FORWARD: 10, EVALUATION: 4})]
    write(tmp_path, steps, notes=(LOADER, {"warm_up_steps": 10}))
    (rank,) = read_recording(tmp_path).ranks
    assert rank.parts_ms["evaluation"] == pytest.approx(40 / 11)


def test_an_evaluation_every_tenth_step_counts_by_whole_periods(tmp_path):
    """Also if the counted steps are few: here 5, one of them with an evaluation."""
    steps = [
        ("plain", {FORWARD: 10} | ({EVALUATION: 40} if i % 10 == 0 else {})) for i in range(1, 26)
    ]
    write(tmp_path, steps, notes=(LOADER, {"warm_up_steps": 18}))
    (rank,) = read_recording(tmp_path).ranks
    assert rank.parts_ms["evaluation"] == pytest.approx(40 / 10)
    assert rank.occasions["evaluation"] == pytest.approx(1 / 10)


def test_work_once_in_fifty_steps_counts_by_whole_periods_and_not_in_a_block(tmp_path):
    """Its first occurrence is in no plain step after the warm-up, and the second is in a block."""
    rare = {OTHER: 500, FORWARD: 10}
    steps = [("plain", {FORWARD: 10})] * 49 + [("settling", rare)]
    steps += [("plain", {FORWARD: 10})] * 49 + [("plain", rare)] + [("plain", {FORWARD: 10})] * 9
    write(tmp_path, steps, notes=(LOADER, {"warm_up_steps": 10}))
    (rank,) = read_recording(tmp_path).ranks
    assert rank.parts_ms["other"] == pytest.approx(500 / 50)
    assert rank.step_ms == pytest.approx(20)
    assert {round(b.step_ms, 6) for b in rank.blocks} == {10}


def test_sample_costs_come_from_worker_records(tmp_path):
    fetches = [Fetch(0, 16, 0, 40 * MS, 24 * MS, 8 * MS)] * 6
    write(tmp_path, [("plain", {FORWARD: 10})] * 12, fetches)
    fetch = read_recording(tmp_path).ranks[0].fetch
    assert fetch.in_workers
    assert fetch.sample_wall_ms == pytest.approx(2)
    assert fetch.sample_cpu_ms == pytest.approx(1)
    assert fetch.collate_ms == pytest.approx(8)


def test_interval_accounts_for_correlation_of_neighboring_steps():
    alternating = [10.0, 20.0] * 50
    drifting = [10.0] * 50 + [20.0] * 50
    assert half_width_ms(alternating) < 0.1 < 2 < half_width_ms(drifting)


def test_killed_command_has_no_exit_code(tmp_path):
    write(tmp_path, [("plain", {FORWARD: 10})] * 12, seconds=None)
    (tmp_path / "command.json").write_text('{"command": ["x"], "seconds": null, "exit_code": null}')
    assert read_recording(tmp_path).exit_code is None


@pytest.mark.parametrize("text", ["", "[]", '{"command": "x"', '{"seconds": 1}'])
def test_damaged_command_file_is_reported(tmp_path, text):
    (tmp_path / "command.json").write_text(text)
    with pytest.raises(UnreadableInput, match=r"command\.json is (damaged|not valid JSON)"):
        read_recording(tmp_path)


def test_ranks_without_steps_are_reported(tmp_path):
    write(tmp_path, [("plain", {FORWARD: 10})] * 9, notes=(LOADER, {"world_size": 3}))
    (tmp_path / "command.json").write_text(
        json.dumps(
            {
                "command": ["x"],
                "seconds": 1.0,
                "exit_code": 0,
                "unended": "task 1 of 3 had not ended.",
            }
        )
    )
    assert read_recording(tmp_path).seen == (
        "ranks 1, 2 of 3 recorded no training step. task 1 of 3 had not ended."
    )


@pytest.mark.parametrize(
    ("noted", "named"), [((), ""), (({"accelerator": "Apple M4"},), "Apple M4")]
)
def test_accelerator_name_comes_from_the_recorder(tmp_path, noted, named):
    write(tmp_path, [("plain", {FORWARD: 5})] * 6, notes=(LOADER, *noted))
    (rank,) = read_recording(tmp_path).ranks
    assert rank.accelerator == named


def test_step_with_counted_operators_is_excluded_from_a_short_recording(tmp_path):
    """The recording ended before its interventions."""
    write(
        tmp_path,
        [("plain", {FORWARD: ms}) for ms in (30, 20, 80)],
        counted={"operators": 9, "large_operators_ns": 0},
    )
    (rank,) = read_recording(tmp_path).ranks
    assert (rank.steps, rank.warm_up, rank.operators) == (1, 1, 9)
    assert rank.step_ms == 20


def test_first_batch_time_of_a_worker_counts_as_data(tmp_path):
    """Loading takes 40 of the 50 ms before the first batch. The rest is the worker's start."""
    first = Fetch(0, 16, 13 * 10 * MS + 5 * MS, 13 * 10 * MS + 45 * MS, 24 * MS, 0)
    steps = (
        [("plain", {FORWARD: 10})] * 12
        + [("plain", {FORWARD: 10, LOADER_START: 50})]
        + [("plain", {FORWARD: 10})] * 7
    )
    write(tmp_path, steps, [first], waits_ns={12: 45 * MS})
    (rank,) = read_recording(tmp_path).ranks
    counted = rank.steps
    assert rank.parts_ms["data"] == pytest.approx(40 / counted)
    assert rank.parts_ms["loader_start"] == pytest.approx(10 / counted)


def test_large_operators_outside_modules_count_with_their_forward_share(tmp_path):
    """Gradients flow through 20 of 30 ms of own code; 15 ms of them are large operators.

    In the second case the share cannot be determined, so none is added.
    """
    for i, (counted_other, large_ms) in enumerate([(30, 4 + 15), (60, 4.0)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        steps = [("plain", {FORWARD: 10, OTHER: 30})] * 12 + [
            ("plain", {FORWARD: 10, OTHER: counted_other})
        ]
        counted = {"large_operators_ns": 4 * MS, "outside_ns": 20 * MS, "large_outside_ns": 15 * MS}
        write(folder, steps, counted=counted)
        (rank,) = read_recording(folder).ranks
        assert rank.large_operators_ms == pytest.approx(large_ms)
        assert rank.parts_ms["forward"] == pytest.approx(10 + (20 if i == 0 else 0))


def test_loader_start_in_a_settling_step_is_counted(tmp_path):
    """A start occurs once in ten batches although no counted step contains one."""
    steps = (
        [("plain", {FORWARD: 10})] * 8
        + [("settling", {FORWARD: 10, LOADER_START: 50})]
        + [("plain", {FORWARD: 10})] * 9
    )
    first = Fetch(0, 16, 85 * MS, 125 * MS, 24 * MS, 0)
    write(tmp_path, steps, [first], notes=(LOADER, {"warm_up_steps": 7}), waits_ns={8: 45 * MS})
    (rank,) = read_recording(tmp_path).ranks
    after = 11  # steps from the first counted one on
    assert rank.parts_ms["data"] == pytest.approx(40 / after)
    assert rank.parts_ms["loader_start"] == pytest.approx(10 / after)
