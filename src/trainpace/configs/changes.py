"""Changes from one Execution to another as settings, and drafts of rewritten settings files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from trainpace.configs.settings import AUTOCAST_OF, SettingName, Value
from trainpace.configs.syntax import (
    Launch,
    Syntax,
    find_launch,
    find_python,
    flag_text,
    is_open,
    parse,
    set_key,
    with_setting,
)
from trainpace.core.errors import UnreadableInput
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.records import Record

BATCH = frozenset(("micro_batch", "accumulation", "global_batch"))
WORLD = frozenset(("nnodes", "nproc_per_node", "world_size", "gpus_per_node"))
SHARDING: tuple[SettingName, ...] = ("zero_stage", "offload_optimizer", "offload_parameters")
OFFLOADS = SHARDING[1:]
GROUPS = (
    WORLD | {"tp", "pp", "cp"},
    frozenset(("precision",)),
    frozenset(SHARDING),
    BATCH,
    *(
        frozenset((name,))
        for name in (
            "activation_checkpointing",
            "partition_activations",
            "compile",
            "dataloader_workers",
            "time_limit_s",
        )
    ),
)
"""Groups of settings that are written together, in this order.

A tool checks the settings of a group against each other.
"""
DERIVED = frozenset(("global_batch", "world_size", "gpus_per_node"))
"""Settings that follow from other settings.

A file that states them is corrected. They are never added to a file.
"""
_FIELDS = tuple(name for name in EXECUTION_FIELDS if any(name in group for group in GROUPS))
UNWRITTEN = tuple(name for name in EXECUTION_FIELDS if name not in (*_FIELDS, "optimizer"))
"""Fields of an Execution that no settings file states. The training code sets them."""
ELSEWHERE = "another file states it"
"""Reason for a setting that another file states."""
DEEPSPEEDS_OWN = "it belongs in DeepSpeed's own file, in activation_checkpointing"


class Changes(Record):
    """Old and new execution of one training.

    `workers` is the number of data-loader workers per rank, and `time_limit_s` is the limit of a
    batch job in seconds. Each is None if it does not change.
    """

    before: Execution
    after: Execution
    workers: int | None = None
    time_limit_s: float | None = None

    @property
    def wanted(self) -> dict[str, Value]:
        """New values of all settings."""
        beside = {"dataloader_workers": self.workers, "time_limit_s": self.time_limit_s}
        return settings_of(self.after) | {
            name: value for name, value in beside.items() if value is not None
        }

    @property
    def names(self) -> frozenset[str]:
        """Names of the settings whose values change."""
        before = settings_of(self.before)
        return frozenset(name for name, value in self.wanted.items() if before.get(name) != value)


def settings_of(e: Execution) -> dict[str, Value]:
    """Return the settings of an execution. gpus_per_node assumes one GPU per process."""
    values = {name: getattr(e, name) for name in (*_FIELDS, "global_batch", "world_size")}
    if e.precision == "torch_fp32":  # A file states fp32 by enabling no lower precision.
        values["precision"] = "fp32"
    return values | {"gpus_per_node": e.nproc_per_node}


def execution_of(values: Mapping[str, Value], base: Execution) -> Execution:
    """Return `base` with settings from files. FSDP without a ZeRO stage counts as stage 3."""
    fields: dict[str, Any] = {
        name: normal(name, values[name]) for name in _FIELDS if name in values
    }
    if values.get("sharding") == "fsdp" and "zero_stage" not in values:
        fields["zero_stage"] = 3
    if "world_size" in values and "nproc_per_node" not in values:
        nodes = int(fields.get("nnodes", base.nnodes))
        fields["nproc_per_node"] = int(values["world_size"]) // nodes
    return replace(base, **fields)


def normal(name: str, value: Value) -> Value:
    """Return a setting's value in the form that files can state.

    Files only switch activation checkpointing on ("full") or off ("none").
    """
    if name == "activation_checkpointing" and isinstance(value, bool):
        return "full" if value else "none"
    return value


def _offload_device(old: Any, wanted: bool) -> str:
    """Return the device of an offload. nvme is kept, and "none" is not added."""
    if wanted:
        return "nvme" if old == "nvme" else "cpu"
    return "" if old is None else "none"


@dataclass
class Draft:
    """Draft of a settings file that is being rewritten.

    Attributes:
        beside: Formats of the training's other files.
        may_add: Settings that this file may gain, because no other file states them.
        want: Wanted values of all settings.
        names: Settings that are being written now. All methods ignore other settings.
        prefix: The user's own key that contains the settings.
        wrote: Settings that the file now states.
        left: Settings that were not written, with the reasons.
        notes: Instructions for the user.
    """

    text: str
    file: str
    syntax: Syntax | None
    beside: frozenset[str]
    may_add: frozenset[str]
    want: Mapping[str, Value]
    names: frozenset[str] = frozenset()
    prefix: tuple[str, ...] = ()
    wrote: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _parsed: tuple[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """Parsed content of the current text (JSON and YAML only)."""
        if self._parsed is None or self._parsed[0] != self.text:
            assert self.syntax is not None  # Shell texts are edited as words.
            self._parsed = (self.text, parse(self.text, self.file, self.syntax))
        section = self._parsed[1]
        for key in self.prefix:
            section = section[key]
        return dict(section)

    @property
    def launch(self) -> Launch:
        """Launch command in the current text (shell texts only)."""
        launch = find_launch(self.text, self.file) or find_python(self.text)
        if launch is None:
            raise UnreadableInput(f"{self.file} has no launch command that can be changed.")
        return launch

    @property
    def sharding(self) -> list[Value]:
        """Wanted values of SHARDING: ZeRO stage, and offload of optimizer and of parameters."""
        return [self.want[name] for name in SHARDING]

    @property
    def trainer_precision(self) -> str:
        """Wanted precision in a trainer's words.

        Beside a DeepSpeed file, bf16 and fp16 are written as autocast: amp_bf16 and amp_fp16.
        """
        precision = str(self.want["precision"])
        return AUTOCAST_OF.get(precision, precision) if "DeepSpeed" in self.beside else precision

    def get(self, path: str) -> Any:
        """Return the value at a dotted path or of a flag (see `Launch.find`), or None."""
        if self.syntax is None:
            flag = self.launch.find(path)
            return None if flag is None else flag.text
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, path: str, value: Value) -> None:
        """Set the value at a dotted path or of a flag."""
        if self.syntax is None:
            self.text = with_setting(self.text, self.launch, path, flag_text(value))
        else:
            keys = (*self.prefix, *path.split("."))
            self.text = set_key(self.text, self.file, self.syntax, keys, value)

    def place(self, name: str, path: str, value: Value | None = None, adds: bool = True) -> bool:
        """Write one setting if the file states it or may gain it.

        Args:
            name: Name of the setting.
            path: Its dotted key or its flag.
            value: Value in the tool's spelling. By default, the wanted value.
            adds: True if the setting may be added to the file.

        Returns:
            True if the file now states the setting.
        """
        if name not in self.names:
            return False
        new, old = self.want[name] if value is None else value, self.get(path)
        if path.endswith("device"):  # Offloads name a target device.
            new = _offload_device(old, bool(new))
        if why := self._why_not(name, path, old):
            self.leave(why, name)
        elif old is not None or adds:
            self._write(path, old, new)
            self.wrote.add(name)
        return name in self.wrote

    def _why_not(self, name: str, path: str, old: Any) -> str:
        """Return why a setting cannot be written in place of the value `old`, or ""."""
        if old == "auto":
            return f'{path} is "auto": another file or the run decides'
        if self._is_run_time(name, path, old):
            return f"{path} is {old}, whose value is known only at run time"
        return ELSEWHERE if old is None and name not in self.may_add else ""

    def _is_run_time(self, name: str, path: str, old: Any) -> bool:
        """Return True if only the shell or the launcher knows the value of a flag."""
        if self.syntax is not None or self.launch.find(path) is None:
            return False
        return is_open(old) or ":" in old or (name == "nproc_per_node" and not old.isdigit())

    def _write(self, path: str, old: Any, new: Value) -> None:
        if self.syntax is None:
            old, new = old and old.casefold(), flag_text(new)
        if ("" if old is None else old) != new or isinstance(old, bool) != isinstance(new, bool):
            self.put(path, new)

    def place_keys(self, keys: Mapping[SettingName, str], names: Iterable[SettingName]) -> None:
        """Write several settings from a tool's table of keys."""
        for name in names:
            self.place(name, keys[name])

    def keep(self, *names: str) -> None:
        """Count settings as written that the file already contains or does not need."""
        self.wrote |= self.names & set(names)

    def leave(self, why: str, *names: str) -> None:
        """Record why settings are not written."""
        self.left |= dict.fromkeys(sorted(self.names & set(names)), why)

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        """Record settings that are not written (setting -> reason)."""
        for name, why in reasons.items():
            self.leave(why, name)

    def leave_rest(self, why: str) -> None:
        """Mark every remaining setting as not written."""
        self.leave(why, *(self.names - self.wrote - self.left.keys() - DERIVED))

    def note(self, text: str) -> None:
        """Add an instruction for the user, once."""
        if text not in self.notes:
            self.notes.append(text)
