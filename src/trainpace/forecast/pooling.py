"""What is known of a card: what all cards share, what its generation adds, and what it adds itself.

A parameter of a kernel model is, in logarithms, ``shared + generation + card``. The three are estimated together, the last two
drawn towards 0 by their spread over generations and over cards (partial pooling; Gelman and Hill 2007, chapter 12). A card
whose kernels were measured uses its own figures; a card of a known generation that generation's; any other card what all share.
"""

import math
from typing import Literal

from trainpace.core.hardware import Device
from trainpace.core.records import Record

Familiarity = Literal["card", "generation", "none"]
"""How well a card is known: its own kernels were measured, those of a card of its generation, or neither."""


def generation_of(device: Device) -> str:
    """The cards whose multiprocessors are alike: of one compute capability up to 9.x, of one major version from 10 on; other
    vendors' by the name of their instruction set or architecture."""
    major, _, minor = device.compute_capability.partition(".")
    if not major.isdigit():
        return device.compute_capability or device.architecture
    return major if int(major) >= 10 else f"{major}.{minor}"


class Pooled(Record):
    """Parameters by `names`: logarithms, a list for each generation and each card that was measured."""

    names: tuple[str, ...]
    shared: tuple[float, ...]
    generations: dict[str, tuple[float, ...]]
    devices: dict[str, tuple[float, ...]]

    def of(self, device: Device) -> dict[str, float]:
        """The parameters of a device, as factors."""
        none = (0.0,) * len(self.names)
        own = self.devices.get(device.name, none)
        generation = self.generations.get(generation_of(device), none)
        logs = map(sum, zip(self.shared, generation, own, strict=True))
        return {name: math.exp(log) for name, log in zip(self.names, logs, strict=True)}

    def familiarity(self, device: Device) -> Familiarity:
        """How well the device is known."""
        if device.name in self.devices:
            return "card"
        return "generation" if generation_of(device) in self.generations else "none"
