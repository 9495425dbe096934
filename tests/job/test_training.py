"""The time of a whole job: its parts and their invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import forecast, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import JOB_PARTS, StepTime
from trainpace.job import DataPath, JobConditions, Training, power_w, with_data_ms, with_host_work
from trainpace.job.training import CORE_SPREAD, slowest_of

STEP = StepTime(forward_ms=30.0, backward_ms=60.0, optimizer_ms=5.0, communication_ms=5.0)


USUAL = JobConditions()


def training(conditions=USUAL, nodes=4, steps=10_000):
    return Training(
        steps=steps,
        epochs=10.0,
        samples_per_step=256,
        nodes=nodes,
        devices=8 * nodes,
        compiles=False,
        conditions=conditions,
        state_bytes=1e10,
    )


def job(conditions=USUAL, nodes=4):
    return training(conditions, nodes).time(STEP.total_ms / 1e3, STEP.evaluating_ms / 1e3)


def test_job_without_extras_is_steps_and_final_checkpoint():
    quiet = JobConditions(startup_s=0.0, device_mtbf_h=None)
    assert job(quiet).stepping_s == pytest.approx(1000.0)
    assert job(quiet).total_s == pytest.approx(
        1000.0 + 10.0
    )  # the final model is written once: 10 GB at 1 GB/s
    assert job(quiet).goodput == pytest.approx(1000 / 1010)


def test_slow_loading_is_counted_as_data_wait():
    assert (
        job(JobConditions(sample_bytes=1e5)).data_wait_s == 0.0
    )  # 25.6 MB per step at 1 GB/s take 26 ms of the 100 ms step
    assert job(JobConditions(sample_bytes=1e6)).data_wait_s == pytest.approx(10_000 * (0.256 - 0.1))


@pytest.mark.parametrize(
    ("data", "expected_ms"),
    [
        (DataPath(own_ms=3.0), 13.0),
        (DataPath(workers=2, ms_per_sample=2.0, own_ms=3.0), 13.0),
        (DataPath(workers=2, ms_per_sample=5.0, own_ms=3.0), 20.0),
        (DataPath(workers=0, ms_per_sample=2.0, beside=False, own_ms=3.0), 21.0),
    ],
    ids=["own code", "hidden loading", "slow loading", "loading in the training process"],
)
def test_host_work_adds_to_the_step(data, expected_ms):
    assert with_data_ms(10.0, 4, data) == expected_ms


def test_forecast_with_host_work_has_the_core_spread_in_its_interval():
    bare = forecast(workload(), Execution(micro_batch=8), Cluster(device=find_device("T4")))
    work = DataPath(workers=0, ms_per_sample=5.0, beside=False, own_ms=1000.0)
    done = with_host_work(bare, work)
    loading_ms = 5.0 * bare.execution.micro_batch * bare.execution.accumulation
    assert done.step.own_code_ms == 1000.0
    assert done.step.data_wait_ms == pytest.approx(loading_ms)
    assert done.step.total_ms == pytest.approx(bare.step.total_ms + loading_ms + 1000.0)
    ends, before = done.step_time_interval_ms, bare.step_time_interval_ms
    assert ends.low == pytest.approx(before.low + (loading_ms + 1000.0) / CORE_SPREAD)
    assert ends.high == pytest.approx(before.high + (loading_ms + 1000.0) * CORE_SPREAD)
    assert with_host_work(bare, DataPath(workers=2)) is bare


def test_evaluation_time_is_forward_part_of_step():
    time = job(JobConditions(evaluation_samples=2560))
    assert time.evaluation_s == pytest.approx(10 * 10 * 0.030)
    launching = StepTime(
        forward_ms=30.0, backward_ms=60.0, optimizer_ms=10.0, host_overhead_ms=50.0
    )
    assert launching.evaluating_ms == pytest.approx(45.0)


def test_data_download_counts_as_transfer_time():
    assert job(JobConditions(data_gb=150.0, download_gb_per_s=0.25)).transfer_s == 600.0


def test_spot_failure_time_grows_with_nodes():
    conditions = JobConditions(preemption_mean_h=1.0)
    spot = replace(conditions, spot=True)
    assert (
        job(conditions).failures_s < job(spot, nodes=1).failures_s < job(spot, nodes=8).failures_s
    )


def test_slowest_of_nodes_matches_normal_order_statistics():
    """Tables give the expected maximum of n standard normal variables (Harter 1961)."""
    for nodes, expected in ((2, 0.5642), (4, 1.0294), (8, 1.4236), (100, 2.5076)):
        assert slowest_of(nodes, 1.0) == pytest.approx(expected, rel=0.02 if nodes > 2 else 0.05)
    assert slowest_of(1, 1.0) == slowest_of(64, 0.0) == 0.0


@given(
    st.integers(1, 64),
    st.floats(0, 1e7),
    st.floats(0.01, 100),
    st.floats(100, 1e7),
    st.floats(0, 0.2),
    st.booleans(),
)
def test_job_parts_are_nonnegative_and_sum_to_total(
    nodes, sample_bytes, storage, mtbf_h, variation, spot
):
    time = job(
        JobConditions(
            sample_bytes=sample_bytes,
            storage_gb_per_s=storage,
            device_mtbf_h=mtbf_h,
            step_variation=variation,
            spot=spot,
        ),
        nodes,
    )
    parts = [getattr(time, name) for name in JOB_PARTS]
    assert min(parts) >= 0
    assert time.total_s == pytest.approx(sum(parts))
    assert 0 <= time.goodput <= 1


def test_chosen_checkpoint_interval_minimizes_total_time():
    own = job(JobConditions(device_mtbf_h=1000.0))
    for every_s in (own.checkpoint_interval_s / 3, own.checkpoint_interval_s * 3):
        assert (
            own.total_s
            <= job(JobConditions(device_mtbf_h=1000.0, checkpoint_every_s=every_s)).total_s
        )


def test_power_lies_between_idle_and_tdp():
    a100 = find_device("A100")
    assert power_w(a100, 8, StepTime(forward_ms=1.0)) == pytest.approx(8 * 400)
    assert 0 < power_w(a100, 8, StepTime(idle_ms=1.0)) < 0.2 * 8 * 400


@pytest.mark.parametrize(
    "field", ["storage_gb_per_s", "device_mtbf_h", "download_gb_per_s", "sample_bytes"]
)
def test_negative_conditions_are_rejected_by_name(field):
    with pytest.raises(TrainpaceError, match=field):
        JobConditions(**{field: -1.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"startup_s": -1.0},
        {"repeats": 0},
        {"evaluation_s": 5.0},
        {"checkpoint_s": float("inf")},
        {"mean_time_between_failures_s": 0.0},
        {"checkpoint_every_steps": 5, "checkpoint_every_s": 60.0},
        {"checkpoints": False, "checkpoint_s": 5.0},
        {"evaluate_every_steps": 5, "evaluation_samples": 100},
    ],
)
def test_contradictory_conditions_are_rejected(wrong):
    with pytest.raises(TrainpaceError):
        JobConditions(**wrong)
