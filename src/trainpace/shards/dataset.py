"""Datasets of precomputed samples: by position, or as a stream of shuffled batches."""

from __future__ import annotations

import mmap
import os
import struct
from array import array
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

from trainpace.core.errors import Contradiction, TrainpaceError, UnreadableInput, os_reason
from trainpace.core.records import load
from trainpace.shards.files import (
    MANIFEST,
    PLAN,
    SHAPED,
    Column,
    Field,
    Manifest,
    shard_file,
    spoken,
)

Transform = Callable[[Any], Any]
Span = tuple[int, int]
"""Range (start, stop) of positions in the order of an epoch. `stop` is not included."""
_MOST_CHANGES = 32
_STREAM_OPTIONS = {"batch_size", "collate_fn", "drop_last", "shuffle"}


class ShardDataset(Dataset):
    """Map-style dataset of precomputed samples.

    Positions follow the order of the source dataset, without bad samples. `source_index` converts a
    position to an index of the source. The dataset works in any DataLoader. `loader` returns a
    faster one that copies each sample only once, directly into the batch.

    Args:
        folder: Folder with the shards.
        transform: Function sample -> sample that runs in training, for random augmentation.
    """

    def __init__(self, folder: str | Path, transform: Transform | None = None) -> None:
        self.reader = ShardReader(folder)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """Return one sample, or a collated batch if `index` is a sequence of positions."""
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
        """Return the index of a sample in the dataset that it was computed from."""
        return int(self.reader.source_indices([index])[0])

    def loader(
        self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **options: Any
    ) -> DataLoader:
        """Return a DataLoader that reads whole batches.

        `options` are arguments of DataLoader, such as num_workers, pin_memory or generator. With a
        `collate_fn`, samples are read one by one, as in any DataLoader.
        """
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
    """Iterable dataset of shuffled batches of precomputed samples.

    Each sample appears exactly once per epoch over all ranks and workers. Row groups are shuffled
    over all shards, and samples are shuffled within buffers of `buffer_samples`. The order depends
    only on `seed` and epoch, not on the number of workers. `rank` and `world_size` default to those
    of torch.distributed, or to the environment variables RANK and WORLD_SIZE.

    If the samples do not divide evenly, the ranks differ by at most one sample, and so perhaps by
    one batch. With `drop_last`, all ranks have the same number of full batches, and the dropped
    samples differ between epochs. Use `loader` to iterate with a DataLoader that can be resumed.
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
        # The values are the epoch, the number of resumptions, and then for each resumption (world
        # size, samples that each rank had taken). Persistent workers share this memory.
        self._state = torch.zeros(2 + 2 * _MOST_CHANGES, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._state[0])

    def place(self, epoch: int, history: Sequence[Span] = ()) -> None:
        """Set the epoch of the next iteration, and the parts of it that are already finished.

        Each part in `history` is (world size, samples taken by each rank).
        """
        if epoch < 0:
            raise TrainpaceError(f"epoch {epoch} does not exist.", "Epochs count from 0.")
        if len(history) > _MOST_CHANGES:
            raise TrainpaceError(
                f"an epoch can be resumed {_MOST_CHANGES} times.", "Restart the epoch."
            )
        flat = [epoch, len(history), *(int(v) for pair in history for v in pair)]
        self._state[: len(flat)] = torch.tensor(flat, dtype=torch.int64)

    @property
    def history(self) -> list[Span]:
        """Finished parts of this epoch, in the format of `place`."""
        values = self._state.tolist()
        return [(values[2 + 2 * i], values[3 + 2 * i]) for i in range(values[1])]

    def spans(self) -> list[Span]:
        """Return the remaining positions of this rank, as ranges in the order of the epoch."""
        left: list[Span] = [(0, len(self.reader))]
        for world_size, taken in self.history:
            left = remaining(left, world_size, taken, self.batch_size, self.drop_last)
        return share(left, self.rank, self.world_size, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        """Return the number of remaining batches of this rank in this epoch."""
        return -(-sum(stop - start for start, stop in self.spans()) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader takes batches from its n workers in turn. If each worker makes every n-th
        # batch, the order does not depend on n.
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
        """Return a resumable loader. `options` are DataLoader arguments such as num_workers."""
        return ShardLoader(self, **options)


class ShardLoader:
    """Loader that iterates a `ShardStream` through a DataLoader, and can resume after any batch.

    After a full epoch, the next iteration is the next epoch. If an iteration stops early, the next
    one restarts the same epoch, as with any DataLoader, unless `load_state_dict` was called.
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
        """Set the epoch of the next iteration. Setting the current epoch has no effect."""
        if epoch != self.stream.epoch:
            self._begin(epoch)

    def __len__(self) -> int:
        """Return the number of batches in the epoch, or the remaining ones of a resumed epoch."""
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
        """Return the position in this epoch, for a checkpoint.

        The state is equal on all ranks after the same number of steps.
        """
        history = self.stream.history
        if self._batches:
            history.append((self.stream.world_size, self._batches * self.stream.batch_size))
        return {"epoch": self.stream.epoch, "history": history, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches of `state`. The number of ranks and workers may differ.

        Raises:
            Contradiction: If the state was saved with other settings of the stream.
        """
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
    """Allocate a uint8 tensor of `count` bytes.

    In a worker, the tensor is in shared memory, so the main process needs no copy.
    """
    if torch.utils.data.get_worker_info() is None:
        # numpy requests huge pages, and torch does not. With torch, page faults took half of the
        # time.
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
            f"rank {rank} of {world_size} does not exist.",
            "Give both: rank from 0 to world_size - 1.",
        )
    return rank, world_size


class EpochOrder:
    """Order of the samples in one epoch.

    `group_sizes` has the number of samples in each row group. Without `shuffle`, the order is 0, 1,
    2 and so on.
    """

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
        # Within one row group, sample = position + shift.
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
    """Return the contiguous share of one rank. The shares of all ranks are disjoint.

    If the positions do not divide evenly, the first ranks take one more. If `even` is True, all
    ranks take the same multiple of `multiple`, and the rest at the end is dropped.
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
    """Return the positions that remain after each rank has taken the first `taken` of its share.

    They are in the order of ranks.
    """
    left: list[Span] = []
    for rank in range(world_size):
        mine = share(spans, rank, world_size, multiple, even)
        left += cut(mine, taken, sum(stop - start for start, stop in mine))
    return left


def cut(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the part of `spans` from the `first` to the `last` position (not included).

    Positions are counted over all spans, as if they were one sequence.
    """
    parts, before = [], 0
    for start, stop in spans:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            parts.append((start + low, start + high))
        before += stop - start
    return parts


Allocate = Callable[[int], torch.Tensor]
"""Function that allocates a uint8 tensor of the given size in bytes."""


class ShardReader:
    """Reader of the samples in a finished folder by position.

    Positions follow the order of the source, without bad samples. The reader maps a shard's file
    into memory when it first needs it. A copy of the reader in another process makes its own
    mappings. Returned samples are copies and may be changed in place.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).exists():
            if (self.folder / PLAN).exists():
                hint = "Give its trainpace precompute command again: it goes on where it stopped."
                raise UnreadableInput(f"{folder} is not finished.", hint)
            what = "holds no finished shards" if self.folder.is_dir() else "is no folder"
            hint = "Make them with: trainpace precompute FILE.py:NAME --out FOLDER."
            raise UnreadableInput(f"{folder} {what}.", hint)
        self.manifest = load(self.folder / MANIFEST, Manifest)
        layout, shards = self.manifest.plan.layout, self.manifest.shards
        self.fields = layout.fields
        self.build = layout.builder()
        self.group_rows = self.manifest.plan.group_rows
        counts = np.array([shard.samples for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        groups = [len(shard.index_starts) for shard in shards]
        self._first_group = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self._columns = [
            _Placed(field, [shard.columns[c] for shard in shards])
            for c, field in enumerate(self.fields)
        ]
        self._index = _Placed(
            Field(name="index", kind="int"),
            [Column(starts=shard.index_starts, width=8) for shard in shards],
        )
        self._places: dict[tuple[int, int], array[int]] = {}
        self._maps: list[memoryview | None] = [None] * len(shards)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    def group_sizes(self) -> np.ndarray:
        rows, shards = self.group_rows, self.manifest.shards
        return np.array(
            [min(rows, s.samples - start) for s in shards for start in range(0, s.samples, rows)],
            dtype=np.int64,
        )

    def sample(self, position: int) -> Any:
        return self.samples([position])[0]

    def samples(self, positions: Sequence[int] | np.ndarray) -> list[Any]:
        """Return several samples. They do not share memory."""
        shards, groups, rows = (part.tolist() for part in self._locate(positions))
        return [
            self.build([self._leaf(column, shard, group, row) for column in self._columns])
            for shard, group, row in zip(shards, groups, rows, strict=True)
        ]

    def batch(self, positions: Sequence[int] | np.ndarray, allocate: Allocate) -> Any:
        """Return a batch like torch's default_collate, but copy each sample only once.

        `allocate` provides the memory of the batch.
        """
        where = self._locate(positions)
        return self.build([self._gather(column, where, allocate) for column in self._columns])

    def source_indices(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        where = self._locate(positions)
        return (
            self._bytes(self._index, where, np.empty(8 * len(where[0]), np.uint8))
            .view("<i8")
            .reshape(-1)
        )

    def _locate(
        self, positions: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (shard, row group, row in the group) of each position, three arrays.

        Row groups are numbered over all shards.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"position {positions.max()} of {len(self)} samples")
        shards = np.searchsorted(self._ends, positions, side="right")
        local = positions - self._firsts[shards]
        return shards, self._first_group[shards] + local // self.group_rows, local % self.group_rows

    def _gather(
        self, column: _Placed, where: tuple[np.ndarray, np.ndarray, np.ndarray], allocate: Allocate
    ) -> Any:
        field, n = column.field, len(where[0])
        shapes = {column.shapes[shard] for shard in set(where[0].tolist())}
        if field.kind in ("str", "bytes") or (
            field.kind in SHAPED and (len(shapes) > 1 or None in shapes)
        ):
            leaves = [
                self._leaf(column, *at)
                for at in zip(*(part.tolist() for part in where), strict=True)
            ]
            return torch.utils.data.default_collate(leaves)
        if field.kind == "image":
            raise UnreadableInput(
                f"{spoken(field.name)} is an image, and a batch holds tensors.",
                "Give a transform that converts it to a tensor.",
            )
        width = column.widths[int(where[0][0])]
        out = allocate(n * width)
        self._bytes(column, where, out.numpy())
        shape = next(iter(shapes)) or ()
        if field.kind == "bool":
            return out.view(torch.int32).bool()
        return out.view(column.torch_dtype).reshape(n, *shape)

    def _bytes(
        self, column: _Placed, where: tuple[np.ndarray, np.ndarray, np.ndarray], out: np.ndarray
    ) -> np.ndarray:
        shards, groups, rows = where
        width = column.widths[int(shards[0])]
        places = (column.starts[groups] + rows * width).tolist()
        target = memoryview(out.data)
        for k, (shard, place) in enumerate(zip(shards.tolist(), places, strict=True)):
            target[k * width : (k + 1) * width] = self._map(shard)[place : place + width]
        return out

    def _leaf(self, column: _Placed, shard: int, group: int, row: int) -> Any:
        width, shape = column.widths[shard], column.shapes[shard]
        if width:
            place = column.places[group] + row * width
            raw = bytearray(self._map(shard)[place : place + width])
        else:
            raw = self._value(column.starts, shard, group, row)
            if column.field.kind in SHAPED:
                packed = self._value(column.shape_starts, shard, group, row)
                shape = struct.unpack(f"<{len(packed) // 4}i", packed)
        return column.decode(raw, shape)

    def _value(self, starts: np.ndarray, shard: int, group: int, row: int) -> bytearray:
        """Return a value of a column with values of variable length.

        The length of a value is in the four bytes before it. So the reader walks through a row
        group once to find the places of its values.
        """
        mapped, key = self._map(shard), (id(starts), group)
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = array("q")
            place = int(starts[group])
            before = (group - int(self._first_group[shard])) * self.group_rows
            for _ in range(min(self.group_rows, self.manifest.shards[shard].samples - before)):
                length = int.from_bytes(mapped[place : place + 4], "little")
                places.append(place)
                place += 4 + length
        first = places[row] + 4
        length = int.from_bytes(mapped[first - 4 : first], "little")
        return bytearray(mapped[first : first + length])

    def _map(self, shard: int) -> memoryview:
        mapped = self._maps[shard]
        if mapped is None:
            record = self.manifest.shards[shard]
            path = shard_file(self.folder, record.number)
            try:
                with open(path, "rb") as file:
                    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # mmap raises ValueError for an empty file
                whole = None
            except OSError as error:
                raise UnreadableInput(f"{path} cannot be read: {os_reason(error)}.") from None
            if whole is None or len(whole) != record.file_bytes:
                raise UnreadableInput(
                    f"{path} is {'not as long as it was written' if path.exists() else 'missing'}.",
                    f"Repair it: trainpace precompute --repair --out {self.folder}.",
                )
            mapped = self._maps[shard] = memoryview(whole)
        return mapped


class _Placed:
    """Places of one field's values in all shards, and how to decode the values."""

    def __init__(self, field: Field, columns: Sequence[Column]) -> None:
        self.field = field
        self.places = [start for column in columns for start in column.starts]
        self.starts = np.array(self.places, dtype=np.int64)
        self.shape_starts = np.array(
            [s for c in columns for s in c.shape_starts or (0,) * len(c.starts)], dtype=np.int64
        )
        self.widths = [column.width for column in columns]
        self.shapes = [column.shape for column in columns]
        self.torch_dtype = _torch_dtype(field)

    def decode(self, raw: bytearray, shape: tuple[int, ...] | None) -> Any:
        kind, dtype = self.field.kind, self.field.dtype
        if kind == "tensor":
            # torch.frombuffer raises an error for an empty buffer.
            flat = torch.frombuffer(raw, dtype=self.torch_dtype) if raw else torch.empty(0)
            return flat.to(self.torch_dtype).reshape(shape or ())
        if kind == "array":
            return np.frombuffer(raw, dtype=dtype).reshape(shape or ())
        if kind == "image":
            from PIL import Image

            assert shape is not None
            return Image.frombytes(dtype, (shape[1], shape[0]), bytes(raw))
        if kind == "scalar":
            return np.frombuffer(raw, dtype=dtype)[0]
        return _PLAIN_VALUES.get(kind, bytes)(raw)


_PLAIN_VALUES: dict[str, Callable[[bytearray], Any]] = {
    "int": lambda raw: int.from_bytes(raw, "little", signed=True),
    "float": lambda raw: struct.unpack("<d", raw)[0],
    "bool": lambda raw: raw != b"\0\0\0\0",
    "str": bytearray.decode,
}


def _torch_dtype(field: Field) -> torch.dtype:
    if field.kind == "tensor":
        dtype: torch.dtype = getattr(torch, field.dtype)
        return dtype
    if field.kind in ("array", "scalar"):
        return torch.from_numpy(np.empty(0, np.dtype(field.dtype).newbyteorder("="))).dtype
    return torch.float64 if field.kind == "float" else torch.int64
