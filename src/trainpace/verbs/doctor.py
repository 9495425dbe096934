"""`doctor`: is this machine in order, and do measurements work on it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.verbs.places import device_of, profile_here
from trainpace.verbs.request import Field, Progress, Request
from trainpace.workload import Variant, Workload, form_of

if TYPE_CHECKING:
    from trainpace.core.execution import Execution
    from trainpace.core.outcome import Measurement
    from trainpace.diagnose import Elsewhere, Examination, Expected


class DoctorRequest(Request):
    device: Annotated[
        str | None,
        Field(
            "The kind to examine, as in measure.  [default: the accelerator that torch sees, or"
            " cpu]",
            metavar="KIND",
        ),
    ] = None


def run(request: DoctorRequest, progress: Progress) -> Examination:
    """Examine the machine. Raises TrainpaceError where this torch has no device of the kind that was asked for."""
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
    """The known step's forecast on a healthy device of the catalogue, or on this CPU where it was calibrated."""
    from trainpace.diagnose import Expected
    from trainpace.forecast import CalibratedKernels, Forecaster, Target
    from trainpace.workload import load_workload

    profile = profile_here(progress) if kind == "cpu" else None
    if profile is not None:
        target = Target(Cluster(device=profile.device), CalibratedKernels(profile.kernels))
    elif device is not None:
        target = Target(Cluster(device=device))
    else:
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
    """The nearest public measurements of training on one such card."""
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
