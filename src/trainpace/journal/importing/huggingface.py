"""Hugging Face's Trainer: ``all_results.json`` (or ``train_results.json``) and ``trainer_state.json``.

The step time is the run's wall-clock time divided by its steps, so it includes evaluation, checkpoints and the first
steps. Device, precision and optimizer are stated only in training_args.bin, a pickle that is never opened.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.execution import Execution
from trainpace.journal.entry import Entry
from trainpace.journal.importing.reading import UNKNOWN, ContentIds, Given, Item, imported, run_or_reason
from trainpace.records import read_bytes
from trainpace.validation import number

_ROUNDED_BELOW = 0.1
"""Steps per second are rounded to three decimals; below this value that exceeds half a per cent."""


def is_huggingface(data: Any) -> bool:
    return isinstance(data, dict) and ("log_history" in data or "train_runtime" in data)


def read_huggingface(path: Path, given: Given) -> Iterator[Item]:
    """The run of a file. A file that states no training is skipped with its reason."""
    data = _load(path)
    if not is_huggingface(data):
        raise UnreadableInput(f"{path} is neither all_results.json nor trainer_state.json of a Trainer.")
    yield run_or_reason(_entry, path, data, given, ContentIds().of(data))


def _entry(path: Path, data: dict[str, Any], given: Given, id_: str) -> Entry:
    history = data.get("log_history")
    logs = [log for log in history if isinstance(log, dict)] if isinstance(history, list) else [data]
    summary = next((log for log in reversed(logs) if "train_runtime" in log), None)
    if summary is None:
        raise TrainpaceError("the training did not end, so that its time is not stated.")
    per_second, samples = number(summary.get("train_steps_per_second")), number(summary.get("train_samples_per_second"))
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
        accumulation=max(1, round(step_samples / micro)) if micro and step_samples else 1, precision=given.precision,
        optimizer=UNKNOWN,
    )  # fmt: skip
    if execution.accumulation > 1:
        notes.append(f"{execution.accumulation} micro-batches a step, accumulated or on several devices")
    losses = [log["loss"] for log in logs if isinstance(log.get("loss"), int | float)]
    return imported(
        given, id_, given.device, model=_model(path.parent / "config.json"), execution=execution,
        step_time_ms=milliseconds, notes="; ".join(notes), source=path.name,
        losses=tuple(float(loss) if abs(loss) < float("inf") else None for loss in losses),
    )  # fmt: skip


def _model(config: Path) -> str:
    """The model's name in the config.json beside the results."""
    data = _load(config) if config.is_file() else {}
    if not isinstance(data, dict):
        return UNKNOWN
    names = [data.get("_name_or_path"), *(data.get("architectures") or []), data.get("model_type")]
    return next((name for name in names if isinstance(name, str) and name), UNKNOWN)


def _load(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not valid JSON ({str(error)[:200]}).") from None
