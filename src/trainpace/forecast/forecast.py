"""`forecast(workload, execution, cluster, schedule)`: the heart of trainpace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.intervals import spread_of
from trainpace.forecast.kernels import KernelTimes, kernel_table
from trainpace.forecast.memory import fits, largest_micro_batch, step_memory
from trainpace.forecast.rates import Peak, matrix_peak, sustained_rates
from trainpace.forecast.step import PhaseTimes, heaviest, host_us, phase_sums, step_time
from trainpace.forecast.timings import MachineModel, machine_spread, machine_times, step_factor
from trainpace.forecast.timings import host_us as machine_host_us
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import Forecast, Interval, Provenance, StepTime
from trainpace.schedule import Schedule, training_time
from trainpace.units import hours_from_s
from trainpace.workload import ATTENTION_BACKWARD_MODEL_SHARE, MATRIX_KINDS, Operators, Workload, at_batch, form_of


def forecast(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    schedule: Schedule | None = None,
    model: MachineModel | KernelConstants | None = None,
    host_factor: float = 1.0,
    host_to_device_ms: float = 0.0,
) -> Forecast:
    """Forecast one execution of a workload on a cluster.

    What cannot be done (no such rate on the device, not modelled yet) comes back with `reason` and no step time; a
    forecast that does not fit in memory comes back in full with `fits` False. `model` is the machine's own calibration
    (a CPU's) or other constants; without it the fitted ones hold. `host_factor` is how much slower than a common host
    this one launches; `host_to_device_ms` what copying a micro-batch to the device takes where nothing hides it.
    """
    device = cluster.device
    form = workload.form(execution.precision)
    operators = form.operators
    trained = 0 if workload.mode == "inference" else workload.trainable_parameters
    gradient_bytes = trained * (2.0 if form_of(execution.precision) == "half" else 4.0)
    parameter_bytes = workload.parameters * (4.0 if form_of(execution.precision) == "fp32" else 2.0)
    memory = step_memory(form, execution, device.kind == "gpu")
    capacity = None if device.memory_gib is None else device.memory_gib.value
    fitting = None if capacity is None else fits(memory, capacity)
    largest = None
    if capacity is not None and device.kind == "gpu":
        largest = largest_micro_batch(form, execution, capacity)
    calibrated = isinstance(model, MachineModel)
    provenance: Provenance = "calibrated" if calibrated else "fitted"
    evaluated = _evaluate(operators, execution, cluster, model, host_factor)
    reason = _not_modelled(execution, workload) or (evaluated if isinstance(evaluated, str) else "")
    step: StepTime | None = None
    if not isinstance(evaluated, str) and not reason:
        phases, start_ms = evaluated.phases, evaluated.start_ms
        result = step_time(
            phases,
            device.kind == "gpu",
            start_ms,
            execution,
            cluster,
            gradient_bytes,
            parameter_bytes,
            host_to_device_ms,
        )
        step, reason = (None, result) if isinstance(result, str) else (result, "")
    if step is None:
        return Forecast(
            model=workload.model, device=device.name, num_devices=cluster.num_devices, execution=execution, step=None,
            step_time_interval_ms=None, memory=memory, capacity_gib=capacity, fits=fitting, largest_micro_batch=largest, mfu=None,
            model_flops_per_step=None, provenance=provenance, reason=reason,
        )  # fmt: skip
    assert not isinstance(evaluated, str)
    if isinstance(model, MachineModel):
        spread = machine_spread(model, evaluated.times, evaluated.log_sd)
    else:
        spread = spread_of(step, operators, evaluated.times, execution, cluster)
    interval = Interval(
        low=step.total_ms * spread.low, high=step.total_ms * spread.high, coverage=spread.coverage, basis=spread.basis
    )
    flops = _model_flops(operators, execution) * execution.data_parallel_size
    time = None
    if schedule is not None:
        time = training_time(schedule, execution, step.total_ms / 1e3)
    price = cluster.price_usd_per_device_hour
    cost = None
    if time is not None and price is not None:
        cost = price * cluster.num_devices * hours_from_s(time.total_s)
    return Forecast(
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
        mfu=_mfu(flops, operators, step, execution, cluster),
        model_flops_per_step=flops,
        provenance=provenance,
        heaviest=heaviest(operators, evaluated.times, execution),
        training_time=time,
        training_time_interval_s=_time_interval(schedule, execution, interval),
        cost_usd=cost,
        warnings=_warnings(fitting, step),
    )


class _Evaluated(NamedTuple):
    """Kernel times, their phases, the host's work outside the phases, and how unsure each row's time is (a calibrated
    machine's: the standard deviation of its logarithm)."""

    times: KernelTimes
    phases: PhaseTimes
    start_ms: float
    log_sd: NDArray[np.float64]


def _evaluate(
    operators: Operators,
    execution: Execution,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
) -> _Evaluated | str:
    """The times, or the reason why there are none."""
    device = cluster.device
    if isinstance(model, MachineModel) or device.kind == "cpu":
        if not isinstance(model, MachineModel):
            return f"{device.name} is a CPU: it has to be calibrated before it can be forecast."
        if bool((operators.half & (operators.launches > 0)).any()) and not bool(model.timings.half.any()):
            return f"{device.name} has been calibrated in fp32 only."
        times, log_sd = machine_times(operators, execution.micro_batch, model)
        factor = step_factor(model)
        times = KernelTimes(times.device_s * factor, *times[1:])
        host_ms = phase_sums(operators, machine_host_us(operators, model) * 1e-3) * factor
        return _Evaluated(times, PhaseTimes(phase_sums(operators, 1e3 * times.device_s), host_ms), 0.0, log_sd)
    constants = model or fitted_constants()
    rates = sustained_rates(
        device, execution.precision, bool((~operators.half).any()), bool(operators.half.any()), constants
    )
    if isinstance(rates, str):
        return rates
    batch = np.asarray(float(execution.micro_batch))
    times = kernel_table(operators).times(batch, rates, constants, execution.channels_last, execution.compile)
    factor = host_factor * (constants.compile_host if execution.compile else 1.0)
    host_ms = phase_sums(operators, host_us(operators, constants) * 1e-3) * factor
    phases = PhaseTimes(phase_sums(operators, 1e3 * times.device_s), host_ms)
    return _Evaluated(times, phases, constants.host_step_us * 1e-3 * factor, np.zeros(len(operators)))


def _not_modelled(execution: Execution, workload: Workload) -> str:
    wanted = {
        "tensor, pipeline or context parallelism": execution.tp * execution.pp * execution.cp > 1,
        "optimizer offload": execution.offload_optimizer,
    }
    missing = [name for name, is_wanted in wanted.items() if is_wanted]
    if missing:
        return f"{', '.join(missing)}: not forecast yet."
    if execution.activation_checkpointing == "full" and not workload.checkpointed:
        return "activation checkpointing: this workload was traced without it."
    return ""


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


def _time_interval(schedule: Schedule | None, execution: Execution, step_ms: Interval) -> Interval | None:
    if schedule is None:
        return None
    ends = [training_time(schedule, execution, ms / 1e3).total_s for ms in (step_ms.low, step_ms.high)]
    return Interval(low=ends[0], high=ends[1], coverage=step_ms.coverage, basis=step_ms.basis)


def _warnings(fits: bool | None, step: StepTime) -> tuple[str, ...]:
    warnings = []
    if fits is False:
        warnings.append("does not fit in the device's memory; the time is what it would be if it did")
    if step.host_overhead_ms > 0.3 * step.total_ms:
        warnings.append(
            "launch-bound: the host's launches take longer than the device's work; a larger batch costs little"
        )
    return tuple(warnings)
