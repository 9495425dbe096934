"""`calibrate`: what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.host import user_folder
from trainpace.core.records import load, save
from trainpace.verbs.places import detected
from trainpace.verbs.request import COUNT, DURATION, NEW_FILE, Field, Progress, Request

if TYPE_CHECKING:
    from trainpace.core.hardware import HostLinks
    from trainpace.measure import Machine, MachineProfile


class CalibrateRequest(Request):
    seconds: Annotated[float, Field("Time for the micro-benchmarks.", DURATION)] = 60.0
    ranks: Annotated[
        int | None, Field("Also time all-reduce between so many processes on this machine.", COUNT)
    ] = None
    backend: Annotated[Literal["gloo", "nccl"], Field("For `ranks`.")] = "gloo"
    storage: Annotated[
        str | None, Field("Also write and read 256 MiB in this folder.", metavar="FOLDER")
    ] = None
    output: Annotated[
        str | None,
        Field(
            "Where to leave the profile, in place of the user's data folder.",
            NEW_FILE,
            metavar="FILE.json",
        ),
    ] = None

    @property
    def profile_file(self) -> Path:
        return Path(self.output) if self.output else user_folder("data") / "machine.json"


def machine_of(request: CalibrateRequest, progress: Progress) -> Machine:
    """What machine this is, its storage measured where that is asked for."""
    machine = detected(progress)
    if request.storage is not None:
        from trainpace.measure import measure_storage

        machine = replace(machine, storage=measure_storage(request.storage))
    return machine


def run(
    request: CalibrateRequest, progress: Progress, machine: Machine | None = None
) -> MachineProfile:
    """Measure this machine and save its profile. `machine`: what `machine_of` gave, where that was asked before."""
    from trainpace.measure import calibrate

    machine = machine or machine_of(request, progress)
    progress.note(f"measuring for about {request.seconds:.0f} s; let nothing else run")
    with progress.work("calibrating", seconds=request.seconds):
        profile = calibrate(request.seconds, machine)
    if request.ranks is not None:
        from trainpace.measure import measure_allreduce

        with progress.work(f"timing all-reduce between {request.ranks} processes") as work:
            work.to(0)
            profile = replace(profile, allreduce=measure_allreduce(request.ranks, request.backend))
    request.profile_file.parent.mkdir(parents=True, exist_ok=True)
    save(profile, request.profile_file)
    return profile


def run_hosts(request: CalibrateRequest, network_gb_per_s: float | None) -> HostLinks | None:
    """The links between hosts, measured under torchrun, into the profile that an earlier calibration left.

    None on ranks other than 0, which save nothing.
    """
    from trainpace.measure import MachineProfile, measure_host_links

    file = request.profile_file
    if not file.exists():
        raise TrainpaceError(
            f"there is no profile at {file} to put the links into.", "First: trainpace calibrate"
        )
    profile = load(file, MachineProfile)
    links = measure_host_links(network_gb_per_s)
    if links is not None:
        save(replace(profile, host_links=links), file)
    return links
