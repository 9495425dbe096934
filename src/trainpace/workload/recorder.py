"""Record one optimizer step on the meta device: operators, and memory alive at each.

Every matmul must be counted, and counted right. An operator that multiplies matrices but is missing
in `operators` would pass for an element-wise one, and its model would be forecast far too fast. So
such operators raise an error by name, like every operator of an unknown library. The FLOPs of the
others are compared with torch's own formulas (torch.utils.flop_counter).
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from trainpace.core.errors import TrainpaceError
from trainpace.workload.cuda_mapping import backward_result, forward_result
from trainpace.workload.meta import tensors_in
from trainpace.workload.operators import Row, matrices_of, offsets_of, rows_of
from trainpace.workload.own_operators import SKIPPING_ATTENTION, UNKNOWN
from trainpace.workload.recording import BlockSizes, Recording
from trainpace.workload.workload import MATRIX_KINDS, MOST_SIZES, Phase, Role

LARGEST_DIFFERENCE = 0.02
"""Share of a step's FLOPs by which the two counts may differ without a note."""
CAUSAL = 0.5
"""Share of attention's matmuls with a causal mask. torch's formulas count all."""
_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|cdist|attention|rnn|lstm|gru|trilinear"
    r"|conv(olution)?([123]d|_tbc|_overrideable|_transpose\w*)?)(_|$)"
    r"|^_?(linalg|cholesky|svd|qr|lu|triangular_solve|ormqr)(_|$)"
)
"""Matches ATen calls that multiply or decompose matrices."""
_NO_PRODUCT = frozenset(
    "linalg_vector_norm linalg_cross lu_unpack _thnn_fused_lstm_cell _thnn_fused_gru_cell".split()
) | {"_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"}
_KNOWN_LIBRARIES = {"aten", "prims", "prim", "trainpace"}
_MEMORY_BOUND = frozenset(
    f"torchvision::{name}"
    for name in (
        "roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align ps_roi_pool nms"
    ).split()
)
"""Operators of other libraries that are bound by memory traffic."""
WHOLE_MASKS = (
    "An attention mask depends on values, such as the starts of documents. All keys were counted;"
    " the kernel may skip many."
)
_SKIPPING = getattr(torch.ops.trainpace, SKIPPING_ATTENTION).default
INSTEAD = "Measure it with `trainpace measure`, or record a short run with `trainpace watch`."


def refuse_uncounted(func: Any, rows: Sequence[Row], module: str) -> None:
    """Raise TrainpaceError for a call that may multiply matrices without a row that counts it."""
    if not rows or any(row.kind in MATRIX_KINDS for row in rows):
        return
    library, _, name = func._schema.name.partition("::")
    where = f" in {module}" if module else ""
    if library not in _KNOWN_LIBRARIES:
        if func._schema.name not in _MEMORY_BOUND:
            raise TrainpaceError(
                f"the operator {func._schema.name}{where} belongs to another library, and its"
                " FLOPs are unknown.",
                INSTEAD,
            )
    elif name not in _NO_PRODUCT and _PRODUCT.search(name):
        raise TrainpaceError(
            f"the matmuls of {func._schema.name}{where} are not counted yet.", INSTEAD
        )


class FlopCheck:
    """Compares the FLOPs of rows with torch's formulas, call by call."""

    def __init__(self) -> None:
        self._flops = 0.0
        self._differences: dict[str, float] = {}
        self._whole_masks = False

    def add(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, rows: Sequence[Row]
    ) -> None:
        if func is _SKIPPING and args[3] == UNKNOWN:
            self._whole_masks = True
        expected = _expected_flops(func, args, kwargs, out)
        if expected is None:
            return
        counted = sum(row.flops for row in rows if row.kind in MATRIX_KINDS)
        self._flops += expected
        name = func._schema.name
        self._differences[name] = self._differences.get(name, 0.0) + abs(counted - expected)

    def note(self) -> str | None:
        """Return sentences about unknown masks and about counts that differ."""
        return (
            " ".join(filter(None, (WHOLE_MASKS if self._whole_masks else None, self._doubt())))
            or None
        )

    def _doubt(self) -> str | None:
        difference = sum(self._differences.values())
        if difference <= LARGEST_DIFFERENCE * self._flops:
            return None
        name = max(self._differences, key=lambda name: self._differences[name])
        return (
            "The FLOPs counted here differ from torch's formulas by"
            f" {difference / self._flops:.0%} per step, mostly in {name}. The times may be wrong."
        )


def _expected_flops(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> float | None:
    """Return the FLOPs of a call by torch's formulas, or None if it has none."""
    if func is torch.ops.aten.convolution_backward.default:
        # torch's formula counts the weight gradient of a grouped convolution as dense
        gradient, x, weight, transposed, wanted = (args[i] for i in (0, 1, 2, 7, 10))
        return float(
            sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed)
        )
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return float(formula(*args, **kwargs, out_val=out)) * (
        CAUSAL if arguments.get("is_causal") is True else 1.0
    )


BEFORE, AFTER = 0, -1
"""Places outside the blocks, which are numbered from 1. Between two blocks counts as before."""


class Origin(NamedTuple):
    """The place of a row, and its forward call: the call itself, or the one it recomputes or
    differentiates. -1: none."""

    place: int
    call: int


@dataclass(slots=True)
class Recorded:
    """A row, its phase and module, and the bytes alive meanwhile.

    `set_aside_bytes` are activations that no block uses: gradients of parameters before they are
    accumulated, and results of the backward pass outside the blocks (the gradient of a tied head
    waits for that of the embedding).
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
    """A storage that is alive.

    Attributes:
        value: Its number.
        call: The call that made it; -1: before the step.
        size: Bytes.
        row: Number of rows when it was made.
        is_outside: True if the backward pass made it outside the blocks and it is not accumulated.
        is_gradient: True for the accumulated gradient of a parameter.
    """

    value: int
    call: int
    size: float
    row: int
    is_outside: bool
    reference: weakref.ref[Any]
    is_gradient: bool = False


def share_of_memory(parameter: torch.nn.Parameter) -> int:
    """Return the numbers of a parameter, which divide memory among stages.

    A packed one counts as the 16-bit numbers that need the same bytes.
    """
    n = parameter.numel()
    return n * parameter.element_size() // 2 if hasattr(parameter, "keeps_dtype") else n


class Step(NamedTuple):
    """One ATen call of the forward pass. Values are storages by number, so a view is its base.

    Attributes:
        function: ATen's name.
        inputs: (value, elements) pairs.
        operands: The matrices of a matmul, or the weight of a convolution.
        outputs: Values.
    """

    function: str
    inputs: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """Mode that sees every ATen call below autograd. Read `recorded` afterwards.

    A backward call belongs to the forward call whose autograd node runs it, found by the node's
    sequence number, as in torch.profiler. A call that recomputes activations is found by its
    position in the block. `with_steps` stores the calls of the forward pass with their inputs and
    outputs.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], with_steps: bool = False) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.recording = True
        self.recorded: list[Recorded] = []
        self.flop_check = FlopCheck()
        self.parameter_bytes = self.frozen_bytes = self.optimizer_bytes = self.paged_bytes = 0.0
        """Bytes of parameters and buffers, of frozen parameters among them, of optimizer states,
        and of states that CUDA pages to the host."""
        self.before_update = 0.0
        """Bytes of activations alive when the optimizer starts."""
        self._gradient_bytes = 0.0
        self._activation_bytes = 0.0
        self.places: list[int] = []
        """Place of each forward call."""
        self.steps: dict[int, Step] | None = {} if with_steps else None
        self.entered: list[tuple[int, torch.Size, float, int]] = []
        """Blocks in the order they ran: (number, shape, bytes and value of the hidden state)."""
        self.left: list[int] = []
        """Values of the hidden states that blocks returned."""
        self.saved: list[Storage] = []
        """Storages alive when the forward pass ends."""
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
        return False  # True would import torch._dynamo, which takes 0.7 s

    def keep_alive(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count tensors that are always alive (parameters, buffers, batch) as activations."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._add_storage(storage, -1, 0.0)
                if isinstance(tensor, torch.nn.Parameter):
                    self.parameters[self._values] = tensor

    def keep_for_ever(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting tensors that the step made and that stay (optimizer states)."""
        for tensor in tensors:
            storage = self._storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                self._activation_bytes -= storage.size
                storage.size = 0.0

    @property
    def activation_bytes(self) -> float:
        """Bytes of activations alive now."""
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
        """Store what is saved for the backward pass. Nothing else is alive from now on."""
        self.saved = list(self._storages.values())

    def enter_module(self, name: str) -> None:
        """Set the module that runs now, for operators without weights of their own."""
        self._module = name
        if self.recording:
            self._append(Row("module", "module", False, 0, 0.0, 0.0, 0.0, ()), name)

    def gradient_ready(self, gradient: torch.Tensor) -> None:
        """Count an accumulated gradient as such, no longer as an activation."""
        for tensor in tensors_in(gradient):  # a sparse one has several
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
        """Return the values of the parameters that these modules own."""
        of_storage = self._module_of_storage
        return {
            v
            for v, p in self.parameters.items()
            if of_storage.get(p.untyped_storage()._cdata) in modules
        }

    def _locate(self, func: Any, args: Any) -> None:
        if func is _DETACH:  # autograd's bookkeeping, whose number differs in recomputation
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
        """Return the recomputed forward call: the next one of its function in the same place."""
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
    """Return True while autograd's engine runs, also during recomputation."""
    return _current_node() is not None


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """Return the result of a grouped matmul in any format.

    torch's meta kernel only supports bf16. CUDA computes other formats one after the other
    (_grouped_mm_fallback in aten/src/ATen/native/GroupedMMUtils.h).
    """
    offsets = offsets_of((a, b, *rest), kwargs)
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():  # a matrix per group: a batch, or the gradients of the groups' weights
        shape = [a.shape[0] if offsets is None else offsets.numel(), *shape]
    return a.new_empty(shape, dtype=kwargs.get("out_dtype") or a.dtype)


def _foreach_shortcut(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a substitute for an update of many tensors, which torch runs in Python for each."""
    name = func._schema.name.partition("::")[2]
    if not name.startswith("_foreach_") or not all(tensor.is_meta for tensor in args[0]):
        return None  # step counters on the host have values
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
"""Updates that return tensors like those of the first list."""
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node

# torch's meta kernels of batch norm decompose into 20 operators in Python: 80% of a ResNet-50 trace
_SHORTCUTS: dict[Any, Any] = {
    torch.ops.aten._cudnn_rnn.default: forward_result,
    torch.ops.aten._cudnn_rnn_backward.default: backward_result,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}


def numbers_of(recorded: Recorded) -> list[float]:
    """Return a row's numbers, and the bytes of gradients and activations alive meanwhile."""
    row = recorded.row
    sizes = [*map(float, row.dims), *([0.0] * (MOST_SIZES - len(row.dims)))]
    alive = (recorded.gradient_bytes, recorded.activation_bytes)
    return [row.flops, row.read_bytes, row.written_bytes, *sizes, *alive]


def recording_of(
    recorded: Sequence[Recorded],
    constant: np.ndarray,
    slope: np.ndarray,
    role_of: Callable[[str, str, Origin], Role] | None = None,
    states: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    blocks: BlockSizes | None = None,
) -> Recording:
    """Return the recording of rows, from the coefficients of `numbers_of` over the batch size."""
    return Recording(
        kind=tuple(r.row.kind for r in recorded),
        function=tuple(r.row.function for r in recorded),
        phase=tuple(r.phase for r in recorded),
        module=tuple(r.module for r in recorded),
        half=np.array([r.row.half for r in recorded]),
        launches=np.array([r.row.launches for r in recorded]),
        inside=np.array([r.origin.place > BEFORE for r in recorded]),
        role=(
            ()
            if role_of is None
            else tuple(role_of(r.row.kind, r.row.function, r.origin) for r in recorded)
        ),
        numbers=np.stack([constant[:, :-2], slope[:, :-2]], axis=-1),
        order=np.arange(len(recorded)),
        alive=np.stack([constant[:, -2], constant[:, -1], slope[:, -1]], axis=1),
        states=states,
        blocks=blocks,
    )
