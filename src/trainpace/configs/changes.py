"""The change from one Execution to another as settings, and a settings file while it is being changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from trainpace.configs.settings import Value
from trainpace.configs.syntax import (
    Launch,
    Syntax,
    find_launch,
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
SHARDING = ("zero_stage", "offload_optimizer", "offload_parameters")
GROUPS = (
    frozenset(("nnodes", "nproc_per_node", "world_size", "gpus_per_node", "tp", "pp", "cp")),
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
"""Settings that are written together, in this order, because a tool checks them against each other."""
DERIVED = frozenset(("global_batch", "world_size", "gpus_per_node"))
"""Settings that follow from the others: corrected where a file states them, never added where it does not."""
_FIELDS = tuple(name for name in EXECUTION_FIELDS if any(name in group for group in GROUPS))
UNWRITTEN = tuple(name for name in EXECUTION_FIELDS if name not in (*_FIELDS, "optimizer"))
"""Fields of an Execution that no settings file states; they stand in the training's own code."""
ELSEWHERE = "another file states it"
DEEPSPEEDS_OWN = "DeepSpeed's own file has it, in activation_checkpointing"


class Changes(Record):
    """Two executions of one training. `workers`: data-loader workers per rank, and `time_limit_s` of a batch job, None
    where unchanged."""

    before: Execution
    after: Execution
    workers: int | None = None
    time_limit_s: float | None = None

    @property
    def wanted(self) -> dict[str, Value]:
        beside = {"dataloader_workers": self.workers, "time_limit_s": self.time_limit_s}
        return settings_of(self.after) | {
            name: value for name, value in beside.items() if value is not None
        }

    @property
    def names(self) -> frozenset[str]:
        before = settings_of(self.before)
        return frozenset(name for name, value in self.wanted.items() if before.get(name) != value)


def settings_of(e: Execution) -> dict[str, Value]:
    """Settings by the names in `settings.SettingName`; gpus_per_node is one GPU per process."""
    values = {name: getattr(e, name) for name in (*_FIELDS, "global_batch", "world_size")}
    if e.precision == "torch_fp32":  # what a file says by naming no format of fewer bits
        values["precision"] = "fp32"
    return values | {"gpus_per_node": e.nproc_per_node}


def execution_of(values: Mapping[str, Value], base: Execution) -> Execution:
    """`base` with the settings of files in place of its own; FSDP without a ZeRO stage is stage 3. Raises Contradiction
    as Execution does."""
    fields: dict[str, Any] = {
        name: normal(name, values[name]) for name in _FIELDS if name in values
    }
    if values.get("sharding") == "fsdp" and "zero_stage" not in values:
        fields["zero_stage"] = 3
    if "world_size" in values and "nproc_per_node" not in values:
        fields["nproc_per_node"] = int(values["world_size"]) // int(
            fields.get("nnodes", base.nnodes)
        )
    return replace(base, **fields)


def normal(name: str, value: Value) -> Value:
    """A setting's value in one spelling: files that only switch checkpointing on or off recompute everything or nothing."""
    if name == "activation_checkpointing" and isinstance(value, bool):
        return "full" if value else "none"
    return value


@dataclass
class Draft:
    """A settings file while it is being changed: its text, the settings written, and those left out with their reasons.

    `beside`: formats of the training's other files. `may_add`: settings that no other file states, so that this one may
    gain them. `want`: the values of all settings; `names`: those that are being written, to which every method keeps.
    `prefix`: the user's own key that holds the settings. `notes`: what the user must do beside the file.
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
        """The parsed content of the current text (JSON and YAML only)."""
        if self._parsed is None or self._parsed[0] != self.text:
            assert self.syntax is not None  # shell texts are edited as words
            self._parsed = (self.text, parse(self.text, self.file, self.syntax))
        section = self._parsed[1]
        for key in self.prefix:
            section = section[key]
        return dict(section)

    @property
    def launch(self) -> Launch:
        """The launch command in the current text (shell texts only)."""
        launch = find_launch(self.text, self.file)
        if launch is None:
            raise UnreadableInput(f"{self.file} holds no launch command that can be changed.")
        return launch

    def get(self, path: str) -> Any:
        """The value at a dotted path, or the text of a flag as `Launch.find` takes it; None where there is none."""
        if self.syntax is None:
            flag = self.launch.find(path)
            return None if flag is None else "true" if flag.value is None else flag.value.value
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def put(self, path: str, value: Value) -> None:
        if self.syntax is None:
            self.text = with_setting(self.text, self.launch, path, flag_text(value))
            return
        self.text = set_key(
            self.text, self.file, self.syntax, (*self.prefix, *path.split(".")), value
        )

    def place(self, name: str, path: str, value: Value | None = None, adds: bool = True) -> bool:
        """Set a setting, to `value` or what is wanted, where the file states it or may gain it; returns whether the file
        now states it."""
        if name not in self.names:
            return False
        new = self.want[name] if value is None else value
        old = self.get(path)
        if self.syntax is None and (flag := self.launch.find(path)):
            if is_open(old) or ":" in old or (name == "nproc_per_node" and not old.isdigit()):
                self.leave(f"{flag.written} is {old}, whose value is known only when it runs", name)
                return False
            old, new = old.casefold(), flag_text(new)
        if old == "auto":
            self.leave(f'{path} is "auto": another file or the run decides', name)
        elif old is not None or (adds and name in self.may_add):
            if old != new or isinstance(old, bool) != isinstance(new, bool):
                self.put(path, new)
            self.wrote.add(name)
            return True
        elif name not in self.may_add:
            self.leave(ELSEWHERE, name)
        return False

    def place_device(self, name: str, path: str) -> None:
        """Write the device that something is offloaded to. nvme stays, and nothing is said where nothing is offloaded."""
        old, on = self.get(path), self.want[name]
        if (old is None and not on) or (old == "nvme" and on):
            self.keep(name)
        else:
            self.place(name, path, "cpu" if on else "none")

    def keep(self, *names: str) -> None:
        """Count settings as written that the file states already or need not state."""
        self.wrote |= self.names & set(names)

    def leave(self, why: str, *names: str) -> None:
        self.left |= dict.fromkeys(sorted(self.names & set(names)), why)

    def leave_all(self, reasons: Mapping[str, str]) -> None:
        for name, why in reasons.items():
            self.leave(why, name)

    def leave_rest(self, why: str) -> None:
        """Leave every setting that was neither written nor left before."""
        self.leave(why, *(self.names - self.wrote - self.left.keys() - DERIVED))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
