"""A callback's training, stored as a run of the journal."""

import math
import statistics
from importlib.metadata import version

from trainpace.execution import Execution
from trainpace.journal import Entry, Journal, anonymous_entry, new_id, now_utc
from trainpace.medians import median_interval, warmup_steps
from trainpace.outcome import Interval


def keep_run(
    place: str | None, execution: Execution, device: str, step_s: tuple[float, ...], losses: tuple[float | None, ...], *,
    model: str, notes: str, engine: str, keep_identity: bool, sequence_length: int | None = None, seed: int | None = None,
) -> Entry:  # fmt: skip
    """Store a training's latest steps in the journal; `device` is "cpu" or "cuda". Imports torch."""
    from trainpace.machine import device_in, environment

    warm = warmup_steps(step_s)
    step_ms = tuple(1e3 * s for s in step_s[warm:])
    low, high = median_interval(step_ms)
    around = environment(device) | {"engine": f"{engine} {version(engine)}"}
    entry = Entry(
        id=new_id(), created_at=now_utc(), kind="watch", outcome="ok", model=model, execution=execution,
        device=device_in(around), num_devices=execution.world_size,
        step_time_ms=statistics.median(step_ms), step_times_ms=step_ms, warmup_ms=tuple(1e3 * s for s in step_s[:warm]),
        interval_ms=Interval(low=low, high=high, coverage=0.9, basis="order of this run's steps"),
        losses=tuple(loss if loss is not None and math.isfinite(loss) else None for loss in losses),
        environment=around, notes=notes, sequence_length=sequence_length, seed=seed,
    )  # fmt: skip
    with Journal.open(place) as journal:
        journal.add(entry if keep_identity else anonymous_entry(entry))
    return entry
