"""Which batch size to probe next, so that a sweep costs a fraction of its batch sizes and still finds its jumps.

A probe is a process of its own and costs seconds, so every one is decided with all that is known: `next_batch` is a
pure function of what was measured, called until it returns None. In this order it asks for

1. both ends; if the largest does not fit, bisection for the largest that does;
2. a coarse grid, denser at small batches, of odd and even batches in turn (so that a period of two shows), and both
   sides of every hint;
3. repeats of a few, which tell the noise between processes, and of batches whose probes disagree or fit no neighbour;
4. the middle of every gap that rises as if it held a jump, until its ends are neighbours;
5. repeats beside jumps that are uncertain, and the middles of gaps where the curve bends or that are wide.

Within a stage the order is random (seeded), so that a machine that warms up or is disturbed does not bend the curve.
"""

import math
import statistics
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from trainpace.measure.change_search import Floats
from trainpace.measure.changes import StepCurve, find_changes

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
