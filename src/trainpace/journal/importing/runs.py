"""Published runs: the columns that ``trainpace validate`` reads, in CSV, Parquet or JSON."""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry, now_utc, printable
from trainpace.journal.importing.reading import (
    UNKNOWN,
    ContentIds,
    Given,
    Item,
    Skipped,
    columns_and_rows,
    imported,
)  # fmt: skip
from trainpace.records import to_jsonable
from trainpace.validation import CONDITIONS, Run, execution_of, measured_ms, mode_of, run_of

_OUT_OF_MEMORY = re.compile(r"\bOOM\b|out[ -]of[ -]memory", re.IGNORECASE)


def read_published(path: Path, given: Given) -> Iterator[Item]:
    """One run per row. A malformed number rejects the file; a row that states too little is skipped."""
    columns, rows = columns_and_rows(path)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(f"{path} has neither a column model_spec nor model.")
    ids, now = ContentIds(), now_utc()
    for index, row in enumerate(rows):
        run = run_of(path, index, row)
        stated = {name: value for name, value in to_jsonable(run).items() if value or name not in CONDITIONS}
        try:
            yield _entry(run, given, ids.of({**stated, "index": 0, "file": ""}), now)
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
