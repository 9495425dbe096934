"""Record one training step on the meta device: the operators, and the bytes alive at each.

The FLOPs of every matmul must be right. If an operator with a matmul were missing in `operators`,
it would count as element-wise, and its model would be forecast far too fast. Recording therefore
raises an error for such operators, and for operators of unknown libraries. The FLOPs of all other
operators are compared with torch's own formulas (torch.utils.flop_counter).
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from trainpace.core.errors import TrainpaceError
from trainpace.workload.cuda_mapping import backward_result, forward_result
from trainpace.workload.meta import tensors_in
from trainpace.workload.operators import Row, matrices_of, offsets_of, rows_of
from trainpace.workload.own_operators import SKIPPING_ATTENTION, UNKNOWN
from trainpace.workload.workload import MATRIX_KINDS, Phase

LARGEST_DIFFERENCE = 0.02
"""Largest difference from torch's count without a note, as a share of the step's FLOPs."""
CAUSAL = 0.5
"""Share of attention's FLOPs that a causal mask leaves. torch's formulas ignore the mask."""
_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|cdist|attention|rnn|lstm|gru|trilinear"
    r"|conv(olution)?([123]d|_tbc|_overrideable|_transpose\w*)?)(_|$)"
    r"|^_?(linalg|cholesky|svd|qr|lu|triangular_solve|ormqr)(_|$)"
)
"""Pattern for the names of ATen calls that multiply or decompose matrices."""
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
"""Known operators of other libraries. All are bound by memory traffic."""
WHOLE_MASKS = (
    "An attention mask depends on values, such as the starts of documents. All keys were counted;"
    " the kernel may skip many."
)
_SKIPPING = getattr(torch.ops.trainpace, SKIPPING_ATTENTION).default
INSTEAD = "Measure it with `trainpace measure`, or record a short run with `trainpace watch`."


def refuse_uncounted(func: Any, rows: Sequence[Row], module: str) -> None:
    """Raise an error if a call may contain a matmul and none of its rows counts one.

    Args:
        func: The ATen operator.
        rows: The rows of the call.
        module: Name of the module that runs, for the error.

    Raises:
        TrainpaceError: If the operator belongs to an unknown library, or its matmul is not counted.
    """
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
    """Comparison of the FLOPs of rows with torch's formulas, call by call."""

    def __init__(self) -> None:
        self._flops = 0.0
        self._differences: dict[str, float] = {}
        self._whole_masks = False

    def add(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, rows: Sequence[Row]
    ) -> None:
        """Compare the FLOPs of one call's rows with torch's formula."""
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
        """Return a note about unknown attention masks and wrong FLOPs, or None."""
        notes = [WHOLE_MASKS] if self._whole_masks else []
        difference = sum(self._differences.values())
        if difference > LARGEST_DIFFERENCE * self._flops:
            name = max(self._differences, key=lambda name: self._differences[name])
            notes.append(
                "The FLOPs counted here differ from torch's formulas by"
                f" {difference / self._flops:.0%} per step, mostly in {name}. The times may be"
                " wrong."
            )
        return " ".join(notes) or None


def _expected_flops(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> float | None:
    """Return the FLOPs of a call by torch's formula, or None if torch has no formula for it."""
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


BATCHES = (2, 3, 5)
"""Batch sizes of the three traced steps.

Size 1 is not used, because torch then drops dimensions and skips copies.
"""
BEFORE, AFTER = 0, -1
"""Places before and after the blocks. Blocks are numbered from 1.

Calls between two blocks have the place `BEFORE`.
"""


class Origin(NamedTuple):
    """Place and forward call that a row belongs to.

    Attributes:
        place: Number of the block, or `BEFORE` or `AFTER`.
        call: Index of the forward call. For a row of the backward pass, it is the call that the
            row differentiates or recomputes. -1 if there is none.
    """

    place: int
    call: int


@dataclass(slots=True)
class Recorded:
    """Recorded row, with the bytes alive while it runs.

    Attributes:
        row: The operator.
        phase: Phase of the step.
        module: Name of the module that runs.
        origin: Place and forward call.
        gradient_bytes: Accumulated gradients of parameters.
        activation_bytes: All other tensors that the step created.
        set_aside_bytes: The part of `activation_bytes` that no block uses: gradients of parameters
            before they are accumulated, and results of the backward pass outside all blocks. For
            example, the gradient of a tied head waits for the gradient of the embedding.
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
    """Tensor storage that is alive.

    Attributes:
        value: Number of the storage, unique within a recorder.
        call: Index of the forward call that created it. -1 if it existed before the step.
        size: Size in bytes.
        row: Number of rows recorded when it was created.
        is_outside: True if the backward pass created it outside the blocks, until it is
            accumulated as a gradient.
        reference: Weak reference to the storage, which reports when it is freed.
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
    """Return the size of a parameter in elements, to divide memory among pipeline stages.

    A parameter with a fixed dtype, such as a packed weight, counts as the number of 16-bit numbers
    that fill its bytes.
    """
    n = parameter.numel()
    return n * parameter.element_size() // 2 if hasattr(parameter, "keeps_dtype") else n


class Step(NamedTuple):
    """One ATen call of the forward pass.

    Values are numbers of storages, so a view has the same value as its base.

    Attributes:
        function: Name of the ATen operator.
        inputs: (value, number of elements) of each input tensor.
        operands: Values of the two matrices of a matmul, or of the weight of a convolution.
        outputs: Values of the results.
    """

    function: str
    inputs: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every ATen call below autograd.

    The rows are in `recorded` afterwards. A call of the backward pass is assigned to a forward
    call by the sequence number of its autograd node, as in torch.profiler. A call that recomputes
    activations is assigned by its position in the block.

    Args:
        parameters: {name: parameter} of the model.
        with_steps: Store the calls of the forward pass with their inputs and outputs in `steps`.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], with_steps: bool = False) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.recording = True
        self.recorded: list[Recorded] = []
        self.flop_check = FlopCheck()
        self.parameter_bytes = self.frozen_bytes = self.optimizer_bytes = self.paged_bytes = 0.0
        """Bytes of four kinds of states.

        They are parameters and buffers, the frozen parameters among them, optimizer states, and the
        optimizer states that CUDA pages to the host.
        """
        self.before_update = 0.0
        """Bytes of activations alive when the optimizer starts."""
        self._gradient_bytes = 0.0
        self.activation_bytes = 0.0
        """Bytes of activations alive now."""
        self.places: list[int] = []
        """Place of each forward call, by index."""
        self.steps: dict[int, Step] | None = {} if with_steps else None
        self.entered: list[tuple[int, torch.Size, float, int]] = []
        """(number, shape, bytes, value of the hidden state) of each block, in the order they ran.

        The bytes are those of all tensors that no earlier block got. Masks and positions, which all
        blocks share, count for the first block only.
        """
        self.left: list[int] = []
        """Values of the hidden states that the blocks returned, in the order they ran."""
        self.units: list[int] = []
        """Number of the block outside the chain that each forward call belongs to, 0 if none.

        See `blocks.Chain`.
        """
        self.left_units: dict[int, list[float]] = {}
        """{number of a block outside the chain: bytes that it made and returned, each time it ran}.
        """
        self.saved: list[Storage] = []
        """Storages alive when the forward pass ends."""
        self.parameters: dict[int, torch.nn.Parameter] = {}
        """{value: parameter}."""
        self.parameter_count = sum(map(share_of_memory, parameters.values()))
        self._place = BEFORE
        self._unit = 0
        self._given: set[int] = set()
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
        """Exclude tensors that are always alive (parameters, buffers, batch) from activations."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._add_storage(storage, -1, 0.0)
                if isinstance(tensor, torch.nn.Parameter):
                    self.parameters[self._values] = tensor

    def keep_for_ever(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors that the step created and that stay alive, such as optimizer states."""
        for tensor in tensors:
            storage = self._storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                self.activation_bytes -= storage.size
                storage.size = 0.0

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

    def enter_block(
        self, number: int, hidden: torch.Tensor, inputs: Iterable[torch.Tensor]
    ) -> None:
        """Assign the next forward calls to a block.

        Args:
            number: Number of the block.
            hidden: The hidden state, which is the first of its inputs.
            inputs: All tensors that the block gets.
        """
        if self.phase == "forward":
            self._place = number
            self._origin = Origin(number, -1)
            self._first_call[number] = len(self.places)
            sizes = {self._value(t): float(t.numel() * t.element_size()) for t in inputs}
            size = sum(size for value, size in sizes.items() if value not in self._given)
            self._given |= sizes.keys()
            self.entered.append((number, hidden.shape, size, self._value(hidden)))

    def leave_block(self, hidden: torch.Tensor, is_last: bool) -> None:
        """Assign the next forward calls to the place outside the blocks."""
        if self.phase == "forward":
            self._place = AFTER if is_last else BEFORE
            self._origin = Origin(self._place, -1)
            self.left.append(self._value(hidden))

    def enter_unit(self, number: int) -> None:
        """Assign the next forward calls to a block outside the chain."""
        if self.phase == "forward":
            self._unit = number

    def leave_unit(self, returned: Iterable[torch.Tensor]) -> None:
        """End the block that `enter_unit` began."""
        if self.phase == "forward":
            keys = {tensor.untyped_storage()._cdata for tensor in returned}
            stored = [self._storages[key] for key in keys if key in self._storages]
            size = sum(s.size for s in stored if s.call >= 0 and self.units[s.call] == self._unit)
            self.left_units.setdefault(self._unit, []).append(size)
            self._unit = 0

    def end_forward(self) -> None:
        """Store the tensors alive at the end of the forward pass, which the backward pass needs."""
        self.saved = list(self._storages.values())

    def enter_module(self, name: str) -> None:
        """Set the module that runs, and record its entry as a row.

        Operators without weights of their own are attributed to this module.
        """
        self._module = name
        if self.recording:
            self._append(Row("module", "module", False, 0, 0.0, 0.0, 0.0, ()), name)

    def gradient_ready(self, gradient: torch.Tensor) -> None:
        """Move an accumulated gradient from the activation bytes to the gradient bytes."""
        for tensor in tensors_in(gradient):  # a sparse gradient has values and indices
            self._is_gradient(tensor.untyped_storage())

    def _is_gradient(self, whole: Any) -> None:
        size, storage = float(whole.nbytes()), self._storages.get(whole._cdata)
        if storage is not None:
            if storage.is_gradient:
                return  # a later backward pass added to the same gradient
            storage.is_gradient = True
        if storage is not None and storage.is_outside:
            storage.is_outside = False
            self._outside_bytes -= storage.size
        elif storage is not None:
            for recorded in self.recorded[storage.row :]:
                recorded.set_aside_bytes += size
        self.activation_bytes -= size
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
        """Return the values of the parameters of the named modules."""
        of_storage = self._module_of_storage
        return {
            v
            for v, p in self.parameters.items()
            if of_storage.get(p.untyped_storage()._cdata) in modules
        }

    def _locate(self, func: Any, args: Any) -> None:
        """Set the origin of the call that runs next."""
        if func is _DETACH:  # autograd calls it, and not equally often during recomputation
            return
        if self.phase == "forward":
            call = len(self.places)
            self.places.append(self._place)
            self.units.append(self._unit)
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
        """Return the forward call that is recomputed.

        It is the next forward call of the same operator in the same place.
        """
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
        alive = (self._gradient_bytes, self.activation_bytes, self._outside_bytes)
        self.recorded.append(Recorded(row, self.phase, module, self._origin, *alive))

    def _name(self, args: Any) -> str:
        """Return the module that owns a weight among the arguments, or else the one that runs."""
        for argument in args[:3]:
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                name = self._module_of_storage.get(argument.untyped_storage()._cdata)
                if name is not None:
                    return name
        if self.phase == "backward" and self._origin.call >= 0:
            return self._module_of_call[self._origin.call]
        return self._module if self.phase == "forward" else ""

    def _track(self, out: Any) -> None:
        """Count the bytes of new storages until they are freed."""
        for tensor in tensors_in(out):
            if tensor.device.type != "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            size = float(storage.nbytes())
            unit = self.units[self._origin.call] if self._origin.call >= 0 else 0
            is_outside = self.phase == "backward" and self._origin.place <= BEFORE and not unit
            self.activation_bytes += size
            self._outside_bytes += size * is_outside

            def freed(_: Any, key: int = key) -> None:
                gone = self._storages.pop(key)
                self._gradient_bytes -= gone.size * gone.is_gradient
                self.activation_bytes -= gone.size * (not gone.is_gradient)
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
    """Return True while autograd's engine runs, including recomputation of activations."""
    return _current_node() is not None


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """Return an empty result of a grouped matmul, in any dtype.

    torch's meta kernel only supports bf16. For other dtypes, CUDA runs one matmul per group
    (_grouped_mm_fallback in aten/src/ATen/native/GroupedMMUtils.h).
    """
    offsets = offsets_of((a, b, *rest), kwargs)
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():  # one result per group: a batch, or the gradients of expert weights
        shape = [a.shape[0] if offsets is None else offsets.numel(), *shape]
    return a.new_empty(shape, dtype=kwargs.get("out_dtype") or a.dtype)


def _foreach_shortcut(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a fast substitute for a `_foreach_` update, or None.

    On the meta device, torch runs such an update in Python, tensor by tensor.
    """
    name = func._schema.name.partition("::")[2]
    if not name.startswith("_foreach_") or not all(tensor.is_meta for tensor in args[0]):
        return None  # step counters on the host have values
    if name.endswith("_"):
        return lambda *_, **__: None
    return _like_the_first if name in _FOREACH_ALIKE else None


def _like_the_first(tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


_DETACH = torch.ops.aten.detach.default
_FOREACH_ALIKE = frozenset(
    f"_foreach_{name}"
    for name in "abs add addcdiv addcmul div lerp mul neg pow reciprocal sqrt sub".split()
)
"""Updates whose results have the shapes and dtypes of their first list of tensors."""
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node

# torch's meta kernels of batch norm run 20 operators in Python, 80% of the time to trace ResNet-50
_SHORTCUTS: dict[Any, Any] = {
    torch.ops.aten._cudnn_rnn.default: forward_result,
    torch.ops.aten._cudnn_rnn_backward.default: backward_result,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}
