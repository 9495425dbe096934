"""What a command line without a verb means: a script is looked at, a model forecast, a settings file summed up, a profiler's
trace diagnosed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainpace.core.errors import TrainpaceError, nearest_names

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
    """The words with the verb that they lack. Raises TrainpaceError, with the nearest names, where none fits."""
    first, *rest = words
    program = os.path.basename(first)
    from trainpace.workload import ModelSpec  # late: most commands name their verb

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
        f"{first!r} is no verb, no script and no model.",
        f"{suggestion}Try trainpace train.py, trainpace resnet50, or trainpace --help.",
    )


def names_a_script(words: Sequence[str]) -> bool:
    """Whether a training script stands behind options, which are then those of `look`."""
    return any(word.endswith(".py") and os.path.isfile(word) for word in words)


def place_last(words: Sequence[str]) -> list[str]:
    """Of `diagnose`, whose options end where a command begins: options behind a trace or a recording's folder come before it."""
    verb, *rest = words
    place, *options = rest or [""]
    begins = bool(options) and options[0].startswith("-") and options[0] != "--"
    is_place = begins and (os.path.isdir(place) or (place.endswith(TRACES) and _is_trace(place)))
    return [verb, *options, place] if is_place else [*words]


def _kind_of(file: str) -> str:
    """`transformers:` or `diffusers:` of a model's configuration, nothing of a saved workload, else `settings`."""
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
