"""The script's model as a Workload, so that it can be forecast on other hardware without further work."""

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
"""Calls of a step that are noted: a recurrent cell is called once for every letter of a line."""
MOST_NODES = 20_000
"""Nodes of a loss's graph that are looked at to find which outputs it was made of."""


class Shape(NamedTuple):
    """A tensor that the script made. `values`: of a sparse one, how many it has. `learns`: whether its gradient is computed."""

    sizes: tuple[int, ...]
    dtype: Any
    values: int | None = None
    learns: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers, such as indices."""
        return (
            not (self.dtype.is_floating_point or self.dtype.is_complex)
            and str(self.dtype) != "torch.bool"
        )

    def made(self, n: int, of: int) -> Any:
        """Such a tensor of the meta device for `n` samples where the call had `of`."""
        import torch

        if self.values is not None:
            from trainpace.workload import sparse

            return sparse(self.sizes, self.values, self.dtype)
        return torch.empty(_scaled(self.sizes, n, of), dtype=self.dtype, device="meta")


class FromOutput(NamedTuple):
    """A tensor that came from an earlier call: which call, and its position among that one's tensors."""

    call: int
    position: int
    sizes: tuple[int, ...]


class Fixed(NamedTuple):
    """An object with tensors, such as a graph, without their data: it is what it was in the script's own batch."""

    value: Any
    samples: int


class Derived(NamedTuple):
    """A tensor that the script computed of outputs, at these places; the computation itself is not followed."""

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    dtype: Any


class Outputs:
    """The tensors that calls returned, found by where their numbers lie and by the nodes of autograd's graph that made them."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self._at: dict[int, list[tuple[int, int]]] = {}
        self._made: dict[tuple[Any, int], tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.calls)

    def begin(self) -> None:
        """A call begins, which has returned nothing yet."""
        self.calls.append([])

    def put(self, tensors: list[Any]) -> None:
        """What the last call returned."""
        self.calls[-1] = tensors
        for position, tensor in enumerate(tensors):
            place = len(self.calls) - 1, position
            self._at.setdefault(tensor.data_ptr(), []).append(place)
            if tensor.grad_fn is not None:
                self._made[tensor.grad_fn, tensor.output_nr] = place

    def place_of(self, value: Any) -> tuple[int, int] | None:
        """(call, position) of the last output that this is, perhaps in another shape. One that was detached is another."""
        for call, position in reversed(self._at.get(value.data_ptr(), ())):
            tensor = self.calls[call][position]
            if tensor.numel() == value.numel() and tensor.requires_grad == value.requires_grad:
                return call, position
        return None

    def reached(self, roots: Iterable[Any]) -> list[tuple[int, int]]:
        """The places of the outputs that tensors were made of, the last calls' alone where these were made of others."""
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
    """`module`: the number of a model with parameters, or what has none and makes a loss. `arguments`: with placeholders for
    tensors; `nesting`: how they are nested."""

    module: Any
    arguments: list[Any]
    nesting: Any

    @property
    def shapes(self) -> list[Shape]:
        return [value for value in self.arguments if isinstance(value, Shape)]

    @property
    def fixed(self) -> list[Fixed]:
        return [value for value in self.arguments if isinstance(value, Fixed)]

    @property
    def follows(self) -> bool:
        """Whether it got something from an earlier call."""
        return any(isinstance(value, FromOutput | Derived) for value in self.arguments)

    def made(self, n: int, of: int) -> list[Any]:
        """Its arguments for `n` samples where it had `of`; what comes from earlier calls stays open."""
        made = [
            value.made(n, of) if isinstance(value, Shape) else value for value in self.arguments
        ]
        if self.fixed:
            from trainpace.workload import Copier

            # each step gets its own, which a model may write into
            made = [
                Copier({})(value.value) if isinstance(value, Fixed) else value for value in made
            ]
        return made

    def holds_still(self, of: int) -> bool:
        """Whether something that it got says that its batch is a graph, whose edges do not grow with its nodes: an object, a
        sparse matrix, or pairs of nodes."""
        pairs = [
            len(s.sizes) == 2 and s.sizes[0] == 2 and of != 2 and s.is_whole for s in self.shapes
        ]
        return (
            any(pairs)
            or any(v.samples > 0 for v in self.fixed)
            or any(s.values for s in self.shapes)
        )

    def run(
        self, module: Any, arguments: list[Any], outputs: Sequence[Sequence[Any]], n: int, of: int
    ) -> Any:
        from torch.utils._pytree import tree_unflatten

        given = list(arguments)
        for i, value in enumerate(self.arguments):
            if isinstance(value, FromOutput):
                given[i] = outputs[value.call][value.position].reshape(_scaled(value.sizes, n, of))
            elif isinstance(value, Derived):
                given[i] = _derived(value, outputs, _scaled(value.sizes, n, of))
            elif isinstance(value, Shape) and value.learns:
                given[i] = given[i].detach().requires_grad_()
        args, kwargs = tree_unflatten(given, self.nesting)
        return module(*args, **kwargs)


def _derived(value: Derived, outputs: Sequence[Sequence[Any]], sizes: tuple[int, ...]) -> Any:
    """A tensor of its sizes through which gradients flow to all that it was made of."""
    import torch

    means = [outputs[call][position].mean() for call, position in value.places]
    return torch.empty(sizes, dtype=value.dtype, device="meta") + sum(means[1:], means[0])


def _scaled(sizes: tuple[int, ...], n: int, of: int) -> tuple[int, ...]:
    """With as many samples; what has no such dimension first stays as it is."""
    if not sizes or n == of or sizes[0] % of or (of == 1 and sizes[0] > 1):
        return sizes
    return (n * (sizes[0] // of), *sizes[1:])


def described(module: Any, args: Any, kwargs: Any, outputs: Outputs) -> Call:
    from torch.utils._pytree import tree_flatten

    values, nesting = tree_flatten((args, kwargs))
    return Call(module, [_placeholder(value, outputs) for value in values], nesting)


def _placeholder(value: Any, outputs: Outputs) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            count = value._nnz()
            return Shape(tuple(value.shape), value.dtype, count)
        found = outputs.place_of(value)
        if found is not None:
            return FromOutput(*found, tuple(value.shape))
        if value.grad_fn is not None and (places := outputs.reached([value])):
            return Derived(tuple(places), tuple(value.shape), value.dtype)
        learns = value.requires_grad and value.is_floating_point()
        return Shape(tuple(value.shape), value.dtype, learns=learns)
    if value is None or isinstance(value, bool | int | float | str | torch.device | torch.dtype):
        return value
    from trainpace.workload import Copier, tensors_in

    sizes = [t.shape[0] for t in (*tensors_in(value), *tensors_of(value)) if t.dim()]
    return Fixed(Copier({})(value), sizes[0] if sizes else 0)


def tensors_of(value: Any) -> list[Any]:
    """The tensors of an output, those among them that an object holds, such as a distribution of actions."""
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
WORKLOAD_FILE = "workload.json"
OTHER_FORMS: Any = ("amp", "half")
"""Of which a model may lack one: what it makes itself may have another format than its weights."""
ONE_BATCH = "It could be traced at the script's own batch of {} alone, and holds for no other."
BETWEEN = "The step also computes something between its modules, which is not counted."
_EVALUATES = (
    "the training's {} evaluates the loss several times a step; a step here is one evaluation and"
    " an update by SGD."
)
_SHARDED = ("placements", "_is_flat_param", "ds_id")
"""Attributes of parameters under FSDP2, FSDP and DeepSpeed's ZeRO-3."""
LONGEST_S = 20.0
"""What tracing may take once the script has ended: a recurrent network of 999 calls a sequence took 186 s."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer than that on the main thread; elsewhere it takes the time that it takes."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"tracing the model takes longer than {seconds:g} s")

    try:
        before = signal.signal(signal.SIGALRM, late)
    except (AttributeError, ValueError):  # no such signal, or another thread
        yield
        return
    pending, every = signal.setitimer(
        signal.ITIMER_REAL, seconds, 1.0
    )  # again, where it was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, pending, every)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


class Capture:
    """The calls of the second step up to its first backward pass, and copies of the models that they call."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.calls: list[Call] = []
        self.outputs = Outputs()
        """The tensors that each call returned; let go when the backward pass begins."""
        self.losses: list[tuple[int, int]] = []
        """(call, position) of the outputs that the loss was made of."""
        self.batch_size = 0
        self.models: dict[int, int] = {}
        """The number of each model, by the id of its original."""
        self.copies: list[Any] = []
        self.copier: Any = None
        self.optimizer: Any = None
        self.needs_closure = ""
        """The name of an optimizer that evaluates the loss itself, as often as it likes."""
        self.names: list[str] = []
        self.aside: dict[str, None] = {}
        """Names of models that the step also runs without gradients."""
        self.order: list[int] = []
        """The models that were called before the first backward pass, and then those since the last one."""
        self.later: list[int] | None = None
        self.failed = self.awaits = False
        self.seen = ""

    def attempt(self, part: Callable[..., None], *args: Any) -> None:
        """Do a part of the capture; where it fails, note why there is none."""
        if self.failed:
            return
        try:
            part(*args)
        except Exception as error:
            self.failed = True
            self.forget()
            self.copies, self.optimizer, self.copier = [], None, None
            self.recorder.log.note({"no_workload": in_words(error)})

    def forget(self) -> None:
        """Let the outputs go: their memory is the script's."""
        self.outputs = Outputs()

    @property
    def is_open(self) -> bool:
        """Whether calls are noted: in the second step, before its first backward pass."""
        return not self.failed and self.recorder.steps == CAPTURED_IN_STEP and self.later is None

    @property
    def follows(self) -> bool:
        return self.is_open and bool(self.outputs)

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Called before an outermost module runs with gradients."""
        recorder = self.recorder
        if (
            recorder.steps != CAPTURED_IN_STEP
            or recorder.trials is not None
            or os.environ.get("RANK", "0") != "0"
        ):
            return
        has_parameters = any(True for _ in model.parameters())
        depth = recorder.enter(TRAINPACE)
        try:
            if self.later is not None:
                if has_parameters:
                    self.later.append(id(model))
            elif has_parameters:
                if not self.calls:
                    recorder.log.note({"number_format": _number_format(model)})
                if id(model) not in self.models:
                    self.models[id(model)] = len(self.copies)
                    self.copies.append(self.copied(model))
                    self.names.append(type(model).__qualname__)
                self.order.append(id(model))
                self.add(self.models[id(model)], args, kwargs)
            elif self.outputs:
                self.made_by(model, args, kwargs)
        finally:
            recorder.leave(depth, "capture")

    def copied(self, model: Any) -> Any:
        if any(hasattr(p, name) for p in model.parameters() for name in _SHARDED):
            raise Untraceable(
                "its parameters are sharded among processes, and only whole ones are traced"
            )
        from trainpace.workload import Copier, meta_memo

        if self.copier is None:
            self.copier = Copier({})
        self.copier.memo.update(meta_memo(model, self.copier.memo))
        return self.copier(model)

    def add(self, module: Any, args: Any, kwargs: Any) -> None:
        self.note(described(module, args, kwargs, self.outputs))
        self.batch_size = max(
            self.batch_size, size_of((args, kwargs)), *(v.samples for v in self.calls[-1].fixed)
        )

    def made_by(self, criterion: Any, args: Any, kwargs: Any) -> None:
        """Called before a module or function without parameters, which is noted if it receives an output."""
        call = described(criterion, args, kwargs, self.outputs)
        if call.follows:
            self.note(call)

    def note(self, call: Call) -> None:
        if len(self.calls) == MOST_CALLS:
            raise Untraceable(
                f"a step calls its modules and losses more than {MOST_CALLS} times, and so many are"
                " not followed"
            )
        self.calls.append(call)
        self.outputs.begin()
        self.awaits = True

    def after(self, output: Any) -> None:
        """Called with what an outermost module returned, or a loss function."""
        if self.follows and self.awaits:
            self.outputs.put(tensors_of(output))
        self.awaits = False

    def without_gradients(self, model: Any) -> None:
        """Called when an outermost module runs without gradients, whose work is not traced."""
        if any(True for _ in model.parameters()):
            self.aside[type(model).__qualname__] = None

    def backward(self, roots: Any) -> None:
        """Called before gradients of these tensors are computed."""
        if self.recorder.steps != CAPTURED_IN_STEP or not self.calls:
            return
        if self.later is not None:
            self.turns()
            self.later = []
            return
        depth = self.recorder.enter(TRAINPACE)
        try:
            self.losses = self.outputs.reached(tensors_of(roots))
            self.optimizer = self.stepper()
            self.recorder.log.note({"model_batch": self.batch_size})
            self.later = []
            self.forget()
            self.copier = None
        finally:
            self.recorder.leave(depth, "capture")

    def by_hand(
        self, outputs: Any, inputs: Any = (), *_: Any, create_graph: bool = False, **__: Any
    ) -> None:
        """Called where the script itself asks for gradients by torch.autograd.grad, with its arguments."""
        if self.recorder.steps != CAPTURED_IN_STEP or not self.calls:
            return
        if create_graph or not all(tensor.is_leaf for tensor in tensors_of(inputs)):
            raise Untraceable(
                "gradients of torch.autograd.grad, which its step asks for, are not followed"
            )
        self.backward(outputs)

    def turns(self) -> None:
        """Raise where the calls since the last backward pass are others than those before the first."""
        if self.later != self.order:
            raise Untraceable(
                "its step has several backward passes, each over other calls, and only one is"
                " followed"
            )

    def ends(self) -> None:
        """Called when the second step has ended."""
        self.forget()
        if self.later:
            self.turns()

    def stepper(self) -> Any:
        """The copy of the optimizer, or of several of one kind as one, that has the copies of the parameters."""
        own, covered = [], set[int]()
        for optimizer in (ref() for ref in self.recorder.optimizers):
            updated = (
                set()
                if optimizer is None
                else {id(p) for group in optimizer.param_groups for p in group["params"]}
            )
            if (
                updated & self.copier.memo.keys() and not updated <= covered
            ):  # a wrapper has the parameters of another
                own.append(optimizer)
                covered |= updated
        last = self.recorder.optimizer() if self.recorder.optimizer is not None else None
        if own and _wants_closure(own[0]):
            self.needs_closure = type(own[0]).__name__
            return None
        if not own:
            own = [last] if last is not None and not _wants_closure(last) else []
        if len({type(one) for one in own}) > 1:
            raise Untraceable("its step has optimizers of several kinds, and only one is followed")
        if not own:
            return None
        from trainpace.workload import meta_optimizer

        stepper = meta_optimizer(own, self.copier.memo)
        for group in stepper.param_groups:
            group["params"] = [p for p in group["params"] if p.device.type == "meta"]
            if "fused" in group:
                group["fused"] = None  # which the meta device has not
        return stepper

    # ---- at the end

    def write(self, folder: str) -> None:
        self.forget()
        if not self.copies or self.later is None:
            if (
                self.recorder.steps > CAPTURED_IN_STEP
                and self.recorder.trials is None
                and self.names
            ):
                raise Untraceable("no backward pass of torch was seen in its second step")
            return
        if not self.batch_size:
            raise Untraceable("it is called without a tensor, and a batch is known by one")
        import torch
        from msgspec.structs import replace

        from trainpace.core.records import save
        from trainpace.workload import Task

        # parameters that are changed by hand, or by an optimizer that evaluates the loss itself, as LBFGS
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
        with torch.random.fork_rng(devices=[]), at_most(LONGEST_S), silence():
            workload = traced(
                task, self.batch_size, any(call.holds_still(self.batch_size) for call in self.calls)
            )
        if self.needs_closure:
            workload = replace(
                workload,
                assumes_optimizer=True,
                notes=(*workload.notes, _EVALUATES.format(self.needs_closure)),
            )
        save(workload, os.path.join(folder, WORKLOAD_FILE))
        self.recorder.log.note({"workload": WORKLOAD_FILE, "loss": self.seen})

    @property
    def model(self) -> Any:
        import torch

        return self.copies[0] if len(self.copies) == 1 else torch.nn.ModuleList(self.copies)

    def notes(self) -> tuple[str, ...]:
        aside = " and ".join(self.aside)
        without_gradients = f"The step also runs {aside} without gradients, which is not counted."
        between = any(isinstance(value, Derived) for call in self.calls for value in call.arguments)
        return (*[without_gradients] * bool(aside), *[BETWEEN] * between)

    def make_batch(self, n: int) -> Any:
        return [n, *(call.made(n, self.batch_size) for call in self.calls)]

    def forward(self, model: Any, batch: Any) -> Any:
        """The tensors that each call returns."""
        models = [model] if len(self.copies) == 1 else list(model)
        n, *arguments = batch
        outputs: list[list[Any]] = []
        for call, given in zip(self.calls, arguments, strict=True):
            module = models[call.module] if isinstance(call.module, int) else call.module
            outputs.append(tensors_of(call.run(module, given, outputs, n, self.batch_size)))
        return outputs

    def loss(self, model: Any, batch: Any) -> Any:
        """The sum of what the loss was made of: losses as they are, of other outputs the mean."""
        outputs = self.forward(model, batch)
        ends = [outputs[call][position] for call, position in self.losses]
        made = [call for call, _ in self.losses if not isinstance(self.calls[call].module, int)]
        if not ends:
            ends = [t for t in outputs[-1] if t.is_floating_point() and t.requires_grad]
        are_losses = all(t.dim() == 0 for t in ends)
        self.seen = ("called" if made else "output") if are_losses else "mean of the outputs"
        means = [t if t.dim() == 0 else t.float().mean() for t in ends]
        return sum(means[1:], means[0])


def traced(task: Any, batch_size: int, holds_still: bool) -> Any:
    """The task's workload, for any batch size where it can be had, else for the script's own. A batch that `holds_still` has
    no other.
    """
    from msgspec.structs import replace

    from trainpace.core.errors import TrainpaceError
    from trainpace.workload import trace_task

    workload, only = None, None
    with contextlib.suppress(TrainpaceError):
        workload = None if holds_still else trace_task(task, ("fp32",))
    if workload is None:
        only = batch_size
        workload = trace_task(task, ("fp32",), only_batch=only)
        own = {"micro_batch": only, **workload.settings}
        workload = replace(workload, notes=(*workload.notes, ONE_BATCH.format(only)), settings=own)
    for form in OTHER_FORMS:
        with contextlib.suppress(TrainpaceError):  # a model may compute in one format alone
            workload = replace(
                workload, forms=workload.forms | trace_task(task, (form,), only_batch=only).forms
            )
    return workload


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let a model that prints in its forward pass print nothing more, after the script has ended."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


class Untraceable(Exception):
    """What Trainpace cannot trace, to follow a colon."""


def in_words(error: Exception) -> str:
    """Why there is no workload: what Trainpace could not do."""
    if isinstance(error, Untraceable | TimeoutError):
        return str(error)
    if isinstance(error, ImportError):
        return f"the script's Python lacks a module that tracing takes ({error})"
    if isinstance(error.__cause__, TimeoutError):
        return str(error.__cause__)
    if isinstance(error.__cause__, Exception) and isinstance(error, ValueError):
        from trainpace.workload import in_short

        return in_short(error.__cause__)
    kind = type(error)
    name = "" if kind.__module__.partition(".")[0] == "trainpace" else f"{kind.__name__}: "
    return f"{name}{getattr(error, 'message', error)}".rstrip(".")


def _number_format(model: Any) -> str:
    """As `Execution.precision` names it: autocast's, else that of 16-bit weights; empty for fp32."""
    import torch

    weights = next(model.parameters())
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    if torch.is_autocast_enabled(weights.device.type):
        return f"amp_{short[torch.get_autocast_dtype(weights.device.type)]}"
    return short.get(weights.dtype, "")


def _wants_closure(optimizer: Any) -> bool:
    """Whether its step evaluates the loss itself, as often as it likes."""
    import inspect

    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
