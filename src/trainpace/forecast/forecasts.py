"""Forecasts of many executions as arrays, and full records of selected rows.

Shapes: n is the number of executions. Arrays of a `ForecastTable` have shape (n,), one value per
execution. Arrays of a `RowKernels` have one value per row of an operator table. Times are in
milliseconds if their name ends in `_ms`, and in seconds if it ends in `_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS, PRECISIONS, Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import MFU_LIMIT, STEP_PARTS, Forecast, Interval, StepTime
from trainpace.core.stats import Z_95
from trainpace.forecast.communication import KINDS
from trainpace.forecast.explanations import (
    Roofline,
    by_role,
    heaviest,
    peak_flop_per_s,
    roofline_of,
)
from trainpace.forecast.grid import Facts, Grid, contradiction, fewer_ranks, on_one_device
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.memory import RankMemory, fit_probability, fits
from trainpace.forecast.ranks import RankTable
from trainpace.forecast.rates import emulates_bf16
from trainpace.forecast.software import NO_SOFTWARE, RunningSoftware, running_software
from trainpace.forecast.step import paging_ms
from trainpace.forecast.target import host_sensitivity, kernel_groups
from trainpace.forecast.uncertainty import (
    EXPERTS_SD,
    PHASES,
    Posterior,
    Runs,
    Spread,
    Variant,
    card_deviation,
    fitted_spreads,
    interval_deviations,
    shares_of,
    widened,
)
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

MOST_COMPARED = 2048
"""Rows that are compared with measurements in one pass. The limit bounds the memory."""
LAUNCH_BOUND = 0.3
"""Share of host overhead in a step above which the step is called launch-bound."""


class RowKernels(NamedTuple):
    """Kernels of one execution on one rank.

    Attributes:
        table: Operators of the execution.
        times: Seconds of each operator row on the rank, already multiplied by `held`.
        log_sd: Standard deviation of the logarithm of each row's time.
        held: Share of each operator row that the rank computes, from 0 to 1. For rows of the
            optimizer, the share depends on sharding, and it is 0 if the optimizer is offloaded.
    """

    table: RankTable
    times: KernelTimes
    log_sd: Floats
    held: Floats


class ForecastTable:
    """Forecasts of n executions as arrays of shape (n,), and full records of selected rows.

    Times are NaN in rows without a forecast.

    Attributes:
        step_ms: Step time. It is the sum of `parts`.
        parts: Milliseconds per part of the step, by the field names of `StepTime`.
        exposed: Milliseconds of exposed communication, by kind.
        memory: Peak memory of the fullest rank.
        fits: True if the memory fits the device with probability `FITS_AT`, or if the device's
            memory size is unknown.
        clash: Index in `CLASHES` of the rule that the execution breaks, or 0.
        why: Index in `reasons` of the reason why there is no forecast, or 0.
        uneven: True if the pipeline stages have unequal numbers of blocks.
    """

    step_ms: Floats
    fits: Flags

    def __init__(self, forecaster: Forecaster, grid: Grid) -> None:
        n = len(grid)
        self.forecaster, self.grid = forecaster, grid
        self.parts: Mapping[str, Floats] = {name: np.full(n, np.nan) for name in STEP_PARTS}
        self.exposed: Mapping[str, Floats] = {name: np.full(n, np.nan) for name in KINDS}
        self.memory = RankMemory(*(np.zeros(n) for _ in RankMemory._fields))
        self.clash, self.why = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.uneven = np.zeros(n, dtype=bool)
        self.reasons = [""]
        self._executions: dict[int, Execution] = {}

    def refuse(self, rows: NDArray[np.intp], reason: str) -> None:
        """Store the reason why some rows have no forecast.

        Args:
            rows: Indices of the rows.
            reason: Sentence for the user.
        """
        self.why[rows] = len(self.reasons)
        self.reasons.append(reason)

    def page_states(self) -> None:
        """Add the time of paging optimizer states to the host, then add up the step times.

        Only paged optimizers have such states. They move if the device's memory is full.
        """
        cluster = self.forecaster.target.cluster
        capacity = cluster.device.memory_gib
        self.fits = np.ones(len(self), dtype=bool)
        if capacity is not None:
            self.fits = fits(self.memory, capacity.value, self.grid.compile)
            if self.memory.paged_gib.any():
                paged_ms = paging_ms(self.memory, capacity.value, cluster)
                self.exposed["offload"][:] += paged_ms
                self.parts["communication_ms"][:] += paged_ms
        self.step_ms = sum(self.parts.values(), np.zeros(len(self)))

    def __len__(self) -> int:
        return len(self.grid)

    def execution(self, i: int) -> Execution:
        """Return execution `i`.

        Raises:
            Contradiction: If the sizes of the execution contradict each other.
        """
        if i not in self._executions:
            self._executions[i] = self.grid.execution(i)
        return self._executions[i]

    @property
    def timed(self) -> Flags:
        """Mask of the rows with a forecast."""
        return np.asarray((self.clash == 0) & (self.why == 0))

    @property
    def feasible(self) -> Flags:
        """Mask of the rows that can run: they have a forecast and fit in memory."""
        return np.asarray(self.timed & self.fits)

    @cached_property
    def _spreads(self) -> list[Spread | None]:
        kernels = enumerate(self._kernels(range(len(self))))
        return [None if row is None else self._spread(i, row) for i, row in kernels]

    @property
    def low_ms(self) -> Floats:
        """Lower ends of the 90% intervals of `step_ms`."""
        return self.step_ms * [np.nan if spread is None else spread.low for spread in self._spreads]

    @property
    def high_ms(self) -> Floats:
        """Upper ends of the 90% intervals of `step_ms`."""
        return self.step_ms * [
            np.nan if spread is None else spread.high for spread in self._spreads
        ]

    def reason(self, i: int) -> str:
        """Return the reason why row `i` has no forecast, or "" if it has one."""
        if self.why[i]:
            return self.reasons[int(self.why[i])]
        return str(self._contradiction(i)) if self.clash[i] else ""

    def forecasts(self) -> list[Forecast]:
        """Return the full records of all rows.

        Raises:
            Contradiction: If the sizes of an execution contradict each other.
        """
        return [self._record(i, row) for i, row in enumerate(self._kernels(range(len(self))))]

    def forecast(self, i: int) -> Forecast:
        """Return the full record of row `i`. Errors are those of `forecasts`."""
        return self._record(i, self._kernels([i])[0])

    def brief(self, i: int) -> Forecast:
        """Return a short record of row `i`: step, interval, memory and exposed communication.

        The record has no heaviest operators, scaling efficiency, utilization or largest
        micro-batch, because these take longer to compute.
        """
        return self._brief(i, self._kernels([i])[0])

    def roofline(self, i: int) -> Roofline | None:
        """Return the roofline of the heaviest operators of execution `i` on one rank.

        The result is None if the device's peak rate or bandwidth is unknown, or if the row has no
        forecast.
        """
        (row,) = self._kernels([i])
        if row is None:
            return None
        e, device = self.execution(i), self.forecaster.target.cluster.device
        repeats = np.where(row.table.updates, 1, e.accumulation)
        return roofline_of(row.table.operators, row.times.device_s, row.held, repeats, e, device)

    def shares(self, rows: Counts | None = None) -> Floats:
        """Return the composition of the steps of some or all rows, shape (rows, parts).

        The shares are in the order of `uncertainty.PARTS`. The rows must have a forecast.
        """
        rows = np.arange(len(self.grid)) if rows is None else rows
        grid = self.grid.at(rows)
        costs = self.forecaster.costs(grid)
        assert not isinstance(costs, str), "steps were forecast with these times"
        inside, outside, updates = np.split(costs.parts, 3, axis=1)
        whole = updates.sum(axis=1)
        update_ms = np.where(grid.offload_optimizer, 0.0, self.parts["optimizer_ms"][rows])
        held = np.where(whole > 0, update_ms / np.where(whole > 0, whole, 1.0), 1.0)
        operators = inside / grid.pp[:, None] + outside + updates * held[:, None]
        total = self.step_ms[rows]
        beside = np.stack(
            [self.parts[name][rows] / total for name in ("host_overhead_ms", "communication_ms")],
            axis=1,
        )
        left = np.maximum(0.0, 1.0 - beside.sum(axis=1))
        of_operators = operators / np.maximum(operators.sum(axis=1), 1e-9)[:, None]
        return np.concatenate([left[:, None] * of_operators, beside], axis=1)

    def _contradiction(self, i: int) -> TrainpaceError:
        target, workload = self.forecaster.target, self.forecaster.workload
        blocks = workload.form(PRECISIONS[int(self.grid.precision[i])]).blocks
        facts = Facts.of(workload, blocks, target.cluster)
        return contradiction(int(self.clash[i]), self.grid, i, facts)

    def _kernels(self, rows: Sequence[int]) -> list[RowKernels | None]:
        """Return the kernels of some rows. Rows without a forecast get None."""
        evaluated, target = self.forecaster.evaluated, self.forecaster.target
        kernels: list[RowKernels | None] = [None] * len(rows)
        positions = np.flatnonzero(self.timed[np.asarray(rows)])
        timed = np.asarray(rows)[positions]
        for key, batches, some, batch_of in kernel_groups(self.grid.at(timed), target.software):
            table = evaluated.table(key.sharding)
            ranks = target.kernels.rank_times(table, batches, target.cluster.device, key)
            assert not isinstance(ranks, str), "steps were forecast with these times"
            for position, batch in zip(some.tolist(), batch_of.tolist(), strict=True):
                i = int(timed[position])
                # Rows inside blocks are divided by the number of stages. The rows of the optimizer
                # are scaled so that their sum is the forecast `optimizer_ms`.
                held = 1.0 - table.inside * (1.0 - 1.0 / int(self.grid.pp[i]))
                whole_ms = 1e3 * float(ranks.times.device_s[batch][table.updates].sum())
                if whole_ms > 0:
                    update_ms = self.parts["optimizer_ms"][i] * ~self.grid.offload_optimizer[i]
                    held[table.updates] = float(update_ms) / whole_ms
                times = KernelTimes(*(seconds[batch] * held for seconds in ranks.times))
                kernels[positions[position]] = RowKernels(table, times, ranks.log_sd[batch], held)
        return kernels

    def _step(self, i: int) -> StepTime:
        return StepTime(**{name: float(values[i]) for name, values in self.parts.items()})

    def _spread(self, i: int, row: RowKernels) -> Spread:
        target = self.forecaster.target
        shares = shares_of(self._step(i), row.table.part, row.times.device_s)
        spread = target.kernels.spread(
            shares, target.cluster.device, row.times.device_s, row.log_sd
        )
        return widened(spread, float(self.outside_sds[i]))

    @cached_property
    def outside_sds(self) -> Floats:
        """Standard deviations of log(step time) that no part of the step accounts for.

        The causes are the unknown speed of the host, and expert layers.
        """
        host = self.forecaster.target.host
        experts = EXPERTS_SD if self.forecaster.workload.has_experts else 0.0
        of_host = 0.0 if host is None else host_sensitivity(self.parts, self.step_ms) * host.log_sd
        return np.asarray(np.hypot(of_host, np.full(len(self), experts)))

    def _brief(self, i: int, row: RowKernels | None) -> Forecast:
        if self.clash[i] and not self.why[i]:
            raise self._contradiction(i)
        workload, target = self.forecaster.workload, self.forecaster.target
        execution, cluster, device = self.execution(i), target.cluster, target.cluster.device
        memory = None if self.clash[i] else self.memory.record(i)
        fit: dict[str, Any] = {"capacity_gib": None, "fits": None, "fit_probability": None}
        if device.memory_gib is not None:
            fit["capacity_gib"] = gib = device.memory_gib.value
            if memory is not None:
                fit["fits"] = bool(self.fits[i])
                fit["fit_probability"] = float(fit_probability(memory, gib, execution.compile))
        host, software = target.host, self._software(execution)
        brief = Forecast(
            model=workload.model,
            device=device.name,
            num_devices=cluster.num_devices,
            execution=execution,
            memory=memory,
            mfu=None,
            model_flops_per_step=None,
            provenance=target.kernels.provenance,
            host="" if host is None else host.name,
            host_assumed=host is not None and cluster.host is None,
            software=software.words,
            software_assumed=software.is_assumed,
            software_idle=software.idle,
            notes=workload.notes,
            sequence_length=workload.sequence_length,
            **fit,
            **self._times(i, row),
        )
        if brief.step is None:
            return brief
        form = workload.form(execution.precision)
        return replace(brief, warnings=tuple(_warnings(brief, bool(self.uneven[i]), form, device)))

    def _times(self, i: int, row: RowKernels | None) -> dict[str, Any]:
        """Return the fields of a record that contain times, or the reason why there are none."""
        if row is None:
            reason = self.reason(i) or "not evaluated"
            return {"step": None, "step_time_interval_ms": None, "reason": reason}
        step, spread = self._step(i), self._spread(i, row)
        ends = {"low": step.total_ms * spread.low, "high": step.total_ms * spread.high}
        interval = Interval(**ends, coverage=spread.coverage, basis=spread.basis)
        exposed = {kind: float(values[i]) for kind, values in self.exposed.items() if values[i] > 0}
        return {
            "step": step,
            "step_time_interval_ms": interval,
            "reason": "",
            "exposed_ms": exposed,
        }

    def _software(self, execution: Execution) -> RunningSoftware:
        target, traced = self.forecaster.target, self.forecaster.evaluated.traced.workload
        if target.kernels.traces_cpu:
            return NO_SOFTWARE  # A calibrated machine was measured with its own software.
        compiles = execution.compile or target.software.compiles
        device = target.cluster.device
        return running_software(traced, target.software, device, execution.precision, compiles)

    def _record(self, i: int, row: RowKernels | None) -> Forecast:
        brief, execution, forecaster = self._brief(i, row), self.execution(i), self.forecaster
        if brief.memory is not None:
            brief = replace(brief, largest_micro_batch=forecaster.largest_micro_batch(execution))
        if row is None or brief.step is None:
            return brief
        form = forecaster.workload.form(execution.precision)
        # FLOPs for MFU come from the plain trace. They must not depend on how the software
        # computes.
        traced = forecaster.evaluated.traced.workload.form(execution.precision)
        flops = _model_flops(traced.operators, execution) * execution.data_parallel_size
        repeats = np.where(row.table.updates, 1, execution.accumulation)
        step_ms, cluster = brief.step.total_ms, forecaster.target.cluster
        efficiency, reference = self._scaling(execution, step_ms)
        peak = peak_flop_per_s(cluster.device, form.operators, execution)
        mfu = None if peak is None else flops / (step_ms * 1e-3 * peak * cluster.num_devices)
        # An impossible MFU is dropped if it contains a measurement. The peak rate of a calibrated
        # machine may have been measured next to other processes, and a measured step may be of
        # another workload.
        if mfu is not None and mfu > MFU_LIMIT and brief.provenance != "fitted":
            mfu = None
        return replace(
            brief,
            mfu=mfu,
            model_flops_per_step=flops,
            heaviest=heaviest(row.table.operators, row.times, repeats),
            roles=by_role(row.table.operators, row.times, repeats),
            scaling_efficiency=efficiency,
            scaling_reference_devices=reference,
        )

    def _scaling(self, execution: Execution, step_ms: float) -> tuple[float | None, int | None]:
        """Return the scaling efficiency, and the number of devices of its reference.

        The efficiency is the throughput per device, divided by that of the reference. The reference
        is the smallest execution from `grid.alone` and `grid.fewer_ranks` that fits in memory.
        A device of unknown memory size fits everything. Both values are None on one device, or if
        nothing smaller fits.
        """
        if execution.world_size == 1:
            return None, None
        forecaster, cluster = self.forecaster, self.forecaster.target.cluster
        many = [on_one_device(execution), *fewer_ranks(execution, cluster.devices_per_node)]
        capacity = cluster.device.memory_gib
        fitting = (
            e
            for e in many
            if capacity is None or fits(forecaster.memory(e), capacity.value, e.compile)
        )
        reference = next(fitting, None)
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
    """Return the model FLOPs of one step on one rank.

    Only matrix operators count. Work that fused attention repeats in the backward pass does not.
    """
    flops = at_batch(operators.flops, execution.micro_batch) * operators.count
    weights = dict.fromkeys(MATRIX_KINDS, 1.0) | {
        "attention_backward": ATTENTION_BACKWARD_MODEL_SHARE
    }
    rows = zip(operators.kind, operators.phase, flops.tolist(), strict=True)
    # Matmuls in the update (Muon) do not count as model FLOPs.
    work = sum(w * weights.get(kind, 0.0) for kind, phase, w in rows if phase != "optimizer")
    return work * execution.accumulation


def _warnings(brief: Forecast, uneven: bool, form: TracedForm, device: Device) -> Iterator[str]:
    e, step = brief.execution, brief.step
    assert step is not None
    if uneven:
        count = 0 if form.blocks is None else form.blocks.count
        stages = e.pp * e.virtual_stages
        placed = "the first stages are assumed to have one block more than the last"
        if stages > count:
            placed = "the head, and then the embedding, are assumed to stand for a block"
        yield f"{count} blocks over {stages} stages are uneven: {placed}"
    if not brief.may_fit:
        yield "does not fit in the device's memory; the time is what it would be if it did"
    if emulates_bf16(device, e.precision):
        yield "no bf16 units, so torch emulates bf16, slower than fp32; fp16 is faster"
    if step.host_overhead_ms > LAUNCH_BOUND * step.total_ms:
        yield (
            "launch-bound: the host's launches take longer than the device's work; a larger batch"
            " costs little"
        )


class CorrectedTable(ForecastTable):
    """A forecast table that is corrected by measurements.

    Forward, backward and optimizer time have their own corrections, because only the first two grow
    with the batch. All other parts get the mean correction of these phases.

    Args:
        plain: Uncorrected table.
        posterior: Prediction of the errors from measurements.
        source: Description of the measurements, for the basis of the intervals.
    """

    def __init__(self, plain: ForecastTable, posterior: Posterior, source: str) -> None:
        super().__init__(plain.forecaster, plain.grid)
        self.plain, self._posterior, self._source = plain, posterior, source
        self.memory, self.fits, self.uneven = plain.memory, plain.fits, plain.uneven
        self.clash, self.why, self.reasons = plain.clash, plain.why, plain.reasons
        self.parts, self.exposed = (
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
            for name, ms in (*self.parts.items(), *self.exposed.items()):
                ms[some] *= ratios.get(name, rest)
        self.step_ms = sum(self.parts.values(), np.zeros(len(self)))

    def shares(self, rows: Counts | None = None) -> Floats:
        return self.plain.shares(rows)

    def _kernels(self, rows: Sequence[int]) -> list[RowKernels | None]:
        return self.plain._kernels(rows)

    def _spread(self, i: int, row: RowKernels) -> Spread:
        plain, narrower = self.plain._spread(i, row), float(self._narrower[i])
        basis = f"{plain.basis}; {self._source}"
        return Spread(plain.low**narrower, plain.high**narrower, plain.coverage, basis)

    @cached_property
    def _narrower(self) -> Floats:
        """Standard deviation with the measurements, divided by the one without, for each row."""
        narrower = np.ones(len(self))
        for some in _chunks(np.flatnonzero(self.timed)):
            runs = self._runs(some)
            narrower[some] = self._posterior.log_sd(runs) / runs.log_sd
        return narrower

    def _brief(self, i: int, row: RowKernels | None) -> Forecast:
        brief = super()._brief(i, row)
        return brief if brief.step is None else replace(brief, provenance="transferred")

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
        """Return some rows as `Runs`, which a posterior relates to measurements.

        The rows must have a forecast.
        """
        plain, number = self.plain, self._posterior.number
        workload, n, grid = plain.forecaster.workload, len(rows), plain.grid.at(rows)
        shares = plain.shares(rows)
        log_sd, card_sd = _deviations(plain, rows, shares)
        variant = np.full(n, -1)
        for known in self._posterior.variants:
            if isinstance(known, Variant) and known == Variant.of(known.execution, workload):
                variant[_has(grid, known.execution)] = number(known)
        return Runs(
            model=np.full(n, number(workload.model)),
            device=np.full(n, number(plain.forecaster.target.cluster.device.name)),
            variant=variant,
            batch=np.maximum(grid.global_batch, 1).astype(np.float64),
            shares=shares,
            log_sd=log_sd,
            card_sd=card_sd,
            step_ms=plain.step_ms[rows],
        )


def _chunks(rows: Counts) -> list[Counts]:
    return [rows[start : start + MOST_COMPARED] for start in range(0, len(rows), MOST_COMPARED)]


def _has(grid: Grid, execution: Execution) -> Flags:
    """Return a mask of the executions that equal this one except for the batch."""
    fields = [name for name in EXECUTION_FIELDS if name not in ("micro_batch", "accumulation")]
    return np.all([grid.has(name, getattr(execution, name)) for name in fields], axis=0)


def _deviations(plain: ForecastTable, rows: Counts, shares: Floats) -> tuple[Floats, Floats]:
    """Return two standard deviations of log(step time) for some rows.

    Returns:
        The whole standard deviation.
        The part of it that comes from a card without a run in the fit.
    """
    target, spreads = plain.forecaster.target, fitted_spreads()
    if target.kernels.traces_cpu:
        # Each kernel of a calibrated machine has its own deviation, so derive it from the interval.
        ends = zip(plain.low_ms[rows], plain.high_ms[rows], strict=True)
        own = [math.log(high / low) / (2 * Z_95) for low, high in ends]
        return np.array(own), np.zeros(len(rows))
    device = target.cluster.device.name
    whole = interval_deviations(spreads, shares, device, plain.outside_sds[rows])
    return whole, card_deviation(spreads, shares, device)
