"""Collectives between devices: how long they take, and how much of that nothing hides.

Ring algorithms move 2 (n - 1) / n of the payload over the slowest link for an all-reduce, half of that for an all-gather or
a reduce-scatter (Patarasuk and Yuan 2009). Constants from nccl-tests on A100 and H200 nodes (collectives.csv: 235 of
300 GB/s, 365 of 450 GB/s by ring) and, for PCIe, from multi-GPU rows of public BERT runs (4 to 8 GB/s on generation 4
without peer access).
"""

from __future__ import annotations

from trainpace.execution import Execution
from trainpace.hardware.cluster import Cluster

LINK_EFFICIENCY = 0.78
PCIE_EFFICIENCY = 0.30
NETWORK_EFFICIENCY = 0.80
COLLECTIVE_LATENCY_MS = 0.12
"""Start of one collective on 8 devices; payloads below 10 MB are dominated by it."""
BUCKET_BYTES = 25 * 2**20
"""torch DDP's default bucket_cap_mb."""
OVERLAP = 0.9
"""Share of the backward pass under which gradient buckets can hide; the last bucket never does."""
UNHIDDEN_SHARE = 0.25
"""Share of the gradients' communication that shows even under a long backward pass: the last bucket, and SMs taken."""
DATA_PARALLEL_COPY_SHARE = 1.2
"""nn.DataParallel copies parameters out and gradients back over PCIe in every step, through one device."""


def link_bytes_per_s(cluster: Cluster) -> float | str:
    """One direction of the slowest link of a ring over all devices, as far as collectives sustain it."""
    device = cluster.device
    if device.link_gb_per_s is not None:
        inside = device.link_gb_per_s.value / 2 * LINK_EFFICIENCY
    elif device.pcie_generation is not None and device.pcie_lanes is not None:
        inside = pcie_gb_per_s(cluster) * PCIE_EFFICIENCY
    else:
        return f"{device.name} has no link figure in the catalogue, so communication between GPUs cannot be forecast."
    if cluster.nodes == 1:
        return inside * 1e9
    if cluster.network_gb_per_s_per_device is None:
        return "more than one node: the network's bandwidth is not given."
    # a ring enters and leaves each node once, over all of its network cards together
    across = cluster.network_gb_per_s_per_device * cluster.devices_per_node * NETWORK_EFFICIENCY
    return min(inside, across) * 1e9


def pcie_gb_per_s(cluster: Cluster) -> float:
    """One direction of the device's PCIe link after encoding (PCI-SIG: 0.985 GB/s a lane in generation 3, doubling)."""
    device = cluster.device
    generation = device.pcie_generation.value if device.pcie_generation else 3.0
    lanes = device.pcie_lanes.value if device.pcie_lanes else 16.0
    return float(0.985 * 2 ** (generation - 3) * lanes)


def exposed_ms(
    execution: Execution,
    cluster: Cluster,
    gradient_bytes: float,
    parameter_bytes: float,
    forward_ms: float,
    backward_ms: float,
) -> float | str:
    """Milliseconds of communication in a step that no computation hides. Times are of one micro-step's passes."""
    ranks = execution.data_parallel_size
    if ranks == 1 or (gradient_bytes == 0 and execution.zero_stage < 3):
        return 0.0
    bandwidth = link_bytes_per_s(cluster)
    if isinstance(bandwidth, str):
        return bandwidth
    share = (ranks - 1) / ranks
    if execution.engine == "data_parallel":
        over_pcie = pcie_gb_per_s(cluster) * 1e9 * PCIE_EFFICIENCY
        return 1e3 * DATA_PARALLEL_COPY_SHARE * share * (parameter_bytes + gradient_bytes) / over_pcie
    starts = COLLECTIVE_LATENCY_MS * (1 + gradient_bytes / BUCKET_BYTES)
    one_way = 1e3 * share * gradient_bytes / bandwidth + starts
    if execution.zero_stage < 3:
        both_ways = 2 * one_way
        hidden = OVERLAP * backward_ms if execution.engine == "ddp" else 0.0
        return max(UNHIDDEN_SHARE * both_ways, both_ways - hidden)
    gather = 1e3 * share * parameter_bytes / bandwidth + starts
    # every micro-step gathers the parameters for each pass, and scatters the gradients of the second
    forward = max(0.1 * gather, gather - OVERLAP * forward_ms)
    backward = max(0.1 * (gather + one_way), gather + one_way - OVERLAP * backward_ms)
    return execution.accumulation * (forward + backward)
