"""The script's model as a Workload, so that it can be forecast on other hardware without further work.

In the second step the models, their optimizer and the shapes of what they are called with are copied to the meta device (without
data); they are traced after the script has ended. This needs trainpace's own dependencies in the script's environment; without
them nothing is captured. Known limits: a loss that is neither a module nor one of torch's functions is replaced by a mean of the
outputs that it was made of, which is noted; what the script computes between its modules is not traced; models with sharded
parameters (FSDP2, ZeRO-3) are not captured.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trainpace.watch.inside.batches import size_of
from trainpace.watch.inside.calls import MOST_CALLS, Call, Derived, Outputs, described, tensors_of
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import TRAINPACE

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
            self.recorder.trail.note({"no_workload": in_words(error)})

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
                    recorder.trail.note({"number_format": _number_format(model)})
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
            self.recorder.trail.note({"model_batch": self.batch_size})
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
        self.recorder.trail.note({"workload": WORKLOAD_FILE, "loss": self.seen})

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
