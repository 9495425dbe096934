"""What links carry: which of them joins the ranks of a group, how much of its bandwidth they get, and how late.

NVLink joins all devices of a node through switches (A100 and newer boards of eight; GB200 and GB300: 72 devices over all their
nodes), only pairs through a bridge (PCIe boards), or some devices by wires without a switch (V100 and P100 boards, four GH200s).
Everything else goes over PCIe: straight from device to device where the driver allows it, else through the host's memory.
"""

from typing import NamedTuple

import numpy as np

from trainpace.core.hardware import Cluster, Device
from trainpace.core.records import Record
from trainpace.workload import Flags, Floats

PCIE_EFFICIENCY = 0.30
"""Share of PCIe's bandwidth of a ring through host memory, and of one device's copies: four and eight 2080 Ti and Titan RTX keep
0.31 to 0.34 (Sailor's tables), three RTX 3090 0.27 to 0.37 (NVIDIA's BERT, what more GPUs add to a step)."""
PCIE_PEER_EFFICIENCY = 0.75
"""The same where devices read each other's memory: four A100 and four H100 with bridged pairs keep 0.75 and 0.76 (Vidur's
tables), RTX A5000, A5500 and A40 0.6 to 1.0 (NVIDIA's BERT). Servers differ by more than all else together: in one four L40S keep
0.17 and eight 0.05 (aiconfigurator's), in another two RTX 6000 Ada 0.36 (PipeWeave's); but training steps on four and eight RTX
6000 Ada (lambda's, n 8) come out 8 % slower against those on one with 0.75, and 28 % with 0.17 and 96 % with 0.05. So no figure
of the card says what a host's root complexes let through."""
NETWORK_EFFICIENCY = 0.95
"""Share of a node's network bandwidth that a ring reaches with the largest payloads: 365 of 400 GB/s over four H200 nodes with
4 GiB (collectives.csv), where NVLink was the limit, so at least this before the ramp."""
NETWORK_SEND_EFFICIENCY = 0.75
"""The same for one send: 35.4 of 50 GB/s between two H100 nodes with 64 MiB (Vidur's tables)."""
NETWORK_LATENCY_US = 2.5
"""One message over InfiniBand, as it stands in NCCL's latencies of a hop between nodes (tuning.cc)."""
NETWORK_HOP_US = 4.5
"""A hop between nodes in a collective, as NCCL's model has it for LL and LL128 (tuning.cc: 2.7 to 8.5)."""
NETWORK_START_US = 9.0
"""What a collective over the network starts later than one inside a node: with a hop, sends between two nodes take 12 (H100), 16
(A100) and 17 (A40) microseconds longer than inside (Vidur's tables, up to 16 KiB)."""
MULTICAST_ARCHITECTURES = frozenset({"hopper", "blackwell"})
"""NVSwitch of the third generation on reduces in the switch (NVLS)."""
SWITCHED_FORM_FACTORS = ("sxm", "oam", "module")
"""Boards whose links reach every device of the node. On PCIe boards a bridge joins two."""
WIRED_SHARES = {"sxm2": ((2, 4, 8), (0.52, 0.67, 1.0)), "module": ((2, 4), (0.33, 1.0))}
"""Share of a device's links that lead to others of its group, by ranks, on boards without a switch. V100 in the hybrid cube mesh
has four of six links to its half of eight (NVIDIA's DGX-1 whitepaper), and two ranks keep 0.42 of the sheet where four keep 0.53
(Sailor's tables); each of four GH200s has a third to each other one."""


class Generation(Record):
    """One generation of NVLink, or PCIe: `start_us` once a collective, `hop_us` each step of its algorithm, `efficiency` the
    share of the datasheet's bandwidth (one direction) that a ring approaches with large payloads. `switch_start_us` and
    `switch_efficiency` (relative to what a reduction in the switch could reach at most) are those of NVLS.
    """

    start_us: float
    hop_us: float
    efficiency: float
    switch_start_us: float = 0.0
    switch_efficiency: float = 1.0


class LinkConstants(Record):
    """Fitted by fitting/links.py on collectives of eight cards with NVLink (1,632 rows, median 7 % off); `*_us` in microseconds.

    `generations`: NVLink's by number; others get their mean. `pcie`: its efficiency is relative to PCIE_EFFICIENCY or
    PCIE_PEER_EFFICIENCY. `ramp_us`: bytes that take t at the full bandwidth take t + sqrt(ramp t), as a pipeline of
    chunks of the best size does; `send_ramp_us` is that of point-to-point sends. `pair_efficiency`: of a gather, scatter
    or all-to-all between two ranks, relative to more; `pair_sum_efficiency` of an all-reduce. `eager_us`: what ranks
    wait for each other at a collective's start, where no CUDA graph launches it. `peer_us`: another peer in an
    all-to-all; `far_peer_us`: one beyond the node, within a domain of NVLink.
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
        """Of NVLink; the mean of those that were fitted for another maker's links, or a generation that was not."""
        known = self.generations.get(int(number or 0))
        if known is not None:
            return known
        every = list(self.generations.values())
        return Generation(
            **{
                f: float(np.mean([getattr(g, f) for g in every]))
                for f in Generation.__struct_fields__[:3]
            }
        )


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


def pcie_gb_per_s(cluster: Cluster) -> float:
    """One direction of the device's PCIe link after encoding (PCI-SIG: 0.985 GB/s a lane in generation 3, doubling)."""
    device = cluster.device
    generation = device.pcie_generation.value if device.pcie_generation else 3.0
    lanes = device.pcie_lanes.value if device.pcie_lanes else 16.0
    return float(0.985 * 2 ** (generation - 3) * lanes)


def has_peer_access(cluster: Cluster) -> bool:
    """Whether devices read each other's memory over PCIe. GeForce and Titan cards do not (NVIDIA's driver), others mostly do."""
    stated = cluster.pcie_peer_access
    return not cluster.device.is_consumer if stated is None else stated


def missing_link(cluster: Cluster, within: bool, across: bool) -> str:
    """The figure that is missing for exchanges within and across nodes, as a sentence; "" where none is."""
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

    within, across, card: bytes/s of a rank's links inside, of a group's network cards, and of one of those. start_s, hop_s:
    seconds. far_hop_s: of a hop between nodes. multicast: which groups reduce in the switch. far_peers: ranks inside beyond the
    node, which only a domain of NVLink has.
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
        """The slowest link of a ring, which enters and leaves each node once, over all of the group's cards there."""
        return np.where(self.inside > 1, np.minimum(self.within, self.across), self.across)

    def ramp(self, seconds: Floats, ramp_us: float | None = None) -> Floats:
        """Seconds on the link from those at its full bandwidth: chunks fill its pipeline better the more of them there are."""
        c = self.constants
        late = 1e-6 * (c.ramp_us if ramp_us is None else ramp_us)
        return np.asarray(seconds + np.sqrt(late * seconds))


def group_of(n: Floats, inside: Floats, cluster: Cluster, constants: LinkConstants) -> Group:
    """The links of groups of `n` ranks, `inside` of them to a node or domain."""
    device = cluster.device
    linked, link = _nvlink(n, inside, cluster)
    number = device.nvlink_generation.value if device.nvlink_generation else None
    nvlink, pcie = constants.generation(number), constants.pcie
    share = pcie.efficiency * (
        PCIE_PEER_EFFICIENCY if has_peer_access(cluster) else PCIE_EFFICIENCY
    )
    slow = pcie_gb_per_s(cluster) * share
    within = 1e9 * np.where(linked, np.maximum(link * nvlink.efficiency, slow), slow)
    nodes = np.ceil(n / inside)
    card = 1e9 * (cluster.network_gb_per_s_per_device or np.inf) * NETWORK_EFFICIENCY
    late = (cluster.network_latency_us or NETWORK_LATENCY_US) - NETWORK_LATENCY_US
    start = np.where(linked, nvlink.start_us, pcie.start_us) + np.where(
        nodes > 1, NETWORK_START_US, 0.0
    )
    multicasts = device.architecture.lower() in MULTICAST_ARCHITECTURES and not _is_wired(device)
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
        far_peers=(
            np.maximum(inside - cluster.devices_per_node, 0.0)
            if cluster.devices_per_domain > cluster.devices_per_node
            else np.zeros_like(n)
        ),
        switch=nvlink,
        constants=constants,
    )


def _nvlink(n: Floats, inside: Floats, cluster: Cluster) -> tuple[Flags, Floats]:
    """(which groups links other than PCIe join, GB/s of a rank's links to its group in one direction)."""
    device = cluster.device
    if device.link_gb_per_s is None:
        return np.zeros(n.shape, dtype=bool), np.zeros_like(n)
    link = device.link_gb_per_s.value / 2
    if not device.form_factor.lower().startswith(SWITCHED_FORM_FACTORS):
        # a bridge is an accessory, which GeForce and Titan cards mostly go without
        return (inside <= 2) & (not device.is_consumer), np.full_like(n, link)
    if _is_wired(device):
        return np.ones(n.shape, dtype=bool), link * np.interp(
            inside, *WIRED_SHARES[device.form_factor.lower()]
        )
    return np.ones(n.shape, dtype=bool), np.full_like(n, link)


def _is_wired(device: Device) -> bool:
    """Whether the board's links lead from device to device without a switch."""
    return device.form_factor.lower() in WIRED_SHARES and device.nvlink_domain is None
