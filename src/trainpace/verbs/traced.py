"""Base class of requests about a model, and the workload of such a request.

The workload is traced now or was saved earlier. Several verbs also use the rest of this module:
forecasts of packed documents, nearby public measurements, and the recording of a workload.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import PRECISIONS, optimizer_called
from trainpace.core.hardware import find_host
from trainpace.core.outcome import Forecast, forecast_row
from trainpace.core.records import Record, save
from trainpace.core.units import format_number
from trainpace.job import DataPath
from trainpace.verbs.request import AT_LEAST_1, DURATION, Argument, Field, Misuse, Progress, Request
from trainpace.workload import (
    AS_IT_IS,
    Adaptation,
    Documents,
    Form,
    Mode,
    ModelSpec,
    Variant,
    Workload,
    load_workload,
    load_workloads,
    nearest_multiple,
)

if TYPE_CHECKING:
    from trainpace.core.execution import Execution
    from trainpace.core.hardware import Device
    from trainpace.forecast import Near, Nearness
    from trainpace.measure import LoaderCost
    from trainpace.watch import Rank, Recording

ModelArgument = Annotated[str, Argument("The model, as in trainpace forecast.", metavar="MODEL")]
Optimizer = Annotated[
    str | None,
    Field(
        "sgd, adamw, lion, muon, ...  [default: the task's own, else adamw for tokens and"
        " diffusion, sgd_momentum for the rest]"
    ),
]
SequenceLength = Annotated[int | None, Field("Tokens per sample, for transformers.", AT_LEAST_1)]
ImageSize = Annotated[int | None, Field("Side in pixels, for image models.", AT_LEAST_1)]
ChannelsLast = Annotated[bool, Field("NHWC tensors (memory_format=torch.channels_last).")]
Model = Annotated[
    str | Workload,
    Argument(
        "A name, FILE.py:FUNCTION, a saved WORKLOAD.json, or in Python a workload.", metavar="MODEL"
    ),
]
PRECISION_HELP = (
    "Number format.  [default: the dtype of a transformers configuration; without one, autocast for"
    " transformers and diffusers, torch's fp32 with TF32 convolutions for the rest]"
)
EVERY_FORM: tuple[Form, ...] = ("fp32", "amp", "half")
"""All number formats (forms) in which a model is traced."""


class TracedRequest(Request):
    """Request about a model. `save_workload` is a file for the workload in all number formats."""

    groups = "Model: optimizer sequence_length precision compile"

    model: Model
    optimizer: Optimizer = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    adapter: Annotated[
        Literal["lora", "dora"] | None,
        Field("Train small adapters beside frozen weights, as peft does."),
    ] = None
    lora_rank: Annotated[
        int | None, Field("Rank of the adapters.  [default: 16]", AT_LEAST_1, needs="adapter")
    ] = None
    lora_targets: Annotated[
        str | None,
        Field(
            "Linear layers that get adapters: q_proj,v_proj, ...  [default: all but the head; in"
            " diffusers, the attention's]",
            needs="adapter",
        ),
    ] = None
    weights: Annotated[
        Literal["nf4", "fp4", "nf4_double", "int8", "gptq"] | None,
        Field(
            "Format of frozen weights, as in bitsandbytes; double: with 8-bit scales too; int8:"
            " LLM.int8(); gptq: 4 bits as in AutoGPTQ.",
            needs="adapter",
        ),
    ] = None
    fp32_weights: Annotated[
        Literal["all", "norms", "none"] | None,
        Field(
            "Which weights that are not quantized stay in fp32: all (as with peft's"
            " prepare_model_for_kbit_training), norms (as in TRL's SFTTrainer in bf16) or none (as"
            " under FSDP).  [default: all; none with gptq]",
            needs="weights",
        ),
    ] = None
    whole_modules: Annotated[
        str | None,
        Field(
            "Modules trained in full beside the adapters (peft's modules_to_save):"
            " embed_tokens,lm_head.",
            needs="adapter",
        ),
    ] = None
    timeout: Annotated[float, Field("Time limit of tracing.", DURATION)] = 300.0
    save_workload: str | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """Number formats to trace."""
        return EVERY_FORM

    @property
    def variant(self) -> Variant:
        mode: Mode = getattr(self, "mode", None) or "train"
        optimizer = None if self.optimizer is None else optimizer_called(self.optimizer)
        return Variant(
            optimizer,
            self.sequence_length,
            self.image_size,
            mode=mode,
            adaptation=adaptation_of(self),
        )

    def resolved(self, workload: Workload) -> Self:
        """Return the request with open options filled in from the workload's own settings.

        This class has no such options. Subclasses override the method.
        """
        return self

    @property
    def recomputes(self) -> bool:
        """True if full activation checkpointing is requested. Subclasses override this."""
        return False

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.model


def adaptation_of(request: TracedRequest) -> Adaptation:
    """Return the adaptation (such as LoRA or quantization) of the model's training."""
    r = request
    if r.adapter is None:
        return AS_IT_IS
    chosen = AS_IT_IS._replace(
        adapter=r.adapter, rank=r.lora_rank or AS_IT_IS.rank, weights=r.weights or ""
    )
    # peft's prepare_model_for_kbit_training does not change GPTQ models.
    usual = "none" if r.weights == "gptq" else AS_IT_IS.fp32_weights
    chosen = chosen._replace(fp32_weights=r.fp32_weights or usual, whole=r.whole_modules or "")
    return chosen._replace(targets=r.lora_targets or AS_IT_IS.targets)


class TraceRequest(TracedRequest):
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None


def workload_of(
    request: TracedRequest,
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
) -> Workload:
    """Return the workload of the request's model.

    Uses the request's forms and variant unless others are given.
    """
    (workload,) = workloads_of(request, (), progress, forms, variant).values()
    return workload


def workloads_of(
    request: TracedRequest,
    lengths: Sequence[int],
    progress: Progress,
    forms: Sequence[Form] | None = None,
    variant: Variant | None = None,
) -> dict[int | None, Workload]:
    """Return the workload of the request's model at each sequence length.

    Without `lengths`, the length is that of the variant. The key None is the model's usual length.

    Raises:
        Misuse: `save_workload` is given, but there are several workloads, or the model is already
            a saved workload.
        Contradiction: A saved workload was traced with settings that differ from the request's.
        TrainpaceError: The model has a fixed length.
    """
    model, variant, timeout_s = request.model, variant or request.variant, request.timeout
    forms = EVERY_FORM if request.save_workload else request.forms if forms is None else forms
    spec = ModelSpec.of(model)
    name = spec.in_words
    if request.save_workload and spec.is_saved:
        raise Misuse(f"`save_workload` needs a model to trace; {name} is already a saved workload.")
    if request.save_workload and len(lengths) > 1:
        raise Misuse(
            "`save_workload` saves the trace of one sequence length; this forecast needs several."
        )

    def found(variant: Variant) -> dict[int | None, Workload]:
        if len(lengths) > 1 or (lengths and not spec.has_fixed_length):
            return dict(load_workloads(model, forms, variant, lengths, timeout_s).items())
        length = lengths[0] if lengths else variant.sequence_length
        at_length = variant._replace(sequence_length=length)
        return {length: load_workload(model, forms, at_length, timeout_s)}

    at = f" at {len(lengths)} lengths" if len(lengths) > 1 else ""
    with progress.work(f"tracing {request.model_name}{at}"):
        workloads = found(variant)
    first = next(iter(workloads.values()))
    if spec.is_saved:
        check_agrees(name, first, request)
    if request.resolved(first).recomputes and not all(map(_can_recompute, workloads.values())):
        if spec.is_saved:
            raise Contradiction(
                f"{name} was traced without activation checkpointing and has no repeated blocks to"
                " recompute.",
                "Give the model instead of the saved workload, to trace it with `checkpointing`.",
            )
        workloads = found(variant._replace(checkpointing=True))
    if request.save_workload:
        save(next(iter(workloads.values())), request.save_workload)
    return workloads


def _can_recompute(workload: Workload) -> bool:
    """Return True if the workload was traced with checkpointing or has repeated blocks.

    Forecasts can add recomputation to repeated blocks. Other models must be traced with
    checkpointing.
    """
    return workload.checkpointed or all(f.blocks is not None for f in workload.forms.values())


def check_agrees(name: str, workload: Workload, request: TracedRequest) -> None:
    """Raise Contradiction if a saved workload was traced with other settings than the request's."""
    traced = {
        "mode": workload.mode,
        "optimizer": workload.optimizer,
        "sequence_length": workload.sequence_length,
        "image_size": workload.image_side,
    }
    adaptation = adaptation_of(request).in_words
    found: list[tuple[str, str, Any]] = [
        (workload.adaptation or "no adapters", adaptation, adaptation)
    ]
    for setting, was in traced.items():
        value = getattr(request, setting, None)
        if isinstance(value, tuple):  # A saved workload has been asked for at most one length.
            value = next(iter(value), None)
        value = optimizer_called(value) if setting == "optimizer" and value else value
        shown = f"none ({workload.sample})" if was is None else was
        found.append((f"`{setting}` {shown}", f"`{setting}` {value}", value))
    for was, wanted, value in found:
        if value and was != wanted:
            raise Contradiction(
                f"{name} was traced with {was}, not with {wanted}.",
                "Leave the option out, or give the model to trace it again.",
            )


PADDED_TO = 32
"""Padded lengths are rounded to a multiple of this number, to limit the number of traces."""
LENGTH_COLUMNS = (
    "length",
    "lengths",
    "tokens",
    "num_tokens",
    "n_tokens",
    "token_count",
    "input_ids",
)
COUNT_COLUMNS = ("count", "counts", "documents", "n")


class PaddedBatch(Record):
    """A packed forecast, compared with a padded batch of about as many documents.

    Attributes:
        documents: Documents in the padded micro-batch of one GPU.
        length: Tokens to which the documents are padded.
        padding: Share of padding tokens in the padded batch.
        packed_padding: Share of padding tokens in packed rows.
        packed_tokens: Tokens of documents, without padding, in the packed micro-batch of one GPU.
        padded_tokens: The same for the padded micro-batch. It differs from `packed_tokens`, because
            a padded batch holds whole documents.
        packed: Forecast of packed rows.
        padded: Forecast of the padded batch.
    """

    documents: int
    length: int
    padding: float
    packed_padding: float
    packed_tokens: float
    padded_tokens: float
    packed: Forecast
    padded: Forecast

    @property
    def saved(self) -> float | None:
        """Share of the time per document token that packing saves. Negative if it costs time."""
        if self.packed.step is None or self.padded.step is None:
            return None
        packed_ms, padded_ms = (
            self.packed.step.total_ms / self.packed_tokens,
            self.padded.step.total_ms / self.padded_tokens,
        )
        return 1.0 - packed_ms / padded_ms

    @property
    def packed_rate(self) -> float | None:
        """Document tokens per second with packed rows, over all devices."""
        return _document_rate(self.packed, self.packed_tokens)

    @property
    def padded_rate(self) -> float | None:
        """Document tokens per second with padded batches, over all devices."""
        return _document_rate(self.padded, self.padded_tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "length": self.length,
            "padding": self.padding,
            "packed_padding": self.packed_padding,
            "packed_document_tokens": self.packed_tokens,
            "padded_document_tokens": self.padded_tokens,
            "saved": self.saved,
            "packed_document_tokens_per_second": self.packed_rate,
            "padded_document_tokens_per_second": self.padded_rate,
            "padded": forecast_row(self.padded),
        }


def _document_rate(forecast: Forecast, document_tokens: float) -> float | None:
    if forecast.step is None:
        return None
    e = forecast.execution
    return 1e3 * document_tokens * e.accumulation * e.data_parallel_size / forecast.step.total_ms


def documents_of(request: Any) -> Documents | None:
    """Return the documents to pack, or None if packing is off."""
    r = request
    if not r.packed:
        return None
    if r.attention == "eager":
        raise Contradiction(
            "Eager attention has no kernel for packed rows.",
            "Leave --attention out, or use flash2.",
        )
    if r.mean_length is not None:
        return Documents.with_mean(r.mean_length)
    assert r.lengths is not None
    return Documents.of(_lengths_in(Path(r.lengths)), f"the lengths in {Path(r.lengths).name}")


def padded_batch(documents: Documents, row: int, batch: int) -> tuple[int, int]:
    """Return (documents, length) of a padded batch.

    It has about as many documents as `batch` packed rows.
    """
    n = max(1, round(batch * documents.packed(row).documents))
    return n, min(nearest_multiple(documents.longest_of(n, row), PADDED_TO), row)


def compared(documents: Documents, packed: Forecast, padded: Forecast) -> PaddedBatch:
    row, length, n = packed.sequence_length, padded.sequence_length, padded.execution.micro_batch
    assert row is not None
    assert length is not None
    packed_row, padded_tokens = documents.packed(row), n * documents.mean_up_to(row)
    return PaddedBatch(
        documents=n,
        length=length,
        padding=max(0.0, 1.0 - padded_tokens / (n * length)),
        packed_padding=1.0 - packed_row.fill,
        packed_tokens=packed.execution.micro_batch * row * packed_row.fill,
        padded_tokens=padded_tokens,
        packed=packed,
        padded=padded,
    )


def _lengths_in(path: Path) -> Counter[int]:
    """Count the token counts in a file. Raises UnreadableInput if there are none."""
    from trainpace.forecast import read_table  # Imported late: most forecasts read no table.

    columns, rows = read_table(path)
    by_name = {column.strip().casefold(): column for column in columns}
    lengths, counts = (
        next((by_name[name] for name in names if name in by_name), None)
        for names in (LENGTH_COLUMNS, COUNT_COLUMNS)
    )
    found: Counter[int] = Counter()
    if lengths is None:  # A text file of numbers has no header, so its first line is a number.
        if len(columns) != 1 or not _is_count(columns[0]):
            raise UnreadableInput(
                f"{path} has no column of token counts: {', '.join(columns[:8]) or 'it is empty'}.",
                f"Name it {', '.join(LENGTH_COLUMNS)}, or give one number per line.",
            )
        (lengths,) = columns
        found[int(float(lengths))] += 1
    for number, row in enumerate(rows, 2):
        times = 1 if counts is None else _count(path, number, row.get(counts))
        found[_count(path, number, row.get(lengths))] += times
    if not any(length > 0 and times > 0 for length, times in found.items()):
        raise UnreadableInput(f"{path} has no token count above 0.")
    return found


def _is_count(value: Any) -> bool:
    try:
        return 0 <= float(value) < 1e12 and float(value) == int(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _count(path: Path, row: int, value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    if value is None:
        raise UnreadableInput(
            f"{path}, row {row}: a value is missing.", "Give every row a value for each column."
        )
    if not _is_count(value):
        raise UnreadableInput(f"{path}, row {row}: {str(value)[:40]!r} is not a count of tokens.")
    return int(float(value))


Evidence = Annotated[
    Literal["nearest", "none"],
    Field("Public measurements to show beside the forecast: the nearest ones, or none."),
]
MOST_DEVICES = 3
"""Maximum number of devices with measurements. More would make the list longer than the answer."""
RUNS_FOR_ONE_DEVICE = 3
"""Measurements to show for a single device. With several devices, each shows the nearest one."""

Asked = tuple["Workload", "Execution", "Device"]


def evidence_for(
    wanted: Literal["nearest", "none"], asked: Iterable[Asked]
) -> tuple[Nearness, ...]:
    """Return the nearest public measurements for each GPU. CPUs have none."""
    if wanted == "none":
        return ()
    of_gpus = [
        (workload, execution, device)
        for workload, execution, device in asked
        if device.kind == "gpu"
    ]
    if not of_gpus:
        return ()
    from trainpace.forecast import nearest

    most = RUNS_FOR_ONE_DEVICE if len(of_gpus) == 1 else 1
    return tuple(nearest(*one, most=most) for one in of_gpus[:MOST_DEVICES])


def evidence_json(evidence: Sequence[Nearness]) -> list[dict[str, Any]]:
    """Return the `evidence` entry of JSON answers: runs with sources, distances and differences."""
    return [
        {
            "model": nearness.model,
            "gpu": nearness.device,
            "batch": nearness.batch,
            "nearest": [_near_json(near) for near in nearness.runs],
            "none_near": not nearness.runs,
            "closest": (
                None if nearness.closest is None or nearness.runs else _near_json(nearness.closest)
            ),
        }
        for nearness in evidence
    ]


def _near_json(near: Near) -> dict[str, Any]:
    run = msgspec.to_builtins(near.run)
    error = near.run.error_pct
    return {
        **run,
        "error_pct": None if error is None else round(error, 2),
        "samples_per_second": near.run.samples_per_second,
        "distance": near.distance,
        "alike": list(near.alike),
        "unlike": list(near.unlike),
    }


FEW_STEPS = 10
"""Minimum number of recorded steps for reliable times."""


def recording_of(model: str | Workload) -> Recording | None:
    """Return the recording next to a saved workload. None if there is no readable one."""
    spec = ModelSpec.of(model)
    if not (spec.is_saved and spec.path):
        return None
    from trainpace.watch import COMMAND_FILE, read_recording

    folder = Path(spec.path).parent
    if not (folder / COMMAND_FILE).is_file():
        return None
    try:
        recording = read_recording(folder)
    except TrainpaceError:
        return None
    return recording if recording.ranks else None


HOST_CAUSES = ("logging", "checkpoint", "evaluation", "own_code")
"""Causes in a diagnosis that the host of another machine works on as well."""


class HostWork(NamedTuple):
    """Work of a training script on the host of one rank, apart from launching operators.

    Attributes:
        cost: Time to load a batch on a free core. None without a loader.
        samples: Samples of such a batch, as the model counts them.
        workers: Loader workers of a rank. None means one per core.
        own_ms: Time per update in the script's own code, logging, evaluation, checkpoints and
            starts of loader workers.
        points: Single-thread rating of the recording's CPU. None if it is unknown.
    """

    cost: LoaderCost | None
    samples: int
    workers: int | None
    own_ms: float = 0.0
    points: float | None = None

    def on(
        self,
        cores: float | None,
        points: float | None,
        workers: int | None = None,
        online: float = 1.0,
    ) -> DataPath:
        """Return the same work on another machine.

        Args:
            cores: Cores per rank. If unknown, every loader worker has a core of its own. If the
                number of workers is unknown too, loading takes no time.
            points: Single-thread rating of the CPU. None for the recording's own machine.
            workers: Loader workers per rank, in place of the script's own number.
            online: Share of a sample's preparation that is not done offline.
        """
        from trainpace.measure import batch_ms

        workers = self.workers if workers is None else workers
        ms, loads = 0.0, self.cost is not None
        if workers is None:
            workers, loads = max(1, int(cores or 1)), loads and cores is not None
        if self.cost is not None and loads:
            wall_ms, cpu_ms = online * self.cost.sample_wall_ms, online * self.cost.sample_cpu_ms
            cost = replace(self.cost, sample_wall_ms=wall_ms, sample_cpu_ms=cpu_ms)
            ms = batch_ms(cost, workers, cores or math.inf) / self.samples
        path = DataPath(
            workers=workers,
            ms_per_sample=ms,
            beside=workers > 0,
            precomputed=online < 1,
            own_ms=self.own_ms,
        )
        return path.slower(self.points / points if self.points and points else 1.0)

    def in_words(self, cores: str, workers: int | None = None) -> str:
        """Return a clause that names the host's work in a step, its cores and their speed."""
        workers = self.workers if workers is None else workers
        parts = []
        if self.own_ms:
            own = format_number(self.own_ms)
            parts.append(f"own code, logging, evaluation and checkpoints ({own} ms)")
        if self.cost is not None:
            each = self.cost.sample_wall_ms + self.cost.collate_ms / self.cost.batch_size
            many = {None: "one worker per core", 0: "no workers", 1: "1 worker per GPU"}
            named = many.get(workers, f"{workers} workers per GPU")
            parts.append(f"loading ({named}, {format_number(each)} ms per sample)")
        speed = "the CPU's speed" if self.points else "cores as fast as the recording's"
        included = " and ".join(parts) or "no work of the host"
        return f"step times include {included}, on {cores} and with {speed}"


def host_work_of(recording: Recording, workload: Workload) -> HostWork:
    """Return the host's work in a recorded script, by its first rank."""
    from trainpace.diagnose import diagnose

    rank, cost = recording.ranks[0], _cost_on_a_free_core(recording)
    own_ms = math.fsum(s.ms for s in diagnose(recording).shares if s.cause in HOST_CAUSES)
    return HostWork(
        cost=cost,
        # The model and the loader may count samples differently.
        samples=workload.only_batch or (cost.batch_size if cost else 1),
        workers=rank.loader.workers if rank.loader else 0,
        own_ms=own_ms + rank.parts_ms["loader_start"],
        points=_points_of(rank.cpu),
    )


def _cost_on_a_free_core(recording: Recording) -> LoaderCost | None:
    """Return the cost of loading a batch without waits for the recording's cores.

    Waits for storage count. A recording of workers on shared cores does not tell the two apart, so
    only processor time counts then.
    """
    from trainpace.diagnose import HANDOVER_MS, SEND_MS, loader_cost
    from trainpace.watch import DELAYED

    rank, cost = recording.ranks[0], loader_cost(recording.ranks[0])
    if cost is None or rank.fetch is None:
        return None
    many = rank.loader is not None and rank.loader.workers > rank.cpus
    shared = bool(recording.busy) or many or rank.delayed_share >= DELAYED
    wall_ms = cost.sample_cpu_ms if shared and rank.fetch.in_workers else cost.sample_wall_ms
    return replace(cost, sample_wall_ms=wall_ms, send_ms=SEND_MS, handover_ms=HANDOVER_MS)


def _points_of(cpu: str) -> float | None:
    """Return the single-thread rating of a CPU, or None if it is unknown."""
    with contextlib.suppress(UnknownName):
        return find_host(cpu).single_thread.value
    return None


def host_work(
    recording: Recording | None, workload: Workload, loader_rate: float | None
) -> HostWork | None:
    """Return the host's work, or None if nothing is known about it.

    `loader_rate` is the number of samples per second that one core prepares. It replaces the
    recorded cost of loading.
    """
    work = None if recording is None else host_work_of(recording, workload)
    if loader_rate is None:
        return work
    from trainpace.measure import LoaderCost

    ms = 1000 / loader_rate
    cost = LoaderCost(sample_wall_ms=ms, sample_cpu_ms=ms, collate_ms=0.0, batch_size=1)
    return HostWork(cost, 1, None) if work is None else work._replace(cost=cost, samples=1)


def as_recorded(workload: Workload, recording: Recording | None) -> Workload:
    """Return the workload with the recording's batch and number format as its own settings."""
    if recording is None:
        return workload
    return replace(
        workload, settings={**recorded_settings(recording.ranks[0]), **workload.settings}
    )


def recorded_settings(rank: Rank) -> dict[str, Any]:
    """Return the micro-batch, accumulation and precision of a recorded rank, as far as known."""
    from trainpace.watch import batches_per_step

    batches = batches_per_step(rank)
    settings: dict[str, Any] = {"accumulation": max(1, round(batches))}
    if size := round(rank.samples_per_step / batches) or rank.model_batch:
        settings["micro_batch"] = size
    if rank.number_format in PRECISIONS:
        settings["precision"] = rank.number_format
    return settings


def recorded_batch(recording: Recording, only: int | None) -> int:
    """Return the samples per step over all ranks, or 0 if unknown.

    They come from the only batch that the model was traced with, from the loaders, or else from the
    model's input.
    """
    from trainpace.watch import batches_per_step

    ranks = recording.ranks
    if only is not None:  # The model and the loader may count batches differently.
        return only * max(1, round(batches_per_step(ranks[0]))) * ranks[0].world_size
    loaded = sum(round(rank.samples_per_step) for rank in ranks)
    micro_steps = max(1.0, ranks[0].micro_steps)
    return loaded or round(ranks[0].model_batch * micro_steps) * ranks[0].world_size


def recorded_samples(recording: Recording | None, only: int | None) -> int | None:
    """Return the samples of a recorded epoch, or None if unknown.

    `only` is the only batch that the model was traced with.
    """
    from trainpace.watch import steps_per_epoch

    if recording is None:
        return None
    steps = steps_per_epoch(recording.ranks[0]) or 0.0
    return round(steps * recorded_batch(recording, only)) or None


def caveats(recording: Recording) -> tuple[str, ...]:
    """Return reasons why the recording's times may be misleading, as clauses."""
    first = recording.ranks[0]
    found = []
    if recording.busy:
        found.append(f"while the script was recorded, {recording.busy.rstrip('.')}")
    if first.steps < FEW_STEPS:
        found.append(f"the recording has only {first.steps} steps, so its times are rough")
    if not first.accelerator:
        found.append(
            "the script was recorded on a CPU, so only its loading and its own code are used, not"
            " the time of its model"
        )
    return tuple(found)


def recorded_notes(recording: Recording | None, *work: str) -> tuple[str, ...]:
    """Return sentences: the clauses about the host's work, then the caveats of a recording."""
    clauses = (*work, *(() if recording is None else caveats(recording)))
    return tuple(f"{clause[:1].upper()}{clause[1:]}." for clause in clauses)
