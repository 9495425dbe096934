"""Trace a task into a Workload: one step at three batch sizes on the meta device, no weights, no GPU.

The first two sizes give every number its two coefficients; the third checks them. A model for which the numbers are
not affine in the batch size (a loss over all pairs of samples, say) is refused with the operator that shows it.
"""

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.trace.blocks import Layout, blocks_of, layout_of
from trainpace.trace.chain import Chain, longest_chain
from trainpace.trace.cuda_mapping import CudaMapping, checkpoints_see_through, python_functions_see_through
from trainpace.trace.recorder import BEFORE, Recorder
from trainpace.trace.task import Task, build_task, make_optimizer, recompute_activations
from trainpace.trace.transformers_mapping import unpacked_sequences
from trainpace.workload import MOST_SIZES, PHASES, PLAIN, Form, MemoryProfile, Operators, TracedForm, Variant, Workload

BATCHES = (2, 3, 5)
"""The batch sizes of the three steps. At size 1 torch drops dimensions and copies."""


def trace(spec: str, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN) -> Workload:
    """Trace a model spec. `variant.optimizer` names one of `task.OPTIMIZERS`; None takes the task's own, or sgd_momentum.

    Runs the model's Python code in this process: for code that is not trainpace's, use `load_workload`.
    """
    if spec.rpartition(":")[0].endswith(".py"):
        task = build_task(spec)
    else:
        with torch.device("meta"):
            task = build_task(spec, variant.sequence_length, variant.image_size, not variant.legacy)
    if variant.checkpointing:
        recompute_activations(task.model)
    return trace_task(task, forms, variant)


def trace_task(task: Task, forms: Sequence[Form] = ("fp32",), variant: Variant = PLAIN) -> Workload:
    """Trace a task that has been built."""
    name = variant.optimizer or ("own" if task.optimizer else "sgd_momentum")
    parameters = list(task.model.parameters())
    traced: dict[str, TracedForm] = {
        form: _trace_form(task, None if name == "own" else name, form, variant) for form in forms
    }
    own = "" if task.optimizer is None else type(task.optimizer).__name__.lower()
    return Workload(
        model=task.name,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer="none" if variant.mode != "train" else own if name == "own" else name,
        sample=task.sample,
        sequence_length=task.sequence_length,
        traced_batches=BATCHES,
        mode=variant.mode,
        checkpointed=variant.checkpointing,
        sample_bytes=_sample_bytes(task),
        forms=traced,
    )


def _trace_form(task: Task, optimizer: str | None, form: Form, variant: Variant) -> TracedForm:
    model, own = on_meta(task.model, task.optimizer)
    if form == "half":
        model = model.to(torch.bfloat16)
        own = own if own is None else _rebind(own, model)
    model.train(variant.mode != "inference")
    stepper = own if optimizer is None else None
    stepper = stepper or make_optimizer(optimizer or "sgd_momentum", model)
    chain = longest_chain(model)
    runs = [_one_step(task, model, stepper, form, variant, n, chain) for n in BATCHES]
    if _kinds(runs[0]) != _kinds(runs[1]) == _kinds(runs[2]):
        # a model may compute something once and keep it, such as relative positions: later steps are without it
        runs[0] = _one_step(task, model, stepper, form, variant, BATCHES[0], chain)
    return _fit(task.name, runs, chain)


def _kinds(run: tuple[Recorder, float, float]) -> list[str]:
    return [row.kind for row in run[0].rows]


def _one_step(
    task: Task,
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    form: Form,
    variant: Variant,
    batch_size: int,
    chain: Chain | None,
) -> tuple[Recorder, float, float]:
    """(recorder, parameter and buffer bytes, optimizer state bytes) of one step."""
    stepper.state.clear()
    for group in stepper.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = not (variant.legacy or variant.cpu)  # CUDA's default since torch 2.0
    model.zero_grad(set_to_none=True)
    batch = _meta_batch(task, batch_size, form)
    named = dict(model.named_parameters())
    recorder = Recorder(named, with_steps=chain is not None and batch_size == BATCHES[1])
    lasting = [*model.parameters(), *model.buffers()]
    recorder.keep_alive([*lasting, *_leaves(batch)])
    hooks = [p.register_post_accumulate_grad_hook(lambda p: recorder.gradient_ready(p.grad)) for p in named.values()
             if p.requires_grad]  # fmt: skip
    hooks += [] if chain is None else _block_hooks(chain, recorder)
    hooks += _module_hooks(model, recorder)
    mapping = CudaMapping(form, fused_attention=not variant.legacy, cpu=variant.cpu)
    try:
        with warnings.catch_warnings(), python_functions_see_through(), unpacked_sequences(), recorder:
            warnings.simplefilter("ignore")
            with mapping, checkpoints_see_through(mapping):
                if variant.mode == "inference":
                    with torch.no_grad():
                        task.forward(model, batch)
                    recorder.end_forward()
                else:
                    _forward_and_backward(task, model, batch, recorder, mapping)
            if variant.mode == "train":
                recorder.phase = "optimizer"
                recorder.recording = False
                stepper.step()  # creates the states, which is no part of later steps
                recorder.recording = True
                stepper.step()
    except TrainpaceError:
        raise
    except Exception as error:
        raise _explained(task.name, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    states = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for state in stepper.state.values()
              for t in state.values() if isinstance(t, torch.Tensor) and t.device.type == "meta"}  # fmt: skip
    state_bytes = float(sum(states.values()))
    # the states were made during this step, but are there before it in every other one
    for i, phase in enumerate(recorder.phases):
        if phase == "optimizer":
            gradient, activation = recorder.alive[i]
            recorder.alive[i] = (gradient, max(0.0, activation - state_bytes))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in lasting}
    return recorder, float(sum(storages.values())), state_bytes


def _forward_and_backward(task: Task, model: nn.Module, batch: Any, recorder: Recorder, mapping: CudaMapping) -> None:
    loss = task.loss(model, batch)
    mapping.forget_casts()
    if loss.dim() != 0:
        raise TrainpaceError(f"the loss of {task.name} has shape {tuple(loss.shape)}.", "Return one number.")
    recorder.end_forward()
    recorder.phase = "backward"
    loss.backward()


def _fit(name: str, runs: list[tuple[Recorder, float, float]], chain: Chain | None) -> TracedForm:
    first, second, third = (run[0] for run in runs)
    kinds = [_kinds(run) for run in runs]
    if not kinds[0]:
        raise TrainpaceError(f"{name} does nothing on the device.")
    if not kinds[0] == kinds[1] == kinds[2]:
        raise TrainpaceError(
            f"{name} runs other operators at batch size {BATCHES[2]} than at {BATCHES[0]}, so that batches between cannot be"
            " computed.",
            "Measure it with `trainpace measure` instead.",
        )
    b0, b1, b2 = BATCHES
    columns = []
    for run in (first, second, third):
        numbers = [
            [row.flops, row.read_bytes, row.written_bytes, *row.dims, *([0] * (MOST_SIZES - len(row.dims))), *alive]
            for row, alive in zip(run.rows, run.alive, strict=True)
        ]
        columns.append(np.array(numbers, dtype=np.float64))
    slope = (columns[1] - columns[0]) / (b1 - b0)
    constant = columns[0] - slope * b0
    wrong = np.abs(constant + slope * b2 - columns[2]) > 1e-6 * np.maximum(1.0, np.abs(columns[2]))
    wrong[:, -1] = False  # the moment at which a tensor dies may move by one operator
    if wrong.any():
        row = int(np.flatnonzero(wrong.any(axis=1))[0])
        raise TrainpaceError(
            f"{name} is not affine in the batch size: its {first.rows[row].kind} operator number {row}"
            f" ({first.modules[row] or first.phases[row]}) grows otherwise.",
            "Measure it with `trainpace measure` instead.",
        )
    memory = _memory_profile(runs[0][1], runs[0][2], constant[:, -2], constant[:, -1], slope[:, -1])
    memory = replace(memory, moments=_moments(first.phases, constant, slope))
    layout = layout_of(chain, second)
    operators, heads = _group(first, constant, slope, layout)
    if layout is None:
        return TracedForm(operators=operators, memory=memory)
    origins = [first.origins[i] for i in heads]
    inside = [origin.place > BEFORE for origin in origins]
    roles = [layout.role(*row) for row in zip(operators.kind, operators.function, origins, strict=True)]
    blocks = blocks_of(layout, (first, second, third), BATCHES, inside, roles, operators.count)
    return TracedForm(operators=operators, memory=memory, blocks=blocks)


def _group(
    run: Recorder, constant: np.ndarray, slope: np.ndarray, layout: Layout | None
) -> tuple[Operators, np.ndarray]:
    """Alike operators into one row with a count, in order of first appearance, and the first of each.

    Those inside and outside of the blocks are kept apart, and those of different roles.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(run.rows):
        origin = run.origins[i]
        key = (
            row.kind,
            row.function,
            run.phases[i],
            row.half,
            row.launches,
            layout and (origin.place > BEFORE, layout.role(row.kind, row.function, origin)),
            constant[i, :-2].tobytes(),
            slope[i, :-2].tobytes(),
        )
        groups.setdefault(key, []).append(i)
    heads = np.array([members[0] for members in groups.values()])
    both = np.stack([constant[heads], slope[heads]], axis=-1)
    operators = Operators(
        kind=tuple(run.rows[i].kind for i in heads),
        function=tuple(run.rows[i].function for i in heads),
        phase=tuple(run.phases[i] for i in heads),
        module=tuple(run.modules[i] for i in heads),
        half=np.array([run.rows[i].half for i in heads]),
        count=np.array([len(members) for members in groups.values()]),
        launches=np.array([run.rows[i].launches for i in heads]),
        flops=both[:, 0],
        read_bytes=both[:, 1],
        written_bytes=both[:, 2],
        dims=both[:, 3 : 3 + MOST_SIZES],
    )
    return operators, heads


def _memory_profile(
    parameter_bytes: float, optimizer_bytes: float, gradient: np.ndarray, constant: np.ndarray, slope: np.ndarray
) -> MemoryProfile:
    """Keep the moments on the upper envelope of total bytes over the batch size: the others are never the peak."""
    slope = np.maximum(slope, 0.0)
    total = gradient + constant
    envelope: list[int] = []
    for i in sorted(range(len(total)), key=lambda i: (-slope[i], -total[i])):
        if not envelope or total[i] > total[envelope[-1]]:
            envelope.append(i)
    peaks = np.stack([gradient[envelope], constant[envelope], slope[envelope]], axis=1)
    return MemoryProfile(parameter_bytes=parameter_bytes, optimizer_bytes=optimizer_bytes, peaks=peaks)


MOMENTS = 64
"""The number of a step's moments that a workload holds for its page, the peaks for a batch of 1 and of many among them."""


def _moments(phases: Sequence[str], constant: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The fullest moment of each stretch of operators, and where it lies in its phase by the bytes that operators moved."""
    phase = np.array([PHASES.index(p) for p in phases])
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
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A copy of the model without weights. Tied weights stay tied, which `Module.to("meta")` would undo."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        bare = torch.empty_like(tensor, device="meta")
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


def _rebind(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """`Module.to(dtype)` on meta tensors may put new parameters in place of the old: point the optimizer at them."""
    parameters = {id(p) for p in model.parameters()}
    if all(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    fresh = copy.copy(optimizer)
    fresh.param_groups = [{**optimizer.param_groups[0], "params": [p for p in model.parameters() if p.requires_grad]}]
    return fresh


def _meta_batch(task: Task, size: int, form: Form) -> Any:
    with torch.device("meta") if task.dataset is None else contextlib.nullcontext():
        batch = task.make_batch(size)

    def bare(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = torch.bfloat16 if form == "half" and value.is_floating_point() else value.dtype
            return torch.empty(value.shape, dtype=dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(bare(part) for part in value)
        return {k: bare(v) for k, v in value.items()} if isinstance(value, dict) else value

    return bare(batch)


def _sample_bytes(task: Task) -> float:
    """The bytes that the host sends to the device for one sample."""
    one, two = (sum(t.numel() * t.element_size() for t in _leaves(_meta_batch(task, n, "fp32"))) for n in (1, 2))
    return float(two - one)


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _leaves(part)
    elif isinstance(batch, dict):
        yield from _leaves(list(batch.values()))


def _module_hooks(model: nn.Module, recorder: Recorder) -> list[Any]:
    def entering(name: str) -> Any:
        return lambda *_: recorder.enter_module(name)

    return [module.register_forward_pre_hook(entering(name)) for name, module in model.named_modules() if name]


def _block_hooks(chain: Chain, recorder: Recorder) -> list[Any]:
    def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        if (hidden := next(_floats([args, kwargs]), None)) is not None:
            recorder.enter_block(number, hidden)

    def leave(is_last: bool, _: nn.Module, args: Any, out: Any) -> None:
        if (hidden := next(_floats(out), None)) is not None:
            recorder.leave_block(hidden, is_last)

    hooks: list[Any] = []
    for number, block in enumerate(chain.modules, 1):
        hooks.append(block.register_forward_pre_hook(partial(enter, number), with_kwargs=True))
        hooks.append(block.register_forward_hook(partial(leave, number == len(chain.modules))))
    return hooks


def _floats(batch: Any) -> Iterator[torch.Tensor]:
    return (t for t in _leaves(batch) if t.is_floating_point())


def _explained(name: str, error: Exception) -> UserCodeError:
    """One sentence with the user's own line where it can be found."""
    where = ""
    trace_back = error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/trainpace/" not in file:
            where = f" at {file.rpartition('/')[2]} line {trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    gc.collect()
    if "meta tensors" in reason or "Meta" in type(error).__name__ or "data-dependent" in reason:
        return UserCodeError(
            f"{name} looks at the values of its tensors{where}, so it cannot be traced without them ({reason[:160]}).",
            "Measure it with `trainpace measure` instead.",
        )
    return UserCodeError(f"{name} raised {type(error).__name__}{where}: {reason[:300]}")
