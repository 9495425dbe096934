"""Faster beyond the noise?"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.run.results import gain_of

TIMES = st.lists(st.floats(1, 1000), min_size=1, max_size=4)


@given(TIMES, TIMES)
def test_the_interval_holds_the_ratio_and_turning_it_round_inverts_it(old, new):
    gain, back = gain_of(old, new), gain_of(new, old)
    assert gain.low <= gain.ratio <= gain.high
    assert gain.ratio * back.ratio == pytest.approx(1)
    assert gain.low * back.high == pytest.approx(1)


def test_single_trials_need_a_clear_gain():
    assert gain_of([100], [50]).faster
    assert not gain_of([100], [95]).faster
    assert gain_of([100], [50]).clear
    assert not gain_of([100], [95]).clear


def test_steady_repeats_tell_a_small_gain_and_noisy_ones_do_not():
    assert gain_of([100, 100.5, 99.8], [95, 95.2, 94.9]).faster
    assert not gain_of([100, 115, 92], [95, 108, 90]).faster


def test_noise_alone_is_seldom_a_gain():
    """Of two equal setups one in twenty seems faster, as a one-sided 95 % bound has it."""
    draw = random.Random(0)

    def times():
        return [100 * draw.lognormvariate(0, 0.05) for _ in range(3)]

    assert sum(gain_of(times(), times()).faster for _ in range(2000)) / 2000 == pytest.approx(
        0.05, abs=0.015
    )
