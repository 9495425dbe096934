"""Steps of a training without a torch optimizer: its parameters are changed by hand, or are what a function returns.

Nothing says when such an update is over. A step therefore ends where the model is next called for training (or, without a
module, where the next gradients are computed), if gradients were computed since the step before and the parameters differ from
those of then. Known limits: the last update of a training is followed by no such call, and is not counted; a few numbers of
three parameters stand for all of them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import trainpace.measure as accelerator
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import TRAINPACE

NUMBERS = 16
"""Of each parameter that is looked at: its first and its last so many."""
LEARNT = 8
"""Updates after which, on a device, their rhythm is taken as known: to read a number there makes the host wait."""
FURTHEST = 2000
"""Nodes of a gradient's graph that are searched for parameters."""
State = tuple[Any, ...]


class Updates:
    """Ends the steps of the recorder for as long as no optimizer does."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.find: Callable[[], list[Any]] | None = None
        """What gives the parameters that are looked at; under torch.func they are other tensors at each call."""
        self.without_module = False
        self.state: State = ()
        self.gradients = 0
        self.rhythm: list[int] = []

    @property
    def watches(self) -> bool:
        """Whether no optimizer has made a step; one that does is the better sign."""
        return self.recorder.optimizer is None and not self.recorder.step_is_the_engines

    def parameters(self) -> list[Any]:
        """Those that are looked at although no module with them was called."""
        return self.find() if self.find is not None and self.without_module else []

    def called(self, module: Any) -> None:
        """Before a module computes with gradients, for training."""
        if not self.watches:
            return
        if self.find is None:
            self.find = _parameters_of(module)
        self._looks()

    def computes_gradients(self, of: Any) -> None:
        """Before gradients are computed, while no optimizer was seen. `of`: a loss, or several."""
        if self.find is None:
            found = list(itertools.islice(_leaves(of), 3))
            self.find, self.without_module = (lambda: found) if found else None, bool(found)
        if self.without_module:
            self._looks()
        self.gradients += 1

    def _looks(self) -> None:
        if self.find is None or (self.state and not self.gradients):
            return
        depth = self.recorder.enter(TRAINPACE)
        changed = False
        with contextlib.suppress(
            Exception
        ):  # a kind of tensor that nobody thought of: no step is seen then
            changed = self._changed(self.find())
        self.recorder.leave(depth, "parameters")
        if changed:
            self.rhythm = [*self.rhythm[1 - LEARNT :], self.gradients]
            self.recorder.micro_steps = max(self.recorder.micro_steps, self.gradients)
            self.gradients = 0
            if not self.recorder.steps:
                self.recorder.trail.note({"optimizers": 0})
            self.recorder.ends_step()

    def _changed(self, parameters: list[Any]) -> bool:
        if not parameters:
            return False
        elsewhere = any(p.device.type != "cpu" for p in parameters)
        if elsewhere and len(self.rhythm) == LEARNT and len(set(self.rhythm)) == 1:
            return self.gradients >= self.rhythm[0]
        if any(accelerator.is_capturing(p.device.type) for p in parameters):
            return False
        before, self.state = self.state, tuple(map(_state, parameters))
        return bool(before) and bool(self.gradients) and self.state != before


def _state(parameter: Any) -> State:
    numbers = parameter.detach().reshape(-1)
    return numbers[:NUMBERS].tolist(), numbers[-NUMBERS:].tolist()


def _parameters_of(module: Any) -> Callable[[], list[Any]] | None:
    """What gives the first, the middle and the last parameter of a module that has any."""
    places = [
        (owner, name)
        for owner in module.modules()
        for name, p in owner._parameters.items()
        if _trained(p)
    ]
    if not places:
        return None
    chosen = [places[i] for i in sorted({0, len(places) // 2, len(places) - 1})]
    return lambda: [
        p for owner, name in chosen if _has_numbers(p := _unwrapped(owner._parameters[name]))
    ]


def _has_numbers(parameter: Any) -> bool:
    """Whether they are here: not sharded, not on the meta device, not still to be made."""
    return type(parameter).__name__ in ("Parameter", "Tensor") and parameter.device.type != "meta"


def _trained(parameter: Any) -> bool:
    return _has_numbers(parameter) and bool(parameter.requires_grad)


def _unwrapped(parameter: Any) -> Any:
    """A parameter without the wrappers of torch.func's transformations."""
    import torch

    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(parameter):
        parameter = functions.get_unwrapped(parameter)
    return parameter


def _leaves(of: Any) -> Iterator[Any]:
    """The tensors that these gradients will be of, by the graph behind them."""
    losses = of if isinstance(of, list | tuple) else (of,)
    waiting = [node for loss in losses if (node := getattr(loss, "grad_fn", None)) is not None]
    seen = set()
    for _ in range(FURTHEST):
        if not waiting:
            return
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and _trained(node.variable):
            yield node.variable
        waiting += [next_node for next_node, _ in node.next_functions if next_node is not None]
