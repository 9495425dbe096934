"""This machine, for the verbs that measure on it or forecast it."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from trainpace.errors import TrainpaceError
from trainpace.hardware import catalogue_name
from trainpace.records import load
from trainpace.verbs.places import default_profile_file
from trainpace.verbs.progress import Progress

if TYPE_CHECKING:
    from trainpace.machine import Machine, MachineProfile

BRIEF_S = 20.0


def device_of(kind: str, machine: Machine) -> str:
    """The name of the device that is measured on; a GPU has the catalogue's name where that lists it, as in forecasts."""
    if kind == "cpu":
        return machine.cpu.name or "CPU"
    if not machine.gpus:
        raise TrainpaceError("this machine shows no NVIDIA GPU.", "Use `device` cpu.")
    return catalogue_name(machine.gpus[0].name or "NVIDIA GPU")


def detected(progress: Progress) -> Machine:
    """This machine, after a note on whatever disturbs measurements on it."""
    from trainpace.machine import detect, warnings_of

    machine = detect()
    for warning in warnings_of(machine):
        progress.note(f"note: {warning}")
    return machine


def profile_or_brief(progress: Progress) -> MachineProfile:
    """The profile that `trainpace calibrate` left, else a brief calibration, which is not saved."""
    profile = profile_here(progress)
    if profile is not None:
        return profile
    from trainpace.machine import calibrate

    progress.note(
        f"measuring this machine's CPU for {BRIEF_S:.0f} s (trainpace calibrate does it thoroughly, and once)"
    )
    return calibrate(BRIEF_S)


def profile_here(progress: Progress) -> MachineProfile | None:
    """The profile that `trainpace calibrate` left, if it is of this processor and this torch; else None, with a note on why."""
    file = default_profile_file()
    if not file.exists():
        return None
    from trainpace.machine import MachineProfile, cpu_name

    try:
        profile = load(file, MachineProfile)
    except TrainpaceError as error:
        progress.note(f"note: the machine's profile cannot be used: {error}")
        return None
    for what, value in (("cpu", cpu_name()), ("torch", version("torch"))):
        calibrated = profile.environment.get(what)
        if calibrated != value:
            progress.note(
                f"note: the machine's profile is of {what} {calibrated}, not {value}: trainpace calibrate again."
            )
            return None
    return profile
