"""Times of collectives: latency + bytes / bandwidth of every algorithm; the fastest counts.

The algorithms are NCCL's (NVIDIA/nccl src/graph/tuning.cc; Hu et al. 2025, "Demystifying NCCL"):
ring (Patarasuk and Yuan 2009), double binary tree, reduction in the switch; NCCL runs what its
model finds fastest, and so does this one. Wire bytes follow Thakur et al. 2005. NCCL's protocols
(LL starts quickly and wastes the link, Simple is the reverse, LL128 between them) and its chunks
make the bandwidth rise with the payload: one ramp stands for their envelope (`Group.ramp`).

NVLink joins all devices of a node through switches (A100 and newer boards of eight; GB200 and
GB300: 72 devices over all their nodes), only pairs through a bridge (PCIe boards), or some devices
by wires without a switch (V100 and P100 boards, four GH200s). Everything else goes over PCIe:
straight from device to device if the driver allows it, else through the host's memory.

Limits: fitted on groups of 2 to 8 ranks of one node, and on up to 64 of one NVLink domain
(fitting/links.py); many nodes and slow networks are extrapolation. Congestion between nodes,
unequal nodes and other jobs on the network are not modelled.

CPU hosts talk through gloo, with the figures that `trainpace calibrate --hosts` measured. From
pytorch/gloo (gloo/allreduce.cc, allgather.cc) and torch's ProcessGroupGloo: all-reduce is a ring
that scatters, then gathers, in segments of at most 1 MiB; all-gather is half of that;
reduce-scatter is an all-reduce in which each rank keeps its part, so it costs the same.
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
"""A tree's bandwidth as a share of a ring's (NCCL's tuning.cc)."""
TCP_SHARE = 1448 / 1514
"""Payload in an Ethernet frame of 1500 bytes under TCP with time stamps, of the 1514 that a shaped
link counts."""
PCIE_EFFICIENCY = 0.30
"""Share of PCIe's bandwidth of a ring through host memory, and of one device's copies: four and
eight 2080 Ti and Titan RTX keep 0.31 to 0.34 (Sailor's tables), three RTX 3090 0.27 to 0.37
(NVIDIA's BERT, what more GPUs add to a step)."""
PCIE_PEER_EFFICIENCY = 0.75
"""The same if devices read each other's memory: four A100 and four H100 with bridged pairs keep
0.75 and 0.76 (Vidur's tables), RTX A5000, A5500 and A40 0.6 to 1.0 (NVIDIA's BERT). Servers differ
by more than all else together: in one, four L40S keep 0.17 and eight 0.05 (aiconfigurator's), in
another two RTX 6000 Ada 0.36 (PipeWeave's); but training steps on four and eight RTX 6000 Ada
(lambda's, n 8) are 8% slower against those on one with 0.75, and 28% with 0.17 and 96% with 0.05.
So no figure of the card predicts what a host's root complexes let through."""
NETWORK_EFFICIENCY = 0.95
"""Share of a node's network bandwidth that a ring reaches with the largest payloads: 365 of 400
GB/s over four H200 nodes with 4 GiB (collectives.csv), where NVLink was the limit, so at least this
before the ramp."""
NETWORK_SEND_EFFICIENCY = 0.75
"""The same for one send: 35.4 of 50 GB/s between two H100 nodes with 64 MiB (Vidur's tables)."""
NETWORK_LATENCY_US = 2.5
"""One message over InfiniBand, as in NCCL's latencies of a hop between nodes (tuning.cc)."""
NETWORK_HOP_US = 4.5
"""A hop between nodes in a collective, in NCCL's model of LL and LL128 (tuning.cc: 2.7 to 8.5)."""
NETWORK_START_US = 9.0
"""Extra start latency of a collective over the network versus inside a node. With a hop, sends
between two nodes take 12 (H100), 16 (A100) and 17 (A40) microseconds longer than inside (Vidur's
tables, up to 16 KiB)."""
MULTICAST_ARCHITECTURES = frozenset({"hopper", "blackwell"})
"""Architectures with NVSwitch of the third generation or later, which reduces in the switch
(NVLS)."""
SWITCHED_FORM_FACTORS = ("sxm", "oam", "module")
"""Boards whose links reach every device of the node. On PCIe boards a bridge joins two."""
WIRED_SHARES = {"sxm2": ((2, 4, 8), (0.52, 0.67, 1.0)), "module": ((2, 4), (0.33, 1.0))}
"""Share of a device's links that lead to others of its group, by ranks, on boards without a switch.
V100 in the hybrid cube mesh has four of six links to its half of eight (NVIDIA's DGX-1 whitepaper),
and two ranks keep 0.42 of the datasheet where four keep 0.53 (Sailor's tables); each of four GH200s
has a third to each other one."""


class Generation(Record):
    """One generation of NVLink, or PCIe.

    `start_us` counts once per collective, `hop_us` for each step of its algorithm. `efficiency` is
    the share of the datasheet's bandwidth (one direction) that a ring approaches with large
    payloads. `switch_start_us` and `switch_efficiency` (relative to what a reduction in the switch
    could reach at most) are those of NVLS.
    """

    start_us: float
    hop_us: float
    efficiency: float
    switch_start_us: float = 0.0
    switch_efficiency: float = 1.0


class LinkConstants(Record):
    """Constants fitted by fitting/links.py on collectives of eight cards with NVLink.

    1,632 rows, median 7% off; `*_us` in microseconds. `generations`: NVLink's by number; others get
    their mean. `pcie`: its efficiency is relative to PCIE_EFFICIENCY or PCIE_PEER_EFFICIENCY.
    `ramp_us`: bytes that take t at the full bandwidth take t + sqrt(ramp t), as a pipeline of
    chunks of the best size does; `send_ramp_us` is that of point-to-point sends.
    `pair_efficiency`: of a gather, scatter or all-to-all between two ranks, relative to more;
    `pair_sum_efficiency`: of an all-reduce. `eager_us`: what ranks wait for each other at a
    collective's start if no CUDA graph launches it. `peer_us`: another peer in an all-to-all;
    `far_peer_us`: one beyond the node, within a domain of NVLink.
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
        """Return a generation of NVLink; the mean of all if it was not fitted."""
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
    """Return the milliseconds of one collective, or the reason if it is unknown.

    Arguments broadcast against each other. One rank, or nothing to send, takes 0. A cluster with
    measured `host_links` is one of CPU hosts that talk through gloo.

    Args:
        collective: what is done.
        payload_bytes: the whole tensor: for all_gather and reduce_scatter the gathered size, for
            all_to_all what one rank has, for send what one rank sends another.
        ranks: the size of the group.
        ranks_per_node: ranks of the group that share a node, or a domain of NVLink. The group
            crosses the network with the network cards of that many devices.
        cluster: its devices and links.
        constants: fitted figures of links.
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
    """Return one direction of the device's PCIe link after encoding.

    0.985 GB/s per lane in generation 3, doubling with each generation (PCI-SIG).
    """
    device = cluster.device
    generation = device.pcie_generation.value if device.pcie_generation else 3.0
    lanes = device.pcie_lanes.value if device.pcie_lanes else 16.0
    return float(0.985 * 2 ** (generation - 3) * lanes)


def has_peer_access(cluster: Cluster) -> bool:
    """Return True if devices read each other's memory over PCIe.

    GeForce and Titan cards do not (NVIDIA's driver), others mostly do.
    """
    given = cluster.pcie_peer_access
    return not cluster.device.is_consumer if given is None else given


def missing_link(cluster: Cluster, within: bool, across: bool) -> str:
    """Return which figure is missing for communication within and across nodes, as a sentence."""
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
    """Groups of `n` ranks, `inside` of them joined by a node or a domain of NVLink.

    within, across, card: bytes/s of a rank's links inside, of a group's network cards, and of one
    of those. start_s, hop_s: seconds. far_hop_s: of a hop between nodes. multicast: groups that
    reduce in the switch. far_peers: ranks inside but beyond the node, which only a domain of NVLink
    has.
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
        """The slowest link of a ring.

        A ring enters and leaves each node once, over all of the group's network cards there.
        """
        return np.where(self.inside > 1, np.minimum(self.within, self.across), self.across)

    @property
    def waits_s(self) -> Floats:
        """Seconds before anything moves: the start, and the wait for the last rank."""
        return self.start_s + 1e-6 * self.constants.eager_us

    def ramp(self, seconds: Floats, ramp_us: float | None = None) -> Floats:
        """Return the seconds on a link from those at its full bandwidth.

        The more chunks there are, the better they fill its pipeline.
        """
        late = 1e-6 * (self.constants.ramp_us if ramp_us is None else ramp_us)
        return np.asarray(seconds + np.sqrt(late * seconds))


def group_of(n: Floats, inside: Floats, cluster: Cluster, constants: LinkConstants) -> Group:
    """Return the links of groups of `n` ranks, `inside` of them in each node or domain."""
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
    """Return (groups with links other than PCIe, GB/s of a rank's links in one direction)."""
    device = cluster.device
    if device.link_gb_per_s is None:
        return np.zeros(n.shape, dtype=bool), np.zeros_like(n)
    link = device.link_gb_per_s.value / 2
    if not device.form_factor.lower().startswith(SWITCHED_FORM_FACTORS):
        # a bridge is an accessory, which GeForce and Titan cards are mostly without
        return (inside <= 2) & (not device.is_consumer), np.full_like(n, link)
    links = np.full_like(n, link)
    if _is_wired(device):
        links = link * np.interp(inside, *WIRED_SHARES[device.form_factor.lower()])
    return np.ones(n.shape, dtype=bool), links


def _is_wired(device: Device) -> bool:
    """Return True if the board's links lead from device to device without a switch."""
    return device.form_factor.lower() in WIRED_SHARES and device.nvlink_domain is None


# ---- NCCL's algorithms


def _all_reduce(payload: Floats, group: Group) -> Floats:
    payload = payload / np.where(group.n == 2, group.constants.pair_sum_efficiency, 1.0)
    both = np.minimum(_ring(payload, group, passes=2), _tree(payload, group))
    return np.minimum(both, _in_switch(payload, group))


def _halves(payload: Floats, group: Group) -> Floats:
    """Return all-gather and reduce-scatter: once round the ring.

    Two ranks use fewer of NCCL's channels.
    """
    return _ring(payload / np.where(group.n == 2, group.constants.pair_efficiency, 1.0), group)


def _ring(payload: Floats, group: Group, passes: int = 1) -> Floats:
    """Return `passes` times round the ring: 1 gathers or scatters, 2 reduce."""
    wire = passes * (group.n - 1) / group.n * payload
    between = passes * (group.nodes - 1)
    near = passes * (group.n - 1) - between
    hops = group.waits_s + near * group.hop_s + between * group.far_hop_s
    return hops + group.ramp(wire / group.ring)


def _tree(payload: Floats, group: Group) -> Floats:
    """Return a double binary tree over nodes, a chain inside each (Sanders et al. 2009).

    It goes up and down again, pipelined. Inside, every rank passes the tensor on twice. Between
    nodes, 2 (nodes - 1) half tensors per edge are spread evenly.
    """
    nodes, inside = group.nodes, group.inside
    between = 2 * (nodes - 1) / np.maximum(nodes, 1) * payload / group.across
    between = np.where(nodes > 1, between, 0.0)
    slower = np.maximum(between, np.where(inside > 1, 2 * payload / group.within, 0.0))
    levels = np.ceil(np.log2(np.maximum(nodes, 1)))
    hops = 2 * (inside - 1) * group.hop_s + 2 * levels * group.far_hop_s
    return group.waits_s + hops + group.ramp(slower / TREE_EFFICIENCY)


def _in_switch(payload: Floats, group: Group) -> Floats:
    """Return an all-reduce whose sums the NVSwitch makes (NVLS).

    Over nodes, each rank reduces its part across in between. A rank sends its tensor once and 1/n
    of the result, so it moves (n + 1) / n of the payload each way, while a ring moves 2 (n - 1) /
    n: no gain below four ranks. The three phases over nodes are not pipelined here.
    """
    g, nodes = group.inside, group.nodes
    within = group.ramp((g + 1) / g * payload / (group.within * group.switch.switch_efficiency))
    between = group.ramp(2 * (nodes - 1) / nodes * payload / group.across)
    between = np.where(nodes > 1, between, 0.0)
    hops = g * group.hop_s + 2 * np.ceil(np.log2(np.maximum(nodes, 1))) * group.far_hop_s
    start = group.waits_s - group.start_s + 1e-6 * group.switch.switch_start_us
    return np.where(group.multicast, start + hops + within + between, np.inf)


def _all_to_all(payload: Floats, group: Group) -> Floats:
    """Return the time for every rank to send 1/n of its tensor to each other one at once.

    Within a domain of NVLink, sends to peers beyond the node go out one after the other, under the
    transfer.
    """
    c = group.constants
    near_share, far_share = (group.inside - 1) / group.n, (group.n - group.inside) / group.n
    pair = np.where(group.n == 2, c.pair_efficiency, 1.0)
    near = near_share * payload / (group.within * pair)
    seconds = group.ramp(np.maximum(near, far_share * payload / group.card))
    peers = 1e-6 * c.peer_us * (group.n - 1) + np.where(group.nodes > 1, group.far_hop_s, 0.0)
    return group.waits_s + np.maximum(1e-6 * c.far_peer_us * group.far_peers, peers + seconds)


def _send(payload: Floats, group: Group) -> Floats:
    """Return one rank's send to another, inside the node if the group shares one.

    The receiver waits for it in any case.
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
    """Return the number of messages that wait for one another."""
    if collective == "send":
        return np.ones_like(ranks)
    return (2 if collective in ("all_reduce", "reduce_scatter") else 1) * (ranks - 1)


def wire_bytes(collective: str, payload_bytes: Floats, ranks: Floats) -> Floats:
    """Return the bytes that each rank sends."""
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
    """Return the seconds of one collective of hosts that may send `gb_per_s` each.

    `across` are the groups that span hosts.
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
