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
"""Sources of a number, the surest first. transferred: a forecast corrected by measurements of kindred runs."""

MFU_LIMIT = 4.0
"""Above 1 because Winograd convolutions do the work of 144 multiplications with 36 (Lavin and Gray 2015, F(4x4, 3x3)),
and because GeForce cards clock up to a fifth above the datasheet from which the peak is taken."""


class StepTime(Record):
    """Wall-clock milliseconds of one optimizer step, in parts that add up to `total_ms`.

    `communication_ms`, `data_wait_ms` and `host_overhead_ms` count only exposed time, which nothing else hides.
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
        """The part in which the device computes."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def evaluating_ms(self) -> float:
        """The forward passes with their part of the host's work; the whole step where its parts are not known.

        Limit: exchanges that inference needs too (tensor and pipeline parallelism, gathered parameters) are left out, since
        `communication_ms` holds those of both passes in one number.
        """
        return float(
            evaluating_ms({name: getattr(self, name) for name in STEP_PARTS}, self.total_ms)
        )


STEP_PARTS = StepTime.__struct_fields__


def evaluating_ms(parts: Mapping[str, Any], total_ms: Any) -> np.ndarray:
    """`StepTime.evaluating_ms`, of steps whose parts may be arrays."""
    computing = parts["forward_ms"] + parts["backward_ms"] + parts["optimizer_ms"]
    hosted = 1 + parts["host_overhead_ms"] / np.where(computing > 0, computing, 1.0)
    return np.where(computing > 0, parts["forward_ms"] * hosted, total_ms)


class Interval(Record):
    """A range that should hold the true value in `coverage` of cases, and the basis of that claim."""

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
    """All JOB_PARTS, which may be arrays, added up in their order, so that every sum of them agrees to the last digit."""
    return functools.reduce(operator.add, (parts[name] for name in JOB_PARTS))


class JobTime(Record):
    """Mean wall-clock seconds of a whole training, all repeats together, in parts that add up to `total_s`.

    `trainpace.job` computes it. `steps` are those of one repeat; `checkpoints` how many are written in all, and
    `checkpoint_interval_s` the work between two. `usd` and `kwh` are None where no price, and no power, is known. `assumed`:
    what nobody said, in words.
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
        """All parts together; infinite where failures come faster than the training recovers from them."""
        return float(sum_of_parts({name: getattr(self, name) for name in JOB_PARTS}))

    @property
    def hours(self) -> float:
        return hours_from_s(self.total_s)

    @property
    def goodput(self) -> float:
        """Share of the wall-clock time in which steps are done that count."""
        return self.stepping_s / self.total_s


class Memory(Record):
    """GiB on one device at the step's peak. The parts add up to `allocated_gib`.

    allocated: live tensors. reserved: memory held by the framework's allocator. device: on the card, as its own monitor shows
    it, with the driver's context.
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
    """One of the most expensive groups of similar operators in a step."""

    module: str
    kind: str
    phase: str
    count: int
    time_ms: float
    bound: Literal["compute", "memory", "launch"]
    share_of_roof: float


class RoleShare(Record):
    """Device time of a step in what layers of one role compute. layers: how many there are; 0 where that is not known."""

    role: str
    layers: int
    time_ms: float


class Jump(Record):
    """Where one more sample costs far more than usual, between two batch sizes (neighbours, where all are asked for).

    before, batch: the last size before the jump and the first after it, with their steps. excess_ms: beyond the usual slope.
    causes: in words, the weightiest first; `mechanism` says that one in two or three, empty where it is not known. next_good: the
    first larger size with as much throughput as before the jump, None where none is known.
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
    """One model on one cluster under one execution. Where that is impossible, `reason` says why and times are None.

    host: the CPU that launches kernels, empty on a machine with a profile of its own; `host_assumed`: nobody named it, and it is
    typical of such cards. software: what runs the step, in words, empty on such a machine; `software_assumed`: nobody said
    anything of it. `software_idle`: what was said of it and changes nothing here, each with its reason. `notes`: the workload's,
    of what its trace took for granted. `sequence_length`: tokens of a sample, None where samples are no sequences.
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
    """The part of `step.communication_ms` of each kind of communication; they add up to it."""
    scaling_efficiency: float | None = None
    """Throughput per device relative to that on `scaling_reference_devices` with the same micro-batches; None on one
    device, and where nothing smaller holds the model."""
    scaling_reference_devices: int | None = None
    """1 where one device holds the model, else the fewest devices of this kind that do."""
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
        # a utilisation above the limit is an error in a figure or a formula; showing it clamped would hide that
        assert self.mfu is None or 0 <= self.mfu <= MFU_LIMIT, f"MFU of {self.mfu} on {self.device}"
        assert (self.step is None) == bool(self.reason), (
            "a forecast has a step time or a reason why not"
        )

    @property
    def samples_per_second(self) -> float | None:
        return None if self.step is None else 1e3 * self.execution.global_batch / self.step.total_ms

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices; None where samples are no sequences."""
        rate = self.samples_per_second
        return None if rate is None or self.sequence_length is None else rate * self.sequence_length


class NoiseScale(Record):
    """`samples`: the noise scale. `low` to `high` holds it in 90 of 100 cases. None of the three, with a `reason`, where the true
    gradient is not told from 0. Of `steps` steps, without those of other phases of training."""

    samples: float | None
    low: float | None
    high: float | None
    gradient_squared: float
    covariance_trace: float
    steps: int
    reason: str = ""


class MeasuredNoiseScale(Record):
    """The gradient noise scale over the first steps of a training, each of `batch` samples in `parts`.

    `norms_ms`: the time of the two norms of a step; `step_ms`: the rest of the step. Together they show the cost of measuring.
    """

    batch: int
    parts: int
    scale: NoiseScale
    norms_ms: float
    step_ms: float


class DeviceRun(Record):
    """How the device ran during a measurement's timed steps. What nothing here tells is None: clocks, power and energy come from
    NVIDIA's driver alone.

    `settled`: whether the median steps of two successive windows of the warm-up agreed, None where it was too short for two.
    `launch_ms`: the host's time to launch a step. `busy_share`: of the median step, in which the device works; the rest is
    gaps between its kernels, in which it waits for the host. Clocks: of the multiprocessors in MHz, the median, lowest
    and highest during the steps, before the warm-up, just after the steps, and the highest that the card has. `held_by`: why
    they were held down. `power_w`: the mean of the whole card. `energy_j`: joules of one step, by the card's energy counter
    or its power (`energy_source`: counter, power).
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

    `step_times_ms` are the timed steps in order; `warmup_ms` those before the steady state, kept as data. `step` holds
    the unscaled medians of the parts; the rest of the median step is in `idle_ms`. `peak_memory_gib`: the peak of live
    tensors, on a CPU the growth of the process since before training; `reserved_memory_gib`: memory held by the
    framework's allocator, on a CPU the whole process. `loss`: the name of the loss, None where it is not known. `run`: how
    the device ran meanwhile, None on a CPU.
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
        """One row per step in order, the warm-up first: its time, whether it is warm-up, and its loss where recorded."""
        times = [*self.warmup_ms, *self.step_times_ms]
        # runs of before may have a loss for every micro-batch, or none
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
    """A batch size that could not be measured, and the reason."""

    model: str
    device: str
    execution: Execution
    failure: ProbeFailure
    reason: str
    environment: dict[str, str]
    sequence_length: int | None = None
    image_size: int | None = None


def forecast_row(f: Forecast) -> dict[str, Any]:
    """A row of `trainpace forecast --json`, whose fields are documented."""
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
