import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import JOB_PARTS
from trainpace.job import (
    ONLY_STEPS,
    JobConditions,
    Question,
    Schedule,
    SpeedUp,
    accumulation_for_global_batch,
    answer,
    learning_rate_advice,
    training_of,
)
from trainpace.job.ask import (
    data_parallel_for_deadline,
    epochs_for_deadline,
    micro_batch_for_deadline,
    samples_for_deadline,
    step_time_for_deadline,
)

schedules = st.builds(
    Schedule, samples=st.integers(100, 10**6), epochs=st.integers(1, 50).map(float)
)
conditions = st.builds(
    lambda **fields: replace(ONLY_STEPS, **fields),
    startup_s=st.floats(0, 600),
    evaluate_every_steps=st.integers(1, 1000),
    evaluation_s=st.floats(0, 60),
    checkpoint_every_steps=st.integers(1, 1000),
    checkpoint_s=st.floats(0, 60),
    repeats=st.integers(1, 5),
)
executions = st.builds(Execution, micro_batch=st.integers(1, 64), accumulation=st.integers(1, 4))
step_times = st.floats(1e-3, 10)


def test_speed_up_matches_published_thesis_numbers():
    """32 models x 50 epochs x 10.7 h take 713 days. A speed-up to 2153 % reduces this to 4.65 %, or 33 days."""
    result = answer(
        Question(
            schedule=Schedule(epochs=50),
            conditions=replace(ONLY_STEPS, repeats=32),
            epoch_time_s=10.7 * 3600,
        )
    )
    assert result.time.total_s / 86400 == pytest.approx(713.3, abs=0.05)
    shares = [SpeedUp(ratio=p / 100).share_of_old_time for p in (363, 1329, 2153)]
    assert shares == pytest.approx([0.2755, 0.0752, 0.0465], abs=1e-4)
    assert SpeedUp(ratio=21.53).new_time_s(result.time.total_s) / 86400 == pytest.approx(
        33.1, abs=0.05
    )
    assert SpeedUp(ratio=21.53).percent_of_old_speed == pytest.approx(2153)


@given(schedules, executions, conditions, step_times)
def test_job_parts_sum_to_total_and_scale_with_repeats(schedule, execution, c, step):
    time = training_of(schedule, execution, c).time(step)
    assert time.total_s == pytest.approx(math.fsum(getattr(time, name) for name in JOB_PARTS))
    assert time.stepping_s == pytest.approx(time.steps * step * c.repeats)


@given(schedules, executions, conditions, step_times, step_times)
def test_slower_step_never_shortens_training(schedule, execution, c, a, b):
    fast, slow = (training_of(schedule, execution, c).time(step) for step in sorted((a, b)))
    assert fast.total_s <= slow.total_s


@given(schedules, executions, conditions, step_times)
def test_step_time_for_deadline_inverts_training_time(schedule, execution, c, step):
    training = training_of(schedule, execution, c)
    deadline = training.time(step).total_s
    assert step_time_for_deadline(training, deadline * (1 + 1e-12)) == pytest.approx(step, rel=1e-6)


@given(schedules, executions, conditions, step_times, st.integers(1, 40))
def test_epochs_for_deadline_are_the_most_that_finish(schedule, execution, c, step, epochs):
    def total_s(count):
        return training_of(replace(schedule, epochs=float(count)), execution, c).time(step).total_s

    deadline = total_s(epochs)
    most = epochs_for_deadline(schedule, execution, c, step, deadline)
    assert most >= epochs
    assert total_s(most + 1) > deadline


@given(schedules, executions, conditions, step_times)
def test_samples_for_deadline_are_the_most_that_finish(schedule, execution, c, step):
    def total_s(samples):
        return training_of(replace(schedule, samples=samples), execution, c).time(step).total_s

    deadline = total_s(schedule.samples)
    most = samples_for_deadline(replace(schedule, samples=None), execution, c, step, deadline)
    assert most >= schedule.samples
    assert total_s(most) <= deadline < total_s(most + 1)


@given(schedules, executions, conditions, step_times, st.integers(1, 64))
def test_micro_batch_for_deadline_is_the_smallest(schedule, execution, c, step, micro_batch):
    def total_s(size):
        return training_of(schedule, replace(execution, micro_batch=size), c).time(step).total_s

    deadline = total_s(micro_batch)
    least = micro_batch_for_deadline(schedule, execution, c, step, deadline)
    assert least <= micro_batch
    assert total_s(least) <= deadline
    assert least == 1 or total_s(least - 1) > deadline


@given(schedules, executions, conditions, step_times, st.integers(1, 64), st.booleans())
@example(
    Schedule(samples=100, epochs=1.0),
    Execution(micro_batch=1, accumulation=3),
    ONLY_STEPS,
    5.734904471006503,
    1,
    False,
)
def test_ranks_for_deadline_are_the_fewest(schedule, execution, c, step, ranks, keep):
    def total_s(count):
        return training_of(schedule, replace(execution, nproc_per_node=count), c).time(step).total_s

    deadline = total_s(ranks)
    try:
        choice = data_parallel_for_deadline(schedule, execution, c, step, deadline, keep)
    except Contradiction:
        assert keep  # without a fixed global batch, `ranks` meets the deadline
        return
    assert choice.time.total_s <= deadline
    if keep:
        assert choice.global_batch == execution.global_batch
    else:
        assert choice.data_parallel_size <= ranks
        if choice.data_parallel_size > 1:
            assert total_s(choice.data_parallel_size - 1) > deadline


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_accumulation_keeps_the_global_batch(micro, accumulation, ranks):
    assert accumulation_for_global_batch(micro * accumulation * ranks, micro, ranks) == accumulation


def test_indivisible_accumulation_names_nearest_global_batches():
    with pytest.raises(Contradiction, match="192 and 256"):
        accumulation_for_global_batch(250, 32, 2)


def test_evaluation_checkpoints_and_startup_add_to_training_time():
    c = JobConditions(
        startup_s=30,
        evaluate_every_steps=40,
        evaluation_s=10,
        checkpoint_every_steps=50,
        checkpoint_s=5,
        device_mtbf_h=None,
    )
    time = training_of(Schedule(max_steps=100), Execution(), c).time(1.0)
    assert (time.stepping_s, time.startup_s, time.evaluation_s, time.checkpoint_s) == (
        100,
        30,
        20,
        10,
    )
    assert (time.checkpoints, time.failures_s) == (2, 0.0)


def test_training_never_ends_if_failures_outpace_recovery():
    c = replace(ONLY_STEPS, mean_time_between_failures_s=0.1, restart_s=60.0)
    assert math.isinf(training_of(Schedule(max_steps=100), Execution(), c).time(1.0).total_s)


def test_learning_rate_follows_linear_and_square_root_rules():
    advice = learning_rate_advice(256, 1024, 0.1)
    assert (advice.linear, advice.square_root) == (pytest.approx(0.4), pytest.approx(0.2))
    with pytest.raises(TrainpaceError):
        learning_rate_advice(256, 1024, -1.0)


RUN = Schedule(samples=1281167, epochs=90)


@pytest.mark.parametrize(
    ("question", "clash"),
    [
        (
            {"micro_batch": 8, "accumulation": 2, "global_batch": 32},
            "32 is not micro-batch 8 x accumulation 2",
        ),
        ({"global_batch": 30, "accumulation": 4}, "cannot be split"),
        ({"micro_batch": 8, "step_time_s": 0.1, "throughput_samples_per_s": 10.0}, "disagree"),
        (
            {
                "micro_batch": 8,
                "deadline_s": 60.0,
                "step_time_s": 0.1,
                "solve_gpus": True,
                "keep_global_batch": True,
            },
            "constant",
        ),
        (
            {"micro_batch": 8, "deadline_s": 1e-3, "step_time_s": 1.0, "solve_gpus": True},
            "no number of GPUs",
        ),
    ],
)
def test_contradictions_name_the_conflicting_numbers(question, clash):
    with pytest.raises(Contradiction, match=clash):
        answer(Question(schedule=RUN, **question))


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"micro_batch": 8, "budget_usd": 5.0},
        {"micro_batch": -1},
        {"micro_batch": 8, "step_time_s": float("nan")},
    ],
)
def test_incomplete_or_invalid_questions_are_rejected(question):
    with pytest.raises(TrainpaceError):
        answer(Question(schedule=RUN, **question))


def test_any_two_of_three_batch_numbers_give_the_third():
    for known in (
        {"micro_batch": 8, "accumulation": 4},
        {"micro_batch": 8, "global_batch": 64},
        {"accumulation": 4, "global_batch": 64},
    ):
        execution = answer(Question(schedule=RUN, nproc_per_node=2, **known)).execution
        assert (execution.micro_batch, execution.accumulation, execution.global_batch) == (8, 4, 64)


def test_deadline_gives_required_step_time():
    needed = answer(Question(schedule=RUN, global_batch=256, deadline_s=86400.0))
    assert needed.solved == ("micro_batch", "step_time", "throughput")
    assert needed.time.total_s == pytest.approx(86400)
    assert needed.meets_limit
    late = answer(Question(schedule=RUN, global_batch=256, deadline_s=86400.0, step_time_s=0.21))
    assert late.meets_limit is False


def test_missing_number_of_training_formula_is_solved():
    """Omit each number of epochs x samples / batch x step time = 90 x 1,281,167 / 256 x 0.21 s in turn."""
    run = {"global_batch": 256, "step_time_s": 0.21, "deadline_s": 90 * 5005 * 0.21}
    known = Schedule(samples=1_281_167, epochs=90)
    assert answer(Question(schedule=replace(known, epochs=None), **run)).schedule.epochs == 90
    assert (
        answer(Question(schedule=replace(known, samples=None), **run)).schedule.samples
        == 5005 * 256
    )
    assert (
        answer(Question(schedule=known, **{**run, "global_batch": None})).execution.global_batch
        == 256
    )
    assert answer(
        Question(schedule=known, **{**run, "step_time_s": None})
    ).step_time_s == pytest.approx(0.21)
    assert answer(
        Question(schedule=known, **{**run, "deadline_s": None})
    ).time.total_s == pytest.approx(run["deadline_s"])


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [(Schedule(samples=1000, epochs=5), {}), (Schedule(epochs=5), {"micro_batch": 8})],
)
def test_unreachable_deadline_is_rejected(schedule, sizes):
    with pytest.raises(Contradiction):
        answer(Question(schedule=schedule, step_time_s=10.0, deadline_s=30.0, **sizes))


@pytest.mark.parametrize(
    ("schedule", "more"),
    [(Schedule(samples=1000, max_steps=1000), {}), (RUN, {"solve_gpus": True})],
)
def test_batch_is_required_if_deadline_does_not_determine_it(schedule, more):
    with pytest.raises(TrainpaceError, match="batch size"):
        answer(Question(schedule=schedule, step_time_s=0.1, deadline_s=50.0, **more))


def test_budget_gives_largest_number_of_epochs():
    result = answer(
        Question(
            schedule=Schedule(samples=50_000),
            global_batch=128,
            step_time_s=0.08,
            budget_usd=20.0,
            conditions=replace(ONLY_STEPS, price_usd_per_device_hour=1.2),
        )
    )
    assert "epochs" in result.solved
    assert result.cost_usd <= 20.0 < result.cost_usd + 391 * 0.08 / 3600 * 1.2


def test_larger_global_batch_is_reported_with_learning_rates():
    result = answer(
        Question(
            schedule=RUN,
            micro_batch=32,
            step_time_s=0.21,
            deadline_s=86400.0,
            solve_gpus=True,
            learning_rate=0.1,
        )
    )
    assert result.execution.global_batch > 32
    assert any("global batch changes from 32" in note for note in result.notes)
    assert result.learning_rate.linear == pytest.approx(0.1 * result.execution.global_batch / 32)
