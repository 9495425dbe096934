"""Many executions as arrays, and which ranks of each exchange with which.

Ranks are numbered as Megatron and torchtitan do: tensor parallel fastest, then context, data and pipeline. So the ranks that
exchange most share a node first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from trainpace.errors import TrainpaceError
from trainpace.execution import PRECISIONS, Checkpointing, Execution, PipelineSchedule
from trainpace.hardware.cluster import Cluster

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

CHECKPOINTINGS: tuple[Checkpointing, ...] = get_args(Checkpointing)
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
NONE, SELECTIVE, FULL = range(3)
GPIPE, ONE_F_ONE_B, INTERLEAVED = range(3)


class Grid(NamedTuple):
    """n executions as arrays of n; the names are `Execution`'s.

    precision, activation_checkpointing and pipeline_schedule are positions in PRECISIONS, CHECKPOINTINGS and SCHEDULES;
    shard_size 0 stands for all data-parallel ranks.
    """

    micro_batch: Counts
    accumulation: Counts
    world_size: Counts
    tp: Counts
    pp: Counts
    cp: Counts
    precision: Counts
    zero_stage: Counts
    shard_size: Counts
    activation_checkpointing: Counts
    pipeline_schedule: Counts
    virtual_stages: Counts
    reshard_after_forward: Flags
    offload_optimizer: Flags
    offload_parameters: Flags
    sequence_parallel: Flags
    async_tensor_parallel: Flags
    compile: Flags

    def at(self, rows: Any) -> Grid:
        """Some of the executions: a mask, a slice or positions."""
        return Grid(*(array[rows] for array in self))

    @property
    def data_parallel_size(self) -> Counts:
        """Ranks that see different samples; 0 where the others do not divide the world."""
        shards = self.tp * self.pp * self.cp
        return np.where(self.world_size % shards == 0, self.world_size // shards, 0)

    @property
    def collects_gradients(self) -> Flags:
        """FSDP in a pipeline: parameters stay gathered after a backward pass, and gradients are added up in one piece over all
        micro-batches and scattered once, as torch's pipelines have it (PipelineStage.backward_maybe_with_nosync)."""
        return (self.zero_stage >= 3) & (self.pp > 1)

    @property
    def is_megatron(self) -> Flags:
        """Sharded in Megatron's manner: 16-bit weights, if the form is half, have fp32 master copies."""
        return ((self.tp > 1) | (self.pp > 1)) & (self.zero_stage < 3)

    @property
    def casts_shards(self) -> Flags:
        """FSDP's MixedPrecision, which fp32 weights under FSDP stand for here where products are in 16 bits: it casts shards and
        gathers them so, in place of autocast's copies of weights."""
        autocast = [PRECISIONS.index(name) for name in ("amp_fp16", "amp_bf16")]
        return (self.zero_stage >= 3) & np.isin(self.precision, autocast)

    @property
    def fp32_gradients(self) -> Flags:
        """Gradients of 16-bit weights that are exchanged in fp32: Megatron's main gradients in bf16, and what torchtitan's
        FSDP reduces in bf16 and fp8 (MixedPrecisionPolicy.reduce_dtype). fp16's stay as they are, as do those of ZeRO 1 and 2
        without tp or pp, and of Megatron in fp8, whose recipes reduce in bf16 (NeMo's scripts/performance set
        grad_reduce_in_fp32 = False)."""
        bf16, fp8 = (self.precision == PRECISIONS.index(name) for name in ("bf16", "fp8"))
        wide: Flags = (bf16 & self.is_megatron) | ((bf16 | fp8) & (self.zero_stage >= 3))
        return wide

    @property
    def global_batch(self) -> Counts:
        """Samples per optimizer update."""
        return self.micro_batch * self.accumulation * self.data_parallel_size


def _code(name: str, value: Any) -> Any:
    names: dict[str, tuple[str, ...]] = {
        "precision": PRECISIONS, "activation_checkpointing": CHECKPOINTINGS, "pipeline_schedule": SCHEDULES
    }  # fmt: skip
    if name in names:
        return names[name].index(value)
    return 0 if value is None else value


def grid_of(executions: Sequence[Execution]) -> Grid:
    """Executions as a grid. What a grid does not vary (optimizer, engine, memory format) is not in it."""
    return Grid(*(np.array([_code(name, getattr(e, name)) for e in executions]) for name in Grid._fields))


def grid_from(base: Execution, **varied: ArrayLike) -> Grid:
    """`base` with some fields varied: arrays that broadcast to one length, codes where `Grid` has codes."""
    unknown = set(varied) - set(Grid._fields)
    if unknown:
        raise TrainpaceError(f"a grid of executions has no {min(unknown)!r}.")
    shape = np.broadcast_shapes((1,), *(np.shape(values) for values in varied.values()))
    columns = (np.asarray(varied.get(name, _code(name, getattr(base, name)))) for name in Grid._fields)
    return Grid(*(column if column.shape == shape else np.full(shape, column) for column in columns))


def execution_at(grid: Grid, i: int, base: Execution, cluster: Cluster) -> Execution:
    """Execution `i` of a grid; what a grid does not vary is `base`'s. Raises for sizes that contradict each other."""
    values: dict[str, Any] = {name: getattr(grid, name)[i].item() for name in Grid._fields}
    del values["world_size"]
    values["precision"] = PRECISIONS[values["precision"]]
    values["activation_checkpointing"] = CHECKPOINTINGS[values["activation_checkpointing"]]
    values["pipeline_schedule"] = SCHEDULES[values["pipeline_schedule"]]
    values["shard_size"] = values["shard_size"] or None
    return replace(base, nnodes=cluster.nodes, nproc_per_node=cluster.devices_per_node, **values)


class Groups(NamedTuple):
    """Sizes of the groups that exchange, n each, and how many ranks of a group share a node.

    Context-parallel ranks hold the same parameters, so they reduce gradients and shard states together with the
    data-parallel ones: `data` counts both, `shard` those over which states are divided, `replicas` the copies of that.
    """

    data: Counts
    shard: Counts
    replicas: Counts
    tensor_inside: Counts
    context_inside: Counts
    data_inside: Counts
    shard_inside: Counts
    replicas_inside: Counts
    pipeline_inside: Counts


def groups_of(grid: Grid, devices_per_node: int) -> Groups:
    """Groups of every execution on nodes of so many devices."""
    data = np.maximum(grid.data_parallel_size, 1) * grid.cp
    shard = np.where(grid.shard_size > 0, grid.shard_size * grid.cp, data)

    def inside(size: Counts, stride: Counts) -> Counts:
        """Of `size` ranks that lie `stride` apart."""
        return np.minimum(np.maximum(devices_per_node // stride, 1), size)

    return Groups(
        data=data,
        shard=shard,
        replicas=np.maximum(data // shard, 1),
        tensor_inside=inside(grid.tp, np.ones_like(grid.tp)),
        context_inside=inside(grid.cp, grid.tp),
        data_inside=inside(data, grid.tp),
        shard_inside=inside(shard, grid.tp),
        replicas_inside=inside(np.maximum(data // shard, 1), grid.tp * shard),
        # the slowest of the boundaries between neighbouring stages sets the pace
        pipeline_inside=np.where(grid.world_size <= devices_per_node, 2, 1),
    )
