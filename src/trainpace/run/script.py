"""A ladder over an unchanged script: its own command on changed copies of its settings files.

A rung changes what those files and the command's flags state, or can state, and nothing else: a setting that no file takes
would not be tried by a trial that says so. The user's files are read and never written.
"""

import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace import configs
from trainpace.core.child import no_command
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.intake import read_text
from trainpace.core.records import Record, make_folder, write_whole
from trainpace.core.stats import median
from trainpace.job import accumulation_for_global_batch
from trainpace.measure import cpu_name
from trainpace.run.job import Ended, Job, Starts, run_here
from trainpace.run.ladder import SHARDS, Ladder, Script, Setup
from trainpace.run.slurm import Slurm
from trainpace.run.trial import FailedTrial, LoaderSettings, TrialResult, result_of
from trainpace.watch import (
    COMMAND_FILE,
    DATA,
    LOADER_START,
    Notes,
    Process,
    Recording,
    Step,
    environment,
    header_of,
    inputs_of,
    ms,
    notes_in,
    read_processes,
    read_recording,
    records_of,
    remove_trial_checkpoints,
    temporary_folder,
)
from trainpace.workload import ModelSpec

_INTERVENTIONS = (
    "cached_batch",
    "batch_on_device",
    "no_sync",
    "few_samples",
    "muted",
    "fewer_threads",
    "bf16",
)
_FEWEST_WARM_UP, _FEWEST_STEPS = 4, 3
UNEVEN = 1.1
"""Times the least that a step's inputs hold, beyond which they hold different amounts."""
_GRACE_S = 10.0
_UNTRACKED = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:{folder}/mlruns",
}
"""A trial is no run of the user's: experiment trackers shall not count it as one."""


class ScriptTrial(Record):
    """`command` in words, run in `cwd`, for `steps` steps after the warm-up. `world_size` and `global_batch`: what the settings
    say; a script that is seen to do otherwise does not read them. None is not looked at. `nnodes` x `nproc_per_node` ranks, and
    the cores and GPUs of each, are what Slurm is asked for; `starts` says who starts them."""

    command: tuple[str, ...]
    cwd: str
    steps: int
    warmup_steps: int = 5
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    world_size: int | None = None
    global_batch: int | None = None
    nnodes: int = 1
    nproc_per_node: int = 1
    cpus_per_process: int | None = None
    gpus_per_node: int = 0
    starts: Starts = "rank"


def run_script(
    trial: ScriptTrial, folder: Path, timeout_s: float = 600.0, slurm: Slurm | None = None
) -> TrialResult | FailedTrial:
    """Run the command, here or as a job of Slurm's; after `timeout_s` it is ended, with all its processes. A script that ends
    earlier gives the steps that there were. The folder takes the recording, the log, and what the script writes. Raises
    TrainpaceError when it cannot be started."""
    program, folder = trial.command[0], folder.absolute()
    recorded = folder / "recording"
    shutil.rmtree(recorded, ignore_errors=True)
    recorded.mkdir(parents=True)
    job = script_job(trial, folder, timeout_s)
    started = time.time()
    try:
        if slurm is not None:
            ended = slurm.run(job)
            done = ended.state == "done"
            started = float(Path(job.result).read_text()) if done else started
        else:
            ended = _run_here(trial, job)
            done = ended.exit_code == 0
    finally:
        remove_trial_checkpoints(notes_in(recorded))
    write_whole(
        recorded / COMMAND_FILE,
        json.dumps(
            {
                "command": trial.command,
                "started": started,
                "seconds": ended.seconds,
                "exit_code": ended.exit_code,
                "trials": json.loads(job.environment["TRAINPACE_TRIALS"]),
            }
        ),
    )
    late = ended.seconds >= timeout_s
    if not done:
        reason = f"{program} took longer than {timeout_s:g} s." if late else ended.reason
        return FailedTrial(kind="timed out" if late else "failed", reason=reason, log=ended.log)
    recording = read_recording(recorded)
    if not recording.ranks:
        return FailedTrial(
            kind="failed", reason=f"no training step was seen. {recording.seen}", log=ended.log
        )
    processes = read_processes(recorded)
    if mismatch := _does_otherwise(trial, recording, processes):
        return FailedTrial(kind="misuse", reason=mismatch, log=ended.log)
    warm_up = _warm_up(trial)
    steps = _steps(_first(processes))
    counted = [s for s in steps if s.trial == 0 and s.number >= warm_up]
    if len(counted) < _FEWEST_STEPS:
        reason = (
            f"the script ended after {len(steps)} steps, too few to be timed after a warm-up of"
            f" {warm_up}."
        )
        return FailedTrial(kind="timed out" if late else "failed", reason=reason, log=ended.log)
    return _result(recording, processes, steps, counted, started, ended.seconds)


def script_job(trial: ScriptTrial, folder: Path, timeout_s: float) -> Job:
    """The job of a trial whose recording goes to FOLDER/recording. Its environment has only what differs from ours."""
    folder = folder.absolute()
    recorded = folder / "recording"
    trials = {
        "block_steps": trial.steps,
        "rounds": 1,
        "warm_up_steps": _warm_up(trial),
        "limit_s": timeout_s,
        "without": _INTERVENTIONS,
        "only_steps": True,
        "writes_in": [str(folder)],
    }
    untracked = {key: value.format(folder=folder) for key, value in _UNTRACKED.items()}
    around = environment(recorded, os.environ, trials) | untracked | trial.environment
    # the recorder ends the script in time, with the steps that there were; one that makes no steps is ended by the launcher
    return Job(
        name="script",
        program=trial.command,
        folder=str(folder),
        result=str(recorded / "ended-well"),
        timeout_s=timeout_s + _GRACE_S,
        nnodes=trial.nnodes,
        nproc_per_node=trial.nproc_per_node,
        cpus_per_process=trial.cpus_per_process,
        gpus_per_node=trial.gpus_per_node,
        starts=trial.starts,
        cwd=trial.cwd,
        environment={key: value for key, value in around.items() if os.environ.get(key) != value},
    )


def _run_here(trial: ScriptTrial, job: Job) -> Ended:
    program = trial.command[0]
    path = job.environment.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None and not Path(trial.cwd, program).is_file():
        raise no_command(program)
    with temporary_folder() as own:
        return run_here(job, trial.command, own | job.environment, cwd=trial.cwd)


def _warm_up(trial: ScriptTrial) -> int:
    return max(_FEWEST_WARM_UP, trial.warmup_steps)


def _first(processes: Sequence[Process]) -> Process:
    return max(processes, key=lambda p: (-p.rank, p.steps))


def _steps(process: Process) -> list[Step]:
    return [r for r in records_of(process.path) if isinstance(r, Step)]


def _does_otherwise(trial: ScriptTrial, recording: Recording, processes: Sequence[Process]) -> str:
    """What the recorder saw that the settings do not say; "" where they agree."""
    world = recording.ranks[0].world_size
    if trial.world_size not in (None, world):
        return (
            f"the settings say {trial.world_size} processes, and the script trained with {world}."
        )
    # of most steps: loaders fetch ahead in the first one, and the last batch of an epoch may be a small one
    samples = sum(median([s.samples for s in _steps(p)]) for p in processes)
    if samples and len(processes) == world and trial.global_batch not in (None, samples):
        return (
            f"the settings say {trial.global_batch:,} samples a step, and the script took"
            f" {samples:,.0f}: they are not read as the script reads them."
        )
    return ""


def _result(
    recording: Recording,
    processes: Sequence[Process],
    steps: Sequence[Step],
    counted: Sequence[Step],
    started: float,
    ran_s: float,
) -> TrialResult:
    since_start_s = (
        steps[0].end_ns + (header_of(_first(processes).path) or {}).get("clock_to_wall_ns", 0)
    ) / 1e9 - started
    first = recording.ranks[0]
    notes = [(process, Notes(records_of(process.path))) for process in processes]
    of_first = dict(notes)[_first(processes)]
    losses, gpu = _losses(notes), of_first.last("accelerator")
    peaks_gib = [gib for _, noted in notes for gib in noted.values("peak_allocated_gib")]
    return result_of(
        [ms(s) for s in counted],
        sum(r.samples_per_step for r in recording.ranks),
        "run",
        losses=losses,
        data_wait_ms=tuple((s.parts_ns[DATA] + s.parts_ns[LOADER_START]) / 1e6 for s in counted),
        peak_memory_gib=max(peaks_gib, default=None),
        reserved_memory_gib=max(r.reserved_gib for r in recording.ranks) or None,
        uneven=_are_uneven(of_first, {s.number for s in counted}),
        start_up_s=min(ran_s, max(0.0, since_start_s)),  # the wall clock may be set meanwhile
        world_size=first.world_size,
        environment={"torch": first.torch, "cores": str(first.cpus), "cpu": cpu_name()}
        | ({"gpu": gpu} if gpu else {}),
        notes=() if losses else ("the script's losses were not seen.",),
    )


def _are_uneven(notes: Notes, counted: Collection[int]) -> bool:
    """Whether the inputs of these steps hold different amounts of data, as far as they were seen."""
    held = [count for number, count in inputs_of(notes).items() if number in counted]
    return bool(held) and max(held) > UNEVEN * min(held)


def _losses(notes: Iterable[tuple[Process, Notes]]) -> tuple[float, ...]:
    """The mean over the ranks of each step's loss; empty where a rank's were not seen."""
    curves: dict[int, list[float]] = {}
    for process, noted in notes:
        losses: list[float] = noted.last("losses", [])
        if len(losses) >= len(curves.get(process.rank, [])):
            curves[process.rank] = losses
    return tuple(sum(losses) / len(curves) for losses in zip(*curves.values(), strict=False))


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
