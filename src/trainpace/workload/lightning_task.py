"""A task from a LightningModule: its `training_step`, and the optimizers that it configures.

Under automatic optimisation the step is forward, backward and one update, as of any task. Under manual optimisation
`training_step` does all of it, and is traced as a whole.
"""

import contextlib
import logging
import sys
import warnings
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError
from trainpace.workload.batches import NO_LOSS
from trainpace.workload.task import Task, WholeStep
from trainpace.workload.user_data import samples_of, with_samples

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
DATA = "Return (module, DataLoader or dataset), or give the module a train_dataloader()."


def lightning_data(made: Any) -> tuple[Any, Any] | None:
    """(module, its data or None) of a LightningModule, alone, as (module, data) or as {model, dataset}; None for all else."""
    if isinstance(made, dict) and set(made) <= {"model", "dataset"}:
        made = (made.get("model"), made.get("dataset"))
    module, data = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    return (module, data) if _package_of(module) is not None else None


def lightning_task(name: str, module: Any, data: Any, where: str) -> Task:
    package = _package_of(module)
    loader = _loader(package, module, data, where)
    samples = samples_of(loader, None, where)
    optimizers = _set_up(package, module, loader, where)
    if not module.automatic_optimization:
        step = WholeStep(lambda batch: module.training_step(batch, 0), optimizers)
        return with_samples(Task.of_step(name, module, step, samples.batch), samples, where)
    if len(optimizers) != 1:
        raise TrainpaceError(
            f"{type(module).__name__} configures {len(optimizers)} optimizers under automatic"
            " optimisation.",
            "One is needed; several need `self.automatic_optimization = False`, and a training_step"
            " that steps them.",
        )
    task = Task(name, TrainingStep(module), _forward, _loss, samples.batch, optimizers[0], "")
    return with_samples(task, samples, where)


class TrainingStep(nn.Module):
    """A LightningModule whose call is its `training_step`, so that any engine can wrap it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        trainer = module.trainer

        def attach(module: Any) -> None:
            if module._trainer is None:  # a copy of the module leaves it behind
                module.trainer = trainer

        self.attach = attach

    def forward(self, batch: Any) -> Any:
        self.attach(self.module)
        return self.module.training_step(batch, 0)


def _forward(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def _loss(model: nn.Module, batch: Any) -> Any:
    out = model(batch)
    loss = out.get("loss") if isinstance(out, dict) else out
    if not isinstance(loss, torch.Tensor):
        raise TrainpaceError(f"training_step returns a {type(out).__name__}.", NO_LOSS)
    return loss


def _package_of(module: Any) -> Any:
    packages = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    return next(
        (package for package in packages if isinstance(module, package.LightningModule)), None
    )


def _loader(package: Any, module: Any, data: Any, where: str) -> Any:
    if isinstance(data, package.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if data is None and not _overrides(package, module, "train_dataloader"):
        raise TrainpaceError(f"{where} returned a LightningModule without data.", DATA)
    data = module.train_dataloader() if data is None else data
    if (
        isinstance(data, dict | list | tuple)
        and data
        and hasattr(next(iter(data.values() if isinstance(data, dict) else data)), "dataset")
    ):
        raise TrainpaceError(
            f"{where} has several DataLoaders.",
            "Return one whose samples hold all that a step takes.",
        )
    return data


def _overrides(package: Any, module: Any, name: str) -> bool:
    return getattr(type(module), name, None) is not getattr(package.LightningModule, name)


def _set_up(
    package: Any, module: Any, loader: Any, where: str
) -> tuple[torch.optim.Optimizer, ...]:
    """The module's optimizers, made by a Trainer of Lightning's that the module then belongs to, as in `fit`."""
    for logger in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = package.Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1)
        module.trainer = trainer
        trainer.strategy.connect(module)
        with contextlib.suppress(AttributeError):  # where estimated_stepping_batches asks for it
            trainer.fit_loop._data_source.instance = loader
        module.configure_model()
        if hasattr(module, "setup") and _overrides(package, module, "setup"):
            module.setup("fit")
        trainer.strategy.setup_optimizers(trainer)
    if not trainer.optimizers:
        raise TrainpaceError(f"configure_optimizers of {where} gives no optimizer.")
    return tuple(trainer.optimizers)
