"""Record one optimizer step on the meta device: its operators, and what is alive at each of them."""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainpace.workload import recurrent
from trainpace.workload.operators import Row, matrices_of, offsets_of, rows_of
from trainpace.workload.self_check import FlopCheck, refuse_uncounted
from trainpace.workload.tensor_roles import Step
from trainpace.workload.tensors import tensors_in
from trainpace.workload.workload import Phase

BEFORE, AFTER = 0, -1
"""Places outside of the blocks, which are numbered from 1. What runs between two blocks counts as before."""


class Origin(NamedTuple):
    """A row's place, and the forward call that it is, repeats or takes the gradient of (-1: none)."""

    place: int
    call: int


@dataclass(slots=True)
class Recorded:
    """A row, the phase and module that it ran in, and the bytes alive meanwhile.

    `set_aside_bytes` are of activations that no block works with: gradients of parameters that have not been accumulated yet, and
    what the backward pass made outside of the blocks (a head's gradient waits for its embedding's).
    """

    row: Row
    phase: Phase
    module: str
    origin: Origin
    gradient_bytes: float
    activation_bytes: float
    set_aside_bytes: float


@dataclass(slots=True)
class Storage:
    """A storage that is alive: its number, the call that made it (-1: before the step), its bytes, the row at which it was made,
    whether the backward pass made it outside of the blocks, with a gradient that has not been accumulated, and whether it is a
    parameter's accumulated gradient."""

    value: int
    call: int
    size: float
    row: int
    is_outside: bool
    reference: weakref.ref[Any]
    is_gradient: bool = False


def share_of_memory(parameter: torch.nn.Parameter) -> int:
    """Numbers of a parameter, by which memory is shared out among stages; a packed one counts as many of 16 bits as it takes."""
    n = parameter.numel()
    return n * parameter.element_size() // 2 if hasattr(parameter, "keeps_dtype") else n


class Recorder(TorchDispatchMode):
    """Sees every ATen call below autograd. Read `recorded` afterwards.

    A backward call is traced to the forward call whose autograd node runs it, by the node's sequence number, as
    torch.profiler does; a call that recomputes activations, by its position in the block. `with_steps` keeps the calls
    of the forward pass with their inputs and outputs.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], with_steps: bool = False) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.recording = True
        self.recorded: list[Recorded] = []
        self.flop_check = FlopCheck()
        self.parameter_bytes = self.frozen_bytes = self.optimizer_bytes = self.paged_bytes = 0.0
        """Bytes of parameters and buffers, of the frozen parameters among them, of the optimizer's states, and of those among
        the states that CUDA pages to the host."""
        self.before_update = 0.0
        """Bytes of activations that are alive when the optimizer begins."""
        self._gradient_bytes = 0.0
        self._activation_bytes = 0.0
        self.places: list[int] = []
        """The place of each forward call."""
        self.steps: dict[int, Step] | None = {} if with_steps else None
        self.entered: list[tuple[int, torch.Size, float, int]] = []
        """Blocks in the order in which they ran: (number, shape, bytes and value of the hidden state)."""
        self.left: list[int] = []
        """Values of the hidden states that blocks returned."""
        self.saved: list[Storage] = []
        """The storages alive when the forward pass ends."""
        self.parameters: dict[int, torch.nn.Parameter] = {}
        """Parameters by value."""
        self.parameter_count = sum(map(share_of_memory, parameters.values()))
        self._place = BEFORE
        self._origin = Origin(BEFORE, -1)
        self._made_node: dict[int, int] = {}
        self._first_call: dict[int, int] = {}
        self._functions: list[Any] = []
        self._module_of_call: list[str] = []
        self._replayed = -1
        self._outside_bytes = 0.0
        self._values = 0
        self._storages: dict[int, Storage] = {}
        self._module = ""
        self._module_of_storage = {
            parameter.untyped_storage()._cdata: name.rpartition(".")[0] or name
            for name, parameter in parameters.items()
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, 0.7 s, to keep it out of a trace that it is not part of

    def keep_alive(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are alive all the time (parameters, buffers, the batch) as no activation."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._add_storage(storage, -1, 0.0)
                if isinstance(tensor, torch.nn.Parameter):
                    self.parameters[self._values] = tensor

    def keep_for_ever(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that the step made, and that stay (an optimizer's states), as no activation from now on."""
        for tensor in tensors:
            storage = self._storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                self._activation_bytes -= storage.size
                storage.size = 0.0

    @property
    def activation_bytes(self) -> float:
        """Alive now."""
        return self._activation_bytes

    def _add_storage(
        self,
        storage: Any,
        call: int,
        size: float,
        is_outside: bool = False,
        freed: Callable[[Any], None] | None = None,
    ) -> None:
        self._values += 1
        born = len(self.recorded)
        self._storages[storage._cdata] = Storage(
            self._values, call, size, born, is_outside, weakref.ref(storage, freed)
        )

    def _value(self, tensor: torch.Tensor) -> int:
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return -1 if storage is None else storage.value

    def enter_block(self, number: int, hidden: torch.Tensor) -> None:
        if self.phase == "forward":
            self._place = number
            self._origin = Origin(number, -1)
            self._first_call[number] = len(self.places)
            size = float(hidden.numel() * hidden.element_size())
            self.entered.append((number, hidden.shape, size, self._value(hidden)))

    def leave_block(self, hidden: torch.Tensor, is_last: bool) -> None:
        if self.phase == "forward":
            self._place = AFTER if is_last else BEFORE
            self._origin = Origin(self._place, -1)
            self.left.append(self._value(hidden))

    def end_forward(self) -> None:
        """Note the storages saved for the backward pass, the only ones alive from here on."""
        self.saved = list(self._storages.values())

    def enter_module(self, name: str) -> None:
        """Name the module that runs now; operators without weights of their own are shown under it."""
        self._module = name
        if self.recording:
            self._append(Row("module", "module", False, 0, 0.0, 0.0, 0.0, ()), name)

    def gradient_ready(self, gradient: torch.Tensor) -> None:
        """A gradient has been accumulated: from now on it counts as one, not as an activation."""
        for tensor in tensors_in(gradient):  # several of a sparse one
            self._is_gradient(tensor.untyped_storage())

    def _is_gradient(self, whole: Any) -> None:
        size, storage = float(whole.nbytes()), self._storages.get(whole._cdata)
        if storage is not None:
            if storage.is_gradient:
                return  # a second backward pass added to it
            storage.is_gradient = True
        if storage is not None and storage.is_outside:
            storage.is_outside = False
            self._outside_bytes -= storage.size
        elif storage is not None:
            for recorded in self.recorded[storage.row :]:
                recorded.set_aside_bytes += size
        self._activation_bytes -= size
        self._gradient_bytes += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shortcut = _SHORTCUTS.get(func) or _foreach_shortcut(func, args)
        self._locate(func, args)
        out = func(*args, **kwargs) if shortcut is None else shortcut(*args, **kwargs)
        self._track(out)
        if self.recording:
            if self.steps is not None and self.phase == "forward" and func is not _DETACH:
                self._keep_step(func, args, kwargs, out)
            rows, name = rows_of(func, args, kwargs, out), self._name(args)
            refuse_uncounted(func, rows, name)
            self.flop_check.add(func, args, kwargs, out, rows)
            for row in rows:
                self._append(row, name)
        return out

    def parameters_of(self, modules: Collection[str]) -> set[int]:
        """Values of the parameters that these modules own."""
        of_storage = self._module_of_storage
        return {
            v
            for v, p in self.parameters.items()
            if of_storage.get(p.untyped_storage()._cdata) in modules
        }

    def _locate(self, func: Any, args: Any) -> None:
        if func is _DETACH:  # autograd's bookkeeping, another number of times when recomputing
            return
        if self.phase == "forward":
            call = len(self.places)
            self.places.append(self._place)
            self._functions.append(func)
            self._module_of_call.append(self._name(args))
            self._made_node.setdefault(_sequence_number() - 1, call)
            self._origin = Origin(self._place, call)
        elif self.phase == "backward":
            self._origin = self._backward_origin(func)
        else:
            self._origin = Origin(AFTER, -1)

    def _backward_origin(self, func: Any) -> Origin:
        node = _current_node()
        call = -1
        if node is not None and "AccumulateGrad" not in node.name():
            call = self._made_node.get(node._sequence_nr(), -1)
        if not torch.is_grad_enabled():
            self._replayed = -1
            return Origin(self.places[call], call) if call >= 0 else self._origin
        return self._repeated(func, self._origin.place if call < 0 else self.places[call])

    def _repeated(self, func: Any, place: int) -> Origin:
        """The call of the forward pass that recomputation makes again: the next one of its function in the same place."""
        if self._replayed < 0:
            self._replayed = self._first_call.get(place, 0)
        for call in range(self._replayed, len(self.places)):
            if self.places[call] == place and self._functions[call] is func:
                self._replayed = call + 1
                return Origin(place, call)
        return Origin(place, -1)

    def _keep_step(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert self.steps is not None
        inputs = tuple(
            (self._value(t), t.numel())
            for t in tensors_in((args, kwargs))
            if t.device.type == "meta"
        )
        name = func._schema.name.partition("::")[2]
        self.steps[self._origin.call] = Step(
            name,
            inputs,
            tuple(self._value(t) for t in matrices_of(name, args)),
            tuple(self._value(t) for t in tensors_in(out) if t.device.type == "meta"),
        )

    def _append(self, row: Row, module: str) -> None:
        alive = (self._gradient_bytes, self._activation_bytes, self._outside_bytes)
        self.recorded.append(Recorded(row, self.phase, module, self._origin, *alive))

    def _name(self, args: Any) -> str:
        for argument in args[:3]:
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                name = self._module_of_storage.get(argument.untyped_storage()._cdata)
                if name is not None:
                    return name
        if self.phase == "backward" and self._origin.call >= 0:
            return self._module_of_call[self._origin.call]
        return self._module if self.phase == "forward" else ""

    def _track(self, out: Any) -> None:
        for tensor in tensors_in(out):
            if tensor.device.type != "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            size = float(storage.nbytes())
            is_outside = self.phase == "backward" and self._origin.place <= BEFORE
            self._activation_bytes += size
            self._outside_bytes += size * is_outside

            def freed(_: Any, key: int = key) -> None:
                gone = self._storages.pop(key)
                self._gradient_bytes -= gone.size * gone.is_gradient
                self._activation_bytes -= gone.size * (not gone.is_gradient)
                self._outside_bytes -= gone.size * gone.is_outside

            self._add_storage(storage, self._origin.call, size, is_outside, freed)


def _batch_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, inverse_deviation = (
        torch.empty(x.shape[1], dtype=torch.float32, device="meta") for _ in range(2)
    )
    return torch.empty_like(x), mean, inverse_deviation


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    of_input, of_weight, of_bias = (
        torch.empty_like(like) if wanted and like is not None else None
        for like, wanted in zip((x, weight, weight), rest[-1], strict=True)
    )
    return of_input, of_weight, of_bias


def in_backward() -> bool:
    """Whether autograd's engine runs, also to compute activations again."""
    return _current_node() is not None


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """The result of a grouped product, of any format: torch's own meta kernel takes bf16 alone, where CUDA makes the products of
    other formats one after the other (_grouped_mm_fallback in aten/src/ATen/native/GroupedMMUtils.h).
    """
    offsets = offsets_of((a, b, *rest), kwargs)
    shape = [a.shape[-2], b.shape[-1]]
    if (
        a.dim() == b.dim()
    ):  # a matrix a group: a batch of products, or the gradients of the groups' weights
        shape = [a.shape[0] if offsets is None else offsets.numel(), *shape]
    return a.new_empty(shape, dtype=kwargs.get("out_dtype") or a.dtype)


def _foreach_shortcut(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What stands for an update of many tensors, of which torch's own meta kernel runs Python for each tensor of each list."""
    name = func._schema.name.partition("::")[2]
    if not name.startswith("_foreach_") or not all(tensor.is_meta for tensor in args[0]):
        return None  # step counters are the host's, and count
    if name.endswith("_"):
        return _in_place
    return _like_the_first if name in _FOREACH_ALIKE else None


def _in_place(*_: Any, **__: Any) -> None:
    return None


def _like_the_first(tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


_DETACH = torch.ops.aten.detach.default
_FOREACH_ALIKE = frozenset(
    f"_foreach_{name}"
    for name in "abs add addcdiv addcmul div lerp mul neg pow reciprocal sqrt sub".split()
)
"""Out-of-place updates whose results are as large as the first list's tensors."""
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node

# torch's own meta kernels of these two run a Python decomposition of 20 operators: 80 % of ResNet-50's trace
_SHORTCUTS: dict[Any, Any] = {
    torch.ops.aten._cudnn_rnn.default: recurrent.forward_result,
    torch.ops.aten._cudnn_rnn_backward.default: recurrent.backward_result,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}
