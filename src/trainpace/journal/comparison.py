"""Two runs, two sweeps or two recordings compared: their conditions, and whether their times differ by more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.journal.entry import Entry
from trainpace.outcome import STEP_PARTS, Interval
from trainpace.records import Record

if TYPE_CHECKING:
    from trainpace.watch import Recording

TOLERANCE = 0.05
"""Steps of different processes of one program on one machine differ by a few per cent, more than steps of one process."""
_CONDITIONS = "model device num_devices sequence_length image_size mode seed commit workload_key".split()


class Ratio(Record):
    """Step time of B divided by that of A, with its interval, None where a run has no interval.

    `beyond_noise`: whether the interval excludes 1. Steps within one process vary less than runs on different days, so
    a ratio near 1 that is beyond the noise of the steps may still be chance.
    """

    batch: int
    a_ms: float
    b_ms: float
    ratio: float
    low: float | None
    high: float | None
    beyond_noise: bool | None


class Difference(Record):
    """A condition, a part of the step in ms, or memory in GiB, of A and of B; "" where it is not stated."""

    name: str
    a: str | float
    b: str | float


class Comparison(Record):
    """A compared with B, each a run (one entry) or a sweep (one entry per batch size).

    `ratios`: one per micro-batch size that both have; `samples_per_second`: at the best batch of each side.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    conditions: tuple[Difference, ...]
    parts_ms: tuple[Difference, ...]
    memory_gib: tuple[Difference, ...]
    ratios: tuple[Ratio, ...]
    samples_per_second: Difference | None
    median_ratio: float | None


def compare(a: Sequence[Entry], b: Sequence[Entry]) -> Comparison:
    """Compare two runs, or the runs of two sweeps (of each batch size the last one that succeeded)."""
    single = len(a) == 1 and len(b) == 1
    pairs = [(a[0], b[0])] if single else _same_batch(a, b)
    ratios = tuple(ratio for pair in pairs if (ratio := ratio_of(*pair)) is not None)
    best = [max((entry.samples_per_second or 0.0 for entry in side), default=0.0) for side in (a, b)]
    return Comparison(
        a=tuple(entry.id for entry in a), b=tuple(entry.id for entry in b),
        conditions=_conditions(a[0], b[0], single) if a and b else (), parts_ms=_parts(a[0], b[0]) if single else (),
        memory_gib=_memory(a[0], b[0]) if single else (), ratios=ratios,
        samples_per_second=Difference(name="samples per second", a=best[0], b=best[1]) if all(best) else None,
        median_ratio=statistics.median(ratio.ratio for ratio in ratios) if ratios else None,
    )  # fmt: skip


def ratio_of(a: Entry, b: Entry) -> Ratio | None:
    """Step time of B divided by that of A; None where one of them has none."""
    if not a.step_time_ms or not b.step_time_ms:
        return None
    return ratio_between(a.step_time_ms, a.interval_ms, b.step_time_ms, b.interval_ms, b.execution.micro_batch)


def ratio_between(
    a_ms: float, a_interval: Interval | None, b_ms: float, b_interval: Interval | None, batch: int = 0
) -> Ratio:
    """B divided by A. The intervals are taken as independent: their half-widths, as logarithms, add up as squares."""
    ratio = b_ms / a_ms
    low = high = None
    if a_interval and b_interval and a_interval.low > 0 and b_interval.low > 0:
        down = math.hypot(_log(b_ms, b_interval.low), _log(a_interval.high, a_ms))
        up = math.hypot(_log(b_interval.high, b_ms), _log(a_ms, a_interval.low))
        low, high = ratio * math.exp(-down), ratio * math.exp(up)
    return Ratio(
        batch=batch, a_ms=a_ms, b_ms=b_ms, ratio=ratio, low=low, high=high,
        beyond_noise=None if low is None or high is None else not low <= 1 <= high,
    )  # fmt: skip


def _log(larger: float, smaller: float) -> float:
    return max(0.0, math.log(larger / smaller))


def _same_batch(a: Sequence[Entry], b: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    left, right = ({e.execution.micro_batch: e for e in side if e.outcome == "ok"} for side in (a, b))
    return [(left[batch], right[batch]) for batch in sorted(left.keys() & right.keys())]


def _conditions(a: Entry, b: Entry, single: bool) -> tuple[Difference, ...]:
    """Differences between the runs, their executions (for sweeps without the batch) and their environments."""

    def facts(entry: Entry) -> dict[str, object]:
        own = {name: getattr(entry, name) for name in (*_CONDITIONS, *(["outcome"] if single else []))}
        execution = asdict(entry.execution)
        if not single:
            del execution["micro_batch"]
        return own | execution | {f"environment: {key}": value for key, value in entry.environment.items()}

    left, right = facts(a), facts(b)
    return tuple(
        Difference(name=name, a=_word(left.get(name)), b=_word(right.get(name)))
        for name in left | right
        if left.get(name) != right.get(name)
    )


def _word(value: object) -> str:
    return "" if value is None else str(value)


def _parts(a: Entry, b: Entry) -> tuple[Difference, ...]:
    if a.step is None or b.step is None:
        return ()
    rows = ((name.removesuffix("_ms"), getattr(a.step, name), getattr(b.step, name)) for name in STEP_PARTS)
    return tuple(Difference(name=name, a=left, b=right) for name, left, right in rows if left or right)


def _memory(a: Entry, b: Entry) -> tuple[Difference, ...]:
    return tuple(
        Difference(name=name.removesuffix("_memory_gib"), a=left, b=right)
        for name in ("peak_memory_gib", "reserved_memory_gib")
        if (left := getattr(a, name)) is not None and (right := getattr(b, name)) is not None
    )


class Pace(Record):
    """The median step of a run's slowest rank, and the samples per step over all ranks (0: unknown)."""

    run: str
    step_ms: float
    interval_ms: Interval | None
    samples: float
    ranks: int


class Guarded(Record):
    """`regressed`: the lower end of the ratio's interval, or without intervals the ratio itself, is above 1 + tolerance."""

    baseline: Pace
    now: Pace
    ratio: Ratio
    tolerance: float
    regressed: bool


def pace_of_recording(recording: Recording, run: str) -> Pace:
    """Raises UnreadableInput for a recording without training steps."""
    if not recording.ranks:
        raise UnreadableInput(f"{run} holds no training steps: {recording.seen}")
    slowest = max(recording.ranks, key=lambda r: r.median_ms)
    interval = Interval(
        low=slowest.median_ms_low, high=slowest.median_ms_high, coverage=0.9, basis="medians of blocks of steps"
    )
    samples = sum(r.samples_per_step for r in recording.ranks)
    return Pace(run=run, step_ms=slowest.median_ms, interval_ms=interval, samples=samples, ranks=slowest.world_size)


def pace_of_entry(entry: Entry) -> Pace:
    """The pace of a run in the journal. Raises TrainpaceError for a run without a step time."""
    if not entry.step_time_ms:
        raise TrainpaceError(f"run {entry.id[:8]} has no step time ({entry.reason or entry.outcome}).")
    return Pace(
        run=f"run {entry.id[:8]}", step_ms=entry.step_time_ms, interval_ms=entry.interval_ms,
        samples=entry.execution.global_batch, ranks=entry.execution.world_size,
    )  # fmt: skip


def guard(baseline: Pace, now: Pace, tolerance: float = TOLERANCE) -> Guarded:
    """Compare two paces. Raises Contradiction where their samples per step or numbers of ranks differ."""
    if baseline.samples and now.samples and abs(baseline.samples - now.samples) > 0.5:
        raise Contradiction(
            f"a step takes {now.samples:g} samples, and {baseline.samples:g} in {baseline.run}: their times do not compare.",
            "Record a baseline with this batch.",
        )
    if baseline.ranks != now.ranks:
        raise Contradiction(
            f"it trained on {now.ranks} ranks, and {baseline.run} on {baseline.ranks}.", "Record a baseline of its own."
        )
    ratio = ratio_between(baseline.step_ms, baseline.interval_ms, now.step_ms, now.interval_ms)
    least = ratio.ratio if ratio.low is None else ratio.low
    return Guarded(baseline=baseline, now=now, ratio=ratio, tolerance=tolerance, regressed=least > 1 + tolerance)
