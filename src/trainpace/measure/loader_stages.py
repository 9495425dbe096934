"""What each part of ``__getitem__`` costs, and which of them could be computed once for all epochs.

Every transform is timed where it runs, within real samples; the rest of the time is loading and decoding. A transform is random
if it draws from a global random state, or gives two outputs for one input. One that draws from a generator of its own, seeded
by its input alone, is deterministic. Of a dataset without transforms that can be timed, Python's profiler times the functions.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainpace.core.user_file import is_users
from trainpace.measure.loader_measurement import Stage
from trainpace.measure.loader_timing import LoaderTarget, one_thread
from trainpace.shards import determinism

REST = "the rest of __getitem__"
TRIALS = 6
WATCHED = 6
LEAST_SHARE = 0.01
MOST = 12
OTHER = "everything else"

Function = tuple[str, int, str]


def transform_stages(
    target: LoaderTarget, indices: Sequence[int], passes: int = 3
) -> tuple[Stage, ...]:
    """The transforms in the order in which they run, after the rest of ``__getitem__``; ms a sample. Empty where the dataset
    holds no transforms that can be seen from outside."""
    places = determinism.find_places(target.dataset)
    if not places:
        return ()
    clock = _Clock()
    with one_thread(), determinism.replaced(places, partial(_Timed, clock)):
        watched = [_watch(target, clock, index) for index in indices[:WATCHED]]
        clock.watching = False
        for timed in clock.ran:
            timed.wall_s = timed.cpu_s = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(passes):
            for index in indices:
                target.sample(index)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    per_sample = 1e3 / (passes * len(indices))
    rest = Stage(
        name=REST,
        kind="",
        wall_ms=max(0.0, wall - sum(t.wall_s for t in clock.ran)) * per_sample,
        cpu_ms=max(0.0, cpu - sum(t.cpu_s for t in clock.ran)) * per_sample,
        random=any(watched)
        or (not any(t.random for t in clock.ran) and is_random(target, indices[0])),
    )
    random: list[tuple[str, str]] = []
    stages: dict[tuple[Any, ...], Stage] = {(): replace(rest, offline=not rest.random)}
    order: Counter[str] = Counter()
    for t in clock.ran:
        random += [(t.kind, t.branch)] if t.random else []
        # image and target go through chains of their own, and so do the samples of two datasets side by side
        before = any(kind == t.kind and branch.startswith(t.branch) for kind, branch in random)
        stage = Stage(
            name=t.name,
            kind=t.kind,
            wall_ms=t.wall_s * per_sample,
            cpu_ms=t.cpu_s * per_sample,
            random=t.random,
            offline=not (rest.random or before),
        )
        order[t.branch] += 1
        side_by_side = re.sub(r"\[[0-9]+\]", "[]", t.branch)
        key = (side_by_side, order[t.branch], stage.name, stage.kind)
        stages[key] = _added(stages[key], stage) if key in stages else stage
    return tuple(stages.values())


def _added(one: Stage, other: Stage) -> Stage:
    """One transform in two datasets side by side. What is random in one of them was only not seen to be so in the other."""
    return replace(
        one,
        wall_ms=one.wall_ms + other.wall_ms,
        cpu_ms=(one.cpu_ms or 0.0) + (other.cpu_ms or 0.0),
        random=one.random or other.random,
        offline=one.offline and other.offline,
    )


def dataset_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float
) -> tuple[Stage, ...]:
    """Of a random sample of `wall_ms` the part that comes out of deterministic datasets behind wrappers, and the rest. Empty
    where there is no such part."""
    with (
        one_thread(),
        contextlib.suppress(Exception),
    ):  # a wrapper may ask what kind of dataset it holds
        if not is_random(target, indices[0]):
            return ()
        found = list(
            _deterministic(
                target, list(determinism.held_datasets(target.dataset)), indices[:WATCHED]
            )
        )
        calls: list[_Held] = []

        def timed(place: determinism.Place) -> _Held:
            calls.append(_Held(place.transform))
            return calls[-1]

        with determinism.replaced(found, timed):
            start = time.perf_counter()
            for index in indices:
                target.sample(index)
            total = time.perf_counter() - start
        outer, seconds = type(target.dataset).__name__, defaultdict[str, float](float)
        for one in calls:
            seconds[f"{type(one.held).__name__} inside {outer}"] += min(one.wall_s, total)
        inner = [
            Stage(
                name=name, kind="dataset", wall_ms=wall_ms * s / total, random=False, offline=True
            )
            for name, s in seconds.items()
        ]
        rest = Stage(
            name=REST,
            kind="",
            wall_ms=max(0.0, wall_ms - sum(s.wall_ms for s in inner)),
            random=True,
        )
        return (*inner, rest) if inner else ()
    return ()


def _deterministic(
    target: LoaderTarget, places: list[determinism.Place], indices: Sequence[int]
) -> Iterator[determinism.Place]:
    """The outermost datasets among `places`, and in those that they hold, whose samples are the same every time."""
    held: dict[int, _Held] = {}
    with determinism.replaced(
        places, lambda place: held.setdefault(id(place.transform), _Held(place.transform))
    ):
        for index in indices:
            target.sample(index)
    for place in places:
        asked = held[id(place.transform)].asked
        if asked and not any(_gives_two(place.transform, key) for key in asked):
            yield place
        else:
            yield from _deterministic(
                target, list(determinism.held_datasets(place.transform)), indices
            )


def _gives_two(dataset: Any, key: Any) -> bool:
    first, drew = determinism.under_seed(0, lambda: dataset[key])
    again, _ = determinism.under_seed(1, lambda: dataset[key])
    return bool(drew) or not determinism.same(first, again)


class _Held:
    """A stand-in for a dataset inside another: what it was asked for, and how long its samples took."""

    def __init__(self, held: Any) -> None:
        self.held, self.asked, self.wall_s = held, list[Any](), 0.0

    def __getitem__(self, key: Any) -> Any:
        self.asked.append(key)
        start = time.perf_counter()
        try:
            return self.held[key]
        finally:
            self.wall_s += time.perf_counter() - start

    def __len__(self) -> int:
        return len(self.held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


class _Clock:
    """The state that all timed transforms share. While `watching`, they are tried for randomness in place of being timed."""

    def __init__(self) -> None:
        self.ran: list[_Timed] = []  # in the order of their first calls
        self.watching = True
        self.last_state: Any = None
        self.drew_outside = False


class _Timed:
    """A stand-in for a transform that adds up its time."""

    def __init__(self, clock: _Clock, place: determinism.Place) -> None:
        self._transform, self._clock = place.transform, clock
        self.name, self.kind, self.branch = place.name, place.kind, place.branch
        self.wall_s = self.cpu_s = 0.0
        self.random = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self not in self._clock.ran:
            self._clock.ran.append(self)
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
        before = determinism.states()
        clock.drew_outside |= clock.last_state is not None and before != clock.last_state
        if not self.random:
            self.random = determinism.gives_two_results(self._transform, args, kwargs, TRIALS)
        out = self._transform(*args, **kwargs)
        clock.last_state = determinism.states()
        self.random |= before != clock.last_state
        return out


def _watch(target: LoaderTarget, clock: _Clock, index: int) -> bool:
    """True where ``__getitem__`` draws a random number outside all transforms."""
    clock.last_state, clock.drew_outside = determinism.states(), False
    target.sample(index)
    return bool(clock.drew_outside or determinism.states() != clock.last_state)


def is_random(target: LoaderTarget, index: int) -> bool:
    return _gives_two(target.dataset, index)


def function_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float, random: bool = True
) -> tuple[Stage, ...]:
    """The heaviest functions of a sample of `wall_ms`, heaviest first, then all others together.

    The user's own functions count without what they call, and each library function that they call with all that it calls (user
    code that a library calls back counts twice). The profiler's shares are applied to the time that a sample takes without it.
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
    return tuple(
        Stage(name=n, kind="function", wall_ms=wall_ms * s / total, offline=not random)
        for n, s in named
    )


def _library_name(function: Function) -> str:
    file, _, name = function
    if file == "~":
        return name.strip("<>").removeprefix("built-in method ")
    place = Path(file)
    module = place.parent.name if place.name == "__init__.py" else place.stem
    return f"{module}.{name}"
