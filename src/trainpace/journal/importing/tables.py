"""Trainpace's own files, and tables of published runs in the columns that ``trainpace validate`` reads."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry, Sweep, entry_of, now_utc, printable
from trainpace.journal.importing.reading import UNKNOWN, ContentIds, Given, Item, Skipped, columns_and_rows, imported
from trainpace.outcome import FailedProbe, Measurement
from trainpace.records import from_json, to_jsonable
from trainpace.validation import Run, execution_of, measured_ms, mode_of, run_of

RECORDS: dict[str, type[Entry | Sweep | Measurement | FailedProbe]] = {
    kind.__name__: kind for kind in (Entry, Sweep, Measurement, FailedProbe)
}
_OUT_OF_MEMORY = re.compile(r"\bOOM\b|out[ -]of[ -]memory", re.IGNORECASE)


def read_own(path: Path, given: Given) -> Iterator[Item]:
    """Runs and sweeps of an export unchanged; a measurement becomes a run whose id is a hash of it.

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
                id_ = ids.of({key: value for key, value in data.items() if key != "schema_version"})
                source = str(path) if given.keep_identity else path.name
                yield entry_of(record, keep_identity=given.keep_identity, id=id_, source=source)
        except UnreadableInput:
            raise
        except TrainpaceError as error:
            raise UnreadableInput(f"{where}: {error.message}", error.hint) from None


def _record_column(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise UnreadableInput(f"{where} holds no record of a journal.")
    return data


def read_published(path: Path, given: Given) -> Iterator[Item]:
    """One run per row. A malformed number rejects the file; a row that states too little is skipped."""
    columns, rows = columns_and_rows(path)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(f"{path} has neither a column model_spec nor model.")
    ids, now = ContentIds(), now_utc()
    for index, row in enumerate(rows):
        run = run_of(path, index, row)
        stated = {name: value for name, value in to_jsonable(run).items() if value and name not in ("index", "file")}
        try:
            yield _entry(run, given, ids.of(stated), now)
        except TrainpaceError as error:
            yield Skipped(error.message)


def _entry(run: Run, given: Given, id_: str, now: str) -> Entry:
    model = run.model_spec or run.model
    if not model:
        raise TrainpaceError("the run states no model.")
    execution = execution_of(run if run.precision else replace(run, precision=given.precision or ""))
    if mode_of(run) == "train" and not run.optimizer:
        execution = replace(execution, optimizer=UNKNOWN)
    milliseconds = measured_ms(run, execution)
    failed = not milliseconds and bool(_OUT_OF_MEMORY.search(run.notes))
    if not milliseconds and not failed:
        raise TrainpaceError("the run states no step time or throughput.")
    software = {name: getattr(run, name) for name in ("framework", "framework_version", "interconnect")}
    return imported(
        given, id_, run.gpu_canonical or run.gpu or given.device, created_at=now,
        outcome="out_of_memory" if failed else "ok", reason="out of memory, as its source says" if failed else "",
        model=printable(model), num_devices=execution.world_size, execution=execution,
        sequence_length=int(run.seq_len) if run.seq_len else None, image_size=int(run.img_size) if run.img_size else None,
        mode=mode_of(run), step_time_ms=None if failed else milliseconds, peak_memory_gib=run.peak_mem_gib,
        environment={name: printable(value) for name, value in software.items() if value},
        notes=printable(run.notes), source=printable(run.file),
    )  # fmt: skip
