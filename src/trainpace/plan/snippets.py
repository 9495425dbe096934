"""A change as lines of PyTorch, for trainings that no settings file describes.

The lines speak of the names of a plain training loop: `model`, `loss_fn`, `optimizer`, `dataset`, a batch's `inputs` and
`targets`, and `blocks`, the model's repeated layers. tests/plan/test_snippets.py runs them on a small model.
"""

from collections.abc import Callable, Mapping, Sequence

from trainpace.core.execution import Execution
from trainpace.plan.changes import Choice
from trainpace.plan.knobs import Knob
from trainpace.workload import Workload

_AUTOCAST = """with torch.autocast("cuda", dtype=torch.{dtype}):
    loss = loss_fn(model(inputs), targets)
"""
_WEIGHTS = """model = model.to(torch.{dtype})  # before the optimizer is made
inputs = inputs.to(torch.{dtype})  # unless they are token ids"""
_PRECISIONS: Mapping[str, str] = {
    "amp_bf16": _AUTOCAST.format(dtype="bfloat16") + "loss.backward()",
    "amp_fp16": (
        'scaler = torch.amp.GradScaler("cuda")  # once, before the loop\n'
        + _AUTOCAST.format(dtype="float16")
        + "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
    ),
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "torch_fp32": 'torch.set_float32_matmul_precision("highest")',
    "fp32": (
        'torch.set_float32_matmul_precision("highest")\ntorch.backends.cudnn.allow_tf32 = False'
    ),
    "bf16": _WEIGHTS.format(dtype="bfloat16"),
    "fp16": _WEIGHTS.format(dtype="float16"),
    "fp8": (
        "from torchao.float8 import convert_to_float8_training\n\nconvert_to_float8_training(model)"
    ),
}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "sgd_momentum": "SGD"}
_BLOCKS = "for block in blocks:  # the model's repeated layers, such as model.layers\n"


def snippet(knobs: Sequence[Knob], before: Choice, after: Choice, workload: Workload) -> str:
    """The lines of Python that turn some knobs, or a comment with a command where no line of Python does."""
    parts = [_LINES[knob.name](before, after, workload) for knob in knobs]
    counted = any(knob.name in ("micro-batch", "global batch") for knob in knobs)
    if before.execution.accumulation != after.execution.accumulation and not counted:
        parts.append(_loop(after.execution))
    return "\n\n".join(parts)


def _loop(e: Execution) -> str:
    loader = f"loader = DataLoader(dataset, batch_size={e.micro_batch}, shuffle=True)"
    if e.accumulation == 1:
        return loader
    return (
        f"{loader}\nfor i, (inputs, targets) in enumerate(loader, start=1):\n    loss ="
        f" loss_fn(model(inputs), targets) / {e.accumulation}\n    loss.backward()\n    if i %"
        f" {e.accumulation} == 0:\n        optimizer.step()\n        optimizer.zero_grad()"
    )


def _compile(after: Choice) -> str:
    return (
        "model = torch.compile(model)"
        if after.execution.compile
        else "# without torch.compile(model)"
    )


def _memory_format(after: Choice) -> str:
    name = "channels_last" if after.execution.channels_last else "contiguous_format"
    return (
        f"model = model.to(memory_format=torch.{name})\ninputs ="
        f" inputs.to(memory_format=torch.{name})"
    )


def _sharding(e: Execution, workload: Workload) -> str:
    if e.zero_stage == 0:
        return _wrapped()
    if e.zero_stage == 1:
        optimizer = _OPTIMIZERS.get(workload.optimizer, "YourOptimizer")
        return (
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n\noptimizer ="
            f" ZeroRedundancyOptimizer(model.parameters(), torch.optim.{optimizer}, lr=lr)"
        )
    return _fully_sharded(e)


def _fully_sharded(e: Execution) -> str:
    """FSDP2, before the optimizer is made; parameters that stay gathered after the forward pass are ZeRO's stage 2."""
    imports, mesh, how = ["fully_shard"], "", ""
    if e.shard_size:
        mesh = (
            f'mesh = init_device_mesh("cuda", ({e.data_parallel_size // e.shard_size},'
            f' {e.shard_size}), mesh_dim_names=("replicas", "shards"))\n'
        )
        how += ", mesh=mesh"
    if e.zero_stage == 2 or not e.reshard_after_forward:
        how += ", reshard_after_forward=False"
    if e.offload_optimizer or e.offload_parameters:
        imports.append("CPUOffloadPolicy")
        how += ", offload_policy=CPUOffloadPolicy()"
    lines = f"from torch.distributed.fsdp import {', '.join(sorted(imports))}\n"
    lines += "from torch.distributed.device_mesh import init_device_mesh\n" if mesh else ""
    return f"{lines}\n{mesh}{_BLOCKS}    fully_shard(block{how})\nfully_shard(model{how})"


def _wrapped() -> str:
    return (
        "from torch.nn.parallel import DistributedDataParallel\n\n"
        "model = DistributedDataParallel(model)  # after torch.distributed.init_process_group()"
    )


def _checkpointing(after: Choice) -> str:
    kind = after.execution.activation_checkpointing
    if kind == "none":
        return "# without torch.utils.checkpoint"
    imported = "from torch.utils.checkpoint import checkpoint\n\n"
    if kind == "selective":  # Megatron's: the products and the softmax of attention
        return (
            f"{imported}# in each block, around the attention alone\nx = checkpoint(attention, x,"
            " use_reentrant=False)"
        )
    return (
        f"{imported}{_BLOCKS}    x = checkpoint(block, x, use_reentrant=False)  # in forward, in"
        " place of x = block(x)"
    )


def _offload(e: Execution) -> str:
    if not (e.offload_optimizer or e.offload_parameters):
        return "# without an offload_policy" if e.zero_stage != 3 else _fully_sharded(e)
    if e.offload_parameters:
        return _fully_sharded(e)
    return (
        "# the optimizer alone is offloaded by DeepSpeed: trainpace plan ... --write --new ds.json"
        " makes its file"
    )


def _divided(e: Execution) -> str:
    degrees = {"tensor": e.tp, "pipeline": e.pp, "context": e.cp, "expert": e.ep}
    flags = " ".join(
        f"--parallelism.{name}_parallel_degree {n}" for name, n in degrees.items() if n > 1
    )
    return (
        "# the model's own code has to divide its layers (torch.distributed.tensor.parallel,"
        f" pipelining), or an engine;\n# torchtitan's options: {flags or 'none'}"
    )


def _fleet(e: Execution) -> str:
    head = " --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500" if e.nnodes > 1 else ""
    start = (
        f"# started by: torchrun --nnodes {e.nnodes} --nproc-per-node {e.nproc_per_node}{head}"
        " train.py"
    )
    return start if e.world_size == 1 or e.zero_stage else f"{start}\n{_wrapped()}"


def _data(before: Choice, after: Choice) -> str:
    lines = []
    dataset = "dataset"
    if after.data.precomputed and not before.data.precomputed:
        lines += [
            "# once: trainpace precompute FILE.py:dataset --out shards",
            "from trainpace.shards import ShardDataset",
            "",
            (
                'dataset = ShardDataset("shards", transform=random_transform)  # what is random'
                " stays in training"
            ),
        ]
    workers = after.data.workers or 0
    kept = ", pin_memory=True, persistent_workers=True" if workers else ""
    size = after.execution.micro_batch
    lines.append(
        f"loader = DataLoader({dataset}, batch_size={size}, shuffle=True,"
        f" num_workers={workers}{kept})"
    )
    return "\n".join(lines)


_LINES: Mapping[str, Callable[[Choice, Choice, Workload], str]] = {
    "precision": lambda a, b, w: _PRECISIONS[b.execution.precision],
    "micro-batch": lambda a, b, w: _loop(b.execution),
    "compile": lambda a, b, w: _compile(b),
    "memory format": lambda a, b, w: _memory_format(b),
    "sharding": lambda a, b, w: _sharding(b.execution, w),
    "checkpointing": lambda a, b, w: _checkpointing(b),
    "offload": lambda a, b, w: _offload(b.execution),
    "model parallelism": lambda a, b, w: _divided(b.execution),
    "GPUs": lambda a, b, w: _fleet(b.execution),
    "global batch": lambda a, b, w: _loop(b.execution),
    "data": lambda a, b, w: _data(a, b),
}
