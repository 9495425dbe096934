"""The gradient noise scale is unbiased, has a calibrated interval, and is None without a signal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import TrainpaceError
from trainpace.job import (
    GradientNorms,
    learning_rate_for_noise_scale,
    noise_scale,
    samples_factor,
    steps_factor,
)

SMALL, BIG = 8, 32


def drawn(seed, steps, signal=1.0, deviation=2.0, dims=50):
    """Draw norms of normal gradients around a vector of length `signal`. The noise scale is dims x deviation^2 / signal^2."""
    rng = np.random.default_rng(seed)
    true = np.full(dims, signal / np.sqrt(dims))
    parts = true + rng.normal(0, deviation / np.sqrt(SMALL), size=(steps, BIG // SMALL, dims))
    small = np.square(parts).sum(axis=-1)[:, 0]
    big = np.square(parts.mean(axis=1)).sum(axis=-1)
    return GradientNorms(
        small_batch=SMALL, big_batch=BIG, small_squared=tuple(small), big_squared=tuple(big)
    )


def test_noise_scale_recovers_known_value():
    found = noise_scale(drawn(0, 4000))
    assert found.samples == pytest.approx(200, rel=0.1)
    assert found.gradient_squared == pytest.approx(1, rel=0.1)
    assert found.covariance_trace == pytest.approx(200, rel=0.05)


def test_noise_scale_interval_covers_truth_in_90_percent():
    scales = [noise_scale(drawn(seed, 400)) for seed in range(100)]
    held = [s.low <= 200 <= (s.high or np.inf) for s in scales if s.samples is not None]
    assert len(held) > 95
    assert 0.8 <= np.mean(held) <= 0.98


def test_noise_scale_is_none_without_signal():
    found = noise_scale(drawn(1, 50, signal=1e-6))
    assert found.samples is None
    assert found.reason
    # the measured values are still reported: 50 dimensions with deviation 2
    assert found.steps == 50
    assert found.covariance_trace == pytest.approx(200, rel=0.1)
    assert abs(found.gradient_squared) < 1


def test_noise_scale_is_zero_without_noise():
    same = GradientNorms(
        small_batch=1, big_batch=2, small_squared=(3.0,) * 20, big_squared=(3.0,) * 20
    )
    assert noise_scale(same).samples == 0


def test_identical_steps_give_interval_of_zero_width():
    alike = GradientNorms(
        small_batch=1, big_batch=2, small_squared=(4.0,) * 20, big_squared=(3.0,) * 20
    )
    found = noise_scale(alike)
    # |G|^2 = 2 x 3 - 4, and tr(Sigma) = (4 - 3) / (1 - 1/2)
    assert (found.gradient_squared, found.covariance_trace) == pytest.approx((2, 2))
    assert (found.low, found.samples, found.high) == pytest.approx((1, 1, 1))


def test_weak_gradient_widens_upper_bound_of_noise_scale():
    """4.9 % of the resampled means have no gradient signal. They count as an infinite scale, not as a small one."""
    found = noise_scale(drawn(20, 60, signal=0.8))
    assert 200 < found.low < 200 / 0.8**2 < found.samples < 1000
    assert 10_000 < found.high < np.inf


def test_noise_scale_below_one_sample_is_reported():
    found = noise_scale(drawn(0, 100, deviation=0.05))
    assert found.samples == pytest.approx(50 * 0.05**2, rel=0.5)
    assert 0 < found.low < 0.125 < found.high < 1


def test_noise_scale_is_deterministic():
    assert noise_scale(drawn(3, 40)) == noise_scale(drawn(3, 40))


def test_autocorrelated_steps_widen_interval():
    """100 steps in groups of 5 equal ones carry the information of 20, so the interval is about sqrt(5) times wider."""
    few = drawn(5, 80)
    repeated = GradientNorms(
        small_batch=SMALL,
        big_batch=BIG,
        small_squared=tuple(np.repeat(few.small_squared, 5)),
        big_squared=tuple(np.repeat(few.big_squared, 5)),
    )
    shuffled = np.random.default_rng(0).permutation(400)
    mixed = GradientNorms(
        small_batch=SMALL,
        big_batch=BIG,
        small_squared=tuple(np.array(repeated.small_squared)[shuffled]),
        big_squared=tuple(np.array(repeated.big_squared)[shuffled]),
    )
    in_runs, apart = noise_scale(repeated), noise_scale(mixed)
    assert in_runs.samples == pytest.approx(apart.samples)
    assert 1.5 < (in_runs.high - in_runs.low) / (apart.high - apart.low) < 2.6


@pytest.mark.parametrize(
    "wrong",
    [
        {"small_batch": 32},
        {"small_batch": 0},
        {"small_squared": (1.0,)},
        {"big_squared": (float("nan"), 1.0)},
    ],
)
def test_invalid_gradient_norms_are_rejected(wrong):
    right = {
        "small_batch": 8,
        "big_batch": 32,
        "small_squared": (1.0, 1.0),
        "big_squared": (0.0, 1.0),
    }
    assert GradientNorms(**right).big_squared == (0.0, 1.0)
    with pytest.raises(TrainpaceError):
        GradientNorms(**right | wrong)


def test_noise_scale_needs_ten_steps():
    with pytest.raises(TrainpaceError):
        noise_scale(drawn(0, 9))
    assert noise_scale(drawn(0, 10, deviation=0.1)).steps == 10


positive = st.floats(1, 1e6)


@given(positive, positive, positive)
def test_larger_batch_trades_fewer_steps_for_more_samples(noise, old, new):
    steps, samples = steps_factor(noise, old, new), samples_factor(noise, old, new)
    assert samples == pytest.approx(steps * new / old)
    if new >= old:
        assert old / new * (1 - 1e-9) <= steps <= 1 + 1e-9 <= samples + 2e-9


def test_learning_rate_factors_approach_limits_at_extreme_noise_scales():
    rule = learning_rate_for_noise_scale(256, 1024, 1e9)
    assert rule.sgd_factor == pytest.approx(4, rel=1e-4)
    assert rule.adam_factor == pytest.approx(2, rel=1e-4)
    assert learning_rate_for_noise_scale(256, 1024, 1e-3).sgd_factor == pytest.approx(1, rel=1e-4)
    assert steps_factor(1000, 1000, 2000) == pytest.approx(0.75)
    assert samples_factor(0, 8, 32) == 4


@pytest.mark.parametrize("factor", [steps_factor, samples_factor])
@pytest.mark.parametrize(
    ("noise", "old", "new"),
    [
        (-1, 8, 8),
        (float("inf"), 8, 8),
        (100, 0, 8),
        (100, 8, 0),
        (100, float("nan"), 8),
        (0, 8, float("inf")),
    ],
)
def test_invalid_noise_scales_and_batches_are_rejected(factor, noise, old, new):
    with pytest.raises(TrainpaceError):
        factor(noise, old, new)


def test_learning_rate_for_zero_batch_is_rejected():
    with pytest.raises(TrainpaceError):
        learning_rate_for_noise_scale(8, 0, 1)
