"""Executions as arrays: sizes, process groups, and the contents of pipeline stages.

Ranks are ordered as in Megatron and torchtitan: tensor varies fastest, then context, data and
pipeline. Ranks that communicate most therefore share a node first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import (
    EXECUTION_FIELDS,
    NUMBER_FORMATS,
    PRECISIONS,
    Execution,
    ExecutionField,
)
from trainpace.workload import Blocks, Counts, Flags, Floats


class Grid:
    """Executions as arrays of length n, one per field of `Execution`: `grid.micro_batch`.

    The values of a choice are codes (see `ExecutionField`): `grid.has("engine", "ddp")` compares.
    shard_size 0 stands for all data-parallel ranks. The arrays are read-only by convention.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = columns

    @classmethod
    def of(cls, executions: Sequence[Execution]) -> Grid:
        return cls(
            {
                name: np.array([field.encode(getattr(e, name)) for e in executions])
                for name, field in EXECUTION_FIELDS.items()
            }
        )

    @classmethod
    def vary(cls, base: Execution, **varied: ArrayLike) -> Grid:
        """Return a grid of `base` with some fields set to arrays, which broadcast to one length."""
        unknown = set(varied) - set(EXECUTION_FIELDS)
        if unknown:
            raise TrainpaceError(f"unknown execution field {min(unknown)!r}.")
        given = {name: _coded(EXECUTION_FIELDS[name], values) for name, values in varied.items()}
        shape = np.broadcast_shapes((1,), *(values.shape for values in given.values()))
        columns = {}
        for name, field in EXECUTION_FIELDS.items():
            column = given[name] if name in given else np.asarray(field.encode(getattr(base, name)))
            columns[name] = column if column.shape == shape else np.full(shape, column)
        return cls(columns)

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name in EXECUTION_FIELDS:
            return self._columns[name]
        raise AttributeError(f"a grid of executions has no {name!r}")

    def __len__(self) -> int:
        return len(self._columns["tp"])

    def at(self, rows: Any) -> Grid:
        """Return the executions selected by a mask, a slice or indices."""
        return Grid({name: column[rows] for name, column in self._columns.items()})

    def execution(self, i: int) -> Execution:
        """Return execution `i`. Raises `Contradiction` if its sizes contradict each other."""
        values = {
            name: field.decode(self._columns[name][i].item())
            for name, field in EXECUTION_FIELDS.items()
        }
        return Execution(**values)

    def has(self, name: str, value: Any) -> Flags:
        """Return a mask of the executions whose field has this value."""
        return np.asarray(self._columns[name] == EXECUTION_FIELDS[name].encode(value))

    def groups(self, *columns: NDArray[Any]) -> Iterator[NDArray[np.intp]]:
        """Yield the indices of each group of executions that agree in all columns."""
        codes = np.zeros(len(self), dtype=np.int64)
        for column in columns:
            values, code_of = np.unique(column, return_inverse=True)
            codes = codes * len(values) + code_of
        for code in np.unique(codes):
            yield np.flatnonzero(codes == code)

    def key(self) -> tuple[bytes, ...]:
        """Return a hashable value that is equal for grids of the same executions."""
        return tuple(column.tobytes() for column in self._columns.values())

    @property
    def world_size(self) -> Counts:
        return np.asarray(self.nnodes * self.nproc_per_node)

    @property
    def data_parallel_size(self) -> Counts:
        """Ranks that see different samples; 0 if the other sizes do not divide the world size."""
        shards = self.tp * self.pp * self.cp
        return np.where(self.world_size % shards == 0, self.world_size // shards, 0)

    @property
    def experts_tp(self) -> Counts:
        """Tensor-parallel ranks of each expert."""
        return np.where(self.expert_tp > 0, self.expert_tp, self.tp)

    @property
    def shard_ranks(self) -> Counts:
        """Data-parallel ranks that share the sharded states."""
        everyone = np.maximum(self.data_parallel_size, 1)
        return np.where(self.shard_size > 0, self.shard_size, everyone)

    @property
    def collects_gradients(self) -> Flags:
        """Mask of FSDP in a pipeline, which accumulates gradients and reduce-scatters them once.

        Parameters stay gathered after a backward pass, as in torch's pipelines
        (PipelineStage.backward_maybe_with_nosync).
        """
        return (self.zero_stage >= 3) & (self.pp > 1)

    @property
    def is_megatron(self) -> Flags:
        """Mask of Megatron-style sharding: 16-bit weights have fp32 master copies."""
        return ((self.tp > 1) | (self.pp > 1) | (self.ep > 1)) & (self.zero_stage < 3)

    @property
    def copies(self) -> Counts:
        """Number of pipeline ranks that hold each stage: two under DualPipe."""
        return np.where(self.has("pipeline_schedule", "dualpipe") & (self.pp > 1), 2, 1)

    @property
    def casts_shards(self) -> Flags:
        """Mask of FSDP's MixedPrecision: fp32 weights and 16-bit matmuls.

        FSDP casts shards before the all-gather, so autocast does not copy weights.
        """
        autocasts = np.array([NUMBER_FORMATS[name].autocasts for name in PRECISIONS])
        return np.asarray((self.zero_stage >= 3) & autocasts[self.precision])

    @property
    def fp32_gradients(self) -> Flags:
        """Mask of executions with 16-bit weights that communicate gradients in fp32.

        True for Megatron in bf16 (main gradients), and for torchtitan's FSDP in bf16 and
        fp8 (MixedPrecisionPolicy.reduce_dtype). False for fp16, for ZeRO 1 and
        2 without tp or pp, and for Megatron in fp8, whose recipes reduce in bf16 (NeMo's
        scripts/performance set grad_reduce_in_fp32 = False).
        """
        bf16, fp8 = self.has("precision", "bf16"), self.has("precision", "fp8")
        wide = (bf16 & self.is_megatron) | ((bf16 | fp8) & (self.zero_stage >= 3))
        return np.asarray(wide & ~self.pure_16_bit)

    @property
    def global_batch(self) -> Counts:
        """Samples per optimizer update."""
        return np.asarray(self.micro_batch * self.accumulation * self.data_parallel_size)


def _coded(field: ExecutionField, values: ArrayLike) -> NDArray[Any]:
    """Return the codes of a field's values. Codes are returned unchanged."""
    array = np.asarray(values)
    if field.kind != "choice" or array.dtype.kind in "iu":
        return array
    names, positions = np.unique(array, return_inverse=True)
    return np.array([field.encode(name) for name in names.tolist()])[positions].reshape(array.shape)


class Copies(NamedTuple):
    """Sizes of process groups with the same parameters, and their ranks per node (n each).

    data: all ranks of a group. shard: ranks that shard one copy of the states. replicas: copies.
    """

    data: Counts
    shard: Counts
    replicas: Counts
    data_inside: Counts
    shard_inside: Counts
    replicas_inside: Counts


class Groups(NamedTuple):
    """Process groups that communicate: parameter copies, and ranks of a group per node (n each).

    Context-parallel ranks hold the same parameters, so they reduce gradients and shard states
    together with the data-parallel ones: `whole` counts both. `experts` are the copies of a rank's
    experts, which ep and expert_tp divide.
    """

    whole: Copies
    experts: Copies
    tensor_inside: Counts
    context_inside: Counts
    pipeline_inside: Counts
    expert_inside: Counts
    expert_tensor_inside: Counts


def groups_of(grid: Grid, devices_per_node: int) -> Groups:
    """Return the process groups for nodes or NVLink domains of `devices_per_node` devices."""
    data = np.maximum(grid.data_parallel_size, 1) * grid.cp * grid.copies
    shard = np.where(grid.shard_size > 0, grid.shard_size * grid.cp, data)
    one = np.ones_like(grid.tp)

    def inside(size: Counts, stride: Counts) -> Counts:
        """Return how many of `size` ranks that lie `stride` apart share a node."""
        return np.minimum(np.maximum(devices_per_node // stride, 1), size)

    def copies(data: Counts, shard: Counts, stride: Counts) -> Copies:
        replicas = np.maximum(data // shard, 1)
        apart = ((data, stride), (shard, stride), (replicas, stride * shard))
        return Copies(data, shard, replicas, *(inside(*group) for group in apart))

    experts_of_one = grid.ep * grid.experts_tp
    of_experts = np.maximum(data * grid.tp // experts_of_one, 1)
    divided = np.maximum(np.minimum(shard * grid.tp // experts_of_one, of_experts), 1)
    return Groups(
        whole=copies(data, shard, grid.tp),
        experts=copies(of_experts, divided, experts_of_one),
        tensor_inside=inside(grid.tp, one),
        context_inside=inside(grid.cp, grid.tp),
        # the slowest link between neighboring stages sets the pace
        pipeline_inside=np.where(grid.world_size <= devices_per_node, 2, 1),
        expert_inside=inside(grid.ep, grid.experts_tp),
        expert_tensor_inside=inside(grid.experts_tp, one),
    )


class Stages(NamedTuple):
    """Content of pipeline stages by kind: the first, a middle and the last one (n x 3).

    A single stage counts as the first. A kind that does not exist has no blocks.

    number: stages of the kind. blocks: repeated blocks in one stage; for middle stages, in the
    fullest. mean_share: the mean over the middle stages as a share of the fullest. has_first,
    has_last: whether it holds the layers before or after the blocks. parameters: those of one
    tensor-parallel rank. expert_share: the share that expert parallelism divides differently
    from tensor parallelism, 0 if both divide alike.

    If stages times virtual stages do not divide the blocks, the first stages hold one more block
    (of each virtual stage) and the last the fewest, since it has the head as well; frameworks let
    users choose this. The stages may exceed the blocks by two: the head and then the embedding
    count as a block (Megatron's --account-for-loss-in-pipeline-split and
    --account-for-embedding-in-pipeline-split), as with 126 layers on 16 x 8 stages.
    """

    number: Floats
    blocks: Floats
    has_first: Floats
    has_last: Floats
    parameters: Floats
    mean_share: Floats
    expert_share: Floats

    def shard(self, groups: Groups) -> Floats:
        """Return the ranks that share a parameter's states (n x 3).

        This is a mean over all parameters, because expert parameters have fewer copies.
        """
        of_experts = self.expert_share / groups.experts.shard[:, None]
        of_rest = (1 - self.expert_share) / groups.whole.shard[:, None]
        return np.asarray(1 / (of_rest + of_experts))


def has_vocabulary_head(blocks: Blocks) -> bool:
    """Return True if a matmul over the vocabulary follows the blocks.

    Text classifiers have only an embedding.
    """
    return any(
        role == "column" and not count
        for role, count in zip(blocks.roles, blocks.operator_counts, strict=True)
    )


def stages_of(grid: Grid, blocks: Blocks | None) -> tuple[Stages, float]:
    """Return the stages of every execution, and the parameters of the whole model.

    A model without blocks counts as one parameter.
    """
    pp, tp = grid.pp.astype(np.float64), grid.tp.astype(np.float64)
    one, zero = np.ones_like(pp), np.zeros_like(pp)
    number = np.stack([one, np.maximum(pp - 2, 0), np.minimum(pp - 1, 1)], axis=1)
    has_first = np.stack([one, zero, zero], axis=1)
    has_last = np.stack([np.where(pp == 1, one, zero), zero, np.where(pp > 1, one, zero)], axis=1)
    if blocks is None:
        none, whole = np.zeros_like(number), np.ones_like(number)
        return Stages(number, none, has_first, has_last, number, whole, none), 1.0
    held, mean_share = _held_blocks(grid, blocks, number)
    block = blocks.parameters - blocks.expert_parameters - blocks.tensor_parameters * (1 - 1 / tp)
    experts = held * (blocks.expert_parameters / (grid.ep * grid.experts_tp))[:, None]
    vocabulary = blocks.outside_tensor_parameters
    # An untied embedding and head have the same size.
    head = vocabulary / 2 if has_vocabulary_head(blocks) and not blocks.tied_parameters else 0.0
    before = vocabulary - head
    behind = np.where(pp > 1, blocks.tied_parameters or head, head)
    rest = blocks.outside_parameters - vocabulary
    parameters = held * block[:, None]
    parameters += has_first * (before / tp + rest)[:, None] + has_last * (behind / tp)[:, None]
    parameters += experts
    # DualPipe's ranks hold their own stage and the stage at the other end.
    mirrored = (grid.copies > 1)[:, None]
    parameters = np.where(mirrored, parameters + parameters[:, ::-1] * (number > 0), parameters)
    experts = np.where(mirrored, experts + experts[:, ::-1] * (number > 0), experts)
    apart = (grid.ep * grid.experts_tp != grid.tp)[:, None] & (experts > 0)
    expert_share = np.where(apart, experts / np.maximum(parameters, 1.0), 0.0)
    total = float(blocks.count * blocks.parameters + blocks.outside_parameters)
    return Stages(number, held, has_first, has_last, parameters, mean_share, expert_share), total


def _held_blocks(grid: Grid, blocks: Blocks, number: Floats) -> tuple[Floats, Floats]:
    """Return the blocks in each kind of stage, and the mean share of the middle ones (n x 3)."""
    pp = grid.pp.astype(np.float64)
    one = np.ones_like(pp)
    chunks = pp * grid.virtual_stages
    most = np.ceil(blocks.count / chunks) * grid.virtual_stages
    least = np.where(
        pp == 2, blocks.count - most, np.floor(blocks.count / chunks) * grid.virtual_stages
    )
    first = np.minimum(most, blocks.count)
    more = chunks - blocks.count  # number of end stages (embedding, head) without a block
    first = np.where((pp > 1) & (more > 1), most - 1, first)
    least = np.where((pp > 1) & (more > 0), most - 1, least)
    held = np.stack([first, most, least], axis=1) * (number > 0)
    mean = (blocks.count - first - least) / np.maximum(pp - 2, 1)
    mean_share = np.stack([one, np.where(pp > 2, np.clip(mean / most, 0, 1), one), one], axis=1)
    return held, mean_share
