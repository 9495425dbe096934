"""Hooks in torch itself: the outermost module, backward, the optimizer, copies, checkpoints."""

import builtins
import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import trainpace.measure as accelerator
from trainpace.watch.inside import among, evaluations, left_out
from trainpace.watch.inside.by_hand import Updates
from trainpace.watch.inside.capture import CAPTURED_IN_STEP, Capture
from trainpace.watch.inside.direct import DirectCalls
from trainpace.watch.inside.optimizers import Optimizers
from trainpace.watch.inside.padding import Padding
from trainpace.watch.inside.recorder import Recorder, get_ident
from trainpace.watch.inside.trail import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    HOST_TO_DEVICE,
    LOADER_START,
    LOGGING,
    OPTIMIZER,
    SYNCHRONISATION,
    Step,
)

LOSSES = (
    "cross_entropy",
    "mse_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "l1_loss",
    "smooth_l1_loss",
)


def install(torch: Any, recorder: Recorder) -> None:
    recorder.capture = Capture(recorder)
    updates = Updates(recorder)
    calls = _Calls(torch, recorder, updates)
    if recorder.trials is None:
        calls.losses(torch.nn.functional)
    direct = DirectCalls(recorder, calls, updates.parameters)
    optimizers, hooks = Optimizers(recorder, direct.another), sys.modules["torch.optim.optimizer"]
    hooks.register_optimizer_step_pre_hook(optimizers.before)
    hooks.register_optimizer_step_post_hook(optimizers.after)
    torch.optim.Optimizer.zero_grad = recorder.wraps(
        torch.optim.Optimizer.zero_grad, OPTIMIZER, "zero_grad"
    )
    torch.autograd.backward = _counted(recorder, torch.autograd.backward, updates)
    if recorder.losses is not None:
        torch.autograd.backward = recorder.losses.within(torch.autograd.backward)
        torch.amp.GradScaler.scale = recorder.losses.scaled(torch.amp.GradScaler.scale)
    torch.autograd.grad = _by_hand(recorder, torch.autograd.grad, updates)
    clip = recorder.wraps(torch.nn.utils.clip_grad_norm_, OPTIMIZER, "clip_grad_norm_")
    # under both their names, or else pickle finds another function than the one that it was given
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip
    save = recorder.wraps(torch.save, CHECKPOINT, "torch.save")
    torch.save = torch.serialization.save = left_out.checkpoints(recorder, save, "f")
    evaluations.ends(torch, recorder)
    _outputs(recorder)

    def once(step: Step) -> None:
        _copies(torch, recorder)
        recorder.after_step.remove(once)

    recorder.after_step.append(once)


# ---- modules


def core(module: Any) -> Any:
    """The model without the wrappers of DDP, torch.compile and the like."""
    for _ in range(8):
        inner = module.__dict__.get("_modules", {})
        wrapped = inner.get("_orig_mod") or (inner.get("module") if len(inner) == 1 else None)
        if wrapped is None:
            break
        module = wrapped
    return module


_NOT_THE_MODELS = (BACKWARD, DATA, LOADER_START)
"""Parts in which a module that is called is recomputed or prepares a sample, as torchvision's transforms do."""
_whatever_happens = contextlib.suppress(Exception)


class _Calls:
    """Charges calls of outermost modules. The first step is watched through nn.Module, later steps only through the
    classes seen in it, so that the hundreds of inner modules cost nothing."""

    def __init__(self, torch: Any, recorder: Recorder, updates: Updates) -> None:
        self.torch, self.recorder, self.updates = torch, recorder, updates
        self.is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self.trained: set[int] = set()
        self.parts: set[int] = set()
        """Modules inside of those that train. One that is called alone and without gradients may be evaluated, or not."""
        self.kinds: set[type] = set()
        """The classes of those that train. A copy, such as a moving average, may be evaluated too, or help to train."""
        self.usual: set[int] = set()
        """Modules of which a call while training says nothing new."""
        self.classes: set[type] = set()
        self.models: dict[int, weakref.ref[Any]] = {}
        """Those that were called with gradients in the first two steps, by their ids."""
        self.inside, self.padding = False, Padding(recorder)
        self.plain = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self.watching = self.charged(self.plain)
        recorder.after_step.append(self.narrow)

    def charged(self, original: Callable[..., Any] | None) -> Callable[..., Any]:
        """A class's __call__; without an own one, what nn.Module's is by then, which torch.fx changes while it traces."""
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
                # no function of ours that can be left out, as each is far from the processor by now
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
                if recorder.undecided or recorder.evaluating:
                    recorder.ends_forward()
                self.inside = False

        return call

    def enters(self, module: Any, args: Any, kwargs: Any) -> int:
        """Begin a call of which something may have to be noted; returns the depth for `leave`."""
        trains = False
        with _whatever_happens:
            trains = self._trains(module, args, kwargs)
        return self.recorder.enters_training() if trains else self.recorder.enter(FORWARD)

    def _trains(self, module: Any, args: Any, kwargs: Any) -> bool:
        """Note what is new about a call; whether it trains. Others are known to the recorder then as what they are."""
        recorder = self.recorder
        self.classes.add(type(module))
        recorder.compiled |= type(module).__name__ == "OptimizedModule"
        if self.torch.is_grad_enabled():
            model = core(module)
            if recorder.steps <= CAPTURED_IN_STEP:
                self.models[id(model)] = weakref.ref(model)
            if module.training:
                self.updates.called(model)
            if recorder.steps == CAPTURED_IN_STEP:
                recorder.capture.attempt(recorder.capture.before, model, args, kwargs)
            if recorder.undecided and next(model.parameters(), None) is None:
                return False  # a loss, which an evaluation may compute as well
            if module.training:
                if recorder.spans_on:  # what is noted of them, in no other step
                    recorder.input_elements += among.elements(args, kwargs)
                    self.padding.sees(kwargs)
                if id(model) not in self.trained:
                    self.trained.add(id(model))
                    self.kinds.add(type(model))
                    self.parts.update(map(id, model.modules()))
                    with contextlib.suppress(Exception):
                        _note_model(recorder, module, model)
                if not self.updates.watches:
                    self.usual.add(id(module))
                return True
            if id(model) in self.trained:
                recorder.begins_undecided(with_gradients=True)
            return False
        if recorder.steps == CAPTURED_IN_STEP:
            recorder.capture.attempt(recorder.capture.without_gradients, core(module))
        if id(core(module)) in self.trained and module.training:
            recorder.begins_undecided(with_gradients=False)
        elif id(core(module)) in self.trained:
            recorder.begins_evaluation()
        elif id(core(module)) in self.parts or (
            self._is_a_copy(core(module)) and not recorder.bears_backward
        ):
            recorder.begins_undecided(with_gradients=False)
        return False

    def _is_a_copy(self, module: Any) -> bool:
        """Whether a module may be a copy of one that trains: of the same class, which is the script's own."""
        return type(module) in self.kinds and not type(module).__module__.startswith("torch.nn.")

    def models_called(self) -> list[Any]:
        return [model for reference in self.models.values() if (model := reference()) is not None]

    def losses(self, functional: Any) -> None:
        """Watch losses called as functions outside modules, only during the captured step and only then wrapped:
        TorchScript cannot compile wrapped functions."""
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
                    if getattr(functional, name) is call:  # else it is the script's own by now
                        setattr(functional, name, plain)
                self.recorder.after_step.remove(at_step)

        self.recorder.after_step.append(at_step)

    def narrow(self, step: Step) -> None:
        if step.number != 1:
            return
        every: Any = self.torch.nn.Module
        if every.__call__ is self.watching:  # else it is the script's own by now
            every.__call__ = self.plain
        with contextlib.suppress(Exception):
            self.classes.update(kind for model in self.models_called() for kind in _cores_of(model))
        for kind in self.classes:
            own = kind.__call__
            setattr(kind, "__call__", self.charged(None if own is every.__call__ else own))  # noqa: B010
        self.recorder.after_step.remove(self.narrow)


def _cores_of(model: Any) -> Iterator[type]:
    """The classes of the modules, one inside the other, that hold more than half of a model's parameters: an evaluation may call
    one of them alone, as where a loss has the model inside. torch's own classes have too many others.
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
    recorder.trail.note(
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
    elsewhere, exchanging = (
        recorder.wraps(backward, BACKWARD, "backward"),
        among.Gradients(recorder).within(backward),
    )

    @functools.wraps(backward)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.micro_steps += 1
        if get_ident() != recorder.thread:
            return elsewhere(*args, **kwargs)
        if recorder.steps == CAPTURED_IN_STEP and not _in_autograd():
            recorder.capture.attempt(
                recorder.capture.backward, args[0] if args else kwargs.get("tensors")
            )
        if recorder.undecided or recorder.optimizer is None:
            _tells(recorder, updates, args, kwargs)
        depth = recorder.enter(BACKWARD)
        try:
            return (
                backward(*args, **kwargs)
                if recorder.exchanges is None
                else exchanging(*args, **kwargs)
            )
        finally:
            recorder.leave(depth, "backward")

    return call


def _in_autograd() -> bool:
    """Whether autograd's engine runs, as where activations are computed again, and gradients of them."""
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
            _tells(recorder, updates, args, kwargs)
        return charged(*args, **kwargs)

    return call


def _tells(recorder: Recorder, updates: Updates, args: Any, kwargs: Any) -> None:
    """Before gradients are computed: tell those that wait for that, which is any call that is undecided, and trainings without an
    optimizer."""
    if updates.watches and recorder.part != BACKWARD:
        updates.computes_gradients(args[0] if args else next(iter(kwargs.values()), None))
    recorder.decides(False)


# ---- copies, synchronisation, output


def _copies(torch: Any, recorder: Recorder) -> None:
    """Watch copies to a device and, where there is one, synchronisation. Inside a module's forward they count as the module's."""
    has_torch_function = torch.overrides.has_torch_function_unary
    is_compiling = torch.compiler.is_compiling

    def watch(name: str, part: int) -> None:
        plain = getattr(torch.Tensor, name)

        @functools.wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return plain(self, *args, **kwargs)
            run = plain
            # kinds of tensors know torch's own function, which C++ would look up as this one
            if has_torch_function(self):
                run = functools.partial(torch.overrides.handle_torch_function, plain, (self,))
            if recorder.part in within or get_ident() != recorder.thread:
                return run(self, *args, **kwargs)
            if part == HOST_TO_DEVICE and _waits_first(torch, kind, name, self, args, kwargs):
                recorder.charged(SYNCHRONISATION, name, accelerator.finish_stream)
            return recorder.charged(part, name, run, self, *args, **kwargs)

        setattr(torch.Tensor, name, call)

    kind = accelerator.in_use()
    # without a device, what a dataset converts is a sample's own cost
    within = (
        (FORWARD, BACKWARD, OPTIMIZER) if kind != "cpu" else (FORWARD, BACKWARD, OPTIMIZER, DATA)
    )
    watch("to", HOST_TO_DEVICE)
    if kind != "cpu":
        recorder.trail.note({"accelerator": accelerator.device_name(kind) or kind})
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
    """Whether a copy to the device begins by waiting for its stream: from pageable memory always (CUDA C Programming Guide, "API
    synchronization behavior"), from pinned memory unless non_blocking. Waiting before it changes nothing, and says what it is.
    """
    if kind == "cpu" or tensor.device.type != "cpu":
        return False
    if name == kind:
        frees_the_host = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
    elif args and isinstance(args[0], torch.Tensor):
        if args[0].device.type != kind:
            return False
        frees_the_host = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
    else:
        before_copy = (
            2 if args and isinstance(args[0], torch.dtype) else 3
        )  # (dtype, non_blocking, copy), or a device first
        settings = {key: value for key, value in kwargs.items() if key != "copy"}
        device, _, frees_the_host, _ = torch._C._nn._parse_to(*args[:before_copy], **settings)
        if device is None or device.type != kind:
            return False
    return not (frees_the_host and tensor.is_pinned())


def _outputs(recorder: Recorder) -> None:
    for owner, name in ((builtins, "print"), (os, "fsync"), (logging.Handler, "handle")):
        charged = recorder.wraps(
            getattr(owner, name), LOGGING, "logging" if name == "handle" else name
        )
        setattr(owner, name, left_out.muted(recorder, charged))
