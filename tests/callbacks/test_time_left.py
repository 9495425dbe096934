"""The estimated time left matches simulated runs."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.callbacks.time_left import Other, multiples_in, pace_of, time_left
from trainpace.core.errors import TrainpaceError

STEPS = 1000


def steps_of(seed, noise=0.05, spike_every=0, first_slow=0, pace=lambda i: 0.1):
    rng = random.Random(seed)
    times = []
    for i in range(STEPS):
        seconds = pace(i) * math.exp(rng.gauss(0, noise))
        seconds *= 10 if spike_every and i % spike_every == spike_every - 1 else 1
        times.append(seconds * (50 if i < first_slow else 1))
    return times


def errors(times, shares=(0.05, 0.1, 0.25, 0.5, 0.75)):
    found = []
    for share in shares:
        done = round(share * len(times))
        left = time_left(done, len(times), times[:done], len(times) - done)
        found.append(left.seconds / sum(times[done:]) - 1)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "run",
    [
        {"noise": 0.0},
        {"noise": 0.2},
        {"first_slow": 1},
        {"first_slow": 8},
        {"spike_every": 5},
        {"pace": lambda i: 0.1 * (1 + 0.1 * math.sin(i / 5))},
    ],
    ids=["even", "noisy", "compiles", "compiles for eight steps", "every fifth is slow", "waves"],
)
def test_error_is_below_10_percent_after_5_percent_of_steps(run, seed):
    assert max(map(abs, errors(steps_of(seed, **run)))) < 0.1


def test_recurring_pauses_count_and_a_single_stall_does_not():
    recurring = steps_of(1, noise=0.02, spike_every=50)
    assert max(map(abs, errors(recurring, (0.25, 0.5, 0.75)))) < 0.05
    once = steps_of(1, noise=0.02)
    once[20] = 30.0  # more than a quarter of the run in one step
    assert abs(errors(once, (0.05,))[0]) < 0.05
    assert abs(errors(once, (0.5,))[0]) < 0.02


def test_error_shrinks_the_longer_a_new_pace_lasts():
    times = steps_of(2, noise=0.02, pace=lambda i: 0.1 if i < 400 else 0.2)
    after_20, after_100, after_400 = (abs(e) for e in errors(times, (0.42, 0.5, 0.8)))
    assert after_20 > after_100 > after_400
    assert after_400 < 0.05
    assert after_100 < 0.35


def test_ten_quick_steps_do_not_halve_the_time_left():
    times = steps_of(3, noise=0.02, pace=lambda i: 0.05 if 490 <= i < 500 else 0.1)
    assert abs(errors(times, (0.5,))[0]) < 0.1


def test_interval_covers_90_percent_of_runs():
    held = 0
    runs = 300
    for seed in range(runs):
        rng = random.Random(1000 + seed)
        # the pace drifts: every 50 steps have their own
        levels = [0.1 * math.exp(rng.gauss(0, 0.04)) for _ in range(STEPS // 50)]
        times = steps_of(seed, noise=0.1, pace=lambda i, levels=levels: levels[i // 50])
        done = rng.choice([100, 250, 500, 750])
        interval = time_left(done, STEPS, times[:done], STEPS - done).interval_s
        held += interval.low <= sum(times[done:]) <= interval.high
    assert held / runs > 0.85


def test_evaluations_and_checkpoints_are_estimated_separately_from_steps():
    evaluations = Other("evaluation", [12.0, 10.0, 10.2, 9.8], times_left=6)
    left = time_left(400, 1000, [0.1] * 400, 600, [evaluations, Other("checkpoint", [2.0], 3)])
    assert left.seconds == pytest.approx(60 + 60 + 6, rel=0.01)
    assert left.other_s == {
        "evaluation": pytest.approx(60, rel=0.01),
        "checkpoint": pytest.approx(6),
    }
    assert left.interval_s.low < 126 < left.interval_s.high


def test_unseen_evaluations_use_a_guess_or_are_reported_as_unseen():
    guessed = time_left(10, 100, [1.0] * 10, 90, [Other("evaluation", [], 2, guess_s=5.0)])
    assert guessed.seconds == pytest.approx(100)
    assert guessed.interval_s.high - guessed.seconds > 9  # the guess may be half the real time
    unknown = time_left(
        10, 100, [1.0] * 10, 90, [Other("checkpoint", [], 2), Other("evaluation", [], 0)]
    )
    assert unknown.seconds == pytest.approx(90)
    assert unknown.unseen == ("checkpoint",)


def test_time_left_is_none_without_timed_steps():
    assert time_left(0, 100, [], 100) is None


def test_time_left_is_zero_after_the_last_step():
    left = time_left(100, 100, [1.0] * 100, 0)
    assert left.seconds == left.interval_s.low == 0


def test_current_step_is_subtracted_from_time_left():
    begun = time_left(10, 20, [1.0] * 10, 10, since_s=0.4)
    assert begun.seconds == pytest.approx(9.6)
    hangs = time_left(10, 20, [1.0] * 10, 10, since_s=500)
    assert hangs.seconds == pytest.approx(9.0)


@pytest.mark.parametrize("wrong", [{"steps_left": -1}, {"since_s": -1}, {"step_s": [-1.0]}])
def test_negative_values_raise(wrong):
    with pytest.raises(TrainpaceError):
        time_left(**{"step": 1, "total_steps": 2, "step_s": [1.0], "steps_left": 1, **wrong})


seconds = st.floats(1e-6, 1e6)


@given(
    st.lists(seconds, min_size=1, max_size=200),
    st.integers(0, 10**9),
    st.lists(seconds, max_size=5),
    st.floats(0, 1e6),
)
def test_interval_contains_the_estimate(step_s, steps_left, evaluations, since):
    left = time_left(
        len(step_s),
        len(step_s) + steps_left,
        step_s,
        steps_left,
        [Other("evaluation", evaluations, 2)],
        since,
    )
    assert 0 <= left.interval_s.low <= left.seconds <= left.interval_s.high < math.inf
    pace = pace_of(step_s, steps_left).mean_s
    assert min(step_s) * (1 - 1e-9) <= pace <= max(step_s) * (1 + 1e-9)


@given(st.lists(seconds, min_size=1, max_size=200), st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_time_left_scales_with_step_time(step_s, steps_left, factor):
    one = time_left(1, 2, step_s, steps_left)
    other = time_left(1, 2, [factor * s for s in step_s], steps_left)
    assert other.seconds == pytest.approx(factor * one.seconds, rel=1e-3)


@given(st.lists(seconds, min_size=1, max_size=100), st.integers(0, 1000), st.integers(1, 1000))
def test_more_steps_never_take_less_time(step_s, steps_left, more):
    few, many = (time_left(1, 2, step_s, n).seconds for n in (steps_left, steps_left + more))
    assert many >= few * (1 - 1e-9)


@given(st.integers(-3, 50), st.integers(0, 500), st.integers(0, 500))
def test_multiples_in_counts_multiples_within_a_range(every, after, last):
    expected = sum(1 for i in range(after + 1, last + 1) if every > 0 and i % every == 0)
    assert multiples_in(every, after, last) == expected


def test_pace_of_a_long_run_matches_its_mean():
    times = steps_of(7, noise=0.2)
    assert pace_of(times, 1000).mean_s == pytest.approx(statistics.fmean(times), rel=0.02)
