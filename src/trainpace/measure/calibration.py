"""What this machine can do, measured in processes of their own: micro-benchmarks that give a profile for forecasts, and
all-reduce timed over payloads. No torch in this process."""

import json
import operator
import tempfile
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from trainpace.core import records
from trainpace.core.errors import TimedOut, TrainpaceError, UnknownName
from trainpace.core.hardware import Device, HostLinks
from trainpace.core.records import Record
from trainpace.core.stats import median
from trainpace.core.worker import run_isolated, run_ranks
from trainpace.forecast import TCP_SHARE, MachineModel, meets_itself, steps, wire_bytes
from trainpace.measure.detection import Machine, detect

Backend = Literal["gloo", "nccl"]
SIZES_BYTES = tuple(4**k * 2**10 for k in range(8))
"""1 KiB to 16 MiB: from what is all latency to what is all bandwidth."""
ELEMENT_BYTES = 4
_TINY = 1e-10
BURSTS_BYTES = tuple(4096.0 * k for k in range(17))
ROUNDS = 20
CLOSE = 0.01
"""Errors below this share of a time are not told apart."""


class AllReduce(Record):
    """All-reduce (sum) of fp32 tensors among the ranks of one machine.

    `time_ms[i]` is the median over repeats of the slowest rank's time for `sizes_bytes[i]`. The fit says
    time = latency + wire bytes / bandwidth, where a ring puts 2 (ranks - 1) / ranks of the payload on the wire; no
    bandwidth where the times do not grow with the payload.
    """

    ranks: int
    backend: Backend
    sizes_bytes: tuple[int, ...]
    time_ms: tuple[float, ...]
    latency_us: float
    bandwidth_gb_per_s: float | None


class MachineProfile(Record):
    """A device made of measured figures, the kernel model that goes with it, and what machine it is.

    `spread` is (slowest - fastest) / fastest over the passes of a block of layers, at the median block; `drift` the same for
    blocks that ran at the start, in the middle and at the end: how steady the machine was. `host_links` join it to other
    hosts (`trainpace calibrate --hosts`).
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
    """Micro-benchmarks of this machine's CPU for about `seconds`; `machine` is what `detect` found, if it was asked before.

    `threads` are torch's, by default as many as it takes by itself.
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
        raise TimedOut(error.message, "Let nothing else run meanwhile.") from None
    return records.from_json(answer, MachineProfile, "the profile")


def measure_allreduce(
    ranks: int,
    backend: Backend = "gloo",
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeats: int = 15,
    timeout_s: float = 120.0,
) -> AllReduce:
    """Start that many local processes and time them. Sizes are rounded up to whole fp32 numbers.

    Raises `TrainpaceError` for arguments that make no sense, ranks that fail, and after `timeout_s`; no process stays.
    """
    if not 2 <= ranks <= 1024:
        raise TrainpaceError(
            f"an all-reduce among {ranks} ranks cannot be measured.", "Give 2 or more."
        )
    if backend not in get_args(Backend):
        raise UnknownName(
            "backend", str(backend), get_args(Backend), f"Backends: {', '.join(get_args(Backend))}."
        )
    if not sizes_bytes or min(sizes_bytes) < 1 or repeats < 1:
        raise TrainpaceError(
            "an all-reduce needs payloads of 1 byte or more, and 1 repeat or more."
        )
    sizes = sorted({-(-size // ELEMENT_BYTES) * ELEMENT_BYTES for size in sizes_bytes})
    with tempfile.TemporaryDirectory(
        prefix="trainpace-"
    ) as folder:  # where the ranks find each other
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
        what = f"an all-reduce among {ranks} ranks over {backend}"
        answer = run_ranks("trainpace.measure.collectives", requests, timeout_s, what)
    seconds = json.loads(answer)
    times = [median([repeat[i] for repeat in seconds]) for i in range(len(sizes))]
    wire = wire_bytes("all_reduce", np.array(sizes), np.array(ranks))
    latency_s, bytes_per_s = fit_latency_and_bandwidth(wire, times)
    return AllReduce(
        ranks=ranks,
        backend=backend,
        sizes_bytes=tuple(sizes),
        time_ms=tuple(1e3 * t for t in times),
        latency_us=1e6 * latency_s,
        bandwidth_gb_per_s=None if bytes_per_s is None else bytes_per_s / 1e9,
    )


def fit_latency_and_bandwidth(wire: ArrayLike, times_s: ArrayLike) -> tuple[float, float | None]:
    """(seconds, bytes/s or None) of time = latency + bytes / bandwidth, both >= 0, least squares of relative errors."""
    t = np.asarray(times_s, dtype=float)
    columns = np.stack([1 / t, np.asarray(wire, dtype=float) / t], axis=1)
    latency_s, s_per_byte = non_negative(columns, np.ones(len(t)))
    return float(latency_s), 1 / float(s_per_byte) if s_per_byte > 0 else None


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with every unknown >= 0 (Lawson and Hanson 1974), on columns of equal length."""
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
            # as far towards the free solution as no unknown goes below 0
            x += (x[below] / np.maximum(x[below] - inner[below], _TINY)).min() * (inner - x)
            free &= x > _TINY
            x[~free] = 0.0
    return x / scale


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
    both_ways = np.array(
        [bool(meets_itself(t.collective, np.asarray(float(t.ranks)))) for t in timed]
    )
    # what meets itself has an excess to be found, so its hosts' work is taken to be an all-reduce's
    works = [
        "all_reduce" if both else t.collective for t, both in zip(timed, both_ways, strict=True)
    ]
    names = sorted(set(works))
    columns = [np.full(len(timed), 1e-6), 1e-6 * hops]
    columns += [
        1e-6 * wire_b / 2**20 * np.array([work == name for work in works]) for name in names
    ]
    fits: list[tuple[float, float, np.ndarray]] = []
    for burst in BURSTS_BYTES:
        held_back = np.maximum(0.0, wire_b - burst) / (1e9 * gb_per_s * TCP_SHARE)
        left = 1 - held_back / seconds
        relative = np.stack([*columns, held_back * both_ways], axis=1) / seconds[:, None]
        x = _least_absolute(relative, left)
        fits.append((float(np.abs(relative @ x - left).sum()), burst, x))
    _, burst, x = min(fits, key=operator.itemgetter(0))
    return HostLinks(
        start_us=float(x[0]),
        message_us=float(x[1]),
        host_us_per_mib=dict(zip(names, (float(v) for v in x[2:-1]), strict=True)),
        gb_per_s=gb_per_s,
        link_share=TCP_SHARE,
        burst_bytes=burst,
        duplex_excess=float(x[-1]),
    )


def _wire(collective: str, payload_bytes: int, ranks: int) -> float:
    return float(wire_bytes(collective, np.asarray(float(payload_bytes)), np.asarray(float(ranks))))


def _least_absolute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least sum of |a x - b|, by least squares whose weights follow the errors."""
    weight = np.ones(len(b))
    for _ in range(ROUNDS):
        x = non_negative(a * weight[:, None], b * weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(a @ x - b), CLOSE))
    return x
