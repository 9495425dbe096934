"""Is a sample the same whenever it is computed? And if not, which part of it is random."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from trainpace.datapath.samples import Encoded, encode, same
from trainpace.errors import TrainpaceError

_SEEDS = (1, 20_011)
_MORE_SEEDS = range(2, 18)
_MOST_LINES = 20_000


_HINT = "Leave the random part out of the dataset, and give it to ShardDataset(folder, transform=...), where it stays online."


class NotDeterministic(TrainpaceError):
    """A sample comes out differently when it is computed again."""


def computed_twice(dataset: Any, index: int, file: str) -> Encoded:
    """The sample, if it comes out the same under differently seeded generators of Python, numpy and torch.

    Raises `NotDeterministic`, naming the transform, the line or the field that is random. Whatever the dataset itself raises
    goes through. `file` is the user's source file.
    """
    first, drew = _under(_SEEDS[0], lambda: encode(dataset[index]))
    # where a generator was used, twice the same may be luck: a flip is not made every second time
    for seed in (_SEEDS[1], *(_MORE_SEEDS if drew else ())):
        again, drew_again = _under(seed, lambda: encode(dataset[index]))
        differing = same(first, again)
        drew += [name for name in drew_again if name not in drew]
        if differing:
            raise NotDeterministic(_in_words(dataset, index, file, first, again, differing, drew), _HINT)
    return first


def _in_words(
    dataset: Any, index: int, file: str, a: Encoded, b: Encoded, differing: list[str], drew: list[str]
) -> str:
    fields = "every part" if len(differing) == len(a.layout.fields) > 1 else ", ".join(differing)
    where = "" if a.layout.structure == "0" else f" in {fields},"
    message = (
        f"sample {index} comes out differently each time it is computed ({f'{where}{_by_how_much(a, b)}'.strip(' ,')})"
    )
    transform = random_transform(dataset, index)
    if transform is not None:
        return f"{message}: {transform} is random."
    line = _drawing_line(dataset, index, Path(file).resolve().parent)
    if line is not None:
        return f"{message}: {line}."
    if drew:
        return f"{message}: it draws from the generator of {' and '.join(drew)}."
    return f"{message}, and not by a generator of Python, numpy or torch: by one of its own, the time, or what it did before."


def random_transform(dataset: Any, index: int) -> str | None:
    """The first member of a Compose-like list (`.transforms`) in the dataset that gives two results for one input."""
    for name, owner in _composes(dataset, "the dataset", 3, set()):
        members = list(owner.transforms)
        inputs: dict[int, Any] = {}
        try:
            owner.transforms = [_Recording(member, i, inputs) for i, member in enumerate(members)]
            with contextlib.suppress(Exception), _generators_kept():
                dataset[index]
        finally:
            owner.transforms = members
        for i, member in enumerate(members):
            if i in inputs and not hasattr(member, "transforms") and _is_random(member, inputs[i]):
                what = type(member).__name__ if not hasattr(member, "__name__") else member.__name__
                return f"{what}, transform {i + 1} of {len(members)} in {name},"
    return None


class _Recording:
    """Calls a transform, and keeps a copy of what it was given."""

    def __init__(self, member: Any, number: int, inputs: dict[int, Any]) -> None:
        self._member, self._number, self._inputs = member, number, inputs

    def __call__(self, *values: Any) -> Any:
        self._inputs[self._number] = copy.deepcopy(values)
        return self._member(*values)


def _is_random(member: Callable[..., Any], values: tuple[Any, ...]) -> bool:
    first = None
    for seed in (*_SEEDS, *_MORE_SEEDS):
        try:
            result, _ = _under(seed, lambda: encode(_plain(member(*copy.deepcopy(values)))))
        except Exception:  # what no column keeps cannot be compared; another part is then named
            return False
        if first is not None and same(first, result):
            return True
        first = first or result
    return False


def _plain(value: Any) -> Any:
    return value if not isinstance(value, tuple) else list(value)


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


def _drawing_line(dataset: Any, index: int, project: Path) -> str | None:
    """The line of the user's code during which a generator moved on, found by looking at the generators after every line."""
    found: list[str] = []
    seen = 0
    before = ("", 0, "")
    state = _states()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal state, seen, before
        file = frame.f_code.co_filename
        if not file.startswith(str(project)) or "site-packages" in file:
            return None
        seen += 1
        if found or seen > _MOST_LINES:
            return None
        now = _states()
        moved = [name for name in now if now[name] != state.get(name, now[name])]
        if moved and before[1]:
            name, line, function = before
            found.append(
                f"{Path(name).name} line {line} ({function}) draws from the generator of {' and '.join(moved)}"
            )
        state, before = now, (file, frame.f_lineno, frame.f_code.co_name)
        return trace

    with _generators_kept(), contextlib.suppress(Exception):
        traced = sys.gettrace()
        sys.settrace(trace)
        try:
            dataset[index]
        finally:
            sys.settrace(traced)
    return found[0] if found else None


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
    with _generators_kept():
        random.seed(seed)
        np.random.seed(seed)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.manual_seed(seed)
        before = _states()
        result = work()
        after = _states()
    return result, [name for name in before if before[name] != after[name]]


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    torch = sys.modules.get("torch")
    python, numpy = random.getstate(), np.random.get_state()
    state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None and state is not None:
            torch.set_rng_state(state)


def _states() -> dict[str, Any]:
    _, keys, position, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {"Python": random.getstate(), "numpy": (keys.tobytes(), position, *rest)}  # type: ignore[union-attr]
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states
