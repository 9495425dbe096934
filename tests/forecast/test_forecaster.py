"""A forecaster gives the same results for grids and single executions, on any target, in any order, from any thread."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import cpu, machine_model, stacked, workload
from trainpace.core.errors import Contradiction
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import CalibratedKernels, FittedKernels, Forecaster, Grid, Target
from trainpace.forecast.step import ACCUMULATE_SHARE, COPY_START_US

FOUR = Cluster(device=find_device("A100"), devices_per_node=4)
RUN = Execution(nproc_per_node=4, precision="bf16", zero_stage=1)


def on(device, **kernels):
    return Target(Cluster(device=find_device(device)), **kernels)


@pytest.mark.parametrize("model", [workload(), stacked()], ids=["one layer", "blocks"])
def test_batch_sweep_equals_single_forecasts(model):
    batches = [1, 2, 7, 31, 32, 33, 64, 500]
    curve = Forecaster(model, Target(FOUR)).at(Grid.vary(RUN, micro_batch=batches))
    records = curve.forecasts()
    for i, batch in enumerate(batches):
        alone = Forecaster(model, Target(FOUR)).forecast(replace(RUN, micro_batch=batch))
        assert records[i] == curve.forecast(i) == alone
        assert curve.step_ms[i] == pytest.approx(alone.step.total_ms, rel=1e-12)
        assert curve.low_ms[i] == pytest.approx(alone.step_time_interval_ms.low, rel=1e-12)
        assert curve.high_ms[i] == pytest.approx(alone.step_time_interval_ms.high, rel=1e-12)
        assert curve.memory.allocated_gib[i] == pytest.approx(alone.memory.allocated_gib)
        assert curve.fits[i] == alone.fits


def test_forecaster_accepts_calibrated_machine():
    target = Target(Cluster(device=cpu()), CalibratedKernels(machine_model()))
    curve = Forecaster(workload(), target).at(Grid.vary(Execution(), micro_batch=range(1, 71)))
    for i in (0, 40, 69):
        alone = Forecaster(workload(), target).forecast(Execution(micro_batch=i + 1))
        assert alone == curve.forecast(i)
        assert alone.provenance == "calibrated"
    assert (curve.low_ms < curve.step_ms).all()
    refused = Forecaster(workload(), Target(Cluster(device=cpu()))).forecast(Execution())
    assert "has to be calibrated" in refused.reason


def test_impossible_mfu_on_calibrated_machine_is_none():
    made = cpu()
    slow = replace(made, fp32_tflops=replace(made.fp32_tflops, value=1e-6))
    sound, damaged = (
        Forecaster(
            workload(), Target(Cluster(device=device), CalibratedKernels(machine_model()))
        ).forecast(Execution())
        for device in (made, slow)
    )
    assert sound.mfu > 0
    assert damaged.mfu is None
    assert damaged.step == sound.step


def test_rejected_rows_have_reason_and_others_have_time():
    rows = [
        RUN,
        replace(RUN, precision="fp8"),
        replace(RUN, tp=4, precision="fp32"),
        replace(RUN, nproc_per_node=2),
    ]
    several = Forecaster(workload(), Target(FOUR)).at(rows)
    assert several.timed.tolist() == [True, False, False, False]
    assert not several.reason(0)
    assert "FP8" in several.reason(1)
    assert "no repeated blocks" in several.reason(2)
    assert "2 processes" in several.reason(3)
    assert [several.forecast(i).step is None for i in range(3)] == [False, True, True]
    with pytest.raises(Contradiction, match="2 processes"):
        several.forecast(3)
    assert np.isnan(several.low_ms[1:]).all()


def test_workload_traced_at_one_batch_forecasts_only_that_batch():
    only = replace(workload(), traced_batches=(7,))
    rows = Forecaster(only, Target(FOUR)).at(Grid.vary(RUN, micro_batch=[1, 7, 8]))
    assert rows.timed.tolist() == [False, True, False]
    assert "7" in rows.reason(2)
    assert rows.forecast(1).largest_micro_batch == 7
    assert workload().only_batch is None


def test_grid_mixes_engines_and_memory_formats():
    rows = [
        replace(RUN, zero_stage=0, engine=engine, channels_last=nhwc)
        for engine in EXECUTION_FIELDS["engine"].choices
        for nhwc in (False, True)
    ]
    forecaster = Forecaster(workload(), Target(FOUR))
    together = forecaster.at(rows)
    for i, execution in enumerate(rows):
        assert together.forecast(i) == forecaster.forecast(execution)
        assert together.grid.execution(i) == execution


def test_forecasters_share_kernel_tables_but_not_results():
    first = Forecaster(stacked(), on("T4"))
    run = Execution(micro_batch=4, precision="fp32")
    slow = first.forecast(run)
    fast, late = (
        first.on(on("H100").cluster),
        first.on(on("T4", kernels=FittedKernels(host_factor=50.0))),
    )
    assert fast.forecast(run).step.total_ms < slow.step.total_ms < late.forecast(run).step.total_ms
    assert first.forecast(run) == slow
    assert fast.on(first.target).forecast(run) == slow
    copied = first.on(first.target._replace(host_copy_gb_per_s=5.0))
    bytes_s = copied.workload.sample_bytes * 4 / 5e9
    assert copied.forecast(run).step.host_to_device_ms == pytest.approx(
        1e3 * bytes_s + 2e-3 * COPY_START_US
    )


def test_gradient_clipping_time_is_three_passes_over_gradients():
    forecaster = Forecaster(workload(), Target(FOUR))
    bytes_ms = FOUR.device.memory_bandwidth_gb_per_s.value * 1e6 * ACCUMULATE_SHARE

    def clipping_ms(**changes):
        e = Execution(nproc_per_node=4, **changes)
        clipped, free = (
            forecaster.forecast(replace(e, clip_gradients=True)).step,
            forecaster.forecast(e).step,
        )
        assert clipped.total_ms - free.total_ms == pytest.approx(
            clipped.optimizer_ms - free.optimizer_ms
        )
        return clipped.optimizer_ms - free.optimizer_ms

    assert clipping_ms() == pytest.approx(3 * 4 * workload().trainable_parameters / bytes_ms)
    assert clipping_ms(zero_stage=1) == pytest.approx(clipping_ms() / 4)
    assert clipping_ms(precision="bf16") == pytest.approx(clipping_ms() / 2)
    assert clipping_ms(accumulation=8) == pytest.approx(clipping_ms())  # once per update


def test_larger_batch_starts_fewer_host_copies():
    small = replace(workload(), sample_bytes=100.0, batch_tensors=3)
    forecaster = Forecaster(small, on("T4")._replace(host_copy_gb_per_s=12.0))
    few, many = (
        forecaster.forecast(Execution(micro_batch=n)).step.host_to_device_ms for n in (64, 8)
    )
    assert 8 * many - few == pytest.approx(
        7 * 3 * COPY_START_US * 1e-3
    )  # the same bytes in 7 x 3 fewer copies
    accumulated = forecaster.forecast(
        Execution(micro_batch=8, accumulation=8)
    ).step.host_to_device_ms
    assert accumulated == pytest.approx(8 * many)


def test_every_execution_field_is_a_grid_column():
    assert set(EXECUTION_FIELDS) == set(Execution.__struct_fields__)
    for name, field in EXECUTION_FIELDS.items():
        assert field.help, name
        assert field.decode(field.encode(field.default)) == field.default
    varied = Grid.vary(
        RUN, precision=["fp32", "bf16"], activation_checkpointing="full", shard_size=2
    )
    assert varied.execution(1) == replace(RUN, activation_checkpointing="full", shard_size=2)
    assert varied.has("precision", "fp32").tolist() == [True, False]
    assert Grid.vary(RUN, precision=varied.precision).execution(0).precision == "fp32"


def _questions():
    runs = [
        Execution(micro_batch=b, precision=p, compile=c)
        for b in (1, 3, 8, 70)
        for p in ("fp32", "bf16")
        for c in (False, True)
    ]
    curve = [range(low, low + 40, step) for low in (1, 30) for step in (1, 3)]
    clusters = [
        Cluster(device=find_device(name), devices_per_node=n)
        for name in ("T4", "A100", "H100")
        for n in (1, 4)
    ]
    return [
        (c, replace(r, nproc_per_node=c.devices_per_node), b)
        for c in clusters
        for r in runs
        for b in curve
    ]


def _answer(forecaster, question):
    cluster, run, batches = question
    here = forecaster.on(cluster)
    curve = here.at(Grid.vary(run, micro_batch=batches))
    return (
        here.forecast(run),
        curve.step_ms.tobytes(),
        curve.low_ms.tobytes(),
        curve.memory.allocated_gib.tobytes(),
    )


def _eight_threads(seconds):
    questions = _questions()
    expected = [_answer(Forecaster(stacked(), Target(FOUR)), question) for question in questions]
    shared, end = Forecaster(stacked(), Target(FOUR)), time.monotonic() + seconds

    def work(seed):
        order, asked = random.Random(seed), 0
        while time.monotonic() < end:
            i = order.randrange(len(questions))
            assert _answer(shared, questions[i]) == expected[i]
            asked += 1
        return asked

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 8


def test_eight_threads_get_same_forecasts_as_one():
    _eight_threads(2.0)


@pytest.mark.long
def test_eight_threads_get_same_forecasts_as_one_for_30_seconds():
    _eight_threads(30.0)
