"""Pooled parameters per card, per generation, and shared by all cards."""

import math

import pytest

from trainpace.core.hardware import find_device
from trainpace.forecast.constants import Pooled, generation_of

POOLED = Pooled(
    names=("share",),
    shared=(math.log(0.5),),
    generations={"9.0": (math.log(1.2),)},
    devices={"H100 SXM": (math.log(1.1),)},
)


@pytest.mark.parametrize(
    ("card", "share", "familiarity"),
    [
        ("H100 SXM", 0.5 * 1.2 * 1.1, "card"),
        ("H200 SXM", 0.5 * 1.2, "generation"),
        ("A100 SXM 80GB", 0.5, "none"),
    ],
)
def test_pooled_parameters_fall_back_to_generation_and_shared(
    card: str, share: float, familiarity: str
) -> None:
    device = find_device(card)
    assert POOLED.of(device)["share"] == pytest.approx(share)
    assert POOLED.familiarity(device) == familiarity


@pytest.mark.parametrize(
    ("card", "generation"),
    [("A100 SXM 80GB", "8.0"), ("A40", "8.6"), ("B200", "10"), ("MI250X", "gfx90a")],
)
def test_generation_is_found_for_card(card: str, generation: str) -> None:
    assert generation_of(find_device(card)) == generation
