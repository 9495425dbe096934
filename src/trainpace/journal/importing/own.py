"""Trainpace's own files: measurements from ``trainpace measure --output``, and exports of a journal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry, Sweep, entry_of
from trainpace.journal.importing.reading import ContentIds, Given, Item, Skipped, columns_and_rows
from trainpace.outcome import FailedProbe, Measurement
from trainpace.records import from_json

RECORDS: dict[str, type[Entry | Sweep | Measurement | FailedProbe]] = {
    "Entry": Entry,
    "Sweep": Sweep,
    "Measurement": Measurement,
    "FailedProbe": FailedProbe,
}


def read_own(path: Path, given: Given) -> Iterator[Item]:
    """Runs and sweeps unchanged; a measurement becomes a run whose id is a hash of it.

    Raises UnreadableInput for a damaged record, so that no file is imported in part.
    """
    _, rows = columns_and_rows(path)
    ids = ContentIds()
    for index, row in enumerate(rows):
        where = f"{path} record {index + 1}"
        column = str(row.get("record")).lstrip()
        data = _record_column(column, where) if column[:1] in ("{", "") or path.suffix in (".csv", ".parquet") else row
        kind = RECORDS.get(str(data.get("record")))
        if kind is None:
            yield Skipped(f"a record of the kind {str(data.get('record'))[:40]!r} is not a run")
            continue
        try:
            record = from_json(json.dumps(data), kind, where)
            if isinstance(record, Entry | Sweep):
                yield record
            else:
                name = content_id_of(data, ids)
                source = str(path) if given.keep_identity else path.name
                yield entry_of(record, keep_identity=given.keep_identity, id=name, source=source)
        except UnreadableInput:
            raise
        except TrainpaceError as error:
            raise UnreadableInput(f"{where}: {error.message}", error.hint) from None


def content_id_of(data: dict[str, Any], ids: ContentIds) -> str:
    """The id of a measurement, equal for all versions of the file's schema."""
    return ids.of({key: value for key, value in data.items() if key != "schema_version"})


def _record_column(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise UnreadableInput(f"{where} holds no record of a journal.")
    return data
