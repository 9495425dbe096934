"""Requests about a model, its whole training, and how its steps are executed; and the model's workload, traced or saved."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec.structs import replace

from trainpace.errors import Contradiction
from trainpace.execution import (
    EXECUTION_FIELDS,
    Checkpointing,
    Engine,
    Execution,
    ExpertExchange,
    PipelineSchedule,
    Precision,
    ZeroStage,
)
from trainpace.hardware import Cluster, Device, HostCPU, HostLinks
from trainpace.job import JobConditions, stated_conditions
from trainpace.optimizers import optimizer_called
from trainpace.records import save
from trainpace.trace import is_saved, load_workload, stored_precision, workload_on_its_way
from trainpace.units import hours_from_s
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
    Argument,
    Field,
    Misuse,
    Progress,
    Request,
    fields_of,
    within,
)
from trainpace.verbs.software import (
    AttentionName,
    CrossEntropyKernels,
    Fp8Scales,
    OptimizerKernels,
    SoftwareName,
    runs_anyway,
    software_of,
)
from trainpace.workload import AS_IT_IS, Adaptation, Form, Mode, Variant, Workload

ModelSpec = Annotated[str, Argument("The model, as in trainpace forecast.", metavar="MODEL")]
Optimizer = Annotated[
    str | None,
    Field(
        "sgd, adamw, adamw_8bit, lion, adafactor, muon, ...  [default: the task's own, else adamw for tokens, sgd_momentum]"
    ),
]
SequenceLength = Annotated[int | None, Field("Tokens in a sample, for transformers.", AT_LEAST_1)]
ImageSize = Annotated[int | None, Field("Side in pixels, for image models.", AT_LEAST_1)]
ChannelsLast = Annotated[bool, Field("NHWC tensors (memory_format=torch.channels_last).")]
Model = Annotated[
    str | Workload,
    Argument("A name, FILE.py:FUNCTION, a saved WORKLOAD.json, or from Python a workload.", metavar="MODEL"),
]
PRECISION_HELP = (
    "Number format.  [default: as a transformers configuration's dtype says, else torch's own fp32, which lets convolutions use"
    " TF32 on cards that have it]"
)
Offload = Literal["none", "optimizer", "parameters", "both"]
Network = Annotated[
    float | None,
    Field("A node's network bandwidth in one direction, in gigabytes: 400 Gbit/s is 50; 1 GbE is 0.125.", GB_PER_S),
]
EVERY_FORM: tuple[Form, ...] = ("fp32", "amp", "half")


class TracedRequest(Request):
    """A request about a model. `save_workload` is where faces want the workload to be saved, in every number format."""

    model: Model
    optimizer: Optimizer = None
    sequence_length: SequenceLength = None
    image_size: ImageSize = None
    adapter: Annotated[
        Literal["lora", "dora"] | None, Field("Train small adapters beside frozen weights, as peft does.")
    ] = None
    lora_rank: Annotated[int | None, Field("Rank of the adapters.  [default: 16]", AT_LEAST_1)] = None
    lora_targets: Annotated[
        str | None, Field("Linear layers that get adapters: q_proj,v_proj, ...  [default: all-linear, but the head]")
    ] = None
    weights: Annotated[
        Literal["nf4", "fp4", "nf4_double"] | None,
        Field("Format of frozen weights under adapters, as bitsandbytes keeps them; double: its scales in 8 bits too."),
    ] = None
    timeout: Annotated[float, Field("Give up tracing after this.", DURATION)] = 300.0
    save_workload: str | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """The number formats in which to trace the model."""
        return EVERY_FORM

    @property
    def variant(self) -> Variant:
        mode: Mode = getattr(self, "mode", None) or "train"
        optimizer = None if self.optimizer is None else optimizer_called(self.optimizer)
        return Variant(optimizer, self.sequence_length, self.image_size, mode=mode, adaptation=adaptation_of(self))

    @property
    def recomputes(self) -> bool:
        """Whether full activation checkpointing is wanted."""
        return False

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.model


def adaptation_of(request: TracedRequest) -> Adaptation:
    """How the model is trained without training its own weights. Raises Misuse for what does nothing without adapters."""
    r = request
    if r.adapter is None:
        for name in ("lora_rank", "lora_targets", "weights"):
            if getattr(r, name) is not None:
                raise Misuse(f"`{name}` does nothing without `adapter`.")
        return AS_IT_IS
    chosen = AS_IT_IS._replace(adapter=r.adapter, rank=r.lora_rank or AS_IT_IS.rank, weights=r.weights or "")
    return chosen._replace(targets=r.lora_targets or AS_IT_IS.targets)


class TraceRequest(TracedRequest):
    mode: Annotated[Mode | None, Field("How much of a step.  [default: train]")] = None


def workload_of(
    request: TracedRequest, progress: Progress, forms: Sequence[Form] | None = None, variant: Variant | None = None
) -> Workload:
    """The workload of the request's model, in other forms or another variant than the request's where these are given."""
    with workload_started(request, progress, forms, variant) as workload:
        return workload()


@contextlib.contextmanager
def workload_started(
    request: TracedRequest, progress: Progress, forms: Sequence[Form] | None = None, variant: Variant | None = None
) -> Iterator[Callable[[], Workload]]:
    """Start tracing the request's model, and give what waits for its workload, so that a verb can prepare the rest meanwhile.

    Raises Contradiction where the request asks of a saved workload what it was not traced with.
    """
    model, variant = request.model, variant or request.variant
    forms = EVERY_FORM if request.save_workload else request.forms if forms is None else forms
    name = model if isinstance(model, str) else f"this workload of {model.model}"
    if is_saved(model) and request.save_workload:
        raise Misuse(f"`save_workload` needs a model to trace, and {name} is a saved workload already.")
    with workload_on_its_way(model, forms, variant, request.timeout) as traced:

        def workload() -> Workload:
            with progress.work(f"tracing {request.model_name}"):
                result = traced()
            if is_saved(model):
                check_agrees(name, result, request)
            # a forecast applies recomputation to repeated blocks; a model without them is traced with it
            able = result.checkpointed or all(form.blocks is not None for form in result.forms.values())
            settled_request = settled(request, result) if isinstance(request, ExecutedRequest) else request
            if settled_request.recomputes and not able:
                if is_saved(model):
                    raise Contradiction(
                        f"{name} was traced without activation checkpointing and has no repeated blocks to recompute.",
                        "`checkpointing` needs a new trace, from the model.",
                    )
                result = load_workload(model, forms, variant._replace(checkpointing=True), request.timeout)
            if request.save_workload:
                save(result, request.save_workload)
            return result

        yield workload


def check_agrees(name: str, workload: Workload, request: TracedRequest) -> None:
    """Raise Contradiction for the first field of the request that differs from what a saved workload was traced with."""
    traced = {
        "mode": workload.mode, "optimizer": workload.optimizer, "sequence_length": workload.sequence_length,
        "image_size": workload.image_side,
    }  # fmt: skip
    for setting, was in traced.items():
        value = getattr(request, setting, None)
        value = optimizer_called(value) if setting == "optimizer" and value else value
        if value is None or value == was:
            continue
        shown = was if was is not None else f"none ({workload.sample})"
        raise Contradiction(
            f"{name} was traced with `{setting}` {shown}, and `{setting}` {value} needs a new trace, from the model.",
            "Leave the option out, or name the model.",
        )
    wanted = adaptation_of(request).in_words
    if wanted and wanted != workload.adaptation:
        raise Contradiction(
            f"{name} was traced with {workload.adaptation or 'no adapters'}, and {wanted} needs a new trace, from the model.",
            "Leave the option out, or name the model.",
        )


class SoftwareRequest(TracedRequest):
    software: SoftwareName = None
    attention: AttentionName = None
    optimizer_implementation: OptimizerKernels = None
    cross_entropy: CrossEntropyKernels = None
    fp8_recipe: Fp8Scales = None


class TrainingRequest(SoftwareRequest):
    epochs: Annotated[float | None, Field("Passes over the data.", EPOCHS)] = None
    startup: Annotated[float | None, Field("Until the first step.  [default: 60s, assumed]", DURATION)] = None
    evaluation_samples: Annotated[int, Field("Samples evaluated after every epoch.", COUNT)] = 0
    checkpoint_every: Annotated[
        float | None, Field("Time between checkpoints.  [default: what loses least]", ABOVE_0_S)
    ] = None
    mtbf: Annotated[
        float | None, Field("Mean time between failures of one GPU.  [default: 50000h, arXiv:2407.21783]", ABOVE_0_S)
    ] = None
    step_variation: Annotated[float, Field("Relative deviation of a node's step: 0.03.", within("share", 0, 10))] = 0.0
    data_gb: Annotated[float, Field("Data to copy to the servers first.", within("GB", 0, 1e9))] = 0.0
    download: Annotated[float | None, Field("Speed of that copy.  [default: 0.125, assumed]", GB_PER_S)] = None
    sample_bytes: Annotated[int, Field("Bytes read per sample; slow storage then shows as data wait.", BYTES)] = 0
    storage: Annotated[
        float | None, Field("Speed of shared storage (checkpoints, samples).  [default: 1, assumed]", GB_PER_S)
    ] = None

    def conditions(self, **more: Any) -> JobConditions:
        """The training besides its steps, as the request and `more` say it; the rest is as assumed."""
        return stated_conditions({
            "startup_s": self.startup, "evaluation_samples": self.evaluation_samples, "data_gb": self.data_gb,
            "checkpoint_every_s": self.checkpoint_every, "step_variation": self.step_variation,
            "device_mtbf_h": None if self.mtbf is None else hours_from_s(self.mtbf), "download_gb_per_s": self.download,
            "sample_bytes": float(self.sample_bytes), "storage_gb_per_s": self.storage, **more,
        })  # fmt: skip


class ExecutedRequest(TrainingRequest):
    num_gpus: Annotated[int, Field("GPUs of a node; data parallel by default.", DEVICES, sets="nproc_per_node")] = 1
    nodes: Annotated[int, Field("Nodes of that many GPUs each.", DEVICES, sets="nnodes")] = 1
    network: Network = None
    network_latency: Annotated[
        float | None, Field("Time of one small message between two nodes.  [default: 2.5us, InfiniBand's]", ABOVE_0_S)
    ] = None
    host_copy: Annotated[
        float | None,
        Field("Speed of copying each micro-batch to the GPU, where the step waits for it.  [default: hidden]", GB_PER_S),
    ] = None  # fmt: skip
    batch: Annotated[
        tuple[int, ...] | None,
        Field("Samples per GPU: 32, or 1:70, or 8,16,32.  [default: the task's loader's or trainer's, or 32]", BATCHES),
    ] = None  # fmt: skip
    accumulate: Annotated[
        int | None,
        Field("Micro-batches per update.  [default: the task's trainer's, or 1]", AT_LEAST_1, sets="accumulation"),
    ] = None  # fmt: skip
    precision: Annotated[Precision | None, Field(PRECISION_HELP)] = None
    channels_last: ChannelsLast = False
    compile: Annotated[bool, Field("Under torch.compile, which fuses element-wise operators.")] = False
    tp: Annotated[int, Field("Tensor-parallel ranks.", AT_LEAST_1)] = 1
    pp: Annotated[int, Field("Pipeline stages; micro-batches by `accumulate`.", AT_LEAST_1)] = 1
    cp: Annotated[int, Field("Context-parallel ranks: divide the sequence.", AT_LEAST_1)] = 1
    sequence_parallel: Annotated[bool, Field("Divide norms and residuals over the tensor-parallel ranks too.")] = False
    partition_activations: Annotated[
        bool, Field("Divide checkpointed activations over the tensor-parallel ranks (ZeRO-R, DeepSpeed).")
    ] = False
    async_tp: Annotated[
        bool, Field("Hide part of tensor parallelism's exchanges under its products.", sets="async_tensor_parallel")
    ] = False  # fmt: skip
    clip_gradients: Annotated[bool, Field("Scale gradients to a largest norm before the update (clip_grad_norm_).")] = (
        False
    )
    pipeline: Annotated[
        PipelineSchedule, Field("Schedule of the pipeline's micro-batches.", sets="pipeline_schedule")
    ] = "1f1b"
    virtual_stages: Annotated[int, Field("Stages a device, interleaved.", AT_LEAST_1)] = 1
    ep: Annotated[int, Field("Expert-parallel ranks: divide the experts of each layer.", AT_LEAST_1)] = 1
    expert_tp: Annotated[
        int | None, Field("Tensor-parallel ranks of each expert.  [default: as `tp`]", AT_LEAST_1)
    ] = None  # fmt: skip
    expert_exchange: Annotated[
        ExpertExchange,
        Field("How tokens go to the ranks of their experts: NCCL's all-to-all, DeepEP, or under computation."),
    ] = "all_to_all"
    expert_load: Annotated[
        float,
        Field("Tokens of the fullest expert-parallel rank over the mean, from 1, a balanced router, to `ep`.", LOAD),
    ] = 1.0
    engine: Annotated[
        Engine,
        Field("How gradients and parameters are exchanged: under the backward pass (ddp, with FSDP and ZeRO on top), after it, by"
              " torch's old DataParallel, or with Megatron-Core's overlaps."),
    ] = "ddp"  # fmt: skip
    zero: Annotated[ZeroStage, Field("ZeRO stage; 3 is FSDP's full sharding.", sets="zero_stage")] = 0
    shard_size: Annotated[
        int | None, Field("Shard over so many data-parallel ranks only (hybrid sharding).", AT_LEAST_1)
    ] = None
    keep_gathered: Annotated[
        bool, Field("FSDP without resharding after the forward pass.", sets="reshard_after_forward")
    ] = False
    offload: Annotated[Offload, Field("What is kept in the host's memory.", sets="offload_optimizer")] = "none"
    checkpointing: Annotated[
        Checkpointing | None,
        Field("Recompute activations in the backward pass; alone it means full, block by block.", alone="full",
              sets="activation_checkpointing"),
    ] = None  # fmt: skip

    @property
    def recomputes(self) -> bool:
        return self.checkpointing == "full"


E = TypeVar("E", bound=ExecutedRequest)


def settled(request: E, workload: Workload) -> E:
    """The request with the task's own settings, or the defaults, where it leaves them open."""
    own: Mapping[str, Any] = workload.settings
    return replace(
        request, batch=request.batch or (own.get("micro_batch", 32),),
        accumulate=request.accumulate or own.get("accumulation", 1),
        precision=request.precision or own.get("precision"),
        checkpointing=request.checkpointing or own.get("activation_checkpointing", "none"),
        clip_gradients=request.clip_gradients or own.get("clip_gradients", False),
        compile=request.compile or own.get("compile", False),
    )  # fmt: skip


def execution_values(request: Request, workload: Workload) -> dict[str, Any]:
    """What a request says of an `Execution`, by the names of its fields. A workload traced with recomputation stays so."""
    fields = fields_of(type(request))
    settings = {field.about.sets or name: getattr(request, name) for name, field in fields.items()}
    values = {name: value for name, value in settings.items() if name in EXECUTION_FIELDS and name != "optimizer"}
    if "reshard_after_forward" in values:
        values["reshard_after_forward"] = not values["reshard_after_forward"]
    if (offload := values.pop("offload_optimizer", None)) is not None:
        values["offload_optimizer"] = offload in ("optimizer", "both")
        values["offload_parameters"] = offload in ("parameters", "both")
    if workload.checkpointed:
        values["activation_checkpointing"] = "full"
    return values | runs_anyway(software_of(request))


def default_precision(model: str | Workload, device: Device) -> Precision:
    """What a script gets that says nothing of number formats: its configuration's dtype, or fp32 as torch computes it there."""
    return stored_precision(model) or ("fp32" if device.tf32_tensor_tflops is None else "torch_fp32")


def execution_of(request: ExecutedRequest, workload: Workload, device: Device) -> Execution:
    """How the workload is executed, of a request that is settled."""
    values = execution_values(request, workload)
    values["precision"] = request.precision or default_precision(request.model, device)
    assert request.batch is not None, "a request is settled before it is executed"
    return Execution(micro_batch=request.batch[0], optimizer=workload.optimizer, **values)


def check_used(request: ExecutedRequest, with_training: bool) -> None:
    """Raise Misuse for fields that would do nothing; those of the whole training need one."""
    r = request
    idle = {
        "shard_size": (r.shard_size is not None and r.zero == 0, "`zero` 1, 2 or 3"),
        "keep_gathered": (r.keep_gathered and r.zero != 3, "`zero` 3"),
        "sequence_parallel": (r.sequence_parallel and r.tp == 1, "`tp` of 2 or more"),
        "partition_activations": (
            r.partition_activations and (r.tp == 1 or not r.recomputes),
            "`tp` of 2 or more and `checkpointing`",
        ),
        "async_tp": (r.async_tp and r.tp == 1, "`tp` of 2 or more"),
        "expert_tp": (r.expert_tp is not None and r.ep == 1, "`ep` of 2 or more"),
        "expert_exchange": (r.expert_exchange != "all_to_all" and r.ep == 1, "`ep` of 2 or more"),
        "expert_load": (r.expert_load != 1 and r.ep == 1, "`ep` of 2 or more"),
        "engine": (r.engine != "ddp" and r.num_gpus * r.nodes == 1, "several GPUs"),
        "network_latency": (r.network_latency is not None and r.nodes == 1, "several `nodes`"),
        "fp8_recipe": (r.fp8_recipe is not None and r.precision != "fp8", "`precision` fp8"),
    }
    for name, field in fields_of(TrainingRequest).items():
        if not with_training and name not in fields_of(SoftwareRequest):
            idle[name] = (getattr(r, name) != field.default, "`samples` and `epochs`")
    for name, (does_nothing, needs) in idle.items():
        if does_nothing:
            raise Misuse(f"`{name}` does nothing without {needs}.")


def fleet_of(
    device: Device,
    num_gpus: int,
    nodes: int,
    network: float | None,
    price: float | None,
    links: HostLinks | None = None,
    host: HostCPU | None = None,
    latency_us: float | None = None,
) -> Cluster:
    """Nodes of GPUs that share a `network` (GB/s of a node), which a profile's `links` may say too; `price`: of a GPU and hour;
    `host`: the CPU of a node, where it is known; `latency_us`: of a small message between two nodes.

    Raises Misuse for a fleet that nobody has, and for several nodes without a network between them.
    """
    if num_gpus * nodes > MOST_DEVICES:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} cannot be right: up to {MOST_DEVICES:,} GPUs in all."
        )
    if nodes > 1 and network is None and links is None:
        raise Misuse(f"{nodes} nodes need the network between them: add `network` GB/S (1 Gbit/s Ethernet is 0.125).")
    return Cluster(
        device=device, devices_per_node=num_gpus, nodes=nodes, price_usd_per_device_hour=price, host_links=links, host=host,
        network_gb_per_s_per_device=None if network is None else network / num_gpus, network_latency_us=latency_us,
    )  # fmt: skip
