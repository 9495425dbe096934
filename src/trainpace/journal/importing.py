"""Import of runs from files: Trainpace's own, tables, timm, Hugging Face and MLflow.

A format is a function that yields the runs of a file, and a line in FORMATS. It translates each row
to the columns of a measured run, which `trainpace validate` reads too.

An MLflow store is a folder ``mlruns`` (meta.yaml, params/, metrics/) or a file ``mlflow.db``. Both
are read without mlflow. A run is imported if it states a model, a batch size and a precision. It
must also have logged a step time or a throughput under one of the names below. The loggers of
Hugging Face, Lightning and Trainpace use these names. Only the last component of a name counts.
"""

import contextlib
import datetime
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.configs import parse_yaml
from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput
from trainpace.core.execution import PRECISIONS, Execution, Precision
from trainpace.core.hardware import catalogue_name
from trainpace.core.intake import (
    SQLITE,
    first_bytes,
    json_of,
    opened_database,
    read_bytes,
    read_json,
)
from trainpace.core.outcome import FailedProbe, Measurement
from trainpace.core.records import Record, from_json, to_jsonable
from trainpace.forecast import (
    MeasuredRun,
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
"""Precision for each name that timm, Lightning and torch use."""


class Given(NamedTuple):
    """Facts that the user states about a file.

    Attributes:
        device: Device to use if the file does not state one.
        precision: Precision to use if the file does not state one.
        keep_identity: If True, names and paths are stored as they are.
        accept_odd: If True, shared runs far off their forecast are accepted.
    """

    device: str = ""
    precision: Precision | None = None
    keep_identity: bool = False
    accept_odd: bool = False


Item = Entry | Sweep | Skipped


def content_ids() -> Callable[[Any], str]:
    """Return a function that makes ids from JSON-serializable content.

    If a file is read again, the ids are the same. Two equal rows of one file get different ids.
    """
    counts: Counter[str] = Counter()

    def id_of(content: Any) -> str:
        text = json.dumps(content, sort_keys=True, default=str, ensure_ascii=True)
        counts[text] += 1
        return content_id(text if counts[text] == 1 else f"{text}#{counts[text]}")

    return id_of


def entry_of_run(run: MeasuredRun, given: Given, id_: str, **facts: Any) -> Entry:
    """Return the entry of an imported run. `facts` are further fields of the entry."""
    execution = _execution_of(run, given)
    texts = {name: printable(getattr(run, name)) for name in _ENVIRONMENT}
    fields: dict[str, Any] = {
        "created_at": now_utc(),
        "model": printable(run.model_spec or run.model),
        "device": printable(run.gpu_canonical or run.gpu or given.device),
        "execution": execution,
        "num_devices": execution.world_size,
        "mode": mode_of(run),
        "sequence_length": _whole(run.seq_len),
        "image_size": _whole(run.img_size),
        "peak_memory_gib": run.peak_mem_gib,
        "environment": {name: text for name, text in texts.items() if text},
        "notes": printable(run.notes),
        "source": printable(run.file),
        **_outcome_of(run, execution),
    }
    fields["device"] = catalogue_name(fields["device"]) or UNKNOWN
    entry = Entry(id=id_, kind="import", **fields | facts)
    return entry if given.keep_identity else anonymous_entry(entry)


def _execution_of(run: MeasuredRun, given: Given) -> Execution:
    """Return the execution of a run, or raise TrainpaceError if a condition is missing."""
    if not (run.model_spec or run.model):
        raise TrainpaceError("the run states no model.")
    precision = run.precision or given.precision
    if not precision:
        raise TrainpaceError("the run states no known precision: pass --precision.")
    execution = execution_of(replace(run, precision=precision))
    if execution.optimizer == "none" or run.optimizer:
        return execution
    return replace(execution, optimizer=UNKNOWN)


def _whole(value: float | None) -> int | None:
    return int(value) if value else None


def _outcome_of(run: MeasuredRun, execution: Execution) -> dict[str, Any]:
    if milliseconds := measured_ms(run, execution):
        return {"outcome": "ok", "step_time_ms": milliseconds}
    if not _OUT_OF_MEMORY.search(run.notes):
        raise TrainpaceError("the run states no step time or throughput.")
    return {"outcome": "out_of_memory", "reason": "out of memory, by its source"}


def run_or_reason(run_of: Callable[..., Entry], *arguments: Any) -> Item:
    """Return `run_of(*arguments)`, or the reason why the run is skipped."""
    try:
        return run_of(*arguments)
    except TrainpaceError as error:
        return Skipped(error.message)


def columns_and_rows(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Return a table's columns and an iterator over its rows.

    Raises:
        UnreadableInput: If the file is not a table.
    """
    if first_bytes(path).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"[", b"{"):
        return read_table(path)
    data = read_json(path)
    rows = data if isinstance(data, list) else [data]
    if not all(isinstance(row, dict) for row in rows):
        raise UnreadableInput(f"{path} does not contain JSON objects.")
    return list(rows[0]) if rows else [], iter(rows)


LARGEST_META = 1 << 20
"""Maximum number of characters that are read of a meta.yaml file."""
_MLFLOW = {
    "model": "model_name_or_path model_name _name_or_path model architecture arch backbone",
    "batch_per_gpu": (
        "per_device_train_batch_size micro_batch_size micro_batch train_batch_size batch_size"
    ),
    "grad_accum": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "num_gpus": "world_size num_devices num_gpus n_gpu",
    "optimizer": "optimizer optimizer_name optim opt",
    "gpu": "gpu_name device_name gpu",
    "seq_len": "max_seq_length sequence_length seq_len block_size",
    "img_size": "image_size img_size",
}
"""Names of MLflow params for each column of a measured run, the most reliable first."""
_STEP_MS = "step_time_ms train_step_time_ms"
_STEPS_PER_S = "train_steps_per_second steps_per_second steps_per_sec"
_SAMPLES_PER_S = "train_samples_per_second samples_per_second samples_per_sec"
_MIXED: dict[str, Precision] = {"no": "fp32", "fp16": "amp_fp16", "bf16": "amp_bf16", "fp8": "fp8"}


class Logged(NamedTuple):
    """One run as MLflow logged it."""

    run_id: str
    start_ms: Any
    params: dict[str, str]
    metrics: dict[str, list[float]]


def is_mlruns(path: Path) -> bool:
    """Return True if the folder holds MLflow experiments, one experiment or one run."""
    return (path / "meta.yaml").is_file() or any(
        child.is_file() for child in path.glob("*/meta.yaml")
    )


def is_mlflow_db(path: Path) -> bool:
    """Return True if the SQLite file is a database of MLflow."""
    with opened_database(path) as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {"runs", "params", "metrics", "experiments"} <= {name for (name,) in tables}


def read_mlflow(path: Path, given: Given) -> Iterator[Item]:
    """Yield every run of an MLflow store that is not deleted."""
    for logged in _folder_runs(path) if path.is_dir() else _database_runs(path):
        yield run_or_reason(_mlflow_entry, path, logged, given)


def _mlflow_entry(path: Path, logged: Logged, given: Given) -> Entry:
    params = {_last(key): value for key, value in sorted(logged.params.items())}
    metrics = {_last(key): values for key, values in sorted(logged.metrics.items())}
    row: dict[str, Any] = {column: _first(params, names) for column, names in _MLFLOW.items()}
    optimizer = row["optimizer"].removesuffix("_torch")
    if steps_per_s := _median(metrics, _STEPS_PER_S):
        row["step_time_ms"] = 1e3 / steps_per_s
    row |= {
        "precision": _precision(params),
        "step_time_ms": _median(metrics, _STEP_MS) or row.get("step_time_ms"),
        "samples_per_sec": _median(metrics, _SAMPLES_PER_S),
        "file": f"mlflow {logged.run_id}",
    }
    try:
        moment = datetime.datetime.fromtimestamp(float(logged.start_ms) / 1e3, datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise TrainpaceError("the run's start is not a valid time.") from None
    facts = {"created_at": utc_text(moment), "seed": _whole(number(_first(params, "seed")))}
    entry = entry_of_run(run_of(path, 0, row), given, content_id(row["file"]), **facts)
    return replace(entry, execution=replace(entry.execution, optimizer=optimizer or UNKNOWN))


def _first(params: dict[str, str], names: str) -> str:
    values = (params.get(name, "").strip() for name in names.split())
    return next((value for value in values if value not in ("", "None")), "")


def _median(metrics: dict[str, list[float]], names: str) -> float | None:
    """Return the median of the first metric that has positive values."""
    for name in names.split():
        values = [value for value in metrics.get(name, []) if 0 < value < float("inf")]
        if values:
            return statistics.median(values)
    return None


def _precision(params: dict[str, str]) -> str:
    """Return the precision that the params state, or "" if it is unknown."""
    if word := params.get("mixed_precision", "").lower():
        return _MIXED.get(word, "")
    if word := params.get("precision") or params.get("dtype") or "":
        return PRECISION_NAMES.get(word.lower().removeprefix("torch."), "")
    if params.keys() & {"fp16", "bf16"}:  # Hugging Face: fp32 if neither is on.
        on = (name for name in ("fp16", "bf16") if params.get(name, "").lower() in ("true", "1"))
        return _MIXED[next(on, "no")]
    return ""


def _last(key: str) -> str:
    return re.split(r"[/.]", key)[-1].lower()


def _folder_runs(path: Path) -> Iterator[Logged]:
    """Yield the runs in an MLflow folder."""
    if not is_mlruns(path):
        raise UnreadableInput(f"{path} is not a folder of MLflow runs.")
    for meta in sorted(path.rglob("meta.yaml")):
        params, metrics = meta.parent / "params", meta.parent / "metrics"
        if ".trash" in meta.parts or not (params.is_dir() or metrics.is_dir()):
            continue  # Skip experiments, models and deleted runs.
        data = parse_yaml(_text(meta)[:LARGEST_META], str(meta))
        if isinstance(data, dict) and data.get("lifecycle_stage") != "deleted":
            yield Logged(
                meta.parent.name,
                data.get("start_time", 0),
                {key: _text(file).strip() for key, file in _files(params)},
                {key: _values(_text(file)) for key, file in _files(metrics)},
            )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield keys and their files. A key with slashes is a file in subfolders.

    Links are not followed.
    """
    for root, _, names in os.walk(folder, followlinks=False):
        for name in sorted(names):
            file = Path(root, name)
            if not file.is_symlink():
                yield file.relative_to(folder).as_posix(), file


def _text(file: Path) -> str:
    return read_bytes(file).decode("utf-8", "replace")


def _values(text: str) -> list[float]:
    """Return the values from lines of ``timestamp value step``."""
    values = []
    for line in text.splitlines():
        with contextlib.suppress(IndexError, ValueError):
            values.append(float(line.split()[1]))
    return values


def _database_runs(path: Path) -> Iterator[Logged]:
    """Yield the runs in an MLflow database."""
    if not is_mlflow_db(path):
        raise UnreadableInput(f"{path} is not a database of MLflow.")
    chosen = (
        "SELECT run_uuid, start_time FROM runs WHERE lifecycle_stage IS NOT 'deleted' ORDER BY"
        " start_time, run_uuid"
    )
    values = "SELECT key, value FROM {} WHERE run_uuid = ?"
    with opened_database(path) as database:
        for run_id, start in database.execute(chosen).fetchall():
            params = database.execute(values.format("params"), (run_id,))
            metrics: dict[str, list[float]] = {}
            for key, value in database.execute(values.format("metrics"), (run_id,)):
                if isinstance(value, int | float):
                    metrics.setdefault(key, []).append(float(value))
            texts = {key: str(value) for key, value in params}
            yield Logged(str(run_id), start or 0, texts, metrics)


RECORDS: dict[str, type[Entry | Sweep | Measurement | FailedProbe]] = {
    kind.__name__: kind for kind in (Entry, Sweep, Measurement, FailedProbe)
}
_ENVIRONMENT = ("framework", "framework_version", "interconnect")
_OUT_OF_MEMORY = re.compile(r"\bOOM\b|out[ -]of[ -]memory", re.IGNORECASE)
SHARED = "shared"
"""Format of files from `trainpace journal share`. Their runs are checked before the import."""
_ROUNDED_BELOW = 0.1
"""Smallest steps per second that are precise enough to use.

They are rounded to three decimals. Below this value, the error exceeds half a percent.
"""


def read_own(path: Path, given: Given) -> Iterator[Item]:
    """Yield the runs and sweeps of an export. A measurement becomes a run with a hash as its id.

    Raises:
        UnreadableInput: If a record is damaged. No file is then imported in part.
    """
    _, rows = columns_and_rows(path)
    id_of = content_ids()
    for index, row in enumerate(rows):
        where = f"{path} record {index + 1}"
        data = _record_of(row, path, where)
        kind = RECORDS.get(str(data.get("record")))
        if kind is None:
            yield Skipped(f"a record of the kind {str(data.get('record'))[:40]!r} is not a run")
            continue
        try:
            record = from_json(json.dumps(data), kind, where)
            if isinstance(record, Measurement | FailedProbe):
                id_ = id_of({key: value for key, value in data.items() if key != "schema_version"})
                source = str(path) if given.keep_identity else path.name
                record = entry_of(record, keep_identity=given.keep_identity, id=id_, source=source)
        except UnreadableInput:
            raise
        except TrainpaceError as error:
            raise UnreadableInput(f"{where}: {error.message}", error.hint) from None
        yield record


def _record_of(row: dict[str, Any], path: Path, where: str) -> dict[str, Any]:
    """Return the JSON object of a record, which is a column of an exported table."""
    if path.suffix not in (".csv", ".parquet"):
        return row
    data = json_of(str(row.get("record")), where)
    if not isinstance(data, dict):
        raise UnreadableInput(f"{where} contains no record of a journal.")
    return data


def read_published(path: Path, given: Given) -> Iterator[Item]:
    """Yield one run per row of a table.

    An invalid number rejects the whole file. A row without a required field is skipped.
    """
    columns, rows = columns_and_rows(path)
    if not {"model_spec", "model"} & set(columns):
        raise UnreadableInput(f"{path} has no model_spec or model column.")
    id_of = content_ids()
    for index, row in enumerate(rows):
        run = run_of(path, index, row)
        stated = {
            name: value
            for name, value in to_jsonable(run).items()
            if value and name not in ("index", "file")
        }
        yield run_or_reason(entry_of_run, run, given, id_of(stated))


class FileName(NamedTuple):
    """Conditions parsed from the name of a benchmark file of timm."""

    precision: Precision | None
    channels_last: bool
    compile: bool
    device: str
    environment: dict[str, str]


def read_name(name: str) -> FileName:
    """Parse a file name at its hyphens. The last part without another meaning is the device."""
    precision: Precision | None = None
    environment = {"framework": "timm benchmark.py"}
    device, channels_last, compiled = "", False, False
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
    """Return True if the columns are those of timm's benchmark results."""
    return "model" in columns and bool(
        {"train_samples_per_sec", "infer_samples_per_sec"} & set(columns)
    )


def read_timm(path: Path, given: Given) -> Iterator[Item]:
    """Yield a run for each row and phase (train, infer) that has a time.

    The file's name states the conditions, as in benchmark-train-amp-nhwc-pt210-cu121-rtx3090.csv. A
    training time covers a whole step of SGD with momentum on a batch that is already on the device.
    """
    columns, rows = columns_and_rows(path)
    if not is_timm(columns):
        raise UnreadableInput(
            f"{path} lacks the columns of timm's benchmark (model, train_samples_per_sec, ...)."
        )
    name, id_of = read_name(path.name), content_ids()
    for row in rows:
        stated = {key: value for key, value in row.items() if value not in (None, "")}
        phases = [phase for phase in ("train", "infer") if f"{phase}_samples_per_sec" in stated]
        if not phases:
            failed = " (the benchmark failed on it)" if row.get("error") else ""
            yield Skipped(f"the model has no time{failed}")
        for phase in phases:
            id_ = id_of([*name[:4], phase, stated])
            yield run_or_reason(_timm_entry, path, stated, phase, name, given, id_)


_TIMM = {
    "batch_per_gpu": "batch_size",
    "img_size": "img_size",
    "step_time_ms": "step_time",
    "samples_per_sec": "samples_per_sec",
}
"""timm's column, without its prefix train_ or infer_, for each column of a measured run."""


def _timm_entry(
    path: Path, row: dict[str, Any], phase: str, name: FileName, given: Given, id_: str
) -> Entry:
    parameters = number(row.get("param_count"))
    columns = {column: row.get(f"{phase}_{key}") for column, key in _TIMM.items()} | {
        "model_spec": f"timm:{row.get('model', '')}",
        "gpu": given.device or name.device,
        "precision": given.precision or name.precision,
        "optimizer": "sgd momentum",
        "memory_format": "nhwc" if name.channels_last else "",
        "compile": "compile" if name.compile else "",
        "mode": "train" if phase == "train" else "inference",
        "notes": f"{parameters:g} M parameters" if parameters else "",
        "file": path.name,
    }
    return entry_of_run(run_of(path, 0, columns), given, id_, environment=name.environment)


def is_huggingface(data: Any) -> bool:
    """Return True if the JSON holds results of Hugging Face's Trainer."""
    return isinstance(data, dict) and ("log_history" in data or "train_runtime" in data)


def read_huggingface(path: Path, given: Given) -> Iterator[Item]:
    """Yield the run of a Hugging Face results file. A file without training is skipped.

    The step time is the run's wall-clock time divided by its number of steps. It therefore includes
    evaluation, checkpoints and the first steps. Device, precision and optimizer are only in
    training_args.bin, which is a pickle and is never opened.
    """
    data = read_json(path)
    if not is_huggingface(data):
        raise UnreadableInput(
            f"{path} is neither all_results.json nor trainer_state.json of a Trainer."
        )
    yield run_or_reason(_huggingface_entry, path, data, given, content_ids()(data))


def _huggingface_entry(path: Path, data: dict[str, Any], given: Given, id_: str) -> Entry:
    logs = _logs_of(data)
    summary = next((log for log in reversed(logs) if "train_runtime" in log), None)
    if summary is None:
        raise TrainpaceError("the training did not end, so its time is unknown.")
    milliseconds = _huggingface_ms(summary, data)
    rate = number(summary.get("train_samples_per_second")) or 0.0
    step_samples = round(rate * milliseconds / 1e3)
    micro = int(number(data.get("train_batch_size")) or 0)
    accumulation = max(1, round(step_samples / micro)) if micro else 1
    notes = ["wall clock of the whole run over its steps, with evaluation and checkpoints"]
    if not micro:
        notes.append("the batch is samples per step, over all devices and accumulation")
    if accumulation > 1:
        notes.append(f"{accumulation} micro-batches per step, accumulated or on several devices")
    run = MeasuredRun(
        index=0,
        model=_huggingface_model(path.parent / "config.json"),
        batch_per_gpu=micro or step_samples,
        grad_accum=accumulation,
        step_time_ms=milliseconds,
        notes="; ".join(notes),
        file=path.name,
    )
    return entry_of_run(run, given, id_, losses=_losses(logs))


def _logs_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the logs in trainer_state.json. all_results.json is itself a single log."""
    history = data.get("log_history")
    return (
        [log for log in history if isinstance(log, dict)] if isinstance(history, list) else [data]
    )


def _losses(logs: list[dict[str, Any]]) -> tuple[float | None, ...]:
    losses = [log["loss"] for log in logs if isinstance(log.get("loss"), int | float)]
    return tuple(float(loss) if abs(loss) < float("inf") else None for loss in losses)


def _huggingface_ms(summary: dict[str, Any], data: dict[str, Any]) -> float:
    """Return the time per step in ms.

    If steps per second is too coarsely rounded, it is the runtime divided by the number of steps.
    """
    per_second, runtime = map(number, map(summary.get, ("train_steps_per_second", "train_runtime")))
    steps = number(data.get("global_step"))
    if per_second and (per_second >= _ROUNDED_BELOW or not steps):
        return 1e3 / per_second
    if not (runtime and steps):
        raise TrainpaceError("the file states no steps per second.")
    return 1e3 * runtime / steps


def _huggingface_model(config: Path) -> str:
    """Return the model's name from the config.json beside the results."""
    data = read_json(config) if config.is_file() else {}
    if not isinstance(data, dict):
        return UNKNOWN
    names = [data.get("_name_or_path"), *(data.get("architectures") or []), data.get("model_type")]
    return next((name for name in names if isinstance(name, str) and name), UNKNOWN)


MOST_REASONS = 12
"""Maximum number of different reasons for skipped runs. A hostile file could give thousands."""


class Imported(Record):
    """Result of importing one file.

    A run was new, already in the journal, or skipped for a reason. `lessons` describes what the
    journal learned from a file of shared runs.
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
    """Import a file or an MLflow folder into the journal, completely or not at all."""
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
    reasons = dict(skipped.most_common(MOST_REASONS))
    if rest := skipped.total() - sum(reasons.values()):
        reasons["for other reasons"] = rest
    return Imported(
        file=path.name,
        format=name,
        new=new,
        already_there=read - new,
        skipped=reasons,
        lessons=None if shared is None else shared.lessons,
    )


def format_of(path: Path) -> str:
    """Return the name of a file's format.

    Raises:
        UnreadableInput: If the format is unknown.
    """
    unknown = UnreadableInput(
        f"{path} is not in a known format.",
        f"Known: {', '.join((*FORMATS, SHARED))}; see --format.",
    )
    if path.is_dir():
        if is_mlruns(path):
            return "mlflow"
        raise unknown
    head = first_bytes(path)
    if head.startswith(SQLITE):
        if is_mlflow_db(path):
            return "mlflow"
        raise UnreadableInput(
            f"{path} is a database.", f"If it is a journal: trainpace journal merge {path}."
        )
    columns, rows = columns_and_rows(path)
    if not columns and head.lstrip()[:1] == b"[":
        return "trainpace"  # The export is empty.
    named = set(columns)
    own = {"record", "id", "created_at"} <= named or str(next(rows, {}).get("record")) in RECORDS
    formats = {
        "timm": is_timm(columns),
        SHARED: {"record", "runs"} <= named,
        "trainpace": own,
        "hf": is_huggingface(dict.fromkeys(columns)),
        "runs": bool({"model_spec", "model"} & named),
    }
    for name, matches in formats.items():
        if matches:
            return name
    raise unknown


FORMATS: dict[str, Callable[[Path, Given], Iterator[Item]]] = {
    "trainpace": read_own,
    "runs": read_published,
    "timm": read_timm,
    "hf": read_huggingface,
    "mlflow": read_mlflow,
}
