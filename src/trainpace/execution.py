"""How a step is executed: batches, parallelism, precision, and what is traded for memory.

The words are the field's: a *micro-batch* is what one data-parallel rank processes in one forward + backward; the
*global batch* (effective batch) is what one optimizer update sees.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trainpace.errors import Contradiction, TrainpaceError
from trainpace.records import Record

Precision = Literal["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
"""fp32: everything in fp32, TF32 off. tf32: fp32 storage, matrix products in TF32. amp_*: fp32 weights under
autocast, which FSDP does by its MixedPrecision. bf16, fp16: weights, gradients and activations in that format; what the
optimizer keeps is the engine's (`trainpace.forecast.states`). fp8: bf16 with matrix products in FP8."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

ZeroStage = Literal[0, 1, 2, 3]

Engine = Literal["ddp", "unoverlapped", "data_parallel", "megatron_core"]
"""ddp: one process a device, gradients reduced under the backward pass (FSDP and ZeRO shard on top of it).
unoverlapped: the same, reduced after the backward pass. data_parallel: torch's old nn.DataParallel, one process for
all devices of a node. megatron_core: as ddp, and the parameters of ZeRO 1 are gathered under the next forward pass, and
interleaved stages compute while they send (--overlap-param-gather, --overlap-p2p-communication, which NeMo's recipes set)."""


Checkpointing = Literal["none", "selective", "full"]
"""Which activations are computed again in the backward pass instead of kept. selective: what is large and cheap, the
products inside attention (Korthikanti et al. 2022). full: everything but the input of each repeated block."""

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
"""gpipe: all forward passes, then all backward passes. 1f1b: one of each in turn, which keeps fewer activations.
interleaved: 1f1b over several smaller stages a device (`virtual_stages`; Narayanan et al. 2021)."""


class Execution(Record):
    """One way to execute a workload. Sizes are counts >= 1.

    With plain data parallelism every process is a data-parallel rank; tensor (`tp`), pipeline (`pp`) and context
    parallelism (`cp`) divide that number. Nodes are not pipeline stages, and the GPUs of a node are not tensor shards.

    `zero_stage` 1, 2, 3 shard optimizer states, gradients, parameters over the data-parallel ranks, or over `shard_size`
    of them (hybrid sharding). FSDP is stage 3; with `reshard_after_forward` off it keeps the gathered parameters from
    the forward to the backward pass (SHARD_GRAD_OP). `sequence_parallel` divides norms and residuals along the sequence
    over the tensor-parallel ranks; `async_tensor_parallel` splits products to hide their communication.
    """

    micro_batch: int = 1
    accumulation: int = 1
    nnodes: int = 1
    nproc_per_node: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    precision: Precision = "fp32"
    optimizer: str = "sgd"
    engine: Engine = "ddp"
    zero_stage: ZeroStage = 0
    shard_size: int | None = None
    reshard_after_forward: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False
    activation_checkpointing: Checkpointing | bool = "none"
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = 1
    compile: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.activation_checkpointing, bool):  # as older records have it
            msgspec.structs.force_setattr(
                self, "activation_checkpointing", "full" if self.activation_checkpointing else "none"
            )
        for name in ("micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp", "virtual_stages"):
            value = getattr(self, name)
            if value < 1:
                raise TrainpaceError(f"{name} is {value}; it must be a whole number from 1.")
        shards = self.tp * self.pp * self.cp
        if self.world_size % shards:
            raise Contradiction(
                f"world size {self.world_size} (nnodes {self.nnodes} x nproc_per_node {self.nproc_per_node}) cannot be"
                f" divided by tp {self.tp} x pp {self.pp} x cp {self.cp} = {shards}.",
                f"Use a world size that is a multiple of {shards}, or smaller tp, pp or cp.",
            )

        if self.virtual_stages > 1 and (self.pp == 1 or self.pipeline_schedule != "interleaved"):
            raise Contradiction(
                f"virtual_stages is {self.virtual_stages}, with pp {self.pp} and the schedule {self.pipeline_schedule}.",
                "Several stages a device need pp of at least 2 and the interleaved schedule.",
            )
        if self.shard_size is not None and (self.shard_size < 1 or self.data_parallel_size % self.shard_size):
            raise Contradiction(
                f"shard_size {self.shard_size} does not divide the data-parallel size {self.data_parallel_size}.",
                "States are sharded over all data-parallel ranks, or over a divisor of them.",
            )

    @property
    def world_size(self) -> int:
        """Processes in all, one a GPU."""
        return self.nnodes * self.nproc_per_node

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples: world size / (tp x pp x cp)."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update: micro-batch x accumulation x data-parallel size."""
        return self.micro_batch * self.accumulation * self.data_parallel_size
