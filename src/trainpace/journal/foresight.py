"""What is forecast for a model on one machine, with what the journal knows of it: the same before a measurement and without."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from trainpace.execution import Execution
from trainpace.forecast import KernelConstants, MachineModel, forecast
from trainpace.forecast.transfer import LARGEST_RATIO, MeasuredRatio, measured_ratio, sharpened, shifted
from trainpace.hardware import Cluster
from trainpace.outcome import Forecast
from trainpace.schedule import Schedule
from trainpace.workload import Workload

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.neighbours import Neighbours
    from trainpace.journal.store import Journal


class Foresight(NamedTuple):
    """A workload on a cluster, the machine's own model if it was calibrated, and the journal's runs near it."""

    workload: Workload
    cluster: Cluster
    model: MachineModel | KernelConstants | None
    near: Neighbours | None

    def at(self, execution: Execution, schedule: Schedule | None = None) -> Forecast:
        """The forecast, sharpened by measurements of the same workload here, else by those of others here."""
        plain = forecast(self.workload, execution, self.cluster, schedule, self.model)
        if plain.step is None:
            return plain
        known = self.known()
        if known:
            return sharpened(plain, known, "journal")
        ratios = [r.measured_over_forecast for r in self.near.same_device] if self.near is not None else []
        source = f"{len(ratios)} other model{'s' if len(ratios) > 1 else ''} on this device (journal)"
        return shifted(plain, [r for r in ratios if 1 / LARGEST_RATIO <= r <= LARGEST_RATIO], source)

    def in_words(self) -> str:
        """One sentence on what of the journal goes into a forecast; empty for nothing."""
        if known := self.known():
            sizes = ", ".join(str(k.batch) for k in known[:8])
            return f"sharpened by the journal, where this workload was measured on this device at batch {sizes}."
        n = 0 if self.near is None else len(self.near.same_device)
        return f"shifted by the journal: {n} other model{'s' if n > 1 else ''} measured on this device." if n else ""

    def factor(self, execution: Execution) -> float:
        """What the journal multiplies the plain forecast by."""
        plain = forecast(self.workload, execution, self.cluster, None, self.model)
        there = self.at(execution)
        return 1.0 if plain.step is None or there.step is None else there.step.total_ms / plain.step.total_ms

    def known(self) -> list[MeasuredRatio]:
        """measured / forecast at every batch size that the journal has of this workload."""
        ratios = []
        for entry in () if self.near is None else self.near.same_workload:
            there = forecast(self.workload, entry.execution, self.cluster, None, self.model)
            if there.step is not None and entry.step_time_ms is not None:
                ratios.append(measured_ratio(entry.execution.global_batch, there.step, entry.step_time_ms, entry.step))
        return ratios


def foresee(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None,
    journal: Journal | None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Foresight:
    """Look up what the journal knows of this workload on this device; without a journal, nothing."""
    near = None
    if journal is not None:
        from trainpace.journal.identity import anonymous
        from trainpace.journal.neighbours import neighbours

        near = neighbours(
            journal, anonymous(workload.model), cluster.device.name, execution, workload_key(workload, execution),
            sequence_length or workload.sequence_length, image_size,
        )  # fmt: skip
    return Foresight(workload, cluster, model, near)


def workload_key(workload: Workload, execution: Execution) -> str:
    """The same for two workloads that compute the same, whatever they are called."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (operators.count, operators.flops, operators.read_bytes, operators.written_bytes, operators.dims)
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]
