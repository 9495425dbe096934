"""Whether a rung helped: is it faster, beyond the noise of both setups, and is it still the same training?

A rung and the baseline start from the same weights and see the same samples in the same order (`Trial.seed`), so their loss
curves differ only by what the rung changed, some of it legitimately (bf16 rounding, batch statistics, augmentation). Curves are
smoothed and compared within a tolerance, a share of the baseline's first loss since a loss may approach 0, and within the
spread between two trials of the baseline with different seeds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainpace.core.records import Record
from trainpace.core.stats import noise_of, student_t_95

BETWEEN_PROCESSES = 0.05
"""Relative standard deviation that one trial's median is taken to have to the next process', where one of each was run. An
assumption, which decides nothing: a ratio below `CLEAR` is repeated, and one above is beyond it."""
CLEAR = 1.5
"""A ratio above it, or below its inverse, needs no repeats."""
Verdict = Literal["ok", "drifts", "diverges", "not compared"]
WINDOWS = 4
"""A curve is compared in so many windows of equal length; their means are the smoothed curve."""
FEWEST_A_WINDOW = 2
SMALLEST_SCALE = 1e-6
Floats = NDArray[np.float64]


class Gain(Record):
    """Old time / new time, and the 90 % interval that the spread of trials leaves it. Above 1 is faster."""

    ratio: float
    low: float
    high: float
    trials: int

    @property
    def faster(self) -> bool:
        return self.low > 1

    @property
    def clear(self) -> bool:
        """Whether it is so far from 1 that a repeat would not change the answer."""
        return self.ratio >= CLEAR or self.ratio <= 1 / CLEAR


def gain_of(old_ms: Sequence[float], new_ms: Sequence[float]) -> Gain:
    """The gain from the medians of trials, each in a process of its own. With one trial of each the noise is taken to be
    `BETWEEN_PROCESSES`; with more it is pooled from their repeats, in logarithms, and the difference of the means is judged by
    Student's t (Welch's would need more trials than a ladder has)."""
    noise = noise_of({0: old_ms, 1: new_ms})
    logs = [statistics.fmean(math.log(v) for v in values) for values in (old_ms, new_ms)]
    each = 1 / len(old_ms) + 1 / len(new_ms)
    if noise is None:
        half = 1.645 * BETWEEN_PROCESSES * math.sqrt(each)
    else:
        half = student_t_95(noise.degrees) * noise.relative * math.sqrt(each)
    middle = logs[0] - logs[1]
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        trials=len(old_ms) + len(new_ms),
    )


class LossCheck(Record):
    """`worst` and `at_end`: the rung's smoothed loss less the baseline's over the baseline's first, where it is largest and in
    the last of the windows of `smoothed_over` steps. `tolerance` holds the baseline's own spread.
    """

    verdict: Verdict
    reason: str = ""
    worst: float = 0.0
    at_end: float = 0.0
    tolerance: float = 0.0
    steps: int = 0
    smoothed_over: int = 0


def own_spread(one: Sequence[float], other: Sequence[float]) -> float:
    """How far apart two trials of the baseline with different seeds are: the root mean square over the windows, a share."""
    difference = _difference(one, other)
    return 0.0 if difference is None else float(np.sqrt(np.mean(difference**2)))


def compare(
    baseline: Sequence[float], rung: Sequence[float], tolerance: float, spread: float = 0.0
) -> LossCheck:
    """diverges: not finite, or worse by more than the tolerance in the last window. drifts: beyond it elsewhere, or better by
    more than it. Only the steps that both have are compared."""
    bad = next((i for i, loss in enumerate(rung) if not math.isfinite(loss)), None)
    if bad is not None:
        return LossCheck(
            verdict="diverges", reason=f"the loss became {rung[bad]} at step {bad + 1}"
        )
    steps = min(len(baseline), len(rung))
    difference = _difference(baseline, rung)
    if difference is None:
        return LossCheck(verdict="not compared", reason="too few steps", steps=steps)
    worst = float(difference[np.argmax(np.abs(difference))])
    at_end, allowed = float(difference[-1]), tolerance + spread
    verdict: Verdict = "ok"
    reason = ""
    if at_end > allowed:
        verdict, reason = (
            "diverges",
            f"the loss ends {at_end:.0%} of the first loss above the baseline's",
        )
    elif abs(worst) > allowed:
        verdict, reason = (
            "drifts",
            f"the loss is up to {abs(worst):.0%} of the first loss off the baseline's",
        )
    if reason:
        reason = f"{reason} ({allowed:.0%} allowed, over {steps} steps)".replace("%", " %")
    return LossCheck(
        verdict=verdict,
        reason=reason,
        worst=worst,
        at_end=at_end,
        tolerance=allowed,
        steps=steps,
        smoothed_over=steps // WINDOWS,
    )


def _difference(one: Sequence[float], other: Sequence[float]) -> Floats | None:
    """How far the other curve is above the first, window by window, over the first's first window; steps that do not fill the
    last window are left out. None for too few steps."""
    width = min(len(one), len(other)) // WINDOWS
    if width < FEWEST_A_WINDOW:
        return None
    means = [
        np.asarray(c[: width * WINDOWS], dtype=float).reshape(WINDOWS, width).mean(1)
        for c in (one, other)
    ]
    scale = max(abs(float(means[0][0])), SMALLEST_SCALE)
    return np.asarray((means[1] - means[0]) / scale)


def judged(gain: Gain, check: LossCheck) -> tuple[bool, str]:
    if check.verdict == "diverges":
        return False, check.reason
    figures = f"{gain.ratio:.2f}x ({gain.low:.2f} to {gain.high:.2f})"
    if gain.faster:
        return True, f"{figures}; {check.reason}" if check.reason else figures
    return False, f"{'slower' if gain.high < 1 else 'no gain beyond the noise'}: {figures}"
