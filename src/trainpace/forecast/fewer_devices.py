"""The same micro-batches on fewer devices: the curve of throughput over their number."""

from __future__ import annotations

from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.forecast import forecast
from trainpace.forecast.timings import MachineModel
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import Forecast
from trainpace.workload import Workload


def fewer_devices(
    workload: Workload, execution: Execution, cluster: Cluster, model: MachineModel | KernelConstants | None = None
) -> tuple[Forecast, ...]:
    """Forecasts on 1, 2, 4, ... devices up to the cluster's, whole nodes beyond one; those that can be forecast and fit.

    Per device nothing changes, so that the global batch grows with the devices (weak scaling).
    """
    found = []
    for nodes, per_node in _shapes(cluster.nodes, cluster.devices_per_node):
        e = replace(execution, nnodes=nodes, nproc_per_node=per_node)
        if e.shard_size is not None and (nodes, per_node) != (cluster.nodes, cluster.devices_per_node):
            e = replace(e, shard_size=None)
        try:
            one = forecast(workload, e, replace(cluster, nodes=nodes, devices_per_node=per_node), None, model)
        except TrainpaceError:  # too few for its tensor or pipeline parallelism
            continue
        if one.step is not None and one.fits is not False:
            found.append(one)
    return tuple(found)


def _shapes(nodes: int, per_node: int) -> list[tuple[int, int]]:
    return [(1, n) for n in _doubling(per_node)] + [(n, per_node) for n in _doubling(nodes)[1:]]


def _doubling(most: int) -> list[int]:
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
