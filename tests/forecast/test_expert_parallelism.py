"""Expert parallelism: computation, memory and communication per rank."""

import numpy as np
import pytest
from msgspec.structs import replace

from expert_models import CHOSEN, EXPERTS, INNER, TOKENS, WIDTH, language_task
from nouns import stacked
from trainpace.core.errors import Contradiction
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.software import Software
from trainpace.core.stats import Z_95
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast import Forecaster, Target, read_parallelism
from trainpace.forecast.ranks import rank_operators
from trainpace.forecast.software import as_run
from trainpace.forecast.target import host_sensitivity, kernel_key
from trainpace.forecast.uncertainty import EXPERTS_SD
from trainpace.workload import GEMM, GROUPED, Variant, at_batch
from trainpace.workload.trace import trace_task

EP8 = Execution(nproc_per_node=8, micro_batch=256, precision="bf16", optimizer="adamw", ep=8)


@pytest.fixture(scope="module")
def workload():
    return trace_task(language_task(), ("half", "amp"), Variant(optimizer="adamw"))


def forecaster(workload, nodes=1, per_node=8):
    cluster = Cluster(
        device=find_device("H100 SXM"),
        devices_per_node=per_node,
        nodes=nodes,
        network_gb_per_s_per_device=25.0,
    )
    return Forecaster(workload, Target(cluster))


def grouped(workload, batch, *ranks):
    """Return (FLOPs, groups, rows of all groups) of the first grouped matmul of a rank."""
    form = workload.forms["half"]
    table = rank_operators(form.operators, form.blocks, *ranks)
    first = table.function.index(GROUPED)
    groups, rows, *_ = at_batch(table.dims[first, GEMM], batch)
    return at_batch(table.flops[first], batch), groups, groups * rows


def test_expert_parallel_ranks_hold_fewer_experts_but_same_tokens(workload):
    rows, flops = 4 * TOKENS * CHOSEN, 4 * TOKENS * CHOSEN * 2 * WIDTH * 2 * INNER
    assert grouped(workload, 4, 1, 1, False) == (flops, EXPERTS, rows)
    assert grouped(workload, 4, 1, 1, False, 4, 1) == (flops, EXPERTS / 4, rows)
    # a tensor-parallel rank contributes its share of the tokens; experts split over two ranks receive tokens of both
    assert grouped(workload, 4, 2, 1, True, 4, 1) == (flops / 2, EXPERTS / 4, rows / 2)
    assert grouped(workload, 4, 2, 1, True, 4, 2) == (flops / 2, EXPERTS / 4, rows)
    assert grouped(workload, 4, 1, 1, False, 4, 1, 1.5) == (1.5 * flops, EXPERTS / 4, 1.5 * rows)


def test_expert_states_are_sharded_over_expert_parallel_ranks(workload):
    """16 ranks with ep 4 hold 4 copies of each expert and 16 of everything else."""
    experts = workload.forms["half"].blocks.expert_parameters * workload.forms["half"].blocks.count
    rest = workload.parameters - experts
    one = replace(EP8, nnodes=2, ep=4)
    memory = {
        stage: forecaster(workload, nodes=2).memory(replace(one, zero_stage=stage))
        for stage in (0, 1)
    }
    assert memory[0].parameters_gib * BYTES_PER_GIB == pytest.approx(
        2 * (rest + experts / 4), rel=1e-3
    )
    # fp32 weights and two moments
    assert memory[1].optimizer_states_gib * BYTES_PER_GIB == pytest.approx(
        12 * (rest / 16 + experts / 16), rel=1e-3
    )
    assert memory[0].optimizer_states_gib * BYTES_PER_GIB == pytest.approx(
        12 * (rest + experts / 4), rel=1e-3
    )


def exposed(workload, nodes=1, per_node=8, **changes):
    execution = replace(EP8, nnodes=nodes, nproc_per_node=per_node, **changes)
    return (
        forecaster(workload, nodes, per_node)
        .forecast(execution)
        .exposed_ms.get("expert_parallel", 0.0)
    )


def test_expert_exchange_time_depends_on_network_and_library(workload):
    here, far = exposed(workload), exposed(workload, nodes=8, per_node=1)
    assert exposed(workload, ep=1) == 0 < here < far
    assert exposed(workload, nodes=4, per_node=2, expert_exchange="deep_ep") < exposed(
        workload, nodes=4, per_node=2
    )
    assert exposed(workload, expert_exchange="overlapped") < 0.5 * here
    across = {
        "nodes": 8,
        "per_node": 2,
        "ep": 16 if EXPERTS % 16 == 0 else 8,
        "expert_exchange": "deep_ep",
    }
    limited = [exposed(workload, **across, expert_nodes=nodes) for nodes in (None, 8, 1)]
    assert limited[0] == limited[1] > limited[2] > 0
    assert here < exposed(workload, expert_load=2.0) < 2 * here
    recomputed = exposed(workload, activation_checkpointing="full")
    assert recomputed == pytest.approx(1.5 * here)  # forward, forward again, backward


def test_expert_load_imbalance_costs_time_and_memory(workload):
    even, uneven = (
        forecaster(workload).forecast(replace(EP8, expert_load=load)) for load in (1.0, 3.0)
    )
    assert uneven.step.forward_ms > even.step.forward_ms
    assert uneven.memory.activations_gib > even.memory.activations_gib


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        (replace(EP8, ep=3, nproc_per_node=9), "it has 8 experts"),
        (replace(EP8, ep=16, nproc_per_node=16), "it has 8 experts"),
    ],
)
def test_sizes_that_do_not_divide_experts_are_rejected(workload, execution, words):
    with pytest.raises(Contradiction, match=words) as refused:
        forecaster(workload, per_node=execution.nproc_per_node).forecast(execution)
    assert "1, 2, 4, 8" in refused.value.hint


def test_ep_is_rejected_for_model_without_experts():
    execution = Execution(nproc_per_node=2, ep=2)
    with pytest.raises(Contradiction, match="ep 2"):
        forecaster(stacked(), per_node=2).forecast(execution)


def test_ep_times_expert_tp_must_divide_ranks():
    with pytest.raises(Contradiction, match="ep 4"):
        Execution(nproc_per_node=4, tp=2, ep=4)
    assert Execution(nproc_per_node=4, tp=2, ep=4, expert_tp=1).data_parallel_size == 2


def test_autocast_is_rejected_if_experts_would_stay_in_fp32(workload):
    table = forecaster(workload).at(
        [replace(EP8, precision="amp_bf16", zero_stage=stage) for stage in (0, 3)]
    )
    assert np.isfinite(table.step_ms).tolist() == [False, True]
    assert "autocast" in table.reason(0)


def test_expert_parallelism_text_is_parsed():
    execution = read_parallelism("tp=2,pp=8,cp=1,vp=4,ep=64,deepep")
    assert (execution.ep, execution.expert_tp, execution.expert_exchange) == (64, 1, "deep_ep")
    assert read_parallelism("ep=8,etp=2").expert_tp == 2
    assert read_parallelism("ep=8,deepep,ep_overlap").expert_exchange == "overlapped"
    assert read_parallelism("pp=16,ep=64,expert_nodes=4").expert_nodes == 4
    assert read_parallelism("fsdp=0,tp=1,pp=1,ep=8").zero_stage == 0
    assert read_parallelism("fsdp=8,ep=8").zero_stage == 3


def test_expert_weight_gradients_are_padded_to_aligned_rows(workload):
    """A gradient summed over 10,922.7 rows per expert does not become an unaligned matmul, which would be slow on tensor cores."""
    f = forecaster(workload)
    key, batches = (
        kernel_key(replace(EP8, expert_load=1.07, precision="fp8"), f.target.software),
        np.arange(6400.0, 6408.0),
    )
    table = f.evaluated.table(key.sharding)
    timed = f.target.kernels.rank_times(table, tuple(batches), f.target.cluster.device, key)
    operators = table.operators
    grouped = (np.array(operators.function) == GROUPED) & (np.array(operators.phase) == "backward")
    rows = at_batch(operators.dims[grouped, GEMM.k], batches[:, None])
    assert (rows % 16 > 0).any()
    steps = (
        np.diff(timed.times.device_s[:, grouped].sum(axis=1))
        / timed.times.device_s[0, grouped].sum()
    )
    assert np.abs(steps).max() < 0.05


def test_router_software_setting_computes_fp32_router_in_16_bits(workload):
    """Megatron-Core's RouterGatingLinearFunction uses 16 bits; transformers casts DeepSeek-V3's router to fp32."""
    form = workload.forms["half"]
    operators, blocks = form.operators, form.blocks
    inside = (np.array(operators.kind) == "gemm") & (blocks.operator_counts > 0)
    router = np.flatnonzero(inside)[0]
    half = operators.half.copy()
    half[router] = False
    cast = replace(workload, forms={"half": replace(form, operators=replace(operators, half=half))})
    assert as_run(cast, Software().rewrites) is cast
    run = as_run(cast, Software(router="16_bit").rewrites).forms["half"].operators
    assert run.half[inside].all()
    assert (2 * run.read_bytes[router] == operators.read_bytes[router]).all()
    assert (run.read_bytes[~inside] == operators.read_bytes[~inside]).all()


def test_expert_layers_widen_interval(workload):
    table = forecaster(workload).at([EP8])
    (sd,) = table.outside_sds
    of_host = host_sensitivity(table.parts, table.step_ms)[0] * table.forecaster.target.host.log_sd
    assert sd == pytest.approx(np.hypot(EXPERTS_SD, of_host))
    assert table.high_ms[0] / table.step_ms[0] > np.exp(Z_95 * EXPERTS_SD)
    assert not stacked().has_experts
