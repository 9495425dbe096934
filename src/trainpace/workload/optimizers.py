"""Create optimizers by name, and record their update on the meta device.

Optimizers of bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861) and torchao cannot run on the
meta device. `BlockwiseOptimizer` stands in for them. Its states have the same shapes and dtypes.
For each kernel, one per tensor, it calls an operator of this package. The operator reads the
parameter, the gradient and the states, and writes all of them except the gradient.

The optimizer of a saved workload can be replaced (`with_optimizer`). The forward and backward pass
do not depend on the optimizer. Therefore only the update is traced again, with parameters of the
stored shapes.
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
from trainpace.core.execution import Form, OptimizerKind, find_optimizer
from trainpace.workload.fit import numbers_of, table_of
from trainpace.workload.meta import tensors_in
from trainpace.workload.model_spec import import_package
from trainpace.workload.own_operators import define_operator
from trainpace.workload.recorder import Recorder
from trainpace.workload.workload import (
    PHASES,
    MemoryProfile,
    Operators,
    TracedForm,
    TrainedShape,
    Workload,
)

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
"""State elements per scale in AdamW8bit and AdamW4bit of torchao.optim, by bits."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for the trainable parameters of a model.

    It may be a stand-in for the meta device, with the same states and kernels.

    Raises:
        UnknownName: If the optimizer is unknown.
        TrainpaceError: If the model has no trainable parameters.
    """
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
    return _quantised(name, kind, parameters)


def _quantised(
    name: str, kind: OptimizerKind, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer with quantized states, or its stand-in for meta parameters."""
    is_torchao = kind.library == "torchao"
    assert kind.bits is not None, "quantised states have a width"
    if parameters[0].device.type == "meta":
        block = _TORCHAO_BLOCKS[kind.bits] if is_torchao else 256
        layout = StateLayout(kind.states, kind.bits, block, kind.is_paged, is_torchao)
        return BlockwiseOptimizer(parameters, layout)
    if is_torchao:
        torchao: Any = import_package("torchao.optim", "torchao")
        return getattr(torchao, f"AdamW{kind.bits}bit")(parameters)
    algorithm = name.removeprefix("paged_").removesuffix(f"_{kind.bits}bit")
    options: dict[str, Any] = {"lr": 1e-4, "optim_bits": kind.bits}
    if algorithm == "sgd_momentum":
        options["momentum"] = 0.9
    if kind.is_paged:
        options["is_paged"] = True
    bitsandbytes: Any = import_package("bitsandbytes.optim", "bitsandbytes")
    return getattr(bitsandbytes, _BITSANDBYTES[algorithm])(parameters, **options)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer: its class in lower case. SGD with momentum: sgd_momentum."""
    if isinstance(optimizer, _Together):
        return optimizer.name
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    name = type(optimizer).__name__.lower()
    if name == "adafactor" and type(optimizer).__module__.startswith("transformers"):
        return "adafactor_transformers"
    return "sgd_momentum" if name == "sgd" and has_momentum else name


class _Together(torch.optim.Optimizer):
    """Optimizer that steps several optimizers of different parameters one after the other."""

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
    """Return Muon for hidden matrices, and AdamW for other parameters (Jordan et al. 2024).

    The other parameters are embeddings, heads, biases and norms.
    """
    vocabularies = _vocabularies(model)
    hidden = [p for p in parameters if p.dim() == 2 and id(p) not in vocabularies]
    if not hidden:
        raise TrainpaceError(
            "Muon only updates hidden matrices, and the model has none.",
            "Choose another optimizer.",
        )
    others = [p for p in parameters if p.dim() != 2 or id(p) in vocabularies]
    optimizers: list[torch.optim.Optimizer] = [_new_in_torch("Muon")(hidden)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-3))
    return _Together("muon", optimizers)


def _vocabularies(model: nn.Module) -> set[int]:
    """Return the ids of embedding tables, and of matrices over a vocabulary, such as the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {table.shape[0] for table in tables}
    matrices = (p for p in model.parameters() if p.dim() == 2 and p.shape[0] in sizes)
    return {id(table) for table in (*tables, *matrices)}


class ScalarsReadAsOne(TorchFunctionMode):
    """Mode in which `item()` of a meta tensor returns 1.0.

    Some optimizers of torch read a norm (Adafactor) or a step count.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].device.type == "meta":
            return 1.0
        return func(*args, **(kwargs or {}))


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer of torch.optim. Its kernels do not depend on values."""
    return type(optimizer).__module__.startswith("torch.optim")


def _new_in_torch(name: str) -> Any:
    """Return an optimizer class of torch.optim.

    Raises:
        TrainpaceError: If this version of torch does not have it.
    """
    if not hasattr(torch.optim, name):
        raise TrainpaceError(
            f"torch {torch.__version__} has no torch.optim.{name}.",
            "Install a newer torch, 2.9 or later.",
        )
    return getattr(torch.optim, name)


SMALLEST_QUANTISED = 4096
"""Minimum elements of a tensor with quantized states (bitsandbytes' `min_8bit_size`; torchao too).
"""
SMALLEST_PAGED = 100_000
"""Minimum elements of a paged state (bitsandbytes' get_state_buffer).

Smaller states stay on the device.
"""
UPDATE = "blockwise_update_"

define_operator(
    UPDATE,
    "(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states, Tensor(c!)[] scales) -> ()",
    lambda *_: None,
)


class StateLayout(NamedTuple):
    """Layout of the states of a quantized optimizer.

    Attributes:
        states: Number of state elements per parameter element.
        bits: Bits per state element.
        block: Number of state elements that share an fp32 scale.
        is_paged: True if CUDA pages the states to the host when the device is full.
        needs_whole_blocks: True if states are quantized only for tensors with a multiple of `block`
            elements, as in torchao. In bitsandbytes, the last block may be shorter.
    """

    states: int
    bits: int
    block: int = 256
    is_paged: bool = False
    needs_whole_blocks: bool = False


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Stand-in for a quantized optimizer. It has the states, but does not compute values."""

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
        """Return the bytes of states that CUDA pages to the host when the device is full."""
        if not self.layout.is_paged:
            return 0.0
        large = (s["states"] for p, s in self.state.items() if p.numel() >= SMALLEST_PAGED)
        return float(sum(t.numel() * t.element_size() for states in large for t in states))


def launch_together(stepper: torch.optim.Optimizer, together: bool) -> None:
    """Select the foreach or the for-loop implementation of an optimizer.

    foreach launches kernels for many tensors at once. It is the default on CUDA since torch 2.0.
    Adafactor is the exception, since its temporaries are as large as the tensors of one launch.
    """
    if is_torchs(stepper) and type(stepper).__name__ == "Adafactor":
        return
    for group in stepper.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = together


def step_like(first: Recorder, recorder: Recorder) -> None:
    """Copy the recorded update of another batch size, since it does not depend on the batch."""
    shift = recorder.activation_bytes - first.before_update
    for one in first.recorded:
        if one.phase == "optimizer":
            recorder.recorded.append(
                dataclasses.replace(one, activation_bytes=max(0.0, one.activation_bytes + shift))
            )
    recorder.optimizer_bytes, recorder.paged_bytes = first.optimizer_bytes, first.paged_bytes


def step_once(stepper: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Record one optimizer step, and store the bytes of the optimizer states."""
    recorder.phase, recorder.before_update = "optimizer", recorder.activation_bytes
    with ScalarsReadAsOne() if is_torchs(stepper) else contextlib.nullcontext():
        recorder.recording = False
        stepper.step()  # the first step creates the states, and is not recorded
        recorder.recording = True
        stepper.step()
    recorder.optimizer_bytes = storage_bytes(
        tensors_in([dict(state) for state in stepper.state.values()])
    )
    recorder.paged_bytes = stepper.paged_bytes() if isinstance(stepper, BlockwiseOptimizer) else 0.0
    # the recorder counts the new states as activations, but they outlive the step
    for recorded in recorder.recorded:
        if recorded.phase == "optimizer":
            recorded.activation_bytes = max(
                0.0, recorded.activation_bytes - recorder.optimizer_bytes
            )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Return the total bytes of meta tensors. A shared storage counts once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "meta"
    }
    return float(sum(storages.values()))


OPTIMIZER = float(PHASES.index("optimizer"))


def trained_shapes(model: nn.Module) -> tuple[TrainedShape, ...]:
    """Return the distinct shapes of the trainable parameters, with the count of each."""
    vocabularies = _vocabularies(model)
    counts = Counter(
        (tuple(p.shape), id(p) in vocabularies, hasattr(p, "keeps_dtype"))
        for p in model.parameters()
        if p.requires_grad
    )
    return tuple(
        TrainedShape(sizes=sizes, is_vocabulary=table, is_fp32=wide, count=n)
        for (sizes, table, wide), n in counts.items()
    )


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Return a workload with another optimizer, without tracing the model again.

    Raises:
        UnknownName: If the optimizer is unknown.
        TrainpaceError: If the workload was saved without the shapes of its parameters.
    """
    name, _ = find_optimizer(name)
    if workload.mode != "train":
        raise TrainpaceError(
            f"this workload of {workload.model} was traced without an update.",
            "Trace the model again.",
        )
    if not workload.trained:
        raise TrainpaceError(
            f"this workload of {workload.model} was saved without the shapes of its parameters,"
            f" which {name} needs.",
            "Trace the model again.",
        )
    forms = {
        key: _updated(form, key, workload.trained, name) for key, form in workload.forms.items()
    }
    return replace(workload, optimizer=name, assumes_optimizer=False, forms=forms)


class _Parameters(nn.Module):
    """Module with parameters of given shapes and their gradients, on the meta device."""

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
    numbers = numbers_of(recorder.recorded)
    update, _ = table_of(recorder.recorded, np.stack([numbers, np.zeros_like(numbers)], axis=-1))
    old = form.operators
    passes = [i for i, phase in enumerate(old.phase) if phase != "optimizer"]
    columns: dict[str, Any] = {}
    for field in Operators.__struct_fields__:
        before, after = getattr(old, field), getattr(update, field)
        if isinstance(before, tuple):
            columns[field] = (*(before[i] for i in passes), *after)
        else:
            columns[field] = np.concatenate([before[passes], after])
    blocks = form.blocks
    if blocks is not None:
        none = np.zeros(len(update), dtype=np.int64)
        roles = (*(blocks.roles[i] for i in passes), *[""] * len(update))
        blocks = blocks.with_counts(
            lambda counts: np.concatenate([counts[passes], none]), roles=roles
        )
    return TracedForm(
        operators=Operators(**columns),
        memory=_remembered(form.memory, recorder, numbers[:, -1]),
        blocks=blocks,
    )


def _remembered(memory: MemoryProfile, recorder: Recorder, temporary: np.ndarray) -> MemoryProfile:
    """Return a memory profile with the states and temporaries of another optimizer's update.

    Args:
        memory: Profile with the previous optimizer.
        recorder: Recorder of the new update.
        temporary: Bytes of temporaries at each operator of the update.
    """
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
