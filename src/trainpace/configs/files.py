"""Reader, rewriter and generator for settings files in all known formats.

A rewritten file must read back with the intended values. If it does not, the change is not made. A
new format needs a module in this package and a line in FORMATS. It also needs a line in WRITERS if
changes can be written into it.
"""

import ast
import contextlib
import copy
import difflib
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainpace.configs import accelerate, huggingface, lightning
from trainpace.configs.accelerate import is_accelerate, read_accelerate, write_accelerate
from trainpace.configs.changes import (
    BATCH,
    DERIVED,
    ELSEWHERE,
    GROUPS,
    UNWRITTEN,
    Changes,
    Draft,
    normal,
)
from trainpace.configs.deepspeed import is_deepspeed, read_deepspeed, write_deepspeed
from trainpace.configs.huggingface import DISTINCTIVE, is_training_arguments
from trainpace.configs.lightning import TRAINER, is_lightning, read_lightning, write_lightning
from trainpace.configs.settings import (
    AUTOCAST_OF,
    ConfigFile,
    Note,
    Reading,
    Setting,
    Value,
    is_same_file,
)
from trainpace.configs.shell import (
    is_sbatch,
    parse_command,
    read_launch,
    read_sbatch,
    write_command,
    write_sbatch,
)
from trainpace.configs.syntax import (
    LARGEST_FILE_BYTES,
    Syntax,
    checked,
    find_launch,
    find_python,
    parse,
    resolved,
)
from trainpace.core.errors import TrainpaceError, UnreadableInput, os_reason
from trainpace.core.execution import Execution
from trainpace.core.intake import read_bytes, read_text
from trainpace.core.records import Record, written_aside

FORMATS: tuple[
    tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], str], ConfigFile]], ...
] = (
    (is_lightning, read_lightning),
    (is_deepspeed, read_deepspeed),
    (is_accelerate, read_accelerate),
    (huggingface.is_training_arguments, huggingface.read_training_arguments),
)
"""Recognizer and reader of each format of parsed JSON or YAML. The first match counts."""
_SHELL = (".sh", ".bash", ".sbatch", ".slurm", ".cmd", ".txt")
_KNOWN = (
    "Hugging Face TrainingArguments, DeepSpeed, Lightning CLI, accelerate, an sbatch script, a"
    " launch command, or Python code with arguments of these"
)


def read_configs(paths: Iterable[str], command: str | None = None) -> tuple[ConfigFile, ...]:
    """Read settings files from disk, a launch command, and the settings files that they name."""
    files = [parse_config(read_text(path), path) for path in paths]
    files += [parse_command(command)] if command else []
    for file in files:  # The list grows.
        for key, name in file.named:
            given = any(is_same_file(name, other.file) for other in files)
            found = None if given else _named_file(file.file, name)
            if found is not None:
                text = f"read too; {file.file} names it ({key})"
                note = Note(file=found.file, key=found.file, text=text)
                files.append(replace(found, notes=(note, *found.notes)))
    return tuple(files)


def _named_file(by: str, name: str) -> ConfigFile | None:
    """Read a settings file that another file names, or return None if it is not there."""
    for path in dict.fromkeys((os.path.join(os.path.dirname(by), name), name)):
        if os.path.isfile(path):
            with contextlib.suppress(TrainpaceError):
                return parse_config(read_text(path), path)
    return None


def syntax_of(text: str, file: str) -> Syntax | None:
    """Return "json" or "yaml", or None for shell scripts, commands and Python code."""
    text = text.removeprefix("\ufeff")
    if is_sbatch(text) or is_python(file) or file.endswith(_SHELL) or text.startswith("#!"):
        return None
    return "json" if file.endswith(".json") or text.lstrip().startswith("{") else "yaml"


def parse_config(text: str, file: str) -> ConfigFile:
    """Read the text of one settings file. Its format is recognized from its name and content.

    Raises:
        UnreadableInput: If the file is too large, empty, damaged or of an unknown format.
    """
    if len(text.encode("utf-8", "replace")) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, so it is not a settings file.")
    if "\x00" in text:
        raise UnreadableInput(f"{file} contains a NUL byte, so it is not a text file.")
    if not text.strip():
        raise UnreadableInput(f"{file} is empty.")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    syntax = syntax_of(text, file)
    if is_sbatch(text):
        return read_sbatch(text, file)
    if is_python(file):
        data, unread = _read_python(text, file)
        read = _in_known_format(data, file)
        return replace(read, notes=(*read.notes, *unread))
    if syntax is None:
        text = resolved(text)
        launch = find_launch(text, file) or find_python(text)
        if launch is None:
            raise UnreadableInput(f"{file} contains no known launch command.", f"Known: {_KNOWN}.")
        return read_launch(launch, Reading(file, "launch command")).done()
    data = parse(text, file, syntax)
    if not isinstance(data, dict):
        raise UnreadableInput(
            f"{file} contains no keys and values, so it is not a settings file.",
            f"Known: {_KNOWN}.",
        )
    return _in_known_format(data, file)


def _in_known_format(data: dict[str, Any], file: str) -> ConfigFile:
    """Read a parsed file in the first format that recognizes it."""
    for recognises, read in FORMATS:
        if recognises(data):
            return read(data, file)
    sections = huggingface.sections_with_arguments(data)
    if len(sections) > 1:
        names = ", ".join(map(str, sections))
        raise UnreadableInput(
            f"{file} contains several TrainingArguments, under {names}.",
            "Put each in a separate file.",
        )
    if sections:
        return huggingface.read_training_arguments(data[sections[0]], file, f"{sections[0]}.")
    raise UnreadableInput(f"{file}: unknown format of settings file.", f"Known: {_KNOWN}.")


WRITERS: dict[str, Callable[[Draft], None]] = {
    "Hugging Face TrainingArguments": huggingface.write_training_arguments,
    "DeepSpeed": write_deepspeed,
    "Lightning CLI": write_lightning,
    "accelerate": write_accelerate,
    "Slurm batch script": write_sbatch,
    "launch command": write_command,
}
"""Writers of the formats. A setting that no file contains is offered to them in this order."""
_COMPARED = frozenset(("micro_batch", "accumulation", "precision"))
"""Settings that Hugging Face's Trainer compares with DeepSpeed's file.

If its own file does not state such a setting, the Trainer compares its default.
"""
BY_HAND = "it cannot be changed here without changing something else: set it by hand"
PYTHON = "Python code is read but never changed: set it by hand"
NOT_THERE = "it does not contain the settings that this one depends on"
NO_KEY = "no settings file has a key for it: set it in the training's code"


_LACKS = {
    "Hugging Face TrainingArguments": huggingface.LACKS,
    "accelerate": accelerate.LACKS,
    "Lightning CLI": lightning.LACKS,
}


def lacking(text: str, file: str) -> dict[str, str]:
    """Return the kinds of parallelism that the engine of a file or command lacks, with reasons."""
    read = parse_config(text, file)
    lacks = _LACKS.get(read.format, {})
    if read.format == "Lightning CLI" and all(setting.name != "tp" for setting in read.settings):
        return lacks | {"tp": lightning.NO_TP}
    if read.format not in ("launch command", "Slurm batch script"):
        return lacks
    text = resolved(text)
    launch = find_launch(text, file) or find_python(text)
    if launch is None:
        return {}
    flags = {flag.name.replace("-", "_") for flag in launch.script}
    return _LACKS.get(launch.name, {}) | (huggingface.LACKS if flags & DISTINCTIVE else {})


NEW_FILES = {
    "DeepSpeed": (
        """{{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "train_batch_size": 1,
  "zero_optimization": {{
    "stage": 0
  }}
}}
"""
    ),
    "accelerate": (
        """compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
num_machines: 1
num_processes: 1
use_cpu: false
{address}"""
    ),
    "accelerate with DeepSpeed": (
        """compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: {deepspeed}
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 1
use_cpu: false
{address}"""
    ),
    "torchrun": "torchrun --nnodes=1 --nproc-per-node=1{meeting} train.py\n",
    "sbatch": (
        """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --rdzv-id=$SLURM_JOB_ID \\
    --rdzv-backend=c10d --rdzv-endpoint=$head:29500 train.py
"""
    ),
}
"""Templates of new files for one process on one node.

The batch script starts torchrun once per node, with a rendezvous on the first node and one GPU per
process. The torchrun command for several nodes uses a rendezvous at $HEAD_NODE. Beside a DeepSpeed
file, accelerate's file names that file and leaves all other settings to it, as accelerate requires.
The DeepSpeed file must then state a stage.
"""
_PARTS = {
    "meeting": " --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500",
    "address": (
        "# each node's own: accelerate launch --main_process_ip ADDRESS --machine_rank NUMBER\n"
    ),
}
"""Parts of the templates that only several nodes need."""
NO_FILES: Mapping[str, str] = {}
_FORMATS_OF_NEW = {
    "DeepSpeed": "DeepSpeed",
    "accelerate": "accelerate",
    "torchrun": "launch command",
    "sbatch": "Slurm batch script",
}
HAND_OVER = (
    "Pass {file} to your script: deepspeed.initialize(config=...), or --deepspeed {file} with the"
    " Hugging Face Trainer"
)


class Written(Record):
    """Settings file with its changes.

    Attributes:
        before: Old text, or "" for a new file.
        text: New text.
        wrote: Settings that the file now states.
        left: Settings that the file cannot state, with the reasons.
        notes: Instructions for the user.
    """

    file: str
    before: str
    text: str
    wrote: tuple[str, ...]
    left: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        """Unified diff of the changes."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.text))
        lines = difflib.unified_diff(before, after, f"{self.file} (now)", f"{self.file} (planned)")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ no newline at end of file\n"
            for line in lines
        )


class Rewritten(Record):
    """All changed files of a training.

    `left` holds the settings that no file could take, with the reasons.
    """

    files: tuple[Written, ...]
    left: dict[str, str]


def write_changes(
    text: str,
    file: str,
    changes: Changes,
    beside: frozenset[str] = frozenset(),
    may_add: frozenset[str] | None = None,
    unchanged: frozenset[str] = frozenset(),
) -> Written:
    """Write `changes` into the text of one file.

    Settings are written in groups. If a group does not read back as intended, none of it is
    written.

    Args:
        text: Text of the file.
        file: Name of the file.
        changes: Old and new execution.
        beside: Formats of the training's other files.
        may_add: Settings that may be added to the file. None allows all.
        unchanged: Settings to leave as they are.
    """
    read = parse_config(text, file)
    names = changes.names - unchanged
    if is_python(file):
        left = dict.fromkeys(sorted(names - DERIVED), PYTHON)
        return Written(file=file, before=text, text=text, wrote=(), left=left)
    added = names if may_add is None else may_add
    draft = Draft(text, file, syntax_of(text, file), beside, added, changes.wanted)
    if read.format == "Hugging Face TrainingArguments":
        draft.prefix = huggingface.prefix_of(draft.data)
    for group in GROUPS:
        if names & group:
            draft = _with_group(draft, read.format, names & group)
    before, after = changes.before, changes.after
    in_code = [name for name in UNWRITTEN if getattr(before, name) != getattr(after, name)]
    left = {name: why for name, why in draft.left.items() if name not in DERIVED | draft.wrote}
    return Written(
        file=file,
        before=text,
        text=draft.text,
        wrote=tuple(sorted(draft.wrote)),
        left=left | dict.fromkeys(in_code, NO_KEY),
        notes=tuple(draft.notes),
    )


def rewrite(texts: Mapping[str, str], changes: Changes) -> Rewritten:
    """Write `changes` into all files of a training (file name -> text).

    Each setting goes into the file that contains it, or else into a file that can hold it. If a
    file states a setting but cannot change it, the setting is written into no file. The files then
    still agree.
    """
    done, wanted = _one_pass(texts, changes, frozenset()), changes.wanted
    stuck = _stuck(done, wanted)
    unchanged = frozenset[str]().union(*(group for group in GROUPS if group & stuck.keys()))
    if "nnodes" in unchanged:  # Batch sizes depend on the number of processes.
        unchanged |= BATCH
    if unchanged:
        done = _one_pass(texts, changes, unchanged)
    why = f"it depends on {', '.join(sorted(stuck))}"
    left = _reasons(done, wanted)
    left |= dict.fromkeys((unchanged & changes.names) - DERIVED, why) | stuck
    wrote = {name for f in done for name in f.wrote}
    left = {name: why for name, why in left.items() if name not in wrote}
    if wrote & {"micro_batch", "accumulation"}:
        size = f"{changes.after.nnodes} x {changes.after.nproc_per_node}"
        for name in left.keys() & {"nnodes", "nproc_per_node"}:
            left[name] += f"; the batch sizes are for {size} processes"
    return Rewritten(files=tuple(done), left=left)


def _stuck(files: Sequence[Written], wanted: Mapping[str, Value]) -> dict[str, str]:
    """Return the settings that a file states with another value and cannot change."""
    return {
        name: f"{f.file}: {why}"
        for f in files
        for name, why in f.left.items()
        if still_says(f, name, wanted)
    }


def _reasons(files: Sequence[Written], wanted: Mapping[str, Value]) -> dict[str, str]:
    """Return why settings were not written. For each setting, the first file's reason is used."""
    stated = {
        s.name
        for f in files
        for s in parse_config(f.text, f.file).settings
        if normal(s.name, s.value) == wanted.get(s.name)
    }
    reasons: dict[str, str] = {}
    for f in files:
        for name, why in f.left.items():
            if why == ELSEWHERE and name in stated:
                continue
            why = NOT_THERE if why == ELSEWHERE else why
            reasons.setdefault(name, why if why == NO_KEY else f"{f.file}: {why}")
    return reasons


def _one_pass(
    texts: Mapping[str, str], changes: Changes, unchanged: frozenset[str]
) -> list[Written]:
    """Write the changes once into each file, in the order of WRITERS."""
    read = {file: parse_config(text, file) for file, text in texts.items()}
    order, done, wrote = list(WRITERS), {}, set[str]()
    for file in sorted(texts, key=lambda file: order.index(read[file].format)):
        others = [r for name, r in read.items() if name != file]
        beside = frozenset(r.format for r in others)
        stated = _stated_by(others)
        if read[file].format == "Hugging Face TrainingArguments" and "DeepSpeed" in beside:
            stated -= _COMPARED
        may_add = frozenset(changes.names - stated - wrote)
        done[file] = write_changes(texts[file], file, changes, beside, may_add, unchanged)
        wrote |= set(done[file].wrote)
    return [done[file] for file in texts]


def _stated_by(files: Sequence[ConfigFile]) -> set[str]:
    """Return the settings that files state directly or imply by another setting."""
    stated: set[str] = {s.name for file in files for s in file.settings}
    for group in ({"world_size", "nproc_per_node"}, {"sharding", "zero_stage"}):
        if stated & (group - {"zero_stage"}):
            stated |= group
    return stated


def still_says(written: Written, name: str, wanted: Mapping[str, Value]) -> bool:
    """Return True if a file still states another value of a setting that it cannot take."""
    names = {name, "world_size"} if name in ("nnodes", "nproc_per_node") else {name}
    settings = parse_config(written.text, written.file).settings
    return any(s.name in names and normal(s.name, s.value) != wanted[s.name] for s in settings)


def save_all(files: Sequence[Written]) -> list[str | None]:
    """Replace all files or none. Each old file is kept as FILE.bak, FILE.bak2 and so on.

    Returns:
        The name of each backup: "" for a new file, and None for an unchanged file.

    Raises:
        TrainpaceError: If a file has changed since it was read, or cannot be written. In that case
            no file is changed.
    """
    backups: list[str | None] = []
    try:
        with contextlib.ExitStack() as renamed_together:
            for written in files:
                backups.append(_backup(written) if written.before else "")
                if backups[-1] is not None:
                    aside = renamed_together.enter_context(written_aside(written.file))
                    aside.write_text(written.text, encoding="utf-8")
    except BaseException:
        for backup in filter(None, backups):
            Path(backup).unlink(missing_ok=True)
        raise
    return backups


def _backup(written: Written) -> str | None:
    """Copy the old file to a new backup file. Return None if nothing changes."""
    if written.text == written.before:
        return None
    if read_bytes(written.file) != written.before.encode("utf-8"):
        raise TrainpaceError(f"{written.file} has changed since it was read.", "Ask again.")
    target = Path(written.file).resolve()  # Keep a link as a link.
    names = (f"{target}.bak{'' if number == 1 else number}" for number in itertools.count(1))
    backup = next(name for name in names if not os.path.lexists(name))
    try:
        shutil.copy(target, backup)
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only file system refuses this, too
            Path(backup).unlink(missing_ok=True)
        raise UnreadableInput(f"cannot write {backup}: {os_reason(error)}.") from None
    return backup


def _with_group(draft: Draft, kind: str, names: frozenset[str]) -> Draft:
    """Return the draft with a group of settings written, or the old draft with the reason."""
    before = copy.deepcopy(draft)
    draft.names = names
    try:
        WRITERS[kind](draft)
        if _is_sound(before.text, draft, names):
            return draft
        why = BY_HAND
    except TrainpaceError as error:
        why = error.message
    before.names = names - DERIVED
    before.leave(why, *names)
    return before


def _is_sound(old_text: str, draft: Draft, names: frozenset[str]) -> bool:
    """Return True if the file now states the wanted values and its other settings are unchanged."""
    before, after = (parse_config(text, draft.file) for text in (old_text, draft.text))
    # Settings that the file left open may have a value now.
    touched = names | {note.leaves_open for note in before.notes}
    if "zero_stage" in names:
        touched |= {"sharding"}
    kept, still = (
        {(s.name, s.value) for s in file.settings if s.name not in touched}
        for file in (before, after)
    )
    checked = (names | {"sharding"}) - (names & draft.left.keys() - draft.wrote)
    wanted = all(_is_wanted(s, after, draft) for s in after.settings if s.name in checked)
    return before.format == after.format and kept == still and wanted


def _is_wanted(setting: Setting, after: ConfigFile, draft: Draft) -> bool:
    if setting.name == "sharding":
        return draft.want["zero_stage"] == 3 or "zero_stage" not in draft.wrote
    value, want = normal(setting.name, setting.value), draft.want[setting.name]
    if (
        setting.name == "precision"
        and "DeepSpeed" in draft.beside | {after.format}
        and draft.beside
    ):
        return AUTOCAST_OF.get(str(value), value) == AUTOCAST_OF.get(str(want), want)
    return value == want


def new_files(
    kinds: Mapping[str, str],
    execution: Execution,
    texts: Mapping[str, str],
    workers: int | None = None,
    time_limit_s: float | None = None,
) -> tuple[Written, ...]:
    """Create new files that together state an execution.

    Args:
        kinds: New files (name -> kind in NEW_FILES).
        execution: Execution that they state.
        texts: Existing files of the training (name -> text).
        workers: Loader workers per rank, if known.
        time_limit_s: Limit of a batch job in seconds, if known.
    """
    formats = {file: parse_config(text, file).format for file, text in texts.items()}
    formats |= {file: _FORMATS_OF_NEW[kind] for file, kind in kinds.items()}
    return tuple(
        new_file(kind, execution, file, formats, workers, time_limit_s)
        for file, kind in kinds.items()
    )


def new_file(
    kind: str,
    execution: Execution,
    file: str,
    formats: Mapping[str, str] = NO_FILES,
    workers: int | None = None,
    time_limit_s: float | None = None,
) -> Written:
    """Create a file of a kind in NEW_FILES that states an execution.

    `formats` holds the format of each of the training's files.
    """
    beside = frozenset(format_ for name, format_ in formats.items() if name != file)
    deepspeed = {format_: name for name, format_ in formats.items()}.get("DeepSpeed", "")
    template = "accelerate with DeepSpeed" if kind == "accelerate" and deepspeed else kind
    parts = _PARTS if execution.nnodes > 1 else dict.fromkeys(_PARTS, "")
    text = NEW_FILES[template].format(deepspeed=deepspeed, **parts)
    changes = Changes(
        before=Execution(),  # The template states its values.
        after=execution,
        workers=workers,
        time_limit_s=time_limit_s if kind == "sbatch" else None,
    )
    written = replace(write_changes(text, file, changes, beside), before="")
    if kind == "DeepSpeed" and "accelerate" not in beside:
        written = replace(written, notes=(*written.notes, HAND_OVER.format(file=file)))
    return written


_CORE = frozenset(
    "devices num_nodes strategy precision accumulate_grad_batches max_epochs max_steps"
    " accelerator".split()
)
"""Arguments that distinguish Lightning's Trainer from other classes named Trainer."""
_CLASSES = ("Arguments", "Args", "Config")
_NOT_READ = object()


class _Found(NamedTuple):
    line: int
    data: dict[str, Any]
    unread: list[tuple[str, ast.expr]]


def is_python(file: str) -> bool:
    """Return True if the file's name ends in .py."""
    return file.endswith(".py")


def _read_python(text: str, file: str) -> tuple[dict[str, Any], list[Note]]:
    """Read a trainer's arguments from Python code.

    They may be `TrainingArguments(...)`, `Trainer(devices=2, ...)`, or a dict of such arguments.
    The code is parsed and never run, so only literals are read.

    Returns:
        The arguments in the form of a settings file, and a note for each value that is not a
        literal.

    Raises:
        UnreadableInput: If the code does not parse, or has no such arguments, or has several.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hide warnings about escapes in strings.
            tree = ast.parse(text)
            found = list(_candidates(tree))
    except SyntaxError as error:
        raise UnreadableInput(
            f"{file} is not valid Python at line {error.lineno}: {error.msg}."
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise UnreadableInput(f"{file} is nested too deeply.") from None
    known = (
        "TrainingArguments(...), Lightning's Trainer(...), or a dict of their arguments, or"
        " of DeepSpeed's or accelerate's"
    )
    if not found:
        raise UnreadableInput(
            f"{file} contains no trainer arguments that can be read.", f"Known: {known}."
        )
    if len(found) > 1:
        lines = ", ".join(str(one.line) for one in found)
        raise UnreadableInput(
            f"{file} contains several sets of trainer arguments, in lines {lines}.",
            "Put each in a separate file.",
        )
    (one,) = found
    notes = [
        Note(
            file=file,
            key=key,
            severity="warning",
            text=(
                f"{key}: {ast.unparse(node)[:60]!r} (line {node.lineno}) is not a literal, so it is"
                " ignored"
            ),
        )
        for key, node in one.unread
    ]
    return checked(one.data, file), notes


def _candidates(tree: ast.Module) -> Iterator[_Found]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Dict | ast.Call
        ):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if (found := _from_dict(ast.unparse(target), node.value)) is not None:
                yield found
        if isinstance(node, ast.Call) and (found := _from_call(node)) is not None:
            yield found


def _from_dict(name: str, node: ast.expr) -> _Found | None:
    """Return the settings in a dict assigned to `name`, if it holds trainer arguments."""
    if isinstance(node, ast.Call) and _name_of(node.func) != "dict":
        return None
    found = _literals(node)
    if found is None:
        return None
    if (
        any(recognises(found.data) for recognises in (is_deepspeed, is_accelerate, is_lightning))
        or DISTINCTIVE & found.data.keys()
    ):
        return found
    core = len(found.data.keys() & _CORE)
    return _of_trainer(found) if core > 1 or (core and "trainer" in name.lower()) else None


def _from_call(node: ast.Call) -> _Found | None:
    name = _name_of(node.func)
    if not name.endswith(("Trainer", "Fabric", *_CLASSES)):
        return None
    found = _literals(node)
    if found is None:
        return None
    if name.endswith(_CLASSES):
        return found if is_training_arguments(found.data) else None
    return (
        _of_trainer(found) if found.data.keys() & _CORE and found.data.keys() <= TRAINER else None
    )


def _of_trainer(found: _Found) -> _Found:
    return found._replace(
        data={"trainer": found.data},
        unread=[(f"trainer.{key}", node) for key, node in found.unread],
    )


def _literals(node: ast.expr) -> _Found | None:
    """Return the literal values of a dict or of a call's keywords, or None if a key is not text.

    A value that is not a literal becomes None, which means "not set".
    """
    pairs = _pairs_of(node)
    if pairs is None:
        return None
    data: dict[str, Any] = {}
    unread: list[tuple[str, ast.expr]] = []
    for name, value in pairs:
        read = _NOT_READ if name == "**" else _literal(value, name, unread)
        if read is _NOT_READ:
            unread.append((name, value))
        if name != "**":
            data[name] = None if read is _NOT_READ else read
    return _Found(node.lineno, data, unread)


def _pairs_of(node: ast.expr) -> list[tuple[str, ast.expr]] | None:
    if isinstance(node, ast.Call):
        return [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    assert isinstance(node, ast.Dict)
    names = ["**" if key is None else getattr(key, "value", None) for key in node.keys]
    texts = [name for name in names if isinstance(name, str)]
    return list(zip(texts, node.values, strict=True)) if texts == names else None


def _literal(node: ast.expr, key: str, unread: list[tuple[str, ast.expr]]) -> Any:
    """Return a value that JSON can hold, or _NOT_READ.

    Values inside a dict that are not literals are added to `unread`.
    """
    if isinstance(node, ast.Dict | ast.Call):
        nested = _literals(node)
        if nested is not None:
            return _nested_literals(node, nested, key, unread)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _NOT_READ
    value = list(value) if isinstance(value, tuple) else value
    parts = value if isinstance(value, list) else [value]
    return value if all(isinstance(p, str | int | float | None) for p in parts) else _NOT_READ


def _nested_literals(
    node: ast.Dict | ast.Call, nested: _Found, key: str, unread: list[tuple[str, ast.expr]]
) -> Any:
    """Return a nested dict. The class of a strategy becomes class_path and init_args."""
    called = "dict"
    if isinstance(node, ast.Call):
        called = _name_of(node.func)
        if node.args or (called != "dict" and key != "strategy"):
            return _NOT_READ
    unread += [(f"{key}.{inner}", value) for inner, value in nested.unread]
    return nested.data if called == "dict" else {"class_path": called, "init_args": nested.data}


def _name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]
