"""What each part of ``__getitem__`` costs, and which of them could be computed once for all epochs.

Every transform is timed where it runs, within real samples; the rest of the time is loading and decoding. A transform is random
if it draws from a global random state, or gives two outputs for one input. One that draws from a generator of its own, seeded
by its input alone, is deterministic. Of a dataset without transforms that can be timed, Python's profiler times the functions.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.loader.records import Stage
from trainpace.loader.samples import LoaderTarget, one_thread
from trainpace.shards import random_states
from trainpace.user_file import is_users

REST = "the rest of __getitem__"
TRIALS = 6
WATCHED = 6
_NAMES = ("transform", "target_transform", "transforms", "augment", "augmentation", "preprocess", "pipeline")
_DEPTH = 4
LEAST_SHARE = 0.01
MOST = 12
OTHER = "everything else"

Function = tuple[str, int, str]


def transform_stages(target: LoaderTarget, indices: Sequence[int], passes: int = 3) -> tuple[Stage, ...]:
    """The transforms in the order in which they run, after the rest of ``__getitem__``; ms a sample.

    Empty where the dataset holds no transforms that can be seen from outside.
    """
    places = find_places(target.dataset)
    if not places:
        return ()
    clock = _Clock()
    with one_thread(), replaced(places, clock.wrapper):
        watched = [_watch(target, clock, index) for index in indices[:WATCHED]]
        clock.watching = False
        clock.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(passes):
            for index in indices:
                target.sample(index)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    per_sample = 1e3 / (passes * len(indices))
    ran = sorted((t for t in clock.timed if t.order is not None), key=lambda t: t.order or 0)
    rest = Stage(
        name=REST, kind="", wall_ms=max(0.0, wall - sum(t.wall_s for t in ran)) * per_sample,
        cpu_ms=max(0.0, cpu - sum(t.cpu_s for t in ran)) * per_sample,
        random=any(watched) or (not any(t.random for t in ran) and is_random(target, indices[0])),
    )  # fmt: skip
    stages = [
        Stage(name=t.name, kind=t.kind, wall_ms=t.wall_s * per_sample, cpu_ms=t.cpu_s * per_sample, random=t.random)
        for t in ran
    ]
    return _with_prefix([rest, *stages])


def _with_prefix(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Mark the stages before which nothing in their chain is random (image and target go through chains of their own)."""
    broken = {s.kind for s in stages} if stages[0].random else set()
    marked = []
    for stage in stages:
        if stage.random:
            broken.add(stage.kind)
        marked.append(replace(stage, offline=stage.kind not in broken))
    return tuple(marked)


class _Clock:
    """The state that all timed transforms share. While `watching`, they are tried for randomness in place of being timed."""

    def __init__(self) -> None:
        self.timed: list[_Timed] = []
        self.watching = True
        self.calls = 0
        self.last_state: Any = None
        self.drew_outside = False

    def wrapper(self, place: Place) -> _Timed:
        timed = _Timed(self, place)
        self.timed.append(timed)
        return timed

    def reset(self) -> None:
        for timed in self.timed:
            timed.wall_s = timed.cpu_s = 0.0


class _Timed:
    """A stand-in for a transform that adds up its time."""

    def __init__(self, clock: _Clock, place: Place) -> None:
        self._transform, self._clock = place.transform, clock
        self.name, self.kind = _name(place.transform), place.kind
        self.wall_s = self.cpu_s = 0.0
        self.order: int | None = None
        self.random = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.order is None:
            self.order = self._clock.calls
        self._clock.calls += 1
        if self._clock.watching:
            return self._watched(args, kwargs)
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)

    def __repr__(self) -> str:
        return repr(self._transform)

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the transform also under other seeds, on copies of the input, since transforms may write into it."""
        clock = self._clock
        before = random_states.states()
        clock.drew_outside |= clock.last_state is not None and before != clock.last_state
        if not self.random:
            self.random = random_states.gives_two_results(self._transform, args, kwargs, TRIALS)
        out = self._transform(*args, **kwargs)
        clock.last_state = random_states.states()
        self.random |= before != clock.last_state
        return out


def _watch(target: LoaderTarget, clock: _Clock, index: int) -> bool:
    """True where ``__getitem__`` draws a random number outside all transforms."""
    clock.last_state, clock.drew_outside = random_states.states(), False
    target.sample(index)
    return bool(clock.drew_outside or random_states.states() != clock.last_state)


def is_random(target: LoaderTarget, index: int) -> bool:
    with random_states.restored():
        random_states.seed(0)
        before = random_states.states()
        first = target.sample(index)
        if random_states.states() != before:
            return True
        random_states.seed(1)
        return not random_states.same(first, target.sample(index))


def _name(transform: Any) -> str:
    named = getattr(transform, "__name__", None) or type(transform).__name__
    if named != "<lambda>":
        return str(named)
    return f"lambda at line {transform.__code__.co_firstlineno}"


# ---- where a dataset holds its transforms, recognised by their names and types, so that any library's ``Compose`` is one


class Place(NamedTuple):
    """`container` holds the transform under `key`: an attribute, or an item where `is_item`. `kind` is the outermost name.

    The same transform may lie in several places (torchvision's datasets keep their `transform` again inside `transforms`).
    """

    container: Any
    key: Any
    is_item: bool
    kind: str
    transform: Any


def find_places(dataset: Any) -> list[Place]:
    """Every place of every innermost transform, in the order in which they would run."""
    return list(_within(dataset, "", _DEPTH, set()))


@contextlib.contextmanager
def replaced(places: list[Place], wrap: Callable[[Place], Any]) -> Iterator[None]:
    """Put `wrap(place)`, called once for each transform, in every place of that transform, and the transforms back at the end."""
    wrapped: dict[int, Any] = {}
    changed: list[Place] = []
    try:
        for place in places:
            new = wrapped.get(id(place.transform))
            if new is None:
                new = wrapped[id(place.transform)] = wrap(place)
            with contextlib.suppress(AttributeError, TypeError):  # a frozen holder's transform counts as the rest
                _put(place, new)
                changed.append(place)
        yield
    finally:
        for place in changed:
            _put(place, place.transform)


def _put(place: Place, value: Any) -> None:
    if place.is_item:
        place.container[place.key] = value
    elif isinstance(getattr(place.container, "_modules", None), dict) and place.key in place.container._modules:
        place.container._modules[place.key] = value  # nn.Module refuses what is no module as a child by name
    else:
        setattr(place.container, place.key, value)


def _within(holder: Any, kind: str, depth: int, seen: set[int]) -> Iterator[Place]:
    if id(holder) in seen or depth == 0:
        return
    seen.add(id(holder))
    for name, value in _attributes(holder):
        inner_kind = kind or name
        if name in _NAMES or _is_composed(value):
            if value is not None:
                yield from _transforms(holder, name, False, inner_kind, value, seen)
        elif name in ("dataset", "datasets", "_dataset", "base"):
            for part in value if isinstance(value, list | tuple) else [value]:
                yield from _within(part, "", depth - 1, seen)


def _transforms(container: Any, key: Any, is_item: bool, kind: str, value: Any, seen: set[int]) -> Iterator[Place]:
    items = value if isinstance(value, list) else getattr(value, "transforms", None) if _is_composed(value) else None
    modules = getattr(value, "_modules", None)
    if isinstance(items, list):
        for i, item in enumerate(items):
            yield from _transforms(items, i, True, kind, item, seen)
    elif type(value).__name__ == "Sequential" and isinstance(modules, dict):
        for name, item in list(modules.items()):
            yield from _transforms(modules, name, True, kind, item, seen)
    elif type(value).__name__ == "StandardTransform":  # torchvision's pair of the two
        yield from _within(value, "", _DEPTH, seen)
    elif callable(value) and not isinstance(value, type):
        yield Place(container, key, is_item, kind, value)


def _is_composed(value: Any) -> bool:
    """A list of transforms that all run. One that chooses among them (RandomChoice, OneOf) is a transform of its own."""
    return isinstance(getattr(value, "transforms", None), list) and "Compose" in type(value).__name__


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    attributes = dict(getattr(holder, "__dict__", {}))
    modules = attributes.get("_modules")
    return list((attributes | modules if isinstance(modules, dict) else attributes).items())


# ---- functions


def function_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float, random: bool = True
) -> tuple[Stage, ...]:
    """The heaviest functions of a sample of `wall_ms`, heaviest first, then all others together.

    Every ms counts once: the user's own functions without what they call, and each library function that they call with all that
    it calls (user code that a library calls back is counted twice). The profiler slows many small calls more than few large ones,
    so that its shares are applied to the time that a sample takes without it.
    `random`: the sample as a whole depends on random numbers; single functions are not tried.
    """
    profiler = cProfile.Profile()
    with one_thread():
        profiler.enable()
        try:
            for index in indices:
                target.sample(index)
        finally:
            profiler.disable()
    stats: dict[Function, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    seconds: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in stats.items():
        if is_users(function[0]):
            seconds[f"{function[2]} ({Path(function[0]).name} line {function[1]})"] += own_s
            continue
        for caller, (_, _, _, with_callees_s) in callers.items():
            if is_users(caller[0]):
                seconds[f"{_library_name(function)} in {caller[2]}"] += with_callees_s
    total = sum(seconds.values())
    if not total:
        return ()
    shown = [(name, s) for name, s in seconds.most_common(MOST) if s >= LEAST_SHARE * total]
    rest = total - sum(s for _, s in shown)
    named = [*shown, (OTHER, rest)] if rest > LEAST_SHARE * total else shown
    return tuple(Stage(name=n, kind="function", wall_ms=wall_ms * s / total, offline=not random) for n, s in named)


def _library_name(function: Function) -> str:
    file, _, name = function
    if file == "~":
        return name.strip("<>").removeprefix("built-in method ")
    place = Path(file)
    module = place.parent.name if place.name == "__init__.py" else place.stem
    return f"{module}.{name}"
