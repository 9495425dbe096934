"""The order of samples in an epoch and their division over ranks, as pure functions of a seed, so that they can be resumed.

The row groups of all shards are permuted; the resulting sequence is cut into buffers of some thousand samples, and each
buffer is permuted in itself. Nothing has to be read to know the n-th sample, so a position is all the state there is.
"""

from collections.abc import Sequence

import numpy as np

Span = tuple[int, int]
"""Positions `start` to `stop` (not included) of an epoch's sequence."""


class EpochOrder:
    """The sequence of one epoch. `group_sizes`: samples of every row group; without `shuffle` it is 0, 1, 2, ..."""

    def __init__(
        self, group_sizes: np.ndarray, seed: int, epoch: int, buffer_samples: int = 10_000, shuffle: bool = True
    ) -> None:
        self.samples = int(group_sizes.sum())
        self._seed, self._buffer, self._shuffle = (seed, epoch), max(1, buffer_samples), shuffle
        groups = np.arange(len(group_sizes))
        if shuffle:
            groups = np.random.default_rng((*self._seed, 0)).permutation(groups)
        sizes = group_sizes[groups]
        self._ends = np.cumsum(sizes)
        # sample = position + shift, within one row group
        firsts = np.concatenate([[0], np.cumsum(group_sizes)])[:-1]
        self._shifts = firsts[groups] - (self._ends - sizes)
        self._buffered: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def at(self, start: int, stop: int) -> np.ndarray:
        """Samples at the positions `start` to `stop` (not included)."""
        parts = []
        while start < stop:
            number = start // self._buffer
            first = number * self._buffer
            part = self._permuted(number)[start - first : stop - first]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _permuted(self, number: int) -> np.ndarray:
        if self._buffered[0] != number:
            first = number * self._buffer
            positions = np.arange(first, min(first + self._buffer, self.samples))
            if self._shuffle:
                positions = np.random.default_rng((*self._seed, 1, number)).permutation(positions)
            samples = positions + self._shifts[np.searchsorted(self._ends, positions, side="right")]
            self._buffered = (number, samples)
        return self._buffered[1]


def share(spans: Sequence[Span], rank: int, world_size: int, multiple: int = 1, even: bool = False) -> list[Span]:
    """The part of `rank`: contiguous, disjoint from the others', and together with them everything.

    Where the count does not divide, the first ranks take one more. `even`: all take the same whole multiple of `multiple`, and
    what is left at the end is nobody's.
    """
    total = sum(stop - start for start, stop in spans)
    if even:
        each = total // (world_size * multiple) * multiple
        return cut(spans, rank * each, (rank + 1) * each)
    return cut(spans, *_bounds(total, rank, world_size))


def remaining(spans: Sequence[Span], world_size: int, taken: int, multiple: int = 1, even: bool = False) -> list[Span]:
    """What is left once each of `world_size` ranks has taken the first `taken` of its share, in the order of the ranks."""
    left: list[Span] = []
    for rank in range(world_size):
        mine = share(spans, rank, world_size, multiple, even)
        left += cut(mine, taken, sum(stop - start for start, stop in mine))
    return left


def cut(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """The positions of `spans` from the `first` to the `last` (not included), counted over all of them."""
    parts, before = [], 0
    for start, stop in spans:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            parts.append((start + low, start + high))
        before += stop - start
    return parts


def _bounds(total: int, rank: int, world_size: int) -> Span:
    each, more = divmod(total, world_size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)
