"""The cost of failures, compared with a simulation and with analytic limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from failing_runs import mean_simulated_s
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.job import ONLY_STEPS, Schedule, training_of
from trainpace.job.training import (
    Interruption,
    best_interval_s,
    best_segments,
    expected_s,
    failure_rate,
    segment_s,
)

CASES = [
    # (work, segments, checkpoint, ((mean time between failures, restart), ...)), from rare to very frequent failures
    (40_000.0, 20, 30.0, ((50_000.0, 300.0),)),
    (40_000.0, 40, 60.0, ((3_600.0, 600.0),)),
    (20_000.0, 10, 100.0, ((2_000.0, 900.0),)),
    (40_000.0, 50, 60.0, ((5_000.0, 600.0), (9_000.0, 120.0))),
    (10_000.0, 1, 0.0, ((8_000.0, 60.0),)),
]


def of(pairs):
    return failure_rate([Interruption(*pair) for pair in pairs])


@pytest.mark.parametrize("case", CASES)
def test_closed_form_is_within_2_percent_of_simulation(case):
    work, segments, checkpoint, pairs = case
    assert expected_s(work, segments, checkpoint, of(pairs)) == pytest.approx(
        mean_simulated_s(1500, 7, *case), rel=0.02
    )


def test_step_based_checkpoints_match_simulation():
    conditions = replace(
        ONLY_STEPS,
        checkpoint_every_steps=1000,
        checkpoint_s=60.0,
        mean_time_between_failures_s=3600.0,
        restart_s=600.0,
    )
    simulated = mean_simulated_s(1500, 3, 40_000.0, 40, 60.0, ((3600.0, 600.0),))
    time = training_of(Schedule(max_steps=40_000), Execution(), conditions).time(1.0)
    assert time.total_s == pytest.approx(simulated, rel=0.02)


def test_rare_failure_cost_matches_young_approximation():
    mean, restart, interval, work = 1e7, 60.0, 300.0, 200_000.0
    exact = expected_s(work, round(work / interval), 0.0, of(((mean, restart),)))
    assert exact - work == pytest.approx(work * (restart + interval / 2) / mean, rel=0.01)


@given(st.floats(0.1, 500), st.floats(1e3, 1e7), st.floats(0, 1e3))
def test_best_interval_minimizes_cost(checkpoint, mean, restart):
    failing = of(((mean, restart),))
    best = best_interval_s(checkpoint, failing)

    def cost(interval):
        return segment_s(interval + checkpoint, failing) / interval

    assert cost(best) <= min(cost(best * 0.9), cost(best * 1.1)) * (1 + 1e-9)


def test_best_interval_matches_young_formula_for_short_checkpoints():
    assert best_interval_s(5.0, of(((1e6, 0.0),))) == pytest.approx(
        math.sqrt(2 * 5.0 * 1e6), rel=0.01
    )


@given(st.floats(1, 1e6), st.integers(1, 100), st.floats(10, 1e9), st.floats(0, 1e4))
def test_failures_never_shorten_training(work, segments, mean, restart):
    assert expected_s(work, segments, 1.0, of(((mean, restart),))) >= (work + segments) * (1 - 1e-9)


def test_no_failures_give_one_segment_without_loss():
    assert best_segments(1e6, 10.0, of(())) == 1
    assert expected_s(1e6, 1, 10.0, of(())) == 1e6 + 10.0


def test_zero_time_between_failures_is_rejected():
    with pytest.raises(TrainpaceError):
        failure_rate([Interruption(0.0, 1.0)])
