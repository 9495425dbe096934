"""Intervals are calibrated on held-out runs and are wider for cards without measured runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouns import forecast, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, catalogue, find_device
from trainpace.core.outcome import StepTime
from trainpace.forecast.uncertainty import PARTS, deviation, fitted_spreads, shares_of
from trainpace.workload import load_workload


def test_interval_contains_forecast():
    spreads = fitted_spreads()
    assert set(spreads.parts) == set(PARTS)
    assert spreads.low < 0 < spreads.high
    assert spreads.n >= 100


def test_larger_share_of_uncertain_part_widens_interval():
    spreads = fitted_spreads()
    one_part = [deviation(spreads, np.eye(len(PARTS))[i], seen=True) for i in range(len(PARTS))]
    mixed = deviation(spreads, np.full(len(PARTS), 1 / len(PARTS)), seen=True)
    assert spreads.model_sd <= mixed < max(one_part)


@given(st.lists(st.floats(0.001, 10), min_size=3, max_size=3), st.floats(0, 0.5))
def test_step_shares_sum_to_one(seconds, outside):
    step = StepTime(forward_ms=10.0, communication_ms=10 * outside)
    shares = shares_of(step, np.array([0, 0, 5]), np.array(seconds))
    assert shares.sum() == pytest.approx(1)
    assert shares[PARTS.index("communication")] == pytest.approx(
        step.communication_ms / step.total_ms
    )


def test_fitted_cards_are_in_catalogue():
    assert set(fitted_spreads().devices) <= {device.name for device in catalogue()}


def test_new_card_has_wider_interval():
    def width(name):
        run = Execution(micro_batch=64, precision="amp_fp16")
        interval = forecast(model, run, Cluster(device=find_device(name))).step_time_interval_ms
        return interval.high / interval.low

    model = load_workload("resnet18", ("amp",))
    assert width("RTX 3090") < width("RTX 3060")


def test_interval_basis_names_held_out_runs():
    f = forecast(workload(), Execution(micro_batch=64), Cluster(device=find_device("V100")))
    assert "held-out runs" in f.step_time_interval_ms.basis
    assert f.step_time_interval_ms.coverage == pytest.approx(0.9)
