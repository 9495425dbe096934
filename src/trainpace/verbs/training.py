"""Requests about a model's whole training, and how its steps are executed."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from msgspec.structs import replace

from trainpace.core.execution import (
    EXECUTION_FIELDS,
    Checkpointing,
    Engine,
    Execution,
    ExpertExchange,
    PipelineSchedule,
    Precision,
    ZeroStage,
)
from trainpace.core.hardware import Cluster, Device, HostCPU, HostLinks
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
from trainpace.verbs.traced import PRECISION_HELP, ChannelsLast, TracedRequest
from trainpace.workload import Form, ModelSpec, Workload, form_of, stored_precision

Offload = Literal["none", "optimizer", "parameters", "both"]
Network = Annotated[
    float | None,
    Field(
        "A node's network bandwidth in one direction, in gigabytes: 400 Gbit/s is 50; 1 GbE is"
        " 0.125.",
        GB_PER_S,
    ),
]
Tokens = Annotated[
    int | None,
    Field(
        "Tokens in an epoch, in place of `samples`, of a model of token sequences: 300B.",
        AT_LEAST_1,
    ),
]
GlobalBatch = Annotated[
    int | None, Field("Samples per update over all GPUs, in place of `accumulate`.", AT_LEAST_1)
]
USUAL_BATCH = 32
"""Samples per GPU where nobody says."""
USUAL_GLOBAL_BATCH = 8 * USUAL_BATCH
"""Samples an update where nobody says and servers of several sizes take the same: `USUAL_BATCH` for each GPU of a server of
eight."""


class SoftwareRequest(TracedRequest):
    software: SoftwareName = None
    attention: AttentionName = None
    optimizer_implementation: OptimizerKernels = None
    cross_entropy: CrossEntropyKernels = None
    fp8_recipe: Fp8Scales = None


class TrainingRequest(SoftwareRequest):
    epochs: Annotated[float | None, Field("Passes over the data.", EPOCHS)] = None
    startup: Annotated[
        float | None, Field("Until the first step.  [default: 60s, assumed]", DURATION)
    ] = None
    evaluation_samples: Annotated[int, Field("Samples evaluated after every epoch.", COUNT)] = 0
    checkpoint_every: Annotated[
        float | None,
        Field("Time between checkpoints.  [default: the one that loses the least time]", ABOVE_0_S),
    ] = None
    mtbf: Annotated[
        float | None,
        Field(
            "Mean time between failures of one GPU.  [default: 50000h, arXiv:2407.21783]", ABOVE_0_S
        ),
    ] = None
    step_variation: Annotated[
        float, Field("Relative deviation of a node's step: 0.03.", within("share", 0, 10))
    ] = 0.0
    data_gb: Annotated[float, Field("Data to copy to the servers first.", within("GB", 0, 1e9))] = (
        0.0
    )
    download: Annotated[
        float | None, Field("Speed of that copy.  [default: 0.125, assumed]", GB_PER_S)
    ] = None
    sample_bytes: Annotated[
        int, Field("Bytes read per sample; slow storage then shows as data wait.", BYTES)
    ] = 0
    storage: Annotated[
        float | None,
        Field("Speed of shared storage (checkpoints, samples).  [default: 1, assumed]", GB_PER_S),
    ] = None

    def conditions(self, **more: Any) -> JobConditions:
        """The training besides its steps, as the request and `more` say it; the rest is as assumed."""
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


class ExecutedRequest(TrainingRequest):
    num_gpus: Annotated[
        int, Field("GPUs of a node; data parallel by default.", DEVICES, sets="nproc_per_node")
    ] = 1
    nodes: Annotated[int, Field("Nodes of that many GPUs each.", DEVICES, sets="nnodes")] = 1
    network: Network = None
    network_latency: Annotated[
        float | None,
        Field(
            "Time of one small message between two nodes.  [default: 2.5us, InfiniBand's]",
            ABOVE_0_S,
        ),
    ] = None
    host_copy: Annotated[
        float | None,
        Field(
            "Speed of copying each micro-batch to the GPU, where the step waits for it.  [default:"
            " hidden]",
            GB_PER_S,
        ),
    ] = None
    batch: Annotated[
        tuple[int, ...] | None,
        Field(
            "Samples per GPU: 32, or 1:70, or 8,16,32.  [default: the task's loader's or trainer's,"
            " or 32]",
            BATCHES,
        ),
    ] = None
    accumulate: Annotated[
        int | None,
        Field(
            "Micro-batches per update.  [default: the task's trainer's, or 1]",
            AT_LEAST_1,
            sets="accumulation",
        ),
    ] = None
    global_batch: GlobalBatch = None
    precision: Annotated[Precision | None, Field(PRECISION_HELP)] = None
    channels_last: ChannelsLast = False
    compile: Annotated[bool, Field("Under torch.compile, which fuses element-wise operators.")] = (
        False
    )
    tp: Annotated[int, Field("Tensor-parallel ranks.", AT_LEAST_1)] = 1
    pp: Annotated[int, Field("Pipeline stages; micro-batches by `accumulate`.", AT_LEAST_1)] = 1
    cp: Annotated[int, Field("Context-parallel ranks: divide the sequence.", AT_LEAST_1)] = 1
    sequence_parallel: Annotated[
        bool, Field("Divide norms and residuals over the tensor-parallel ranks too.")
    ] = False
    partition_activations: Annotated[
        bool,
        Field(
            "Divide checkpointed activations over the tensor-parallel ranks (ZeRO-R, DeepSpeed)."
        ),
    ] = False
    async_tp: Annotated[
        bool,
        Field(
            "Hide part of tensor parallelism's exchanges under its products.",
            sets="async_tensor_parallel",
        ),
    ] = False
    clip_gradients: Annotated[
        bool, Field("Scale gradients to a largest norm before the update (clip_grad_norm_).")
    ] = False
    pure_16_bit: Annotated[
        bool,
        Field(
            "Sharded 16-bit weights without an fp32 copy, and optimizer states as wide (a model"
            " loaded in 16 bits)."
        ),
    ] = False
    pipeline: Annotated[
        PipelineSchedule,
        Field("Schedule of the pipeline's micro-batches.", sets="pipeline_schedule"),
    ] = "1f1b"
    virtual_stages: Annotated[int, Field("Stages a device, interleaved.", AT_LEAST_1)] = 1
    ep: Annotated[
        int, Field("Expert-parallel ranks: divide the experts of each layer.", AT_LEAST_1)
    ] = 1
    expert_tp: Annotated[
        int | None, Field("Tensor-parallel ranks of each expert.  [default: as `tp`]", AT_LEAST_1)
    ] = None
    expert_exchange: Annotated[
        ExpertExchange,
        Field(
            "How tokens go to the ranks of their experts: NCCL's all-to-all, DeepEP, or under"
            " computation."
        ),
    ] = "all_to_all"
    expert_nodes: Annotated[
        int | None,
        Field("Nodes that the experts of one token lie on at most.  [default: any]", AT_LEAST_1),
    ] = None
    expert_load: Annotated[
        float,
        Field(
            "Tokens of the fullest expert-parallel rank over the mean, from 1, a balanced router,"
            " to `ep`.",
            LOAD,
        ),
    ] = 1.0
    engine: Annotated[
        Engine,
        Field(
            "How gradients and parameters are exchanged: under the backward pass (ddp, with FSDP"
            " and ZeRO on top), after it, by torch's old DataParallel, or with Megatron-Core's"
            " overlaps."
        ),
    ] = "ddp"
    zero: Annotated[
        ZeroStage, Field("ZeRO stage; 3 is FSDP's full sharding.", sets="zero_stage")
    ] = 0
    shard_size: Annotated[
        int | None,
        Field("Shard over so many data-parallel ranks only (hybrid sharding).", AT_LEAST_1),
    ] = None
    keep_gathered: Annotated[
        bool, Field("FSDP without resharding after the forward pass.", sets="reshard_after_forward")
    ] = False
    offload: Annotated[
        Offload, Field("What is kept in the host's memory.", sets="offload_optimizer")
    ] = "none"
    checkpointing: Annotated[
        Checkpointing | None,
        Field(
            "Recompute activations in the backward pass; alone it means full, block by block.",
            alone="full",
            sets="activation_checkpointing",
        ),
    ] = None

    @property
    def recomputes(self) -> bool:
        return self.checkpointing == "full"

    def settled(self, workload: Workload) -> Self:
        """The request with the task's own settings, or the defaults, where it leaves them open."""
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
            clip_gradients=self.clip_gradients or own.get("clip_gradients", False),
            compile=self.compile or own.get("compile", False),
        )

    def _batches(self, own_batch: int, own_accumulation: int) -> tuple[tuple[int, ...], int]:
        """(batch sizes of a GPU, micro-batches an update). Of a global batch each GPU takes its usual batch, or the largest below
        it that divides its share. Raises Misuse where the numbers clash."""
        if self.global_batch is None:
            return self.batch or (own_batch,), self.accumulate or own_accumulation
        ranks = self.num_gpus * self.nodes // (self.tp * self.pp * self.cp) or 1
        share = self.global_batch // ranks
        if self.batch is None and share and self.global_batch % ranks == 0:
            usual = share // self.accumulate if self.accumulate else own_batch
            batches: tuple[int, ...] = (
                max(n for n in range(1, max(1, min(usual, share)) + 1) if share % n == 0),
            )
        else:
            batches = self.batch or (own_batch,)
        if len(batches) > 1:
            raise Misuse(
                "`global_batch` goes with one `batch`: several would each need another"
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
    """The work, where an epoch may be told in tokens: `length` of a sample, else the workload's own. Raises Misuse for tokens of
    a model whose samples are no sequences of them."""
    length = length or workload.sequence_length
    if tokens is not None and length is None:
        raise Misuse(
            f"`tokens`: a sample of {workload.model} is no sequence of tokens.", "Give `samples`."
        )
    return Schedule(
        samples=samples,
        tokens=tokens,
        sequence_length=length if tokens is not None else None,
        **more,
    )


def execution_values(request: Request, workload: Workload) -> dict[str, Any]:
    """What a request says of an `Execution`, by the names of its fields. A workload traced with recomputation stays so."""
    fields = fields_of(type(request))
    settings = {field.about.sets or name: getattr(request, name) for name, field in fields.items()}
    values = {
        name: value
        for name, value in settings.items()
        if name in EXECUTION_FIELDS and name != "optimizer"
    }
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
    return stored_precision(model) or device.torch_precision


def default_forms(model: str | Workload, precisions: Sequence[Precision]) -> tuple[Form, ...]:
    """In which forms a model is traced for these precisions, or for its default; none where a task's own trainer may say."""
    stored = stored_precision(model)
    named = tuple(precisions) or ((stored,) if stored else ())
    if not named and ModelSpec.of(model).runs_code:
        return ()
    return tuple(dict.fromkeys(form_of(precision) for precision in named or ("fp32",)))


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
        "expert_nodes": (
            r.expert_nodes is not None and (r.ep == 1 or r.expert_exchange == "all_to_all"),
            "`ep` of 2 or more, and an `expert_exchange` that sends a token once to each node",
        ),
        "expert_load": (r.expert_load != 1 and r.ep == 1, "`ep` of 2 or more"),
        "engine": (r.engine != "ddp" and r.num_gpus * r.nodes == 1, "several GPUs"),
        "network_latency": (r.network_latency is not None and r.nodes == 1, "several `nodes`"),
        "pure_16_bit": (
            r.pure_16_bit
            and (
                form_of(r.precision or stored_precision(r.model) or "fp32") != "half"
                or (r.zero == 0 and r.tp * r.pp == 1)
            ),
            "`precision` bf16 or fp16 and sharding",
        ),
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
    if num_gpus < 1 or nodes < 1:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} cannot be right: give at least 1 of each."
        )
    if num_gpus * nodes > MOST_DEVICES:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} cannot be right: up to {MOST_DEVICES:,}"
            " GPUs in all."
        )
    if nodes > 1 and network is None and links is None:
        raise Misuse(
            f"{nodes} nodes need the network between them: add `network` GB/S (1 Gbit/s Ethernet is"
            " 0.125)."
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
