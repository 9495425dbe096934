"""Invariants of a forecast: parts sum to the total, more work never takes less time, impossible requests give a reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, operators, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.hardware import Cluster, catalogue, find_device
from trainpace.core.outcome import STEP_PARTS, Forecast, Interval, StepTime
from trainpace.forecast import fitted_constants
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.rates import Peak, matrix_peak, sustained_rates
from trainpace.job import Schedule

devices = st.sampled_from([d.name for d in catalogue()])
in_fp32 = st.sampled_from([d.name for d in catalogue() if d.architecture != "Gaudi"])
WORKLOAD = workload()


def one(
    device="A100", batch=8, precision="fp32", schedule=None, price=None, per_node=1, **execution
):
    cluster = Cluster(
        device=find_device(device), devices_per_node=per_node, price_usd_per_device_hour=price
    )
    run = Execution(micro_batch=batch, precision=precision, nproc_per_node=per_node, **execution)
    return forecast(WORKLOAD, run, cluster, schedule)


@given(devices, st.integers(1, 512), st.sampled_from(PRECISIONS))
def test_every_device_gives_a_step_or_a_reason(device, batch, precision):
    f = one(device, batch, precision)
    if f.step is None:
        assert f.reason
        return
    assert sum(getattr(f.step, part) for part in STEP_PARTS) == pytest.approx(f.step.total_ms)
    assert f.step_time_interval_ms.low < f.step.total_ms < f.step_time_interval_ms.high
    assert 0 < f.mfu <= 1.25  # GeForce cards run above their datasheet clock


@given(in_fp32, st.integers(1, 256), st.integers(1, 256))
def test_a_larger_batch_never_takes_less_time_or_memory(device, a, b):
    small, large = (one(device, n) for n in sorted((a, b)))
    assert small.step.total_ms <= large.step.total_ms * (1 + 1e-9)
    assert small.memory.allocated_gib <= large.memory.allocated_gib


@given(st.integers(1, 64), st.integers(1, 8))
def test_accumulation_multiplies_forward_but_not_optimizer_time(batch, accumulation):
    whole, split = one(batch=batch), one(batch=batch, accumulation=accumulation)
    assert split.step.forward_ms == pytest.approx(accumulation * whole.step.forward_ms)
    assert split.step.optimizer_ms == whole.step.optimizer_ms
    assert split.step.total_ms >= whole.step.total_ms
    assert split.memory.gradients_gib >= whole.memory.gradients_gib


def test_operator_times_are_at_least_the_roofline():
    table = operators()
    device = find_device("A100")
    constants = fitted_constants()
    rates = sustained_rates(device, "fp32", True, False, constants)
    times = KernelTable(table).times(np.array(4.0), rates, constants)
    assert (times.device_s >= np.maximum(times.compute_s, times.memory_s)).all()
    flops = (table.flops[:2, 0] + 4 * table.flops[:2, 1]) * table.count[:2]
    assert (times.device_s[:2] >= flops / (device.fp32_tflops.value * 1e12)).all()


def test_better_datasheet_never_increases_step_time():
    """The faster device is the same device with one figure doubled."""
    base = find_device("A100")
    for name in ("fp32_tflops", "memory_bandwidth_gb_per_s"):
        better = replace(
            base, **{name: replace(getattr(base, name), value=2 * getattr(base, name).value)}
        )
        times = [
            forecast(WORKLOAD, Execution(micro_batch=64), Cluster(device=d)).step.total_ms
            for d in (base, better)
        ]
        assert times[1] <= times[0]


def test_matrix_peak_follows_precision():
    a100, v100, p100 = find_device("A100"), find_device("V100"), find_device("P100")
    assert matrix_peak(a100, "fp32", False) == Peak(19.5e12, False)
    assert matrix_peak(a100, "tf32", False) == Peak(156e12, True)
    assert matrix_peak(a100, "amp_bf16", True) == Peak(312e12, True)
    assert matrix_peak(v100, "amp_fp16", True) == Peak(125e12, True)
    assert matrix_peak(v100, "tf32", False) == Peak(15.7e12, False)  # torch ignores the flag there
    assert matrix_peak(p100, "amp_fp16", True) == Peak(10.6e12, False)  # fp32 accumulation
    for card in (v100, p100, find_device("T4"), find_device("GTX 1660 Super")):
        emulated, full = matrix_peak(card, "bf16", True), matrix_peak(card, "fp32", False)
        assert emulated == Peak(0.54 * full.flop_per_s, False)


def test_unsupported_precision_gives_reason_instead_of_step():
    for device, precision, word in (("T4", "fp8", "FP8"), ("A100", "fp8", "FP8")):
        f = one(device, precision=precision)
        assert f.step is None
        assert word in f.reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tp": 2, "per_node": 2}, "no repeated blocks"),
        ({"pp": 2, "per_node": 2}, "no repeated blocks"),
        ({"activation_checkpointing": "full"}, "no repeated"),
    ],
)
def test_model_parallelism_needs_repeated_blocks(changes, word):
    f = one(**changes)
    assert f.step is None
    assert word in f.reason


def test_more_gpus_add_communication_time():
    alone, eight = one(batch=1), one(batch=1, per_node=8)
    assert alone.step.communication_ms == 0 < eight.step.communication_ms
    assert eight.execution.global_batch == 8
    assert eight.samples_per_second < 8 * alone.samples_per_second
    without_link = one("L4", per_node=4).step.communication_ms
    assert without_link > eight.step.communication_ms  # PCIe is slower than NVLink


def test_several_nodes_require_network_bandwidth():
    cluster = Cluster(device=find_device("A100"), devices_per_node=8, nodes=2)
    two_nodes = Execution(nnodes=2, nproc_per_node=8)
    assert "more than one node" in forecast(WORKLOAD, two_nodes, cluster).reason
    times = [
        forecast(
            WORKLOAD, two_nodes, replace(cluster, network_gb_per_s_per_device=rate)
        ).step.communication_ms
        for rate in (1.0, 25.0)
    ]
    assert times[0] > times[1] > 0


def test_out_of_memory_is_reported_with_step_time():
    small, large = one("T4", batch=8), one("T4", batch=4096)
    assert small.fits
    assert large.fits is False
    assert large.step is not None
    assert any("does not fit" in w for w in large.warnings)


def test_training_time_and_cost_follow_from_schedule():
    schedule = Schedule(samples=8000, epochs=2.0)
    f = one(schedule=schedule, price=3.6)
    assert f.training_time.stepping_s == pytest.approx(2000 * f.step.total_ms / 1e3)
    assert f.training_time.startup_s == 60.0
    assert f.training_time.assumed
    assert f.cost_usd == pytest.approx(f.training_time.total_s * 3.6 / 3600)
    assert (
        f.training_time_interval_s.low < f.training_time.total_s < f.training_time_interval_s.high
    )


def test_launch_bound_steps_have_a_warning():
    f = forecast(workload(m=1, n=64, k=64), Execution(), Cluster(device=find_device("H100")))
    assert f.step.host_overhead_ms > 0
    assert any("launch-bound" in w for w in f.warnings)


def test_untraced_precision_raises_error_with_hint():
    partial = replace(WORKLOAD, forms={"fp32": WORKLOAD.forms["fp32"]})
    with pytest.raises(TrainpaceError, match="`save_workload`"):
        forecast(partial, Execution(precision="bf16"), Cluster(device=find_device("A100")))


def test_impossible_values_are_rejected():
    with pytest.raises(TrainpaceError):
        StepTime(forward_ms=-1.0)
    with pytest.raises(TrainpaceError):
        StepTime(forward_ms=float("nan"))
    with pytest.raises(TrainpaceError):
        Interval(low=2.0, high=1.0, coverage=0.9, basis="")
    good = one()
    with pytest.raises(AssertionError, match="MFU"):
        replace_checked(good, mfu=4.2)


def replace_checked(record, **changes):
    fields = {f: getattr(record, f) for f in record.__struct_fields__}
    return Forecast(**{**fields, **changes})
