"""`forecast`: step time, memory and cost of a model on GPUs that are not there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.forecast import CalibratedKernels, Forecaster, Measured, Target, observe_elsewhere
from trainpace.hardware import Cluster, Device, find_device
from trainpace.job import with_job
from trainpace.outcome import Forecast, Jump, Measurement, forecast_row
from trainpace.records import Record, from_json, load, read_json
from trainpace.schedule import Schedule
from trainpace.software import TODAY
from trainpace.trace import stored_precision
from trainpace.trend import Trend, trend_of
from trainpace.verbs.places import (
    HardwareFile,
    HostName,
    JournalPlace,
    consulted_journal,
    known_of,
    named_host,
    own_devices,
    profile_or_brief,
)
from trainpace.verbs.request import AT_LEAST_1, EXISTING_FILE, RATE, USD, Field, Misuse, Progress, Rows
from trainpace.verbs.software import software_of
from trainpace.verbs.training import ExecutedRequest, check_used, execution_of, fleet_of, settled, workload_of
from trainpace.workload import Form, Mode, Variant, Workload, form_of

if TYPE_CHECKING:
    from trainpace.machine import MachineProfile


class ForecastRequest(ExecutedRequest):
    gpu: Annotated[
        tuple[str, ...],
        Field("A GPU by name, several times if you like; 'cpu' is this machine's, by its profile (trainpace calibrate)."),
    ] = ()  # fmt: skip
    host: HostName = None
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None
    transfer_from: Annotated[
        str | None,
        Field("Correct by measurements of the same model, on this GPU or another (trainpace measure --output).", EXISTING_FILE,
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
    price: Annotated[float | None, Field("Dollars per GPU and hour, for the cost of the whole training.", USD)] = None
    loader_rate: Annotated[float | None, Field("Samples per second that one loader worker prepares.", RATE)] = None
    workers: Annotated[int | None, Field("Loader workers of a node, with `loader_rate`.", AT_LEAST_1)] = None
    hardware: HardwareFile = None

    @property
    def forms(self) -> tuple[Form, ...]:
        precision = self.precision or stored_precision(self.model)
        if precision is None and isinstance(self.model, str) and ".py:" in self.model:
            return ()  # the task may say
        return (form_of(precision or "fp32"),)

    @property
    def variant(self) -> Variant:
        return super().variant._replace(cpu=all(gpu.casefold() == "cpu" for gpu in self.gpu))


UNMEASURED = (
    "no kernel of its generation was measured, so that jumps may be missed: those reported for VGG on a K80 after batch 16, 32,"
    " 48 and 64 are forecast, but too small to count (docs/jumps.md)."
)


class Sweep(NamedTuple):
    """The forecasts for one target, in order of batch size."""

    forecaster: Forecaster
    rows: list[Forecast]


class Forecasts(Record, Rows[Forecast]):
    """A forecast for each GPU and batch size, in the order asked for. Iterates over `rows`.

    `jumps`: by device, where one more sample costs far more than usual. `notes`: what runs in the journal did to the forecasts,
    and what these leave out. `sweeps`: the rows of each target. `trends`: by device, over the sizes that fit.
    """

    rows: tuple[Forecast, ...]
    jumps: dict[str, tuple[Jump, ...]]
    notes: tuple[str, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    trends: dict[str, Trend] = msgspec.field(default_factory=dict)

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
    if (r.loader_rate is None) != (r.workers is None):
        raise Misuse("`loader_rate` (samples per second of one worker) and `workers` (of a node) go together.")
    if r.loader_rate is not None and r.samples is None:
        raise Misuse("`loader_rate` does nothing without `samples` and `epochs`.")
    check_used(r, with_training=r.samples is not None)
    schedule = None if r.samples is None else Schedule(samples=r.samples, epochs=r.epochs)
    conditions = r.conditions(price_usd_per_device_hour=r.price, samples_per_cpu_s=r.loader_rate)
    targets = _targets(r, progress)
    measured = () if r.transfer_from is None else _measurements(r.transfer_from)
    workloads = _workloads(r, {target.kernels.traces_cpu for target in targets}, progress)
    r = settled(r, next(iter(workloads.values())))
    assert r.batch is not None
    sweeps: list[Sweep] = []
    jumps: dict[str, tuple[Jump, ...]] = {}
    trends: dict[str, Trend] = {}
    notes: list[str] = []
    devices = {target.cluster.device.name for target in targets}
    models = {workload.model for workload in workloads.values()}
    with consulted_journal(r.journal, r.no_journal, devices, models) as journal:
        for target in targets:
            forecaster = Forecaster(workloads[target.kernels.traces_cpu], target)
            execution = execution_of(r, forecaster.workload, target.cluster.device)
            device = target.cluster.device.name
            if measured:
                forecaster = forecaster.knowing(_measured(measured, forecaster, own_devices(r.hardware)))
            elif (known := known_of(forecaster.workload, journal, r.sequence_length, r.image_size)) is not None:
                notes += [f"{device}: {words}"] if (words := known.in_words(forecaster)) else []
                forecaster = forecaster.knowing(known)
            rows = forecaster.over_batches(execution, r.batch).forecasts()
            rows = [with_job(row, forecaster.workload, schedule, conditions, r.workers) for row in rows]
            sweeps.append(Sweep(forecaster, rows))
            step_ms = np.array([row.step.total_ms for row in rows if row.step is not None])
            trend = _trend([row for row in rows if row.step is not None and row.fits is not False])
            if trend is not None:
                trends[device] = trend
            if not target.kernels.traces_cpu and len(step_ms) == len(r.batch):
                jumps[device] = forecaster.jumps_in(execution, r.batch, step_ms)
                if (
                    trend is not None
                    and not jumps[device]
                    and target.cluster.device.compute_capability.startswith("3.")
                ):
                    notes.append(f"{device}: {UNMEASURED}")
    rows = [row for sweep in sweeps for row in sweep.rows]
    return Forecasts(rows=tuple(rows), jumps=jumps, notes=tuple(notes), sweeps=tuple(sweeps), trends=trends)


def _trend(rows: Sequence[Forecast]) -> Trend | None:
    rows = sorted(rows, key=lambda row: row.execution.micro_batch)
    batches = [row.execution.micro_batch for row in rows]
    if len(set(batches)) < len(batches):
        return None
    step_ms = [row.step.total_ms for row in rows if row.step is not None]
    return trend_of(batches, step_ms, [row.samples_per_second or 0.0 for row in rows])


def _workloads(request: ForecastRequest, on_cpus: set[bool], progress: Progress) -> dict[bool, Workload]:
    """The workload as GPUs run it (False) and as a CPU does (True), which runs other operators, as far as they are asked for."""
    workloads: dict[bool, Workload] = {}
    for on_cpu in sorted(on_cpus):
        saved_once = replace(request, save_workload=None) if workloads else request
        workloads[on_cpu] = workload_of(saved_once, progress, variant=request.variant._replace(cpu=on_cpu))
    return workloads


def _targets(request: ForecastRequest, progress: Progress) -> list[Target]:
    r, own, host = request, own_devices(request.hardware), named_host(request.host)
    software = software_of(r)
    fleet = (r.num_gpus, r.nodes, r.network, r.price)
    latency_us = None if r.network_latency is None else 1e6 * r.network_latency
    copies = math.inf if r.host_copy is None else r.host_copy
    if host is not None and all(gpu.casefold() == "cpu" for gpu in r.gpu):
        raise Misuse("`host` does nothing without a `gpu`: a machine's profile was measured with its own CPU.")
    if software != TODAY and all(gpu.casefold() == "cpu" for gpu in r.gpu):
        raise Misuse("Software does nothing without a `gpu`: a machine's profile was measured with its own.")

    def machine(profile: MachineProfile) -> Target:
        links = profile.host_links
        cluster = fleet_of(profile.device, *fleet, links, latency_us=latency_us)
        return Target(cluster, CalibratedKernels(profile.kernels), copies)

    def card(name: str) -> Target:
        cluster = fleet_of(find_device(name, own), *fleet, host=host, latency_us=latency_us)
        return Target(cluster, host_copy_gb_per_s=copies, software=software)

    targets = [machine(profile_or_brief(progress)) if gpu.casefold() == "cpu" else card(gpu) for gpu in r.gpu]
    if r.calibrated:
        from trainpace.machine import MachineProfile

        targets.append(machine(load(r.calibrated, MachineProfile)))
    return targets


def _measurements(path: str) -> list[Measurement]:
    """The measurements of a file that `measure --output` wrote."""
    entries = read_json(path)
    entries = entries if isinstance(entries, list) else [entries]
    measurements = [from_json(json.dumps(entry), Measurement, path) for entry in entries]
    if not measurements:
        raise UnreadableInput(f"{path} holds no measurement.")
    return measurements


def _measured(measurements: Sequence[Measurement], forecaster: Forecaster, own: Sequence[Device]) -> Measured:
    """Measurements of the same model beside their forecasts."""
    target, known = forecaster.target, []
    measurements = [m for m in measurements if m.model == forecaster.workload.model] or measurements
    for m in measurements:
        e = m.execution
        if m.device == target.cluster.device.name and e.world_size == 1 == target.cluster.num_devices:
            there = forecaster
        elif target.kernels.traces_cpu:
            raise TrainpaceError(f"a measurement on {m.device} says nothing of another machine's CPU.")
        else:
            fleet = Cluster(device=find_device(m.device, own), nodes=e.nnodes, devices_per_node=e.nproc_per_node)
            there = forecaster.on(Target(fleet, software=target.software))
        known.append(observe_elsewhere(m, there))
    sizes = ", ".join(str(m.execution.micro_batch) for m in measurements[:8])
    devices = ", ".join(sorted({seen.run.device for seen in known}))
    return Measured(tuple(known), f"corrected by what was measured on {devices} at batch {sizes}")
