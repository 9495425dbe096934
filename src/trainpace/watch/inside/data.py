"""Hooks in torch.utils.data: the wait for each batch in the training process, and the dataset's work for it in the worker or
training process that does it."""

import contextlib
import functools
import multiprocessing
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside import trials
from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns
from trainpace.watch.inside.trail import DATA, LOADER_START, Fetch, TrailWriter


def _loader(module: Any, recorder: Recorder) -> None:
    iterator, loader = module._BaseDataLoaderIter, module.DataLoader
    plain_next, plain_iter = iterator.__next__, loader.__iter__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(plain_next)
    def next_batch(self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain_next(self)
        recorder.begins_batch()
        first = not self.__dict__.get("_trainpace_begun", False)
        if first:
            self._trainpace_begun = True
        depth = recorder.enter(LOADER_START if first and self._num_workers else DATA)
        try:
            batch = trials.batch(recorder, self, plain_next)
            recorder.fetched_samples += trials.size_of(batch)
            return batch
        finally:
            recorder.leave(depth, "first batch" if first else "next batch")

    @functools.wraps(plain_iter)
    def start(self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain_iter(self)
        with contextlib.suppress(Exception):
            if self not in seen:
                seen.add(self)
                _note_loader(recorder, self)
        recorder.begins_batch()
        return recorder.charged(LOADER_START if self.num_workers else DATA, "start of the loader", plain_iter, self)

    iterator.__next__, loader.__iter__ = next_batch, start


def _note_loader(recorder: Recorder, loader: Any) -> None:
    def length(of: Any) -> int | None:
        try:
            return len(of)
        except Exception:
            return None

    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    asked_before = loader._IterableDataset_len_called
    batches = length(loader)
    # else the loader warns of a length that the script never asked for
    loader._IterableDataset_len_called = asked_before
    recorder.trail.note({
        "loader": id(loader), "dataset": f"{type(loader.dataset).__module__}.{type(loader.dataset).__qualname__}",
        "samples_in_dataset": length(loader.dataset), "batches": batches,
        "batch_size": loader.batch_size or getattr(sampler, "batch_size", None), "workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor, "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
    })  # fmt: skip


def _fetchers(module: Any, recorder: Recorder) -> None:
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        kind.fetch = timed_fetch(kind.fetch, recorder, os.environ["TRAINPACE_WATCH"])


def timed_fetch(fetch: Callable[..., Any], recorder: Recorder, folder: str) -> Callable[..., Any]:
    """A fetch function that writes its times to the trail of the process in which it runs."""
    trails: dict[int, TrailWriter] = {}

    @functools.wraps(fetch)
    def timed(self: Any, indices: Any) -> Any:
        data = sys.modules.get("torch.utils.data")
        worker = data.get_worker_info() if data is not None else None
        if worker is None and get_ident() != recorder.thread:
            return fetch(self, indices)
        collating = self.__dict__.get("_trainpace_collating")
        if collating is None:
            collating = self._trainpace_collating = [0]
            collate = self.collate_fn

            def timed_collate(batch: Any) -> Any:
                begin = now_ns()
                try:
                    return collate(batch)
                finally:
                    collating[0] += now_ns() - begin

            self.collate_fn = timed_collate
        collating[0] = 0
        start, cpu = now_ns(), time.thread_time_ns()
        try:
            return fetch(self, indices)
        finally:
            end, cpu = now_ns(), time.thread_time_ns() - cpu
            samples = len(indices) if isinstance(indices, list | tuple) else 1
            record = Fetch(-1 if worker is None else worker.id, samples, start, end, cpu, collating[0])
            if worker is not None:
                with contextlib.suppress(Exception):  # such as no file descriptor left
                    trail = trails.get(os.getpid()) or _worker_trail(trails, folder, worker.id)
                    trail.fetch(record)
                    trail.flush()
            elif recorder.spans_on:
                recorder.trail.fetch(record)

    return timed


def _worker_trail(trails: dict[int, TrailWriter], folder: str, worker: int) -> TrailWriter:
    trainer = multiprocessing.parent_process()  # which a fork server is not, though it be the parent
    pid, host, parent = os.getpid(), socket.gethostname(), trainer.pid if trainer is not None else os.getppid()
    header = {"role": "worker", "worker": worker, "pid": pid, "parent": parent, "host": host}
    trails[pid] = TrailWriter(os.path.join(folder, f"worker-{parent}-{worker}-{pid}-{host}.trail"), header)
    return trails[pid]


LOADER_HOOKS: dict[str, Callable[..., None]] = {
    "torch.utils.data.dataloader": _loader,
    "torch.utils.data._utils.fetch": _fetchers,
}
