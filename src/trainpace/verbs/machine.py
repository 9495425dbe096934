"""`calibrate`, `doctor` and `gpus`: measure this machine, check its health, and list hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.hardware import Cluster, Device, catalogue, find_device
from trainpace.core.host import user_folder
from trainpace.core.records import load, save
from trainpace.verbs.places import HardwareFile, detected, device_of, own_devices, target_here
from trainpace.verbs.request import COUNT, DURATION, NEW_FILE, Argument, Field, Progress, Request
from trainpace.workload import Variant, Workload, form_of

if TYPE_CHECKING:
    from trainpace.core.execution import Execution
    from trainpace.core.hardware import HostLinks
    from trainpace.core.outcome import Measurement
    from trainpace.diagnose import Elsewhere, Examination, Expected
    from trainpace.measure import Machine, MachineProfile


class CalibrateRequest(Request):
    """Request to measure this machine and save its profile."""

    seconds: Annotated[float, Field("Time for the micro-benchmarks.", DURATION)] = 60.0
    ranks: Annotated[
        int | None,
        Field("Also time all-reduce between this number of processes on this machine.", COUNT),
    ] = None
    backend: Annotated[
        Literal["gloo", "nccl"], Field("Backend of the processes.", needs="ranks")
    ] = "gloo"
    storage: Annotated[
        str | None, Field("Also write and read 256 MiB in this folder.", metavar="FOLDER")
    ] = None
    output: Annotated[
        str | None,
        Field(
            "File for the profile, in place of the user's data folder.",
            NEW_FILE,
            metavar="FILE.json",
        ),
    ] = None

    @property
    def profile_file(self) -> Path:
        return Path(self.output) if self.output else user_folder("data") / "machine.json"


def machine_of(request: CalibrateRequest, progress: Progress) -> Machine:
    """Describe this machine, with its storage measured if requested."""
    machine = detected(progress)
    if request.storage is not None:
        from trainpace.measure import measure_storage

        machine = replace(machine, storage=measure_storage(request.storage))
    return machine


def calibrate_machine(
    request: CalibrateRequest, progress: Progress, machine: Machine | None = None
) -> MachineProfile:
    """Measure this machine and save its profile.

    `machine` is the result of `machine_of`, if it is already known.
    """
    from trainpace.measure import calibrate

    machine = machine or machine_of(request, progress)
    progress.note(f"measuring for about {request.seconds:.0f} s; do not run anything else now")
    with progress.work("calibrating"):
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
    """Measure the links between hosts under torchrun, and add them to an existing profile.

    Returns None on all ranks except 0; they save nothing.
    """
    from trainpace.measure import MachineProfile, measure_host_links

    file = request.profile_file
    if not file.exists():
        raise TrainpaceError(
            f"Measured host links are stored in the machine's profile, but {file} does not exist.",
            "Run trainpace calibrate first.",
        )
    profile = load(file, MachineProfile)
    links = measure_host_links(network_gb_per_s)
    if links is not None:
        save(replace(profile, host_links=links), file)
    return links


class DoctorRequest(Request):
    device: Annotated[
        str | None,
        Field(
            "Kind of device to examine, as in measure.  [default: torch's accelerator, or cpu]",
            metavar="KIND",
        ),
    ] = None


def examine_machine(request: DoctorRequest, progress: Progress) -> Examination:
    """Check this machine for problems.

    Raises:
        TrainpaceError: This torch has no device of the requested kind.
    """
    from trainpace.diagnose import examine, unusable
    from trainpace.measure import detect, device_here

    machine = detect()
    with progress.work("examining") as work:
        work.to(0, words="devices")
        try:
            kind = device_here(request.device).kind
        except UserCodeError as error:
            return unusable(request.device or "cpu", machine, error)
        name = device_of(kind, machine)
        try:
            device: Device | None = None if kind == "cpu" else find_device(name)
        except TrainpaceError:
            device = None
        return examine(
            kind,
            machine,
            device,
            lambda measured: _expected(measured, kind, device, progress),
            lambda part, done, parts: work.to(done, parts, part),
        )


def _expected(
    measured: Measurement, kind: str, device: Device | None, progress: Progress
) -> Expected | None:
    """Forecast the known step on a healthy catalogue device, or on this calibrated CPU."""
    from trainpace.diagnose import Expected
    from trainpace.forecast import Forecaster, Target
    from trainpace.workload import load_workload

    target = target_here(progress) if kind == "cpu" else None
    if device is not None:
        target = Target(Cluster(device=device))
    if target is None:
        return None
    e = measured.execution
    workload = load_workload(measured.model, (form_of(e.precision),), Variant(cpu=kind == "cpu"))
    forecast = Forecaster(workload, target).forecast(e)
    if forecast.step is None:
        return None
    elsewhere = () if device is None else _elsewhere(workload, e, device)
    return Expected(
        step_ms=forecast.step.total_ms,
        interval_ms=forecast.step_time_interval_ms,
        elsewhere=elsewhere,
    )


def _elsewhere(workload: Workload, execution: Execution, device: Device) -> tuple[Elsewhere, ...]:
    """Return the nearest public measurements of training on one card of this type."""
    from trainpace.diagnose import Elsewhere
    from trainpace.forecast import nearest

    return tuple(
        Elsewhere(
            model=near.run.model,
            batch=near.run.micro_batch,
            source=near.run.source,
            differences=near.unlike,
            samples_per_second=1e3
            * near.run.micro_batch
            * near.run.accumulation
            / near.run.step_time_ms,
        )
        for near in nearest(workload, execution, device).runs
        if near.is_near
        and near.run.mode == "train"
        and near.run.gpus == 1
        and near.run.device == device.name
    )


class GpusRequest(Request):
    name: Annotated[str | None, Argument("One device, by its name.", metavar="[NAME]")] = None
    hardware: HardwareFile = None


def list_gpus(request: GpusRequest, progress: Progress) -> tuple[Device, ...]:
    """Return the device with the requested name, or all devices. The user's own come first."""
    own = own_devices(request.hardware)
    return (*own, *catalogue()) if request.name is None else (find_device(request.name, own),)
