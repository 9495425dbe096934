"""Which engine can do what: checked before anything starts, without loading one."""

from trainpace.errors import Contradiction
from trainpace.execution import Execution
from trainpace.launch.trial import EngineName

_SAYS = {"plain": "one plain process", "ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
_STAGES = {"plain": (0,), "ddp": (0,), "fsdp2": (3,), "deepspeed": (0, 1, 2, 3)}


def engine_for(execution: Execution) -> EngineName:
    """The usual engine of an execution: DeepSpeed for ZeRO 1 and 2 and for offloaded optimizer states, FSDP2 for full
    sharding."""
    if execution.zero_stage in (1, 2) or execution.offload_optimizer != execution.offload_parameters:
        return "deepspeed"
    if execution.zero_stage == 3:
        return "fsdp2"
    return "plain" if execution.world_size == 1 else "ddp"


def check_engine(engine: EngineName, execution: Execution) -> None:
    """Raise Contradiction for an execution that this engine does not have, naming one that does."""
    e, name = execution, _SAYS[engine]
    if e.tp * e.pp * e.cp > 1:
        raise Contradiction(
            f"trials run data parallelism; tp {e.tp}, pp {e.pp}, cp {e.cp} divide the model's own code.",
            "Try it in your script: its own launcher starts it.",
        )
    if engine == "plain" and e.world_size > 1:
        raise Contradiction(f"{name} is not {e.world_size} ranks.", "Use the engine ddp, fsdp2 or deepspeed.")
    if e.engine == "data_parallel":
        raise Contradiction("nn.DataParallel is not among the engines of trials.", "Use DDP.")
    if e.zero_stage not in _STAGES[engine]:
        hint = "Use deepspeed for stages 1 and 2, fsdp2 or deepspeed for 3, ddp for none."
        raise Contradiction(f"{name} has no ZeRO stage {e.zero_stage}.", hint)
    if e.precision == "fp8":
        raise Contradiction("no engine of trials has fp8.", "Use amp_bf16 or bf16.")
    if engine == "fsdp2" and e.precision == "amp_fp16":
        raise Contradiction("FSDP2 has no gradient scaler, which amp_fp16 needs.", "Use amp_bf16, or deepspeed.")
    if engine == "fsdp2" and e.offload_optimizer != e.offload_parameters:
        raise Contradiction(
            "FSDP2 offloads parameters, gradients and optimizer states together.", "Offload both, or use deepspeed."
        )
    if engine in ("plain", "ddp") and (e.offload_optimizer or e.offload_parameters):
        raise Contradiction(f"{name} offloads nothing.", "Use deepspeed with a ZeRO stage, or fsdp2.")
    if engine == "deepspeed":
        _check_deepspeed(e)
    if not e.reshard_after_forward and engine != "fsdp2":
        raise Contradiction(f"{name} has no parameters to keep gathered.", "reshard_after_forward off is fsdp2's.")
    if e.activation_checkpointing == "selective":
        raise Contradiction(
            "no engine of trials checkpoints selectively: that is in a model's own code.", "Use full, or none."
        )


def why_no_noise_scale(engine: EngineName, execution: Execution) -> str:
    """The reason why the noise scale, which needs the gradient of a part of a batch, cannot be gathered; "" where it can."""
    e = execution
    if engine == "deepspeed":
        return "DeepSpeed does not show the gradients of a part of a batch: use ddp or fsdp2."
    if e.accumulation > 1 or (engine == "ddp" and e.world_size > 1 and e.precision != "amp_fp16"):
        return ""
    return (
        "the gradient noise scale needs a part of the batch to hold against the whole: accumulation of 2 or more, or ranks"
        " under DDP (in another precision than amp_fp16)."
    )


def _check_deepspeed(e: Execution) -> None:
    if e.offload_optimizer and e.zero_stage == 0:
        raise Contradiction("DeepSpeed offloads the optimizer from ZeRO stage 1 on.", "Use ZeRO stage 1, 2 or 3.")
    if e.offload_parameters and e.zero_stage != 3:
        raise Contradiction("DeepSpeed offloads parameters in ZeRO stage 3.", "Use ZeRO stage 3.")
    if e.shard_size not in (None, e.data_parallel_size):
        raise Contradiction("DeepSpeed's ZeRO shards over all ranks.", "Hybrid sharding is fsdp2's.")
