"""Sweeps over batch sizes: choosing the next size, running the probes, and analyzing the results.

A probe measures one batch size in a fresh process, so a crash or a hang affects only that probe. It
takes seconds. A sweep therefore probes only some of the batch sizes and still finds the jumps.
`next_batch` is a pure function of the measurements and is called until it returns None. It asks in
this order for:

1. Both ends. If the largest size does not fit, it bisects for the largest size that fits.
2. A coarse grid, denser at small batches, and both sides of every hint. The grid alternates between
   odd and even sizes to show a period of two.
3. Repeats. Some show the noise between processes. Others repeat batches with probes that disagree.
4. The middle of every gap that rises as if it contained a jump, until its ends are neighbors.
5. Repeats next to uncertain jumps, and the middles of gaps that bend or are wide.

Within a stage, the order is random (seeded). A machine that warms up then does not bend the curve.
"""

import math
import random
import statistics
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TypeVar

import msgspec
import numpy as np

from trainpace.core import records
from trainpace.core.errors import OutOfMemory, TimedOut, TrainpaceError, UserCodeError
from trainpace.core.execution import FOR_LANGUAGE, FOR_OTHERS, Execution, Precision
from trainpace.core.outcome import (
    FailedProbe,
    Interval,
    MeasuredNoiseScale,
    Measurement,
    ProbeFailure,
)
from trainpace.core.records import Record
from trainpace.core.stats import Noise, Trend, noise_of, repeat_interval, trend_of
from trainpace.core.worker import run_isolated
from trainpace.measure.changes import Floats, StepCurve, find_changes
from trainpace.workload import ModelSpec

R = TypeVar("R", bound=Record)
Outcome = Measurement | FailedProbe
ADAPTIVE_FROM = 13
"""Minimum number of requested batch sizes for an adaptive sweep.

If there are fewer, all are measured.
"""
MOST_CRASHES = 4
"""Number of failed batch sizes after which the code is assumed to fail at every size."""
RESOLUTION = 1 / 64
"""Relative difference below which batch sizes count as equal."""


class Conditions(Record):
    """Conditions of a measurement, except the batch size.

    A resumed sweep must have the same conditions.

    Attributes:
        seconds: Training time of one probe.
        memory_limit_gib: Memory limit of the probe's process (CPU only).
        optimizer: Name of the optimizer. None means the task's own optimizer, or the usual one
            (`trainpace.core.execution`).
    """

    model: str
    device: str = "cpu"
    precision: Precision = "fp32"
    optimizer: str | None = None
    accumulation: int = 1
    sequence_length: int | None = None
    image_size: int | None = None
    channels_last: bool = False
    compile: bool = False
    seconds: float = 2.0
    timeout_s: float = 600.0
    memory_limit_gib: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.timeout_s > 0 and self.accumulation >= 1):
            raise TrainpaceError(
                "a probe needs seconds of at least 0, a positive time-out and at least 1"
                " micro-batch."
            )
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise TrainpaceError("a memory limit must be above 0 GiB.")
        if self.memory_limit_gib is not None and self.device != "cpu":
            raise TrainpaceError(
                "a memory limit is for probes on the CPU.", "On a GPU its own memory is the limit."
            )

    def execution(self, batch_size: int, own_optimizer: str = "") -> Execution:
        """Return the `Execution` of a probe.

        `own_optimizer` is the name of the task's optimizer, or empty if the task is not built yet.
        """
        is_language = (
            self.sequence_length is not None or ModelSpec.of(self.model).kind == "transformers"
        )
        return Execution(
            micro_batch=batch_size,
            accumulation=self.accumulation,
            precision=self.precision,
            optimizer=self.optimizer
            or own_optimizer
            or (FOR_LANGUAGE if is_language else FOR_OTHERS),
            channels_last=self.channels_last,
            compile=self.compile,
        )


def measure(conditions: Conditions, batch_size: int) -> Measurement:
    """Measure real training steps at one batch size on this machine.

    Raises:
        UserCodeError: If the user's code fails.
        OutOfMemory: If the batch does not fit.
        TimedOut: If the steps take too long.
    """
    return _answer(Measurement, "measuring", conditions, batch_size)


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """Measure the gradient noise scale on the task's own data.

    It raises the same errors as `measure`, and `TrainpaceError` if the task has no data.
    """
    return _answer(MeasuredNoiseScale, "gathering gradients of", conditions, batch_size)


def _answer(kind: type[R], verb: str, conditions: Conditions, batch_size: int) -> R:
    request = {
        "record": kind.__name__,
        "conditions": msgspec.to_builtins(conditions),
        "batch_size": batch_size,
    }
    what = f"{verb} {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.steps", request, conditions.timeout_s, what)
    return records.from_json(answer, kind, "the answer of the measuring process")


def probe(conditions: Conditions, batch_size: int, device: str) -> Measurement | FailedProbe:
    """Measure one batch size. A failure of the user's code or a lack of memory is an outcome."""
    try:
        return measure(conditions, batch_size)
    except OutOfMemory as error:
        failure: ProbeFailure = "out_of_memory"
        reason = error.message
    except TimedOut as error:
        failure, reason = "timeout", error.message
    except UserCodeError as error:
        failure, reason = "crashed", str(error)
    return FailedProbe(
        model=conditions.model,
        device=device,
        failure=failure,
        reason=reason,
        environment={},
        execution=conditions.execution(batch_size),
        sequence_length=conditions.sequence_length,
        image_size=conditions.image_size,
    )


class SweepPlan(Record):
    """Plan of a sweep.

    Attributes:
        batches: Requested batch sizes.
        repeats: Number of measurements of each size, if `every` is True.
        every: True to measure all of `batches`.
        until_oom: True to search for the largest size that fits, up to the last of `batches`.
        also_batches: True to measure the other sizes as well, if `until_oom` is True.
    """

    batches: tuple[int, ...]
    repeats: int = 2
    every: bool = False
    until_oom: bool = False
    also_batches: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.repeats < 1:
            raise TrainpaceError(
                "a sweep needs batch sizes of at least 1, each measured at least once."
            )

    @property
    def adaptive(self) -> bool:
        """True if the sweep skips some of the requested batch sizes."""
        return not self.every and len(self.batches) >= ADAPTIVE_FROM


def medians_of(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """Return the median step times of the probes in ms, by batch size."""
    medians: dict[int, list[float]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Measurement):
            medians.setdefault(outcome.execution.micro_batch, []).append(outcome.median_ms)
    return dict(sorted(medians.items()))


def next_for_largest(
    worked: Collection[int], failed: Collection[int], most: int, crashed: Collection[int] = ()
) -> int | None:
    """Return the next batch size in the search for the largest one that fits.

    The search doubles the size until it fails, then bisects. Sizes above the smallest failure are
    not trusted, even if one worked. Returns None once the largest size that fits is known.

    Args:
        worked: Sizes that worked.
        failed: Sizes that ran out of memory or time.
        most: Largest size to try.
        crashed: Sizes that failed for another reason. They count as limits only if a smaller size
            worked.
    """
    smallest = min(worked, default=math.inf)
    failed = {*failed, *(n for n in crashed if n > smallest)}
    ceiling = min(failed, default=most + 1)
    floor = max((n for n in worked if n < ceiling), default=0)
    if floor >= most or ceiling <= 1:
        return None
    if not failed:
        tried = max(floor, max(crashed, default=0))
        return None if tried >= most else min(2 * tried, most) if tried else 1
    if ceiling - floor <= max(1, int(floor * RESOLUTION)):
        return None
    return next((n for n in range((floor + ceiling) // 2, ceiling) if n not in crashed), None)


def next_probe(
    plan: SweepPlan, outcomes: Sequence[Outcome], hints: Sequence[int] = ()
) -> int | None:
    """Return the batch size to measure next, or None when the plan is done.

    Raises:
        UserCodeError: If no size worked, and the user's code failed at all sizes or at
            MOST_CRASHES of them.
    """
    medians = medians_of(outcomes)
    crashed, too_large = _sizes(outcomes, "crashed"), _sizes(outcomes, "out_of_memory")
    failed = (too_large | _sizes(outcomes, "timeout")) - crashed
    most = MOST_CRASHES if plan.until_oom else max(2, min(MOST_CRASHES, len(plan.batches)))
    if len(crashed) >= most and not medians:
        raise UserCodeError(_failures(outcomes, "crashed")[-1].reason)
    if plan.until_oom:
        larger = next_for_largest(medians, failed, plan.batches[-1], crashed)
        if larger is not None or not plan.also_batches:
            return larger
    limit = min(too_large, default=math.inf)
    wanted = [b for b in plan.batches if b not in failed | crashed and b < limit]
    if not plan.adaptive:
        return _next_in_round(plan, wanted, medians)
    return next_batch(plan.batches, medians, hints, failed, crashed=crashed) if wanted else None


def _failures(outcomes: Sequence[Outcome], failure: ProbeFailure) -> list[FailedProbe]:
    return [o for o in outcomes if isinstance(o, FailedProbe) and o.failure == failure]


def _sizes(outcomes: Sequence[Outcome], failure: ProbeFailure) -> set[int]:
    return {o.execution.micro_batch for o in _failures(outcomes, failure)}


def _next_in_round(
    plan: SweepPlan, wanted: Sequence[int], medians: Mapping[int, Sequence[float]]
) -> int | None:
    rounds = {b: len(medians.get(b, ())) for b in wanted}
    now = min(rounds.values(), default=plan.repeats)
    if now >= plan.repeats:
        return None
    # Each round has a different order, so that a machine that slows down does not bend the curve.
    order = sorted(wanted)
    random.Random(f"{plan.seed}:{now}").shuffle(order)
    return next(b for b in order if rounds[b] == now)


def run_sweep(
    conditions: Conditions,
    plan: SweepPlan,
    device: str,
    keep: Callable[[Outcome], None],
    done: Sequence[Outcome] = (),
    hints: Sequence[int] = (),
    tell: Callable[[int, int], None] = lambda batch, finished: None,
) -> list[Outcome]:
    """Run probes until the plan is complete, and return all outcomes.

    Args:
        conditions: Conditions of every probe.
        plan: Plan of the sweep.
        device: Name of the device for failed outcomes.
        keep: Callback that receives each outcome, for example to store it.
        done: Outcomes of an earlier, interrupted run.
        hints: Batch sizes at which a jump is expected.
        tell: Callback that receives (batch, number of finished probes) before each probe.
    """
    outcomes = list(done)
    while (batch := next_probe(plan, outcomes, hints)) is not None:
        tell(batch, len(outcomes))
        outcome = probe(conditions, batch, device)
        keep(outcome)
        outcomes.append(outcome)
    return outcomes


MOST_SHARE = 0.4
"""Maximum number of probes, relative to the number of requested batch sizes."""
FEWEST_PROBES = 12
"""Number of probes that is always allowed, even if it exceeds MOST_SHARE."""
NOISE = 0.01
"""Assumed relative standard deviation between processes, until repeats show it."""
NOISE_REPEATS = 2
DISAGREE = 4.0
"""Difference between two probes of one batch above which a third is needed, in deviations."""
SUSPICIOUS = 2.2
"""Rise of a gap beyond the usual slope above which it may contain a jump, in deviations."""
SLOPE_WINDOW = 6
SAG = 0.5
"""Tolerated distance of a gap's middle from the line between its ends, in deviations."""
SURE = 6.0
"""Size of a jump above which it needs no repeats, in deviations."""
PRIOR_WORTH = 1.0
"""Weight of the assumed noise, in repeats."""
WIDEST_GAP_SHARE = 8
"""Widest allowed gap as 1 / value of the sweep. Wider gaps are probed in the middle."""


def next_batch(
    asked: Sequence[int],
    measured: Mapping[int, Sequence[float]],
    hints: Sequence[int] = (),
    failed: Collection[int] = (),
    seed: int = 0,
    crashed: Collection[int] = (),
) -> int | None:
    """Return the batch size to probe next, or None when the sweep is complete.

    It may be a size that was measured before.

    Args:
        asked: Requested batch sizes.
        measured: Median step times in ms of the probes that worked, by batch size.
        hints: Batch sizes at which a jump is expected, each the first that costs more.
        failed: Sizes that ran out of memory. Only smaller sizes than all of these are probed.
        seed: Seed of the order within a stage.
        crashed: Sizes that failed for another reason. They are skipped.
    """
    sizes = sorted(set(asked) - set(crashed))
    measured = {batch: measured[batch] for batch in sizes if measured.get(batch)}
    limit = min(failed, default=math.inf)
    sizes = [batch for batch in sizes if batch < limit]
    budget = most_probes(len(set(asked)))
    spent = sum(len(times) for times in measured.values()) + len({*failed, *crashed})
    if not sizes or spent >= budget:
        return None
    for wanted in _stages(sizes, measured, hints, limit):
        if wanted:
            return min(wanted, key=lambda batch: zlib.crc32(f"{seed} {batch}".encode()))
    return None


def _stages(
    sizes: list[int], measured: Mapping[int, Sequence[float]], hints: Sequence[int], limit: float
) -> Iterator[Collection[int]]:
    """Yield the batch sizes that each stage asks for.

    The caller takes the first stage that asks for any. The sizes are ascending and below `limit`,
    the smallest size that failed.
    """
    if limit < math.inf:
        yield [] if sizes[0] in measured else [sizes[0]]
        unknown = [batch for batch in sizes if batch > max(measured)]
        yield unknown[len(unknown) // 2 :][:1]
    else:
        yield {sizes[0], sizes[-1]} - measured.keys()
    yield [batch for batch in coarse_grid(sizes, hints) if batch not in measured]
    yield _for_noise(measured)
    yield _disagreeing(measured)
    yield from _stages_of_curve([batch for batch in sizes if batch <= max(measured)], measured)


def _disagreeing(measured: Mapping[int, Sequence[float]]) -> list[int]:
    """Return the batch sizes with two probes that disagree."""
    deviation = noise_between(measured) * math.sqrt(2)
    return [
        batch
        for batch, times in measured.items()
        if len(times) == 2 and abs(times[0] - times[1]) > DISAGREE * deviation * min(times)
    ]


def _stages_of_curve(
    sizes: list[int], measured: Mapping[int, Sequence[float]]
) -> Iterator[Collection[int]]:
    curve = fitted_curve(measured)
    yield _suspicious(sizes, measured, curve)
    yield [batch for jump in curve.jumps for batch in _middle(sizes, jump.before, jump.after)]
    unsure = [jump for jump in curve.jumps if abs(jump.z) < SURE]
    beside = [batch for jump in unsure for batch in (jump.before, jump.after)]
    yield [batch for batch in beside if len(measured[batch]) == 1]
    yield _curved(sizes, measured, curve)
    yield _widest(sizes, curve)


def _widest(sizes: list[int], curve: StepCurve) -> list[int]:
    """Return the middle of the widest gap, if it is too wide."""
    places = [bisect_left(sizes, batch) for batch in curve.batches]
    width, low = max(((b - a, a) for a, b in pairwise(places)), default=(0, 0))
    return [sizes[low + width // 2]] if width > max(2, len(sizes) // WIDEST_GAP_SHARE) else []


def fitted_curve(measured: Mapping[int, Sequence[float]]) -> StepCurve:
    """Fit a curve through the median step time of each batch size, with the noise from repeats."""
    batches = sorted(batch for batch, times in measured.items() if times)
    noise = noise_between(measured)
    return find_changes(
        batches,
        [statistics.median(measured[b]) for b in batches],
        [noise / math.sqrt(len(measured[b])) for b in batches],
    )


def noise_between(measured: Mapping[int, Sequence[float]]) -> float:
    """Estimate the relative standard deviation between probes of one batch size.

    The estimate combines repeats and a prior (NOISE). Variances are capped at nine times their
    median, so one disturbed probe does not dominate.
    """
    squares = [
        statistics.variance(v) / statistics.fmean(v) ** 2 for v in measured.values() if len(v) > 1
    ]
    if not squares:
        return NOISE
    # Without the cap, one disturbed probe among few repeats would hide every jump.
    cap = 9 * statistics.median(squares)
    capped = [min(square, cap) for square in squares]
    return math.sqrt((sum(capped) + PRIOR_WORTH * NOISE**2) / (len(capped) + PRIOR_WORTH))


def coarse_grid(sizes: Sequence[int], hints: Sequence[int] = ()) -> list[int]:
    """Choose about 4 + sqrt(n) of n ascending batch sizes.

    They are 1, 2, 4 and 8 times the first size, then evenly spaced. Odd and even sizes alternate.
    """
    count = len(sizes)
    points = 4 + round(math.sqrt(count))
    if count <= points + 2:
        return list(sizes)
    places = {0, count - 1}
    for factor in (2, 4, 8):
        places.add(min(bisect_left(sizes, factor * sizes[0]), count - 1))
    # The first few are close together. Spread the others over the remaining sizes.
    start = bisect_left(sizes, 8 * sizes[0]) if 8 * sizes[0] < sizes[count // 2] else 0
    for i, place in enumerate(np.linspace(start, count - 1, points - 3).round().astype(int)[1:-1]):
        odd_wanted = i % 2
        places.add(
            int(place) if sizes[place] % 2 == odd_wanted or place + 2 >= count else int(place) + 1
        )
    beside = [place for hint in hints for place in _sides(sizes, hint)]
    return [sizes[place] for place in sorted(places.union(beside)) if 0 <= place < count]


def _sides(sizes: Sequence[int], hint: int) -> tuple[int, int]:
    after = bisect_left(sizes, hint)
    return after - 1, after


def _for_noise(measured: Mapping[int, Sequence[float]]) -> list[int]:
    """Return batch sizes to repeat in order to measure the noise.

    They are spread over the sweep and include both ends, which have only one neighbor.
    """
    batches = sorted(measured)
    count = min(NOISE_REPEATS, len(batches))
    if sum(len(times) > 1 for times in measured.values()) >= count:
        return []
    spread = {batches[round(i)] for i in np.linspace(0, len(batches) - 1, count)}
    return [batch for batch in spread if len(measured[batch]) == 1]


def _middle(sizes: list[int], before: int, after: int) -> list[int]:
    """Return the batch size in the middle of a gap, or an empty list if its ends are neighbors."""
    low, high = bisect_left(sizes, before), bisect_left(sizes, after)
    return [sizes[(low + high) // 2]] if high - low > 1 else []


def unresolved(
    asked: Sequence[int], measured: Mapping[int, Sequence[float]]
) -> tuple[tuple[int, int], ...]:
    """Return the gaps between measured sizes that probably contain a jump at an unmeasured size."""
    sizes, curve = sorted(set(asked)), fitted_curve(measured)
    gaps = {(jump.before, jump.after) for jump in curve.jumps}
    if len(curve.batches) > 2:
        z = _surprises(measured, curve)
        gaps |= {
            (curve.batches[t], curve.batches[t + 1])
            for t in range(len(z))
            if z[t] >= SUSPICIOUS and not _lone(measured, z, t)
        }
    return tuple(sorted(gap for gap in gaps if _middle(sizes, *gap)))


def _suspicious(
    sizes: list[int], measured: Mapping[int, Sequence[float]], curve: StepCurve
) -> list[int]:
    """Return the middle of the gap with the most surprising rise.

    If its ends are neighbors, return the ends, so that they are repeated.
    """
    z = _surprises(measured, curve)
    again: list[int] = []
    for t in np.argsort(-np.abs(z)):
        if abs(z[t]) < SUSPICIOUS:
            break
        before, after = curve.batches[t], curve.batches[t + 1]
        if wanted := [curve.batches[p] for p in _lone(measured, z, t)] or _middle(
            sizes, before, after
        ):
            return wanted
        if abs(z[t]) < SURE and not again:
            again = [batch for batch in (before, after) if len(measured[batch]) == 1]
    return again


def _lone(measured: Mapping[int, Sequence[float]], z: Floats, t: int) -> list[int]:
    """Return the ends of gap `t` that are probably disturbed points, as indices.

    At such a point, the curve rises and falls again by the same amount. These are not two jumps.
    """
    repeats = [len(times) for _, times in sorted(measured.items()) if times]
    return [
        p
        for p in (t, t + 1)
        if 0 < p < len(z) and repeats[p] == 1 and abs(z[p - 1] + z[p]) < 0.3 * abs(z[t])
    ]


def _surprises(measured: Mapping[int, Sequence[float]], curve: StepCurve) -> Floats:
    """Return the rise of each gap beyond the usual slope, in deviations.

    A few points are not enough to fit the whole curve, but this only needs one slope.
    """
    batches = np.array(curve.batches)
    repeats = np.array([len(measured[batch]) for batch in curve.batches], dtype=float)
    steps = np.array(curve.step_ms) - curve.odd_extra_ms * (batches % 2)
    gap, rise = np.diff(batches), np.diff(steps)
    # Use the noise of the repeats. The noise of the curve includes jumps that were not found yet.
    deviation = (
        noise_between(measured)
        * np.maximum(steps[1:], steps[:-1])
        * np.sqrt(1 / repeats[1:] + 1 / repeats[:-1])
    )
    return np.array([_surprise(rise / gap, deviation / gap, gap, t) for t in range(len(gap))])


def _surprise(slopes: Floats, deviations: Floats, gaps: Floats, t: int) -> float:
    """Return the deviation of the slope of gap `t` from the nearest usual slope (z-score).

    One usual slope is the mode of the slopes around the gap, weighted by width. It is not the
    median, because half of the gaps may contain jumps. The slopes of the neighboring gaps are also
    usual.
    """
    around = [
        i for i in range(max(0, t - SLOPE_WINDOW), min(len(slopes), t + SLOPE_WINDOW + 1)) if i != t
    ]
    if not around:
        return 0.0
    agree = np.exp(
        -0.5
        * (
            (slopes[around, None] - slopes[around])
            / np.hypot(deviations[around, None], deviations[around])
        )
        ** 2
    )
    usual = around[int((gaps[around] @ agree).argmax())]
    near = []
    for side in (range(t - 1, -1, -1), range(t + 1, len(slopes))):
        near += [i for i in side if 2 * gaps[i] >= gaps[t]][:1]
    surprises = [(slopes[t] - slopes[i]) / math.hypot(deviations[t], deviations[i]) for i in near]
    surprises.append((slopes[t] - slopes[usual]) / math.hypot(deviations[t], deviations[usual]))
    if min(surprises) < 0 < max(surprises):
        return 0.0
    return float(min(surprises, key=abs))


def _curved(
    sizes: list[int], measured: Mapping[int, Sequence[float]], curve: StepCurve
) -> list[int]:
    """Return the middle of the gap that a straight line fits worst.

    The slopes on both sides of a gap show how far its middle may be from the line.
    """
    batches, steps = curve.batches, np.array(curve.step_ms)
    gap = np.diff(batches)
    slope = np.diff(steps - curve.odd_extra_ms * (np.array(batches) % 2)) / gap
    noise = noise_between(measured)
    holds_jump = {jump.after for jump in curve.jumps}
    worst, wanted = SAG, []
    for t in range(1, len(gap) - 1):
        if not holds_jump.isdisjoint(batches[t : t + 3]) or gap[t] < 2:
            continue
        unsure = noise * math.sqrt(2) * math.hypot(steps[t] / gap[t - 1], steps[t + 2] / gap[t + 1])
        sag = (abs(slope[t + 1] - slope[t - 1]) - 2 * unsure) * gap[t] / 8 / (noise * steps[t])
        if sag > worst and (between := _middle(sizes, batches[t], batches[t + 1])):
            worst, wanted = sag, between
    return wanted


def most_probes(asked: int) -> int:
    """Return the maximum number of probes for a sweep over this many batch sizes."""
    return max(math.ceil(MOST_SHARE * asked), FEWEST_PROBES)


TOO_NOISY = 0.25
"""Relative scatter above which the best batch size is not reported."""
LAUNCH_BOUND_COST = 1.1
"""Maximum step time of a launch-bound batch size, relative to the smallest batch size."""
LAUNCH_BOUND_SPAN = 2.0
"""Minimum extent of the launch-bound region, as a multiple of the smallest batch size."""


class SweepPoint(Record):
    """Results of one batch size. `step_ms` is the median over probes of their median steps."""

    batch: int
    probes: int
    step_ms: float
    interval_ms: Interval
    samples_per_second: float
    peak_memory_gib: float | None
    reserved_memory_gib: float | None


class Failure(Record):
    """Batch size that could not be measured."""

    batch: int
    failure: str
    reason: str


class BatchChoice(Record):
    """Batch size with its fitted step time, and its fitted and measured throughput."""

    batch: int
    step_ms: float
    samples_per_second: float
    measured_samples_per_second: float


class BestBatches(Record):
    """Recommended batch sizes.

    Attributes:
        best: Smallest batch size with a throughput indistinguishable from the highest.
        before_jumps: Last measured batch size before each jump up, ascending.
        after_jumps: For each of these, the first measured batch size after the jump with at least
            the same throughput, or None.
        launch_bound_until: Largest measured batch size of the flat region at the start, or None.
    """

    best: BatchChoice
    before_jumps: tuple[BatchChoice, ...]
    after_jumps: tuple[BatchChoice | None, ...]
    launch_bound_until: int | None


class SweepAnalysis(Record):
    """Results of a sweep.

    Attributes:
        largest_that_fits: Largest batch size that fits. Known only if a larger one ran out of
            memory.
        unresolved: Gaps between measured sizes that contain a jump at an unknown size.
        trend: None if there are too few points.
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
        """Relative scatter: between repeats or around the curve, whichever is larger."""
        return max(self.curve.noise, 0.0 if self.noise is None else self.noise.relative)

    @property
    def too_noisy(self) -> bool:
        """True if the measurements scatter too much to compare batch sizes."""
        return len(self.points) > 1 and self.scatter > TOO_NOISY


def analyse(outcomes: Sequence[Outcome], asked: Sequence[int] = ()) -> SweepAnalysis:
    """Analyze the outcomes of one sweep. At least one outcome must be a measurement.

    `asked` are the batch sizes that the sweep should cover.
    """
    medians = medians_of(outcomes)
    noise = noise_of(medians)
    failures = {o.execution.micro_batch: o for o in outcomes if isinstance(o, FailedProbe)}
    points = tuple(_point(outcomes, batch, medians[batch], noise) for batch in medians)
    # Without repeats, find_changes estimates the noise from the curve itself.
    curve = (
        find_changes([p.batch for p in points], [p.step_ms for p in points])
        if noise is None
        else fitted_curve(medians)
    )
    too_large = _sizes(outcomes, "out_of_memory")
    fitting = [batch for batch in medians if batch < min(too_large, default=0)]
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


def _point(
    outcomes: Sequence[Outcome], batch: int, medians: list[float], noise: Noise | None
) -> SweepPoint:
    measured = [
        o for o in outcomes if isinstance(o, Measurement) and o.execution.micro_batch == batch
    ]
    step_ms = statistics.median(medians)
    first = measured[0]
    return SweepPoint(
        batch=first.execution.micro_batch,
        probes=len(measured),
        step_ms=step_ms,
        interval_ms=first.interval_ms if noise is None else repeat_interval(medians, noise),
        samples_per_second=1e3 * first.execution.global_batch / step_ms,
        peak_memory_gib=_most(m.peak_memory_gib for m in measured),
        reserved_memory_gib=_most(m.reserved_memory_gib for m in measured),
    )


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def best_batches(curve: StepCurve) -> BestBatches:
    """Recommend batch sizes from a curve.

    Throughput is computed from fitted step times, which have less noise. A batch size is good under
    two conditions. Its throughput is less than one standard deviation of a measured step
    (`curve.noise`) below the highest. Its own measurement is at most two deviations slower than the
    fit. The best batch size is the smallest good one, which saves memory and converges in fewer
    samples.
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
