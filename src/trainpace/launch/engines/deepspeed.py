"""DeepSpeed ZeRO through Fabric: stages 0 to 3, with offload. It accumulates and scales by itself.

Fabric has DeepSpeed on GPUs only; on a CPU (DS_ACCELERATOR=cpu, gloo) a subclass leaves that check out, so that ZeRO can be
tried and tested where there is no GPU. The optimizer is the task's own, in Python; DeepSpeed's C++ ones are not compiled.
"""

import logging
import os
from typing import Any

import torch

from trainpace.execution import Execution
from trainpace.launch.engines.engine import Engine, Loss
from trainpace.launch.engines.fabric import FabricEngine, import_engine, import_lightning
from trainpace.launch.trial import Trial


def load(device: str) -> None:
    """Import Lightning and DeepSpeed, which takes the device from the environment."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import_lightning()
    _import_deepspeed(device)


def make(trial: Trial, model: Any, optimizer: Any) -> Engine:
    """The engine around a model that DeepSpeed takes over."""
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy

    class OnCpu(DeepSpeedStrategy):
        """Fabric's strategy without its check for CUDA devices and their indices (lightning 2.6)."""

        def setup_environment(self) -> None:
            # DeepSpeed asks a device for its index, which a CPU's has only if it is given one
            self.parallel_devices = [torch.device("cpu", i) for i in range(trial.execution.nproc_per_node)]
            DDPStrategy.setup_environment(self)

        def _setup_distributed(self) -> None:
            self._set_world_ranks()
            self._init_deepspeed_distributed()
            self._format_config()
            self._config_initialized = True

    kind = OnCpu if trial.device == "cpu" else DeepSpeedStrategy
    strategy = kind(
        config=config_of(trial.execution), process_group_backend="gloo" if trial.device == "cpu" else None,
        logging_level=logging.WARNING,
    )  # fmt: skip
    return _DeepSpeed(trial, model, optimizer, strategy)


def config_of(e: Execution) -> dict[str, Any]:
    """DeepSpeed's configuration, but for the precision, which Fabric adds."""
    zero: dict[str, Any] = {"stage": e.zero_stage}
    if e.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if e.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": e.micro_batch,
        "gradient_accumulation_steps": e.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # left out, DeepSpeed 0.19 clips at 1.0, and trains differently from every other engine
        "steps_per_print": 10**9,
    }


class _DeepSpeed(FabricEngine):
    skips_synchronisation = False
    scales_loss_itself = True

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        value = super().micro_step(loss, batch, last)
        # which counts micro-batches, and updates after the last of a step; Fabric's optimizer would pass its engine by
        # (lightning 2.6, deepspeed 0.19)
        self.fabric.strategy.model.step()
        return value

    def update(self) -> None:
        pass


def _import_deepspeed(device: str) -> None:
    import_engine("deepspeed", "deepspeed")
    if device == "cpu":  # else it compiles a C++ operator for a minute
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
