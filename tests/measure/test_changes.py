"""Planted jumps are found with their size. Lines, kinks, smooth curves and outliers have none."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpace.core.outcome import Jump
from trainpace.core.records import from_json, to_json
from trainpace.measure.changes import (
    StepCurve,
    _constant_noise,
    _Fit,
    _relative_noise,
    find_changes,
)
from trainpace.measure.sweep import best_batches

BATCHES = np.arange(1, 71)


def noisy(step_ms, noise, seed):
    return np.asarray(step_ms) * (
        1 + noise * np.random.default_rng(seed).standard_normal(len(step_ms))
    )


def vgg(noise=0.01, seed=0):
    """Step times of VGG. Images are computed in groups of 16, like cuDNN's non-fused Winograd convolution."""
    return noisy(40 + 0.4 * BATCHES + 0.6 * np.ceil(BATCHES / 16) * 16, noise, seed)


def places(curve):
    return [(jump.before, jump.after) for jump in curve.jumps]


@pytest.mark.parametrize("noise", [None, 0.01])
def test_vgg_jumps_and_slopes_are_found(noise):
    curve = find_changes(BATCHES, vgg(), noise)
    assert places(curve) == [(16, 17), (32, 33), (48, 49), (64, 65)]
    for jump in curve.jumps:
        assert jump.tight
        assert jump.low_ms < jump.size_ms < jump.high_ms
        assert jump.size_ms == pytest.approx(9.6, abs=1.5)
        assert abs(jump.z) > 5
        assert jump.percent == pytest.approx(100 * jump.size_ms / curve.fitted_ms[jump.before - 1])
    assert 0.008 < curve.noise < 0.012
    assert [segment.first_batch for segment in curve.segments] == [1, 17, 33, 49, 65]
    assert [segment.last_batch for segment in curve.segments] == [16, 32, 48, 64, 70]
    assert all(
        segment.slope_ms_per_sample == pytest.approx(0.4, abs=0.06) for segment in curve.segments
    )
    assert from_json(to_json(curve), StepCurve) == curve


@given(st.floats(0.1, 10), st.floats(0, 1000), st.integers(1, 60))
@settings(max_examples=30)
def test_noiseless_line_has_no_jumps(slope, start, first):
    curve = find_changes(BATCHES + first - 1, start + slope * (BATCHES + first))
    assert curve.jumps == curve.disturbed == ()
    (segment,) = curve.segments
    assert segment.slope_ms_per_sample == pytest.approx(slope, rel=1e-6)


@given(st.integers(4, 66), st.floats(0.15, 1.0), st.integers(0, 10**6), st.sampled_from([-1, 1]))
@settings(max_examples=40)
def test_big_jumps_are_always_found(at, share, seed, sign):
    line = 50 + 1.0 * BATCHES
    line[at:] *= (1 + share) ** sign
    found = places(find_changes(BATCHES, noisy(line, 0.01, seed)))
    assert (at, at + 1) in found


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=10)
def test_scaled_times_have_scaled_jumps(seed, factor):
    step_ms = vgg(0.01, seed)
    one, other = find_changes(BATCHES, step_ms), find_changes(BATCHES, factor * step_ms)
    assert places(one) == places(other)
    assert [jump.size_ms * factor for jump in one.jumps] == pytest.approx(
        [jump.size_ms for jump in other.jumps], rel=1e-6
    )
    assert one.noise == pytest.approx(other.noise, rel=1e-6)


def test_shifted_batch_sizes_have_shifted_jumps():
    here, there = find_changes(BATCHES, vgg()), find_changes(BATCHES + 100, vgg())
    assert [(before + 100, after + 100) for before, after in places(here)] == places(there)


def share_without_jumps(curve_of, count=60):
    return sum(not find_changes(BATCHES, curve_of(seed)).jumps for seed in range(count)) / count


@pytest.mark.parametrize(
    "step_ms",
    [
        20 + 1.0 * BATCHES,
        np.maximum(30.3, 1.0 * BATCHES),
        np.hypot(30.0, 1.0 * BATCHES),
        (20 + BATCHES) * (1 + BATCHES / 140),
        20 + np.ceil(BATCHES / 2) * 2,
    ],
    ids=["line", "launch-bound", "soft", "quadratic", "odd-even"],
)
def test_smooth_curves_have_no_jumps(step_ms):
    assert share_without_jumps(lambda seed: noisy(step_ms, 0.01, seed)) >= 0.9


def test_launch_bound_start_is_a_bend_without_jump():
    curve = find_changes(BATCHES, noisy(np.maximum(30, 1.0 * BATCHES), 0.01, 4))
    assert curve.jumps == ()
    before, after = curve.segments
    assert 27 <= after.first_batch <= 33
    assert abs(before.slope_ms_per_sample) < 0.1
    assert after.slope_ms_per_sample == pytest.approx(1, abs=0.05)
    assert 27 <= best_batches(curve).launch_bound_until <= 36


def test_disturbed_point_is_not_a_jump():
    step_ms = vgg()
    step_ms[24] *= 1.4
    step_ms[31] *= 1.3
    curve = find_changes(BATCHES, step_ms)
    assert curve.disturbed == (25, 32)
    # The disturbed point at 32 may lie on either side of the jump.
    assert places(curve) == [(16, 17), (31, 33), (48, 49), (64, 65)]
    assert [jump.tight for jump in curve.jumps] == [True, False, True, True]


def test_padding_of_odd_batches_is_not_noise():
    curve = find_changes(BATCHES, noisy(20 + 2.0 * np.ceil(BATCHES / 2), 0.005, 1))
    assert curve.odd_extra_ms == pytest.approx(1, abs=0.15)
    assert curve.noise < 0.008
    assert curve.at(9) == pytest.approx(30, rel=0.01)
    assert curve.at(10) == pytest.approx(30, rel=0.01)


def test_sparse_sweep_brackets_jump_between_measured_sizes():
    sizes = np.array([1, 4, 8, 12, 20, 24, 30, 40, 44, 52, 60, 70])
    step_ms = 50 + sizes + 30.0 * (sizes > 26)
    curve = find_changes(sizes, noisy(step_ms, 0.005, 0), 0.005)
    (jump,) = curve.jumps
    assert (jump.before, jump.after, jump.tight) == (24, 30, False)
    assert curve.at(26) < 85 < curve.at(30)


def test_fitted_lines_meet_at_bend_between_sizes():
    sizes = [1, 4, 8, 12, 16, 20, 36, 40, 48, 56, 60, 70]
    curve = find_changes(sizes, np.maximum(28.0, sizes))
    assert curve.jumps == ()
    assert [curve.at(b) for b in (1, 20, 24, 28, 32, 70)] == pytest.approx(
        [28, 28, 28, 28, 32, 70], rel=0.02
    )


def test_constant_noise_does_not_create_jumps():
    rng = np.random.default_rng(0)
    found = [
        find_changes(BATCHES, BATCHES + 5 + 0.5 * rng.standard_normal(70)).jumps for _ in range(30)
    ]
    assert sum(map(bool, found)) <= 3


def stair(noise=0.0, seed=0, height=10.0):
    """Step times of 20 ms plus 1 ms per sample, and 10 ms more from batch 21 on."""
    sizes = np.arange(1, 41)
    return sizes, noisy(20 + sizes + height * (sizes > 20), noise, seed)


@pytest.mark.parametrize("height", [10.0, -10.0])
def test_noiseless_jump_is_found_exactly(height):
    sizes, step_ms = stair(height=height)
    curve = find_changes(sizes, step_ms)
    (jump,) = curve.jumps
    assert (jump.before, jump.after, jump.tight) == (20, 21, True)
    assert (jump.size_ms, jump.percent) == pytest.approx((height, 100 * height / 40))
    assert np.sign(jump.z) == np.sign(height)
    first, second = curve.segments
    assert (first.first_batch, first.last_batch, second.first_batch, second.last_batch) == (
        1,
        20,
        21,
        40,
    )
    assert (first.first_ms, second.first_ms) == pytest.approx((21, 41 + height))
    assert (first.slope_ms_per_sample, second.slope_ms_per_sample) == pytest.approx((1, 1))
    assert (first.line(1), first.line(20), first.line(30)) == pytest.approx((21, 40, 50))
    assert [curve.at(b) for b in (1, 20, 21, 40, 50)] == pytest.approx(
        [21, 40, 41 + height, 60 + height, 70 + height]
    )
    assert curve.fitted_ms == pytest.approx(tuple(step_ms))
    assert (curve.batches, curve.step_ms) == (tuple(range(1, 41)), tuple(step_ms))
    assert (curve.disturbed, curve.odd_extra_ms) == ((), 0.0)
    # No time is known to better than 0.1 %, and the reported noise says so.
    assert 0.0002 < curve.noise <= 0.001


def test_jump_and_slope_intervals_cover_90_percent():
    curves = [find_changes(*stair(0.01, seed), 0.01) for seed in range(60)]
    jumps = [jump for curve in curves for jump in curve.jumps if jump.before == 20]
    assert len(jumps) > 55
    assert 0.8 <= np.mean([jump.low_ms <= 10 <= jump.high_ms for jump in jumps]) <= 0.97
    slopes = [curve.segments[0] for curve in curves]
    assert 0.8 <= np.mean([slope.slope_low <= 1 <= slope.slope_high for slope in slopes]) <= 0.97


def test_z_of_jump_is_smaller_with_few_points():
    curves = [find_changes(*stair(0.02, seed, height=4.0), 0.02) for seed in range(20)]
    jumps = [jump for curve in curves for jump in curve.jumps]
    assert len(jumps) > 10
    for jump in jumps:
        # With few points, z is Student's t converted to a normal deviation, so it is smaller.
        deviations = jump.size_ms / ((jump.high_ms - jump.low_ms) / 2 / 1.645)
        assert 0.75 * deviations < abs(jump.z) < deviations
        assert abs(jump.z) >= 3


@pytest.mark.parametrize("given", [None, 0.005, 0.03, [0.03] * 40])
def test_noise_estimate_ignores_too_small_given_noise(given):
    told = [find_changes(*stair(0.03, seed), given).noise for seed in range(20)]
    assert np.mean(told) == pytest.approx(0.03, rel=0.1)
    assert 0.02 < min(told) < max(told) < 0.045


@pytest.mark.parametrize(
    ("curve_of", "noise"),
    [
        (lambda x: 20 + x, 0.01),
        (lambda x: 20 + 2 * np.ceil(x / 2), 0.003),
        (lambda x: 20 + x + 10 * (x > 20), 0.01),
    ],
    ids=["line", "odd-even", "stair"],
)
def test_initial_relative_noise_estimate_matches_planted_noise(curve_of, noise):
    """Neither jumps nor padding to even batches count as noise before the curve is fitted."""
    x = BATCHES.astype(float)
    guesses = [_relative_noise(x, noisy(curve_of(x), noise, seed)) for seed in range(60)]
    assert 0.9 < np.mean(guesses) / noise < 1.15


def test_initial_constant_noise_estimate_matches_planted_noise():
    x = BATCHES.astype(float)
    drawn = [0.5 * np.random.default_rng(seed).standard_normal(len(x)) for seed in range(60)]
    assert 0.45 < np.mean([_constant_noise(x, 20 + x + 10 * (x > 20) + z) for z in drawn]) < 0.56


@pytest.mark.parametrize(
    ("t", "free", "z"),
    [
        (2.571, 5, 1.960),
        (2.228, 10, 1.960),
        (4.587, 10, 3.291),
        (3.850, 20, 3.291),
        (1.984, 100, 1.960),
        (1.812, 10, 1.645),
    ],
)
def test_z_matches_student_t_quantiles(t, free, z):
    """Expected values are table quantiles of Student's t and the normal quantiles of the same probability."""
    fit = SimpleNamespace(
        values=np.array([0.0, 3.0 * t + 1]), covariance=np.diag([1.0, 9.0]), free=free
    )
    assert _Fit.z(fit, 1, 1.0) == pytest.approx(z, rel=0.005)
    assert _Fit.z(fit, 1, 6.0 * t + 1) == pytest.approx(-z, rel=0.005)


def test_bend_and_jump_of_one_curve_are_separated():
    sizes = np.array([1, 4, 8, 12, 16, 20, 36, 40, 44, 48, 52, 56, 60, 64, 70, 74, 80, 84])
    curve = find_changes(sizes, np.maximum(28.0, sizes) + 40 * (sizes > 60))
    assert places(curve) == [(60, 64)]
    assert [curve.at(b) for b in (20, 24, 32, 60, 62, 64)] == pytest.approx(
        [28, 28, 32, 60, 62, 104], rel=0.02
    )


def test_measured_jump_takes_cause_from_forecast_jump_in_bracket():
    def forecast(batch, causes):
        return Jump(
            before=batch - 1, batch=batch, before_ms=1.0, after_ms=2.0, excess_ms=1.0, causes=causes
        )

    sizes = np.array([1, 4, 8, 12, 16, 20, 24, 28, 32, 36])
    (jump,) = find_changes(sizes, 50.0 + sizes + 30.0 * (sizes > 16)).jumps
    assert (jump.before, jump.after, jump.tight) == (16, 20, False)
    unnamed, before, within, after = (
        forecast(17, ()),
        forecast(16, ("a",)),
        forecast(20, ("b",)),
        forecast(21, ("c",)),
    )
    assert jump.cause_among([unnamed, before, within, after]) == within
    assert jump.cause_among([unnamed, before, after]) is None


def test_five_points_are_interpolated_linearly():
    curve = find_changes([1, 2, 4, 7, 9], [5.0, 9.0, 7.0, 1.0, 4.0], [0.01, 0.02, 0.02, 0.03, 0.04])
    pieces = [
        (s.first_batch, s.last_batch, s.first_ms, s.slope_ms_per_sample) for s in curve.segments
    ]
    assert pieces == [(1, 1, 5.0, 4.0), (2, 2, 9.0, -1.0), (4, 4, 7.0, -2.0), (7, 9, 1.0, 1.5)]
    assert all(s.slope_low is None and s.slope_high is None for s in curve.segments)
    assert (curve.noise, curve.disturbed) == (0.02, ())
    assert [curve.at(b) for b in (3, 5, 8, 10)] == pytest.approx([8, 5, 2.5, 5.5])
    assert find_changes([1, 2, 3, 4, 5], [1.0] * 5).noise == 0
    # Six points are enough for a fit.
    assert len(find_changes([1, 2, 3, 4, 5, 6], [1.0] * 6).segments) == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_points_are_not_smoothed(count):
    curve = find_changes(range(1, count + 1), [5.0, 9.0, 7.0, 1.0, 4.0][:count])
    assert curve.fitted_ms == curve.step_ms
    assert curve.jumps == ()
    assert [curve.at(b) for b in range(1, count + 1)] == pytest.approx(list(curve.step_ms))
    assert from_json(to_json(curve), StepCurve) == curve


def test_best_batch_is_right_before_last_jump():
    """60 images in groups of 16 cost as much as 64, so the largest batch is not the best."""
    best = best_batches(find_changes(BATCHES, vgg(0.005)))
    assert [choice.batch for choice in best.before_jumps] == [16, 32, 48, 64]
    assert best.best.batch in (63, 64)
    assert best.best.samples_per_second == pytest.approx(1e3 * best.best.batch / best.best.step_ms)
    assert 12 <= best.launch_bound_until <= 15  # 1.1 x 50 ms at 13


def test_equal_throughput_selects_smaller_batch():
    flat_out = find_changes(BATCHES, noisy(np.maximum(20, 1.0 * BATCHES), 0.01, 0))
    assert best_batches(flat_out).best.batch <= 24


@pytest.mark.parametrize(
    ("count", "noise", "known"),
    [(20, 0.01, True), (40, 0.02, True), (40, 0.02, False), (70, 0.1, True)],
)
def test_least_jump_is_detected_but_a_third_is_not(count, noise, known):
    rng, sizes = np.random.default_rng(7), np.arange(1, count + 1)
    line, given = 10.0 + sizes, noise if known else None

    def seen(share):
        hits = 0
        for _ in range(40):
            at = int(rng.integers(count // 5, count - count // 5))
            step_ms = np.where(sizes > at, line + share(at) * line[at - 1], line)
            curve = find_changes(sizes, step_ms * np.exp(noise * rng.standard_normal(count)), given)
            hits += any(abs(jump.before - at) <= 3 for jump in curve.jumps)
        return hits / 40

    least = find_changes(sizes, line * np.exp(noise * rng.standard_normal(count)), given).least_jump
    assert seen(lambda at: least) >= 0.8
    assert seen(lambda at: least / 3) <= 0.5


def test_least_jump_grows_with_noise_until_none():
    rng = np.random.default_rng(1)
    z = rng.standard_normal(len(BATCHES))
    least = [
        find_changes(BATCHES, (20 + BATCHES) * np.exp(noise * z), noise).least_jump
        for noise in (0.005, 0.02, 0.1, 0.6)
    ]
    assert least[:3] == sorted(least[:3])
    assert least[3] is None
    assert find_changes(BATCHES[:5], 20.0 + BATCHES[:5]).least_jump is None
