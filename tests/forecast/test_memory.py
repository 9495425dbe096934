"""Memory of a step: sharding, communication buckets, and the largest batch that fits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import memory_model, stacked, step_memory, workload
from trainpace.core.execution import Execution
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.memory import CONTEXT_GIB, fits

FORM = workload().forms["fp32"]


def memory(**changes):
    return step_memory(FORM, Execution(micro_batch=8, nproc_per_node=8, **changes), True)


def test_zero_stages_shard_states_then_gradients_then_parameters():
    plain, one, two, three = (memory(zero_stage=stage) for stage in range(4))
    assert one.optimizer_states_gib == pytest.approx(plain.optimizer_states_gib / 8)
    assert two.gradients_gib <= one.gradients_gib / 8
    # a model without blocks is gathered whole
    assert three.parameters_gib == pytest.approx(plain.parameters_gib * (1 + 1 / 8))
    assert plain.allocated_gib > one.allocated_gib >= two.allocated_gib


def test_ddp_buckets_double_gradient_memory():
    alone = step_memory(FORM, Execution(micro_batch=8, accumulation=2), True)
    assert memory(accumulation=2).gradients_gib == pytest.approx(2 * alone.gradients_gib)
    assert memory(engine="data_parallel", accumulation=2).gradients_gib == pytest.approx(
        alone.gradients_gib
    )


@given(st.floats(0.7, 80))
def test_largest_micro_batch_fits_and_next_does_not(capacity):
    run = Execution()
    largest = memory_model(FORM, run).largest_micro_batch(run, capacity)
    if largest:
        assert fits(step_memory(FORM, replace(run, micro_batch=largest), True), capacity)
    assert not fits(step_memory(FORM, replace(run, micro_batch=largest + 1), True), capacity)


def test_communicators_take_device_memory_only_with_several_gpus():
    def outside(on_gpu=True, **changes):
        found = step_memory(
            stacked().forms["half"], Execution(precision="bf16", accumulation=4, **changes), on_gpu
        )
        return found.device_gib - found.reserved_gib

    assert outside() == pytest.approx(CONTEXT_GIB)
    assert outside(on_gpu=False, nproc_per_node=8) == 0
    several = [outside(nproc_per_node=8, **more) for more in ({}, {"tp": 2}, {"tp": 2, "pp": 2})]
    assert CONTEXT_GIB < several[0] < several[1] < several[2]


def test_fsdp_mixed_precision_replaces_autocast_weight_copies():
    """Gathered weights are in 16 bits, so autocast makes no further copies."""
    form = stacked().forms["fp32"]
    copy = (
        2.0 * form.blocks.parameters
    )  # autocast keeps a 16-bit copy of each weight until the backward pass
    peaks = form.memory.peaks + np.array([0.0, form.blocks.count * copy, 0.0])
    form = replace(
        form,
        memory=replace(form.memory, peaks=peaks),
        blocks=replace(form.blocks, saved_bytes=(copy, form.blocks.saved_bytes[1])),
    )
    runs = [Execution(nproc_per_node=8, zero_stage=3, precision=p) for p in ("fp32", "amp_bf16")]
    plain, cast = (step_memory(form, run, True) for run in runs)
    shard = form.memory.parameter_bytes / 8 / BYTES_PER_GIB
    assert cast.parameters_gib - shard == pytest.approx((plain.parameters_gib - shard) / 2)
    copies = form.blocks.count * copy / BYTES_PER_GIB
    assert cast.activations_gib == pytest.approx(plain.activations_gib - copies)


def test_checkpointing_does_not_change_inference_memory():
    form = stacked().forms["half"]
    forward = np.array(form.operators.phase) == "forward"
    columns = {
        name: getattr(form.operators, name)[forward]
        if isinstance(getattr(form.operators, name), np.ndarray)
        else tuple(np.array(getattr(form.operators, name))[forward])
        for name in form.operators.__struct_fields__
    }
    blocks = replace(
        form.blocks,
        operator_counts=form.blocks.operator_counts[forward],
        roles=tuple(np.array(form.blocks.roles)[forward].tolist()),
    )
    inference = replace(form, operators=replace(form.operators, **columns), blocks=blocks)
    kept, full = (
        step_memory(inference, Execution(precision="bf16", activation_checkpointing=c), True)
        for c in ("none", "full")
    )
    assert kept == full


def test_torch_tensor_parallel_head_uses_more_memory_than_megatron():
    """PyTorch also keeps an fp32 copy of the logits and the gathered input."""
    form = stacked().forms["half"]
    run = Execution(
        nproc_per_node=8, tp=8, precision="bf16", micro_batch=64, activation_checkpointing="full"
    )
    megatron, torchs = (step_memory(form, replace(run, zero_stage=stage), True) for stage in (0, 3))
    assert torchs.activations_gib > megatron.activations_gib
