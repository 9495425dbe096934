"""Read single samples and whole batches from shards by position, straight from the mapped files."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainpace.core.errors import UnreadableInput, os_reason
from trainpace.core.records import load
from trainpace.shards.files import MANIFEST, PLAN, Column, Manifest, shard_file
from trainpace.shards.samples import SHAPED, Field, spoken

Allocate = Callable[[int], torch.Tensor]
"""Makes a uint8 tensor of so many bytes."""


class ShardReader:
    """The samples of a finished folder by position: 0 to `len` - 1, in the order of the source without its bad samples.

    Maps a shard's file when it is first needed; a copy in another process maps for itself. What is returned is a copy: it
    may be changed in place.
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
        """Several samples that share no memory."""
        shards, groups, rows = (part.tolist() for part in self._locate(positions))
        return [
            self.build([self._leaf(column, shard, group, row) for column in self._columns])
            for shard, group, row in zip(shards, groups, rows, strict=True)
        ]

    def batch(self, positions: Sequence[int] | np.ndarray, allocate: Allocate) -> Any:
        """What torch's default_collate makes of these samples, each copied once, to its place in the batch."""
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
        """(shard, row group over all shards, row within it)."""
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
                f"{spoken(field.name)} is a picture, and a batch holds tensors.",
                "Give a transform that makes one of it.",
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
        """A value of any length: its length stands in the four bytes before it, so a row group is walked once."""
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
            except (FileNotFoundError, ValueError):  # mmap's word for an empty file
                whole = None
            except OSError as error:
                raise UnreadableInput(f"{path} cannot be read: {os_reason(error)}.") from None
            if whole is None or len(whole) != record.file_bytes:
                raise UnreadableInput(
                    f"{path} is {'not as long as it was written' if path.exists() else 'missing'}.",
                    f"Mend it: trainpace precompute --repair --out {self.folder}.",
                )
            mapped = self._maps[shard] = memoryview(whole)
        return mapped


class _Placed:
    """Where one field's values lie in all shards, and how they are read."""

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
        kind = self.field.kind
        if kind == "tensor":
            flat = (
                torch.frombuffer(raw, dtype=self.torch_dtype)
                if raw
                else torch.empty(0, dtype=self.torch_dtype)
            )
            return flat.reshape(shape or ())
        if kind in ("array", "scalar"):
            values = np.frombuffer(raw, dtype=self.field.dtype)
            return values.reshape(shape or ()) if kind == "array" else values[0]
        if kind == "image":
            from PIL import Image

            assert shape is not None
            return Image.frombytes(self.field.dtype, (shape[1], shape[0]), bytes(raw))
        if kind == "int":
            return int.from_bytes(raw, "little", signed=True)
        if kind == "float":
            return struct.unpack("<d", raw)[0]
        if kind == "bool":
            return raw != b"\0\0\0\0"
        return raw.decode() if kind == "str" else bytes(raw)


def _torch_dtype(field: Field) -> torch.dtype:
    if field.kind == "tensor":
        dtype: torch.dtype = getattr(torch, field.dtype)
        return dtype
    if field.kind in ("array", "scalar"):
        return torch.from_numpy(np.empty(0, np.dtype(field.dtype).newbyteorder("="))).dtype
    return torch.float64 if field.kind == "float" else torch.int64
