"""Difference between two sets of weights."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.run.equivalence import difference, difference_of_files

floats = st.floats(-100, 100, width=32)
models = st.lists(st.lists(floats, min_size=1, max_size=4), min_size=1, max_size=3).map(
    lambda rows: {f"p{i}": np.array(row, dtype=np.float32) for i, row in enumerate(rows)}
)


def test_difference_names_most_different_tensor():
    a = {"weight": np.array([4.0, -2.0]), "bias": np.array([1.0])}
    found = difference(a, {"weight": np.array([4.0, -2.1]), "bias": np.array([1.05])})
    assert found.tensor == "bias"
    assert found.relative == pytest.approx(0.05 / 1.05)


@given(models)
def test_difference_from_itself_is_zero(a):
    assert difference(a, a).relative == 0


@given(models, floats)
def test_difference_is_symmetric_and_scale_invariant(a, shift):
    b = {name: value + np.float32(shift) for name, value in a.items()}
    forth, back = difference(a, b).relative, difference(b, a).relative
    scaled = difference({n: 8 * v for n, v in a.items()}, {n: 8 * v for n, v in b.items()}).relative
    assert forth <= 2 + 1e-12
    assert scaled == pytest.approx(forth)
    if len(a) == 1:
        assert back == pytest.approx(forth)


def test_tiny_tensor_is_compared_with_scale_of_model():
    a = {"weight": np.ones(1000), "bias": np.array([1e-9])}
    assert difference(a, {"weight": np.ones(1000), "bias": np.array([-1e-9])}).relative < 1e-5


def test_nan_weight_gives_nan_difference():
    a = {"w": np.ones(2), "x": np.ones(1)}
    assert math.isnan(difference(a, {"w": np.array([1.0, np.nan]), "x": np.ones(1)}).relative)


def test_difference_of_files_matches_arrays(tmp_path):
    a, b = {"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.2])}
    np.savez(tmp_path / "a.npz", **a)
    np.savez(tmp_path / "b.npz", **b)
    assert difference_of_files(tmp_path / "a.npz", tmp_path / "b.npz") == difference(a, b)
