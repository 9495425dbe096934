"""What a machine's micro-benchmarks give: a profile that forecasts use. They run in a process of their own."""

import msgspec

from trainpace import records
from trainpace.forecast import MachineModel
from trainpace.hardware import Device, HostLinks
from trainpace.machine.allreduce import AllReduce
from trainpace.machine.detection import Machine, detect
from trainpace.process import run_isolated
from trainpace.records import Record

_CALIBRATION_TIMEOUT_S = 300.0


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


def calibrate(seconds: float, machine: Machine | None = None, threads: int | None = None) -> MachineProfile:
    """Micro-benchmarks of this machine's CPU for about `seconds`; `machine` is what `detect` found, if it was asked before.

    `threads` are torch's, by default as many as it takes by itself.
    """
    request = {"seconds": seconds, "machine": msgspec.to_builtins(machine or detect()), "threads": threads}
    timeout_s = _CALIBRATION_TIMEOUT_S + 2 * seconds
    answer = run_isolated("trainpace.machine.micro_benchmarks", request, timeout_s, "calibrating this machine")
    return records.from_json(answer, MachineProfile, "the profile")
