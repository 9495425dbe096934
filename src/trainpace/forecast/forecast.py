"""`forecast(workload, execution, cluster, schedule)`: the heart of trainpace."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.executions import grid_of
from trainpace.forecast.grid import forecast_grid
from trainpace.forecast.intervals import spread_of
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.memory import fits, largest_micro_batch
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.forecast.scaling import scaling_of
from trainpace.forecast.shapes import contradiction
from trainpace.forecast.sharding import rank_operators
from trainpace.forecast.stages import RankTimes, block_shares, rank_times
from trainpace.forecast.step import heaviest
from trainpace.forecast.timings import MachineModel, machine_spread
from trainpace.hardware.cluster import Cluster
from trainpace.job import ASSUMED, JobConditions, with_job
from trainpace.outcome import Forecast, Interval, Provenance, StepTime
from trainpace.schedule import Schedule
from trainpace.workload import ATTENTION_BACKWARD_MODEL_SHARE, MATRIX_KINDS, Operators, TracedForm, Workload, at_batch


def forecast(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    schedule: Schedule | None = None,
    model: MachineModel | KernelConstants | None = None,
    host_factor: float = 1.0,
    host_to_device_ms: float = 0.0,
    conditions: JobConditions = ASSUMED,
) -> Forecast:
    """Forecast one execution of a workload on a cluster.

    What cannot be done (no such rate on the device, not modelled yet) comes back with `reason` and no step time; a
    forecast that does not fit in memory comes back in full with `fits` False. `model` is the machine's own calibration
    (a CPU's) or other constants; without it the fitted ones hold. `host_factor` is how much slower than a common host
    this one launches; `host_to_device_ms` what copying a micro-batch to the device takes where nothing hides it.
    """
    device = cluster.device
    form = workload.form(execution.precision)
    grid = grid_of([execution])
    capacity = None if device.memory_gib is None else device.memory_gib.value
    refused = _refused(workload, form, execution)
    found = forecast_grid(workload, execution, grid, cluster, model, host_factor, host_to_device_ms)
    clash = int(found.clash[0])
    if clash and not refused:
        raise contradiction(clash, grid, 0, form.blocks, workload.sequence_length, cluster)
    memory = None if clash else found.memory.at(0)
    fitting = None if capacity is None or memory is None else bool(fits(memory, capacity))
    largest = None
    if capacity is not None and memory is not None and device.kind == "gpu":
        largest = largest_micro_batch(form, execution, capacity, workload.checkpointed)
    provenance: Provenance = "calibrated" if isinstance(model, MachineModel) else "fitted"
    timed = _timed(workload, form, execution, cluster, model, host_factor)
    reason = refused or next(iter(found.reasons.values()), "")
    if reason or isinstance(timed, str):
        return Forecast(
            model=workload.model, device=device.name, num_devices=cluster.num_devices, execution=execution, step=None,
            step_time_interval_ms=None, memory=memory, capacity_gib=capacity, fits=fitting, largest_micro_batch=largest, mfu=None,
            model_flops_per_step=None, provenance=provenance, reason=reason or str(timed),
        )  # fmt: skip
    step = StepTime(**{name: float(values[0]) for name, values in found.parts.items()})
    timed = timed._replace(times=_of_rank(timed, form, execution, step))
    if isinstance(model, MachineModel):
        spread = machine_spread(model, timed.times, timed.log_sd)
    else:
        spread = spread_of(step, timed.operators, timed.times, execution, cluster)
    interval = Interval(
        low=step.total_ms * spread.low, high=step.total_ms * spread.high, coverage=spread.coverage, basis=spread.basis
    )
    flops = _model_flops(form.operators, execution) * execution.data_parallel_size
    scaling = scaling_of(workload, execution, cluster, model, host_factor, host_to_device_ms, step.total_ms)
    step_forecast = Forecast(
        model=workload.model,
        device=device.name,
        num_devices=cluster.num_devices,
        execution=execution,
        step=step,
        step_time_interval_ms=interval,
        memory=memory,
        capacity_gib=capacity,
        fits=fitting,
        largest_micro_batch=largest,
        mfu=_mfu(flops, form.operators, step, execution, cluster),
        model_flops_per_step=flops,
        provenance=provenance,
        heaviest=heaviest(timed.operators, timed.times, execution),
        exposed_ms={kind: float(values[0]) for kind, values in found.exposed.items() if values[0] > 0},
        scaling_efficiency=scaling.efficiency,
        scaling_reference_devices=scaling.devices,
        warnings=_warnings(fitting, step, bool(found.uneven[0]), form, execution),
    )
    priced = replace(conditions, price_usd_per_device_hour=cluster.price_usd_per_device_hour)
    return with_job(step_forecast, workload, schedule, priced)


def _refused(workload: Workload, form: TracedForm, execution: Execution) -> str:
    """What cannot be forecast for want of knowledge about the model."""
    wanted = {"tensor": execution.tp, "pipeline": execution.pp, "context": execution.cp}
    missing = [name for name, size in wanted.items() if size > 1]
    if missing and form.blocks is None:
        return (
            f"{' and '.join(missing)} parallelism: {workload.model} has no repeated blocks along which it could be cut."
        )
    if execution.activation_checkpointing != "none" and not workload.checkpointed and form.blocks is None:
        return "activation checkpointing: this workload was traced without it, and has no repeated blocks to recompute."
    return ""


def _timed(
    workload: Workload,
    form: TracedForm,
    execution: Execution,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
) -> RankTimes | str:
    """Kernel times of one rank's share of every row, or the reason why there are none."""
    if _refused(workload, form, execution):
        return "not evaluated"
    sequence = execution.sequence_parallel and execution.tp > 1
    operators = rank_operators(form.operators, form.blocks, execution.tp, execution.cp, sequence)
    batch = np.array([float(execution.micro_batch)])
    timed = rank_times(
        operators, batch, execution.precision, cluster.device, model, host_factor, execution.channels_last, execution.compile
    )  # fmt: skip
    if isinstance(timed, str):
        return timed
    return timed._replace(times=KernelTimes(*(seconds[0] for seconds in np.broadcast_arrays(*timed.times))))


def _of_rank(timed: RankTimes, form: TracedForm, execution: Execution, step: StepTime) -> KernelTimes:
    """The rows' times on one stage of a pipeline; the optimizer's rows as their sum was forecast, sharded or on the host."""
    held = 1.0 - block_shares(timed.operators, form.blocks) * (1.0 - 1.0 / execution.pp)
    updates = np.array(timed.operators.phase) == "optimizer"
    whole_ms = 1e3 * float(timed.times.device_s[updates].sum())
    if whole_ms > 0:
        held[updates] = 0.0 if execution.offload_optimizer else step.optimizer_ms / whole_ms
    return KernelTimes(*(seconds * held for seconds in timed.times))


def _model_flops(operators: Operators, execution: Execution) -> float:
    """FLOPs of the model itself on one rank: matrix operators, without what fused attention computes twice."""
    flops = at_batch(operators.flops, execution.micro_batch) * operators.count
    weight = {"attention_backward": ATTENTION_BACKWARD_MODEL_SHARE}
    counted = sum(
        float(flops[i]) * weight.get(kind, 1.0) for i, kind in enumerate(operators.kind) if kind in MATRIX_KINDS
    )
    return counted * execution.accumulation


def _mfu(flops: float, operators: Operators, step: StepTime, execution: Execution, cluster: Cluster) -> float | None:
    """Model FLOPs over what the fastest format in use could do in the same time."""
    formats = {bool(half) for half in operators.half}
    peaks = [matrix_peak(cluster.device, execution.precision, half) for half in formats]
    rates = [peak.flop_per_s for peak in peaks if isinstance(peak, Peak)]
    return flops / (step.total_ms * 1e-3 * max(rates) * cluster.num_devices) if rates else None


def _warnings(
    fits: bool | None, step: StepTime, uneven: bool, form: TracedForm, execution: Execution
) -> tuple[str, ...]:
    warnings = []
    if uneven and form.blocks is not None:
        stages = execution.pp * execution.virtual_stages
        warnings.append(
            f"{form.blocks.count} blocks over {stages} stages are uneven: the first are taken to hold one more than the last"
        )
    if fits is False:
        warnings.append("does not fit in the device's memory; the time is what it would be if it did")
    if step.host_overhead_ms > 0.3 * step.total_ms:
        warnings.append(
            "launch-bound: the host's launches take longer than the device's work; a larger batch costs little"
        )
    return tuple(warnings)
