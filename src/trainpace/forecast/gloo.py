"""Collectives between CPU hosts over gloo: its algorithms' steps and bytes, with the figures that `calibrate --hosts` measured.

From pytorch/gloo (gloo/allreduce.cc, allgather.cc) and torch's ProcessGroupGloo: all-reduce is a ring that scatters, then
gathers, in segments of at most 1 MiB; all-gather is half of that; reduce-scatter is an all-reduce of which each rank keeps
its part, so it costs as much.
"""

import numpy as np
from numpy.typing import NDArray

from trainpace.hardware import HostLinks

Floats = NDArray[np.float64]

TCP_SHARE = 1448 / 1514
"""Payload in an Ethernet frame of 1500 bytes under TCP with time stamps, of the 1514 that a shaped link counts."""


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
    collective: str, payload_bytes: Floats, ranks: Floats, across: NDArray[np.bool_], gb_per_s: float, links: HostLinks
) -> Floats:
    """Seconds of one collective; `across` says whether the group spans hosts, `gb_per_s` is what a host may send."""
    wire = wire_bytes(collective, payload_bytes, ranks)
    host_us = links.host_us_per_mib.get(collective, links.host_us_per_mib.get("all_reduce", 0.0))
    host_s = 1e-6 * (links.start_us + steps(collective, ranks) * links.message_us + host_us * wire / 2**20)
    held_back = np.maximum(0.0, wire - links.burst_bytes) / (1e9 * gb_per_s * links.link_share)
    held_back = held_back * np.where(meets_itself(collective, ranks), 1 + links.duplex_excess, 1.0)
    return host_s + np.where(across, held_back, 0.0)


def meets_itself(collective: str, ranks: Floats) -> NDArray[np.bool_]:
    """Whether both directions of one connection carry the tensor at the same time."""
    return np.asarray((ranks == 2) & (collective == "all_gather"))
