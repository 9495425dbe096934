"""What a sweep says: the curve with its jumps, the noise, the best batch and the largest that fits. Pure."""

import statistics
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from trainpace.core.outcome import FailedProbe, Interval, Measurement
from trainpace.core.records import Record
from trainpace.core.stats import Noise, noise_of, repeat_interval
from trainpace.core.trend import Trend, trend_of
from trainpace.measure.adaptive import fitted_curve, unresolved
from trainpace.measure.changes import StepCurve, find_changes
from trainpace.measure.sweep import Outcome, medians_of

TOO_NOISY = 0.25
"""Scatter from which on no batch size is called the best."""
LAUNCH_BOUND_COST = 1.1
"""A step is launch-bound as long as it costs less than this many times the smallest batch's step ..."""
LAUNCH_BOUND_SPAN = 2.0
"""... provided that this holds to at least so many times the smallest batch."""


class SweepPoint(Record):
    """One batch size: the median over its probes of their median steps."""

    batch: int
    probes: int
    step_ms: float
    interval_ms: Interval
    samples_per_second: float
    peak_memory_gib: float | None
    reserved_memory_gib: float | None


class Failure(Record):
    """A batch size that could not be measured."""

    batch: int
    failure: str
    reason: str


class BatchChoice(Record):
    """A batch size, its fitted step, and its throughput: fitted, and as measured."""

    batch: int
    step_ms: float
    samples_per_second: float
    measured_samples_per_second: float


class BestBatches(Record):
    """`best`: the smallest batch whose throughput cannot be told from the highest. `before_jumps`: the last measured
    batch before each jump up, ascending; `after_jumps`: for each the first measured one behind it that is as good, None where
    there is none. `launch_bound_until`: the largest measured batch of the flat region at the
    start, None where there is none.
    """

    best: BatchChoice
    before_jumps: tuple[BatchChoice, ...]
    after_jumps: tuple[BatchChoice | None, ...]
    launch_bound_until: int | None


class SweepAnalysis(Record):
    """What a sweep says. `largest_that_fits` is known only where a larger one ran out of memory. `unresolved`: gaps between
    measured sizes with a jump in them, whose place among the sizes that were asked for is not known. `trend`: None with few.
    """

    points: tuple[SweepPoint, ...]
    failures: tuple[Failure, ...]
    noise: Noise | None
    curve: StepCurve
    best: BestBatches
    largest_that_fits: int | None
    unresolved: tuple[tuple[int, int], ...] = ()
    trend: Trend | None = None

    @property
    def scatter(self) -> float:
        """What repeats of one size differ by, or the sizes beyond their curve where that is more; relative."""
        return max(self.curve.noise, 0.0 if self.noise is None else self.noise.relative)

    @property
    def too_noisy(self) -> bool:
        """Do measurements differ too much to say anything of the sizes?"""
        return len(self.points) > 1 and self.scatter > TOO_NOISY


def analyse(outcomes: Sequence[Outcome], asked: Sequence[int] = ()) -> SweepAnalysis:
    """Read the outcomes of one sweep; at least one must be a measurement. `asked`: the sizes that it was to cover."""
    medians = medians_of(outcomes)
    noise = noise_of(medians)
    measured: dict[int, list[Measurement]] = {}
    failures: dict[int, FailedProbe] = {}
    for outcome in outcomes:
        if isinstance(outcome, Measurement):
            measured.setdefault(outcome.execution.micro_batch, []).append(outcome)
        else:
            failures[outcome.execution.micro_batch] = outcome
    points = tuple(_point(measured[batch], medians[batch], noise) for batch in medians)
    # without repeats the curve itself has to tell its noise
    curve = (
        find_changes([p.batch for p in points], [p.step_ms for p in points])
        if noise is None
        else fitted_curve(medians)
    )
    too_large = [batch for batch, failed in failures.items() if failed.failure == "out_of_memory"]
    fitting = [p.batch for p in points if p.batch < min(too_large, default=0)]
    return SweepAnalysis(
        points=points,
        failures=tuple(
            Failure(batch=batch, failure=failed.failure, reason=failed.reason)
            for batch, failed in sorted(failures.items())
        ),
        noise=noise,
        curve=curve,
        best=best_batches(curve),
        largest_that_fits=max(fitting, default=None) if too_large else None,
        unresolved=unresolved(sorted({*asked, *medians} - set(failures)), medians),
        trend=trend_of(
            curve.batches,
            curve.step_ms,
            [
                p.samples_per_second * p.step_ms / ms
                for p, ms in zip(points, curve.fitted_ms, strict=True)
            ],
            0.0 if noise is None else noise.relative,
        ),
    )


def _point(measured: list[Measurement], medians: list[float], noise: Noise | None) -> SweepPoint:
    step_ms = statistics.median(medians)
    first = measured[0]

    def most(field: str) -> float | None:
        return max(
            (value for m in measured if (value := getattr(m, field)) is not None), default=None
        )

    return SweepPoint(
        batch=first.execution.micro_batch,
        probes=len(measured),
        step_ms=step_ms,
        interval_ms=first.interval_ms if noise is None else repeat_interval(medians, noise),
        samples_per_second=1e3 * first.execution.global_batch / step_ms,
        peak_memory_gib=most("peak_memory_gib"),
        reserved_memory_gib=most("reserved_memory_gib"),
    )


def best_batches(curve: StepCurve) -> BestBatches:
    """The batch sizes that a curve recommends.

    Throughput is that of the fitted step, which averages noise away. A batch counts as the best if it is less than one
    standard deviation of a measured step (`curve.noise`) below the highest fitted throughput, and if its own measurement
    was not more than two deviations slower than its fit; of those, the smallest, which leaves memory and converges in
    fewer samples.
    """
    batches = np.asarray(curve.batches, dtype=float)
    fitted, measured = np.asarray(curve.fitted_ms), np.asarray(curve.step_ms)
    throughput = 1e3 * batches / fitted
    undisturbed = measured <= fitted * (1 + 2 * curve.noise)
    if not undisturbed.any():
        undisturbed[:] = True
    good = undisturbed & (throughput >= throughput[undisturbed].max() * (1 - curve.noise))
    before = [curve.batches.index(jump.before) for jump in curve.jumps if jump.size_ms > 0]
    behind = [
        next((k for k in range(i + 1, len(batches)) if throughput[k] >= throughput[i]), None)
        for i in before
    ]
    return BestBatches(
        best=_choice(curve, int(np.flatnonzero(good)[0])),
        before_jumps=tuple(_choice(curve, i) for i in before),
        after_jumps=tuple(None if k is None else _choice(curve, k) for k in behind),
        launch_bound_until=_launch_bound(curve),
    )


def _choice(curve: StepCurve, i: int) -> BatchChoice:
    batch, step = curve.batches[i], curve.fitted_ms[i]
    return BatchChoice(
        batch=batch,
        step_ms=step,
        samples_per_second=1e3 * batch / step,
        measured_samples_per_second=1e3 * batch / curve.step_ms[i],
    )


def _launch_bound(curve: StepCurve) -> int | None:
    limit_ms = LAUNCH_BOUND_COST * curve.fitted_ms[0]
    flat = sum(1 for _ in takewhile(lambda step_ms: step_ms <= limit_ms, curve.fitted_ms))
    last = curve.batches[flat - 1]
    return last if last >= LAUNCH_BOUND_SPAN * curve.batches[0] else None
