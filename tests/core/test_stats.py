import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as students_t

from trainpace.core.stats import (
    median_interval,
    noise_of,
    repeat_interval,
    student_t_95,
    warmup_steps,
)

times = st.lists(st.floats(0.1, 100), min_size=1, max_size=100)


@given(times)
def test_median_interval_contains_median(values):
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high
    assert {low, high} <= set(values)


def test_median_interval_covers_true_median_in_90_percent():
    rng = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = median_interval([rng.lognormvariate(0, 0.2) for _ in range(40)])
        hits += low <= 1.0 <= high
    assert 880 <= hits <= 960


def test_warmup_steps_are_only_the_slow_first_steps():
    assert warmup_steps([9.0, 5.0, 3.0, *[1.0] * 20]) == 3
    assert warmup_steps([1.0] * 20) == 2
    assert warmup_steps([1.0] * 8 + [5.0] + [1.0] * 11) == 2
    assert warmup_steps([5.0, 1.0]) == 0


@given(times)
def test_warmup_is_at_most_half_of_the_steps(values):
    assert warmup_steps(values) <= len(values) / 2


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 20, 100])
def test_student_t_matches_scipy(degrees):
    assert student_t_95(degrees) == pytest.approx(students_t.ppf(0.95, degrees), rel=0.01)


@pytest.mark.parametrize(("sizes", "probes"), [(5, 2), (1, 3), (20, 2), (3, 4)])
def test_repeat_interval_covers_90_percent_of_repeats(sizes, probes):
    draw = np.random.default_rng(0)
    inside = n = 0
    for _ in range(3000 // sizes):
        medians = {
            b: list(100.0 * b * np.exp(draw.normal(0, 0.02, probes))) for b in range(1, sizes + 1)
        }
        noise = noise_of(medians)
        for b, values in medians.items():
            interval = repeat_interval(values, noise)
            inside += interval.low <= 100.0 * b * np.exp(draw.normal(0, 0.02)) <= interval.high
            n += 1
    assert 0.87 < inside / n < 0.935


def test_noise_needs_a_repeated_measurement():
    assert noise_of({1: [1.0], 2: [2.0]}) is None
    noise = noise_of({1: [1.0, 1.02], 2: [2.0]})
    assert noise.degrees == 1
    assert noise.relative == pytest.approx(np.log(1.02) / np.sqrt(2))
