"""Times of collectives with NCCL and gloo.

The time of an algorithm is latency + bytes / bandwidth. The model uses the fastest algorithm, as
NCCL's own model does. NCCL's algorithms are ring (Patarasuk and Yuan 2009), double binary tree and
reduction in the switch (NVIDIA/nccl src/graph/tuning.cc; Hu et al. 2025, "Demystifying NCCL"). The
bytes on the wire follow Thakur et al. 2005. The reached bandwidth rises with the payload, because
of NCCL's protocols and chunks. The LL protocol has a low latency and a low bandwidth, Simple is the
reverse, and LL128 is between them. One curve models all of them (`Group.ramp`).

NVLink connects devices in one of three ways:

- Switches connect all devices of a node (A100 and newer boards with eight GPUs), or 72 devices of
  several nodes (GB200 and GB300).
- A bridge connects a pair of PCIe boards.
- Wires connect some devices without a switch (V100 and P100 boards, four GH200s).

All other traffic uses PCIe. It goes directly from device to device if the driver allows it, and
otherwise through host memory.

CPU hosts use gloo, with the figures that `trainpace calibrate --hosts` measures. The algorithms are
from pytorch/gloo (gloo/allreduce.cc, allgather.cc) and torch's ProcessGroupGloo. An all-reduce is a
ring that scatters and then gathers, in segments of at most 1 MiB. An all-gather is half of that. A
reduce-scatter is an all-reduce after which each rank keeps only its part, so it costs the same.

Limits: the constants were fitted on groups of 2 to 8 ranks in one node, and of up to 64 ranks in
one NVLink domain (fitting/links.py). Many nodes and slow networks are extrapolations. The model
ignores congestion between nodes, unequal nodes and other jobs on the network.

Shapes: all functions are elementwise. Payloads and group sizes broadcast against each other.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from trainpace.core.errors import UnknownName
from trainpace.core.hardware import Cluster, Device, HostLinks
from trainpace.core.records import Record
from trainpace.workload import Flags, Floats

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

TREE_EFFICIENCY = 0.9
"""Bandwidth of a tree relative to a ring (NCCL's tuning.cc)."""
TCP_SHARE = 1448 / 1514
"""Share of payload in an Ethernet frame with TCP and time stamps.

The frame carries 1500 bytes. A link with traffic shaping counts 1514.
"""
PCIE_EFFICIENCY = 0.30
"""Share of the PCIe bandwidth that a ring through host memory reaches.

Four and eight 2080 Ti and Titan RTX reach 0.31 to 0.34 (Sailor's tables). Three RTX 3090 reach 0.27
to 0.37 (NVIDIA's BERT, from the time that more GPUs add to a step).
"""
PCIE_PEER_EFFICIENCY = 0.75
"""Share of the PCIe bandwidth that a ring reaches if devices read each other's memory.

Four A100 and four H100 with bridged pairs reach 0.75 and 0.76 (Vidur's tables). RTX A5000, A5500
and A40 reach 0.6 to 1.0 (NVIDIA's BERT). The server matters more than anything else. In one server,
four L40S reach 0.17 and eight 0.05 (aiconfigurator's tables). In another, two RTX 6000 Ada reach
0.36 (PipeWeave's). But forecasts of training steps on four and eight RTX 6000 Ada (lambda's, n 8),
relative to those on one, are 8% too slow with a share of 0.75, 28% with 0.17 and 96% with 0.05. So
no property of the card predicts the bandwidth of a host's root complexes.
"""
NETWORK_EFFICIENCY = 0.95
"""Share of a node's network bandwidth that a ring reaches with the largest payloads.

Four H200 nodes reach 365 of 400 GB/s with 4 GiB (collectives.csv). NVLink was the limit there, so
the share before the ramp is at least this large.
"""
NETWORK_SEND_EFFICIENCY = 0.75
"""Share of a network card's bandwidth that one send reaches.

Two H100 nodes reach 35.4 of 50 GB/s with 64 MiB (Vidur's tables).
"""
NETWORK_LATENCY_US = 2.5
"""Latency of one message over InfiniBand, from NCCL's hop between nodes (tuning.cc)."""
NETWORK_HOP_US = 4.5
"""Latency of a hop between nodes in a collective.

NCCL's model of LL and LL128 has 2.7 to 8.5 microseconds (tuning.cc).
"""
NETWORK_START_US = 9.0
"""Extra start latency of a collective over the network, compared to one inside a node.

Together with a hop, sends between two nodes take 12 (H100), 16 (A100) and 17 (A40) microseconds
longer than sends inside a node (Vidur's tables, up to 16 KiB).
"""
MULTICAST_ARCHITECTURES = frozenset({"hopper", "blackwell"})
"""Architectures whose NVSwitch (third generation or later) can reduce in the switch (NVLS)."""
SWITCHED_FORM_FACTORS = ("sxm", "oam", "module")
"""Board types whose links reach every device of the node. On PCIe boards, a bridge joins two."""
WIRED_SHARES = {"sxm2": ((2, 4, 8), (0.52, 0.67, 1.0)), "module": ((2, 4), (0.33, 1.0))}
"""Share of a device's links that lead to other devices of its group, on boards without a switch.

The first tuple has group sizes, and the second the shares. A V100 in the hybrid cube mesh has four
of six links to its half of eight GPUs (NVIDIA's DGX-1 whitepaper). Two ranks reach 0.42 of the
datasheet and four reach 0.53 (Sailor's tables). Each of four GH200s has a third of its links to
each other one.
"""


class Generation(Record):
    """Constants of one generation of NVLink, or of PCIe.

    Attributes:
        start_us: Latency once per collective, in microseconds.
        hop_us: Latency of each step of the algorithm, in microseconds.
        efficiency: Share of the datasheet's bandwidth in one direction that a ring reaches with
            large payloads.
        switch_start_us: Latency once per reduction in the switch (NVLS), in microseconds.
        switch_efficiency: Share of the maximum bandwidth that a reduction in the switch reaches.
    """

    start_us: float
    hop_us: float
    efficiency: float
    switch_start_us: float = 0.0
    switch_efficiency: float = 1.0


class LinkConstants(Record):
    """Constants of links, fitted by fitting/links.py.

    The fit uses 1,632 collectives measured on eight GPU models with NVLink. Its median error is 7%.
    Fields that end in `_us` are in microseconds.

    Attributes:
        generations: Constants of NVLink by generation. Other generations get the mean.
        pcie: Constants of PCIe. Its efficiency is relative to `PCIE_EFFICIENCY` or
            `PCIE_PEER_EFFICIENCY`.
        ramp_us: Constant r of the ramp. A transfer that takes t at full bandwidth takes
            t + sqrt(r t). A pipeline of chunks of the best size behaves like this.
        send_ramp_us: The same for point-to-point sends.
        pair_efficiency: Bandwidth of a gather, scatter or all-to-all between two ranks, relative to
            larger groups.
        pair_sum_efficiency: The same for an all-reduce.
        eager_us: Time that ranks wait for each other at the start of a collective, if it is not
            launched by a CUDA graph.
        peer_us: Time that each further peer adds to an all-to-all.
        far_peer_us: Minimum time of an all-to-all per peer outside the node, but in the same NVLink
            domain.
    """

    generations: dict[int, Generation]
    pcie: Generation
    ramp_us: float
    send_ramp_us: float
    pair_efficiency: float
    pair_sum_efficiency: float
    eager_us: float
    peer_us: float
    far_peer_us: float

    def generation(self, number: float | None) -> Generation:
        """Return the constants of a generation of NVLink, or the mean of all if it is unknown."""
        known = self.generations.get(int(number or 0))
        if known is not None:
            return known
        every, fields = self.generations.values(), Generation.__struct_fields__[:3]
        return Generation(**{f: float(np.mean([getattr(g, f) for g in every])) for f in fields})


CONSTANTS = LinkConstants(
    generations={
        3: Generation(start_us=9.21, hop_us=0.889, efficiency=0.705),
        4: Generation(
            start_us=4.66,
            hop_us=0.839,
            efficiency=0.841,
            switch_start_us=8.82,
            switch_efficiency=0.827,
        ),
        5: Generation(
            start_us=7.33,
            hop_us=1.33,
            efficiency=0.735,
            switch_start_us=33.3,
            switch_efficiency=0.599,
        ),
    },
    pcie=Generation(start_us=4.95, hop_us=1.17, efficiency=1.0),
    ramp_us=14.2,
    send_ramp_us=1.09,
    pair_efficiency=0.764,
    pair_sum_efficiency=0.935,
    eager_us=20.7,
    peer_us=0.893,
    far_peer_us=10.7,
)


def collective_ms(
    collective: Collective,
    payload_bytes: ArrayLike,
    ranks: ArrayLike,
    ranks_per_node: ArrayLike,
    cluster: Cluster,
    constants: LinkConstants = CONSTANTS,
) -> Floats | str:
    """Return the milliseconds of one collective, or the reason if they are unknown.

    Array arguments broadcast against each other. One rank or an empty payload takes 0 ms. A cluster
    with measured `host_links` consists of CPU hosts that use gloo.

    Args:
        collective: Name of the collective.
        payload_bytes: Size of the whole tensor. For all_gather and reduce_scatter, this is the
            gathered size. For all_to_all it is the tensor of one rank. For send it is the message.
        ranks: Size of the group.
        ranks_per_node: Ranks of the group that share a node or an NVLink domain. The group crosses
            the network with the network cards of that many devices.
        cluster: Devices and links.
        constants: Fitted constants of links.

    Raises:
        UnknownName: If the collective is unknown.
    """
    if collective not in COLLECTIVES:
        raise UnknownName(
            "collective", str(collective), COLLECTIVES, f"Collectives: {', '.join(COLLECTIVES)}."
        )
    sizes = (np.asarray(size, dtype=float) for size in (payload_bytes, ranks, ranks_per_node))
    payload, n, inside = np.broadcast_arrays(*sizes)
    inside = np.clip(inside, 1.0, np.maximum(n, 1.0))
    if cluster.host_links is not None:
        rate = cluster.host_links.gb_per_s
        if cluster.network_gb_per_s_per_device is not None:
            rate = cluster.network_gb_per_s_per_device * cluster.devices_per_node
        seconds = gloo_seconds(collective, payload, n, n > inside, rate, cluster.host_links)
    else:
        within, across = bool(((inside > 1) & (n > 1)).any()), bool((n > inside).any())
        if reason := missing_link(cluster, within, across):
            return reason
        seconds = _SECONDS[collective](payload, group_of(n, inside, cluster, constants))
    return np.where((n > 1) & (payload > 0), 1e3 * seconds, 0.0)


# ---- what links carry


def pcie_gb_per_s(cluster: Cluster) -> float:
    """Return the bandwidth of the device's PCIe link in one direction, in GB/s.

    A lane of generation 3 has 0.985 GB/s after encoding. The rate doubles with each generation
    (PCI-SIG). Unknown links are assumed to have 16 lanes of generation 3.
    """
    device = cluster.device
    generation = device.pcie_generation.value if device.pcie_generation else 3.0
    lanes = device.pcie_lanes.value if device.pcie_lanes else 16.0
    return float(0.985 * 2 ** (generation - 3) * lanes)


def has_peer_access(cluster: Cluster) -> bool:
    """Return True if devices read each other's memory over PCIe.

    NVIDIA's driver does not allow it on GeForce and Titan cards. Most other cards have it.
    """
    given = cluster.pcie_peer_access
    return not cluster.device.is_consumer if given is None else given


def missing_link(cluster: Cluster, within: bool, across: bool) -> str:
    """Return a sentence that names the missing link figure, or "" if all are known.

    Args:
        cluster: Devices and links.
        within: True if ranks communicate within a node.
        across: True if ranks communicate across nodes.
    """
    device = cluster.device
    if within and device.link_gb_per_s is None and device.pcie_generation is None:
        return (
            f"{device.name} has no link figure in the catalogue, so communication between GPUs"
            " cannot be forecast."
        )
    if across and cluster.network_gb_per_s_per_device is None:
        return "more than one node: the network's bandwidth is not given."
    return ""


class Group(NamedTuple):
    """Process groups and their links, as arrays of one shape. Bandwidths are in bytes per second.

    Attributes:
        n: Number of ranks in the group.
        inside: Ranks of the group that share a node or an NVLink domain.
        nodes: Number of nodes or NVLink domains.
        within: Bandwidth of a rank's links inside the node.
        across: Bandwidth of the group's network cards on a node. Infinite for one node.
        card: Bandwidth of one network card.
        start_s: Latency once per collective, in seconds.
        hop_s: Latency of a hop inside the node, in seconds.
        far_hop_s: Latency of a hop between nodes, in seconds.
        multicast: Mask of groups that can reduce in the switch.
        far_peers: Ranks outside the node but in the same NVLink domain.
        switch: Constants of the NVLink generation.
        constants: Fitted constants of links.
    """

    n: Floats
    inside: Floats
    nodes: Floats
    within: Floats
    across: Floats
    card: float
    start_s: Floats
    hop_s: Floats
    far_hop_s: float
    multicast: Flags
    far_peers: Floats
    switch: Generation
    constants: LinkConstants

    @property
    def ring(self) -> Floats:
        """Bandwidth of the slowest link of a ring.

        A ring enters and leaves each node once, over all network cards of the group on the node.
        """
        return np.where(self.inside > 1, np.minimum(self.within, self.across), self.across)

    @property
    def waits_s(self) -> Floats:
        """Seconds before data moves: the start latency, and the wait for the last rank."""
        return self.start_s + 1e-6 * self.constants.eager_us

    def ramp(self, seconds: Floats, ramp_us: float | None = None) -> Floats:
        """Convert seconds at full bandwidth to actual seconds on a link.

        Larger transfers have more chunks, which fill the pipeline of the link better.
        """
        late = 1e-6 * (self.constants.ramp_us if ramp_us is None else ramp_us)
        return np.asarray(seconds + np.sqrt(late * seconds))


def group_of(n: Floats, inside: Floats, cluster: Cluster, constants: LinkConstants) -> Group:
    """Return the links of groups of `n` ranks, with `inside` ranks per node or NVLink domain."""
    device = cluster.device
    linked, link = _nvlink(n, inside, cluster)
    number = device.nvlink_generation.value if device.nvlink_generation else None
    nvlink, pcie = constants.generation(number), constants.pcie
    share = PCIE_PEER_EFFICIENCY if has_peer_access(cluster) else PCIE_EFFICIENCY
    slow = pcie_gb_per_s(cluster) * (pcie.efficiency * share)
    within = 1e9 * np.where(linked, np.maximum(link * nvlink.efficiency, slow), slow)
    nodes = np.ceil(n / inside)
    card = 1e9 * (cluster.network_gb_per_s_per_device or np.inf) * NETWORK_EFFICIENCY
    late = (cluster.network_latency_us or NETWORK_LATENCY_US) - NETWORK_LATENCY_US
    start = np.where(linked, nvlink.start_us, pcie.start_us)
    start = start + np.where(nodes > 1, NETWORK_START_US, 0.0)
    multicasts = device.architecture.lower() in MULTICAST_ARCHITECTURES and not _is_wired(device)
    far_peers = np.zeros_like(n)
    if cluster.devices_per_domain > cluster.devices_per_node:
        far_peers = np.maximum(inside - cluster.devices_per_node, 0.0)
    return Group(
        n=n,
        inside=inside,
        nodes=nodes,
        within=within,
        across=np.where(nodes > 1, card * inside, np.inf),
        card=card,
        start_s=1e-6 * start,
        hop_s=1e-6 * np.where(linked, nvlink.hop_us, pcie.hop_us),
        far_hop_s=1e-6 * max(0.0, NETWORK_HOP_US + late),
        multicast=linked & multicasts & (inside > 2),
        far_peers=far_peers,
        switch=nvlink,
        constants=constants,
    )


def _nvlink(n: Floats, inside: Floats, cluster: Cluster) -> tuple[Flags, Floats]:
    """Return a mask of groups with NVLink, and the GB/s of a rank's links in one direction."""
    device = cluster.device
    if device.link_gb_per_s is None:
        return np.zeros(n.shape, dtype=bool), np.zeros_like(n)
    link = device.link_gb_per_s.value / 2
    if not device.form_factor.lower().startswith(SWITCHED_FORM_FACTORS):
        # A bridge is an accessory. Most GeForce and Titan cards have none.
        return (inside <= 2) & (not device.is_consumer), np.full_like(n, link)
    links = np.full_like(n, link)
    if _is_wired(device):
        links = link * np.interp(inside, *WIRED_SHARES[device.form_factor.lower()])
    return np.ones(n.shape, dtype=bool), links


def _is_wired(device: Device) -> bool:
    """Return True if links connect the devices of the board without a switch."""
    return device.form_factor.lower() in WIRED_SHARES and device.nvlink_domain is None


# ---- NCCL's algorithms


def _all_reduce(payload: Floats, group: Group) -> Floats:
    payload = payload / np.where(group.n == 2, group.constants.pair_sum_efficiency, 1.0)
    both = np.minimum(_ring(payload, group, passes=2), _tree(payload, group))
    return np.minimum(both, _in_switch(payload, group))


def _halves(payload: Floats, group: Group) -> Floats:
    """Return the seconds of an all-gather or reduce-scatter: one pass around the ring.

    Groups of two ranks use fewer of NCCL's channels.
    """
    return _ring(payload / np.where(group.n == 2, group.constants.pair_efficiency, 1.0), group)


def _ring(payload: Floats, group: Group, passes: int = 1) -> Floats:
    """Return the seconds of `passes` passes around the ring.

    A gather or a scatter needs one pass, and an all-reduce needs two.
    """
    wire = passes * (group.n - 1) / group.n * payload
    between = passes * (group.nodes - 1)
    near = passes * (group.n - 1) - between
    hops = group.waits_s + near * group.hop_s + between * group.far_hop_s
    return hops + group.ramp(wire / group.ring)


def _tree(payload: Floats, group: Group) -> Floats:
    """Return the seconds of a double binary tree over nodes, with a chain inside each node.

    Data goes up the tree and down again, pipelined (Sanders et al. 2009). Inside a node, every rank
    passes the tensor on twice. Between nodes, the two trees have 2 (nodes - 1) edges. Each edge
    carries half a tensor up and half a tensor down, spread evenly over the nodes.
    """
    nodes, inside = group.nodes, group.inside
    between = 2 * (nodes - 1) / np.maximum(nodes, 1) * payload / group.across
    between = np.where(nodes > 1, between, 0.0)
    slower = np.maximum(between, np.where(inside > 1, 2 * payload / group.within, 0.0))
    levels = np.ceil(np.log2(np.maximum(nodes, 1)))
    hops = 2 * (inside - 1) * group.hop_s + 2 * levels * group.far_hop_s
    return group.waits_s + hops + group.ramp(slower / TREE_EFFICIENCY)


def _in_switch(payload: Floats, group: Group) -> Floats:
    """Return the seconds of an all-reduce in the NVSwitch (NVLS). Infinite without multicast.

    A rank sends its tensor once, and 1/n of the result. It therefore moves (n + 1) / n of the
    payload in each direction, while a ring moves 2 (n - 1) / n. There is no gain below four ranks.
    With several nodes, each rank also reduces its part across nodes, between the two phases inside
    the node. The model does not pipeline these three phases.
    """
    g, nodes = group.inside, group.nodes
    within = group.ramp((g + 1) / g * payload / (group.within * group.switch.switch_efficiency))
    between = group.ramp(2 * (nodes - 1) / nodes * payload / group.across)
    between = np.where(nodes > 1, between, 0.0)
    hops = g * group.hop_s + 2 * np.ceil(np.log2(np.maximum(nodes, 1))) * group.far_hop_s
    start = group.waits_s - group.start_s + 1e-6 * group.switch.switch_start_us
    return np.where(group.multicast, start + hops + within + between, np.inf)


def _all_to_all(payload: Floats, group: Group) -> Floats:
    """Return the seconds of an all-to-all: every rank sends 1/n of its tensor to each other rank.

    In an NVLink domain, sends to peers outside the node start one after the other. This overlaps
    with the transfer.
    """
    c = group.constants
    near_share, far_share = (group.inside - 1) / group.n, (group.n - group.inside) / group.n
    pair = np.where(group.n == 2, c.pair_efficiency, 1.0)
    near = near_share * payload / (group.within * pair)
    seconds = group.ramp(np.maximum(near, far_share * payload / group.card))
    peers = 1e-6 * c.peer_us * (group.n - 1) + np.where(group.nodes > 1, group.far_hop_s, 0.0)
    return group.waits_s + np.maximum(1e-6 * c.far_peer_us * group.far_peers, peers + seconds)


def _send(payload: Floats, group: Group) -> Floats:
    """Return the seconds of a send from one rank to another.

    The send stays inside the node if the group does. It has no `eager_us`, because the receiver
    waits for the sender in any case.
    """
    same = group.inside >= group.n
    far = group.card * NETWORK_SEND_EFFICIENCY / NETWORK_EFFICIENCY
    bandwidth = np.where(same, group.within, far)
    hop = np.where(same, group.hop_s, group.far_hop_s)
    return group.start_s + hop + group.ramp(payload / bandwidth, group.constants.send_ramp_us)


_SECONDS: dict[Collective, Callable[[Floats, Group], Floats]] = {
    "all_reduce": _all_reduce,
    "all_gather": _halves,
    "reduce_scatter": _halves,
    "all_to_all": _all_to_all,
    "send": _send,
}

# ---- gloo


def steps(collective: str, ranks: Floats) -> Floats:
    """Return the number of messages of a gloo collective that run one after the other."""
    if collective == "send":
        return np.ones_like(ranks)
    return (2 if collective in ("all_reduce", "reduce_scatter") else 1) * (ranks - 1)


def wire_bytes(collective: str, payload_bytes: Floats, ranks: Floats) -> Floats:
    """Return the bytes that each rank sends in a gloo collective."""
    if collective == "send":
        return payload_bytes * np.ones_like(ranks)
    return steps(collective, ranks) * payload_bytes / ranks


def gloo_seconds(
    collective: str,
    payload_bytes: Floats,
    ranks: Floats,
    across: Flags,
    gb_per_s: float,
    links: HostLinks,
) -> Floats:
    """Return the seconds of one gloo collective.

    Args:
        collective: Name of the collective.
        payload_bytes: Size of the whole tensor.
        ranks: Size of the group.
        across: Mask of groups that span several hosts.
        gb_per_s: Bandwidth of each host in one direction.
        links: Measured figures of the hosts.
    """
    wire = wire_bytes(collective, payload_bytes, ranks)
    host_us = links.host_us_per_mib.get(collective, links.host_us_per_mib.get("all_reduce", 0.0))
    host_s = 1e-6 * (
        links.start_us + steps(collective, ranks) * links.message_us + host_us * wire / 2**20
    )
    held_back = np.maximum(0.0, wire - links.burst_bytes) / (1e9 * gb_per_s * links.link_share)
    held_back = held_back * np.where(meets_itself(collective, ranks), 1 + links.duplex_excess, 1.0)
    return host_s + np.where(across, held_back, 0.0)


def meets_itself(collective: str, ranks: Floats) -> Flags:
    """Return True if both directions of one connection carry the tensor at the same time."""
    return np.asarray((ranks == 2) & (collective == "all_gather"))
