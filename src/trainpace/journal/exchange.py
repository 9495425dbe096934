"""Records written to files and read back, and what every importer needs: facts from the user, ids from content, precisions.

JSON, CSV and Parquet hold every record whole; the tables add columns for people.
JSON is a list with one record per line, so that long files are written and read line by line. The tables have the
columns that ``trainpace validate`` reads and a column `record`, from which they are imported.
"""

import csv
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from trainpace.core.catalogue_reader import catalogue_name
from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.core.execution import PRECISIONS, Precision
from trainpace.core.intake import first_bytes, opened_text
from trainpace.core.records import to_json, written_aside
from trainpace.forecast import read_table
from trainpace.journal.entry import Entry, Sweep, content_id, now_utc, printable
from trainpace.journal.identity import anonymous_entry

ROWS_AT_ONCE = 10_000

_TEXTS = (
    "id created_at kind outcome model_spec model gpu precision memory_format compile optimizer"
    " parallelism mode notes file"
).split()
_COUNTS = "num_gpus num_nodes batch_per_gpu global_batch grad_accum seq_len img_size".split()
_NUMBERS = (
    "step_time_ms step_time_ms_low step_time_ms_high samples_per_sec peak_mem_gib reserved_mem_gib"
    " forecast_ms forecast_low_ms forecast_high_ms"
).split()
COLUMNS = (*_TEXTS, *_COUNTS, *_NUMBERS, "record")

UNKNOWN = "unknown"
"""A condition that the source does not state. It is not guessed, because forecasts would use the guess."""
PRECISION_NAMES: dict[str, Precision] = {
    **{name: name for name in PRECISIONS},
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "no": "fp32",
    "16": "amp_fp16",
    "16-mixed": "amp_fp16",
    "amp": "amp_fp16",
    "bf16-mixed": "amp_bf16",
    "16-true": "fp16",
    "float16": "fp16",
    "bf16-true": "bf16",
    "bfloat16": "bf16",
}
"""Precisions by the names that timm, Lightning and torch give them."""


def export(path: Path, records: Iterable[Entry | Sweep]) -> int:
    """Write records to FILE.json, .csv or .parquet, whole or not at all; returns their number. Holds a few thousand in memory."""
    writers = {".json": _write_json, ".csv": _write_csv, ".parquet": _write_parquet}
    write = writers.get(path.suffix.lower())
    if write is None:
        raise TrainpaceError(
            f"{path.name} is not the name of an export.", "End it in .parquet, .csv or .json."
        )
    count = 0

    def counted() -> Iterator[Entry | Sweep]:
        nonlocal count
        for record in records:
            count += 1
            yield record

    with written_aside(path) as aside:
        write(aside, counted())
    return count


def columns_of(record: Entry | Sweep) -> dict[str, Any]:
    """The columns of a record; of a sweep only its head and the record."""
    if isinstance(record, Sweep):
        return {
            "id": record.id,
            "created_at": record.created_at,
            "kind": "sweep",
            "record": to_json(record),
        }
    e, x = record, record.execution
    return {
        **{name: getattr(e, name) for name in COLUMNS if name in e.__struct_fields__},
        "model_spec": e.model,
        "gpu": e.device,
        "precision": x.precision,
        "optimizer": x.optimizer,
        "memory_format": "nhwc" if x.channels_last else "nchw",
        "compile": "compile" if x.compile else "eager",
        "parallelism": (
            f"dp={x.data_parallel_size},tp={x.tp},pp={x.pp},cp={x.cp},zero={x.zero_stage}"
            + (f",ac={x.activation_checkpointing}" if x.activation_checkpointing != "none" else "")
        ),
        "file": e.source,
        "num_gpus": e.num_devices,
        "num_nodes": x.nnodes,
        "batch_per_gpu": x.micro_batch,
        "global_batch": x.global_batch,
        "grad_accum": x.accumulation,
        "seq_len": e.sequence_length,
        "img_size": e.image_size,
        "step_time_ms_low": e.interval_ms.low if e.interval_ms else None,
        "step_time_ms_high": e.interval_ms.high if e.interval_ms else None,
        "samples_per_sec": e.samples_per_second,
        "peak_mem_gib": e.peak_memory_gib,
        "reserved_mem_gib": e.reserved_memory_gib,
        "record": to_json(e),
    }


def read_json_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, or one object; a list with one object per line is read line by line.

    Raises UnreadableInput for anything else.
    """
    try:
        with opened_text(path) as file:
            first, second = file.readline().strip(), file.readline().rstrip(",\n")
            file.seek(0)
            if first == "[" and second.startswith('{"record":') and second.endswith("}"):
                items: Iterable[Any] = _lines(path, file)
            else:
                whole = json.loads(file.read())
                items = whole if isinstance(whole, list) else [whole]
            for item in items:
                if not isinstance(item, dict):
                    raise UnreadableInput(f"{path} does not hold JSON objects.")
                yield item
    except OSError as error:
        raise UnreadableInput(f"cannot read {path}: {os_reason(error)}.") from None
    except UnreadableInput:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not valid JSON ({str(error)[:200]}).") from None


def _lines(path: Path, file: TextIO) -> Iterator[Any]:
    """The objects of a list as `_write_json` writes it."""
    closed = False
    for line in itertools.islice(file, 1, None):
        if closed and line.strip():
            raise UnreadableInput(f"{path} goes on after its list.")
        closed = closed or line.strip() == "]"
        if line.strip() and not closed:
            yield json.loads(line.strip().removesuffix(","))
    if not closed:
        raise UnreadableInput(f"{path} ends in the middle of its list.")


def _write_json(path: Path, records: Iterable[Entry | Sweep]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        for i, record in enumerate(records):
            file.write((",\n" if i else "\n") + to_json(record))
        file.write("\n]\n")


def _write_csv(path: Path, records: Iterable[Entry | Sweep]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)  # its \r\n is what makes it quote a lone \r
        writer.writeheader()
        writer.writerows(map(columns_of, records))


def _write_parquet(path: Path, records: Iterable[Entry | Sweep]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TrainpaceError(
            "writing Parquet needs pyarrow.", "pip install pyarrow, or export JSON or CSV."
        ) from None
    kinds = (
        dict.fromkeys(_TEXTS, pa.string())
        | dict.fromkeys(_COUNTS, pa.int64())
        | dict.fromkeys(_NUMBERS, pa.float64())
    )
    schema = pa.schema([*kinds.items(), ("record", pa.string())])
    rows = map(columns_of, records)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(chunk, schema))


class Skipped(NamedTuple):
    """Content of a file that is not a run, and the reason."""

    reason: str


class Given(NamedTuple):
    """Facts that the user adds where a file does not state them, whether names and paths are stored as they are, and whether
    shared runs are taken that are far off their forecast."""

    device: str = ""
    precision: Precision | None = None
    keep_identity: bool = False
    accept_odd: bool = False


Item = Entry | Sweep | Skipped


def content_ids() -> Callable[[Any], str]:
    """A function that makes ids from JSON-serialisable content: reading a file again gives the same ids, and two equal rows
    of one file are two runs."""
    counts: Counter[str] = Counter()

    def id_of(content: Any) -> str:
        text = json.dumps(content, sort_keys=True, default=str, ensure_ascii=True)
        counts[text] += 1
        return content_id(text if counts[text] == 1 else f"{text}#{counts[text]}")

    return id_of


def imported(given: Given, id_: str, device: str, **fields: Any) -> Entry:
    """The entry of an imported run, as it is stored. `device`: its name in the source, "" where there is none."""
    device = catalogue_name(printable(device)) if device else ""
    defaults = {"created_at": now_utc(), "outcome": "ok"}
    entry = Entry(id=id_, kind="import", device=device or UNKNOWN, **defaults | fields)
    return entry if given.keep_identity else anonymous_entry(entry)


def run_or_reason(run_of: Callable[..., Entry], *arguments: Any) -> Item:
    """The run that `run_of` makes of its arguments, or the reason why it is skipped."""
    try:
        return run_of(*arguments)
    except TrainpaceError as error:
        return Skipped(error.message)


def columns_and_rows(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """A table's columns, and an iterator over its rows. Raises UnreadableInput for a file that is not a table."""
    if first_bytes(path).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"[", b"{"):
        return read_table(path)
    rows = read_json_records(path)
    first = next(rows, None)
    return ([], iter(())) if first is None else (list(first), itertools.chain([first], rows))
