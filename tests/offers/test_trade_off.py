"""The cheapest, knee and fastest servers of a ranking."""

import math

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.core.hardware import find_device
from trainpace.core.outcome import Interval
from trainpace.job import Schedule
from trainpace.offers import Job, Offer, picks, rank
from trainpace.offers.match import knee


@pytest.fixture(scope="module")
def one():
    offer = Offer(provider="p", instance_type="a", device="A100", count=1, price_usd_per_hour=2.0)
    job = Job(schedule=Schedule(samples=100_000, epochs=2), global_batch=64)
    (match,) = rank(workload(), [offer], {"A100": find_device("A100")}, job).matches
    return match


def server(one, hours, usd, spread=1.0, on_front=True):
    time = replace(
        one.time, stepping_s=0.0, checkpoint_s=0.0, failures_s=0.0, startup_s=3600 * hours, usd=usd
    )
    interval = replace(one.hours, low=hours / spread, high=hours * spread)
    assert isinstance(interval, Interval)
    return replace(one, time=time, hours=interval, on_front=on_front)


def test_picks_are_cheapest_knee_and_fastest(one):
    slow, middle, quick = server(one, 10.0, 4.0), server(one, 2.0, 8.0), server(one, 1.0, 100.0)
    beaten = server(one, 11.0, 200.0, on_front=False)
    found = picks([slow, beaten, quick, middle])
    assert [(pick.name, pick.match) for pick in found] == [
        ("cheapest", slow),
        ("knee", middle),
        ("fastest", quick),
    ]
    assert [pick.hour_less_usd for pick in found] == [
        None,
        pytest.approx(4 / 8),
        pytest.approx(92 / 1),
    ]
    assert [pick.as_fast for pick in found] == [None] * 3


def test_single_server_is_picked_once(one):
    only = server(one, 3.0, 5.0)
    assert [(pick.name, pick.hour_less_usd) for pick in picks([only])] == [("cheapest", None)]
    assert picks([]) == ()
    assert picks([server(one, math.inf, math.inf)]) == ()


def test_front_with_constant_cost_has_no_knee(one):
    """Each halving of the time doubles the price."""
    straight = [server(one, hours, 8.0 / hours) for hours in (1.0, 2.0, 4.0, 8.0)]
    assert knee(straight) is None
    assert [pick.name for pick in picks(straight)] == ["cheapest", "fastest"]
    assert knee(straight[:2]) is None


def test_cheaper_server_within_forecast_error_of_fastest_is_named(one):
    slow, near, quick = (
        server(one, 10.0, 4.0),
        server(one, 1.1, 50.0, spread=1.3),
        server(one, 1.0, 500.0, spread=1.3),
    )
    assert picks([slow, near, quick])[-1].as_fast is near
    sure = [
        replace(m, hours=replace(m.hours, low=m.mean_hours / 1.01, high=m.mean_hours * 1.01))
        for m in (slow, near, quick)
    ]
    assert picks(sure)[-1].as_fast is None
