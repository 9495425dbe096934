"""Timing of the dataset's work for a batch, in the worker or training process that does it."""

import contextlib
import functools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns
from trainpace.watch.inside.trail import Fetch, TrailWriter


def watch_fetchers(module: Any, recorder: Recorder, folder: str) -> None:
    """Time the fetchers of torch.utils.data."""
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        kind.fetch = timed_fetch(kind.fetch, recorder, folder)


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
