"""The states of Python's, numpy's and torch's random numbers: whether code drew from them, and the same numbers again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def states() -> tuple[Any, ...]:
    """Comparable with ==; equal before and after code that drew no random number."""
    of_numpy: Any = np.random.get_state()
    keys = (of_numpy[1].tobytes(), *of_numpy[2:])
    return random.getstate(), keys, torch.get_rng_state().numpy().tobytes()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the states as they were found."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)


def seed(value: int) -> None:
    """Seed all three."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def same(a: Any, b: Any) -> bool:
    """Whether two samples are equal: tensors, arrays, pictures, numbers and text, in tuples, lists and dicts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "tobytes") and hasattr(a, "size"):  # a PIL picture
        return bool(a.size == b.size and a.tobytes() == b.tobytes())
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
