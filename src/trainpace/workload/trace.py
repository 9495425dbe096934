"""Trace a task into a Workload: one step at three batch sizes on the meta device, no weights, no GPU.

The first two sizes give every number its two coefficients; the third checks them. A model for which the numbers are
not affine in the batch size (a loss over all pairs of samples, say) is refused with the operator that shows it.
"""

import contextlib
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import find_optimizer
from trainpace.workload.adapters import adapted
from trainpace.workload.bare import on_meta, without_data
from trainpace.workload.blocks import Chain, blocks_of, layout_of, longest_chain
from trainpace.workload.cuda_mapping import (
    CudaMapping,
    checkpoints_see_through,
    python_functions_see_through,
    unpacked_sequences,
)
from trainpace.workload.explaining import explained
from trainpace.workload.model_spec import ModelSpec
from trainpace.workload.quantised import packed_away
from trainpace.workload.recorded_operators import BATCHES, Recording
from trainpace.workload.recorder import Recorded, Recorder
from trainpace.workload.repeats import (
    idle_parameters,
    in_turns,
    only_these_blocks,
    repeated,
    shortened,
)
from trainpace.workload.specs import build_task
from trainpace.workload.stand_ins import answered
from trainpace.workload.stepping import launch_together, step_like, step_once, storage_bytes
from trainpace.workload.task import Task, WholeStep, recompute_activations, usual_optimizer
from trainpace.workload.task_optimizers import make_optimizer, optimizer_name
from trainpace.workload.tensors import map_tensors, tensors_in
from trainpace.workload.traced_rows import numbers_of, recording_of
from trainpace.workload.traced_updates import trained_shapes
from trainpace.workload.whole_step import StepRecorder, on_meta_in_place, record_whole_step
from trainpace.workload.workload import AS_IT_IS, PLAIN, Form, Variant, Workload, form_of

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
    return recording_of(recorded, constant, slope, layout, states, blocks)


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
    return recording_of(run.recorded, numbers, np.zeros_like(numbers), layout, states, blocks)


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
