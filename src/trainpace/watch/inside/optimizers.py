"""The steps of torch's optimizers, and where a training step ends."""

import contextlib
import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.capture import CAPTURED_IN_STEP
from trainpace.watch.inside.recorder import Recorder, get_ident
from trainpace.watch.inside.trail import OPTIMIZER, OTHER

ANOTHER_STAGE = 20
"""Steps of an optimizer without one of the first. A judgement, nothing measured: more than critics make for a generator in most
GANs, which is 5 in the paper of WGAN, and few enough to lose little of a stage."""


class Optimizers:
    """Charges the steps of every torch optimizer; a training step ends with that of the first optimizer seen, or of one that has
    made many since, as where another stage of the training has begun."""

    def __init__(
        self, recorder: Recorder, another: Callable[[Any], None] = lambda optimizer: None
    ) -> None:
        """`another`: called where another optimizer begins to end the steps."""
        self.recorder, self.another = recorder, another
        self.first: weakref.ref[Any] | None = None
        self.depths: list[tuple[weakref.ref[Any], int]] = []
        self.known: set[int] = set()
        self.stepped: Counter[int] = Counter()
        self.most = 1
        self.were_first: dict[int, weakref.ref[Any]] = {}
        """Optimizers that ended steps, by their ids: one that does so again begins no other training."""

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Returns the arguments of `step` with a closure that is none of the optimizer's own time, as where Lightning trains in
        it; None where there is no closure."""
        self.begins(optimizer)
        if len(args) == 1 and not kwargs:
            return None
        # what else is callable, such as a module, is an argument of an optimizer of its own kind
        given = [self._charged(one) for one in args[1:2]]
        return (*args[:1], *given, *args[2:]), {
            k: self._charged(v) if k == "closure" else v for k, v in kwargs.items()
        }

    def _charged(self, closure: Any) -> Any:
        """A closure, charged to the script's own code but for the parts in it; anything else as it is."""
        of_functions = (types.FunctionType, types.MethodType, functools.partial)
        return (
            self.recorder.wraps(closure, OTHER, "closure")
            if isinstance(closure, of_functions)
            else closure
        )

    def begins(self, optimizer: Any) -> None:
        """Begin to charge a step of this optimizer."""
        recorder = self.recorder
        if get_ident() != recorder.thread:
            if recorder.begins_again is not None:
                recorder.begins_again()
            elif (recorder.steps and not recorder.thread_is_over) or recorder.thread == -1:
                return
            recorder.thread, recorder.thread_is_over = get_ident(), False
            recorder.trains_in_thread()
        if self.first is None or self.first() is None:
            self.ends_steps(optimizer)
            with contextlib.suppress(Exception):
                _note_optimizer(recorder, optimizer)
        if recorder.steps <= CAPTURED_IN_STEP and id(optimizer) not in self.known:
            self.known.add(id(optimizer))
            recorder.optimizers.append(weakref.ref(optimizer))
        for i, (owner, depth) in enumerate(self.depths):
            # its step raised, as when memory was full, and the script went on
            if owner() is None or owner() is optimizer:
                recorder.leave(depth, type(optimizer).__name__)
                del self.depths[i:]
                break
        self.depths.append((weakref.ref(optimizer), recorder.enter(OPTIMIZER)))

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        if get_ident() != recorder.thread:
            return
        while self.depths:
            owner, depth = self.depths.pop()
            if owner() is optimizer:
                recorder.leave(depth, type(optimizer).__name__)
                self.stepped[id(optimizer)] += 1
                if recorder.step_is_the_engines or self.first is None:
                    break
                if self.stepped[id(optimizer)] >= ANOTHER_STAGE and self.first() is not optimizer:
                    self.ends_steps(optimizer)
                if self.first() is optimizer:
                    if len(self.stepped) > self.most:
                        self.most = len(self.stepped)
                        recorder.trail.note({"optimizers": self.most})
                    self.stepped.clear()
                    recorder.ends_step()
                break

    def ends_steps(self, optimizer: Any) -> None:
        """Steps end with this one's from now on. Where it is another than before, another training begins, or another stage."""
        before = self.were_first.get(id(optimizer))
        anew = self.first is not None and (before is None or before() is not optimizer)
        self.first = self.were_first[id(optimizer)] = weakref.ref(optimizer)
        if anew:
            if self.recorder.steps:
                self.recorder.trail.note({"begins_anew": True})
            self.another(optimizer)


def _note_optimizer(recorder: Recorder, optimizer: Any) -> None:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    recorder.trail.note(
        {
            "optimizer": type(optimizer).__name__,
            "optimizer_settings": {
                k: v for k, v in group.items() if isinstance(v, int | float | bool | None)
            },
            "optimizer_tensors": sum(len(g["params"]) for g in optimizer.param_groups),
            "optimizer_numbers": sum(
                p.numel() for g in optimizer.param_groups for p in g["params"]
            ),
        }
    )
    recorder.optimizer = weakref.ref(optimizer)
