"""DistributedDataParallel through Fabric: gradients are reduced under the last backward pass of a step."""

from typing import Any

from trainpace.launch.engines.engine import Engine
from trainpace.launch.engines.fabric import FabricEngine, import_lightning
from trainpace.launch.trial import Trial


def load(device: str) -> None:
    import_lightning()


def make(trial: Trial, model: Any, optimizer: Any) -> Engine:
    """The engine around a copy of the model on every rank."""
    from lightning.fabric.strategies import DDPStrategy

    backend = "gloo" if trial.device == "cpu" else "nccl"
    return FabricEngine(trial, model, optimizer, DDPStrategy(process_group_backend=backend))
