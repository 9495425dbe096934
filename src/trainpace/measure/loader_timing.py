"""The Dataset, DataLoader or task from the user's own file whose loading is measured: what one of its samples costs (wall against
CPU time, and cold against warm files: DS-Analyzer's difference, VLDB 2021, section 4), and a DataLoader in steady state.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, default_collate

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.host import thread_times
from trainpace.core.worker import explain
from trainpace.measure.loader_measurement import LoaderCost, SampleCost
from trainpace.shards import is_task, length_of, made_by, opened_files
from trainpace.workload import ModelSpec

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
