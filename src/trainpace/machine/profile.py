"""What a machine's micro-benchmarks give: a profile that forecasts use."""

from trainpace.forecast import MachineModel
from trainpace.hardware import Device, HostLinks
from trainpace.machine.allreduce import AllReduce
from trainpace.machine.detection import Machine
from trainpace.records import Record


class MachineProfile(Record):
    """A device made of measured figures, the kernel model that goes with it, and what machine it is.

    `spread` is (slowest - fastest) / fastest over the passes of a block of layers, at the median block; `drift` the same for
    blocks that ran at the start, in the middle and at the end: how steady the machine was. `host_links` join it to other
    hosts (`trainpace calibrate --hosts`).
    """

    device: Device
    kernels: MachineModel
    environment: dict[str, str]
    machine: Machine
    spread: float
    drift: float
    allreduce: AllReduce | None = None
    host_links: HostLinks | None = None
