"""FSDP2 (`fully_shard`) through Fabric's ModelParallelStrategy: every repeated block is a unit, the rest another.

Gradients are sharded, so they are reduced after every micro-batch, as DeepSpeed's ZeRO does and as forecasts assume: to keep
them whole until the last one (no_sync) would take the memory that sharding is for. Under amp_bf16 FSDP2's own mixed precision
is used (parameters gathered in bf16, gradients reduced in fp32), not autocast: norms and softmax compute in bf16 too.
"""

import dataclasses
from typing import Any

import torch

from trainpace.launch.engines.engine import Engine
from trainpace.launch.engines.fabric import FabricEngine, import_lightning
from trainpace.launch.trial import Trial
from trainpace.trace import longest_chain


def load(device: str) -> None:
    import_lightning()


def make(trial: Trial, model: Any, optimizer: Any) -> Engine:
    """The engine around a model whose parameters are sharded over the ranks, or over `shard_size` of them."""
    from lightning.fabric.strategies import ModelParallelStrategy

    e = trial.execution

    def shard(module: Any, _: Any) -> Any:
        return _sharded(module, trial)

    strategy = ModelParallelStrategy(
        parallelize_fn=shard, data_parallel_size=e.world_size, tensor_parallel_size=1,
        process_group_backend=_backend(trial),
    )  # fmt: skip
    return _Fsdp2(trial, model, optimizer, strategy, "32-true" if e.precision == "amp_bf16" else None)


def _backend(trial: Trial) -> str:
    if trial.device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if trial.execution.offload_parameters else "nccl"


class _Fsdp2(FabricEngine):
    skips_synchronisation = False

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        whole = getattr(model, "_orig_mod", model)
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        model = self.fabric.setup_module(model, move_to_device=False)  # shards go there, not the whole model
        sharded = dict(whole.named_parameters())
        for group in optimizer.param_groups:  # which still hold the whole parameters that sharding replaced
            group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
        optimizer.state.clear()
        return model, self.fabric.setup_optimizers(optimizer)


def _sharded(model: Any, trial: Trial) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    e = trial.execution
    size = e.shard_size or e.data_parallel_size
    copies = e.data_parallel_size // size
    mesh = (
        init_device_mesh(trial.device, (size,))
        if copies == 1
        else init_device_mesh(trial.device, (copies, size), mesh_dim_names=("replicate", "shard"))
    )
    options: dict[str, Any] = {"mesh": mesh}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if e.precision == "amp_bf16":
        options["mp_policy"] = mixed
    if e.offload_parameters:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=trial.device == "cuda")
    chain = longest_chain(model)
    for block in chain.modules if chain is not None else ():
        fully_shard(block, reshard_after_forward=e.reshard_after_forward, **options)
    if e.precision == "amp_bf16":
        options["mp_policy"] = dataclasses.replace(mixed, output_dtype=torch.float32)  # for the loss
    # the root's own parameters are needed again at once; None is torch's word for that
    fully_shard(model, reshard_after_forward=None if e.reshard_after_forward else False, **options)
    return model
