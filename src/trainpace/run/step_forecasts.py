"""Forecasts of the step time for a ladder's setups.

They combine the traced model, the calibrated machine and the measured cost of a sample.

- Compute: the measured compute of one setup times the ratio of two forecasts on this machine, as in
  `forecast.transfer` between devices. Before anything is measured, it is the forecast itself.
- Data: the cost of a sample, measured alone by `measure.loader_costs`.

Without loader workers, a step is the sum of both. With workers, it is the larger of them, and the
workers share the cores. With n ranks on a machine, each rank has 1/n of the cores.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, HostLinks, find_device
from trainpace.core.host import allowed_cores, usable_cores
from trainpace.core.outcome import Forecast, Interval
from trainpace.core.records import Record, load, save
from trainpace.forecast import REPEAT_SD, CalibratedKernels, Forecaster, Target
from trainpace.job import state_bytes
from trainpace.measure import (
    AllReduce,
    LoaderCost,
    MachineProfile,
    calibrate,
    loader_costs,
    measure_allreduce,
    step_ms,
)
from trainpace.run.ladder import Setup, counted
from trainpace.run.trial import engine_for
from trainpace.workload import ModelSpec, Variant, Workload, form_of, load_workload

SAMPLE_SD = 0.1
"""Standard deviation of the logarithm of a sample's cost.

The cost is measured for a second or two in a separate process. Other processes may use the same
cores.
"""
QUEUE_EXCESS = 0.15
"""Extra upper reach of the interval with loader workers, as a logarithm.

With workers, the model of the queue is a lower bound of the step time. On two cores, two workers of
examples/face_crops.py gave 1.8 times the samples of none, and the bound is 2.0
(benchmarks/results/thesis_case.md).
"""
PER_LOG_BATCH_SD = 0.08
"""Standard deviation added per factor of e between two batch sizes.

It is the RMS over ten models on a CPU.
"""
COLD_SD = 0.15
"""Standard deviation of the logarithm of a compute time from steps that waited for data.

Waiting cools caches and changes clocks. The value is an assumption. It is scaled by the wait's
share of a step.
"""
OTHER_PRECISION_SD = 0.15
"""Standard deviation of the logarithm of a ratio taken from another precision (an assumption)."""
Z = 1.645
"""Standard deviations from the middle to each end of a 90% interval."""
CLEAN = 0.1
"""Largest loading time, as a share of a step, at which workers do not slow the compute down.

Compute is learned only from trials below it, or from trials without workers.
"""


NO_FORECAST = "--no-forecast"
NO_MODEL = "the model of a script is unknown; name it with --task MODEL"
OWN_SETTINGS = (
    "the effect of the script's own settings and environment variables is unknown before a trial"
)
NOT_ASKED = (NO_FORECAST, NO_MODEL)
"""Reasons for a missing forecast that the user chose."""


class StepForecast(Record):
    """Forecast of a step time, or the reason for none.

    Attributes:
        compute_ms: Compute per step, without loading.
        data_ms: Loading per step, without compute.
        state_bytes: Size of a checkpoint, or 0 if the model is unknown.
        evaluating_share: Time of the forward passes and their data, as a share of a step.
    """

    step_ms: float | None = None
    interval_ms: Interval | None = None
    compute_ms: float | None = None
    data_ms: float = 0.0
    basis: str = ""
    reason: str = ""
    state_bytes: float = 0.0
    evaluating_share: float = 1.0

    def holds(self, measured_ms: float) -> bool | None:
        """Return True if the interval contains the measured time. None means no interval."""
        interval = self.interval_ms
        return None if interval is None else interval.low <= measured_ms <= interval.high


class NotCalibrated(TrainpaceError):
    """Error if this machine cannot be profiled: it is too busy, or a benchmark failed.

    Profiling is tried once per number of ranks and threads.
    """


class MeasuredCompute(NamedTuple):
    """Setup with its measured compute per step.

    `waiting` is the share of a step that was not compute.
    """

    setup: Setup
    compute_ms: float
    waiting: float = 0.0


class RankShare(NamedTuple):
    """Share of the machine for one rank: cores for loading, and threads for compute."""

    cores: float
    threads: float


def compute_of(
    setup: Setup, step_time_ms: float, compute_ms: float, data_ms: float
) -> MeasuredCompute | None:
    """Return the measured compute of a setup, or None if its loader slowed the compute down.

    `data_ms` is the time per step that loading alone takes.
    """
    if (setup.loader.workers and data_ms > CLEAN * step_time_ms) or compute_ms <= 0:
        return None
    return MeasuredCompute(setup, compute_ms, max(0.0, 1 - compute_ms / step_time_ms))


def nearest(measured: Sequence[MeasuredCompute], setup: Setup) -> MeasuredCompute | None:
    """Return the measured setup that is most similar to `setup`, or None if nothing is measured.

    The fewest differing settings come first, then the nearest micro-batch, then the latest
    measurement.
    """

    def distance(other: MeasuredCompute) -> tuple[int, float]:
        return len(_differences(other.setup, setup)), _log_batches(other.setup, setup)

    return min(reversed(measured), key=distance, default=None)


class _Compute(NamedTuple):
    """Forecast compute of a step.

    `sd` is the standard deviation of its logarithm. `evaluating` is the forward passes' share.
    """

    ms: float
    sd: float
    basis: str
    evaluating: float


def forecast_step(
    setup: Setup,
    forecast: Forecast,
    measured: tuple[MeasuredCompute, Forecast] | None,
    cost: LoaderCost | None,
    shared: RankShare,
) -> StepForecast:
    """Forecast the step time of a setup.

    Args:
        setup: Setup to forecast.
        forecast: Forecast of its compute.
        measured: Measured setup with its own forecast, or None.
        cost: Cost of loading one micro-batch, or None if no data is loaded.
        shared: Cores and threads of one rank.
    """
    if measured is not None and measured[1].step is None:
        measured = None
    interval = forecast.step_time_interval_ms
    if forecast.step is None or interval is None:
        share = 1.0
        if measured is not None:  # Use the share of the nearest setup.
            known = forecast_step(measured[0].setup, measured[1], measured, cost, shared)
            share = known.evaluating_share
        reason = f"the compute cannot be forecast: {forecast.reason}"
        return StepForecast(reason=reason, evaluating_share=share)
    middle, basis = forecast.step.total_ms, interval.basis
    sd = math.log(interval.high / interval.low) / (2 * Z)
    share = forecast.step.evaluating_ms / middle
    compute = _Compute(middle, sd, basis, share)
    if measured is not None:
        compute = _scaled(compute, setup, forecast, *measured)
    return _with_data(setup, compute, cost, shared)


def _scaled(
    compute: _Compute, setup: Setup, forecast: Forecast, known: MeasuredCompute, there: Forecast
) -> _Compute:
    """Return the forecast compute, scaled by the error of the forecast for a measured setup."""
    assert there.step is not None
    others, sd = _differences(known.setup, setup), _between_batches(known, setup)
    if others:
        sd = math.hypot(sd, compute.sd)
    same = known.setup.execution == setup.execution
    basis = "compute as measured" if same else "compute measured before, as a ratio"
    if forecast.execution.precision != setup.execution.precision:
        sd = math.hypot(sd, OTHER_PRECISION_SD)
        basis += f" of {forecast.execution.precision}"
    if others:
        basis += f" ({', '.join(others)} by {compute.basis})"
    ms = compute.ms * (known.compute_ms / there.step.total_ms)
    return compute._replace(ms=ms, sd=sd, basis=basis)


def _between_batches(known: MeasuredCompute, setup: Setup) -> float:
    """Return the standard deviation of a measured compute time applied to another batch size.

    It is the standard deviation of the logarithm.
    """
    return math.hypot(
        REPEAT_SD, PER_LOG_BATCH_SD * _log_batches(known.setup, setup), COLD_SD * known.waiting
    )


def as_measured(
    setup: Setup, known: MeasuredCompute, cost: LoaderCost | None, shared: RankShare
) -> StepForecast:
    """Forecast a step from a measured setup without a machine profile.

    The two setups may differ only in batch sizes and data.
    """
    samples = [s.execution.micro_batch * s.execution.accumulation for s in (setup, known.setup)]
    ms, sd = known.compute_ms * samples[0] / samples[1], _between_batches(known, setup)
    compute = _Compute(ms, sd, "compute as measured, without a profile", 1.0)
    return _with_data(setup, compute, cost, shared)


def _with_data(
    setup: Setup, compute: _Compute, cost: LoaderCost | None, shared: RankShare
) -> StepForecast:
    """Return the forecast of a step from its compute and the cost of its samples."""
    e, (middle, sd, basis, evaluating) = setup.execution, compute
    whole = None if cost is None else cost.of_batch(e.micro_batch * e.accumulation)
    workers = setup.loader.workers

    def step(compute: float, data: float, threads: float) -> float:
        if whole is None:
            return compute
        scaled = replace(
            whole,
            sample_wall_ms=whole.sample_wall_ms * data,
            sample_cpu_ms=whole.sample_cpu_ms * data,
        )
        return step_ms(scaled, compute, workers, shared.cores, min(threads, shared.cores))

    at = step(middle, 1.0, shared.threads)
    above = math.exp(Z * SAMPLE_SD + (QUEUE_EXCESS if workers else 0.0))
    up = math.hypot(
        step(middle * math.exp(Z * sd), 1.0, shared.threads) - at,
        step(middle, above, shared.threads) - at,
    )
    # For the lower end, assume that only one thread is always busy.
    down = math.hypot(
        at - step(middle * math.exp(-Z * sd), 1.0, 1.0),
        at - step(middle, math.exp(-Z * SAMPLE_SD), shared.threads),
    )
    share = min(1.0, step(middle * evaluating, 1.0, shared.threads) / at)
    return StepForecast(
        step_ms=at,
        evaluating_share=share,
        compute_ms=middle,
        data_ms=step(0.0, 1.0, 0.0) if whole is not None else 0.0,
        interval_ms=Interval(low=max(at - down, 0.0), high=at + up, coverage=0.9, basis=basis),
        basis=basis + ("" if cost is None else ", samples timed alone"),
    )


def _differences(a: Setup, b: Setup) -> tuple[str, ...]:
    """Return the names of differing settings that affect the compute. Batch sizes do not count."""
    names = [n for n in Execution.__struct_fields__ if n not in ("micro_batch", "accumulation")]
    return (
        *(n for n in names if getattr(a.execution, n) != getattr(b.execution, n)),
        *(n for n in ("threads", "engine") if getattr(a, n) != getattr(b, n)),
    )


def _log_batches(a: Setup, b: Setup) -> float:
    return abs(math.log(a.execution.micro_batch / b.execution.micro_batch))


CALIBRATION_S = 12.0
"""Seconds to calibrate one process."""
COST_TIMEOUT_S = 300.0
"""Time limit in seconds for measuring the cost of samples."""
ALLREDUCE_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22)
"""Message sizes of the timed all-reduces, in bytes."""
ALLREDUCE_REPEATS = 7
Tell = Callable[[str], None]


def rank_threads(setup: Setup) -> int:
    """Return the threads per rank: the user's number, or an even share of the cores."""
    if setup.threads is not None:
        return setup.threads
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given)
        if given.isdecimal() and int(given)
        else max(1, usable_cores() // setup.execution.nproc_per_node)
    )


@dataclass
class LadderForecasts:
    """Forecaster of step times for the setups of one ladder on this machine.

    Attributes:
        folder: Folder for machine profiles with several ranks. A resumed ladder reads them again.
        device: Kind of device: "cpu" or "cuda".
        whole: Returns the machine's profile with all cores.
        tell: Reports progress.
        timeout_s: Time limit for tracing.
        seed: Seed for the measured samples.
        between_nodes: Returns the links that `trainpace calibrate --hosts` has timed.
    """

    folder: Path
    device: str
    whole: Callable[[], MachineProfile]
    tell: Tell
    timeout_s: float
    seed: int = 0
    between_nodes: Callable[[], HostLinks | None] = lambda: None
    _workloads: dict[tuple[str, str], Workload] = field(default_factory=dict)
    _costs: dict[tuple[str | None, int, bool], LoaderCost] = field(default_factory=dict)
    _links: dict[int, HostLinks] = field(default_factory=dict)
    _failed: dict[tuple[int, int], NotCalibrated] = field(default_factory=dict)

    def forecast(
        self, setups: Sequence[Setup], measured: Sequence[MeasuredCompute]
    ) -> list[StepForecast]:
        """Return a forecast for each setup, given the compute measured so far."""
        try:
            self._measure_costs(setups)
        except TrainpaceError as error:
            return [
                StepForecast(reason=f"the samples cannot be timed: {error.message}") for _ in setups
            ]
        return [self._one(setup, measured) for setup in setups]

    def _one(self, setup: Setup, measured: Sequence[MeasuredCompute]) -> StepForecast:
        """Return the forecast of one setup, or the reason for none."""
        alike = [m for m in measured if m.setup.opaque_changes == setup.opaque_changes]
        near = nearest(alike, setup)
        if near is None and setup.opaque_changes:
            return StepForecast(reason=OWN_SETTINGS)
        if setup.loader.shards is not None and not Path(setup.loader.shards).is_dir():
            return StepForecast(reason="the shards do not exist yet, so reading them is not timed")
        e, cost = setup.execution, self._costs.get(_cost_key(setup))
        threads = rank_threads(setup) if self.device == "cpu" else 1.0
        shared = RankShare(allowed_cores() / e.nproc_per_node, threads)
        try:
            step = self._step(setup, near, cost, shared)
            return replace(step, state_bytes=state_bytes(self._workload(setup), e))
        except TrainpaceError as error:
            return StepForecast(reason=error.message)

    def _step(
        self, setup: Setup, near: MeasuredCompute | None, cost: LoaderCost | None, shared: RankShare
    ) -> StepForecast:
        """Forecast a step, scaled by the most similar measured setup if there is one."""
        precision: dict[str, Any] = {}
        try:
            here = self._forecast(setup)
        except NotCalibrated:
            if near is None or _differences(near.setup, setup):
                raise
            return as_measured(setup, near, cost, shared)
        if near is None:
            return forecast_step(setup, here, None, cost, shared)
        if here.step is None and near.setup.execution.precision == setup.execution.precision:
            # A profile covers only fp32. Its ratio is the best estimate for this precision.
            precision = {"precision": "fp32"}
            here = self._forecast(_with(setup, precision))
        there = self._forecast(_with(near.setup, precision))
        return forecast_step(setup, here, (near, there), cost, shared)

    def _forecast(self, setup: Setup) -> Forecast:
        """Forecast the compute and the collectives of a setup, without loading."""
        e, workload = setup.execution, self._workload(setup)
        on_cpu, several = self.device == "cpu", e.nnodes > 1
        links = self.between_nodes() if several and on_cpu else None
        if several and links is None:
            raise TrainpaceError("the links between the nodes are unknown.")
        if not on_cpu:
            cluster = Cluster(device=find_device(_gpu()), devices_per_node=e.nproc_per_node)
            return Forecaster(workload, Target(cluster)).forecast(e)
        profile = self._profile(e.nproc_per_node, rank_threads(setup))
        if links is None and e.world_size > 1:
            links = self._ranks_links(e.nproc_per_node)
        cluster = Cluster(
            device=profile.device,
            devices_per_node=e.nproc_per_node,
            nodes=e.nnodes,
            host_links=links,
        )
        forecaster = Forecaster(workload, Target(cluster, CalibratedKernels(profile.kernels)))
        return _with_collectives(forecaster, setup)

    def _workload(self, setup: Setup) -> Workload:
        form = form_of(setup.execution.precision)
        key = (setup.task, form)
        if key not in self._workloads:
            self.tell(f"tracing {setup.task}")
            variant = Variant(cpu=self.device == "cpu")
            self._workloads[key] = load_workload(setup.task, (form,), variant, self.timeout_s)
        return self._workloads[key]

    def _profile(self, ranks: int, threads: int) -> MachineProfile:
        """Return the machine's profile for one of several ranks.

        The ranks calibrate at the same time, because they share the machine.
        """
        file = self.folder / f"machine-{ranks}x{threads}.json"
        if file.exists():
            return load(file, MachineProfile)
        if (ranks, threads) in self._failed:
            raise self._failed[ranks, threads]
        try:
            profile = self._calibrated(ranks, threads)
        except TrainpaceError as error:
            failed = NotCalibrated(
                f"this machine cannot be calibrated: {error.message}", error.hint
            )
            self._failed[ranks, threads] = failed
            raise failed from None
        save(profile, file)
        return profile

    def _calibrated(self, ranks: int, threads: int) -> MachineProfile:
        if ranks == 1 and threads == rank_threads(Setup(task="", execution=Execution())):
            return self.whole()
        processes = f"{ranks} process{'es' if ranks > 1 else ''}"
        each = counted(threads, "thread")
        self.tell(f"calibrating {processes} with {each} for {CALIBRATION_S:.0f} s")
        with ThreadPoolExecutor(ranks) as pool:
            profile, *_ = pool.map(
                lambda _: calibrate(CALIBRATION_S, threads=threads), range(ranks)
            )
        return profile

    def _ranks_links(self, ranks: int) -> HostLinks:
        if ranks not in self._links:
            self.tell(f"timing all-reduces of {ranks} processes")
            self._links[ranks] = links_of(
                measure_allreduce(ranks, "gloo", ALLREDUCE_BYTES, ALLREDUCE_REPEATS)
            )
        return self._links[ranks]

    def _measure_costs(self, setups: Sequence[Setup]) -> None:
        """Measure the cost of samples that the setups need and that is not known yet."""
        batch_sizes: dict[tuple[str, str | None, bool], list[int]] = {}
        for s in setups:
            there = s.loader.shards is None or Path(s.loader.shards).is_dir()
            if there and ModelSpec.of(s.task).runs_code and _cost_key(s) not in self._costs:
                sizes = batch_sizes.setdefault((s.task, s.loader.shards, s.loader.workers > 0), [])
                sizes += [s.execution.micro_batch] if s.execution.micro_batch not in sizes else []
        for (task, shards, workers), sizes in batch_sizes.items():
            self.tell("timing samples" + (" of the shards" if shards else ""))
            costs = loader_costs(task, shards, sizes, workers, self.seed, COST_TIMEOUT_S)
            self._costs |= {
                (shards, size, workers): cost for size, cost in zip(sizes, costs, strict=True)
            }


def _with_collectives(forecaster: Forecaster, setup: Setup) -> Forecast:
    """Forecast a step on this machine, on which collectives overlap little or not at all."""
    e = setup.execution
    overlapped = forecaster.forecast(e)
    interval = overlapped.step_time_interval_ms
    if e.world_size == 1 or interval is None or e.engine != "ddp":
        return overlapped
    bare = forecaster.forecast(replace(e, engine="unoverlapped"))
    if bare.step_time_interval_ms is None:
        return overlapped
    if (setup.engine or engine_for(e)) != "ddp":
        return bare  # Without streams in gloo, FSDP2 and DeepSpeed wait for each collective.
    # A collective needs the same cores as the compute that should hide it.
    wider = replace(interval, high=max(interval.high, bare.step_time_interval_ms.high))
    return replace(overlapped, step_time_interval_ms=wider)


def links_of(a: AllReduce) -> HostLinks:
    """Return the links between the processes of one machine from timed all-reduces.

    All collectives get the bandwidth and latency of the all-reduce.
    """
    per_mib_us = 0.0 if a.bandwidth_gb_per_s is None else 2**20 / (1e3 * a.bandwidth_gb_per_s)
    works = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "send"), per_mib_us)
    return HostLinks(
        start_us=a.latency_us,
        message_us=0.0,
        host_us_per_mib=works,
        gb_per_s=a.bandwidth_gb_per_s or 1e3,
        link_share=1.0,
    )


def _with(setup: Setup, changes: dict[str, Any]) -> Setup:
    return replace(setup, execution=replace(setup.execution, **changes))


def _cost_key(setup: Setup) -> tuple[str | None, int, bool]:
    return setup.loader.shards, setup.execution.micro_batch, setup.loader.workers > 0


def _gpu() -> str:
    from trainpace.measure import detect

    gpus = detect().gpus
    if not gpus or not gpus[0].name:
        raise TrainpaceError("no NVIDIA GPU found on this machine.")
    return gpus[0].name
