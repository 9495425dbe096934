"""Preprocessing of examples/thesis: alignment by landmarks, and the hull around them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

for package in ("yaml", "scipy"):
    pytest.importorskip(package)
FILE = Path(__file__).parents[1] / "examples" / "thesis" / "train.py"
SPEC = importlib.util.spec_from_file_location("thesis_train", FILE)
train = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(train)


@given(st.floats(-3.1, 3.1), st.floats(0.1, 4.0), st.floats(-2, 2), st.floats(-2, 2))
def test_similarity_transform_is_recovered(angle, scale, right, down):
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    moved = train.TEMPLATE @ turn.T + [right, down]
    found = train.similarity(train.TEMPLATE, moved)
    np.testing.assert_allclose(found, np.column_stack([turn, [right, down]]), atol=1e-4)


def test_mirrored_face_is_rotated_not_mirrored():
    found = train.similarity(train.TEMPLATE, train.TEMPLATE * [-1, 1])
    assert np.linalg.det(found[:, :2]) > 0


def test_hull_mask_contains_landmarks_but_not_corners():
    mask = train.hull_mask(train.TEMPLATE, 48)
    assert all(mask[int(48 * y), int(48 * x)] for x, y in train.TEMPLATE)
    assert not mask[[0, 0, -1, -1], [0, -1, 0, -1]].any()
    assert (
        train.hull_mask(np.full((5, 2), 0.5, dtype=np.float32), 48).mean() < 0.1
    )  # all marks in one place


def test_aligned_face_matches_the_template():
    draw = np.random.default_rng(0)
    photo = Image.fromarray(draw.integers(0, 255, (200, 200, 3), dtype=np.uint8))
    face, marks = train.aligned(photo)
    again, _ = train.aligned(photo)
    assert (face.shape, face.dtype, marks.shape) == ((48, 48, 3), np.uint8, (5, 2))
    np.testing.assert_array_equal(face, again)
    # Least squares: the center of the landmarks is that of the template.
    np.testing.assert_allclose(marks.mean(0), train.TEMPLATE.mean(0), atol=1e-5)
