"""Requests that say how a step is executed: each field names the field of `Execution` that it sets."""

from typing import Annotated, Any, Literal

from trainpace.execution import Checkpointing, Execution, PipelineSchedule, Precision, ZeroStage
from trainpace.verbs.request import Field, Misuse, Request, fields_of
from trainpace.verbs.training import TrainingRequest
from trainpace.verbs.units import AT_LEAST_1, BATCHES, DEVICES, GB_PER_S, MOST_DEVICES
from trainpace.workload import Workload

Offload = Literal["none", "optimizer", "parameters", "both"]
Network = Annotated[
    float | None,
    Field("A node's network bandwidth in one direction, in gigabytes: 400 Gbit/s is 50; 1 GbE is 0.125.", GB_PER_S,
          metavar="GB/S"),
]  # fmt: skip


class ExecutedRequest(TrainingRequest):
    """A training, and how its steps are executed."""

    num_gpus: Annotated[
        int, Field("GPUs of a node; data parallel unless said otherwise.", DEVICES, execution="nproc_per_node")
    ] = 1
    nodes: Annotated[int, Field("Nodes of that many GPUs each.", DEVICES, execution="nnodes")] = 1
    network: Network = None
    batch: Annotated[tuple[int, ...], Field("Samples per GPU: 32, or 1:70, or 8,16,32.", BATCHES)] = (32,)
    accumulate: Annotated[int, Field("Micro-batches per update.", AT_LEAST_1, execution="accumulation")] = 1
    precision: Annotated[Precision, Field("Number format.", execution="precision")] = "fp32"
    channels_last: Annotated[
        bool, Field("NHWC tensors (memory_format=torch.channels_last).", execution="channels_last")
    ] = False
    compile: Annotated[bool, Field("Under torch.compile, which fuses element-wise operators.", execution="compile")] = (
        False
    )
    tp: Annotated[int, Field("Tensor-parallel ranks.", AT_LEAST_1, execution="tp")] = 1
    pp: Annotated[int, Field("Pipeline stages; micro-batches by `accumulate`.", AT_LEAST_1, execution="pp")] = 1
    cp: Annotated[int, Field("Context-parallel ranks: divide the sequence.", AT_LEAST_1, execution="cp")] = 1
    sequence_parallel: Annotated[
        bool, Field("Divide norms and residuals over the tensor-parallel ranks too.", execution="sequence_parallel")
    ] = False
    async_tp: Annotated[
        bool, Field("Hide part of tensor parallelism's exchanges under its products.", execution="async_tensor_parallel")
    ] = False  # fmt: skip
    pipeline: Annotated[
        PipelineSchedule, Field("Schedule of the pipeline's micro-batches.", execution="pipeline_schedule")
    ] = "1f1b"
    virtual_stages: Annotated[int, Field("Stages a device, interleaved.", AT_LEAST_1, execution="virtual_stages")] = 1
    zero: Annotated[ZeroStage, Field("ZeRO stage; 3 is FSDP's full sharding.", execution="zero_stage")] = 0
    shard_size: Annotated[
        int | None,
        Field("Shard over so many data-parallel ranks only (hybrid sharding).", AT_LEAST_1, execution="shard_size"),
    ] = None
    keep_gathered: Annotated[
        bool, Field("FSDP without resharding after the forward pass.", execution="reshard_after_forward")
    ] = False
    offload: Annotated[Offload, Field("What is kept in the host's memory.", execution="offload_optimizer")] = "none"
    checkpointing: Annotated[
        Checkpointing,
        Field("Recompute activations in the backward pass; alone it means full, block by block.", alone="full",
              show_default=False, execution="activation_checkpointing"),
    ] = "none"  # fmt: skip


def execution_values(request: Request) -> dict[str, Any]:
    """What a request says of an `Execution`, by the names of its fields."""
    fields = fields_of(type(request))
    values = {field.about.execution: getattr(request, name) for name, field in fields.items() if field.about.execution}
    if "reshard_after_forward" in values:
        values["reshard_after_forward"] = not values["reshard_after_forward"]
    if "offload_optimizer" in values:
        offload = values.pop("offload_optimizer")
        values |= offloads(offload) if offload is not None else {}
    return values


def offloads(offload: Offload) -> dict[str, bool]:
    return {
        "offload_optimizer": offload in ("optimizer", "both"), "offload_parameters": offload in ("parameters", "both")
    }  # fmt: skip


def execution_of(request: ExecutedRequest, workload: Workload) -> Execution:
    """The execution that a request asks for, at its first batch size."""
    values = execution_values(request)
    if workload.checkpointed:
        values["activation_checkpointing"] = "full"
    return Execution(micro_batch=request.batch[0], optimizer=workload.optimizer, **values)


def check_executed(request: ExecutedRequest) -> None:
    """Raise Misuse for fields that would do nothing."""
    r = request
    for idle, name, needs in (
        (r.shard_size is not None and r.zero == 0, "shard_size", "`zero` 1, 2 or 3"),
        (r.keep_gathered and r.zero != 3, "keep_gathered", "`zero` 3"),
        (r.sequence_parallel and r.tp == 1, "sequence_parallel", "`tp` of 2 or more"),
        (r.async_tp and r.tp == 1, "async_tp", "`tp` of 2 or more"),
    ):
        if idle:
            raise Misuse(f"`{name}` does nothing without {needs}.")


def check_fleet(num_gpus: int, nodes: int, network_gb_per_s: float | None, measured: bool = False) -> None:
    """Refuse a fleet that nobody has, and several nodes without a network between them (`measured`: by a profile)."""
    if num_gpus * nodes > MOST_DEVICES:
        raise Misuse(
            f"`num_gpus` {num_gpus:,} x `nodes` {nodes:,} cannot be right: up to {MOST_DEVICES:,} GPUs in all."
        )
    if nodes > 1 and network_gb_per_s is None and not measured:
        raise Misuse(f"{nodes} nodes need the network between them: add `network` GB/S (1 Gbit/s Ethernet is 0.125).")
