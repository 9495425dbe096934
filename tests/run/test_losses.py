"""Loss curves compared with the baseline's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.run.results import compare, own_spread

CURVE = [0.7 * math.exp(-i / 20) for i in range(40)]
LOSSES = st.lists(st.floats(0.01, 100), min_size=8, max_size=60)


@given(LOSSES, st.floats(0.01, 1))
def test_curve_compared_with_itself_is_ok(losses, tolerance):
    check = compare(losses, losses, tolerance)
    assert (check.verdict, check.worst, check.at_end) == ("ok", 0, 0)


@given(LOSSES, st.floats(0.1, 100))
def test_loss_comparison_is_scale_invariant(losses, factor):
    other = [loss * 1.3 for loss in losses]
    a, b = (
        compare(losses, other, 0.1),
        compare([v * factor for v in losses], [v * factor for v in other], 0.1),
    )
    assert a.worst == pytest.approx(b.worst)


def test_higher_final_loss_diverges_and_lower_loss_drifts():
    higher = [loss + 0.3 * i / 40 for i, loss in enumerate(CURVE)]
    assert compare(CURVE, higher, 0.1).verdict == "diverges"
    assert "above the baseline's" in compare(CURVE, higher, 0.1).reason
    assert compare(CURVE, [loss * 0.2 for loss in CURVE], 0.1).verdict == "drifts"
    bump = [loss + 0.4 * (10 <= i < 20) for i, loss in enumerate(CURVE)]
    assert compare(CURVE, bump, 0.1).verdict == "drifts"


def test_loss_noise_and_single_spikes_are_ok():
    noisy = [loss + 0.05 * (-1) ** i for i, loss in enumerate(CURVE)]
    assert compare(CURVE, noisy, 0.1).verdict == "ok"
    assert compare(CURVE, [*CURVE[:20], CURVE[20] + 0.3, *CURVE[21:]], 0.1).verdict == "ok"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_diverges(bad):
    check = compare(CURVE, [*CURVE[:5], bad], 10.0)
    assert check.verdict == "diverges"
    assert "step 6" in check.reason


def test_loss_near_zero_is_relative_to_first_loss():
    """0.001 is ten times 0.0001, but the difference does not matter."""
    down = [0.7, 0.7, 0.1, 0.1, 0.01, 0.01, 1e-4, 1e-4]
    assert compare(down, [*down[:-2], 1e-3, 1e-3], 0.1).verdict == "ok"


def test_baseline_spread_widens_loss_tolerance():
    rng = np.random.default_rng(0)
    one, other = (
        [loss + 0.15 * (i >= 20) * k + rng.normal(0, 0.01) for i, loss in enumerate(CURVE)]
        for k in (0, 1)
    )
    spread = own_spread(one, other)
    assert 0.1 < spread < 0.25
    assert compare(one, other, 0.1).verdict == "diverges"
    assert compare(one, other, 0.1, spread).verdict == "ok"


def test_short_loss_curves_are_not_compared():
    assert compare(CURVE[:5], CURVE, 0.1).verdict == "not compared"
    assert own_spread(CURVE[:3], CURVE) == 0
