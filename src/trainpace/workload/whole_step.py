"""Trace a step that runs forward, backward and updates by itself, of one model or several.

The user's own models are traced, since his function refers to them: each of their tensors becomes a meta tensor in its place, and
gets its values back afterwards. What runs in autograd's engine is backward, what runs inside an optimizer's `step` is optimizer,
and all else is forward, however often they take turns.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.workload.cuda_mapping import (
    MOVES,
    CudaMapping,
    checkpoints_see_through,
    kept_on_meta,
    moves_alone,
    python_functions_see_through,
    without_device,
)
from trainpace.workload.recorder import Recorder, in_backward
from trainpace.workload.stepping import launch_together, storage_bytes
from trainpace.workload.task import WholeStep
from trainpace.workload.tensors import map_tensors, tensors_in
from trainpace.workload.workload import Form, Variant


def record_whole_step(
    step: WholeStep, model: nn.Module, batch: Any, form: Form, variant: Variant
) -> "StepRecorder":
    """The second of two steps on one batch: the first makes the optimizers' states, and whatever else a model keeps."""
    lasting = [*model.parameters(), *model.buffers()]
    recorder = StepRecorder(dict(model.named_parameters()))
    recorder.keep_alive([*lasting, *tensors_in(batch)])
    mapping = StepMapping(form == "amp", fused_attention=not variant.legacy, cpu=variant.cpu)
    recorder.backward_begins = mapping.forget_casts
    for optimizer in step.optimizers:
        launch_together(optimizer, not (variant.legacy or variant.cpu))
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: recorder.gradient_ready(p.grad))
        for p in model.parameters()
        if p.requires_grad
    ]
    hooks += [
        module.register_forward_pre_hook(lambda *_, name=name: recorder.enter_module(name))
        for name, module in model.named_modules()
        if name
    ]

    def updating(is_on: bool) -> None:
        recorder.updates = mapping.rests = is_on
        mapping.forget_casts()  # of weights that are about to change

    for optimizer in step.optimizers:
        hooks.append(optimizer.register_step_pre_hook(lambda *_: updating(True)))
        hooks.append(optimizer.register_step_post_hook(lambda *_: updating(False)))
    try:
        with (
            python_functions_see_through(),
            _noticed_autocast(recorder),
            recorder,
            mapping,
            checkpoints_see_through(mapping),
        ):
            recorder.recording = False
            step.run(batch)
            recorder.keep_for_ever(_states(step.optimizers))
            recorder.recording = True
            step.run(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.updated:
        raise TrainpaceError(
            "the step never calls an optimizer's step().",
            "A step trains: forward, backward, update.",
        )
    recorder.optimizer_bytes = storage_bytes(_states(step.optimizers))
    recorder.parameter_bytes = storage_bytes(lasting)
    recorder.frozen_bytes = storage_bytes(p for p in model.parameters() if not p.requires_grad)
    return recorder


@contextlib.contextmanager
def _noticed_autocast(recorder: "StepRecorder") -> Iterator[None]:
    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        recorder.autocasts |= region._enabled
        return enter(region)

    owner: Any = torch.autocast
    owner.__enter__ = entered
    try:
        yield
    finally:
        owner.__enter__ = enter


class StepRecorder(Recorder):
    """A recorder that tells phases by what calls an operator."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.updates = False
        self.updated = False
        self.autocasts = False
        """Whether the step enters torch.autocast, which does nothing to meta tensors."""
        self.backward_begins: Callable[[], None] = lambda: None

    def _locate(self, func: Any, args: Any) -> None:
        self._tell_phase()
        super()._locate(func, args)

    def enter_module(self, name: str) -> None:
        self._tell_phase()
        super().enter_module(name)

    def _tell_phase(self) -> None:
        before = self.phase
        self.phase = "optimizer" if self.updates else "backward" if in_backward() else "forward"
        self.updated |= self.updates
        if before == "forward" and self.phase == "backward":
            self.backward_begins()


class StepMapping(CudaMapping):
    """The mapping onto CUDA around a whole step, where tensors stay on the meta device wherever the step sends them."""

    rests = False
    """Inside of an optimizer, whose counters are host's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.rests:
            return func(*args, **kwargs)
        if func in self._constructors:
            kwargs["device"] = "meta"
        elif func in MOVES:
            args, kwargs = without_device(args, kwargs)
            if moves_alone(func, args, kwargs):
                return kept_on_meta(args[0])
        args, kwargs = map_tensors(kept_on_meta, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def on_meta_in_place(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], dtype: torch.dtype | None
) -> Iterator[None]:
    """Every parameter and buffer as a meta tensor, the same object everywhere, and optimizers without states; undone on leaving.

    `dtype`: of what holds floating-point numbers, its own by default.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    _forget_references(recurrent)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in [*model.parameters(), *model.buffers()]:
        bare = torch.empty_like(
            tensor, dtype=dtype if tensor.is_floating_point() else None, device="meta"
        )
        pairs.append(
            (
                tensor,
                (
                    nn.Parameter(bare, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else bare
                ),
            )
        )
    states = [dict(optimizer.state) for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            optimizer.state.clear()
        for tensor, bare in pairs:
            torch.utils.swap_tensors(tensor, bare)
        for module in recurrent:
            module._init_flat_weights()
        yield
    finally:
        _forget_references(recurrent)
        for tensor, bare in pairs:
            if tensor.device.type == "meta":
                tensor.grad = None
                hooked: Any = tensor
                hooked._post_accumulate_grad_hooks = (
                    None  # or new hooks would join a list that nobody calls
                )
                torch.utils.swap_tensors(tensor, bare)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
        for module in recurrent:
            module._init_flat_weights()


def _forget_references(modules: Iterable[nn.RNNBase]) -> None:
    """Drop the weak references to weights that recurrent modules hold: a tensor with one cannot be swapped. So does Module.to."""
    for module in modules:
        module._flat_weight_refs = []


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return list(
        tensors_in([dict(state) for optimizer in optimizers for state in optimizer.state.values()])
    )
