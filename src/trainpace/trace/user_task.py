"""A task from a function in the user's own file."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from trainpace.errors import TrainpaceError
from trainpace.trace.task import Task, forward, loss_by, name_of_loss
from trainpace.user_file import load_name

TASK = "FILE.py:FUNCTION must return (model, loss, optimizer, dataset)"


def task_from_file(path: Path, function: str) -> Task:
    """The function returns (model, loss, optimizer, dataset); `loss` takes (output, target).

    A data set whose samples differ in length brings its own `collate_fn` (a list of samples into a batch), as an attribute.
    """
    task_function = load_name(path, function, "function")
    try:
        parts = task_function() if callable(task_function) else task_function
    except SystemExit as error:
        raise TrainpaceError(
            f"{path}:{function} ended its process ({error}), as a program that reads its command line does.",
            f"{TASK}, without arguments of its own. To time a whole program: trainpace watch -- python {path.name}",
        ) from None
    if not isinstance(parts, tuple | list) or len(parts) != 4:
        raise TrainpaceError(f"{path}:{function} returned {type(parts).__name__}.", f"{TASK}.")
    model, criterion, optimizer, dataset = parts
    if not isinstance(model, nn.Module) or not callable(criterion):
        raise TrainpaceError(f"{path}:{function} returned a {type(model).__name__} as model.", f"{TASK}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainpaceError(f"{path}:{function} returned a {type(optimizer).__name__} as optimizer.", f"{TASK}.")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise TrainpaceError(f"the dataset of {path}:{function} needs __len__ above 0 and __getitem__.")
    first = dataset[0]
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise TrainpaceError(
            f"a sample of {path}:{function} is a {type(first).__name__}.", "It should be (input, ..., target)."
        )
    own_collate = getattr(dataset, "collate_fn", None) or default_collate

    def make_batch(n: int) -> Any:
        return own_collate([dataset[i % len(dataset)] for i in range(n)])

    shape = " x ".join(map(str, getattr(first[0], "shape", ()))) or type(first[0]).__name__
    name, loss = f"{path.name}:{function}", loss_by(criterion)
    loss_name = name_of_loss(criterion)
    return Task(name, model, forward, loss, make_batch, optimizer, shape, None, dataset, own_collate, loss_name)
