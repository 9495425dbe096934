"""A DataLoader timed in steady state while nothing else runs."""

import math
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from trainpace.errors import UserCodeError
from trainpace.loader.model import LoaderCost
from trainpace.loader.samples import LoaderTarget
from trainpace.process import explain

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
    return Run(1e3 * (time.perf_counter() - wall) / timed, 1e3 * (time.process_time() - cpu) / timed, first_s)


def run_loader(
    target: LoaderTarget, setting: Setting, indices: Sequence[int], seconds: float, expected_ms: float
) -> Run:
    """Load for about `seconds`, after the batches that the workers prefetched. `indices` are loaded repeatedly, shuffled.

    The number of timed batches is a multiple of the number of workers. Raises `UserCodeError` where a worker fails.
    """
    ahead = setting.workers * (setting.prefetch_factor or TORCH_PREFETCH)
    turns = max(setting.workers, 1)
    wanted = min(max(1e3 * seconds / max(expected_ms, 1e-3), FEWEST_BATCHES, 2 * turns), MOST_BATCHES)
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
        target.dataset, setting.batch_size, sampler=order, num_workers=setting.workers, collate_fn=target.collate,
        pin_memory=setting.pin_memory, **options,
    )  # fmt: skip
    try:
        return _timed(loader, skipped, timed)
    except Exception as error:
        raise UserCodeError(loader_failure(error, setting.workers)) from None


def loader_failure(error: Exception, workers: int) -> str:
    """One sentence. A worker that dies while it sends shows in the parent as a broken connection, or as torch's own error."""
    how = f"the DataLoader with {workers or 'no'} worker{'' if workers == 1 else 's'}"
    reason = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "no message")
    if workers and isinstance(error, EOFError | ConnectionError) and not str(error).startswith("Caught "):
        return f"a worker of {how} exited unexpectedly ({type(error).__name__}: {reason[:300]})"
    return f"{how} raised {type(error).__name__}: {reason[:300]}"


def loader_cost(
    target: LoaderTarget, wall_ms: float, cpu_ms: float, indices: Sequence[int], batch_size: int, pin_memory: bool,
    workers: bool = True,
) -> LoaderCost:  # fmt: skip
    """What a batch costs beyond its samples: collated in this process, then sent by one worker that has its samples ready.
    `workers` False: nothing is sent."""
    samples = [target.sample(indices[i % len(indices)]) for i in range(batch_size)]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.collated(samples)
        times.append(1e3 * (time.perf_counter() - start))
    collate_ms = median(times)
    if not workers:
        return LoaderCost(sample_wall_ms=wall_ms, sample_cpu_ms=cpu_ms, collate_ms=collate_ms, batch_size=batch_size)
    sent = [_sent(target, samples, pin_memory) for _ in range(3)]
    return LoaderCost(
        sample_wall_ms=wall_ms, sample_cpu_ms=cpu_ms, collate_ms=collate_ms, batch_size=batch_size,
        send_ms=max(0.0, median(run.batch_ms for run in sent) - collate_ms),
        handover_ms=median(run.cpu_ms for run in sent),
    )  # fmt: skip


class _Ready(Dataset[Any]):
    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def __len__(self) -> int:
        return len(self._samples)


def _sent(target: LoaderTarget, samples: Sequence[Any], pin_memory: bool, batches: int = 24) -> Run:
    """A run with one worker and samples that cost nothing."""
    skipped = TORCH_PREFETCH + 1
    order = list(range(len(samples))) * (batches + 2 * skipped)
    loader: DataLoader[Any] = DataLoader(
        _Ready(samples), len(samples), sampler=order, num_workers=1, collate_fn=target.collate, pin_memory=pin_memory,
        multiprocessing_context=target.options.get("multiprocessing_context"),
    )  # fmt: skip
    try:
        return _timed(loader, skipped, batches)
    except Exception as error:
        raise UserCodeError(f"a worker cannot send a batch: {explain(error, 'the DataLoader')}") from None


def _endless(indices: Sequence[int], count: int) -> list[int]:
    """`count` indices: all of them in random order, then again in another."""
    generator = random.Random(0)
    order: list[int] = []
    while len(order) < count:
        order += generator.sample(indices, len(indices))
    return order[:count]
