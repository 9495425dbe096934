"""``python -m trainpace.machine.allreduce_rank FOLDER RANK``: one rank of a timed all-reduce."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainpace.errors import TrainpaceError
from trainpace.machine.allreduce import ELEMENT_BYTES
from trainpace.records import write_whole

WARMUP_ROUNDS = 2
BYTES_A_TIMING = 2**20
MOST_CALLS = 10


def time_allreduce(
    rank: int, ranks: int, sizes_bytes: list[int], repeats: int, device: torch.device
) -> list[list[float]]:
    """repeats x sizes seconds of one all-reduce, the slowest rank's. The sizes take turns, so that drift meets all alike."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    tensors = [torch.zeros(size // ELEMENT_BYTES, device=device) for size in sizes_bytes]
    rounds = []
    for _ in range(WARMUP_ROUNDS + repeats):
        rounds.append([_seconds(tensor, wait) for tensor in tensors])
    slowest = torch.tensor(rounds[WARMUP_ROUNDS:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds: list[list[float]] = slowest.tolist()
    return seconds


def _seconds(tensor: torch.Tensor, wait: Callable[[], None]) -> float:
    size = tensor.numel() * tensor.element_size()
    calls = max(
        1, min(MOST_CALLS, BYTES_A_TIMING // max(1, size))
    )  # a small payload is shorter than the ranks' start is apart
    dist.all_reduce(tensor)  # the first after another size is slower
    dist.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    wait()
    return (time.perf_counter() - start) / calls


def _main(folder: Path, rank: int) -> None:
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    signal.alarm(max(1, int(request["timeout_s"]) + 5))  # whoever started this may be gone by then
    ranks, backend = request["ranks"], request["backend"]
    device = torch.device("cpu")
    if backend == "nccl":
        if not dist.is_nccl_available() or torch.cuda.device_count() < ranks:
            found = torch.cuda.device_count() if dist.is_nccl_available() else 0
            raise TrainpaceError(f"nccl needs a CUDA GPU for each of the {ranks} ranks, and {found} can be used here.")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
        if sys.platform == "linux":  # a host whose own name does not resolve stops gloo
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        init_method=(folder / "store").resolve().as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=request["timeout_s"]),
    )
    seconds = time_allreduce(rank, ranks, request["sizes_bytes"], request["repeats"], device)
    if rank == 0:
        write_whole(folder / "seconds.json", json.dumps(seconds))
    dist.barrier()  # no rank goes while another still talks to it


if __name__ == "__main__":
    _folder, _rank = Path(sys.argv[1]), int(sys.argv[2])
    try:
        _main(_folder, _rank)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        sentence = (
            error.message if isinstance(error, TrainpaceError) else f"rank {_rank} of the all-reduce raised {reason}"
        )
        write_whole(_folder / f"error-{_rank}.txt", sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch may abort in its own exit
