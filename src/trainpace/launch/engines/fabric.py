"""What the engines share that Lightning Fabric drives: set-up, precision, and steps."""

import contextlib
import importlib
import warnings
from typing import Any

import torch

from trainpace.errors import TrainpaceError
from trainpace.execution import Precision
from trainpace.launch.engines.engine import Loss
from trainpace.launch.engines.recompute import recompute_blocks
from trainpace.launch.trial import Trial
from trainpace.measure import place_batch

PRECISIONS: dict[Precision, Any] = {
    "fp32": "32-true", "tf32": "32-true", "amp_fp16": "16-mixed", "amp_bf16": "bf16-mixed", "bf16": "bf16-true",
    "fp16": "16-true",
}  # fmt: skip
"""Fabric's names of the precisions. 16-mixed brings a gradient scaler. TF32 is a switch of torch's, apart from these."""


def import_engine(module: str, package: str) -> Any:
    """A module of an engine's package. Raises TrainpaceError with the command that installs it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise TrainpaceError(
            f"this engine needs {package}, which cannot be imported ({reason}).", f"pip install 'trainpace[{package}]'."
        ) from None


def import_lightning() -> Any:
    """``lightning.fabric``."""
    return import_engine("lightning.fabric", "lightning")


class FabricEngine:
    """A model and its optimizer under a strategy of Fabric's. Ranks come from the environment, as torchrun sets it."""

    skips_synchronisation = True
    """Between the micro-batches of a step (no_sync)."""
    scales_loss_itself = False

    def __init__(self, trial: Trial, model: Any, optimizer: Any, strategy: Any, precision: str | None = None) -> None:
        fabric = import_lightning()
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        e = self._execution = trial.execution
        self.notes: tuple[str, ...] = recompute_blocks(model) if e.activation_checkpointing == "full" else ()
        if e.channels_last:
            model = model.to(memory_format=torch.channels_last)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of srun on the path, and of the number of loader workers
            self.fabric = fabric.Fabric(
                accelerator=trial.device, strategy=strategy, devices=e.nproc_per_node, num_nodes=e.nnodes,
                precision=precision or PRECISIONS[e.precision], plugins=[TorchElasticEnvironment()],
            )  # fmt: skip
            self.fabric.launch()
        self.device = self.fabric.device
        self.model, self._optimizer = self._set_up(torch.compile(model) if e.compile else model, optimizer)

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        model, optimizer = self.fabric.setup(model, optimizer)
        return model, optimizer

    @property
    def loss_scale(self) -> float:
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def place(self, batch: Any) -> Any:
        """The batch on the device; Fabric gives the model's inputs their number format."""
        return place_batch(batch, self.device, "fp32", self._execution.channels_last)

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        quiet = self.skips_synchronisation and not last
        with self.fabric.no_backward_sync(self.model) if quiet else contextlib.nullcontext():
            value = loss(self.model, batch)
            self.fabric.backward(value if self.scales_loss_itself else value / self._execution.accumulation)
        return value.detach()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
