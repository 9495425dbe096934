"""Many executions as arrays, with their process groups, pipeline stages and rules.

Shapes: n is the number of executions. An array of shape (n,) has one value per execution. An array
of shape (n, 3) has one value per execution and kind of pipeline stage. The kinds are the first
stage, a middle stage and the last stage.

Ranks are ordered as in Megatron and torchtitan: the tensor-parallel index varies fastest, then the
context, data and pipeline index. Ranks that communicate most are therefore the first to share a
node.

`RULES` lists the conditions on the execution, the model and the cluster. Each rule checks one
`Execution` or a whole `Grid`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import (
    EXECUTION_FIELDS,
    EXECUTION_RULES,
    NUMBER_FORMATS,
    OPTIMIZERS,
    PRECISIONS,
    Execution,
    Precision,
    Rule,
    host_update_bytes,
)
from trainpace.core.hardware import Cluster
from trainpace.workload import GROUPED, Blocks, Counts, Flags, Floats, Workload


class Grid:
    """n executions, stored as one array of shape (n,) per field of `Execution`.

    Each field is an attribute, for example `grid.micro_batch`. Fields with named choices hold
    integer codes (see `ExecutionField`); compare them with `grid.has("engine", "ddp")`. A
    `shard_size` of 0 means all data-parallel ranks. The arrays are read-only by convention.
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
        """Return a grid of copies of `base` in which some fields vary.

        Args:
            base: Execution that gives the value of every other field.
            **varied: Values per field. They are broadcast to one common shape.

        Raises:
            TrainpaceError: If a name is not a field of `Execution`.
        """
        unknown = set(varied) - set(EXECUTION_FIELDS)
        if unknown:
            raise TrainpaceError(f"unknown execution field {min(unknown)!r}.")
        given = {name: np.asarray(values) for name, values in varied.items()}
        for name, values in given.items():
            field = EXECUTION_FIELDS[name]
            # Numbers and existing codes stay as they are.
            if field.kind == "choice" and values.dtype.kind not in "iu":
                given[name] = np.vectorize(field.encode, otypes=[np.int64])(values)
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
        """Return execution `i`.

        Raises:
            Contradiction: If the sizes of the execution contradict each other.
        """
        values = {
            name: field.decode(self._columns[name][i].item())
            for name, field in EXECUTION_FIELDS.items()
        }
        return Execution(**values)

    def uncompiled(self) -> Grid:
        """Return the same executions without torch.compile."""
        return Grid({**self._columns, "compile": np.zeros_like(self.compile)})

    def has(self, name: str, value: Any) -> Flags:
        """Return a mask of the executions in which field `name` equals `value`."""
        return np.asarray(self._columns[name] == EXECUTION_FIELDS[name].encode(value))

    def groups(self, *columns: NDArray[Any]) -> Iterator[NDArray[np.intp]]:
        """Yield the indices of each group of executions with equal values in all columns."""
        codes = np.zeros(len(self), dtype=np.int64)
        for column in columns:
            values, code_of = np.unique(column, return_inverse=True)
            codes = codes * len(values) + code_of
        for code in np.unique(codes):
            yield np.flatnonzero(codes == code)

    def key(self) -> tuple[bytes, ...]:
        """Return a hashable key. Grids of the same executions have equal keys."""
        return tuple(column.tobytes() for column in self._columns.values())

    @property
    def world_size(self) -> Counts:
        return np.asarray(self.nnodes * self.nproc_per_node)

    @property
    def ranks_per_copy(self) -> Counts:
        """Number of ranks that divide one copy of the model among them: tp x pp x cp."""
        return np.asarray(self.tp * self.pp * self.cp)

    @property
    def data_parallel_size(self) -> Counts:
        """Number of data-parallel ranks, or 0 if tp * pp * cp does not divide the world size."""
        divides = self.world_size % self.ranks_per_copy == 0
        return np.where(divides, self.world_size // self.ranks_per_copy, 0)

    @property
    def experts_tp(self) -> Counts:
        """Number of tensor-parallel ranks per expert: expert_tp if it is set, otherwise tp."""
        return np.where(self.expert_tp > 0, self.expert_tp, self.tp)

    @property
    def shard_ranks(self) -> Counts:
        """Number of data-parallel ranks over which ZeRO or FSDP shards the states."""
        everyone = np.maximum(self.data_parallel_size, 1)
        return np.where(self.shard_size > 0, self.shard_size, everyone)

    @property
    def collects_gradients(self) -> Flags:
        """Mask of executions that reduce gradients only once per step: FSDP (ZeRO 3) in a pipeline.

        They accumulate gradients locally, then reduce-scatter them. Parameters stay gathered after
        a backward pass, as in torch's pipelines (PipelineStage.backward_maybe_with_nosync).
        """
        return (self.zero_stage >= 3) & (self.pp > 1)

    @property
    def is_megatron(self) -> Flags:
        """Mask of executions with tp, pp or ep, but without ZeRO 3.

        They follow Megatron: 16-bit weights have fp32 master copies.
        """
        return ((self.tp > 1) | (self.pp > 1) | (self.ep > 1)) & (self.zero_stage < 3)

    @property
    def is_compiled(self) -> Flags:
        """Mask of executions whose partitioner chooses the saved activations.

        Megatron compiles single functions only, so its autograd saves activations as in eager mode.
        """
        in_functions = self.has("engine", "megatron_core") | self.is_megatron
        return np.asarray(self.compile & ~in_functions)

    @property
    def compiles_loss(self) -> Flags:
        """Mask of executions that compile the model and its loss as a whole.

        FSDP compiles block by block, and leaves the loss outside (torchtitan's parallelize.py).
        """
        whole = (self.zero_stage < 3) & (self.ranks_per_copy == 1)
        return np.asarray(self.is_compiled & whole)

    @property
    def casts_shards(self) -> Flags:
        """Mask of executions with FSDP's MixedPrecision: fp32 weights and 16-bit matmuls.

        FSDP casts the shards to 16 bits before the all-gather. The gathered weights are already
        16-bit, so autocast does not copy them.
        """
        autocasts = np.array([NUMBER_FORMATS[name].autocasts for name in PRECISIONS])
        return np.asarray((self.zero_stage >= 3) & autocasts[self.precision])

    @property
    def fp32_gradients(self) -> Flags:
        """Mask of executions that communicate fp32 gradients although matmuls are 16-bit or fp8.

        True for:
            Megatron in bf16: it reduces its fp32 main gradients.
            FSDP in bf16 or fp8: torchtitan sets MixedPrecisionPolicy.reduce_dtype to fp32.

        False for:
            fp16, and any execution with `pure_16_bit`.
            ZeRO 0 to 2 without tp, pp or ep.
            Megatron in fp8: NeMo's recipes reduce in bf16. Its scripts/performance set
            grad_reduce_in_fp32 = False.
        """
        bf16, fp8 = self.has("precision", "bf16"), self.has("precision", "fp8")
        wide = (bf16 & self.is_megatron) | ((bf16 | fp8) & (self.zero_stage >= 3))
        return np.asarray(wide & ~self.pure_16_bit)

    @property
    def global_batch(self) -> Counts:
        """Samples per optimizer update."""
        return np.asarray(self.micro_batch * self.accumulation * self.data_parallel_size)


class ParameterGroups(NamedTuple):
    """Sizes of the process groups that hold the same parameters. All arrays have shape (n,).

    Attributes:
        data: Number of ranks that hold the same parameters.
        shard: Number of ranks over which one copy of the states is sharded.
        replicas: Number of sharded copies of the states: data / shard.
        data_inside: Ranks of the `data` group that share a node.
        shard_inside: Ranks of the `shard` group that share a node.
        replicas_inside: Ranks of the `replicas` group that share a node.
    """

    data: Counts
    shard: Counts
    replicas: Counts
    data_inside: Counts
    shard_inside: Counts
    replicas_inside: Counts


class Groups(NamedTuple):
    """Process groups that communicate. All arrays have shape (n,).

    Context-parallel ranks hold the same parameters. They therefore reduce gradients and shard
    states together with the data-parallel ranks.

    Attributes:
        whole: Groups for parameters outside experts. They include context-parallel ranks.
        experts: Groups for parameters of experts, which are divided over ep * expert_tp ranks.
        tensor_inside: Tensor-parallel ranks of one group that share a node. The other `_inside`
            fields count the same for context, pipeline, expert and expert-tensor parallelism.
    """

    whole: ParameterGroups
    experts: ParameterGroups
    tensor_inside: Counts
    context_inside: Counts
    pipeline_inside: Counts
    expert_inside: Counts
    expert_tensor_inside: Counts


def groups_of(grid: Grid, devices_per_node: int) -> Groups:
    """Return the process groups of every execution.

    Args:
        grid: The executions.
        devices_per_node: Devices per node, or per NVLink domain.
    """
    data = np.maximum(grid.data_parallel_size, 1) * grid.cp
    shard = np.where(grid.shard_size > 0, grid.shard_size * grid.cp, data)
    one = np.ones_like(grid.tp)

    def inside(size: Counts, stride: Counts) -> Counts:
        """Return how many of `size` ranks share a node if their numbers differ by `stride`."""
        return np.minimum(np.maximum(devices_per_node // stride, 1), size)

    def copies(data: Counts, shard: Counts, stride: Counts) -> ParameterGroups:
        replicas = np.maximum(data // shard, 1)
        apart = ((data, stride), (shard, stride), (replicas, stride * shard))
        return ParameterGroups(data, shard, replicas, *(inside(*group) for group in apart))

    # Ranks that together hold one copy of all experts, number of copies, and shards of each copy.
    expert_ranks = grid.ep * grid.experts_tp
    expert_copies = np.maximum(data * grid.tp // expert_ranks, 1)
    expert_shards = np.maximum(np.minimum(shard * grid.tp // expert_ranks, expert_copies), 1)
    return Groups(
        whole=copies(data, shard, grid.tp),
        experts=copies(expert_copies, expert_shards, expert_ranks),
        tensor_inside=inside(grid.tp, one),
        context_inside=inside(grid.cp, grid.tp),
        # The slowest link between neighboring stages sets the pace. If there are several nodes,
        # one of these links crosses nodes, so the group counts one rank per node.
        pipeline_inside=np.where(grid.world_size <= devices_per_node, 2, 1),
        expert_inside=inside(grid.ep, grid.experts_tp),
        expert_tensor_inside=inside(grid.experts_tp, one),
    )


class Stages(NamedTuple):
    """Contents of the pipeline stages. All arrays have shape (n, 3).

    The three columns are the first stage, a middle stage and the last stage. A model on a single
    stage uses the first column only. A kind of stage that does not exist has no blocks.

    Blocks may not divide evenly among the pp * virtual_stages chunks. The first stages then hold
    one more block per virtual stage. The last stage holds the fewest, because it also has the
    head. Frameworks let users choose this split.

    There may be up to two more chunks than blocks, for example 126 layers on 16 x 8 chunks. The
    head then takes the place of one block, and the embedding the place of another. Megatron has
    the options --account-for-loss-in-pipeline-split and --account-for-embedding-in-pipeline-split
    for this.

    Attributes:
        number: Number of stages of this kind.
        blocks: Repeated blocks in one stage. For middle stages, the count of the fullest stage.
        has_first: 1 if the stage holds the layers before the blocks, otherwise 0.
        has_last: 1 if the stage holds the layers after the blocks, otherwise 0.
        parameters: Parameters of one tensor-parallel rank of the stage.
        mean_share: Mean blocks of the middle stages, divided by the blocks of the fullest one.
        expert_share: Share of the parameters that belongs to experts, if they are divided
            differently from the other parameters. Otherwise 0, because the share then does not
            matter.
    """

    number: Floats
    blocks: Floats
    has_first: Floats
    has_last: Floats
    parameters: Floats
    mean_share: Floats
    expert_share: Floats

    def shard(self, groups: Groups) -> Floats:
        """Return the number of ranks over which the states are sharded, shape (n, 3).

        Expert parameters have fewer copies than the others. The result is therefore a harmonic
        mean over all parameters, and can be fractional.
        """
        of_experts = self.expert_share / groups.experts.shard[:, None]
        of_rest = (1 - self.expert_share) / groups.whole.shard[:, None]
        return np.asarray(1 / (of_rest + of_experts))


def has_vocabulary_head(blocks: Blocks) -> bool:
    """Return True if the model has an output matmul over the vocabulary, as language models do.

    Text classifiers have an embedding, but not this matmul.
    """
    # A column-parallel matmul outside the blocks (count 0) is the head.
    return any(
        role == "column" and not count
        for role, count in zip(blocks.roles, blocks.operator_counts, strict=True)
    )


def stages_of(grid: Grid, blocks: Blocks | None) -> tuple[Stages, float]:
    """Return the stages of every execution, and the parameter count of the whole model.

    Without blocks, the parameter count is unknown. The whole model then counts as 1, in its only
    stage.
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
    # If embedding and head do not share their weights, each has half of these parameters.
    head = vocabulary / 2 if has_vocabulary_head(blocks) and not blocks.tied_parameters else 0.0
    before = vocabulary - head
    behind = np.where(pp > 1, blocks.tied_parameters or head, head)
    rest = blocks.outside_parameters - vocabulary
    parameters = held * block[:, None]
    parameters += has_first * (before / tp + rest)[:, None] + has_last * (behind / tp)[:, None]
    parameters += experts
    apart = (grid.ep * grid.experts_tp != grid.tp)[:, None] & (experts > 0)
    expert_share = np.where(apart, experts / np.maximum(parameters, 1.0), 0.0)
    total = float(blocks.count * blocks.parameters + blocks.outside_parameters)
    return Stages(number, held, has_first, has_last, parameters, mean_share, expert_share), total


def _held_blocks(grid: Grid, blocks: Blocks, number: Floats) -> tuple[Floats, Floats]:
    """Return `Stages.blocks` and `Stages.mean_share`, each of shape (n, 3)."""
    pp = grid.pp.astype(np.float64)
    one = np.ones_like(pp)
    chunks = pp * grid.virtual_stages
    most = np.ceil(blocks.count / chunks) * grid.virtual_stages
    least = np.where(
        pp == 2, blocks.count - most, np.floor(blocks.count / chunks) * grid.virtual_stages
    )
    first = np.minimum(most, blocks.count)
    # With one chunk more than blocks, the last chunk holds the head and no block. With two more,
    # the first chunk in addition holds the embedding and no block.
    more = chunks - blocks.count
    first = np.where((pp > 1) & (more > 1), most - 1, first)
    least = np.where((pp > 1) & (more > 0), most - 1, least)
    held = np.stack([first, most, least], axis=1) * (number > 0)
    mean = (blocks.count - first - least) / np.maximum(pp - 2, 1)
    mean_share = np.stack([one, np.where(pp > 2, np.clip(mean / most, 0, 1), one), one], axis=1)
    return held, mean_share


# ---- rules, and smaller executions for baselines

MOST_SHOWN = 64
"""Largest size that an error message suggests."""
STAGES_WITHOUT_BLOCKS = 2
"""Number of stages that may hold no block: one for the embedding and one for the head."""


class Facts(NamedTuple):
    """Properties of the model and the cluster that the rules read.

    The counts of blocks, heads and experts are 0 for a model without repeated blocks.
    """

    cluster: Cluster
    sequence_length: int | None
    has_blocks: bool
    blocks: int
    heads: int
    key_value_heads: int
    experts: int
    whole_step: bool

    @classmethod
    def of(cls, workload: Workload, blocks: Blocks | None, cluster: Cluster) -> Facts:
        names = "count", "heads", "key_value_heads", "experts"
        sizes: Any = [0 if blocks is None else getattr(blocks, name) for name in names]
        has_blocks = blocks is not None and blocks.are_most
        shape = [has_blocks, *sizes, workload.whole_step]
        return cls(cluster, workload.sequence_length, *shape)


def _possible(n: int) -> str:
    return ", ".join(str(size) for size in divisors(n) if size <= MOST_SHOWN)


def _tp_hint(e: Execution, f: Facts) -> str:
    return f"Possible tp: {_possible(f.heads)}." if f.heads else "Use tp 1: the model has no heads."


def _stages_in_words(e: Execution) -> str:
    virtual = "" if e.virtual_stages == 1 else f" x virtual_stages {e.virtual_stages}"
    return f"{e.pp * e.virtual_stages} pipeline stages (pp {e.pp}{virtual})"


RULES = (
    Rule(
        "world_size",
        lambda e, f: e.world_size != f.cluster.num_devices,
        lambda e, f: (
            f"the execution has {e.world_size} processes, and the cluster"
            f" {f.cluster.num_devices} devices ({f.cluster.nodes} nodes of"
            f" {f.cluster.devices_per_node}).",
            "One process runs on each device.",
        ),
    ),
    *EXECUTION_RULES,
    Rule(
        "no blocks",
        lambda e, f: (e.ranks_per_copy > 1) & (not f.has_blocks),
        lambda e, f: (
            f"tp {e.tp}, pp {e.pp} and cp {e.cp} need a model with repeated blocks, and this one"
            " has none.",
            "Use data parallelism, ZeRO or FSDP.",
        ),
    ),
    Rule(
        "tp",
        lambda e, f: (e.tp > 1) & (f.heads % e.tp != 0),
        lambda e, f: (
            f"tp {e.tp} does not divide the model's {f.heads} attention heads.",
            _tp_hint(e, f),
        ),
    ),
    Rule(
        "key_value_heads",
        # With more ranks than key-value heads, each head must have the same number of copies.
        lambda e, f: (
            (e.tp > 1)
            & (f.key_value_heads > 0)
            & ((f.key_value_heads % e.tp != 0) & (e.tp % max(1, f.key_value_heads) != 0))
        ),
        lambda e, f: (
            f"tp {e.tp} and the model's {f.key_value_heads} key-value heads do not divide each"
            " other.",
            "Use a tp that divides the number of key-value heads, or a multiple of that number.",
        ),
    ),
    Rule(
        "pp",
        lambda e, f: (
            e.pp * e.virtual_stages > max(1, f.blocks) + STAGES_WITHOUT_BLOCKS * (e.pp > 1)
        ),
        lambda e, f: (
            f"{_stages_in_words(e)} are too many for {f.blocks} blocks: only the first and the"
            " last stage may have none.",
            f"Use at most {f.blocks + STAGES_WITHOUT_BLOCKS} stages.",
        ),
    ),
    Rule(
        "cp",
        lambda e, f: (e.cp > 1) & ((f.sequence_length or 1) % e.cp != 0),
        lambda e, f: (
            f"cp {e.cp} does not divide the sequence length {f.sequence_length}.",
            "Every rank needs the same number of tokens.",
        ),
    ),
    Rule(
        "accumulation",
        lambda e, f: (
            e.has("pipeline_schedule", "interleaved") & (e.pp > 1) & (e.accumulation % e.pp != 0)
        ),
        lambda e, f: (
            "the interleaved schedule needs a number of micro-batches that is a multiple of"
            f" pp {e.pp}; `accumulation` is {e.accumulation}.",
            f"Use {-(-e.accumulation // e.pp) * e.pp}, or the schedule 1f1b.",
        ),
    ),
    Rule(
        "engine",
        lambda e, f: (
            e.has("engine", "data_parallel") & ((e.ranks_per_copy > 1) | (e.zero_stage > 0))
        ),
        lambda e, f: (
            f"nn.DataParallel cannot run tp {e.tp}, pp {e.pp}, cp {e.cp} and ZeRO stage"
            f" {e.zero_stage}.",
            "Use the engine ddp.",
        ),
    ),
    Rule(
        "nodes",
        lambda e, f: e.has("engine", "data_parallel") & (e.world_size > f.cluster.devices_per_node),
        lambda e, f: (
            f"nn.DataParallel is one process on one node of {f.cluster.devices_per_node} devices;"
            f" the world has {e.world_size}.",
            "Use the engine ddp.",
        ),
    ),
    Rule(
        "offload_parameters",
        lambda e, f: e.offload_parameters & (e.zero_stage < 3),
        lambda e, f: (
            f"only ZeRO stage 3 keeps its parameters on the host; the stage is {e.zero_stage}.",
            "Use `zero_stage` 3, or offload only the optimizer.",
        ),
    ),
    Rule(
        "ep",
        lambda e, f: (e.ep > 1) & ((f.experts == 0) | (f.experts % e.ep != 0)),
        lambda e, f: (
            f"ep {e.ep} cannot divide the model's experts: "
            + (f"it has {f.experts} experts." if f.experts else "it has none."),
            f"Possible ep: {_possible(f.experts)}." if f.experts else "Use ep 1.",
        ),
    ),
    Rule(
        "whole step",
        lambda e, f: f.whole_step & (e.accumulation > 1),
        lambda e, f: (
            "the model's step calls the optimizer itself, so gradients cannot be accumulated around"
            f" it (`accumulation` is {e.accumulation}).",
            "Accumulate in the step itself.",
        ),
    ),
)
"""Conditions on the execution, the model and the cluster. The first broken rule is reported."""

CLASHES = ("", *(rule.name for rule in RULES))
"""Names of `RULES`. `ForecastTable.clash` holds indices of this tuple; 0 means no broken rule."""


def clashes(grid: Grid, facts: Facts) -> Counts:
    """Return the index in `CLASHES` of the first broken rule of every execution, shape (n,)."""
    codes = np.zeros_like(grid.tp)
    for code in range(len(RULES), 0, -1):
        codes = np.where(RULES[code - 1].is_broken(grid, facts), code, codes)
    return codes


def contradiction(clash: int, grid: Grid, i: int, facts: Facts) -> TrainpaceError:
    """Return the error that explains which rule execution `i` breaks.

    Args:
        clash: Index in `CLASHES` of the broken rule. It must not be 0.
        grid: The executions.
        i: Index of the execution in the grid.
        facts: Properties of the model and the cluster, for the message.
    """
    try:
        execution = grid.execution(i)
    except TrainpaceError as error:  # The sizes of the execution contradict each other.
        return error
    return Contradiction(*RULES[clash - 1].words(execution, facts))


SEARCHED_RULES = ("offload_parameters", "accumulation", "shard_size")
"""Rules that depend only on the execution. `usable` also checks them.

A search combines their settings without looking at the rules.
"""


def usable(grid: Grid, start: Execution) -> Flags:
    """Return a mask of the executions that are worth trying in a search from `start`, shape (n,).

    The mask is False if a setting would have no effect, or if no engine supports the combination.
    The ZeRO stage and `reshard_after_forward` of `start` itself are accepted.
    """
    ranks, stage = grid.data_parallel_size, grid.zero_stage
    # DeepSpeed ZeRO 2 with offload is useful even on one GPU: each gradient moves to the host as
    # soon as it is computed.
    offloads_in_stage_2 = grid.offload_optimizer & (stage == 2)
    # These rules read neither the model nor the cluster, so they need no facts.
    broken = [rule.is_broken(grid, None) for rule in RULES if rule.name in SEARCHED_RULES]
    wrong = [
        # Sharding over a single rank has no effect.
        (stage > 0) & (ranks <= 1) & (stage != start.zero_stage) & ~offloads_in_stage_2,
        # Engines offload the optimizer of several ranks only with ZeRO.
        grid.offload_optimizer & (stage == 0) & (ranks != 1),
        # Sequence parallelism splits activations over tensor-parallel ranks.
        grid.sequence_parallel & (grid.tp == 1),
        # torch overlaps matmuls with collectives only in compiled, sequence-parallel code.
        grid.async_tensor_parallel & ~(grid.sequence_parallel & grid.compile),
        # Only ZeRO 3 gathers parameters, so only ZeRO 3 can reshard them.
        (stage != 3) & (grid.reshard_after_forward != start.reshard_after_forward),
        *broken,
    ]
    return np.asarray(~np.any(wrong, axis=0))


AUTOCAST_EXPERTS = (
    "autocast leaves grouped matmuls of experts in fp32, which is not forecast: use bf16, or FSDP's"
    " mixed precision (ZeRO 3)"
)


def unsupported(
    grid: Grid, workload: Workload, precision: Precision
) -> Iterator[tuple[Flags, str]]:
    """Yield (mask, reason) pairs for the executions that cannot be forecast.

    Args:
        grid: Executions of one precision.
        workload: The traced model.
        precision: Precision of all executions in the grid.
    """
    form = workload.form(precision)
    if NUMBER_FORMATS[precision].autocasts and GROUPED in form.operators.function:
        yield grid.zero_stage < 3, AUTOCAST_EXPERTS
    if workload.only_batch is not None:
        yield grid.micro_batch != workload.only_batch, workload.only_batch_in_words
    if workload.mode == "train":
        yield from _impossible_updates(grid, workload.optimizer)
    if form.blocks is not None and form.blocks.are_most:
        return
    divided = (grid.ranks_per_copy > 1) | (grid.ep > 1)
    yield (
        divided,
        f"{workload.model} has no repeated blocks, which tensor, pipeline, context and expert"
        " parallelism need.",
    )
    if form.blocks is None and not workload.checkpointed:
        yield (
            ~grid.has("activation_checkpointing", "none") & ~divided,
            f"{workload.model} was traced without activation checkpointing, and has no repeated"
            " blocks to recompute.",
        )


def _impossible_updates(grid: Grid, optimizer: str) -> Iterator[tuple[Flags, str]]:
    if host_update_bytes(optimizer) is None:
        on_host = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.on_host)
        yield (
            grid.offload_optimizer,
            f"{optimizer} cannot be offloaded: engines update on the host with {on_host}.",
        )
    kind = OPTIMIZERS.get(optimizer)
    if kind is None or not kind.whole_matrices:
        return
    if optimizer == "muon":
        needs = "muon needs whole matrices, but each rank holds only a part of them with"
        yield grid.tp > 1, f"{needs} tensor parallelism. Use ZeRO 1 or 2."
        yield grid.zero_stage >= 3, f"{needs} FSDP or ZeRO 3. Use ZeRO 1 or 2."
    else:
        yield (
            (grid.zero_stage == 1) | (grid.zero_stage == 2),
            f"{optimizer} works on rows and columns of matrices, but ZeRO 1 and 2 shard flat"
            " vectors. Use ZeRO 3 (FSDP2).",
        )


def divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def doublings(most: int) -> list[int]:
    """Return the powers of two below `most`, followed by `most`."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def on_one_device(execution: Execution) -> Execution:
    """Return the same execution on one device, the usual baseline of scaling efficiency."""
    return replace(
        execution,
        nnodes=1,
        nproc_per_node=1,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        expert_tp=None,
        expert_load=1.0,
        engine="ddp",
        zero_stage=0,
        shard_size=None,
        offload_optimizer=False,
        offload_parameters=False,
        sequence_parallel=False,
        virtual_stages=1,
        pipeline_schedule="1f1b",
    )


def fewer_ranks(execution: Execution, devices_per_node: int) -> list[Execution]:
    """Return the execution with fewer data-parallel ranks, smallest first.

    These executions are baselines of scaling efficiency if one device cannot hold the model. A
    forecast for one device would then be of a run that does not fit into memory, and the efficiency
    relative to it could exceed 1.

    If an execution needs several nodes, it uses all devices of each node.
    """
    smaller = []
    for ranks in divisors(execution.data_parallel_size)[:-1]:
        world = execution.ranks_per_copy * ranks
        nodes = -(-world // devices_per_node)
        shard = None if execution.shard_size is None else min(execution.shard_size, ranks)
        experts = execution.pp * execution.ep * execution.experts_tp
        is_possible = (nodes == 1 or world % devices_per_node == 0) and (
            execution.ep == 1 or world % experts == 0
        )
        if is_possible and (shard is None or ranks % shard == 0):
            smaller.append(
                replace(execution, nnodes=nodes, nproc_per_node=world // nodes, shard_size=shard)
            )
    return smaller
