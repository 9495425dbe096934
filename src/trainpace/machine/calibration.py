"""This machine's profile: micro-benchmarks of its CPU, run in a process of their own."""

import msgspec

from trainpace import records
from trainpace.machine.detection import Machine, detect
from trainpace.machine.profile import MachineProfile
from trainpace.process import run_isolated

CALIBRATION_TIMEOUT_S = 300.0


def calibrate(seconds: float, machine: Machine | None = None, threads: int | None = None) -> MachineProfile:
    """Micro-benchmarks of this machine's CPU for about `seconds`; `machine` is what `detect` found, if it was asked before.

    `threads` are torch's, by default as many as it takes by itself.
    """
    request = {
        "seconds": seconds, "machine": msgspec.to_builtins(machine or detect()), "threads": threads,
    }  # fmt: skip
    timeout_s = CALIBRATION_TIMEOUT_S + 2 * seconds
    answer = run_isolated("trainpace.machine.worker", request, timeout_s, "calibrating this machine")
    return records.from_json(answer, MachineProfile, "the profile")
