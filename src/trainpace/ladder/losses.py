"""Is it still the same training? A rung's loss curve beside the baseline's, step by step on the same samples.

Both start from the same weights and see the same samples in the same order (`Trial.seed`), so their curves differ only by what
the rung changed. Some of it is legitimate: bf16 rounds to 8 bits of mantissa, batch normalisation takes its statistics over
another micro-batch, augmentation draws other random numbers. So curves are smoothed and compared within a tolerance, a share of
the baseline's first (smoothed) loss, for a loss that approaches 0 has no relative difference that means anything; and within the
spread that the baseline has by itself, from a trial with another seed, whose weights and order of samples are others.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainpace.records import Record

Verdict = Literal["ok", "drifts", "diverges", "not compared"]
WINDOWS = 4
"""A curve is compared in so many windows of equal length; their means are the smoothed curve."""
FEWEST_A_WINDOW = 2
SMALLEST_SCALE = 1e-6
Floats = NDArray[np.float64]


class LossCheck(Record):
    """`worst` and `at_end`: the rung's smoothed loss less the baseline's over the baseline's first, where it is largest and in
    the last of the windows of `smoothed_over` steps. `tolerance` holds the baseline's own spread."""

    verdict: Verdict
    reason: str = ""
    worst: float = 0.0
    at_end: float = 0.0
    tolerance: float = 0.0
    steps: int = 0
    smoothed_over: int = 0


def own_spread(one: Sequence[float], other: Sequence[float]) -> float:
    """How far apart two trials of the baseline with different seeds are: the root mean square over the windows, a share."""
    curves = _windows(one, other)
    if curves is None:
        return 0.0
    first, second = curves
    return float(np.sqrt(np.mean(((second - first) / _scale(first)) ** 2)))


def compare(baseline: Sequence[float], rung: Sequence[float], tolerance: float, spread: float = 0.0) -> LossCheck:
    """diverges: not finite, or worse by more than the tolerance in the last window. drifts: beyond it elsewhere, or better by
    more than it. Only the steps that both have are compared."""
    bad = next((i for i, loss in enumerate(rung) if not math.isfinite(loss)), None)
    if bad is not None:
        return LossCheck(verdict="diverges", reason=f"the loss became {rung[bad]} at step {bad + 1}")
    curves = _windows(baseline, rung)
    if curves is None:
        return LossCheck(verdict="not compared", reason="too few steps", steps=min(len(baseline), len(rung)))
    before, after = curves
    difference = (after - before) / _scale(before)
    worst = float(difference[np.argmax(np.abs(difference))])
    at_end, allowed = float(difference[-1]), tolerance + spread
    steps = min(len(baseline), len(rung))
    verdict: Verdict = "ok"
    reason = ""
    if at_end > allowed:
        verdict, reason = "diverges", f"the loss ends {_share(at_end)} of the first loss above the baseline's"
    elif abs(worst) > allowed:
        verdict, reason = "drifts", f"the loss is up to {_share(abs(worst))} of the first loss off the baseline's"
    if reason:
        reason += f" ({_share(allowed)} allowed, over {steps} steps)"
    return LossCheck(
        verdict=verdict, reason=reason, worst=worst, at_end=at_end, tolerance=allowed, steps=steps,
        smoothed_over=steps // WINDOWS,
    )  # fmt: skip


def _windows(one: Sequence[float], other: Sequence[float]) -> tuple[Floats, Floats] | None:
    """The means of both over the same windows; fewer than WINDOWS steps at the end are left out."""
    steps = min(len(one), len(other))
    width = steps // WINDOWS
    if width < FEWEST_A_WINDOW:
        return None
    first, second = (
        np.asarray(c[: width * WINDOWS], dtype=float).reshape(WINDOWS, width).mean(1) for c in (one, other)
    )
    return first, second


def _scale(curve: Floats) -> float:
    return max(abs(float(curve[0])), SMALLEST_SCALE)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
