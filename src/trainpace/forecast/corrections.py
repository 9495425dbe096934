"""`CorrectedTable`: forecasts of many executions, corrected by measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.outcome import MFU_LIMIT, Forecast
from trainpace.core.stats import Z_95
from trainpace.forecast.forecasts import ForecastTable, RowKernels
from trainpace.forecast.grid import Grid
from trainpace.forecast.intervals import (
    Spread,
    card_deviations,
    fitted_spreads,
    interval_deviations,
)
from trainpace.forecast.posterior import PHASES, Posterior, Runs, Variant
from trainpace.workload import Counts, Flags, Floats

MOST_AT_ONCE = 2048
"""Rows that are compared with the measurements in one pass, which bounds its memory."""
OF_THE_BATCH = ("micro_batch", "accumulation")


class CorrectedTable(ForecastTable):
    """A table whose times are those of `plain`, given measurements: phase by phase, since an optimizer's time does not grow with
    the batch and the others do; parts besides the phases as these together."""

    def __init__(self, plain: ForecastTable, posterior: Posterior, source: str) -> None:
        self.plain, self._posterior, self._source = plain, posterior, source
        parts, exposed = (
            {name: ms.copy() for name, ms in table.items()}
            for table in (plain.parts, plain.exposed)
        )
        for some in _chunks(np.flatnonzero(plain.timed)):
            means = posterior.means(self._runs(some))
            old = {name: plain.parts[name][some] for name in PHASES}
            ratios = dict(zip(PHASES, np.exp(means[:, 1:]).T, strict=True))
            before, after = sum(old.values()), sum(old[name] * ratios[name] for name in PHASES)
            rest = np.where(
                before > 0, after / np.where(before > 0, before, 1.0), np.exp(means[:, 0])
            )
            for name, ms in (*parts.items(), *exposed.items()):
                ms[some] *= ratios.get(name, rest)
        super().__init__(
            plain.forecaster,
            plain.grid,
            sum(parts.values(), np.zeros(len(plain))),
            parts,
            exposed,
            plain.memory,
            plain.fits,
            plain.clash,
            plain.uneven,
            plain.why,
            plain.reasons,
        )

    def shares(self) -> list[Floats]:
        return self.plain.shares()

    def _kernels(self, rows: Sequence[int]) -> list[RowKernels | None]:
        return self.plain._kernels(rows)

    def _spread(self, i: int, row: RowKernels) -> Spread:
        plain, narrower = self.plain._spread(i, row), float(self._narrower[i])
        return Spread(
            plain.low**narrower,
            plain.high**narrower,
            plain.coverage,
            f"{plain.basis}; {self._source}",
        )

    @cached_property
    def _narrower(self) -> Floats:
        """What measurements leave of every row's standard deviation, as a share."""
        narrower = np.ones(len(self))
        for some in _chunks(np.flatnonzero(self.timed)):
            runs = self._runs(some)
            narrower[some] = self._posterior.log_sd(runs) / runs.log_sd
        return narrower

    def _brief(self, i: int, row: RowKernels | None) -> Forecast:
        brief = super()._brief(i, row)
        return brief if brief.step is None else replace(brief, provenance="transferred")

    def _mfu(
        self, flops_per_step: float, peak_flop_per_s: float | None, step_ms: float
    ) -> float | None:
        mfu = super()._mfu(flops_per_step, peak_flop_per_s, step_ms)
        return None if mfu is None or mfu > MFU_LIMIT else mfu  # of a measurement of something else

    def _record(self, i: int, row: RowKernels | None) -> Forecast:
        record = super()._record(i, row)
        if record.step is None:
            return record
        ratio = float(self.step_ms[i] / self.plain.step_ms[i])
        return replace(
            record,
            heaviest=tuple(replace(o, time_ms=o.time_ms * ratio) for o in record.heaviest),
            roles=tuple(replace(role, time_ms=role.time_ms * ratio) for role in record.roles),
        )

    def _runs(self, rows: Counts) -> Runs:
        """Some rows that have a time, as runs that measurements can be related to."""
        plain, number = self.plain, self._posterior.number
        forecaster = plain.forecaster
        device, n = forecaster.target.cluster.device.name, len(rows)
        grid = plain.grid.at(rows)
        shares = _shares(plain, rows, grid)
        log_sd, card_sd = _deviations(plain, rows, shares)
        variant = np.full(n, -1)
        for known in self._posterior.variants:
            if isinstance(known, Variant) and known == Variant.of(
                known.execution, forecaster.workload
            ):
                variant[_has(grid, known.execution)] = number(known)
        return Runs(
            np.full(n, number(forecaster.workload.model)),
            np.full(n, number(device)),
            variant,
            np.maximum(grid.global_batch, 1).astype(np.float64),
            shares,
            log_sd,
            card_sd,
            plain.step_ms[rows],
        )


def _chunks(rows: Counts) -> list[Counts]:
    return [rows[start : start + MOST_AT_ONCE] for start in range(0, len(rows), MOST_AT_ONCE)]


def _has(grid: Grid, execution: Execution) -> Flags:
    """Which executions are this one but for the batch."""
    fields = [name for name in EXECUTION_FIELDS if name not in OF_THE_BATCH]
    return np.all([grid.has(name, getattr(execution, name)) for name in fields], axis=0)


def _shares(plain: ForecastTable, rows: Counts, grid: Grid) -> Floats:
    """`ForecastTable.shares` of some rows as one array, n x parts."""
    inside, outside, updates = np.split(plain.forecaster.part_ms(grid), 3, axis=1)
    whole = updates.sum(axis=1)
    update_ms = np.where(grid.offload_optimizer, 0.0, plain.parts["optimizer_ms"][rows])
    held = np.where(whole > 0, update_ms / np.where(whole > 0, whole, 1.0), 1.0)
    operators = inside / grid.pp[:, None] + outside + updates * held[:, None]
    total = plain.step_ms[rows]
    beside = np.stack(
        [plain.parts[name][rows] / total for name in ("host_overhead_ms", "communication_ms")],
        axis=1,
    )
    left = np.maximum(0.0, 1.0 - beside.sum(axis=1))
    return np.concatenate(
        [left[:, None] * operators / np.maximum(operators.sum(axis=1), 1e-9)[:, None], beside],
        axis=1,
    )


def _deviations(plain: ForecastTable, rows: Counts, shares: Floats) -> tuple[Floats, Floats]:
    """Standard deviations of the logarithms of steps, and what of them a card adds that has no run in the fit."""
    target, spreads = plain.forecaster.target, fitted_spreads()
    if target.kernels.traces_cpu:  # every kernel of a calibrated machine has a deviation of its own
        ends = [
            (low, high) for low, high in zip(plain.low_ms[rows], plain.high_ms[rows], strict=True)
        ]
        return np.array([math.log(high / low) / (2 * Z_95) for low, high in ends]), np.zeros(
            len(rows)
        )
    device = target.cluster.device.name
    return interval_deviations(spreads, shares, device, plain.outside_sds[rows]), card_deviations(
        spreads, shares, device
    )
