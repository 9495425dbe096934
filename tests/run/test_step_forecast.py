"""Forecasts of rungs from earlier measurements."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ladder_world import forecast_of_ms
from trainpace.core.execution import Execution
from trainpace.core.outcome import StepTime
from trainpace.measure import LoaderCost
from trainpace.run.ladder import Setup
from trainpace.run.step_forecasts import (
    MeasuredCompute,
    RankShare,
    compute_of,
    forecast_step,
    nearest,
)
from trainpace.run.trial import LoaderSettings

COST = LoaderCost(sample_wall_ms=10, sample_cpu_ms=10, collate_ms=0, batch_size=4)
TWO = RankShare(cores=2, threads=2)


def setup(micro=4, accumulation=4, workers=0, **execution) -> Setup:
    e = Execution(micro_batch=micro, accumulation=accumulation, **execution)
    return Setup(task="t", execution=e, loader=LoaderSettings(workers=workers))


def test_data_and_compute_add_up_without_workers():
    f = forecast_step(setup(), forecast_of_ms(20), None, COST, TWO)
    assert f.step_ms == pytest.approx(16 * 10 + 20)
    assert f.interval_ms.low < f.step_ms < f.interval_ms.high
    assert f.data_ms == pytest.approx(160)


def test_workers_share_cores_with_compute():
    """80 of the 160 ms of samples load during 20 ms of compute, whose two threads wait for the workers; both load the rest."""
    f = forecast_step(setup(workers=2), forecast_of_ms(20), None, COST, TWO)
    assert f.step_ms == pytest.approx(20 + 80 + 80 / 2)
    assert f.interval_ms.low < 110
    assert f.interval_ms.high > 150


def test_compute_forecast_is_scaled_by_measurement():
    known = MeasuredCompute(setup(), 30.0)
    f = forecast_step(setup(16, 1), forecast_of_ms(10), (known, forecast_of_ms(20)), None, TWO)
    assert f.step_ms == pytest.approx(15)
    wide, same = (
        f.interval_ms,
        forecast_step(
            setup(), forecast_of_ms(20), (known, forecast_of_ms(20)), None, TWO
        ).interval_ms,
    )
    assert math.log(wide.high / wide.low) > 2 * math.log(same.high / same.low)


def test_changed_precision_widens_interval():
    known = (MeasuredCompute(setup(), 30.0), forecast_of_ms(20))
    forecast = forecast_of_ms(20, low=10, high=40, precision="amp_bf16")
    other = forecast_step(setup(precision="amp_bf16"), forecast, known, None, TWO)
    assert "precision" in other.basis
    assert other.interval_ms.high > 1.9 * other.step_ms


def test_missing_forecast_has_a_reason():
    f = forecast_step(setup(), forecast_of_ms(None), None, COST, TWO)
    assert f.step_ms is None
    assert "no such rate" in f.reason
    assert f.holds(3) is None


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(0, 4))
def test_forecast_interval_contains_forecast(compute, sample, workers):
    cost = LoaderCost(
        sample_wall_ms=sample, sample_cpu_ms=sample, collate_ms=0.1, batch_size=4, send_ms=0.1
    )
    f = forecast_step(setup(workers=workers), forecast_of_ms(compute), None, cost, TWO)
    assert f.interval_ms.low <= f.step_ms <= f.interval_ms.high
    assert f.holds(f.step_ms)


def test_compute_is_learned_only_without_worker_contention():
    assert compute_of(setup(), 100, 20, 80) == (setup(), 20, pytest.approx(0.8))
    assert compute_of(setup(workers=2), 100, 95, 60) is None
    assert compute_of(setup(workers=2), 100, 95, 2).compute_ms == 95
    assert compute_of(setup(), 100, 0, 80) is None


def test_long_data_waits_widen_compute_interval():
    def width(waiting):
        known = (MeasuredCompute(setup(), 30.0, waiting), forecast_of_ms(20))
        interval = forecast_step(setup(), forecast_of_ms(20), known, None, TWO).interval_ms
        return interval.high / interval.low

    assert width(0.9) > 1.5 > 1.15 > width(0.0)


def test_nearest_measured_setup_is_selected():
    known = [
        MeasuredCompute(setup(4, 4), 1),
        MeasuredCompute(setup(16, 1), 2),
        MeasuredCompute(setup(8, 2, precision="amp_bf16"), 3),
    ]
    assert nearest(known, setup(8, 2)).compute_ms in (1, 2)
    assert nearest(known, setup(16, 1)).compute_ms == 2
    assert nearest(known, setup(4, 4, precision="amp_bf16")).compute_ms == 3
    assert nearest([], setup()) is None


def test_evaluation_share_comes_from_nearest_measured_setup():
    unknown, known = (
        replace(forecast_of_ms(20), step=None, reason="fp32 only"),
        MeasuredCompute(setup(), 30.0),
    )
    near = replace(forecast_of_ms(20), step=StepTime(forward_ms=5, backward_ms=15))
    share = forecast_step(setup(), near, (known, near), None, TWO).evaluating_share
    f = forecast_step(setup(precision="amp_bf16"), unknown, (known, near), None, TWO)
    assert f.step_ms is None
    assert f.evaluating_share == share < 1
    assert forecast_step(setup(), unknown, None, None, TWO).evaluating_share == 1
