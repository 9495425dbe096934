"""Regression check: is a recorded training slower than a baseline, beyond the noise of both?"""

from trainpace.errors import Contradiction, TrainpaceError, UnreadableInput
from trainpace.journal.comparison import Ratio, ratio_between
from trainpace.journal.entry import Entry
from trainpace.outcome import Interval
from trainpace.records import Record
from trainpace.watch import Recording

TOLERANCE = 0.05
"""Steps of different processes of one program on one machine differ by a few per cent, more than steps of one process."""


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
