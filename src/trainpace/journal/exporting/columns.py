"""A run in the terms of trackers: settings, single numbers, and numbers per step."""

import datetime
from typing import Any

from trainpace.journal.entry import Entry
from trainpace.outcome import STEP_PARTS

_SETTINGS = (
    "nnodes nproc_per_node tp pp cp precision optimizer engine zero_stage shard_size offload_optimizer offload_parameters"
    " activation_checkpointing compile channels_last micro_batch"
).split()


def settings_of(entry: Entry) -> dict[str, str | int | bool]:
    """The conditions of the run; those that do not apply are left out."""
    x = entry.execution
    settings: dict[str, Any] = {
        "model_name": entry.model, "device_name": entry.device, "num_devices": entry.num_devices,
        "gradient_accumulation_steps": x.accumulation, **{name: getattr(x, name) for name in _SETTINGS},
        "sequence_length": entry.sequence_length, "image_size": entry.image_size, "mode": entry.mode, "seed": entry.seed,
    }  # fmt: skip
    return {name: value for name, value in settings.items() if value is not None}


def numbers_of(entry: Entry) -> dict[str, float]:
    """Measured and forecast values, one number each."""
    parts = {} if entry.step is None else {part: getattr(entry.step, part) for part in STEP_PARTS}
    interval = entry.interval_ms
    numbers = {
        "median_step_ms": entry.step_time_ms,
        "step_ms_low": interval and interval.low, "step_ms_high": interval and interval.high,
        "samples_per_second": entry.samples_per_second, "peak_memory_gib": entry.peak_memory_gib,
        "reserved_memory_gib": entry.reserved_memory_gib, "forecast_ms": entry.forecast_ms,
        "forecast_low_ms": entry.forecast_low_ms, "forecast_high_ms": entry.forecast_high_ms, **parts,
    }  # fmt: skip
    return {name: float(value) for name, value in numbers.items() if value is not None}


def series_of(entry: Entry) -> dict[str, list[tuple[int, float]]]:
    """(step, value) pairs of everything recorded per step; a run without single steps has its median as the only one."""
    times = entry.step_times_ms or (() if entry.step_time_ms is None else (entry.step_time_ms,))
    first = len(entry.warmup_ms)
    return {
        "step_time_ms": [(first + i, ms) for i, ms in enumerate(times)],
        "loss": [(i, loss) for i, loss in enumerate(entry.losses) if loss is not None],
    }


def words_of(entry: Entry) -> dict[str, str]:
    """Texts on the run's origin and outcome."""
    texts = {
        "id": entry.id, "kind": entry.kind, "outcome": entry.outcome, "reason": entry.reason, "notes": entry.notes,
        "command": entry.command, "commit": entry.commit or "", "source": entry.source, "sweep": entry.sweep or "",
        **entry.environment,
    }  # fmt: skip
    return {name: text for name, text in texts.items() if text}


def start_ms(entry: Entry) -> int:
    """Milliseconds since 1970."""
    return round(datetime.datetime.fromisoformat(entry.created_at).timestamp() * 1e3)
