"""The script's model as a Workload, so that it can be forecast on other hardware without further work.

In the second step the model, its optimizer and the shapes of its batch are copied to the meta device (without data);
they are traced after the script has ended. This needs trainpace's own dependencies in the script's environment; without
them nothing is captured. Known limits: a loss that is neither a module nor one of torch's functions is replaced by a
mean of the outputs, which is noted; models with sharded parameters (FSDP2, ZeRO-3) are not captured.
"""

import os
from typing import Any, NamedTuple

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import TRAINPACE
from trainpace.watch.inside.trials import size_of

CAPTURED_IN_STEP = 1
WORKLOAD_FILE = "workload.json"
FORMS: Any = ("fp32", "amp", "half")


class _Shape(NamedTuple):
    """A placeholder for a tensor of the batch."""

    sizes: tuple[int, ...]
    dtype: Any


class _FromOutput(NamedTuple):
    """A placeholder for a tensor of the model's output that the loss received."""

    path: tuple[Any, ...]
    sizes: tuple[int, ...]


class Capture:
    """The calls of the second step: the model, and the module or function that makes its loss."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.batch_size = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.name = ""
        self.arguments: Any = None
        self.output: Any = None
        self.criterion: Any = None
        self.criterion_arguments: Any = None

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Called before an outermost module runs with gradients."""
        recorder = self.recorder
        if recorder.steps != CAPTURED_IN_STEP or recorder.trials is not None or os.environ.get("RANK", "0") != "0":
            return
        depth = recorder.enter(TRAINPACE)
        try:
            if self.model is None and any(True for _ in model.parameters()):
                self.batch_size = size_of((args, kwargs))
                self.arguments = _described((args, kwargs), None)
                self.name = type(model).__qualname__
                self.model, self.optimizer = _on_meta(recorder, model)
            elif self.output is not None and self.criterion is None and not any(True for _ in model.parameters()):
                self.made_by(model, args, kwargs)
        finally:
            recorder.leave(depth, "capture")

    def made_by(self, criterion: Any, args: Any, kwargs: Any) -> None:
        """Called before a module or function that makes the loss, which it does if it receives the model's output."""
        described = _described((args, kwargs), self.output)
        if _mentions_output(described):
            self.criterion, self.criterion_arguments = criterion, described
            self.output = None

    def after(self, output: Any) -> None:
        """Called with the model's output."""
        if self.model is not None and self.recorder.steps == CAPTURED_IN_STEP and self.criterion is None:
            self.output = output

    # ---- at the end

    def at_end(self, folder: str) -> None:
        """Trace the captured model and write ``workload.json``, or note why there is none."""
        try:
            self._write(folder)
        except Exception as error:
            self.fails(error)

    def fails(self, error: Exception) -> None:
        """Give up, and note why."""
        self.model = None
        self.recorder.trail.note({"no_workload": f"{type(error).__name__}: {error}"})

    def _write(self, folder: str) -> None:
        self.output = None
        if self.model is None or not self.batch_size:
            return
        import torch

        from trainpace.records import save
        from trainpace.trace import Task, trace_task

        task = Task(
            name=self.name, model=self.model, forward=self.forward, loss=self.loss, make_batch=self.make_batch,
            optimizer=self.optimizer, sample=self.sample(), dataset=None,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            save(trace_task(task, FORMS), os.path.join(folder, WORKLOAD_FILE))
        seen = "called" if self.criterion is not None else "output" if self.has_loss else "mean of the outputs"
        self.recorder.trail.note({"workload": WORKLOAD_FILE, "loss": seen})

    has_loss = False

    def make_batch(self, n: int) -> Any:
        """The model's arguments for n samples."""
        return _made(self.arguments, n, self.batch_size, None)

    def forward(self, model: Any, batch: Any) -> Any:
        """Call the model as the script did."""
        args, kwargs = batch
        return model(*args, **kwargs)

    def loss(self, model: Any, batch: Any) -> Any:
        """The loss: by the module that made it, else the output's own, else a mean."""
        output = self.forward(model, batch)
        if self.criterion is not None:
            leaves = [t for _, t in _leaves(batch)]
            args, kwargs = _made(self.criterion_arguments, leaves[0].shape[0], self.batch_size, output)
            return self.criterion(*args, **kwargs)
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if own is not None and own.dim() == 0:
            self.has_loss = True
            return own
        means = [t.float().mean() for _, t in _leaves(output) if t.is_floating_point() and t.requires_grad]
        return sum(means[1:], means[0])

    def sample(self) -> str:
        """The shapes of the model's arguments, in words."""
        sizes = [s.sizes[1:] for _, s in _leaves(self.arguments, _Shape) if s.sizes]
        return ", ".join("x".join(map(str, s)) or "number" for s in sizes)


def _on_meta(recorder: Recorder, model: Any) -> tuple[Any, Any]:
    from trainpace.trace import on_meta

    optimizer = recorder.optimizer() if recorder.optimizer is not None else None
    copied, stepper = on_meta(model, optimizer)
    if stepper is not None:
        for group in stepper.param_groups:
            group["params"] = [p for p in group["params"] if p.device.type == "meta"]
            if "fused" in group:
                group["fused"] = None  # which the meta device has not
    return copied, stepper


def _leaves(value: Any, kind: Any = None, path: tuple[Any, ...] = ()) -> Any:
    if kind is None:
        import torch

        kind = torch.Tensor
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, kind, (*path, key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _leaves(part, kind, (*path, i))


def _described(value: Any, output: Any) -> Any:
    if hasattr(value, "is_floating_point") and hasattr(value, "shape"):
        if output is not None:
            for path, tensor in _leaves(output):
                if tensor is value or (tensor.numel() == value.numel() and tensor.data_ptr() == value.data_ptr()):
                    return _FromOutput(path, tuple(value.shape))
        return _Shape(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {k: _described(v, output) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [_described(v, output) for v in value]
        return parts if isinstance(value, list) else tuple(parts)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"an argument of type {type(value).__name__}")
    return value


def _mentions_output(described: Any) -> bool:
    return any(True for _ in _leaves(described, _FromOutput))


def _made(described: Any, n: int, of: int, output: Any) -> Any:
    import torch

    def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (n * (sizes[0] // of), *sizes[1:]) if sizes and sizes[0] % of == 0 else sizes

    if isinstance(described, _Shape):
        return torch.empty(scaled(described.sizes), dtype=described.dtype, device="meta")
    if isinstance(described, _FromOutput):
        for key in described.path:
            output = output[key]
        return output.reshape(scaled(described.sizes))
    if isinstance(described, dict):
        return {k: _made(v, n, of, output) for k, v in described.items()}
    if isinstance(described, list | tuple):
        parts = [_made(v, n, of, output) for v in described]
        return parts if isinstance(described, list) else tuple(parts)
    return described
