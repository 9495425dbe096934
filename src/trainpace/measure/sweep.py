"""Batch sizes measured from outside, each in a fresh process, so that a crash or a hang costs only that probe: which comes next,
and what to keep when something ends the sweep."""

import math
import random
import statistics
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
"""Batch sizes from which on some are left out: below it, measuring all is as cheap as choosing."""
MOST_CRASHES = 4
"""Sizes at which the code may fail before one is measured: more, and it fails at every size."""
RESOLUTION = 1 / 64
"""Sizes closer than this share of the largest are the same answer."""


class Conditions(Record):
    """The conditions under which a model is measured: everything but the batch size. A sweep and its resumption share them.

    `seconds` is the training time of one probe; `memory_limit_gib` the most memory that its process may map (CPU only);
    `optimizer` None is the task's own, or the usual one (`trainpace.core.execution`).
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
                "a probe needs seconds of 0 or more, a time-out above 0 and 1 or more"
                " micro-batches."
            )
        if self.memory_limit_gib is not None and not self.memory_limit_gib > 0:
            raise TrainpaceError("a memory limit is above 0 GiB.")
        if self.memory_limit_gib is not None and self.device != "cpu":
            raise TrainpaceError(
                "a memory limit is for probes on the CPU.", "A GPU's own memory is the limit there."
            )

    def execution(self, batch_size: int, own_optimizer: str = "") -> Execution:
        """How a probe at this batch size is executed. `own_optimizer`: what the task is trained with, "" before it was built."""
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
    """Real training steps at one batch size on this machine. Raises `UserCodeError` and its kin where they fail."""
    return _answer(Measurement, "measuring", conditions, batch_size)


def measure_noise_scale(conditions: Conditions, batch_size: int) -> MeasuredNoiseScale:
    """The gradient noise scale over some steps on the task's own data. Raises as `measure` does, and where there is no data."""
    return _answer(MeasuredNoiseScale, "gathering gradients of", conditions, batch_size)


def _answer(kind: type[R], verb: str, conditions: Conditions, batch_size: int) -> R:
    """The worker's answer, which is a record of that kind."""
    request = {
        "record": kind.__name__,
        "conditions": msgspec.to_builtins(conditions),
        "batch_size": batch_size,
    }
    what = f"{verb} {conditions.model} at batch {batch_size}"
    answer = run_isolated("trainpace.measure.steps", request, conditions.timeout_s, what)
    return records.from_json(answer, kind, "the answer of the measuring process")


def probe(conditions: Conditions, batch_size: int, device: str) -> Measurement | FailedProbe:
    """Measure; a failure of the user's code or a lack of memory is an answer, on the named device."""
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
    """A sweep that was asked for. `every` measures all of `batches`, `repeats` times; `until_oom` looks for the largest that
    fits, up to the last of `batches`, and measures the others only with `also_batches`."""

    batches: tuple[int, ...]
    repeats: int = 2
    every: bool = False
    until_oom: bool = False
    also_batches: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.repeats < 1:
            raise TrainpaceError(
                "a sweep needs batch sizes of 1 or more, each measured at least once."
            )

    @property
    def adaptive(self) -> bool:
        return not self.every and len(self.batches) >= ADAPTIVE_FROM


def medians_of(outcomes: Sequence[Outcome]) -> dict[int, list[float]]:
    """The median step in ms of each probe, by batch size."""
    medians: dict[int, list[float]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Measurement):
            medians.setdefault(outcome.execution.micro_batch, []).append(outcome.median_ms)
    return dict(sorted(medians.items()))


def next_for_largest(
    worked: Collection[int], failed: Collection[int], most: int, crashed: Collection[int] = ()
) -> int | None:
    """Double until a batch size fails, then bisect. None once the largest that works is known, or is `most`.

    Where a smaller size failed than one that worked, sizes above the smallest failure are not trusted. `crashed`: sizes that
    failed for a reason of their own, which say nothing of larger ones unless a smaller one worked.
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
    """The batch size to measure next, None when all is done. Raises where the user's code fails at all sizes, or at
    MOST_CRASHES, and works at none."""
    medians = medians_of(outcomes)
    failures = [o for o in outcomes if isinstance(o, FailedProbe)]
    crashes = [o for o in failures if o.failure == "crashed"]
    crashed = {o.execution.micro_batch for o in crashes}
    failed = {o.execution.micro_batch for o in failures} - crashed
    most = MOST_CRASHES if plan.until_oom else max(2, min(MOST_CRASHES, len(plan.batches)))
    if len(crashed) >= most and not medians:
        raise UserCodeError(crashes[-1].reason)
    too_large = {o.execution.micro_batch for o in failures if o.failure == "out_of_memory"}
    limit = min(too_large, default=None)
    if plan.until_oom:
        larger = next_for_largest(medians, failed, plan.batches[-1], crashed)
        if larger is not None or not plan.also_batches:
            return larger
    wanted = [b for b in plan.batches if b not in failed | crashed and (limit is None or b < limit)]
    if plan.adaptive:
        return next_batch(plan.batches, medians, hints, failed, crashed=crashed) if wanted else None
    rounds = {b: len(medians.get(b, ())) for b in wanted}
    now = min(rounds.values(), default=plan.repeats)
    if now >= plan.repeats:
        return None
    # in each round another order, so that a machine that slows down does not bend the curve
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
    """Probe until the plan is fulfilled. `keep` gets each outcome as soon as it is there; `done` are those of an earlier,
    interrupted run; `tell(batch, finished)` says what begins. `device` names the machine where a probe fails.
    """
    outcomes = list(done)
    while (batch := next_probe(plan, outcomes, hints)) is not None:
        tell(batch, len(outcomes))
        outcome = probe(conditions, batch, device)
        keep(outcome)
        outcomes.append(outcome)
    return outcomes


MOST_SHARE = 0.4
"""Probes over batches asked for, at most ..."""
FEWEST_PROBES = 12
"""... but so many are always allowed."""
NOISE = 0.01
"""Relative deviation that is expected between processes, before repeats tell."""
NOISE_REPEATS = 2
DISAGREE = 4.0
"""Two probes of one batch that differ by this many deviations call for a third."""
SUSPICIOUS = 2.2
"""Deviations by which a gap must rise beyond the usual slope to be looked into."""
SLOPE_WINDOW = 6
SAG = 0.5
"""Deviations by which the middle of a gap may lie off the line between its ends."""
SURE = 6.0
"""A jump of this many deviations needs no repeats."""
PRIOR_WORTH = 1.0
"""How many repeats the expected noise is worth."""
WIDEST_GAP_SHARE = 8
"""A gap of more than one part in so many of the sweep is tested in its middle."""


def next_batch(
    asked: Sequence[int],
    measured: Mapping[int, Sequence[float]],
    hints: Sequence[int] = (),
    failed: Collection[int] = (),
    seed: int = 0,
    crashed: Collection[int] = (),
) -> int | None:
    """The batch size to probe next, one of `asked`, perhaps again; None when enough is known.

    `measured` holds the median step in ms of each probe that worked, by batch size; `failed` the sizes that ran out of memory:
    nothing from the smallest of them on is asked for. `crashed`: sizes that failed for a reason of their own. `hints` are batch
    sizes at which a jump is expected, each the first that costs more. `seed` is for the order.
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
    """What each stage asks for, in order; a stage is looked at where those before it ask for nothing.

    sizes: ascending, below `limit`, the smallest that failed.
    """
    if limit < math.inf:
        yield [] if sizes[0] in measured else [sizes[0]]
        unknown = [batch for batch in sizes if batch > max(measured)]
        yield unknown[len(unknown) // 2 :][:1]
    else:
        yield {sizes[0], sizes[-1]} - measured.keys()
    yield [batch for batch in coarse_grid(sizes, hints) if batch not in measured]
    yield _for_noise(measured)
    deviation = noise_between(measured) * math.sqrt(2)
    yield [
        batch
        for batch, times in measured.items()
        if len(times) == 2 and abs(times[0] - times[1]) > DISAGREE * deviation * min(times)
    ]
    sizes = [batch for batch in sizes if batch <= max(measured)]
    curve = fitted_curve(measured)
    yield _suspicious(sizes, measured, curve)
    yield [batch for jump in curve.jumps for batch in _middle(sizes, jump.before, jump.after)]
    yield _again(sizes, measured, curve)
    yield [
        batch
        for jump in curve.jumps
        if abs(jump.z) < SURE
        for batch in (jump.before, jump.after)
        if len(measured[batch]) == 1
    ]
    yield _curved(sizes, measured, curve)
    places = [bisect_left(sizes, batch) for batch in curve.batches]
    width, low = max(((b - a, a) for a, b in pairwise(places)), default=(0, 0))
    yield [sizes[low + width // 2]] if width > max(2, len(sizes) // WIDEST_GAP_SHARE) else []


def fitted_curve(measured: Mapping[int, Sequence[float]]) -> StepCurve:
    """The curve through the medians of each batch's probes; repeats tell the noise and sharpen their batch."""
    batches = sorted(batch for batch, times in measured.items() if times)
    noise = noise_between(measured)
    return find_changes(
        batches,
        [statistics.median(measured[b]) for b in batches],
        [noise / math.sqrt(len(measured[b])) for b in batches],
    )


def noise_between(measured: Mapping[int, Sequence[float]]) -> float:
    """Relative standard deviation between probes of one batch, from their differences and what was expected. Batches
    with a disturbed probe do not count for more than the others: the median of the squares counts, not the mean.
    """
    squares = [
        statistics.variance(v) / statistics.fmean(v) ** 2 for v in measured.values() if len(v) > 1
    ]
    if not squares:
        return NOISE
    # a disturbed probe among few repeats would hide every jump
    cap = 9 * statistics.median(squares)
    capped = [min(square, cap) for square in squares]
    return math.sqrt((sum(capped) + PRIOR_WORTH * NOISE**2) / (len(capped) + PRIOR_WORTH))


def coarse_grid(sizes: Sequence[int], hints: Sequence[int] = ()) -> list[int]:
    """About 4 + sqrt(n) of n ascending sizes: 1, 2, 4, 8 times the first, then evenly spread; odd and even in turn."""
    count = len(sizes)
    points = 4 + round(math.sqrt(count))
    if count <= points + 2:
        return list(sizes)
    places = {0, count - 1}
    for factor in (2, 4, 8):
        places.add(min(bisect_left(sizes, factor * sizes[0]), count - 1))
    # the first few are close together already: the rest is spread over what they leave
    start = bisect_left(sizes, 8 * sizes[0]) if 8 * sizes[0] < sizes[count // 2] else 0
    for i, place in enumerate(np.linspace(start, count - 1, points - 3).round().astype(int)[1:-1]):
        odd_wanted = i % 2
        places.add(
            int(place) if sizes[place] % 2 == odd_wanted or place + 2 >= count else int(place) + 1
        )
    for hint in hints:
        after = bisect_left(sizes, hint)
        places |= {place for place in (after - 1, after) if 0 <= place < count}
    return [sizes[place] for place in sorted(places)]


def _for_noise(measured: Mapping[int, Sequence[float]]) -> list[int]:
    """Repeats spread over the sweep, the ends first, which have a neighbour on one side only."""
    batches = sorted(measured)
    count = min(NOISE_REPEATS, len(batches))
    if sum(len(times) > 1 for times in measured.values()) >= count:
        return []
    spread = {batches[round(i)] for i in np.linspace(0, len(batches) - 1, count)}
    return [batch for batch in spread if len(measured[batch]) == 1]


def _again(
    sizes: list[int], measured: Mapping[int, Sequence[float]], curve: StepCurve
) -> list[int]:
    """Batches whose measurement fits no neighbour, again; if it stays so, what lies between."""
    wanted = []
    for batch in curve.disturbed:
        if len(measured[batch]) == 1:
            wanted.append(batch)
            continue
        place = curve.batches.index(batch)
        for before, after in pairwise(curve.batches[max(0, place - 1) : place + 2]):
            wanted += _middle(sizes, before, after)
    return wanted


def _middle(sizes: list[int], before: int, after: int) -> list[int]:
    """The size in the middle of a bracket; none if its ends are neighbours."""
    low, high = bisect_left(sizes, before), bisect_left(sizes, after)
    return [sizes[(low + high) // 2]] if high - low > 1 else []


def unresolved(
    asked: Sequence[int], measured: Mapping[int, Sequence[float]]
) -> tuple[tuple[int, int], ...]:
    """The gaps between measured sizes in which a jump is, or seems to be, while sizes between them were not measured."""
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
    """The middle of the gap whose step time grows most unlike what a sample costs around it, or its ends again where
    nothing lies between.
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
    """Ends of gap `t`, as places, from which the curve goes up and down again by as much: that is the point, not two jumps."""
    repeats = [len(times) for _, times in sorted(measured.items()) if times]
    return [
        p
        for p in (t, t + 1)
        if 0 < p < len(z) and repeats[p] == 1 and abs(z[p - 1] + z[p]) < 0.3 * abs(z[t])
    ]


def _surprises(measured: Mapping[int, Sequence[float]], curve: StepCurve) -> Floats:
    """Of every gap, by how many deviations it rises beyond the usual slope. Few points hold too little for a model of the whole
    curve; this asks for one slope only."""
    batches = np.array(curve.batches)
    repeats = np.array([len(measured[batch]) for batch in curve.batches], dtype=float)
    steps = np.array(curve.step_ms) - curve.odd_extra_ms * (batches % 2)
    gap, rise = np.diff(batches), np.diff(steps)
    # the noise of the repeats, not the curve's: that holds the misfit of all jumps that were not found yet
    deviation = (
        noise_between(measured)
        * np.maximum(steps[1:], steps[:-1])
        * np.sqrt(1 / repeats[1:] + 1 / repeats[:-1])
    )
    return np.array([_surprise(rise / gap, deviation / gap, gap, t) for t in range(len(gap))])


def _surprise(slopes: Floats, deviations: Floats, gaps: Floats, t: int) -> float:
    """By how many deviations the slope of gap `t` differs from all that may be usual there: the slope that most of the
    width around it agrees with (a mode, since jumps may be in half of the gaps), and those of the next gaps.
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
    """The middle of the gap that a straight line crosses worst, judged by the slopes on either side of it."""
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
    """How many probes a sweep over so many batch sizes may take."""
    return max(math.ceil(MOST_SHARE * asked), FEWEST_PROBES)


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
