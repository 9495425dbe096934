"""Trace a task into a `Workload` by running its step on the meta device.

Tracing needs no GPU and no values of weights. The step runs at three batch sizes. FLOPs, bytes and
sizes are affine in the batch size: constant + slope x batch size. The first two batch sizes
determine both coefficients, and the third checks them. If a number is not affine (for example in a
loss over all pairs of samples), tracing raises an error that names the operator.

The user may provide a whole step, a function that runs forward, backward and optimizer itself. The
function refers to the user's own models. Their tensors are therefore turned into meta tensors in
place, and get their values back afterwards. The caller of an operator decides its phase: "backward"
in autograd's engine, "optimizer" inside an optimizer's `step`, and "forward" otherwise.
"""

import contextlib
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UserCodeError, message_of
from trainpace.core.execution import find_optimizer
from trainpace.core.worker import explain, place_in_code
from trainpace.workload.adapters import adapted, packed_away
from trainpace.workload.blocks import (
    Chain,
    idle_parameters,
    longest_chain,
    only_these_blocks,
    repeated,
    shortened,
)
from trainpace.workload.cuda_mapping import (
    MOVES,
    CudaMapping,
    answered,
    checkpoints_see_through,
    kept_on_meta,
    moves_alone,
    replaced,
    without_device,
)
from trainpace.workload.fit import MEASURE, fitted_form, kinds_of
from trainpace.workload.meta import map_tensors, meta_memo, on_meta, tensors_in, without_data
from trainpace.workload.model_spec import ModelSpec, check_packages
from trainpace.workload.optimizers import (
    launch_together,
    make_optimizer,
    optimizer_name,
    step_like,
    step_once,
    storage_bytes,
    trained_shapes,
)
from trainpace.workload.recorder import BATCHES, Recorder, in_backward
from trainpace.workload.specs import MODELS, build_task
from trainpace.workload.task import Task, WholeStep, recompute_activations, usual_optimizer
from trainpace.workload.workload import (
    AS_IT_IS,
    PLAIN,
    Form,
    TracedForm,
    Variant,
    Workload,
    form_of,
)

AUTOCASTS = (
    "The step's own torch.autocast was not traced: matmuls are forecast in the number format of"
    " the precision. Use --precision amp_bf16 or amp_fp16."
)
BUILT_ON_META = (
    "This machine has too little memory for the weights, so the model was built on the meta device."
)
_EXPERTS = re.compile(r"[Ee]xpert|MoE|Moe|MOE|\bmoe\b|(\b|_)moe_")
"""Pattern for the names and classes of mixture-of-experts modules."""
_GROUPED_EXPERTS = (
    'Compute its experts together: experts_implementation="grouped_mm" in transformers.'
)


def trace(
    spec: str, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN, on_meta: bool = False
) -> Workload:
    """Trace a model spec into a workload.

    The model's Python code runs in this process. `load_workload` runs code of others in a
    subprocess.

    Args:
        spec: The model, as in `trainpace.workload.model_spec`.
        forms: Number formats to trace, such as "fp32", "amp" or "half".
        variant: How to trace. `variant.optimizer` is a name from `trainpace.core.execution`. If it
            is None, the task's own optimizer is used. A task without one gets AdamW for token
            sequences, and SGD with momentum for other samples.
        on_meta: Run the user's function under the meta device too, so its weights need no memory.

    Raises:
        TrainpaceError: If the model cannot be traced in this variant.
    """
    named = ModelSpec.of(spec)
    is_built_in = named.kind == "torchvision" and named.name in MODELS
    needs_library = named.is_library and not is_built_in
    check_packages(*[named.kind] * needs_library, *["peft"] * bool(variant.adaptation.adapter))
    runs_code = named.runs_code
    with torch.device("meta") if on_meta or not runs_code else contextlib.nullcontext():
        task = build_task(spec, variant.sequence_length, variant.image_size, not variant.legacy)
    if runs_code:
        if on_meta:
            task = task._replace(notes=(*task.notes, BUILT_ON_META))
        if variant.sequence_length not in (None, task.sequence_length):
            raise TrainpaceError(
                f"{spec} brings its own samples: {task.sample}, not {variant.sequence_length}"
                " tokens.",
                "Omit --sequence-length, and let the function make longer samples.",
            )
    if variant.adaptation != AS_IT_IS:
        task = adapted(task, variant.adaptation)
    if variant.checkpointing:
        if task.step is not None:
            raise TrainpaceError(
                f"{task.name} has a step of its own.", "Recompute activations in its models."
            )
        recompute_activations(task.model)
    return trace_task(task, forms, variant)


def trace_task(
    task: Task,
    forms: Sequence[Form] = ("fp32",),
    variant: Variant = PLAIN,
    only_batch: int | None = None,
) -> Workload:
    """Trace a task into a workload.

    Args:
        task: The task.
        forms: Number formats. If empty, the format of the precision in the task's settings.
        variant: How to trace.
        only_batch: Trace only this batch size. The workload is then valid for this size only.
    """
    variant = _resolved(task, variant)
    forms = forms or (form_of(task.settings.get("precision", "fp32")),)
    sample_bytes, batch_tensors = _batch_shape(task, only_batch)
    traced = {form: _trace_form(task, form, variant, only_batch) for form in forms}
    notes = dict.fromkeys([*task.notes, *(doubt for _, doubt in traced.values() if doubt)])
    trains, is_whole_step = variant.mode == "train", task.step is not None
    return Workload(
        model=task.name,
        sample=task.sample,
        sequence_length=task.sequence_length,
        sample_bytes=sample_bytes,
        batch_tensors=batch_tensors,
        parameters=_numbers(task.model.parameters()) + packed_away(task.model),
        trainable_parameters=_numbers(p for p in task.model.parameters() if p.requires_grad),
        optimizer=_optimizer(task, variant),
        adaptation=variant.adaptation.in_words,
        trained=trained_shapes(task.model),
        assumes_optimizer=trains and variant.optimizer is None is task.optimizer is task.step,
        mode=variant.mode,
        checkpointed=variant.checkpointing,
        notes=tuple(notes),
        traced_batches=(only_batch,) if only_batch else BATCHES,
        settings=dict(task.settings),
        whole_step=is_whole_step,
        forms={form: found for form, (found, _) in traced.items()},
    )


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _resolved(task: Task, variant: Variant) -> Variant:
    """Return the variant with the canonical name of its optimizer.

    If the user and the task name none, the optimizer of the task's settings is used.

    Raises:
        UnknownName: If the optimizer is unknown.
        TrainpaceError: If the task has a step of its own, and an optimizer or mode is requested.
    """
    if variant.optimizer is not None:
        variant = variant._replace(optimizer=find_optimizer(variant.optimizer)[0])
    trains = variant.mode == "train"
    if task.step is not None and (variant.optimizer is not None or not trains):
        raise TrainpaceError(
            f"{task.name} has a step of its own, which decides its optimizers and how much runs.",
            "Omit `optimizer` and `mode`.",
        )
    if task.optimizer is None and variant.optimizer is None and trains:
        variant = variant._replace(optimizer=task.settings.get("optimizer"))
    return variant


def _optimizer(task: Task, variant: Variant) -> str:
    if variant.mode != "train":
        return "none"
    if task.step is not None:
        return task.step.optimizer_name
    own = usual_optimizer(task) if task.optimizer is None else optimizer_name(task.optimizer)
    return variant.optimizer or own


def meta_batch(task: Task, size: int, form: Form) -> Any:
    """Return a batch of a task on the meta device. With form "half", floats become bf16."""
    with torch.device("meta") if task.dataset is None else contextlib.nullcontext():
        batch = (task.batch_to_trace or task.make_batch)(size)

    def empty(t: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if form == "half" and t.is_floating_point() else t.dtype
        if t.layout is not torch.strided:
            return without_data(t, dtype)
        return torch.empty(t.shape, dtype=dtype, device="meta")

    return map_tensors(empty, batch)


def _batch_shape(task: Task, only_batch: int | None) -> tuple[float, int]:
    """Return (bytes per sample, tensors per batch)."""

    def measured(n: int) -> tuple[int, int]:
        tensors = list(tensors_in(meta_batch(task, n, "fp32")))
        return sum(t.numel() * t.element_size() for t in tensors), len(tensors)

    if only_batch:
        size, tensors = measured(only_batch)
        return size / only_batch, tensors
    (one, tensors), (two, _) = measured(1), measured(2)
    return float(two - one), tensors


def _trace_form(
    task: Task, form: Form, variant: Variant, only_batch: int | None
) -> tuple[TracedForm, str | None]:
    """Return the traced step in one number format, and a note if its FLOPs may be wrong."""
    if task.step is not None:
        return _trace_whole_steps(task, task.step, form, variant)
    passes = _Passes(task, form, variant)
    whole = longest_chain(passes.model)
    if only_batch:
        passes.step(only_batch, whole)  # a model may compute values once and cache them
        run = passes.step(only_batch, whole, with_steps=True)
        return fitted_form(task.name, [run], [run.recorded], whole), run.flop_check.note()
    for chain in (whole and shortened(passes.model, whole), whole):
        try:
            runs = passes.at_each_batch(chain)
        except UserCodeError:
            if chain is whole:
                raise
            continue  # the model's code needs all blocks, for example because it counts them
        steps = [step for run in runs if (step := repeated(run, chain)) is not None]
        if len(steps) == len(runs):
            break
    return fitted_form(task.name, runs, steps, chain), runs[1].flop_check.note()


class _Passes:
    """Runner for the forward pass, backward pass and optimizer of a task in one number format."""

    def __init__(self, task: Task, form: Form, variant: Variant) -> None:
        own = task.optimizer if variant.optimizer is None else None
        quantised = bool(variant.adaptation.weights)
        in_16_bits = form == "half" or (form == "amp" and quantised)
        self.task, self.form, self.variant = task, form, variant
        self.model, own = on_meta(task.model, own, torch.bfloat16 if in_16_bits else None)
        self.model.train(variant.mode != "inference")
        self.stepper = own or make_optimizer(variant.optimizer or usual_optimizer(task), self.model)
        in_16_bits_too = any((variant.autocast, task.autocast, quantised))
        self.autocast = form == "amp" or (form == "half" and in_16_bits_too)

    def at_each_batch(self, chain: Chain | None) -> list[Recorder]:
        """Record a step at each batch size of `BATCHES`."""
        first = self.step(BATCHES[0], chain)
        runs = [first, *(self.step(n, chain, first) for n in BATCHES[1:])]
        one, two, three = (kinds_of(run.recorded) for run in runs)
        if one != two == three:
            # a model may compute values once and cache them, such as relative positions
            runs[0] = self.step(BATCHES[0], chain)
        return runs

    def step(
        self,
        batch_size: int,
        chain: Chain | None,
        first: Recorder | None = None,
        with_steps: bool = False,
    ) -> Recorder:
        """Record one step.

        Args:
            batch_size: Number of samples.
            chain: The blocks that run. None runs the model without looking for blocks.
            first: Recorder of another batch size. Its optimizer step is copied.
            with_steps: Store the inputs and outputs of every call of the forward pass. They are
                always stored at the second of `BATCHES`, and never without a chain.
        """
        task, model, variant = self.task, self.model, self.variant
        self.stepper.state.clear()
        launch_together(self.stepper, not (variant.legacy or variant.cpu))
        model.zero_grad(set_to_none=True)
        batch = meta_batch(task, batch_size, self.form)
        named = dict(model.named_parameters())
        with_steps = with_steps or batch_size == BATCHES[1]
        recorder = Recorder(named, with_steps=chain is not None and with_steps)
        lasting = [*model.parameters(), *model.buffers()]
        recorder.keep_alive([*lasting, *tensors_in(batch)])
        idle = [] if chain is None else idle_parameters(model, chain)
        mapping = CudaMapping(self.autocast, not variant.legacy, variant.cpu)
        with (
            _explained(task.name, model),
            _hooked(recorder, model, named, chain),
            warnings.catch_warnings(),
            answered(self.autocast, task.pads),
            recorder,
        ):
            warnings.simplefilter("ignore")
            with mapping, checkpoints_see_through(mapping), only_these_blocks(model, chain):
                self._pass(batch, recorder, mapping)
            if variant.mode == "train":
                self._update(recorder, first, idle)
        recorder.parameter_bytes = storage_bytes(lasting)
        recorder.frozen_bytes = storage_bytes(p for p in named.values() if not p.requires_grad)
        return recorder

    def _pass(self, batch: Any, recorder: Recorder, mapping: CudaMapping) -> None:
        if self.variant.mode == "inference":
            with torch.no_grad():
                self.task.forward(self.model, batch)
            recorder.end_forward()
            return
        loss = self.task.loss(self.model, batch)
        mapping.forget_casts()
        if loss.dim() != 0:
            raise TrainpaceError(
                f"the loss of {self.task.name} has shape {tuple(loss.shape)}.", "Return one number."
            )
        recorder.end_forward()
        recorder.phase = "backward"
        loss.backward()

    def _update(
        self, recorder: Recorder, first: Recorder | None, idle: Iterable[nn.Parameter]
    ) -> None:
        recorder.recording, recorder.phase = False, "optimizer"
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # the rows of a sparse embedding gradient grow with the batch, so updates differ
        if first is not None and all(g.layout is torch.strided for g in gradients):
            step_like(first, recorder)
            return
        for parameter in idle:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                recorder.gradient_ready(parameter.grad)
        step_once(self.stepper, recorder)


@contextlib.contextmanager
def _explained(name: str, model: nn.Module) -> Iterator[None]:
    try:
        yield
    except TrainpaceError:
        raise
    except Exception as error:
        raise explained(name, error, model) from error


@contextlib.contextmanager
def _hooked(
    recorder: Recorder,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    chain: Chain | None = None,
) -> Iterator[None]:
    """Notify the recorder of accumulated gradients, and of the blocks and modules that run."""
    hooks: list[Any] = [
        p.register_post_accumulate_grad_hook(lambda p: recorder.gradient_ready(p.grad))
        for p in parameters.values()
        if p.requires_grad
    ]
    hooks += [] if chain is None else _block_hooks(chain, recorder)
    hooks += [
        module.register_forward_pre_hook(lambda *_, name=name: recorder.enter_module(name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _block_hooks(chain: Chain, recorder: Recorder) -> list[Any]:
    def hidden_state(tree: Any) -> torch.Tensor | None:
        return next((t for t in tensors_in(tree) if t.is_floating_point()), None)

    def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = list(tensors_in([args, kwargs]))
        if (hidden := hidden_state(inputs)) is not None:
            recorder.enter_block(number, hidden, inputs)

    def leave(is_last: bool, _: nn.Module, args: Any, out: Any) -> None:
        if (hidden := hidden_state(out)) is not None:
            recorder.leave_block(hidden, is_last)

    hooks: list[Any] = []
    for number, block in enumerate(chain.modules, 1):
        hooks.append(block.register_forward_pre_hook(partial(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(partial(leave, number == len(chain.modules))))
    for number, block in enumerate(chain.units, 1):
        hooks.append(
            block.register_forward_pre_hook(lambda *_, number=number: recorder.enter_unit(number))
        )
        hooks.append(
            block.register_forward_hook(lambda *given: recorder.leave_unit(tensors_in(given[-1])))
        )
    return hooks


# --- whole steps provided by the user


def _trace_whole_steps(
    task: Task, step: WholeStep, form: Form, variant: Variant
) -> tuple[TracedForm, str | None]:
    runs = []
    dtype = torch.bfloat16 if form == "half" else None
    for n in BATCHES:
        batch = meta_batch(task, n, form)
        with (
            _on_meta_in_place(task.model, step.optimizers, dtype),
            _explained(task.name, task.model),
            answered(form == "amp", task.pads),
        ):
            runs.append(_record_whole_step(step, task.model, batch, form, variant))
    autocasts = AUTOCASTS if runs[1].autocasts and form != "amp" else None
    doubts = filter(None, [runs[1].flop_check.note(), autocasts])
    form_found = fitted_form(task.name, runs, [run.recorded for run in runs], None)
    return form_found, " ".join(doubts) or None


def _record_whole_step(
    step: WholeStep, model: nn.Module, batch: Any, form: Form, variant: Variant
) -> "_StepRecorder":
    """Run two steps on one batch and record the second.

    The first step creates the optimizer states and fills the caches of the model.
    """
    lasting = [*model.parameters(), *model.buffers()]
    named = dict(model.named_parameters())
    recorder = _StepRecorder(named)
    recorder.keep_alive([*lasting, *tensors_in(batch)])
    mapping = _StepMapping(form == "amp", not variant.legacy, variant.cpu)
    recorder.backward_begins = mapping.forget_casts

    def updating(is_on: bool) -> None:
        recorder.updates = mapping.rests = is_on
        mapping.forget_casts()  # the weights are about to change

    with contextlib.ExitStack() as hooks:
        for optimizer in step.optimizers:
            launch_together(optimizer, not (variant.legacy or variant.cpu))
            before = optimizer.register_step_pre_hook(lambda *_: updating(True))
            after = optimizer.register_step_post_hook(lambda *_: updating(False))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        with (
            _hooked(recorder, model, named),
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
    if not recorder.updated:
        raise TrainpaceError(
            "the step never calls an optimizer's step().",
            "A step trains: forward, backward, update.",
        )
    recorder.optimizer_bytes = storage_bytes(_states(step.optimizers))
    recorder.parameter_bytes = storage_bytes(lasting)
    recorder.frozen_bytes = storage_bytes(p for p in named.values() if not p.requires_grad)
    return recorder


@contextlib.contextmanager
def _noticed_autocast(recorder: "_StepRecorder") -> Iterator[None]:
    """Set `recorder.autocasts` if the step enters an enabled torch.autocast region."""
    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        recorder.autocasts |= region._enabled
        return enter(region)

    with replaced(torch.autocast, __enter__=entered):
        yield


class _StepRecorder(Recorder):
    """Recorder that derives the phase of an operator from its caller."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.updates = False
        self.updated = False
        self.autocasts = False
        """True if the step enters torch.autocast, which has no effect on meta tensors."""
        self.backward_begins: Callable[[], None] = lambda: None

    def _locate(self, func: Any, args: Any) -> None:
        self._set_phase()
        super()._locate(func, args)

    def enter_module(self, name: str) -> None:
        self._set_phase()
        super().enter_module(name)

    def _set_phase(self) -> None:
        before = self.phase
        self.phase = "optimizer" if self.updates else "backward" if in_backward() else "forward"
        self.updated |= self.updates
        if before == "forward" and self.phase == "backward":
            self.backward_begins()


class _StepMapping(CudaMapping):
    """Mapping that keeps tensors on the meta device, to whichever device the step moves them."""

    rests = False
    """True inside an optimizer: the mapping is off, because step counters stay on the host."""

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
def _on_meta_in_place(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], dtype: torch.dtype | None
) -> Iterator[None]:
    """Turn parameters and buffers into meta tensors in place, and restore them on exit.

    The Python objects stay the same, so every reference to them sees the meta tensors. The
    optimizer states are removed during the context and restored too.

    Args:
        model: The model.
        optimizers: Optimizers of the model.
        dtype: Dtype of floating-point tensors. None keeps the original dtypes.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    _drop_references(recurrent)
    attributes = _detach_attributes(model)
    memo = meta_memo(model, {}, dtype)
    pairs = [(t, memo[id(t)]) for t in [*model.parameters(), *model.buffers()]]
    states = [optimizer.state for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            optimizer.state = defaultdict(dict)
        for tensor, bare in pairs:
            _swap(tensor, bare)
        _make_references(recurrent)
        yield
    except Exception as error:
        _clear_frames(error)
        raise
    finally:
        _drop_references(recurrent)
        _detach_attributes(model)
        for tensor, bare in pairs:
            if tensor.device.type == "meta":
                tensor.grad = None
                hooked: Any = tensor
                # otherwise hooks added later would join a list that autograd no longer calls
                hooked._post_accumulate_grad_hooks = None
                _swap(tensor, bare)
        for module, name, value in attributes:
            setattr(module, name, value)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state = state
        _make_references(recurrent)


def _swap(tensor: torch.Tensor, bare: torch.Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, bare)
    except RuntimeError as error:
        raise TrainpaceError(
            "the step or its models keep an autograd graph or weak references to weights, so the"
            " weights cannot be replaced for a trace.",
            f"Detach the tensors that outlive a step, such as `total += loss.detach()`. {MEASURE}",
        ) from error


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of the code that failed, which keep its autograd graph alive."""
    traceback.clear_frames(error.__traceback__)
    for earlier in {error.__cause__, error.__context__} - {None}:
        assert earlier is not None
        _clear_frames(earlier)
        earlier.__traceback__ = None  # a frame also keeps the copy that `f_locals` makes


def _detach_attributes(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Detach tensors that modules store as plain attributes, such as the weight of `weight_norm`.

    Returns:
        (module, name, detached value) of each attribute.
    """
    found = [
        (module, name, map_tensors(torch.Tensor.detach, value))
        for module in model.modules()
        for name, value in vars(module).items()
        if any(tensor.grad_fn is not None for tensor in tensors_in(value))
    ]
    for module, name, value in found:
        setattr(module, name, value)
    return found


def _drop_references(modules: Iterable[nn.RNNBase]) -> None:
    """Drop the weak references of recurrent modules to their weights, as `Module.to` does.

    `torch.utils.swap_tensors` rejects tensors that have weak references.
    """
    for module in modules:
        module._flat_weight_refs = []


def _make_references(modules: Iterable[nn.RNNBase]) -> None:
    for module in modules:
        module._init_flat_weights()


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return list(
        tensors_in([dict(state) for optimizer in optimizers for state in optimizer.state.values()])
    )


# --- why a trace failed


def explained(name: str, error: Exception, model: nn.Module) -> UserCodeError:
    """Return an error that names the user's line, and the module that reads tensor values, if any.

    Args:
        name: Name of the model.
        error: The exception that the step raised.
        model: The model, to find the module in the traceback.
    """
    if not asks_for_values(error):
        return UserCodeError(explain(error, name))
    place, module = _innermost_module(error, model)
    where = f" in {place} ({type(module).__name__})" if place else ""
    classes = (f"{part} {type(inner).__name__}" for part, inner in model.named_modules())
    hint = MEASURE
    if any(map(_EXPERTS.search, classes)):
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager":
            hint = _GROUPED_EXPERTS
        else:
            hint += (
                " Experts can be traced if torch.nn.functional.grouped_mm computes them, or if each"
                " gets a fixed number of tokens."
            )
    code = place_in_code(error)
    at = f" at {code}" if code else ""
    return UserCodeError(
        f"{name} reads the values of its tensors{where}{at}, so it cannot be traced without them.",
        hint,
    )


def in_short(error: Exception) -> str:
    """Return why a watched script could not be traced, as a clause that ends a sentence."""
    place = place_in_code(error)
    where = f" at {place}" if place else ""
    if asks_for_values(error):
        return f"its code reads values of tensors{where}, and a trace only has their sizes"
    reason = message_of(error)
    if "TensorOptions(" in reason:
        reason = "it passes one to a constructor of CPU tensors, such as torch.LongTensor"
    return f"its code does not run on tensors without values{where} ({reason.rstrip('.')})"


def asks_for_values(error: Exception) -> bool:
    """Return True if code failed because it read the values of a meta tensor."""
    reason = str(error).replace("Meta tensor", "meta tensor")
    words = ("meta tensor", "data-dependent", "register_meta")
    return "Meta" in type(error).__name__ or any(word in reason for word in words)


def _innermost_module(error: Exception, model: nn.Module) -> tuple[str, nn.Module | None]:
    """Return (name, module) of the innermost module in the traceback, or ("", None)."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found: tuple[str, nn.Module | None] = "", None
    trace_back = error.__traceback__
    while trace_back is not None:
        module = trace_back.tb_frame.f_locals.get("self")
        if id(module) in names:
            found = names[id(module)], module
        trace_back = trace_back.tb_next
    return found
