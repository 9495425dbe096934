"""Experiment trackers: runs exported to MLflow and to Weights & Biases, and MLflow's local stores read without mlflow.

A store is a folder ``mlruns`` (meta.yaml, params/, metrics/) or ``mlflow.db``. A run is imported if it states a model, a batch
size and a precision, and logged a step time or a throughput under one of the names below, which Hugging Face's, Lightning's and
our own loggers use. Only a name's last component counts.
"""

import contextlib
import datetime
import logging
import os
import re
import sqlite3
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec.structs import asdict

from trainpace.configs import parse_yaml
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution, Precision
from trainpace.core.intake import read_bytes
from trainpace.forecast import as_precision, number
from trainpace.journal.entry import Entry, content_id, printable, utc_text
from trainpace.journal.exchange import (
    PRECISION_NAMES,
    UNKNOWN,
    Given,
    Item,
    imported,
    run_or_reason,
)

_DAMAGED = (sqlite3.Error, UnicodeDecodeError)
"""sqlite3 cannot always say what is wrong with a damaged file."""
EXPERIMENT = "trainpace"
ID_TAG = "trainpace.id"
LONGEST = 5000
"""The longest tag or parameter, in characters, that every version of MLflow takes."""
AT_ONCE = 1000
_EXECUTION = (
    "nnodes nproc_per_node tp pp cp precision optimizer engine zero_stage shard_size"
    " offload_optimizer offload_parameters activation_checkpointing compile channels_last"
    " micro_batch"
).split()
_CONDITIONS = "num_devices sequence_length image_size mode seed".split()
_NUMBERS = (
    "samples_per_second peak_memory_gib reserved_memory_gib forecast_ms forecast_low_ms"
    " forecast_high_ms".split()
)
_WORDS = "id kind outcome reason notes command commit source sweep".split()
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


def export_mlflow(where: str, entries: Iterable[Entry], experiment: str = EXPERIMENT) -> int:
    """Add runs to the experiment of a tracking store (a folder, a database or a server); returns how many were new (by id)."""
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
        raise UnreadableInput(f"MLflow at {where} refuses: {str(error).splitlines()[0]}") from None


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
    """Add runs to a project, NAME or ENTITY/NAME, or with WANDB_MODE=offline to a folder for `wandb sync`.

    Returns their number. A run keeps its id, so exporting twice makes no second one.
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
            f"Weights & Biases refuses: {str(error).splitlines()[0]}",
            "wandb login, or WANDB_MODE=offline.",
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
    """The conditions of the run; those that do not apply are left out."""
    settings: dict[str, Any] = {
        "model_name": entry.model,
        "device_name": entry.device,
        "gradient_accumulation_steps": entry.execution.accumulation,
        **{name: getattr(entry.execution, name) for name in _EXECUTION},
        **{name: getattr(entry, name) for name in _CONDITIONS},
    }
    return {name: value for name, value in settings.items() if value is not None}


def numbers_of(entry: Entry) -> dict[str, float]:
    """Measured and forecast values, one number each."""
    numbers = {
        "median_step_ms": entry.step_time_ms,
        **{name: getattr(entry, name) for name in _NUMBERS},
    }
    if entry.interval_ms is not None:
        numbers |= {"step_ms_low": entry.interval_ms.low, "step_ms_high": entry.interval_ms.high}
    if entry.step is not None:
        numbers |= asdict(entry.step)
    return {name: float(value) for name, value in numbers.items() if value is not None}


def series_of(entry: Entry) -> dict[str, list[tuple[int, float]]]:
    """(step, value) pairs of everything recorded per step; a run without single steps has its median as the only one."""
    times = entry.step_times_ms or (() if entry.step_time_ms is None else (entry.step_time_ms,))
    return {
        "step_time_ms": list(enumerate(times, start=len(entry.warmup_ms))),
        "loss": [(i, loss) for i, loss in enumerate(entry.losses) if loss is not None],
    }


def words_of(entry: Entry) -> dict[str, str]:
    """Texts on the run's origin and outcome."""
    texts = {name: getattr(entry, name) for name in _WORDS} | entry.environment
    return {name: text for name, text in texts.items() if text}


def start_ms(entry: Entry) -> int:
    """Milliseconds since 1970."""
    return round(datetime.datetime.fromisoformat(entry.created_at).timestamp() * 1e3)


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
