"""PyTorch code for changes, for trainings without a settings file.

The code uses the names of a plain training loop: `model`, `loss_fn`, `optimizer`, `dataset`, a
batch's `inputs` and `targets`, and `blocks` for the model's repeated layers.
tests/plan/test_snippets.py runs it on a small model.
"""

from collections.abc import Mapping

from trainpace.core.execution import Execution
from trainpace.plan.changes import Choice
from trainpace.workload import Workload

_AUTOCAST = """with torch.autocast("cuda", dtype=torch.{dtype}):
    loss = loss_fn(model(inputs), targets)
"""
_WEIGHTS = """model = model.to(torch.{dtype})  # before the optimizer is made
inputs = inputs.to(torch.{dtype})  # unless they are token ids"""
PRECISIONS: Mapping[str, str] = {
    "amp_bf16": _AUTOCAST.format(dtype="bfloat16") + "loss.backward()",
    "amp_fp16": f"""scaler = torch.amp.GradScaler("cuda")  # once, before the loop
{_AUTOCAST.format(dtype="float16")}scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()""",
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "torch_fp32": 'torch.set_float32_matmul_precision("highest")',
    "fp32": """torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.allow_tf32 = False""",
    "bf16": _WEIGHTS.format(dtype="bfloat16"),
    "fp16": _WEIGHTS.format(dtype="float16"),
    "fp8": """from torchao.float8 import convert_to_float8_training

convert_to_float8_training(model)""",
}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "sgd_momentum": "SGD"}
_BLOCKS = "for block in blocks:  # the model's repeated layers, such as model.layers\n"
_DDP = """from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model)  # after torch.distributed.init_process_group()"""


def loop(e: Execution) -> str:
    """Return the data loader, and the gradient accumulation loop if it is needed."""
    loader = f"loader = DataLoader(dataset, batch_size={e.micro_batch}, shuffle=True)"
    if e.accumulation == 1:
        return loader
    return f"""{loader}
for i, (inputs, targets) in enumerate(loader, start=1):
    loss = loss_fn(model(inputs), targets) / {e.accumulation}
    loss.backward()
    if i % {e.accumulation} == 0:
        optimizer.step()
        optimizer.zero_grad()"""


def memory_format(e: Execution) -> str:
    name = "channels_last" if e.channels_last else "contiguous_format"
    return f"""model = model.to(memory_format=torch.{name})
inputs = inputs.to(memory_format=torch.{name})"""


def sharding(e: Execution, workload: Workload) -> str:
    if e.zero_stage == 0:
        return _DDP
    if e.zero_stage > 1:
        return _fully_sharded(e)
    optimizer = _OPTIMIZERS.get(workload.optimizer, "YourOptimizer")
    return f"""from torch.distributed.optim import ZeroRedundancyOptimizer

optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.{optimizer}, lr=lr)"""


def _fully_sharded(e: Execution) -> str:
    """Return the FSDP2 code that goes before the creation of the optimizer.

    For ZeRO stage 2, parameters stay gathered after the forward pass.
    """
    imports, mesh, how = ["fully_shard"], "", ""
    if e.shard_size:
        shape = f"({e.data_parallel_size // e.shard_size}, {e.shard_size})"
        names = 'mesh_dim_names=("replicas", "shards")'
        mesh = f'mesh = init_device_mesh("cuda", {shape}, {names})\n'
        how += ", mesh=mesh"
    if e.zero_stage == 2 or not e.reshard_after_forward:
        how += ", reshard_after_forward=False"
    if e.offload_optimizer or e.offload_parameters:
        imports.append("CPUOffloadPolicy")
        how += ", offload_policy=CPUOffloadPolicy()"
    lines = f"from torch.distributed.fsdp import {', '.join(sorted(imports))}\n"
    lines += "from torch.distributed.device_mesh import init_device_mesh\n" if mesh else ""
    return f"{lines}\n{mesh}{_BLOCKS}    fully_shard(block{how})\nfully_shard(model{how})"


def checkpointing(e: Execution) -> str:
    if e.activation_checkpointing == "none":
        return "# without torch.utils.checkpoint"
    imported = "from torch.utils.checkpoint import checkpoint\n\n"
    # As in Megatron: recomputes attention's matmuls and softmax
    if e.activation_checkpointing == "selective":
        return f"""{imported}# in each block, around the attention alone
x = checkpoint(attention, x, use_reentrant=False)"""
    call = "x = checkpoint(block, x, use_reentrant=False)"
    return f"{imported}{_BLOCKS}    {call}  # in forward, in place of x = block(x)"


def offload(e: Execution) -> str:
    if e.offload_parameters or (e.zero_stage == 3 and not e.offload_optimizer):
        return _fully_sharded(e)
    if not e.offload_optimizer:
        return "# without an offload_policy"
    return (
        "# only DeepSpeed offloads the optimizer alone: trainpace plan ... --write --new ds.json"
        " makes its file"
    )


def model_parallelism(e: Execution) -> str:
    degrees = {"tensor": e.tp, "pipeline": e.pp, "context": e.cp, "expert": e.ep}
    flags = " ".join(
        f"--parallelism.{name}_parallel_degree {n}" for name, n in degrees.items() if n > 1
    )
    return (
        "# the model's own code has to divide its layers (torch.distributed.tensor.parallel,"
        f" pipelining), or an engine;\n# torchtitan's options: {flags or 'none'}"
    )


def launch(e: Execution) -> str:
    """Return the torchrun command, and the DDP wrapper if data parallelism needs it."""
    head = " --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500" * (e.nnodes > 1)
    sizes = f"--nnodes {e.nnodes} --nproc-per-node {e.nproc_per_node}"
    start = f"# started by: torchrun {sizes}{head} train.py"
    return start if e.world_size == 1 or e.zero_stage else f"{start}\n{_DDP}"


_SHARDS = """# once: trainpace precompute FILE.py:dataset --out shards
from trainpace.shards import ShardDataset

dataset = ShardDataset("shards", transform=random_transform)  # what is random stays in training
"""


def data(before: Choice, after: Choice) -> str:
    shards = _SHARDS * (after.data.precomputed and not before.data.precomputed)
    workers, size = after.data.workers or 0, after.execution.micro_batch
    options = f"batch_size={size}, shuffle=True, num_workers={workers}"
    options += ", pin_memory=True, persistent_workers=True" * bool(workers)
    return f"{shards}loader = DataLoader(dataset, {options})"
