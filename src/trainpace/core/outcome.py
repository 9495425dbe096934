"""Results of forecasts and measurements: parts of the step time, memory and throughput."""

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import Record, Table, check_fields
from trainpace.core.units import hours_from_s

Provenance = Literal["measured", "transferred", "calibrated", "fitted", "datasheet"]
"""Source of a number, the most reliable first.

transferred means a forecast that is corrected by measurements of related runs.
"""

MFU_LIMIT = 4.0
"""Largest plausible model FLOPs utilization (MFU).

It can be above 1. Winograd convolutions replace 144 multiplications by 36 (Lavin and Gray 2015,
F(4x4, 3x3)), and GeForce cards clock up to a fifth above their datasheet.
"""


class StepTime(Record):
    """Wall-clock time of one optimizer step in milliseconds, in parts that add up to `total_ms`.

    `communication_ms`, `data_wait_ms` and `host_overhead_ms` only contain exposed time, which does
    not overlap with computation. `own_code_ms` is the script's own code, logging, evaluation and
    checkpoints, if a recording shows them.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    communication_ms: float = 0.0
    data_wait_ms: float = 0.0
    host_to_device_ms: float = 0.0
    host_overhead_ms: float = 0.0
    idle_ms: float = 0.0
    own_code_ms: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, STEP_PARTS, lambda ms: 0 <= ms < math.inf, "0 or more")

    @property
    def total_ms(self) -> float:
        return math.fsum(getattr(self, name) for name in STEP_PARTS)

    @property
    def computing_ms(self) -> float:
        """Time in which the device computes, in milliseconds."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def evaluating_ms(self) -> float:
        """Time of the forward passes with their share of the host overhead, in milliseconds.

        If the parts are unknown, it is the time of the whole step. Communication that inference
        also needs (tensor and pipeline parallelism, gathered parameters) is missing, because
        `communication_ms` is one number for both passes.
        """
        return float(
            evaluating_ms({name: getattr(self, name) for name in STEP_PARTS}, self.total_ms)
        )


STEP_PARTS = StepTime.__struct_fields__


def evaluating_ms(parts: Mapping[str, Any], total_ms: Any) -> np.ndarray:
    """Return `StepTime.evaluating_ms` for one or many steps.

    Args:
        parts: {part: milliseconds}. Values may be arrays.
        total_ms: Time of the whole step, which may be an array.
    """
    computing = parts["forward_ms"] + parts["backward_ms"] + parts["optimizer_ms"]
    hosted = 1 + parts["host_overhead_ms"] / np.where(computing > 0, computing, 1.0)
    return np.where(computing > 0, parts["forward_ms"] * hosted, total_ms)


class Interval(Record):
    """Interval for an unknown value.

    Attributes:
        low: Lower end.
        high: Upper end.
        coverage: Share of cases in which the interval contains the true value.
        basis: Evidence for the coverage, in words.
    """

    low: float
    high: float
    coverage: float
    basis: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or not 0 < self.coverage < 1:
            raise TrainpaceError(f"not an interval: {self.low} to {self.high} at {self.coverage}.")


JOB_PARTS = (
    "stepping_s",
    "data_wait_s",
    "stragglers_s",
    "evaluation_s",
    "checkpoint_s",
    "failures_s",
    "startup_s",
    "compiling_s",
    "preparing_s",
    "transfer_s",
)


def sum_of_parts(parts: Mapping[str, Any]) -> Any:
    """Add up all JOB_PARTS in a fixed order, so that equal parts give equal sums.

    The values may be arrays.
    """
    return functools.reduce(operator.add, (parts[name] for name in JOB_PARTS))


class JobTime(Record):
    """Mean wall-clock time of a whole training in seconds, in parts that add up to `total_s`.

    `trainpace.job` computes it. The times include all repeats.

    Attributes:
        steps: Number of steps of one repeat.
        repeats: Number of repeats.
        checkpoints: Number of checkpoints written in total.
        checkpoint_interval_s: Seconds of work between two checkpoints.
        usd: Cost in US dollars. None without a price.
        kwh: Energy in kWh. None if the power is unknown.
        assumed: Assumptions in words.
    """

    steps: int
    repeats: int
    stepping_s: float
    data_wait_s: float = 0.0
    stragglers_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    failures_s: float = 0.0
    startup_s: float = 0.0
    compiling_s: float = 0.0
    preparing_s: float = 0.0
    transfer_s: float = 0.0
    checkpoints: int = 0
    checkpoint_interval_s: float = 0.0
    usd: float | None = None
    kwh: float | None = None
    assumed: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        """Sum of the parts. Infinite if failures come faster than the training recovers."""
        return float(sum_of_parts({name: getattr(self, name) for name in JOB_PARTS}))

    @property
    def hours(self) -> float:
        return hours_from_s(self.total_s)

    @property
    def goodput(self) -> float:
        """Share of the wall-clock time spent on steps that are not lost to failures."""
        return self.stepping_s / self.total_s


class Memory(Record):
    """Memory on one device at the peak of a step, in GiB.

    Parameters, gradients, optimizer states and activations add up to `allocated_gib`, the memory of
    live tensors. `logits_gib` is the part of the activations that has the size of a vocabulary's
    logits: the logits, and the copies that the loss makes of them. `reserved_gib` is the memory
    of the framework's allocator. `device_gib` is the memory that nvidia-smi and similar tools show,
    including the driver's context.
    """

    parameters_gib: float
    gradients_gib: float
    optimizer_states_gib: float
    activations_gib: float
    reserved_gib: float
    device_gib: float
    logits_gib: float = 0.0

    @property
    def allocated_gib(self) -> float:
        return (
            self.parameters_gib
            + self.gradients_gib
            + self.optimizer_states_gib
            + self.activations_gib
        )


class OperatorShare(Record):
    """Group of similar operators that is among the most expensive of a step."""

    module: str
    kind: str
    phase: str
    count: int
    time_ms: float
    bound: Literal["compute", "memory", "launch"]
    share_of_roof: float


class RoleShare(Record):
    """Device time of a step in the layers of one role.

    `layers` is the number of these layers, or 0 if unknown.
    """

    role: str
    layers: int
    time_ms: float


class Jump(Record):
    """Jump of the step time: between two batch sizes, a sample costs far more than usual.

    Attributes:
        before: Last batch size before the jump.
        batch: First batch size after the jump.
        before_ms: Step time at `before`.
        after_ms: Step time at `batch`.
        excess_ms: Increase of the step time beyond the usual slope.
        causes: Causes in words, the largest first.
        mechanism: Largest cause in two or three words. Empty if unknown.
        next_good: Smallest larger batch size with the throughput from before the jump. None if
            unknown.
    """

    before: int
    batch: int
    before_ms: float
    after_ms: float
    excess_ms: float
    causes: tuple[str, ...]
    mechanism: str = ""
    next_good: int | None = None


FITS_AT = 0.9
"""Least probability of fitting in memory at which a training is said to fit."""
CERTAIN = 0.99
"""Probability of fitting in memory above which it is not printed."""


class Forecast(Record):
    """Forecast for one model on one cluster with one execution.

    If the combination is impossible, `reason` says why and times are None.

    Attributes:
        fits: True if the training fits in memory with at least the probability `FITS_AT`. None if
            the memory is unknown.
        host: CPU that launches kernels. Empty for a machine with its own profile.
        host_assumed: True if the host was not given, so a typical host of such cards is assumed.
        software: Software in words. Empty for a machine with its own profile.
        software_assumed: True if the software was not given.
        software_idle: Given software settings that have no effect here, with reasons.
        notes: Assumptions of the trace.
        sequence_length: Tokens per sample. None if samples are not sequences.
    """

    model: str
    device: str
    num_devices: int
    execution: Execution
    step: StepTime | None
    step_time_interval_ms: Interval | None
    memory: Memory | None
    capacity_gib: float | None
    fits: bool | None
    mfu: float | None
    model_flops_per_step: float | None
    provenance: Provenance
    reason: str = ""
    heaviest: tuple[OperatorShare, ...] = ()
    roles: tuple[RoleShare, ...] = ()
    largest_micro_batch: int | None = None
    training_time: JobTime | None = None
    training_time_interval_s: Interval | None = None
    cost_usd: float | None = None
    cost_interval_usd: Interval | None = None
    exposed_ms: dict[str, float] = msgspec.field(default_factory=dict)
    """{kind of communication: its part of `step.communication_ms`}, in milliseconds."""
    scaling_efficiency: float | None = None
    """Throughput per device divided by that on `scaling_reference_devices`, at equal micro-batches.

    None on one device, and if the model does not fit on fewer devices."""
    scaling_reference_devices: int | None = None
    """Smallest number of such devices on which the model fits."""
    warnings: tuple[str, ...] = ()
    fit_probability: float | None = None
    host: str = ""
    host_assumed: bool = False
    software: str = ""
    software_assumed: bool = False
    software_idle: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        # an MFU above the limit means a wrong figure or formula, so it fails instead of being cut
        assert self.mfu is None or 0 <= self.mfu <= MFU_LIMIT, f"MFU of {self.mfu} on {self.device}"
        assert (self.step is None) == bool(self.reason), (
            "a forecast has either a step time or a reason"
        )

    @property
    def can_run(self) -> bool:
        """True if the step has a time, and nothing says that it does not fit in memory."""
        return self.step is not None and self.fits is not False

    @property
    def samples_per_second(self) -> float | None:
        return None if self.step is None else 1e3 * self.execution.global_batch / self.step.total_ms

    @property
    def may_fit(self) -> bool:
        """False if the probability of fitting in memory is at most `1 - FITS_AT`."""
        return self.fits is not False or (self.fit_probability or 0.0) > 1 - FITS_AT

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices. None if samples are not sequences."""
        rate = self.samples_per_second
        return None if rate is None or self.sequence_length is None else rate * self.sequence_length


class NoiseScale(Record):
    """Gradient noise scale in samples, measured over some steps. It changes during a training.

    Attributes:
        samples: Noise scale. None, with a `reason`, if the true gradient cannot be distinguished
            from 0.
        low: Lower end of the 90% interval.
        high: Upper end of the 90% interval.
        steps: Number of steps.
        reason: Reason why there is no noise scale.
    """

    samples: float | None
    low: float | None
    high: float | None
    gradient_squared: float
    covariance_trace: float
    steps: int
    reason: str = ""


class MeasuredNoiseScale(Record):
    """Gradient noise scale over the first steps of a training.

    Attributes:
        batch: Number of samples per step.
        parts: Number of parts into which the batch is split.
        scale: The noise scale.
        norms_ms: Time to compute the two gradient norms of a step.
        step_ms: Time of the rest of the step.
    """

    batch: int
    parts: int
    scale: NoiseScale
    norms_ms: float
    step_ms: float


class DeviceRun(Record):
    """State of the device during the timed steps of a measurement.

    Unknown values are None. Only NVIDIA's driver reports clocks, power and energy.

    Attributes:
        settled: True if two successive windows of the warm-up had equal medians. None if the
            warm-up was too short.
        launch_ms: Time that the host needs to launch a step.
        busy_share: Share of the median step in which the device works. In the rest it waits for the
            host.
        sm_mhz: Median clock of the multiprocessors during the steps.
        sm_mhz_low: Lowest clock during the steps.
        sm_mhz_high: Highest clock during the steps.
        sm_mhz_before: Clock before the warm-up.
        sm_mhz_after: Clock just after the steps.
        sm_mhz_max: Highest clock that the card supports.
        held_by: Reasons for reduced clocks.
        power_w: Mean power of the whole card.
        energy_j: Energy per step in joules.
        energy_source: Source of `energy_j`: the card's energy counter, or its power.
    """

    settled: bool | None = None
    launch_ms: float | None = None
    busy_share: float | None = None
    sm_mhz: float | None = None
    sm_mhz_low: float | None = None
    sm_mhz_high: float | None = None
    sm_mhz_before: float | None = None
    sm_mhz_after: float | None = None
    sm_mhz_max: float | None = None
    held_by: tuple[str, ...] = ()
    power_w: float | None = None
    energy_j: float | None = None
    energy_source: Literal["", "counter", "power"] = ""


class Measurement(Record, Table):
    """Measured steps of one model at one batch size, on the machine in `environment`.

    Attributes:
        step_times_ms: Times of the timed steps, in order.
        warmup_ms: Times of the steps before the steady state.
        step: Median of each part, without scaling. The rest of the median step is in `idle_ms`.
        peak_memory_gib: Peak memory of live tensors. On a CPU, growth of the process since before
            training.
        reserved_memory_gib: Memory of the framework's allocator. On a CPU, memory of the process.
        loss: Name of the loss. None if unknown.
        run: State of the device. None on a CPU.
    """

    model: str
    device: str
    execution: Execution
    step_times_ms: tuple[float, ...]
    warmup_ms: tuple[float, ...]
    step: StepTime
    median_ms: float
    interval_ms: Interval
    peak_memory_gib: float | None
    losses: tuple[float, ...]
    environment: dict[str, str]
    reserved_memory_gib: float | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    noise_scale: MeasuredNoiseScale | None = None
    loss: str | None = None
    run: DeviceRun | None = None

    @property
    def samples_per_second(self) -> float:
        return 1e3 * self.execution.global_batch / self.median_ms

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a row for each step in order, including warm-up, with its loss if recorded."""
        times = [*self.warmup_ms, *self.step_times_ms]
        # older runs may have one loss per micro-batch, or no losses
        losses = self.losses if len(self.losses) == len(times) else (None,) * len(times)
        return [
            {
                "model": self.model,
                "device": self.device,
                "batch": self.execution.micro_batch,
                "step": i + 1,
                "step_time_ms": ms,
                "warm_up": i < len(self.warmup_ms),
                "loss": losses[i],
            }
            for i, ms in enumerate(times)
        ]


ProbeFailure = Literal["out_of_memory", "timeout", "crashed"]


class FailedProbe(Record):
    """Batch size that could not be measured, with the reason."""

    model: str
    device: str
    execution: Execution
    failure: ProbeFailure
    reason: str
    environment: dict[str, str]
    sequence_length: int | None = None
    image_size: int | None = None


def forecast_row(f: Forecast) -> dict[str, Any]:
    """Return a forecast as a row of `trainpace forecast --json`."""
    interval = f.step_time_interval_ms
    return {
        "model": f.model,
        "gpu": f.device,
        "num_gpus": f.num_devices,
        "precision": f.execution.precision,
        "batch": f.execution.micro_batch,
        "sequence_length": f.sequence_length,
        "step_time_ms": None if f.step is None else f.step.total_ms,
        "step_time_ms_low": None if interval is None else interval.low,
        "step_time_ms_high": None if interval is None else interval.high,
        "samples_per_second": f.samples_per_second,
        "tokens_per_second": f.tokens_per_second,
        "peak_memory_gib": None if f.memory is None else f.memory.allocated_gib,
        "fits": f.fits,
        "fit_probability": f.fit_probability,
        "largest_batch": f.largest_micro_batch,
        "mfu": f.mfu,
        "exposed_ms": dict(f.exposed_ms),
        "scaling_efficiency": f.scaling_efficiency,
        "scaling_reference_devices": f.scaling_reference_devices,
        "breakdown_ms": (
            {} if f.step is None else {name: getattr(f.step, name) for name in STEP_PARTS}
        ),
        "provenance": f.provenance,
        "host": f.host,
        "host_assumed": f.host_assumed,
        "software": f.software,
        "software_assumed": f.software_assumed,
        "software_idle": list(f.software_idle),
        "warnings": list(f.warnings),
        "notes": list(f.notes),
        "reason": f.reason,
        "training_time_s": None if f.training_time is None else f.training_time.total_s,
        "cost_usd": f.cost_usd,
        "assumed": [] if f.training_time is None else list(f.training_time.assumed),
    }
