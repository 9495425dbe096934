"""A model's forecast on one machine, corrected by similar runs in the journal."""

from __future__ import annotations

import hashlib
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast import LARGEST_RATIO, Forecaster, MeasuredRatio, measured_ratio, sharpened, shifted
from trainpace.outcome import Forecast
from trainpace.workload import Workload

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.entry import Entry
    from trainpace.journal.store import Journal

MOST = 2000
"""The number of runs examined, the newest first."""


class Foresight(NamedTuple):
    """A forecaster, and the ratios measured / forecast in the journal.

    `same_workload`: those of this workload on this device, by batch size; `others`: those of other models on this device.
    """

    forecaster: Forecaster
    same_workload: tuple[MeasuredRatio, ...] = ()
    others: tuple[float, ...] = ()

    @property
    def workload(self) -> Workload:
        return self.forecaster.workload

    def at(self, execution: Execution) -> Forecast:
        """The forecast, corrected."""
        return self.corrected(self.forecaster.forecast(execution))

    def corrected(self, plain: Forecast) -> Forecast:
        """A forecast of the forecaster, corrected by measurements of the same workload, else by those of other models."""
        if self.same_workload:
            return sharpened(plain, self.same_workload, "journal")
        source = f"{len(self.others)} other model{'s' if len(self.others) > 1 else ''} on this device (journal)"
        return shifted(plain, self.others, source)

    def in_words(self) -> str:
        """One sentence on the journal's part in the forecast; "" where it has none."""
        if self.same_workload:
            sizes = ", ".join(str(ratio.batch) for ratio in self.same_workload[:8])
            return f"sharpened by the journal, where this workload was measured on this device at batch {sizes}."
        n = len(self.others)
        return f"shifted by the journal: {n} other model{'s' if n > 1 else ''} measured on this device." if n else ""


def foresight_of(
    forecaster: Forecaster,
    execution: Execution,
    journal: Journal | None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Foresight:
    """Look up the journal's runs near this workload and device."""
    if journal is None:
        return Foresight(forecaster)
    from trainpace.journal.identity import anonymous

    workload, device = forecaster.workload, forecaster.target.cluster.device
    same, others = neighbours(
        journal, anonymous(workload.model), device.name, execution, workload_key(workload, execution),
        sequence_length or workload.sequence_length, image_size,
    )  # fmt: skip
    same_workload = tuple(
        measured_ratio(entry.execution.global_batch, step, entry.step_time_ms, entry.step)
        for entry in same
        if entry.step_time_ms is not None and (step := forecaster.forecast(entry.execution).step) is not None
    )
    plausible = tuple(ratio for ratio in others.values() if 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO)
    return Foresight(forecaster, same_workload, plausible)


def neighbours(
    journal: Journal,
    model: str,
    device: str,
    execution: Execution,
    workload_key: str | None = None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> tuple[list[Entry], dict[str, float]]:
    """Runs of the same workload, with otherwise the same execution, the newest of each batch size in order of batch size; and of
    other models on the same device, by name, the median of measured step time / forecast without the journal.

    Where both a run and the question have a `workload_key`, the keys decide whether the workload is the same, whatever
    the model is called; otherwise the model's name does. A sequence length or image size that both state must agree.
    """
    from trainpace.journal.query import Query

    def newest_first(**filters: Any) -> list[Entry]:
        return journal.find(Query(device=device, exact=True, outcome="ok", **filters), limit=MOST)

    candidates = newest_first(model=model) + (newest_first(workload_key=workload_key) if workload_key else [])
    newest: dict[int, Entry] = {}
    for entry in sorted(candidates, key=lambda e: (e.created_at, e.id), reverse=True):
        other = workload_key and entry.workload_key and entry.workload_key != workload_key
        shapes = ((entry.sequence_length, sequence_length), (entry.image_size, image_size))
        if other or any(a and b and a != b for a, b in shapes) or entry.mode != "train":
            continue
        if replace(entry.execution, micro_batch=1, accumulation=1) == replace(execution, micro_batch=1, accumulation=1):
            newest.setdefault(entry.execution.global_batch, entry)
    candidate_ids = {entry.id for entry in candidates}
    ratios: dict[str, list[float]] = {}
    for entry in newest_first(with_forecast=True):
        if entry.model != model and entry.id not in candidate_ids and entry.forecast_ms and entry.step_time_ms:
            ratios.setdefault(entry.model, []).append(entry.step_time_ms * entry.forecast_factor / entry.forecast_ms)
    return [newest[batch] for batch in sorted(newest)], {n: statistics.median(ratios[n]) for n in sorted(ratios)}


def workload_key(workload: Workload, execution: Execution) -> str:
    """Equal for workloads that compute the same, whatever their names."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (operators.count, operators.flops, operators.read_bytes, operators.written_bytes, operators.dims)
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]
