"""Trace a task into a Workload: one step at three batch sizes on the meta device, no weights, no GPU.

The first two sizes give every number its two coefficients; the third checks them. A model for which the numbers are
not affine in the batch size (a loss over all pairs of samples, say) is refused with the operator that shows it.
"""

import contextlib
import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.process import explain
from trainpace.trace.blocks import Chain, Layout, blocks_of, layout_of, longest_chain
from trainpace.trace.cuda_mapping import (
    CudaMapping,
    checkpoints_see_through,
    python_functions_see_through,
    unpacked_sequences,
)
from trainpace.trace.operators import map_tensors, tensors_in
from trainpace.trace.optimizers import make_optimizer, optimizer_name
from trainpace.trace.recorder import BEFORE, Recorded, Recorder
from trainpace.trace.repeats import idle_parameters, only_these_blocks, repeated, shortened
from trainpace.trace.specs import build_task
from trainpace.trace.stand_ins import answered
from trainpace.trace.task import Task, WholeStep, recompute_activations
from trainpace.trace.whole_step import on_meta_in_place, record_whole_step, storage_bytes
from trainpace.workload import (
    MOST_SIZES,
    PHASES,
    PLAIN,
    Form,
    MemoryProfile,
    Operators,
    TracedForm,
    Variant,
    Workload,
    form_of,
)

BATCHES = (2, 3, 5)
"""The batch sizes of the three steps. At size 1 torch drops dimensions and copies."""


def trace(spec: str, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN) -> Workload:
    """Trace a model spec. `variant.optimizer` names one of `optimizers.OPTIMIZERS`; None takes the task's own, or sgd_momentum.

    Runs the model's Python code in this process: for code that is not trainpace's, use `load_workload`.
    """
    if spec.rpartition(":")[0].endswith(".py"):
        task = build_task(spec)
    else:
        with torch.device("meta"):
            task = build_task(spec, variant.sequence_length, variant.image_size, not variant.legacy)
    if variant.checkpointing:
        if task.step is not None:
            raise TrainpaceError(f"{task.name} has a step of its own.", "Let its models recompute activations there.")
        recompute_activations(task.model)
    return trace_task(task, forms, variant)


def trace_task(task: Task, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN) -> Workload:
    """The workload of a task, in the form of its own settings' precision where `forms` names none."""
    own = "sgd_momentum" if task.optimizer is None else optimizer_name(task.optimizer)
    if task.step is not None:
        own = task.step.optimizer_name
        if variant.optimizer is not None or variant.mode != "train":
            raise TrainpaceError(
                f"{task.name} has a step of its own: its optimizers and how much of it runs are its function's.",
                "Leave `optimizer` and `mode` out.",
            )
    forms = forms or (form_of(task.settings.get("precision", "fp32")),)
    parameters = list(task.model.parameters())
    sample_bytes, batch_tensors = _batch_shape(task)
    traced = {form: _trace_form(task, form, variant) for form in forms}
    notes = dict.fromkeys([*task.notes, *(doubt for _, doubt in traced.values() if doubt)])
    return Workload(
        model=task.name, sample=task.sample, sequence_length=task.sequence_length, sample_bytes=sample_bytes,
        batch_tensors=batch_tensors,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer="none" if variant.mode != "train" else variant.optimizer or own,
        mode=variant.mode, checkpointed=variant.checkpointing, traced_batches=BATCHES, notes=tuple(notes),
        settings=dict(task.settings), whole_step=task.step is not None,
        forms={form: result for form, (result, _) in traced.items()},
    )  # fmt: skip


def _trace_form(task: Task, form: Form, variant: Variant) -> tuple[TracedForm, str | None]:
    """The form, and a sentence where its FLOPs are in doubt."""
    if task.step is not None:
        runs = _whole_steps(task, task.step, form, variant)
        return _fit(task.name, runs, [run.recorded for run in runs], None), runs[1].flop_check.note()
    model, own = on_meta(task.model, task.optimizer, torch.bfloat16 if form == "half" else None)
    model.train(variant.mode != "inference")
    stepper = own if variant.optimizer is None else None
    stepper = stepper or make_optimizer(variant.optimizer or "sgd_momentum", model)
    whole = longest_chain(model)
    short = None if whole is None else shortened(model, whole)
    for chain in (short, whole):
        runs = [_one_step(task, model, stepper, form, variant, n, chain) for n in BATCHES]
        if _kinds(runs[0].recorded) != _kinds(runs[1].recorded) == _kinds(runs[2].recorded):
            # a model may compute something once and keep it, such as relative positions: later steps are without it
            runs[0] = _one_step(task, model, stepper, form, variant, BATCHES[0], chain)
        steps = [step for run in runs if (step := repeated(run, chain)) is not None]
        if len(steps) == len(runs):
            break
    return _fit(task.name, runs, steps, chain), runs[1].flop_check.note()


def _whole_steps(task: Task, step: WholeStep, form: Form, variant: Variant) -> list[Recorder]:
    runs = []
    for n in BATCHES:
        batch = _meta_batch(task, n, form)
        try:
            dtype = torch.bfloat16 if form == "half" else None
            with on_meta_in_place(task.model, step.optimizers, dtype), unpacked_sequences(), answered(form, task.pads):
                runs.append(record_whole_step(step, task.model, batch, form, variant))
        except TrainpaceError:
            raise
        except Exception as error:
            raise _explained(task.name, error, task.model) from error
    return runs


def _kinds(recorded: Sequence[Recorded]) -> list[str]:
    return [one.row.kind for one in recorded]


def _one_step(
    task: Task, model: nn.Module, stepper: torch.optim.Optimizer, form: Form, variant: Variant, batch_size: int,
    chain: Chain | None,
) -> Recorder:  # fmt: skip
    stepper.state.clear()
    for group in stepper.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = not (variant.legacy or variant.cpu)  # CUDA's default since torch 2.0
    model.zero_grad(set_to_none=True)
    batch = _meta_batch(task, batch_size, form)
    named = dict(model.named_parameters())
    recorder = Recorder(named, with_steps=chain is not None and batch_size == BATCHES[1])
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
    mapping = CudaMapping(form, fused_attention=not variant.legacy, cpu=variant.cpu)
    try:
        with (
            warnings.catch_warnings(),
            python_functions_see_through(),
            unpacked_sequences(),
            answered(form, task.pads),
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
                recorder.phase = "optimizer"
                recorder.recording = False
                for parameter in idle:
                    parameter.grad = torch.empty_like(parameter)
                    recorder.gradient_ready(parameter.grad)
                stepper.step()  # creates the states, which is no part of later steps
                recorder.recording = True
                stepper.step()
    except TrainpaceError:
        raise
    except Exception as error:
        raise _explained(task.name, error, model) from error
    finally:
        for hook in hooks:
            hook.remove()
    recorder.optimizer_bytes = storage_bytes(tensors_in([dict(state) for state in stepper.state.values()]))
    recorder.parameter_bytes = storage_bytes(lasting)
    # the states were made during this step, but are there before it in every other one
    for recorded in recorder.recorded:
        if recorded.phase == "optimizer":
            recorded.activation_bytes = max(0.0, recorded.activation_bytes - recorder.optimizer_bytes)
    return recorder


def _forward_and_backward(task: Task, model: nn.Module, batch: Any, recorder: Recorder, mapping: CudaMapping) -> None:
    loss = task.loss(model, batch)
    mapping.forget_casts()
    if loss.dim() != 0:
        raise TrainpaceError(f"the loss of {task.name} has shape {tuple(loss.shape)}.", "Return one number.")
    recorder.end_forward()
    recorder.phase = "backward"
    loss.backward()


def _fit(name: str, runs: list[Recorder], steps: list[list[Recorded]], chain: Chain | None) -> TracedForm:
    """The form of three runs, whose `steps` are of the whole chain."""
    first, second, recorded = runs[0], runs[1], steps[0]
    kinds = [_kinds(step) for step in steps]
    if not kinds[0]:
        raise TrainpaceError(f"{name} does nothing on the device.")
    if not kinds[0] == kinds[1] == kinds[2]:
        raise TrainpaceError(
            f"{name} runs other operators at batch size {BATCHES[2]} than at {BATCHES[0]}, so that batches between cannot be"
            " computed.",
            "Measure it with `trainpace measure` instead.",
        )
    b0, b1, b2 = BATCHES
    columns = [np.array([_numbers(one) for one in step]) for step in steps]
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
    memory = MemoryProfile(
        parameter_bytes=first.parameter_bytes, optimizer_bytes=first.optimizer_bytes,
        peaks=_peaks(constant[:, -2], constant[:, -1], slope[:, -1]), moments=_moments(recorded, constant, slope),
    )  # fmt: skip
    layout = layout_of(chain, second)
    operators, heads = _group(recorded, constant, slope, layout)
    if layout is None:
        return TracedForm(operators=operators, memory=memory)
    origins = [recorded[i].origin for i in heads]
    inside = [origin.place > BEFORE for origin in origins]
    roles = [layout.role(*row) for row in zip(operators.kind, operators.function, origins, strict=True)]
    blocks = blocks_of(layout, runs, steps, BATCHES, inside, roles, operators.count)
    return TracedForm(operators=operators, memory=memory, blocks=blocks)


def _numbers(recorded: Recorded) -> list[float]:
    row = recorded.row
    sizes = [*map(float, row.dims), *([0.0] * (MOST_SIZES - len(row.dims)))]
    alive = (recorded.gradient_bytes, recorded.activation_bytes)
    return [row.flops, row.read_bytes, row.written_bytes, *sizes, *alive]


def _group(
    recorded: Sequence[Recorded], constant: np.ndarray, slope: np.ndarray, layout: Layout | None
) -> tuple[Operators, np.ndarray]:
    """Alike operators into one row with a count, in order of first appearance, and the first of each.

    Those inside and outside of the blocks are kept apart, and those of different roles.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, r in enumerate(recorded):
        place = layout and (r.origin.place > BEFORE, layout.role(r.row.kind, r.row.function, r.origin))
        numbers = (constant[i, :-2].tobytes(), slope[i, :-2].tobytes())
        key = (r.row.kind, r.row.function, r.phase, r.row.half, r.row.launches, place, *numbers)
        groups.setdefault(key, []).append(i)
    heads = np.array([members[0] for members in groups.values()])
    both = np.stack([constant[heads], slope[heads]], axis=-1)
    first = [recorded[i] for i in heads]
    operators = Operators(
        kind=tuple(r.row.kind for r in first), function=tuple(r.row.function for r in first),
        phase=tuple(r.phase for r in first), module=tuple(r.module for r in first),
        half=np.array([r.row.half for r in first]), launches=np.array([r.row.launches for r in first]),
        count=np.array([len(members) for members in groups.values()]),
        flops=both[:, 0], read_bytes=both[:, 1], written_bytes=both[:, 2], dims=both[:, 3 : 3 + MOST_SIZES],
    )  # fmt: skip
    return operators, heads


def _peaks(gradient: np.ndarray, constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The moments on the upper envelope of total bytes over the batch size: the others are never the peak."""
    slope = np.maximum(slope, 0.0)
    total = gradient + constant
    envelope: list[int] = []
    for i in sorted(range(len(total)), key=lambda i: (-slope[i], -total[i])):
        if not envelope or total[i] > total[envelope[-1]]:
            envelope.append(i)
    return np.stack([gradient[envelope], constant[envelope], slope[envelope]], axis=1)


MOMENTS = 64
"""The number of a step's moments that a workload holds for its page, the peaks for a batch of 1 and of many among them."""


def _moments(recorded: Sequence[Recorded], constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The fullest moment of each stretch of operators, and where it lies in its phase by the bytes that operators moved."""
    phase = np.array([PHASES.index(r.phase) for r in recorded])
    moved = (constant + slope * BATCHES[1])[:, 1:3].sum(axis=1)
    total = constant[:, -2] + constant[:, -1] + slope[:, -1] * np.array([[1.0], [1e6]])
    moments = {0, len(phase) - 1, *total.argmax(axis=1).tolist()}
    for stretch in np.array_split(np.arange(len(phase)), MOMENTS - 4):
        if len(stretch):
            moments.add(int(stretch[total[1, stretch].argmax()]))
    rows = np.array(sorted(moments))
    share = np.zeros(len(phase))
    for code in np.unique(phase):
        inside = phase == code
        share[inside] = np.cumsum(moved[inside]) / max(moved[inside].sum(), 1.0)
    alive = [constant[rows, -2], constant[rows, -1], np.maximum(slope[rows, -1], 0.0)]
    return np.stack([phase[rows].astype(float), share[rows], *alive], axis=1)


def on_meta(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None = None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copies of the model, without weights, and of its optimizer. Tied weights stay tied, which `Module.to("meta")` would undo.

    `dtype`: of what holds floating-point numbers, the model's own by default.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        bare = torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else None, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    copied = copy.deepcopy(model, memo)
    if optimizer is None:
        return copied, None
    fresh = copy.copy(optimizer)
    fresh.state = type(optimizer.state)(optimizer.state.default_factory) if optimizer.state is not None else {}
    fresh.param_groups = [
        {**group, "params": [memo.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]
    return copied, fresh


def _meta_batch(task: Task, size: int, form: Form) -> Any:
    with torch.device("meta") if task.dataset is None else contextlib.nullcontext():
        batch = (task.batch_to_trace or task.make_batch)(size)

    def bare(t: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if form == "half" and t.is_floating_point() else t.dtype
        return torch.empty(t.shape, dtype=dtype, device="meta")

    return map_tensors(bare, batch)


def _batch_shape(task: Task) -> tuple[float, int]:
    """(bytes of a sample, tensors of a batch)."""
    one, two = (list(tensors_in(_meta_batch(task, n, "fp32"))) for n in (1, 2))
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


def _explained(name: str, error: Exception, model: nn.Module) -> UserCodeError:
    """One sentence with the user's own line where it can be found, and the module that looks at values."""
    reason = str(error)
    if (
        "meta tensors" in reason
        or "Meta" in type(error).__name__
        or "data-dependent" in reason
        or "register_meta" in reason
    ):
        place, module = _innermost_module(error, model)
        where = f" in {place} ({type(module).__name__})" if place else ""
        is_eager = getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        return UserCodeError(
            f"{name} looks at the values of its tensors{where}, so it cannot be traced without them: {explain(error, 'it')}",
            'Give its experts as one product: experts_implementation="grouped_mm" in transformers.'
            if is_eager
            else "Measure it with `trainpace measure` instead. Experts can be traced where torch.nn.functional.grouped_mm makes"
            " their products, or where each gets a fixed number of tokens.",
        )
    return UserCodeError(explain(error, name))


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
