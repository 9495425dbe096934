"""Tasks: a model with its loss, optimizer and samples. Every model spec is converted to a task.

A batch has one of three forms: a tuple (input, ..., target), a dict of keyword arguments with the
target under `labels`, or one object with the target in `y`, such as a graph of torch_geometric.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import FOR_LANGUAGE, FOR_OTHERS
from trainpace.workload.meta import tensors_in
from trainpace.workload.optimizers import optimizer_name

NO_LOSS = (
    "Return an output with .loss, a dict with 'loss', or the loss alone; or give a loss function in"
    " place of None."
)


def forward(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch, without the batch's target."""
    args, kwargs, _ = _without_target(batch)
    return model(*args, **kwargs)


def loss_by(criterion: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """Convert a criterion, a function of (output, target), to a loss of (model, batch)."""

    def loss(model: nn.Module, batch: Any) -> Any:
        args, kwargs, target = _without_target(batch)
        if target is None:
            raise TrainpaceError(
                f"a batch has no target for its loss: it is {_in_words(batch)}.",
                "Samples are (input, ..., target), dicts with 'labels', or objects with .y. Use"
                " loss None if the model returns it.",
            )
        return criterion(model(*args, **kwargs), target)

    return loss


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that the model itself computes from the whole batch, as in transformers."""
    if isinstance(batch, Mapping):
        return loss_in(model(**batch))
    return loss_in(model(*batch) if isinstance(batch, tuple | list) else model(batch))


def loss_in(out: Any) -> torch.Tensor:
    """Return the loss in a model's output: its `loss`, or the only scalar in it.

    Raises:
        TrainpaceError: If the output has neither.
    """
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if found is None:
        parts = out if isinstance(out, tuple | list) else [out]
        numbers = [t for t in parts if isinstance(t, torch.Tensor) and t.dim() == 0]
        found = numbers[0] if len(numbers) == 1 else None
    if not isinstance(found, torch.Tensor):
        raise TrainpaceError(f"the model returns no loss, but {_in_words(out)}.", NO_LOSS)
    return found


def _without_target(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split a batch into (positional arguments, keyword arguments, target)."""
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        return (), kwargs, kwargs.pop("labels", None)
    if isinstance(batch, tuple | list):
        return tuple(batch[:-1]), {}, batch[-1]
    return (batch,), {}, getattr(batch, "y", None)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


LOOKED_AT = 1000


class WholeStep(NamedTuple):
    """Training step that runs forward, backward and optimizers itself, with its optimizers."""

    run: Callable[[Any], Any]
    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def optimizer_name(self) -> str:
        """Names of the optimizers, joined by " + "."""
        return " + ".join(dict.fromkeys(optimizer_name(optimizer) for optimizer in self.optimizers))


class Task(NamedTuple):
    """Model with its loss, optimizer and samples.

    Attributes:
        name: Name for messages.
        model: The model. With `step`, a module that contains all models of the step.
        forward: Function of (model, batch) that runs the model without the loss.
        loss: Function of (model, batch) that returns a scalar.
        make_batch: Function that returns a batch of n samples on the default device.
        optimizer: The task's own optimizer, or None.
        sample: Description of a sample.
        sequence_length: Tokens per sample. None if samples are not sequences.
        dataset: The task's own samples, or None.
        collate: Function that makes a batch from a list of samples.
        loss_name: Name of the loss's class or function. None for a lambda or the model's own loss.
        notes: Assumptions, and requested parts that are missing.
        batch_to_trace: Like `make_batch`, but with samples of equal size. None if `make_batch`
            returns such samples.
        settings: Fields of `Execution` that the task's own loader or trainer sets.
        pads: True if batches contain padding.
        step: Whole training step, which replaces loss and optimizer.
        autocast: True if a model in 16 bits also runs under torch.autocast.
    """

    name: str
    model: nn.Module
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    make_batch: Callable[[int], Any]
    optimizer: torch.optim.Optimizer | None
    sample: str
    sequence_length: int | None = None
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    loss_name: str | None = None
    notes: tuple[str, ...] = ()
    batch_to_trace: Callable[[int], Any] | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    pads: bool = False
    step: WholeStep | None = None
    autocast: bool = False

    @classmethod
    def of_step(
        cls, name: str, model: nn.Module, step: WholeStep, make_batch: Callable[[int], Any]
    ) -> "Task":
        """Return a task with a whole training step, without a separate loss and forward pass."""

        def refused(_: nn.Module, __: Any) -> Any:
            raise TrainpaceError(
                f"{name} has a training step of its own, without a separate loss and forward pass."
                " Forecast and measure run it as a whole.",
                "For anything else return a model, its loss and its optimizer.",
            )

        return cls(name, model, refused, refused, make_batch, None, "", step=step)


def image_task(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> Task:
    """Return an image classification task with cross-entropy.

    Args:
        name: Name of the task.
        model: The classifier.
        shape: (channels, height, width) of an image.
        classes: Number of classes.
    """

    def criterion(out: Any, labels: torch.Tensor) -> torch.Tensor:
        scores = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        return nn.functional.cross_entropy(scores, labels)

    def make_batch(n: int) -> Any:
        return torch.randn(n, *shape), torch.randint(0, classes, (n,))

    sample = f"{' x '.join(map(str, shape))} image"
    task = Task(name, model, forward, loss_by(criterion), make_batch, None, sample)
    return task._replace(loss_name="cross_entropy")


def recompute_activations(model: nn.Module) -> None:
    """Turn on the model's own activation checkpointing on the meta device, block by block.

    Raises:
        TrainpaceError: If the model does not support it.
    """
    # The meta device has no random state to save.
    if not recomputes_itself(model, preserve_rng_state=False):
        raise TrainpaceError(
            f"{type(model).__name__} has no switch for activation checkpointing.",
            "Use a transformers, timm or diffusers model, or call torch.utils.checkpoint in your"
            " own.",
        )


def recomputes_itself(model: Any, **options: Any) -> bool:
    """Turn on a model's own activation checkpointing. Return False if it has no switch.

    Args:
        model: The model.
        options: Options of torch.utils.checkpoint.

    Raises:
        TrainpaceError: If the model has a switch but does not support checkpointing.
    """
    options["use_reentrant"] = False
    switches = {
        "activation_checkpointing_enable": options,  # transformers 5
        "gradient_checkpointing_enable": options,
        "set_grad_checkpointing": True,  # timm
        "enable_gradient_checkpointing": partial(checkpoint, **options),  # diffusers
    }
    switch = next((name for name in switches if hasattr(model, name)), None)
    if switch is None:
        return False
    try:
        getattr(model, switch)(switches[switch])
    except ValueError as error:  # models that do not support it have the method too
        raise TrainpaceError(
            str(error), "Call torch.utils.checkpoint in a model of your own."
        ) from None
    return True


def name_of_loss(criterion: Callable[..., Any]) -> str | None:
    """Return the name of a loss, such as ``CrossEntropyLoss`` or ``cross_entropy``.

    None for a lambda.
    """
    inner = getattr(criterion, "func", criterion)  # functools.partial stores it in `func`
    name = getattr(inner, "__name__", type(inner).__name__)
    return None if name == "<lambda>" else name.lstrip("_")


def usual_optimizer(task: Task) -> str:
    """Return the name of the optimizer to assume if the user does not choose one.

    It is the optimizer of the task's settings. Without one, it is AdamW for token sequences and
    diffusion models, and SGD with momentum for other samples.
    """
    if "optimizer" in task.settings:
        return str(task.settings["optimizer"])
    is_diffusion = task.name.startswith("diffusers:")
    return FOR_LANGUAGE if is_diffusion or task.sequence_length else FOR_OTHERS


def longest_first(task: Task, n: int) -> Any | None:
    """Return a batch of the n largest samples, or None if all samples have the same size.

    Only the first 1,000 samples are read, since reading a whole dataset may take hours.
    """
    if task.dataset is None:
        return None
    assert task.collate is not None, "a task with a data set knows how to make batches of it"
    looked = min(len(task.dataset), LOOKED_AT)
    sizes = [sum(t.numel() for t in tensors_in(task.dataset[i])) for i in range(looked)]
    if len(set(sizes)) == 1:
        return None
    longest = sorted(range(looked), key=lambda i: -sizes[i])[:n]
    return task.collate([task.dataset[longest[i % len(longest)]] for i in range(n)])
