"""Failures, and the checkpoints that limit what they cost: the exact expectation, for any failure rate.

Failures arrive at a constant rate, at any moment: while working, while writing a checkpoint, while restarting. A segment of
work ends with its checkpoint; a failure in it costs a restart and the segment from its start. Then (J. Daly, FGCS 22(3),
2006, equation 13) a segment of length L takes M e^(R/M) (e^(L/M) - 1) on average, M the mean time between failures, R the
restart. Young's first-order form (CACM 17(9), 1974) is its limit for L and R well below M. It holds for exponential times
between failures, and not for those that come in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainpace.errors import TrainpaceError
from trainpace.records import Record

MOST_EXPONENT = 500.0
"""Beyond e^500 mean times a run does not end."""


class Interruption(Record):
    """One kind of failure of a whole job: how often it comes, and what a restart after it takes."""

    mean_time_between_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if not (self.mean_time_between_s > 0 and math.isfinite(self.restart_s) and self.restart_s >= 0):
            raise TrainpaceError(
                f"an interruption every {self.mean_time_between_s} s with a restart of {self.restart_s} s cannot be."
            )


def segment_s(length_s: float, interruptions: Sequence[Interruption]) -> float:
    """Mean seconds until `length_s` of work, its checkpoint included, have been done without an interruption.

    For several kinds, a restart is drawn by which kind came, so that e^(R/M) becomes 1 / E[e^(-R/M)].
    """
    rate = _rate(interruptions)
    if rate == 0.0:
        return length_s
    restarted = _restarted(interruptions, rate)
    if length_s * rate > MOST_EXPONENT or restarted < math.exp(-MOST_EXPONENT):
        return math.inf if length_s > 0 else 0.0
    return math.expm1(length_s * rate) / rate / restarted


def expected_s(work_s: float, segments: int, checkpoint_s: float, interruptions: Sequence[Interruption]) -> float:
    """Mean seconds for `work_s`, cut into equal segments that each end with a checkpoint."""
    return segments * segment_s(work_s / segments + checkpoint_s, interruptions)


def best_interval_s(checkpoint_s: float, interruptions: Sequence[Interruption]) -> float:
    """Seconds of work between checkpoints that make the mean time shortest; infinite where nothing fails.

    The root x = interval / M of (1 - x) e^x = e^(-checkpoint / M); for a short checkpoint x is Young's sqrt(2 checkpoint / M).
    """
    rate = _rate(interruptions)
    if rate == 0.0:
        return math.inf
    target = math.exp(-checkpoint_s * rate)
    x = min(math.sqrt(2 * checkpoint_s * rate), 0.999)
    for _ in range(50):  # Newton's method on a falling, concave function
        change = ((1 - x) * math.exp(x) - target) / (x * math.exp(x))
        x = min(max(x + change, 1e-12), 1.0)
        if abs(change) < 1e-12:
            break
    return x / rate


def best_segments(work_s: float, checkpoint_s: float, interruptions: Sequence[Interruption]) -> int:
    """Into how many segments to cut `work_s`, from 1."""
    return max(1, round(work_s / best_interval_s(max(checkpoint_s, 1e-3), interruptions)))


def _rate(interruptions: Sequence[Interruption]) -> float:
    return math.fsum(1.0 / each.mean_time_between_s for each in interruptions)


def _restarted(interruptions: Sequence[Interruption], rate: float) -> float:
    """E[e^(-R x rate)]: the chance that a restart is not itself interrupted."""
    return math.fsum(math.exp(-each.restart_s * rate) / each.mean_time_between_s / rate for each in interruptions)
