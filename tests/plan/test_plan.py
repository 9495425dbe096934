"""Invariants of a plan, on a small model and many kinds of clusters."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from expert_models import language_task
from nouns import forecast, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import CERTAIN, FITS_AT
from trainpace.forecast import Grid
from trainpace.forecast.memory import FIT_MARGIN, needed_gib
from trainpace.job import DataPath, Schedule, total_steps
from trainpace.plan import NOISE, Choice, Evaluator, Problem, SearchSpace, plan_changes
from trainpace.plan.evaluate import device_room_gib, part_of, same_work, with_start
from trainpace.plan.plan import ordered_changes
from trainpace.plan.search import executions_on, is_legal, search
from trainpace.plan.settings import (
    RESOLUTION,
    SETTING_NAMES,
    SETTINGS,
    changed,
    differing,
    points,
    resolution,
)
from trainpace.workload import Variant, load_workload
from trainpace.workload.trace import trace_task

MODEL = workload()
WAITING = (
    DataPath(workers=0, ms_per_sample=8.0, beside=False),
    DataPath(workers=2, ms_per_sample=4.0),
    DataPath(workers=1, ms_per_sample=0.01, precomputed=True),
)


def setting(
    gpu="A100", gpus=1, nodes=1, network=None, schedule=None, memory_gib=None, price=None
) -> Problem:
    device = find_device(gpu)
    if memory_gib:
        device = replace(device, memory_gib=replace(device.memory_gib, value=memory_gib))
    cluster = Cluster(
        device=device,
        devices_per_node=gpus,
        nodes=nodes,
        price_usd_per_device_hour=price,
        network_gb_per_s_per_device=None if network is None else network / gpus,
    )
    return Problem(MODEL, cluster, schedule or Schedule(samples=100_000, epochs=3.0))


PROBLEMS = st.builds(
    setting,
    gpu=st.sampled_from(["A100", "T4", "H100"]),
    gpus=st.sampled_from([1, 2]),
    nodes=st.sampled_from([1, 2]),
    network=st.sampled_from([0.125, 25.0]),
    memory_gib=st.sampled_from([None, 1.2, 2.0]),
)
BATCHES = st.sampled_from([4, 12, 64])


def start_on(s: Problem, micro_batch=8, **changes) -> Execution:
    return Execution(
        micro_batch=micro_batch,
        nnodes=s.cluster.nodes,
        nproc_per_node=s.cluster.devices_per_node,
        optimizer="sgd_momentum",
        **changes,
    )


@settings(max_examples=6)
@given(PROBLEMS, BATCHES, st.sampled_from([WAITING, WAITING[:1]]))
def test_plan_is_consistent_with_its_search(s, micro_batch, data):
    start = start_on(s, micro_batch)
    plan = plan_changes(s, start, data)
    s = with_start(s, start)
    found = search(s, start, executions_on(s.cluster, MODEL, start, SearchSpace()), data)
    if plan.best is None:
        assert found.fitting == 0
        assert plan.reason
        return
    best = plan.best.choice
    evaluator = Evaluator(s, start)
    assert evaluator.fits(best)
    # no single forecast that fits is faster than the best by more than the forecast error
    for row in range(0, len(found.grid), 31):
        execution = found.grid.execution(row)
        assert execution.global_batch == start.global_batch
        f = forecast(
            MODEL, execution, part_of(s.cluster, execution.nnodes, execution.nproc_per_node)
        )
        for path in data:
            choice = Choice(execution=execution, data=path)
            if f.step is not None and f.fits:
                apart = resolution(knob.name for knob in differing(best, choice))
                assert plan.best.job_s <= evaluator.job_s(choice) * math.exp(apart) * (1 + 1e-9)
                assert evaluator.job_s(choice) >= plan.fastest.job_s * (1 - 1e-9)
    assert plan.because
    for maybe in plan.maybe:
        assert 0 < maybe.saved_s <= maybe.told_apart * plan.best.job_s
    # every intermediate step fits and keeps the global batch, and the savings add up
    for change in plan.changes:
        rung = Choice(execution=change.execution, data=change.data)
        assert evaluator.fits(rung)
        assert is_legal(rung.execution, start)
        assert change.execution.global_batch == start.global_batch
        assert change.makes_fit or len(plan.changes) == 1 or change.forecast_saved_s > 0
    for change, left_s in zip(plan.changes, plan.left_s[1:], strict=True):
        assert change.makes_fit or change.forecast_saved_s >= s.noise_s(left_s) * (1 - 1e-9)
    if plan.changes:
        assert plan.end == best.execution
        assert plan.changes[-1].data == best.data
    first = next((c for c in plan.changes if c.makes_fit), None)
    begin = (
        Choice(execution=first.execution, data=first.data)
        if first
        else Choice(execution=start, data=data[0])
    )
    assert plan.saved_s == pytest.approx(evaluator.job_s(begin) - plan.best.job_s, abs=1e-6)
    assert plan.start_fits == (first is None)
    assert plan.best.changes == len(differing(Choice(execution=start, data=data[0]), best))
    if plan.start_fits and plan.changes:
        assert plan.saved_s >= s.noise_s(plan.now.job_s) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "memory_gib"), [(1, None), (2, 1.6)])
def test_search_includes_expert_parallelism(nodes, memory_gib):
    """The best result of a search that includes ep equals the best of single forecasts."""
    experts = trace_task(language_task(), ("half",), Variant(optimizer="adamw"))
    s = setting("H100", gpus=4, nodes=nodes, network=25.0, memory_gib=memory_gib)._replace(
        workload=experts
    )
    start = start_on(s, micro_batch=256, precision="bf16")
    found = search(
        s,
        start,
        executions_on(s.cluster, experts, start, SearchSpace(keep=("GPUs", "offload"))),
        WAITING[1:2],
    )
    assert set(found.grid.ep.tolist()) == {1, 2, 4, 8} - ({8} if nodes == 1 else set())
    evaluator = Evaluator(s, start)
    rows = range(0, len(found.grid), len(found.grid) // 200)
    choices = [Choice(execution=found.grid.execution(row), data=WAITING[1]) for row in rows]
    alone = [evaluator.job_s(choice) if evaluator.fits(choice) else math.inf for choice in choices]
    assert alone == pytest.approx(found.job_s[list(rows), 0].tolist())
    assert found.job_s[found.best()] <= min(alone)


def test_recommendation_saves_time_on_the_given_network_too():
    """A slower network excludes the start. The choice that is best there is no gain here."""
    s = setting("H100", gpus=2)
    start = start_on(s, activation_checkpointing="full")
    grid = Grid.of([start, replace(start, zero_stage=2), replace(start, compile=True)])
    found = search(s, start, grid, WAITING[:1])
    here = found._replace(job_s=np.array([[100.0], [101.0], [90.0]]), startup_s=0.0)
    slower = here._replace(job_s=np.array([[150.0], [100.0], [110.0]]))
    assert here.recommended([slower]) == (2, 0)


def test_change_to_almost_full_memory_is_a_risk():
    s = setting()
    now, more = start_on(s, accumulation=8), start_on(s, micro_batch=64)
    needed = float(needed_gib(forecast(MODEL, more, s.cluster).memory))
    risks = {}
    for factor in (1.2, 3.0):
        evaluator = Evaluator(setting(memory_gib=needed * factor), now)
        (change,) = ordered_changes(evaluator, Choice(execution=now), Choice(execution=more))
        risks[evaluator.fit_probability(Choice(execution=more)) >= CERTAIN] = change.risk
    assert risks == {False: "low", True: "none"}


def test_recommendation_is_simplest_of_indistinguishably_fast_choices():
    s = setting(gpus=2)
    start = start_on(s)
    found = search(s, start, executions_on(s.cluster, MODEL, start, SearchSpace()), WAITING)
    chosen = found.recommended()
    assert found.as_fast_as(found.best())[chosen]

    def beaten(index):
        """Return True if another choice is faster by more than the forecast error of the difference."""
        apart = found.resolutions(index)
        return bool(
            (
                found.job_s[index]
                > found.startup_s + (found.job_s - found.startup_s) * np.exp(apart) * (1 + 1e-6)
            ).any()
        )

    assert not beaten(chosen)
    simpler = np.argwhere((found.points < found.points[chosen]) & np.isfinite(found.job_s))
    assert len(simpler)
    assert all(beaten(tuple(index)) for index in simpler[:: max(1, len(simpler) // 40)])


def test_savings_within_forecast_error_are_listed_as_maybe():
    """A loader that is 5 % faster is listed as a maybe; one that is twice as fast is a change."""
    s = setting()
    start = start_on(s, micro_batch=256, precision="amp_bf16")
    only_data = SearchSpace(keep=tuple(name for name in SETTING_NAMES if name != "data"))
    slow = DataPath(workers=1, ms_per_sample=8.0)
    little, much = (
        plan_changes(s, start, (slow, DataPath(workers=2, ms_per_sample=8.0 * share)), only_data)
        for share in (0.95, 0.5)
    )
    assert not little.changes
    (maybe,) = little.maybe
    assert maybe.saved_s == pytest.approx(0.05 * little.best.job_s, rel=0.05)
    assert maybe.told_apart == pytest.approx(1 - math.exp(-RESOLUTION["data"]))
    assert [change.title for change in much.changes] == [
        "2 loader workers instead of 1 loader worker"
    ]
    assert 0 < much.changes[0].saved_at_least_s < much.changes[0].forecast_saved_s
    assert not much.maybe


@pytest.mark.parametrize(
    ("simple", "less_simple"),
    [
        ({}, {"zero_stage": 1}),
        ({"zero_stage": 1}, {"zero_stage": 2}),
        ({"zero_stage": 2}, {"zero_stage": 3}),
        ({"zero_stage": 3}, {"tp": 2, "accumulation": 2}),
        ({"tp": 2, "accumulation": 2}, {"pp": 2, "accumulation": 2}),
        ({}, {"activation_checkpointing": "selective"}),
        ({"compile": True}, {"compile": True, "channels_last": True}),
        ({"precision": "amp_bf16"}, {"precision": "amp_fp16"}),
    ],
)
def test_simpler_changes_have_fewer_points(simple, less_simple):
    start = Execution(nproc_per_node=2, precision="fp32")
    grid = Grid.of([start, replace(start, **simple), replace(start, **less_simple)])
    unmoved, first, second = points(grid, start)
    assert unmoved == 0
    assert first < second


def test_current_training_proves_that_its_memory_suffices():
    """A training that runs may be less than surely forecast to fit, and needs no change for it."""
    start = start_on(setting(), micro_batch=64)
    need = float(needed_gib(forecast(MODEL, start, setting().cluster).memory))
    probable = setting(memory_gib=1.05 * need / FIT_MARGIN)
    f = forecast(MODEL, start, probable.cluster)
    assert (f.fits, f.may_fit) == (False, True)
    assert 0.5 < f.fit_probability < FITS_AT
    plan = plan_changes(probable, start)
    assert plan.start_fits
    assert plan.best.fit_probability >= f.fit_probability
    assert not any(change.makes_fit for change in plan.changes)


def test_plan_explains_its_choice():
    small = plan_changes(setting("A100", gpus=4), start_on(setting("A100", gpus=4)))
    assert small.best.choice.execution.zero_stage == 0
    for said in ("4 x A100 SXM 40GB with NVLink", "plain DDP", "gradients"):
        assert said in small.because
    alone = plan_changes(setting(), start_on(setting()))
    assert "nothing to divide" in alone.because


def test_change_count_equals_named_changes():
    s = setting(gpus=4, nodes=2, network=1.0)
    start = start_on(s)
    found = search(
        s,
        start,
        executions_on(s.cluster, MODEL, start, SearchSpace(allow_global_batch=True)),
        WAITING,
    )
    for row in range(0, len(found.grid), 41):
        for path in range(len(WAITING)):
            now = Choice(execution=start, data=WAITING[0])
            assert found.changes[row, path] == len(differing(now, found.choice((row, path))))


def test_first_change_makes_start_fit_in_memory():
    s = setting(memory_gib=2.5)
    start = start_on(s, micro_batch=1024)
    plan = plan_changes(s, start)
    assert not plan.start_fits
    assert plan.changes[0].makes_fit
    assert plan.changes[0].forecast_saved_s == 0
    assert plan.changes[0].execution.micro_batch < 1024


def test_plan_reports_missing_memory_if_nothing_fits():
    s = setting(memory_gib=0.45)
    plan = plan_changes(s, start_on(s))
    assert plan.best is None
    grid = executions_on(s.cluster, MODEL, start_on(s), SearchSpace())
    least = min(
        needed_gib(f.memory)
        for row in range(len(grid))
        if (f := forecast(MODEL, grid.execution(row), s.cluster)).step is not None
    )
    assert f"needs {least:.3g} GiB" in plan.reason
    assert f"{least - device_room_gib(s.cluster):.3g} more" in plan.reason
    assert "GiB would do" in plan.nearest or "it would fit" in plan.nearest


def test_plan_avoids_slow_network():
    s = setting(gpus=2, nodes=2, network=0.01)
    plan = plan_changes(s, start_on(s))
    assert plan.best.choice.execution.nnodes == 1
    (said,) = [r for r in plan.rejected if r.title == "2 nodes of 2 GPUs"]
    assert "0.01 GB/s" in said.why
    assert said.lost_s > 0
    assert plan.changes[0].effort == "infrastructure"


def test_accumulation_is_rejected_on_one_gpu():
    # larger matmuls reach a few percent less of the peak rate, as measured ones do
    plan = plan_changes(setting(), start_on(setting(), micro_batch=2))
    (said,) = [r for r in plan.rejected if r.title == "accumulation"]
    assert "on one GPU" in said.why
    assert said.lost_s >= 0


def test_sharding_setting_is_kept_and_rejected_sharding_listed():
    s = setting(gpus=2)
    plan = plan_changes(s, start_on(s), space=SearchSpace(keep=("sharding",)))
    assert not [r for r in plan.rejected if "ZeRO" in r.title]
    said = [
        r
        for r in plan_changes(s, start_on(s)).rejected
        if "ZeRO" in r.title or r.title == "no sharding"
    ]
    assert said
    assert all(r.lost_s is None or r.lost_s > -NOISE * plan.best.job_s for r in said)


@pytest.mark.parametrize("knob", SETTING_NAMES)
def test_kept_setting_is_not_changed(knob):
    s = setting(gpus=2, nodes=2, network=1.0)
    start = start_on(s)
    plan = plan_changes(
        s, start, WAITING, SearchSpace(keep=(knob,), allow_global_batch=knob != "global batch")
    )
    now = Choice(execution=start, data=WAITING[0])
    assert knob not in {k.name for k in differing(now, plan.best.choice)}


def test_search_space_rejects_unknown_setting():
    with pytest.raises(TrainpaceError):
        SearchSpace(keep=("precisions",))


def test_global_batch_changes_only_if_allowed():
    s = setting()
    start = start_on(s, micro_batch=1)
    free = plan_changes(s, start, space=SearchSpace(allow_global_batch=True))
    assert plan_changes(s, start).best.choice.execution.global_batch == 1
    assert free.best.choice.execution.global_batch > 1
    (change,) = [c for c in free.changes if "global batch" in c.title]
    assert change.risk == "medium"
    in_steps = Schedule(max_steps=1000)
    larger = replace(start, micro_batch=8)
    there = s._replace(schedule=in_steps)
    assert same_work(there, larger, start).max_steps == 125
    assert total_steps(same_work(there, larger, start), larger) == 125


def test_noise_scale_scales_steps_to_the_same_loss():
    s = setting()
    start = start_on(s, micro_batch=1)
    larger = replace(start, micro_batch=8)
    in_steps = s._replace(schedule=Schedule(max_steps=1000), noise_scale=8.0)
    assert same_work(in_steps, larger, start).max_steps == pytest.approx(1000 * 2 / 9, abs=1)
    in_epochs = s._replace(noise_scale=8.0)
    assert same_work(in_epochs, larger, start).epochs == pytest.approx(
        s.schedule.epochs * 2 / (1 + 1 / 8)
    )
    assert same_work(in_epochs, start, start) == s.schedule
    batches = [
        plan_changes(
            s._replace(noise_scale=scale), start, space=SearchSpace(allow_global_batch=True)
        ).best.choice.execution.global_batch
        for scale in (1e-3, 1e6)
    ]
    assert batches[0] == 1  # more samples per step would not help
    assert batches[1] > 1


def test_precision_is_lowered_only_if_allowed():
    s = setting("H100")
    for precision in ("fp32", "amp_bf16", "bf16"):
        plan = plan_changes(s, start_on(s, precision=precision))
        assert plan.best.choice.execution.precision in {
            "fp32": ("amp_bf16", "amp_fp16", "tf32")
        }.get(precision, (precision, "amp_bf16", "amp_fp16") if precision != "bf16" else ("bf16",))
    free = plan_changes(
        s, start_on(s, micro_batch=4096, precision="bf16"), space=SearchSpace(allow_fp8=True)
    )
    assert free.best.choice.execution.precision == "fp8"
    assert [c.risk for c in free.changes if "fp8" in c.title] == ["medium"]


def test_data_path_changes_if_steps_wait_for_data():
    s = setting()
    plan = plan_changes(s, start_on(s), WAITING)
    assert plan.best.choice.data.precomputed
    slow = [c for c in plan.changes if "prepared offline" in c.title]
    assert len(slow) == 1
    assert slow[0].effort == "code change"
    # a step takes at least as long as loading its data, before and after the change
    assert plan.now.step_ms >= 8 * 8.0
    assert plan.best.step_ms >= 8 * 0.01


def test_single_change_gives_single_step():
    s = setting(memory_gib=1.5)
    start = start_on(s, micro_batch=8)
    assert (
        changed(
            Choice(execution=start), Choice(execution=replace(start, micro_batch=3)), SETTINGS[1:2]
        )
        is None
    )
    rungs = ordered_changes(
        Evaluator(s, start), Choice(execution=start), Choice(execution=replace(start, compile=True))
    )
    assert [r.title for r in rungs] == ["torch.compile"]


def test_compile_is_recommended_only_for_long_jobs():
    def compiles(samples):
        s = setting(schedule=Schedule(samples=samples, epochs=1))._replace(
            workload=load_workload("resnet18", ("amp",))
        )
        plan = plan_changes(s, start_on(s, precision="amp_bf16"))
        assert plan.best.job_s <= plan.now.job_s
        return plan.best.choice.execution.compile

    assert not compiles(800)
    assert compiles(800_000_000)


def test_search_excludes_gpu_counts_that_do_not_divide_batch():
    s = setting(gpus=4)
    start = Execution(micro_batch=3, nproc_per_node=2, optimizer="sgd_momentum")
    shapes = executions_on(s.cluster, MODEL, start, SearchSpace()).nproc_per_node
    assert set(shapes.tolist()) == {1, 2}  # 6 samples cannot be divided by 4


def test_price_gives_pareto_front():
    s = setting(gpus=4, price=2.0)
    plan = plan_changes(s, start_on(s, micro_batch=64))
    times = [p.job_s for p in plan.pareto]
    assert times == sorted(times, reverse=True)
    assert plan.pareto[-1].choice == plan.best.choice
    for p in plan.pareto:
        assert p.cost_usd == pytest.approx(2.0 * p.num_devices * p.job_s / 3600)
        assert math.isfinite(p.job_s)


def test_legal_executions_include_required_settings():
    """Offloading requires sharding, and asynchronous tensor parallelism requires torch.compile."""
    start = start_on(setting(gpus=2))
    assert is_legal(start, start)
    assert not is_legal(replace(start, offload_optimizer=True), start)
    assert is_legal(replace(start, offload_optimizer=True, zero_stage=1), start)
    asynchronous = replace(start, tp=2, sequence_parallel=True, async_tensor_parallel=True)
    assert not is_legal(asynchronous, start)
    assert is_legal(replace(asynchronous, compile=True), start)


def test_plan_compares_memory_formats():
    s = setting()._replace(workload=load_workload("resnet18", ("amp",)))
    plan = plan_changes(
        s, start_on(s, 64, precision="amp_bf16"), space=SearchSpace(keep=("compile",))
    )
    assert plan.best.choice.execution.channels_last
    assert "memory_format" in {key for change in plan.changes for key in change.settings}
