"""How a batch of any form goes through a model, and where its loss comes from.

A batch is (input, ..., target), a dict of keyword arguments with its target under `labels`, or one object, such as a graph of
torch_geometric, with its target in `y`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError

NO_LOSS = (
    "Return an output with .loss, a dict with 'loss', or the loss alone; or give a loss function in"
    " place of None."
)


def forward(model: nn.Module, batch: Any) -> Any:
    """The model on a batch without its target."""
    args, kwargs, _ = _without_target(batch)
    return model(*args, **kwargs)


def loss_by(criterion: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """The loss that `criterion` makes of (output, target)."""

    def loss(model: nn.Module, batch: Any) -> Any:
        args, kwargs, target = _without_target(batch)
        if target is None:
            raise TrainpaceError(
                f"a batch has no target for its loss: it is {_in_words(batch)}.",
                "Samples are (input, ..., target), dicts with 'labels', or objects with .y. With"
                " loss None the model returns it.",
            )
        return criterion(model(*args, **kwargs), target)

    return loss


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model computes by itself from the whole batch, as those of transformers do."""
    if isinstance(batch, Mapping):
        return loss_in(model(**batch))
    return loss_in(model(*batch) if isinstance(batch, tuple | list) else model(batch))


def loss_in(out: Any) -> torch.Tensor:
    """The loss in a model's output: its `loss`, or the one number among what it returns."""
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if found is None:
        numbers = [t for t in (out if isinstance(out, tuple | list) else [out]) if _is_number(t)]
        found = numbers[0] if len(numbers) == 1 else None
    if not isinstance(found, torch.Tensor):
        raise TrainpaceError(f"the model returns no loss, but {_in_words(out)}.", NO_LOSS)
    return found


def _without_target(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(positional arguments, keyword arguments, target)."""
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        return (), kwargs, kwargs.pop("labels", None)
    if isinstance(batch, tuple | list):
        return tuple(batch[:-1]), {}, batch[-1]
    return (batch,), {}, getattr(batch, "y", None)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}"
