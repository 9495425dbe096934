"""How much of its devices an execution keeps busy, against fewer devices that do the same micro-batches.

One device alone is the reference where it holds the model. Where it does not, its time would be that of a run that cannot be
made, and the efficiency could pass 1: the reference is then the same execution with fewer data-parallel ranks, the fewest that
hold it.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.executions import grid_of
from trainpace.forecast.grid import forecast_grid
from trainpace.forecast.memory import fits, step_memory
from trainpace.forecast.shapes import divisors
from trainpace.forecast.timings import MachineModel
from trainpace.hardware.cluster import Cluster
from trainpace.workload import Workload


class Scaling(NamedTuple):
    """Throughput a device over that of the reference, and the devices of the reference; None, None: nothing smaller holds it.

    Sharded optimizer states let it pass 1 by a little: more ranks have less to update each.
    """

    efficiency: float | None
    devices: int | None


def scaling_of(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
    host_to_device_ms: float,
    step_ms: float,
) -> Scaling:
    """Of an execution whose step takes `step_ms`. Memory of unknown size is taken to be enough."""
    many = [_alone(execution), *_smaller(execution, cluster.devices_per_node)]
    held = _first_held(workload, many, cluster)
    if execution.world_size == 1 or held is None:
        return Scaling(None, None)
    small = replace(cluster, nodes=held.nnodes, devices_per_node=held.nproc_per_node)
    found = forecast_grid(workload, held, grid_of([held]), small, model, host_factor, host_to_device_ms)
    if found.clash[0]:
        return Scaling(None, None)
    each = execution.global_batch / (step_ms * execution.world_size)
    return Scaling(each * held.world_size * float(found.step_ms[0]) / held.global_batch, held.world_size)


def _alone(execution: Execution) -> Execution:
    return replace(
        execution, nnodes=1, nproc_per_node=1, tp=1, pp=1, cp=1, engine="ddp", zero_stage=0, shard_size=None,
        offload_optimizer=False, offload_parameters=False, sequence_parallel=False, virtual_stages=1, pipeline_schedule="1f1b",
    )  # fmt: skip


def _smaller(execution: Execution, devices_per_node: int) -> list[Execution]:
    """The same with fewer data-parallel ranks, on whole nodes where one is not enough; the fewest first."""
    found = []
    for ranks in divisors(execution.data_parallel_size)[:-1]:
        world = execution.tp * execution.pp * execution.cp * ranks
        nodes = -(-world // devices_per_node)
        shard = None if execution.shard_size is None else min(execution.shard_size, ranks)
        if (nodes == 1 or world % devices_per_node == 0) and (shard is None or ranks % shard == 0):
            found.append(replace(execution, nnodes=nodes, nproc_per_node=world // nodes, shard_size=shard))
    return found


def _first_held(workload: Workload, many: list[Execution], cluster: Cluster) -> Execution | None:
    """The first that fits in the cluster's devices."""
    capacity, form = cluster.device.memory_gib, workload.form(many[0].precision)
    if capacity is None:
        return many[0]
    on_gpu, room = cluster.device.kind == "gpu", capacity.value
    return next((e for e in many if fits(step_memory(form, e, on_gpu, workload.checkpointed), room)), None)
