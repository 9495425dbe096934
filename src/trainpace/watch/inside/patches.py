"""Hooks in torch itself: modules, backward, optimizers, copies and checkpoints.

A training step ends with a step of the first optimizer.

A training without a torch optimizer changes its parameters by hand. Nothing marks the end of such
an update. The step then ends when the model is next called for training, if gradients were computed
since the last step and the parameters have changed.

Known limits: the last update of such a training is not counted, because no call follows it. Only a
few values of three parameters are compared. A training without a module is not detected.
"""

import builtins
import contextlib
import functools
import logging
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import trainpace.measure as accelerator
from trainpace.watch.inside import files, ranks, trials
from trainpace.watch.inside.capture import CAPTURED_IN_STEP, Capture
from trainpace.watch.inside.event_log import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST_TO_DEVICE,
    LOADER_START,
    OPTIMIZER,
    OTHER,
    SYNCHRONISATION,
    TRAINPACE,
)
from trainpace.watch.inside.loaders import Padding
from trainpace.watch.inside.recorder import (
    COVERING,
    EVALUATING,
    TRAINING,
    Recorder,
    around,
    get_ident,
)
from trainpace.watch.inside.script import Environments, line_of

NUMBERS = 16
"""Number of values that are compared at the beginning and at the end of each parameter."""
LEARNT = 8
"""Updates after which the number of backward passes per update is known.

From then on, a parameter on a device is not read, because reading makes the host wait.
"""
State = tuple[Any, ...]


class Updates:
    """Detects updates without an optimizer, and ends the recorder's steps at them.

    It is active until an optimizer makes a step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.places: list[tuple[Any, str]] = []
        """(module, name) of the parameters to compare. A script may replace the tensors."""
        self.state: State = ()
        self.gradients = 0
        self.rhythm: list[int] = []

    @property
    def watches(self) -> bool:
        """True until an optimizer makes a step. An optimizer's steps are more reliable."""
        return self.recorder.optimizer is None and not self.recorder.step_is_the_engines

    def called(self, module: Any) -> None:
        """Handle a module that is about to compute with gradients, for training."""
        if not self.watches:
            return
        self.places = self.places or _compared(module)
        if self.state and not self.gradients:
            return
        changed = False
        # If the kind of tensor is unknown, the step is not detected.
        with contextlib.suppress(Exception):
            changed = self.recorder.charged(TRAINPACE, "parameters", self._changed)
        if changed:
            self.rhythm = [*self.rhythm[1 - LEARNT :], self.gradients]
            self.recorder.micro_steps = max(self.recorder.micro_steps, self.gradients)
            self.gradients = 0
            if not self.recorder.steps:
                self.recorder.log.note(optimizers=0)
            self.recorder.ends_step()

    def _changed(self) -> bool:
        parameters = [owner._parameters[name] for owner, name in self.places]
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


def _compared(module: Any) -> list[tuple[Any, str]]:
    """Return (owner, name) of the first, middle and last trained parameter of a module.

    The values must be here: not sharded, not on the meta device, and not lazy.
    """
    places = [
        (owner, name)
        for owner in module.modules()
        for name, p in owner._parameters.items()
        if type(p).__name__ in ("Parameter", "Tensor")
        and p.device.type != "meta"
        and p.requires_grad
    ]
    return [places[i] for i in sorted({0, len(places) // 2, len(places) - 1})] if places else []


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

    def __init__(self, recorder: Recorder, another: Callable[[], None] = lambda: None) -> None:
        """Set up for one recorder.

        Args:
            recorder: The recorder of this process.
            another: Called when another optimizer begins to end the steps.
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
            recorder.log.note(optimizer=type(optimizer).__name__)
            recorder.optimizer = weakref.ref(optimizer)
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
                recorder.log.note(optimizers=self.most)
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
                self.recorder.log.note(begins_anew=True)
            self.another()


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
    _patch_optimizers(torch, recorder, calls)
    around(torch.autograd, "backward", _counted(recorder, updates))
    if recorder.losses is not None:
        around(torch.autograd, "backward", recorder.losses.backward)
        around(torch.amp.GradScaler, "scale", recorder.losses.scale)
    around(torch.autograd, "grad", _by_hand(recorder, updates))
    files.checkpoints(recorder, torch, "save", "f", "torch.save")
    torch.serialization.save = torch.save

    def leave(plain: Any, context: Any, /, *error: Any) -> Any:
        """End a context without gradients, which may end an evaluation.

        Known limit: if an evaluation calls `torch.set_grad_enabled` as a function, it is assumed to
        last until the next batch.
        """
        result = plain(context, *error)
        evaluates = recorder.phase == EVALUATING and get_ident() == recorder.thread
        if evaluates and torch.is_grad_enabled():
            recorder.leaves_evaluation()
        return result

    # A `with` statement looks up `__exit__` at its beginning, so the hook is installed now, not at
    # the first evaluation.
    for kind in (torch.no_grad, torch.inference_mode, torch.set_grad_enabled):
        around(kind, "__exit__", leave)
    around(torch, "set_num_threads", _set_threads(recorder))
    for owner, name in ((builtins, "print"), (os, "fsync"), (logging.Handler, "handle")):
        shown = "logging" if name == "handle" else name
        around(owner, name, trials.charges_output(recorder, shown))
    recorder.once(0, lambda: _copies(torch, recorder))


def _set_threads(recorder: Recorder) -> Callable[..., Any]:
    def act(plain: Callable[[int], None], /, threads: int) -> None:
        plain(threads)
        if not recorder.steps:  # Later, an intervention may set the number.
            line, library = line_of(sys._getframe(1))
            recorder.log.note(threads=threads, threads_by="" if library else line)

    return act


def _patch_optimizers(torch: Any, recorder: Recorder, calls: Any) -> None:
    optimizers, hooks = Optimizers(recorder, calls.widen), sys.modules["torch.optim.optimizer"]
    hooks.register_optimizer_step_pre_hook(optimizers.before)
    hooks.register_optimizer_step_post_hook(optimizers.after)
    kind, utilities = torch.optim.Optimizer, torch.nn.utils
    kind.zero_grad = recorder.wraps(kind.zero_grad, OPTIMIZER, "zero_grad")
    clip = recorder.wraps(utilities.clip_grad_norm_, OPTIMIZER, "clip_grad_norm_")
    # Both names get the same function, because pickle looks a function up by its name.
    utilities.clip_grad_norm_ = utilities.clip_grad.clip_grad_norm_ = clip


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

    In the first two steps of a training or stage, all modules are watched through nn.Module. Later,
    only the classes of outermost modules are watched. Thus hundreds of inner modules cost nothing.
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
        self.holders: dict[int, tuple[int, bool]] = {}
        """Results of `_holds_trained` by id, with the number of trained modules at that time."""
        self.environments, self.collected = Environments(), False
        self.inside, self.padding = False, Padding(recorder)
        self.plain = torch.nn.Module.__call__
        self.watching = self.charged(self.plain)
        self.narrowed: set[type] = set()
        self.widen()

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
        part = None
        with _whatever_happens:
            part = self._training_part(module, args, kwargs)
        return self.recorder.enter(FORWARD) if part is None else self.recorder.enters_training(part)

    def _training_part(self, module: Any, args: Any, kwargs: Any) -> int | None:
        """Do the bookkeeping of a call. Return the part to charge if the call serves training.

        Other calls set the recorder's phase.
        """
        recorder, model = self.recorder, core(module)
        self.classes.add(type(module))
        recorder.compiled |= type(module).__name__ == "OptimizedModule"
        if not self.torch.is_grad_enabled():
            if recorder.steps == CAPTURED_IN_STEP:
                recorder.capture.attempt(recorder.capture.without_gradients, model)
            if self._collects(model):
                return OTHER
            self._call_without_gradients(module, model)
            return None
        if recorder.steps <= CAPTURED_IN_STEP:
            self.models[id(model)] = weakref.ref(model)
        if module.training:
            self.updates.called(model)  # May end a step.
        if recorder.steps == CAPTURED_IN_STEP:
            recorder.capture.attempt(recorder.capture.before, model, args, kwargs)
        if recorder.undecided and next(model.parameters(), None) is None:
            return None  # A loss, which an evaluation may compute as well.
        if module.training:
            self._note_training_call(module, model, args, kwargs)
        elif id(model) in self.trained:
            recorder.begins_undecided(with_gradients=True)
        return FORWARD if module.training else None

    def _note_training_call(self, module: Any, model: Any, args: Any, kwargs: Any) -> None:
        if self.recorder.spans_on:
            self.recorder.input_elements += ranks.elements(args, kwargs)
            self.padding.sees(kwargs)
        if id(model) not in self.trained:
            self.trained.add(id(model))
            self.kinds.add(type(model))
            self.parts.update(map(id, model.modules()))
            with contextlib.suppress(Exception):
                _note_model(self.recorder, model)
        if not self.updates.watches:
            self.usual.add(id(module))

    def _collects(self, model: Any) -> bool:
        """Return True if this call without gradients collects experience for the training.

        A policy in training mode is left to `begins_undecided`, because updates call it too.
        """
        recorder = self.recorder
        collects = (
            not (model.training or recorder.fetched_samples)
            and recorder.part not in COVERING
            and self._holds_trained(model)
            and self.environments.collects()
        )
        if collects and not self.collected:
            self.collected = True
            recorder.log.note(collects_experience=True)
        return collects

    def _holds_trained(self, model: Any) -> bool:
        """Return True if the module or one of its submodules is called for training."""
        known, holds = self.holders.get(id(model), (0, False))
        if not holds and known != len(self.trained):
            holds = any(id(one) in self.trained for one in model.modules())
            self.holders[id(model)] = len(self.trained), holds
        return holds

    def _call_without_gradients(self, module: Any, model: Any) -> None:
        recorder = self.recorder
        if not module.training and self._holds_trained(model):
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
        watched: dict[str, tuple[Any, Any]] = {}
        capture = self.recorder.capture

        def loss(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            is_outside = not (self.is_compiling() or self.inside) and self.torch.is_grad_enabled()
            if not (is_outside and capture.follows):
                return plain(*args, **kwargs)
            capture.attempt(capture.made_by, plain, args, kwargs)
            output = plain(*args, **kwargs)
            capture.attempt(capture.after, output)
            return output

        def begin() -> None:
            for name in LOSSES:
                plain = getattr(functional, name)
                around(functional, name, loss)
                watched[name] = plain, getattr(functional, name)

        def end() -> None:
            capture.attempt(capture.ends)
            for name, (plain, call) in watched.items():
                if getattr(functional, name) is call:  # Otherwise the script has replaced it.
                    setattr(functional, name, plain)

        self.recorder.once(CAPTURED_IN_STEP - 1, begin)
        self.recorder.once(CAPTURED_IN_STEP, end)

    def widen(self) -> None:
        """Watch all modules for two steps. Another stage may train models of other classes."""
        every: Any = self.torch.nn.Module
        if every.__call__ is self.plain:  # Otherwise the script has replaced it.
            every.__call__ = self.watching
        self.recorder.once(self.recorder.steps + 1, self.narrow)

    def narrow(self) -> None:
        """From now on, watch only the classes seen so far."""
        every: Any = self.torch.nn.Module
        if every.__call__ is self.watching:
            every.__call__ = self.plain
        with contextlib.suppress(Exception):
            self.classes.update(kind for model in self.models_called() for kind in _cores_of(model))
        for kind in self.classes - self.narrowed:
            own = kind.__call__
            setattr(kind, "__call__", self.charged(None if own is every.__call__ else own))  # noqa: B010
        self.narrowed |= self.classes


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


def _note_model(recorder: Recorder, model: Any) -> None:
    plain = (p for p in model.parameters() if type(p).__name__ != "UninitializedParameter")
    recorder.log.note(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        parameters=sum(p.numel() for p in plain),
    )


def _counted(recorder: Recorder, updates: Updates) -> Callable[..., Any]:
    gradients = ranks.Gradients(recorder)

    def act(backward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        recorder.micro_steps += 1
        if get_ident() == recorder.thread:
            if recorder.steps == CAPTURED_IN_STEP and not _in_autograd():
                losses = args[0] if args else kwargs.get("tensors")
                recorder.capture.attempt(recorder.capture.backward, losses)
            _report_gradients(recorder, updates)
            if recorder.synchronizes is not None:
                backward = functools.partial(gradients.reduce, backward)
        return recorder.charged(BACKWARD, "backward", backward, *args, **kwargs)

    return act


def _in_autograd() -> bool:
    """Return True if autograd's engine is running, for example to recompute activations."""
    return sys.modules["torch"]._C._current_autograd_node() is not None


def _by_hand(recorder: Recorder, updates: Updates) -> Callable[..., Any]:
    def act(gradients: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if recorder.steps == CAPTURED_IN_STEP and recorder.part != FORWARD and not _in_autograd():
            recorder.capture.attempt(lambda: recorder.capture.by_hand(*args, **kwargs))
        if get_ident() == recorder.thread:
            _report_gradients(recorder, updates)
        return recorder.charged(BACKWARD, "autograd.grad", gradients, *args, **kwargs)

    return act


def _report_gradients(recorder: Recorder, updates: Updates) -> None:
    """Report that gradients will be computed.

    Undecided calls and trainings without an optimizer depend on this.
    """
    if updates.watches and recorder.part != BACKWARD:
        updates.gradients += 1
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
        recorder.log.note(accelerator=accelerator.device_name(kind) or kind)
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
    if name == kind:
        non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
    else:
        # The arguments are (dtype or tensor, non_blocking, copy), or (device, dtype, ...).
        before_copy = 2 if args and isinstance(args[0], (torch.dtype, torch.Tensor)) else 3
        settings = dict(kwargs)
        settings.pop("copy", None)
        parsed = torch._C._nn._parse_to(*args[:before_copy], **settings)
        device, _, non_blocking, _ = parsed
        if device is None or device.type != kind:
            return False
    return not (non_blocking and tensor.is_pinned())
