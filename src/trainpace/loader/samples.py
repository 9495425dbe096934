"""What one sample costs: wall against CPU time, and cold against warm files (DS-Analyzer's difference, VLDB 2021, section 4)."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from trainpace.loader.records import SampleCost
from trainpace.loader.target import LoaderTarget
from trainpace.shards import opened_files

MOST_SAMPLES = 512
FEWEST_SAMPLES = 8
FIRST = 4
"""Samples 0 to 3 are always measured: they are what a person tries first."""
PASSES = 3
_CACHED_RATIO = 5.0


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
    first = list(range(min(FIRST, length)))
    others = random.Random(seed).sample(range(len(first), length), min(MOST_SAMPLES, length) - len(first))
    return first + others


def first_pass(target: LoaderTarget, indices: Sequence[int], seconds: float) -> tuple[list[int], float]:
    """Read every sample once, for about `seconds`: (indices of those that were read, mean ms of this first access)."""
    end = time.perf_counter() + seconds
    read_indices: list[int] = []
    times: list[float] = []
    with one_thread():
        for index in indices:
            if len(read_indices) >= FEWEST_SAMPLES and time.perf_counter() > end:
                break
            start = time.perf_counter()
            target.sample(index)
            times.append(1e3 * (time.perf_counter() - start))
            read_indices.append(index)
    return read_indices, fmean(times)


def sample_cost(
    target: LoaderTarget, indices: Sequence[int], first_ms: float, held: Sequence[str] = (), passes: int = PASSES
) -> SampleCost:
    """Time the samples warm, `passes` times, then cold and warm again. Medians over passes of means over samples.

    `held`: files that stay open from sample to sample.
    """
    with one_thread():
        before = opened_files.bytes_read()
        with opened_files.recorded() as opened:
            for index in indices:
                target.sample(index)
        after = opened_files.bytes_read()
        warm = [_pass(target, indices) for _ in range(passes)]
        files = opened or list(held)
        note = _note(opened, files, (after or 0) - (before or 0), len(indices))
        cold: list[_Pass] = []
        for _ in range(passes if files and not note else 0):
            note = opened_files.drop(files)
            if note:
                break
            cold.append(_pass(target, indices))
            warm.append(_pass(target, indices))
    wall_ms = median(p.wall_ms for p in warm)
    if not note and first_ms > _CACHED_RATIO * wall_ms and not files:
        note = f"the first access of a sample took {first_ms:.3g} ms: the dataset caches its samples."
    return SampleCost(
        samples=len(indices), wall_ms=wall_ms, cpu_ms=median(p.cpu_ms for p in warm), first_ms=first_ms,
        delayed_ms=median(p.delayed_ms for p in warm), cold_wall_ms=median(p.wall_ms for p in cold) if cold else None,
        files=len(opened) / len(indices), file_bytes=sum(_size(path) for path in opened) / len(indices), note=note,
    )  # fmt: skip


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
    return _Pass((wall_ms - delayed_ms) / len(indices), cpu_ms / len(indices), delayed_ms / len(indices))


def _delayed_ms() -> float:
    """Time that this process' main thread has waited for a core so far; 0 where the system does not report it."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def _note(opened: Sequence[str], files: Sequence[str], read: int, samples: int) -> str:
    if opened:
        return ""
    if files:
        return "" if read > 0 else "files are mapped into memory, so their reads are not told from preprocessing."
    if read > 1024 * samples:
        return (
            f"{read / samples / 1024:.0f} KiB a sample are read from files that Python did not open, so they stay warm."
        )
    return "nothing is read from files: the data is in memory."


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
