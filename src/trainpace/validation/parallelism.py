"""What a run's text says of its parallelism, such as ``fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full``.

Every collection writes it in its own way; the words are the field's. `interleave=3` and `vp=3` are three stages a device,
`vp_layers=5` says that a stage has five layers; `fsdp=32` counts the ranks that shard, `fsdp=FULL_SHARD` names torch's strategy.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from trainpace.errors import TrainpaceError
from trainpace.execution import Checkpointing, PipelineSchedule, ZeroStage


class Parallelism(NamedTuple):
    """Sizes as stated; `dp` and `layers_a_stage` are None where the text has none."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int | None = None
    virtual_stages: int = 1
    layers_a_stage: int | None = None
    zero_stage: ZeroStage = 0
    sharded_in_node: bool = False
    reshard_after_forward: bool = True
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    interleaved: bool = False
    activation_offload: bool = False


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
    ranks = re.search(r"\bdp=(\d+)", text) or re.search(r"\bfsdp=(\d+)", text)
    stages = _size(text, "vp") or _size(text, "interleave") or 1
    interleaved = stages > 1 or "interleaved" in text.lower()
    return Parallelism(
        tp=tp or 1,
        pp=pp or 1,
        cp=cp or 1,
        dp=int(ranks[1]) if ranks else None,
        virtual_stages=stages,
        layers_a_stage=_size(text, "vp_layers"),
        zero_stage=3 if shards else (zero or 0),  # type: ignore[arg-type]
        sharded_in_node="HYBRID" in strategy,
        # torchtitan keeps parameters gathered under a pipeline, whose micro-batches would gather them again and again
        reshard_after_forward="SHARD_GRAD_OP" not in strategy and "ZERO2" not in strategy and (pp or 1) == 1,
        checkpointing=_checkpointing(text),
        sequence_parallel=bool(re.search(r"\bsp\b(?!=[01])|\bsp=1", text)),
        async_tensor_parallel="async_tp" in text,
        interleaved=interleaved,
        activation_offload="act_cpu_offload=True" in text,
    )


def stages_of(stated: Parallelism, layers: int | None) -> tuple[int, PipelineSchedule]:
    """(virtual stages a device, schedule). An interleaved schedule of which nothing more is said has two stages a device,
    torch's default."""
    stages = stated.virtual_stages
    if stated.layers_a_stage and layers:
        stages = max(1, layers // (stated.pp * stated.layers_a_stage))
    if stated.pp == 1:
        return 1, "1f1b"
    if stated.interleaved and stages == 1:
        stages = 2
    return (stages, "interleaved") if stages > 1 else (1, "1f1b")


def _size(text: str, name: str) -> int | None:
    found = re.search(rf"(?<![a-z_]){name}=(\d+)", text)
    return int(found[1]) if found else None


def _checkpointing(text: str) -> Checkpointing:
    if re.search(r"\bac=full", text):
        return "full"
    return "selective" if re.search(r"\bac=selective", text) else "none"
