import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from trainpace.medians import median_interval, warmup_steps

times = st.lists(st.floats(0.1, 100), min_size=1, max_size=100)


@given(times)
def test_the_interval_holds_the_median(values):
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high
    assert {low, high} <= set(values)


def test_the_interval_holds_the_true_median_nine_times_in_ten():
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = median_interval([rng.lognormvariate(0, 0.2) for _ in range(40)])
        hits += low <= 1.0 <= high
    assert 880 <= hits <= 960


def test_warm_up_is_the_slow_start_and_nothing_else():
    assert warmup_steps([9.0, 5.0, 3.0, *[1.0] * 20]) == 3
    assert warmup_steps([1.0] * 20) == 2
    assert warmup_steps([1.0] * 8 + [5.0] + [1.0] * 11) == 2
    assert warmup_steps([5.0, 1.0]) == 0


@given(times)
def test_at_least_half_of_the_steps_stay(values):
    assert warmup_steps(values) <= len(values) / 2
