"""Forecasts of a ladder's setups from the traced model, this machine's profile and a sample's cost, each measured when needed.

compute: the forecast of the model on this machine, as a ratio between two executions times the compute of a setup that was
measured (as `forecast.transfer` does between devices); of the baseline the forecast itself. data: what a sample costs, measured
alone, by `loader.costs`. A step is the sum of both without loader workers, and the later of them with workers, which
share the cores. On one machine n ranks have an nth of its cores each.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, HostLinks, find_device
from trainpace.core.host import allowed_cores, usable_cores
from trainpace.core.outcome import Forecast, Interval
from trainpace.core.records import Record, load, save
from trainpace.forecast import AT_A_MEASURED_BATCH_SD, CalibratedKernels, Forecaster, Target
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
from trainpace.run.ladder import Setup
from trainpace.run.trial import engine_for
from trainpace.workload import ModelSpec, Variant, Workload, form_of, load_workload

SAMPLE_SD = 0.1
"""Standard deviation of the logarithm of a sample's cost: measured for a second or two in a process of its own, on cores that
others may use."""
QUEUE_EXCESS = 0.15
"""With workers the model is a lower bound: on two cores two workers of examples/face_crops.py gave 1.8 times the samples of none
(benchmarks/results/thesis_case.md), where the bound has 2.0 (0.11 in logarithms). The interval reaches so much further up."""
PER_LOG_BATCH_SD = 0.08
"""What every factor of e between two batch sizes adds to `AT_A_MEASURED_BATCH_SD` (root mean square over ten models on a CPU)."""
COLD_SD = 0.15
"""Standard deviation of the logarithm of a compute time that was measured in steps which waited for data, and is carried to steps
that do not: caches have gone cold meanwhile, and clocks are others. An assumption, in proportion to the share of the wait."""
OTHER_PRECISION_SD = 0.15
"""Standard deviation of the logarithm of a ratio between two setups that is known in another precision than theirs. An
assumption."""
Z = 1.645
CLEAN = 0.1
"""Workers that take cores from the compute inflate it: it is learnt from trials without workers, or whose loader alone would take
less than this share of the step."""


NO_FORECAST = "--no-forecast"
NO_MODEL = "a script shows no model; --task MODEL names it"
OWN_SETTINGS = (
    "what the script's own settings and environment variables change is not known before it is"
    " measured"
)
NOT_ASKED = (NO_FORECAST, NO_MODEL)
"""Reasons for no forecast that are the user's own choice."""


class StepForecast(Record):
    """The forecast of a step, or the reason why there is none. `compute_ms` and `data_ms` are the times of each without the
    other. `state_bytes` is what a checkpoint holds; 0 where the model is not known. `evaluating_share`: the forward passes of a
    step with their data, over the step."""

    step_ms: float | None = None
    interval_ms: Interval | None = None
    compute_ms: float | None = None
    data_ms: float = 0.0
    basis: str = ""
    reason: str = ""
    state_bytes: float = 0.0
    evaluating_share: float = 1.0

    def holds(self, measured_ms: float) -> bool | None:
        """Whether the interval holds what was measured; None without one."""
        return (
            None
            if self.interval_ms is None
            else self.interval_ms.low <= measured_ms <= self.interval_ms.high
        )


class NotCalibrated(TrainpaceError):
    """The machine gave no profile: it is too busy, or a benchmark failed. It is tried once."""


class MeasuredCompute(NamedTuple):
    """A setup whose compute was measured, in steps of which `waiting` is the share that was not compute."""

    setup: Setup
    compute_ms: float
    waiting: float = 0.0


class RankShare(NamedTuple):
    cores: float
    threads: float


def compute_of(
    setup: Setup, step_time_ms: float, compute_ms: float, data_ms: float
) -> MeasuredCompute | None:
    """The compute of a measured setup; None where its loader, which alone would take `data_ms` a step, slowed it down."""
    if (setup.loader.workers and data_ms > CLEAN * step_time_ms) or compute_ms <= 0:
        return None
    return MeasuredCompute(setup, compute_ms, max(0.0, 1 - compute_ms / step_time_ms))


def nearest(measured: Sequence[MeasuredCompute], setup: Setup) -> MeasuredCompute | None:
    """The measured setup nearest to another: the fewest differing settings, then the nearest micro-batch, then the latest."""

    def distance(other: MeasuredCompute) -> tuple[int, float]:
        return len(_differences(other.setup, setup)), _log_batches(other.setup, setup)

    return min(reversed(measured), key=distance, default=None)


def forecast_step(
    setup: Setup,
    forecast: Forecast,
    measured: tuple[MeasuredCompute, Forecast] | None,
    cost: LoaderCost | None,
    shared: RankShare,
) -> StepForecast:
    """`cost` is of one micro-batch, None where no data is loaded; `measured` a measured setup and the forecast of it."""
    interval = forecast.step_time_interval_ms
    if forecast.step is None or interval is None:
        share = 1.0  # of the setup that it is nearest to, where that is known
        if measured is not None and measured[1].step is not None:
            share = forecast_step(
                measured[0].setup, measured[1], measured, cost, shared
            ).evaluating_share
        return StepForecast(
            reason=f"the compute cannot be forecast: {forecast.reason}", evaluating_share=share
        )
    middle, sd, basis = (
        forecast.step.total_ms,
        math.log(interval.high / interval.low) / (2 * Z),
        interval.basis,
    )
    if measured is not None and measured[1].step is not None:
        there = measured[0]
        middle *= there.compute_ms / measured[1].step.total_ms
        others = _differences(there.setup, setup)
        batches = math.hypot(
            AT_A_MEASURED_BATCH_SD,
            PER_LOG_BATCH_SD * _log_batches(there.setup, setup),
            COLD_SD * there.waiting,
        )
        sd = math.hypot(batches, sd) if others else batches
        same = there.setup.execution == setup.execution
        basis = "compute as measured" if same else "compute measured before, as a ratio"
        if forecast.execution.precision != setup.execution.precision:
            sd = math.hypot(sd, OTHER_PRECISION_SD)
            basis += f" of {forecast.execution.precision}"
        basis += f" ({', '.join(others)} by {interval.basis})" if others else ""
    share = forecast.step.evaluating_ms / forecast.step.total_ms
    return _with_data(setup, _Compute(middle, sd, basis, share), cost, shared)


def as_measured(
    setup: Setup, there: MeasuredCompute, cost: LoaderCost | None, shared: RankShare
) -> StepForecast:
    """The forecast, without a profile of the machine, of a setup that differs from a measured one by its batches and data."""
    samples = [s.execution.micro_batch * s.execution.accumulation for s in (setup, there.setup)]
    sd = math.hypot(
        AT_A_MEASURED_BATCH_SD,
        PER_LOG_BATCH_SD * _log_batches(there.setup, setup),
        COLD_SD * there.waiting,
    )
    compute = _Compute(
        there.compute_ms * samples[0] / samples[1],
        sd,
        "compute as measured, without a profile",
        1.0,
    )
    return _with_data(setup, compute, cost, shared)


class _Compute(NamedTuple):
    """The compute of a step, the standard deviation of its logarithm, and the share of its forward passes."""

    ms: float
    sd: float
    basis: str
    evaluating: float


def _with_data(
    setup: Setup, compute: _Compute, cost: LoaderCost | None, shared: RankShare
) -> StepForecast:
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
    # no more than one of its threads may really be busy all the time
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
    """The settings that change the compute and differ, besides the micro-batch size."""
    fields = (
        name for name in Execution.__struct_fields__ if name not in ("micro_batch", "accumulation")
    )
    differing = [
        name for name in fields if getattr(a.execution, name) != getattr(b.execution, name)
    ]
    return (
        *differing,
        *(name for name in ("threads", "engine") if getattr(a, name) != getattr(b, name)),
    )


def _log_batches(a: Setup, b: Setup) -> float:
    return abs(math.log(a.execution.micro_batch / b.execution.micro_batch))


CALIBRATION_S = 12.0
COST_TIMEOUT_S = 300.0
ALLREDUCE_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22)
ALLREDUCE_REPEATS = 7
Tell = Callable[[str], None]


def rank_threads(setup: Setup) -> int:
    """Threads of a rank as the launchers of this machine give them: as the user said, else an even share of the cores."""
    if setup.threads is not None:
        return setup.threads
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given)
        if given.isdecimal() and int(given)
        else max(1, usable_cores() // setup.execution.nproc_per_node)
    )


class LadderForecasts:
    """Forecasts for setups of one task on this machine. `whole` gives the profile of the machine with all its cores,
    `between_nodes` the links of hosts where `trainpace calibrate --hosts` has timed them; nodes are as this machine. `folder`
    keeps profiles for several ranks, so that a ladder taken up again does not measure them twice.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        whole: Callable[[], MachineProfile],
        tell: Tell,
        timeout_s: float,
        seed: int = 0,
        between_nodes: Callable[[], HostLinks | None] = lambda: None,
    ) -> None:
        self._folder, self._device, self._whole, self._tell = folder, device, whole, tell
        self._timeout_s, self._seed, self._between_nodes = timeout_s, seed, between_nodes
        self._workloads: dict[tuple[str, str], Workload] = {}
        self._costs: dict[tuple[str | None, int, bool], LoaderCost] = {}
        self._links: dict[int, HostLinks] = {}
        self._failed: dict[tuple[int, int], NotCalibrated] = {}

    def forecast(
        self, setups: Sequence[Setup], measured: Sequence[MeasuredCompute]
    ) -> list[StepForecast]:
        try:
            self._measure_costs(setups)
        except TrainpaceError as error:
            return [
                StepForecast(reason=f"the samples cannot be timed: {error.message}") for _ in setups
            ]
        return [self._one(setup, measured) for setup in setups]

    def _one(self, setup: Setup, measured: Sequence[MeasuredCompute]) -> StepForecast:
        near = nearest([m for m in measured if m.setup.own_settings == setup.own_settings], setup)
        if near is None and setup.own_settings:
            return StepForecast(reason=OWN_SETTINGS)
        if setup.loader.shards is not None and not Path(setup.loader.shards).is_dir():
            return StepForecast(
                reason="the shards are not made yet, so what reading them back costs is not known"
            )
        try:
            e = setup.execution
            cost = self._costs.get(_cost_key(setup))
            shared = RankShare(
                allowed_cores() / e.nproc_per_node,
                rank_threads(setup) if self._device == "cpu" else 1.0,
            )
            try:
                here, precision = self._forecast(setup), {}
            except NotCalibrated:
                if near is None or _differences(near.setup, setup):
                    raise
                step = as_measured(setup, near, cost, shared)
                return replace(step, state_bytes=state_bytes(self._workload(setup), e))
            if (
                here.step is None
                and near is not None
                and near.setup.execution.precision == e.precision
            ):
                # a profile is of fp32 alone; from one setup to another of this precision its ratio is the nearest there is
                precision = {"precision": "fp32"}
                here = self._forecast(_with(setup, precision))
            there = None if near is None else (near, self._forecast(_with(near.setup, precision)))
            step = forecast_step(setup, here, there, cost, shared)
            return replace(step, state_bytes=state_bytes(self._workload(setup), e))
        except TrainpaceError as error:
            return StepForecast(reason=error.message)

    def _forecast(self, setup: Setup) -> Forecast:
        e, workload = setup.execution, self._workload(setup)
        between = self._between_nodes() if e.nnodes > 1 and self._device == "cpu" else None
        if e.nnodes > 1 and between is None:
            raise TrainpaceError("the links between the nodes are not known here.")
        if self._device != "cpu":
            cluster = Cluster(device=find_device(_gpu()), devices_per_node=e.nproc_per_node)
            return Forecaster(workload, Target(cluster)).forecast(e)
        profile = self._profile(e.nproc_per_node, rank_threads(setup))
        links = between or (self._ranks_links(e.nproc_per_node) if e.world_size > 1 else None)
        cluster = Cluster(
            device=profile.device,
            devices_per_node=e.nproc_per_node,
            nodes=e.nnodes,
            host_links=links,
        )
        forecaster = Forecaster(workload, Target(cluster, CalibratedKernels(profile.kernels)))
        overlapped = forecaster.forecast(e)
        if e.world_size == 1 or overlapped.step_time_interval_ms is None or e.engine != "ddp":
            return overlapped
        bare = forecaster.forecast(replace(e, engine="unoverlapped"))
        if bare.step_time_interval_ms is None:
            return overlapped
        if (setup.engine or engine_for(e)) != "ddp":
            return bare  # gloo has no streams, so FSDP2 and DeepSpeed wait for every exchange
        # an exchange also takes the cores that would hide it
        interval = overlapped.step_time_interval_ms
        wider = replace(interval, high=max(interval.high, bare.step_time_interval_ms.high))
        return replace(overlapped, step_time_interval_ms=wider)

    def _workload(self, setup: Setup) -> Workload:
        form = form_of(setup.execution.precision)
        key = (setup.task, form)
        if key not in self._workloads:
            self._tell(f"tracing {setup.task}")
            variant = Variant(cpu=self._device == "cpu")
            self._workloads[key] = load_workload(setup.task, (form,), variant, self._timeout_s)
        return self._workloads[key]

    def _profile(self, ranks: int, threads: int) -> MachineProfile:
        """The profile of the machine as one of so many ranks has it: all of them calibrate at the same time."""
        file = self._folder / f"machine-{ranks}x{threads}.json"
        if file.exists():
            return load(file, MachineProfile)
        if (ranks, threads) in self._failed:
            raise self._failed[ranks, threads]
        try:
            profile = self._calibrated(ranks, threads)
        except TrainpaceError as error:
            failed = NotCalibrated(
                f"this machine could not be calibrated: {error.message}", error.hint
            )
            self._failed[ranks, threads] = failed
            raise failed from None
        save(profile, file)
        return profile

    def _calibrated(self, ranks: int, threads: int) -> MachineProfile:
        if ranks == 1 and threads == rank_threads(Setup(task="", execution=Execution())):
            return self._whole()
        processes = f"{ranks} process{'es' if ranks > 1 else ''}"
        self._tell(f"calibrating {processes} of {threads} threads for {CALIBRATION_S:.0f} s")
        with ThreadPoolExecutor(ranks) as pool:
            profile, *_ = pool.map(
                lambda _: calibrate(CALIBRATION_S, threads=threads), range(ranks)
            )
        return profile

    def _ranks_links(self, ranks: int) -> HostLinks:
        if ranks not in self._links:
            self._tell(f"timing all-reduces of {ranks} processes")
            self._links[ranks] = links_of(
                measure_allreduce(ranks, "gloo", ALLREDUCE_BYTES, ALLREDUCE_REPEATS)
            )
        return self._links[ranks]

    def _measure_costs(self, setups: Sequence[Setup]) -> None:
        batch_sizes: dict[tuple[str, str | None, bool], list[int]] = {}
        for s in setups:
            there = s.loader.shards is None or Path(s.loader.shards).is_dir()
            if there and ModelSpec.of(s.task).runs_code and _cost_key(s) not in self._costs:
                sizes = batch_sizes.setdefault((s.task, s.loader.shards, s.loader.workers > 0), [])
                sizes += [s.execution.micro_batch] if s.execution.micro_batch not in sizes else []
        for (task, shards, workers), sizes in batch_sizes.items():
            self._tell("timing samples" + (" of the shards" if shards else ""))
            costs = loader_costs(task, shards, sizes, workers, self._seed, COST_TIMEOUT_S)
            self._costs |= {
                (shards, size, workers): cost for size, cost in zip(sizes, costs, strict=True)
            }


def links_of(a: AllReduce) -> HostLinks:
    """The links between processes of one machine, as timed all-reduces tell them: bandwidth and latency of every collective."""
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
        raise TrainpaceError("this machine shows no NVIDIA GPU.")
    return gpus[0].name
