"""Time collectives between processes: all-reduce between ranks of one machine, and gloo between
hosts.

``python -m trainpace.measure.collectives`` is one rank of an all-reduce that `measure_allreduce`
starts.
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
"""Pause between timings, in which the token bucket of a shaped link fills again.

It is also full when the first collective of a step starts.
"""
SMALL_BYTES = 2**16
QUANTILE = 0.25
"""The quantile of the rounds that counts. It is low, since disturbances only add time."""
TIMEOUT_S = 120.0


def time_collectives(
    collectives: list[str], sizes_bytes: list[int], repeats: int
) -> list[TimedCollective]:
    """Time every collective at every payload (fp32), once per round.

    All ranks return the same times.

    The process group must exist.
    """
    ranks = dist.get_world_size()
    cases = [(name, size, _call(name, size)) for name in collectives for size in sizes_bytes]
    rounds = torch.zeros(repeats, len(cases), dtype=torch.float64)
    for i in range(-1, repeats):  # the first round warms up
        for j, (name, size, call) in enumerate(cases):
            if size <= SMALL_BYTES:
                call()  # the first after another size is slower
            time.sleep(REFILL_S)
            dist.barrier()
            start = time.perf_counter()
            call()
            # a sender may leave the rest to the kernel, so only the receiver counts
            if i >= 0 and (name != "send" or dist.get_rank() == 1):
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
    """Measure the links between the hosts of this torchrun. Ranks other than 0 return None.

    `gb_per_s` is the bandwidth of the links if it is known. Raises `TrainpaceError` outside
    torchrun.
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
    """Join the process group that the environment describes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))


WARMUP_ROUNDS = 2
BYTES_A_TIMING = 2**20
MOST_CALLS = 10


def time_allreduce(sizes_bytes: list[int], repeats: int, device: torch.device) -> list[list[float]]:
    """Return seconds of one all-reduce on the slowest rank, repeats x sizes.

    The sizes take turns, so that drift affects all alike.
    """
    tensors = [torch.zeros(size // torch.float32.itemsize, device=device) for size in sizes_bytes]
    rounds = [[_seconds(tensor) for tensor in tensors] for _ in range(WARMUP_ROUNDS + repeats)]
    slowest = torch.tensor(rounds[WARMUP_ROUNDS:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds: list[list[float]] = slowest.tolist()
    return seconds


def _seconds(tensor: torch.Tensor) -> float:
    # ranks start further apart than a small payload takes
    calls = max(1, min(MOST_CALLS, BYTES_A_TIMING // tensor.nbytes))
    dist.all_reduce(tensor)  # the first after another size is slower
    dist.barrier()
    _wait(tensor)
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    _wait(tensor)
    return (time.perf_counter() - start) / calls


def _wait(tensor: torch.Tensor) -> None:
    synchronize(tensor.device.type)


def _work(request: dict[str, Any]) -> str:
    rank, ranks, backend = request["rank"], request["ranks"], request["backend"]
    device = torch.device("cpu")
    if backend == "nccl":
        gpus = count_devices("cuda") if dist.is_nccl_available() else 0
        if gpus < ranks:
            raise TrainpaceError(
                f"nccl needs a CUDA GPU for each of the {ranks} ranks, but {gpus} are usable here."
            )
        device = torch.device("cuda", rank)
        use_device("cuda", rank)
    else:
        torch.set_num_threads(1)  # ranks share the cores
        if sys.platform == "linux":  # a host whose own name does not resolve stops gloo
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=Path(request["folder"], "store").resolve().as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=request["timeout_s"]),
    )
    seconds = time_allreduce(request["sizes_bytes"], request["repeats"], device)
    dist.barrier()  # no rank ends while another still communicates with it
    return json.dumps(seconds)


if __name__ == "__main__":
    serve(_work)
