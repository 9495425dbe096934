"""Modules whose `forward` the script calls itself, which nn.Module.__call__ never hears of.

Only after the first step is known whether there are any: the step has then changed parameters that belong to no module that was
called. The classes of those modules have their `forward` watched from then on, and as it was again where nobody calls it within a
few steps. A script that calls its modules as usual pays for one look at its parameters. Known limits: the first step itself, and
layers of torch itself.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import TRAINPACE, Step

MOST_LOOKS = 3
"""A script may make an optimizer for every sample, and a look goes through all objects of the process."""
WATCHED_FOR = 10
"""Steps within which a class's `forward` is called directly, or is none that is: TorchScript compiles no wrapped one."""


class DirectCalls:
    """Looks for such modules after the first step, and again where another optimizer begins to make the steps."""

    def __init__(self, recorder: Recorder, calls: Any, by_hand: Callable[[], list[Any]]) -> None:
        """`calls`: what watches the modules that are called; `by_hand`: the parameters of a training without an optimizer."""
        self.recorder, self.calls, self.by_hand = recorder, calls, by_hand
        self.looks = 0
        self.watched: dict[type, Callable[..., Any]] = {}
        """The wrapped `forward` of each class."""
        self.used: set[type] = set()
        recorder.after_step.append(self.at_step)

    def at_step(self, step: Step) -> None:
        self.recorder.after_step.remove(self.at_step)
        self.look(
            [one for reference in self.recorder.optimizers if (one := reference()) is not None]
        )

    def another(self, optimizer: Any) -> None:
        """Look at a later stage's parameters; models of a known class are watched by their calls."""
        self.look([optimizer], self.calls.classes)

    def look(self, optimizers: list[Any], classes: Collection[type] = ()) -> None:
        self.looks += 1
        if self.looks > MOST_LOOKS:
            return
        depth = self.recorder.enter(TRAINPACE)
        with contextlib.suppress(
            Exception
        ):  # parameters of an unknown kind stay the script's own code
            self._look(optimizers, classes)
        self.recorder.leave(depth, "direct calls")

    def _look(self, optimizers: list[Any], classes: Collection[type]) -> None:
        trained = [
            p for one in optimizers for group in one.param_groups for p in group["params"]
        ] or self.by_hand()
        left = {id(p) for p in trained if p.requires_grad} - _parameters(self.calls.models_called())
        if not left:
            return
        found = holding(left)
        left -= _parameters(module for module in found if type(module) in classes)
        kinds = {
            type(module) for module in found if left & _parameters([module])
        } - self.watched.keys()
        kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
        for kind in kinds:
            self._watch(kind)
        if kinds:
            self.recorder.once(
                self.recorder.steps + WATCHED_FOR, lambda: self._leave_alone(kinds - self.used)
            )

    def _watch(self, kind: Any) -> None:
        plain, calls, is_compiling = kind.forward, self.calls, self.calls.is_compiling
        charged = calls.charged(plain)

        @functools.wraps(plain)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return plain(module, *args, **kwargs)
            if not calls.inside:
                self.used.add(kind)
            return charged(module, *args, **kwargs)

        self.watched[kind] = kind.forward = forward

    def _leave_alone(self, kinds: Iterable[Any]) -> None:
        for kind in kinds:
            if kind.forward is self.watched[kind]:  # else it is the script's own by now
                kind.forward = self.watched[kind].__wrapped__  # type: ignore[attr-defined]


def _parameters(modules: Iterable[Any]) -> set[int]:
    return {id(p) for module in modules for p in module.parameters()}


def holding(parameters: set[int]) -> list[Any]:
    """All modules that hold one of these parameters, given by their ids, themselves or in a module inside them."""
    every: Any = sys.modules["torch"].nn.Module
    # by type, since the attributes of others' objects, such as __class__ of a proxy, may run code of theirs
    modules = [found for found in gc.get_objects() if issubclass(type(found), every)]
    return [module for module in modules if parameters & _parameters([module])]
