"""The interval for a repeat: does it hold what it says?"""

import numpy as np
import pytest
from scipy.stats import t as students_t

from trainpace.forecast.intervals import student_t_95
from trainpace.measure.repeats import noise_of, repeat_interval


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 20, 100])
def test_student(degrees):
    assert student_t_95(degrees) == pytest.approx(students_t.ppf(0.95, degrees), rel=0.01)


@pytest.mark.parametrize(("sizes", "probes"), [(5, 2), (1, 3), (20, 2), (3, 4)])
def test_nine_of_ten_repeats_fall_inside(sizes, probes):
    draw = np.random.default_rng(0)
    inside = n = 0
    for _ in range(3000 // sizes):
        medians = {b: list(100.0 * b * np.exp(draw.normal(0, 0.02, probes))) for b in range(1, sizes + 1)}
        noise = noise_of(medians)
        for b, values in medians.items():
            interval = repeat_interval(values, noise)
            inside += interval.low <= 100.0 * b * np.exp(draw.normal(0, 0.02)) <= interval.high
            n += 1
    assert 0.87 < inside / n < 0.935


def test_noise_needs_a_repeat():
    assert noise_of({1: [1.0], 2: [2.0]}) is None
    noise = noise_of({1: [1.0, 1.02], 2: [2.0]})
    assert noise.degrees == 1
    assert noise.relative == pytest.approx(np.log(1.02) / np.sqrt(2))
