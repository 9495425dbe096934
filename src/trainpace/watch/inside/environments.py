"""Reinforcement learning: tell the collection of experience from an evaluation.

Both call the policy without gradients. stable-baselines3 even sets the policy to evaluation mode
before it collects. The recorder looks for the environment that the calling functions step through.
The first environment it finds is the one that training learns from. Calls of the policy for it
collect experience, and calls for another environment evaluate.

Known limit: an evaluation in the training's own environment counts as collecting experience.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from trainpace.watch.inside.script import MOST_FRAMES, frames_from

_TORCH = "torch"
"""Package whose functions hold no environment."""


class Environments:
    """Decides for each call of a policy without gradients whether it collects experience."""

    def __init__(self) -> None:
        self._training: int | None = None
        """Id of the training's environment."""
        self._collects: dict[tuple[int, ...], bool] = {}
        """Decisions by the code of the calling functions. A decision holds for later calls."""

    def collects(self) -> bool:
        """Return True if the calling functions step through the training's environment."""
        frames = [
            frame
            for frame in islice(frames_from(sys._getframe(1)), MOST_FRAMES)
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in (_TORCH, "trainpace")
        ]
        key = tuple(id(frame.f_code) for frame in frames)
        if key not in self._collects:
            self._collects[key] = self._finds_training(frames)
        return self._collects[key]

    def _finds_training(self, frames: list[FrameType]) -> bool:
        found = next(_environments(frames), None)
        if found is None:
            return False
        if self._training is None:
            self._training = id(found)
        return id(found) == self._training


def _environments(frames: list[FrameType]) -> Iterator[Any]:
    """Yield the environments in the variables of functions, then in their objects' attributes.

    Variables come first, because an evaluation gets its own environment as an argument, while its
    agent may hold the environment of the training.
    """
    variables = [value for frame in frames for value in list(frame.f_locals.values())]
    yield from filter(is_environment, variables)
    for value in variables:
        if issubclass(type(value), ModuleType | type):
            continue
        with contextlib.suppress(AttributeError):
            inner = object.__getattribute__(value, "__dict__")
            yield from filter(is_environment, list(inner.values()))


def is_environment(value: Any) -> bool:
    """Return True if the object has `reset` and `step(action)`, as in Gym and dm_env.

    Optimizers, schedulers and timers have a `step` that needs no argument.
    """
    kind = type(value)
    step = getattr(kind, "step", None)
    if not (callable(step) and callable(getattr(kind, "reset", None))):
        return False
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) > 1  # The first one is `self`.
