"""What precomputing costs and saves, estimated from some samples that are computed, written and read back."""

import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from trainpace.errors import UnreadableInput, os_reason
from trainpace.records import Record, save
from trainpace.shards import opened_files
from trainpace.shards.determinism import computed_twice
from trainpace.shards.folder import write_shard
from trainpace.shards.plan import MANIFEST, Fingerprint, Manifest, ShardPlan, shard_sizes
from trainpace.shards.samples import Encoded, spread, timed_samples

_WARM_SHARE = 0.7
"""Share of the memory up to which shards are read from the page cache after the first epoch."""
_COMPUTED_TWICE = 2
"""Samples that are computed twice, since a random dataset would be refused afterwards."""
_LEAST_SHARE = 0.02
"""Share of an epoch; a smaller gain is not worth a copy of the data."""


class SampleCosts(Record):
    """Measured, for one process. `compute_s`: the dataset's own sample; `read_s` and `read_cold_s`: the same sample out of a
    shard in the page cache, and not in it."""

    samples: int
    measured: int
    compute_s: float
    sample_bytes: float
    read_s: float
    read_cold_s: float
    memory_bytes: int
    free_bytes: int


class Estimate(Record):
    """The decision. Times are those of the data path with `workers` processes, next to a step of `step_s` if that is given."""

    costs: SampleCosts
    workers: int
    compute_once_s: float
    total_bytes: float
    epoch_now_s: float
    epoch_after_s: float
    from_cache: bool
    epochs_to_pay: float | None
    pays: bool
    reason: str

    @property
    def saved_per_epoch_s(self) -> float:
        return self.epoch_now_s - self.epoch_after_s


def estimate_here(dataset: Any, target: str, folder: str, seconds: float, most: int) -> SampleCosts:
    """Compute up to `most` samples spread over the dataset for at most `seconds`, write them beside `folder`, read them back.

    Raises `NotDeterministic`, as the work itself would.
    """
    import torch

    from trainpace.shards.dataset import ShardDataset

    order = list(spread(most, len(dataset)))
    random.Random(0).shuffle(order)
    samples = list(timed_samples(dataset, order, seconds))
    for index, _, _ in samples[:_COMPUTED_TWICE]:
        computed_twice(dataset, index)
    n = len(samples)
    beside = next(p for p in Path(folder).resolve().parents if p.is_dir())
    try:
        aside = tempfile.TemporaryDirectory(dir=beside, prefix=".trainpace-estimate-")
    except OSError as error:
        raise UnreadableInput(f"cannot write into {beside}: {os_reason(error)}.") from None
    with aside as place:
        _write(Path(place), target, [sample for _, sample, _ in samples])
        data = ShardDataset(place)
        positions = list(range(n))
        random.Random(1).shuffle(positions)
        batches = [positions[i : i + 32] for i in range(0, n, 32)]
        file = next(Path(place).glob("*.parquet"))
        size = file.stat().st_size
        # opening and mapping happen once a shard, not once a sample
        data[0]
        opened_files.drop_file(str(file))
        cold = _timed(data, batches)
        warm = min(_timed(data, batches) for _ in range(3))
    free = os.statvfs(beside)
    torch.set_num_threads(1)
    return SampleCosts(
        samples=len(dataset), measured=n, compute_s=statistics.fmean(seconds for _, _, seconds in samples),
        sample_bytes=size / n, read_s=warm / n, read_cold_s=max(cold, warm) / n,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), free_bytes=free.f_bavail * free.f_frsize,
    )  # fmt: skip


def decide(
    costs: SampleCosts, workers: int, step_s: float | None = None, batch: int = 1, epochs: float | None = None
) -> Estimate:
    """What `workers` processes need for it, what an epoch saves, and after how many epochs it has paid. Pure.

    An epoch takes the later of its data and its steps (`step_s` for each `batch` samples; without it data alone, which is
    the most that can be saved). The first epoch's data would have been computed anyway: that is not counted in its favour.
    """
    n, total_bytes = costs.samples, costs.samples * costs.sample_bytes
    from_cache = total_bytes <= _WARM_SHARE * costs.memory_bytes
    read_s = costs.read_s if from_cache else costs.read_cold_s
    once = n * costs.compute_s / workers
    steps = 0.0 if step_s is None else math.ceil(n / batch) * step_s
    now, after = max(steps, n * costs.compute_s / workers), max(steps, n * read_s / workers)
    saved = now - after
    pays_after = once / saved if saved > _LEAST_SHARE * now else None
    reason = ""
    if pays_after is None:
        reason = (
            "the steps take longer than the data as it is" if now == steps and steps
            else f"reading back takes {read_s / costs.compute_s:.0%} of computing"
        )  # fmt: skip
    elif total_bytes > costs.free_bytes:
        reason = "the disk has not the room"
    elif epochs is not None and epochs < pays_after:
        reason = f"it would pay after {pays_after:.1f} epochs"
    return Estimate(
        costs=costs, workers=workers, compute_once_s=once, total_bytes=total_bytes, epoch_now_s=now, epoch_after_s=after,
        from_cache=from_cache, epochs_to_pay=pays_after, pays=not reason, reason=reason,
    )  # fmt: skip


def _write(folder: Path, target: str, samples: list[Encoded]) -> None:
    n, size = len(samples), statistics.fmean(sample.size_bytes for sample in samples)
    plan = ShardPlan(
        target=target, samples=n, shard_samples=n, group_rows=shard_sizes(n, size, 1, n)[1], layout=samples[0].layout,
        fingerprint=Fingerprint(code={}, packages={}, source={}), probe_bytes=size, probe_s=0.0,
    )  # fmt: skip
    shard = write_shard(folder, plan, 0, list(enumerate(samples)), ())
    save(Manifest(plan=plan, shards=(shard,)), folder / MANIFEST)


def _timed(data: Any, batches: list[list[int]]) -> float:
    start = time.perf_counter()
    for batch in batches:
        data.__getitems__(batch)
    return time.perf_counter() - start
