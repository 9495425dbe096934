"""Adaptive search finds the same jumps as a full sweep with few probes, and always ends."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpace.measure.sweep import NOISE, coarse_grid, fitted_curve, next_batch, noise_between

ASKED = list(range(1, 71))


def run(step_ms, asked=ASKED, noise=0.01, seed=0, hints=(), fits=10**9, disturbed=None):
    """Probe until the search ends. Return (measured, failed, batch sizes in the order probed)."""
    rng = np.random.default_rng(seed)
    measured, failed, order = {}, [], []
    while (batch := next_batch(asked, measured, hints, failed, seed)) is not None:
        assert batch in asked
        assert len(order) < 3 * len(asked) + 20, "it does not end"
        order.append(batch)
        if batch > fits:
            failed.append(batch)
            continue
        first = batch not in measured
        times = measured.setdefault(batch, [])
        times.append(
            step_ms(batch)
            * (1 + noise * rng.standard_normal())
            * (1.4 if first and batch == disturbed else 1)
        )
    return measured, failed, order


def vgg(batch):
    return 40 + 0.4 * batch + 0.6 * -(-batch // 16) * 16


def places(curve):
    return [(jump.before, jump.after) for jump in curve.jumps]


def test_vgg_jumps_are_found_with_two_fifths_of_probes():
    right = 0
    for seed in range(12):
        measured, _, order = run(vgg, noise=0.005, seed=seed)
        assert len(order) <= 28
        right += places(fitted_curve(measured)) == [(16, 17), (32, 33), (48, 49), (64, 65)]
    assert right >= 10


def test_hinted_batch_sizes_are_probed():
    found = []
    for seed in range(8):
        measured, _, order = run(vgg, seed=seed, hints=[17, 33, 49, 65])
        assert {16, 17, 32, 33, 48, 49, 64, 65} <= set(measured)
        assert len(order) <= 28
        found.append(places(fitted_curve(measured)))
    assert found.count([(16, 17), (32, 33), (48, 49), (64, 65)]) >= 7


def test_wrong_hints_do_not_create_jumps():
    found = [
        fitted_curve(run(lambda b: 20 + b, seed=seed, hints=[17, 33])[0]).jumps
        for seed in range(10)
    ]
    assert sum(map(bool, found)) <= 1


@pytest.mark.parametrize(
    "step_ms",
    [
        lambda b: 30 + b,
        lambda b: max(28.0, b),
        lambda b: 20 + 2 * -(-b // 2),
        lambda b: (30 + b) * (1 + b / 200),
    ],
    ids=["line", "launch-bound", "odd-even", "curved"],
)
def test_curves_without_jumps_take_few_probes(step_ms):
    clean, errors = 0, []
    for seed in range(10):
        measured, _, order = run(step_ms, seed=seed)
        assert len(order) <= 28
        curve = fitted_curve(measured)
        clean += not curve.jumps
        errors.append(max(abs(curve.at(b) / step_ms(b) - 1) for b in ASKED))
    assert clean >= 8
    assert statistics.median(errors) < 0.03


def test_coarse_grid_mixes_odd_and_even_batches():
    grid = coarse_grid(ASKED)
    assert 4 <= sum(batch % 2 for batch in grid) <= len(grid) - 4
    assert grid[0] == 1
    assert grid[-1] == 70


def test_disturbed_probe_is_repeated():
    measured, _, order = run(lambda b: 30 + b, disturbed=39)
    assert order.count(39) >= 2
    assert not fitted_curve(measured).jumps


@pytest.mark.parametrize("fits", [1, 2, 37, 69])
def test_search_finds_largest_batch_that_fits(fits):
    measured, failed, order = run(vgg, fits=fits)
    assert max(measured) == fits
    assert min(failed) == fits + 1
    # Each out-of-memory probe lowers the ceiling permanently.
    for i, batch in enumerate(order):
        assert batch < min((b for b in order[:i] if b > fits), default=10**9)


def test_search_is_empty_if_no_batch_fits():
    assert run(vgg, fits=0)[0] == {}


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40, unique=True),
    st.integers(0, 10**6),
    st.floats(0, 0.2),
    st.integers(0, 600),
    st.lists(st.integers(1, 500), max_size=3),
)
@settings(max_examples=40)
def test_search_ends_within_requested_sizes(asked, seed, noise, fits, hints):
    rng = np.random.default_rng(seed)
    times = {batch: float(rng.uniform(1, 100)) for batch in asked}
    measured, _, order = run(times.__getitem__, asked, noise, seed, hints, fits)
    assert set(measured) <= set(asked)
    assert len(order) <= max(-(-2 * len(asked) // 5), 12)
    if len(asked) <= 6 and fits >= max(asked):
        assert set(measured) == set(asked)


def test_next_batch_ignores_order_of_inputs():
    measured = {1: [10.0], 70: [80.0]}
    assert next_batch(ASKED, measured) == next_batch(ASKED[::-1], dict(reversed(measured.items())))


def test_noise_is_estimated_from_repeats():
    rng = np.random.default_rng(0)
    measured = {b: list(100 * (1 + 0.03 * rng.standard_normal(4))) for b in range(1, 40)}
    assert noise_between(measured) == pytest.approx(0.03, rel=0.2)
    assert noise_between({1: [1.0], 2: [2.0]}) == NOISE
