"""What a sweep says: the curve with its jumps, the noise, the best batch and the largest that fits. Pure."""

import statistics
from collections.abc import Sequence

from trainpace.measure.adaptive import fitted_curve
from trainpace.measure.best_batches import BestBatches, best_batches
from trainpace.measure.changes import StepCurve, find_changes
from trainpace.measure.repeats import Noise, noise_of, repeat_interval
from trainpace.measure.sweep import Outcome, medians_of
from trainpace.outcome import FailedProbe, Interval, Measurement
from trainpace.records import Record


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


class SweepAnalysis(Record):
    """What a sweep says. `largest_that_fits` is known only where a larger one ran out of memory."""

    points: tuple[SweepPoint, ...]
    failures: tuple[Failure, ...]
    noise: Noise | None
    curve: StepCurve
    best: BestBatches
    largest_that_fits: int | None


def analyse(outcomes: Sequence[Outcome]) -> SweepAnalysis:
    """Read the outcomes of one sweep; at least one must be a measurement."""
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
        find_changes([p.batch for p in points], [p.step_ms for p in points]) if noise is None else fitted_curve(medians)
    )
    too_large = [batch for batch, failed in failures.items() if failed.failure == "out_of_memory"]
    fitting = [p.batch for p in points if p.batch < min(too_large, default=0)]
    return SweepAnalysis(
        points=points,
        failures=tuple(
            Failure(batch=batch, failure=failures[batch].failure, reason=failures[batch].reason)
            for batch in sorted(failures)
        ),
        noise=noise,
        curve=curve,
        best=best_batches(curve),
        largest_that_fits=max(fitting, default=None) if too_large else None,
    )


def _point(measured: list[Measurement], medians: list[float], noise: Noise | None) -> SweepPoint:
    step_ms = statistics.median(medians)
    first = measured[0]
    return SweepPoint(
        batch=first.execution.micro_batch,
        probes=len(measured),
        step_ms=step_ms,
        interval_ms=first.interval_ms if noise is None else repeat_interval(medians, noise),
        samples_per_second=1e3 * first.execution.global_batch / step_ms,
        peak_memory_gib=max((m.peak_memory_gib for m in measured if m.peak_memory_gib is not None), default=None),
        reserved_memory_gib=max((m.reserved_memory_gib for m in measured if m.reserved_memory_gib is not None), default=None),
    )  # fmt: skip
