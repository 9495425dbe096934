"""Settings files in any known format. A format is added as a file in this room and a line in FORMATS."""

from collections.abc import Callable, Iterable
from typing import Any

from trainpace.configs.accelerate import is_accelerate, read_accelerate
from trainpace.configs.command import has_launcher, read_launch
from trainpace.configs.deepspeed import is_deepspeed, read_deepspeed
from trainpace.configs.huggingface import is_training_arguments, read_training_arguments
from trainpace.configs.lightning import is_lightning, read_lightning
from trainpace.configs.parsing import LARGEST_FILE_BYTES, parse_json, parse_yaml
from trainpace.configs.reading import Reading
from trainpace.configs.sbatch import is_sbatch, read_sbatch
from trainpace.configs.settings import ConfigFile
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


def parse_config(text: str, file: str) -> ConfigFile:
    """Settings in the text of one file, whose format is recognised from its name and content."""
    if len(text.encode("utf-8", "replace")) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, which no settings file is.")
    if "\x00" in text:
        raise UnreadableInput(f"{file} holds a NUL byte, so it is not a text file.")
    if not text.strip():
        raise UnreadableInput(f"{file} is empty.")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if is_sbatch(text):
        return read_sbatch(text, file)
    if file.endswith(_SHELL) or text.startswith("#!"):
        return _launch_in(text, file)
    data = parse_json(text, file) if file.endswith(".json") or text.lstrip().startswith("{") else parse_yaml(text, file)
    if not isinstance(data, dict):
        raise UnreadableInput(f"{file} holds no keys and values, so it is not a settings file.", f"Known: {_KNOWN}.")
    for recognises, read in FORMATS:
        if recognises(data):
            return read(data, file)
    sections = {key: part for key, part in data.items() if isinstance(part, dict) and is_training_arguments(part)}
    if len(sections) > 1:
        names = ", ".join(map(str, sections))
        raise UnreadableInput(f"{file} holds TrainingArguments under {names}.", "Give each as a file of its own.")
    for key, part in sections.items():  # a key of the user's own, such as `training:`
        return read_training_arguments(part, file, f"{key}.")
    raise UnreadableInput(f"{file} is in no known format of settings files.", f"Known: {_KNOWN}.")


def _launch_in(text: str, file: str) -> ConfigFile:
    for line in text.replace("\\\n", " ").splitlines():
        reading = Reading(file, "launch command")
        if not line.lstrip().startswith("#") and has_launcher(line) and read_launch(line, reading):
            return reading.done()
    raise UnreadableInput(f"{file} holds no known launch command.", f"Known: {_KNOWN}.")
