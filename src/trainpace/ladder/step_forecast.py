"""The forecast of a rung's step time from what was measured before it. Pure.

compute: the forecast of the model on this machine, as a ratio between two executions times the compute of a setup that was
measured (as `forecast.transfer` does between devices); of the baseline the forecast itself. data: what a sample costs, measured
alone, by `loader.model`. A step is the sum of both without loader workers, and the later of them with workers, which
share the cores. On one machine n ranks have an nth of its cores each.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from trainpace.execution import Execution
from trainpace.forecast import AT_A_MEASURED_BATCH_SD, PER_LOG_BATCH_SD
from trainpace.ladder.rungs import Setup
from trainpace.loader import LoaderCost, step_ms
from trainpace.outcome import Forecast, Interval
from trainpace.records import Record

SAMPLE_SD = 0.1
"""Standard deviation of the logarithm of a sample's cost: measured for a second or two in a process of its own, on cores that
others may use."""
QUEUE_EXCESS = 0.15
"""With workers the model is a lower bound: on two cores two workers of examples/face_crops.py gave 1.8 times the samples of none
(benchmarks/results/thesis_case.md), where the bound has 2.0 (0.11 in logarithms). The interval reaches so much further up."""
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


class StepForecast(Record):
    """The forecast of a step, or the reason why there is none. `compute_ms` and `data_ms` are the times of each without the
    other. `state_bytes` is what a checkpoint holds; 0 where the model is not known."""

    step_ms: float | None = None
    interval_ms: Interval | None = None
    compute_ms: float | None = None
    data_ms: float = 0.0
    basis: str = ""
    reason: str = ""
    state_bytes: float = 0.0

    def holds(self, measured_ms: float) -> bool | None:
        """Whether the interval holds what was measured; None without one."""
        return None if self.interval_ms is None else self.interval_ms.low <= measured_ms <= self.interval_ms.high


class MeasuredCompute(NamedTuple):
    """A setup whose compute was measured, in steps of which `waiting` is the share that was not compute."""

    setup: Setup
    compute_ms: float
    waiting: float = 0.0


class RankShare(NamedTuple):
    cores: float
    threads: float


def compute_of(setup: Setup, median_ms: float, compute_ms: float, data_ms: float) -> MeasuredCompute | None:
    """The compute of a measured setup; None where its loader, which alone would take `data_ms` a step, slowed it down."""
    if (setup.loader.workers and data_ms > CLEAN * median_ms) or compute_ms <= 0:
        return None
    return MeasuredCompute(setup, compute_ms, max(0.0, 1 - compute_ms / median_ms))


def nearest(measured: Sequence[MeasuredCompute], setup: Setup) -> MeasuredCompute | None:
    """The measured setup nearest to another: the fewest differing settings, then the nearest micro-batch, then the latest."""

    def distance(other: MeasuredCompute) -> tuple[int, float]:
        return len(_differences(other.setup, setup)), _log_batches(other.setup, setup)

    return min(reversed(measured), key=distance, default=None)


def forecast_step(
    setup: Setup, forecast: Forecast, measured: tuple[MeasuredCompute, Forecast] | None, cost: LoaderCost | None,
    shared: RankShare,
) -> StepForecast:  # fmt: skip
    """`cost` is of one micro-batch, None where no data is loaded; `measured` a measured setup and the forecast of it."""
    interval = forecast.step_time_interval_ms
    if forecast.step is None or interval is None:
        return StepForecast(reason=f"the compute cannot be forecast: {forecast.reason}")
    middle, sd, basis = forecast.step.total_ms, math.log(interval.high / interval.low) / (2 * Z), interval.basis
    if measured is not None and measured[1].step is not None:
        there = measured[0]
        middle *= there.compute_ms / measured[1].step.total_ms
        others = _differences(there.setup, setup)
        batches = math.hypot(
            AT_A_MEASURED_BATCH_SD, PER_LOG_BATCH_SD * _log_batches(there.setup, setup), COLD_SD * there.waiting
        )
        sd = math.hypot(batches, sd) if others else batches
        same = there.setup.execution == setup.execution
        basis = "compute as measured" if same else "compute measured before, as a ratio"
        if forecast.execution.precision != setup.execution.precision:
            sd = math.hypot(sd, OTHER_PRECISION_SD)
            basis += f" of {forecast.execution.precision}"
        basis += f" ({', '.join(others)} by {interval.basis})" if others else ""
    e = setup.execution
    whole = None if cost is None else cost.of_batch(e.micro_batch * e.accumulation)
    workers = setup.loader.workers

    def step(compute: float, data: float, threads: float) -> float:
        if whole is None:
            return compute
        scaled = replace(whole, sample_wall_ms=whole.sample_wall_ms * data, sample_cpu_ms=whole.sample_cpu_ms * data)
        return step_ms(scaled, compute, workers, shared.cores, min(threads, shared.cores))

    at = step(middle, 1.0, shared.threads)
    above = math.exp(Z * SAMPLE_SD + (QUEUE_EXCESS if workers else 0.0))
    up = math.hypot(step(middle * math.exp(Z * sd), 1.0, shared.threads) - at, step(middle, above, shared.threads) - at)
    # no more than one of its threads may really be busy all the time
    down = math.hypot(
        at - step(middle * math.exp(-Z * sd), 1.0, 1.0), at - step(middle, math.exp(-Z * SAMPLE_SD), shared.threads)
    )
    return StepForecast(
        step_ms=at, compute_ms=middle, data_ms=step(0.0, 1.0, 0.0) if whole is not None else 0.0,
        interval_ms=Interval(low=max(at - down, 0.0), high=at + up, coverage=0.9, basis=basis),
        basis=basis + ("" if cost is None else ", samples timed alone"),
    )  # fmt: skip


def _differences(a: Setup, b: Setup) -> tuple[str, ...]:
    """The settings that change the compute and differ, besides the micro-batch size."""
    fields = (name for name in Execution.__struct_fields__ if name not in ("micro_batch", "accumulation"))
    differing = [name for name in fields if getattr(a.execution, name) != getattr(b.execution, name)]
    return (*differing, *(name for name in ("threads", "engine") if getattr(a, name) != getattr(b, name)))


def _log_batches(a: Setup, b: Setup) -> float:
    return abs(math.log(a.execution.micro_batch / b.execution.micro_batch))
