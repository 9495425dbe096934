"""Worker process that computes samples or shards.

It is started as ``python -m trainpace.shards.precompute_worker TARGET``. It reads one JSON request
per line and answers in JSON lines. Output of the user's code goes to stderr. Single samples are
computed to plan a precomputation and to estimate its cost and gain.
"""

import errno
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec

from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.core.records import Record, save
from trainpace.core.worker import failure_of, serve_lines
from trainpace.shards import files, opened_files
from trainpace.shards.files import Encoded, Layout, encode, reason_of, spread, timed_samples
from trainpace.shards.user_dataset import (
    SETTINGS,
    computed_twice,
    fingerprint,
    load_dataset,
    settings_of,
)

_WARM_SHARE = 0.7
"""Maximum size of shards, as a share of memory, that stays in the page cache between epochs."""
_COMPUTED_TWICE = 2
"""Number of samples that an estimate computes twice.

This finds random datasets early. `precompute` would reject them later.
"""
_LEAST_SHARE = 0.02
"""Minimum gain that is worth a copy of the data, as a share of an epoch."""


class SampleCosts(Record):
    """Measured costs per sample in one process.

    Attributes:
        samples: Number of samples in the dataset.
        measured: Number of samples that were measured.
        compute_s: Time to compute a sample.
        sample_bytes: Size of a sample in a shard.
        read_s: Time to read a sample from a shard in the page cache.
        read_cold_s: Time to read a sample from a shard outside the page cache.
    """

    samples: int
    measured: int
    compute_s: float
    sample_bytes: float
    read_s: float
    read_cold_s: float
    memory_bytes: int
    free_bytes: int


class Estimate(Record):
    """Result of `decide`. Times are for loading data with `workers` processes."""

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
    """Measure the costs of computing samples and of reading them back from a shard.

    Up to `most` samples are computed in at most `seconds`, and written to a temporary folder next
    to `folder`.

    Raises:
        NotDeterministic: If a sample differs when it is computed again.
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
        # Opening and mapping happen once per shard, so do not time them as part of a sample.
        data[0]
        opened_files.drop_file(str(file))
        cold = _timed(data, batches)
        warm = min(_timed(data, batches) for _ in range(3))
    free = os.statvfs(beside)
    torch.set_num_threads(1)
    return SampleCosts(
        samples=len(dataset),
        measured=n,
        compute_s=statistics.fmean(seconds for _, _, seconds in samples),
        sample_bytes=size / n,
        read_s=warm / n,
        read_cold_s=max(cold, warm) / n,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_bytes=free.f_bavail * free.f_frsize,
    )


def decide(
    costs: SampleCosts,
    workers: int,
    step_s: float | None = None,
    batch: int = 1,
    epochs: float | None = None,
) -> Estimate:
    """Decide from measured costs if precomputing pays off, and after how many epochs.

    An epoch takes as long as its data or its steps (`step_s` per `batch` samples), whichever is
    longer. Without `step_s`, only data counts, and the result is an upper bound of the saving. The
    training would compute each sample in the first epoch anyway; the estimate does not subtract
    this.
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
            "the steps take longer than the data as it is"
            if now == steps and steps
            else f"reading back takes {read_s / costs.compute_s:.0%} of computing"
        )
    elif total_bytes > costs.free_bytes:
        reason = "there is not enough room on the disk"
    elif epochs is not None and epochs < pays_after:
        reason = f"it would pay after {pays_after:.1f} epochs"
    return Estimate(
        costs=costs,
        workers=workers,
        compute_once_s=once,
        total_bytes=total_bytes,
        epoch_now_s=now,
        epoch_after_s=after,
        from_cache=from_cache,
        epochs_to_pay=pays_after,
        pays=not reason,
        reason=reason,
    )


def _write(folder: Path, target: str, samples: list[Encoded]) -> None:
    n, size = len(samples), statistics.fmean(sample.size_bytes for sample in samples)
    plan = files.ShardPlan(
        target=target,
        samples=n,
        shard_samples=n,
        group_rows=files.shard_sizes(n, size, 1, n)[1],
        layout=samples[0].layout,
        fingerprint=files.Fingerprint(code={}, source={}),
        probe_bytes=size,
    )
    shard = files.write_shard(folder, plan, 0, list(enumerate(samples)), ())
    save(files.Manifest(plan=plan, shards=(shard,)), folder / files.MANIFEST)


def _timed(data: Any, batches: list[list[int]]) -> float:
    start = time.perf_counter()
    for batch in batches:
        data.__getitems__(batch)
    return time.perf_counter() - start


_PROGRESS_S = 0.5
_LOOKED_AT = 8
_LOOKING_S = 30.0


class Inspection(Record):
    """Findings from a few samples, such as the size of one in a shard."""

    samples: int
    layout: Layout
    fingerprint: files.Fingerprint
    sample_bytes: float


def inspect(dataset: Any, target: str, settings: str) -> Inspection:
    """Inspect some samples that are spread over the dataset. Each is computed twice.

    Raises:
        NotDeterministic: If a sample differs when it is computed again.
        UserCodeError: If no sample can be computed.
    """
    looked_at = timed_samples(dataset, spread(_LOOKED_AT, len(dataset)), _LOOKING_S)
    samples = [computed_twice(dataset, index) for index, _, _ in looked_at]
    return Inspection(
        samples=len(dataset),
        layout=samples[-1].layout,
        fingerprint=fingerprint(dataset, target, settings),
        sample_bytes=statistics.fmean(s.size_bytes for s in samples),
    )


def compute(
    dataset: Any, plan: files.ShardPlan, number: int, progress: Any
) -> tuple[list[tuple[int, Encoded]], list[files.BadSample]]:
    """Return the samples of one shard, and its bad samples.

    A bad sample raises an exception, or has a different layout than the other samples.
    """
    computed: list[tuple[int, Encoded]] = []
    bad: list[files.BadSample] = []
    reported_at = time.monotonic()
    for index in plan.range_of(number):
        try:
            computed.append((index, encode(dataset[index], plan.layout)))
        except MemoryError:
            raise
        except Exception as error:
            bad.append(files.BadSample(index=index, reason=reason_of(error)))
        if time.monotonic() - reported_at > _PROGRESS_S:
            reported_at = time.monotonic()
            progress(len(computed) + len(bad), len(bad), bad[-1].reason if bad else "")
    return computed, bad


class _Worker:
    """Server that answers the requests of the parent process.

    A thread writes a shard while the main thread computes the next one. Otherwise, the core would
    be idle during fsync.
    """

    def __init__(self, target: str, answers: IO[str]) -> None:
        self._target, self._answers, self._sending = target, answers, threading.Lock()
        self._writer, self._written = ThreadPoolExecutor(1), Future[None]()
        self._written.set_result(None)

    def serve(self, requests: Iterable[dict[str, Any]]) -> None:
        """Answer requests until there are no more, then end the process."""
        try:
            files.import_pyarrow()
            self._dataset = load_dataset(self._target)
            self._settings = settings_of(self._dataset)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            for request in requests:
                self._answer(**request)
            self._written.result()
        except (Exception, SystemExit) as error:
            self._fail(error)
        os._exit(0)  # threads of the user's code must not keep the process alive

    def _answer(self, do: str, **request: Any) -> None:
        if do == "inspect":
            self._send(inspection=inspect(self._dataset, self._target, self._settings))
        elif do == "fingerprint":
            self._send(fingerprint=fingerprint(self._dataset, self._target, self._settings))
        elif do == "estimate":
            self._send(estimate=estimate_here(self._dataset, self._target, **request["options"]))
        else:
            self._compute(
                msgspec.convert(request["plan"], files.ShardPlan),
                request["number"],
                Path(request["folder"]),
            )

    def _compute(self, plan: files.ShardPlan, number: int, folder: Path) -> None:
        if plan.fingerprint.source[SETTINGS] != self._settings:
            raise TrainpaceError(
                f"{self._target} is put together differently in every process: an index does not"
                " always mean the same sample.",
                "Sort what it lists, and seed what it shuffles.",
            )

        def progress(samples: int, bad: int, reason: str) -> None:
            self._send(number=number, progress=samples, bad=bad, reason=reason)

        computed, bad = compute(self._dataset, plan, number, progress)
        self._written.result()  # write one shard at a time, so at most two are in memory
        self._written = self._writer.submit(self._write, folder, plan, number, computed, bad)

    def _write(self, *shard: Any) -> None:
        try:
            self._send(shard=files.write_shard(*shard))
        except Exception as error:
            # Report at once, because the main thread may wait for a request that never comes.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._send(error="the disk is full.", hint="", disk_full=True)
        else:
            hint = "Try fewer --workers or a smaller --shard-samples."
            self._send(**failure_of(error, "the dataset's code", memory_hint=hint))
        os._exit(0)

    def _send(self, **answer: Any) -> None:
        with self._sending:
            self._answers.write(msgspec.json.encode(answer).decode() + "\n")
            self._answers.flush()


if __name__ == "__main__":
    requests, answers = serve_lines()
    _Worker(sys.argv[1], answers).serve(requests)
