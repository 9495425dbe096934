"""The parallelism in a run's text, such as ``fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full``.

The words are the field's: `zero=1` is a ZeRO stage, `interleave=3` and `vp=3` are three virtual stages a device, `gpipe` and
`interleaved` pipeline schedules, `sp` sequence parallelism, `ac=full|selective|none` activation checkpointing. `fsdp=32` counts
the ranks that shard, `fsdp=FULL_SHARD` names torch's strategy. `DataParallel` is torch's module of that name.
"""

import re
from typing import NamedTuple

from trainpace.errors import TrainpaceError
from trainpace.execution import Checkpointing, PipelineSchedule, ZeroStage


class Parallelism(NamedTuple):
    """Sizes and switches as stated, each at its default where the text says nothing of it."""

    tp: int
    pp: int
    cp: int
    virtual_stages: int
    pipeline_schedule: PipelineSchedule
    zero_stage: ZeroStage
    sharded_in_node: bool
    reshard_after_forward: bool
    checkpointing: Checkpointing
    sequence_parallel: bool
    async_tensor_parallel: bool
    activation_offload: bool
    is_data_parallel_module: bool


def read_parallelism(text: str) -> Parallelism:
    """Raises `TrainpaceError` for sizes of 0, a ZeRO stage above 3, and expert parallelism, which is not forecast."""
    tp, pp, cp, zero = (_size(text, name) for name in ("tp", "pp", "cp", "zero"))
    experts = _size(text, "ep")
    if experts is not None and experts > 1:
        raise TrainpaceError(f"expert parallelism (ep={experts}) is not forecast.")
    if 0 in (tp, pp, cp) or (zero or 0) > 3:
        raise TrainpaceError(f"parallelism {text!r} is not understood.")
    sharding = re.search(r"\bfsdp(?:=(\w+))?", text)
    strategy = (sharding[1] or "").upper() if sharding else ""
    # one data-parallel rank shards nothing; but FSDP shards over context-parallel ranks too, as torchtitan does
    shards = bool(sharding) and strategy != "NO_SHARD" and not (strategy == "1" and (cp or 1) == 1)
    virtual_stages, schedule = _pipeline(text, pp or 1)
    checkpointing = re.search(r"\bac=(full|selective)", text)
    return Parallelism(
        tp=tp or 1,
        pp=pp or 1,
        cp=cp or 1,
        virtual_stages=virtual_stages,
        pipeline_schedule=schedule,
        zero_stage=3 if shards else (zero or 0),  # type: ignore[arg-type]
        sharded_in_node="HYBRID" in strategy,
        # torchtitan keeps parameters gathered under a pipeline, whose micro-batches would gather them again and again
        reshard_after_forward="SHARD_GRAD_OP" not in strategy and "ZERO2" not in strategy and (pp or 1) == 1,
        checkpointing=checkpointing[1] if checkpointing else "none",  # type: ignore[arg-type]
        sequence_parallel=bool(re.search(r"\bsp\b(?!=[01])|\bsp=1", text)),
        async_tensor_parallel="async_tp" in text,
        activation_offload="act_cpu_offload=True" in text,
        is_data_parallel_module="DataParallel" in text and "Distributed" not in text,
    )


def _pipeline(text: str, pp: int) -> tuple[int, PipelineSchedule]:
    """(virtual stages a device, schedule). An interleaved schedule of which nothing more is said has two stages a device,
    torch's default."""
    stages = _size(text, "vp") or _size(text, "interleave") or 1
    if pp == 1:
        return 1, "1f1b"
    if re.search(r"\bgpipe\b", text, re.IGNORECASE):
        return 1, "gpipe"
    if stages == 1 and "interleaved" in text.lower():
        stages = 2
    return (stages, "interleaved") if stages > 1 else (1, "1f1b")


def _size(text: str, name: str) -> int | None:
    match = re.search(rf"(?<![a-z_]){name}=(\d+)", text)
    return int(match[1]) if match else None
