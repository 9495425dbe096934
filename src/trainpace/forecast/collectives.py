"""Times of collectives: latency + bytes / bandwidth of every algorithm that could run one; the fastest counts.

The algorithms are NCCL's (NVIDIA/nccl src/graph/tuning.cc; Hu et al. 2025, "Demystifying NCCL"): ring (Patarasuk and Yuan
2009), double binary tree, reduction in the switch; NCCL runs what its model finds fastest, and so does this one. Wire bytes
follow Thakur et al. 2005. NCCL's protocols (LL starts quickly and wastes the link, Simple is the reverse, LL128 between them)
and its chunks make the bandwidth rise with the payload: one ramp stands for their envelope (`links.Group.ramp`). What links
carry is in `links`.

Limits: fitted on groups of 2 to 8 ranks of one node, and on up to 64 of one NVLink domain (fitting/links.py); many nodes and slow
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

from trainpace.core.errors import UnknownName
from trainpace.core.hardware import Cluster, HostLinks
from trainpace.forecast.links import (
    CONSTANTS,
    NETWORK_EFFICIENCY,
    NETWORK_SEND_EFFICIENCY,
    Group,
    LinkConstants,
    group_of,
    missing_link,
)
from trainpace.workload import Flags, Floats

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

TREE_EFFICIENCY = 0.9
"""A tree's bandwidth as a share of a ring's (NCCL's tuning.cc)."""
TCP_SHARE = 1448 / 1514
"""Payload in an Ethernet frame of 1500 bytes under TCP with time stamps, of the 1514 that a shaped link counts."""


def collective_ms(
    collective: Collective,
    payload_bytes: ArrayLike,
    ranks: ArrayLike,
    ranks_per_node: ArrayLike,
    cluster: Cluster,
    constants: LinkConstants = CONSTANTS,
) -> Floats | str:
    """Milliseconds of one collective, or the reason why there is no answer. Arguments broadcast against each other.

    `payload_bytes` is the whole tensor: for all_gather and reduce_scatter the gathered size, for all_to_all what one
    rank holds, for send what one rank sends another. `ranks_per_node` of the group's `ranks` share a node, or a domain
    of NVLink; the group crosses the network with the network cards of so many devices. One rank, or nothing to send,
    takes 0. A cluster with measured `host_links` is one of CPU hosts that talk through gloo.
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
        slow = gloo_seconds(collective, payload, n, n > inside, rate, cluster.host_links)
        return np.where((n > 1) & (payload > 0), 1e3 * slow, 0.0)
    reason = missing_link(cluster, bool(((inside > 1) & (n > 1)).any()), bool((n > inside).any()))
    if reason:
        return reason
    seconds = _SECONDS[collective](payload, group_of(n, inside, cluster, constants))
    return np.where((n > 1) & (payload > 0), 1e3 * seconds, 0.0)


def _all_reduce(payload: Floats, group: Group) -> Floats:
    payload = payload / np.where(group.n == 2, group.constants.pair_sum_efficiency, 1.0)
    both = np.minimum(_ring(payload, group, passes=2), _tree(payload, group))
    return np.minimum(both, _in_switch(payload, group))


def _halves(payload: Floats, group: Group) -> Floats:
    """All-gather and reduce-scatter: once round the ring. Two ranks use fewer of NCCL's channels."""
    return _ring(payload / np.where(group.n == 2, group.constants.pair_efficiency, 1.0), group)


def _ring(payload: Floats, group: Group, passes: int = 1) -> Floats:
    """`passes` times round the ring: 1 gathers or scatters, 2 reduce."""
    wire = passes * (group.n - 1) / group.n * payload
    between = passes * (group.nodes - 1)
    near = passes * (group.n - 1) - between
    return (
        _waits(group)
        + near * group.hop_s
        + between * group.far_hop_s
        + group.ramp(wire / group.ring)
    )


def _tree(payload: Floats, group: Group) -> Floats:
    """Double binary tree over nodes, a chain inside each: up and down again, pipelined (Sanders et al. 2009).

    Inside, every rank passes the tensor on twice. Between nodes, 2 (nodes - 1) half tensors an edge are spread evenly.
    """
    nodes, inside = group.nodes, group.inside
    between = np.where(
        nodes > 1, 2 * (nodes - 1) / np.maximum(nodes, 1) * payload / group.across, 0.0
    )
    slower = np.maximum(between, np.where(inside > 1, 2 * payload / group.within, 0.0))
    levels = np.ceil(np.log2(np.maximum(nodes, 1)))
    hops = 2 * (inside - 1) * group.hop_s + 2 * levels * group.far_hop_s
    return _waits(group) + hops + group.ramp(slower / TREE_EFFICIENCY)


def _in_switch(payload: Floats, group: Group) -> Floats:
    """All-reduce whose sums the NVSwitch makes (NVLS); over nodes, each rank reduces its part across in between.

    A rank sends its tensor once and 1/n of the result, so it moves (n + 1) / n of the payload each way, where a ring
    moves 2 (n - 1) / n: no gain below four ranks. The three phases over nodes are not pipelined here.
    """
    g = group.inside
    within = group.ramp((g + 1) / g * payload / (group.within * group.switch.switch_efficiency))
    between = np.where(
        group.nodes > 1,
        group.ramp(2 * (group.nodes - 1) / group.nodes * payload / group.across),
        0.0,
    )
    hops = g * group.hop_s + 2 * np.ceil(np.log2(np.maximum(group.nodes, 1))) * group.far_hop_s
    start = _waits(group) - group.start_s + 1e-6 * group.switch.switch_start_us
    return np.where(group.multicast, start + hops + within + between, np.inf)


def _all_to_all(payload: Floats, group: Group) -> Floats:
    """Every rank sends 1/n of its tensor to each other one, to those of its node and to the others at the same time.

    Within a domain of NVLink, sends to peers beyond the node go out one after the other, under the transfer.
    """
    c = group.constants
    near_share, far_share = (group.inside - 1) / group.n, (group.n - group.inside) / group.n
    pair = np.where(group.n == 2, c.pair_efficiency, 1.0)
    seconds = group.ramp(
        np.maximum(near_share * payload / (group.within * pair), far_share * payload / group.card)
    )
    peers = 1e-6 * c.peer_us * (group.n - 1) + np.where(group.nodes > 1, group.far_hop_s, 0.0)
    return _waits(group) + np.maximum(1e-6 * c.far_peer_us * group.far_peers, peers + seconds)


def _send(payload: Floats, group: Group) -> Floats:
    """One rank to another, inside the node where the group shares one. The receiver waits for it in any case."""
    same = group.inside >= group.n
    bandwidth = np.where(
        same, group.within, group.card * NETWORK_SEND_EFFICIENCY / NETWORK_EFFICIENCY
    )
    hop = np.where(same, group.hop_s, group.far_hop_s)
    return group.start_s + hop + group.ramp(payload / bandwidth, group.constants.send_ramp_us)


def _waits(group: Group) -> Floats:
    """Seconds before anything moves: the start, and the wait for the last rank to come."""
    return group.start_s + 1e-6 * group.constants.eager_us


_SECONDS: dict[Collective, Callable[[Floats, Group], Floats]] = {
    "all_reduce": _all_reduce,
    "all_gather": _halves,
    "reduce_scatter": _halves,
    "all_to_all": _all_to_all,
    "send": _send,
}


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
    collective: str,
    payload_bytes: Floats,
    ranks: Floats,
    across: Flags,
    gb_per_s: float,
    links: HostLinks,
) -> Floats:
    """Seconds of one collective; `across` says whether the group spans hosts, `gb_per_s` is what a host may send."""
    wire = wire_bytes(collective, payload_bytes, ranks)
    host_us = links.host_us_per_mib.get(collective, links.host_us_per_mib.get("all_reduce", 0.0))
    host_s = 1e-6 * (
        links.start_us + steps(collective, ranks) * links.message_us + host_us * wire / 2**20
    )
    held_back = np.maximum(0.0, wire - links.burst_bytes) / (1e9 * gb_per_s * links.link_share)
    held_back = held_back * np.where(meets_itself(collective, ranks), 1 + links.duplex_excess, 1.0)
    return host_s + np.where(across, held_back, 0.0)


def meets_itself(collective: str, ranks: Floats) -> Flags:
    """Whether both directions of one connection carry the tensor at the same time."""
    return np.asarray((ranks == 2) & (collective == "all_gather"))
