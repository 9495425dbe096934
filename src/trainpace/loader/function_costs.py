"""What each function within ``__getitem__`` costs, for datasets without transforms that can be timed.

Python's profiler counts every ms once here: the user's own functions without what they call, and each library function that
they call with all that it calls (user code that a library calls back is counted twice). The profiler slows many small calls
more than few large ones, so its shares are applied to the time that a sample takes without it.
"""

import cProfile
import pstats
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainpace.loader.records import Stage
from trainpace.loader.samples import one_thread
from trainpace.loader.target import LoaderTarget
from trainpace.user_file import is_users

LEAST_SHARE = 0.01
MOST = 12
OTHER = "everything else"

Function = tuple[str, int, str]


def function_stages(
    target: LoaderTarget, indices: Sequence[int], wall_ms: float, random: bool = True
) -> tuple[Stage, ...]:
    """The heaviest functions of a sample of `wall_ms`, heaviest first, then all others together.

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
    seconds: dict[str, float] = {}
    for function, (_, _, own_s, _, callers) in stats.items():
        if is_users(function[0]):
            name = f"{function[2]} ({Path(function[0]).name} line {function[1]})"
            seconds[name] = seconds.get(name, 0.0) + own_s
            continue
        for caller, (_, _, _, with_callees_s) in callers.items():
            if is_users(caller[0]):
                name = f"{_library_name(function)} in {caller[2]}"
                seconds[name] = seconds.get(name, 0.0) + with_callees_s
    total = sum(seconds.values())
    if not total:
        return ()
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(name, s) for name, s in ranked[:MOST] if s >= LEAST_SHARE * total]
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
