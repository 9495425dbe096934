"""Export of runs to files (JSON, CSV, Parquet) and to trackers (MLflow, Weights & Biases).

All file formats contain every complete record. JSON is a list with one record per line. CSV and
Parquet have the columns that ``trainpace validate`` reads. Their column `record` is used to import
the runs again. A JSON file above 256 MiB cannot be imported again.
"""

import csv
import datetime
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from trainpace.core.errors import TrainpaceError, UnreadableInput, message_of
from trainpace.core.records import to_json, written_aside
from trainpace.journal.entry import Entry, Sweep

ROWS_AT_ONCE = 10_000
_TEXTS = (
    "id created_at kind outcome model_spec model gpu precision memory_format compile optimizer"
    " parallelism mode notes file"
).split()
_COUNTS = "num_gpus num_nodes batch_per_gpu global_batch grad_accum seq_len img_size".split()
_NUMBERS = (
    "step_time_ms step_time_ms_low step_time_ms_high samples_per_sec peak_mem_gib reserved_mem_gib"
    " forecast_ms forecast_low_ms forecast_high_ms"
).split()
COLUMNS = (*_TEXTS, *_COUNTS, *_NUMBERS, "record")
"""Columns of CSV and Parquet files."""


def export(path: Path, records: Iterable[Entry | Sweep]) -> int:
    """Write records to FILE.json, .csv or .parquet, all or none, and return their number.

    Only a few thousand records are in memory at a time.
    """
    writers = {".json": _write_json, ".csv": _write_csv, ".parquet": _write_parquet}
    write = writers.get(path.suffix.lower())
    if write is None:
        raise TrainpaceError(
            f"cannot tell the format of {path.name} from its extension.",
            "End it in .parquet, .csv or .json.",
        )
    numbers = itertools.count()
    with written_aside(path) as aside:
        write(aside, (record for record, _ in zip(records, numbers, strict=False)))
    return next(numbers)


def columns_of(record: Entry | Sweep) -> dict[str, Any]:
    """Return the columns of a record. For a sweep, only its head and the record are filled in."""
    head = {"id": record.id, "created_at": record.created_at, "record": to_json(record)}
    if isinstance(record, Sweep):
        return head | {"kind": "sweep"}
    e, x = record, record.execution
    checkpointing = x.activation_checkpointing
    return {
        **{name: getattr(e, name) for name in COLUMNS if name in e.__struct_fields__},
        **head,
        "model_spec": e.model,
        "gpu": e.device,
        "precision": x.precision,
        "optimizer": x.optimizer,
        "memory_format": "nhwc" if x.channels_last else "nchw",
        "compile": "compile" if x.compile else "eager",
        "parallelism": (
            f"dp={x.data_parallel_size},tp={x.tp},pp={x.pp},cp={x.cp},zero={x.zero_stage}"
            + (f",ac={checkpointing}" if checkpointing != "none" else "")
        ),
        "file": e.source,
        "num_gpus": e.num_devices,
        "num_nodes": x.nnodes,
        "batch_per_gpu": x.micro_batch,
        "global_batch": x.global_batch,
        "grad_accum": x.accumulation,
        "seq_len": e.sequence_length,
        "img_size": e.image_size,
        "step_time_ms_low": e.interval_ms.low if e.interval_ms else None,
        "step_time_ms_high": e.interval_ms.high if e.interval_ms else None,
        "samples_per_sec": e.samples_per_second,
        "peak_mem_gib": e.peak_memory_gib,
        "reserved_mem_gib": e.reserved_memory_gib,
    }


def _write_json(path: Path, records: Iterable[Entry | Sweep]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        for i, record in enumerate(records):
            file.write((",\n" if i else "\n") + to_json(record))
        file.write("\n]\n")


def _write_csv(path: Path, records: Iterable[Entry | Sweep]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)  # With \r\n as line end, a lone \r is quoted.
        writer.writeheader()
        writer.writerows(map(columns_of, records))


def _write_parquet(path: Path, records: Iterable[Entry | Sweep]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TrainpaceError(
            "writing Parquet needs pyarrow.", "pip install pyarrow, or export JSON or CSV."
        ) from None
    kinds = (
        dict.fromkeys(_TEXTS, pa.string())
        | dict.fromkeys(_COUNTS, pa.int64())
        | dict.fromkeys(_NUMBERS, pa.float64())
    )
    schema = pa.schema([*kinds.items(), ("record", pa.string())])
    rows = map(columns_of, records)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(chunk, schema))


EXPERIMENT = "trainpace"
ID_TAG = "trainpace.id"
LONGEST = 5000
"""Maximum length of a tag or parameter, in characters, that every version of MLflow accepts."""
AT_ONCE = 1000
_EXECUTION = (
    "nnodes nproc_per_node tp pp cp precision optimizer engine zero_stage shard_size"
    " offload_optimizer offload_parameters activation_checkpointing compile channels_last"
    " micro_batch"
).split()
_CONDITIONS = "num_devices sequence_length image_size mode seed".split()
_METRICS = (
    "samples_per_second peak_memory_gib reserved_memory_gib forecast_ms forecast_low_ms"
    " forecast_high_ms".split()
)
_WORDS = "id kind outcome reason notes command commit source sweep".split()


def export_mlflow(where: str, entries: Iterable[Entry], experiment: str = EXPERIMENT) -> int:
    """Add runs to an experiment in an MLflow tracking store, and return the number of new runs.

    `where` is a folder, a database or a server. A run with an id that is already there is skipped.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise TrainpaceError(
            "an export to MLflow needs mlflow.", "pip install 'trainpace[mlflow]'."
        ) from None
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    client = MlflowClient(tracking_uri=where if "://" in where else Path(where).absolute().as_uri())
    try:
        existing = client.get_experiment_by_name(experiment)
        place = (
            existing.experiment_id if existing is not None else client.create_experiment(experiment)
        )
        return sum(_add_to_mlflow(client, place, entry) for entry in entries)
    except (MlflowException, OSError) as error:
        raise UnreadableInput(f"MLflow at {where} failed: {message_of(error)}") from None


def _add_to_mlflow(client: Any, experiment: str, entry: Entry) -> int:
    from mlflow.entities import Metric, Param, RunTag

    if client.search_runs([experiment], f"tags.`{ID_TAG}` = '{entry.id}'", max_results=1):
        return 0
    start = start_ms(entry)
    run = client.create_run(
        experiment, start_time=start, run_name=f"{entry.model} {entry.id[:8]}"[:250]
    )
    numbers = {name: [(0, value)] for name, value in numbers_of(entry).items()} | series_of(entry)
    metrics = [
        Metric(name, value, start, step)
        for name, points in numbers.items()
        for step, value in points
    ]
    params = [Param(name, str(value)[:LONGEST]) for name, value in settings_of(entry).items()]
    tags = [RunTag(f"trainpace.{name}", text[:LONGEST]) for name, text in words_of(entry).items()]
    client.log_batch(run.info.run_id, params=params, tags=tags)
    for i in range(0, len(metrics), AT_ONCE):
        client.log_batch(run.info.run_id, metrics=metrics[i : i + AT_ONCE])
    client.set_terminated(run.info.run_id, "FINISHED" if entry.outcome == "ok" else "FAILED", start)
    return 1


def export_wandb(project: str, entries: Iterable[Entry]) -> int:
    """Add runs to a Weights & Biases project, NAME or ENTITY/NAME, and return their number.

    With WANDB_MODE=offline, they go to a folder for `wandb sync`. A run keeps its id, so a second
    export adds nothing.
    """
    try:
        import wandb
    except ImportError:
        raise TrainpaceError(
            "an export to Weights & Biases needs wandb.", "pip install 'trainpace[wandb]'."
        ) from None
    entity, _, name = project.rpartition("/")
    try:
        return sum(_add_to_wandb(wandb, name, entity or None, entry) for entry in entries)
    except (wandb.Error, OSError) as error:
        raise UnreadableInput(
            f"Weights & Biases failed: {message_of(error)}",
            "Run wandb login, or set WANDB_MODE=offline.",
        ) from None


def _add_to_wandb(wandb: Any, project: str, entity: str | None, entry: Entry) -> int:
    run = wandb.init(
        project=project,
        entity=entity,
        id=entry.id,
        name=f"{entry.model} {entry.id[:8]}",
        config=settings_of(entry),
        tags=[entry.kind, entry.outcome],
        notes=entry.notes or None,
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(
            console="off", silent=True, disable_git=True, x_disable_stats=True, x_disable_meta=True
        ),
    )
    run.config.update({"trainpace": words_of(entry)}, allow_val_change=True)
    rows: dict[int, dict[str, float]] = {}
    for name, points in series_of(entry).items():
        for step, value in points:
            rows.setdefault(step, {})[name] = value
    for step in sorted(rows):
        run.log(rows[step], step=step)
    run.summary.update({**numbers_of(entry), "created_at": entry.created_at})
    run.finish(exit_code=0 if entry.outcome == "ok" else 1)
    return 1


def settings_of(entry: Entry) -> dict[str, str | int | bool]:
    """Return the conditions that apply to the run."""
    settings: dict[str, Any] = {
        "model_name": entry.model,
        "device_name": entry.device,
        "gradient_accumulation_steps": entry.execution.accumulation,
        **{name: getattr(entry.execution, name) for name in _EXECUTION},
        **{name: getattr(entry, name) for name in _CONDITIONS},
    }
    return {name: value for name, value in settings.items() if value is not None}


def numbers_of(entry: Entry) -> dict[str, float]:
    """Return the measured and forecast values."""
    numbers = {
        "median_step_ms": entry.step_time_ms,
        **{name: getattr(entry, name) for name in _METRICS},
    }
    if entry.interval_ms is not None:
        numbers |= {"step_ms_low": entry.interval_ms.low, "step_ms_high": entry.interval_ms.high}
    if entry.step is not None:
        numbers |= asdict(entry.step)
    return {name: float(value) for name, value in numbers.items() if value is not None}


def series_of(entry: Entry) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs of all values recorded per step.

    If single steps were not recorded, the median is the only value.
    """
    times = entry.step_times_ms or (() if entry.step_time_ms is None else (entry.step_time_ms,))
    return {
        "step_time_ms": list(enumerate(times, start=len(entry.warmup_ms))),
        "loss": [(i, loss) for i, loss in enumerate(entry.losses) if loss is not None],
    }


def words_of(entry: Entry) -> dict[str, str]:
    """Return the texts about the run's origin and outcome."""
    texts = {name: getattr(entry, name) for name in _WORDS} | entry.environment
    return {name: text for name, text in texts.items() if text}


def start_ms(entry: Entry) -> int:
    """Return the start of the run in milliseconds since 1970."""
    return round(datetime.datetime.fromisoformat(entry.created_at).timestamp() * 1e3)
