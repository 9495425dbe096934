"""Which executions a model and a cluster allow, which numbers clash where they do not, and smaller executions to compare with."""

import math

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.forecast.grid import Grid
from trainpace.workload import Blocks, Counts

CLASHES = (
    "",
    "world_size",
    "tp x pp x cp",
    "no blocks",
    "tp",
    "key_value_heads",
    "pp",
    "cp",
    "virtual_stages",
    "accumulation",
    "shard_size",
    "engine",
    "nodes",
    "offload_parameters",
    "ep",
    "expert_tp",
    "whole step",
    "dualpipe",
)
"""What may clash in an execution. A position here is the code in `ForecastTable.clash`; 0 stands for no clash."""

MOST_SHOWN = 64
ENDS = 2
"""Stages that may have no block: the embedding's and the head's."""


def clashes(
    grid: Grid, blocks: Blocks | None, sequence_length: int | None, cluster: Cluster
) -> Counts:
    """The first clash of every execution, as a position in CLASHES."""
    shards = grid.tp * grid.pp * grid.cp
    count, heads, groups = (
        (0, 0, 0) if blocks is None else (blocks.count, blocks.heads, blocks.key_value_heads)
    )
    one, experts = np.ones_like(grid.tp), 0 if blocks is None else blocks.experts
    stages = grid.pp * grid.virtual_stages
    interleaved, one_process = (
        grid.has("pipeline_schedule", "interleaved"),
        grid.has("engine", "data_parallel"),
    )
    share = grid.data_parallel_size % np.where(grid.shard_size > 0, grid.shard_size, one)
    is_wrong = {
        "world_size": grid.world_size != cluster.num_devices,
        "tp x pp x cp": grid.world_size % shards != 0,
        "no blocks": (shards > 1) & (blocks is None),
        "tp": (grid.tp > 1) & ((one * heads) % grid.tp != 0),
        # more ranks than key-value heads hold copies of them, evenly
        "key_value_heads": (
            (grid.tp > 1)
            & (groups > 0)
            & ((groups % grid.tp != 0) & (grid.tp % max(1, groups) != 0))
        ),
        "pp": stages > np.where(grid.pp > 1, count + ENDS, max(1, count)),
        "cp": (grid.cp > 1) & ((sequence_length or 1) % grid.cp != 0),
        "virtual_stages": (grid.virtual_stages > 1) & ((grid.pp == 1) | ~interleaved),
        "accumulation": interleaved & (grid.pp > 1) & (grid.accumulation % grid.pp != 0),
        "dualpipe": (grid.copies > 1) & ((grid.pp % 2 != 0) | (grid.accumulation % 2 != 0)),
        "shard_size": (grid.shard_size > 0) & (share != 0),
        "engine": one_process & ((shards > 1) | (grid.zero_stage > 0)),
        "nodes": one_process & (grid.world_size > cluster.devices_per_node),
        "offload_parameters": grid.offload_parameters & (grid.zero_stage < 3),
        "ep": (grid.ep > 1) & (experts % grid.ep != 0 if experts else True),
        "expert_tp": (grid.ep > 1) & (grid.world_size % (grid.pp * grid.ep * grid.experts_tp) != 0),
    }
    result = np.zeros_like(grid.tp)
    for name, rows in reversed(is_wrong.items()):
        result = np.where(rows, CLASHES.index(name), result)
    return result


def contradiction(
    clash: int,
    grid: Grid,
    i: int,
    blocks: Blocks | None,
    sequence_length: int | None,
    cluster: Cluster,
) -> TrainpaceError:
    """The clash of execution `i` in words, with its numbers."""
    try:
        e = grid.execution(i)
    except TrainpaceError as error:  # its own sizes do not go together
        return error
    tp, pp, cp, v, world, accumulation = (
        e.tp,
        e.pp,
        e.cp,
        e.virtual_stages,
        e.world_size,
        e.accumulation,
    )
    count, heads, groups = (
        (0, 0, 0) if blocks is None else (blocks.count, blocks.heads, blocks.key_value_heads)
    )
    possible_tp = "The model has no attention whose heads could be divided."
    if heads:
        possible_tp = (
            f"Possible tp: {', '.join(str(n) for n in divisors(heads) if n <= MOST_SHOWN)}."
        )
    experts = 0 if blocks is None else blocks.experts
    has = f"{experts} experts" if experts else "no repeated blocks with grouped products of experts"
    messages = {
        "world_size": (
            (
                f"the execution has {world} processes, and the cluster {cluster.num_devices}"
                f" devices ({cluster.nodes} nodes of {cluster.devices_per_node})."
            ),
            "One process runs on each device.",
        ),
        "no blocks": (
            (
                f"tp {tp}, pp {pp} and cp {cp} need repeated blocks along which the model could be"
                " cut, and it has none."
            ),
            "Use data parallelism, ZeRO or FSDP.",
        ),
        "tp": (f"tp {tp} does not divide the model's {heads} attention heads.", possible_tp),
        "key_value_heads": (
            f"tp {tp} and the model's {groups} key-value heads do not divide each other.",
            "Every rank needs the same number of them, or copies of one.",
        ),
        "pp": (
            (
                f"pp {pp}{f' x virtual_stages {v} = {pp * v}' if v > 1 else ''} stages need a block"
                f" each, but for the embedding's and the head's; the model has {count}."
            ),
            f"Use at most {count + ENDS} stages.",
        ),
        "cp": (
            f"cp {cp} does not divide the sequence length {sequence_length}.",
            "Every rank needs as many tokens.",
        ),
        "accumulation": (
            (
                f"the interleaved schedule needs a number of micro-batches that pp {pp} divides;"
                f" accumulation is {accumulation}."
            ),
            f"Use {-(-accumulation // pp) * pp}, or the schedule 1f1b.",
        ),
        "dualpipe": (
            (
                f"DualPipe runs micro-batches from both ends, so that pp {pp} and accumulation"
                f" {accumulation} both have to be even."
            ),
            "Use even numbers, or the schedule 1f1b.",
        ),
        "engine": (
            f"nn.DataParallel knows no tp {tp}, pp {pp}, cp {cp} and no ZeRO stage {e.zero_stage}.",
            "Use the engine ddp.",
        ),
        "nodes": (
            (
                f"nn.DataParallel is one process on one node of {cluster.devices_per_node} devices;"
                f" the world has {world}."
            ),
            "Use the engine ddp.",
        ),
        "offload_parameters": (
            f"only ZeRO stage 3 keeps its parameters on the host; the stage is {e.zero_stage}.",
            "Use zero_stage 3, or offload the optimizer alone.",
        ),
        "whole step": (
            (
                f"the model's step makes its own updates, so that accumulation {accumulation}"
                " cannot be put around it."
            ),
            "Accumulate in the step itself.",
        ),
        "ep": (
            f"ep {e.ep} cannot divide the model's experts: it has {has}.",
            f"Possible ep: {', '.join(map(str, divisors(experts)))}." if experts else "Use ep 1.",
        ),
    }
    return Contradiction(*messages[CLASHES[clash]])


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def alone(execution: Execution) -> Execution:
    """The same micro-batches on one device: the reference of scaling, where one device holds the model."""
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
    """The same with fewer data-parallel ranks, on whole nodes where one is not enough; the fewest first.

    They are the references of scaling where one device does not hold the model: its time would be that of a run that cannot be
    made, and the efficiency could pass 1.
    """
    smaller = []
    for ranks in divisors(execution.data_parallel_size)[:-1]:
        world = execution.tp * execution.pp * execution.cp * ranks
        nodes = -(-world // devices_per_node)
        shard = None if execution.shard_size is None else min(execution.shard_size, ranks)
        experts = execution.pp * execution.ep * (execution.expert_tp or execution.tp)
        whole = (nodes == 1 or world % devices_per_node == 0) and (
            execution.ep == 1 or world % experts == 0
        )
        if whole and (shard is None or ranks % shard == 0):
            smaller.append(
                replace(execution, nnodes=nodes, nproc_per_node=world // nodes, shard_size=shard)
            )
    return smaller
