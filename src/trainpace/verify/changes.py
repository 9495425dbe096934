"""The interventions: what is changed in a model, its loss and its generators to see whether a difference goes away."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trainpace.verify.question import Change

IGNORED = -100
"""The target that torch's losses leave out, and that transformers pads labels with."""


def loss_weight(changes: Sequence[Change], part: int, sizes: Sequence[int], targets: Sequence[int]) -> float:
    """The weight of a part's loss. Without a change it is what training loops use: one over the number of parts."""
    if "sum" in changes:
        return 1.0
    if "weight_by_targets" in changes and any(targets):
        return targets[part] / sum(targets)
    if "weight_by_samples" in changes:
        return sizes[part] / sum(sizes)
    return 1 / len(sizes)


def targets_of(batch: Any) -> int:
    """How many targets of a batch count: whole numbers in its last part, or its `labels`, that are not -100.

    The first of a row of labels in a dictionary is left out where there are several: language models predict the next one.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else batch[-1] if isinstance(batch, list | tuple) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return 0
    if isinstance(batch, dict) and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


def training_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms that normalise by the statistics of the batch at hand."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]


@contextlib.contextmanager
def statistics_of_next_batch(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """A context in which running statistics become those of the one batch that runs; afterwards they normalise every batch."""
    for norm in norms:
        if norm.running_mean is None:
            like = norm.weight if norm.weight is not None else torch.zeros(())
            norm.running_mean = like.new_zeros(norm.num_features).detach()
            norm.running_var = like.new_ones(norm.num_features).detach()
            norm.track_running_stats = True
        norm.momentum = 1.0
        norm.train()
    yield
    for norm in norms:
        norm.eval()


def hooks_of(model: nn.Module, remove: bool) -> int:
    """The number of hooks on gradients of parameters, which act on each part of a batch; they are removed if asked."""
    count = 0
    for parameter in model.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, name, None)
            count += len(hooks or ())
            if hooks and remove:
                hooks.clear()
    return count


class _NoDropout(TorchFunctionMode):
    """Turns off dropout in functional calls as well, whose probability is no attribute of a module."""

    _DROPPING = (
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """No dropout: modules named so do not train, probabilities that modules keep are 0, and so are those of calls."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
            module.eval()
        for name, value in list(vars(module).items()):
            if "drop" in name.lower() and isinstance(value, float):
                setattr(module, name, 0.0)
    with _NoDropout():
        yield
