"""Capture of the script's model as a Workload, for forecasts of other hardware.

In the second step, the models, their optimizer and the shapes of their inputs are copied to the
meta device, without data. They are traced after the script has ended. Tracing needs trainpace's own
dependencies in the script's environment. Without them, nothing is captured.

Modules and loss functions are recorded in the order of their calls, with the shapes of their
arguments. If an argument came from an earlier call, that call is recorded. Thus all calls can be
repeated on the meta device.

Known limits: if a loss is neither a module nor one of torch's functions, the mean of the outputs
behind it replaces it, with a note. Computations between modules are not traced. Models with sharded
parameters (FSDP2, ZeRO-3) are not captured.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from trainpace.watch.inside.event_log import TRAINPACE
from trainpace.watch.inside.loaders import size_of
from trainpace.watch.inside.recorder import Recorder

MOST_CALLS = 200
"""Most calls that are recorded in a step. A recurrent cell is called once per letter of a line."""
MOST_NODES = 20_000
"""Most nodes of a loss's graph that are visited to find the outputs behind it."""


class Shape(NamedTuple):
    """Shape and type of a tensor that the script made.

    Attributes:
        values: Number of values of a sparse tensor, or None for a dense tensor.
        learns: The script computes its gradient.
    """

    sizes: tuple[int, ...]
    dtype: Any
    values: int | None = None
    learns: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the tensor holds integers, such as indices."""
        return (
            not (self.dtype.is_floating_point or self.dtype.is_complex)
            and str(self.dtype) != "torch.bool"
        )

    def made(self, n: int, of: int) -> Any:
        """Return such a tensor on the meta device for `n` samples.

        The recorded call had `of` samples.
        """
        import torch

        if self.values is not None:
            from trainpace.workload import sparse

            return sparse(self.sizes, self.values, self.dtype)
        return torch.empty(_scaled(self.sizes, n, of), dtype=self.dtype, device="meta")


class FromOutput(NamedTuple):
    """A tensor from an earlier call: the call, and the position among its output tensors."""

    call: int
    position: int
    sizes: tuple[int, ...]

    def filled(self, outputs: Sequence[Sequence[Any]], n: int, of: int) -> Any:
        """Return the tensor, given the outputs of the earlier calls."""
        return outputs[self.call][self.position].reshape(_scaled(self.sizes, n, of))


class Fixed(NamedTuple):
    """A copy without data of an object with tensors, such as a graph.

    It fits only the script's own batch.
    """

    value: Any
    samples: int

    def made(self, n: int, of: int) -> Any:
        """Return a copy for one step, since a model may write into it."""
        from trainpace.workload import Copier

        return Copier({})(self.value)


class Derived(NamedTuple):
    """A tensor that the script derived from the outputs at `places`.

    The derivation is not traced.
    """

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    dtype: Any

    def filled(self, outputs: Sequence[Sequence[Any]], n: int, of: int) -> Any:
        """Return a tensor through which gradients flow to all its sources."""
        import torch

        means = [outputs[call][position].mean() for call, position in self.places]
        empty = torch.empty(_scaled(self.sizes, n, of), dtype=self.dtype, device="meta")
        return empty + _sum(means)


class Outputs:
    """Output tensors of the calls.

    They are found by their memory address or by their nodes in autograd's graph.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self._at: dict[int, list[tuple[int, int]]] = {}
        self._made: dict[tuple[Any, int], tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.calls)

    def begin(self) -> None:
        """Begin a call. Its results follow with `put`."""
        self.calls.append([])

    def put(self, tensors: list[Any]) -> None:
        """Add the results of the last call."""
        self.calls[-1] = tensors
        for position, tensor in enumerate(tensors):
            place = len(self.calls) - 1, position
            self._at.setdefault(tensor.data_ptr(), []).append(place)
            if tensor.grad_fn is not None:
                self._made[tensor.grad_fn, tensor.output_nr] = place

    def place_of(self, value: Any) -> tuple[int, int] | None:
        """Return (call, position) of the last output that shares memory with this tensor, or None.

        The tensor may have another shape. A detached output is another tensor.
        """
        for call, position in reversed(self._at.get(value.data_ptr(), ())):
            tensor = self.calls[call][position]
            if tensor.numel() == value.numel() and tensor.requires_grad == value.requires_grad:
                return call, position
        return None

    def reached(self, roots: Iterable[Any]) -> list[tuple[int, int]]:
        """Return the places of the outputs from which these tensors were computed.

        The search stops at each output, so outputs behind another output are not returned.
        """
        found: dict[tuple[int, int], None] = {}
        left = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        seen = set(left)
        while left and len(seen) < MOST_NODES:
            node = left.pop()
            if node in self._made:
                found[self._made[node]] = None
                continue
            for following in node[0].next_functions:
                if following[0] is not None and following not in seen:
                    seen.add(following)
                    left.append(following)
        return sorted(found)


class Call(NamedTuple):
    """One call of a model or a loss.

    Attributes:
        module: Number of a model with parameters, or a module or function that computes a loss.
        arguments: Flat list of arguments, with placeholders for tensors.
        nesting: Structure of the arguments.
    """

    module: Any
    arguments: list[Any]
    nesting: Any

    @property
    def shapes(self) -> list[Shape]:
        return [value for value in self.arguments if isinstance(value, Shape)]

    @property
    def follows(self) -> bool:
        """True if the call received a result of an earlier call."""
        return any(isinstance(value, FromOutput | Derived) for value in self.arguments)

    def made(self, n: int, of: int) -> list[Any]:
        """Return the arguments for `n` samples. Results of earlier calls remain placeholders."""
        return [
            value.made(n, of) if isinstance(value, Shape | Fixed) else value
            for value in self.arguments
        ]

    @property
    def fixed_samples(self) -> int:
        """Largest number of samples of an object with tensors, or 0 without such an object."""
        return max((v.samples for v in self.arguments if isinstance(v, Fixed)), default=0)

    def has_fixed_batch(self, of: int) -> bool:
        """Return True if an argument shows that the batch is a graph.

        Signs are an object with tensors, a sparse matrix, or an integer tensor of pairs. The edges
        of a graph do not grow with its nodes, so no other batch size can be made up.
        """
        return self.fixed_samples > 0 or any(
            shape.values or (of != 2 == len(shape.sizes) == shape.sizes[0] and shape.is_whole)
            for shape in self.shapes
        )

    def run(
        self, module: Any, arguments: list[Any], outputs: Sequence[Sequence[Any]], n: int, of: int
    ) -> Any:
        """Call the module with the arguments, filled in with results of earlier calls."""
        from torch.utils._pytree import tree_unflatten

        given = list(arguments)
        for i, value in enumerate(self.arguments):
            if isinstance(value, FromOutput | Derived):
                given[i] = value.filled(outputs, n, of)
            elif isinstance(value, Shape) and value.learns:
                given[i] = given[i].detach().requires_grad_()
        args, kwargs = tree_unflatten(given, self.nesting)
        return module(*args, **kwargs)


def _sum(tensors: Sequence[Any]) -> Any:
    return sum(tensors[1:], tensors[0])


def _scaled(sizes: tuple[int, ...], n: int, of: int) -> tuple[int, ...]:
    """Return the sizes for `n` samples instead of `of`.

    If the first dimension does not count samples, the sizes stay the same.
    """
    if not sizes or n == of or sizes[0] % of or (of == 1 and sizes[0] > 1):
        return sizes
    return (n * (sizes[0] // of), *sizes[1:])


def described(module: Any, args: Any, kwargs: Any, outputs: Outputs) -> Call:
    """Return a call as a `Call`, with placeholders for its tensors."""
    from torch.utils._pytree import tree_flatten

    values, nesting = tree_flatten((args, kwargs))
    return Call(module, [_placeholder(value, outputs) for value in values], nesting)


def _placeholder(value: Any, outputs: Outputs) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor_placeholder(value, outputs)
    if value is None or isinstance(value, bool | int | float | str | torch.device | torch.dtype):
        return value
    from trainpace.workload import Copier, tensors_in

    sizes = [t.shape[0] for t in (*tensors_in(value), *tensors_of(value)) if t.dim()]
    return Fixed(Copier({})(value), sizes[0] if sizes else 0)


def _tensor_placeholder(value: Any, outputs: Outputs) -> Shape | FromOutput | Derived:
    import torch

    sizes = tuple(value.shape)
    if value.layout is not torch.strided:
        return Shape(sizes, value.dtype, value._nnz())
    if (found := outputs.place_of(value)) is not None:
        return FromOutput(*found, sizes)
    if value.grad_fn is not None and (places := outputs.reached([value])):
        return Derived(tuple(places), sizes, value.dtype)
    return Shape(sizes, value.dtype, learns=value.requires_grad and value.is_floating_point())


def tensors_of(value: Any) -> list[Any]:
    """Return the tensors of an output, also those inside objects such as a distribution."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, torch.nn.Module):
            found += [part for part in vars(leaf).values() if isinstance(part, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout is torch.strided]


CAPTURED_IN_STEP = 1
"""Number of the step in which the model is captured, counted from 0."""
WORKLOAD_FILE = "workload.json"
OTHER_FORMS: Any = ("amp", "half")
"""Precision policies. A model may support only some of them."""
ONE_BATCH = "It could only be traced at the script's own batch of {}, and holds for no other."
BETWEEN = "The step also computes something between its modules, which is not counted."
_EVALUATES = (
    "the training's {} evaluates the loss several times a step; a step here is one evaluation and"
    " an update by SGD."
)
_SHARDED = ("placements", "_is_flat_param", "ds_id")
"""Attributes of parameters under FSDP2, FSDP and DeepSpeed's ZeRO-3."""
LONGEST_S = 20.0
"""Seconds for tracing after the script has ended. A recurrent network of 999 calls took 186 s."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds` on the main thread. Other threads have no limit."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"tracing the model took longer than {seconds:g} s and was stopped")

    try:
        before = signal.signal(signal.SIGALRM, late)
    # The system lacks this signal, or this is not the main thread.
    except (AttributeError, ValueError):
        yield
        return
    # The timer repeats, because the code may catch the exception.
    pending, every = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, pending, every)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


class Capture:
    """The calls of the second step up to its first backward pass, and copies of the models."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.calls: list[Call] = []
        self.outputs = Outputs()
        """Tensors that each call returned. They are released when the backward pass begins."""
        self.losses: list[tuple[int, int]] = []
        """(call, position) of the outputs from which the loss was computed."""
        self.batch_size = 0
        self.models: dict[int, int] = {}
        """Number of each model, by the id of the original."""
        self.copies: list[Any] = []
        self.copier: Any = None
        self.optimizer: Any = None
        self.needs_closure = ""
        """Name of an optimizer that evaluates the loss itself, any number of times."""
        self.names: list[str] = []
        self.aside: dict[str, None] = {}
        """Names of models that the step also runs without gradients."""
        self.order: list[int] = []
        """Models that were called before the first backward pass.

        `later` holds the models that were called since the last one.
        """
        self.later: list[int] | None = None
        self.failed = self.awaits = False
        self.seen = ""

    def attempt(self, part: Callable[..., None], *args: Any) -> None:
        """Run a part of the capture. If it fails, log the reason and end the capture."""
        if self.failed:
            return
        try:
            part(*args)
        except Exception as error:
            self.failed = True
            self.forget()
            self.copies, self.optimizer, self.copier = [], None, None
            self.recorder.log.note(no_workload=in_words(error))

    def forget(self) -> None:
        """Release the outputs, because they hold memory of the script."""
        self.outputs = Outputs()

    @property
    def is_open(self) -> bool:
        """True while calls are recorded: in the second step, before its first backward pass."""
        return not self.failed and self.recorder.steps == CAPTURED_IN_STEP and self.later is None

    @property
    def follows(self) -> bool:
        """True while calls are recorded and a model was called."""
        return self.is_open and bool(self.outputs)

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Handle an outermost module that is about to run with gradients."""
        recorder, is_first_rank = self.recorder, os.environ.get("RANK", "0") == "0"
        if recorder.steps == CAPTURED_IN_STEP and recorder.trials is None and is_first_rank:
            recorder.charged(TRAINPACE, "capture", self._called, model, args, kwargs)

    def _called(self, model: Any, args: Any, kwargs: Any) -> None:
        if not any(True for _ in model.parameters()):
            if self.follows:
                self.made_by(model, args, kwargs)
            return
        if self.later is not None:
            self.later.append(id(model))
            return
        if not self.calls:
            self.recorder.log.note(number_format=_number_format(model))
        if id(model) not in self.models:
            self.models[id(model)] = len(self.copies)
            self.copies.append(self.copied(model))
            self.names.append(type(model).__qualname__)
        self.order.append(id(model))
        self.note(described(self.models[id(model)], args, kwargs, self.outputs))
        self.batch_size = max(
            self.batch_size, size_of((args, kwargs)), self.calls[-1].fixed_samples
        )

    def copied(self, model: Any) -> Any:
        """Return a copy of a model on the meta device.

        Raises:
            Untraceable: The model's parameters are sharded.
        """
        if any(hasattr(p, name) for p in model.parameters() for name in _SHARDED):
            raise Untraceable(
                "its parameters are sharded among processes, and only whole ones can be traced"
            )
        from trainpace.workload import Copier, meta_memo

        if self.copier is None:
            self.copier = Copier({})
        self.copier.memo.update(meta_memo(model, self.copier.memo))
        return self.copier(model)

    def made_by(self, criterion: Any, args: Any, kwargs: Any) -> None:
        """Handle a module or function without parameters.

        It is recorded if it receives an output of an earlier call.
        """
        call = described(criterion, args, kwargs, self.outputs)
        if call.follows:
            self.note(call)

    def note(self, call: Call) -> None:
        """Record a call.

        Raises:
            Untraceable: The step has too many calls.
        """
        if len(self.calls) == MOST_CALLS:
            raise Untraceable(
                f"a step calls its modules and losses more than {MOST_CALLS} times, which is too"
                " many"
            )
        self.calls.append(call)
        self.outputs.begin()
        self.awaits = True

    def after(self, output: Any) -> None:
        """Handle the result of an outermost module or a loss function."""
        if self.follows and self.awaits:
            self.outputs.put(tensors_of(output))
        self.awaits = False

    def without_gradients(self, model: Any) -> None:
        """Handle an outermost module that runs without gradients. Its work is not traced."""
        if any(True for _ in model.parameters()):
            self.aside[type(model).__qualname__] = None

    def backward(self, roots: Any) -> None:
        """Handle tensors whose gradients are about to be computed."""
        if self.recorder.steps != CAPTURED_IN_STEP or not self.calls:
            return
        if self.later is None:
            self.recorder.charged(TRAINPACE, "capture", self._first_backward, roots)
        else:
            self.turns()
        self.later = []

    def _first_backward(self, roots: Any) -> None:
        self.losses = self.outputs.reached(tensors_of(roots))
        self.optimizer = self.stepper()
        self.recorder.log.note(model_batch=self.batch_size)
        self.forget()
        self.copier = None

    def by_hand(
        self, outputs: Any, inputs: Any = (), *_: Any, create_graph: bool = False, **__: Any
    ) -> None:
        """Handle a call of torch.autograd.grad by the script itself."""
        if self.recorder.steps != CAPTURED_IN_STEP or not self.calls:
            return
        if create_graph or not all(tensor.is_leaf for tensor in tensors_of(inputs)):
            raise Untraceable(
                "its step uses gradients of torch.autograd.grad, which cannot be traced"
            )
        self.backward(outputs)

    def turns(self) -> None:
        """Raise if the calls since the last backward pass differ from those before the first."""
        if self.later != self.order:
            raise Untraceable(
                "its step has several backward passes over different calls, and only one can be"
                " traced"
            )

    def ends(self) -> None:
        """Handle the end of the second step."""
        self.forget()
        if self.later:
            self.turns()

    def stepper(self) -> Any:
        """Return a copy of the optimizer with the copied parameters, or None without an optimizer.

        Several optimizers of one kind are copied as one optimizer.
        """
        own = self._own_optimizers()
        last = self.recorder.optimizer() if self.recorder.optimizer is not None else None
        if not own and last is not None:
            own = [last]
        if not own:
            return None
        if _wants_closure(own[0]):
            self.needs_closure = type(own[0]).__name__
            return None
        if len({type(one) for one in own}) > 1:
            raise Untraceable(
                "its step has optimizers of several kinds, and only one can be traced"
            )
        from trainpace.workload import meta_optimizer

        stepper = meta_optimizer(own, self.copier.memo)
        for group in stepper.param_groups:
            group["params"] = [p for p in group["params"] if p.device.type == "meta"]
            if "fused" in group:
                group["fused"] = None  # The meta device has no fused implementation.
        return stepper

    def _own_optimizers(self) -> list[Any]:
        """Return the optimizers of the copied parameters.

        Wrappers of an optimizer that is already listed are left out.
        """
        own, covered = [], set[int]()
        for optimizer in (ref() for ref in self.recorder.optimizers):
            groups = [] if optimizer is None else optimizer.param_groups
            updated = {id(p) for group in groups for p in group["params"]}
            if updated & self.copier.memo.keys() and not updated <= covered:
                own.append(optimizer)
                covered |= updated
        return own

    # ---- after the script has ended

    def write(self, folder: str) -> None:
        """Trace the captured model and write the workload into the folder."""
        self.forget()
        if self.later is None:
            if self.names and self.recorder.steps > CAPTURED_IN_STEP:
                raise Untraceable("no backward pass of torch was seen in its second step")
            return
        if not self.batch_size:
            raise Untraceable("it is called without a tensor, so its batch size is unknown")
        import torch
        from msgspec.structs import replace

        from trainpace.core.records import save
        from trainpace.workload import Task

        # Without a copied optimizer, SGD is assumed. The script changes parameters by hand, or its
        # optimizer evaluates the loss itself, as LBFGS does.
        settings = {"optimizer": "sgd"} if self.optimizer is None else {}
        shapes = [shape.sizes for shape in self.calls[0].shapes if shape.sizes]
        task = Task(
            name=" + ".join(dict.fromkeys(self.names)),
            model=self.model,
            forward=self.forward,
            loss=self.loss,
            make_batch=self.make_batch,
            optimizer=self.optimizer,
            dataset=None,
            settings=settings,
            notes=self.notes(),
            sample=", ".join("x".join(map(str, sizes[1:])) or "number" for sizes in shapes),
        )
        is_fixed = any(call.has_fixed_batch(self.batch_size) for call in self.calls)
        with torch.random.fork_rng(devices=[]), at_most(LONGEST_S), silence():
            workload = traced(task, self.batch_size, is_fixed)
        if self.needs_closure:
            notes = (*workload.notes, _EVALUATES.format(self.needs_closure))
            workload = replace(workload, assumes_optimizer=True, notes=notes)
        save(workload, os.path.join(folder, WORKLOAD_FILE))
        self.recorder.log.note(workload=WORKLOAD_FILE, loss=self.seen)

    @property
    def model(self) -> Any:
        """The captured model, or a list of all captured models."""
        import torch

        return self.copies[0] if len(self.copies) == 1 else torch.nn.ModuleList(self.copies)

    def notes(self) -> tuple[str, ...]:
        """Return notes on work of the step that is not counted."""
        aside = " and ".join(self.aside)
        without_gradients = f"The step also runs {aside} without gradients, which is not counted."
        between = any(isinstance(value, Derived) for call in self.calls for value in call.arguments)
        return (*[without_gradients] * bool(aside), *[BETWEEN] * between)

    def make_batch(self, n: int) -> Any:
        """Return a batch of `n` samples: `n`, and the arguments of each call."""
        return [n, *(call.made(n, self.batch_size) for call in self.calls)]

    def forward(self, model: Any, batch: Any) -> Any:
        """Return the output tensors of each call."""
        models = [model] if len(self.copies) == 1 else list(model)
        n, *arguments = batch
        outputs: list[list[Any]] = []
        for call, given in zip(self.calls, arguments, strict=True):
            module = models[call.module] if isinstance(call.module, int) else call.module
            outputs.append(tensors_of(call.run(module, given, outputs, n, self.batch_size)))
        return outputs

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the sum of the losses, or of the means of other outputs."""
        outputs = self.forward(model, batch)
        ends = [outputs[call][position] for call, position in self.losses]
        ends = ends or [t for t in outputs[-1] if t.is_floating_point() and t.requires_grad]
        self.seen = self._kind_of_loss(ends)
        return _sum([t if t.dim() == 0 else t.float().mean() for t in ends])

    def _kind_of_loss(self, ends: Sequence[Any]) -> str:
        if any(t.dim() for t in ends):
            return "mean of the outputs"
        made = any(not isinstance(self.calls[call].module, int) for call, _ in self.losses)
        return "called" if made else "output"


def traced(task: Any, batch_size: int, has_fixed_batch: bool) -> Any:
    """Trace the task for any batch size if possible, otherwise only for the script's own.

    Args:
        task: The captured training.
        batch_size: Batch size of the script.
        has_fixed_batch: The batch cannot have another size.
    """
    from msgspec.structs import replace

    from trainpace.core.errors import TrainpaceError
    from trainpace.workload import trace_task

    workload, only = None, None
    with contextlib.suppress(TrainpaceError):
        workload = None if has_fixed_batch else trace_task(task, ("fp32",))
    if workload is None:
        only = batch_size
        workload = trace_task(task, ("fp32",), only_batch=only)
        own = {"micro_batch": only, **workload.settings}
        workload = replace(workload, notes=(*workload.notes, ONE_BATCH.format(only)), settings=own)
    for form in OTHER_FORMS:
        with contextlib.suppress(TrainpaceError):  # A model may support only one of the formats.
            workload = replace(
                workload, forms=workload.forms | trace_task(task, (form,), only_batch=only).forms
            )
    return workload


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silence a model that prints in its forward pass, after the script has ended."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


class Untraceable(Exception):
    """Reason why the model cannot be traced. The text is printed after a colon."""


def in_words(error: Exception) -> str:
    """Return the reason why the workload is missing."""
    cause = error.__cause__
    if isinstance(cause, TimeoutError):
        error = cause
    if isinstance(error, Untraceable | TimeoutError):
        return str(error)
    if isinstance(error, ImportError):
        return f"the script's Python lacks a module that tracing needs ({error})"
    if isinstance(cause, Exception) and isinstance(error, ValueError):
        from trainpace.workload import in_short

        return in_short(cause)
    kind = type(error)
    name = "" if kind.__module__.partition(".")[0] == "trainpace" else f"{kind.__name__}: "
    return f"{name}{getattr(error, 'message', error)}".rstrip(".")


def _number_format(model: Any) -> str:
    """Return the precision as in `Execution.precision`. Empty for fp32.

    It is the precision of autocast, or else of 16-bit or fp64 weights.
    """
    import torch

    weights = next(model.parameters())
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    if torch.is_autocast_enabled(weights.device.type):
        return f"amp_{short[torch.get_autocast_dtype(weights.device.type)]}"
    return short.get(weights.dtype, "")


def _wants_closure(optimizer: Any) -> bool:
    """Return True if the optimizer's step evaluates the loss itself."""
    import inspect

    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
