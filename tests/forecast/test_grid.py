"""Grids of parallel executions: parts sum up, sharding never adds work, and pipeline bubbles match theory."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import LAYERS, forecast, stacked, step_memory
from trainpace.core.errors import Contradiction
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.software import TODAY
from trainpace.forecast import Forecaster, Grid, Target, fitted_constants
from trainpace.forecast.communication import Communication
from trainpace.forecast.grid import CLASHES, Facts, clashes, divisors, stages_of
from trainpace.forecast.memory import OFFLOAD_BUCKET
from trainpace.forecast.ranks import RankTable, StageCosts
from trainpace.forecast.target import FITTED, kernel_key

WORKLOAD = stacked()
powers = st.sampled_from([1, 2, 4, 8])


def cluster(nodes=4, network=25.0, name="H100"):
    return Cluster(
        device=find_device(name),
        devices_per_node=8,
        nodes=nodes,
        network_gb_per_s_per_device=network,
    )


def run(nodes=4, **changes):
    return Execution(nnodes=nodes, nproc_per_node=8, precision="bf16", **changes)


@st.composite
def executions(draw):
    tp, pp, cp = draw(powers), draw(powers), draw(st.sampled_from([1, 2, 4]))
    assume(tp * pp * cp <= 32)
    virtual = draw(st.sampled_from([1, LAYERS // pp])) if pp > 1 else 1
    dp = 32 // (tp * pp * cp)
    return run(
        micro_batch=draw(st.integers(1, 9)),
        accumulation=pp * draw(st.integers(1, 4)),
        tp=tp,
        pp=pp,
        cp=cp,
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        shard_size=draw(st.sampled_from([None, 1, dp])),
        activation_checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
        virtual_stages=virtual,
        pipeline_schedule="interleaved"
        if virtual > 1
        else draw(st.sampled_from(["gpipe", "1f1b"])),
        sequence_parallel=draw(st.booleans()),
        async_tensor_parallel=draw(st.booleans()),
        compile=draw(st.booleans()),
        offload_optimizer=draw(st.booleans()),
        reshard_after_forward=draw(st.booleans()),
    )


def at(executions):
    grid = executions if isinstance(executions, Grid) else Grid.of(executions)
    return Forecaster(WORKLOAD, Target(cluster())).at(grid)


@settings(max_examples=60, deadline=None)
@given(st.lists(executions(), min_size=1, max_size=4))
def test_grid_equals_single_forecasts(many):
    found = at(many)
    assert found.feasible.shape == (len(many),)
    for i, execution in enumerate(many):
        one = forecast(WORKLOAD, execution, cluster())
        assert found.clash[i] == 0
        assert one.step.total_ms == pytest.approx(found.step_ms[i])
        assert sum(one.exposed_ms.values()) == pytest.approx(one.step.communication_ms)
        assert found.parts["idle_ms"][i] == pytest.approx(one.step.idle_ms)
        assert one.memory.allocated_gib == pytest.approx(found.memory.allocated_gib[i])
        assert one.fits == found.fits[i]
        assert (one.scaling_efficiency is None) == (one.scaling_reference_devices is None)
        assert Grid.of(many).execution(i) == execution


def test_memory_is_computed_once_for_all_devices(monkeypatch):
    many = Grid.vary(run(), micro_batch=[1, 2, 4], zero_stage=[0, 1, 3])
    forecaster = Forecaster(WORKLOAD, Target(cluster()))
    whole = forecaster.at(many)
    monkeypatch.setattr("trainpace.forecast.memory.MemoryModel.at", None)
    again = forecaster.on(cluster(name="A100")).at(many)
    assert (again.memory.allocated_gib == whole.memory.allocated_gib).all()
    assert (again.step_ms > whole.step_ms).all()


def test_unsharded_execution_ignores_blocks():
    alone = replace(cluster(), nodes=1, devices_per_node=1)
    plain = forecast(
        replace(WORKLOAD, forms=without_blocks()), Execution(precision="bf16", micro_batch=4), alone
    )
    blocks = forecast(WORKLOAD, Execution(precision="bf16", micro_batch=4), alone)
    assert blocks.step.total_ms == pytest.approx(plain.step.total_ms)
    assert blocks.memory == plain.memory
    assert blocks.scaling_efficiency is None


def without_blocks():
    return {name: replace(form, blocks=None) for name, form in WORKLOAD.forms.items()}


@given(powers, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_sharding_never_adds_work_to_a_rank(tp, pp, cp, sequence):
    assume(tp * pp * cp <= 16)
    whole = forecast(WORKLOAD, run(micro_batch=16, accumulation=4), cluster())
    shards = forecast(
        WORKLOAD,
        run(micro_batch=16, accumulation=4, tp=tp, pp=pp, cp=cp, sequence_parallel=sequence),
        cluster(),
    )
    for part in ("forward_ms", "backward_ms", "optimizer_ms"):
        # partly filled tiles may cost a little more
        assert getattr(shards.step, part) <= getattr(whole.step, part) * 1.02


@given(st.integers(0, 3))
def test_more_gpus_at_fixed_global_batch_never_increase_compute_time(stage):
    last = None
    for nodes in (1, 2, 4, 8):
        step = forecast(
            WORKLOAD, run(nodes, micro_batch=64 // nodes, zero_stage=stage), cluster(nodes)
        ).step
        computed = step.forward_ms + step.backward_ms + step.optimizer_ms
        assert last is None or computed <= last
        last = computed


@settings(deadline=None)
@given(executions(), st.floats(1, 100), st.floats(1, 4))
def test_more_network_bandwidth_never_increases_step_time(execution, network, factor):
    slow = forecast(WORKLOAD, execution, cluster(network=network)).step.total_ms
    fast = forecast(WORKLOAD, execution, cluster(network=network * factor)).step.total_ms
    assert fast <= slow * (1 + 1e-9)


def blocks_alone():
    """Return the workload without operators outside the blocks, so that equal stages take equal time."""
    form = WORKLOAD.forms["half"]
    inside = form.blocks.operator_counts > 0
    optimizer = np.array([phase == "optimizer" for phase in form.operators.phase])
    keep = np.flatnonzero(inside | optimizer)
    operators = replace(
        form.operators,
        **{
            name: tuple(column[i] for i in keep) if isinstance(column, tuple) else column[keep]
            for name in form.operators.__struct_fields__
            for column in [getattr(form.operators, name)]
        },
    )
    blocks = replace(
        form.blocks,
        operator_counts=form.blocks.operator_counts[keep],
        roles=tuple(form.blocks.roles[i] for i in keep),
        outside_parameters=0,
        outside_tensor_parameters=0,
    )
    return replace(WORKLOAD, forms={"half": replace(form, operators=operators, blocks=blocks)})


@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.booleans())
def test_bubble_of_equal_stages_matches_theory(pp, times, interleaved):
    even = blocks_alone()
    m, v = pp * times, (LAYERS // pp if interleaved else 1)
    assume(not interleaved or v > 1)
    schedule = "interleaved" if interleaved else "1f1b"
    huge = cluster(network=1e9)
    execution = run(
        micro_batch=32,
        pp=pp,
        accumulation=m,
        zero_stage=1,
        pipeline_schedule=schedule,
        virtual_stages=v,
    )
    f = forecast(even, execution, huge)
    busy = f.step.forward_ms + f.step.backward_ms + f.exposed_ms["pipeline"]
    assert f.step.idle_ms / busy == pytest.approx((pp - 1) / (m * v), rel=0.05)


def memory(**changes):
    return step_memory(
        WORKLOAD.forms["half"], run(**{"micro_batch": 4, "accumulation": 8, **changes}), True
    )


def test_memory_decreases_with_zero_stage_and_parallel_ranks():
    stages = [memory(zero_stage=stage).allocated_gib for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    for name, stage in (("tp", 0), ("tp", 3), ("cp", 3), ("pp", 0)):
        sizes = [memory(**{name: size, "zero_stage": stage}).allocated_gib for size in (2, 4, 8)]
        assert sizes == sorted(sizes, reverse=True), name
    kept = memory(zero_stage=3, reshard_after_forward=False)
    assert kept.parameters_gib > memory(zero_stage=3).parameters_gib


@given(st.sampled_from([2, 4, 8]), st.integers(1, 16))
def test_1f1b_activations_do_not_exceed_gpipe(pp, m):
    keeps = [
        memory(pp=pp, accumulation=m, pipeline_schedule=name).activations_gib
        for name in ("1f1b", "gpipe")
    ]
    assert keeps[0] <= keeps[1] * (1 + 1e-9)


def test_recomputation_trades_memory_for_time():
    none, selective, full = (
        forecast(
            WORKLOAD, run(micro_batch=16, zero_stage=3, activation_checkpointing=kind), cluster()
        )
        for kind in ("none", "selective", "full")
    )
    assert none.step.backward_ms < selective.step.backward_ms < full.step.backward_ms
    assert (
        none.memory.activations_gib > selective.memory.activations_gib > full.memory.activations_gib
    )


def test_megatron_mixed_precision_holds_18_bytes_per_parameter():
    # 2 (weights) + 4 (main gradients) + 12 (fp32 weights and two moments): Megatron-LM's bf16 optimizer
    found = memory(tp=8)
    held = found.parameters_gib / 2
    states = found.parameters_gib + found.gradients_gib + found.optimizer_states_gib
    assert states == pytest.approx(18 * held)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 32}, ["32", "16 attention heads"]),
        ({"pp": 16}, ["16", "8"]),
        (
            {"pp": 8, "virtual_stages": 2, "pipeline_schedule": "interleaved", "accumulation": 8},
            ["8 x virtual_stages 2"],
        ),
        ({"pp": 4, "pipeline_schedule": "interleaved", "accumulation": 6}, ["pp 4", "6"]),
        ({"nodes": 8}, ["64", "32"]),
        ({"engine": "data_parallel"}, ["one node of 8", "32"]),
        ({"offload_parameters": True, "zero_stage": 2}, ["stage 3", "2"]),
    ],
)
def test_contradictory_sizes_are_named_in_error(changes, words):
    with pytest.raises(Contradiction) as error:
        forecast(WORKLOAD, run(**changes), cluster())
    for word in words:
        assert word in str(error.value)


def test_cp_must_divide_the_sequence():
    odd = replace(WORKLOAD, sequence_length=511)
    with pytest.raises(Contradiction, match="cp 2 does not divide the sequence length 511"):
        forecast(odd, run(cp=2), cluster())


def test_uneven_stages_are_forecast_with_a_warning():
    f = forecast(WORKLOAD, run(2, pp=4, accumulation=8), cluster(2))
    assert not any("uneven" in warning for warning in f.warnings)
    three = replace(cluster(3), nodes=3)
    f = forecast(WORKLOAD, run(3, pp=3, accumulation=9), three)
    assert any("8 blocks over 3 stages" in warning for warning in f.warnings)


def test_grid_reports_broken_rules_by_name():
    found = at(Grid.vary(run(), tp=[1, 2, 32], pp=[1, 3, 1]))
    assert [CLASHES[i] for i in found.clash] == ["", "tp x pp x cp", "tp"]
    assert np.isfinite(found.step_ms).tolist() == [True, False, False]
    assert found.feasible.tolist() == [bool(found.fits[0]), False, False]


def test_optimizer_offload_frees_memory_and_adds_time():
    here, away = (forecast(WORKLOAD, run(offload_optimizer=o), cluster()) for o in (False, True))
    assert away.memory.optimizer_states_gib == 0 < here.memory.optimizer_states_gib
    assert away.step.total_ms > here.step.total_ms


def test_full_recomputation_keeps_block_inputs_and_head():
    form = WORKLOAD.forms["half"]
    blocks, batch = form.blocks, 64
    full = memory(activation_checkpointing="full", accumulation=1, zero_stage=3, micro_batch=64)
    head_and_work = form.memory.peaks[:, 2].max() - blocks.count * blocks.saved_bytes[1]
    expected = batch * (blocks.count * blocks.input_bytes[1] + head_and_work)
    assert full.activations_gib * 2**30 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_in_pipeline_keeps_stage_gradients_and_parameters(reshard):
    def at(m, nodes=2):
        changes = {
            "pp": 2,
            "zero_stage": 3,
            "micro_batch": 4,
            "accumulation": m,
            "reshard_after_forward": reshard,
        }
        return forecast(WORKLOAD, run(nodes, **changes), cluster(nodes))

    few, many = at(2), at(16)
    assert many.exposed_ms["data_parallel"] == pytest.approx(few.exposed_ms["data_parallel"])
    form = WORKLOAD.forms["half"]
    stage_gib = (
        (form.blocks.count // 2 * form.blocks.parameters + form.blocks.outside_parameters / 2)
        * 2
        / 2**30
    )
    assert many.memory.parameters_gib >= stage_gib
    assert many.memory.gradients_gib >= stage_gib


def test_fsdp_in_pipeline_reduce_scatter_is_not_overlapped():
    def scattered(micro_batch):
        found = forecast(WORKLOAD, run(2, pp=2, zero_stage=3, micro_batch=micro_batch), cluster(2))
        return found.exposed_ms["data_parallel"]

    assert scattered(64) == pytest.approx(
        scattered(1)
    )  # independent of the length of the backward pass


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({"tp": 2}, {"bf16": 4, "fp8": 2, "fp16": 2}),
        ({"zero_stage": 3}, {"bf16": 4, "fp8": 4, "fp16": 2}),
        ({"zero_stage": 2}, {"bf16": 2, "fp16": 2}),
        ({}, {"bf16": 2, "fp16": 2, "fp32": 4}),
    ],
)
def test_gradients_are_communicated_in_accumulation_precision(changes, bytes_each, monkeypatch):
    seen, step_exchanges = {}, Communication.step
    for precision in bytes_each:

        def spy(exchanges, gradients, *others, precision=precision):
            seen[precision] = gradients[0].sum() / (exchanges.stages.parameters[0].sum())
            return step_exchanges(exchanges, gradients, *others)

        monkeypatch.setattr(Communication, "step", spy)
        many = [replace(run(micro_batch=4, **changes), precision=precision)]
        at(many)
    assert seen == pytest.approx(bytes_each)


def test_zero2_accumulates_only_its_gradient_shard():
    def added(stage):
        once, often = (
            forecast(
                WORKLOAD,
                replace(run(accumulation=m, zero_stage=stage), precision="fp32"),
                cluster(),
            ).step.backward_ms
            for m in (1, 5)
        )
        return often - 5 * once

    assert added(1) > 0
    assert added(2) == pytest.approx(added(1) / 32)


def test_zero1_offload_caps_gradient_memory_at_bucket_size():
    kept, gone = (memory(zero_stage=1, offload_optimizer=o).gradients_gib for o in (False, True))
    assert gone == kept  # smaller than a bucket
    form = WORKLOAD.forms["half"]
    billion = replace(form.memory, peaks=form.memory.peaks * np.array([1e3, 1.0, 1.0]))
    much = replace(form, memory=billion)
    execution = run(micro_batch=4, accumulation=8, zero_stage=1, offload_optimizer=True)
    assert step_memory(much, execution, True).gradients_gib == pytest.approx(
        OFFLOAD_BUCKET * 2 / 2**30
    )


def test_offloaded_master_weights_leave_16_bit_shards_on_gpu():
    here, away = (memory(zero_stage=3, offload_optimizer=o).parameters_gib for o in (False, True))
    assert here - away == pytest.approx(WORKLOAD.parameters * 2 / 32 / 2**30)


def test_zero2_offload_copies_gradients_every_micro_step():
    def copied(m):
        found = forecast(
            WORKLOAD, run(zero_stage=2, offload_optimizer=True, accumulation=m), cluster()
        )
        return found.exposed_ms["offload"]

    once, twice, thrice = (copied(m) for m in (1, 2, 3))
    assert 0 < twice - once == pytest.approx(thrice - twice)


def exchanges_of(mode, **changes):
    found = forecast(replace(WORKLOAD, mode=mode), run(2, micro_batch=4, **changes), cluster(2))
    return found.exposed_ms


def test_parameters_are_gathered_after_step_only_with_optimizer():
    assert exchanges_of("train", zero_stage=1)["parameters"] > 0
    assert "parameters" not in exchanges_of("forward_backward", zero_stage=1)
    assert "parameters" not in exchanges_of("inference", zero_stage=2)


def test_inference_communicates_only_in_forward_pass():
    for kind, changes in (
        ("tensor_parallel", {"tp": 2}),
        ("parameters", {"zero_stage": 3}),
        ("context_parallel", {"cp": 2}),
    ):
        trained, looked = (exchanges_of(mode, **changes)[kind] for mode in ("train", "inference"))
        assert 0 < looked <= 0.51 * trained, kind
    ring = {"pp": 2, "accumulation": 4, "virtual_stages": 2, "pipeline_schedule": "interleaved"}
    both_ways, one_way = (exchanges_of(mode, **ring)["pipeline"] for mode in ("train", "inference"))
    assert one_way == pytest.approx(both_ways / 2)
    again = {"tp": 2, "activation_checkpointing": "full"}
    assert exchanges_of("inference", **again) == exchanges_of("inference", tp=2)


def test_full_recomputation_repeats_context_parallel_ring():
    plain, again = (
        exchanges_of("train", cp=4, activation_checkpointing=c)["context_parallel"]
        for c in ("none", "full")
    )
    looked = exchanges_of("inference", cp=4)["context_parallel"]
    assert again - plain == pytest.approx(looked)


def test_sgd_without_momentum_keeps_master_weights():
    form = WORKLOAD.forms["half"]
    plain = replace(form, memory=replace(form.memory, optimizer_bytes=0.0))
    found = step_memory(plain, run(tp=8), True)
    assert found.optimizer_states_gib == pytest.approx(2 * found.parameters_gib)
    assert step_memory(plain, run(), True).optimizer_states_gib == 0.0


def test_uneven_stages_compute_all_blocks():
    found = forecast(
        blocks_alone(), run(5, micro_batch=32, pp=5, accumulation=10), cluster(5, network=1e9)
    )
    a_block = (found.step.forward_ms + found.step.backward_ms) / 10 / 2  # the fullest stage has two
    assert found.step.idle_ms == pytest.approx((LAYERS - 2) * a_block, rel=0.05)


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "held"),
    [
        (126, 16, 8, (7, 8, 7)),
        (127, 16, 8, (8, 8, 7)),
        (4, 6, 1, (0, 1, 0)),
        (5, 6, 1, (1, 1, 0)),
        (14, 2, 8, (7, 0, 7)),
    ],
)
def test_embedding_and_head_can_count_as_pipeline_blocks(layers, pp, virtual, held):
    """Llama 3 405B runs 126 layers on 16 x 8 stages (Llama team 2024, section 3.3.2)."""
    schedule = "interleaved" if virtual > 1 else "1f1b"
    grid = Grid.of(
        [
            Execution(
                nproc_per_node=pp,
                pp=pp,
                accumulation=pp,
                virtual_stages=virtual,
                pipeline_schedule=schedule,
            )
        ]
    )
    blocks = replace(WORKLOAD.forms["half"].blocks, count=layers)
    stages, _ = stages_of(grid, blocks)
    assert tuple(stages.blocks[0]) == held
    assert (stages.number * stages.blocks).sum() == layers
    one_node = Cluster(device=find_device("H100 SXM"), devices_per_node=pp)
    assert not clashes(grid, Facts.of(WORKLOAD, blocks, one_node)).any()
    fewer = replace(blocks, count=pp * virtual - 3)
    assert clashes(grid, Facts.of(WORKLOAD, fewer, one_node)).all()


def test_embedding_without_head_is_on_first_stage():
    form = WORKLOAD.forms["half"]
    roles = tuple(
        "" if not n else r
        for r, n in zip(form.blocks.roles, form.blocks.operator_counts, strict=True)
    )
    for blocks, share in ((form.blocks, 0.5), (replace(form.blocks, roles=roles), 0.0)):
        stages, _ = stages_of(Grid.of([run(pp=2)]), blocks)
        behind = stages.parameters[0, 2] - LAYERS // 2 * blocks.parameters
        assert behind == pytest.approx(share * blocks.outside_parameters)


def test_context_parallelism_divides_samples_not_constants():
    form = WORKLOAD.forms["half"]
    constant = 2.0**30
    heavy = replace(
        form, blocks=replace(form.blocks, working_bytes=(constant, form.blocks.working_bytes[1]))
    )

    def activations_gib(cp):
        return step_memory(heavy, run(micro_batch=1, cp=cp), True).activations_gib

    assert activations_gib(8) >= constant / 2**30


def test_patch_convolution_is_on_first_stage():
    form = WORKLOAD.forms["half"]
    rows = np.array(form.operators.kind) == "embedding"
    kinds = tuple(
        "conv" if row else kind for kind, row in zip(form.operators.kind, rows, strict=True)
    )
    names = tuple(
        "convolution" if row else name
        for name, row in zip(form.operators.function, rows, strict=True)
    )
    dims, flops = form.operators.dims.copy(), form.operators.flops.copy()
    dims[rows, :15, 0], flops[rows] = 1, (2, 0)  # one element
    patches = replace(
        form, operators=replace(form.operators, kind=kinds, function=names, dims=dims, flops=flops)
    )
    device, key = find_device("H100"), kernel_key(Execution(precision="bf16"), TODAY)
    tables = [RankTable(f.operators, f.blocks) for f in (form, patches)]
    timed = [FITTED.rank_times(table, (1.0,), device, key) for table in tables]
    costs = [
        StageCosts.of(table.costs(found.times.device_s, found.host_ms, found.start_ms))
        for table, found in zip(tables, timed, strict=True)
    ]
    first_host = [cost.passes_host[:, 1] for cost in costs]
    assert (first_host[0] > 0).all()
    c = fitted_constants()
    library_call = c.host_library_us / c.host_launch_us
    assert first_host[1] == pytest.approx(first_host[0] * library_call)


def test_divisors_lists_all_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(49) == [1, 7, 49]
    assert divisors(97) == [1, 97]
