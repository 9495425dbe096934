"""A ladder over an unchanged script: its own command on changed copies of its settings files.

A rung changes what those files and the command's flags state, or can state, and nothing else: a setting that no file takes
would not be tried by a trial that says so. The user's files are read and never written.
"""

import hashlib
import json
import os
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainpace import configs
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.intake import read_text
from trainpace.core.records import make_folder, write_whole
from trainpace.job import accumulation_for_global_batch
from trainpace.run.rungs import SHARDS, Ladder, Script, Setup
from trainpace.run.script_trial import ScriptTrial
from trainpace.run.trial import LoaderSettings
from trainpace.workload import ModelSpec

COMMAND = "command.sh"
"""The name under which the command stands beside the files."""
ENVIRONMENT = "environment.sh"
"""The name under which the variables that were kept stand beside the files."""
SCRIPT_STEPS = 30


class Present(NamedTuple):
    """How a script trains now, as far as its settings say: the names of `stated` are those of `configs.settings`."""

    execution: Execution
    workers: int
    stated: frozenset[str]


def present(script: Script) -> Present:
    """What the files and the command say together. Raises Contradiction where they clash, TrainpaceError where a file is one that
    the command would not read, or no shell is there to run it."""
    words = configs.split_command(script.command).words
    texts = _texts(script)
    combined = configs.agreed([configs.parse_config(text, file) for file, text in texts.items()])
    for file in _copied(script):
        if not configs.names_file(texts, words, file, script.folder):
            raise TrainpaceError(
                f"neither the command nor another settings file names {file}, so a changed copy of"
                " it would not be read.",
                f"Name it in the command, as in --config {file}.",
            )
    values = {name: setting.value for name, setting in combined.values.items()}
    e = configs.execution_of(values, Execution())
    if "global_batch" in values and "accumulation" not in values:
        needed = accumulation_for_global_batch(
            int(values["global_batch"]), e.micro_batch, e.data_parallel_size
        )
        values["accumulation"] = needed
        e = configs.execution_of(values, Execution())
    return Present(e, int(values.get("dataloader_workers", 0)), frozenset(values))


def prepare(
    ladder: Ladder, setup: Setup, folder: Path
) -> tuple[ScriptTrial, tuple[configs.Written, ...]]:
    """Write changed copies of the settings files into `folder`: (the trial on them, how they differ from the user's). Raises
    TrainpaceError where no file takes a change."""
    script, files = _script_of(ladder), changed_files(ladder, setup)
    folder, output = folder.absolute(), str(folder.absolute() / "output")
    copies = {file: str(folder / "configs" / name) for file, name in _names(script).items()}
    make_folder(folder / "configs")
    make_folder(folder / "output")
    command = script.command
    for written in files:
        if written.file == COMMAND:
            command = written.text.strip()
        elif written.file in copies:
            text = configs.copied_text(written.text, written.file, copies, script.folder, output)
            write_whole(copies[written.file], text)
    split, launcher = configs.split_command(command), configs.launcher_of(command)
    threads = {} if setup.threads is None else {"OMP_NUM_THREADS": str(setup.threads)}
    environment = split.environment | setup.environment | threads
    e = setup.execution
    # which would have each node train by itself
    words = tuple(word for word in split.words if word != "--standalone" or e.nnodes == 1)
    trial = ScriptTrial(
        command=configs.copied_command(words, copies, script.folder, output),
        cwd=str(Path(script.folder).absolute()),
        steps=ladder.steps or SCRIPT_STEPS,
        warmup_steps=ladder.warmup_steps,
        environment=environment,
        world_size=e.world_size,
        global_batch=e.global_batch,
        nnodes=e.nnodes,
        nproc_per_node=e.nproc_per_node,
        cpus_per_process=None if setup.threads is None else setup.threads + setup.loader.workers,
        gpus_per_node=e.nproc_per_node if ladder.device != "cpu" else 0,
        starts="node" if launcher else "rank",
    )
    return trial, files


def changed_files(ladder: Ladder, setup: Setup) -> tuple[configs.Written, ...]:
    """The user's files and command as `setup` has them. Raises TrainpaceError where no file takes a change."""
    start, script, shards = ladder.start, _script_of(ladder), setup.loader.shards
    if (
        setup.loader != LoaderSettings(workers=setup.loader.workers, shards=shards)
        or setup.engine != start.engine
    ):
        raise TrainpaceError(
            "of a script's data and engine only the number of workers and its own settings can be"
            " changed from outside."
        )
    launcher = configs.launcher_of(script.command)
    if setup.execution.nnodes > 1 and launcher in ("accelerate", "deepspeed"):
        raise TrainpaceError(
            f"on several nodes {launcher} needs an address or a list of hosts, which are not known"
            " before Slurm gives them.",
            "Start the script with python (Lightning) or torchrun: each of Slurm's nodes then finds"
            " the others.",
        )
    workers = setup.loader.workers if setup.loader.workers != start.loader.workers else None
    changes = configs.Changes(before=start.execution, after=setup.execution, workers=workers)
    done = configs.rewrite(_texts(script), changes)
    if done.left:
        untaken = "; ".join(f"{name} ({why})" for name, why in sorted(done.left.items()))
        raise TrainpaceError(f"its settings files do not take {untaken}.")
    folder = (
        "" if shards is None else str(Path(shards).absolute() if Path(shards).is_dir() else shards)
    )
    own = {
        key: value.replace(SHARDS, folder) if isinstance(value, str) else value
        for key, value in setup.settings.items()
    }
    return configs.with_own_keys(done.files, own)


def keep_files(ladder: Ladder, setup: Setup, folder: Path) -> Path:
    """Write the settings files of the setup that a climb ended with to FOLDER/kept, for the user to take over."""
    kept = folder / "kept"
    make_folder(kept)
    names = _names(_script_of(ladder))
    for written in changed_files(ladder, setup):
        if not configs.is_python(written.file):
            write_whole(kept / names.get(written.file, "command.txt"), written.text)
    (kept / ENVIRONMENT).unlink(missing_ok=True)  # of an earlier climb
    if setup.environment:
        lines = [
            f"export {name}={shlex.quote(value)}\n" for name, value in setup.environment.items()
        ]
        write_whole(kept / ENVIRONMENT, "".join(lines))
    return kept


def fingerprint(spec: str) -> str:
    """A hash of the Python files in the folder of a task's file, since measurements of other code do not count; "" for other
    models. Raises UnreadableInput without the file."""
    named = ModelSpec.of(spec)
    if not named.runs_code:
        return ""
    path = Path(named.path).absolute()
    sources = _sources_of(path, path.parent)
    if path.name not in sources:
        raise UnreadableInput(f"cannot read {named.path}: no such file.")
    return _hash_of([named.name, sources])


def fingerprint_of_script(script: Script) -> str:
    """A hash of the settings files, and of the Python files beside those that the command names, by path or by ``-m``."""
    words, around = configs.split_command(script.command)
    base = Path(script.folder).absolute()
    folders = (
        base,
        *(base / folder for folder in around.get("PYTHONPATH", "").split(os.pathsep) if folder),
    )
    sources: dict[str, str] = {}
    for before, word in pairwise(("", *words)):
        file = _file_of_module(word, folders) if before in ("-m", "--module") else base / word
        if file is not None and file.suffix == ".py" and file.is_file():
            sources |= _sources_of(file, base)
    return _hash_of([_texts(script), sources])


def _hash_of(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def _sources_of(file: Path, base: Path) -> dict[str, str]:
    """A hash of every Python file in a file's folder, under its path from `base`: a project may be moved as a whole."""
    return {
        os.path.relpath(path, base): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(file.absolute().parent.glob("*.py"))
    }


def _file_of_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """The file that ``python -m NAME`` runs, where one of the folders has it."""
    for folder in folders:
        inside = folder.joinpath(*name.split("."))
        for file in (inside.with_name(inside.name + ".py"), inside / "__main__.py"):
            if file.is_file():
                return file
    return None


def started_by(trial: ScriptTrial) -> str:
    words = [f"{key}={value}" for key, value in trial.environment.items()]
    return shlex.join([*(["env", *words] if words else []), *trial.command])


def _script_of(ladder: Ladder) -> Script:
    assert ladder.script is not None
    return ladder.script


def _texts(script: Script) -> dict[str, str]:
    texts = {file: read_text(str(Path(script.folder, file))) for file in script.configs}
    return texts | (
        {COMMAND: script.command + "\n"} if configs.has_settings(script.command) else {}
    )


def _copied(script: Script) -> tuple[str, ...]:
    """The settings files that trials have copies of: Python code is read, and stays where its imports are."""
    return tuple(file for file in script.configs if not configs.is_python(file))


def _names(script: Script) -> dict[str, str]:
    files = _copied(script)
    plain = [Path(file).name for file in files]
    return {
        file: name if plain.count(name) == 1 else f"{i}-{name}"
        for i, (file, name) in enumerate(zip(files, plain, strict=True))
    }
