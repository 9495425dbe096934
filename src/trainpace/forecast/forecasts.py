"""`ForecastTable`: arrays over executions, and full records of the rows that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import PRECISIONS, Execution
from trainpace.core.outcome import MFU_LIMIT, Forecast, Interval, StepTime
from trainpace.forecast.explanations import Roofline, heaviest, peak_flop_per_s, roofline_of
from trainpace.forecast.grid import Grid
from trainpace.forecast.intervals import EXPERTS_SD, Spread, shares_of, widened
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.memory import RankMemory, fit_probability, fits
from trainpace.forecast.ranks import RankTable
from trainpace.forecast.roles import by_role
from trainpace.forecast.shapes import alone, contradiction, fewer_ranks
from trainpace.forecast.software_rewrites import NO_SOFTWARE, RunningSoftware, running_software
from trainpace.forecast.tables import MOST_AT_ONCE
from trainpace.forecast.target import KernelKey, host_sensitivity, kernel_key
from trainpace.job import ASSUMED, JobConditions, Schedule, with_job
from trainpace.workload import (
    ATTENTION_BACKWARD_MODEL_SHARE,
    MATRIX_KINDS,
    Counts,
    Flags,
    Floats,
    Operators,
    TracedForm,
    at_batch,
)

if TYPE_CHECKING:
    from trainpace.forecast.forecaster import Forecaster


class RowKernels(NamedTuple):
    """The kernels of one execution on the stage of a pipeline that it holds, the optimizer's as they are sharded or moved: of
    each row of the table `held`, from 0 to 1."""

    table: RankTable
    times: KernelTimes
    log_sd: Floats
    held: Floats


class ForecastTable:
    """Forecasts of n executions: arrays of n, and full records of the rows that are asked for.

    Times are NaN where there are none. parts: milliseconds by the names of `StepTime`'s parts, which add up to step_ms. exposed:
    communication by kind. clash: a position in CLASHES; 0 is none. fits: within the device's memory (True where its size is not
    known). uneven: the stages hold unequal numbers of blocks.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        grid: Grid,
        step_ms: Floats,
        parts: dict[str, Floats],
        exposed: dict[str, Floats],
        memory: RankMemory,
        fits: Flags,
        clash: Counts,
        uneven: Flags,
        why: Counts,
        reasons: tuple[str, ...],
    ) -> None:
        self.forecaster, self.grid, self.step_ms, self.parts, self.exposed = (
            forecaster,
            grid,
            step_ms,
            parts,
            exposed,
        )
        self.memory, self.fits, self.clash, self.uneven = memory, fits, clash, uneven
        self.why, self.reasons = why, reasons
        self._executions: dict[int, Execution] = {}
        self._largest_by_kind: dict[Execution, int | None] = {}

    def __len__(self) -> int:
        return len(self.grid)

    def execution(self, i: int) -> Execution:
        """Execution `i`. Raises for sizes that contradict each other."""
        if i not in self._executions:
            self._executions[i] = self.grid.execution(i)
        return self._executions[i]

    @property
    def timed(self) -> Flags:
        """Which rows have a time."""
        return np.asarray((self.clash == 0) & (self.why == 0))

    @property
    def feasible(self) -> Flags:
        """Could be run: sizes that go together, a time, and enough memory."""
        return np.asarray(self.timed & self.fits)

    @cached_property
    def _spreads(self) -> list[Spread | None]:
        return [
            None if row is None else self._spread(i, row)
            for i, row in enumerate(self._kernels(range(len(self))))
        ]

    @property
    def low_ms(self) -> Floats:
        """The lower ends of the intervals of `step_ms`."""
        return self.step_ms * [np.nan if spread is None else spread.low for spread in self._spreads]

    @property
    def high_ms(self) -> Floats:
        """The upper ends of the intervals of `step_ms`."""
        return self.step_ms * [
            np.nan if spread is None else spread.high for spread in self._spreads
        ]

    def reason(self, i: int) -> str:
        """Why row `i` has no time; empty where it has one."""
        if self.why[i]:
            return self.reasons[int(self.why[i])]
        return str(self._contradiction(i)) if self.clash[i] else ""

    def forecasts(
        self, schedule: Schedule | None = None, conditions: JobConditions = ASSUMED
    ) -> list[Forecast]:
        """The full records of all rows, with the whole training where a `schedule` is given. Raises `Contradiction` for the
        first whose sizes do not go together."""
        kernels = self._kernels(range(len(self)))
        return [
            self._with_job(self._record(i, row), schedule, conditions)
            for i, row in enumerate(kernels)
        ]

    def forecast(
        self, i: int, schedule: Schedule | None = None, conditions: JobConditions = ASSUMED
    ) -> Forecast:
        """The full record of row `i`. Raises `Contradiction` for sizes that do not go together."""
        return self._with_job(self._record(i, self._kernels([i])[0]), schedule, conditions)

    def _with_job(
        self, forecast: Forecast, schedule: Schedule | None, conditions: JobConditions
    ) -> Forecast:
        if schedule is None:
            return forecast
        price = self.forecaster.target.cluster.price_usd_per_device_hour
        priced = replace(conditions, price_usd_per_device_hour=price)
        return with_job(forecast, self.forecaster.workload, schedule, priced)

    def _contradiction(self, i: int) -> TrainpaceError:
        target, workload = self.forecaster.target, self.forecaster.workload
        form = workload.form(PRECISIONS[int(self.grid.precision[i])])
        return contradiction(
            int(self.clash[i]), self.grid, i, form.blocks, workload.sequence_length, target.cluster
        )

    def _kernels(self, rows: Sequence[int]) -> list[RowKernels | None]:
        """The kernels of some rows; None for rows without a time."""
        forecaster, grid = self.forecaster, self.grid
        tables, target = forecaster.tables, forecaster.target
        keyed: dict[KernelKey, list[int]] = {}
        timed = self.timed
        for position, i in enumerate(rows):
            if timed[i]:
                keyed.setdefault(kernel_key(self.execution(i), target.software), []).append(
                    position
                )
        kernels: list[RowKernels | None] = [None] * len(rows)
        for key, positions in keyed.items():
            table = tables.table(key.sharding)
            at = np.array([rows[position] for position in positions])
            batches, batch_of = np.unique(grid.micro_batch[at], return_inverse=True)
            for start in range(0, len(batches), MOST_AT_ONCE):
                ranks = tables.times(
                    key, target, batches[start : start + MOST_AT_ONCE].astype(np.float64)
                )
                assert not isinstance(ranks, str), "steps were forecast with these times"
                for j in np.flatnonzero(
                    (batch_of >= start) & (batch_of < start + MOST_AT_ONCE)
                ).tolist():
                    batch = batch_of[j] - start
                    device_s = ranks.times.device_s[batch]
                    held = self._held(int(at[j]), table, device_s)
                    times = KernelTimes(*(seconds[batch] * held for seconds in ranks.times))
                    kernels[positions[j]] = RowKernels(table, times, ranks.log_sd[batch], held)
        return kernels

    def roofline(self, i: int) -> Roofline | None:
        """The heaviest operators of a rank of execution `i` under the device's roofs; None where these are not known, or there is
        no time."""
        (row,) = self._kernels([i])
        if row is None:
            return None
        e = self.execution(i)
        held_s, repeats = row.times.device_s, np.where(row.table.updates, 1, e.accumulation)
        return roofline_of(
            row.table.operators, held_s, row.held, repeats, e, self.forecaster.target.cluster.device
        )

    def _held(self, i: int, table: RankTable, device_s: Floats) -> Floats:
        """Share of each row that a rank has: the blocks of its stage; of the optimizer what it was forecast to take."""
        held = 1.0 - table.inside * (1.0 - 1.0 / int(self.grid.pp[i]))
        whole_ms = 1e3 * float(device_s[table.updates].sum())
        if whole_ms > 0:
            offloaded = bool(self.grid.offload_optimizer[i])
            held[table.updates] = (
                0.0 if offloaded else float(self.parts["optimizer_ms"][i]) / whole_ms
            )
        return held

    def _step(self, i: int) -> StepTime:
        return StepTime(**{name: float(values[i]) for name, values in self.parts.items()})

    def _spread(self, i: int, row: RowKernels) -> Spread:
        target, step = self.forecaster.target, self._step(i)
        shares = shares_of(step, row.table.part, row.times.device_s)
        spread = target.kernels.spread(
            shares, target.cluster.device, row.times.device_s, row.log_sd
        )
        return widened(spread, self.outside_sd(i))

    def outside_sd(self, i: int) -> float:
        """Standard deviation of the logarithm of step `i` from what none of its parts tells: its host, and layers of experts."""
        return float(self.outside_sds[i])

    @cached_property
    def outside_sds(self) -> Floats:
        """`outside_sd` of every row."""
        host, experts = (
            self.forecaster.target.host,
            (EXPERTS_SD if self.forecaster.workload.has_experts else 0.0),
        )
        of_host = 0.0 if host is None else host_sensitivity(self.parts, self.step_ms) * host.log_sd
        return np.asarray(np.hypot(of_host, np.full(len(self), experts)))

    def shares(self) -> list[Floats]:
        """What the step of every row is made of, the share of each of `intervals.PARTS`; all rows have a time."""
        shares = []
        for i, row in enumerate(self._kernels(range(len(self)))):
            assert row is not None, "a row without a time has no shares"
            shares.append(shares_of(self._step(i), row.table.part, row.times.device_s))
        return shares

    def brief(self, i: int) -> Forecast:
        """Row `i` without what takes longer: the heaviest operators, scaling, utilisation, the largest micro-batch."""
        return self._brief(i, self._kernels([i])[0])

    def _brief(self, i: int, row: RowKernels | None) -> Forecast:
        if self.clash[i] and not self.why[i]:
            raise self._contradiction(i)
        target, execution = self.forecaster.target, self.execution(i)
        cluster, device = target.cluster, target.cluster.device
        memory = None if self.clash[i] else self.memory.record(i)
        capacity = None if device.memory_gib is None else device.memory_gib.value
        host, software = target.host, self._software(execution)
        forecast = Forecast(
            model=self.forecaster.workload.model,
            device=device.name,
            num_devices=cluster.num_devices,
            execution=execution,
            step=None,
            step_time_interval_ms=None,
            memory=memory,
            capacity_gib=capacity,
            fits=None if capacity is None or memory is None else bool(self.fits[i]),
            fit_probability=(
                None
                if capacity is None or memory is None
                else float(fit_probability(memory, capacity, execution.compile))
            ),
            mfu=None,
            model_flops_per_step=None,
            provenance=target.kernels.provenance,
            reason=self.reason(i) or "not evaluated",
            host="" if host is None else host.name,
            host_assumed=host is not None and cluster.host is None,
            software=software.words,
            software_assumed=software.is_assumed,
            software_idle=software.idle,
            notes=self.forecaster.workload.notes,
            sequence_length=self.forecaster.workload.sequence_length,
        )
        if row is None:
            return forecast
        step, spread = self._step(i), self._spread(i, row)
        interval = Interval(
            low=step.total_ms * spread.low,
            high=step.total_ms * spread.high,
            coverage=spread.coverage,
            basis=spread.basis,
        )
        return replace(
            forecast,
            step=step,
            step_time_interval_ms=interval,
            reason="",
            exposed_ms={
                kind: float(values[i]) for kind, values in self.exposed.items() if values[i] > 0
            },
        )

    def _software(self, execution: Execution) -> RunningSoftware:
        target, traced = self.forecaster.target, self.forecaster.tables.traced.workload
        if target.kernels.traces_cpu:
            return NO_SOFTWARE  # it was measured with the machine
        return running_software(
            traced,
            target.software,
            target.cluster.device,
            execution.precision,
            execution.compile or target.software.compiles,
        )

    def _record(self, i: int, row: RowKernels | None) -> Forecast:
        brief, execution = self._brief(i, row), self.execution(i)
        brief = replace(
            brief, largest_micro_batch=None if brief.memory is None else self._largest(execution)
        )
        if row is None or brief.step is None:
            return brief
        form = self.forecaster.workload.form(execution.precision)
        # a model's own FLOPs do not depend on how its software computes them
        traced = self.forecaster.tables.traced.workload.form(execution.precision)
        flops = _model_flops(traced.operators, execution) * execution.data_parallel_size
        repeats = np.where(row.table.updates, 1, execution.accumulation)
        efficiency, reference = self._scaling(execution, brief.step.total_ms)
        peak = peak_flop_per_s(self.forecaster.target.cluster.device, form.operators, execution)
        return replace(
            brief,
            mfu=self._mfu(flops, peak, brief.step.total_ms),
            model_flops_per_step=flops,
            heaviest=heaviest(row.table.operators, row.times, repeats),
            roles=by_role(row.table.operators, row.times, repeats),
            scaling_efficiency=efficiency,
            scaling_reference_devices=reference,
            warnings=_warnings(brief.fits, brief.step, bool(self.uneven[i]), form, execution),
        )

    def _mfu(
        self, flops_per_step: float, peak_flop_per_s: float | None, step_ms: float
    ) -> float | None:
        if peak_flop_per_s is None:
            return None
        target = self.forecaster.target
        mfu = flops_per_step / (step_ms * 1e-3 * peak_flop_per_s * target.cluster.num_devices)
        # a machine's highest rate, unlike a datasheet's, may have been measured in a moment when others had its cores
        return None if target.kernels.traces_cpu and mfu > MFU_LIMIT else mfu

    def _largest(self, execution: Execution) -> int | None:
        """The largest micro-batch, worked out once for executions that differ in theirs alone."""
        kind = replace(execution, micro_batch=1)
        if kind not in self._largest_by_kind:
            self._largest_by_kind[kind] = self.forecaster.largest_micro_batch(kind)
        return self._largest_by_kind[kind]

    def _scaling(self, execution: Execution, step_ms: float) -> tuple[float | None, int | None]:
        """Throughput a device over that of the reference, and the devices of the reference (see `shapes`); None, None: there is
        one device, or nothing smaller holds the model. Memory of unknown size is taken to be enough.
        """
        if execution.world_size == 1:
            return None, None
        forecaster, cluster = self.forecaster, self.forecaster.target.cluster
        many = [alone(execution), *fewer_ranks(execution, cluster.devices_per_node)]
        capacity = cluster.device.memory_gib
        reference = next(
            (e for e in many if capacity is None or fits(forecaster.memory(e), capacity.value)),
            None,
        )
        if reference is None:
            return None, None
        small = replace(cluster, nodes=reference.nnodes, devices_per_node=reference.nproc_per_node)
        there = forecaster.on(small).at([reference])
        if there.clash[0]:
            return None, None
        each = execution.global_batch / (step_ms * execution.world_size)
        return (
            each * reference.world_size * float(there.step_ms[0]) / reference.global_batch,
            reference.world_size,
        )


def _model_flops(operators: Operators, execution: Execution) -> float:
    """FLOPs of the model itself on one rank: matrix operators, without what fused attention computes twice."""
    flops = at_batch(operators.flops, execution.micro_batch) * operators.count
    weights = dict.fromkeys(MATRIX_KINDS, 1.0) | {
        "attention_backward": ATTENTION_BACKWARD_MODEL_SHARE
    }
    counted = zip(operators.kind, flops.tolist(), strict=True)
    of_model = (
        phase != "optimizer" for phase in operators.phase
    )  # Muon's products are not the model's
    work = sum(
        work * weights.get(kind, 0.0)
        for (kind, work), counts in zip(counted, of_model, strict=True)
        if counts
    )
    return work * execution.accumulation


def _warnings(
    fits: bool | None, step: StepTime, uneven: bool, form: TracedForm, execution: Execution
) -> tuple[str, ...]:
    count, stages = (
        (0 if form.blocks is None else form.blocks.count),
        execution.pp * execution.virtual_stages,
    )
    placed = "the first are taken to hold one more than the last"
    if stages > count:
        placed = "the head, and then the embedding, are taken to stand for a block"
    warnings = {
        f"{count} blocks over {stages} stages are uneven: {placed}": uneven,
        "does not fit in the device's memory; the time is what it would be if it did": (
            fits is False
        ),
        "launch-bound: the host's launches take longer than the device's work; a larger batch costs little": (
            step.host_overhead_ms > 0.3 * step.total_ms
        ),
    }
    return tuple(text for text, applies in warnings.items() if applies)
