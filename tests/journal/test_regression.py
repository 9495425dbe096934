"""Regression check: a run is slower than an earlier one only beyond the noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import Contradiction
from trainpace.core.outcome import Interval
from trainpace.journal import Pace, guard
from trainpace.watch import PARTS, Step, steady_ms


def pace(ms, spread=0.02, **more):
    interval = (
        None
        if spread is None
        else Interval(low=ms * (1 - spread), high=ms * (1 + spread), coverage=0.9, basis="made")
    )
    return Pace(
        **{"run": "a run", "step_ms": ms, "interval_ms": interval, "samples": 32.0, "ranks": 1}
        | more
    )


def test_slower_beyond_noise_and_tolerance_is_a_regression():
    assert guard(pace(10), pace(12)).regressed
    assert not guard(pace(10), pace(10.6)).regressed  # within noise and tolerance together
    assert not guard(pace(10), pace(12), tolerance=0.25).regressed
    assert not guard(pace(10, spread=0.3), pace(12, spread=0.3)).regressed
    assert guard(
        pace(10, spread=None), pace(10.6)
    ).regressed  # no noise known: the tolerance alone decides


@given(st.floats(0.1, 1e5), st.floats(0, 0.5), st.floats(0, 1))
def test_equal_or_faster_run_is_not_a_regression(ms, spread, tolerance):
    assert not guard(pace(ms, spread), pace(ms, spread), tolerance).regressed
    assert not guard(pace(ms, spread), pace(0.7 * ms, spread), tolerance).regressed


@pytest.mark.parametrize("other", [{"samples": 64.0}, {"ranks": 2}])
def test_regression_rejects_different_batch_or_ranks(other):
    with pytest.raises(Contradiction):
        guard(pace(10), pace(10, **other))


def test_steady_step_excludes_occasional_work():
    steps, at = [], 0
    for i in range(60):
        parts = [0] * len(PARTS)
        parts[PARTS.index("evaluation")] = 500_000_000 if i % 2 else 0
        length = 10_000_000 + parts[PARTS.index("evaluation")] + (90_000_000 if i == 7 else 0)
        steps.append(Step(0, 1, i, at, at + length, 8, 0.0, 0.0, tuple(parts)))
        at += length
    assert steady_ms(steps) == pytest.approx((10.0, 10.0, 10.0))
    assert steady_ms(steps[:2])[0] == pytest.approx(10.0)
