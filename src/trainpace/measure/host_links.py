"""What the links between CPU hosts bring to gloo's collectives, from times of a few payloads. No torch in this module."""

from __future__ import annotations

import numpy as np

from trainpace.errors import TrainpaceError
from trainpace.forecast.gloo import TCP_SHARE, steps, wire_bytes
from trainpace.hardware.cluster import HostLinks
from trainpace.records import Record

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES_BYTES = (2**10, 2**14, 2**18, 2**20, 2**22)
BURSTS_BYTES = tuple(4096.0 * k for k in range(17))
ROUNDS = 20
CLOSE = 0.01
"""Errors below this share of a time are not told apart."""


class TimedCollective(Record):
    """The lower quartile over repeats of the mean over ranks (as nccl-tests counts; the receiver alone for send)."""

    collective: str
    payload_bytes: int
    ranks: int
    time_ms: float


def fit_host_links(timed: list[TimedCollective], gb_per_s: float | None = None) -> HostLinks:
    """Latencies, host costs and burst by the least sum of relative errors, all >= 0.

    `gb_per_s` is the bandwidth that the link is known to have; without it the largest payload sent from one host to
    another tells it, the hosts' work included. The ranks must be one a host.
    """
    if not timed:
        raise TrainpaceError("no collective was timed, so the links cannot be fitted.")
    if gb_per_s is None:
        sent = [t for t in timed if t.collective == "send"] or timed
        largest = max(sent, key=lambda t: t.payload_bytes)
        wire = _wire(largest.collective, largest.payload_bytes, largest.ranks)
        gb_per_s = wire / largest.time_ms / 1e6 / TCP_SHARE
    names = sorted({t.collective for t in timed})
    seconds = np.array([t.time_ms / 1e3 for t in timed])
    wire_b = np.array([_wire(t.collective, t.payload_bytes, t.ranks) for t in timed])
    hops = np.array([float(steps(t.collective, np.asarray(float(t.ranks)))) for t in timed])
    columns = [np.full(len(timed), 1e-6), 1e-6 * hops]
    columns += [1e-6 * wire_b / 2**20 * np.array([t.collective == name for t in timed]) for name in names]
    relative = np.stack(columns, axis=1) / seconds[:, None]
    best: tuple[float, float, np.ndarray] | None = None
    for burst in BURSTS_BYTES:
        held_back = np.maximum(0.0, wire_b - burst) / (1e9 * gb_per_s * TCP_SHARE)
        left = 1 - held_back / seconds
        x = _least_absolute(relative, left)
        cost = float(np.abs(relative @ x - left).sum())
        if best is None or cost < best[0]:
            best = cost, burst, x
    assert best is not None
    _, burst, x = best
    return HostLinks(
        start_us=float(x[0]),
        message_us=float(x[1]),
        host_us_per_mib=dict(zip(names, (float(v) for v in x[2:]), strict=True)),
        gb_per_s=gb_per_s,
        link_share=TCP_SHARE,
        burst_bytes=burst,
    )


def _wire(collective: str, payload_bytes: int, ranks: int) -> float:
    return float(wire_bytes(collective, np.asarray(float(payload_bytes)), np.asarray(float(ranks))))


def _least_absolute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 of the least sum of |a x - b|, by least squares whose weights follow the errors."""
    weight = np.ones(len(b))
    for _ in range(ROUNDS):
        x = _non_negative(a * weight[:, None], b * weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(a @ x - b), CLOSE))
    return x


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with every unknown >= 0, by leaving out the most negative one until none is."""
    free = list(range(a.shape[1]))
    while True:
        x = np.zeros(a.shape[1])
        if not free:
            return x
        x[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        if (x >= 0).all():
            return x
        free.remove(int(np.argmin(x)))
