"""Helpers of all importers: items, ids made from content, and tables in CSV, Parquet or JSON."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.errors import TrainpaceError
from trainpace.execution import PRECISIONS, Precision
from trainpace.hardware import catalogue_name
from trainpace.journal.entry import Entry, Sweep, content_id, now_utc, printable
from trainpace.journal.exchange import read_json_records
from trainpace.journal.identity import anonymous_entry
from trainpace.validation import first_bytes, read_table

UNKNOWN = "unknown"
"""A condition that the source does not state. It is not guessed, because forecasts would use the guess."""
PRECISION_NAMES: dict[str, Precision] = {
    **{name: name for name in PRECISIONS}, "32": "fp32", "32-true": "fp32", "float32": "fp32", "no": "fp32",
    "16": "amp_fp16", "16-mixed": "amp_fp16", "amp": "amp_fp16", "bf16-mixed": "amp_bf16", "16-true": "fp16",
    "float16": "fp16", "bf16-true": "bf16", "bfloat16": "bf16",
}  # fmt: skip
"""Precisions by the names that timm, Lightning and torch give them."""


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
