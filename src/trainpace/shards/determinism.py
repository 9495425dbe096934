"""Check that a sample is the same whenever it is computed, and find the part that is random where it is not."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from trainpace.errors import TrainpaceError
from trainpace.shards import random_states
from trainpace.shards.samples import Encoded, encode, same, spoken
from trainpace.user_file import is_users

_SEEDS = (1, 20_011)
_MORE_SEEDS = range(2, 18)
_TRIALS = 18
_MOST_LINES = 20_000
_HINT = (
    "Leave the random part, and what follows it, out of the dataset, and give both to ShardDataset(folder, transform=...),"
    " where they stay online."
)


class NotDeterministic(TrainpaceError):
    """A sample comes out differently when it is computed again."""


def computed_twice(dataset: Any, index: int) -> Encoded:
    """The sample, if it comes out the same under differently seeded generators of Python, numpy and torch.

    Raises `NotDeterministic`, naming the transform, the line or the field that is random. Exceptions of the dataset itself
    pass through.
    """
    first, drew = _under(_SEEDS[0], lambda: encode(dataset[index]))
    # with a random generator, two equal results may be chance: a flip happens only every second time
    for seed in (_SEEDS[1], *(_MORE_SEEDS if drew else ())):
        again, drew_again = _under(seed, lambda: encode(dataset[index]))
        differing = same(first, again)
        drew += [name for name in drew_again if name not in drew]
        if differing:
            raise NotDeterministic(_in_words(dataset, index, first, again, differing, drew), _HINT)
    return first


def _in_words(dataset: Any, index: int, a: Encoded, b: Encoded, differing: list[str], drew: list[str]) -> str:
    fields = "every part" if len(differing) == len(a.layout.fields) > 1 else ", ".join(map(spoken, differing))
    where = "" if a.layout.structure == "0" else f" in {fields},"
    message = (
        f"sample {index} comes out differently each time it is computed ({f'{where}{_by_how_much(a, b)}'.strip(' ,')})"
    )
    if cause := random_transform(dataset, index) or _drawing_line(dataset, index):
        return f"{message}: {cause}."
    if drew:
        return f"{message}: it draws from the generator of {' and '.join(drew)}."
    return f"{message}, and not by a generator of Python, numpy or torch: by one of its own, the time, or what it did before."


def random_transform(dataset: Any, index: int) -> str | None:
    """The first member of a Compose-like list (`.transforms`) in the dataset that gives two results for one input."""
    for name, owner in _composes(dataset, "the dataset", 3, set()):
        members = list(owner.transforms)
        inputs: dict[int, Any] = {}
        try:
            owner.transforms = [_recording(member, i, inputs) for i, member in enumerate(members)]
            with contextlib.suppress(Exception), random_states.restored():
                dataset[index]
        finally:
            owner.transforms = members
        for i, member in enumerate(members):
            tried = i in inputs and not hasattr(member, "transforms")
            if tried and random_states.gives_two_results(member, inputs[i], {}, _TRIALS):
                what = getattr(member, "__name__", type(member).__name__)
                return f"{what}, transform {i + 1} of {len(members)} in {name}, is random"
    return None


def _recording(member: Any, number: int, inputs: dict[int, Any]) -> Callable[..., Any]:
    """The transform, which also stores a copy of its input."""

    def call(*values: Any) -> Any:
        inputs[number] = copy.deepcopy(values)
        return member(*values)

    return call


def _composes(owner: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """(name, object with a list `.transforms`) within `owner`, the inner ones first."""
    if id(owner) in seen or depth < 0:
        return
    seen.add(id(owner))
    state = getattr(owner, "__dict__", None)
    for attribute, value in list(state.items()) if isinstance(state, dict) else []:
        inside = f"{name}.{attribute}".removeprefix("the dataset.")
        for i, member in enumerate(value if isinstance(value, list | tuple) and len(value) < 100 else [value]):
            step = f"{inside}[{i}]" if isinstance(value, list | tuple) else inside
            if hasattr(member, "__dict__") and not isinstance(member, type):
                yield from _composes(member, step, depth - 1, seen)
    if isinstance(getattr(owner, "transforms", None), list) and isinstance(state, dict) and "transforms" in state:
        yield name, owner


def _drawing_line(dataset: Any, index: int) -> str | None:
    """The line of the user's code during which a generator moved on, found by looking at the generators after every line."""
    message: str | None = None
    seen, before, state = 0, ("", 0, ""), random_states.states()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal message, seen, before, state
        file = frame.f_code.co_filename
        if message or seen >= _MOST_LINES or not is_users(file):
            return None
        seen += 1
        now = random_states.states()
        if before[1] and (moved := random_states.moved(state, now)):
            name, line, function = before
            message = f"{Path(name).name} line {line} ({function}) draws from the generator of {' and '.join(moved)}"
        state, before = now, (file, frame.f_lineno, frame.f_code.co_name)
        return trace

    with random_states.restored(), contextlib.suppress(Exception):
        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            dataset[index]
        finally:
            sys.settrace(traced)
    return message


def _by_how_much(a: Encoded, b: Encoded) -> str:
    for x, y, s, t in zip(a.values, b.values, a.shapes, b.shapes, strict=False):
        if s != t:
            return f" its shape: {s} and {t}"
        if isinstance(x, bytes) and isinstance(y, bytes) and x != y and len(x) == len(y):
            share = np.mean(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))
            return f" in {share:.0%} of its bytes" if share >= 0.005 else " in a few of its bytes"
    return ""


def _under(seed: int, work: Callable[[], Encoded]) -> tuple[Encoded, list[str]]:
    """The result of `work` under this seed, and the names of the generators that it drew from."""
    with random_states.restored():
        random_states.seed(seed)
        before = random_states.states()
        result = work()
        return result, random_states.moved(before, random_states.states())
