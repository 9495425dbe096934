"""`forecast(workload, execution, cluster, schedule)`: the heart of trainpace."""

from __future__ import annotations

from trainpace.execution import Execution
from trainpace.forecast.kernels import GPU_KERNELS, KernelModel, KernelTimes, Peak, kernel_times, matrix_peak
from trainpace.forecast.memory import step_memory
from trainpace.forecast.step import heaviest, step_time
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import Forecast, Interval, Provenance, StepTime
from trainpace.schedule import Schedule, training_time
from trainpace.units import hours_from_s
from trainpace.workload import ATTENTION_BACKWARD_MODEL_SHARE, MATRIX_KINDS, Operators, Workload, at_batch, form_of

COVERAGE = 0.9
FIT_MARGIN = 0.97
"""Share of the card that is counted as usable: the driver, the display and fragmentation take the rest."""


GPU_SPREAD = (0.60, 2.8)
"""Factors on the central forecast for 90 % coverage: the quantiles on the specs that the constants were chosen on were 0.66
and 2.0, widened because neither GPUs nor software versions were held out. benchmarks/results/forecast_check.md has the
coverage on other specs."""
CPU_SPREAD = (0.55, 1.80)
"""From a handful of small models on one machine: wide on purpose."""


def forecast(
    workload: Workload,
    execution: Execution,
    cluster: Cluster,
    schedule: Schedule | None = None,
    model: KernelModel | None = None,
) -> Forecast:
    """Forecast one execution of a workload on a cluster.

    What cannot be done (no such rate on the device, not modelled yet) comes back with `reason` and no step time; a
    forecast that does not fit in memory comes back in full with `fits` False. `model` is the machine's own calibration;
    without it the constants of GPU_KERNELS hold.
    """
    device = cluster.device
    form = workload.form(execution.precision)
    operators = form.operators
    memory = step_memory(form, execution, device.kind == "gpu")
    capacity = None if device.memory_gib is None else device.memory_gib.value
    fits = None if capacity is None else memory.device_gib <= capacity * FIT_MARGIN
    constants = model or GPU_KERNELS
    times = kernel_times(operators, execution.micro_batch, device, execution.precision, constants)
    gradient_bytes = workload.trainable_parameters * (2.0 if form_of(execution.precision) == "half" else 4.0)
    reason = _not_modelled(execution)
    step: StepTime | None = None
    if not reason and isinstance(times, str):
        reason = times
    if not reason and isinstance(times, KernelTimes):
        result = step_time(operators, times, constants, execution, cluster, gradient_bytes)
        step, reason = (None, result) if isinstance(result, str) else (result, "")
    provenance: Provenance = "fitted" if model is None else "calibrated"
    if step is None:
        return Forecast(
            model=workload.model, device=device.name, num_devices=cluster.num_devices, execution=execution, step=None,
            step_time_interval_ms=None, memory=memory, capacity_gib=capacity, fits=fits, mfu=None,
            model_flops_per_step=None, provenance=provenance, reason=reason,
        )  # fmt: skip
    assert isinstance(times, KernelTimes)
    low, high = CPU_SPREAD if device.kind == "cpu" else GPU_SPREAD
    interval = Interval(
        low=step.total_ms * low, high=step.total_ms * high, coverage=COVERAGE,
        basis="spread of this model's errors on measured runs, widened for unseen GPUs",
    )  # fmt: skip
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
        fits=fits,
        mfu=_mfu(flops, operators, step, execution, cluster),
        model_flops_per_step=flops,
        provenance=provenance,
        heaviest=heaviest(operators, times, execution),
        training_time=time,
        training_time_interval_s=_time_interval(schedule, execution, interval),
        cost_usd=cost,
        warnings=_warnings(fits, step),
    )


def _not_modelled(execution: Execution) -> str:
    wanted = {
        "tensor, pipeline or context parallelism": execution.tp * execution.pp * execution.cp > 1,
        "ZeRO or FSDP sharding": execution.zero_stage > 0,
        "optimizer offload": execution.offload_optimizer,
        "activation checkpointing": execution.activation_checkpointing,
        "torch.compile": execution.compile,
    }
    missing = [name for name, is_wanted in wanted.items() if is_wanted]
    return f"{', '.join(missing)}: not forecast yet." if missing else ""


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
