"""Process that measures a data loader, or the cost of its samples.

It is started as ``python -m trainpace.measure.loader_worker`` and is the parent of the loader's
worker processes. First, it times samples one by one: wall time against CPU time, and cold files
against warm files (DS-Analyzer, VLDB 2021, section 4). Then it times whole DataLoaders in steady
state.

It also times the parts of ``__getitem__`` to find those that could be computed once for all epochs.
Every transform is timed inside real samples. The rest of the time is loading and decoding. A
transform is random if it draws from a global random state, or gives two outputs for one input. A
transform with its own generator is deterministic if only its input determines the seed. If a
dataset has no transforms that can be timed, Python's profiler times its functions.
"""

from __future__ import annotations

import contextlib
import cProfile
import math
import os
import pstats
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, default_collate

from trainpace.core.errors import TrainpaceError, UserCodeError, message_of
from trainpace.core.host import random_states, thread_times
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
"""Time limit of one pass over single samples, in seconds. There are about ten passes.

The second value is for measuring several batch sizes.
"""
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
GAIN = 0.05
SHARD_PASSES = 5
DEFAULT_BATCH = 32
MOST_SAMPLES = 512
FEWEST_SAMPLES = 8
FIRST = 4
"""Number of samples at the start that are always measured, because people try these first."""
PASSES = 3
MOST_BATCHES = 2000
FEWEST_BATCHES = 4
TORCH_PREFETCH = 2
SENT_S = 0.1
"""Duration of a run that sends finished batches, in seconds."""
REST = "the rest of __getitem__"
TRIALS = 6
WATCHED = 6
CHECKS_S = 1.0
"""Time limit in seconds for comparing random states within one sample."""
LEAST_SHARE = 0.01
MOST = 12
OTHER = "everything else"

Function = tuple[str, int, str]


def measure_loader(c: LoaderConditions) -> LoaderMeasurement:
    """Time samples one by one, then the whole loader at each number of workers."""
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


def costs(
    task: str, shards: str | None, batch_sizes: Sequence[int], workers: bool, seed: int
) -> list[LoaderCost]:
    """Return the loading cost for each batch size.

    If `workers` is True, the cost includes sending a batch from a worker.
    """
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
    """Return the cost of reading shards in batches, including the dataset's online transform."""
    data = ShardDataset(folder, transform=getattr(target.dataset, "online", None))
    target = target._replace(dataset=data, length=len(data))
    measured = []
    for size in batch_sizes:
        positions = [(17 * i) % len(data) for i in range(size)]
        data[positions]
        with one_thread():
            spent = [_clocked(lambda: data[positions]) for _ in range(SHARD_PASSES)]  # noqa: B023
        wall_ms, cpu_ms = (median(column) / size for column in zip(*spent, strict=True))
        cost = loader_cost(target, wall_ms, cpu_ms, positions, size, workers)
        measured.append(replace(cost, collate_ms=0.0))
    return measured


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and CPU time of `work` in ms.

    The CPU time includes all threads, because libraries such as OpenCV have their own threads.
    """
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within this context, torch uses one thread, as in a DataLoader worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class LoaderTarget(NamedTuple):
    """Map-style dataset with the settings of its loader. `options` are DataLoader arguments."""

    name: str
    dataset: Any
    length: int
    collate: Callable[[list[Any]], Any]
    batch_size: int
    drop_last: bool
    given_workers: int | None = None
    given_persistent: bool = False
    prefetch_factor: int = TORCH_PREFETCH
    is_task: bool = False
    options: Mapping[str, Any] = {}

    def sample(self, index: int) -> Any:
        """Return one sample. Raise `UserCodeError` if the dataset's code fails."""
        try:
            return self.dataset[index]
        except Exception as error:
            reason = explain(error, "the dataset")
            raise UserCodeError(f"sample {index} cannot be loaded: {reason}") from error

    def read(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.sample(index)

    def collated(self, samples: Sequence[Any]) -> Any:
        """Return a batch. Raise `UserCodeError` if the samples cannot be collated."""
        try:
            return self.collate(list(samples))
        except Exception as error:
            raise UserCodeError(
                f"{len(samples)} samples do not make a batch: {explain(error, 'collate_fn')}",
                "Give the dataset a collate_fn, or return a DataLoader that has one.",
            ) from error


def load_target(spec: str, batch_size: int | None = None) -> LoaderTarget:
    """Load the dataset or loader that FILE.py:NAME is, or that it returns.

    Raises:
        TrainpaceError: If it has no samples.
    """
    named = ModelSpec.of(spec)
    name = f"{Path(named.path).name}:{named.name}"
    try:
        made = made_by(spec)
    except TrainpaceError:
        raise
    except Exception as error:
        raise UserCodeError(explain(error, name)) from error
    if isinstance(made, DataLoader):
        return _of_loader(made, name, batch_size)
    dataset = made[3] if is_task(made) else made
    return LoaderTarget(
        name,
        dataset,
        length_of(dataset, name),
        getattr(dataset, "collate_fn", None) or default_collate,
        batch_size or DEFAULT_BATCH,
        drop_last=False,
        is_task=is_task(made),
    )


def _of_loader(loader: DataLoader[Any], name: str, batch_size: int | None) -> LoaderTarget:
    length = length_of(loader.dataset, f"the dataset of {name}")
    size: int | None = batch_size or loader.batch_size
    size = size or getattr(loader.batch_sampler, "batch_size", None)
    if not size:
        raise TrainpaceError(
            f"the DataLoader of {name} has no batch size.", "Give one with --batch."
        )
    options = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    return LoaderTarget(
        name,
        loader.dataset,
        length,
        loader.collate_fn if loader.batch_sampler is not None else default_collate,
        size,
        drop_last=bool(loader.drop_last),
        given_workers=loader.num_workers,
        given_persistent=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor or TORCH_PREFETCH,
        options={key: value for key, value in options.items() if value is not None},
    )


# ---- the cost of a sample


def choose(length: int, seed: int) -> list[int]:
    """Choose the indices of samples to measure: the first few, then others in random order."""
    first = min(FIRST, length)
    rest = random.Random(seed).sample(range(first, length), min(MOST_SAMPLES, length) - first)
    return [*range(first), *rest]


def first_pass(
    target: LoaderTarget, indices: Sequence[int], seconds: float
) -> tuple[list[int], float]:
    """Read samples once for about `seconds`.

    Returns:
        The indices of these samples, and the mean time of this first access in ms.
    """
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
    """Time the samples with warm files, `passes` times, then alternately with cold and warm files.

    The result has the median over passes of the mean over samples.

    Args:
        target: Dataset.
        indices: Indices of the samples.
        first_ms: Mean time of the first access.
        held: Files that stay open from sample to sample.
        passes: Number of passes.
    """
    with one_thread():
        before = opened_files.bytes_read() or 0
        with opened_files.recorded() as opened:
            target.read(indices)
        read = (opened_files.bytes_read() or 0) - before
        warm = [_pass(target, indices) for _ in range(passes)]
        cold: list[_Pass] = []
        note = "" if opened else _note(held, read, len(indices))
        while not note and len(cold) < passes:
            note = opened_files.drop(opened or held)
            if not note:
                cold.append(_pass(target, indices))
                warm.append(_pass(target, indices))
    file_bytes = sum(os.path.getsize(path) for path in opened if os.path.exists(path))
    return SampleCost(
        samples=len(indices),
        wall_ms=median(p.wall_ms for p in warm),
        cpu_ms=median(p.cpu_ms for p in warm),
        first_ms=first_ms,
        delayed_ms=median(p.delayed_ms for p in warm),
        cold_wall_ms=median(p.wall_ms for p in cold) if cold else None,
        files=len(opened) / len(indices),
        file_bytes=file_bytes / len(indices),
        note=note,
    )


class _Pass(NamedTuple):
    """Mean times per sample of one pass. `wall_ms` does not include `delayed_ms`."""

    wall_ms: float
    cpu_ms: float
    delayed_ms: float


def _pass(target: LoaderTarget, indices: Sequence[int]) -> _Pass:
    before, count = _delayed_ms(), len(indices)
    wall_ms, cpu_ms = _clocked(lambda: target.read(indices))
    delayed_ms = min(_delayed_ms() - before, wall_ms)
    return _Pass((wall_ms - delayed_ms) / count, cpu_ms / count, delayed_ms / count)


def _delayed_ms() -> float:
    """Return the total time that the main thread has waited for a core in ms, or 0 if unknown."""
    times = thread_times(os.getpid())  # the id of the main thread is that of the process
    return 0.0 if times is None else times[1] / 1e6


def _note(files: Sequence[str], read: int, samples: int) -> str:
    """Explain why reading cold files cannot be timed. Return "" if it can."""
    if files and read > 0:
        return ""
    if files:
        return "files are mapped into memory, so reading cannot be separated from preprocessing."
    if read > 1024 * samples:
        kib = read / samples / 1024
        return (
            f"{kib:.0f} KiB per sample come from files that Python did not open, so they stay warm."
        )
    return "nothing is read from files: the data is in memory."


# ---- whole loaders


class Setting(NamedTuple):
    """Settings of a loader. `prefetch_factor` is not used without workers."""

    workers: int
    batch_size: int
    prefetch_factor: int = TORCH_PREFETCH
    pin_memory: bool = False


class Run(NamedTuple):
    """Result of one run of a loader in steady state.

    Attributes:
        batch_ms: Time from batch to batch.
        cpu_ms: CPU time of the main process per batch.
        first_s: Time from ``iter()`` to the first batch.
    """

    batch_ms: float
    cpu_ms: float
    first_s: float


def _skip(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def run_loader(
    target: LoaderTarget,
    setting: Setting,
    indices: Sequence[int],
    seconds: float,
    expected_ms: float,
) -> Run:
    """Run a loader for about `seconds`. The first batches, which workers prefetch, do not count.

    The indices are loaded repeatedly in shuffled order. The number of timed batches is a multiple
    of the number of workers.

    Raises:
        UserCodeError: If a worker fails.
    """
    ahead, turns = setting.workers * setting.prefetch_factor, max(setting.workers, 1)
    wanted = max(1e3 * seconds / max(expected_ms, 1e-3), FEWEST_BATCHES, 2 * turns)
    timed = math.ceil(min(wanted, MOST_BATCHES) / turns) * turns
    skipped = ahead + turns if setting.workers else 1
    options = {**target.options, "prefetch_factor": setting.prefetch_factor}
    loader: DataLoader[Any] = DataLoader(
        target.dataset,
        setting.batch_size,
        # If a worker ran out of samples early, the others would have more cores.
        sampler=_endless(indices, (skipped + timed + ahead) * setting.batch_size),
        num_workers=setting.workers,
        collate_fn=target.collate,
        pin_memory=setting.pin_memory,
        **(options if setting.workers else {}),
    )
    try:
        start = time.perf_counter()
        batches = iter(loader)
        next(batches)
        first_s = time.perf_counter() - start
        _skip(batches, skipped - 1)
        wall_ms, cpu_ms = _clocked(lambda: _skip(batches, timed))
    except Exception as error:
        raise UserCodeError(loader_failure(error, setting.workers)) from None
    return Run(wall_ms / timed, cpu_ms / timed, first_s)


def loader_failure(error: Exception, workers: int) -> str:
    """Describe a failure of a loader.

    A killed worker causes a broken connection in this process, or an error of torch.
    """
    how = f"the DataLoader with {workers or 'no'} worker{'' if workers == 1 else 's'}"
    reason = f"{type(error).__name__}: {message_of(error)}"
    died = isinstance(error, EOFError | ConnectionError) and not str(error).startswith("Caught ")
    if workers and died:
        return f"a worker of {how} exited unexpectedly ({reason})"
    return f"{how} raised {reason}"


def loader_cost(
    target: LoaderTarget,
    wall_ms: float,
    cpu_ms: float,
    indices: Sequence[int],
    batch_size: int,
    workers: bool = True,
) -> LoaderCost:
    """Measure collating in this process, and sending batches from one worker.

    The worker has its samples ready, so only the transfer is timed. If `workers` is False, sending
    is not measured.
    """
    samples = [target.sample(indices[i % len(indices)]) for i in range(batch_size)]
    collate_ms = median(_clocked(lambda: target.collated(samples))[0] for _ in range(7))
    cost = LoaderCost(
        sample_wall_ms=wall_ms, sample_cpu_ms=cpu_ms, collate_ms=collate_ms, batch_size=batch_size
    )
    if not workers:
        return cost
    ready = target._replace(dataset=samples)
    sent = [
        run_loader(ready, Setting(1, batch_size), range(batch_size), SENT_S, collate_ms)
        for _ in range(3)
    ]
    send_ms = max(0.0, median(run.batch_ms for run in sent) - collate_ms)
    return replace(cost, send_ms=send_ms, handover_ms=median(run.cpu_ms for run in sent))


def _endless(indices: Sequence[int], count: int) -> list[int]:
    """Return `count` indices: all indices in random order, then again in another order."""
    generator = random.Random(0)
    order: list[int] = []
    while len(order) < count:
        order += generator.sample(indices, len(indices))
    return order[:count]


class _Bench(NamedTuple):
    """Benchmark of a loader over its settings."""

    target: LoaderTarget
    c: LoaderConditions
    indices: Sequence[int]
    cost: LoaderCost
    cores: float

    def over_workers(self) -> tuple[LoaderPoint, ...]:
        """Measure the requested numbers of workers, or from 0 until more workers do not help."""
        runs: dict[Setting, list[Run]] = {}
        best, misses = math.inf, 0
        for workers in self.c.workers or LADDER:
            if self.c.workers is None and self._suffice(workers, best, misses):
                break
            setting = self._setting(workers)
            run = self._run(setting)
            runs[setting] = [run]
            misses = 0 if run.batch_ms < best * (1 - GAIN) else misses + 1
            best = min(best, run.batch_ms)
        if self.target.given_workers is not None:
            now = self._setting(self.target.given_workers)
            if now not in runs:
                runs[now] = [self._run(now)]
        self._repeat(runs, self.c.repeats - 1)
        return self._points(runs)

    def _suffice(self, workers: int, best_ms: float, misses: int) -> bool:
        """Return True if this many workers need not be tried, after `misses` without a gain."""
        enough = workers > 1 and best_ms < (self.c.compute_ms or 0.0) / 2
        return enough or misses >= 2 or (misses > 0 and workers > self.cores + 1)

    def variants(self, workers: int) -> tuple[LoaderPoint, ...]:
        """Measure variants of one setting at a time with the same number of workers.

        The unchanged setting comes first.
        """
        batch, base = self.target.batch_size, self._setting(workers)
        settings = [base, base._replace(batch_size=2 * batch)]
        if batch > 1:
            settings.append(base._replace(batch_size=batch // 2))
        if workers:
            settings.append(base._replace(prefetch_factor=2 * base.prefetch_factor))
        if count_devices("cuda"):  # pinned memory costs time without a CUDA device
            settings.append(base._replace(pin_memory=True))
        runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
        self._repeat(runs, self.c.repeats)
        return self._points(runs)

    def _setting(self, workers: int) -> Setting:
        return Setting(workers, self.target.batch_size, self.target.prefetch_factor)

    def _repeat(self, runs: dict[Setting, list[Run]], times: int) -> None:
        # Alternate the order, so that drift of the machine's speed does not favor a setting.
        for turn in range(times):
            for setting in list(runs)[:: 1 if turn % 2 else -1]:
                runs[setting].append(self._run(setting))

    def _run(self, setting: Setting) -> Run:
        predicted = self._predicted_ms(setting)
        return run_loader(self.target, setting, self.indices, self.c.seconds, predicted)

    def _predicted_ms(self, setting: Setting) -> float:
        return batch_ms(self.cost.of_batch(setting.batch_size), setting.workers, self.cores)

    def _points(self, runs: dict[Setting, list[Run]]) -> tuple[LoaderPoint, ...]:
        times = {setting: [run.batch_ms for run in done] for setting, done in runs.items()}
        noise = noise_of(dict(enumerate(times.values())))
        points = []
        for setting, done in runs.items():
            interval = None if noise is None else repeat_interval(times[setting], noise)
            if interval is not None:
                basis = "the spread of repeats, each with workers of its own"
                interval = replace(interval, basis=basis)
            first_s, prefetch = 0.0, None
            if setting.workers:
                worker_ms = self.cost.sample_wall_ms * setting.batch_size + self.cost.collate_ms
                first_s = max(0.0, median(run.first_s for run in done) - worker_ms / 1e3)
                prefetch = setting.prefetch_factor
            points.append(
                LoaderPoint(
                    workers=setting.workers,
                    batch_size=setting.batch_size,
                    pin_memory=setting.pin_memory,
                    prefetch_factor=prefetch,
                    batch_ms=median(times[setting]),
                    interval_ms=interval,
                    predicted_ms=self._predicted_ms(setting),
                    startup_s=first_s,
                    runs=len(done),
                )
            )
        return tuple(sorted(points, key=lambda p: p.workers))


# ---- the parts of a sample


def _stages(target: LoaderTarget, indices: Sequence[int], wall_ms: float) -> tuple[Stage, ...]:
    few = indices[: max(8, len(indices) // 2)]
    stages = transform_stages(target, few)
    if not stages:
        return function_stages(target, few, wall_ms, is_random(target, indices[0]))
    # The timers and other processes take time as well. Shares are right, but sums are not, so scale
    # the stages to the time of a sample.
    factor = wall_ms / sum(s.wall_ms for s in stages)
    return tuple(replace(s, wall_ms=s.wall_ms * factor) for s in stages)


def transform_stages(
    target: LoaderTarget, indices: Sequence[int], passes: int = 3
) -> tuple[Stage, ...]:
    """Time the transforms of a dataset in ms per sample.

    The first stage is the rest of ``__getitem__``, the others are the transforms in their order.
    Returns an empty tuple if no transform can be found in the dataset's attributes.
    """
    places = user_dataset.find_places(target.dataset)
    if not places:
        return ()
    clock = _Clock()
    with one_thread(), user_dataset.replaced(places, partial(_Timed, clock)):
        watched = [_watch(target, clock, index) for index in indices[:WATCHED]]
        clock.watching = False
        for timed in clock.ran:
            timed.wall_ms = timed.cpu_ms = 0.0
        if not clock.ran:
            return ()
        wall_ms, cpu_ms = _clocked(lambda: target.read([*indices] * passes))
    samples, any_random = passes * len(indices), any(t.random for t in clock.ran)
    rest_random = any(watched) or (not any_random and is_random(target, indices[0]))
    rest = Stage(
        name=REST,
        kind="",
        wall_ms=max(0.0, wall_ms - sum(t.wall_ms for t in clock.ran)) / samples,
        cpu_ms=max(0.0, cpu_ms - sum(t.cpu_ms for t in clock.ran)) / samples,
        random=rest_random,
        offline=not rest_random,
    )
    return rest, *_in_order(clock.ran, samples, rest_random)


def _in_order(ran: Sequence[_Timed], samples: int, rest_random: bool) -> Iterator[Stage]:
    """Yield one stage per transform."""
    random: list[_Timed] = []
    for t in ran:
        random += [t] if t.random else []
        # Image and target have separate chains of transforms, and so have datasets side by side.
        after_random = any(r.kind == t.kind and r.branch.startswith(t.branch) for r in random)
        yield Stage(
            name=t.name,
            kind=t.kind,
            wall_ms=t.wall_ms / samples,
            cpu_ms=t.cpu_ms / samples,
            random=t.random,
            offline=not (rest_random or after_random),
        )


def is_random(target: LoaderTarget, index: int) -> bool:
    """Return True if a sample draws random numbers, or differs when it is computed again."""
    first, drew = user_dataset.under_seed(0, lambda: target.dataset[index])
    again, _ = user_dataset.under_seed(1, lambda: target.dataset[index])
    return bool(drew) or not user_dataset.same(first, again)


class _Clock:
    """Shared state of timed transforms. While `watching` is True, randomness is tested."""

    def __init__(self) -> None:
        self.ran: list[_Timed] = []  # in the order of their first calls
        self.watching = True
        self.last_state: Any = None
        self.drew_outside = False


class _Timed:
    """Stand-in for a transform that sums up its time."""

    def __init__(self, clock: _Clock, place: user_dataset.Place) -> None:
        self._transform, self._clock = place.transform, clock
        self.name, self.kind, self.branch = place.name, place.kind, place.branch
        self.wall_ms = self.cpu_ms = 0.0
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
            self.wall_ms += 1e3 * (time.perf_counter() - wall)
            self.cpu_ms += 1e3 * (time.process_time() - cpu)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)

    def __repr__(self) -> str:
        return repr(self._transform)

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the transform, and test it for randomness: other seeds, copies of the input."""
        clock = self._clock
        before = random_states()
        clock.drew_outside |= clock.last_state is not None and before != clock.last_state
        if not self.random:
            self.random = user_dataset.gives_two_results(self._transform, args, kwargs, TRIALS)
        out = self._transform(*args, **kwargs)
        clock.last_state = random_states()
        self.random |= before != clock.last_state
        return out


def _watch(target: LoaderTarget, clock: _Clock, index: int) -> bool:
    """Return True if ``__getitem__`` draws a random number outside all transforms."""
    clock.last_state, clock.drew_outside = random_states(), False
    target.sample(index)
    return bool(clock.drew_outside or random_states() != clock.last_state)


def function_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float, random: bool = True
) -> tuple[Stage, ...]:
    """Split the time of a sample among its slowest functions, and the rest.

    The user's own functions count without the functions that they call. A library function that
    they call counts with everything that it calls. User code that a library calls back therefore
    counts twice. The profiler's shares are applied to `wall_ms`, the time of a sample without the
    profiler.

    If `random` is True, the sample depends on random numbers. Then a function can run offline if it
    ends before the first random number, such as decoding before an augmentation.
    """
    profiler = cProfile.Profile()
    with one_thread(), profiler:
        target.read(indices)
    seconds = _seconds_by_function(profiler)
    total = sum(seconds.values())
    shown = [(name, s) for name, s in seconds.most_common(MOST) if s >= LEAST_SHARE * total]
    rest = total - sum(s for _, s in shown)
    if rest > LEAST_SHARE * total:
        shown.append((OTHER, rest))
    fixed = _before_random(target, indices[:WATCHED]) if random else {name for name, _ in shown}
    return tuple(
        Stage(name=name, kind="function", wall_ms=wall_ms * s / total, offline=name in fixed)
        for name, s in shown
        if total
    )


def _before_random(target: LoaderTarget, indices: Sequence[int]) -> set[str]:
    """Return the functions that spend most of their time before a sample's first random number.

    The set is empty if a sample draws nothing from the global generators. It may then use a
    generator of its own, which is not observed.
    """
    whole, before = Counter[str](), Counter[str]()
    for index in indices:
        clock = _UntilRandom()
        profilers = cProfile.Profile(), cProfile.Profile(clock)
        for seconds, profiler in zip((whole, before), profilers, strict=True):
            clock.states = random_states()
            with one_thread(), profiler:
                target.sample(index)
            seconds.update(_seconds_by_function(profiler))
        if clock.stopped is None:
            return set()
    return {name for name, s in whole.items() if before[name] > s / 2}


class _UntilRandom:
    """Clock in seconds that stops when a global random generator is used.

    It does not count the time of its own checks, and stops when they take long.
    """

    def __init__(self) -> None:
        self.states: Any = None
        self.stopped: float | None = None
        self._checking_s = 0.0

    def __call__(self) -> float:
        if self.stopped is not None:
            return self.stopped
        now = time.perf_counter() - self._checking_s
        if random_states() != self.states or self._checking_s > CHECKS_S:
            self.stopped = now
        self._checking_s = time.perf_counter() - now
        return now


def _seconds_by_function(profiler: cProfile.Profile) -> Counter[str]:
    stats: dict[Function, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    seconds: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in stats.items():
        if is_users(function[0]):
            seconds[f"{function[2]} ({Path(function[0]).name} line {function[1]})"] += own_s
            continue
        for caller, (_, _, _, with_callees_s) in callers.items():
            if is_users(caller[0]):
                seconds[f"{_library_name(function)} in {caller[2]}"] += with_callees_s
    return seconds


def _library_name(function: Function) -> str:
    file, _, name = function
    if file == "~":
        return name.strip("<>").removeprefix("built-in method ")
    place = Path(file)
    module = place.parent.name if place.name == "__init__.py" else place.stem
    return f"{module}.{name}"


def _work(request: dict[str, Any]) -> str:
    if "costs" in request:
        return msgspec.json.encode(costs(**request["costs"])).decode()
    return to_json(measure_loader(msgspec.convert(request, LoaderConditions)))


if __name__ == "__main__":
    # torch warns about more workers than cores, but these are measured on purpose.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # A dead worker is already reported. torch's DataLoader raises again in its destructor.
    sys.unraisablehook = lambda _: None
    serve(_work)
