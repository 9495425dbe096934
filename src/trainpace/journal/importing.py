"""Runs imported from files: Trainpace's own, tables of measured runs, timm's benchmark, and Hugging Face's results.

A format is a function that yields the runs of a file, and a line in FORMATS. MLflow's stores are read in `trackers`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import Execution, Precision
from trainpace.core.intake import first_bytes, read_json
from trainpace.core.outcome import FailedProbe, Measurement
from trainpace.core.records import Record, from_json, to_jsonable
from trainpace.forecast import MeasuredRun, execution_of, measured_ms, mode_of, number, run_of
from trainpace.journal.entry import Entry, Sweep, entry_of, now_utc, printable
from trainpace.journal.exchange import (
    PRECISION_NAMES,
    UNKNOWN,
    Given,
    Item,
    Skipped,
    columns_and_rows,
    content_ids,
    imported,
    run_or_reason,
)
from trainpace.journal.receiving import Lessons, receive
from trainpace.journal.store import Journal
from trainpace.journal.trackers import is_mlflow_db, is_mlruns, read_mlflow

RECORDS: dict[str, type[Entry | Sweep | Measurement | FailedProbe]] = {
    kind.__name__: kind for kind in (Entry, Sweep, Measurement, FailedProbe)
}
_OUT_OF_MEMORY = re.compile(r"\bOOM\b|out[ -]of[ -]memory", re.IGNORECASE)
SHARED = "shared"
"""Files of `trainpace journal share`, whose runs are checked before the journal takes them (`receiving`)."""
_SHARED_HEAD = re.compile(rb'[\xef\xbb\xbf\s]*\{\s*"record"\s*:\s*"SharedRuns"')
_ROUNDED_BELOW = 0.1
"""Steps per second are rounded to three decimals; below this value that exceeds half a per cent."""


def read_own(path: Path, given: Given) -> Iterator[Item]:
    """Runs and sweeps of an export unchanged; a measurement becomes a run whose id is a hash of it.

    Raises UnreadableInput for a damaged record, so that no file is imported in part.
    """
    _, rows = columns_and_rows(path)
    id_of = content_ids()
    for index, row in enumerate(rows):
        where = f"{path} record {index + 1}"
        column = str(row.get("record")).lstrip()
        data = (
            _record_column(column, where)
            if column[:1] in ("{", "") or path.suffix in (".csv", ".parquet")
            else row
        )
        kind = RECORDS.get(str(data.get("record")))
        if kind is None:
            yield Skipped(f"a record of the kind {str(data.get('record'))[:40]!r} is not a run")
            continue
        try:
            record = from_json(json.dumps(data), kind, where)
            if isinstance(record, Entry | Sweep):
                yield record
            else:
                id_ = id_of({key: value for key, value in data.items() if key != "schema_version"})
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
    id_of, now = content_ids(), now_utc()
    for index, row in enumerate(rows):
        run = run_of(path, index, row)
        stated = {
            name: value
            for name, value in to_jsonable(run).items()
            if value and name not in ("index", "file")
        }
        yield run_or_reason(_published_entry, run, given, id_of(stated), now)


def _published_entry(run: MeasuredRun, given: Given, id_: str, now: str) -> Entry:
    model = run.model_spec or run.model
    if not model:
        raise TrainpaceError("the run states no model.")
    execution = execution_of(
        run if run.precision else replace(run, precision=given.precision or "")
    )
    if mode_of(run) == "train" and not run.optimizer:
        execution = replace(execution, optimizer=UNKNOWN)
    milliseconds = measured_ms(run, execution)
    failed = not milliseconds and bool(_OUT_OF_MEMORY.search(run.notes))
    if not milliseconds and not failed:
        raise TrainpaceError("the run states no step time or throughput.")
    software = {
        name: getattr(run, name) for name in ("framework", "framework_version", "interconnect")
    }
    return imported(
        given,
        id_,
        run.gpu_canonical or run.gpu or given.device,
        created_at=now,
        outcome="out_of_memory" if failed else "ok",
        reason="out of memory, as its source says" if failed else "",
        model=printable(model),
        num_devices=execution.world_size,
        execution=execution,
        sequence_length=int(run.seq_len) if run.seq_len else None,
        image_size=int(run.img_size) if run.img_size else None,
        mode=mode_of(run),
        step_time_ms=None if failed else milliseconds,
        peak_memory_gib=run.peak_mem_gib,
        environment={name: printable(value) for name, value in software.items() if value},
        notes=printable(run.notes),
        source=printable(run.file),
    )


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
    environment, device, channels_last, compiled = (
        {"framework": "timm benchmark.py"},
        "",
        False,
        False,
    )
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
    return "model" in columns and bool(
        {"train_samples_per_sec", "infer_samples_per_sec"} & set(columns)
    )


def read_timm(path: Path, given: Given) -> Iterator[Item]:
    """A run for each row and phase (train, infer) that has a time.

    The file's name states the conditions: benchmark-train-amp-nhwc-pt210-cu121-rtx3090.csv. A training time is that of a
    whole step of SGD with momentum on a batch that is on the device already.
    """
    columns, rows = columns_and_rows(path)
    if not is_timm(columns):
        raise UnreadableInput(
            f"{path} has not the columns of timm's benchmark (model, train_samples_per_sec, ...)."
        )
    name, id_of, now = read_name(path.name), content_ids(), now_utc()
    for row in rows:
        phases = [
            phase
            for phase in ("train", "infer")
            if row.get(f"{phase}_samples_per_sec") not in (None, "")
        ]
        if not phases:
            yield Skipped(
                "the model has no time"
                + (" (the benchmark failed on it)" if row.get("error") else "")
            )
        for phase in phases:
            stated = {key: value for key, value in row.items() if value not in (None, "")}
            id_ = id_of(
                [name.precision, name.channels_last, name.compile, name.device, phase, stated]
            )
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
        micro_batch=int(batch),
        precision=precision,
        optimizer="sgd_momentum" if phase == "train" else "none",
        channels_last=name.channels_last,
        compile=name.compile,
    )
    return imported(
        given,
        id_,
        given.device or name.device,
        created_at=now,
        execution=execution,
        model=f"timm:{printable(str(row.get('model') or ''))}",
        image_size=int(size) if size else None,
        mode="train" if phase == "train" else "inference",
        step_time_ms=number(row.get(f"{phase}_step_time")) or 1e3 * batch / rate,
        environment=name.environment,
        notes=f"{parameters:g} M parameters" if parameters else "",
        source=printable(source),
    )


def is_huggingface(data: Any) -> bool:
    return isinstance(data, dict) and ("log_history" in data or "train_runtime" in data)


def read_huggingface(path: Path, given: Given) -> Iterator[Item]:
    """The run of a file. A file that states no training is skipped with its reason.

    The step time is the run's wall-clock time divided by its steps, so it includes evaluation, checkpoints and the first
    steps. Device, precision and optimizer are stated only in training_args.bin, a pickle that is never opened.
    """
    data = read_json(path)
    if not is_huggingface(data):
        raise UnreadableInput(
            f"{path} is neither all_results.json nor trainer_state.json of a Trainer."
        )
    yield run_or_reason(_huggingface_entry, path, data, given, content_ids()(data))


def _huggingface_entry(path: Path, data: dict[str, Any], given: Given, id_: str) -> Entry:
    history = data.get("log_history")
    logs = (
        [log for log in history if isinstance(log, dict)] if isinstance(history, list) else [data]
    )
    summary = next((log for log in reversed(logs) if "train_runtime" in log), None)
    if summary is None:
        raise TrainpaceError("the training did not end, so that its time is not stated.")
    per_second, samples = (
        number(summary.get("train_steps_per_second")),
        number(summary.get("train_samples_per_second")),
    )
    runtime, steps = number(summary.get("train_runtime")), number(data.get("global_step"))
    if per_second and (per_second >= _ROUNDED_BELOW or not steps):
        milliseconds = 1e3 / per_second
    elif runtime and steps:
        milliseconds = 1e3 * runtime / steps
    else:
        raise TrainpaceError("the file states no steps per second.")
    micro = int(number(data.get("train_batch_size")) or 0)
    step_samples = round(samples * milliseconds / 1e3) if samples else 0
    if not micro and not step_samples:
        raise TrainpaceError("the file states neither a batch size nor samples per second.")
    if given.precision is None:
        raise TrainpaceError("Hugging Face's results state no precision: give --precision.")
    notes = ["wall clock of the whole run over its steps, with evaluation and checkpoints"]
    if not micro:
        notes.append("the batch is samples a step, over all devices and accumulation")
    execution = Execution(
        micro_batch=micro or step_samples,
        accumulation=max(1, round(step_samples / micro)) if micro and step_samples else 1,
        precision=given.precision,
        optimizer=UNKNOWN,
    )
    if execution.accumulation > 1:
        notes.append(
            f"{execution.accumulation} micro-batches a step, accumulated or on several devices"
        )
    losses = [log["loss"] for log in logs if isinstance(log.get("loss"), int | float)]
    return imported(
        given,
        id_,
        given.device,
        model=_huggingface_model(path.parent / "config.json"),
        execution=execution,
        step_time_ms=milliseconds,
        notes="; ".join(notes),
        source=path.name,
        losses=tuple(float(loss) if abs(loss) < float("inf") else None for loss in losses),
    )


def _huggingface_model(config: Path) -> str:
    """The model's name in the config.json beside the results."""
    data = read_json(config) if config.is_file() else {}
    if not isinstance(data, dict):
        return UNKNOWN
    names = [data.get("_name_or_path"), *(data.get("architectures") or []), data.get("model_type")]
    return next((name for name in names if isinstance(name, str) and name), UNKNOWN)


class Imported(Record):
    """The result of importing one file: the numbers of runs that were new, already in the journal, or skipped (by reason).

    `lessons`: what a file of shared runs taught.
    """

    file: str
    format: str
    new: int
    already_there: int
    skipped: dict[str, int]
    lessons: Lessons | None = None


def import_file(
    journal: Journal, path: Path, format_: str = "auto", given: Given | None = None
) -> Imported:
    """Import a file (or MLflow's folder) into the journal as a whole; where it raises UnreadableInput, nothing is imported."""
    name = format_of(path) if format_ == "auto" else format_
    if name not in (*FORMATS, SHARED):
        raise UnknownName("format", name, (*FORMATS, SHARED))
    given = given or Given()
    shared = receive(journal, path, given.accept_odd) if name == SHARED else None
    skipped: Counter[str] = Counter()
    read = 0

    def items() -> Iterator[Entry | Sweep]:
        nonlocal read
        for item in FORMATS[name](path, given) if shared is None else shared.items:
            if isinstance(item, Skipped):
                skipped[item.reason] += 1
            else:
                read += 1
                yield item

    new = journal.add_many(items())
    return Imported(
        file=path.name,
        format=name,
        new=new,
        already_there=read - new,
        skipped=dict(skipped.most_common()),
        lessons=None if shared is None else shared.lessons,
    )


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
        raise UnreadableInput(
            f"{path} is a database.", f"If it is a journal: trainpace journal merge {path}."
        )
    if _SHARED_HEAD.match(head):
        return SHARED  # which the door of foreign files reads
    columns, rows = columns_and_rows(path)
    if is_timm(columns):
        return "timm"
    if {"record", "runs"} <= set(columns):
        return SHARED
    if {"record", "id", "created_at"} <= set(columns) or next(rows, {}).get("record") in tuple(
        RECORDS
    ):
        return "trainpace"
    if is_huggingface(dict.fromkeys(columns)):
        return "hf"
    if {"model_spec", "model"} & set(columns):
        return "runs"
    if not columns and head.lstrip()[:1] == b"[":
        return "trainpace"  # an export of nothing
    raise _unknown(path)


def _unknown(path: Path) -> UnreadableInput:
    return UnreadableInput(
        f"{path} is in no format that is known.",
        f"Known: {', '.join((*FORMATS, SHARED))}; see --format.",
    )


FORMATS: dict[str, Callable[[Path, Given], Iterator[Item]]] = {
    "trainpace": read_own,
    "runs": read_published,
    "timm": read_timm,
    "hf": read_huggingface,
    "mlflow": read_mlflow,
}
