"""`forecast`: step time, memory and cost of a model on GPUs that are not there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from msgspec.structs import replace

from trainpace.errors import UnreadableInput
from trainpace.forecast import MachineModel
from trainpace.forecast import forecast as forecast_one
from trainpace.forecast.jumps import jumps_of
from trainpace.forecast.transfer import transfer_ratio, transferred
from trainpace.hardware import Cluster, find_device
from trainpace.job import JobConditions, with_job
from trainpace.journal import foresee
from trainpace.outcome import Forecast, Jump, Measurement, forecast_row
from trainpace.records import Record, Table, from_json, load, read_bytes
from trainpace.schedule import Schedule
from trainpace.verbs.executed import ExecutedRequest, check_executed, check_fleet, execution_of
from trainpace.verbs.fields import JournalPlace
from trainpace.verbs.own_hardware import HardwareFile, own_devices
from trainpace.verbs.progress import Progress
from trainpace.verbs.request import Field, Misuse
from trainpace.verbs.traced import workload_of
from trainpace.verbs.units import AT_LEAST_1, EPOCHS, EXISTING_FILE, USD
from trainpace.workload import Form, Mode, Variant, Workload, form_of


class ForecastRequest(ExecutedRequest):
    """A model on some GPUs, at one batch size or several."""

    gpu: Annotated[
        tuple[str, ...],
        Field("A GPU by name, several times if you like; 'cpu' is this machine's, by its profile (trainpace calibrate)."),
    ] = ()  # fmt: skip
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None
    transfer_from: Annotated[
        str | None,
        Field("Sharpen by a measurement of the same model on another GPU (trainpace measure --output).", EXISTING_FILE,
              metavar="MEASUREMENT.json"),
    ] = None  # fmt: skip
    calibrated: Annotated[
        str | None,
        Field("Also forecast the machine of this profile (trainpace calibrate --output).", EXISTING_FILE,
              metavar="PROFILE.json"),
    ] = None  # fmt: skip
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Leave measurements in the journal out of account.")] = False
    samples: Annotated[
        int | None, Field("Samples in an epoch: with `epochs`, the whole training is forecast too.", AT_LEAST_1)
    ] = None
    epochs: Annotated[float | None, Field("Passes over the data.", EPOCHS)] = None
    price: Annotated[float | None, Field("Dollars per GPU and hour, for the cost of `samples` and `epochs`.", USD)] = (
        None
    )
    hardware: HardwareFile = None

    @property
    def forms(self) -> tuple[Form, ...]:
        return (form_of(self.precision),)

    @property
    def variant(self) -> Variant:
        return super().variant._replace(cpu=all(gpu.casefold() == "cpu" for gpu in self.gpu))


class Sweep(NamedTuple):
    """The forecasts on one cluster, in order of batch size. `machine`: its own calibration, where it has one."""

    workload: Workload
    cluster: Cluster
    machine: MachineModel | None
    rows: list[Forecast]


class Forecasts(Record, Table):
    """A forecast for each GPU and batch size, in the order asked for. Iterates over `rows`.

    `jumps`: by device, where one more sample costs far more than usual. `notes`: what runs in the journal did to the forecasts.
    `sweeps`: the rows of each cluster.
    """

    rows: tuple[Forecast, ...]
    jumps: dict[str, tuple[Jump, ...]]
    notes: tuple[str, ...] = ()
    sweeps: tuple[Sweep, ...] = ()

    def __iter__(self) -> Iterator[Forecast]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Forecast:
        return self.rows[i]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row a forecast: the columns of `trainpace forecast --json`."""
        return [forecast_row(row) for row in self.rows]


def run(request: ForecastRequest, progress: Progress) -> Forecasts:
    r = request
    if (r.samples is None) != (r.epochs is None):
        raise Misuse("`samples` and `epochs` go together.")
    if r.price is not None and r.samples is None:
        raise Misuse("`price` does nothing without `samples` and `epochs`, which say how long to pay.")
    if not r.gpu and not r.calibrated:
        raise Misuse("Name a GPU with `gpu`, or a machine's profile with `calibrated`.")
    check_executed(r)
    schedule = None if r.samples is None else Schedule(samples=r.samples, epochs=r.epochs)
    targets = _targets(r, progress)
    measured = None if r.transfer_from is None else _nearest_measurement(r.transfer_from, r.batch[0])
    workloads = _workloads(r, {machine is not None for _, machine in targets}, progress)
    sweeps: list[Sweep] = []
    jumps: dict[str, tuple[Jump, ...]] = {}
    notes: list[str] = []
    with _journal_if_there(r) as journal:
        for cluster, machine in targets:
            workload = workloads[machine is not None]
            first = execution_of(r, workload)
            executions = [replace(first, micro_batch=batch) for batch in r.batch]
            if measured is not None:
                there = Cluster(device=find_device(measured.device, own_devices(r.hardware)))
                ratio = transfer_ratio(workload, measured, there)
                rows = [
                    transferred(forecast_one(workload, e, cluster, None, machine), ratio, measured.device)
                    for e in executions
                ]
                rows = [
                    with_job(row, workload, schedule, JobConditions(price_usd_per_device_hour=r.price)) for row in rows
                ]
            else:
                foresight = foresee(workload, first, cluster, machine, journal, r.sequence_length, r.image_size)
                rows = [foresight.at(e, schedule) for e in executions]
                notes += [f"{cluster.device.name}: {foresight.in_words()}"] if foresight.in_words() else []
            sweeps.append(Sweep(workload, cluster, machine, rows))
            step_ms = [row.step.total_ms for row in rows if row.step is not None]
            if machine is None and len(step_ms) == len(r.batch):
                jumps[cluster.device.name] = jumps_of(workload, first, cluster.device, r.batch, step_ms)
    rows = [row for sweep in sweeps for row in sweep.rows]
    return Forecasts(rows=tuple(rows), jumps=jumps, notes=tuple(notes), sweeps=tuple(sweeps))


def _workloads(request: ForecastRequest, calibrated: set[bool], progress: Progress) -> dict[bool, Workload]:
    """The workload as GPUs run it (False) and as a CPU does (True), which runs other operators, as far as they are asked for."""
    full = request.checkpointing == "full"
    workloads: dict[bool, Workload] = {}
    for on_cpu in sorted(calibrated):
        variant = request.variant._replace(cpu=on_cpu)
        saved_once = replace(request, save_workload=None) if workloads else request
        workloads[on_cpu] = workload_of(saved_once, progress, variant=variant, recompute=full)
    return workloads


def _targets(request: ForecastRequest, progress: Progress) -> list[tuple[Cluster, MachineModel | None]]:
    """(cluster, the machine's own kernel model or None) for every GPU and profile that was named."""
    r, own = request, own_devices(request.hardware)
    machines: list[tuple[Any, Any, Any]] = []
    for gpu in r.gpu:
        if gpu.casefold() == "cpu":
            from trainpace.verbs.this_machine import profile_or_brief

            profile = profile_or_brief(progress)
            machines.append((profile.device, profile.kernels, profile.host_links))
        else:
            machines.append((find_device(gpu, own), None, None))
    if r.calibrated:
        from trainpace.machine import MachineProfile

        profile = load(r.calibrated, MachineProfile)
        machines.append((profile.device, profile.kernels, profile.host_links))
    for _, _, links in machines:
        check_fleet(r.num_gpus, r.nodes, r.network, links is not None)
    network = None if r.network is None else r.network / r.num_gpus
    return [
        (Cluster(device=device, devices_per_node=r.num_gpus, nodes=r.nodes, price_usd_per_device_hour=r.price,
                 network_gb_per_s_per_device=network, host_links=links), kernels)
        for device, kernels, links in machines
    ]  # fmt: skip


@contextlib.contextmanager
def _journal_if_there(request: ForecastRequest) -> Iterator[Any]:
    """The journal, if there is one: a forecast makes none."""
    from trainpace.journal import is_there

    if request.no_journal or (request.journal is None and not is_there()):
        yield None
        return
    from trainpace.journal import Journal

    with Journal.open(request.journal, create=False) as journal:
        yield journal


def _nearest_measurement(path: str, batch: int) -> Measurement:
    """The measurement at the batch size nearest to the asked one, of a file that `measure --output` wrote."""
    try:
        entries = json.loads(read_bytes(path))
    except ValueError as error:
        raise UnreadableInput(f"{path} is not valid JSON ({error}).") from None
    entries = entries if isinstance(entries, list) else [entries]
    measurements = [from_json(json.dumps(entry), Measurement, path) for entry in entries]
    if not measurements:
        raise UnreadableInput(f"{path} holds no measurement.")
    return min(measurements, key=lambda m: abs(m.execution.micro_batch - batch))
