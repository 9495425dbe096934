"""Worked examples of the sources, and what must hold for every number."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainpace.errors import Contradiction, TrainpaceError
from trainpace.execution import Execution
from trainpace.schedule import Schedule, epoch_steps, total_steps

sizes = st.integers(1, 64)
samples = st.integers(1, 10**6)


def executions():
    return st.builds(
        Execution, micro_batch=sizes, accumulation=sizes, nnodes=st.integers(1, 8), nproc_per_node=st.integers(1, 8)
    )


def test_1000_samples_in_batches_of_10_are_100_steps():
    assert epoch_steps(Schedule(samples=1000), Execution(micro_batch=10)).steps == 100


def test_accumulation_2_halves_the_micro_batch_and_keeps_100_updates():
    execution = Execution(micro_batch=5, accumulation=2)
    assert execution.global_batch == 10
    assert epoch_steps(Schedule(samples=1000), execution).steps == 100


def test_two_devices_with_batch_2_are_an_effective_batch_of_4():
    assert Execution(micro_batch=2, nproc_per_node=len([2, 3])).global_batch == 4


def test_global_batch_with_nodes_and_processes():
    execution = Execution(micro_batch=8, accumulation=4, nnodes=2, nproc_per_node=8)
    assert (execution.world_size, execution.data_parallel_size, execution.global_batch) == (16, 16, 512)


def test_tensor_and_pipeline_parallelism_divide_the_data_parallel_size():
    execution = Execution(micro_batch=1, nnodes=4, nproc_per_node=8, tp=4, pp=2)
    assert execution.data_parallel_size == 4
    with pytest.raises(Contradiction, match="tp 3"):
        Execution(nproc_per_node=8, tp=3)


def test_imagenet_on_eight_gpus():
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


def test_drop_last_that_leaves_nothing_says_so():
    with pytest.raises(Contradiction, match="do not fill one step"):
        epoch_steps(Schedule(samples=10, drop_last=True), Execution(micro_batch=16))
    with pytest.raises(Contradiction, match="accumulation"):
        epoch_steps(Schedule(samples=10, partial_accumulation="drop"), Execution(micro_batch=4, accumulation=8))


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
def test_dropping_everything_partial_is_a_floor(n, execution):
    assume(n >= execution.global_batch)
    schedule = Schedule(samples=n, drop_last=True, partial_accumulation="drop")
    assert epoch_steps(schedule, execution).steps == n // execution.global_batch


@given(samples, sizes, sizes, st.integers(1, 8))
def test_the_same_global_batch_gives_the_same_steps(n, micro, accumulation, ranks):
    """However it is split into micro-batches, accumulation and ranks."""
    split = Execution(micro_batch=micro, accumulation=accumulation, nproc_per_node=ranks)
    whole = Execution(micro_batch=micro * accumulation * ranks)
    assert split.global_batch == whole.global_batch
    assert epoch_steps(Schedule(samples=n), split).steps == epoch_steps(Schedule(samples=n), whole).steps


@given(samples, executions(), st.floats(0.01, 100), st.floats(0.01, 100))
def test_more_epochs_are_never_fewer_steps(n, execution, a, b):
    few, many = sorted((a, b))
    assert total_steps(Schedule(samples=n, epochs=few), execution) <= total_steps(
        Schedule(samples=n, epochs=many), execution
    )


def test_fractional_epochs_and_max_steps():
    execution = Execution(micro_batch=10)
    assert total_steps(Schedule(samples=1000, epochs=0.5), execution) == 50
    assert total_steps(Schedule(samples=100, epochs=0.1), execution) == 1
    assert total_steps(Schedule(samples=1000, epochs=3, max_steps=120), execution) == 120
    assert total_steps(Schedule(max_steps=120), execution) == 120
    for schedule in (Schedule(samples=1000), Schedule(epochs=3)):
        with pytest.raises(TrainpaceError):
            total_steps(schedule, execution)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"samples": 10**19}, {"epochs": 0}, {"epochs": float("nan")}])
def test_impossible_schedules(wrong):
    with pytest.raises(TrainpaceError):
        Schedule(**wrong)


@pytest.mark.parametrize("name", ["micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp"])
def test_impossible_executions(name):
    with pytest.raises(TrainpaceError, match=name):
        Execution(**{name: 0})
