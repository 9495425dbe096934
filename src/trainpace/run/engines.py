"""Training engines: a model and its optimizer wrapped, which take micro-batches and update after the last one of a step.

`PlainEngine` is the contract: one process, a loop as anyone writes it. The others are driven by Lightning Fabric, whose ranks
come from the environment (RANK, WORLD_SIZE, ...), as torchrun sets it.
"""

import abc
import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution, Precision
from trainpace.measure import Loss, PlainEngine, collective_backend, place_batch
from trainpace.run.trial import EngineName
from trainpace.workload import import_package, longest_chain

PRECISIONS: dict[Precision, Any] = {
    "fp32": "32-true",
    "torch_fp32": "32-true",
    "tf32": "32-true",
    "amp_fp16": "16-mixed",
    "amp_bf16": "bf16-mixed",
    "bf16": "bf16-true",
    "fp16": "16-true",
}
"""Fabric's names of the precisions. 16-mixed brings a gradient scaler. TF32 is a switch of torch's, apart from these."""


class FabricEngine(abc.ABC):
    """A model and its optimizer under a strategy of Fabric's."""

    precisions = PRECISIONS
    skips_synchronisation = True
    """Between the micro-batches of a step (no_sync)."""
    scales_loss_itself = False

    def __init__(self, execution: Execution, device: str, model: Any, optimizer: Any) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        e = self._execution = execution
        precision, plugins = self.precisions[e.precision], [TorchElasticEnvironment()]
        if device == "cpu" and precision == "16-mixed" and not self.scales_loss_itself:
            # asked for it by name, Fabric takes bf16 on a CPU (lightning 2.6), where torch has fp16 as well
            from lightning.fabric.plugins.precision import MixedPrecision

            precision, plugins = None, [*plugins, MixedPrecision("16-mixed", device)]
        if e.channels_last:
            model = model.to(memory_format=torch.channels_last)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of srun on the path, and of the number of loader workers
            self.fabric = Fabric(
                accelerator=device,
                strategy=self._strategy(e, device),
                devices=e.nproc_per_node,
                num_nodes=e.nnodes,
                precision=precision,
                plugins=plugins,
            )
            self.fabric.launch()
        self.device = self.fabric.device
        self.model, self._optimizer = self._set_up(
            torch.compile(model) if e.compile else model, optimizer
        )

    @abc.abstractmethod
    def _strategy(self, e: Execution, device: str) -> Any: ...

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped: tuple[Any, Any] = self.fabric.setup(model, optimizer)
        return wrapped

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
            self.fabric.backward(
                value if self.scales_loss_itself else value / self._execution.accumulation
            )
        return value.detach()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Ddp(FabricEngine):
    """DistributedDataParallel: gradients are reduced under the last backward pass of a step."""

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import DDPStrategy

        return DDPStrategy(process_group_backend=collective_backend(device))


class Fsdp2(FabricEngine):
    """`fully_shard` on every repeated block, and on the rest. Gradients are reduced after every micro-batch, as forecasts
    assume: to keep them whole until the last one (no_sync) would take the memory that sharding is for. Under amp_bf16 FSDP2's
    own mixed precision is used (parameters gathered in bf16, gradients reduced in fp32), so norms and softmax compute in bf16
    too."""

    precisions = PRECISIONS | {"amp_bf16": "32-true"}
    skips_synchronisation = False

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import ModelParallelStrategy

        def shard(module: Any, _: Any) -> Any:
            return _sharded(module, e, device)

        backend = collective_backend(device)
        if device != "cpu" and e.offload_parameters:
            backend = f"cpu:gloo,{device}:{backend}"
        return ModelParallelStrategy(
            parallelize_fn=shard,
            data_parallel_size=e.world_size,
            tensor_parallel_size=1,
            process_group_backend=backend,
        )

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        whole = getattr(model, "_orig_mod", model)
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        model = self.fabric.setup_module(
            model, move_to_device=False
        )  # shards go there, not the whole model
        sharded = dict(whole.named_parameters())
        for (
            group
        ) in optimizer.param_groups:  # which still hold the whole parameters that sharding replaced
            group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
        optimizer.state.clear()
        return model, self.fabric.setup_optimizers(optimizer)


class DeepSpeed(FabricEngine):
    """ZeRO stages 0 to 3, with offload. It accumulates and scales by itself. The optimizer is the task's own, in Python;
    DeepSpeed's C++ ones are not compiled."""

    skips_synchronisation = False
    scales_loss_itself = True

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy

        class OnCpu(DeepSpeedStrategy):
            """Fabric's strategy without its check for CUDA devices (lightning 2.6), so that ZeRO can be tried without a GPU."""

            def setup_environment(self) -> None:
                # DeepSpeed asks a device for its index, which a CPU's has only if it is given one
                self.parallel_devices = [torch.device("cpu", i) for i in range(e.nproc_per_node)]
                DDPStrategy.setup_environment(self)

            def _setup_distributed(self) -> None:
                self._set_world_ranks()
                self._init_deepspeed_distributed()
                self._format_config()
                self._config_initialized = True

        on_cpu = device == "cpu"
        return (OnCpu if on_cpu else DeepSpeedStrategy)(
            config=_deepspeed_config(e),
            process_group_backend="gloo" if on_cpu else None,
            logging_level=logging.WARNING,
        )

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        value = super().micro_step(loss, batch, last)
        # which counts micro-batches, and updates after the last of a step; Fabric's optimizer would pass its engine by
        # (lightning 2.6, deepspeed 0.19)
        self.fabric.strategy.model.step()
        return value

    def update(self) -> None:
        pass


Engine = PlainEngine | FabricEngine
ENGINES: dict[EngineName, Callable[[Execution, str, Any, Any], Engine]] = {
    "plain": PlainEngine,
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
}


def import_engine(engine: EngineName, device: str) -> None:
    """Import what the engine needs. Raises TrainpaceError where a package is missing."""
    if engine == "deepspeed" and device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if engine != "plain":
                import_package("lightning.fabric", "lightning")
            if engine == "deepspeed":
                import_package("deepspeed", "deepspeed")
        except TrainpaceError as error:
            raise TrainpaceError(
                f"the engine {engine} cannot start: {error.message}", error.hint
            ) from None
    if engine == "deepspeed" and device == "cpu":  # else it compiles a C++ operator for a minute
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def recompute_blocks(model: Any) -> tuple[str, ...]:
    """Full activation checkpointing, by the model's own switch (transformers, timm), else by wrappers around its longest chain of
    alike blocks. Returns notes: where the model has neither, nothing is recomputed, and a note says so.
    """
    # transformers renamed it in 5.x
    for switch in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, switch):
            getattr(model, switch)({"use_reentrant": False})
            return ()
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
        return ()
    chain = longest_chain(model)
    if chain is None:
        name = type(model).__name__
        return (
            (
                f"activation checkpointing did nothing: {name} has no switch for it and no chain of"
                " alike blocks."
            ),
        )
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    members = {id(module) for module in chain.modules}
    wrappers.apply_activation_checkpointing(
        model, wrappers.checkpoint_wrapper, check_fn=lambda module: id(module) in members
    )
    return (f"activation checkpointing recomputes {len(members)} blocks ({chain.name} and on).",)


def _sharded(model: Any, e: Execution, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    size = e.shard_size or e.data_parallel_size
    copies = e.data_parallel_size // size
    axes = {"shard": size} if copies == 1 else {"replicate": copies, "shard": size}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    }
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if e.precision == "amp_bf16":
        options["mp_policy"] = mixed
    if e.offload_parameters:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    chain = longest_chain(model)
    for block in chain.modules if chain is not None else ():
        fully_shard(block, reshard_after_forward=e.reshard_after_forward, **options)
    if e.precision == "amp_bf16":
        options["mp_policy"] = dataclasses.replace(
            mixed, output_dtype=torch.float32
        )  # for the loss
    # the root's own parameters are needed again at once; None is torch's word for that
    fully_shard(model, reshard_after_forward=None if e.reshard_after_forward else False, **options)
    return model


def _deepspeed_config(e: Execution) -> dict[str, Any]:
    """DeepSpeed's configuration, but for the precision, which Fabric adds."""
    offloads = {"offload_optimizer": e.offload_optimizer, "offload_param": e.offload_parameters}
    zero = {"stage": e.zero_stage} | {
        name: {"device": "cpu"} for name, wanted in offloads.items() if wanted
    }
    return {
        "train_micro_batch_size_per_gpu": e.micro_batch,
        "gradient_accumulation_steps": e.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": (
            0.0
        ),  # left out, DeepSpeed 0.19 clips at 1.0, and trains differently from every other engine
        "steps_per_print": 10**9,
    }
