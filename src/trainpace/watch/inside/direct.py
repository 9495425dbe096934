"""Modules whose `forward` the script calls itself, which nn.Module.__call__ never hears of.

Only after the first step is known whether there are any: the step has then changed parameters that belong to no module that was
called. The classes of those modules have their `forward` watched from then on; a script that calls its modules as usual pays for
one look at its parameters. Known limit: the first step itself.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import Step


class DirectCalls:
    """Looks for such modules after the first step, and again where another optimizer begins to make the steps."""

    def __init__(self, recorder: Recorder, calls: Any, by_hand: Callable[[], list[Any]]) -> None:
        """`calls`: what watches the modules that are called; `by_hand`: the parameters of a training without an optimizer."""
        self.recorder, self.calls, self.by_hand = recorder, calls, by_hand
        self.watched: set[type] = set()
        recorder.after_step.append(self.at_step)

    def at_step(self, step: Step) -> None:
        self.recorder.after_step.remove(self.at_step)
        self.look([one for reference in self.recorder.optimizers if (one := reference()) is not None])

    def another(self, optimizer: Any) -> None:
        """Look at a later stage's parameters. Of its models none was noted; those of a known class are watched by their calls."""
        self.look([optimizer], self.calls.classes)

    def look(self, optimizers: list[Any], classes: Collection[type] = ()) -> None:
        with contextlib.suppress(
            Exception
        ):  # parameters of a kind that nobody thought of: they stay the script's own code
            trained = [p for one in optimizers for group in one.param_groups for p in group["params"]] or self.by_hand()
            left = {id(p) for p in trained if p.requires_grad} - _parameters(self.calls.called())
            if not left:
                return
            found = holding(left)
            left -= _parameters(module for module in found if type(module) in classes)
            for kind in {type(module) for module in found if left & _parameters([module])} - self.watched:
                self.watched.add(kind)
                kind.forward = self.calls.charged(kind.forward)


def _parameters(modules: Iterable[Any]) -> set[int]:
    return {id(p) for module in modules for p in module.parameters()}


def holding(parameters: set[int]) -> list[Any]:
    """All modules that hold one of these parameters, given by their ids, themselves or in a module inside them."""
    every: Any = sys.modules["torch"].nn.Module
    # by type, since the attributes of others' objects, such as __class__ of a proxy, may run code of theirs
    modules = [found for found in gc.get_objects() if issubclass(type(found), every)]
    return [module for module in modules if parameters & _parameters([module])]
