"""Settings files in any known format. A format is added as a file in this room and a line in FORMATS."""

from collections.abc import Callable, Iterable
from typing import Any

from trainpace.configs.accelerate import is_accelerate, read_accelerate
from trainpace.configs.command import read_launch
from trainpace.configs.deepspeed import is_deepspeed, read_deepspeed
from trainpace.configs.editing import Syntax
from trainpace.configs.huggingface import is_training_arguments, read_training_arguments, sections_with_arguments
from trainpace.configs.launch import find_launch
from trainpace.configs.lightning import is_lightning, read_lightning
from trainpace.configs.parsing import LARGEST_FILE_BYTES, parse
from trainpace.configs.sbatch import is_sbatch, read_sbatch
from trainpace.configs.settings import ConfigFile, Reading
from trainpace.errors import UnreadableInput
from trainpace.records import read_text

FORMATS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], str], ConfigFile]], ...] = (
    (is_lightning, read_lightning),
    (is_deepspeed, read_deepspeed),
    (is_accelerate, read_accelerate),
    (is_training_arguments, read_training_arguments),
)
_SHELL = (".sh", ".bash", ".sbatch", ".slurm", ".cmd", ".txt")
_KNOWN = "Hugging Face TrainingArguments, DeepSpeed, Lightning CLI, accelerate, an sbatch script or a launch command"


def read_configs(paths: Iterable[str]) -> tuple[ConfigFile, ...]:
    return tuple(parse_config(read_text(path), path) for path in paths)


def syntax_of(text: str, file: str) -> Syntax | None:
    """None for shell scripts and commands."""
    text = text.removeprefix("\ufeff")
    if is_sbatch(text) or file.endswith(_SHELL) or text.startswith("#!"):
        return None
    return "json" if file.endswith(".json") or text.lstrip().startswith("{") else "yaml"


def parse_config(text: str, file: str) -> ConfigFile:
    """Settings in the text of one file, whose format is recognised from its name and content."""
    if len(text.encode("utf-8", "replace")) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, which no settings file is.")
    if "\x00" in text:
        raise UnreadableInput(f"{file} holds a NUL byte, so it is not a text file.")
    if not text.strip():
        raise UnreadableInput(f"{file} is empty.")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    syntax = syntax_of(text, file)
    if is_sbatch(text):
        return read_sbatch(text, file)
    if syntax is None:
        launch = find_launch(text, file)
        if launch is None:
            raise UnreadableInput(f"{file} holds no known launch command.", f"Known: {_KNOWN}.")
        return read_launch(launch, Reading(file, "launch command")).done()
    data = parse(text, file, syntax)
    if not isinstance(data, dict):
        raise UnreadableInput(f"{file} holds no keys and values, so it is not a settings file.", f"Known: {_KNOWN}.")
    for recognises, read in FORMATS:
        if recognises(data):
            return read(data, file)
    sections = sections_with_arguments(data)
    if len(sections) > 1:
        names = ", ".join(map(str, sections))
        raise UnreadableInput(f"{file} holds TrainingArguments under {names}.", "Give each as a file of its own.")
    if sections:
        return read_training_arguments(data[sections[0]], file, f"{sections[0]}.")
    raise UnreadableInput(f"{file} is in no known format of settings files.", f"Known: {_KNOWN}.")
