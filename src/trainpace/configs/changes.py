"""An Execution as the settings that files can state, and settings as an Execution."""

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
"""Fields of an Execution that no settings file states; they stand in the training's own code."""
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
"""Settings that are written together, in this order, because a tool checks them against each other."""
DERIVED = frozenset(("global_batch", "world_size", "gpus_per_node"))
"""Settings that follow from the others: corrected where a file states them, never added where it does not."""


class Changes(Record):
    """Two executions of one training. `workers`: data-loader workers per rank, and `time_limit_s` of a batch job, None
    where unchanged."""

    before: Execution
    after: Execution
    workers: int | None = None
    time_limit_s: float | None = None

    @property
    def wanted(self) -> dict[str, Value]:
        """The values of all settings after the change."""
        beside = {"dataloader_workers": self.workers, "time_limit_s": self.time_limit_s}
        return settings_of(self.after) | {name: value for name, value in beside.items() if value is not None}

    @property
    def names(self) -> frozenset[str]:
        """The settings whose values differ."""
        before = settings_of(self.before)
        return frozenset(name for name, value in self.wanted.items() if before.get(name) != value)

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Fields that differ and that no settings file states."""
        return tuple(name for name in UNWRITTEN if getattr(self.before, name) != getattr(self.after, name))


def settings_of(e: Execution) -> dict[str, Value]:
    """Settings by the names in `settings.SettingName`; gpus_per_node is one GPU per process."""
    return {
        "micro_batch": e.micro_batch, "accumulation": e.accumulation, "global_batch": e.global_batch,
        "world_size": e.world_size, "nnodes": e.nnodes, "nproc_per_node": e.nproc_per_node,
        "gpus_per_node": e.nproc_per_node, "tp": e.tp, "pp": e.pp, "cp": e.cp, "precision": e.precision,
        "zero_stage": e.zero_stage, "offload_optimizer": e.offload_optimizer,
        "offload_parameters": e.offload_parameters, "activation_checkpointing": str(e.activation_checkpointing),
        "compile": e.compile,
    }  # fmt: skip


def execution_of(values: Mapping[str, Value], base: Execution) -> Execution:
    """`base` with the settings of files in place of its own; FSDP without a ZeRO stage is stage 3. Raises Contradiction
    as Execution does."""
    fields: dict[str, Any] = {
        name: values[name]
        for name in ("micro_batch", "accumulation", "nnodes", "nproc_per_node", "tp", "pp", "cp", "precision",
                     "zero_stage", "offload_optimizer", "offload_parameters", "compile")
        if name in values
    }  # fmt: skip
    if values.get("sharding") == "fsdp" and "zero_stage" not in values:
        fields["zero_stage"] = 3
    if "activation_checkpointing" in values:
        fields["activation_checkpointing"] = normal("activation_checkpointing", values["activation_checkpointing"])
    if "world_size" in values and "nproc_per_node" not in values:
        fields["nproc_per_node"] = int(values["world_size"]) // int(fields.get("nnodes", base.nnodes))
    return replace(base, **fields)


def normal(name: str, value: Value) -> Value:
    """A setting's value in one spelling: files that only switch checkpointing on or off recompute everything or nothing."""
    if name == "activation_checkpointing" and isinstance(value, bool):
        return "full" if value else "none"
    return value
