"""Read precomputed shards back: map-style (`ShardDataset`), or streamed in a shuffled, resumable order (`ShardStream`).

The order of a stream and its division over ranks are pure functions of a seed. The row groups of all shards are permuted;
the resulting sequence is cut into buffers of some thousand samples, and each buffer is permuted in itself. Nothing has to
be read to know the n-th sample, so a position is all the state there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import default_collate as torch_collate

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.shards.reader import ShardReader

Transform = Callable[[Any], Any]
Span = tuple[int, int]
"""Positions `start` to `stop` (not included) of an epoch's sequence."""
_MOST_CHANGES = 32
_STREAM_OPTIONS = {"batch_size", "collate_fn", "drop_last", "shuffle"}


class ShardDataset(Dataset):
    """Precomputed samples by position. `transform` (sample -> sample) is what stays online: the random augmentation.

    Positions run over the source in its order, without its bad samples; `source_index` gives the number in the source. Works
    in any DataLoader; `loader` makes one that copies each sample once, into its place in the batch.
    """

    def __init__(self, folder: str | Path, transform: Transform | None = None) -> None:
        self.reader = ShardReader(folder)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """One sample; or, for a sequence of positions, their collated batch."""
        if not isinstance(index, int | np.integer | torch.Tensor):
            return _batch(
                self.reader, np.asarray(index, dtype=np.int64), self.transform, torch_collate
            )
        i = int(index)
        sample = self.reader.sample(i + len(self) if i < 0 else i)
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = self.reader.samples(indices)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def source_index(self, index: int) -> int:
        """The index that this sample had in the dataset it was computed from."""
        return int(self.reader.source_indices([index])[0])

    def loader(
        self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **options: Any
    ) -> DataLoader:
        """A DataLoader of whole batches; `options` are DataLoader's own (num_workers, pin_memory, generator, ...). With a
        `collate_fn` its samples are copied as in any DataLoader."""
        if options.get("collate_fn") is not None:
            return DataLoader(self, batch_size, shuffle=shuffle, drop_last=drop_last, **options)
        order = (
            RandomSampler(self, generator=options.get("generator"))
            if shuffle
            else SequentialSampler(self)
        )
        return DataLoader(
            self, sampler=BatchSampler(order, batch_size, drop_last), batch_size=None, **options
        )


class ShardStream(IterableDataset):
    """Batches of precomputed samples, each sample exactly once an epoch over all ranks and workers.

    Row groups are shuffled over all shards, samples within buffers of `buffer_samples`: the order depends on `seed` and epoch
    alone, not on workers. `rank` and `world_size` are those of torch.distributed, or RANK and WORLD_SIZE. Where samples do not
    divide, ranks differ by at most one sample (and so perhaps by one batch); with `drop_last` all ranks have the same number of
    full batches, and the samples left over differ from epoch to epoch. Iterate it by `loader`, which can be resumed.
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        buffer_samples: int = 10_000,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        transform: Transform | None = None,
        collate_fn: Callable[[list[Any]], Any] = torch_collate,
    ) -> None:
        if batch_size < 1 or buffer_samples < 1 or seed < 0:
            raise TrainpaceError("batch_size and buffer_samples are 1 or more, and seed 0 or more.")
        self.reader = ShardReader(folder)
        self.batch_size, self.shuffle, self.seed, self.buffer_samples = (
            batch_size,
            shuffle,
            seed,
            buffer_samples,
        )
        self.drop_last, self.transform, self.collate_fn = drop_last, transform, collate_fn
        self.rank, self.world_size = _place(rank, world_size)
        # epoch, changes, then (world size, samples taken by each rank) of every resumption; shared, so that workers that
        # live on from epoch to epoch see it
        self._state = torch.zeros(2 + 2 * _MOST_CHANGES, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._state[0])

    def place(self, epoch: int, history: Sequence[Span] = ()) -> None:
        """Begin the next iteration at this epoch, after the parts in `history`: (world size, samples taken by each rank)."""
        if epoch < 0:
            raise TrainpaceError(f"there is no epoch {epoch}.", "Epochs count from 0.")
        if len(history) > _MOST_CHANGES:
            raise TrainpaceError(
                f"an epoch can be resumed {_MOST_CHANGES} times.", "Begin the epoch anew."
            )
        flat = [epoch, len(history), *(int(v) for pair in history for v in pair)]
        self._state[: len(flat)] = torch.tensor(flat, dtype=torch.int64)

    @property
    def history(self) -> list[Span]:
        """The parts of this epoch that are done, in the form that `place` takes."""
        values = self._state.tolist()
        return [(values[2 + 2 * i], values[3 + 2 * i]) for i in range(values[1])]

    def spans(self) -> list[Span]:
        """This rank's positions in the epoch's order that are still to come."""
        left: list[Span] = [(0, len(self.reader))]
        for world_size, taken in self.history:
            left = remaining(left, world_size, taken, self.batch_size, self.drop_last)
        return share(left, self.rank, self.world_size, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        """Batches still to come in this epoch."""
        return -(-sum(stop - start for start, stop in self.spans()) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        # a DataLoader takes batches from its workers in turn, so that with every n-th batch a worker the order stays
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        spans, count = self.spans(), len(self)
        order = EpochOrder(
            self.reader.group_sizes(), self.seed, self.epoch, self.buffer_samples, self.shuffle
        )
        for number in range(first, count, step):
            wanted = cut(spans, number * self.batch_size, (number + 1) * self.batch_size)
            positions = np.concatenate([order.at(*span) for span in wanted])
            yield _batch(self.reader, positions, self.transform, self.collate_fn)

    def loader(self, **options: Any) -> ShardLoader:
        """Its DataLoader; `options` are DataLoader's own (num_workers, pin_memory, persistent_workers, ...)."""
        return ShardLoader(self, **options)


class ShardLoader:
    """Iterates a `ShardStream` through a DataLoader, counts the batches that were handed out, and resumes after them.

    A full epoch moves on to the next one. An iteration that is broken off and begun anew, without `load_state_dict`, begins its
    epoch anew, as any DataLoader does.
    """

    def __init__(self, stream: ShardStream, **options: Any) -> None:
        self.stream = stream
        taken = sorted(options.keys() & _STREAM_OPTIONS)
        if taken:
            raise TrainpaceError(
                f"{', '.join(taken)}: for the stream, not for its loader.",
                f"ShardStream(folder, ..., {taken[0]}=...)",
            )
        self.loader = DataLoader(stream, batch_size=None, **options)
        self._batches = 0
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Naming the epoch that is under way changes nothing."""
        if epoch != self.stream.epoch:
            self._begin(epoch)

    def __len__(self) -> int:
        """Batches of the whole epoch, or of what a resumed one still has."""
        return len(self.stream)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._begin(self.stream.epoch)
        self._resumed = False
        for batch in self.loader:
            self._batches += 1
            yield batch
        self._begin(self.stream.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """How far this epoch is: equal on every rank after the same number of steps, so one rank's copy is enough."""
        history = self.stream.history
        if self._batches:
            history.append((self.stream.world_size, self._batches * self.stream.batch_size))
        return {"epoch": self.stream.epoch, "history": history, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of `state`, also with another number of ranks or workers."""
        for name, value in self._settings().items():
            if state.get(name) != value:
                raise Contradiction(
                    f"the state was saved with {name} {state.get(name)}, and this stream has"
                    f" {value}.",
                    "Resume with the settings that the epoch was begun with.",
                )
        self._begin(state["epoch"], [(int(world), int(taken)) for world, taken in state["history"]])
        self._resumed = True

    def _begin(self, epoch: int, history: Sequence[Span] = ()) -> None:
        self._batches = 0
        self.stream.place(epoch, history)

    def _settings(self) -> dict[str, Any]:
        names = ("seed", "shuffle", "buffer_samples", "batch_size", "drop_last")
        return {name: getattr(self.stream, name) for name in names} | {
            "samples": len(self.stream.reader)
        }


def _batch(
    reader: ShardReader,
    positions: np.ndarray,
    transform: Transform | None,
    collate: Callable[[list[Any]], Any],
) -> Any:
    if transform is None and collate is torch_collate:
        return reader.batch(positions, _allocate)
    samples = reader.samples(positions)
    return collate(samples if transform is None else [transform(sample) for sample in samples])


def _allocate(count: int) -> torch.Tensor:
    """In a worker, memory that the training process can map: the batch then needs no second copy (as in torch's collate)."""
    if torch.utils.data.get_worker_info() is None:
        # numpy asks for huge pages where they help, torch does not: half of the time was page faults
        return torch.from_numpy(np.empty(count, dtype=np.uint8))
    empty = torch.empty(0, dtype=torch.uint8)
    return empty.new(empty._typed_storage()._new_shared(count, device="cpu")).resize_(count)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise TrainpaceError(
            f"rank {rank} of {world_size} is no place.", "Give both: rank from 0 to world_size - 1."
        )
    return rank, world_size


class EpochOrder:
    """The sequence of one epoch. `group_sizes`: samples of every row group; without `shuffle` it is 0, 1, 2, ..."""

    def __init__(
        self,
        group_sizes: np.ndarray,
        seed: int,
        epoch: int,
        buffer_samples: int = 10_000,
        shuffle: bool = True,
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


def share(
    spans: Sequence[Span], rank: int, world_size: int, multiple: int = 1, even: bool = False
) -> list[Span]:
    """The part of `rank`: contiguous, disjoint from the others', and together with them everything.

    Where the count does not divide, the first ranks take one more. `even`: all take the same whole multiple of `multiple`, and
    what is left at the end is nobody's.
    """
    total = sum(stop - start for start, stop in spans)
    if even:
        each = total // (world_size * multiple) * multiple
        return cut(spans, rank * each, (rank + 1) * each)
    each, more = divmod(total, world_size)
    first = rank * each + min(rank, more)
    return cut(spans, first, first + each + (rank < more))


def remaining(
    spans: Sequence[Span], world_size: int, taken: int, multiple: int = 1, even: bool = False
) -> list[Span]:
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
