"""How far single kernels err by how well their card is known, on kernels that the fit had not seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import numpy as np
from msgspec.structs import replace

from fitting.families import FAMILIES, group_of
from fitting.kernel_rows import KernelRows
from trainpace.forecast.cards import CardConstants
from trainpace.forecast.pooling import Familiarity

ONE_IN = 4
RELATIVES = "H200|A100 PCIe 40GB|A40|Titan RTX|Titan Xp|V100 PCIe"
"""Cards whose generations have other measured cards."""
GENERATIONS = "V100|T4|RTX 2080|Titan RTX|A100"
"""All measured cards of three generations."""
FEWEST = 20

Errors = Callable[[KernelRows, KernelRows], np.ndarray]
"""(kernels to fit, kernels to forecast) -> log(forecast / measured) of these."""


def held_out_spreads(kernels: KernelRows, errors: Errors, seed: int = 1) -> dict[str, dict[Familiarity, float]]:
    """Robust standard deviations by family: other shapes of known cards, cards of known generations, unknown generations.

    Where a family has too few kernels for one of them, it takes the next better known card's figure.
    """
    is_out = {
        "card": np.random.default_rng(seed).random(len(kernels.device)) < 1 / ONE_IN,
        "generation": np.array([bool(re.match(RELATIVES, name)) for name in kernels.device]),
        "none": np.array([bool(re.match(GENERATIONS, name)) for name in kernels.device]),
    }
    spreads: dict[str, dict[str, float]] = {family: {} for family in FAMILIES}
    known = ""
    for name, out in is_out.items():
        found, family = errors(kernels.select(~out), kernels.select(out)), kernels.family[out]
        for own, sds in spreads.items():
            rows = found[family == own]
            if len(rows) >= FEWEST:
                sds[name] = float(f"{1.4826 * np.median(np.abs(rows)):.3f}")
            elif known in sds:
                sds[name] = sds[known]
        known = name
    return cast(dict[str, dict[Familiarity, float]], spreads)


def with_spreads(cards: CardConstants, spreads: dict[str, dict[Familiarity, float]]) -> CardConstants:
    """The constants with the spreads of their families in place of those on their own kernels."""
    family_of_group = {group_of(name): family for family, names in FAMILIES.items() for name in names}
    return CardConstants(
        families={
            group: replace(pooled, log_sd=spreads.get(family_of_group.get(group, "")) or pooled.log_sd)
            for group, pooled in cards.families.items()
        }
    )
