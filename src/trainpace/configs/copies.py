"""Copies of settings files for a trial, and of the command that reads them.

Outputs go into the trial's folder. If a file names another settings file, its copy names the other
file's copy.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.configs.files import Written, parse_config, syntax_of
from trainpace.configs.huggingface import prefix_of
from trainpace.configs.settings import Value
from trainpace.configs.shell import parse_command
from trainpace.configs.syntax import ENDS, TORCHRUN, Path, find_launch, is_open, parse, set_key
from trainpace.core.errors import TrainpaceError, UnreadableInput

OUT = "{out}"
"""Placeholder in a command for the trial's output folder."""
_OUTPUT_FLAGS = ("output_dir", "logging_dir", "trainer.default_root_dir")
_SHELL_ONLY = ("bash", "sh", "zsh", "sbatch", "salloc", "ssh", "docker", "nohup")


class Command(NamedTuple):
    """Words of a command, and the environment variables that are assigned before it."""

    words: tuple[str, ...]
    environment: dict[str, str]


def split_command(text: str) -> Command:
    """Split a command into words and leading variable assignments.

    Raises:
        TrainpaceError: If the command needs a shell or starts another command.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TrainpaceError(
            f"the command cannot be split into words: {str(error).lower()}."
        ) from None
    environment = {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise TrainpaceError(
            "the command is empty.", "Give the whole command: torchrun train.py ARGUMENTS"
        )
    shell = next((w for w in words if w in ENDS or is_open(w)), None)
    if shell is not None:
        raise TrainpaceError(
            f"the command has {shell!r}, which needs a shell.", "Give the one command that trains."
        )
    if os.path.basename(words[0]) in _SHELL_ONLY:
        raise TrainpaceError(
            f"{words[0]} hides the command that trains.",
            "Give that command: python, torchrun, accelerate launch or deepspeed.",
        )
    return Command(tuple(words), environment)


def has_settings(command: str) -> bool:
    """Return True if the command starts with a launcher whose flags can be read and written."""
    try:
        parse_command(command)
        return launcher_of(command) != ""
    except UnreadableInput:
        return False


def launcher_of(command: str) -> str:
    """Return the launcher that a command starts with: torchrun, accelerate, deepspeed or "".

    Other names of torchrun also give "torchrun".
    """
    found = find_launch(command, "command")
    return "" if found is None else "torchrun" if found.launcher is TORCHRUN else found.name


def with_own_keys(files: Sequence[Written], values: Mapping[str, Any]) -> tuple[Written, ...]:
    """Set keys that only the script understands, with dots between sections (data.shards).

    Raises:
        TrainpaceError: If no file has the key, or several files have it.
    """
    texts = {written.file: written.text for written in files}
    for key, value in values.items():
        path = tuple(key.split("."))
        having = [file for file, text in texts.items() if _has(text, file, path)]
        if not having:
            raise TrainpaceError(
                f"none of the script's settings files has the key {key}, which a rung sets.",
                "Add it to one file, with its current value (null for none).",
            )
        if len(having) > 1:
            raise TrainpaceError(
                f"{' and '.join(having)} both have the key {key}, which a rung sets.",
                "Keep it in one file.",
            )
        (file,) = having
        syntax = syntax_of(texts[file], file)
        assert syntax is not None
        texts[file] = set_key(texts[file], file, syntax, path, value)
    return tuple(replace(written, text=texts[written.file]) for written in files)


def _has(text: str, file: str, path: Path) -> bool:
    syntax = syntax_of(text, file)
    data = None if syntax is None else parse(text, file, syntax)
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True


def copied_command(
    words: tuple[str, ...], copies: Mapping[str, str], folder: str, output: str
) -> tuple[str, ...]:
    """Return the command with the copies of its settings files and with `output` as output folder.

    File names are relative to `folder`.
    """
    copied = []
    is_output = False
    for word in words:
        flag, equals, value = _flag_and_value(word)
        takes_output = (flag or word).lstrip("-").replace("-", "_") in _OUTPUT_FLAGS
        copied_value = _copy_of(value, copies, folder) or value.replace(OUT, output)
        value = output if is_output or (equals and takes_output) else copied_value
        is_output = word.startswith("--") and not equals and takes_output
        copied.append(f"{flag}{equals}{value}")
    return tuple(copied)


def copied_text(text: str, file: str, copies: Mapping[str, str], folder: str, output: str) -> str:
    """Return a settings file's text with the same replacements as in `copied_command`.

    Resuming from a checkpoint and pushing to a hub are switched off.
    """
    kind, syntax = parse_config(text, file).format, syntax_of(text, file)
    if syntax is None:
        raise TrainpaceError(
            f"{file} is a shell script, which trials do not run.",
            "Give its command with --command.",
        )
    data = parse(text, file, syntax)
    changes: dict[Path, Value] = {
        path: copy
        for path, value in _leaves(data)
        if isinstance(value, str) and (copy := _copy_of(value, copies, folder))
    }
    for path, value in (changes | _outputs(kind, data, output)).items():
        text = set_key(text, file, syntax, path, value)
    return text


def _outputs(kind: str, data: dict[str, Any], output: str) -> dict[Path, Value]:
    """Return the keys for a trainer's output folders, with `output` as their value."""
    if kind == "Lightning CLI":
        return {("trainer", "default_root_dir"): output}
    if kind == "DeepSpeed":
        monitors = ("tensorboard", "csv_monitor")
        return {(key, "output_path"): output for key in monitors if isinstance(data.get(key), dict)}
    if kind != "Hugging Face TrainingArguments":
        return {}
    prefix = prefix_of(data)
    arguments = data[prefix[0]] if prefix else data
    replaced: dict[str, Value] = {
        "logging_dir": output,
        "resume_from_checkpoint": False,
        "push_to_hub": False,
    }
    stated = {(*prefix, key): value for key, value in replaced.items() if arguments.get(key)}
    return {(*prefix, "output_dir"): output} | stated


def names_file(texts: Mapping[str, str], words: tuple[str, ...], file: str, folder: str) -> bool:
    """Return True if the command or another settings file names this file.

    If nothing names a file, no program would read its copy.
    """
    values = [_flag_and_value(word)[2] for word in words]
    for other, text in texts.items():
        syntax = syntax_of(text, other)
        if other != file and syntax is not None:
            leaves = _leaves(parse(text, other, syntax))
            values += [value for _, value in leaves if isinstance(value, str)]
    return any(_copy_of(value, {file: "a copy"}, folder) for value in values)


def _flag_and_value(word: str) -> tuple[str, str, str]:
    """Split --flag=value into "--flag", "=" and "value". Other words become ("", "", word)."""
    return word.partition("=") if word.startswith("-") and "=" in word else ("", "", word)


def _copy_of(value: str, copies: Mapping[str, str], folder: str) -> str:
    """Return the copy of the file that a value names, or ""."""
    whole = os.path.normpath(os.path.join(folder, value)) if value else ""
    return next(
        (
            copy
            for file, copy in copies.items()
            if os.path.normpath(os.path.join(folder, file)) == whole
        ),
        "",
    )


def _leaves(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            if isinstance(key, str):
                yield from _leaves(value, (*path, key))
    else:
        yield path, data
