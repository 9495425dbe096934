"""The states of Python's, numpy's and torch's random numbers: whether code drew from them, and the same numbers again.

torch counts only where the user's code has loaded it: a process without it starts a second sooner.
"""

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def states() -> dict[str, Any]:
    """The states by name, comparable with ==; equal before and after code that draws no random number."""
    of_numpy: Any = np.random.get_state()
    generators = {"Python": random.getstate(), "numpy": (of_numpy[1].tobytes(), *of_numpy[2:])}
    torch = sys.modules.get("torch")
    return generators if torch is None else {**generators, "torch": torch.get_rng_state().numpy().tobytes()}


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the generators that were drawn from between two `states`."""
    return [name for name, state in after.items() if before.get(name, state) != state]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the states at the end of the block."""
    torch = sys.modules.get("torch")
    python, numpy = random.getstate(), np.random.get_state()
    of_torch = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(value)


def gives_two_results(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trials: int) -> bool:
    """True where `call` gives different results for copies of one input under `trials` seeds; else or untried, False."""
    first: Any = None
    with restored(), contextlib.suppress(Exception):
        for trial in range(trials):
            copied_args, copied_kwargs = copy.deepcopy((args, kwargs))
            seed(trial)
            out = call(*copied_args, **copied_kwargs)
            if trial and not same(first, out):
                return True
            first = out if trial == 0 else first
    return False


def same(a: Any, b: Any) -> bool:
    """Equality of samples: tensors, arrays, pictures, numbers and text, in tuples, lists and dicts."""
    torch = sys.modules.get("torch")
    if type(a) is not type(b):
        return False
    if torch is not None and isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
