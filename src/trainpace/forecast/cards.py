"""Constants of cards whose kernels were measured, in place of those that all cards share."""

from __future__ import annotations

from functools import cache, lru_cache

from msgspec.structs import replace

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.pooling import Pooled


class CardConstants(Record):
    """By family of kernels ("conv_plain", "batch_norm"): the family's constants, by generation and card.

    A card of a generation whose kernels of a family were measured takes the family's constants from here. Any other card keeps
    the shared ones of `KernelConstants`, which whole steps decide as well.
    """

    families: dict[str, Pooled]

    def of(self, c: KernelConstants, device: Device) -> KernelConstants:
        """The constants of a device."""
        return _of_device(self, c, device) if self.families else c

    def __hash__(self) -> int:
        return id(self)


NO_CARDS = CardConstants(families={})


@lru_cache(maxsize=512)
def _of_device(cards: CardConstants, c: KernelConstants, device: Device) -> KernelConstants:
    own: dict[str, float] = {}
    for family in cards.families.values():
        if family.familiarity(device) != "none":
            own |= family.of(device)
    return replace(c, **own) if own else c


@cache
def measured_cards() -> CardConstants:
    """The cards that the package knows."""
    return from_package("forecast/kernel_models/cards.json", CardConstants)
