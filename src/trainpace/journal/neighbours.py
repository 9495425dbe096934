"""Measured runs that are similar to a run to be forecast."""

import statistics

from trainpace.execution import Execution
from trainpace.journal.entry import Entry
from trainpace.journal.query import Query
from trainpace.journal.store import Journal
from trainpace.records import Record

MOST = 2000
"""The number of runs examined, the newest first."""

_SIZES = ("micro_batch", "accumulation")


class Ratio(Record):
    """One other model on the same device: the median of measured step time / forecast without the journal, over `n` runs."""

    model: str
    n: int
    measured_over_forecast: float


class Neighbours(Record):
    """`same_workload`: the newest run of each batch size of the same model, with otherwise the same execution, in order
    of batch size. `same_device`: the errors of forecasts for other models on the device, in order of name."""

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
    """Runs near the given conditions.

    Where both a run and the question have a `workload_key`, the keys decide whether the workload is the same, whatever
    the model is called; otherwise the model's name does. A sequence length or image size that both state must agree.
    """
    forecast_there = Query(device=device, exact=True, outcome="ok", with_forecast=True)
    named = journal.find(Query(model=model, device=device, exact=True, outcome="ok"), limit=MOST)
    keyed = []
    if workload_key:
        keyed = journal.find(Query(device=device, exact=True, outcome="ok", workload_key=workload_key), limit=MOST)
    candidates = {entry.id: entry for entry in (*named, *keyed)}
    newest: dict[int, Entry] = {}
    for entry in sorted(candidates.values(), key=lambda e: (e.created_at, e.id), reverse=True):
        other = workload_key and entry.workload_key and entry.workload_key != workload_key
        shapes = ((entry.sequence_length, sequence_length), (entry.image_size, image_size))
        if other or any(a and b and a != b for a, b in shapes) or entry.mode != "train":
            continue
        if _conditions(entry.execution) == _conditions(execution):
            newest.setdefault(entry.execution.global_batch, entry)
    return Neighbours(
        same_workload=tuple(newest[batch] for batch in sorted(newest)),
        same_device=_ratios(
            [e for e in journal.find(forecast_there, limit=MOST) if e.model != model and e.id not in candidates]
        ),
    )


def _conditions(execution: Execution) -> dict[str, object]:
    """The execution without its batch sizes."""
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
