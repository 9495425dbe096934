"""Dataset of precomputed samples."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data import default_collate as torch_collate

from trainpace.core.errors import UnreadableInput, os_reason
from trainpace.core.records import load
from trainpace.shards.files import MANIFEST, PLAN, SHAPED, Column, Field, Manifest, shard_file

Transform = Callable[[Any], Any]


class ShardDataset(Dataset):
    """Map-style dataset of precomputed samples.

    Positions follow the order of the source dataset, without bad samples. The dataset works in any
    DataLoader. `loader` returns a faster one that copies each sample only once, directly into the
    batch.

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
            if self.transform is None:
                return self.reader.batch(index)
            return torch_collate(self.__getitems__(index))
        i = int(index)
        return self.__getitems__([i + len(self) if i < 0 else i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = self.reader.samples(indices)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def loader(
        self,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Sampler[int] | None = None,
        **options: Any,
    ) -> DataLoader:
        """Return a DataLoader that reads whole batches.

        `sampler` determines the order instead of `shuffle`, for example a DistributedSampler.
        `options` are arguments of DataLoader, such as num_workers, pin_memory or generator. With a
        `collate_fn`, samples are read one by one, as in any DataLoader.
        """
        if sampler is None and shuffle:
            sampler = RandomSampler(self, generator=options.get("generator"))
        order = sampler or SequentialSampler(self)
        if options.get("collate_fn") is not None:
            return DataLoader(self, batch_size, sampler=order, drop_last=drop_last, **options)
        batches = BatchSampler(order, batch_size, drop_last)
        return DataLoader(self, sampler=batches, batch_size=None, **options)


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
        groups = -(-counts // self.group_rows)
        self._first_group = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self._columns = [
            _Placed(field, [shard.columns[c] for shard in shards])
            for c, field in enumerate(self.fields)
        ]
        self._places: dict[tuple[int, int], array[int]] = {}
        self._maps: list[memoryview | None] = [None] * len(shards)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    def samples(self, positions: Sequence[int] | np.ndarray) -> list[Any]:
        """Return several samples. They do not share memory."""
        shards, groups, rows = (part.tolist() for part in self._locate(positions))
        return [
            self.build([self._leaf(column, shard, group, row) for column in self._columns])
            for shard, group, row in zip(shards, groups, rows, strict=True)
        ]

    def batch(self, positions: Sequence[int] | np.ndarray) -> Any:
        """Return a batch like torch's default_collate, but copy each sample only once."""
        where = self._locate(positions)
        return self.build([self._gather(column, where) for column in self._columns])

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

    def _gather(self, column: _Placed, where: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Any:
        field, n = column.field, len(where[0])
        shapes = {column.shapes[shard] for shard in set(where[0].tolist())}
        varies = len(shapes) > 1 or None in shapes
        if field.kind == "image" or (varies and field.kind not in ("int", "float", "bool")):
            places = zip(*(part.tolist() for part in where), strict=True)
            return torch_collate([self._leaf(column, *place) for place in places])
        width = column.widths[int(where[0][0])]
        # numpy requests huge pages. With torch.empty, page faults took half of the time.
        out = torch.from_numpy(np.empty(n * width, dtype=np.uint8))
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
