"""What the links between CPU hosts bring to gloo's collectives, from times of a few payloads.

``python -m trainpace.measure.host_links RESULT.json REQUEST`` is one rank, under torchrun or with its variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT): rank 0 writes the times; REQUEST is JSON with `collectives`, `sizes_bytes` and `repeats`.
"""

import datetime
import json
import operator
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trainpace.core.cluster import HostLinks
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, to_jsonable, write_whole
from trainpace.forecast import TCP_SHARE, meets_itself, steps, wire_bytes
from trainpace.measure.calibration import non_negative

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES_BYTES = (2**10, 2**13, 2**14, 3 * 2**13, 2**15, 2**16, 2**18, 2**20, 2**22)
BURSTS_BYTES = tuple(4096.0 * k for k in range(17))
ROUNDS = 20
CLOSE = 0.01
"""Errors below this share of a time are not told apart."""
REFILL_S = 0.004
"""Between timings: a shaped link's bucket is full again, as it is when a step's first collective starts."""
SMALL_BYTES = 2**16
QUANTILE = 0.25
"""The quantile of the rounds that counts; it is low, since what disturbs a host only ever adds."""
TIMEOUT_S = 120.0


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


def time_collectives(
    collectives: list[str], sizes_bytes: list[int], repeats: int
) -> list[TimedCollective]:
    """Time every collective at every payload (fp32), once a round. The process group must exist; all ranks return the same."""
    ranks = dist.get_world_size()
    cases = [(name, size, _call(name, size)) for name in collectives for size in sizes_bytes]
    rounds = torch.zeros(repeats, len(cases), dtype=torch.float64)
    for i in range(-1, repeats):  # the first warms up
        for j, (name, size, call) in enumerate(cases):
            if size <= SMALL_BYTES:
                call()  # the first after another size is slower
            time.sleep(REFILL_S)
            dist.barrier()
            start = time.perf_counter()
            call()
            if i >= 0 and (
                name != "send" or dist.get_rank() == 1
            ):  # a sender may leave the rest to the kernel
                rounds[i, j] = time.perf_counter() - start
    dist.all_reduce(rounds)
    counted = torch.tensor([1 if name == "send" else ranks for name, _, _ in cases])
    undisturbed = (1e3 * torch.quantile(rounds / counted, QUANTILE, dim=0)).tolist()
    return [
        TimedCollective(collective=name, payload_bytes=size, ranks=ranks, time_ms=ms)
        for (name, size, _), ms in zip(cases, undisturbed, strict=True)
    ]


def _call(collective: str, size_bytes: int) -> Callable[[], object]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = torch.zeros(max(1, size_bytes // 4 // ranks))
    whole = torch.zeros(part.numel() * ranks)
    # torch 2.13 warns of the older names
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if collective == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, part)
    if collective == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(part, whole)
    assert collective == "send", collective
    return lambda: (dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)) if rank < 2 else None


def measure_host_links(gb_per_s: float | None = None, repeats: int = 21) -> HostLinks | None:
    """The links between the hosts of this torchrun, of which this process is a rank; None on ranks other than 0.

    `gb_per_s` is their bandwidth where it is known. Raises `TrainpaceError` outside torchrun.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        raise TrainpaceError(
            "the links between hosts need a process on each of two hosts or more.",
            "On every host: torchrun --nnodes 2 --nproc-per-node 1 --node-rank N --master-addr HOST"
            " -m trainpace calibrate --hosts",
        )
    join()
    timed = time_collectives(list(COLLECTIVES), list(SIZES_BYTES), repeats)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return fit_host_links(timed, gb_per_s) if first else None


def join() -> None:
    """Become a rank of the group that the environment describes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))


def _main(result: Path, request: dict[str, object]) -> None:
    join()
    timed = time_collectives(**request)  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        write_whole(result, json.dumps([to_jsonable(t) for t in timed]))
    dist.barrier()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch may abort in its own exit
