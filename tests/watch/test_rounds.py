"""Tests of the number of rounds and steps of a diagnosis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.stats import student_t_95
from trainpace.watch.inside.trials import LEAST_BLOCK, T_95, fitted, settled, warm_up_steps


@given(
    st.floats(0, 5000), st.integers(1, 5), st.integers(2, 10), st.integers(2, 20), st.integers(1, 8)
)
def test_fitted_rounds_never_exceed_the_request(steps, blocks, settling, block, rounds):
    each, made = fitted(steps, blocks, settling, block, rounds)
    assert LEAST_BLOCK <= each <= block
    assert 1 <= made <= rounds
    if made > 2:  # fewer rounds are made only down to two
        assert made * blocks * (each + settling) <= steps


@given(st.floats(0, 5000), st.floats(1, 1000))
def test_more_steps_never_fit_fewer_rounds(steps, more):
    few, many = fitted(steps, 3, 4, 8, 4), fitted(steps + more, 3, 4, 8, 4)
    assert few[0] * few[1] <= many[0] * many[1] or few[1] < many[1]


def test_long_steps_shorten_the_warm_up():
    assert warm_up_steps(10, 120.0, 0.1) == 10
    assert warm_up_steps(10, 120.0, 5.0) == 6
    assert warm_up_steps(10, 120.0, 60.0) == 3


def test_settled_matches_significance_of_the_difference():
    assert settled([20, 21, 20], [12, 12, 13])
    assert not settled([20, 90, 21], [12, 14, 80])
    assert settled([20, 20, 20], [20, 19.9, 20.1])
    assert not settled([20], [12])


def test_t_table_matches_student_t():
    assert [student_t_95(df) for df in range(1, len(T_95) + 1)] == pytest.approx(T_95, rel=0.005)
