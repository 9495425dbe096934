"""``python -m trainpace.measure.loader_worker``: measure a data loader, or the cost of its samples.

The process of its own is the parent of the loader's workers.
"""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from trainpace.core.records import to_json
from trainpace.core.stats import noise_of, repeat_interval
from trainpace.core.worker import serve
from trainpace.measure import loader_timing as timing
from trainpace.measure.detection import detect, environment
from trainpace.measure.devices import count_devices
from trainpace.measure.loader_measurement import (
    LoaderConditions,
    LoaderCost,
    LoaderMeasurement,
    LoaderPoint,
    Stage,
    batch_ms,
    fewest_workers,
)
from trainpace.measure.loader_stages import (
    dataset_stages,
    function_stages,
    is_random,
    transform_stages,
)
from trainpace.shards import ShardDataset, opened_files

SAMPLES_S, SAMPLES_OF_A_LADDER_S = 1.0, 1.5
"""Time of one pass over the samples that are timed one by one; there are about ten passes."""
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
GAIN = 0.05
SHARD_PASSES = 5


def measure_loader(c: LoaderConditions) -> LoaderMeasurement:
    """Time samples one by one, then the whole loader at each number of workers, with interleaved repeats."""
    before = opened_files.held_open()
    torch.manual_seed(c.seed)
    target = timing.load_target(c.target, c.batch_size)
    held = sorted(opened_files.held_open() - before)
    machine = detect()
    cores = machine.cpu.usable_cores or float(os.cpu_count() or 1)
    indices, first_ms = timing.first_pass(target, timing.choose(target.length, c.seed), SAMPLES_S)
    target.collated([target.sample(i) for i in indices[:2]])
    sample = timing.sample_cost(target, indices, first_ms, held)
    stages = _stages(target, indices, sample.wall_ms)
    cost = timing.loader_cost(target, sample.wall_ms, sample.cpu_ms, indices, target.batch_size)
    bench = _Bench(target, c, indices, cost, cores)
    points = bench.over_workers()
    best = fewest_workers({p.workers: p.batch_ms for p in points})
    return LoaderMeasurement(
        target=target.name,
        dataset=type(target.dataset).__name__,
        length=target.length,
        batch_size=target.batch_size,
        drop_last=target.drop_last,
        given_workers=target.given_workers,
        given_persistent=target.given_persistent,
        is_task=target.is_task,
        cores=cores,
        memory_gib=machine.memory_limit_gib or machine.memory_gib,
        sample=sample,
        cost=cost,
        points=points,
        variants=bench.variants(best),
        stages=stages,
        notes=(sample.note,) if sample.note else (),
        environment=environment("cpu"),
    )


def _stages(
    target: timing.LoaderTarget, indices: Sequence[int], wall_ms: float
) -> tuple[Stage, ...]:
    few = indices[: max(8, len(indices) // 2)]
    stages = transform_stages(target, few)
    inner = dataset_stages(target, few, wall_ms)
    if _offline_share(inner) > _offline_share(stages):
        return inner
    if not stages:
        return function_stages(target, few, wall_ms, is_random(target, indices[0]))
    # the clocks around transforms cost some time themselves, and so do other processes: shares hold, sums do not
    factor = wall_ms / sum(s.wall_ms for s in stages)
    return tuple(replace(s, wall_ms=s.wall_ms * factor) for s in stages)


def _offline_share(stages: Sequence[Stage]) -> float:
    total = sum(s.wall_ms for s in stages)
    return sum(s.wall_ms for s in stages if s.offline) / total if total else 0.0


class _Bench:
    def __init__(
        self,
        target: timing.LoaderTarget,
        c: LoaderConditions,
        indices: Sequence[int],
        cost: LoaderCost,
        cores: float,
    ) -> None:
        self._target, self._c, self._indices, self._cost, self._cores = (
            target,
            c,
            indices,
            cost,
            cores,
        )

    def over_workers(self) -> tuple[LoaderPoint, ...]:
        """Measure the numbers of workers of the conditions, or from 0 up to where more gain nothing."""
        runs: dict[timing.Setting, list[timing.Run]] = {}
        best, misses = float("inf"), 0
        for workers in self._c.workers or LADDER:
            enough = workers > 1 and best < (self._c.compute_ms or 0.0) / 2
            if self._c.workers is None and (
                enough or misses >= 2 or (misses and workers > self._cores + 1)
            ):
                break
            setting = self._setting(workers)
            runs[setting] = [self._run(setting)]
            misses = 0 if runs[setting][0].batch_ms < best * (1 - GAIN) else misses + 1
            best = min(best, runs[setting][0].batch_ms)
        if (
            self._target.given_workers is not None
            and (now := self._setting(self._target.given_workers)) not in runs
        ):
            runs[now] = [self._run(now)]
        self._repeat(runs, self._c.repeats - 1)
        return self._points(runs)

    def variants(self, workers: int) -> tuple[LoaderPoint, ...]:
        """Measure the same number of workers with one other setting at a time; the unchanged setting comes first."""
        batch = self._target.batch_size
        base = self._setting(workers)
        settings = [base, base._replace(batch_size=2 * batch)]
        if batch > 1:
            settings.append(base._replace(batch_size=batch // 2))
        if workers:
            settings.append(
                base._replace(prefetch_factor=2 * (base.prefetch_factor or timing.TORCH_PREFETCH))
            )
        if count_devices(
            "cuda"
        ):  # pinned memory makes copies to a CUDA device faster, and is a cost without one
            settings.append(base._replace(pin_memory=True))
        runs: dict[timing.Setting, list[timing.Run]] = {setting: [] for setting in settings}
        self._repeat(runs, self._c.repeats)
        return self._points(runs)

    def _setting(self, workers: int) -> timing.Setting:
        return timing.Setting(
            workers, self._target.batch_size, self._target.prefetch_factor if workers else None
        )

    def _repeat(self, runs: dict[timing.Setting, list[timing.Run]], times: int) -> None:
        """Forwards and backwards in turn, so that a machine whose speed drifts favours no setting."""
        for turn in range(times):
            for setting in list(runs)[:: 1 if turn % 2 else -1]:
                runs[setting].append(self._run(setting))

    def _run(self, setting: timing.Setting) -> timing.Run:
        return timing.run_loader(
            self._target, setting, self._indices, self._c.seconds, self._predicted_ms(setting)
        )

    def _predicted_ms(self, setting: timing.Setting) -> float:
        return batch_ms(self._cost.of_batch(setting.batch_size), setting.workers, self._cores)

    def _points(self, runs: dict[timing.Setting, list[timing.Run]]) -> tuple[LoaderPoint, ...]:
        noise = noise_of(
            {i: [run.batch_ms for run in done] for i, done in enumerate(runs.values())}
        )
        points = []
        for setting, done in runs.items():
            times = [run.batch_ms for run in done]
            interval = None if noise is None else repeat_interval(times, noise)
            if interval is not None:
                interval = replace(
                    interval, basis="the spread of repeats, each with workers of its own"
                )
            worker_ms = self._cost.sample_wall_ms * setting.batch_size + self._cost.collate_ms
            points.append(
                LoaderPoint(
                    workers=setting.workers,
                    batch_size=setting.batch_size,
                    pin_memory=setting.pin_memory,
                    prefetch_factor=(
                        (setting.prefetch_factor or timing.TORCH_PREFETCH)
                        if setting.workers
                        else None
                    ),
                    batch_ms=median(times),
                    interval_ms=interval,
                    predicted_ms=self._predicted_ms(setting),
                    startup_s=(
                        max(0.0, median(r.first_s for r in done) - worker_ms / 1e3)
                        if setting.workers
                        else 0.0
                    ),
                    runs=len(done),
                )
            )
        return tuple(sorted(points, key=lambda p: p.workers))


def costs(
    task: str, shards: str | None, batch_sizes: Sequence[int], workers: bool, seed: int
) -> list[LoaderCost]:
    """The loader's cost for each batch size. `workers`: time sending a batch from a worker as well."""
    target = timing.load_target(task, batch_sizes[0])
    if shards is not None:
        return _costs_of_shards(target, shards, batch_sizes, workers)
    indices, first_ms = timing.first_pass(
        target, timing.choose(target.length, seed), SAMPLES_OF_A_LADDER_S
    )
    sample = timing.sample_cost(target, indices, first_ms, passes=1)
    return [
        timing.loader_cost(target, sample.wall_ms, sample.cpu_ms, indices, size, workers)
        for size in batch_sizes
    ]


def _costs_of_shards(
    target: timing.LoaderTarget, folder: str, batch_sizes: Sequence[int], workers: bool
) -> list[LoaderCost]:
    """The cost of reading shards: a batch at a time, collated as it is copied, with the part of the dataset that stays online."""
    data = ShardDataset(folder, transform=getattr(target.dataset, "online", None))
    target = target._replace(dataset=data, length=len(data))
    measured = []
    for size in batch_sizes:
        positions = [(17 * i) % len(data) for i in range(size)]
        data[positions]
        with timing.one_thread():
            spent = [_timed(data, positions) for _ in range(SHARD_PASSES)]
        wall_ms, cpu_ms = (median(column) / size for column in zip(*spent, strict=True))
        cost = timing.loader_cost(target, wall_ms, cpu_ms, positions, size, workers)
        measured.append(replace(cost, collate_ms=0.0))
    return measured


def _timed(data: Any, positions: list[int]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    data[positions]
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def _work(request: dict[str, Any]) -> str:
    if "costs" in request:
        return msgspec.json.encode(costs(**request["costs"])).decode()
    return to_json(measure_loader(msgspec.convert(request, LoaderConditions)))


if __name__ == "__main__":
    # torch warns of more workers than cores, which is what is tried here
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # a worker that dies is told once; torch's DataLoader, taken apart after it, raises the same again where nobody can catch it
    sys.unraisablehook = lambda _: None
    serve(_work)
