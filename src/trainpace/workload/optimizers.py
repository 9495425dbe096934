"""Optimizers by name, and their recorded update on the meta device.

[task_optimizers] The optimizers that a task may be given by name (`trainpace.core.execution`), made for its model.

[blockwise] The states and kernels of optimizers that quantise their states block by block, for a trace.

bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861) and torchao cannot run on the meta device. This optimizer has their states
in shape and dtype, and calls an operator of its own, without values, where they launch a kernel: one for each tensor, which reads
parameter, gradient and states, and writes all but the gradient.

[stepping] One update of an optimizer on the meta device, recorded as every later one is.

[traced_updates] A saved workload with another optimizer: the update alone is traced again, over parameters of the shapes that it keeps.

What the passes compute does not depend on the optimizer, so neither the model nor its code is needed.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn
from torch.overrides import TorchFunctionMode

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Form, find_optimizer
from trainpace.workload.meta import tensors_in
from trainpace.workload.model_spec import import_package
from trainpace.workload.recorder import Recorder, numbers_of, recording_of
from trainpace.workload.workload import (
    PHASES,
    MemoryProfile,
    Operators,
    TracedForm,
    TrainedShape,
    Workload,
)

# --- task_optimizers
_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": lambda p: _new_in_torch("Adafactor")(p, lr=1e-3),
}
_BITSANDBYTES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "lion": "Lion",
    "ademamix": "AdEMAMix",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "sgd_momentum": "SGD",
}
_TORCHAO_BLOCKS = {8: 256, 4: 128}
"""Numbers that share a scale in torchao.optim's AdamW8bit and AdamW4bit by default."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a model's trainable parameters; on the meta device one that only has the states and kernels, where the
    library's own cannot run there. Raises UnknownName for a name that nobody knows."""
    name, kind = find_optimizer(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainpaceError("the model has no trainable parameters.")
    if name == "muon":
        return _muon(model, parameters)
    if kind.library == "torch":
        return _TORCH[name](parameters)
    if kind.library == "transformers":
        made = import_package("transformers.optimization", "transformers").Adafactor
        return made(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    assert kind.bits is not None, "quantised states have a width"
    if parameters[0].device.type == "meta":
        block = _TORCHAO_BLOCKS[kind.bits] if kind.library == "torchao" else 256
        layout = StateLayout(
            kind.states, kind.bits, block, kind.is_paged, kind.library == "torchao"
        )
        return BlockwiseOptimizer(parameters, layout)
    if kind.library == "torchao":
        return getattr(import_package("torchao.optim", "torchao"), f"AdamW{kind.bits}bit")(
            parameters
        )
    algorithm = name.removeprefix("paged_").removesuffix(f"_{kind.bits}bit")
    optim = import_package("bitsandbytes.optim", "bitsandbytes")
    more = {"lr": 1e-4} | ({"momentum": 0.9} if algorithm == "sgd_momentum" else {})
    paged = {"is_paged": True} if kind.is_paged else {}
    return getattr(optim, _BITSANDBYTES[algorithm])(
        parameters, optim_bits=kind.bits, **more, **paged
    )


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer as this package uses it: its class in small letters, and sgd_momentum for SGD with momentum."""
    if isinstance(optimizer, _Together):
        return optimizer.name
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    name = type(optimizer).__name__.lower()
    if name == "adafactor" and type(optimizer).__module__.startswith("transformers"):
        return "adafactor_transformers"
    return "sgd_momentum" if name == "sgd" and has_momentum else name


class _Together(torch.optim.Optimizer):
    """Optimizers of different parameters, stepped one after the other."""

    def __init__(self, name: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.name, self.optimizers = name, optimizers
        self.defaults: dict[str, Any] = {}
        super().__init__(
            [group for optimizer in optimizers for group in optimizer.param_groups], self.defaults
        )
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def _muon(model: nn.Module, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for hidden matrices, AdamW for everything else: vocabularies, their heads, biases, norms (Jordan et al. 2024)."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = {table.shape[0] for table in tables}
    is_table = {id(table) for table in tables}
    hidden = [
        p
        for p in parameters
        if p.dim() == 2 and id(p) not in is_table and p.shape[0] not in vocabularies
    ]
    if not hidden:
        raise TrainpaceError(
            "the model has no hidden matrices, which are all that Muon updates.",
            "Name another optimizer.",
        )
    chosen = {id(p) for p in hidden}
    others = [p for p in parameters if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [_new_in_torch("Muon")(hidden)]
    return _Together(
        "muon", [*optimizers, torch.optim.AdamW(others, lr=1e-3)] if others else optimizers
    )


class ScalarsReadAsOne(TorchFunctionMode):
    """Lets torch's own optimizers that read a norm (Adafactor) or a count step on the meta device, where nothing has a value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].device.type == "meta":
            return 1.0
        return func(*args, **(kwargs or {}))


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch.optim's, of which none launches anything else for other values."""
    return type(optimizer).__module__.startswith("torch.optim")


def _new_in_torch(name: str) -> Any:
    """An optimizer that older versions of torch do not have."""
    if not hasattr(torch.optim, name):
        raise TrainpaceError(
            f"torch {torch.__version__} has no torch.optim.{name}.",
            "Install a newer torch, 2.9 or later.",
        )
    return getattr(torch.optim, name)


# --- blockwise
SMALLEST_QUANTISED = 4096
"""Tensors of fewer numbers keep 32-bit states: bitsandbytes' `min_8bit_size`, and torchao alike."""
SMALLEST_PAGED = 100_000
"""Smaller states stay on the device (bitsandbytes' get_state_buffer)."""
UPDATE = "blockwise_update_"

_library = torch.library.Library("trainpace", "FRAGMENT")
_library.define(
    f"{UPDATE}(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states, Tensor(c!)[] scales)"
    " -> ()"
)
_library.impl(UPDATE, lambda *_: None, "Meta")


class StateLayout(NamedTuple):
    """states: for each number. bits: of each. block: numbers that share a scale, in fp32. needs_whole_blocks: a tensor that is no
    multiple of it stays in its own dtype (torchao), where bitsandbytes has a last short one."""

    states: int
    bits: int
    block: int = 256
    is_paged: bool = False
    needs_whole_blocks: bool = False


class BlockwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with states of a layout, which makes no new values."""

    def __init__(self, parameters: Iterable[Any], layout: StateLayout) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            state = self.state[parameter]
            if not state:
                state["states"], state["scales"] = self._states(parameter)
            torch.ops.trainpace.blockwise_update_(
                parameter, parameter.grad, state["states"], state["scales"]
            )

    def _states(self, parameter: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        n, layout = parameter.numel(), self.layout
        empty = parameter.new_empty
        whole = not layout.needs_whole_blocks or n % layout.block == 0
        if layout.bits == 32 or n < SMALLEST_QUANTISED or not whole:
            dtype = parameter.dtype if layout.needs_whole_blocks else torch.float32
            return [empty(n, dtype=dtype) for _ in range(layout.states)], []
        numbers = [empty(n * layout.bits // 8, dtype=torch.uint8) for _ in range(layout.states)]
        return numbers, [
            empty(-(-n // layout.block), dtype=torch.float32) for _ in range(layout.states)
        ]

    def paged_bytes(self) -> float:
        """Bytes of states that CUDA pages to the host where the device is full."""
        if not self.layout.is_paged:
            return 0.0
        large = (s["states"] for p, s in self.state.items() if p.numel() >= SMALLEST_PAGED)
        return float(sum(t.numel() * t.element_size() for states in large for t in states))


# --- stepping
def launch_together(stepper: torch.optim.Optimizer, together: bool) -> None:
    """Let an optimizer launch kernels for many tensors at once, CUDA's default since torch 2.0, or tensor by tensor.

    Adafactor goes tensor by tensor unless told otherwise, since what is temporary is as large as the parameters at once.
    """
    if is_torchs(stepper) and type(stepper).__name__ == "Adafactor":
        return
    for group in stepper.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = together


def step_like(first: Recorder, recorder: Recorder) -> None:
    """Note the step that another batch size's recorder saw: an update does not depend on the batch."""
    shift = recorder.activation_bytes - first.before_update
    for one in first.recorded:
        if one.phase == "optimizer":
            recorder.recorded.append(
                dataclasses.replace(one, activation_bytes=max(0.0, one.activation_bytes + shift))
            )
    recorder.optimizer_bytes, recorder.paged_bytes = first.optimizer_bytes, first.paged_bytes


def step_once(stepper: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Record one step, and note the bytes of its states."""
    recorder.phase, recorder.before_update = "optimizer", recorder.activation_bytes
    with ScalarsReadAsOne() if is_torchs(stepper) else contextlib.nullcontext():
        recorder.recording = False
        stepper.step()  # creates the states, which is no part of later steps
        recorder.recording = True
        stepper.step()
    recorder.optimizer_bytes = storage_bytes(
        tensors_in([dict(state) for state in stepper.state.values()])
    )
    recorder.paged_bytes = stepper.paged_bytes() if isinstance(stepper, BlockwiseOptimizer) else 0.0
    # the states were made during this step, but are there before it in every other one
    for recorded in recorder.recorded:
        if recorded.phase == "optimizer":
            recorded.activation_bytes = max(
                0.0, recorded.activation_bytes - recorder.optimizer_bytes
            )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> float:
    """The bytes of meta tensors, of which some may share their storage."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "meta"
    }
    return float(sum(storages.values()))


# --- traced_updates
OPTIMIZER = float(PHASES.index("optimizer"))


def trained_shapes(model: nn.Module) -> tuple[TrainedShape, ...]:
    """The shapes of a model's trainable parameters, each with how many there are."""
    tables = {
        id(m.weight): m.weight.shape[0] for m in model.modules() if isinstance(m, nn.Embedding)
    }
    vocabularies = set(tables.values())
    counts = Counter(
        (
            tuple(p.shape),
            id(p) in tables or (p.dim() == 2 and p.shape[0] in vocabularies),
            hasattr(p, "keeps_dtype"),
        )
        for p in model.parameters()
        if p.requires_grad
    )
    return tuple(
        TrainedShape(sizes=sizes, is_vocabulary=table, is_fp32=wide, count=n)
        for (sizes, table, wide), n in counts.items()
    )


def with_optimizer(workload: Workload, name: str) -> Workload:
    """The workload, updated by another optimizer. Raises UnknownName, and TrainpaceError where its shapes were not kept."""
    name, _ = find_optimizer(name)
    if workload.mode != "train":
        raise TrainpaceError(
            f"this workload of {workload.model} was traced without an update.",
            "Trace it again, from the model.",
        )
    if not workload.trained:
        raise TrainpaceError(
            f"this workload of {workload.model} was saved without the shapes of its parameters,"
            f" which {name} needs.",
            "Trace it again, from the model.",
        )
    forms = {
        key: _updated(form, key, workload.trained, name) for key, form in workload.forms.items()
    }
    return replace(workload, optimizer=name, assumes_optimizer=False, forms=forms)


class _Parameters(nn.Module):
    """Parameters of given shapes, with gradients, on the meta device."""

    def __init__(self, shapes: tuple[TrainedShape, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.tables, self.others = nn.ModuleList(), nn.ParameterList()
        for shape in shapes:
            for _ in range(shape.count):
                parameter = nn.Parameter(
                    torch.empty(
                        shape.sizes, dtype=torch.float32 if shape.is_fp32 else dtype, device="meta"
                    )
                )
                parameter.grad = torch.empty_like(parameter)
                if shape.is_vocabulary:
                    table = nn.Embedding(1, 1, device="meta")
                    table.weight = parameter
                    self.tables.append(table)
                else:
                    self.others.append(parameter)


def _updated(
    form: TracedForm, name: Form, shapes: tuple[TrainedShape, ...], optimizer: str
) -> TracedForm:
    model = _Parameters(shapes, torch.bfloat16 if name == "half" else torch.float32)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    recorder = Recorder(dict(model.named_parameters()))
    recorder.keep_alive([*model.parameters(), *gradients])
    stepper = make_optimizer(optimizer, model)
    launch_together(
        stepper, any(name.startswith(("_foreach_", "_fused_")) for name in form.operators.function)
    )
    with recorder:
        step_once(stepper, recorder)
    numbers = np.array([numbers_of(recorded) for recorded in recorder.recorded])
    update, _ = recording_of(recorder.recorded, numbers, np.zeros_like(numbers)).operators()
    old, memory = form.operators, form.memory
    passes = np.flatnonzero(np.array(old.phase) != "optimizer")
    columns: dict[str, Any] = {
        field: np.concatenate([getattr(old, field)[passes], getattr(update, field)])
        for field in ("half", "count", "launches", "flops", "read_bytes", "written_bytes", "dims")
    }
    words: dict[str, Any] = {
        field: (*(getattr(old, field)[i] for i in passes), *getattr(update, field))
        for field in ("kind", "function", "phase", "module")
    }
    blocks = form.blocks and replace(
        form.blocks,
        roles=(*(form.blocks.roles[i] for i in passes), *[""] * len(update)),
        operator_counts=np.concatenate(
            [form.blocks.operator_counts[passes], np.zeros(len(update), dtype=np.int64)]
        ),
    )
    return TracedForm(
        operators=Operators(**words, **columns),
        memory=_remembered(memory, recorder, numbers[:, -1]),
        blocks=blocks,
    )


def _remembered(memory: MemoryProfile, recorder: Recorder, temporary: np.ndarray) -> MemoryProfile:
    """The profile with the states of the update that was recorded, and the most of its temporaries."""
    gradients = float(memory.peaks[:, 0].max())
    most = float(temporary.max(initial=0.0))
    peaks = np.concatenate([memory.peaks[memory.peaks[:, 2] != 0], [[gradients, most, 0.0]]])
    moments = memory.moments
    if moments.size:
        at = moments[:, 0] == OPTIMIZER
        moments = moments.astype(np.float64)
        moments[at, 3] = most
    return replace(
        memory,
        optimizer_bytes=recorder.optimizer_bytes - recorder.paged_bytes,
        paged_bytes=recorder.paged_bytes,
        peaks=peaks,
        moments=moments,
    )
