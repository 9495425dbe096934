"""What the links between CPU hosts bring to gloo's collectives, from times of a few payloads. No torch in this module."""

import numpy as np

from trainpace.errors import TrainpaceError
from trainpace.forecast import TCP_SHARE, meets_itself, steps, wire_bytes
from trainpace.hardware import HostLinks
from trainpace.records import Record

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES_BYTES = (2**10, 2**13, 2**14, 3 * 2**13, 2**15, 2**16, 2**18, 2**20, 2**22)
BURSTS_BYTES = tuple(4096.0 * k for k in range(17))
ROUNDS = 20
TINY = 1e-10
CLOSE = 0.01
"""Errors below this share of a time are not told apart."""


class TimedCollective(Record):
    """The lower quartile over repeats of the mean over ranks (as nccl-tests counts; the receiver alone for send)."""

    collective: str
    payload_bytes: int
    ranks: int
    time_ms: float


def fit_host_links(timed: list[TimedCollective], gb_per_s: float | None = None) -> HostLinks:
    """Fit latencies, host costs and the burst, all >= 0, by the least sum of relative errors.

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
    seconds = np.array([t.time_ms / 1e3 for t in timed])
    wire_b = np.array([_wire(t.collective, t.payload_bytes, t.ranks) for t in timed])
    hops = np.array([float(steps(t.collective, np.asarray(float(t.ranks)))) for t in timed])
    both_ways = np.array([bool(meets_itself(t.collective, np.asarray(float(t.ranks)))) for t in timed])
    # what meets itself has an excess to be found, so its hosts' work is taken to be an all-reduce's
    works = ["all_reduce" if both else t.collective for t, both in zip(timed, both_ways, strict=True)]
    names = sorted(set(works))
    columns = [np.full(len(timed), 1e-6), 1e-6 * hops]
    columns += [1e-6 * wire_b / 2**20 * np.array([work == name for work in works]) for name in names]
    best: tuple[float, float, np.ndarray] | None = None
    for burst in BURSTS_BYTES:
        held_back = np.maximum(0.0, wire_b - burst) / (1e9 * gb_per_s * TCP_SHARE)
        left = 1 - held_back / seconds
        relative = np.stack([*columns, held_back * both_ways], axis=1) / seconds[:, None]
        x = _least_absolute(relative, left)
        cost = float(np.abs(relative @ x - left).sum())
        if best is None or cost < best[0]:
            best = cost, burst, x
    assert best is not None
    _, burst, x = best
    return HostLinks(
        start_us=float(x[0]), message_us=float(x[1]),
        host_us_per_mib=dict(zip(names, (float(v) for v in x[2:-1]), strict=True)), gb_per_s=gb_per_s,
        link_share=TCP_SHARE, burst_bytes=burst, duplex_excess=float(x[-1]),
    )  # fmt: skip


def _wire(collective: str, payload_bytes: int, ranks: int) -> float:
    return float(wire_bytes(collective, np.asarray(float(payload_bytes)), np.asarray(float(ranks))))


def _least_absolute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least sum of |a x - b|, by least squares whose weights follow the errors."""
    weight = np.ones(len(b))
    for _ in range(ROUNDS):
        x = non_negative(a * weight[:, None], b * weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(a @ x - b), CLOSE))
    return x


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with every unknown >= 0 (Lawson and Hanson 1974), on columns of equal length."""
    length = np.linalg.norm(a, axis=0)
    scale = np.where(length > 0, length, 1.0)
    scaled = a / scale
    x = np.zeros(a.shape[1])
    free: list[int] = []
    for _ in range(3 * len(x)):
        gradient = scaled.T @ (b - scaled @ x)
        gradient[free] = -np.inf
        if gradient.max() <= TINY:
            break
        free.append(int(np.argmax(gradient)))
        while True:
            inner = np.zeros_like(x)
            inner[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            if (inner[free] > 0).all():
                break
            # as far towards the free solution as no unknown goes below 0
            worst = [i for i in free if inner[i] <= 0]
            x = x + min(x[i] / (x[i] - inner[i]) if x[i] > inner[i] else 0.0 for i in worst) * (inner - x)
            free = [i for i in free if x[i] > TINY]
            x[[i for i in range(len(x)) if i not in free]] = 0.0
            if not free:
                inner = np.zeros_like(x)
                break
        x = inner
    return x / scale
