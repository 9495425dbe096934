"""The script's model as a Workload, so that it can be forecast on other hardware without further work.

In the second step the model, its optimizer and the shapes of its batch are copied to the meta device (without data);
they are traced after the script has ended. This needs trainpace's own dependencies in the script's environment; without
them nothing is captured. Known limits: a loss that is neither a module nor one of torch's functions is replaced by a
mean of the outputs, which is noted; models with sharded parameters (FSDP2, ZeRO-3) are not captured.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import TRAINPACE
from trainpace.watch.inside.trials import size_of

CAPTURED_IN_STEP = 1
WORKLOAD_FILE = "workload.json"
FORMS: Any = ("fp32", "amp", "half")
_EVALUATES = (
    "the training's {} evaluates the loss several times a step; a step here is one evaluation and an update by SGD."
)
LONGEST_S = 20.0
"""What tracing may take once the script has ended: a recurrent network of 999 calls a sequence took 186 s."""


class _Shape(NamedTuple):
    sizes: tuple[int, ...]
    dtype: Any


class _FromOutput(NamedTuple):
    """A placeholder for a tensor of the model's output that the loss received: its position among them."""

    position: int
    sizes: tuple[int, ...]


class _Arguments(NamedTuple):
    """The arguments of a call with placeholders for their tensors, and how they are nested."""

    values: list[Any]
    nesting: Any

    def made(self, n: int, of: int, output: Any = None) -> tuple[Any, Any]:
        """(args, kwargs) for `n` samples where the call had `of`, on the meta device."""
        import torch
        from torch.utils._pytree import tree_unflatten

        def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (n * (sizes[0] // of), *sizes[1:]) if sizes and sizes[0] % of == 0 else sizes

        made = list(self.values)
        for i, value in enumerate(made):
            if isinstance(value, _Shape):
                made[i] = torch.empty(scaled(value.sizes), dtype=value.dtype, device="meta")
            elif isinstance(value, _FromOutput):
                made[i] = _tensors(output)[value.position].reshape(scaled(value.sizes))
        args, kwargs = tree_unflatten(made, self.nesting)
        return args, kwargs


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
    pending, every = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, where it was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, pending, every)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


class Capture:
    """The calls of the second step: the model, and the module or function that makes its loss."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.batch_size = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.needs_closure = ""
        """The name of an optimizer that evaluates the loss itself, as often as it likes."""
        self.name = ""
        self.arguments = _Arguments([], None)
        self.output: Any = None
        self.criterion: Any = None
        self.criterion_arguments = _Arguments([], None)
        self.has_loss = False

    def attempt(self, part: Callable[..., None], *args: Any) -> None:
        """Do a part of the capture; where it fails, note why there is none."""
        try:
            part(*args)
        except Exception as error:
            self.model = None
            kind = type(error)
            name = "" if kind.__module__.partition(".")[0] == "trainpace" else f"{kind.__name__}: "
            self.recorder.trail.note({"no_workload": f"{name}{error}".rstrip(".")})

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Called before an outermost module runs with gradients."""
        recorder = self.recorder
        if recorder.steps != CAPTURED_IN_STEP or recorder.trials is not None or os.environ.get("RANK", "0") != "0":
            return
        has_parameters = any(True for _ in model.parameters())
        depth = recorder.enter(TRAINPACE)
        try:
            if self.model is None and has_parameters:
                self.batch_size = size_of((args, kwargs))
                self.arguments = _described(args, kwargs)
                self.name = type(model).__qualname__
                optimizer = recorder.optimizer() if recorder.optimizer is not None else None
                if optimizer is not None and _wants_closure(optimizer):
                    optimizer, self.needs_closure = None, type(optimizer).__name__
                self.model, self.optimizer = _on_meta(model, optimizer)
                recorder.trail.note({"number_format": _number_format(model), "model_batch": self.batch_size})
            elif self.output is not None and self.criterion is None and not has_parameters:
                self.made_by(model, args, kwargs)
        finally:
            recorder.leave(depth, "capture")

    def made_by(self, criterion: Any, args: Any, kwargs: Any) -> None:
        """Called before a module or function that makes the loss, which it does if it receives the model's output."""
        described = _described(args, kwargs, _tensors(self.output))
        if any(isinstance(value, _FromOutput) for value in described.values):
            self.criterion, self.criterion_arguments = criterion, described
            self.output = None

    def after(self, output: Any) -> None:
        if self.model is not None and self.recorder.steps == CAPTURED_IN_STEP and self.criterion is None:
            self.output = output

    # ---- at the end

    def write(self, folder: str) -> None:
        self.output = None
        if self.model is None or not self.batch_size:
            return
        import torch
        from msgspec.structs import replace

        from trainpace.records import save
        from trainpace.tasks import Task
        from trainpace.trace import trace_task

        # parameters that are changed by hand, or by an optimizer that evaluates the loss itself, as LBFGS
        settings = {"optimizer": "sgd"} if self.optimizer is None else {}
        shapes = [value.sizes for value in self.arguments.values if isinstance(value, _Shape) and value.sizes]
        task = Task(
            name=self.name, model=self.model, forward=self.forward, loss=self.loss, make_batch=self.make_batch,
            optimizer=self.optimizer, dataset=None, settings=settings,
            sample=", ".join("x".join(map(str, sizes[1:])) or "number" for sizes in shapes),
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), at_most(LONGEST_S):
            workload = trace_task(task, FORMS)
        if self.needs_closure:
            workload = replace(
                workload, assumes_optimizer=True, notes=(*workload.notes, _EVALUATES.format(self.needs_closure))
            )
        save(workload, os.path.join(folder, WORKLOAD_FILE))
        seen = "called" if self.criterion is not None else "output" if self.has_loss else "mean of the outputs"
        self.recorder.trail.note({"workload": WORKLOAD_FILE, "loss": seen})

    def make_batch(self, n: int) -> Any:
        return self.arguments.made(n, self.batch_size)

    def forward(self, model: Any, batch: Any) -> Any:
        args, kwargs = batch
        return model(*args, **kwargs)

    def loss(self, model: Any, batch: Any) -> Any:
        """The loss: by the module that made it, else the output's own, else a mean."""
        output = self.forward(model, batch)
        if self.criterion is not None:
            args, kwargs = self.criterion_arguments.made(_tensors(batch)[0].shape[0], self.batch_size, output)
            return self.criterion(*args, **kwargs)
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if own is not None and own.dim() == 0:
            self.has_loss = True
            return own
        means = [t.float().mean() for t in _tensors(output) if t.is_floating_point() and t.requires_grad]
        return sum(means[1:], means[0])


def _number_format(model: Any) -> str:
    """As `Execution.precision` names it: autocast's, else that of 16-bit weights; empty for fp32."""
    import torch

    weights = next(model.parameters())
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    if torch.is_autocast_enabled(weights.device.type):
        return f"amp_{short[torch.get_autocast_dtype(weights.device.type)]}"
    return short.get(weights.dtype, "")


def _on_meta(model: Any, optimizer: Any) -> tuple[Any, Any]:
    from trainpace.trace import on_meta

    copied, stepper = on_meta(model, optimizer)
    if stepper is not None:
        for group in stepper.param_groups:
            group["params"] = [p for p in group["params"] if p.device.type == "meta"]
            if "fused" in group:
                group["fused"] = None  # which the meta device has not
    return copied, stepper


def _wants_closure(optimizer: Any) -> bool:
    """Whether its step evaluates the loss itself, as often as it likes."""
    import inspect

    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _described(args: Any, kwargs: Any, output: Sequence[Any] = ()) -> _Arguments:
    from torch.utils._pytree import tree_flatten

    values, nesting = tree_flatten((args, kwargs))
    return _Arguments([_placeholder(value, output) for value in values], nesting)


def _placeholder(value: Any, output: Sequence[Any]) -> Any:
    if hasattr(value, "is_floating_point") and hasattr(value, "shape"):
        for i, tensor in enumerate(output):
            if tensor is value or (tensor.numel() == value.numel() and tensor.data_ptr() == value.data_ptr()):
                return _FromOutput(i, tuple(value.shape))
        return _Shape(tuple(value.shape), value.dtype)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"an argument of type {type(value).__name__}")
    return value
