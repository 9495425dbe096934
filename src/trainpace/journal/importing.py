"""Runs imported from files."""

import contextlib
import datetime
import itertools
import json
import os
import re
import sqlite3
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote

from msgspec.structs import replace

from trainpace.configs import parse_yaml
from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput, os_reason
from trainpace.core.execution import PRECISIONS, Execution, Precision
from trainpace.core.hardware import catalogue_name
from trainpace.core.intake import first_bytes, opened_text, read_bytes, read_json
from trainpace.core.outcome import FailedProbe, Measurement
from trainpace.core.records import Record, from_json, to_jsonable
from trainpace.forecast import (
    MeasuredRun,
    as_precision,
    execution_of,
    measured_ms,
    mode_of,
    number,
    read_table,
    run_of,
)
from trainpace.journal.entry import (
    UNKNOWN,
    Entry,
    Sweep,
    anonymous_entry,
    content_id,
    entry_of,
    now_utc,
    printable,
    utc_text,
)
from trainpace.journal.sharing import Lessons, Skipped, receive
from trainpace.journal.store import Journal

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


_DAMAGED = (sqlite3.Error, UnicodeDecodeError)
"""sqlite3 cannot always say what is wrong with a damaged file."""
LARGEST_VALUE = 1 << 20
"""Characters of a param that are read."""
_NAMES = {
    "model": "model_name_or_path model_name _name_or_path model architecture arch backbone",
    "batch": "per_device_train_batch_size micro_batch_size micro_batch train_batch_size batch_size",
    "accumulation": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "devices": "world_size num_devices num_gpus n_gpu",
    "optimizer": "optimizer optimizer_name optim opt",
    "device": "gpu_name device_name gpu",
    "sequence": "max_seq_length sequence_length seq_len block_size",
    "image": "image_size img_size",
    "seed": "seed",
}
"""The names of params that state a condition, the surest first."""
_STEP_MS = "step_time_ms train_step_time_ms".split()
_STEPS_PER_S = "train_steps_per_second steps_per_second steps_per_sec".split()
_SAMPLES_PER_S = "train_samples_per_second samples_per_second samples_per_sec".split()
_MIXED: dict[str, Precision] = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}


class Logged(NamedTuple):
    """One run of MLflow."""

    run_id: str
    start_ms: float
    params: dict[str, str]
    metrics: dict[str, list[float]]


def is_mlruns(path: Path) -> bool:
    """Whether the folder holds experiments, is one experiment, or is one run."""
    return (path / "meta.yaml").is_file() or any(
        child.is_file() for child in path.glob("*/meta.yaml")
    )


def is_mlflow_db(path: Path) -> bool:
    try:
        with contextlib.closing(_connected(path)) as connection:
            tables = {
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
    except _DAMAGED:
        return False
    return {"runs", "params", "metrics", "experiments"} <= tables


def read_mlflow(path: Path, given: Given) -> Iterator[Item]:
    """Every run of a store that is not deleted."""
    for logged in _folder_runs(path) if path.is_dir() else _database_runs(path):
        yield run_or_reason(_entry, logged, given)


def _entry(logged: Logged, given: Given) -> Entry:
    params = {_last(key): value for key, value in sorted(logged.params.items())}
    metrics = {_last(key): values for key, values in sorted(logged.metrics.items())}
    model, batch = _stated(params, "model"), _whole(params, "batch")
    if not model:
        raise TrainpaceError("the run states no model (params such as model_name).")
    if not batch:
        raise TrainpaceError("the run states no batch size (params such as batch_size).")
    execution = Execution(
        micro_batch=batch,
        accumulation=_whole(params, "accumulation") or 1,
        nproc_per_node=_whole(params, "devices") or 1,
        precision=given.precision or _precision(params),
        optimizer=_stated(params, "optimizer").removesuffix("_torch") or UNKNOWN,
    )
    try:
        moment = datetime.datetime.fromtimestamp(logged.start_ms / 1e3, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        raise TrainpaceError("the run's start is not a valid time.") from None
    return imported(
        given,
        content_id(f"mlflow {logged.run_id}"),
        given.device or _stated(params, "device"),
        created_at=utc_text(moment),
        model=printable(model),
        num_devices=execution.world_size,
        execution=execution,
        sequence_length=_whole(params, "sequence"),
        image_size=_whole(params, "image"),
        step_time_ms=_step_ms(metrics, execution),
        seed=_whole(params, "seed"),
        source=f"mlflow {logged.run_id}",
    )


def _step_ms(metrics: dict[str, list[float]], execution: Execution) -> float:
    for names, convert in (
        (_STEP_MS, lambda value: value),
        (_STEPS_PER_S, lambda value: 1e3 / value),
        (_SAMPLES_PER_S, lambda value: 1e3 * execution.global_batch / value),
    ):
        for name in names:
            values = [value for value in metrics.get(name, []) if 0 < value < float("inf")]
            if values:
                return convert(statistics.median(values))
    raise TrainpaceError(
        "the run logged no step time or throughput (metrics such as step_time_ms,"
        " train_steps_per_second)."
    )


def _precision(params: dict[str, str]) -> Precision:
    if word := params.get("mixed_precision", "").lower():
        if word in _MIXED:
            return _MIXED[word]
    elif (
        word := (params.get("precision") or params.get("dtype") or "")
        .lower()
        .removeprefix("torch.")
    ):
        return PRECISION_NAMES.get(word) or as_precision(word)
    elif "fp16" in params or "bf16" in params:  # Hugging Face: neither means fp32
        on = [name for name in ("fp16", "bf16") if params.get(name, "").lower() in ("true", "1")]
        return _MIXED[on[0]] if on else "fp32"
    raise TrainpaceError("the run states no precision that is known: give --precision.")


def _stated(params: dict[str, str], condition: str) -> str:
    values = (params.get(name, "").strip() for name in _NAMES[condition].split())
    return next((value for value in values if value not in ("", "None")), "")


def _whole(params: dict[str, str], condition: str) -> int | None:
    text = _stated(params, condition)
    return int(number(text) or 0) if text else None


def _last(key: str) -> str:
    return re.split(r"[/.]", key)[-1].lower()


def _folder_runs(path: Path) -> Iterator[Logged]:
    if not is_mlruns(path):
        raise UnreadableInput(f"{path} is not a folder of MLflow runs.")
    for meta in sorted(path.rglob("meta.yaml")):
        run = meta.parent
        if ".trash" in meta.parts or (
            not (run / "params").is_dir() and not (run / "metrics").is_dir()
        ):
            continue  # an experiment's, a model's, or a deleted run
        data = parse_yaml(_text(meta)[:LARGEST_VALUE], str(meta))
        if not isinstance(data, dict) or data.get("lifecycle_stage") == "deleted":
            continue
        start = data.get("start_time")
        params = {key: _text(file)[:LARGEST_VALUE].strip() for key, file in _files(run / "params")}
        metrics = {key: _values(_text(file)) for key, file in _files(run / "metrics")}
        yield Logged(
            run.name, float(start) if isinstance(start, int | float) else 0.0, params, metrics
        )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Keys and their files; a key with slashes is a file in folders. Links out of the store are not followed."""
    for root, _, names in os.walk(folder, followlinks=False):
        for name in sorted(names):
            file = Path(root, name)
            if not file.is_symlink():
                yield file.relative_to(folder).as_posix(), file


def _text(file: Path) -> str:
    return read_bytes(file).decode("utf-8", "replace")


def _values(text: str) -> list[float]:
    """The values in lines of ``timestamp value step``."""
    values = []
    for line in text.splitlines():
        with contextlib.suppress(IndexError, ValueError):
            values.append(float(line.split()[1]))
    return values


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)


def _database_runs(path: Path) -> Iterator[Logged]:
    if not is_mlflow_db(path):
        raise UnreadableInput(f"{path} is not a database of MLflow.")
    chosen = (
        "SELECT run_uuid, start_time FROM runs WHERE lifecycle_stage IS NOT 'deleted' ORDER BY"
        " start_time, run_uuid"
    )
    values = "SELECT key, value FROM {} WHERE run_uuid = ?"
    try:
        with contextlib.closing(_connected(path)) as connection:
            for run_id, start in connection.execute(chosen).fetchall():
                params = dict(connection.execute(values.format("params"), (run_id,)).fetchall())
                metrics: dict[str, list[float]] = {}
                for key, value in connection.execute(
                    values.format("metrics"), (run_id,)
                ).fetchall():
                    if isinstance(value, int | float):
                        metrics.setdefault(key, []).append(float(value))
                texts = {key: str(value) for key, value in params.items()}
                yield Logged(str(run_id), float(start or 0), texts, metrics)
    except _DAMAGED as error:
        raise UnreadableInput(f"{path} cannot be read: {error}.") from None


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
