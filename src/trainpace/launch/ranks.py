"""Exchanges between the ranks of a trial, over the process group that its engine made. With one rank there is nothing to
exchange."""

import contextlib
import os
import socket
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainpace.errors import Contradiction
from trainpace.execution import Execution


class Place(NamedTuple):
    """The rank of this process among all, and on its node."""

    rank: int
    local_rank: int
    world_size: int


def find_place(execution: Execution) -> Place:
    """The place that torchrun's environment variables give; a process that was started alone is made rank 0 of 1.

    Raises Contradiction where the number of processes is not the execution's.
    """
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if world != execution.world_size:
        raise Contradiction(
            f"{world} process{'es were' if world > 1 else ' was'} started for an execution of {execution.world_size}"
            f" (nnodes {execution.nnodes} x nproc_per_node {execution.nproc_per_node}).",
            "Start as many as nnodes x nproc_per_node.",
        )
    return Place(rank, local, world)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks, element by element."""
    if not _many():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    if not _many():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def of_the_first(value: float, device: torch.device) -> float:
    """Rank 0's value, on every rank."""
    if not _many():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared)


def wait_for_all() -> None:
    """Wait until every rank has come here."""
    if _many():
        with contextlib.suppress(RuntimeError):  # one that has gone already was here
            dist.barrier()


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
