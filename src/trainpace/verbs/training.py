"""Requests about a model's whole training, and about how its steps are executed.

Options that set a field of `Execution` take their type, default and help from it. `EXECUTED_AS` and
`EXECUTION_OPTIONS` hold the differences.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import defstruct
from msgspec.structs import replace

from trainpace.core.errors import Contradiction
from trainpace.core.execution import EXECUTION_FIELDS, Execution, Precision
from trainpace.core.hardware import Cluster, Device, HostCPU, HostLinks
from trainpace.core.software import (
    ATTENTIONS,
    TODAY,
    CrossEntropy,
    Fp8Recipe,
    OptimizerImplementation,
    Software,
    parse_attention,
    parse_software,
)
from trainpace.core.units import hours_from_s
from trainpace.job import JobConditions, Schedule, accumulation_for_global_batch, stated_conditions
from trainpace.verbs.request import (
    ABOVE_0_S,
    AT_LEAST_1,
    BATCHES,
    BYTES,
    COUNT,
    DEVICES,
    DURATION,
    EPOCHS,
    GB_PER_S,
    LOAD,
    MOST_DEVICES,
    Field,
    Misuse,
    Request,
    Unit,
    fields_of,
    within,
)
from trainpace.verbs.traced import PRECISION_HELP, TracedRequest
from trainpace.workload import Form, ModelSpec, Workload, form_of, stored_precision


def _software_name(text: str) -> str:
    parse_software(text)
    return text


SOFTWARE = Unit("software", _software_name)
ATTENTION = Unit("kernels", parse_attention)
LENGTH = "epochs|max_steps|config|command|watched"
"""Options of any verb that can give the length of a training."""
Network = Annotated[
    float | None, Field("Bandwidth of a node in GB/s: 50 for 400 Gbit/s.", GB_PER_S)
]
Tokens = Annotated[
    int | None,
    Field("Tokens per epoch, such as 300B.", AT_LEAST_1, needs=LENGTH, excludes="samples"),
]
MaxSteps = Annotated[
    int | None, Field("Optimizer updates, in place of `epochs`.", AT_LEAST_1, excludes="epochs")
]
GlobalBatch = Annotated[
    int | None, Field("Samples per update over all GPUs, in place of `accumulate`.", AT_LEAST_1)
]
USUAL_BATCH = 32
"""Default samples per GPU."""
USUAL_GLOBAL_BATCH = 8 * USUAL_BATCH
"""Default samples per update for servers of several sizes. Equal to `USUAL_BATCH` per GPU on a
server with eight GPUs.
"""


class SoftwareRequest(TracedRequest):
    """Request with options for software versions and kernels."""

    software: Annotated[
        str | None,
        Field(
            "Framework and version: torch2.8, torch1.9, tensorflow2.4, keras, jax."
            "  [default: today's PyTorch]",
            SOFTWARE,
            metavar="NAME",
        ),
    ] = None
    attention: Annotated[
        str | None,
        Field(
            f"Attention kernels: {', '.join(ATTENTIONS)}.  [default: the software's choice on the"
            " card]",
            ATTENTION,
            metavar="KERNELS",
        ),
    ] = None
    optimizer_implementation: Annotated[
        OptimizerImplementation | None,
        Field("Optimizer kernels: fused, several tensors per kernel, or one.  [default: foreach]"),
    ] = None
    cross_entropy: Annotated[
        CrossEntropy | None,
        Field(
            "Implementation of cross-entropy: fused; fused_fp32 or chunked, as Liger has them in"
            " transformers; uncompiled, outside torch.compile.  [default: plain]"
        ),
    ] = None
    fp8_recipe: Annotated[
        Fp8Recipe | None,
        Field(
            "What shares a scale in FP8.  [default: per_tensor]",
            needs="precision=fp8|allow_fp8|config|command|watched",
        ),
    ] = None


class TrainingRequest(SoftwareRequest):
    """Request about a whole training: its length, checkpoints, failures and data."""

    groups = "Training length: epochs max_steps samples tokens; Batch: global_batch"

    epochs: Annotated[
        float | None, Field("Passes over the data.", EPOCHS, needs="samples|tokens|watched")
    ] = None
    startup: Annotated[
        float | None,
        Field(
            "Time until the first step.  [default: 60s, assumed]",
            DURATION,
            needs=LENGTH,
            sets="startup_s",
        ),
    ] = None
    evaluation_samples: Annotated[
        int, Field("Samples evaluated after every epoch.", COUNT, needs=LENGTH)
    ] = 0
    checkpoint_every: Annotated[
        float | None,
        Field(
            "Time between checkpoints.  [default: the one that loses the least time]",
            ABOVE_0_S,
            needs=LENGTH,
            sets="checkpoint_every_s",
        ),
    ] = None
    mtbf: Annotated[
        float | None,
        Field(
            "Mean time between failures of one GPU.  [default: 50000h, arXiv:2407.21783]",
            ABOVE_0_S,
            needs=LENGTH,
            sets="device_mtbf_h",
        ),
    ] = None
    step_variation: Annotated[
        float,
        Field("Relative deviation of a node's step: 0.03.", within("share", 0, 10), needs=LENGTH),
    ] = 0.0
    data_gb: Annotated[
        float, Field("Data to copy to the servers first.", within("GB", 0, 1e9), needs=LENGTH)
    ] = 0.0
    download: Annotated[
        float | None,
        Field(
            "Download speed for --data-gb.  [default: 0.125, assumed]",
            GB_PER_S,
            needs=LENGTH,
            sets="download_gb_per_s",
        ),
    ] = None
    sample_bytes: Annotated[
        int,
        Field("Bytes read per sample; slow storage then shows as data wait.", BYTES, needs=LENGTH),
    ] = 0
    storage: Annotated[
        float | None,
        Field(
            "Speed of shared storage (checkpoints, samples).  [default: 1, assumed]",
            GB_PER_S,
            needs=LENGTH,
            sets="storage_gb_per_s",
        ),
    ] = None

    def conditions(self, **more: Any) -> JobConditions:
        """Return the conditions of the training besides its steps. Open values are assumed."""
        return stated_conditions(
            {
                "startup_s": self.startup,
                "evaluation_samples": self.evaluation_samples,
                "data_gb": self.data_gb,
                "checkpoint_every_s": self.checkpoint_every,
                "step_variation": self.step_variation,
                "device_mtbf_h": None if self.mtbf is None else hours_from_s(self.mtbf),
                "download_gb_per_s": self.download,
                "sample_bytes": float(self.sample_bytes),
                "storage_gb_per_s": self.storage,
                **more,
            }
        )


EXECUTED_AS = {
    "num_gpus": "nproc_per_node",
    "gpus": "nproc_per_node",
    "nodes": "nnodes",
    "batch": "micro_batch",
    "accumulate": "accumulation",
    "zero": "zero_stage",
    "keep_gathered": "reshard_after_forward",
    "offload": "offload_optimizer",
    "checkpointing": "activation_checkpointing",
    "async_tp": "async_tensor_parallel",
    "pipeline": "pipeline_schedule",
}
"""Options that are named differently from the field of `Execution` that they set."""
EXECUTION_OPTIONS: dict[str, dict[str, Any]] = {
    "num_gpus": {"unit": DEVICES},
    "nodes": {"unit": DEVICES},
    "accumulate": {
        "default": None,
        "help": "Micro-batches per update.  [default: the task's, or 1]",
    },
    "precision": {"default": None, "help": PRECISION_HELP},
    "channels_last": {},
    "compile": {},
    "tp": {},
    "pp": {},
    "cp": {},
    "sequence_parallel": {"needs": "tp"},
    "partition_activations": {"needs": "tp checkpointing=full"},
    "async_tp": {"needs": "tp"},
    "clip_gradients": {},
    "pure_16_bit": {"needs": "zero|tp|pp"},
    "pipeline": {},
    "virtual_stages": {},
    "ep": {},
    "expert_tp": {"needs": "ep"},
    "expert_exchange": {"needs": "ep"},
    "expert_nodes": {"needs": "ep expert_exchange"},
    "expert_load": {"unit": LOAD, "needs": "ep"},
    "engine": {"needs": "num_gpus|nodes"},
    "zero": {},
    "shard_size": {"needs": "zero"},
    "keep_gathered": {
        "default": False,
        "help": "Keep gathered parameters until the backward pass (FSDP without resharding).",
        "needs": "zero=3",
    },
    "offload": {
        "kind": Literal["none", "optimizer", "parameters", "both"],
        "default": "none",
        "help": "Part of the training state that is kept in host memory.",
        "sets": "offload_optimizer offload_parameters",
    },
    "checkpointing": {"default": None, "alone": "full"},
}
"""Options for fields of `Execution`, with overrides of the field's type, default, unit or help.
"""
OWN_FLAGS = ("clip_gradients", "compile")
"""Flags of `Execution` that a task sets itself. No request turns them off."""
_KINDS: dict[str, Any] = {"count": int, "optional count": int, "number": float, "flag": bool}


def _execution_option(name: str, now: bool) -> tuple[str, Any, Any]:
    field = EXECUTION_FIELDS[EXECUTED_AS.get(name, name)]
    about = {"help": field.help, "default": field.default, "sets": field.name}
    about |= EXECUTION_OPTIONS.get(name, {})
    if "count" in field.kind:
        about.setdefault("unit", AT_LEAST_1)
    kind, default = about.pop("kind", None), about.pop("default")
    kind = kind or _KINDS.get(field.kind) or Literal[field.choices]
    if now:
        about |= {"needs": "", "alone": None}
        default = default if kind is bool else None
    kind = kind if default is not None else kind | None
    return name, Annotated[kind, Field(**about)], default


def with_execution(name: str, options: Iterable[str], now: bool = False) -> type[Request]:
    """Create a subclass of `TrainingRequest` with options for `Execution`.

    Args:
        name: Name of the class.
        options: Option names.
        now: True if the options describe the current training. All except flags then default to
            None.
    """
    fields = [_execution_option(option, now) for option in options]
    kind = defstruct(name, fields, bases=(TrainingRequest,), module=__name__)
    assert issubclass(kind, Request)
    return kind


if TYPE_CHECKING:
    from trainpace.forecast import Forecaster

    class ExecutionRequest(TrainingRequest):
        def __getattr__(self, name: str) -> Any: ...

else:
    ExecutionRequest = with_execution("ExecutionRequest", EXECUTION_OPTIONS)


class ExecutedRequest(ExecutionRequest):
    """Request with all options for the execution of a training's steps."""

    groups = (
        "GPUs: num_gpus nodes network; "
        "Batch: batch accumulate; "
        "Parallelism and memory: tp pp zero checkpointing"
    )

    network: Network = None
    network_latency: Annotated[
        float | None,
        Field(
            "Latency of one small message between two nodes.  [default: 2.5us, InfiniBand's]",
            ABOVE_0_S,
            needs="nodes",
        ),
    ] = None
    host_copy: Annotated[
        float | None,
        Field(
            "Speed of copying each micro-batch to the GPU if the step waits for it.  [default:"
            " hidden]",
            GB_PER_S,
        ),
    ] = None
    batch: Annotated[
        tuple[int, ...] | None,
        Field(
            "Samples per GPU: 32, or 1:70, or 8,16,32.  [default: the task's, or 32]",
            BATCHES,
            sets="micro_batch",
        ),
    ] = None
    global_batch: GlobalBatch = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch:
            self._batches(USUAL_BATCH, 1)
        known = {n: value for n, value in _execution_fields(self).items() if value is not None}
        Execution(**{**known, "micro_batch": 1})  # Raises if the sizes contradict each other.

    @property
    def recomputes(self) -> bool:
        return bool(self.checkpointing == "full")

    def resolved(self, workload: Workload) -> Self:
        """Fill open options from the task's own settings, or else from defaults."""
        own: Mapping[str, Any] = workload.settings
        batch, accumulate = self._batches(
            own.get("micro_batch", USUAL_BATCH), own.get("accumulation", 1)
        )
        return replace(
            self,
            batch=batch,
            accumulate=accumulate,
            precision=self.precision or own.get("precision"),
            checkpointing=self.checkpointing or own.get("activation_checkpointing", "none"),
            compile=self.compile or own.get("compile", False),
        )

    def _batches(self, own_batch: int, own_accumulation: int) -> tuple[tuple[int, ...], int]:
        """Return (batch sizes per GPU, micro-batches per update).

        With a global batch, each GPU uses its usual batch, or the largest smaller one that divides
        its share. `default_setup` makes it smaller still if it does not fit.

        Raises:
            Misuse: The numbers contradict each other.
        """
        if self.global_batch is None:
            return self.batch or (own_batch,), self.accumulate or own_accumulation
        ranks = self.num_gpus * self.nodes // (self.tp * self.pp * self.cp) or 1
        batches = self.batch or (own_batch,)
        if self.batch is None and self.global_batch % ranks == 0:
            share = self.global_batch // ranks
            most = share // self.accumulate if self.accumulate else own_batch
            batches = (batch_dividing(share, most),)
        if len(batches) > 1:
            raise Misuse(
                "`global_batch` needs a single `batch`; several batch sizes would each need another"
                " accumulation."
            )
        needed = accumulation_for_global_batch(self.global_batch, batches[0], ranks)
        if self.accumulate not in (None, needed):
            raise Misuse(
                f"`global_batch` {self.global_batch:,} is not `batch` {batches[0]:,} x `accumulate`"
                f" {self.accumulate:,} x {ranks:,} data-parallel GPUs.",
                "Leave one of them out.",
            )
        return batches, needed


def epoch_of(
    samples: int | None, tokens: int | None, length: int | None, workload: Workload, **more: Any
) -> Schedule:
    """Return a schedule with the epoch's size in samples or tokens.

    The sequence length is `length`, or else the workload's own.

    Raises:
        Misuse: Tokens were given for a model that does not read token sequences.
    """
    length = length or workload.sequence_length
    if tokens is not None and length is None:
        raise Misuse(
            f"`tokens` needs a model that reads token sequences; {workload.model} does not.",
            "Give `samples`.",
        )
    return Schedule(
        samples=samples,
        tokens=tokens,
        sequence_length=length if tokens is not None else None,
        **more,
    )


def execution_values(request: Request, workload: Workload) -> dict[str, Any]:
    """Return the fields of `Execution` that a request sets.

    A workload that was traced with recomputation keeps it. The task's own flags stay set.
    """
    values = _execution_fields(request)
    if workload.checkpointed:
        values["activation_checkpointing"] = "full"
    values |= {name: True for name in OWN_FLAGS if workload.settings.get(name)}
    return values | runs_anyway(software_of(request))


def _execution_fields(request: Request) -> dict[str, Any]:
    settings = {EXECUTED_AS.get(name, name): name for name in fields_of(type(request))}
    values = {
        field: getattr(request, name)
        for field, name in settings.items()
        if field in EXECUTION_FIELDS and field != "optimizer"
    }
    if "reshard_after_forward" in values:  # `keep_gathered` is its opposite.
        values["reshard_after_forward"] = not values["reshard_after_forward"]
    if (offload := values.pop("offload_optimizer", None)) is not None:
        values["offload_optimizer"] = offload in ("optimizer", "both")
        values["offload_parameters"] = offload in ("parameters", "both")
    return values


AUTOCAST: tuple[Precision, ...] = ("amp_bf16", "amp_fp16")


def default_precisions(model: str | Workload) -> tuple[Precision, ...]:
    """Return the precisions that a training on GPUs has if none is given.

    It is the one of the task's own trainer, or the dtype in the model's configuration. Other models
    of transformers and diffusers are trained under autocast, in the 16-bit format that the card
    computes fastest. Returns () for fp32 as torch computes it on the card.
    """
    stored = stored_precision(model)
    if isinstance(model, Workload):
        stored, model = model.settings.get("precision"), model.model  # type: ignore[assignment]
    if stored is not None:
        return (stored,)
    return AUTOCAST if ModelSpec.of(model).is_hugging_face else ()


def default_precision(model: str | Workload, device: Device) -> Precision:
    """Return the precision on a device if none is given."""
    precisions = default_precisions(model)
    if len(precisions) == 1:
        return precisions[0]
    return (
        device.autocast_precision if precisions and device.kind == "gpu" else device.torch_precision
    )


def default_forms(
    model: str | Workload, precisions: Sequence[Precision], gpu: bool = True, cpu: bool = False
) -> tuple[Form, ...]:
    """Return the forms to trace for the given precisions, or else for the default ones.

    Args:
        model: The model.
        precisions: The given precisions.
        gpu: True if the model is forecast on GPUs.
        cpu: True if the model is forecast on the CPU of a calibrated machine.

    Returns:
        The forms, or () if the task's own trainer may choose the precision.
    """
    named = tuple(precisions) or default_precisions(model)
    if not named and ModelSpec.of(model).runs_code:
        return ()
    if len(named) > 1 and not precisions:
        wanted: dict[Form, bool] = {"amp": gpu, "fp32": cpu}
        return tuple(form for form, is_wanted in wanted.items() if is_wanted)
    return tuple(dict.fromkeys(form_of(precision) for precision in named or ("fp32",)))


def default_setup(
    forecaster: "Forecaster", start: Execution, recompute: bool, same_global_batch: bool = False
) -> Execution:
    """Return the execution with the largest micro-batch that fits, up to its own.

    Args:
        forecaster: Forecaster on the target.
        start: Execution with the largest micro-batch to try.
        recompute: True to recompute activations if not even one sample fits.
        same_global_batch: True to keep the global batch by gradient accumulation.
    """
    only = forecaster.workload.only_batch
    share = start.micro_batch * start.accumulation if same_global_batch else 0
    sizes = [only] if only else [n for n in range(start.micro_batch, 0, -1) if share % n == 0]
    ways = [start]
    if recompute and forecaster.workload.form(start.precision).blocks is not None:
        ways.append(replace(start, activation_checkpointing="full"))
    execution = start
    for way, size in product(ways, sizes):
        n = share // size or start.accumulation
        execution = replace(way, micro_batch=size, accumulation=n)
        largest = forecaster.largest_micro_batch(execution)
        if largest is None or largest >= size:
            break
    return execution


def assumed_setup(autocast: bool, batch: bool, recompute: bool) -> tuple[str, ...]:
    """Return the settings that were chosen because the user gave none, in words."""
    parts = {
        "autocast (--precision)": autocast,
        f"the largest batch that fits, up to {USUAL_BATCH} (--batch)": batch,
        "full checkpointing where one sample needs it (--checkpointing)": recompute,
    }
    return tuple(part for part, is_assumed in parts.items() if is_assumed)


def batch_dividing(share: int, most: int) -> int:
    """Return the largest micro-batch up to `most` that divides a GPU's share of a global batch."""
    return max(n for n in range(1, max(1, min(most, share)) + 1) if share % n == 0)


def execution_of(request: ExecutedRequest, workload: Workload, device: Device) -> Execution:
    """Return the execution of a resolved request."""
    values = execution_values(request, workload)
    values["precision"] = request.precision or default_precision(workload, device)
    assert request.batch is not None, "the request must be resolved first"
    values["micro_batch"] = request.batch[0]
    return Execution(optimizer=workload.optimizer, **values)


def check_pure_16_bit(request: ExecutedRequest) -> None:
    precisions = (request.precision,) if request.precision else default_precisions(request.model)
    if request.pure_16_bit and form_of(next(iter(precisions), "fp32")) != "half":
        raise Misuse("`pure_16_bit` needs `precision` bf16 or fp16.")


def cluster_with(
    device: Device,
    num_gpus: int,
    nodes: int,
    network: float | None,
    price: float | None,
    links: HostLinks | None = None,
    host: HostCPU | None = None,
    latency_us: float | None = None,
) -> Cluster:
    """Return a cluster of identical nodes.

    Args:
        device: GPU or CPU of the nodes.
        num_gpus: Devices per node.
        nodes: Number of nodes.
        network: Bandwidth of a node in GB/s, shared by its GPUs.
        price: Dollars per GPU and hour.
        links: Links of a calibrated machine. They can replace `network`.
        host: CPU of a node, if known.
        latency_us: Latency of a small message between two nodes.

    Raises:
        Misuse: The size is out of range, or several nodes have no network.
    """
    if num_gpus < 1 or nodes < 1:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} is out of range: give at least 1 of each."
        )
    if num_gpus * nodes > MOST_DEVICES:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} is out of range: up to {MOST_DEVICES:,}"
            " GPUs in all."
        )
    if nodes > 1 and network is None and links is None:
        raise Misuse(
            f"The network between {nodes} nodes is unknown.",
            "Give `network` in GB/s per node; 1 Gbit/s Ethernet is 0.125.",
        )
    return Cluster(
        device=device,
        devices_per_node=num_gpus,
        nodes=nodes,
        price_usd_per_device_hour=price,
        host_links=links,
        host=host,
        network_gb_per_s_per_device=None if network is None else network / num_gpus,
        network_latency_us=latency_us,
    )


def software_of(request: Request) -> Software:
    """Return the software of a request that has some of these fields.

    Raises:
        Contradiction: torch.compile was requested with torch older than 2.0.
    """
    fields = {
        "attention": "attention",
        "optimizer": "optimizer_implementation",
        "cross_entropy": "cross_entropy",
        "fp8_recipe": "fp8_recipe",
    }
    given: dict[str, Any] = {
        name: value for name, field in fields.items() if (value := getattr(request, field, None))
    }
    name: str | None = getattr(request, "software", None)
    software = replace(parse_software(name) if name else TODAY, **given)
    if software.is_before_fusion and getattr(request, "compile", False):
        raise Contradiction(
            f"torch.compile needs torch 2.0 or later; `software` is {name}.",
            "Leave one of them out.",
        )
    return software


def runs_anyway(software: Software) -> dict[str, bool]:
    """Return the fields of `Execution` that some software enables by itself."""
    settings = {"compile": software.compiles, "channels_last": software.channels_last}
    return {name: True for name, on in settings.items() if on}
