"""Launch commands: torchrun, python -m torch.distributed.run, accelerate launch, deepspeed.

Flags: torch 2.13's torch/distributed/run.py, accelerate 1.15's commands/launch.py, DeepSpeed 0.19's launcher/runner.py.
A launcher's own flags end at the first word that is neither a flag nor a flag's value: the script.
"""

import re
import shlex
from collections.abc import Set
from typing import Any, NamedTuple

from trainpace.configs.accelerate import PRECISION, put_dynamo
from trainpace.configs.huggingface import DISTINCTIVE, NAMES, put_training_arguments
from trainpace.configs.names import names
from trainpace.configs.parsing import LARGEST_FILE_BYTES
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName
from trainpace.errors import UnreadableInput


class Launcher(NamedTuple):
    """A launcher's flags: those that state settings, those without a value, and the others that take one."""

    reads: dict[str, SettingName]
    alone: frozenset[str]
    others: frozenset[str] | None = None  # None: too many to list


_TORCHRUN = Launcher(
    {"nnodes": "nnodes", "nproc-per-node": "nproc_per_node"},
    frozenset(names("torchrun", "flags_without_value")), frozenset(names("torchrun", "other_flags")),
)  # fmt: skip
_ACCELERATE = Launcher(
    {
        "num-processes": "world_size", "num-machines": "nnodes", "mixed-precision": "precision",
        "gradient-accumulation-steps": "accumulation", "zero-stage": "zero_stage",
        "parallelism-config-tp-size": "tp", "parallelism-config-cp-size": "cp",
        "fsdp-activation-checkpointing": "activation_checkpointing", "offload-optimizer-device": "offload_optimizer",
        "offload-param-device": "offload_parameters",
        "dynamo-backend": "compile", "use-fsdp": "sharding",
    },
    frozenset(names("accelerate_launch", "flags_without_value")),
)  # fmt: skip
_DEEPSPEED = Launcher(
    {
        "num-nodes": "nnodes", "num-gpus": "nproc_per_node", "num-accelerators": "nproc_per_node",
        "include": "nproc_per_node", "i": "nproc_per_node",
    },
    frozenset(names("deepspeed_launcher", "flags_without_value")), frozenset(names("deepspeed_launcher", "other_flags")),
)  # fmt: skip
LAUNCHERS = {
    "torchrun": _TORCHRUN, "torch.distributed.run": _TORCHRUN, "torch.distributed.launch": _TORCHRUN,
    "accelerate": _ACCELERATE, "deepspeed": _DEEPSPEED,
}  # fmt: skip
_SCRIPT_FLAGS = NAMES | DISTINCTIVE | {"deepspeed_config"}
_DEEPEST_SUBSTITUTION = 10
ENDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "2>", "2>&1", "&>", "<"))


def parse_command(command: str, file: str = "command") -> ConfigFile:
    """Settings of a launch command. Raises UnreadableInput for a text without a known launcher."""
    if len(command) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, which no launch command is.")
    reading = Reading(file, "launch command")
    if not read_launch(command, reading):
        launchers = "torchrun, python -m torch.distributed.run, accelerate launch, deepspeed"
        text = f"{file}: {command[:60]!r} is not a known launch command."
        raise UnreadableInput(text, f"Known: {launchers}.")
    return reading.done()


def has_launcher(line: str) -> bool:
    return re.search(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate\s+launch|deepspeed)\b", line) is not None


def read_launch(text: str, reading: Reading) -> str | None:
    """Record the settings of the first launch command in `text`; returns the launcher's name, None where there is none."""
    words = split_words(text, reading.file)
    names = [word.rpartition("/")[2] for word in words]
    at = next((i for i, name in enumerate(names) if starts_at(names, i, name)), None)
    if at is None:
        return None
    name = names[at]
    words = words[at + (2 if name == "accelerate" else 1) :]
    end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
    launcher, script = _split_at_script(words[:end], LAUNCHERS[name], reading)
    _put_launcher(launcher, LAUNCHERS[name], reading)
    _put_script(script, reading)
    _note_what_is_missing(LAUNCHERS[name], dict(launcher).keys(), reading)
    return name


def _note_what_is_missing(launcher: Launcher, stated: Set[str], reading: Reading) -> None:
    if launcher is _TORCHRUN and "nproc-per-node" not in stated:
        reading.note("--nproc-per-node", "not stated; torchrun would start 1 process a node")
    elif launcher is _ACCELERATE and "num-processes" not in stated:
        text = "not stated; accelerate takes it from its configuration file, or every GPU it finds"
        reading.note("--num_processes", text, leaves_open="world_size")
    elif launcher is _DEEPSPEED and not stated & launcher.reads.keys() - {"num-nodes"}:
        text = "not stated; DeepSpeed would take every GPU it finds"
        reading.note("--num_gpus", text, leaves_open="nproc_per_node")


def split_words(text: str, file: str) -> list[str]:
    """The words that a shell would split `text` into; a substitution that only the shell can resolve stays one word with a $."""
    text = re.sub(r"\\\r?\n", " ", text)
    for _ in range(_DEEPEST_SUBSTITUTION):
        text, substitutions = re.subn(r"\$\([^()]*\)|`[^`]*`", "${command}", text)
        if not substitutions:
            break
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UnreadableInput(f"{file}: the command cannot be split into words: {str(error).lower()}.") from None
    return [part for word in words for part in ((word[:-1], ";") if word[-1:] == ";" and word != ";" else (word,))]


def starts_at(names: list[str], i: int, name: str) -> bool:
    if name == "accelerate":
        return names[i + 1 : i + 2] == ["launch"]
    if name.startswith("torch.distributed."):
        return name in LAUNCHERS and names[i - 1 : i] == ["-m"]
    return name in LAUNCHERS


def _split_at_script(
    words: list[str], launcher: Launcher, reading: Reading
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """The launcher's flags with their values, and the words from the script on."""
    flags: list[tuple[str, str | None]] = []
    i = 0
    while i < len(words):
        word = words[i]
        if not word.startswith("-") or word == "-":
            return flags, words[i:]
        i += 1
        key, has_value, value = word.lstrip("-").partition("=")
        key = key.replace("_", "-")
        if has_value:
            flags.append((key, value))
        elif key in launcher.alone:
            flags.append((key, None))
        elif i < len(words) and not re.match(r"-{1,2}[A-Za-z]", words[i]):
            flags.append((key, words[i]))
            i += 1
        else:
            raise UnreadableInput(f"{reading.file}: {word} has no value.")
    return flags, []


def _put_launcher(flags: list[tuple[str, str | None]], launcher: Launcher, reading: Reading) -> None:
    seen: dict[str, str | None] = {}
    for key, value in flags:
        dashes = "--" if len(key) > 1 else "-"
        if key in seen and seen[key] != value:
            raise UnreadableInput(f"{reading.file}: {dashes}{key} is given twice, as {seen[key]} and {value}.")
        if key == "dynamo-backend" and ("use-deepspeed", None) in flags:
            reading.note(dashes + key, "without effect: accelerate does not pass it on where it starts DeepSpeed")
        elif key in launcher.reads and key not in seen:
            _put(reading, launcher.reads[key], value, dashes + key)
        seen[key] = value
    if launcher.others is not None:
        flag_names = launcher.reads.keys() | launcher.alone | launcher.others
        reading.flag_unknown(seen, flag_names, "not a flag of this launcher", "--")
    for key in ("config-file", "deepspeed-config-file"):
        if seen.get(key):
            reading.note(f"--{key}", f"{seen[key]} is a file of its own; read it too")


def _put(reading: Reading, name: SettingName, value: str | None, key: str) -> None:
    if value is None:  # of the flags that are read, only --use-fsdp stands alone
        reading.put("sharding", "fsdp", key)
    elif "$" in value:
        reading.note(key, f"{value} is known only when it runs", leaves_open=name)
    elif name == "nnodes" and (span := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)):
        low, high = span.groups()
        if low == high:
            reading.count(name, int(low), key)
        else:
            text = f"{value} is elastic, {low} to {high} nodes: the number is not known here"
            reading.note(key, text, leaves_open=name)
    elif name == "nproc_per_node" and value in ("gpu", "cpu", "auto", "xpu"):
        reading.note(key, f"{value}: as many as the machine has, which is not known here", leaves_open=name)
    elif key in ("--include", "-i"):
        _put_include(reading, value, key)
    elif name == "precision":
        reading.put(name, PRECISION[reading.word(value.casefold(), key, PRECISION) or "no"], key)
    elif name == "activation_checkpointing":
        reading.put(name, reading.word(value.casefold(), key, ("true", "false")) == "true", key)
    elif name in ("offload_optimizer", "offload_parameters"):
        reading.put(name, reading.word(value, key, ("none", "cpu", "nvme")) != "none", key)
    elif name == "compile":
        put_dynamo(reading, value, key)
    elif not re.fullmatch(r"[0-9]{1,15}", value):
        raise reading.fail(key, value, "a whole number")
    elif name == "zero_stage":
        reading.count(name, int(value), key, least=0, most=3)
    else:
        reading.count(name, int(value), key)


def _put_include(reading: Reading, value: str, key: str) -> None:
    """Read the GPU indices of every node from DeepSpeed's `host:0,1,2@other:0,1,2`."""
    slots = [node.partition(":")[2] for node in value.split("@")]
    counts = {len(indices.split(",")) for indices in slots if indices}
    if "" not in slots and len(counts) == 1:
        reading.put("nproc_per_node", counts.pop(), key)
        reading.put("nnodes", len(slots), key)
    else:
        text = f"{value}: not the same number of GPUs on every node, or all of them"
        reading.note(key, text, leaves_open="nproc_per_node")


def _put_script(words: list[str], reading: Reading) -> None:
    """Read Hugging Face's arguments among the script's flags: `--flag value`, `--flag=value` or `--flag`."""
    arguments: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        key, has_value, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not key.startswith("--") or name not in _SCRIPT_FLAGS:
            continue
        if name in ("deepspeed", "deepspeed_config"):
            file = value or following
            if file.endswith(".json"):
                reading.note(key, f"{file} is a file of its own; read it too")
            continue
        alone = not has_value and re.match(r"-{1,2}[A-Za-z]|-{2}$", following) is not None
        text = value if has_value else following
        if "$" in text and not alone:
            reading.note(key, f"{text} is known only when it runs")
            continue
        read = True if alone else _scalar(text)
        if name in arguments and arguments[name] != read:
            raise UnreadableInput(f"{reading.file}: {key} is given twice, as {arguments[name]} and {read}.")
        arguments[name] = read
    if arguments.keys() & (DISTINCTIVE | {"max_steps"}):
        put_training_arguments(reading, arguments, "--")


def _scalar(text: str) -> Any:
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
