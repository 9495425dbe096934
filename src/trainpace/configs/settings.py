"""The settings of all formats under one set of names, each with the file and key that states it."""

from typing import Literal

from trainpace.records import Record

Value = int | float | str | bool
Severity = Literal["info", "warning"]

SettingName = Literal[
    "micro_batch", "accumulation", "global_batch", "world_size", "nnodes", "nproc_per_node", "gpus_per_node", "tp",
    "pp", "cp", "precision", "zero_stage", "sharding", "offload_optimizer", "offload_parameters",
    "activation_checkpointing", "compile", "optimizer", "learning_rate", "epochs", "max_steps", "drop_last",
    "evaluate_every_steps", "checkpoint_every_steps", "dataloader_workers", "sequence_length", "time_limit_s",
]  # fmt: skip
"""Names as in `trainpace.execution`. gpus_per_node: GPUs that Slurm reserves. sharding: "fsdp" where FSDP is on."""


class Setting(Record):
    """One setting; `key` is spelled as in its file."""

    name: SettingName
    value: Value
    file: str
    key: str


class Note(Record):
    """A remark on a key. `leaves_open`: the setting that the key concerns without giving a number ("auto", an elastic range)."""

    file: str
    key: str
    text: str
    severity: Severity = "info"
    leaves_open: SettingName | None = None


class ConfigFile(Record):
    file: str
    format: str
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
