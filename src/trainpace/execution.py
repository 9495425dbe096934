"""How a step is executed: batches, parallelism, precision, and what is traded for memory.

The words are the field's: a *micro-batch* is what one data-parallel rank processes in one forward + backward; the
*global batch* (effective batch) is what one optimizer update sees.
"""

from __future__ import annotations

from typing import Literal, get_args

from trainpace.errors import Contradiction, TrainpaceError
from trainpace.records import Record

Precision = Literal["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
"""fp32: everything in fp32, TF32 off. tf32: fp32 storage, matrix products in TF32. amp_*: fp32 weights under
autocast. bf16, fp16: weights, gradients and activations in that format. fp8: bf16 with matrix products in FP8."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

ZeroStage = Literal[0, 1, 2, 3]

Engine = Literal["ddp", "unoverlapped", "data_parallel"]
"""ddp: one process a device, gradients reduced under the backward pass (FSDP and ZeRO shard on top of it).
unoverlapped: the same, reduced after the backward pass. data_parallel: torch's old nn.DataParallel, one process for
all devices of a node."""


class Execution(Record):
    """One way to execute a workload. Sizes are counts >= 1.

    With plain data parallelism every process is a data-parallel rank; tensor (`tp`), pipeline (`pp`) and context
    parallelism (`cp`) divide that number. Nodes are not pipeline stages, and the GPUs of a node are not tensor shards.
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
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp"):
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
