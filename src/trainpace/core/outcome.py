"""Results of forecasts and measurements: a step's time in named parts, memory, throughput."""

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
"""Sources of a number, the surest first. transferred: a forecast corrected by measured related
runs."""

MFU_LIMIT = 4.0
"""Largest plausible utilization. Above 1, because Winograd convolutions replace 144 multiplications
by 36 (Lavin and Gray 2015, F(4x4, 3x3)), and GeForce cards clock up to a fifth above their
datasheet."""


class StepTime(Record):
    """Wall-clock milliseconds of one optimizer step, in parts that add up to `total_ms`.

    `communication_ms`, `data_wait_ms` and `host_overhead_ms` are exposed times, which nothing
    hides.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    communication_ms: float = 0.0
    data_wait_ms: float = 0.0
    host_to_device_ms: float = 0.0
    host_overhead_ms: float = 0.0
    idle_ms: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, STEP_PARTS, lambda ms: 0 <= ms < math.inf, "0 or more")

    @property
    def total_ms(self) -> float:
        return math.fsum(getattr(self, name) for name in STEP_PARTS)

    @property
    def computing_ms(self) -> float:
        """Time in which the device computes."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def evaluating_ms(self) -> float:
        """Time of the forward passes with their share of the host's work.

        The whole step if its parts are unknown. Communication that inference also needs (tensor and
        pipeline parallelism, gathered parameters) is missing, because `communication_ms` is one
        number for both passes.
        """
        return float(
            evaluating_ms({name: getattr(self, name) for name in STEP_PARTS}, self.total_ms)
        )


STEP_PARTS = StepTime.__struct_fields__


def evaluating_ms(parts: Mapping[str, Any], total_ms: Any) -> np.ndarray:
    """Return `StepTime.evaluating_ms` for steps whose parts may be arrays."""
    computing = parts["forward_ms"] + parts["backward_ms"] + parts["optimizer_ms"]
    hosted = 1 + parts["host_overhead_ms"] / np.where(computing > 0, computing, 1.0)
    return np.where(computing > 0, parts["forward_ms"] * hosted, total_ms)


class Interval(Record):
    """A range that contains the true value in `coverage` of cases, and the basis of that claim."""

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
    """Add up all JOB_PARTS, which may be arrays, in a fixed order, so sums agree to the last
    digit."""
    return functools.reduce(operator.add, (parts[name] for name in JOB_PARTS))


class JobTime(Record):
    """Mean wall-clock seconds of a whole training with all repeats, in parts that add up to
    `total_s`.

    `trainpace.job` computes it. `steps` are of one repeat. `checkpoints` are written in all, with
    `checkpoint_interval_s` of work between two. `usd` is None without a price, `kwh` without a
    known power. `assumed` lists assumptions in words.
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
        """Sum of the parts; infinite if failures come faster than the training recovers."""
        return float(sum_of_parts({name: getattr(self, name) for name in JOB_PARTS}))

    @property
    def hours(self) -> float:
        return hours_from_s(self.total_s)

    @property
    def goodput(self) -> float:
        """Share of the wall-clock time in lasting steps."""
        return self.stepping_s / self.total_s


class Memory(Record):
    """GiB on one device at the step's peak. The parts add up to `allocated_gib`.

    allocated: live tensors. reserved: memory of the framework's allocator. device: memory of the
    card as its monitor shows it, with the driver's context.
    """

    parameters_gib: float
    gradients_gib: float
    optimizer_states_gib: float
    activations_gib: float
    reserved_gib: float
    device_gib: float

    @property
    def allocated_gib(self) -> float:
        return (
            self.parameters_gib
            + self.gradients_gib
            + self.optimizer_states_gib
            + self.activations_gib
        )


class OperatorShare(Record):
    """A group of similar operators among the most expensive of a step."""

    module: str
    kind: str
    phase: str
    count: int
    time_ms: float
    bound: Literal["compute", "memory", "launch"]
    share_of_roof: float


class RoleShare(Record):
    """Device time of a step in layers of one role. `layers` is their number, 0 if unknown."""

    role: str
    layers: int
    time_ms: float


class Jump(Record):
    """A place where one more sample costs far more than usual, between two batch sizes.

    before, batch: the last size before the jump and the first one after it, with their steps.
    excess_ms: beyond the usual slope. causes: in words, the largest first. mechanism: the largest
    cause in two or three words, empty if unknown. next_good: the first larger size with the
    throughput from before the jump, None if unknown.
    """

    before: int
    batch: int
    before_ms: float
    after_ms: float
    excess_ms: float
    causes: tuple[str, ...]
    mechanism: str = ""
    next_good: int | None = None


class Forecast(Record):
    """One model on one cluster under one execution. If impossible, `reason` is given and times are
    None.

    host: the CPU that launches kernels, empty on a machine with its own profile. host_assumed: it
    was not given, and a typical one of such cards is used. software: in words, empty on a machine
    with its own profile. software_assumed: it was not given. software_idle: given software without
    effect here, with reasons. notes: assumptions of the trace. sequence_length: tokens per sample,
    None without sequences.
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
    """Share of `step.communication_ms` by kind of communication, in milliseconds."""
    scaling_efficiency: float | None = None
    """Throughput per device over that on `scaling_reference_devices`, with the same micro-batches.

    None on one device, and if the model does not fit on fewer."""
    scaling_reference_devices: int | None = None
    """The fewest devices of this kind that hold the model."""
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
        # a utilization above the limit is an error in a figure or a formula, so it is not clamped
        assert self.mfu is None or 0 <= self.mfu <= MFU_LIMIT, f"MFU of {self.mfu} on {self.device}"
        assert (self.step is None) == bool(self.reason), (
            "a forecast has either a step time or a reason"
        )

    @property
    def samples_per_second(self) -> float | None:
        return None if self.step is None else 1e3 * self.execution.global_batch / self.step.total_ms

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices, None without sequences."""
        rate = self.samples_per_second
        return None if rate is None or self.sequence_length is None else rate * self.sequence_length


class NoiseScale(Record):
    """Gradient noise scale in `samples`, with its 90% interval from `low` to `high`, over `steps`
    steps.

    None with a `reason` if the true gradient cannot be distinguished from 0. It says nothing about
    other phases of the training."""

    samples: float | None
    low: float | None
    high: float | None
    gradient_squared: float
    covariance_trace: float
    steps: int
    reason: str = ""


class MeasuredNoiseScale(Record):
    """The gradient noise scale over the first steps of a training, each of `batch` samples in
    `parts`.

    `norms_ms` is the time of the two norms of a step, `step_ms` the rest of the step.
    """

    batch: int
    parts: int
    scale: NoiseScale
    norms_ms: float
    step_ms: float


class DeviceRun(Record):
    """State of the device during a measurement's timed steps. Unknown values are None.

    Only NVIDIA's driver reports clocks, power and energy.

    settled: True if two successive windows of the warm-up had equal medians; None if it was too
    short. launch_ms: the host's time to launch a step. busy_share: share of the median step in
    which the device works; in the rest it waits for the host. Clocks are of the multiprocessors in
    MHz: median, lowest and highest during the steps, before the warm-up, just after the steps, and
    the card's highest. held_by: reasons for lowered clocks. power_w: mean of the whole card.
    energy_j: joules per step, by the card's energy counter or its power (energy_source).
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
    """Real steps of one model at one batch size, on the machine that `environment` describes.

    step_times_ms: the timed steps in order. warmup_ms: the steps before the steady state. step: the
    unscaled medians of the parts; the rest of the median step is in `idle_ms`. peak_memory_gib: the
    peak of live tensors, on a CPU the growth of the process since before training.
    reserved_memory_gib: memory of the framework's allocator, on a CPU the whole process. loss: the
    name of the loss, None if unknown. run: the state of the device, None on a CPU.
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
        """Return one row per step in order, warm-up first, with its loss if recorded."""
        times = [*self.warmup_ms, *self.step_times_ms]
        # older runs may have a loss per micro-batch, or none
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
    """A batch size that could not be measured, with the reason."""

    model: str
    device: str
    execution: Execution
    failure: ProbeFailure
    reason: str
    environment: dict[str, str]
    sequence_length: int | None = None
    image_size: int | None = None


def forecast_row(f: Forecast) -> dict[str, Any]:
    """Return a row of `trainpace forecast --json`."""
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
