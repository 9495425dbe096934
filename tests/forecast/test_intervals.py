"""Intervals come from held-out runs: around 1, wider for a card that no run was measured on."""

import pytest

from nouns import forecast, workload
from trainpace.execution import Execution
from trainpace.forecast.intervals import fitted_spreads
from trainpace.hardware import Cluster, catalogue, find_device


def test_every_class_straddles_the_forecast():
    spreads = fitted_spreads()
    assert {"seen card, any", "new card, any"} <= set(spreads.classes)
    for found in spreads.classes.values():
        assert 0.2 < found.low < 1 < found.high < 5
        assert found.n >= 20


def test_the_fitted_cards_are_in_the_catalogue():
    assert set(fitted_spreads().devices) <= {device.name for device in catalogue()}


def test_a_new_card_is_less_sure():
    def width(name):
        run = Execution(micro_batch=64, precision="amp_fp16")
        interval = forecast(workload(), run, Cluster(device=find_device(name))).step_time_interval_ms
        return interval.high / interval.low

    assert width("RTX 3090") < width("RTX 3060")


def test_the_basis_says_what_it_rests_on():
    f = forecast(workload(), Execution(micro_batch=64), Cluster(device=find_device("V100")))
    assert "held-out runs" in f.step_time_interval_ms.basis
    assert f.step_time_interval_ms.coverage == pytest.approx(0.9)
