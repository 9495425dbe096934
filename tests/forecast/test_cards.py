"""Kernel constants of measured cards replace those of their generation."""

import numpy as np
import pytest

from nouns import workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import FittedKernels, Forecaster, Target, fitted_constants
from trainpace.forecast.constants import (
    NO_CARDS,
    CardConstants,
    KernelConstants,
    Pooled,
    measured_cards,
)

HOPPER = Pooled(
    names=("traffic_copy",),
    shared=(np.log(0.5),),
    generations={"9.0": (np.log(1.2),)},
    devices={"H100 SXM": (np.log(1.1),)},
)
CARDS = CardConstants(families={"copy": HOPPER})


@pytest.mark.parametrize(("device", "share"), [("H100 SXM", 0.66), ("H200 SXM", 0.6)])
def test_measured_card_and_its_generation_have_own_constants(device, share):
    assert CARDS.of(fitted_constants(), find_device(device)).traffic_copy == pytest.approx(share)


@pytest.mark.parametrize("device", ["A100 SXM 80GB", "MI100"])
def test_unmeasured_generation_uses_shared_constants(device):
    assert CARDS.of(fitted_constants(), find_device(device)) == fitted_constants()


def test_packaged_families_have_unique_constants_and_known_cards():
    families = measured_cards().families.values()
    names = [name for family in families for name in family.names]
    assert len(names) == len(set(names)) > 20
    assert set(names) <= set(KernelConstants.__struct_fields__)
    for family in families:
        assert all(find_device(name).name == name for name in family.devices)
        assert all(
            abs(log) < 3
            for logs in (*family.generations.values(), *family.devices.values())
            for log in logs
        )


def test_forecast_uses_constants_of_its_card():
    slow = Pooled(
        names=("traffic_optimizer",),
        shared=(np.log(0.01),),
        generations={"9.0": (0.0,)},
        devices={},
    )

    def optimizer_ms(device, cards):
        target = Target(Cluster(device=find_device(device)), FittedKernels(cards=cards))
        return Forecaster(workload(), target).forecast(Execution(micro_batch=4)).step.optimizer_ms

    with_slow = CardConstants(families={"optimizer": slow})
    assert optimizer_ms("H100 SXM", with_slow) > 5 * optimizer_ms("H100 SXM", NO_CARDS)
    assert optimizer_ms("T4", with_slow) == optimizer_ms("T4", NO_CARDS)
