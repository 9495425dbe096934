"""Settings of all tools under common names, and the cross-check of several files."""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from msgspec.structs import replace

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
"""Names of settings. Most are fields of `trainpace.core.execution.Execution`.

attention, optimizer_implementation and cross_entropy belong to `trainpace.core.software`.
gpus_per_node is the number of GPUs that Slurm reserves. sharding is "fsdp" if FSDP is on.
"""
AUTOCAST_OF = {"bf16": "amp_bf16", "fp16": "amp_fp16"}
"""Precision names that mean autocast when a DeepSpeed file stands beside a trainer's file.

DeepSpeed calls bf16 what Hugging Face and accelerate call autocast.
"""
TOOLS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
)
PYTHON = "python"
"""Key of the single process that `python train.py` starts. Lightning's Trainer starts the rest."""
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
    """Return the keys, arguments or flags of a tool, as listed in names.toml."""
    return tuple(TOOLS[tool][kind].split())


class Setting(Record, omit_defaults=True):
    """One setting with its file, and its key as spelled in the file.

    `over` is the format or the name of a file whose value this setting overrides.
    """

    name: SettingName
    value: Value
    file: str
    key: str
    over: str = ""


class Note(Record):
    """Note about a key.

    `leaves_open` names a setting that the key affects without stating its value: "auto", or a
    range.
    """

    file: str
    key: str
    text: str
    severity: Severity = "info"
    leaves_open: SettingName | None = None


class ConfigFile(Record):
    """Settings and notes read from one file.

    `named` has the keys that name other settings files, with the names.
    """

    file: str
    format: str
    settings: tuple[Setting, ...]
    notes: tuple[Note, ...]
    named: tuple[tuple[str, str], ...] = ()


@dataclass
class Reading:
    """Settings and notes of one file, collected while the file is read.

    Attributes:
        prefix: Text before every key, for a section inside another file.
        understands_auto: True for tools that accept "auto" for a value that another file states.
        over: Format or name of the file that the next settings override.
    """

    file: str
    format: str
    prefix: str = ""
    understands_auto: bool = False
    settings: list[Setting] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    named: list[tuple[str, str]] = field(default_factory=list)
    over: str = ""

    def done(self) -> ConfigFile:
        """Return the finished file with its settings and notes."""
        return ConfigFile(
            file=self.file,
            format=self.format,
            settings=tuple(self.settings),
            notes=tuple(self.notes),
            named=tuple(self.named),
        )

    def stated(self, name: SettingName) -> Value | None:
        """Return the first value read for a setting, or None."""
        return next((s.value for s in self.settings if s.name == name), None)

    def note(
        self,
        key: str,
        text: str,
        severity: Severity = "info",
        leaves_open: SettingName | None = None,
    ) -> None:
        """Add a note about a key. `leaves_open` names the setting that stays open."""
        key = self.prefix + key
        text = f"{key}: {text}"
        self.notes.append(
            Note(file=self.file, key=key, text=text, severity=severity, leaves_open=leaves_open)
        )

    def warn(self, key: str, text: str) -> None:
        """Add a warning about a key."""
        self.note(key, text, "warning")

    def name_file(self, key: str, file: str) -> None:
        """Record that a key names another settings file."""
        self.named.append((self.prefix + key, file))
        self.note(key, f"{file} is a separate settings file; pass it too")

    def note_at_run_time(self, key: str, value: str, name: SettingName | None = None) -> None:
        """Add a note that a value is known only at run time."""
        self.note(key, f"{value} is known only at run time", leaves_open=name)

    def put(self, name: SettingName, value: Value, key: str) -> None:
        """Record a setting whose value is already checked."""
        key = self.prefix + key
        setting = Setting(name=name, value=value, file=self.file, key=key, over=self.over)
        self.settings.append(setting)

    def fail(self, key: str, value: Any, expected: str) -> UnreadableInput:
        """Return the error for an invalid value. The caller raises it."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UnreadableInput(
            f"{self.file}: {self.prefix}{key} is {shown}; it should be {expected}."
        )

    def read(self, name: SettingName, value: Any, key: str) -> None:
        """Check the value of a setting and record it.

        The setting's name decides if it is a device, a flag, a number above 0 or a whole number. A
        missing value is not recorded.

        Raises:
            UnreadableInput: If the value is invalid.
        """
        checked: Value | None
        if key.endswith("device"):  # Offloads name a target device.
            device = self.word(value, key, ("none", "cpu", "nvme"))
            checked = None if device is None else device != "none"
        elif name in _FLAGS:
            checked = self.truth(value, key, name)
        elif name in _NUMBERS:
            checked = self.number(value, key, name)
        else:
            checked = self.whole(value, key, *_RANGES.get(name, (1, LARGEST)), name)
        if checked is not None:
            self.put(name, checked, key)

    def read_keys(self, data: dict[str, Any], keys: Mapping[SettingName, str]) -> None:
        """Read all settings of a table (setting -> dotted key)."""
        for name, key in keys.items():
            self.read(name, self.at(data, key), key)

    def read_word(
        self, name: SettingName, word: Any, key: str, meanings: Mapping[str, Value]
    ) -> None:
        """Record the value that a tool's word stands for, as listed in `meanings`."""
        checked = self.word(word, key, meanings)
        if checked is not None:
            self.put(name, meanings[checked], key)

    def whole(
        self,
        value: Any,
        key: str,
        least: int = 1,
        most: int = LARGEST,
        name: SettingName | None = None,
    ) -> int | None:
        """Return a whole number, or None if there is no value. A number in quotes adds a note."""
        if self._is_open(value, key, name):
            return None
        number = value
        if isinstance(number, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", number):
            self.note(key, f"written as text, {number!r}")
            number = int(number)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            limit = "" if most == LARGEST else f" to {most}"
            raise self.fail(key, value, f"a whole number from {least}{limit}")
        return number

    def number(self, value: Any, key: str, name: SettingName | None = None) -> float | None:
        """Return a number above 0, or None if there is no value.

        Text is converted too: YAML reads 1e-4 as text, and every trainer converts it.
        """
        if self._is_open(value, key, name):
            return None
        try:
            number = 0.0 if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = 0.0
        if not 0 < number < LARGEST:
            raise self.fail(key, value, "a number above 0")
        return number

    def truth(self, value: Any, key: str, name: SettingName | None = None) -> bool | None:
        """Return a truth value, or None if there is no value."""
        if self._is_open(value, key, name):
            return None
        if isinstance(value, bool):
            return value
        raise self.fail(key, value, "true or false")

    def section(self, value: Any, key: str) -> dict[str, Any]:
        """Return a nested table. It is empty if it is missing."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, value, "a section with its own keys")
        return value

    def at(self, data: dict[str, Any], path: str) -> Any:
        """Return the value at a dotted path, or None if it is missing."""
        *outer, last = path.split(".")
        for depth, key in enumerate(outer):
            data = self.section(data.get(key), ".".join(outer[: depth + 1]))
        return data.get(last)

    def word(self, value: Any, key: str, choices: Iterable[str] | None = None) -> str | None:
        """Return a word, or None if there is no value.

        If `choices` are given, the word must be one of them.
        """
        if value is None:
            return None
        if choices is not None and value not in (allowed := list(choices)):
            raise self.fail(key, value, f"one of {', '.join(allowed)}")
        if not isinstance(value, str) or not value.strip():
            raise self.fail(key, value, "a word")
        return value

    def precisions_on(self, switches: Mapping[str, Any]) -> list[str]:
        """Return the precision switches (key -> value) that are on.

        A file states fp32 by turning both half precisions off. If one is off alone, a note says
        that the precision is not stated.

        Raises:
            UnreadableInput: If both half precisions are on.
        """
        states = {key: self.truth(value, key, "precision") for key, value in switches.items()}
        on, off = ([key for key in states if states[key] is state] for state in (True, False))
        fp16, bf16 = _half_precisions(on or off)
        both = bool(fp16 and bf16)
        if on and both:
            raise self.fail(fp16, True, f"false if {bf16} is true")
        if both:
            self.put("precision", "fp32", f"{fp16}, {bf16}")
        for key in [] if on or both else off:
            self.note(key, "off; the precision itself is not stated")
        return on

    def warn_unknown(
        self, keys: Iterable[str], known: Iterable[str], text: str, section: str = ""
    ) -> None:
        """Warn about each key that is not in `known`, and suggest the nearest known names."""
        allowed = set(known)
        unknown = [str(key)[:_LONGEST_NAME] for key in keys if key not in allowed]
        for i, key in enumerate(unknown):
            # The search is slow, so only the first unknown keys get suggestions.
            near = nearest_names(key, sorted(allowed), 2) if i < _MOST_SUGGESTIONS else []
            self.warn(section + key, text + (f"; nearest: {', '.join(near)}" if near else ""))

    def _is_open(self, value: Any, key: str, name: SettingName | None) -> bool:
        """Return True if the value is missing or "auto". "auto" adds a note."""
        auto = self.understands_auto and isinstance(value, str) and value == "auto"
        if auto:
            self.note(key, '"auto": another file or the run decides', leaves_open=name)
        return auto or value is None


def _half_precisions(keys: Iterable[str]) -> tuple[str, str]:
    """Return the first keys of fp16 and of bf16, or "" if there is none."""
    kinds = {"fp16" if "fp16" in key else "bf": key for key in keys if re.search("fp16|bf", key)}
    return kinds.get("fp16", ""), kinds.get("bf", "")


class Clash(Record):
    """Settings that contradict each other. `text` names each file and key.

    `repair` is empty if the files only need to agree.
    """

    name: str
    settings: tuple[Setting, ...]
    text: str
    repair: str = ""


class Combined(Record):
    """Settings on which all files agree, and the clashes between files."""

    files: tuple[str, ...]
    values: dict[str, Setting]
    clashes: tuple[Clash, ...]
    notes: tuple[Note, ...]


def combine(files: Sequence[ConfigFile]) -> Combined:
    """Cross-check files and return their settings.

    `values` has the settings on which all files that state them agree.
    """
    stated, overridden = _in_force(files)
    values, clashes = _agreeing(stated, {file.file for file in files if file.format == "DeepSpeed"})
    refused = list(_refused(files))
    clashes = refused + [c for c in clashes if c.name not in {clash.name for clash in refused}]
    given = _given(files)
    notes = [n for file in files for n in file.notes if (n.file, n.key) not in given] + overridden
    unsure = {clash.name for clash in clashes}
    unsure |= {note.leaves_open for note in notes if note.leaves_open}
    clashes += _Arithmetic(values, unsure).clashes()
    zero, sharding = values.get("zero_stage"), values.get("sharding")
    if zero and sharding and zero.value:
        text = f"ZeRO stage {_located(zero)} and FSDP ({_keys([sharding])}) are both on; use one."
        clashes.append(Clash(name="sharding", settings=(zero, sharding), text=text))
    if (gpus := values.get("gpus_per_node")) and not values.keys() & {
        "world_size",
        "nproc_per_node",
    }:
        values["nproc_per_node"] = replace(gpus, name="nproc_per_node")
        notes.append(
            Note(file=gpus.file, key=gpus.key, text=f"{gpus.key}: assumed one process per GPU")
        )
    return Combined(
        files=tuple(file.file for file in files),
        values=values,
        clashes=tuple(clashes),
        notes=(*notes, *_filled_in(notes, values)),
    )


def agreed(files: Sequence[ConfigFile]) -> Combined:
    """Cross-check files.

    Raises:
        Contradiction: If the files disagree. The message lists every clash.
    """
    combined = combine(files)
    refuse(combined.clashes)
    return combined


def refuse(clashes: Sequence[Clash]) -> None:
    """Raise Contradiction if there are clashes. The message lists all of them."""
    if clashes:
        start = "" if all(clash.repair for clash in clashes) else "the files contradict each other:"
        listed = "".join(f"\n- {clash.text}" for clash in clashes)
        alone = f"{start} {clashes[0].text}".lstrip()
        text = alone if len(clashes) == 1 else f"{start}{listed}"
        repairs = dict.fromkeys(
            clash.repair or "Make them agree, then ask again." for clash in clashes
        )
        raise Contradiction(text, " ".join(repairs))


def check_counts(values: Mapping[str, Setting]) -> None:
    """Check that ranks and sizes give the stated global batch.

    Without a stated number of processes, one is assumed.

    Raises:
        Contradiction: If they do not.
    """
    if not values.keys() & {"world_size", "nnodes", "nproc_per_node"}:
        one = Setting(name="world_size", value=1, file="assumed", key="no launcher starts more")
        values = {**values, "world_size": one}
    refuse(_Arithmetic(dict(values), set()).clashes())


def is_same_file(name: str, other: str) -> bool:
    """Return True if one path ends in the other: `ds.json` and `configs/ds.json`."""
    one, two = PurePath(name).parts, PurePath(other).parts
    shared = min(len(one), len(two))
    return shared > 0 and one[-shared:] == two[-shared:]


def _in_force(files: Sequence[ConfigFile]) -> tuple[list[Setting], list[Note]]:
    """Return the settings that apply, and a note for each value that another one overrides."""
    starts_processes = any(file.format == "Lightning CLI" for file in files)
    stated = [
        (file, setting)
        for file in files
        for setting in file.settings
        if not (starts_processes and setting.key == PYTHON)
    ]
    stronger = [setting for _, setting in stated if setting.over]
    applying, notes = [], []
    for file, setting in stated:
        by = next(
            (
                s
                for s in stronger
                if s.name == setting.name
                and (s.over == file.format or is_same_file(s.over, file.file))
            ),
            None,
        )
        if by is None:
            applying.append(setting)
        elif by.value != setting.value:
            text = f"{by.key}: {by.value} overrides {_located(setting)}"
            notes.append(Note(file=by.file, key=by.key, text=text))
    return applying, notes


def _refused(files: Sequence[ConfigFile]) -> Iterator[Clash]:
    """Yield a clash for each key that Lightning refuses in a DeepSpeed file, whatever its value.

    Source: Lightning 2.6, strategies/deepspeed.py.
    """
    if not any(file.format == "Lightning CLI" for file in files):
        return
    key = "gradient_accumulation_steps"
    for file in files:
        keys = {setting.key for setting in file.settings} | {note.key for note in file.notes}
        if file.format == "DeepSpeed" and key in keys:
            yield Clash(
                name="accumulation",
                settings=tuple(s for s in file.settings if s.key == key),
                text=f"Lightning does not start with {key} in {file.file}.",
                repair="Remove it: Lightning sets it from trainer.accumulate_grad_batches.",
            )


def _given(files: Sequence[ConfigFile]) -> set[tuple[str, str]]:
    """Return (file, key) for each key that names another of the files."""
    return {
        (file.file, key)
        for file in files
        for key, name in file.named
        if any(is_same_file(name, other.file) for other in files)
    }


def _agreeing(
    stated: Sequence[Setting], deepspeed: set[str]
) -> tuple[dict[str, Setting], list[Clash]]:
    """Return the settings on which all files agree, and a clash for each other setting."""
    by_name: dict[str, list[Setting]] = {}
    for setting in stated:
        by_name.setdefault(setting.name, []).append(setting)
    values: dict[str, Setting] = {}
    clashes = []
    for name, settings in by_name.items():
        if _agree(settings, deepspeed):
            values[name] = settings[0]
        else:
            statements = ", ".join(f"{s.value} in {s.file} ({s.key})" for s in settings)
            text = f"{name} is {statements}."
            clashes.append(Clash(name=name, settings=tuple(settings), text=text))
    return values, clashes


def _agree(settings: Sequence[Setting], deepspeed: set[str]) -> bool:
    different = {s.value for s in settings}
    if settings[0].name == "precision" and deepspeed & {s.file for s in settings}:
        different = {AUTOCAST_OF.get(str(value), value) for value in different}
    return len(different) == 1


def _filled_in(notes: list[Note], values: dict[str, Setting]) -> list[Note]:
    """Return a note for each setting that one file leaves open and another file states."""
    return [
        Note(file=note.file, key=note.key, text=f"{note.key}: assumed to be {_located(setting)}")
        for note in notes
        if (setting := values.get(note.leaves_open or ""))
        and (setting.file, setting.key) != (note.file, note.key)
    ]


class _Arithmetic:
    """Cross-check of counts: ranks (nodes x processes), and samples in a global batch.

    `unsure` has the settings that clash or have unknown values.
    """

    def __init__(self, values: dict[str, Setting], unsure: set[str]) -> None:
        self._values, self._unsure = values, unsure
        self._missing = unsure - values.keys()
        self._found: list[Clash] = []

    def clashes(self) -> list[Clash]:
        world, nodes, processes, gpus = map(
            self._values.get, ("world_size", "nnodes", "nproc_per_node", "gpus_per_node")
        )
        # A reader has already warned about GPUs that a single process leaves unused.
        checked = processes and processes.key != PYTHON
        if checked and processes and gpus and processes.value != gpus.value:
            text = (
                f"nproc_per_node {_located(processes)} differs from the GPUs reserved per node,"
                f" {_located(gpus)}."
            )
            self._add("nproc_per_node", text, processes, gpus)
        per_node = processes if "nproc_per_node" in self._unsure else processes or gpus
        if world and nodes and per_node and self._check_world(world, nodes, per_node):
            return self._found
        self._check_batch(self._ranks(world, nodes, processes))
        return self._found

    def _add(self, name: str, text: str, *settings: Setting) -> None:
        self._found.append(Clash(name=name, settings=settings, text=text))

    def _ranks(
        self, world: Setting | None, nodes: Setting | None, processes: Setting | None
    ) -> list[Setting]:
        """Return the settings whose product is the number of ranks. Empty if it is unknown."""
        if world:
            return [world]
        if not processes or self._missing & {"world_size", "nnodes"}:
            return []
        # By default, every launcher uses one node.
        return [processes, nodes] if nodes else [processes]

    def _check_world(self, world: Setting, nodes: Setting, per_node: Setting) -> bool:
        product = _product([nodes, per_node])
        if world.value != product:
            text = (
                f"world size {_located(world)} is not nnodes {_located(nodes)} x"
                f" {_located(per_node)} = {product}."
            )
            self._add("world_size", text, world, nodes, per_node)
        return world.value != product

    def _check_batch(self, used: list[Setting]) -> None:
        """Check that ranks and sizes give the stated global batch.

        `used` holds the settings whose product is the number of ranks.
        """
        if not used or self._missing & {"tp", "pp", "cp"}:
            return
        shards = self._present("tp", "pp", "cp")
        ranks, divisor = _product(used), _product(shards)
        if ranks % divisor:
            factors = " x ".join(_located(shard) for shard in shards)
            text = (
                f"world size {ranks} ({_keys(used)}) is not a multiple of tp x pp x cp = {divisor},"
                f" from {factors}."
            )
            self._add("world_size", text, *used, *shards)
            return
        sizes = self._present("global_batch", "micro_batch", "accumulation")
        if len(sizes) < 3:
            return
        total, micro, accumulation = sizes
        samples = _product([micro, accumulation]) * (ranks // divisor)
        if total.value != samples:
            text = (
                f"global_batch {_located(total)} is not micro_batch {_located(micro)} x"
                f" accumulation {_located(accumulation)} x data-parallel size {ranks // divisor}"
                f" ({_keys([*used, *shards])}) = {samples}."
            )
            text += f" Set {total.key} to {samples}"
            if divisor == 1 and "gpus_per_node" not in self._values:
                text += _agreeing_processes(int(total.value), _product([micro, accumulation]))
            text += "."
            self._add("global_batch", text, *sizes, *used, *shards)

    def _present(self, *names: str) -> list[Setting]:
        return [self._values[name] for name in names if name in self._values]


def _agreeing_processes(global_batch: int, per_rank: int) -> str:
    """Return a clause with the number of processes that gives the global batch, or ""."""
    n, rest = divmod(global_batch, per_rank)
    if rest:
        return ""
    return (
        f", or start {n} processes (torchrun --nproc-per-node {n}, deepspeed --num_gpus {n} or"
        f" accelerate launch --num_processes {n})"
    )


def _product(settings: Sequence[Setting]) -> int:
    return math.prod(int(setting.value) for setting in settings)


def _located(setting: Setting) -> str:
    return f"{setting.value} ({setting.file}, {setting.key})"


def _keys(settings: list[Setting]) -> str:
    return "; ".join(f"{s.file}, {s.key}" for s in settings)
