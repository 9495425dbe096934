"""Times of collectives: latency + bytes / bandwidth of every algorithm and protocol that could run one; the fastest counts.

The form is NCCL's own cost model (NVIDIA/nccl src/graph/tuning.cc; Hu et al. 2025, "Demystifying NCCL"): per algorithm
(ring, Patarasuk and Yuan 2009; double binary tree; in-switch reduction) and protocol (LL, LL128, Simple) a start, a
latency a hop and a share of the link's bandwidth; NCCL runs what its model finds fastest, and so does this one. Wire
bytes follow Thakur et al. 2005. LL starts quickly and wastes the link, Simple is the reverse: their lower envelope is
the ramp of bandwidth with the payload.

Limits: starts were fitted on 8 ranks of one node (fitting/links.py); hops are NCCL's figures, so many ranks and slow
networks are extrapolation. Congestion between nodes, unequal nodes and other jobs on the network are not modelled.

CPU hosts talk through gloo, with the figures that `trainpace calibrate --hosts` measured. From pytorch/gloo
(gloo/allreduce.cc, allgather.cc) and torch's ProcessGroupGloo: all-reduce is a ring that scatters, then gathers, in segments of
at most 1 MiB; all-gather is half of that; reduce-scatter is an all-reduce of which each rank keeps its part, so it costs as
much.
"""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from trainpace.errors import UnknownName
from trainpace.hardware import Cluster, HostLinks
from trainpace.records import Record
from trainpace.workload import Flags, Floats

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

PCIE_EFFICIENCY = 0.30
"""Ring over PCIe through host memory: 4 to 8 GB/s on generation 4 in multi-GPU rows of public BERT runs."""
PCIE_PEER_EFFICIENCY = 0.75
"""The same where devices read each other's memory (Li et al. 2019, "Evaluating Modern GPU Interconnect": 12 to 13 of
16 GB/s between two devices under one switch; less across sockets, which is not modelled)."""
NETWORK_EFFICIENCY = 0.91
"""Share of a node's network bandwidth that a ring reaches: 365 of 400 GB/s over four H200 nodes (collectives.csv), where
NVLink was the limit, so at least this."""
TREE_EFFICIENCY = 0.9
"""A tree's bandwidth as a share of a ring's (NCCL's tuning.cc)."""
NETWORK_LATENCY_US = 2.5
"""One message over InfiniBand, as it stands in NCCL's latencies of a hop between nodes."""
TCP_SHARE = 1448 / 1514
"""Payload in an Ethernet frame of 1500 bytes under TCP with time stamps, of the 1514 that a shaped link counts."""
MULTICAST_ARCHITECTURES = frozenset({"hopper", "blackwell"})
"""NVSwitch of the third generation on reduces in the switch (NVLS)."""
SWITCHED_FORM_FACTORS = ("sxm", "oam", "module")
"""Boards whose links reach every device of the node. On PCIe boards a bridge joins two."""


class LinkConstants(Record):
    """Fitted by fitting/links.py on nccl-tests of one A100 and one H200 node (46 rows, 6.1 % mean); `*_us` in microseconds.

    Each node forecast from a fit on the other is 17 to 18 % off on average, worst around 16 MiB, where A100 nodes are slow.

    `link_efficiency`: of NVLink's datasheet bandwidth (one direction), by ring and Simple. `*_start_us`: once a
    collective. `*_share`: bandwidth of a protocol over Simple's. `nvls_efficiency`: of what a reduction in the switch
    could reach at most, relative to the ring's.
    """

    link_efficiency: float = 0.793
    ll_start_us: float = 33.3
    ll_share: float = 0.0989
    ll128_start_us: float = 59.6
    ll128_share: float = 0.792
    simple_start_us: float = 353.0
    nvls_start_us: float = 41.4
    nvls_efficiency: float = 0.831


CONSTANTS = LinkConstants()

# NCCL's latencies of a hop in microseconds (tuning.cc): LL, LL128, Simple.
HOP_US = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 4.0), "pcie": (1.0, 1.9, 4.0), "network": (5.0, 8.5, 14.0)},
}


def collective_ms(
    collective: Collective, payload_bytes: ArrayLike, ranks: ArrayLike, ranks_per_node: ArrayLike, cluster: Cluster,
    constants: LinkConstants = CONSTANTS,
) -> Floats | str:  # fmt: skip
    """Milliseconds of one collective, or the reason why there is no answer. Arguments broadcast against each other.

    `payload_bytes` is the whole tensor: for all_gather and reduce_scatter the gathered size, for all_to_all what one
    rank holds, for send what one rank sends another. `ranks_per_node` of the group's `ranks` share a node; the group
    crosses the network with the network cards of so many devices. One rank, or nothing to send, takes 0. A cluster with
    measured `host_links` is one of CPU hosts that talk through gloo.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", str(collective), COLLECTIVES, f"Collectives: {', '.join(COLLECTIVES)}.")
    sizes = (np.asarray(size, dtype=float) for size in (payload_bytes, ranks, ranks_per_node))
    payload, n, inside = np.broadcast_arrays(*sizes)
    inside = np.clip(inside, 1.0, np.maximum(n, 1.0))
    if cluster.host_links is not None:
        rate = cluster.host_links.gb_per_s
        if cluster.network_gb_per_s_per_device is not None:
            rate = cluster.network_gb_per_s_per_device * cluster.devices_per_node
        slow = gloo_seconds(collective, payload, n, n > inside, rate, cluster.host_links)
        return np.where((n > 1) & (payload > 0), 1e3 * slow, 0.0)
    reason = _missing(cluster, bool(((inside > 1) & (n > 1)).any()), bool((n > inside).any()))
    if reason:
        return reason
    seconds = _SECONDS[collective](payload, _Group(n, inside, cluster, constants))
    return np.where((n > 1) & (payload > 0), 1e3 * seconds, 0.0)


def pcie_gb_per_s(cluster: Cluster) -> float:
    """One direction of the device's PCIe link after encoding (PCI-SIG: 0.985 GB/s a lane in generation 3, doubling)."""
    device = cluster.device
    generation = device.pcie_generation.value if device.pcie_generation else 3.0
    lanes = device.pcie_lanes.value if device.pcie_lanes else 16.0
    return float(0.985 * 2 ** (generation - 3) * lanes)


def has_switched_links(cluster: Cluster) -> bool:
    """Whether links other than PCIe join all devices of a node, not only pairs."""
    device = cluster.device
    return device.link_gb_per_s is not None and device.form_factor.lower().startswith(SWITCHED_FORM_FACTORS)


def _missing(cluster: Cluster, within: bool, across: bool) -> str:
    device = cluster.device
    if within and device.link_gb_per_s is None and device.pcie_generation is None:
        return f"{device.name} has no link figure in the catalogue, so communication between GPUs cannot be forecast."
    if across and cluster.network_gb_per_s_per_device is None:
        return "more than one node: the network's bandwidth is not given."
    return ""


class _Group:
    """Bandwidths (bytes/s) and hops (seconds by protocol) of groups of `n` ranks, `inside` of them to a node."""

    def __init__(self, n: Floats, inside: Floats, cluster: Cluster, constants: LinkConstants) -> None:
        self.n, self.inside, self.constants = n, inside, constants
        self.nodes = np.ceil(n / inside)
        links, switched = cluster.device.link_gb_per_s, has_switched_links(cluster)
        self.linked = ((inside <= 2) | switched) & (links is not None)
        link = links.value / 2 * constants.link_efficiency if links else 0
        pcie = pcie_gb_per_s(cluster) * (PCIE_PEER_EFFICIENCY if cluster.pcie_peer_access else PCIE_EFFICIENCY)
        self.within = 1e9 * np.where(self.linked, max(link, pcie), pcie)
        self.card = 1e9 * (cluster.network_gb_per_s_per_device or np.inf) * NETWORK_EFFICIENCY
        self.across = np.where(self.nodes > 1, self.card * inside, np.inf)
        self.late_s = 1e-6 * ((cluster.network_latency_us or NETWORK_LATENCY_US) - NETWORK_LATENCY_US)
        multicasts = switched and cluster.device.architecture.lower() in MULTICAST_ARCHITECTURES
        self.multicast = self.linked & multicasts

    @property
    def ring(self) -> Floats:
        """The slowest link of a ring, which enters and leaves each node once, over all of the group's cards there."""
        return np.where(self.inside > 1, np.minimum(self.within, self.across), self.across)

    def fastest(
        self, algorithm: str, near: Floats | Flags, far: Floats | Flags, payload: Floats, bandwidth: Floats | float,
        protocols: tuple[int, ...] = (0, 1, 2),
    ) -> Floats:  # fmt: skip
        """Seconds by the fastest of some protocols, with `near` hops inside nodes and `far` hops between them."""
        c, us = self.constants, HOP_US[algorithm]
        starts, shares = (c.ll_start_us, c.ll128_start_us, c.simple_start_us), (c.ll_share, c.ll128_share, 1.0)
        times = []
        for i in protocols:
            near_s = 1e-6 * np.where(self.linked, us["nvlink"][i], us["pcie"][i])
            hops = near * near_s + far * self.far_s(algorithm, i)
            times.append(1e-6 * starts[i] + hops + payload / (shares[i] * bandwidth))
        return np.asarray(np.minimum.reduce(times), dtype=float)

    def far_s(self, algorithm: str, protocol: int) -> float:
        """Seconds of a hop between nodes."""
        return max(0.0, 1e-6 * HOP_US[algorithm]["network"][protocol] + self.late_s)


POINT_TO_POINT = (0, 2)
"""Protocols of sends (positions in HOP_US): NCCL has no LL128 for them."""


def _all_reduce(payload: Floats, group: _Group) -> Floats:
    both = np.minimum(_ring(payload, group, passes=2), _tree(payload, group))
    return np.minimum(both, _in_switch(payload, group))


def _ring(payload: Floats, group: _Group, passes: int = 1) -> Floats:
    """`passes` times round the ring: 1 gathers or scatters, 2 reduce."""
    wire = passes * (group.n - 1) / group.n * payload
    between = passes * (group.nodes - 1)
    return group.fastest("ring", passes * (group.n - 1) - between, between, wire, group.ring)


def _tree(payload: Floats, group: _Group) -> Floats:
    """Double binary tree over nodes, a chain inside each: up and down again, pipelined (Sanders et al. 2009).

    Inside, every rank passes the tensor on twice. Between nodes, 2 (nodes - 1) half tensors an edge are spread evenly.
    """
    nodes, inside = group.nodes, group.inside
    between = np.where(nodes > 1, 2 * (nodes - 1) / np.maximum(nodes, 1) * payload / group.across, 0.0)
    slower = np.maximum(between, np.where(inside > 1, 2 * payload / group.within, 0.0))
    levels = np.ceil(np.log2(np.maximum(nodes, 1)))
    return group.fastest("tree", 2 * (inside - 1), 2 * levels, slower, TREE_EFFICIENCY)


def _in_switch(payload: Floats, group: _Group) -> Floats:
    """All-reduce whose sums the NVSwitch makes (NVLS); over nodes, each rank reduces its part across in between.

    A rank sends its tensor once and 1/n of the result, so it moves (n + 1) / n of the payload each way, where a ring
    moves 2 (n - 1) / n: no gain below four ranks. The three phases over nodes are not pipelined here.
    """
    c, g = group.constants, group.inside
    within = (g + 1) / g * payload / (group.within * c.nvls_efficiency)
    between = 2 * (group.nodes - 1) / group.nodes * payload / group.across
    hops = 2 * np.ceil(np.log2(np.maximum(group.nodes, 1))) * group.far_s("tree", 2)
    usable = group.multicast & (g > 2)
    return np.where(usable, 1e-6 * c.nvls_start_us + within + between + hops, np.inf)


def _all_to_all(payload: Floats, group: _Group) -> Floats:
    """Every rank sends 1/n of its tensor to each other one, to those of its node and to the others at the same time."""
    near_share, far_share = (group.inside - 1) / group.n, (group.n - group.inside) / group.n
    seconds = np.maximum(near_share * payload / group.within, far_share * payload / group.card)
    return group.fastest("ring", group.nodes <= 1, group.nodes > 1, seconds, 1.0, POINT_TO_POINT)


def _send(payload: Floats, group: _Group) -> Floats:
    """One rank to another, inside the node where the group shares one."""
    same = group.inside >= group.n
    bandwidth = np.where(same, group.within, group.card)
    return group.fastest("ring", same, ~same, payload, bandwidth, POINT_TO_POINT)


_SECONDS: dict[Collective, Callable[[Floats, _Group], Floats]] = {
    "all_reduce": _all_reduce, "all_gather": _ring, "reduce_scatter": _ring, "all_to_all": _all_to_all, "send": _send,
}  # fmt: skip


def steps(collective: str, ranks: Floats) -> Floats:
    """Messages that wait for one another."""
    if collective == "send":
        return np.ones_like(ranks)
    return (2 if collective in ("all_reduce", "reduce_scatter") else 1) * (ranks - 1)


def wire_bytes(collective: str, payload_bytes: Floats, ranks: Floats) -> Floats:
    """Bytes that each rank sends."""
    if collective == "send":
        return payload_bytes * np.ones_like(ranks)
    return steps(collective, ranks) * payload_bytes / ranks


def gloo_seconds(
    collective: str, payload_bytes: Floats, ranks: Floats, across: Flags, gb_per_s: float, links: HostLinks
) -> Floats:
    """Seconds of one collective; `across` says whether the group spans hosts, `gb_per_s` is what a host may send."""
    wire = wire_bytes(collective, payload_bytes, ranks)
    host_us = links.host_us_per_mib.get(collective, links.host_us_per_mib.get("all_reduce", 0.0))
    host_s = 1e-6 * (links.start_us + steps(collective, ranks) * links.message_us + host_us * wire / 2**20)
    held_back = np.maximum(0.0, wire - links.burst_bytes) / (1e9 * gb_per_s * links.link_share)
    held_back = held_back * np.where(meets_itself(collective, ranks), 1 + links.duplex_excess, 1.0)
    return host_s + np.where(across, held_back, 0.0)


def meets_itself(collective: str, ranks: Floats) -> Flags:
    """Whether both directions of one connection carry the tensor at the same time."""
    return np.asarray((ranks == 2) & (collective == "all_gather"))
