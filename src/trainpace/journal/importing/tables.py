"""Trainpace's own files, tables in the columns that ``trainpace validate`` reads, and those of timm's ``benchmark.py``.

The name of a timm file, such as ``benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv``, states the precision, memory format,
versions, device, and whether torch.compile was on. Times are milliseconds per step; training is a whole step with SGD and
momentum on a batch that is already on the device.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.execution import Execution, Precision
from trainpace.journal.entry import Entry, Sweep, entry_of, now_utc, printable
from trainpace.journal.importing.reading import (
    PRECISION_NAMES,
    UNKNOWN,
    ContentIds,
    Given,
    Item,
    Skipped,
    columns_and_rows,
    imported,
    run_or_reason,
)
from trainpace.outcome import FailedProbe, Measurement
from trainpace.records import from_json, to_jsonable
from trainpace.validation import Run, execution_of, measured_ms, mode_of, number, run_of

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
        yield run_or_reason(_published_entry, run, given, ids.of(stated), now)


def _published_entry(run: Run, given: Given, id_: str, now: str) -> Entry:
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


class FileName(NamedTuple):
    """Conditions stated in the name of a benchmark file."""

    precision: Precision | None
    channels_last: bool
    compile: bool
    device: str
    environment: dict[str, str]


def read_name(name: str) -> FileName:
    """Parse a file name at its hyphens; the last part that is nothing else is the device."""
    precision: Precision | None = None
    environment, device, channels_last, compiled = {"framework": "timm benchmark.py"}, "", False, False
    for part in re.sub(r"\.\w+$", "", name.lower()).split("-"):
        if part in ("benchmark", "train", "infer", "cpu", "nchw", ""):
            continue
        if part in PRECISION_NAMES:
            precision = PRECISION_NAMES[part]
        elif part == "nhwc":
            channels_last = True
        elif part in ("dynamo", "compile", "inductor"):
            compiled = True
        elif version := re.fullmatch(r"pt(1)(\d\d)|pt([2-9])(\d)(\d)", part):
            environment["torch"] = ".".join(digits for digits in version.groups() if digits)
        elif version := re.fullmatch(r"cu(\d\d)(\d)", part):
            environment["cuda"] = ".".join(version.groups())
        else:
            device = part
    return FileName(precision, channels_last, compiled, device, environment)


def is_timm(columns: list[str]) -> bool:
    return "model" in columns and bool({"train_samples_per_sec", "infer_samples_per_sec"} & set(columns))


def read_timm(path: Path, given: Given) -> Iterator[Item]:
    """A run for each row and phase (train, infer) that has a time."""
    columns, rows = columns_and_rows(path)
    if not is_timm(columns):
        raise UnreadableInput(f"{path} has not the columns of timm's benchmark (model, train_samples_per_sec, ...).")
    name, ids, now = read_name(path.name), ContentIds(), now_utc()
    for row in rows:
        phases = [phase for phase in ("train", "infer") if row.get(f"{phase}_samples_per_sec") not in (None, "")]
        if not phases:
            yield Skipped("the model has no time" + (" (the benchmark failed on it)" if row.get("error") else ""))
        for phase in phases:
            stated = {key: value for key, value in row.items() if value not in (None, "")}
            id_ = ids.of([name.precision, name.channels_last, name.compile, name.device, phase, stated])
            yield run_or_reason(_timm_entry, row, phase, name, given, id_, now, path.name)


def _timm_entry(
    row: dict[str, Any], phase: str, name: FileName, given: Given, id_: str, now: str, source: str
) -> Entry:
    precision = given.precision or name.precision
    if precision is None:
        raise TrainpaceError("the file's name states no precision: give --precision.")
    batch, rate = number(row.get(f"{phase}_batch_size")), number(row[f"{phase}_samples_per_sec"])
    if not batch or not rate:
        raise TrainpaceError("the row states no batch size or no throughput above 0.")
    size, parameters = number(row.get(f"{phase}_img_size")), number(row.get("param_count"))
    execution = Execution(
        micro_batch=int(batch), precision=precision, optimizer="sgd_momentum" if phase == "train" else "none",
        channels_last=name.channels_last, compile=name.compile,
    )  # fmt: skip
    return imported(
        given, id_, given.device or name.device, created_at=now, execution=execution,
        model=f"timm:{printable(str(row.get('model') or ''))}", image_size=int(size) if size else None,
        mode="train" if phase == "train" else "inference",
        step_time_ms=number(row.get(f"{phase}_step_time")) or 1e3 * batch / rate, environment=name.environment,
        notes=f"{parameters:g} M parameters" if parameters else "", source=printable(source),
    )  # fmt: skip
