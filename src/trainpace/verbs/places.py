"""What belongs to the user and to this machine: files of their own, devices, and the machine's profile."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated

from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import Device, HostCPU, catalogue_name, find_host, parse_catalogue
from trainpace.core.host import user_folder
from trainpace.core.intake import read_text
from trainpace.core.records import load
from trainpace.verbs.request import Field, Progress

if TYPE_CHECKING:
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
KeepIdentity = Annotated[bool, Field("Keep paths and names in the journal as they are.")]
HostName = Annotated[
    str | None,
    Field(
        "The CPU that launches the kernels: 'Xeon 8480+', 'EPYC 7742', i9-13900K.  [default: one"
        " typical of such cards]",
        metavar="CPU",
    ),
]
HardwareFile = Annotated[
    str | None, Field("Also read devices of your own from this file.", metavar="FILE.toml")
]


@contextlib.contextmanager
def opened_journal(
    place: str | None, no_journal: bool, create: bool = True
) -> Iterator[Journal | None]:
    """The journal of a request, or None where it wants none."""
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
    """The journal, if it may hold runs on one of the devices or of one of the models; else None, and nothing is opened."""
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
    """What a journal knows of a workload; None without one."""
    if journal is None:
        return None
    from trainpace.journal import Knowledge

    return Knowledge(journal, workload, sequence_length, image_size)


def own_devices(path: str | None) -> tuple[Device, ...]:
    """Devices of the file at `path`, or of the one in the user's configuration folder where there is one."""
    if path is not None:
        return parse_catalogue(read_text(path), path)
    default = user_folder("config") / "hardware.toml"
    return parse_catalogue(read_text(default), str(default)) if default.is_file() else ()


def named_host(name: str | None) -> HostCPU | None:
    """The CPU of that name, None for None. Raises UnknownName."""
    return None if name is None else find_host(name)


def device_of(kind: str, machine: Machine) -> str:
    """The name of the device that is measured on; a GPU has the catalogue's name where that lists it, as in forecasts."""
    if kind == "cpu":
        return machine.cpu.name or "CPU"
    names = {gpu.name or "NVIDIA GPU" for gpu in machine.gpus}
    if kind == "cuda" and len(names) == 1:
        return catalogue_name(names.pop())
    from trainpace.measure import device_here

    name = device_here(kind).name
    return catalogue_name(name) if name else f"{machine.cpu.name} ({kind})"


def detected(progress: Progress) -> Machine:
    """This machine, after a note on whatever disturbs measurements on it."""
    from trainpace.measure import detect, warnings_of

    machine = detect()
    for warning in warnings_of(machine):
        progress.note(f"note: {warning}")
    return machine


def profile_or_brief(progress: Progress) -> MachineProfile:
    """The profile that `trainpace calibrate` left, else a brief calibration, which is not saved."""
    profile = profile_here(progress)
    if profile is not None:
        return profile
    from trainpace.measure import calibrate

    progress.note(
        "measuring this machine's CPU for 20 s (trainpace calibrate does it thoroughly, and once)"
    )
    return calibrate(20.0)


def profile_here(progress: Progress) -> MachineProfile | None:
    """The profile that `trainpace calibrate` left, if it is of this processor and this torch; else None, with a note on why."""
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
