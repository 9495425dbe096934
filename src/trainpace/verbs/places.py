"""Access to the user's journal and device file, and to this machine's profile."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated

from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import (
    Cluster,
    Device,
    HostCPU,
    catalogue_name,
    find_host,
    parse_catalogue,
)
from trainpace.core.host import user_folder
from trainpace.core.intake import read_text
from trainpace.core.records import load
from trainpace.verbs.request import Field, Progress

if TYPE_CHECKING:
    from trainpace.forecast import Target
    from trainpace.journal import Journal, Knowledge
    from trainpace.measure import Machine, MachineProfile
    from trainpace.workload import Workload

JournalPlace = Annotated[
    str | None,
    Field(
        "The journal: a file, or postgresql://user@host/database. Default: $TRAINPACE_JOURNAL, else"
        " the user's data folder.",
        metavar="PATH|URL",
    ),
]
KeepIdentity = Annotated[bool, Field("Store paths and names in the journal unchanged.")]
HostName = Annotated[
    str | None,
    Field(
        "Host CPU: 'Xeon 8480+', 'EPYC 7742', i9-13900K.  [default: a typical one for the card]",
        metavar="CPU",
    ),
]
HardwareFile = Annotated[str | None, Field("File with your own devices.", metavar="FILE.toml")]


@contextlib.contextmanager
def opened_journal(
    place: str | None, no_journal: bool, create: bool = True
) -> Iterator[Journal | None]:
    """Open the journal of a request. Yields None with `no_journal`."""
    if no_journal:
        yield None
        return
    from trainpace.journal import Journal

    with Journal.open(place, create) as journal:
        yield journal


@contextlib.contextmanager
def consulted_journal(
    place: str | None, no_journal: bool, devices: Collection[str], models: Collection[str]
) -> Iterator[Journal | None]:
    """Open the journal if it may have runs on one of the devices or of one of the models.

    Yields None otherwise.
    """
    from trainpace.journal import may_know

    with opened_journal(
        place, no_journal or not may_know(place, devices, models), create=False
    ) as journal:
        yield journal


def known_of(
    workload: Workload,
    journal: Journal | None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Knowledge | None:
    """Return what the journal knows about a workload, or None without a journal."""
    if journal is None:
        return None
    from trainpace.journal import Knowledge

    return Knowledge(journal, workload, sequence_length, image_size)


def own_devices(path: str | None) -> tuple[Device, ...]:
    """Return the devices in the file at `path`, or else in the user's configuration folder."""
    if path is not None:
        return parse_catalogue(read_text(path), path)
    default = user_folder("config") / "hardware.toml"
    return parse_catalogue(read_text(default), str(default)) if default.is_file() else ()


def named_host(name: str | None) -> HostCPU | None:
    """Return the CPU with this name, or None if `name` is None. Raises UnknownName."""
    return None if name is None else find_host(name)


def device_of(kind: str, machine: Machine) -> str:
    """Return the name of the device to measure on.

    A GPU that is in the catalogue gets its catalogue name, as in forecasts.
    """
    if kind == "cpu":
        return machine.cpu.name or "CPU"
    names = {gpu.name or "NVIDIA GPU" for gpu in machine.gpus}
    if kind == "cuda" and len(names) == 1:
        return catalogue_name(names.pop())
    from trainpace.measure import device_here

    name = device_here(kind).name
    return catalogue_name(name) if name else f"{machine.cpu.name} ({kind})"


def detected(progress: Progress) -> Machine:
    """Describe this machine. Prints a note about anything that disturbs measurements."""
    from trainpace.measure import detect, warnings_of

    machine = detect()
    for warning in warnings_of(machine):
        progress.note(f"note: {warning}")
    return machine


BRIEF_S = 20.0
"""Seconds of micro-benchmarks. Starting, and timing three networks, takes about twice as long."""


def profile_or_brief(progress: Progress) -> MachineProfile:
    """Return the profile from `trainpace calibrate`, or else a brief, unsaved calibration."""
    profile = profile_here(progress)
    if profile is not None:
        return profile
    from trainpace.measure import calibrate

    progress.note(
        "measuring this machine's CPU, about a minute (trainpace calibrate does it thoroughly, and"
        " once)"
    )
    return calibrate(BRIEF_S)


def profile_here(progress: Progress) -> MachineProfile | None:
    """Return the profile from `trainpace calibrate` if it matches this processor and torch.

    Otherwise prints a note and returns None.
    """
    file = user_folder("data") / "machine.json"
    if not file.exists():
        return None
    from importlib.metadata import version

    from trainpace.measure import MachineProfile, cpu_name

    try:
        profile = load(file, MachineProfile)
    except TrainpaceError as error:
        progress.note(f"note: the machine's profile cannot be used: {error}")
        return None
    for what, value in (("cpu", cpu_name()), ("torch", version("torch"))):
        calibrated = profile.environment.get(what)
        if calibrated != value:
            progress.note(
                f"note: the machine's profile is of {what} {calibrated}, not {value}: trainpace"
                " calibrate again."
            )
            return None
    return profile


def target_here(progress: Progress) -> Target | None:
    """Return this machine's CPU as a target of forecasts, or None without a profile."""
    from trainpace.forecast import CalibratedKernels, Target

    profile = profile_here(progress)
    if profile is None:
        return None
    return Target(Cluster(device=profile.device), CalibratedKernels(profile.kernels))
