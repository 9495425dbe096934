"""What this machine can do, measured in processes of their own: micro-benchmarks that give a profile for forecasts, and
all-reduce timed over payloads. No torch in this process."""

import json
import tempfile
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from trainpace.core import records
from trainpace.core.cluster import Device, HostLinks
from trainpace.core.errors import TimedOut, TrainpaceError, UnknownName
from trainpace.core.records import Record
from trainpace.core.stats import median
from trainpace.core.worker import run_isolated, run_ranks
from trainpace.forecast import MachineModel, wire_bytes
from trainpace.measure.detection import Machine, detect

Backend = Literal["gloo", "nccl"]
SIZES_BYTES = tuple(4**k * 2**10 for k in range(8))
"""1 KiB to 16 MiB: from what is all latency to what is all bandwidth."""
ELEMENT_BYTES = 4
_TINY = 1e-10


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
        answer = run_ranks("trainpace.measure.allreduce_rank", requests, timeout_s, what)
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
