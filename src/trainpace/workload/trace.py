"""Trace a task into a Workload: three batch sizes on the meta device, without weights or GPU.

[explaining] Why a model's code could not be traced, in a sentence.

[whole_step] Trace a step that runs forward, backward and updates by itself, of one model or several.

The user's own models are traced, since his function refers to them: each of their tensors becomes a meta tensor in its place, and
gets its values back afterwards. What runs in autograd's engine is backward, what runs inside an optimizer's `step` is optimizer,
and all else is forward, however often they take turns.

[trace] Trace a task into a Workload: one step at three batch sizes on the meta device, no weights, no GPU.

The first two sizes give every number its two coefficients; the third checks them. A model for which the numbers are
not affine in the batch size (a loss over all pairs of samples, say) is refused with the operator that shows it.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import find_optimizer
from trainpace.core.worker import explain, place_in_code
from trainpace.workload.adapters import adapted, packed_away
from trainpace.workload.blocks import (
    Chain,
    blocks_of,
    idle_parameters,
    in_turns,
    layout_of,
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
    python_functions_see_through,
    unpacked_sequences,
    without_device,
)
from trainpace.workload.meta import map_tensors, on_meta, tensors_in, without_data
from trainpace.workload.model_spec import ModelSpec
from trainpace.workload.optimizers import (
    launch_together,
    make_optimizer,
    optimizer_name,
    step_like,
    step_once,
    storage_bytes,
    trained_shapes,
)
from trainpace.workload.recorder import Recorded, Recorder, in_backward, numbers_of, recording_of
from trainpace.workload.recording import BATCHES, Recording
from trainpace.workload.specs import build_task
from trainpace.workload.task import Task, WholeStep, recompute_activations, usual_optimizer
from trainpace.workload.workload import AS_IT_IS, PLAIN, Form, Variant, Workload, form_of

# --- explaining
LONGEST_REASON = 200
"""Characters of torch's own reason that are kept."""
_EXPERTS = re.compile(r"[Ee]xpert|MoE|Moe|MOE|\bmoe\b|(\b|_)moe_")
"""In the names of the modules of a mixture of experts, or of their classes."""


def explained(name: str, error: Exception, model: nn.Module) -> UserCodeError:
    """One sentence with the user's own line where it can be found, and the module that looks at values."""
    if not asks_for_values(error):
        return UserCodeError(explain(error, name))
    place, module = _innermost_module(error, model)
    where = f" in {place} ({type(module).__name__})" if place else ""
    hint = "Measure it with `trainpace measure` instead."
    if getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager":
        hint = (
            'Give its experts as one product: experts_implementation="grouped_mm" in transformers.'
        )
    elif any(
        _EXPERTS.search(f"{part} {type(inner).__name__}") for part, inner in model.named_modules()
    ):
        hint += (
            " Experts can be traced where torch.nn.functional.grouped_mm makes their products, or"
            " where each gets a fixed number of tokens."
        )
    return UserCodeError(
        f"{name} looks at the values of its tensors{where}, so it cannot be traced without them:"
        f" {explain(error, 'it')}",
        hint,
    )


def in_short(error: Exception) -> str:
    """The same for a script that was only watched, of whose code nothing was asked: what tracing lacks, to follow a colon."""
    place = place_in_code(error)
    where = f" at {place}" if place else ""
    if asks_for_values(error):
        return f"its code asks for values of tensors{where}, and a trace has their sizes alone"
    reason = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    if "TensorOptions(" in reason:
        reason = "it gives one to a constructor of CPU tensors, such as torch.LongTensor"
    elif len(reason) > LONGEST_REASON:
        reason = reason[:LONGEST_REASON].rpartition(" ")[0]
    return f"its code does not run on tensors without values{where} ({reason.rstrip('.')})"


def asks_for_values(error: Exception) -> bool:
    reason = str(error)
    return (
        "meta tensors" in reason
        or "Meta" in type(error).__name__
        or "data-dependent" in reason
        or "register_meta" in reason
    )


def _innermost_module(error: Exception, model: nn.Module) -> tuple[str, nn.Module | None]:
    """(name, module) of the last of a model's modules whose code an error came through; nothing where it came through none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found: tuple[str, nn.Module | None] = "", None
    trace_back = error.__traceback__
    while trace_back is not None:
        module = trace_back.tb_frame.f_locals.get("self")
        if id(module) in names:
            found = names[id(module)], module
        trace_back = trace_back.tb_next
    return found


# --- whole_step
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


# --- trace
AUTOCASTS = (
    "The step's own torch.autocast was not followed: its products are forecast in the number format"
    " of the precision. --precision amp_bf16 or amp_fp16 is what it does."
)


def trace(spec: str, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN) -> Workload:
    """Trace a model spec. `variant.optimizer` names one of `trainpace.core.execution`; None takes the task's own, or the
    usual one: AdamW where samples are sequences of tokens, else SGD with momentum.

    Runs the model's Python code in this process: for code that is not trainpace's, use `load_workload`.
    """
    return record(spec, forms, variant)[0]


def record(
    spec: str, forms: Sequence[Form], variant: Variant
) -> tuple[Workload, dict[Form, Recording]]:
    """As `trace`, with the recordings that the workload's forms were made of."""
    if ModelSpec.of(spec).runs_code:
        task = build_task(spec)
        if variant.sequence_length not in (None, task.sequence_length):
            raise TrainpaceError(
                f"the samples of {spec} are its own: {task.sample}, not {variant.sequence_length}"
                " tokens.",
                "Leave --sequence-length out, and let the function make longer samples.",
            )
    else:
        with torch.device("meta"):
            task = build_task(spec, variant.sequence_length, variant.image_size, not variant.legacy)
    if variant.adaptation != AS_IT_IS:
        task = adapted(task, variant.adaptation)
    if variant.checkpointing:
        if task.step is not None:
            raise TrainpaceError(
                f"{task.name} has a step of its own.", "Let its models recompute activations there."
            )
        recompute_activations(task.model)
    return _record_task(task, forms, variant)


def trace_task(
    task: Task,
    forms: Sequence[Form] = ("fp32",),
    variant: Variant = PLAIN,
    only_batch: int | None = None,
) -> Workload:
    """The workload of a task, in the form of its own settings' precision where `forms` names none. `only_batch`: trace at this
    batch size alone, at which alone the workload then holds."""
    return _record_task(task, forms, variant, only_batch)[0]


def _record_task(
    task: Task, forms: Sequence[Form], variant: Variant, only_batch: int | None = None
) -> tuple[Workload, dict[Form, Recording]]:
    variant = _named(variant)
    if task.step is not None and (variant.optimizer is not None or variant.mode != "train"):
        raise TrainpaceError(
            f"{task.name} has a step of its own: its optimizers and how much of it runs are its"
            " function's.",
            "Leave `optimizer` and `mode` out.",
        )
    if task.optimizer is None and variant.optimizer is None and variant.mode == "train":
        variant = variant._replace(optimizer=task.settings.get("optimizer"))
    forms = forms or (form_of(task.settings.get("precision", "fp32")),)
    parameters = list(task.model.parameters())
    sample_bytes, batch_tensors = _batch_shape(task, only_batch)
    traced = {form: _trace_form(task, form, variant, only_batch) for form in forms}
    recordings = {form: recording for form, (recording, _) in traced.items()}
    notes = dict.fromkeys([*task.notes, *(doubt for _, doubt in traced.values() if doubt)])
    workload = Workload(
        model=task.name,
        sample=task.sample,
        sequence_length=task.sequence_length,
        sample_bytes=sample_bytes,
        batch_tensors=batch_tensors,
        parameters=sum(p.numel() for p in parameters) + packed_away(task.model),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer=_optimizer(task, variant),
        adaptation=variant.adaptation.in_words,
        trained=trained_shapes(task.model),
        assumes_optimizer=variant.mode == "train"
        and variant.optimizer is None is task.optimizer
        and task.step is None,
        mode=variant.mode,
        checkpointed=variant.checkpointing,
        notes=tuple(notes),
        traced_batches=(only_batch,) if only_batch else BATCHES,
        settings=dict(task.settings),
        whole_step=task.step is not None,
        forms={form: recording.form() for form, recording in recordings.items()},
    )
    return workload, recordings


def _named(variant: Variant) -> Variant:
    """The variant with its optimizer's name as this package has it. Raises UnknownName."""
    return (
        variant
        if variant.optimizer is None
        else variant._replace(optimizer=find_optimizer(variant.optimizer)[0])
    )


def _optimizer(task: Task, variant: Variant) -> str:
    if variant.mode != "train":
        return "none"
    if task.step is not None:
        return task.step.optimizer_name
    own = usual_optimizer(task) if task.optimizer is None else optimizer_name(task.optimizer)
    return variant.optimizer or own


def _trace_form(
    task: Task, form: Form, variant: Variant, only_batch: int | None = None
) -> tuple[Recording, str | None]:
    """Its recording, and a sentence where its FLOPs are in doubt."""
    if task.step is not None:
        own_runs = _whole_steps(task, task.step, form, variant)
        doubts = [
            own_runs[1].flop_check.note(),
            AUTOCASTS if own_runs[1].autocasts and form != "amp" else None,
        ]
        fitted = _fit(task.name, own_runs, [run.recorded for run in own_runs], None)
        return fitted, " ".join(filter(None, doubts)) or None
    own = task.optimizer if variant.optimizer is None else None
    in_16_bits = form == "half" or (form == "amp" and bool(variant.adaptation.weights))
    model, own = on_meta(task.model, own, torch.bfloat16 if in_16_bits else None)
    model.train(variant.mode != "inference")
    stepper = own or make_optimizer(variant.optimizer or usual_optimizer(task), model)
    longest = longest_chain(model)
    whole = None if longest is None else in_turns(longest)
    short = None if whole is None else shortened(model, whole)
    if only_batch:
        # the second time, since a model may compute something once and keep it
        for _ in range(2):
            run = _one_step(task, model, stepper, form, variant, only_batch, whole, with_steps=True)
        return _at_one_batch(task.name, run, whole), run.flop_check.note()
    for chain in (short, whole):
        try:
            runs: list[Recorder] = []
            for n in BATCHES:
                runs.append(
                    _one_step(
                        task, model, stepper, form, variant, n, chain, runs[0] if runs else None
                    )
                )
        except UserCodeError:
            if chain is whole:
                raise
            continue  # code that counts its blocks, or pairs them with something, wants them all
        if _kinds(runs[0].recorded) != _kinds(runs[1].recorded) == _kinds(runs[2].recorded):
            # a model may compute something once and keep it, such as relative positions: later steps are without it
            runs[0] = _one_step(task, model, stepper, form, variant, BATCHES[0], chain)
        steps = [step for run in runs if (step := repeated(run, chain)) is not None]
        if len(steps) == len(runs):
            break
    return _fit(task.name, runs, steps, chain), runs[1].flop_check.note()


def _whole_steps(task: Task, step: WholeStep, form: Form, variant: Variant) -> list[StepRecorder]:
    runs = []
    for n in BATCHES:
        batch = meta_batch(task, n, form)
        try:
            dtype = torch.bfloat16 if form == "half" else None
            with (
                on_meta_in_place(task.model, step.optimizers, dtype),
                unpacked_sequences(),
                answered(form == "amp", task.pads),
            ):
                runs.append(record_whole_step(step, task.model, batch, form, variant))
        except TrainpaceError:
            raise
        except Exception as error:
            raise explained(task.name, error, task.model) from error
    return runs


def _kinds(recorded: Sequence[Recorded]) -> list[str]:
    return [one.row.kind for one in recorded]


def _one_step(
    task: Task,
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    form: Form,
    variant: Variant,
    batch_size: int,
    chain: Chain | None,
    first: Recorder | None = None,
    with_steps: bool = False,
) -> Recorder:
    """Record a step; its update is that of the first batch size's recorder, where there is one."""
    stepper.state.clear()
    launch_together(stepper, not (variant.legacy or variant.cpu))
    model.zero_grad(set_to_none=True)
    batch = meta_batch(task, batch_size, form)
    named = dict(model.named_parameters())
    recorder = Recorder(
        named, with_steps=chain is not None and (with_steps or batch_size == BATCHES[1])
    )
    lasting = [*model.parameters(), *model.buffers()]
    recorder.keep_alive([*lasting, *tensors_in(batch)])
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: recorder.gradient_ready(p.grad))
        for p in named.values()
        if p.requires_grad
    ]
    hooks += [] if chain is None else _block_hooks(chain, recorder)
    hooks += [
        module.register_forward_pre_hook(lambda *_, name=name: recorder.enter_module(name))
        for name, module in model.named_modules()
        if name
    ]
    idle = [] if chain is None else [p for p in idle_parameters(model, chain) if p.requires_grad]
    autocast = form == "amp" or (
        form == "half" and bool(variant.autocast or task.autocast or variant.adaptation.weights)
    )
    mapping = CudaMapping(autocast, fused_attention=not variant.legacy, cpu=variant.cpu)
    try:
        with (
            warnings.catch_warnings(),
            python_functions_see_through(),
            unpacked_sequences(),
            answered(autocast, task.pads),
            recorder,
        ):
            warnings.simplefilter("ignore")
            with mapping, checkpoints_see_through(mapping), only_these_blocks(model, chain):
                if variant.mode == "inference":
                    with torch.no_grad():
                        task.forward(model, batch)
                    recorder.end_forward()
                else:
                    _forward_and_backward(task, model, batch, recorder, mapping)
            if variant.mode == "train":
                recorder.recording, recorder.phase = False, "optimizer"
                # rows of a table with a sparse gradient are as many as the batch has
                is_dense = all(
                    p.grad is None or p.grad.layout is torch.strided for p in model.parameters()
                )
                if first is not None and is_dense:
                    step_like(first, recorder)
                else:
                    for parameter in idle:
                        parameter.grad = torch.empty_like(parameter)
                        recorder.gradient_ready(parameter.grad)
                    step_once(stepper, recorder)
    except TrainpaceError:
        raise
    except Exception as error:
        raise explained(task.name, error, model) from error
    finally:
        for hook in hooks:
            hook.remove()
    recorder.parameter_bytes = storage_bytes(lasting)
    recorder.frozen_bytes = storage_bytes(p for p in named.values() if not p.requires_grad)
    return recorder


def _forward_and_backward(
    task: Task, model: nn.Module, batch: Any, recorder: Recorder, mapping: CudaMapping
) -> None:
    loss = task.loss(model, batch)
    mapping.forget_casts()
    if loss.dim() != 0:
        raise TrainpaceError(
            f"the loss of {task.name} has shape {tuple(loss.shape)}.", "Return one number."
        )
    recorder.end_forward()
    recorder.phase = "backward"
    loss.backward()


def _fit(
    name: str, runs: Sequence[Recorder], steps: Sequence[Sequence[Recorded]], chain: Chain | None
) -> Recording:
    """The recording that three runs agree on, whose `steps` are of the whole chain."""
    first, second, recorded = runs[0], runs[1], steps[0]
    kinds = [_kinds(step) for step in steps]
    if not kinds[0]:
        raise TrainpaceError(f"{name} does nothing on the device.")
    if not kinds[0] == kinds[1] == kinds[2]:
        raise TrainpaceError(
            f"{name} runs other operators at batch size {BATCHES[2]} than at {BATCHES[0]}, so that"
            " batches between cannot be computed.",
            "Measure it with `trainpace measure` instead.",
        )
    b0, b1, b2 = BATCHES
    columns = [np.array([numbers_of(one) for one in step]) for step in steps]
    slope = (columns[1] - columns[0]) / (b1 - b0)
    constant = columns[0] - slope * b0
    wrong = np.abs(constant + slope * b2 - columns[2]) > 1e-6 * np.maximum(1.0, np.abs(columns[2]))
    wrong[:, -1] = False  # the moment at which a tensor dies may move by one operator
    if wrong.any():
        number = int(np.flatnonzero(wrong.any(axis=1))[0])
        other = recorded[number]
        raise TrainpaceError(
            f"{name} is not affine in the batch size: its {other.row.kind} operator number {number}"
            f" ({other.module or other.phase}) grows otherwise.",
            "Measure it with `trainpace measure` instead.",
        )
    layout = layout_of(chain, second)
    states = (
        first.parameter_bytes,
        first.optimizer_bytes - first.paged_bytes,
        first.paged_bytes,
        first.frozen_bytes,
    )
    blocks = None if layout is None else blocks_of(layout, runs, steps)
    role_of = None if layout is None else layout.role
    return recording_of(recorded, constant, slope, role_of, states, blocks)


def _at_one_batch(name: str, run: Recorder, chain: Chain | None) -> Recording:
    """The recording of one step, whose numbers are the same for any batch: it holds for its own alone."""
    if not run.recorded:
        raise TrainpaceError(f"{name} does nothing on the device.")
    numbers = np.array([numbers_of(one) for one in run.recorded])
    layout = layout_of(chain, run)
    states = (
        run.parameter_bytes,
        run.optimizer_bytes - run.paged_bytes,
        run.paged_bytes,
        run.frozen_bytes,
    )
    blocks = None if layout is None else blocks_of(layout, [run, run], [run.recorded, run.recorded])
    role_of = None if layout is None else layout.role
    slope = np.zeros_like(numbers)
    return recording_of(run.recorded, numbers, slope, role_of, states, blocks)


def meta_batch(task: Task, size: int, form: Form) -> Any:
    with torch.device("meta") if task.dataset is None else contextlib.nullcontext():
        batch = (task.batch_to_trace or task.make_batch)(size)

    def empty(t: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if form == "half" and t.is_floating_point() else t.dtype
        if t.layout is not torch.strided:
            return without_data(t, dtype)
        return torch.empty(t.shape, dtype=dtype, device="meta")

    return map_tensors(empty, batch)


def _batch_shape(task: Task, only_batch: int | None) -> tuple[float, int]:
    """(bytes of a sample, tensors of a batch)."""
    if only_batch:
        whole = list(tensors_in(meta_batch(task, only_batch, "fp32")))
        return sum(t.numel() * t.element_size() for t in whole) / only_batch, len(whole)
    one, two = (list(tensors_in(meta_batch(task, n, "fp32"))) for n in (1, 2))
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in (one, two)]
    return float(sizes[1] - sizes[0]), len(one)


def _block_hooks(chain: Chain, recorder: Recorder) -> list[Any]:
    def hidden_state(tree: Any) -> torch.Tensor | None:
        return next((t for t in tensors_in(tree) if t.is_floating_point()), None)

    def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        if (hidden := hidden_state([args, kwargs])) is not None:
            recorder.enter_block(number, hidden)

    def leave(is_last: bool, _: nn.Module, args: Any, out: Any) -> None:
        if (hidden := hidden_state(out)) is not None:
            recorder.leave_block(hidden, is_last)

    hooks: list[Any] = []
    for number, block in enumerate(chain.modules, 1):
        hooks.append(block.register_forward_pre_hook(partial(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(partial(leave, number == len(chain.modules))))
    return hooks
