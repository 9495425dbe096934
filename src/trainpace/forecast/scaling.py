"""How much of its devices an execution keeps busy, against fewer devices that do the same micro-batches.

One device alone is the reference where it holds the model. Where it does not, its time would be that of a run that cannot be
made, and the efficiency could pass 1: the reference is then the same execution with fewer data-parallel ranks, the fewest that
hold it.
"""

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast.shapes import divisors


def alone(execution: Execution) -> Execution:
    return replace(
        execution, nnodes=1, nproc_per_node=1, tp=1, pp=1, cp=1, engine="ddp", zero_stage=0, shard_size=None,
        offload_optimizer=False, offload_parameters=False, sequence_parallel=False, virtual_stages=1, pipeline_schedule="1f1b",
    )  # fmt: skip


def fewer_ranks(execution: Execution, devices_per_node: int) -> list[Execution]:
    """The same with fewer data-parallel ranks, on whole nodes where one is not enough; the fewest first."""
    smaller = []
    for ranks in divisors(execution.data_parallel_size)[:-1]:
        world = execution.tp * execution.pp * execution.cp * ranks
        nodes = -(-world // devices_per_node)
        shard = None if execution.shard_size is None else min(execution.shard_size, ranks)
        if (nodes == 1 or world % devices_per_node == 0) and (shard is None or ranks % shard == 0):
            smaller.append(replace(execution, nnodes=nodes, nproc_per_node=world // nodes, shard_size=shard))
    return smaller
