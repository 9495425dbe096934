"""The ways to divide a global batch agree with single forecasts of them."""

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import needed_gib
from trainpace.job import Schedule
from trainpace.plan import Problem, forecast_of, layouts_of

CHOSEN = Execution(micro_batch=4, accumulation=3, nproc_per_node=2, optimizer="sgd_momentum")


def setting(gpu="A100", devices=2, of=None):
    cluster = Cluster(device=find_device(gpu), devices_per_node=devices)
    return Problem(of or workload(), cluster, Schedule(samples=1000, epochs=1.0))


def test_every_way_has_the_same_global_batch_and_its_own_forecast():
    here = setting()
    found = layouts_of(here, CHOSEN)
    assert CHOSEN in [at.execution for at in found]
    assert len({at.execution for at in found}) == len(found) == 4 * 6
    assert {at.execution.global_batch for at in found} == {24}
    assert {at.execution.micro_batch for at in found} == {1, 2, 3, 4, 6, 12}
    for at in found[::5]:
        one = forecast_of(here, at.execution)
        assert at.step_ms == pytest.approx(one.step.total_ms)
        assert at.needed_gib == pytest.approx(float(needed_gib(one.memory)))
        assert at.fits == (one.fits is not False)


def test_one_device_has_nothing_to_shard():
    alone = replace(CHOSEN, nproc_per_node=1)
    assert {at.execution.zero_stage for at in layouts_of(setting(devices=1), alone)} == {0}


def test_what_does_not_fit_says_how_much_it_needs():
    many = replace(CHOSEN, micro_batch=2**20, accumulation=1)
    found = layouts_of(setting("T4"), many)
    assert len({at.execution.micro_batch for at in found}) <= 11
    assert many in [at.execution for at in found]
    largest = next(at for at in found if at.execution == many)
    assert not largest.fits
    assert largest.needed_gib > largest.room_gib
