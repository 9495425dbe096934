"""From kernel times to a step: phases, host against device, accumulation, the gradients' all-reduce."""

from __future__ import annotations

import numpy as np

from trainpace.execution import Execution
from trainpace.forecast.kernels import KernelModel, KernelTimes
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import OperatorShare, StepTime
from trainpace.workload import PHASES, Operators

LINK_EFFICIENCY = 0.75
"""Share of one direction of a link that a large all-reduce sustains; nccl-tests on A100 and H200 nodes give 0.7 to 0.8."""
OVERLAP = 0.9
"""Share of the backward pass under which gradient buckets can hide; the last bucket never does."""


def step_time(
    operators: Operators,
    times: KernelTimes,
    model: KernelModel,
    execution: Execution,
    cluster: Cluster,
    gradient_bytes: float,
) -> StepTime | str:
    """One optimizer step.

    Per phase the later of host and device: on a GPU the host launches ahead, so a phase of many small kernels takes as
    long as launching them. On a CPU the two are one, and add up. What the host adds is `host_overhead_ms`.
    """
    phases = np.array(operators.phase)
    launches = operators.count * operators.launches
    device_ms = {p: 1e3 * float(times.device_s[phases == p].sum()) for p in PHASES}
    host_ms = {p: 1e-3 * float(launches[phases == p].sum()) * model.host_us_per_launch for p in PHASES}
    repeats = {"forward": execution.accumulation, "backward": execution.accumulation, "optimizer": 1}
    on_gpu = cluster.device.kind == "gpu"
    overhead = {p: max(0.0, host_ms[p] - device_ms[p]) if on_gpu else host_ms[p] for p in PHASES}
    total = {p: repeats[p] * device_ms[p] for p in PHASES}
    exposed = 0.0
    if execution.data_parallel_size > 1:
        communication = _all_reduce_ms(cluster, execution.data_parallel_size, gradient_bytes)
        if isinstance(communication, str):
            return communication
        exposed = max(communication * 0.05, communication - OVERLAP * device_ms["backward"])
    accumulate_ms = 0.0
    bandwidth = cluster.device.memory_bandwidth_gb_per_s
    if execution.accumulation > 1 and bandwidth is not None:
        moved = 3 * gradient_bytes * (execution.accumulation - 1)  # read both, write one
        accumulate_ms = 1e3 * moved / (bandwidth.value * 1e9 * model.memory)
    return StepTime(
        forward_ms=total["forward"],
        backward_ms=total["backward"] + accumulate_ms,
        optimizer_ms=total["optimizer"],
        communication_ms=exposed,
        host_overhead_ms=sum(repeats[p] * overhead[p] for p in PHASES),
    )


def heaviest(
    operators: Operators, times: KernelTimes, execution: Execution, most: int = 10
) -> tuple[OperatorShare, ...]:
    """The rows that take most device time in a step, and what bounds each."""
    rows = np.argsort(-times.device_s)[:most]
    shares = []
    for i in rows:
        parts = {
            "compute": float(times.compute_s[i]), "memory": float(times.memory_s[i]), "launch": float(times.latency_s[i])
        }  # fmt: skip
        bound = max(parts, key=lambda part: parts[part])
        repeats = 1 if operators.phase[i] == "optimizer" else execution.accumulation
        shares.append(
            OperatorShare(
                module=operators.module[i],
                kind=operators.kind[i],
                phase=operators.phase[i],
                count=int(operators.count[i]),
                time_ms=1e3 * float(times.device_s[i]) * repeats,
                bound=bound,  # type: ignore[arg-type]
                share_of_roof=max(parts["compute"], parts["memory"]) / float(times.device_s[i]),
            )
        )
    return tuple(shares)


def _all_reduce_ms(cluster: Cluster, ranks: int, payload_bytes: float) -> float | str:
    """Ring all-reduce inside one node: 2 (n - 1) / n of the payload over one direction of the link (Patarasuk 2009)."""
    if cluster.nodes > 1:
        return "more than one node is not forecast yet: the network between nodes is not modelled."
    device = cluster.device
    if device.link_gb_per_s is not None:
        one_direction = device.link_gb_per_s.value / 2
    elif device.pcie_generation is not None and device.pcie_lanes is not None:
        one_direction = 0.985 * 2 ** (device.pcie_generation.value - 3) * device.pcie_lanes.value
    else:
        return f"{device.name} has no link figure in the catalogue, so communication between GPUs cannot be forecast."
    return 1e3 * 2 * (ranks - 1) / ranks * payload_bytes / (one_direction * 1e9 * LINK_EFFICIENCY)
