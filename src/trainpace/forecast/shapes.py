"""Checks whether a model and a cluster allow an execution, and smaller executions for baselines.

`RULES` lists the conditions. Each rule checks one `Execution` or a whole `Grid`. For a grid of n
executions, masks and codes have shape (n,).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import (
    EXECUTION_RULES,
    NUMBER_FORMATS,
    OPTIMIZERS,
    Execution,
    Precision,
    Rule,
    host_update_bytes,
)
from trainpace.core.hardware import Cluster
from trainpace.forecast.grid import Grid
from trainpace.workload import GROUPED, Blocks, Counts, Flags, Workload

MOST_SHOWN = 64
"""Largest size that an error message suggests."""
ENDS = 2
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
    def of(cls, workload: Workload, blocks: Blocks | None, cluster: Cluster) -> "Facts":
        names = "count", "heads", "key_value_heads", "experts"
        sizes: Any = [0 if blocks is None else getattr(blocks, name) for name in names]
        has_blocks = blocks is not None
        shape = [has_blocks, *sizes, workload.whole_step]
        return cls(cluster, workload.sequence_length, *shape)


def _shards(e: Any) -> Any:
    return e.tp * e.pp * e.cp


def _possible(n: int) -> str:
    return ", ".join(str(size) for size in divisors(n) if size <= MOST_SHOWN)


def _tp_hint(e: Execution, f: Facts) -> str:
    return f"Possible tp: {_possible(f.heads)}." if f.heads else "Use tp 1: the model has no heads."


def _stages_in_words(e: Execution) -> str:
    if e.virtual_stages == 1:
        return f"pp {e.pp}"
    return f"pp {e.pp} x virtual_stages {e.virtual_stages} = {e.pp * e.virtual_stages}"


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
        lambda e, f: (_shards(e) > 1) & (not f.has_blocks),
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
            "Every rank needs the same number of them, or copies of one.",
        ),
    ),
    Rule(
        "pp",
        lambda e, f: e.pp * e.virtual_stages > max(1, f.blocks) + ENDS * (e.pp > 1),
        lambda e, f: (
            f"{_stages_in_words(e)} stages need a block each, except the embedding's and the"
            f" head's; the model has {f.blocks} blocks.",
            f"Use at most {f.blocks + ENDS} stages.",
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
            f" pp {e.pp}; accumulation is {e.accumulation}.",
            f"Use {-(-e.accumulation // e.pp) * e.pp}, or the schedule 1f1b.",
        ),
    ),
    Rule(
        "dualpipe",
        lambda e, f: (
            e.has("pipeline_schedule", "dualpipe")
            & (e.pp > 1)
            & ((e.pp % 2 != 0) | (e.accumulation % 2 != 0))
        ),
        lambda e, f: (
            "DualPipe runs micro-batches from both ends, so pp and accumulation must be even; they"
            f" are pp {e.pp} and accumulation {e.accumulation}.",
            "Use even numbers, or the schedule 1f1b.",
        ),
    ),
    Rule(
        "engine",
        lambda e, f: e.has("engine", "data_parallel") & ((_shards(e) > 1) | (e.zero_stage > 0)),
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
            "Use zero_stage 3, or offload only the optimizer.",
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
            "the model's step makes its own updates, so it cannot run under accumulation"
            f" {e.accumulation}.",
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


def usable(grid: Grid, start: Execution) -> Flags:
    """Return a mask of the executions that are worth trying in a search from `start`, shape (n,).

    The mask is False if a setting would have no effect, or if no engine supports the combination.
    The ZeRO stage and `reshard_after_forward` of `start` itself are accepted.
    """
    ranks, stage = grid.data_parallel_size, grid.zero_stage
    # DeepSpeed ZeRO 2 with offload is useful even on one GPU: each gradient moves to the host as
    # soon as it is computed.
    offloads_in_stage_2 = grid.offload_optimizer & (stage == 2)
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


SEARCHED_RULES = ("offload_parameters", "accumulation", "shard_size")
"""Names of the rules that `usable` also checks. A search combines their settings freely."""

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
        only = f"{workload.model} could only be traced at a batch size of {workload.only_batch}"
        yield grid.micro_batch != workload.only_batch, f"{only} per GPU"
    if workload.mode == "train":
        yield from _impossible_updates(grid, workload.optimizer)
    if form.blocks is not None:
        return
    divided = (_shards(grid) > 1) | (grid.ep > 1)
    yield (
        divided,
        f"{workload.model} has no repeated blocks, which tensor, pipeline, context and expert"
        " parallelism need.",
    )
    if not workload.checkpointed:
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
        needs = "muon needs whole matrices, and ranks hold parts under"
        yield grid.tp > 1, f"{needs} tensor parallelism. Use zero 1 or 2."
        yield grid.zero_stage >= 3, f"{needs} FSDP or ZeRO 3. Use zero 1 or 2."
    else:
        yield (
            (grid.zero_stage == 1) | (grid.zero_stage == 2),
            f"{optimizer} factors matrices, and shards of ZeRO 1 and 2 are flat. Use zero 3"
            " (FSDP2).",
        )


def divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def doublings(most: int) -> list[int]:
    """Return the powers of two below `most`, followed by `most`."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def alone(execution: Execution) -> Execution:
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

    These executions are baselines of scaling efficiency if one device cannot hold the model. A run
    on one device is then impossible, and the efficiency relative to its forecast could exceed 1.

    If an execution needs several nodes, it uses all devices of each node.
    """
    smaller = []
    for ranks in divisors(execution.data_parallel_size)[:-1]:
        world = _shards(execution) * ranks
        nodes = -(-world // devices_per_node)
        shard = None if execution.shard_size is None else min(execution.shard_size, ranks)
        experts = execution.pp * execution.ep * execution.experts_tp
        whole = (nodes == 1 or world % devices_per_node == 0) and (
            execution.ep == 1 or world % experts == 0
        )
        if whole and (shard is None or ranks % shard == 0):
            smaller.append(
                replace(execution, nnodes=nodes, nproc_per_node=world // nodes, shard_size=shard)
            )
    return smaller
