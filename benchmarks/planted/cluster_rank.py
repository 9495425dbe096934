"""``cluster_rank.py ANSWER.json REQUEST``: one rank of training steps on several hosts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainpace.core.records import write_whole
from trainpace.measure.collectives import join
from trainpace.workload import build_task, make_optimizer

WARM_UP = 3


def steps_ms(request: dict[str, Any]) -> list[float]:
    """Milliseconds of every step, the mean over ranks; no rank waits for another but where the engine makes it."""
    torch.manual_seed(0)
    task = build_task(request["spec"])
    model = _wrapped(task.model, request["engine"])
    optimizer = make_optimizer(request["optimizer"], model)
    batches = [task.make_batch(request["micro_batch"]) for _ in range(4)]
    accumulation = request["accumulation"]
    times = torch.zeros(request["steps"], dtype=torch.float64)
    dist.barrier()
    for step in range(-WARM_UP, request["steps"]):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for i in range(accumulation):
            _synchronise(model, last=i == accumulation - 1)
            (task.loss(model, batches[i % len(batches)]) / accumulation).backward()
        optimizer.step()
        if step >= 0:
            times[step] = time.perf_counter() - start
    dist.all_reduce(times)
    result: list[float] = (1e3 * times / dist.get_world_size()).tolist()
    return result


def _wrapped(model: nn.Module, engine: str) -> nn.Module:
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    keep = engine == "fsdp_keep"
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False if keep else None
    )  # None: torch's own choice for a root
    return model


def _synchronise(model: nn.Module, last: bool) -> None:
    """Replicated gradients are reduced once a step (no_sync); FSDP reduces them in every micro-step."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = last


if __name__ == "__main__":
    _request = json.loads(sys.argv[2])
    join()
    _answer = steps_ms(_request)
    if dist.get_rank() == 0:
        write_whole(Path(sys.argv[1]), json.dumps(_answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch may abort in its own exit
