"""Hooks in torch itself: modules, backward, optimizers, copies and checkpoints.

A training step ends with a step of the first optimizer.

A training without a torch optimizer changes its parameters by hand, or a function returns new
parameters. Nothing marks the end of such an update. The step then ends when the model is next
called for training, if gradients were computed since the last step and the parameters have changed.
Without a module, it ends when the next gradients are computed.

Known limits: the last update of such a training is not counted, because no call follows it. Only a
few values of three parameters are compared.
"""

import builtins
import contextlib
import functools
import gc
import itertools
import logging
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import trainpace.measure as accelerator
from trainpace.watch.inside import files, ranks, trials
from trainpace.watch.inside.capture import CAPTURED_IN_STEP, Capture
from trainpace.watch.inside.event_log import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    HOST_TO_DEVICE,
    LOADER_START,
    LOGGING,
    OPTIMIZER,
    OTHER,
    SYNCHRONISATION,
    TRAINPACE,
    Step,
)
from trainpace.watch.inside.loaders import Padding
from trainpace.watch.inside.recorder import EVALUATING, TRAINING, Recorder, get_ident

NUMBERS = 16
"""Number of values that are compared at the beginning and at the end of each parameter."""
LEARNT = 8
"""Updates after which the number of backward passes per update is known.

From then on, a parameter on a device is not read, because reading makes the host wait.
"""
FURTHEST = 2000
"""Most nodes of autograd's graph that are searched for parameters."""
State = tuple[Any, ...]


class Updates:
    """Detects updates without an optimizer, and ends the recorder's steps at them.

    It is active until an optimizer makes a step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.find: Callable[[], list[Any]] | None = None
        """Returns the parameters to compare. Under torch.func, each call has other tensors."""
        self.without_module = False
        self.state: State = ()
        self.gradients = 0
        self.rhythm: list[int] = []

    @property
    def watches(self) -> bool:
        """True until an optimizer makes a step. An optimizer's steps are more reliable."""
        return self.recorder.optimizer is None and not self.recorder.step_is_the_engines

    def parameters(self) -> list[Any]:
        """Return the compared parameters if no module with these parameters was called."""
        return self.find() if self.find is not None and self.without_module else []

    def called(self, module: Any) -> None:
        """Handle a module that is about to compute with gradients, for training."""
        if not self.watches:
            return
        if self.find is None:
            self.find = _parameters_of(module)
        self._looks()

    def computes_gradients(self, of: Any) -> None:
        """Handle losses whose gradients are about to be computed without an optimizer."""
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
        # If the kind of tensor is unknown, the step is not detected.
        with contextlib.suppress(Exception):
            changed = self._changed(self.find())
        self.recorder.leave(depth, "parameters")
        if changed:
            self.rhythm = [*self.rhythm[1 - LEARNT :], self.gradients]
            self.recorder.micro_steps = max(self.recorder.micro_steps, self.gradients)
            self.gradients = 0
            if not self.recorder.steps:
                self.recorder.log.note({"optimizers": 0})
            self.recorder.ends_step()

    def _changed(self, parameters: list[Any]) -> bool:
        if not parameters:
            return False
        on_device = any(p.device.type != "cpu" for p in parameters)
        if on_device and len(self.rhythm) == LEARNT and len(set(self.rhythm)) == 1:
            return self.gradients >= self.rhythm[0]
        if any(accelerator.is_capturing(p.device.type) for p in parameters):
            return False
        before, self.state = self.state, tuple(map(_state, parameters))
        return bool(before) and bool(self.gradients) and self.state != before


def _state(parameter: Any) -> State:
    numbers = parameter.detach().reshape(-1)
    return numbers[:NUMBERS].tolist(), numbers[-NUMBERS:].tolist()


def _parameters_of(module: Any) -> Callable[[], list[Any]] | None:
    """Return a function that returns the first, middle and last parameter of a module."""
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
    """Return True if the values are here: not sharded, not on the meta device, and not lazy."""
    return type(parameter).__name__ in ("Parameter", "Tensor") and parameter.device.type != "meta"


def _trained(parameter: Any) -> bool:
    return _has_numbers(parameter) and bool(parameter.requires_grad)


def _unwrapped(parameter: Any) -> Any:
    """Remove the wrappers of torch.func's transformations from a parameter."""
    import torch

    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(parameter):
        parameter = functions.get_unwrapped(parameter)
    return parameter


def _leaves(of: Any) -> Iterator[Any]:
    """Yield the parameters behind these losses, found in autograd's graph."""
    losses = of if isinstance(of, list | tuple) else (of,)
    waiting: list[Any] = [getattr(loss, "grad_fn", None) for loss in losses]
    seen: set[Any] = {None}
    for _ in range(FURTHEST):
        if not waiting:
            return
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and _trained(node.variable):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


# ---- optimizers

ANOTHER_STAGE = 20
"""Steps of another optimizer after which it ends the training's steps.

The first optimizer must not have made a step meanwhile. The number is a judgement, not a
measurement. In most GANs, critics make fewer steps per generator step (5 in the WGAN paper). Little
of a new stage is lost.
"""


class Optimizers:
    """Charges the steps of every torch optimizer.

    A training step ends with a step of the first optimizer. If another optimizer has made many
    steps since then, a new stage of the training has begun, and that optimizer ends the steps.
    """

    def __init__(
        self, recorder: Recorder, another: Callable[[Any], None] = lambda optimizer: None
    ) -> None:
        """Set up for one recorder.

        Args:
            recorder: The recorder of this process.
            another: Called with the optimizer when another optimizer begins to end the steps.
        """
        self.recorder, self.another = recorder, another
        self.first: weakref.ref[Any] | None = None
        self.depths: list[tuple[weakref.ref[Any], int]] = []
        self.known: set[int] = set()
        self.stepped: Counter[int] = Counter()
        self.most = 1
        self.were_first: dict[int, weakref.ref[Any]] = {}
        """Optimizers that have ended steps, by id.

        If one of them does so again, no new training begins.
        """

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of `step` with a wrapped closure, or None without arguments.

        The closure's time is not the optimizer's own: Lightning trains in the closure.
        """
        self.begins(optimizer)
        if len(args) == 1 and not kwargs:
            return None
        given = [self._charged(one) for one in args[1:2]]
        named = {k: self._charged(v) if k == "closure" else v for k, v in kwargs.items()}
        return (*args[:1], *given, *args[2:]), named

    def _charged(self, closure: Any) -> Any:
        """Wrap a closure so that its time counts as the script's own code, except for parts inside.

        Other callables, such as a module, are arguments of a special optimizer and stay unchanged.
        """
        if isinstance(closure, types.FunctionType | types.MethodType | functools.partial):
            return self.recorder.wraps(closure, OTHER, "closure")
        return closure

    def begins(self, optimizer: Any) -> None:
        """Begin to charge a step of this optimizer."""
        recorder = self.recorder
        if get_ident() != recorder.thread and not self._trains_here():
            return
        if self.first is None or self.first() is None:
            self.ends_steps(optimizer)
            with contextlib.suppress(Exception):
                _note_optimizer(recorder, optimizer)
        if recorder.steps <= CAPTURED_IN_STEP and id(optimizer) not in self.known:
            self.known.add(id(optimizer))
            recorder.optimizers.append(weakref.ref(optimizer))
        for i, (owner, depth) in enumerate(self.depths):
            # Its last step raised an exception, such as out of memory, and the script continued.
            if owner() is None or owner() is optimizer:
                recorder.leave(depth, type(optimizer).__name__)
                del self.depths[i:]
                break
        self.depths.append((weakref.ref(optimizer), recorder.enter(OPTIMIZER)))

    def _trains_here(self) -> bool:
        """Make this thread the training thread, if no other thread trains. Return success."""
        recorder = self.recorder
        if recorder.begins_again is not None:
            recorder.begins_again()
        elif (recorder.steps and not recorder.thread_is_over) or recorder.thread == -1:
            return False
        recorder.thread, recorder.thread_is_over = get_ident(), False
        recorder.trains_in_thread()
        return True

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        if get_ident() != recorder.thread:
            return
        while self.depths:
            owner, depth = self.depths.pop()
            if owner() is optimizer:
                recorder.leave(depth, type(optimizer).__name__)
                self._count(optimizer)
                break

    def _count(self, optimizer: Any) -> None:
        """Count a step of an optimizer. End the training step if this optimizer ends steps."""
        recorder, stepped = self.recorder, self.stepped
        stepped[id(optimizer)] += 1
        if recorder.step_is_the_engines or self.first is None:
            return
        if stepped[id(optimizer)] >= ANOTHER_STAGE and self.first() is not optimizer:
            self.ends_steps(optimizer)
        if self.first() is optimizer:
            if len(stepped) > self.most:
                self.most = len(stepped)
                recorder.log.note({"optimizers": self.most})
            stepped.clear()
            recorder.ends_step()

    def ends_steps(self, optimizer: Any) -> None:
        """Let this optimizer end the steps from now on.

        If it has not done so before, another training or stage begins.
        """
        before = self.were_first.get(id(optimizer))
        anew = self.first is not None and (before is None or before() is not optimizer)
        self.first = self.were_first[id(optimizer)] = weakref.ref(optimizer)
        if anew:
            if self.recorder.steps:
                self.recorder.log.note({"begins_anew": True})
            self.another(optimizer)


def _note_optimizer(recorder: Recorder, optimizer: Any) -> None:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    recorder.log.note(
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


LOSSES = (
    "cross_entropy",
    "mse_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "l1_loss",
    "smooth_l1_loss",
)


def install(torch: Any, recorder: Recorder) -> None:
    """Install all hooks in torch."""
    recorder.capture = Capture(recorder)
    updates = Updates(recorder)
    calls = _Calls(torch, recorder, updates)
    if recorder.trials is None:
        calls.losses(torch.nn.functional)
    direct = DirectCalls(recorder, calls, updates.parameters)
    _patch_optimizers(torch, recorder, direct)
    torch.autograd.backward = _counted(recorder, torch.autograd.backward, updates)
    if recorder.losses is not None:
        torch.autograd.backward = recorder.losses.within(torch.autograd.backward)
        torch.amp.GradScaler.scale = recorder.losses.scaled(torch.amp.GradScaler.scale)
    torch.autograd.grad = _by_hand(recorder, torch.autograd.grad, updates)
    save = recorder.wraps(torch.save, CHECKPOINT, "torch.save")
    torch.save = torch.serialization.save = files.checkpoints(recorder, save, "f")
    # A `with` statement looks up `__exit__` at its beginning, so the hook is installed now, not at
    # the first evaluation.
    for kind in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        kind.__exit__ = _reported(kind.__exit__, torch.is_grad_enabled, recorder)
    for owner, name in ((builtins, "print"), (os, "fsync"), (logging.Handler, "handle")):
        shown = "logging" if name == "handle" else name
        charged = recorder.wraps(getattr(owner, name), LOGGING, shown)
        setattr(owner, name, trials.muted(recorder, charged))

    def once(step: Step) -> None:
        _copies(torch, recorder)
        recorder.after_step.remove(once)

    recorder.after_step.append(once)


def _patch_optimizers(torch: Any, recorder: Recorder, direct: Any) -> None:
    optimizers, hooks = Optimizers(recorder, direct.another), sys.modules["torch.optim.optimizer"]
    hooks.register_optimizer_step_pre_hook(optimizers.before)
    hooks.register_optimizer_step_post_hook(optimizers.after)
    kind, utilities = torch.optim.Optimizer, torch.nn.utils
    kind.zero_grad = recorder.wraps(kind.zero_grad, OPTIMIZER, "zero_grad")
    clip = recorder.wraps(utilities.clip_grad_norm_, OPTIMIZER, "clip_grad_norm_")
    # Both names get the same function, because pickle looks a function up by its name.
    utilities.clip_grad_norm_ = utilities.clip_grad.clip_grad_norm_ = clip


def _reported(plain: Any, is_grad_enabled: Any, recorder: Recorder) -> Any:
    """Wrap the end of a context without gradients, which may end an evaluation.

    Known limit: if an evaluation calls `torch.set_grad_enabled` as a function, it is assumed to
    last until the next batch.
    """

    @functools.wraps(plain)
    def leave(context: Any, *error: Any) -> Any:
        result = plain(context, *error)
        if recorder.phase == EVALUATING and get_ident() == recorder.thread and is_grad_enabled():
            recorder.leaves_evaluation()
        return result

    return leave


# ---- modules


def core(module: Any) -> Any:
    """Return the model inside the wrappers of DDP, torch.compile and others."""
    for _ in range(8):
        inner = module.__dict__.get("_modules", {})
        wrapped = inner.get("_orig_mod") or (inner.get("module") if len(inner) == 1 else None)
        if wrapped is None:
            break
        module = wrapped
    return module


_NOT_THE_MODELS = (BACKWARD, DATA, LOADER_START)
"""Parts in which a called module is not the model.

The module recomputes activations there, or prepares a sample (torchvision).
"""
_whatever_happens = contextlib.suppress(Exception)


class _Calls:
    """Charges calls of outermost modules.

    In the first two steps, all modules are watched through nn.Module. Later, only the classes of
    outermost modules are watched. Thus hundreds of inner modules cost nothing.
    """

    def __init__(self, torch: Any, recorder: Recorder, updates: Updates) -> None:
        self.torch, self.recorder, self.updates = torch, recorder, updates
        self.is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self.trained: set[int] = set()
        self.parts: set[int] = set()
        """Submodules of the models that train, by id.

        A call of one of them alone without gradients may be an evaluation.
        """
        self.kinds: set[type] = set()
        """Classes of the models that train.

        A copy of a model, such as a moving average, may be evaluated or help to train.
        """
        self.usual: set[int] = set()
        """Modules whose training calls need no further bookkeeping, by id."""
        self.classes: set[type] = set()
        self.models: dict[int, weakref.ref[Any]] = {}
        """Models that were called with gradients in the first two steps, by id."""
        self.inside, self.padding = False, Padding(recorder)
        self.plain = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self.watching = self.charged(self.plain)
        recorder.after_step.append(self.narrow)

    def charged(self, original: Callable[..., Any] | None) -> Callable[..., Any]:
        """Wrap `__call__` of a class.

        If the class has no `__call__` of its own, the wrapper looks up nn.Module's at each call,
        because torch.fx replaces that while it traces.
        """
        is_compiling, recorder, every = self.is_compiling, self.recorder, self.torch.nn.Module

        @functools.wraps(original or self.plain)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            run = original or every.__call__
            if (
                is_compiling()
                or self.inside
                or get_ident() != recorder.thread
                or recorder.part in _NOT_THE_MODELS
            ):
                return run(module, *args, **kwargs)
            self.inside, depth = True, -1
            if recorder.calls_as is not None:
                run = recorder.calls_as(run)
            try:
                # The recorder makes few calls here: its code is not in the processor's caches.
                usual = id(module) in self.usual and module.training and not recorder.spans_on
                usual = usual and self.torch.is_grad_enabled() and not recorder.undecided
                depth = recorder.enters_training() if usual else self.enters(module, args, kwargs)
                output = run(module, *args, **kwargs)
                if recorder.steps == CAPTURED_IN_STEP:
                    recorder.capture.attempt(recorder.capture.after, output)
                return output
            finally:
                if depth >= 0:
                    recorder.leave(depth, type(module).__name__)
                if recorder.undecided or recorder.phase == EVALUATING:
                    recorder.ends_forward()
                self.inside = False

        return call

    def enters(self, module: Any, args: Any, kwargs: Any) -> int:
        """Begin a call that may need bookkeeping. Return the depth for `leave`."""
        trains = False
        with _whatever_happens:
            trains = self._trains(module, args, kwargs)
        return self.recorder.enters_training() if trains else self.recorder.enter(FORWARD)

    def _trains(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Do the bookkeeping of a call. Return True if it trains.

        Other calls set the recorder's phase.
        """
        recorder, model = self.recorder, core(module)
        self.classes.add(type(module))
        recorder.compiled |= type(module).__name__ == "OptimizedModule"
        if not self.torch.is_grad_enabled():
            if recorder.steps == CAPTURED_IN_STEP:
                recorder.capture.attempt(recorder.capture.without_gradients, model)
            self._call_without_gradients(module, model)
            return False
        if recorder.steps <= CAPTURED_IN_STEP:
            self.models[id(model)] = weakref.ref(model)
        if module.training:
            self.updates.called(model)  # May end a step.
        if recorder.steps == CAPTURED_IN_STEP:
            recorder.capture.attempt(recorder.capture.before, model, args, kwargs)
        if recorder.undecided and next(model.parameters(), None) is None:
            return False  # A loss, which an evaluation may compute as well.
        if module.training:
            self._note_training_call(module, model, args, kwargs)
        elif id(model) in self.trained:
            recorder.begins_undecided(with_gradients=True)
        return bool(module.training)

    def _note_training_call(self, module: Any, model: Any, args: Any, kwargs: Any) -> None:
        if self.recorder.spans_on:
            self.recorder.input_elements += ranks.elements(args, kwargs)
            self.padding.sees(kwargs)
        if id(model) not in self.trained:
            self.trained.add(id(model))
            self.kinds.add(type(model))
            self.parts.update(map(id, model.modules()))
            with contextlib.suppress(Exception):
                _note_model(self.recorder, module, model)
        if not self.updates.watches:
            self.usual.add(id(module))

    def _call_without_gradients(self, module: Any, model: Any) -> None:
        recorder = self.recorder
        if id(model) in self.trained and not module.training:
            recorder.begins_evaluation()
        elif (
            id(model) in self.trained
            or id(model) in self.parts
            or (self._is_a_copy(model) and not recorder.bears_backward)
        ):
            recorder.begins_undecided(with_gradients=False)

    def _is_a_copy(self, module: Any) -> bool:
        """Return True if another instance of this class trains. Classes of torch do not count."""
        return type(module) in self.kinds and not type(module).__module__.startswith("torch.nn.")

    def models_called(self) -> list[Any]:
        return [model for reference in self.models.values() if (model := reference()) is not None]

    def losses(self, functional: Any) -> None:
        """Watch loss functions that are called outside of modules, in the captured step only.

        They are unwrapped afterwards because TorchScript cannot compile wrapped functions.
        """
        watched, capture = {}, self.recorder.capture

        def watch(name: str) -> None:
            plain = getattr(functional, name)

            @functools.wraps(plain)
            def call(*args: Any, **kwargs: Any) -> Any:
                if (
                    self.is_compiling()
                    or self.inside
                    or not capture.follows
                    or not self.torch.is_grad_enabled()
                ):
                    return plain(*args, **kwargs)
                capture.attempt(capture.made_by, plain, args, kwargs)
                output = plain(*args, **kwargs)
                capture.attempt(capture.after, output)
                return output

            watched[name] = plain, call
            setattr(functional, name, call)

        def at_step(step: Step) -> None:
            if step.number == CAPTURED_IN_STEP - 1:
                for name in LOSSES:
                    watch(name)
            elif step.number == CAPTURED_IN_STEP:
                capture.attempt(capture.ends)
                for name, (plain, call) in watched.items():
                    if getattr(functional, name) is call:  # Otherwise the script has replaced it.
                        setattr(functional, name, plain)
                self.recorder.after_step.remove(at_step)

        self.recorder.after_step.append(at_step)

    def narrow(self, step: Step) -> None:
        """After the second step, watch only the classes seen so far."""
        if step.number != 1:
            return
        every: Any = self.torch.nn.Module
        if every.__call__ is self.watching:  # Otherwise the script has replaced it.
            every.__call__ = self.plain
        with contextlib.suppress(Exception):
            self.classes.update(kind for model in self.models_called() for kind in _cores_of(model))
        for kind in self.classes:
            own = kind.__call__
            setattr(kind, "__call__", self.charged(None if own is every.__call__ else own))  # noqa: B010
        self.recorder.after_step.remove(self.narrow)


def _cores_of(model: Any) -> Iterator[type]:
    """Yield the classes of nested modules that hold more than half of a model's parameters.

    If a loss contains the model, an evaluation may call the model alone. torch's own classes are
    skipped, because they have too many other instances.
    """
    held = sum(p.numel() for p in model.parameters())
    while True:
        sizes = [(sum(p.numel() for p in child.parameters()), child) for child in model.children()]
        size, model = max(sizes, key=lambda one: one[0], default=(0, None))
        if 2 * size <= held:
            return
        if not type(model).__module__.startswith("torch.nn."):
            yield type(model)


def _note_model(recorder: Recorder, module: Any, model: Any) -> None:
    recorder.log.note(
        {
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "wrapped": type(module).__name__ if module is not model else "",
            "parameters": sum(
                p.numel()
                for p in model.parameters()
                if type(p).__name__ != "UninitializedParameter"
            ),
        }
    )


def _counted(
    recorder: Recorder, backward: Callable[..., Any], updates: Updates
) -> Callable[..., Any]:
    in_another_thread = recorder.wraps(backward, BACKWARD, "backward")
    reducing = ranks.Gradients(recorder).within(backward)

    @functools.wraps(backward)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.micro_steps += 1
        if get_ident() != recorder.thread:
            return in_another_thread(*args, **kwargs)
        if recorder.steps == CAPTURED_IN_STEP and not _in_autograd():
            losses = args[0] if args else kwargs.get("tensors")
            recorder.capture.attempt(recorder.capture.backward, losses)
        if recorder.undecided or recorder.optimizer is None:
            _report_gradients(recorder, updates, args, kwargs)
        depth = recorder.enter(BACKWARD)
        try:
            run = backward if recorder.synchronizes is None else reducing
            return run(*args, **kwargs)
        finally:
            recorder.leave(depth, "backward")

    return call


def _in_autograd() -> bool:
    """Return True if autograd's engine is running, for example to recompute activations."""
    return sys.modules["torch"]._C._current_autograd_node() is not None


def _by_hand(
    recorder: Recorder, gradients: Callable[..., Any], updates: Updates
) -> Callable[..., Any]:
    charged = recorder.wraps(gradients, BACKWARD, "autograd.grad")

    @functools.wraps(gradients)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.steps == CAPTURED_IN_STEP and recorder.part != FORWARD and not _in_autograd():
            recorder.capture.attempt(lambda: recorder.capture.by_hand(*args, **kwargs))
        if get_ident() == recorder.thread:
            _report_gradients(recorder, updates, args, kwargs)
        return charged(*args, **kwargs)

    return call


def _report_gradients(recorder: Recorder, updates: Updates, args: Any, kwargs: Any) -> None:
    """Report that gradients will be computed.

    Undecided calls and trainings without an optimizer depend on this.
    """
    if updates.watches and recorder.part != BACKWARD:
        updates.computes_gradients(args[0] if args else next(iter(kwargs.values()), None))
    recorder.decides(TRAINING)


# ---- copies and synchronization


def _copies(torch: Any, recorder: Recorder) -> None:
    """Watch copies to a device, and synchronization.

    Inside the forward pass of a module, they count as forward.
    """
    has_torch_function = torch.overrides.has_torch_function_unary
    is_compiling = torch.compiler.is_compiling

    def watch(name: str, part: int) -> None:
        plain = getattr(torch.Tensor, name)

        @functools.wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return plain(self, *args, **kwargs)
            run = plain
            # Tensor subclasses expect torch's own function, but C++ would find this wrapper.
            if has_torch_function(self):
                run = functools.partial(torch.overrides.handle_torch_function, plain, (self,))
            if recorder.part in within or get_ident() != recorder.thread:
                return run(self, *args, **kwargs)
            if part == HOST_TO_DEVICE and _waits_first(torch, kind, name, self, args, kwargs):
                recorder.charged(SYNCHRONISATION, name, accelerator.finish_stream)
            return recorder.charged(part, name, run, self, *args, **kwargs)

        setattr(torch.Tensor, name, call)

    kind = accelerator.in_use()
    # Without a device, conversions in a dataset are part of the cost of a sample.
    within = (
        (FORWARD, BACKWARD, OPTIMIZER) if kind != "cpu" else (FORWARD, BACKWARD, OPTIMIZER, DATA)
    )
    watch("to", HOST_TO_DEVICE)
    if kind != "cpu":
        recorder.log.note({"accelerator": accelerator.device_name(kind) or kind})
        for name in (kind, "item", "cpu", "tolist", "numpy"):
            if hasattr(torch.Tensor, name):
                watch(name, HOST_TO_DEVICE if name == kind else SYNCHRONISATION)
        for module in (torch.get_device_module(kind), torch.accelerator):
            module.synchronize = recorder.wraps(module.synchronize, SYNCHRONISATION, "synchronize")
        recorder.peak_allocated_gib = lambda: accelerator.peak_allocated_gib(kind)
        recorder.allocator = lambda: (
            accelerator.reserved_gib(kind) or 0.0,
            accelerator.allocator_retries(kind),
        )


def _waits_first(torch: Any, kind: str, name: str, tensor: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a copy to the device begins by waiting for its stream.

    Copies from pageable memory always wait. Copies from pinned memory wait unless they are
    non_blocking (CUDA C Programming Guide, "API synchronization behavior"). If the recorder waits
    before such a copy, the result is the same, and the wait is charged as synchronization.
    """
    if kind == "cpu" or tensor.device.type != "cpu":
        return False
    non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
    if name != kind:
        if args and isinstance(args[0], torch.Tensor):
            device = args[0].device
        else:
            # The arguments are (dtype, non_blocking, copy), or a device comes first.
            before_copy = 2 if args and isinstance(args[0], torch.dtype) else 3
            settings = {key: value for key, value in kwargs.items() if key != "copy"}
            parsed = torch._C._nn._parse_to(*args[:before_copy], **settings)
            device, _, non_blocking, _ = parsed
        if device is None or device.type != kind:
            return False
    return not (non_blocking and tensor.is_pinned())


# ---- modules whose `forward` the script calls directly
#
# nn.Module.__call__ does not see such calls. They can be detected only after the first step: it has
# changed parameters of modules that were never called. From then on, `forward` of their classes is
# watched, unless nobody calls it within a few steps. Other scripts only pay for one comparison of
# parameters. Known limits: the first step itself, and layers of torch.

MOST_LOOKS = 3
"""Most searches for directly called modules.

A script may create an optimizer for every sample, and a search visits all objects of the process.
"""
WATCHED_FOR = 10
"""Steps after which an unused wrapper is removed, because TorchScript cannot compile it."""


class DirectCalls:
    """Finds modules whose `forward` the script calls directly.

    It searches after the first step, and again when another optimizer begins to end the steps.
    """

    def __init__(self, recorder: Recorder, calls: Any, by_hand: Callable[[], list[Any]]) -> None:
        """Set up for one recorder.

        Args:
            recorder: The recorder of this process.
            calls: Watches module calls.
            by_hand: Returns the parameters of a training without an optimizer.
        """
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
        """Search the parameters of a later stage.

        Models of a known class are already watched through their calls.
        """
        self.look([optimizer], self.calls.classes)

    def look(self, optimizers: list[Any], classes: Collection[type] = ()) -> None:
        """Search for directly called modules that hold parameters of these optimizers."""
        self.looks += 1
        if self.looks > MOST_LOOKS:
            return
        depth = self.recorder.enter(TRAINPACE)
        with contextlib.suppress(Exception):  # Unknown parameters count as the script's own code.
            self._look(optimizers, classes)
        self.recorder.leave(depth, "direct calls")

    def _look(self, optimizers: list[Any], classes: Collection[type]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        trained = [p for group in groups for p in group["params"]] or self.by_hand()
        left = {id(p) for p in trained if p.requires_grad} - _parameters(self.calls.models_called())
        kinds = self._kinds_holding(left, classes) if left else set()
        for kind in kinds:
            self._watch(kind)
        if kinds:
            last = self.recorder.steps + WATCHED_FOR
            self.recorder.once(last, lambda: self._unwatch(kinds - self.used))

    def _kinds_holding(self, left: set[int], classes: Collection[type]) -> set[type]:
        """Return the classes of modules that hold these parameters and are not watched yet."""
        found = holding(left)
        left = left - _parameters(module for module in found if type(module) in classes)
        kinds = {type(module) for module in found if left & _parameters([module])}
        return {
            kind for kind in kinds - self.watched.keys() if not kind.__module__.startswith("torch.")
        }

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

    def _unwatch(self, kinds: Iterable[Any]) -> None:
        for kind in kinds:
            if kind.forward is self.watched[kind]:  # Otherwise the script has replaced it.
                kind.forward = self.watched[kind].__wrapped__  # type: ignore[attr-defined]


def _parameters(modules: Iterable[Any]) -> set[int]:
    return {id(p) for module in modules for p in module.parameters()}


def holding(parameters: set[int]) -> list[Any]:
    """Return all modules that hold one of these parameters (ids), directly or in a submodule."""
    every: Any = sys.modules["torch"].nn.Module
    # Check the type: attributes of foreign objects, such as a proxy's __class__, may run code.
    modules = [found for found in gc.get_objects() if issubclass(type(found), every)]
    return [module for module in modules if parameters & _parameters([module])]
