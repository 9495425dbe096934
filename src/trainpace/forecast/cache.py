"""What a forecaster remembers, bounded and safe under threads."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
V = TypeVar("V")

MOST_AT_ONCE = 128
"""Batch sizes that are evaluated in one pass, which bounds its memory."""
MOST_BATCHES = 4096


class Bounded(Generic[V]):
    """The values used last by their keys. Two threads may make the same value at the same time; all get the first."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            value = self._values.setdefault(key, value)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def find(self, key: Hashable) -> V | None:
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            self._evict()

    def _evict(self) -> None:
        while len(self._values) > self._most:
            self._values.popitem(last=False)


class ByBatch:
    """Rows of numbers by batch size, each worked out once, or the reason why there are none."""

    def __init__(self, rows_at: Callable[[Floats], Floats | str]) -> None:
        self._rows_at, self._lock = rows_at, Lock()
        self._batches: Floats = np.zeros(0)
        self._rows: Any = None

    def at(self, batches: Floats) -> Floats | str:
        """The rows of ascending batch sizes."""
        with self._lock:
            missing = np.setdiff1d(batches, self._batches, assume_unique=True)
            if len(self._batches) + len(missing) > MOST_BATCHES:
                self._batches, self._rows, missing = np.zeros(0), None, batches
            for start in range(0, len(missing), MOST_AT_ONCE):
                some = missing[start : start + MOST_AT_ONCE]
                rows = self._rows_at(some)
                if isinstance(rows, str):
                    return rows
                together = np.concatenate([self._batches, some])
                order = np.argsort(together)
                rows = rows if self._rows is None else np.concatenate([self._rows, rows])
                self._batches, self._rows = together[order], rows[order]
            result: Floats = self._rows[np.searchsorted(self._batches, batches)]
            return result
