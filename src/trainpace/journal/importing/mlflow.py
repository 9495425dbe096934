"""MLflow's local stores, read without mlflow: a folder ``mlruns`` (meta.yaml, params/, metrics/) or ``mlflow.db``.

A run is imported if it states a model, a batch size and a precision, and logged a step time or a throughput under one
of the names below, which Hugging Face's, Lightning's and our own loggers use. Only a name's last component counts.
"""

import contextlib
import datetime
import os
import re
import sqlite3
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from trainpace.configs import parse_yaml
from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.execution import Execution, Precision
from trainpace.journal.entry import Entry, content_id, printable, utc_text
from trainpace.journal.importing.reading import PRECISION_NAMES, UNKNOWN, Given, Item, imported, run_or_reason
from trainpace.records import read_bytes
from trainpace.validation import as_precision, number

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
    return (path / "meta.yaml").is_file() or any(child.is_file() for child in path.glob("*/meta.yaml"))


def is_mlflow_db(path: Path) -> bool:
    try:
        with contextlib.closing(_connected(path)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
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
        micro_batch=batch, accumulation=_whole(params, "accumulation") or 1,
        nproc_per_node=_whole(params, "devices") or 1, precision=given.precision or _precision(params),
        optimizer=_stated(params, "optimizer").removesuffix("_torch") or UNKNOWN,
    )  # fmt: skip
    try:
        moment = datetime.datetime.fromtimestamp(logged.start_ms / 1e3, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        raise TrainpaceError("the run's start is not a valid time.") from None
    return imported(
        given, content_id(f"mlflow {logged.run_id}"), given.device or _stated(params, "device"), created_at=utc_text(moment),
        model=printable(model), num_devices=execution.world_size, execution=execution,
        sequence_length=_whole(params, "sequence"), image_size=_whole(params, "image"),
        step_time_ms=_step_ms(metrics, execution), seed=_whole(params, "seed"), source=f"mlflow {logged.run_id}",
    )  # fmt: skip


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
        "the run logged no step time or throughput (metrics such as step_time_ms, train_steps_per_second)."
    )


def _precision(params: dict[str, str]) -> Precision:
    if word := params.get("mixed_precision", "").lower():
        if word in _MIXED:
            return _MIXED[word]
    elif word := (params.get("precision") or params.get("dtype") or "").lower().removeprefix("torch."):
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
        if ".trash" in meta.parts or (not (run / "params").is_dir() and not (run / "metrics").is_dir()):
            continue  # an experiment's, a model's, or a deleted run
        data = parse_yaml(_text(meta)[:LARGEST_VALUE], str(meta))
        if not isinstance(data, dict) or data.get("lifecycle_stage") == "deleted":
            continue
        start = data.get("start_time")
        params = {key: _text(file)[:LARGEST_VALUE].strip() for key, file in _files(run / "params")}
        metrics = {key: _values(_text(file)) for key, file in _files(run / "metrics")}
        yield Logged(run.name, float(start) if isinstance(start, int | float) else 0.0, params, metrics)


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
        "SELECT run_uuid, start_time FROM runs WHERE lifecycle_stage IS NOT 'deleted' ORDER BY start_time, run_uuid"
    )
    values = "SELECT key, value FROM {} WHERE run_uuid = ?"
    try:
        with contextlib.closing(_connected(path)) as connection:
            for run_id, start in connection.execute(chosen).fetchall():
                params = dict(connection.execute(values.format("params"), (run_id,)).fetchall())
                metrics: dict[str, list[float]] = {}
                for key, value in connection.execute(values.format("metrics"), (run_id,)).fetchall():
                    if isinstance(value, int | float):
                        metrics.setdefault(key, []).append(float(value))
                texts = {key: str(value) for key, value in params.items()}
                yield Logged(str(run_id), float(start or 0), texts, metrics)
    except sqlite3.Error as error:
        raise UnreadableInput(f"{path} cannot be read: {error}.") from None
