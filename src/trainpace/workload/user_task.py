"""A task from what a function in the user's own file returns.

Parts of a training, as (model, loss, optimizer, dataset) or a dict by their names; a Hugging Face Trainer; or a LightningModule
with its data. docs/tasks.md shows each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.worker import load_name
from trainpace.workload.batches import forward, loss_by, own_loss
from trainpace.workload.lightning_task import lightning_data, lightning_task
from trainpace.workload.task import Task, WholeStep, name_of_loss
from trainpace.workload.trainer_task import as_with_a_gpu, is_trainer, trainer_task
from trainpace.workload.user_data import samples_of, with_samples

TASK = (
    "FILE.py:FUNCTION must return (model, loss, optimizer, dataset), a dict of these (with `step`"
    " for a step of your own), a Trainer, or a LightningModule and its data"
)


class Parts(NamedTuple):
    """The parts of a training, by the names that a dict has for them.

    `loss` takes (output, target); None: the model returns its own. `step(batch)` takes their place: it runs forward, backward and
    updates by itself, of one model and optimizer or several, each a list or a dict of them.
    """

    model: Any = None
    loss: Any = None
    optimizer: Any = None
    dataset: Any = None
    step: Any = None
    collate: Any = None


def task_from_file(path: Path, function: str) -> Task:
    name, where = f"{path.name}:{function}", f"{path}:{function}"
    returned = _returned(path, function)
    if is_trainer(returned):
        return trainer_task(name, returned)
    if (data := lightning_data(returned)) is not None:
        return lightning_task(name, *data, where)
    parts = _parts(returned, where)
    return (
        _whole_step_task(name, parts, where)
        if parts.step is not None
        else _plain_task(name, parts, where)
    )


def _returned(path: Path, function: str) -> Any:
    task_function = load_name(path, function, "function")
    if not callable(task_function) or isinstance(task_function, nn.Module):
        return task_function
    try:
        return as_with_a_gpu(task_function)
    except SystemExit as error:
        raise TrainpaceError(
            f"{path}:{function} ended its process ({error}), as a program that reads its command"
            " line does.",
            f"{TASK}, without arguments of its own. To time a whole program: trainpace watch --"
            f" python {path.name}",
        ) from None


def _parts(returned: Any, where: str) -> Parts:
    if isinstance(returned, Mapping) and not isinstance(returned, nn.Module):
        for key in returned:
            if key not in Parts._fields:
                raise UnknownName(
                    f"part of the task that {where} returns:",
                    str(key),
                    Parts._fields,
                    f"All: {', '.join(Parts._fields)}.",
                )
        return Parts(**returned)
    if isinstance(returned, tuple | list) and len(returned) == 4:
        return Parts(*returned)
    what = (
        f"{len(returned)} things" if isinstance(returned, tuple | list) else type(returned).__name__
    )
    raise TrainpaceError(f"{where} returned {what}.", f"{TASK}.")


def _plain_task(name: str, parts: Parts, where: str) -> Task:
    """One model and its optimizer, stepped by whoever trains them."""
    if not isinstance(parts.model, nn.Module):
        several = isinstance(parts.model, Mapping | list | tuple)
        hint = (
            "Several models need `step`, a function of a batch that trains them."
            if several
            else f"{TASK}."
        )
        raise TrainpaceError(f"{where} returned a {type(parts.model).__name__} as model.", hint)
    if parts.loss is not None and not callable(parts.loss):
        raise TrainpaceError(
            f"{where} returned a {type(parts.loss).__name__} as loss.",
            "A loss takes (output, target); None is for a model that returns its own.",
        )
    if parts.optimizer is not None and not isinstance(parts.optimizer, torch.optim.Optimizer):
        several = isinstance(parts.optimizer, Mapping | list | tuple)
        hint = (
            "Several optimizers need `step`, a function of a batch that steps them."
            if several
            else f"{TASK}."
        )
        raise TrainpaceError(
            f"{where} returned a {type(parts.optimizer).__name__} as optimizer.", hint
        )
    samples = samples_of(parts.dataset, parts.collate, where)
    first = samples.dataset[0]
    least = 1 if parts.loss is None else 2
    if (isinstance(first, tuple | list) and len(first) < least) or isinstance(
        first, int | float | str | bytes
    ):
        raise TrainpaceError(
            f"a sample of {where} is a {type(first).__name__}.",
            "It should be (input, ..., target), a dict of the model's arguments, or an object"
            " with .y.",
        )
    loss = own_loss if parts.loss is None else loss_by(parts.loss)
    loss_name = None if parts.loss is None else name_of_loss(parts.loss)
    return with_samples(
        Task(
            name,
            parts.model,
            forward,
            loss,
            samples.batch,
            parts.optimizer,
            "",
            loss_name=loss_name,
        ),
        samples,
        where,
    )


def _whole_step_task(name: str, parts: Parts, where: str) -> Task:
    if not callable(parts.step):
        raise TrainpaceError(
            f"{where} returned a {type(parts.step).__name__} as step.",
            "It is a function of a batch.",
        )
    if parts.loss is not None:
        raise TrainpaceError(
            f"{where} returned both a loss and a step.",
            "A step of your own computes its losses itself.",
        )
    models = _by_name(parts.model, nn.Module, "model", where)
    optimizers = _by_name(parts.optimizer, torch.optim.Optimizer, "optimizer", where)
    model = next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
    step = WholeStep(parts.step, tuple(optimizers.values()))
    samples = samples_of(parts.dataset, parts.collate, where)
    return with_samples(Task.of_step(name, model, step, samples.batch), samples, where)


def _by_name(given: Any, kind: type, word: str, where: str) -> dict[str, Any]:
    """One or several of a kind, by name."""
    if isinstance(given, kind):
        return {word: given}
    named = (
        given
        if isinstance(given, Mapping)
        else (
            {f"{word}_{i}": one for i, one in enumerate(given or ())}
            if isinstance(given, Sequence | None)
            else {}
        )
    )
    wrong = next((type(one).__name__ for one in named.values() if not isinstance(one, kind)), None)
    if wrong is not None or not named:
        raise TrainpaceError(
            f"{where} returned a {wrong or type(given).__name__} as {word}.",
            f"Beside a step, `{word}` is one {kind.__name__}, or a list or dict of all that the"
            " step uses, frozen ones too.",
        )
    return dict(named)
