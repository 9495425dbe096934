"""An execution as the settings that files can state, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from trainpace.configs.settings import Value
from trainpace.execution import Execution
from trainpace.records import Record

UNWRITTEN = (
    "engine", "shard_size", "reshard_after_forward", "sequence_parallel", "async_tensor_parallel", "pipeline_schedule",
    "virtual_stages", "channels_last",
)  # fmt: skip
"""Fields of an execution that no settings file is read for: they stand in the training's own code."""
BATCH = frozenset(("micro_batch", "accumulation", "global_batch"))
GROUPS = (
    frozenset(("nnodes", "nproc_per_node", "world_size", "gpus_per_node", "tp", "pp", "cp")),
    frozenset(("precision",)),
    frozenset(("zero_stage", "offload_optimizer", "offload_parameters")),
    BATCH,
    frozenset(("activation_checkpointing",)),
    frozenset(("compile",)),
    frozenset(("dataloader_workers",)),
    frozenset(("time_limit_s",)),
)
"""Settings that are changed together, in this order, since a tool holds them against each other."""
DERIVED = frozenset(("global_batch", "world_size", "gpus_per_node"))
"""They follow from the others, so they are corrected where a file states them and never missed where it does not."""


class Changes(Record):
    """From one way to train to another. `workers`: loader workers of a rank, and `time_limit_s` of a batch job, where they
    change."""

    before: Execution
    after: Execution
    workers: int | None = None
    time_limit_s: float | None = None

    @property
    def wanted(self) -> dict[str, Value]:
        """Every setting as it shall be."""
        beside = {"dataloader_workers": self.workers, "time_limit_s": self.time_limit_s}
        return settings_of(self.after) | {name: value for name, value in beside.items() if value is not None}

    @property
    def names(self) -> frozenset[str]:
        """Those that differ."""
        before = settings_of(self.before)
        return frozenset(name for name, value in self.wanted.items() if before.get(name) != value)

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Fields that differ and that no file is read for."""
        return tuple(name for name in UNWRITTEN if getattr(self.before, name) != getattr(self.after, name))


def settings_of(e: Execution) -> dict[str, Value]:
    """The settings, under the names of `settings.SettingName`. gpus_per_node: one a process."""
    return {
        "micro_batch": e.micro_batch, "accumulation": e.accumulation, "global_batch": e.global_batch,
        "world_size": e.world_size, "nnodes": e.nnodes, "nproc_per_node": e.nproc_per_node,
        "gpus_per_node": e.nproc_per_node, "tp": e.tp, "pp": e.pp, "cp": e.cp, "precision": e.precision,
        "zero_stage": e.zero_stage, "offload_optimizer": e.offload_optimizer,
        "offload_parameters": e.offload_parameters, "activation_checkpointing": str(e.activation_checkpointing),
        "compile": e.compile,
    }  # fmt: skip


def execution_of(values: Mapping[str, Value], base: Execution) -> Execution:
    """`base` with what files say laid over it; FSDP without a ZeRO stage is stage 3. Raises Contradiction as Execution does."""
    found: dict[str, Any] = {
        name: values[name]
        for name in ("micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp", "precision",
                     "zero_stage", "offload_optimizer", "offload_parameters", "compile")
        if name in values
    }  # fmt: skip
    if values.get("sharding") == "fsdp" and "zero_stage" not in values:
        found["zero_stage"] = 3
    if "activation_checkpointing" in values:
        found["activation_checkpointing"] = normal("activation_checkpointing", values["activation_checkpointing"])
    if "world_size" in values and "nproc_per_node" not in values:
        found["nproc_per_node"] = int(values["world_size"]) // int(found.get("nnodes", base.nnodes))
    return replace(base, **found)


def normal(name: str, value: Value) -> Value:
    """One word for one thing: files that only know on and off recompute everything or nothing."""
    if name == "activation_checkpointing" and isinstance(value, bool):
        return "full" if value else "none"
    return value
