"""The trend of a batch sweep: its shape, its linear fit, and its knee."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainpace.core.stats import trend_of

BATCHES = list(range(1, 65))
X = np.array(BATCHES, dtype=float)


def trend(step_ms, batches=BATCHES):
    return trend_of(batches, step_ms, 1e3 * np.array(batches) / step_ms)


@given(st.floats(0.1, 100), st.floats(0.1, 10))
def test_linear_trend_recovers_slope_and_fixed_time(fixed, slope):
    found = trend(fixed + slope * X)
    assert found.shape == "linear"
    assert found.fixed_ms == pytest.approx(fixed, rel=1e-6, abs=1e-6 * slope)
    assert found.ms_per_sample == pytest.approx(slope, rel=1e-6)
    assert found.r_squared == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("step_ms", "shape"),
    [
        (5 + X + 0.1 * X**2, "quadratic"),
        (5000 + 0.01 * (X - 10) * (X - 30) * (X - 60), "linear"),
        (500 + 0.01 * (X - 10) * (X - 30) * (X - 60), "cubic"),
        (np.where(X > 32, 50.0, 1.0), "none of these"),
    ],
    ids=["parabola", "nearly flat", "cubic", "a cliff"],
)
def test_trend_shape_is_simplest_that_fits(step_ms, shape):
    assert trend(step_ms).shape == shape


@given(st.floats(0, 200), st.floats(0.1, 5))
@example(24.0, 0.1)  # the throughput at batch 40 is exactly 5 % below the best
def test_knee_is_smallest_batch_within_5_percent_of_best(fixed, slope):
    found = trend(fixed + slope * X)
    rate = X / (fixed + slope * X)
    assert rate[found.knee_batch - 1] >= 0.95 * rate.max() - 1e-12
    assert (rate[: found.knee_batch - 1] < 0.95 * rate.max() + 1e-12).all()
    assert found.best_samples_per_second == pytest.approx(1e3 * rate.max())


def test_trend_reports_worst_and_uneven_batches():
    step_ms = 10 + X + 8.0 * (X > 16)
    found = trend(step_ms)
    assert found.worst_batch == 1
    line = found.fixed_ms + found.ms_per_sample
    assert found.worst_error == pytest.approx(line / step_ms[0] - 1)
    assert found.uneven == ((16, pytest.approx(8.0 / 26.0)),)


def test_three_batch_sizes_have_no_trend():
    assert trend_of([1, 2, 3], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) is None
