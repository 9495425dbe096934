"""Batches of iterators that are no DataLoader's: those of Ray Data."""

import functools
from collections.abc import Iterator
from typing import Any

from trainpace.watch.inside.batches import size_of
from trainpace.watch.inside.recorder import Recorder, get_ident
from trainpace.watch.inside.trail import DATA


def ray_data(module: Any, recorder: Recorder) -> None:
    """Hook into what `iter_batches`, `iter_torch_batches` and the like return."""
    kind = getattr(module, "_IterableFromIterator", None)
    if kind is None:
        return
    plain = kind.__iter__

    @functools.wraps(plain)
    def start(self: Any) -> Any:
        return _Charged(plain(self), recorder)

    kind.__iter__ = start


class _Charged:
    """An iterator whose waiting is charged, in the training thread, which may turn out to be one only after the first batch."""

    def __init__(self, batches: Iterator[Any], recorder: Recorder) -> None:
        self._batches, self._recorder = batches, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        recorder = self._recorder
        if get_ident() != recorder.thread or recorder.part == DATA:  # one within another
            return next(self._batches)
        depth = recorder.enters_batch(DATA)
        try:
            batch = next(self._batches)
            recorder.fetched_samples += size_of(batch)
            recorder.fetched_from = 0
            return batch
        finally:
            recorder.leave(depth, "next batch")
