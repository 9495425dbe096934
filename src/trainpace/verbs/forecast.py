"""`forecast`: predict step time, memory and cost of a model on GPUs that are not available here.

`run` has four stages. It resolves the request, forecasts every target and sequence length, compares
packed rows with padded batches, and adds jumps, trends and evidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, Device, find_device
from trainpace.core.host import usable_cores
from trainpace.core.intake import read_json
from trainpace.core.outcome import Forecast, Jump, Measurement, forecast_row
from trainpace.core.records import SCHEMA_VERSION, Record, from_json, load, to_jsonable
from trainpace.core.software import TODAY
from trainpace.core.stats import Trend, trend_of
from trainpace.forecast import (
    CalibratedKernels,
    Forecaster,
    Grid,
    Measured,
    Target,
    observe_elsewhere,
    packed,
)
from trainpace.job import (
    NO_WAIT,
    DataPath,
    JobConditions,
    Schedule,
    assumed_in_words,
    with_host_work,
    with_job,
)
from trainpace.verbs.match import placed
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
from trainpace.verbs.request import (
    ABOVE_0,
    AT_LEAST_1,
    EXISTING_FILE,
    LENGTHS,
    RATE,
    USD,
    Field,
    Misuse,
    Progress,
    Rows,
    Silent,
    within,
)
from trainpace.verbs.traced import (
    Asked,
    Evidence,
    HostWork,
    PaddedBatch,
    as_recorded,
    compared,
    documents_of,
    evidence_for,
    evidence_json,
    host_work,
    padded_batch,
    recorded_notes,
    recording_of,
    workloads_of,
)
from trainpace.verbs.training import (
    AUTOCAST,
    LENGTH,
    USUAL_BATCH,
    ExecutedRequest,
    MaxSteps,
    Tokens,
    assumed_setup,
    check_pure_16_bit,
    cluster_with,
    default_forms,
    default_precision,
    default_precisions,
    default_setup,
    epoch_of,
    execution_of,
    software_of,
)
from trainpace.workload import Documents, Form, Mode, ModelSpec, Variant, Workload, form_of

if TYPE_CHECKING:
    from trainpace.forecast import Nearness
    from trainpace.journal import Journal
    from trainpace.measure import MachineProfile
    from trainpace.watch import Recording

USUAL_GPUS = ("RTX 3090", "RTX 4090", "T4", "A100", "H100")
"""GPUs to forecast if the request names none."""
LARGE_GPUS = ("A100 SXM 80GB", "H200", "B200")
"""GPUs to forecast besides if the model fits none of `USUAL_GPUS`."""
ADAPTERS = ({"adapter": "lora"}, {"adapter": "lora", "weights": "nf4"})
"""Options of LoRA and QLoRA, which fine-tune in less memory."""
UNMEASURED = (
    "kernels of this GPU generation were never measured, so jumps may be missed (docs/jumps.md)."
)
IGNORED_JOURNAL = "Journal measurements are ignored: they are not of packed rows."
NOT_COMPARED = "Packed rows are not compared with padded batches of the same documents"


class ForecastRequest(ExecutedRequest):
    """Request to forecast a model on one or several devices, batch sizes and lengths."""

    groups = "GPUs: gpu; Training length: price"

    gpu: Annotated[
        tuple[str, ...],
        Field("A GPU, or cpu for this machine's; repeat for several.  [default: some common ones]"),
    ] = ()
    sequence_length: Annotated[
        tuple[int, ...], Field("Tokens per sample: 4096, or 1024,4096 for several.", LENGTHS)
    ] = ()  # type: ignore[assignment]  # A tuple here; other verbs take one GPU.
    host: HostName = None
    mode: Annotated[Mode | None, Field("Part of a step to forecast.  [default: train]")] = None
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
            overrides="gpu",
        ),
    ] = None
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Ignore measurements in the journal.")] = False
    samples: Annotated[
        int | None, Field("Samples per epoch, for the whole training.", AT_LEAST_1, needs=LENGTH)
    ] = None
    tokens: Tokens = None
    max_steps: MaxSteps = None
    price: Annotated[
        float | None,
        Field("Dollars per GPU and hour.", USD, needs=LENGTH, sets="price_usd_per_device_hour"),
    ] = None
    loader_rate: Annotated[
        float | None, Field("Samples per second that one CPU core prepares.", RATE)
    ] = None
    workers: Annotated[
        int | None,
        Field(
            "Loader workers per node.  [default: the recording's, else one per core]", AT_LEAST_1
        ),
    ] = None
    cores: Annotated[
        int | None,
        Field(
            "Cores per node for loading.  [default: those of the cheapest server with the GPU]",
            AT_LEAST_1,
        ),
    ] = None
    packed: Annotated[
        bool,
        Field(
            "Pack several documents into a row, with variable-length attention.",
            needs="sequence_length lengths|mean_length",
            excludes="transfer_from",
        ),
    ] = False
    lengths: Annotated[
        str | None,
        Field(
            "Token counts of the documents: a text file of numbers, or a CSV or Parquet file with"
            " a column length (and count) or input_ids.",
            EXISTING_FILE,
            metavar="FILE",
            needs="packed",
            excludes="mean_length",
        ),
    ] = None
    mean_length: Annotated[
        float | None,
        Field(
            "Mean token count of the documents, which are assumed to be exponentially distributed.",
            within("tokens", ABOVE_0, 1e9),
            needs="packed",
        ),
    ] = None
    hardware: HardwareFile = None
    evidence: Evidence = "nearest"

    @property
    def forms(self) -> tuple[Form, ...]:
        has_cpu = self.calibrated is not None or any(gpu.casefold() == "cpu" for gpu in self.gpu)
        has_gpu = not self.gpu or not self.only_cpu
        precisions = () if self.precision is None else (self.precision,)
        return default_forms(self.model, precisions, has_gpu, has_cpu)

    def leaves_batch_open(self, workload: Workload) -> bool:
        """Return True if neither the request nor the task decides the micro-batch."""
        is_given = self.batch is not None or "micro_batch" in workload.settings or self.packed
        return not is_given and (self.global_batch is None or self.accumulate is None)

    def leaves_checkpointing_open(self, workload: Workload) -> bool:
        return self.checkpointing is None and "activation_checkpointing" not in workload.settings

    @property
    def variant(self) -> Variant:
        length = self.sequence_length[0] if self.sequence_length else None
        return super().variant._replace(cpu=self.only_cpu, sequence_length=length)

    @property
    def only_cpu(self) -> bool:
        return all(gpu.casefold() == "cpu" for gpu in self.gpu)

    @property
    def whole_training(self) -> bool:
        return self.epochs is not None or self.max_steps is not None


class Sweep(NamedTuple):
    """Forecasts for one target and one sequence length, in order of batch size.

    `work` says in a sentence which work of the host the steps include.
    """

    forecaster: Forecaster
    rows: list[Forecast]
    execution: Execution
    length: int | None = None
    work: str = ""

    @property
    def device(self) -> Device:
        return self.forecaster.target.cluster.device

    @property
    def on_cpu(self) -> bool:
        return self.forecaster.target.kernels.traces_cpu


class Forecasts(Record, Rows[Forecast]):
    """Forecasts for each GPU, sequence length and batch size, in the order of the request.

    Iterates over `rows`.

    Attributes:
        jumps: Batch sizes by device after which one more sample costs far more than usual. Empty if
            there are several sequence lengths.
        notes: Changes due to runs in the journal, and missing information.
        sweeps: The rows of each target and sequence length.
        trends: Fit of step time over batch size by device, for the sizes that fit in memory.
        padded: The same documents in padded batches instead of packed rows, for models that can be
            traced at other lengths.
        evidence: Public measurements near the fastest fitting row of each GPU.
        recorded: Work of the host that the steps include, and caveats of a recording.
        fits_with: Options with which the training fits in memory, if it does not fit.
    """

    rows: tuple[Forecast, ...]
    jumps: dict[str, tuple[Jump, ...]]
    notes: tuple[str, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    trends: dict[str, Trend] = msgspec.field(default_factory=dict)
    padded: tuple[PaddedBatch, ...] = ()
    evidence: tuple[Nearness, ...] = ()
    recorded: tuple[str, ...] = ()
    fits_with: dict[str, str] = msgspec.field(default_factory=dict)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per forecast, with the columns of `trainpace forecast --json`."""
        return [forecast_row(row) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """Return what `trainpace forecast --json` prints."""
        jumps = {name: to_jsonable(some) for name, some in self.jumps.items()}
        return {
            "record": "Forecasts",
            "schema_version": SCHEMA_VERSION,
            "rows": self.to_dicts(),
            "journal": list(self.notes),
            "jumps": jumps,
            "trends": {name: to_jsonable(trend) for name, trend in self.trends.items()},
            "padded": [one.as_json() for one in self.padded],
            "evidence": evidence_json(self.evidence),
            "recorded": list(self.recorded),
            "fits_with": self.fits_with,
        }


class _Question(NamedTuple):
    """A resolved request with everything that is needed to forecast.

    Keys of `workloads` are (sequence length, True for a CPU's operators). `work` is the work of the
    host beside the forecast steps, if it is known.
    """

    request: ForecastRequest
    batches: tuple[int, ...]
    targets: list[Target]
    workloads: dict[tuple[int | None, bool], Workload]
    documents: Documents | None
    measured: list[Measurement]
    conditions: JobConditions
    recording: Recording | None
    work: HostWork | None
    opens_batch: bool
    opens_checkpointing: bool


def run(request: ForecastRequest, progress: Progress) -> Forecasts:
    """Forecast every target, sequence length and batch size of a request."""
    question = _resolve(request, progress)
    devices = {target.cluster.device.name for target in question.targets}
    models = {workload.model for workload in question.workloads.values()}
    r = question.request
    with (
        consulted_journal(r.journal, r.no_journal, devices, models) as journal,
        progress.work("forecasting"),
    ):
        notes: dict[str, None] = {}
        sweeps = _sweeps(question, journal, notes, question.targets)
        if not request.gpu and not request.calibrated and not any(map(_fits, sweeps)):
            large = _targets(replace(r, gpu=LARGE_GPUS), progress)
            sweeps += _sweeps(question, journal, notes, large)
            sweeps = list(filter(_fits, sweeps)) or sweeps
        if setup := assumed_in_words(_assumed_setup(question, request, sweeps)):
            notes[setup] = None
        padded = [
            one for sweep in sweeps for one in _padded_batches(question, sweep, journal, notes)
        ]
        answer = _annotated(question, sweeps, padded, notes)
        return replace(answer, fits_with=_lighter(request, sweeps))


def _lighter(request: ForecastRequest, sweeps: Sequence[Sweep]) -> dict[str, str]:
    """Return the first GPU and options with which one sample fits in memory.

    Full checkpointing is tried first, then LoRA and QLoRA in addition to it.
    Returns {} if a batch of the request's own setup fits, or if these options do not help.
    """
    if any(row.can_run or row.largest_micro_batch for sweep in sweeps for row in sweep.rows):
        return {}
    spec, executions = ModelSpec.of(request.model), [sweep.execution for sweep in sweeps]
    recomputes = all(e.activation_checkpointing == "full" for e in executions)
    again = {"checkpointing": "full"} if spec.can_checkpoint and not recomputes else {}
    tried = [again] if again else []
    if spec.is_hugging_face and request.adapter is None:
        tried += [again | options for options in ADAPTERS]
    for options in tried:
        with suppress(TrainpaceError):
            question = _resolve(replace(request, save_workload=None, **options), Silent())
            for sweep in _sweeps(question, None, {}, question.targets):
                if _fits(sweep) and sweep.device.kind == "gpu":
                    return {"gpu": sweep.device.name, **options}
    return {}


def _resolve(r: ForecastRequest, progress: Progress) -> _Question:
    """Check the request, trace its model and look up its targets."""
    if not r.gpu and not r.calibrated:
        r = replace(r, gpu=USUAL_GPUS)
    check_pure_16_bit(r)
    recording = recording_of(r.model)
    conditions = r.conditions(price_usd_per_device_hour=r.price)
    targets = _targets(r, progress)
    measured = [] if r.transfer_from is None else _measurements(r.transfer_from)
    documents = documents_of(r)
    lengths = r.sequence_length
    if not ModelSpec.of(r.model).has_fixed_length:
        lengths = (*lengths, *_padded_lengths(r, documents))
    workloads = _workloads(r, {target.kernels.traces_cpu for target in targets}, lengths, progress)
    workloads = {key: as_recorded(one, recording) for key, one in workloads.items()}
    workload = next(iter(workloads.values()))
    work = _host_work(r, recording, workload)
    is_open = r.leaves_batch_open(workload), r.leaves_checkpointing_open(workload)
    r = r.resolved(workload)
    assert r.batch is not None
    return _Question(
        *(r, r.batch, targets, workloads, documents, measured, conditions),
        *(recording, work, *is_open),
    )


def _host_work(
    r: ForecastRequest, recording: Recording | None, workload: Workload
) -> HostWork | None:
    """Return the host's work, or None if nothing is known about it."""
    work = host_work(recording, workload, r.loader_rate)
    for name in ("workers", "cores"):
        if work is None and getattr(r, name) is not None:
            raise Misuse(f"`{name}` needs `loader_rate`, or a recording as the model.")
    return work


def _sweeps(
    question: _Question, journal: Journal | None, notes: dict[str, None], targets: Sequence[Target]
) -> list[Sweep]:
    lengths = question.request.sequence_length or (None,)
    return [_sweep(question, t, length, journal, notes) for t in targets for length in lengths]


def _fits(sweep: Sweep) -> bool:
    return any(row.can_run for row in sweep.rows)


def _sweep(
    question: _Question,
    target: Target,
    length: int | None,
    journal: Journal | None,
    notes: dict[str, None],
) -> Sweep:
    """Forecast every batch size on one target at one sequence length."""
    r = question.request
    workload = question.workloads[length, target.kernels.traces_cpu]
    execution = execution_of(r, workload, target.cluster.device)
    if question.documents is not None and length is not None:
        form = form_of(execution.precision)
        forms = {form: workload.forms[form]} if form in workload.forms else workload.forms
        workload = packed(replace(workload, forms=forms), question.documents.packed(length))
    batches = question.batches
    forecaster = _informed(question, workload, target, length, journal, notes)
    if question.opens_batch:
        is_global = r.global_batch is not None
        execution = default_setup(forecaster, execution, question.opens_checkpointing, is_global)
        batches = (execution.micro_batch,)
    schedule = _schedule(r, forecaster.workload, length)
    forecaster, on, words = _on_server(question, forecaster, execution, schedule)
    rows = [
        with_host_work(row, on)
        for row in forecaster.at(Grid.vary(execution, micro_batch=batches)).forecasts()
    ]
    rows = [with_job(row, forecaster.workload, schedule, question.conditions) for row in rows]
    return Sweep(forecaster, rows, execution, length, words)


def _schedule(r: ForecastRequest, workload: Workload, length: int | None) -> Schedule | None:
    """Return the steps of the whole training, or None if its length was not given."""
    if not r.whole_training:
        return None
    return epoch_of(r.samples, r.tokens, length, workload, epochs=r.epochs, max_steps=r.max_steps)


def _on_server(
    question: _Question, forecaster: Forecaster, execution: Execution, schedule: Schedule | None
) -> tuple[Forecaster, DataPath, str]:
    """Return the forecaster with the host of the assumed server, the host's work, and its words."""
    r, ranks, work = question.request, question.request.num_gpus, question.work
    if work is None:
        return forecaster, NO_WAIT, ""
    workers = None if r.workers is None else max(1, r.workers // ranks)
    if forecaster.target.host is None:  # A calibrated machine.
        cores = r.cores or usable_cores()
        path = work.on(cores / ranks, None, workers)
        return forecaster, path, work.in_words(f"{cores} cores", workers)
    at = placed(work, forecaster, execution, schedule, question.conditions, r.cores)
    name = f"{at.forecaster.target.cluster.device.name}: " if len(question.targets) > 1 else ""
    words = f"{name}{work.in_words(at.words, workers)}"
    return at.forecaster, work.on(at.cores, at.points, workers), words


def _assumed_setup(
    question: _Question, asked: ForecastRequest, sweeps: Sequence[Sweep]
) -> tuple[str, ...]:
    """Describe what the default setup assumes."""
    executions = [sweep.execution for sweep in sweeps]
    workload = sweeps[0].forecaster.workload
    is_autocast = any(e.precision in AUTOCAST for e in executions)
    return assumed_setup(
        asked.precision is None and is_autocast and len(default_precisions(workload)) > 1,
        question.opens_batch and any(e.micro_batch < USUAL_BATCH for e in executions),
        not workload.checkpointed
        and any(e.activation_checkpointing != question.request.checkpointing for e in executions),
    )


def _informed(
    question: _Question,
    workload: Workload,
    target: Target,
    length: int | None,
    journal: Journal | None,
    notes: dict[str, None],
) -> Forecaster:
    """Return a forecaster that uses the given measurements, or else those in the journal."""
    r, forecaster = question.request, Forecaster(workload, target)
    if question.measured:
        own = own_devices(r.hardware)
        return forecaster.knowing(_measured(question.measured, forecaster, own))
    if question.documents is not None:
        if journal is not None:
            notes[IGNORED_JOURNAL] = None
        return forecaster
    known = known_of(workload, journal, length, r.image_size)
    if known is not None and (words := known.in_words(forecaster)):
        notes[f"{target.cluster.device.name}: {words}"] = None
    return forecaster.knowing(known)


def _padded_batches(
    question: _Question, sweep: Sweep, journal: Journal | None, notes: dict[str, None]
) -> Iterator[PaddedBatch]:
    """Forecast padded batches with the same documents as the packed rows of a sweep."""
    documents, length = question.documents, sweep.length
    if documents is None or length is None:
        return
    for row in sweep.rows:
        n, longest = padded_batch(documents, length, row.execution.micro_batch)
        workload = question.workloads.get((longest, sweep.on_cpu))
        if workload is None:
            name = question.request.model_name
            notes[f"{NOT_COMPARED}: {name} has samples of one length, {length:,} tokens."] = None
            continue
        target = sweep.forecaster.target
        other = _informed(question, workload, target, longest, journal, notes)
        there = other.forecast(replace(row.execution, micro_batch=n))
        yield compared(documents, row, there)


def _annotated(
    question: _Question,
    sweeps: Sequence[Sweep],
    padded: Sequence[PaddedBatch],
    notes: dict[str, None],
) -> Forecasts:
    """Add jumps, trends, evidence and notes about a recording to the forecasts."""
    r = question.request
    jumps: dict[str, tuple[Jump, ...]] = {}
    trends: dict[str, Trend] = {}
    # Jumps and trends are over batch sizes, so they need a single length.
    for sweep in sweeps if len(r.sequence_length) < 2 else ():
        device, trend, found = sweep.device, _trend(sweep.rows), _jumps(sweep, question.batches)
        if trend:
            trends[device.name] = trend
        if found is not None:
            jumps[device.name] = found
        # Kernels of Kepler cards were never measured.
        if trend and found == () and device.compute_capability.startswith("3."):
            notes[f"{device.name}: {UNMEASURED}"] = None
    rows = tuple(row for sweep in sweeps for row in sweep.rows)
    works = dict.fromkeys(sweep.work for sweep in sweeps if sweep.work)
    return Forecasts(
        rows=rows,
        jumps=jumps,
        notes=tuple(notes),
        sweeps=tuple(sweeps),
        trends=trends,
        padded=tuple(padded),
        evidence=evidence_for(r.evidence, map(_asked, sweeps)),
        recorded=recorded_notes(question.recording, *works),
    )


def _jumps(sweep: Sweep, batches: Sequence[int]) -> tuple[Jump, ...] | None:
    """Return the jumps between batch sizes, or None if they are unknown."""
    # Jumps are those of the device. The host's work would hide them.
    step_ms = [
        row.step.total_ms - row.step.own_code_ms - row.step.data_wait_ms
        for row in sweep.rows
        if row.step is not None
    ]
    if sweep.on_cpu or len(step_ms) != len(batches):
        return None
    return sweep.forecaster.jumps(sweep.execution, batches, np.array(step_ms))


def _asked(sweep: Sweep) -> Asked:
    """Return the query for public measurements: the fastest row that fits, or else the first."""
    fitting = [row for row in sweep.rows if row.can_run]
    best = max(fitting, key=lambda row: row.samples_per_second or 0.0, default=sweep.rows[0])
    return sweep.forecaster.workload, best.execution, sweep.device


def _padded_lengths(request: ForecastRequest, documents: Documents | None) -> tuple[int, ...]:
    """Return the padded lengths to compare with packed rows."""
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
    """Return the trend over the batch sizes that fit in memory. None if a size occurs twice."""
    rows = [row for row in rows if row.can_run]
    rows = sorted(rows, key=lambda row: row.execution.micro_batch)
    batches = [row.execution.micro_batch for row in rows]
    if len(set(batches)) < len(batches):
        return None
    step_ms = [row.step.total_ms for row in rows if row.step is not None]
    return trend_of(batches, step_ms, [row.samples_per_second or 0.0 for row in rows])


def _workloads(
    request: ForecastRequest, on_cpus: set[bool], lengths: Sequence[int], progress: Progress
) -> dict[tuple[int | None, bool], Workload]:
    """Return workloads by (sequence length, True for a CPU). CPUs run other operators than GPUs."""
    workloads: dict[tuple[int | None, bool], Workload] = {}
    for on_cpu in sorted(on_cpus):
        saved_once = replace(request, save_workload=None) if workloads else request
        variant = request.variant._replace(cpu=on_cpu)
        some = workloads_of(saved_once, lengths, progress, variant=variant)
        workloads |= {(length, on_cpu): workload for length, workload in some.items()}
    return workloads


def _targets(request: ForecastRequest, progress: Progress) -> list[Target]:
    """Return the devices to forecast, each with its cluster, host and software."""
    r, own, host = request, own_devices(request.hardware), named_host(request.host)
    software = software_of(r)
    if (
        r.packed and software.attention is None
    ):  # Padding-free collators and TRL's packing use FlashAttention.
        software = replace(software, attention="flash2")
    size = (r.num_gpus, r.nodes, r.network, r.price)
    latency_us = None if r.network_latency is None else 1e6 * r.network_latency
    copies = math.inf if r.host_copy is None else r.host_copy
    fixed = {"`host`": host is not None, "Software": software != TODAY}
    for option in (name for name, given in fixed.items() if given and r.only_cpu):
        raise Misuse(
            f"{option} needs a `gpu`: a machine's profile includes its own host and software."
        )

    def machine(profile: MachineProfile) -> Target:
        links = profile.host_links
        cluster = cluster_with(profile.device, *size, links, latency_us=latency_us)
        return Target(cluster, CalibratedKernels(profile.kernels), copies)

    def card(name: str) -> Target:
        cluster = cluster_with(find_device(name, own), *size, host=host, latency_us=latency_us)
        return Target(cluster, host_copy_gb_per_s=copies, software=software)

    def this_machine() -> Target:
        precision = r.precision or default_precision(r.model, Device(name="cpu", kind="cpu"))
        if form_of(precision) != "fp32":
            raise Misuse(
                f"This machine's CPU can be measured in fp32 only, not in {precision}.",
                "Give `precision` fp32, or a `gpu`.",
            )
        return machine(profile_or_brief(progress))

    targets = [this_machine() if gpu.casefold() == "cpu" else card(gpu) for gpu in r.gpu]
    if r.calibrated:
        from trainpace.measure import MachineProfile

        targets.append(machine(load(r.calibrated, MachineProfile)))
    return targets


def _measurements(path: str) -> list[Measurement]:
    """Read the measurements in a file from `measure --output`."""
    entries = read_json(path)
    entries = entries if isinstance(entries, list) else [entries]
    measurements = [from_json(json.dumps(entry), Measurement, path) for entry in entries]
    if not measurements:
        raise UnreadableInput(f"{path} has no measurements.")
    return measurements


def _measured(
    measurements: Sequence[Measurement], forecaster: Forecaster, own: Sequence[Device]
) -> Measured:
    """Pair measurements of the same model with their forecasts."""
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
                f"A measurement on {m.device} cannot correct a forecast for another machine's CPU."
            )
        else:
            cluster = Cluster(
                device=find_device(m.device, own), nodes=e.nnodes, devices_per_node=e.nproc_per_node
            )
            there = forecaster.on(Target(cluster, software=target.software))
        known.append(observe_elsewhere(m, there))
    sizes = ", ".join(str(m.execution.micro_batch) for m in measurements[:8])
    devices = ", ".join(sorted({seen.run.device for seen in known}))
    return Measured(tuple(known), f"corrected by what was measured on {devices} at batch {sizes}")
