"""Trials as the journal records runs."""

from typing import Any

from trainpace.journal import Entry, new_id, now_utc, printable
from trainpace.ladder.climbed import Attempt
from trainpace.ladder.rungs import words_of

_OUTCOMES = {"out of memory": "out_of_memory", "timed out": "timeout"}


def entry_of_trial(one: Attempt, device: str, seed: int, model: str) -> Entry:
    """The entry of a trial, with what was forecast for it."""
    e, measured, foreseen = one.setup.execution, one.measured, one.foreseen
    fields: dict[str, Any] = {}
    if foreseen.step_ms is not None and foreseen.interval_ms is not None:
        fields |= {
            "forecast_ms": foreseen.step_ms, "forecast_low_ms": foreseen.interval_ms.low,
            "forecast_high_ms": foreseen.interval_ms.high, "forecast_basis": foreseen.basis,
        }  # fmt: skip
    if measured is None:
        fields |= {"outcome": _OUTCOMES.get(one.failure.partition(":")[0], "crashed"), "reason": printable(one.failure)}
    else:
        fields |= {
            "outcome": "ok", "step_time_ms": measured.median_ms, "interval_ms": measured.interval_ms,
            "losses": measured.losses, "peak_memory_gib": measured.peak_memory_gib,
            "reserved_memory_gib": measured.reserved_memory_gib, "environment": measured.environment,
        }  # fmt: skip
    return Entry(
        id=new_id(), created_at=now_utc(), kind="run", model=model, device=device, execution=e,
        num_devices=e.world_size, seed=seed, notes=words_of(one.setup), **fields,
    )  # fmt: skip
