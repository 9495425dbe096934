"""Hooks for torch.utils.data: the wait for each batch, and the dataset's work for it, also in the loader's workers."""

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

from trainpace.watch.inside import batches, trials
from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns
from trainpace.watch.inside.trail import DATA, LOADER_START, Fetch, TrailWriter, unused


def loader(module: Any, recorder: Recorder) -> None:
    iterator, kind = module._BaseDataLoaderIter, module.DataLoader
    plain_init, plain_next = iterator.__init__, iterator.__next__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(plain_next)
    def next_batch(self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain_next(self)
        first = not self._trainpace_begun
        if first:
            self._trainpace_begun = True
        part = LOADER_START if first and self._num_workers else DATA
        # after an evaluation the start counts as what its first batch is for
        follows_start = first and self._trainpace_settled_ns == recorder.settled_ns
        depth = recorder.enter(part) if follows_start else recorder.enters_batch(part)
        began_ns = now_ns() if first else 0
        try:
            batch = (
                plain_next(self)
                if recorder.trials is None
                else trials.batch(recorder, self, plain_next)
            )
            recorder.fetched_samples += self._trainpace_size(batch)
            recorder.fetched_from = self._trainpace_loader
            return batch
        except StopIteration:
            if recorder.part == DATA and getattr(self, "_shutdown", False):
                recorder.part = (
                    LOADER_START  # its workers end, which start again for the next epoch
                )
            raise
        finally:
            recorder.leave(depth, "first batch" if first else "next batch")
            if first and self._num_workers:
                recorder.trail.note({"first_wait_ns": now_ns() - began_ns})

    @functools.wraps(plain_init)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, loader, *args, **kwargs)
        if not self._auto_collation:
            self._trainpace_size = batches.size_of_uncollated
        if get_ident() == recorder.thread:
            with contextlib.suppress(Exception):
                self._trainpace_loader = id(loader)
                if loader not in seen:
                    seen.add(loader)
                    _note_loader(recorder, loader)

    iterator._trainpace_begun, iterator._trainpace_loader = False, 0
    iterator._trainpace_given, iterator._trainpace_length, iterator._trainpace_settled_ns = (
        0,
        None,
        -1,
    )
    iterator._trainpace_size = staticmethod(batches.size_of)
    iterator.__init__, iterator.__next__ = init, next_batch
    kind.__iter__ = _starting(recorder, kind.__iter__)


def _starting(recorder: Recorder, plain_iter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(plain_iter)
    def start(self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain_iter(self)
        depth = recorder.enters_batch(LOADER_START if self.num_workers else DATA)
        try:
            iterator = plain_iter(self)
            with contextlib.suppress(AttributeError):  # which may be a generator
                # an iterator with persistent workers begins again
                iterator._trainpace_given, iterator._trainpace_length = 0, None
                iterator._trainpace_settled_ns = recorder.settled_ns
            return iterator
        finally:
            recorder.leave(depth, "start of the loader")

    return start


def stateful_loader(module: Any, recorder: Recorder) -> None:
    kind = getattr(module, "StatefulDataLoader", None)
    if kind is not None:
        kind.__iter__ = _starting(recorder, kind.__iter__)


def _note_loader(recorder: Recorder, loader: Any) -> None:
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    asked_before = loader._IterableDataset_len_called
    per_epoch = batches.length_of(loader)
    # else the loader warns of a length that the script never asked for
    loader._IterableDataset_len_called = asked_before
    dataset = _inside_subsets(loader)
    recorder.trail.note(
        {
            "loader": id(loader),
            "dataset": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
            "samples_in_dataset": batches.length_of(loader.dataset),
            "batches": per_epoch,
            "batch_size": loader.batch_size or getattr(sampler, "batch_size", None),
            "workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "one_by_one": _asks_one_by_one(loader),
        }
    )


def _asks_one_by_one(loader: Any) -> bool:
    """Whether samples are asked for one by one, and joined as torch joins them."""
    data: Any = sys.modules["torch.utils.data"]
    is_map = not isinstance(loader.dataset, data.IterableDataset)
    return (
        is_map
        and loader.collate_fn is data.default_collate
        and not hasattr(_inside_subsets(loader), "__getitems__")
    )


def _inside_subsets(loader: Any) -> Any:
    """A loader's dataset, or that of which it is a part."""
    dataset = loader.dataset
    while type(dataset) is sys.modules["torch.utils.data"].Subset:
        dataset = dataset.dataset
    return dataset


def fetchers(module: Any, recorder: Recorder) -> None:
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        kind.fetch = timed_fetch(kind.fetch, recorder, os.environ["TRAINPACE_WATCH"])


def timed_fetch(fetch: Callable[..., Any], recorder: Recorder, folder: str) -> Callable[..., Any]:
    """A fetch function that writes its times to the trail of the process in which it runs."""
    trails: dict[int, TrailWriter] = {}

    @functools.wraps(fetch)
    def timed(self: Any, indices: Any) -> Any:
        if not recorder.spans_on and get_ident() == recorder.thread:  # of no worker
            return fetch(self, indices)
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
        batch = fetch(self, indices)  # raises at a stream's end, which is no batch
        end, cpu = now_ns(), time.thread_time_ns() - cpu
        record = Fetch(
            -1 if worker is None else worker.id,
            _fetched(self, indices, batch),
            start,
            end,
            cpu,
            collating[0],
        )
        if worker is not None:
            with contextlib.suppress(Exception):  # such as no file descriptor left
                trail = trails.get(os.getpid()) or _worker_trail(trails, folder, worker.id)
                trail.fetch(record)
                trail.flush()
        else:
            recorder.trail.fetch(record)
        return batch

    return timed


def _fetched(fetcher: Any, indices: Any, batch: Any) -> int:
    """How many samples were fetched: as many as were asked for, or as many as a dataset gave that makes batches itself."""
    if isinstance(indices, list | tuple) and getattr(fetcher, "auto_collation", True):
        return len(indices)
    return batches.size_of_uncollated(batch) or 1


def _worker_trail(trails: dict[int, TrailWriter], folder: str, worker: int) -> TrailWriter:
    trainer = (
        multiprocessing.parent_process()
    )  # which a fork server is not, though it be the parent
    pid, host, parent = (
        os.getpid(),
        socket.gethostname(),
        trainer.pid if trainer is not None else os.getppid(),
    )
    header = {"role": "worker", "worker": worker, "pid": pid, "parent": parent, "host": host}
    trails[pid] = TrailWriter(unused(folder, f"worker-{parent}-{worker}-{pid}-{host}"), header)
    return trails[pid]
