"""File format of precomputed folders, and conversion of samples to columns.

A folder has a plan, shards with one record each, and a manifest. A shard is an uncompressed Parquet
file, which is written completely or not at all. Arrays are binary columns, because FixedShapeTensor
would widen uint8 to int32.

A reader can map the values into memory. With plain encoding, no nulls and one page per column
chunk, a chunk is a page header followed by the values without gaps. So any sample is a slice of the
file. Source: parquet-format, Encodings.md.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError, UserCodeError, message_of
from trainpace.core.records import Record, load, save

PLAN, MANIFEST, BAD_SAMPLES = "plan.json", "manifest.json", "bad_samples.jsonl"
MOST_SHARDS = 1_000_000
"""Maximum number of shards in a folder.

If a dataset needs more, its `__len__` is wrong or it needs larger shards.
"""
SHARD_BYTES = 64 * 2**20
GROUP_BYTES = 2**20
_SHARDS_A_WORKER = 16
MOST_GROUP_SAMPLES = 1000


class Fingerprint(Record):
    """Fingerprint of the inputs that determine the content of shards.

    Attributes:
        code: Hashes of the user's source files.
        source: Number of samples, settings of the dataset, and size and modification time of the
            files that it opens.
    """

    code: dict[str, str]
    source: dict[str, str]

    def differences(self, now: Fingerprint) -> list[str]:
        """Return a phrase for each difference between this fingerprint and the current one."""
        changes = []
        for what in ("code", "source"):
            then, today = getattr(self, what), getattr(now, what)
            for name in sorted(then.keys() | today.keys()):
                if name not in then:
                    changes.append(f"{name} is new")
                elif name not in today:
                    changes.append(f"{name} is gone")
                elif then[name] != today[name]:
                    changes.append(f"{name} has changed")
        return changes


class BadSample(Record):
    """Sample that could not be computed, with its index in the source and the reason."""

    index: int
    reason: str


class Column(Record):
    """Place of one field's values in a shard.

    Attributes:
        starts: File offset of the values in each row group.
        width: Bytes per sample, or 0 if samples have different sizes.
        shape: Shape of every sample, or None if shapes differ. The column `NAME.shape` then has
            the shapes.
        shape_starts: File offset of the shapes in each row group.
    """

    starts: tuple[int, ...]
    width: int
    shape: tuple[int, ...] | None = None
    shape_starts: tuple[int, ...] = ()


class Shard(Record):
    """Record of a finished shard (a Parquet file).

    The shard contains the samples `first` to `stop` (not included) of the source, without the bad
    samples.
    """

    number: int
    first: int
    stop: int
    samples: int
    file_bytes: int
    crc32: int
    group_rows: int
    columns: tuple[Column, ...] = ()
    bad: tuple[BadSample, ...] = ()


class ShardPlan(Record):
    """Division of a dataset into shards. It is decided once for a folder.

    `probe_*` are measurements of the inspected samples.
    """

    target: str
    samples: int
    shard_samples: int
    group_rows: int
    layout: Layout
    fingerprint: Fingerprint
    probe_bytes: float

    def __post_init__(self) -> None:
        if not 0 < self.samples <= MOST_SHARDS * self.shard_samples or self.group_rows < 1:
            raise TrainpaceError(
                f"{self.samples:,} samples are not cut into shards of {self.shard_samples:,}; a"
                f" folder has 1 to {MOST_SHARDS:,}."
            )

    @property
    def shards(self) -> int:
        return math.ceil(self.samples / self.shard_samples)

    def range_of(self, number: int) -> range:
        return range(
            number * self.shard_samples, min((number + 1) * self.shard_samples, self.samples)
        )

    def part(self, part: int, parts: int) -> range:
        """Return the numbers of the shards in one part.

        `part` counts from 0. The parts are disjoint and together contain all shards.
        """
        return range(part, self.shards, parts)


class Manifest(Record):
    """Manifest of a finished folder: its plan and all its shards, in the order of the source."""

    plan: ShardPlan
    shards: tuple[Shard, ...]


def shard_sizes(
    samples: int, sample_bytes: float, workers: int, shard_samples: int | None = None
) -> tuple[int, int]:
    """Return (samples per shard, samples per row group).

    The targets are 64 MiB per shard and 1 MiB per row group. There are enough shards that all
    workers finish at about the same time.
    """
    sample_bytes = max(sample_bytes, 1.0)
    fitting = round(GROUP_BYTES / sample_bytes)
    groups = max(1, min(MOST_GROUP_SAMPLES, fitting))
    if shard_samples is None:
        balanced = math.ceil(samples / (_SHARDS_A_WORKER * workers))
        shard_samples = max(1, min(round(SHARD_BYTES / sample_bytes), balanced, 100_000))
        if shard_samples > groups:
            shard_samples = math.ceil(shard_samples / groups) * groups
    return shard_samples, min(groups, shard_samples)


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.parquet"


def shard_record(folder: Path, number: int) -> Path:
    """Return the path of a shard's record.

    The record is written after the shard, so a shard with a record is finished.
    """
    return folder / f"shard-{number:06d}.json"


def part_of(stated: str | None) -> tuple[int, int]:
    """Return (index of the part from 0, number of parts).

    ``2/8`` means the second of eight parts and gives (1, 8). None is the whole, (0, 1).
    """
    part, _, parts = (stated or "1/1").partition("/")
    if not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
        raise TrainpaceError(f"{stated!r} is not a valid part.", "Write I/N, from 1/N to N/N.")
    return int(part) - 1, int(parts)


INDEX = "__index__"
"""Name of the column with each sample's index in the source."""
_LONGEST_HEADER = 200
_READ_BYTES = 2**20


def import_pyarrow() -> Any:
    """Return the pyarrow module.

    Raises:
        TrainpaceError: If pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError(
            "writing shards needs pyarrow.", "pip install 'trainpace[data]'."
        ) from None
    return pyarrow


def write_shard(
    folder: Path,
    plan: ShardPlan,
    number: int,
    samples: Sequence[tuple[int, Encoded]],
    bad: Sequence[BadSample],
) -> Shard:
    """Write samples as one shard, then write its record.

    The shard is written to a temporary file, synchronized to disk, and renamed, so that it is never
    incomplete.

    Args:
        folder: Folder of the shards.
        plan: Plan of the folder.
        number: Number of the shard.
        samples: Pairs of (index in the source, sample).
        bad: Bad samples of the shard.
    """
    pa = import_pyarrow()
    covered, target = plan.range_of(number), shard_file(folder, number)
    columns = [_Column(pa, field, i, samples) for i, field in enumerate(plan.layout.fields)]
    parts = [part for column in columns for part in column.parts]
    parts.append(_Plain(pa, INDEX, pa.int64(), [i for i, _ in samples]))
    schema = pa.schema([part.arrow for part in parts])
    aside = folder / f".{target.name}.{os.getpid()}"
    try:
        with pa.parquet.ParquetWriter(
            aside,
            schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=2**30,
        ) as writer:
            for start in range(0, len(samples), plan.group_rows):
                rows = slice(start, start + plan.group_rows)
                arrays = [part.rows(rows) for part in parts]
                writer.write_table(
                    pa.Table.from_arrays(arrays, schema=schema), row_group_size=plan.group_rows
                )
        file_bytes, crc32 = _sum(aside, to_disk=True)
        starts = _starts(pa.parquet.read_metadata(aside), parts, plan.group_rows)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    shard = Shard(
        number=number,
        first=covered.start,
        stop=covered.stop,
        samples=len(samples),
        file_bytes=file_bytes,
        crc32=crc32,
        group_rows=plan.group_rows,
        columns=tuple(column.place(starts) for column in columns),
        bad=tuple(bad),
    )
    save(shard, shard_record(folder, number))
    return shard


def finished_shard(folder: Path, number: int) -> Shard | None:
    """Return the record of a shard if its file is complete, or None if it must be computed."""
    try:
        shard = load(shard_record(folder, number), Shard)
        return shard if shard_file(folder, number).stat().st_size == shard.file_bytes else None
    except (TrainpaceError, OSError):
        return None


def damage(folder: Path, shard: Shard) -> str:
    """Read every byte of a shard's file. Describe the damage, or return "" if there is none."""
    path = shard_file(folder, shard.number)
    try:
        size, crc32 = _sum(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if size != shard.file_bytes:
        return f"cut or extended: {size:,} bytes instead of {shard.file_bytes:,}"
    return "" if crc32 == shard.crc32 else "changed: its checksum is not the one written"


def _sum(path: Path, to_disk: bool = False) -> tuple[int, int]:
    """Return (size in bytes, CRC-32) of a file. If `to_disk` is True, synchronize it to disk."""
    with open(path, "r+b" if to_disk else "rb") as file:
        size = crc32 = 0
        while block := file.read(_READ_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
        if to_disk:
            os.fsync(file.fileno())
    return size, crc32


class _Plain:
    """Parquet column with one value per sample."""

    def __init__(self, pa: Any, name: str, kind: Any, values: list[Any]) -> None:
        self.pa, self.values = pa, values
        self.arrow = pa.field(name, kind, nullable=False)
        self.width = (
            0 if pa.types.is_binary(kind) or pa.types.is_string(kind) else kind.bit_width // 8
        )

    def rows(self, rows: slice) -> Any:
        chosen = self.values[rows]
        if self.pa.types.is_fixed_size_binary(self.arrow.type):
            buffer = self.pa.py_buffer(b"".join(chosen))
            return self.pa.FixedSizeBinaryArray.from_buffers(
                self.arrow.type, len(chosen), [None, buffer]
            )
        return self.pa.array(chosen, self.arrow.type)

    def value_bytes(self, rows: slice) -> int:
        """Return the size of these rows in plain encoding, in bytes.

        A value of variable length has four extra bytes for its length.
        """
        if self.width:
            return self.width * len(self.values[rows])
        return sum(4 + len(v.encode() if isinstance(v, str) else v) for v in self.values[rows])


_ARROW = {"int": "int64", "float": "float64", "bool": "int32", "str": "string"}
"""Parquet types of values. All other kinds are binary."""


class _Column:
    """Parquet columns of a field: its values and, if shapes differ, its shapes."""

    def __init__(
        self, pa: Any, field: Field, i: int, samples: Sequence[tuple[int, Encoded]]
    ) -> None:
        self.field, self.shape = field, None
        values, shapes = [e.values[i] for _, e in samples], [e.shapes[i] for _, e in samples]
        # Parquet does not support binary values with a fixed length of 0.
        if field.kind in SHAPED and len(set(shapes)) == 1 and values[0]:
            self.shape = shapes[0]
        arrow = getattr(pa, _ARROW.get(field.kind, "binary"))
        kind = arrow() if self.shape is None else pa.binary(len(values[0]))
        if field.kind == "bool":
            values = [int(value) for value in values]
        self.parts = [_Plain(pa, field.name, kind, values)]
        if field.kind in SHAPED and self.shape is None:
            packed = [struct.pack(f"<{len(shape or ())}i", *(shape or ())) for shape in shapes]
            self.parts.append(_Plain(pa, f"{field.name}.shape", pa.binary(), packed))

    def place(self, starts: dict[_Plain, tuple[int, ...]]) -> Column:
        value, *shape = self.parts
        shape_starts = starts[shape[0]] if shape else ()
        return Column(
            starts=starts[value], width=value.width, shape=self.shape, shape_starts=shape_starts
        )


def _starts(
    metadata: Any, parts: Sequence[_Plain], group_rows: int
) -> dict[_Plain, tuple[int, ...]]:
    """Return for each column the file offsets of its values, one per row group."""

    def start(group: int, column: int, part: _Plain) -> int:
        chunk = metadata.row_group(group).column(column)
        rows = slice(group * group_rows, (group + 1) * group_rows)
        header: int = chunk.total_compressed_size - part.value_bytes(rows)
        assert 0 < header < _LONGEST_HEADER, (
            "a column chunk is one page with a header of a few dozen bytes"
        )
        return int(chunk.data_page_offset) + header

    groups = range(metadata.num_row_groups)
    return {part: tuple(start(g, c, part) for g in groups) for c, part in enumerate(parts)}


Kind = Literal["tensor", "array", "scalar", "image", "int", "float", "bool", "str", "bytes"]
SHAPED = frozenset({"tensor", "array", "scalar", "image"})
"""Kinds of fields with a shape, which is needed to decode their bytes."""

_INT64 = range(-(2**63), 2**63)
_PLAIN = (bool, int, float, str, bytes)


class UnsupportedSample(ValueError):
    """Error for a sample with a part that a column cannot store."""


class Field(Record):
    """Field of a sample. `dtype` is the name of the torch or numpy dtype, or the image mode."""

    name: str
    kind: Kind
    dtype: str = ""


class Layout(Record):
    """Layout that all samples share.

    `structure` is the nesting of tuples, lists and dicts as JSON, and `fields` are its leaves.
    """

    structure: str
    fields: tuple[Field, ...]

    def builder(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that builds a sample or a batch from the values of its fields."""
        return partial(_built, json.loads(self.structure))


class Encoded(NamedTuple):
    """Sample as a list of bytes or plain values, with a shape for each value that has one."""

    layout: Layout
    values: list[Any]
    shapes: list[tuple[int, ...] | None]

    @property
    def size_bytes(self) -> int:
        return sum(len(v) if isinstance(v, bytes | str) else 8 for v in self.values)


def encode(sample: Any, layout: Layout | None = None) -> Encoded:
    """Convert a sample to values of columns. Bytes are copied, so a dataset may reuse its buffers.

    Args:
        sample: Sample of the user's dataset.
        layout: Layout of the other samples, if known.

    Raises:
        UnsupportedSample: If the sample has another layout, or contains None, objects or sparse
            tensors.
    """
    leaves: list[tuple[str, Any]] = []
    structure = _take_apart(sample, "", leaves)
    fields, values, shapes = [], [], []
    for name, leaf in leaves:
        kind, dtype, value, shape = _encode_leaf(spoken(name), leaf)
        fields.append(Field(name=name, kind=kind, dtype=dtype))
        values.append(value)
        shapes.append(shape)
    if layout is None:
        names = [name for name, _ in leaves]
        if not names:
            raise UnsupportedSample("the sample is empty")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise UnsupportedSample(f"two parts of the sample have the name {twice!r}")
        layout = Layout(structure=json.dumps(structure), fields=tuple(fields))
    elif tuple(fields) != layout.fields or json.dumps(structure) != layout.structure:
        raise UnsupportedSample(_difference(fields, layout.fields))
    return Encoded(layout, values, shapes)


def differing_columns(a: Encoded, b: Encoded) -> list[str]:
    """Return the names of the columns with any difference between two encodings of a sample."""
    if a.layout != b.layout:
        return [f.name for f in a.layout.fields]
    return [
        f.name
        for f, x, y, s, t in zip(
            a.layout.fields, a.values, b.values, a.shapes, b.shapes, strict=True
        )
        if s != t or repr(x) != repr(y)
    ]


def spoken(name: str) -> str:
    """Return a column's name for use in a sentence, such as "part 0" for items of a tuple."""
    return f"part {name}" if name[:1].isdigit() else name


def _take_apart(value: Any, name: str, leaves: list[tuple[str, Any]]) -> Any:
    """Append the leaves of a sample to `leaves`, and return its nesting.

    In the nesting, the number of its column represents a leaf.
    """
    pairs: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UnsupportedSample(f"{name or 'the sample'} is a dict whose keys are not all text")
        head, pairs = ["dict", list(value)], list(value.items())
    elif isinstance(value, tuple | list):
        head, pairs = ["tuple" if isinstance(value, tuple) else "list"], list(enumerate(value))
    else:
        leaves.append((name or "sample", value))
        return len(leaves) - 1
    return head + [_take_apart(part, _within(name, key), leaves) for key, part in pairs]


def _within(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _built(node: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    kind, *parts = node
    if kind == "dict":
        keys, *parts = parts
        return {key: _built(part, leaves) for key, part in zip(keys, parts, strict=True)}
    values = [_built(part, leaves) for part in parts]
    return tuple(values) if kind == "tuple" else values


def _encode_leaf(name: str, leaf: Any) -> tuple[Kind, str, Any, tuple[int, ...] | None]:
    # Do not import torch or PIL: a worker without them starts a second sooner. If the user's code
    # has not imported them, the sample cannot contain their types.
    torch, image = sys.modules.get("torch"), sys.modules.get("PIL.Image")
    if torch is not None and isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided:
            raise UnsupportedSample(f"{name} is a sparse tensor")
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        dtype = str(leaf.dtype).removeprefix("torch.")
        return "tensor", dtype, flat.view(torch.uint8).numpy().tobytes(), tuple(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind not in "biufc":
            raise UnsupportedSample(f"{name} is an array of dtype {leaf.dtype}")
        kind: Kind = "array" if isinstance(leaf, np.ndarray) else "scalar"
        return kind, leaf.dtype.str, leaf.tobytes(), leaf.shape
    if image is not None and isinstance(leaf, image.Image):
        if leaf.mode not in ("L", "RGB", "RGBA", "I", "F"):
            raise UnsupportedSample(
                f"{name} is an image of mode {leaf.mode}. Convert it to RGB or L"
            )
        pixels = np.asarray(leaf)
        return "image", leaf.mode, pixels.tobytes(), pixels.shape
    return _encode_plain(name, leaf)


def _encode_plain(name: str, leaf: Any) -> tuple[Kind, str, Any, None]:
    if isinstance(leaf, int) and leaf not in _INT64:
        raise UnsupportedSample(f"{name} is an integer beyond 64 bits")
    for kind in _PLAIN:
        if isinstance(leaf, kind):
            return kind.__name__, "", kind(leaf), None  # type: ignore[return-value, arg-type]
    raise UnsupportedSample(f"{name} is a {type(leaf).__name__}, which no column can hold")


def _difference(fields: Sequence[Field], expected: Sequence[Field]) -> str:
    for one, other in zip(fields, expected, strict=False):
        if (one.kind, one.dtype) != (other.kind, other.dtype):
            usual = f"{other.kind} {other.dtype}".rstrip()
            return (
                f"{spoken(one.name)} is {one.kind} {one.dtype}".rstrip()
                + f", in the other samples {usual}"
            )
    return (
        f"it has {len(fields)} parts in another arrangement than the other samples, which have"
        f" {len(expected)}; make lists of different lengths arrays or tensors"
    )


def spread(count: int, total: int) -> Sequence[int]:
    """Return `count` indices spread evenly over range(total), or all if `total` is smaller."""
    if total <= count:
        return range(total)
    return [i * (total - 1) // max(count - 1, 1) for i in range(count)]


def timed_samples(
    dataset: Any, indices: Sequence[int], seconds: float
) -> Iterator[tuple[int, Encoded, float]]:
    """Yield (index, sample, seconds to compute it) until the time limit. Bad samples are skipped.

    Raises:
        UserCodeError: If no sample can be computed.
    """
    layout, reason = None, ""
    deadline = time.perf_counter() + seconds
    for index in indices:
        start = time.perf_counter()
        try:
            sample = dataset[index]
            spent = time.perf_counter() - start
            encoded = encode(sample, layout)
        except Exception as error:
            reason = f"sample {index}: {reason_of(error)}"
            continue
        layout = encoded.layout
        yield index, encoded, spent
        if time.perf_counter() > deadline:
            return
    if layout is None:
        raise UserCodeError(
            f"not one of {len(indices)} samples looked at could be computed ({reason})."
        )


def reason_of(error: Exception) -> str:
    """Return the reason why a sample is bad, in one line."""
    text = message_of(error)
    return text if isinstance(error, UnsupportedSample) else f"{type(error).__name__}: {text}"
