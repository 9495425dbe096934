"""What each transform within ``__getitem__`` costs, and which of them could be computed once for all epochs.

Every transform is timed where it runs, within real samples; the rest of the time is loading and decoding. A transform is random
if it draws from a global random state, or gives two outputs for one input. One that draws from a generator of its own, seeded
by its input alone, is deterministic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trainpace.loader.records import Stage
from trainpace.loader.samples import one_thread
from trainpace.loader.target import LoaderTarget
from trainpace.loader.transform_places import Place, find_places, replaced
from trainpace.shards import random_states

REST = "the rest of __getitem__"
TRIALS = 6
WATCHED = 6


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
    from msgspec.structs import replace

    broken = {kind for kind in {s.kind for s in stages} if stages[0].random}
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
    """True where a sample as a whole depends on random numbers."""
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
