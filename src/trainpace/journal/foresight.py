"""A model's forecast on one machine, corrected by similar runs in the journal."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast import KernelConstants, MachineModel, forecast
from trainpace.forecast.transfer import LARGEST_RATIO, MeasuredRatio, measured_ratio, sharpened, shifted
from trainpace.hardware import Cluster
from trainpace.job import ASSUMED, with_job
from trainpace.outcome import Forecast
from trainpace.schedule import Schedule
from trainpace.workload import Workload

if TYPE_CHECKING:  # a forecast without a journal loads no database
    from trainpace.journal.store import Journal


class Foresight(NamedTuple):
    """A workload on a cluster, the machine's own kernel model if it was calibrated, and the ratios measured / forecast
    in the journal.

    `known`: of this workload on this device, by batch size; `others`: of other models on this device.
    """

    workload: Workload
    cluster: Cluster
    model: MachineModel | KernelConstants | None
    known: tuple[MeasuredRatio, ...] = ()
    others: tuple[float, ...] = ()

    def at(self, execution: Execution, schedule: Schedule | None = None) -> Forecast:
        """The forecast, corrected by measurements of the same workload, else by those of other models."""
        return self.plain_and_sharp(execution, schedule)[1]

    def plain_and_sharp(self, execution: Execution, schedule: Schedule | None = None) -> tuple[Forecast, Forecast]:
        """The forecast without the journal, and with it."""
        plain = forecast(self.workload, execution, self.cluster, None, self.model)
        source = f"{len(self.others)} other model{'s' if len(self.others) > 1 else ''} on this device (journal)"
        sharp = sharpened(plain, self.known, "journal") if self.known else shifted(plain, self.others, source)
        conditions = replace(ASSUMED, price_usd_per_device_hour=self.cluster.price_usd_per_device_hour)
        before, after = (with_job(each, self.workload, schedule, conditions) for each in (plain, sharp))
        return before, after

    def in_words(self) -> str:
        """One sentence on the journal's part in the forecast; "" where it has none."""
        if self.known:
            sizes = ", ".join(str(k.batch) for k in self.known[:8])
            return f"sharpened by the journal, where this workload was measured on this device at batch {sizes}."
        n = len(self.others)
        return f"shifted by the journal: {n} other model{'s' if n > 1 else ''} measured on this device." if n else ""


def foresee(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None,
    journal: Journal | None,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Foresight:
    """Look up the journal's runs near this workload and device."""
    if journal is None:
        return Foresight(workload, cluster, model)
    from trainpace.journal.identity import anonymous
    from trainpace.journal.neighbours import neighbours

    near = neighbours(
        journal, anonymous(workload.model), cluster.device.name, execution, workload_key(workload, execution),
        sequence_length or workload.sequence_length, image_size,
    )  # fmt: skip
    same_workload = []
    for entry in near.same_workload:
        there = forecast(workload, entry.execution, cluster, None, model)
        if there.step is not None and entry.step_time_ms is not None:
            same_workload.append(
                measured_ratio(entry.execution.global_batch, there.step, entry.step_time_ms, entry.step)
            )
    others = [r.measured_over_forecast for r in near.same_device]
    plausible = tuple(ratio for ratio in others if 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO)
    return Foresight(workload, cluster, model, tuple(same_workload), plausible)


def workload_key(workload: Workload, execution: Execution) -> str:
    """Equal for workloads that compute the same, whatever their names."""
    operators = workload.form(execution.precision).operators
    text = repr((operators.kind, operators.function, operators.phase)).encode()
    arrays = (operators.count, operators.flops, operators.read_bytes, operators.written_bytes, operators.dims)
    digest = hashlib.sha256(text)
    for array in arrays:
        digest.update(array.astype("float64").tobytes())
    return digest.hexdigest()[:32]
