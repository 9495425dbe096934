"""Calibration of forecasts for this machine.

Micro-benchmarks give a profile of the machine, and timed collectives give its links. Measurements
run in separate processes, so this module does not import torch.
"""

import json
import operator
import tempfile
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from trainpace.core import records
from trainpace.core.errors import TimedOut
from trainpace.core.hardware import Device, HostLinks
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated, run_ranks
from trainpace.forecast import TCP_SHARE, MachineModel, meets_itself, steps, wire_bytes
from trainpace.measure.detection import Machine, detect

Backend = Literal["gloo", "nccl"]
SIZES_BYTES = tuple(4**k * 2**10 for k in range(8))
"""Payloads of timed collectives, from 1 KiB (only latency) to 16 MiB (only bandwidth)."""
ELEMENT_BYTES = 4
_TINY = 1e-10
BURSTS_BYTES = tuple(4096.0 * k for k in range(17))
ROUNDS = 20
CLOSE = 0.01
"""Relative error below which the fit of the links treats all errors as equal."""


class AllReduce(Record):
    """Measured all-reduce (sum) of fp32 tensors between the ranks of one machine.

    `time_ms[i]` is the time for `sizes_bytes[i]` (see `TimedCollective`). The fit is time = latency
    + wire bytes / bandwidth. A ring sends 2 (ranks - 1) / ranks of the payload. The bandwidth is
    None if the times do not grow with the payload.
    """

    ranks: int
    backend: Backend
    sizes_bytes: tuple[int, ...]
    time_ms: tuple[float, ...]
    latency_us: float
    bandwidth_gb_per_s: float | None


class MachineProfile(Record):
    """Result of a calibration: the measured device, its kernel model, and its machine.

    Attributes:
        spread: (median - fastest) / fastest over the passes of a group of blocks. It is the median
            over all groups.
        drift: Difference between runs of the same blocks at the start, in the middle and at the
            end.
        allreduce: All-reduce between ranks of this machine, if measured.
        host_links: Links to other hosts, if measured (`trainpace calibrate --hosts`).
    """

    device: Device
    kernels: MachineModel
    environment: dict[str, str]
    machine: Machine
    spread: float
    drift: float
    allreduce: AllReduce | None = None
    host_links: HostLinks | None = None


def calibrate(
    seconds: float, machine: Machine | None = None, threads: int | None = None
) -> MachineProfile:
    """Run micro-benchmarks of this machine's CPU for about `seconds`.

    Args:
        seconds: Time limit of the measurements, approximately.
        machine: Result of `detect`, if it is known already.
        threads: Number of torch threads. By default, torch chooses.
    """
    request = {
        "seconds": seconds,
        "machine": msgspec.to_builtins(machine or detect()),
        "threads": threads,
    }
    timeout_s = 300 + 2 * seconds
    try:
        answer = run_isolated(
            "trainpace.measure.micro_benchmarks", request, timeout_s, "calibrating this machine"
        )
    except TimedOut as error:
        raise TimedOut(error.message, "Stop other programs meanwhile.") from None
    return records.from_json(answer, MachineProfile, "the profile")


def measure_allreduce(
    ranks: int,
    backend: Backend = "gloo",
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = 15,
    timeout_s: float = 120.0,
) -> AllReduce:
    """Start local processes and time their all-reduce.

    Sizes are rounded up to whole fp32 numbers.

    Raises:
        TrainpaceError: If a rank fails or exceeds `timeout_s`. All processes have ended by then.
    """
    sizes = sorted({-(-size // ELEMENT_BYTES) * ELEMENT_BYTES for size in sizes_bytes})
    # The ranks rendezvous through a file in this folder.
    with tempfile.TemporaryDirectory(prefix="trainpace-") as folder:
        requests = [
            {
                "backend": backend,
                "sizes_bytes": sizes,
                "repeats": repeats,
                "timeout_s": timeout_s,
                "folder": folder,
                "ranks": ranks,
                "rank": rank,
            }
            for rank in range(ranks)
        ]
        what = f"an all-reduce between {ranks} ranks over {backend}"
        answer = run_ranks("trainpace.measure.collectives", requests, timeout_s, what)
    time_ms: list[float] = json.loads(answer)
    wire = wire_bytes("all_reduce", np.array(sizes), np.array(ranks))
    latency_s, bytes_per_s = fit_latency_and_bandwidth(wire, np.array(time_ms) / 1e3)
    return AllReduce(
        ranks=ranks,
        backend=backend,
        sizes_bytes=tuple(sizes),
        time_ms=tuple(time_ms),
        latency_us=1e6 * latency_s,
        bandwidth_gb_per_s=None if bytes_per_s is None else bytes_per_s / 1e9,
    )


def fit_latency_and_bandwidth(wire: ArrayLike, times_s: ArrayLike) -> tuple[float, float | None]:
    """Fit time = latency + bytes / bandwidth by least squares of relative errors.

    Both parameters are >= 0.

    Returns:
        The latency in seconds, and the bandwidth in bytes per second. The bandwidth is None if the
        times do not grow with the bytes.
    """
    t = np.asarray(times_s, dtype=float)
    columns = np.stack([1 / t, np.asarray(wire, dtype=float) / t], axis=1)
    latency_s, s_per_byte = non_negative(columns, np.ones(len(t)))
    return float(latency_s), 1 / float(s_per_byte) if s_per_byte > 0 else None


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve min |a x - b| over x >= 0 by non-negative least squares (Lawson and Hanson 1974)."""
    length = np.linalg.norm(a, axis=0)
    scale = np.where(length > 0, length, 1.0)
    scaled = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * len(x)):
        gradient = np.where(free, -np.inf, scaled.T @ (b - scaled @ x))
        if gradient.max() <= _TINY:
            break
        free[gradient.argmax()] = True
        while free.any():
            inner = np.zeros_like(x)
            inner[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            below = free & (inner <= 0)
            if not below.any():
                x = inner
                break
            # Step towards the unconstrained solution until an unknown reaches 0.
            x += (x[below] / np.maximum(x[below] - inner[below], _TINY)).min() * (inner - x)
            free &= x > _TINY
            x[~free] = 0.0
    return x / scale


class TimedCollective(Record):
    """Measured time of a collective.

    `time_ms` is the mean over ranks, as in nccl-tests, and the lower quartile over repeats. For
    send, only the receiver's time counts.
    """

    collective: str
    payload_bytes: int
    ranks: int
    time_ms: float


def fit_host_links(timed: list[TimedCollective], gb_per_s: float | None = None) -> HostLinks:
    """Fit the latencies, host costs and burst size of links between hosts.

    All parameters are >= 0. They minimize the sum of absolute relative errors.

    Args:
        timed: Timed collectives with one rank per host.
        gb_per_s: Known bandwidth of the link in GB/s. By default, the largest payload sent between
            two hosts determines it. It then includes the work of the hosts.
    """
    seconds = np.array([t.time_ms / 1e3 for t in timed])
    wire_b, hops, both_ways = map(np.array, zip(*map(_traffic, timed), strict=True))
    if gb_per_s is None:
        sent = np.array([t.collective == "send" for t in timed])
        largest = np.argmax(np.where(sent | ~sent.any(), wire_b, 0.0))
        gb_per_s = float(wire_b[largest] / seconds[largest]) / 1e9 / TCP_SHARE
    # A collective that sends in both directions at once has an unknown excess (`duplex_excess`).
    # Its host work is therefore assumed to be that of an all-reduce.
    works = np.where(both_ways, "all_reduce", [t.collective for t in timed])
    names = sorted(set(works.tolist()))
    columns = [np.full(len(timed), 1e-6), 1e-6 * hops]
    columns += [1e-6 * wire_b / 2**20 * (works == name) for name in names]
    fits: list[tuple[float, float, np.ndarray]] = []
    for burst in BURSTS_BYTES:
        held_back = np.maximum(0.0, wire_b - burst) / (1e9 * gb_per_s * TCP_SHARE)
        left = 1 - held_back / seconds
        relative = np.stack([*columns, held_back * both_ways], axis=1) / seconds[:, None]
        x = _least_absolute(relative, left)
        fits.append((float(np.abs(relative @ x - left).sum()), burst, x))
    _, burst, x = min(fits, key=operator.itemgetter(0))
    start_us, message_us, *host_us, duplex_excess = x.tolist()
    return HostLinks(
        start_us=start_us,
        message_us=message_us,
        host_us_per_mib=dict(zip(names, host_us, strict=True)),
        gb_per_s=gb_per_s,
        link_share=TCP_SHARE,
        burst_bytes=burst,
        duplex_excess=duplex_excess,
    )


def _traffic(t: TimedCollective) -> tuple[float, float, bool]:
    """Return (bytes that each rank sends, messages in a row, True if both directions collide)."""
    payload, ranks = np.array(float(t.payload_bytes)), np.array(float(t.ranks))
    return (
        float(wire_bytes(t.collective, payload, ranks)),
        float(steps(t.collective, ranks)),
        bool(meets_itself(t.collective, ranks)),
    )


def _least_absolute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Minimize the sum of |a x - b| over x >= 0, by iteratively reweighted least squares."""
    weight = np.ones(len(b))
    for _ in range(ROUNDS):
        x = non_negative(a * weight[:, None], b * weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(a @ x - b), CLOSE))
    return x
