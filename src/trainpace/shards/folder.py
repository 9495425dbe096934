"""One shard: an uncompressed Parquet file whose values lie where a reader can map them, written whole or not at all.

Arrays are binary columns (FixedShapeTensor would widen uint8 to int32). With plain encoding, no nulls and one page a column
chunk, a chunk is its page header and then the values, end to end: any sample is a slice of the file, at the speed of
np.memmap, while every Parquet reader can read it as well. Source: parquet-format, Encodings.md (PLAIN).
"""

import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.records import load, save
from trainpace.shards.plan import BadSample, Column, Shard, ShardPlan, shard_file, shard_record
from trainpace.shards.samples import SHAPED, Encoded, Field

INDEX = "__index__"
"""Column with each sample's index in the source."""
_LONGEST_HEADER = 200
_READ_BYTES = 2**20


def import_pyarrow() -> Any:
    """The pyarrow module. Raises TrainpaceError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError("writing shards needs pyarrow.", "pip install 'trainpace[data]'.") from None
    return pyarrow


def write_shard(
    folder: Path, plan: ShardPlan, number: int, samples: Sequence[tuple[int, Encoded]], bad: Sequence[BadSample]
) -> Shard:
    """Write `samples` (index in the source, sample) as shard `number`: aside, to the disk, renamed; then its record."""
    pa = import_pyarrow()
    covered, target = plan.range_of(number), shard_file(folder, number)
    columns = [_Column(pa, field, i, samples) for i, field in enumerate(plan.layout.fields)]
    index = _Plain(pa, INDEX, pa.int64(), [i for i, _ in samples])
    parts = [part for column in columns for part in column.parts] + [index]
    about = {
        "schema_version": 1, "structure": plan.layout.structure, "first": covered.start, "stop": covered.stop,
        "samples": len(samples), "bad": [b.index for b in bad],
        "fields": [{"name": c.field.name, "kind": c.field.kind, "dtype": c.field.dtype, "shape": c.shape} for c in columns],
        "fingerprint": {"code": plan.fingerprint.code, "packages": plan.fingerprint.packages, "source": plan.fingerprint.source},
    }  # fmt: skip
    schema = pa.schema([part.arrow for part in parts], metadata={"trainpace": json.dumps(about)})
    aside = folder / f".{target.name}.{os.getpid()}"
    try:
        with pa.parquet.ParquetWriter(
            aside, schema, compression="none", use_dictionary=False, write_statistics=False, data_page_size=2**30,
        ) as writer:  # fmt: skip
            for start in range(0, len(samples), plan.group_rows):
                rows = slice(start, start + plan.group_rows)
                arrays = [part.rows(rows) for part in parts]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=plan.group_rows)
        file_bytes, crc32 = _sum(aside, to_disk=True)
        starts = _starts(pa.parquet.read_metadata(aside), parts, plan.group_rows)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    shard = Shard(
        number=number, first=covered.start, stop=covered.stop, samples=len(samples), file_bytes=file_bytes, crc32=crc32,
        group_rows=plan.group_rows, columns=tuple(column.place(starts) for column in columns),
        index_starts=starts[index], bad=tuple(bad),
    )  # fmt: skip
    save(shard, shard_record(folder, number))
    return shard


def finished_shard(folder: Path, number: int) -> Shard | None:
    """The record of a shard whose file is there in its full length; None where it has to be computed."""
    try:
        shard = load(shard_record(folder, number), Shard)
        return shard if shard_file(folder, number).stat().st_size == shard.file_bytes else None
    except (TrainpaceError, OSError):
        return None


def damage(folder: Path, shard: Shard) -> str:
    """The problem with a shard's file, after reading every byte of it; "" where there is none."""
    path = shard_file(folder, shard.number)
    try:
        size, crc32 = _sum(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if size < shard.file_bytes:
        return f"truncated: {size:,} of {shard.file_bytes:,} bytes"
    if size > shard.file_bytes:
        return f"longer than written: {size:,} in place of {shard.file_bytes:,} bytes"
    return "" if crc32 == shard.crc32 else "changed: its checksum is another than when it was written"


def _sum(path: Path, to_disk: bool = False) -> tuple[int, int]:
    """(bytes, CRC-32) of a file, `to_disk` only once they are on the disk."""
    with open(path, "r+b" if to_disk else "rb") as file:
        size = crc32 = 0
        while block := file.read(_READ_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
        if to_disk:
            os.fsync(file.fileno())
    return size, crc32


class _Plain:
    """A Parquet column with one value a sample."""

    def __init__(self, pa: Any, name: str, kind: Any, values: list[Any]) -> None:
        self.pa, self.values = pa, values
        self.arrow = pa.field(name, kind, nullable=False)
        self.width = 0 if pa.types.is_binary(kind) or pa.types.is_string(kind) else kind.bit_width // 8

    def rows(self, rows: slice) -> Any:
        chosen = self.values[rows]
        if self.pa.types.is_fixed_size_binary(self.arrow.type):
            buffer = self.pa.py_buffer(b"".join(chosen))
            return self.pa.FixedSizeBinaryArray.from_buffers(self.arrow.type, len(chosen), [None, buffer])
        return self.pa.array(chosen, self.arrow.type)

    def value_bytes(self, rows: slice) -> int:
        """Bytes of these rows in plain encoding: four more than its own for a value of any length."""
        if self.width:
            return self.width * len(self.values[rows])
        return sum(4 + len(v.encode() if isinstance(v, str) else v) for v in self.values[rows])


class _Column:
    """A field's Parquet columns: its values and, where shapes differ, its shapes."""

    def __init__(self, pa: Any, field: Field, i: int, samples: Sequence[tuple[int, Encoded]]) -> None:
        self.field = field
        values, shapes = [e.values[i] for _, e in samples], {e.shapes[i] for _, e in samples}
        if field.kind == "bool":
            values = [int(value) for value in values]
        # Parquet has no binary values of a fixed length of nothing
        fixed = field.kind in SHAPED and len(shapes) == 1 and len(values[0]) > 0
        self.shape = next(iter(shapes)) if fixed else None
        plain = {"int": pa.int64(), "float": pa.float64(), "bool": pa.int32(), "str": pa.string(), "bytes": pa.binary()}
        kind = plain.get(field.kind) or (pa.binary(len(values[0])) if self.shape is not None else pa.binary())
        self.parts = [_Plain(pa, field.name, kind, values)]
        if field.kind in SHAPED and self.shape is None:
            written = [struct.pack(f"<{len(e.shapes[i] or ())}i", *(e.shapes[i] or ())) for _, e in samples]
            self.parts.append(_Plain(pa, f"{field.name}.shape", pa.binary(), written))

    def place(self, starts: dict[_Plain, tuple[int, ...]]) -> Column:
        value, *shape = self.parts
        shape_starts = starts[shape[0]] if shape else ()
        return Column(starts=starts[value], width=value.width, shape=self.shape, shape_starts=shape_starts)


def _starts(metadata: Any, parts: Sequence[_Plain], group_rows: int) -> dict[_Plain, tuple[int, ...]]:
    """File offsets of the values of every row group, by column."""

    def start(group: int, column: int, part: _Plain) -> int:
        chunk = metadata.row_group(group).column(column)
        rows = slice(group * group_rows, (group + 1) * group_rows)
        header: int = chunk.total_compressed_size - part.value_bytes(rows)
        assert 0 < header < _LONGEST_HEADER, "a column chunk is one page with a header of a few dozen bytes"
        return int(chunk.data_page_offset) + header

    groups = range(metadata.num_row_groups)
    return {part: tuple(start(g, c, part) for g in groups) for c, part in enumerate(parts)}
