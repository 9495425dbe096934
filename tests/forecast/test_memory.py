"""Memory: shards divide, buckets add, and the largest batch is the largest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import workload
from trainpace.execution import Execution
from trainpace.forecast.memory import fits, largest_micro_batch, step_memory

FORM = workload().forms["fp32"]


def memory(**changes):
    return step_memory(FORM, Execution(micro_batch=8, nproc_per_node=8, **changes), True)


def test_zero_shards_states_gradients_and_parameters_in_turn():
    plain, one, two, three = (memory(zero_stage=stage) for stage in range(4))
    assert one.optimizer_states_gib == pytest.approx(plain.optimizer_states_gib / 8)
    assert two.gradients_gib <= one.gradients_gib / 8
    # a model without blocks is gathered whole
    assert three.parameters_gib == pytest.approx(plain.parameters_gib * (1 + 1 / 8))
    assert plain.allocated_gib > one.allocated_gib >= two.allocated_gib


def test_ddp_holds_its_buckets_beside_the_gradients():
    alone = step_memory(FORM, Execution(micro_batch=8, accumulation=2), True)
    assert memory(accumulation=2).gradients_gib == pytest.approx(2 * alone.gradients_gib)
    assert memory(engine="data_parallel", accumulation=2).gradients_gib == pytest.approx(alone.gradients_gib)


@given(st.floats(0.7, 80))
def test_the_largest_batch_fits_and_the_next_does_not(capacity):
    run = Execution()
    largest = largest_micro_batch(FORM, run, capacity)
    if largest:
        assert fits(step_memory(FORM, replace(run, micro_batch=largest), True), capacity)
    assert not fits(step_memory(FORM, replace(run, micro_batch=largest + 1), True), capacity)
