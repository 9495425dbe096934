"""Timing of collectives between ranks of one machine, and of gloo between hosts.

`measure_allreduce` starts ``python -m trainpace.measure.collectives`` once per rank.
"""

import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import HostLinks
from trainpace.core.worker import serve
from trainpace.measure.calibration import TimedCollective, fit_host_links
from trainpace.measure.device import count_devices, synchronize, use_device

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES_BYTES = (2**10, 2**13, 2**14, 3 * 2**13, 2**15, 2**16, 2**18, 2**20, 2**22)
REFILL_S = 0.004
"""Pause between timings, in seconds. Meanwhile the token bucket of a rate-limited link refills.

In a training, the bucket is also full when the first collective of a step starts.
"""
SMALL_BYTES = 2**16
BYTES_A_TIMING = 2**20
QUANTILE = 0.25
"""Quantile over rounds that is reported. It is low because disturbances only add time."""
TIMEOUT_S = 120.0


def time_collectives(
    collectives: list[str],
    sizes_bytes: list[int],
    repeats: int,
    kind: str = "cpu",
    most_calls: int = 1,
) -> list[TimedCollective]:
    """Time every collective at every payload of fp32 numbers, once per round.

    The process group must exist. All ranks return the same times.

    Args:
        collectives: Names of collectives, of `COLLECTIVES`.
        sizes_bytes: Payloads.
        repeats: Number of timed rounds.
        kind: Type of the devices that hold the payloads.
        most_calls: Maximum number of calls of a small payload that are timed together. Ranks start
            further apart than a small payload takes.
    """
    ranks = dist.get_world_size()
    cases = [(name, size, _call(name, size, kind)) for name in collectives for size in sizes_bytes]
    rounds = torch.zeros(1 + repeats, len(cases), dtype=torch.float64)
    for timed in rounds:
        for j, (name, size, call) in enumerate(cases):
            if size <= SMALL_BYTES:
                call()  # the first call after a change of size is slower
            time.sleep(REFILL_S)
            dist.barrier()
            synchronize(kind)
            calls = max(1, min(most_calls, BYTES_A_TIMING // size))
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(kind)
            # A send may return before the data has arrived, so only the receiver's time counts.
            if name != "send" or dist.get_rank() == 1:
                timed[j] = (time.perf_counter() - start) / calls
    rounds = rounds[1:].to(kind)  # the first round is the warm-up
    dist.all_reduce(rounds)
    counted = torch.tensor([1 if name == "send" else ranks for name, _, _ in cases])
    undisturbed = (1e3 * torch.quantile(rounds.cpu() / counted, QUANTILE, dim=0)).tolist()
    return [
        TimedCollective(collective=name, payload_bytes=size, ranks=ranks, time_ms=ms)
        for (name, size, _), ms in zip(cases, undisturbed, strict=True)
    ]


def _call(collective: str, size_bytes: int, kind: str) -> Callable[[], object]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = torch.zeros(max(1, size_bytes // 4 // ranks), device=kind)
    whole = torch.zeros(part.numel() * ranks, device=kind)
    # torch 2.13 warns about the older names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "send": lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0),
    }
    idle = collective == "send" and rank > 1
    return (lambda: None) if idle else calls[collective]


def measure_host_links(gb_per_s: float | None = None, repeats: int = 21) -> HostLinks | None:
    """Measure the links between the hosts of this torchrun job.

    Args:
        gb_per_s: Bandwidth of the links in GB/s, if it is known.
        repeats: Number of timed rounds.

    Returns:
        The fitted links on rank 0, and None on the other ranks.

    Raises:
        TrainpaceError: If the process was not started by torchrun with at least two ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        raise TrainpaceError(
            "measuring links between hosts needs a process on each of at least two hosts.",
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
    """Join the process group that torchrun's environment variables describe."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))


def _work(request: dict[str, Any]) -> str:
    rank, ranks, backend = request["rank"], request["ranks"], request["backend"]
    kind = "cpu"
    if backend == "nccl":
        gpus = count_devices("cuda") if dist.is_nccl_available() else 0
        if gpus < ranks:
            raise TrainpaceError(
                f"nccl needs a CUDA GPU for each of the {ranks} ranks, but {gpus} are usable here."
            )
        kind = "cuda"
        use_device(kind, rank)
    else:
        torch.set_num_threads(1)  # ranks share the cores
        if sys.platform == "linux":  # gloo fails if the host's own name does not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=Path(request["folder"], "store").resolve().as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=request["timeout_s"]),
    )
    timed = time_collectives(
        ["all_reduce"], request["sizes_bytes"], request["repeats"], kind, most_calls=10
    )
    dist.barrier()  # otherwise a rank might exit while another still communicates with it
    return json.dumps([t.time_ms for t in timed])


if __name__ == "__main__":
    serve(_work)
