"""Worked examples of step counts from the literature, and invariants."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import asdict

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.job import (
    Schedule,
    SpeedUp,
    accumulation_for_global_batch,
    epoch_steps,
    learning_rate_advice,
    total_steps,
)

sizes = st.integers(1, 64)
samples = st.integers(1, 10**6)


def executions():
    return st.builds(
        Execution,
        micro_batch=sizes,
        accumulation=sizes,
        nnodes=st.integers(1, 8),
        nproc_per_node=st.integers(1, 8),
    )


def test_1000_samples_at_batch_10_take_100_steps():
    assert epoch_steps(Schedule(samples=1000), Execution(micro_batch=10)).steps == 100


def test_accumulation_with_halved_micro_batch_keeps_steps():
    execution = Execution(micro_batch=5, accumulation=2)
    assert execution.global_batch == 10
    assert epoch_steps(Schedule(samples=1000), execution).steps == 100


def test_two_devices_with_batch_2_have_global_batch_4():
    assert Execution(micro_batch=2, nproc_per_node=len([2, 3])).global_batch == 4


def test_global_batch_includes_nodes_and_processes():
    execution = Execution(micro_batch=8, accumulation=4, nnodes=2, nproc_per_node=8)
    assert (execution.world_size, execution.data_parallel_size, execution.global_batch) == (
        16,
        16,
        512,
    )


def test_tensor_and_pipeline_parallelism_divide_the_data_parallel_size():
    execution = Execution(micro_batch=1, nnodes=4, nproc_per_node=8, tp=4, pp=2)
    assert execution.data_parallel_size == 4
    with pytest.raises(Contradiction, match="tp 3"):
        Execution(nproc_per_node=8, tp=3)


def test_imagenet_epoch_on_eight_gpus_takes_5005_steps():
    steps = epoch_steps(Schedule(samples=1281167), Execution(micro_batch=32, nproc_per_node=8))
    assert (steps.steps, steps.last_step_samples) == (5005, 143)


def test_tokens_are_packed_into_samples():
    schedule = Schedule(tokens=10_000, sequence_length=1024)
    assert schedule.samples_per_epoch == 9
    with pytest.raises(Contradiction):
        Schedule(tokens=10, sequence_length=1024).samples_per_epoch  # noqa: B018
    with pytest.raises(TrainpaceError, match="sequence length"):
        Schedule(tokens=10)
    with pytest.raises(Contradiction):
        Schedule(tokens=10, sequence_length=2, samples=4)


def refusal_of(ask):
    with pytest.raises(TrainpaceError) as refused:
        ask()
    return str(refused.value)


def test_epoch_size_must_be_given_exactly_once():
    for fields in ({"samples": 4, "tokens": 10, "sequence_length": 2}, {"tokens": 10}):
        with pytest.raises(TrainpaceError):
            Schedule(**fields)
    with pytest.raises(Contradiction):
        _ = Schedule(tokens=10, sequence_length=1024).samples_per_epoch
    assert Schedule(tokens=1024, sequence_length=1024).samples_per_epoch == 1
    with pytest.raises(TrainpaceError):
        epoch_steps(Schedule(max_steps=3), Execution())
    with pytest.raises(TrainpaceError):
        total_steps(Schedule(samples=10), Execution())


def test_drop_last_without_full_step_is_rejected():
    loader = refusal_of(
        lambda: epoch_steps(Schedule(samples=10, drop_last=True), Execution(micro_batch=16))
    )
    assert loader == (
        "10 samples do not fill one step: micro-batch 16 x accumulation 1 x data-parallel size 1 = 16 samples, with drop_last."
        " Use a smaller batch, or keep the last batch."
    )
    eight = Execution(micro_batch=4, accumulation=8)
    trainer = refusal_of(
        lambda: epoch_steps(Schedule(samples=10, partial_accumulation="drop"), eight)
    )
    assert (
        "micro-batch 4 x accumulation 8 x data-parallel size 1 = 32 samples, with partial accumulation dropped."
        in trainer
    )


def test_dropped_samples_are_not_counted_as_seen():
    """23 samples in micro-batches of 4 give five full micro-batches and one of 3. With accumulation 3 these are two steps."""
    execution = Execution(micro_batch=4, accumulation=3)
    all_of_it = epoch_steps(Schedule(samples=23), execution)
    assert asdict(all_of_it) == {
        "steps": 2,
        "micro_steps_per_rank": 6,
        "samples_seen": 23,
        "last_step_samples": 11,
    }
    loader = epoch_steps(Schedule(samples=23, drop_last=True), execution)
    assert asdict(loader) == {
        "steps": 2,
        "micro_steps_per_rank": 5,
        "samples_seen": 20,
        "last_step_samples": 8,
    }
    trainer = epoch_steps(
        Schedule(samples=23, drop_last=True, partial_accumulation="drop"), execution
    )
    assert asdict(trainer) == {
        "steps": 1,
        "micro_steps_per_rank": 3,
        "samples_seen": 12,
        "last_step_samples": 12,
    }
    only_trainer = epoch_steps(Schedule(samples=23, partial_accumulation="drop"), execution)
    assert asdict(only_trainer) == {
        "steps": 2,
        "micro_steps_per_rank": 6,
        "samples_seen": 23,
        "last_step_samples": 11,
    }


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_nonpositive_speed_up_is_rejected(ratio):
    assert refusal_of(lambda: SpeedUp(ratio=ratio)) == f"a speed-up of {ratio} is not above 0."
    assert SpeedUp(ratio=0.5).share_of_old_time == 2  # a ratio below 1 is slower


def test_indivisible_global_batch_names_nearest_sizes():
    assert accumulation_for_global_batch(64, 32, 2) == 1
    assert refusal_of(lambda: accumulation_for_global_batch(250, 32, 2)) == (
        "global batch 250 is not a multiple of micro-batch 32 x data-parallel size 2 = 64."
        " Nearest global batches: 192 and 256; or a micro-batch that divides 250."
    )
    assert "Nearest global batches: 64; or" in refusal_of(
        lambda: accumulation_for_global_batch(50, 32, 2)
    )
    assert "Nearest global batches: 64; or" in refusal_of(
        lambda: accumulation_for_global_batch(0, 32, 2)
    )


def test_learning_rate_advice_has_linear_and_square_root():
    advice = learning_rate_advice(1, 4, 0.1)
    assert (advice.linear, advice.square_root) == pytest.approx((0.4, 0.2))
    assert (advice.linear_factor, advice.square_root_factor) == (4, 2)
    assert (advice.old_global_batch, advice.new_global_batch, advice.learning_rate) == (1, 4, 0.1)
    factors = learning_rate_advice(1024, 256)
    assert (factors.linear, factors.square_root, factors.learning_rate) == (None, None, None)
    assert (factors.linear_factor, factors.square_root_factor) == (0.25, 0.5)
    assert learning_rate_advice(4, 1, 0.1).linear == pytest.approx(0.025)
    for old, new, rate in ((256, 0, 0.1), (-3, 256, 0.1), (1, 2, 0.0), (1, 2, float("inf"))):
        with pytest.raises(TrainpaceError):
            learning_rate_advice(old, new, rate)


@given(samples, executions())
def test_every_sample_is_seen_once_without_drop_last(n, execution):
    epoch = epoch_steps(Schedule(samples=n), execution)
    assert epoch.samples_seen == n
    assert epoch.steps == -(-n // execution.global_batch)
    assert 0 < epoch.last_step_samples <= execution.global_batch
    assert (epoch.steps - 1) * execution.global_batch + epoch.last_step_samples == n


@given(samples, executions())
def test_dropping_never_adds_steps(n, execution):
    keep = epoch_steps(Schedule(samples=n), execution).steps
    for schedule in (
        Schedule(samples=n, drop_last=True),
        Schedule(samples=n, drop_last=True, partial_accumulation="drop"),
    ):
        try:
            assert epoch_steps(schedule, execution).steps <= keep
        except Contradiction:
            assert n < execution.global_batch or schedule.drop_last


@given(samples, executions())
def test_dropping_partial_steps_rounds_down(n, execution):
    assume(n >= execution.global_batch)
    schedule = Schedule(samples=n, drop_last=True, partial_accumulation="drop")
    assert epoch_steps(schedule, execution).steps == n // execution.global_batch


@given(samples, sizes, sizes, st.integers(1, 8))
def test_steps_depend_only_on_global_batch(n, micro, accumulation, ranks):
    """The split into micro-batches, accumulation and ranks does not matter."""
    split = Execution(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    whole = Execution(micro_batch=micro * accumulation * ranks)
    assert split.global_batch == whole.global_batch
    assert (
        epoch_steps(Schedule(samples=n), split).steps
        == epoch_steps(Schedule(samples=n), whole).steps
    )


@given(samples, executions(), st.floats(0.01, 100), st.floats(0.01, 100))
def test_more_epochs_never_reduce_steps(n, execution, a, b):
    few, many = sorted((a, b))
    assert total_steps(Schedule(samples=n, epochs=few), execution) <= total_steps(
        Schedule(samples=n, epochs=many), execution
    )


def test_total_steps_handles_fractional_epochs_and_max_steps():
    execution = Execution(micro_batch=10)
    assert total_steps(Schedule(samples=1000, epochs=0.5), execution) == 50
    assert total_steps(Schedule(samples=100, epochs=0.1), execution) == 1
    assert total_steps(Schedule(samples=1000, epochs=3, max_steps=120), execution) == 120
    assert total_steps(Schedule(max_steps=120), execution) == 120
    assert total_steps(Schedule(samples=1000, epochs=3, max_steps=1000), execution) == 300
    # 50,000 x 1.1 is 55,000.00000000001 in floating point; for 1e10, a relative tolerance of 1e-9 would change the count
    assert total_steps(Schedule(samples=50_000, epochs=1.1), Execution()) == 55_000
    assert total_steps(Schedule(samples=10**10, epochs=1.0), Execution()) == 10**10
    assert total_steps(Schedule(samples=10**10 + 1, epochs=1.0), Execution()) == 10**10 + 1
    # less than one step counts as one, and 1.01 steps count as two
    assert total_steps(Schedule(samples=1000, epochs=1e-12), execution) == 1
    assert total_steps(Schedule(samples=1000, epochs=0.0101), execution) == 2
    with pytest.raises(TrainpaceError):
        total_steps(Schedule(epochs=3), execution)


@pytest.mark.parametrize("name", ["samples", "tokens", "sequence_length", "max_steps"])
def test_schedule_counts_must_be_from_1_to_1e18(name):
    others = {"sequence_length": 1} if name == "tokens" else {}
    assert getattr(Schedule(**{name: 10**18}, **others), name) == 10**18
    for wrong in (0, 10**18 + 1):
        said = refusal_of(lambda wrong=wrong: Schedule(**{name: wrong}, **others))
        assert said == f"`{name}` is {wrong}; it must be a whole number from 1 to 1e18."
    assert Schedule(epochs=1e18).epochs == 1e18
    assert refusal_of(lambda: Schedule(epochs=0.0)) == "`epochs` is 0.0; it must be above 0."


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"samples": 10**19}, {"epochs": 0}, {"epochs": float("nan")}]
)
def test_impossible_schedules_are_rejected(wrong):
    with pytest.raises(TrainpaceError):
        Schedule(**wrong)


@pytest.mark.parametrize(
    "name", ["micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp"]
)
def test_impossible_executions_are_rejected(name):
    with pytest.raises(TrainpaceError, match=name):
        Execution(**{name: 0})
