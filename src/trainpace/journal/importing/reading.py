"""Helpers of all importers: items, ids made from content, and tables in CSV, Parquet or JSON."""

import csv
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.execution import PRECISIONS, Precision
from trainpace.hardware import catalogue_name
from trainpace.journal.entry import Entry, Sweep, content_id, now_utc, printable
from trainpace.journal.exchange import read_json_records
from trainpace.journal.identity import anonymous_entry

UNKNOWN = "unknown"
"""A condition that the source does not state. It is not guessed, because forecasts would use the guess."""


class Skipped(NamedTuple):
    """Content of a file that is not a run, and the reason."""

    reason: str


class Given(NamedTuple):
    """Facts that the user adds where a file does not state them, and whether names and paths are stored as they are."""

    device: str = ""
    precision: Precision | None = None
    keep_identity: bool = False


Item = Entry | Sweep | Skipped


class ContentIds:
    """Ids from content: reading a file again gives the same ids, and two equal rows of one file are two runs."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, content: Any) -> str:
        """The id of any JSON-serialisable content."""
        text = json.dumps(content, sort_keys=True, default=str, ensure_ascii=True)
        self._seen[text] += 1
        return content_id(text if self._seen[text] == 1 else f"{text}#{self._seen[text]}")


def imported(given: Given, id_: str, device: str, **fields: Any) -> Entry:
    """The entry of an imported run, as it is stored. `device`: its name in the source, "" where there is none."""
    device = catalogue_name(printable(device)) if device else ""
    defaults = {"created_at": now_utc(), "outcome": "ok"}
    entry = Entry(id=id_, kind="import", device=device or UNKNOWN, **defaults | fields)
    return entry if given.keep_identity else anonymous_entry(entry)


def columns_and_rows(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """A table's columns, and an iterator over its rows. Raises UnreadableInput for a file that is not a table."""
    with opened(path) as file:
        head = file.read(64)
    if head[:4] == b"PAR1":
        return _parquet(path)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):
        rows = read_json_records(path)
        first = next(rows, None)
        return ([], iter(())) if first is None else (list(first), itertools.chain([first], rows))
    return _csv(path)


def opened(path: Path) -> Any:
    """The file, open for reading bytes. Raises UnreadableInput."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UnreadableInput(f"cannot read {path}: {os_reason(error)}.") from None
    except ValueError as error:
        raise UnreadableInput(f"cannot read {str(path)!r}: {error}.") from None


def as_precision(word: str) -> Precision:
    """A precision by name. Raises TrainpaceError for an unknown one."""
    for precision in PRECISIONS:
        if word == precision:
            return precision
    raise TrainpaceError(f"precision {word!r} is not one of {', '.join(PRECISIONS)}.")


def number(value: Any) -> float | None:
    """A finite number from 0; None for an empty field. Raises TrainpaceError for anything else."""
    if value is None or str(value).strip().lower() in ("", "nan", "none"):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = -1.0
    if not 0 <= result < float("inf"):
        raise TrainpaceError(f"{str(value)[:40]!r} is not a number from 0.")
    return result


def _csv(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a run of many steps is a long record

    def rows() -> Iterator[dict[str, Any]]:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        except (UnicodeDecodeError, csv.Error) as error:
            raise UnreadableInput(f"{path} is neither Parquet, JSON nor CSV text ({error}).") from None

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file).fieldnames or []), rows()
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} is neither Parquet, JSON nor CSV text ({error}).") from None


def _parquet(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TrainpaceError("reading Parquet needs pyarrow.", "pip install pyarrow, or give CSV.") from None

    def damaged(error: Exception) -> UnreadableInput:
        return UnreadableInput(f"{path} is not a readable Parquet file ({(str(error).splitlines() or [''])[0]}).")

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = list(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(error) from None

    def rows() -> Iterator[dict[str, Any]]:
        try:
            for batch in file.iter_batches(10_000):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise damaged(error) from None

    return columns, rows()
