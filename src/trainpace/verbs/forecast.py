"""`forecast`: step time, memory and cost of a model on GPUs that are not there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.core.intake import read_json
from trainpace.core.outcome import Forecast, Jump, Measurement, forecast_row
from trainpace.core.records import SCHEMA_VERSION, Record, from_json, load, to_jsonable
from trainpace.core.software import TODAY
from trainpace.core.stats import Trend, trend_of
from trainpace.core.units import format_number
from trainpace.forecast import (
    CalibratedKernels,
    Forecaster,
    Measured,
    Target,
    observe_elsewhere,
    packed,
)
from trainpace.job import with_job
from trainpace.verbs.evidence import Asked, Evidence, evidence_for, evidence_json
from trainpace.verbs.lengths import workloads_of
from trainpace.verbs.packing import (
    PackingRequest,
    PaddedBatch,
    compared,
    documents_of,
    padded_batch,
)
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
from trainpace.verbs.recorded import RecordedLoader, caveats, loader_of, recording_of, sentences_of
from trainpace.verbs.request import (
    AT_LEAST_1,
    EXISTING_FILE,
    LENGTHS,
    RATE,
    USD,
    Field,
    Misuse,
    Progress,
    Rows,
)
from trainpace.verbs.software import software_of
from trainpace.verbs.training import (
    USUAL_BATCH,
    Tokens,
    check_used,
    default_forms,
    epoch_of,
    execution_of,
    fleet_of,
)
from trainpace.workload import Documents, Form, Mode, ModelSpec, Variant, Workload, form_of

if TYPE_CHECKING:
    from trainpace.forecast import Nearness
    from trainpace.measure import MachineProfile


class ForecastRequest(PackingRequest):
    gpu: Annotated[
        tuple[str, ...],
        Field(
            "A GPU by name, several times if you like; 'cpu' is this machine's, by its profile"
            " (trainpace calibrate).  [default: some that many people have]"
        ),
    ] = ()
    sequence_length: Annotated[
        tuple[int, ...],
        Field(
            "Tokens in a sample, for transformers: 4096, or a row for each of 1024,4096,16384, or"
            " of 1024:8192:1024.",
            LENGTHS,
        ),
    ] = ()  # type: ignore[assignment]  # several, where other verbs take one
    host: HostName = None
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None
    transfer_from: Annotated[
        str | None,
        Field(
            "Correct by measurements of the same model, on this GPU or another (trainpace measure"
            " --output).",
            EXISTING_FILE,
            metavar="MEASUREMENT.json",
        ),
    ] = None
    calibrated: Annotated[
        str | None,
        Field(
            "Also forecast the machine of this profile (trainpace calibrate --output).",
            EXISTING_FILE,
            metavar="PROFILE.json",
        ),
    ] = None
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Ignore measurements in the journal.")] = False
    samples: Annotated[
        int | None,
        Field(
            "Samples in an epoch: with `epochs`, the whole training is forecast too.", AT_LEAST_1
        ),
    ] = None
    tokens: Tokens = None
    price: Annotated[
        float | None, Field("Dollars per GPU and hour, for the cost of the whole training.", USD)
    ] = None
    loader_rate: Annotated[
        float | None, Field("Samples per second that one loader worker prepares.", RATE)
    ] = None
    workers: Annotated[
        int | None, Field("Loader workers of a node, with `loader_rate`.", AT_LEAST_1)
    ] = None
    hardware: HardwareFile = None
    evidence: Evidence = "nearest"

    @property
    def forms(self) -> tuple[Form, ...]:
        return default_forms(self.model, () if self.precision is None else (self.precision,))

    @property
    def variant(self) -> Variant:
        length = self.sequence_length[0] if self.sequence_length else None
        return super().variant._replace(
            cpu=all(gpu.casefold() == "cpu" for gpu in self.gpu), sequence_length=length
        )


USUAL_GPUS = ("RTX 3090", "RTX 4090", "T4", "A100", "H100")
"""What a model is forecast on where nobody names a card."""
UNMEASURED = (
    "no kernel of its generation was measured, so that jumps may be missed: those reported for VGG"
    " on a K80 after batch 16, 32, 48 and 64 are forecast, but too small to count (docs/jumps.md)."
)


LEFT_OUT = "Measurements in the journal are left out: they are not of packed rows."
ALONE = "Padded batches of the same documents are not forecast beside packed rows"


class Sweep(NamedTuple):
    """The forecasts for one target, in order of batch size."""

    forecaster: Forecaster
    rows: list[Forecast]


class Forecasts(Record, Rows[Forecast]):
    """A forecast for each GPU, sequence length and batch size, in the order asked for. Iterates over `rows`.

    `jumps`: by device, where one more sample costs far more than usual; none where several lengths are asked for.
    `notes`: what runs in the journal did to the forecasts, and what these leave out. `sweeps`: the rows of each target and
    length. `trends`: by device, over the sizes that fit. `padded`: the documents of packed rows in padded batches instead, a
    row's each, of a model that takes other lengths. `evidence`: what others measured near to each GPU's fastest row that fits.
    `recorded`: of a workload in a recording, what its loader does to the answer, and what may mislead in it.
    """

    rows: tuple[Forecast, ...]
    jumps: dict[str, tuple[Jump, ...]]
    notes: tuple[str, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    trends: dict[str, Trend] = msgspec.field(default_factory=dict)
    padded: tuple[PaddedBatch, ...] = ()
    evidence: tuple[Nearness, ...] = ()
    recorded: tuple[str, ...] = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row a forecast: the columns of `trainpace forecast --json`."""
        return [forecast_row(row) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """Return what `trainpace forecast --json` prints."""
        return {
            "record": "Forecasts",
            "schema_version": SCHEMA_VERSION,
            "rows": self.to_dicts(),
            "journal": list(self.notes),
            "jumps": {
                name: [to_jsonable(jump) for jump in some] for name, some in self.jumps.items()
            },
            "trends": {name: to_jsonable(trend) for name, trend in self.trends.items()},
            "padded": [one.as_json() for one in self.padded],
            "evidence": evidence_json(self.evidence),
            "recorded": list(self.recorded),
        }


def run(request: ForecastRequest, progress: Progress) -> Forecasts:
    r = request
    with_job_asked = r.samples is not None or r.tokens is not None
    if r.samples is not None and r.tokens is not None:
        raise Misuse(
            "`samples` and `tokens` both say how large an epoch is.", "Leave one of them out."
        )
    if with_job_asked != (r.epochs is not None):
        raise Misuse("`samples`, or `tokens`, and `epochs` go together.")
    if r.price is not None and not with_job_asked:
        raise Misuse(
            "`price` does nothing without `samples` and `epochs`, which say how long to pay."
        )
    if not r.gpu and not r.calibrated:
        r = replace(r, gpu=USUAL_GPUS)
    if (r.loader_rate is None) != (r.workers is None):
        raise Misuse(
            "`loader_rate` (samples per second of one worker) and `workers` (of a node) go"
            " together."
        )
    if r.packed and r.transfer_from is not None:
        raise Contradiction(
            "`transfer_from` corrects by steps of rows that are not packed, in which a token"
            " attends to its whole row.",
            "Leave one of the two out.",
        )
    if r.loader_rate is not None and not with_job_asked:
        raise Misuse("`loader_rate` does nothing without `samples` and `epochs`.")
    check_used(r, with_training=with_job_asked)
    recording = recording_of(r.model)
    recorded = None if recording is None or r.loader_rate is not None else loader_of(recording)
    conditions = r.conditions(price_usd_per_device_hour=r.price, samples_per_cpu_s=r.loader_rate)
    workers = r.workers
    if recorded is not None:  # as many processes as it has GPUs, each with a loader of its own
        conditions = replace(
            conditions, samples_per_cpu_s=recorded.samples_per_s, loads_beside=recorded.workers > 0
        )
        workers = r.num_gpus
    targets = _targets(r, progress)
    measured = () if r.transfer_from is None else _measurements(r.transfer_from)
    documents = documents_of(r)
    fixed = ModelSpec.of(r.model).has_fixed_length
    lengths = (*r.sequence_length, *(() if fixed else _padded_lengths(r, documents)))
    workloads = _workloads(r, {target.kernels.traces_cpu for target in targets}, lengths, progress)
    r = r.settled(next(iter(workloads.values())))
    assert r.batch is not None
    sweeps: list[Sweep] = []
    jumps: dict[str, tuple[Jump, ...]] = {}
    trends: dict[str, Trend] = {}
    padded: list[PaddedBatch] = []
    notes: dict[str, None] = {}
    devices = {target.cluster.device.name for target in targets}
    models = {workload.model for workload in workloads.values()}
    with (
        consulted_journal(r.journal, r.no_journal, devices, models) as journal,
        progress.work("forecasting"),
    ):

        def informed(workload: Workload, target: Target, length: int | None) -> Forecaster:
            forecaster = Forecaster(workload, target)
            if measured:
                return forecaster.knowing(_measured(measured, forecaster, own_devices(r.hardware)))
            if documents is not None:
                if journal is not None:
                    notes[LEFT_OUT] = None
                return forecaster
            known = known_of(workload, journal, length, r.image_size)
            if known is not None and (words := known.in_words(forecaster)):
                notes[f"{target.cluster.device.name}: {words}"] = None
            return forecaster.knowing(known)

        asked = [(target, length) for target in targets for length in r.sequence_length or (None,)]
        for target, length in asked:
            on_cpu, device = target.kernels.traces_cpu, target.cluster.device.name
            workload = workloads[length, on_cpu]
            execution = execution_of(r, workload, target.cluster.device)
            if documents is not None and length is not None:
                asked_form = {
                    name: form
                    for name, form in workload.forms.items()
                    if name == form_of(execution.precision)
                }
                workload = packed(
                    replace(workload, forms=asked_form or workload.forms), documents.packed(length)
                )
            forecaster = informed(workload, target, length)
            rows = forecaster.over_batches(execution, r.batch).forecasts()
            schedule = None
            if with_job_asked:
                schedule = epoch_of(
                    r.samples, r.tokens, length, forecaster.workload, epochs=r.epochs
                )
            rows = [
                with_job(row, forecaster.workload, schedule, conditions, workers) for row in rows
            ]
            sweeps.append(Sweep(forecaster, rows))
            if documents is not None and length is not None:
                for row in rows:
                    n, longest = padded_batch(documents, length, row.execution.micro_batch)
                    if (longest, on_cpu) not in workloads:
                        notes[
                            f"{ALONE}: {r.model_name} has samples of one length, {length:,} tokens."
                        ] = None
                        continue
                    other = informed(workloads[longest, on_cpu], target, longest)
                    there = other.forecast(replace(row.execution, micro_batch=n))
                    padded.append(compared(documents, row, there))
            if len(r.sequence_length) > 1:
                continue  # jumps and trends are over batch sizes of one length
            step_ms = np.array([row.step.total_ms for row in rows if row.step is not None])
            trend = _trend([row for row in rows if row.step is not None and row.fits is not False])
            if trend is not None:
                trends[device] = trend
            if not on_cpu and len(step_ms) == len(r.batch):
                jumps[device] = forecaster.jumps_in(execution, r.batch, step_ms)
                old = target.cluster.device.compute_capability.startswith("3.")
                notes |= (
                    {f"{device}: {UNMEASURED}": None}
                    if trend is not None and not jumps[device] and old
                    else {}
                )
    every = tuple(row for sweep in sweeps for row in sweep.rows)
    return Forecasts(
        recorded=(
            ()
            if recording is None
            else (*_loading(recorded, every), *sentences_of(caveats(recording)))
        ),
        rows=every,
        jumps=jumps,
        notes=tuple(notes),
        sweeps=tuple(sweeps),
        trends=trends,
        padded=tuple(padded),
        evidence=evidence_for(r.evidence, (_asked(sweep) for sweep in sweeps)),
    )


def _loading(loader: RecordedLoader | None, rows: Sequence[Forecast]) -> Iterator[str]:
    """What a recorded loader does to the fastest row."""
    if loader is None:
        return
    rate = max(((row.samples_per_second or 0.0) / row.num_devices for row in rows), default=0.0)
    waits = (
        f"slower than the fastest step here ({format_number(rate)} samples/s a GPU), which waits"
        " for it"
    )
    if loader.samples_per_s >= rate:
        waits = "fast enough for every step here"
    counted = "It counts in the time of the training, not in that of a step"
    if all(row.training_time is None for row in rows):
        counted = (
            "It does not count in the time of a step; with --epochs and --samples it counts in the"
            " training's"
        )
    yield f"The recorded loader ({loader.words}) is {waits}. {counted}."


def _asked(sweep: Sweep) -> Asked:
    """What public measurements are looked for: the sweep's fastest row that fits, else its first."""
    fitting = [row for row in sweep.rows if row.step is not None and row.fits is not False]
    best = max(fitting, key=lambda row: row.samples_per_second or 0.0, default=sweep.rows[0])
    return sweep.forecaster.workload, best.execution, sweep.forecaster.target.cluster.device


def _padded_lengths(request: ForecastRequest, documents: Documents | None) -> tuple[int, ...]:
    """Lengths of the padded batches that packed rows are compared with."""
    if documents is None:
        return ()
    batches = request.batch or (USUAL_BATCH,)
    lengths = {
        padded_batch(documents, row, batch)[1]
        for row in request.sequence_length
        for batch in batches
    }
    return tuple(sorted(lengths - set(request.sequence_length)))


def _trend(rows: Sequence[Forecast]) -> Trend | None:
    rows = sorted(rows, key=lambda row: row.execution.micro_batch)
    batches = [row.execution.micro_batch for row in rows]
    if len(set(batches)) < len(batches):
        return None
    step_ms = [row.step.total_ms for row in rows if row.step is not None]
    return trend_of(batches, step_ms, [row.samples_per_second or 0.0 for row in rows])


def _workloads(
    request: ForecastRequest, on_cpus: set[bool], lengths: Sequence[int], progress: Progress
) -> dict[tuple[int | None, bool], Workload]:
    """The workload of each length, as GPUs run it (False) and as a CPU does (True), which runs other operators, as far as they
    are asked for."""
    workloads: dict[tuple[int | None, bool], Workload] = {}
    for on_cpu in sorted(on_cpus):
        saved_once = replace(request, save_workload=None) if workloads else request
        some = workloads_of(saved_once, lengths, progress, request.variant._replace(cpu=on_cpu))
        workloads |= {(length, on_cpu): workload for length, workload in some}
    return workloads


def _targets(request: ForecastRequest, progress: Progress) -> list[Target]:
    r, own, host = request, own_devices(request.hardware), named_host(request.host)
    software = software_of(r)
    if r.packed and software.attention is None:
        software = replace(
            software, attention="flash2"
        )  # what padding-free collators and TRL's packing are run with
    fleet = (r.num_gpus, r.nodes, r.network, r.price)
    latency_us = None if r.network_latency is None else 1e6 * r.network_latency
    copies = math.inf if r.host_copy is None else r.host_copy
    if host is not None and all(gpu.casefold() == "cpu" for gpu in r.gpu):
        raise Misuse(
            "`host` does nothing without a `gpu`: a machine's profile was measured with its own"
            " CPU."
        )
    if software != TODAY and all(gpu.casefold() == "cpu" for gpu in r.gpu):
        raise Misuse(
            "Software does nothing without a `gpu`: a machine's profile was measured with its own."
        )

    def machine(profile: MachineProfile) -> Target:
        links = profile.host_links
        cluster = fleet_of(profile.device, *fleet, links, latency_us=latency_us)
        return Target(cluster, CalibratedKernels(profile.kernels), copies)

    def card(name: str) -> Target:
        cluster = fleet_of(find_device(name, own), *fleet, host=host, latency_us=latency_us)
        return Target(cluster, host_copy_gb_per_s=copies, software=software)

    targets = [
        machine(profile_or_brief(progress)) if gpu.casefold() == "cpu" else card(gpu)
        for gpu in r.gpu
    ]
    if r.calibrated:
        from trainpace.measure import MachineProfile

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


def _measured(
    measurements: Sequence[Measurement], forecaster: Forecaster, own: Sequence[Device]
) -> Measured:
    """Measurements of the same model beside their forecasts."""
    target, known = forecaster.target, []
    measurements = [m for m in measurements if m.model == forecaster.workload.model] or measurements
    for m in measurements:
        e = m.execution
        if (
            m.device == target.cluster.device.name
            and e.world_size == 1 == target.cluster.num_devices
        ):
            there = forecaster
        elif target.kernels.traces_cpu:
            raise TrainpaceError(
                f"a measurement on {m.device} says nothing of another machine's CPU."
            )
        else:
            fleet = Cluster(
                device=find_device(m.device, own), nodes=e.nnodes, devices_per_node=e.nproc_per_node
            )
            there = forecaster.on(Target(fleet, software=target.software))
        known.append(observe_elsewhere(m, there))
    sizes = ", ".join(str(m.execution.micro_batch) for m in measurements[:8])
    devices = ", ".join(sorted({seen.run.device for seen in known}))
    return Measured(tuple(known), f"corrected by what was measured on {devices} at batch {sizes}")
