"""Communication of a step: buckets, shards, and overlap with computation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, stacked, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast.collectives import collective_ms
from trainpace.forecast.communication import CONTENTION, KINDS, OVERLAP, exposed

milliseconds = st.floats(0.01, 1e4)


def at(name="A100", per_node=8, nodes=1, network=None, model=None, **changes):
    cluster = Cluster(
        device=find_device(name),
        devices_per_node=per_node,
        nodes=nodes,
        network_gb_per_s_per_device=network,
    )
    run = Execution(nproc_per_node=per_node, nnodes=nodes, **changes)
    return forecast(model or workload(), run, cluster)


@given(milliseconds, milliseconds, st.floats(0, 1))
def test_longer_compute_hides_more_communication_but_never_all(total, window, bare):
    shown = exposed(np.array(total), np.array(bare * total), np.array(window))
    assert CONTENTION * total * (1 - 1e-9) <= shown <= total
    assert shown <= exposed(np.array(total), np.array(bare * total), np.array(window / 2))
    assert exposed(np.array(total), np.array(total), np.array(window)) == total


def test_long_backward_pass_exposes_only_last_bucket_and_contention():
    assert exposed(np.array(10.0), np.array(1.0), np.array(1e3)) == pytest.approx(
        1 + 9 * CONTENTION
    )
    assert exposed(np.array(10.0), np.array(1.0), np.array(2.0)) == pytest.approx(
        10 - (1 - CONTENTION) * 2 * OVERLAP
    )


def test_a100_gradient_all_reduce_is_near_nccl_tests():
    # nccl-tests on 8 A100s (stas00/ml-engineering): 0.424 ms for 32 MiB. 64 MiB of gradients use two such buckets.
    f = at(engine="unoverlapped")
    assert f.exposed_ms["data_parallel"] == pytest.approx(2 * 0.424, rel=0.6)


def test_all_reduce_after_backward_pass_is_not_overlapped():
    assert (
        at(engine="unoverlapped", micro_batch=64).step.communication_ms
        > at(micro_batch=64).step.communication_ms
    )


def test_network_bandwidth_is_required_and_changes_communication_time():
    assert "network" in at(nodes=2).reason
    assert (
        at(nodes=2, network=1.0).step.communication_ms
        > at(nodes=2, network=20.0).step.communication_ms
    )
    assert (
        at("L4").step.communication_ms > at("A100").step.communication_ms
    )  # PCIe is slower than NVLink


def test_nodes_of_one_nvlink_domain_need_no_network():
    eight = at("GB200", per_node=4, nodes=2, engine="unoverlapped")
    assert (
        0
        < eight.step.communication_ms
        < at("H100", per_node=8, engine="unoverlapped").step.communication_ms
    )
    assert (
        "network" in at("GB200", per_node=4, nodes=19, engine="unoverlapped").reason
    )  # 76 devices exceed the NVLink domain of 72


def test_exposed_communication_is_reported_by_kind():
    assert set(at().exposed_ms) == {"data_parallel"}
    assert (
        set(at(zero_stage=1).exposed_ms)
        == set(at(zero_stage=3).exposed_ms)
        == {"data_parallel", "parameters"}
    )
    many = at(
        model=stacked(),
        precision="bf16",
        tp=2,
        pp=2,
        cp=2,
        accumulation=4,
        offload_optimizer=True,
        zero_stage=1,
        per_node=16,
    )
    assert set(many.exposed_ms) == set(KINDS) - {"expert_parallel"}  # needs a model with experts
    assert sum(many.exposed_ms.values()) == pytest.approx(many.step.communication_ms)


def test_hybrid_sharding_gathers_parameters_within_node():
    whole = at(nodes=4, network=2.0, zero_stage=3)
    hybrid = at(nodes=4, network=2.0, zero_stage=3, shard_size=8)
    assert hybrid.exposed_ms["parameters"] < whole.exposed_ms["parameters"]
    assert hybrid.memory.parameters_gib > whole.memory.parameters_gib


def test_reshard_after_forward_false_gathers_parameters_once():
    again, kept = at(zero_stage=3), at(zero_stage=3, reshard_after_forward=False)
    assert kept.exposed_ms["parameters"] < again.exposed_ms["parameters"]


def test_accumulation_all_reduces_once_but_zero2_every_micro_batch():
    once, sharded = at(accumulation=8), at(accumulation=8, zero_stage=2)
    assert once.exposed_ms["data_parallel"] == pytest.approx(at().exposed_ms["data_parallel"])
    assert sharded.exposed_ms["data_parallel"] == pytest.approx(
        8 * at(zero_stage=2).exposed_ms["data_parallel"]
    )


def test_torch_data_parallel_communicates_more_than_ddp():
    assert (
        at("RTX 2080 Ti", 4, engine="data_parallel").step.communication_ms
        > at("RTX 2080 Ti", 4, micro_batch=256).step.communication_ms
    )


def test_torch_data_parallel_host_overhead_grows_with_replicas():
    one, two, three = (
        at("RTX 2080 Ti", n, engine="data_parallel", micro_batch=1).step.host_overhead_ms
        for n in (1, 2, 3)
    )
    assert two - one > 1.2 * (three - two) > 0
    assert at("RTX 2080 Ti", 1, engine="data_parallel").step.communication_ms == 0


def test_megatron_core_overlaps_tensor_parallel_with_sequence_parallelism():
    def tensor(**changes):
        e = {
            "model": stacked(),
            "precision": "bf16",
            "tp": 2,
            "per_node": 2,
            "sequence_parallel": True,
        }
        return at(**e | changes).exposed_ms["tensor_parallel"]

    assert tensor(engine="megatron_core") == pytest.approx(tensor(async_tensor_parallel=True))
    assert tensor(engine="megatron_core") < 0.8 * tensor()
    assert tensor(engine="megatron_core", sequence_parallel=False) == pytest.approx(
        tensor(sequence_parallel=False)
    )


def test_torch_data_parallel_copies_weights_every_micro_batch():
    def copies(**changes):
        return at("RTX 2080 Ti", 4, engine="data_parallel", **changes).exposed_ms["data_parallel"]

    assert copies(accumulation=3) == pytest.approx(3 * copies())
    assert copies(precision="amp_fp16") == copies()  # weights are fp32 under autocast
    looking = replace(workload(), mode="inference")
    assert copies(model=looking) == pytest.approx(copies() / 2)  # only parameters, no gradients


def test_autocast_gathers_fp32_weights_after_the_step():
    whole, cast = (
        at(zero_stage=1, precision=precision).exposed_ms["parameters"]
        for precision in ("fp32", "amp_bf16")
    )
    assert cast == pytest.approx(whole)


def test_model_without_blocks_is_gathered_without_overlap():
    hiding, not_hiding = (
        at(zero_stage=3, micro_batch=64, engine=e).exposed_ms["parameters"]
        for e in ("ddp", "unoverlapped")
    )
    assert hiding == pytest.approx(not_hiding)


def test_single_device_has_no_communication():
    assert at(per_node=1).step.communication_ms == 0
    assert at(per_node=1).exposed_ms == {}


def test_partitioned_activations_are_gathered_per_block_and_save_memory():
    def of(**changes):
        e = {
            "model": stacked(),
            "precision": "bf16",
            "tp": 4,
            "per_node": 4,
            "activation_checkpointing": "full",
            "micro_batch": 4096,
        }
        return at(**e | changes)

    whole, divided = of(), of(partition_activations=True)
    extra = divided.exposed_ms["tensor_parallel"] - whole.exposed_ms["tensor_parallel"]
    kept = stacked().forms["half"].blocks
    payload = kept.input_bytes[0] + kept.input_bytes[1] * whole.execution.micro_batch
    node = Cluster(device=find_device("A100"), devices_per_node=4)
    gather = collective_ms("all_gather", np.array([payload]), np.array([4]), np.array([4]), node)
    assert extra == pytest.approx(kept.count * float(gather[0]), rel=1e-6)
    spared = kept.count * payload * (1 - 1 / 4) / 2**30
    assert whole.memory.activations_gib - divided.memory.activations_gib <= spared * (1 + 1e-9)
    assert divided.memory.activations_gib < whole.memory.activations_gib
    kept_whole = of(activation_checkpointing="none")
    assert of(activation_checkpointing="none", partition_activations=True).step == kept_whole.step
    assert (
        of(sequence_parallel=True, partition_activations=True).step
        == of(sequence_parallel=True).step
    )
