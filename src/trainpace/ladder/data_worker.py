"""``python -m trainpace.ladder.data_worker``: what a task's samples cost, from its own dataset or from shards."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from trainpace.loader import (
    LoaderCost,
    LoaderTarget,
    choose,
    first_pass,
    load_target,
    loader_cost,
    one_thread,
    sample_cost,
)
from trainpace.process import serve

SECONDS = 1.5
PASSES = 5


def costs(task: str, shards: str | None, batch_sizes: Sequence[int], workers: bool, seed: int) -> list[LoaderCost]:
    """The loader's cost for each batch size. `workers`: time sending a batch from a worker as well."""
    target = load_target(task, batch_sizes[0])
    if shards is not None:
        return _costs_of_shards(target, shards, batch_sizes, workers)
    indices, first_ms = first_pass(target, choose(target.length, seed), SECONDS)
    sample = sample_cost(target, indices, first_ms, passes=1)
    return [loader_cost(target, sample.wall_ms, sample.cpu_ms, indices, size, False, workers) for size in batch_sizes]


def _costs_of_shards(target: LoaderTarget, folder: str, batch_sizes: Sequence[int], workers: bool) -> list[LoaderCost]:
    """The cost of reading shards: a batch at a time, collated as it is copied, with the part of the dataset that stays online."""
    from trainpace.shards import ShardDataset

    data = ShardDataset(folder, transform=getattr(target.dataset, "online", None))
    target = target._replace(dataset=data, length=len(data))
    measured = []
    for size in batch_sizes:
        positions = [(17 * i) % len(data) for i in range(size)]
        data[positions]
        with one_thread():
            spent = [_timed(data, positions) for _ in range(PASSES)]
        wall_ms, cpu_ms = (median(column) / size for column in zip(*spent, strict=True))
        cost = loader_cost(target, wall_ms, cpu_ms, positions, size, False, workers)
        measured.append(msgspec.structs.replace(cost, collate_ms=0.0))
    return measured


def _timed(data: Any, positions: list[int]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    data[positions]
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


if __name__ == "__main__":
    serve(lambda request: msgspec.json.encode(costs(**request)).decode())
