"""The optimizers that a task may be given by name."""

from collections.abc import Callable

import torch
from torch import nn

from trainpace.errors import TrainpaceError, UnknownName

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainpaceError("the model has no trainable parameters.")
    return OPTIMIZERS[name](parameters)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer as this package uses it: its class in small letters, and sgd_momentum for SGD with momentum."""
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    name = type(optimizer).__name__.lower()
    return "sgd_momentum" if name == "sgd" and has_momentum else name
