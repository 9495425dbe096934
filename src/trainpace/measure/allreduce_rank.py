"""``python -m trainpace.measure.allreduce_rank``: one rank of a timed all-reduce, in a process of its own."""

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainpace.core.errors import TrainpaceError
from trainpace.core.worker import serve
from trainpace.measure.devices import count_devices, synchronize, use_device

WARMUP_ROUNDS = 2
BYTES_A_TIMING = 2**20
MOST_CALLS = 10


def time_allreduce(sizes_bytes: list[int], repeats: int, device: torch.device) -> list[list[float]]:
    """repeats x sizes seconds of one all-reduce, the slowest rank's. The sizes take turns, so that drift meets all alike."""
    tensors = [torch.zeros(size // torch.float32.itemsize, device=device) for size in sizes_bytes]
    rounds = [[_seconds(tensor) for tensor in tensors] for _ in range(WARMUP_ROUNDS + repeats)]
    slowest = torch.tensor(rounds[WARMUP_ROUNDS:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds: list[list[float]] = slowest.tolist()
    return seconds


def _seconds(tensor: torch.Tensor) -> float:
    # a small payload takes less than the ranks' starts differ
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
                f"nccl needs a CUDA GPU for each of the {ranks} ranks, and {gpus} can be used here."
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
    dist.barrier()  # no rank goes while another still talks to it
    return json.dumps(seconds)


if __name__ == "__main__":
    serve(_work)
