"""This machine, for the verbs that measure on it or forecast it."""

from __future__ import annotations

from importlib.metadata import version

import click

from trainpace.errors import TrainpaceError
from trainpace.hardware import catalogue_name
from trainpace.machine import Machine, MachineProfile, cpu_name
from trainpace.records import load
from trainpace.verbs.places import default_profile_file

BRIEF_S = 20.0


def device_of(kind: str, machine: Machine) -> str:
    """The name of the device that is measured on; a GPU's is the catalogue's where that knows it, as forecasts have it."""
    if kind == "cpu":
        return machine.cpu.name or "CPU"
    if not machine.gpus:
        raise TrainpaceError("this machine shows no NVIDIA GPU.", "Use --device cpu.")
    return catalogue_name(machine.gpus[0].name or "NVIDIA GPU")


def profile_or_brief() -> MachineProfile:
    """The profile that was left here, else a brief calibration, which is not kept."""
    profile = profile_here()
    if profile is not None:
        return profile
    from trainpace.machine import calibrate

    click.echo(
        f"measuring this machine's CPU for {BRIEF_S:.0f} s (trainpace calibrate does it thoroughly, and once)", err=True
    )
    return calibrate(BRIEF_S)


def profile_here() -> MachineProfile | None:
    """The profile that `trainpace calibrate` left, if it is of this processor and this torch; else None, with a word on why."""
    file = default_profile_file()
    if not file.exists():
        return None
    try:
        profile = load(file, MachineProfile)
    except TrainpaceError as error:
        click.echo(f"note: the machine's profile cannot be used: {error}", err=True)
        return None
    here = {"cpu": cpu_name(), "torch": version("torch")}
    for what, value in here.items():
        if profile.environment.get(what) != value:
            was = profile.environment.get(what)
            click.echo(
                f"note: the machine's profile is of {what} {was}, not {value}: trainpace calibrate again.", err=True
            )
            return None
    return profile
