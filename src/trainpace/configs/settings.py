"""The settings of all formats under one set of names, each with the file and key that states it, and the checks and notes
that all readers share."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainpace.core.errors import UnreadableInput, nearest_names
from trainpace.core.records import Record

Value = int | float | str | bool
Severity = Literal["info", "warning"]

SettingName = Literal[
    "micro_batch",
    "accumulation",
    "global_batch",
    "world_size",
    "nnodes",
    "nproc_per_node",
    "gpus_per_node",
    "tp",
    "pp",
    "cp",
    "precision",
    "zero_stage",
    "sharding",
    "offload_optimizer",
    "offload_parameters",
    "activation_checkpointing",
    "compile",
    "optimizer",
    "learning_rate",
    "epochs",
    "max_steps",
    "drop_last",
    "evaluate_every_steps",
    "checkpoint_every_steps",
    "dataloader_workers",
    "sequence_length",
    "time_limit_s",
    "attention",
    "optimizer_implementation",
    "cross_entropy",
    "partition_activations",
]
"""Names as in `trainpace.core.execution`; attention, optimizer_implementation and cross_entropy are a request's, as in
`trainpace.core.software`. gpus_per_node: GPUs that Slurm reserves. sharding: "fsdp" where FSDP is on."""
AUTOCAST_OF = {"bf16": "amp_bf16", "fp16": "amp_fp16"}
"""Hugging Face and accelerate call autocast what DeepSpeed calls bf16 and fp16, so beside a DeepSpeed file both are one."""
TOOLS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
)
LARGEST = 10**15
_FLAGS = (
    "drop_last",
    "compile",
    "activation_checkpointing",
    "offload_optimizer",
    "offload_parameters",
    "partition_activations",
)
_NUMBERS = ("learning_rate", "epochs")
_RANGES = {"zero_stage": (0, 3), "dataloader_workers": (0, LARGEST)}
_LONGEST_NAME = 80
_MOST_SUGGESTIONS = 50


def names(tool: str, kind: str) -> tuple[str, ...]:
    """The keys, arguments or flags that a tool understands, from names.toml."""
    return tuple(TOOLS[tool][kind].split())


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


@dataclass
class Reading:
    """Collects the settings and notes of one file.

    `prefix` heads every key, for a section inside a file of another kind. `understands_auto`: the tool takes the word
    "auto" as "stated elsewhere"; every other tool would stop at it.
    """

    file: str
    format: str
    prefix: str = ""
    understands_auto: bool = False
    settings: list[Setting] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def done(self) -> ConfigFile:
        return ConfigFile(
            file=self.file,
            format=self.format,
            settings=tuple(self.settings),
            notes=tuple(self.notes),
        )

    def stated(self, name: SettingName) -> Value | None:
        """The first value recorded under `name`, if any."""
        return next((s.value for s in self.settings if s.name == name), None)

    def note(
        self,
        key: str,
        text: str,
        severity: Severity = "info",
        leaves_open: SettingName | None = None,
    ) -> None:
        key = self.prefix + key
        text = f"{key}: {text}"
        self.notes.append(
            Note(file=self.file, key=key, text=text, severity=severity, leaves_open=leaves_open)
        )

    def warn(self, key: str, text: str) -> None:
        self.note(key, text, "warning")

    def note_file(self, key: str, file: str) -> None:
        self.note(key, f"{file} is a file of its own; read it too")

    def put(self, name: SettingName, value: Value, key: str) -> None:
        self.settings.append(Setting(name=name, value=value, file=self.file, key=self.prefix + key))

    def fail(self, key: str, value: Any, expected: str) -> UnreadableInput:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UnreadableInput(
            f"{self.file}: {self.prefix}{key} is {shown}; it should be {expected}."
        )

    def read(self, name: SettingName, value: Any, key: str) -> None:
        """Check and record a setting of the kind that its name has: true or false, a number above 0, or a whole number."""
        checked: Value | None
        if name in _FLAGS:
            checked = self.truth(value, key, name)
        elif name in _NUMBERS:
            checked = self.number(value, key, name)
        else:
            checked = self.whole(value, key, *_RANGES.get(name, (1, LARGEST)), name)
        if checked is not None:
            self.put(name, checked, key)

    def read_keys(self, data: dict[str, Any], keys: Mapping[SettingName, str]) -> None:
        """`read` settings by their keys: `keys` gives the dotted path of each."""
        for name, key in keys.items():
            self.read(name, self.at(data, key), key)

    def whole(
        self,
        value: Any,
        key: str,
        least: int = 1,
        most: int = LARGEST,
        name: SettingName | None = None,
    ) -> int | None:
        """A whole number, or None where it is not stated; "8" in quotes is accepted with a note."""
        if value is None or self._is_auto(value, key, name):
            return None
        number = value
        if isinstance(number, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", number):
            self.note(key, f"written as text, {number!r}")
            number = int(number)
        if isinstance(number, float) and math.isfinite(number) and number == int(number):
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise self.fail(
                key,
                value,
                f"a whole number from {least}" + ("" if most == LARGEST else f" to {most}"),
            )
        return number

    def number(self, value: Any, key: str, name: SettingName | None = None) -> float | None:
        """A number above 0; YAML reads 1e-4 as text, which every trainer turns into a number."""
        if value is None or self._is_auto(value, key, name):
            return None
        try:
            number = 0.0 if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = 0.0
        if not 0 < number < LARGEST:
            raise self.fail(key, value, "a number above 0")
        return number

    def truth(self, value: Any, key: str, name: SettingName | None = None) -> bool | None:
        if value is None or self._is_auto(value, key, name):
            return None
        if isinstance(value, bool):
            return value
        raise self.fail(key, value, "true or false")

    def section(self, value: Any, key: str) -> dict[str, Any]:
        """A nested table, empty where it is not stated."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, value, "a section with keys of its own")
        return value

    def at(self, data: dict[str, Any], path: str) -> Any:
        """The value at a dotted path, None where it is not stated."""
        *outer, last = path.split(".")
        for depth, key in enumerate(outer):
            data = self.section(data.get(key), ".".join(outer[: depth + 1]))
        return data.get(last)

    def word(self, value: Any, key: str, choices: Iterable[str] | None = None) -> str | None:
        """A word, one of `choices` where they are given; None where it is not stated."""
        if value is None:
            return None
        if choices is not None and value not in (allowed := list(choices)):
            raise self.fail(key, value, f"one of {', '.join(allowed)}")
        if not isinstance(value, str) or not value.strip():
            raise self.fail(key, value, "a word")
        return value

    def read_device(self, name: SettingName, value: Any, key: str) -> None:
        """Record whether something is offloaded, from the device that it is offloaded to."""
        device = self.word(value, key, ("none", "cpu", "nvme"))
        if device is not None:
            self.put(name, device != "none", key)

    def flag_unknown(
        self, keys: Mapping[str, Any], known: Iterable[str], text: str, section: str = ""
    ) -> None:
        """Warn of every key that is not in `known`, with the nearest known names."""
        allowed = set(known)
        unknown = [str(key)[:_LONGEST_NAME] for key in keys if key not in allowed]
        for i, key in enumerate(
            unknown
        ):  # a search among the names for each: not for a thousand keys
            near = nearest_names(key, sorted(allowed), 2) if i < _MOST_SUGGESTIONS else []
            self.warn(section + key, text + (f"; nearest: {', '.join(near)}" if near else ""))

    def _is_auto(self, value: Any, key: str, name: SettingName | None) -> bool:
        if not (self.understands_auto and isinstance(value, str) and value == "auto"):
            return False
        self.note(key, '"auto": another file or the run decides', leaves_open=name)
        return True
