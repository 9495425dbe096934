"""Incomplete command lines: inference of a missing command, shell completion, and the greeting.

Without a command, a script runs `look`, a model `forecast`, a settings file `schedule` and a trace
`diagnose`. For shell completion, click runs the program at every key press through
`_TRAINPACE_COMPLETE`. Heavy imports are therefore inside functions. To enable completion:

    eval "$(_TRAINPACE_COMPLETE=bash_source trainpace)"      (zsh_source and fish_source likewise)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

from trainpace.core.errors import TrainpaceError, nearest_names

if TYPE_CHECKING:
    import click

LAUNCHERS = (
    "python",
    "python3",
    "torchrun",
    "accelerate",
    "deepspeed",
    "srun",
    "mpirun",
    "uv",
    "poetry",
    "pixi",
)
SETTINGS = (".json", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".slurm")

TRACES = (".json", ".gz", ".sqlite", ".nsys-rep", ".qdrep")


def meant(words: Sequence[str], verbs: Sequence[str]) -> list[str]:
    """Prepend the command that the arguments imply.

    Raises:
        TrainpaceError: No command fits. The message suggests the nearest names.
    """
    first, *rest = words
    program = os.path.basename(first)
    # Imported late: most command lines already name a command.
    from trainpace.workload import ModelSpec

    spec = ModelSpec.of(first)
    if spec.kind == "script" or program in LAUNCHERS or program.startswith("python3."):
        return ["look", *words]
    if spec.is_library or spec.runs_code or first in _built_in():
        return ["forecast", *words]
    if (first.endswith(TRACES) or os.path.isdir(first)) and _is_trace(first):
        return ["diagnose", *rest, first]
    if first.endswith(SETTINGS) and os.path.isfile(first):
        kind = _kind_of(first)
        return (
            ["schedule", "--config", *words]
            if kind == "settings"
            else ["forecast", kind + first, *rest]
        )
    if os.path.isfile(os.path.join(first, "command.json")):
        return ["watch", "--from", *words]
    near = nearest_names(first, [*verbs, *_built_in()], limit=4)
    suggestion = f"Nearest: {', '.join(near)}. " if near else ""
    raise TrainpaceError(
        f"{first!r} is not a command, a script or a model.",
        f"{suggestion}Try trainpace train.py, trainpace resnet50, or trainpace --help.",
    )


def names_a_script(words: Sequence[str]) -> bool:
    """Return True if a training script follows the options. They then belong to `look`."""
    return any(word.endswith(".py") and os.path.isfile(word) for word in words)


def place_last(words: Sequence[str]) -> list[str]:
    """Move the options of `diagnose` in front of the trace or recording folder.

    Option parsing stops at the first argument, because it could be a command to run.
    """
    verb, *rest = words
    place, *options = rest or [""]
    begins = bool(options) and options[0].startswith("-") and options[0] != "--"
    is_place = begins and (os.path.isdir(place) or (place.endswith(TRACES) and _is_trace(place)))
    return [verb, *options, place] if is_place else [*words]


def _kind_of(file: str) -> str:
    """Return the kind of a settings or model file.

    Returns:
        The model-spec prefix of a configuration file, "" for a saved workload, "settings" for other
            files.
    """
    if not file.endswith(".json"):
        return "settings"
    from trainpace.core.intake import read_json

    content = read_json(file)
    if not isinstance(content, dict):
        return "settings"
    if content.get("record") == "Workload":
        return ""
    if "_class_name" in content and "_diffusers_version" in content:
        return "diffusers:"
    return "transformers:" if "model_type" in content else "settings"


def _is_trace(place: str) -> bool:
    from trainpace.diagnose import is_trace

    return is_trace(place)


def _built_in() -> list[str]:
    from trainpace.workload import packaged_names

    return packaged_names()


VARIABLE = "_TRAINPACE_COMPLETE"


def complete(program: click.Group) -> None:
    """Print shell completions and exit. Prints nothing if the command line cannot be parsed."""
    try:
        program.main([], prog_name="trainpace", complete_var=VARIABLE)
    except TrainpaceError:
        sys.exit(0)


def verbs_and_scripts(verbs: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """Complete the first word: commands with summaries, models, and scripts in this folder."""
    items = [
        CompletionItem(verb, help=text)
        for verb, text in verbs.items()
        if verb.startswith(incomplete)
    ]
    models = _built_in() if incomplete else []
    return [
        *items,
        *(CompletionItem(name) for name in models if name.startswith(incomplete)),
        _place("file", incomplete),
    ]


def values(name: str, metavar: str | None, incomplete: str) -> list[CompletionItem]:
    """Complete the value of an option or argument with known names or a path."""
    names = _NAMES[name]() if name in _NAMES else []
    items = [CompletionItem(n) for n in names if n.lower().startswith(incomplete.lower())]
    word = (metavar or "").partition(".")[0]
    if name == "model" or word in ("FILE", "PATH", "PATH|URL"):
        items.append(_place("file", incomplete))
    elif word == "FOLDER":
        items.append(_place("dir", incomplete))
    return items


def _gpus() -> list[str]:
    from trainpace.core.hardware import catalogue

    # A name with spaces would complete to two words. The hyphenated name is accepted too.
    return [device.name.replace(" ", "-") for device in catalogue() if device.kind == "gpu"]


def _precisions() -> Sequence[str]:
    from trainpace.core.execution import PRECISIONS

    return [*PRECISIONS]


def _optimizers() -> Sequence[str]:
    from trainpace.core.execution import OPTIMIZERS

    return [*OPTIMIZERS]


def _place(kind: str, incomplete: str) -> CompletionItem:
    return CompletionItem(incomplete, type=kind)


_NAMES = {"gpu": _gpus, "model": _built_in, "precision": _precisions, "optimizer": _optimizers}
"""Options with known names, by name."""
EXAMPLES = (
    (
        "trainpace train.py --epochs 30",
        "How long will my script take here, what slows it down, what would it cost elsewhere?",
    ),
    (
        "trainpace resnet50 --batch 64",
        "How fast is this model on GPUs that I do not have? Also: a transformers config.json.",
    ),
    ("trainpace doctor", "Does this machine work as it should, and can it be measured?"),
)


def greet() -> None:
    from trainpace.report import Headline, Lines, named, show

    question = (
        "How long will this training take, what will it cost, why, and how do I make it faster?"
    )
    show([Headline(question), named("", EXAMPLES), Lines(["All commands: trainpace --help"])])
