"""``python -m trainpace.measure.loader_worker``: measure a data loader, or the cost of its samples.

The process of its own is the parent of the loader's workers.
"""

from __future__ import annotations

import contextlib
import cProfile
import math
import os
import pstats
import random
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, default_collate

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.host import thread_times
from trainpace.core.records import to_json
from trainpace.core.stats import noise_of, repeat_interval
from trainpace.core.worker import explain, is_users, serve
from trainpace.measure.detection import detect, environment
from trainpace.measure.device import count_devices
from trainpace.measure.loader import (
    LoaderConditions,
    LoaderCost,
    LoaderMeasurement,
    LoaderPoint,
    SampleCost,
    Stage,
    batch_ms,
    fewest_workers,
)
from trainpace.shards import ShardDataset, is_task, length_of, made_by, opened_files, user_dataset
from trainpace.workload import ModelSpec

SAMPLES_S, SAMPLES_OF_A_LADDER_S = 1.0, 1.5
"""Time of one pass over the samples that are timed one by one; there are about ten passes."""
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
GAIN = 0.05
SHARD_PASSES = 5


def measure_loader(c: LoaderConditions) -> LoaderMeasurement:
    """Time samples one by one, then the whole loader at each number of workers, with interleaved repeats."""
    before = opened_files.held_open()
    torch.manual_seed(c.seed)
    target = load_target(c.target, c.batch_size)
    held = sorted(opened_files.held_open() - before)
    machine = detect()
    cores = machine.cpu.usable_cores or float(os.cpu_count() or 1)
    indices, first_ms = first_pass(target, choose(target.length, c.seed), SAMPLES_S)
    target.collated([target.sample(i) for i in indices[:2]])
    sample = sample_cost(target, indices, first_ms, held)
    stages = _stages(target, indices, sample.wall_ms)
    cost = loader_cost(target, sample.wall_ms, sample.cpu_ms, indices, target.batch_size)
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


def _stages(target: LoaderTarget, indices: Sequence[int], wall_ms: float) -> tuple[Stage, ...]:
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
        target: LoaderTarget,
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
        runs: dict[Setting, list[Run]] = {}
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
                base._replace(prefetch_factor=2 * (base.prefetch_factor or TORCH_PREFETCH))
            )
        if count_devices(
            "cuda"
        ):  # pinned memory makes copies to a CUDA device faster, and is a cost without one
            settings.append(base._replace(pin_memory=True))
        runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
        self._repeat(runs, self._c.repeats)
        return self._points(runs)

    def _setting(self, workers: int) -> Setting:
        return Setting(
            workers, self._target.batch_size, self._target.prefetch_factor if workers else None
        )

    def _repeat(self, runs: dict[Setting, list[Run]], times: int) -> None:
        """Forwards and backwards in turn, so that a machine whose speed drifts favours no setting."""
        for turn in range(times):
            for setting in list(runs)[:: 1 if turn % 2 else -1]:
                runs[setting].append(self._run(setting))

    def _run(self, setting: Setting) -> Run:
        return run_loader(
            self._target, setting, self._indices, self._c.seconds, self._predicted_ms(setting)
        )

    def _predicted_ms(self, setting: Setting) -> float:
        return batch_ms(self._cost.of_batch(setting.batch_size), setting.workers, self._cores)

    def _points(self, runs: dict[Setting, list[Run]]) -> tuple[LoaderPoint, ...]:
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
                        (setting.prefetch_factor or TORCH_PREFETCH) if setting.workers else None
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
    target = load_target(task, batch_sizes[0])
    if shards is not None:
        return _costs_of_shards(target, shards, batch_sizes, workers)
    indices, first_ms = first_pass(target, choose(target.length, seed), SAMPLES_OF_A_LADDER_S)
    sample = sample_cost(target, indices, first_ms, passes=1)
    return [
        loader_cost(target, sample.wall_ms, sample.cpu_ms, indices, size, workers)
        for size in batch_sizes
    ]


def _costs_of_shards(
    target: LoaderTarget, folder: str, batch_sizes: Sequence[int], workers: bool
) -> list[LoaderCost]:
    """The cost of reading shards: a batch at a time, collated as it is copied, with the part of the dataset that stays online."""
    data = ShardDataset(folder, transform=getattr(target.dataset, "online", None))
    target = target._replace(dataset=data, length=len(data))
    measured = []
    for size in batch_sizes:
        positions = [(17 * i) % len(data) for i in range(size)]
        data[positions]
        with one_thread():
            spent = [_read_once(data, positions) for _ in range(SHARD_PASSES)]
        wall_ms, cpu_ms = (median(column) / size for column in zip(*spent, strict=True))
        cost = loader_cost(target, wall_ms, cpu_ms, positions, size, workers)
        measured.append(replace(cost, collate_ms=0.0))
    return measured


def _read_once(data: Any, positions: list[int]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    data[positions]
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def _work(request: dict[str, Any]) -> str:
    if "costs" in request:
        return msgspec.json.encode(costs(**request["costs"])).decode()
    return to_json(measure_loader(msgspec.convert(request, LoaderConditions)))


DEFAULT_BATCH = 32
MOST_SAMPLES = 512
FEWEST_SAMPLES = 8
FIRST = 4
"""Samples 0 to 3 are always measured: they are what a person tries first."""
PASSES = 3
_CACHED_RATIO = 5.0


class LoaderTarget(NamedTuple):
    """A map-style dataset and how it is loaded. `options`: further options of the user's DataLoader."""

    name: str
    dataset: Any
    length: int
    collate: Callable[[list[Any]], Any]
    batch_size: int
    drop_last: bool
    given_workers: int | None = None
    given_persistent: bool = False
    prefetch_factor: int | None = None
    is_task: bool = False
    options: Mapping[str, Any] = {}

    def sample(self, index: int) -> Any:
        """One sample. Raises `UserCodeError` that names it where the dataset's code raises."""
        try:
            return self.dataset[index]
        except Exception as error:
            raise UserCodeError(
                f"sample {index} cannot be had: {_sentence(explain(error, 'the dataset'))}"
            ) from error

    def collated(self, samples: Sequence[Any]) -> Any:
        """A batch. Raises `UserCodeError` where samples do not collate."""
        try:
            return self.collate(list(samples))
        except Exception as error:
            raise UserCodeError(
                f"{len(samples)} samples do not make a batch:"
                f" {_sentence(explain(error, 'collate_fn'))}",
                "Give the dataset a collate_fn, or return a DataLoader that has one.",
            ) from error


def load_target(spec: str, batch_size: int | None = None) -> LoaderTarget:
    """What FILE.py:NAME is or returns, ready to be loaded. Raises `TrainpaceError` for anything that has no samples."""
    named = ModelSpec.of(spec)
    name = f"{Path(named.path).name}:{named.name}"
    try:
        loader = made_by(spec)
    except TrainpaceError:
        raise
    except Exception as error:
        raise UserCodeError(_sentence(explain(error, name))) from error
    if not isinstance(loader, DataLoader):
        dataset = loader[3] if is_task(loader) else loader
        length = length_of(dataset, name)
        collate = getattr(dataset, "collate_fn", None) or default_collate
        return LoaderTarget(
            name,
            dataset,
            length,
            collate,
            batch_size or DEFAULT_BATCH,
            False,
            is_task=is_task(loader),
        )
    length = length_of(loader.dataset, f"the dataset of {name}")
    batch_size = (
        batch_size or loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    )
    if batch_size is None:
        raise TrainpaceError(
            f"the DataLoader of {name} has no batch size.", "Give one with --batch."
        )
    options = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    options = {key: value for key, value in options.items() if value is not None}
    collate = loader.collate_fn if loader.batch_sampler is not None else default_collate
    return LoaderTarget(
        name,
        loader.dataset,
        length,
        collate,
        batch_size,
        bool(loader.drop_last),
        given_workers=loader.num_workers,
        given_persistent=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        options=options,
    )


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."


# ---- the cost of a sample


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as it does in a DataLoader's worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def choose(length: int, seed: int) -> list[int]:
    """Indices of the samples to measure: the first few, then others in random order."""
    first = min(FIRST, length)
    return [
        *range(first),
        *random.Random(seed).sample(range(first, length), min(MOST_SAMPLES, length) - first),
    ]


def first_pass(
    target: LoaderTarget, indices: Sequence[int], seconds: float
) -> tuple[list[int], float]:
    """Read every sample once, for about `seconds`: (indices of those that were read, mean ms of this first access)."""
    start, count = time.perf_counter(), 0
    with one_thread():
        for index in indices:
            if count >= FEWEST_SAMPLES and time.perf_counter() > start + seconds:
                break
            target.sample(index)
            count += 1
    return list(indices[:count]), 1e3 * (time.perf_counter() - start) / count


def sample_cost(
    target: LoaderTarget,
    indices: Sequence[int],
    first_ms: float,
    held: Sequence[str] = (),
    passes: int = PASSES,
) -> SampleCost:
    """Time the samples warm, `passes` times, then cold and warm again. Medians over passes of means over samples.
    `held`: files that stay open from sample to sample."""
    with one_thread():
        before = opened_files.bytes_read() or 0
        with opened_files.recorded() as opened:
            for index in indices:
                target.sample(index)
        read = (opened_files.bytes_read() or 0) - before
        warm = [_pass(target, indices) for _ in range(passes)]
        files = opened or list(held)
        note = _note(opened, files, read, len(indices))
        cold: list[_Pass] = []
        for _ in range(passes if files and not note else 0):
            note = opened_files.drop(files)
            if note:
                break
            cold.append(_pass(target, indices))
            warm.append(_pass(target, indices))
    wall_ms = median(p.wall_ms for p in warm)
    if not note and first_ms > _CACHED_RATIO * wall_ms and not files:
        note = (
            f"the first access of a sample took {first_ms:.3g} ms: the dataset caches its samples."
        )
    file_bytes = sum(os.path.getsize(path) for path in opened if os.path.exists(path))
    return SampleCost(
        samples=len(indices),
        wall_ms=wall_ms,
        cpu_ms=median(p.cpu_ms for p in warm),
        first_ms=first_ms,
        delayed_ms=median(p.delayed_ms for p in warm),
        cold_wall_ms=median(p.wall_ms for p in cold) if cold else None,
        files=len(opened) / len(indices),
        file_bytes=file_bytes / len(indices),
        note=note,
    )


class _Pass(NamedTuple):
    """Means of one pass over the samples. `wall_ms` is without `delayed_ms`."""

    wall_ms: float
    cpu_ms: float
    delayed_ms: float


def _pass(target: LoaderTarget, indices: Sequence[int]) -> _Pass:
    """CPU time is that of the whole process, since OpenCV and others have threads of their own."""
    delayed, cpu, wall = _delayed_ms(), time.process_time(), time.perf_counter()
    for index in indices:
        target.sample(index)
    wall_ms, cpu_ms = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
    delayed_ms = min(_delayed_ms() - delayed, wall_ms)
    return _Pass(
        (wall_ms - delayed_ms) / len(indices), cpu_ms / len(indices), delayed_ms / len(indices)
    )


def _delayed_ms() -> float:
    """Time that this process' main thread has waited for a core so far; 0 where the system does not report it."""
    times = thread_times(os.getpid())  # the main thread has the number of its process
    return 0.0 if times is None else times[1] / 1e6


def _note(opened: Sequence[str], files: Sequence[str], read: int, samples: int) -> str:
    if opened:
        return ""
    if files:
        return (
            ""
            if read > 0
            else "files are mapped into memory, so their reads are not told from preprocessing."
        )
    if read > 1024 * samples:
        kib = read / samples / 1024
        return (
            f"{kib:.0f} KiB a sample are read from files that Python did not open, so they stay"
            " warm."
        )
    return "nothing is read from files: the data is in memory."


MOST_BATCHES = 2000
FEWEST_BATCHES = 4
TORCH_PREFETCH = 2


class Setting(NamedTuple):
    """How a loader is run. `prefetch_factor` None means torch's own (2 with workers, none without)."""

    workers: int
    batch_size: int
    prefetch_factor: int | None = None
    pin_memory: bool = False


class Run(NamedTuple):
    """One run: ms from batch to batch in steady state, the main process' CPU ms for one, and seconds from ``iter()`` to the first
    batch."""

    batch_ms: float
    cpu_ms: float
    first_s: float


def _timed(loader: DataLoader[Any], skipped: int, timed: int) -> Run:
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - start
    for _ in range(skipped - 1):
        next(batches)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(timed):
        next(batches)
    return Run(
        1e3 * (time.perf_counter() - wall) / timed,
        1e3 * (time.process_time() - cpu) / timed,
        first_s,
    )


def run_loader(
    target: LoaderTarget,
    setting: Setting,
    indices: Sequence[int],
    seconds: float,
    expected_ms: float,
) -> Run:
    """Load for about `seconds`, after the batches that the workers prefetched. `indices` are loaded repeatedly, shuffled.

    The number of timed batches is a multiple of the number of workers. Raises `UserCodeError` where a worker fails.
    """
    ahead = setting.workers * (setting.prefetch_factor or TORCH_PREFETCH)
    turns = max(setting.workers, 1)
    wanted = min(
        max(1e3 * seconds / max(expected_ms, 1e-3), FEWEST_BATCHES, 2 * turns), MOST_BATCHES
    )
    timed = math.ceil(wanted / turns) * turns
    skipped = ahead + turns if setting.workers else 1
    # workers that run out of samples before the last timed batch would leave their cores to the others
    order = _endless(indices, (skipped + timed + ahead) * setting.batch_size)
    options: dict[str, Any] = {}
    if setting.workers:
        options = dict(target.options)
        if setting.prefetch_factor is not None:
            options["prefetch_factor"] = setting.prefetch_factor
    loader: DataLoader[Any] = DataLoader(
        target.dataset,
        setting.batch_size,
        sampler=order,
        num_workers=setting.workers,
        collate_fn=target.collate,
        pin_memory=setting.pin_memory,
        **options,
    )
    try:
        return _timed(loader, skipped, timed)
    except Exception as error:
        raise UserCodeError(loader_failure(error, setting.workers)) from None


def loader_failure(error: Exception, workers: int) -> str:
    """One sentence. A worker that dies while it sends shows in the parent as a broken connection, or as torch's own error."""
    how = f"the DataLoader with {workers or 'no'} worker{'' if workers == 1 else 's'}"
    reason = next(
        (line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "no message"
    )
    if (
        workers
        and isinstance(error, EOFError | ConnectionError)
        and not str(error).startswith("Caught ")
    ):
        return f"a worker of {how} exited unexpectedly ({type(error).__name__}: {reason[:300]})"
    return f"{how} raised {type(error).__name__}: {reason[:300]}"


def loader_cost(
    target: LoaderTarget,
    wall_ms: float,
    cpu_ms: float,
    indices: Sequence[int],
    batch_size: int,
    workers: bool = True,
) -> LoaderCost:
    """What a batch costs beyond its samples: collated in this process, then sent by one worker that has its samples ready.
    `workers` False: nothing is sent."""
    samples = [target.sample(indices[i % len(indices)]) for i in range(batch_size)]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.collated(samples)
        times.append(1e3 * (time.perf_counter() - start))
    cost = LoaderCost(
        sample_wall_ms=wall_ms,
        sample_cpu_ms=cpu_ms,
        collate_ms=median(times),
        batch_size=batch_size,
    )
    if not workers:
        return cost
    sent = [_sent(target, samples) for _ in range(3)]
    send_ms = max(0.0, median(run.batch_ms for run in sent) - cost.collate_ms)
    return replace(cost, send_ms=send_ms, handover_ms=median(run.cpu_ms for run in sent))


def _sent(target: LoaderTarget, samples: Any) -> Run:
    """A run with one worker and a list of samples, which cost nothing."""
    skipped, batches = TORCH_PREFETCH + 1, 24
    order = list(range(len(samples))) * (batches + 2 * skipped)
    loader: DataLoader[Any] = DataLoader(
        samples,
        len(samples),
        sampler=order,
        num_workers=1,
        collate_fn=target.collate,
        multiprocessing_context=target.options.get("multiprocessing_context"),
    )
    try:
        return _timed(loader, skipped, batches)
    except Exception as error:
        raise UserCodeError(
            f"a worker cannot send a batch: {explain(error, 'the DataLoader')}"
        ) from None


def _endless(indices: Sequence[int], count: int) -> list[int]:
    """`count` indices: all of them in random order, then again in another."""
    generator = random.Random(0)
    order: list[int] = []
    while len(order) < count:
        order += generator.sample(indices, len(indices))
    return order[:count]


REST = "the rest of __getitem__"
TRIALS = 6
WATCHED = 6
LEAST_SHARE = 0.01
MOST = 12
OTHER = "everything else"

Function = tuple[str, int, str]


def transform_stages(
    target: LoaderTarget, indices: Sequence[int], passes: int = 3
) -> tuple[Stage, ...]:
    """The transforms in the order in which they run, after the rest of ``__getitem__``; ms a sample. Empty where the dataset
    holds no transforms that can be seen from outside."""
    places = user_dataset.find_places(target.dataset)
    if not places:
        return ()
    clock = _Clock()
    with one_thread(), user_dataset.replaced(places, partial(_Timed, clock)):
        watched = [_watch(target, clock, index) for index in indices[:WATCHED]]
        clock.watching = False
        for timed in clock.ran:
            timed.wall_s = timed.cpu_s = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(passes):
            for index in indices:
                target.sample(index)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    per_sample = 1e3 / (passes * len(indices))
    rest = Stage(
        name=REST,
        kind="",
        wall_ms=max(0.0, wall - sum(t.wall_s for t in clock.ran)) * per_sample,
        cpu_ms=max(0.0, cpu - sum(t.cpu_s for t in clock.ran)) * per_sample,
        random=any(watched)
        or (not any(t.random for t in clock.ran) and is_random(target, indices[0])),
    )
    random: list[tuple[str, str]] = []
    stages: dict[tuple[Any, ...], Stage] = {(): replace(rest, offline=not rest.random)}
    order: Counter[str] = Counter()
    for t in clock.ran:
        random += [(t.kind, t.branch)] if t.random else []
        # image and target go through chains of their own, and so do the samples of two datasets side by side
        before = any(kind == t.kind and branch.startswith(t.branch) for kind, branch in random)
        stage = Stage(
            name=t.name,
            kind=t.kind,
            wall_ms=t.wall_s * per_sample,
            cpu_ms=t.cpu_s * per_sample,
            random=t.random,
            offline=not (rest.random or before),
        )
        order[t.branch] += 1
        side_by_side = re.sub(r"\[[0-9]+\]", "[]", t.branch)
        key = (side_by_side, order[t.branch], stage.name, stage.kind)
        stages[key] = _added(stages[key], stage) if key in stages else stage
    return tuple(stages.values())


def _added(one: Stage, other: Stage) -> Stage:
    """One transform in two datasets side by side. What is random in one of them was only not seen to be so in the other."""
    return replace(
        one,
        wall_ms=one.wall_ms + other.wall_ms,
        cpu_ms=(one.cpu_ms or 0.0) + (other.cpu_ms or 0.0),
        random=one.random or other.random,
        offline=one.offline and other.offline,
    )


def dataset_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float
) -> tuple[Stage, ...]:
    """Of a random sample of `wall_ms` the part that comes out of deterministic datasets behind wrappers, and the rest. Empty
    where there is no such part."""
    with (
        one_thread(),
        contextlib.suppress(Exception),
    ):  # a wrapper may ask what kind of dataset it holds
        if not is_random(target, indices[0]):
            return ()
        found = list(
            _deterministic(
                target, list(user_dataset.held_datasets(target.dataset)), indices[:WATCHED]
            )
        )
        calls: list[_Held] = []

        def timed(place: user_dataset.Place) -> _Held:
            calls.append(_Held(place.transform))
            return calls[-1]

        with user_dataset.replaced(found, timed):
            start = time.perf_counter()
            for index in indices:
                target.sample(index)
            total = time.perf_counter() - start
        outer, seconds = type(target.dataset).__name__, defaultdict[str, float](float)
        for one in calls:
            seconds[f"{type(one.held).__name__} inside {outer}"] += min(one.wall_s, total)
        inner = [
            Stage(
                name=name, kind="dataset", wall_ms=wall_ms * s / total, random=False, offline=True
            )
            for name, s in seconds.items()
        ]
        rest = Stage(
            name=REST,
            kind="",
            wall_ms=max(0.0, wall_ms - sum(s.wall_ms for s in inner)),
            random=True,
        )
        return (*inner, rest) if inner else ()
    return ()


def _deterministic(
    target: LoaderTarget, places: list[user_dataset.Place], indices: Sequence[int]
) -> Iterator[user_dataset.Place]:
    """The outermost datasets among `places`, and in those that they hold, whose samples are the same every time."""
    held: dict[int, _Held] = {}
    with user_dataset.replaced(
        places, lambda place: held.setdefault(id(place.transform), _Held(place.transform))
    ):
        for index in indices:
            target.sample(index)
    for place in places:
        asked = held[id(place.transform)].asked
        if asked and not any(_gives_two(place.transform, key) for key in asked):
            yield place
        else:
            yield from _deterministic(
                target, list(user_dataset.held_datasets(place.transform)), indices
            )


def _gives_two(dataset: Any, key: Any) -> bool:
    first, drew = user_dataset.under_seed(0, lambda: dataset[key])
    again, _ = user_dataset.under_seed(1, lambda: dataset[key])
    return bool(drew) or not user_dataset.same(first, again)


class _Held:
    """A stand-in for a dataset inside another: what it was asked for, and how long its samples took."""

    def __init__(self, held: Any) -> None:
        self.held, self.asked, self.wall_s = held, list[Any](), 0.0

    def __getitem__(self, key: Any) -> Any:
        self.asked.append(key)
        start = time.perf_counter()
        try:
            return self.held[key]
        finally:
            self.wall_s += time.perf_counter() - start

    def __len__(self) -> int:
        return len(self.held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


class _Clock:
    """The state that all timed transforms share. While `watching`, they are tried for randomness in place of being timed."""

    def __init__(self) -> None:
        self.ran: list[_Timed] = []  # in the order of their first calls
        self.watching = True
        self.last_state: Any = None
        self.drew_outside = False


class _Timed:
    """A stand-in for a transform that adds up its time."""

    def __init__(self, clock: _Clock, place: user_dataset.Place) -> None:
        self._transform, self._clock = place.transform, clock
        self.name, self.kind, self.branch = place.name, place.kind, place.branch
        self.wall_s = self.cpu_s = 0.0
        self.random = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self not in self._clock.ran:
            self._clock.ran.append(self)
        if self._clock.watching:
            return self._watched(args, kwargs)
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)

    def __repr__(self) -> str:
        return repr(self._transform)

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the transform also under other seeds, on copies of the input, since transforms may write into it."""
        clock = self._clock
        before = user_dataset.states()
        clock.drew_outside |= clock.last_state is not None and before != clock.last_state
        if not self.random:
            self.random = user_dataset.gives_two_results(self._transform, args, kwargs, TRIALS)
        out = self._transform(*args, **kwargs)
        clock.last_state = user_dataset.states()
        self.random |= before != clock.last_state
        return out


def _watch(target: LoaderTarget, clock: _Clock, index: int) -> bool:
    """True where ``__getitem__`` draws a random number outside all transforms."""
    clock.last_state, clock.drew_outside = user_dataset.states(), False
    target.sample(index)
    return bool(clock.drew_outside or user_dataset.states() != clock.last_state)


def is_random(target: LoaderTarget, index: int) -> bool:
    return _gives_two(target.dataset, index)


def function_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float, random: bool = True
) -> tuple[Stage, ...]:
    """The heaviest functions of a sample of `wall_ms`, heaviest first, then all others together.

    The user's own functions count without what they call, and each library function that they call with all that it calls (user
    code that a library calls back counts twice). The profiler's shares are applied to the time that a sample takes without it.
    `random`: the sample as a whole depends on random numbers; single functions are not tried.
    """
    profiler = cProfile.Profile()
    with one_thread():
        profiler.enable()
        try:
            for index in indices:
                target.sample(index)
        finally:
            profiler.disable()
    stats: dict[Function, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    seconds: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in stats.items():
        if is_users(function[0]):
            seconds[f"{function[2]} ({Path(function[0]).name} line {function[1]})"] += own_s
            continue
        for caller, (_, _, _, with_callees_s) in callers.items():
            if is_users(caller[0]):
                seconds[f"{_library_name(function)} in {caller[2]}"] += with_callees_s
    total = sum(seconds.values())
    if not total:
        return ()
    shown = [(name, s) for name, s in seconds.most_common(MOST) if s >= LEAST_SHARE * total]
    rest = total - sum(s for _, s in shown)
    named = [*shown, (OTHER, rest)] if rest > LEAST_SHARE * total else shown
    return tuple(
        Stage(name=n, kind="function", wall_ms=wall_ms * s / total, offline=not random)
        for n, s in named
    )


def _library_name(function: Function) -> str:
    file, _, name = function
    if file == "~":
        return name.strip("<>").removeprefix("built-in method ")
    place = Path(file)
    module = place.parent.name if place.name == "__init__.py" else place.stem
    return f"{module}.{name}"


if __name__ == "__main__":
    # torch warns of more workers than cores, which is what is tried here
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # a worker that dies is told once; torch's DataLoader, taken apart after it, raises the same again where nobody can catch it
    sys.unraisablehook = lambda _: None
    serve(_work)
