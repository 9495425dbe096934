"""Project defaults from `trainpace.toml`, or from `[tool.trainpace]` in `pyproject.toml`.

    gpu = ["A100", "H100"]      # for every verb that has the option
    epochs = 90

    [plan]                      # for one verb
    num_gpus = 4

The file is not trusted, because it may come with a cloned repository. It can only set the options
in `SETTABLE`: numbers, names of hardware and settings, and files in its own folder that are read as
data. It cannot set code to run, files to write, servers to contact, or flags (the command line
could not unset a flag).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.intake import read_bytes, toml_of
from trainpace.verbs import SUMMARIES
from trainpace.verbs.request import Argument, ResolvedField, inapplicable, rivals_of

FILE = "trainpace.toml"
PYPROJECT, TABLE = "pyproject.toml", "trainpace"
MOST_BYTES = 1 << 20
ROOTS = (".git", ".hg")
FILES = frozenset("cluster hardware journal machines".split())
"""Settable options that are files. These files must be inside the project."""
SETTABLE = FILES | frozenset(
    "accumulate attention batch budget by checkpoint_every checkpoint_time cp data_gb deadline"
    " device download epochs evaluate_every evaluation_samples evaluation_time evidence"
    " global_batch gpu gpus_now host image_size max_nodes max_steps micro_batch mtbf network nnodes"
    " nodes nodes_now nproc_per_node num_gpus offload optimizer pp precision preempted_every price"
    " provider region restart_time sample_bytes samples sequence_length software startup"
    " step_variation timeout tokens top tp zero".split()
)
ONLY_JOURNAL = ("journal", "serve")
"""Verbs that use only the journal from the file. Their other options select runs or open a port.
"""
CONSULT_JOURNAL = ("forecast", "match", "plan")
MOST_VALUES = 100
SHOWN = 40
"""Maximum length of a value in the message about defaults."""


class Found(NamedTuple):
    """A settings file and its values. `name` is its path relative to the current folder."""

    name: str
    folder: Path
    values: Mapping[str, Any]


class ProjectDefaults(NamedTuple):
    """Default values by field, and a line that reports them. The line is "" without defaults."""

    values: Mapping[str, Any]
    message: str = ""


def defaults_for(
    path: Sequence[str], fields: Mapping[str, ResolvedField], given: Mapping[str, Any]
) -> ProjectDefaults:
    """Return the defaults from the project's file that apply to a command.

    Args:
        path: The command, such as ("journal", "list").
        fields: Fields of its request by name.
        given: Values from the command line. They take precedence.

    Raises:
        UnknownName: A key is not an option.
        TrainpaceError: The file must not set a key, or its value is not valid.
    """
    try:
        found = find(Path.cwd())
    except FileNotFoundError:  # The current folder was removed.
        return ProjectDefaults({})
    if found is None:
        return ProjectDefaults({})
    verb = path[0]
    for_all, for_verb = _checked(found, verb, fields)
    # The verb's own table takes precedence over the keys for all verbs.
    rivals = rivals_of(fields, for_verb)
    usable = {*_settable(verb, fields)} - given.keys()
    candidates = {name: for_all[name] for name in for_all if name in usable - rivals}
    candidates |= {name: for_verb[name] for name in for_verb if name in usable}
    if not _journal_applies(found, verb, candidates):
        candidates.pop("journal", None)

    def value_of(name: str) -> Any:
        return _value(found, name, fields[name], candidates[name], name in for_verb, verb)

    parsed = dict(candidates)
    for name in candidates:
        with contextlib.suppress(TrainpaceError):  # Errors are raised below if the default applies.
            parsed[name] = value_of(name)
    dropped = inapplicable(fields, given, parsed)
    values = {name: value_of(name) for name in candidates if name not in dropped}
    shown = " ".join(_shown(fields[name], candidates[name]) for name in values)
    return ProjectDefaults(values, f"Defaults from {found.name}: {shown}" if values else "")


def _journal_applies(found: Found, verb: str, candidates: Mapping[str, Any]) -> bool:
    """Return True if the project's journal should be used.

    The user's own environment variable takes precedence. Commands that only consult the journal use
    it once it exists.
    """
    if os.environ.get("TRAINPACE_JOURNAL"):
        return False
    file = found.folder / str(candidates.get("journal", ""))
    return verb not in CONSULT_JOURNAL or os.path.exists(file)


def find(folder: Path) -> Found | None:
    """Find the nearest settings file between `folder` and the root of its repository.

    Outside a repository only `folder` is searched.
    """
    parents = [folder, *folder.parents]
    root = next((p for p in parents if any(os.path.exists(p / name) for name in ROOTS)), folder)
    for place in parents[: parents.index(root) + 1]:
        own = place / FILE
        if os.path.lexists(own):
            name = os.path.relpath(own, folder)
            return Found(name, place, toml_of(read_bytes(own, MOST_BYTES), name))
        beside = place / PYPROJECT
        if os.path.isfile(beside):
            name = os.path.relpath(beside, folder)
            with contextlib.suppress(
                TrainpaceError
            ):  # Other tools report an unreadable pyproject.toml.
                text = read_bytes(beside, MOST_BYTES)
                table = toml_of(text, name).get("tool", {}) if b"tool.trainpace" in text else {}
                if isinstance(table, dict) and isinstance(table.get(TABLE), dict):
                    return Found(f"{name}, [tool.{TABLE}]", place, table[TABLE])
    return None


def _checked(
    found: Found, verb: str, fields: Mapping[str, ResolvedField]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (values for all verbs, values for this verb)."""
    for_all: dict[str, Any] = {}
    for_verb: dict[str, Any] = {}
    for key, value in found.values.items():
        if not isinstance(value, dict):
            for_all[_name(found, key, known=fields)] = value
            continue
        if key not in SUMMARIES:
            raise UnknownName(
                "table", key, SUMMARIES, f"Tables in {found.name} are named after commands."
            )
        own = {_name(found, inner, known=None): one for inner, one in value.items()}
        if key == verb:
            for_verb = own
    settable = _settable(verb, fields)
    for name in for_verb:
        if name not in settable:
            raise UnknownName("key", name, settable, f"It is in {found.name} under [{verb}].")
    return for_all, for_verb


def _settable(verb: str, fields: Mapping[str, ResolvedField]) -> list[str]:
    allowed = ("journal",) if verb in ONLY_JOURNAL else SETTABLE
    return [name for name in fields if name in allowed]


def _name(found: Found, key: str, known: Mapping[str, ResolvedField] | None) -> str:
    name = key.replace("-", "_")
    if name in SETTABLE:
        return name
    if name in REFUSED or (known and name in known and isinstance(known[name].about, Argument)):
        raise TrainpaceError(
            f"{found.name} must not set {key!r}.",
            "Give code to run, files to write, servers and flags on the command line.",
        )
    raise UnknownName(
        "key",
        key,
        [*SETTABLE, *SUMMARIES],
        f"It is in {found.name}; docs/defaults.md lists the possible keys.",
    )


REFUSED = frozenset(
    "model task target command config ladder runs code run_code precompute compare html figure"
    " share output out save_workload markdown trace traces svg new write yes json storage suite"
    " sbatch launcher partition account name port no_journal watched recorded from baseline lengths"
    " calibrated transfer_from noise_scale refresh models".split()
)
"""Options that a file must not set. They have their own error message.
"""


def _value(found: Found, name: str, field: ResolvedField, value: Any, own: bool, verb: str) -> Any:
    try:
        hint = "" if own else f"Set one for {verb} under [{verb}]."
        _check_plain(field, value, verb, hint)
        return field.read(_file_in(found, str(value)) if name in FILES else value)
    except TrainpaceError as error:
        raise TrainpaceError(f"{found.name}, {name}: {error.message}", error.hint) from None


def _check_plain(field: ResolvedField, value: Any, verb: str, hint: str) -> None:
    """Raise TrainpaceError unless the value is text, a number, or a list if the option takes one.

    `hint` says how to give one value to a verb whose option takes no list.
    """
    unit, option = field.about.unit, f"--{field.option}"
    if field.is_flag or isinstance(value, bool):
        raise TrainpaceError(f"{value!r} is not a value of {option}.")
    if isinstance(value, list) and not field.several and not (unit and unit.is_list):
        raise TrainpaceError(f"trainpace {verb} takes one {option}, not a list.", hint)
    several = value if isinstance(value, list) else [value]
    if len(several) > MOST_VALUES:
        raise TrainpaceError(f"{option} has more than {MOST_VALUES} values.")
    kind, words = (str | int | float, "plain values")
    if field.kind is str and unit is None:
        kind, words = (str, "text in quotation marks")
    if not all(isinstance(one, kind) for one in several):
        raise TrainpaceError(f"{option} takes {words}.")


def _file_in(found: Found, value: str) -> str:
    """Return the path of a project file relative to the current folder.

    Raises:
        TrainpaceError: The file is outside the project.
    """
    if "://" in value:
        raise TrainpaceError(
            "A project file cannot name a server.",
            "Set $TRAINPACE_JOURNAL to its URL, or give --journal URL.",
        )
    try:
        folder, file = os.path.realpath(found.folder), os.path.realpath(found.folder / value)
        inside = os.path.commonpath([folder, file]) == folder
    except ValueError as error:  # The path contains a NUL byte.
        raise TrainpaceError(f"{value!r} is not a path ({error}).") from None
    if not inside:
        raise TrainpaceError(
            f"{value} is outside the folder of {found.name}.", "Give it on the command line."
        )
    return os.path.relpath(file)


def _shown(field: ResolvedField, value: Any) -> str:
    """Format an option and its values as on a command line."""
    several = value if isinstance(value, list) and field.several else [value]
    return " ".join(f"--{field.option} {_short(one)}" for one in several)


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    return f"'{text}'" if " " in text else text
