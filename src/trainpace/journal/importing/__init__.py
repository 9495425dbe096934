"""Runs imported from other files. A format is added as a file in this room and a line in FORMATS."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from trainpace.errors import UnknownName, UnreadableInput
from trainpace.journal.entry import Entry, Sweep
from trainpace.journal.importing.huggingface import is_huggingface, read_huggingface
from trainpace.journal.importing.mlflow import is_mlflow_db, is_mlruns, read_mlflow
from trainpace.journal.importing.reading import Given, Item, Skipped, columns_and_rows
from trainpace.journal.importing.tables import RECORDS, is_timm, read_own, read_published, read_timm
from trainpace.journal.store import Journal
from trainpace.records import Record
from trainpace.validation import first_bytes

FORMATS: dict[str, Callable[[Path, Given], Iterator[Item]]] = {
    "trainpace": read_own, "runs": read_published, "timm": read_timm, "hf": read_huggingface, "mlflow": read_mlflow,
}  # fmt: skip


class Imported(Record):
    """The result of importing one file: the numbers of runs that were new, already in the journal, or skipped (by reason)."""

    file: str
    format: str
    new: int
    already_there: int
    skipped: dict[str, int]


def import_file(journal: Journal, path: Path, format_: str = "auto", given: Given | None = None) -> Imported:
    """Import a file (or MLflow's folder) into the journal as a whole; where it raises UnreadableInput, nothing is imported."""
    name = format_of(path) if format_ == "auto" else format_
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS)
    skipped: Counter[str] = Counter()
    read = 0

    def items() -> Iterator[Entry | Sweep]:
        nonlocal read
        for item in FORMATS[name](path, given or Given()):
            if isinstance(item, Skipped):
                skipped[item.reason] += 1
            else:
                read += 1
                yield item

    new = journal.add_many(items())
    return Imported(file=path.name, format=name, new=new, already_there=read - new, skipped=dict(skipped.most_common()))


def format_of(path: Path) -> str:
    """The name of a file's format. Raises UnreadableInput for an unknown one."""
    if path.is_dir():
        if is_mlruns(path):
            return "mlflow"
        raise _unknown(path)
    head = first_bytes(path)
    if head[:16] == b"SQLite format 3\x00":
        if is_mlflow_db(path):
            return "mlflow"
        raise UnreadableInput(f"{path} is a database.", f"If it is a journal: trainpace journal merge {path}.")
    columns, rows = columns_and_rows(path)
    if is_timm(columns):
        return "timm"
    if {"record", "id", "created_at"} <= set(columns) or next(rows, {}).get("record") in RECORDS:
        return "trainpace"
    if is_huggingface(dict.fromkeys(columns)):
        return "hf"
    if {"model_spec", "model"} & set(columns):
        return "runs"
    if not columns and head.lstrip()[:1] == b"[":
        return "trainpace"  # an export of nothing
    raise _unknown(path)


def _unknown(path: Path) -> UnreadableInput:
    return UnreadableInput(f"{path} is in no format that is known.", f"Known: {', '.join(FORMATS)}; see --format.")
