"""The settings of all formats under one set of names, each with the file and key that states it, and the checks and notes
that all readers share."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainpace.core.errors import Contradiction, UnreadableInput, nearest_names
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


class Clash(Record):
    """Settings that cannot all be right; `text` is one sentence that names every file and key."""

    name: str
    settings: tuple[Setting, ...]
    text: str


class Combined(Record):
    files: tuple[str, ...]
    values: dict[str, Setting]
    clashes: tuple[Clash, ...]
    notes: tuple[Note, ...]


def combine(files: Sequence[ConfigFile]) -> Combined:
    """Cross-check files. `values` holds every setting that all files which state it agree on."""
    stated: dict[str, list[Setting]] = {}
    for file in files:
        for setting in file.settings:
            stated.setdefault(setting.name, []).append(setting)
    deepspeed = {file.file for file in files if file.format == "DeepSpeed"}
    notes = [note for file in files for note in file.notes]
    values: dict[str, Setting] = {}
    clashes: list[Clash] = []
    for name, settings in stated.items():
        different = {s.value for s in settings}
        if name == "precision" and any(s.file in deepspeed for s in settings):
            different = {AUTOCAST_OF.get(str(value), value) for value in different}
        if len(different) == 1:
            values[name] = settings[0]
        else:
            statements = ", ".join(f"{s.value} in {s.file} ({s.key})" for s in settings)
            clashes.append(
                Clash(name=name, settings=tuple(settings), text=f"{name} is {statements}.")
            )
    unsure = {clash.name for clash in clashes} | {
        note.leaves_open for note in notes if note.leaves_open
    }
    clashes += _counted_clashes(values, unsure)
    zero, sharding = values.get("zero_stage"), values.get("sharding")
    if zero and sharding and zero.value:
        text = (
            f"ZeRO stage {_located(zero)} and FSDP ({_keys([sharding])}) are both on; one of them"
            " shards."
        )
        clashes.append(Clash(name="sharding", settings=(zero, sharding), text=text))
    return Combined(
        files=tuple(file.file for file in files),
        values=values,
        clashes=tuple(clashes),
        notes=(*notes, *_filled_in(notes, values)),
    )


def agreed(files: Sequence[ConfigFile]) -> Combined:
    """`combine`, which raises `Contradiction` with every clash where the files disagree."""
    combined = combine(files)
    if combined.clashes:
        text = "the files contradict each other: " + " ".join(
            clash.text for clash in combined.clashes
        )
        raise Contradiction(text, "Make them agree, then ask again.")
    return combined


def _filled_in(notes: list[Note], values: dict[str, Setting]) -> list[Note]:
    """Notes on settings that one file leaves open and another states."""
    stated = [
        (note, values[note.leaves_open])
        for note in notes
        if note.leaves_open and note.leaves_open in values
    ]
    return [
        Note(file=note.file, key=note.key, text=f"{note.key}: taken as {_located(setting)}")
        for note, setting in stated
        if (setting.file, setting.key) != (note.file, note.key)
    ]


def _counted_clashes(values: dict[str, Setting], unsure: set[str]) -> list[Clash]:
    """Processes that are not nodes x processes of each, and samples that are not micro-batches x ranks. `unsure`: settings
    that clash or whose values are not known here."""
    world, nodes, processes, gpus, total, micro, accumulation = (
        values.get(name)
        for name in (
            "world_size",
            "nnodes",
            "nproc_per_node",
            "gpus_per_node",
            "global_batch",
            "micro_batch",
            "accumulation",
        )
    )
    clashes = []
    if processes and gpus and processes.value != gpus.value:
        text = (
            f"nproc_per_node {_located(processes)} is not the GPUs reserved on a node,"
            f" {_located(gpus)}."
        )
        clashes.append(Clash(name="nproc_per_node", settings=(processes, gpus), text=text))
    per_node = processes or (None if "nproc_per_node" in unsure else gpus)
    if (
        world
        and nodes
        and per_node
        and world.value != (product := int(nodes.value) * int(per_node.value))
    ):
        text = (
            f"world size {_located(world)} is not nnodes {_located(nodes)} x {_located(per_node)} ="
            f" {product}."
        )
        clashes.append(Clash(name="world_size", settings=(world, nodes, per_node), text=text))
        if processes:
            return clashes
    if world:
        ranks, used = int(world.value), [world]
    elif processes and "world_size" not in unsure and (nodes or "nnodes" not in unsure):
        # every launcher starts one node where none is stated
        ranks, used = (
            int(processes.value) * int(nodes.value if nodes else 1),
            [processes, *([nodes] if nodes else [])],
        )
    else:
        return clashes
    shards = [values[name] for name in ("tp", "pp", "cp") if name in values]
    if unsure & {"tp", "pp", "cp"} - {s.name for s in shards}:
        return clashes
    divisor = math.prod(int(shard.value) for shard in shards)
    if ranks % divisor:
        factors = " x ".join(_located(shard) for shard in shards)
        text = (
            f"world size {ranks} ({_keys(used)}) is not a multiple of tp x pp x cp = {divisor},"
            f" from {factors}."
        )
        clashes.append(Clash(name="world_size", settings=(*used, *shards), text=text))
    elif total and micro and accumulation:
        samples = int(micro.value) * int(accumulation.value) * (ranks // divisor)
        text = (
            f"global_batch {_located(total)} is not micro_batch {_located(micro)} x accumulation"
            f" {_located(accumulation)} x data-parallel size {ranks // divisor}"
            f" ({_keys([*used, *shards])}) = {samples}."
        )
        if total.value != samples:
            clashes.append(
                Clash(
                    name="global_batch",
                    settings=(total, micro, accumulation, *used, *shards),
                    text=text,
                )
            )
    return clashes


def _located(setting: Setting) -> str:
    return f"{setting.value} ({setting.file}, {setting.key})"


def _keys(settings: list[Setting]) -> str:
    return "; ".join(f"{s.file}, {s.key}" for s in settings)
