"""Tests whether a speed-up exceeds the noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.run.results import gain_of

TIMES = st.lists(st.floats(1, 1000), min_size=1, max_size=4)


@given(TIMES, TIMES)
def test_gain_interval_contains_ratio_and_inverts_when_swapped(old, new):
    gain, back = gain_of(old, new), gain_of(new, old)
    assert gain.low <= gain.ratio <= gain.high
    assert gain.ratio * back.ratio == pytest.approx(1)
    assert gain.low * back.high == pytest.approx(1)


def test_single_trials_need_a_clear_gain():
    assert gain_of([100], [50]).faster
    assert not gain_of([100], [95]).faster
    assert gain_of([100], [50]).clear
    assert not gain_of([100], [95]).clear


def test_small_gain_needs_steady_repeats():
    assert gain_of([100, 100.5, 99.8], [95, 95.2, 94.9]).faster
    assert not gain_of([100, 115, 92], [95, 108, 90]).faster


def test_equal_setups_seem_faster_in_5_percent():
    """The interval is a one-sided 95 % bound."""
    draw = random.Random(0)

    def times():
        return [100 * draw.lognormvariate(0, 0.05) for _ in range(3)]

    assert sum(gain_of(times(), times()).faster for _ in range(2000)) / 2000 == pytest.approx(
        0.05, abs=0.015
    )
