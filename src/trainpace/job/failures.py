"""Failures, and the checkpoints that limit what they cost: the exact expectation, for any failure rate.

Failures arrive at a constant rate, at any moment: while working, while writing a checkpoint, while restarting. A segment of
work ends with its checkpoint; a failure in it costs a restart and the segment from its start. Then (J. Daly, FGCS 22(3),
2006, equation 13) a segment of length L takes M e^(R/M) (e^(L/M) - 1) on average, M the mean time between failures, R the
restart. Young's first-order form (CACM 17(9), 1974) is its limit for L and R well below M. It holds for exponential times
between failures, and not for those that come in bursts.

Every number may be an array: then so is the answer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainpace.core.errors import TrainpaceError
from trainpace.workload import Floats

Numbers = Any
"""A float, or an array of them."""

MOST_EXPONENT = 500.0
"""Beyond e^500 mean times a run does not end."""


class Interruption(NamedTuple):
    """One kind of failure of a whole job: how often it comes, and what a restart after it takes."""

    mean_time_between_s: Numbers
    restart_s: float


class FailureRate(NamedTuple):
    """All kinds of failure together: their rate, and the chance that a restart is not itself interrupted."""

    per_s: Numbers
    restarted: Numbers


def failure_rate(interruptions: Sequence[Interruption]) -> FailureRate:
    """The rate of several kinds of failure. A restart is drawn by which kind came, so that e^(R/M) becomes 1 / E[e^(-R/M)]."""
    for mean_s, restart_s in interruptions:
        if not (np.all(np.asarray(mean_s) > 0) and np.isfinite(restart_s) and restart_s >= 0):
            raise TrainpaceError(
                f"an interruption every {mean_s} s with a restart of {restart_s} s cannot be."
            )
    if not interruptions:
        return FailureRate(np.float64(0.0), np.float64(1.0))
    rate = sum(1.0 / np.asarray(mean_s) for mean_s, _ in interruptions)
    restarted = sum(
        np.exp(-restart_s * rate) / mean_s / rate for mean_s, restart_s in interruptions
    )
    return FailureRate(rate, restarted)


def segment_s(length_s: Numbers, failures: FailureRate) -> Floats:
    """Mean seconds until `length_s` of work, its checkpoint included, have been done without an interruption."""
    rate, restarted = failures
    # e^(rate length) / restarted, together: each alone may be far from what a float holds
    hopeless = (
        length_s * rate - np.log(np.maximum(restarted, np.exp(-MOST_EXPONENT - 1))) > MOST_EXPONENT
    )
    fails = (rate > 0) & ~hopeless
    some_rate = np.where(fails, rate, 1.0)
    with_failures = (
        np.expm1(np.where(fails, length_s, 0.0) * some_rate)
        / some_rate
        / np.where(fails, restarted, 1.0)
    )
    endless = np.where(length_s > 0, np.inf, 0.0)
    return np.where(fails, with_failures, np.where(hopeless, endless, length_s))


def expected_s(
    work_s: Numbers, segments: Numbers, checkpoint_s: Numbers, failures: FailureRate
) -> Floats:
    """Mean seconds for `work_s`, cut into equal segments that each end with a checkpoint."""
    return np.asarray(segments * segment_s(work_s / segments + checkpoint_s, failures))


def best_interval_s(checkpoint_s: Numbers, failures: FailureRate) -> Floats:
    """Seconds of work between checkpoints that make the mean time shortest; infinite where nothing fails.

    The root x = interval / M of (1 - x) e^x = e^(-checkpoint / M); for a short checkpoint x is Young's sqrt(2 checkpoint / M).
    """
    rate = np.asarray(failures.per_s)
    if not rate.any():
        return np.full(rate.shape, np.inf)
    product, place = np.unique(checkpoint_s * rate, return_inverse=True)
    target = np.exp(-product)
    x = np.clip(np.sqrt(2 * product), 1e-12, 0.999)
    for _ in range(50):  # Newton's method on a falling, concave function
        change = ((1 - x) * np.exp(x) - target) / (x * np.exp(x))
        x = np.clip(x + change, 1e-12, 1.0)
        if (np.abs(change) < 1e-12).all():
            break
    with np.errstate(divide="ignore"):
        return np.where(rate > 0, x[place].reshape(np.shape(checkpoint_s * rate)) / rate, np.inf)


def best_segments(work_s: Numbers, checkpoint_s: Numbers, failures: FailureRate) -> Floats:
    """Into how many segments to cut `work_s`, from 1: a whole number beside work / best interval, the one that costs less.

    The cost is convex in the number of segments, so that no other whole number is better.
    """
    fewer = np.maximum(
        1.0, np.floor(work_s / best_interval_s(np.maximum(checkpoint_s, 1e-3), failures))
    )
    with np.errstate(invalid="ignore"):
        cost_s, cost_of_more_s = (
            expected_s(work_s, count, checkpoint_s, failures) for count in (fewer, fewer + 1)
        )
        return np.where(cost_of_more_s < cost_s, fewer + 1, fewer)
