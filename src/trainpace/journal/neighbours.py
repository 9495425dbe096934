"""Measured runs that say something about a run to be forecast."""

from __future__ import annotations

import statistics

from trainpace.execution import Execution
from trainpace.journal.entry import Entry
from trainpace.journal.query import Query
from trainpace.journal.store import Journal
from trainpace.records import Record

MOST = 2000
"""Runs that are looked at, the newest first."""

_SIZES = ("micro_batch", "accumulation")


class Ratio(Record):
    """Other runs on the same device: their measured step over what was forecast for it without the journal, the median by
    model."""

    model: str
    n: int
    measured_over_forecast: float


class Neighbours(Record):
    """`same_workload`: the same model under the same execution but for the batch, the newest run of each batch size, in order
    of batch size. `same_device`: by other model on the device, how far forecasts were off there, in order of name."""

    same_workload: tuple[Entry, ...]
    same_device: tuple[Ratio, ...]


def neighbours(
    journal: Journal,
    model: str,
    device: str,
    execution: Execution,
    workload_key: str | None = None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Neighbours:
    """Runs near the one that these words describe.

    With a `workload_key`, a run that states one is the same workload if the two are equal, whatever its model is called; a
    run that states none is matched by the model's name. A sequence length or image size, where both state one, must agree.
    """
    forecast_there = Query(device=device, exact=True, outcome="ok", with_forecast=True)
    named = journal.find(Query(model=model, device=device, exact=True, outcome="ok"), limit=MOST)
    keyed = []
    if workload_key:
        keyed = journal.find(Query(device=device, exact=True, outcome="ok", workload_key=workload_key), limit=MOST)
    found = {entry.id: entry for entry in (*named, *keyed)}
    newest: dict[int, Entry] = {}
    for entry in sorted(found.values(), key=lambda e: (e.created_at, e.id), reverse=True):
        other = workload_key and entry.workload_key and entry.workload_key != workload_key
        shapes = ((entry.sequence_length, sequence_length), (entry.image_size, image_size))
        if other or any(a and b and a != b for a, b in shapes) or entry.mode != "train":
            continue
        if _conditions(entry.execution) == _conditions(execution):
            newest.setdefault(entry.execution.global_batch, entry)
    return Neighbours(
        same_workload=tuple(newest[batch] for batch in sorted(newest)),
        same_device=_ratios(
            [e for e in journal.find(forecast_there, limit=MOST) if e.model != model and e.id not in found]
        ),
    )


def _conditions(execution: Execution) -> dict[str, object]:
    """Everything but the batch."""
    return {name: getattr(execution, name) for name in execution.__struct_fields__ if name not in _SIZES}


def _ratios(entries: list[Entry]) -> tuple[Ratio, ...]:
    ratios: dict[str, list[float]] = {}
    for entry in entries:
        if entry.forecast_ms and entry.step_time_ms:
            ratios.setdefault(entry.model, []).append(entry.step_time_ms * entry.forecast_factor / entry.forecast_ms)
    return tuple(
        Ratio(model=model, n=len(ratios[model]), measured_over_forecast=statistics.median(ratios[model]))
        for model in sorted(ratios)
    )
