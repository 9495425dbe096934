"""The noun that a machine's micro-benchmarks make."""

from __future__ import annotations

from trainpace.forecast import KernelModel
from trainpace.hardware import Device
from trainpace.records import Record


class MachineProfile(Record):
    """A device made of measured figures, the kernel model that goes with it, and what machine it is.

    `spread` is (slowest - fastest) / median over the rounds of the least steady benchmark: how far to trust the rest.
    """

    device: Device
    kernels: KernelModel
    environment: dict[str, str]
    spread: float
