"""The common language of settings files: one name a setting, and where it was read."""

from __future__ import annotations

import math
from typing import Any, Literal

from trainpace.errors import UnreadableInput
from trainpace.records import Record

Value = int | float | str | bool

SettingName = Literal[
    "micro_batch", "accumulation", "global_batch", "world_size", "nnodes", "nproc_per_node", "tp", "pp", "cp",
    "precision", "zero_stage", "offload_optimizer", "activation_checkpointing", "compile", "optimizer",
    "learning_rate", "epochs", "max_steps", "drop_last", "evaluate_every_steps", "checkpoint_every_steps",
    "dataloader_workers", "sequence_length", "time_limit_s", "sharding",
]  # fmt: skip


class Setting(Record):
    """One setting as a file states it; `key` is written as in that file."""

    name: SettingName
    value: Value
    file: str
    key: str


class Note(Record):
    """Something that a reader of the file should know."""

    file: str
    key: str
    text: str
    severity: Literal["info", "warning"] = "info"


class ConfigFile(Record):
    """What one file says."""

    file: str
    format: str
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]


class Reading:
    """Collects what a format's reader finds, and checks every value on the way."""

    def __init__(self, file: str, format_name: str) -> None:
        self.file = file
        self.format = format_name
        self._settings: list[Setting] = []
        self._notes: list[Note] = []

    def done(self) -> ConfigFile:
        """The frozen result."""
        return ConfigFile(file=self.file, format=self.format, settings=tuple(self._settings), notes=tuple(self._notes))

    def note(self, key: str, text: str, severity: Literal["info", "warning"] = "info") -> None:
        """Remember a remark about a key."""
        self._notes.append(Note(file=self.file, key=key, text=f"{key}: {text}", severity=severity))

    def put(self, name: SettingName, value: Value, key: str) -> None:
        """Remember a setting that has been checked."""
        self._settings.append(Setting(name=name, value=value, file=self.file, key=key))

    def fail(self, key: str, value: Any, expected: str) -> UnreadableInput:
        """The error for a value that cannot be."""
        return UnreadableInput(f"{self.file}: {key} is {_shown(value)}; it should be {expected}.")

    def count(self, name: SettingName, value: Any, key: str, least: int = 1) -> None:
        """A whole number; "8" in quotes is understood with a note, "auto" means unknown."""
        if value is None:
            return
        if value == "auto":
            self.note(key, '"auto": another file or the run decides')
            return
        if isinstance(value, str) and value.strip().isdigit() and value.strip().isascii():
            self.note(key, f"written as text, {value!r}")
            value = int(value)
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**15:
            raise self.fail(key, value, f"a whole number from {least}")
        self.put(name, value, key)

    def number(self, name: SettingName, value: Any, key: str) -> None:
        """A number above 0; YAML leaves 1e-4 as text, which every trainer turns into a number."""
        if value is None:
            return
        if value == "auto":
            self.note(key, '"auto": another file or the run decides')
            return
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.fail(key, value, "a number above 0") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self.fail(key, value, "a number above 0")
        self.put(name, float(value), key)

    def flag(self, value: Any, key: str) -> bool | None:
        """True, False, or None where it is not stated."""
        if value is None or isinstance(value, bool):
            return value
        if value == "auto":
            self.note(key, '"auto": another file or the run decides')
            return None
        if isinstance(value, str) and value.casefold() in ("true", "false"):
            return value.casefold() == "true"
        raise self.fail(key, value, "true or false")

    def section(self, value: Any, key: str) -> dict[str, Any]:
        """A nested table; an absent one is empty."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, value, "a section with keys of its own")
        return value

    def text(self, value: Any, key: str) -> str | None:
        """A word."""
        if value is None or isinstance(value, str):
            return value
        raise self.fail(key, value, "text")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
