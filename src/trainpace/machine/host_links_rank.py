"""One rank of timed collectives between hosts, under torchrun or with its variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

``python -m trainpace.machine.host_links_rank RESULT.json REQUEST``: rank 0 writes the times; REQUEST is JSON with
`collectives`, `sizes_bytes` and `repeats`.
"""

import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trainpace.errors import TrainpaceError
from trainpace.hardware import HostLinks
from trainpace.machine.host_links import COLLECTIVES, SIZES_BYTES, TimedCollective, fit_host_links
from trainpace.records import to_jsonable, write_whole

REFILL_S = 0.004
"""Between timings: a shaped link's bucket is full again, as it is when a step's first collective starts."""
SMALL_BYTES = 2**16
QUANTILE = 0.25
"""The quantile of the rounds that counts; it is low, since what disturbs a host only ever adds."""
TIMEOUT_S = 120.0


def time_collectives(collectives: list[str], sizes_bytes: list[int], repeats: int) -> list[TimedCollective]:
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
            if i >= 0 and (name != "send" or dist.get_rank() == 1):  # a sender may leave the rest to the kernel
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
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    assert collective == "send", collective
    return lambda: (dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)) if rank < 2 else None


def measure_host_links(gb_per_s: float | None = None, repeats: int = 21) -> HostLinks | None:
    """The links between the hosts of this torchrun, of which this process is a rank; None on ranks other than 0.

    `gb_per_s` is their bandwidth where it is known. Raises `TrainpaceError` outside torchrun.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        raise TrainpaceError(
            "the links between hosts need a process on each of two hosts or more.",
            "On every host: torchrun --nnodes 2 --nproc-per-node 1 --node-rank N --master-addr HOST -m trainpace"
            " calibrate --hosts",
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
