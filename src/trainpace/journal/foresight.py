"""A model's forecast on one machine, corrected by similar runs in the journal."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from trainpace.execution import Execution
from trainpace.forecast import LARGEST_RATIO, Forecaster, MeasuredRatio, measured_ratio, sharpened, shifted
from trainpace.outcome import Forecast
from trainpace.workload import Workload

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.store import Journal


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
    from trainpace.journal.neighbours import neighbours

    workload, device = forecaster.workload, forecaster.target.cluster.device
    near = neighbours(
        journal, anonymous(workload.model), device.name, execution, workload_key(workload, execution),
        sequence_length or workload.sequence_length, image_size,
    )  # fmt: skip
    same_workload = []
    for entry in near.same_workload:
        there = forecaster.forecast(entry.execution)
        if there.step is not None and entry.step_time_ms is not None:
            same_workload.append(
                measured_ratio(entry.execution.global_batch, there.step, entry.step_time_ms, entry.step)
            )
    others = [r.measured_over_forecast for r in near.same_device]
    plausible = tuple(ratio for ratio in others if 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO)
    return Foresight(forecaster, tuple(same_workload), plausible)


def workload_key(workload: Workload, execution: Execution) -> str:
    """Equal for workloads that compute the same, whatever their names."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (operators.count, operators.flops, operators.read_bytes, operators.written_bytes, operators.dims)
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]
