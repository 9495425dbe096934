"""Trials of an unchanged script: its own command with changed copies of its settings files.

A rung can only change settings that these files or the command's flags state or can state. An error
is raised if no file can hold a setting, because the setting would not be tried. The user's own
files are read but never written.

A trial runs the command with its own launcher under the recorder of `trainpace watch`, on this
machine or on Slurm nodes. The recorder ends the script after the requested steps. A checkpoint
saved with torch.save is written beside its usual path and removed at the end. Checkpoints of
transformers and DeepSpeed are skipped. The script cannot write, remove or rename files outside the
trial's folder (`watch.inside.start`). Checkpoints and step counters of real runs therefore stay
unchanged.
"""

import hashlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from trainpace import configs
from trainpace.core.child import no_command
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.host import temporary_environment
from trainpace.core.intake import read_text
from trainpace.core.records import Record, make_folder, write_whole
from trainpace.core.stats import median
from trainpace.job import accumulation_for_global_batch
from trainpace.measure import cpu_name
from trainpace.run.job import UNTRACKED, Ended, Job, Starts, run_here
from trainpace.run.ladder import SHARDS, Ladder, Script, Setup
from trainpace.run.slurm import Slurm
from trainpace.run.trial import FailedTrial, FailureKind, LoaderSettings, TrialResult, result_of
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
    ms,
    notes_in,
    read_processes,
    read_recording,
    records_of,
    remove_trial_checkpoints,
)
from trainpace.workload import ModelSpec

_INTERVENTIONS = (
    "cached_batch",
    "batch_on_device",
    "no_sync",
    "few_samples",
    "muted",
    "fewer_threads",
)
_FEWEST_WARM_UP, _FEWEST_STEPS = 4, 3
UNEVEN = 1.1
"""Ratio of the largest to the smallest input above which steps count as uneven."""
_GRACE_S = 10.0


class ScriptTrial(Record):
    """Command to run in `cwd` for `steps` steps after the warm-up.

    Attributes:
        command: Words of the command.
        world_size: Number of ranks that the settings state. The recording is checked against it, to
            detect a script that ignores its settings. None skips the check.
        global_batch: Samples per step that the settings state, checked in the same way.
        nnodes: Nodes that Slurm is asked for.
        nproc_per_node: Ranks per node that Slurm is asked for.
        cpus_per_process: Cores per rank that Slurm is asked for.
        gpus_per_node: GPUs per node that Slurm is asked for.
        starts: Program that starts the ranks (see `Starts`).
    """

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
    """Run the command on this machine, or as a Slurm job.

    After `timeout_s` the command and all its processes are ended. If a script ends early, the steps
    that it has run are used. `folder` holds the recording, the log, and the script's output.

    Raises:
        TrainpaceError: If the command cannot be started.
    """
    folder = folder.absolute()
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
    command = {
        "command": trial.command,
        "started": started,
        "seconds": ended.seconds,
        "exit_code": ended.exit_code,
        "trials": json.loads(job.environment["TRAINPACE_TRIALS"]),
    }
    write_whole(recorded / COMMAND_FILE, json.dumps(command))
    late: FailureKind = "timed out" if ended.seconds >= timeout_s else "failed"
    if not done:
        too_long = f"{trial.command[0]} took longer than {timeout_s:g} s."
        reason = too_long if late == "timed out" else ended.reason
        return FailedTrial(kind=late, reason=reason, log=ended.log)
    return _recorded(trial, recorded, started, ended, late)


def _recorded(
    trial: ScriptTrial, recorded: Path, started: float, ended: Ended, late: FailureKind
) -> TrialResult | FailedTrial:
    """Return the result from a recording, or the reason why there is none."""
    recording = read_recording(recorded)
    if not recording.ranks:
        reason = f"no training step was seen. {recording.seen}"
        return FailedTrial(kind="failed", reason=reason, log=ended.log)
    processes = read_processes(recorded)
    if mismatch := _mismatch(trial, recording, processes):
        return FailedTrial(kind="misuse", reason=mismatch, log=ended.log)
    warm_up = _warm_up(trial)
    steps = _steps(_first(processes))
    counted = [s for s in steps if s.trial == 0 and s.number >= warm_up]
    if len(counted) < _FEWEST_STEPS:
        reason = (
            f"the script ended after {len(steps)} steps, too few for a timing after a warm-up of"
            f" {warm_up}."
        )
        return FailedTrial(kind=late, reason=reason, log=ended.log)
    return _result(recording, processes, steps, counted, started, ended.seconds)


def script_job(trial: ScriptTrial, folder: Path, timeout_s: float) -> Job:
    """Return the job of a trial. It records to FOLDER/recording.

    The job's environment holds only variables that differ from this process's environment.
    """
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
    untracked = {key: value.format(folder=folder) for key, value in UNTRACKED.items()}
    around = environment(recorded, os.environ, trials) | untracked | trial.environment
    # The recorder ends the script in time. The launcher ends a script that runs no steps.
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
    # The script is ended before it can remove its own files. Paths of sockets must be short, so the
    # folder is not inside the trial's folder.
    with tempfile.TemporaryDirectory(
        prefix="trainpace-trial-", ignore_cleanup_errors=True
    ) as folder:
        own = temporary_environment(folder)
        return run_here(job, trial.command, own | job.environment, cwd=trial.cwd)


def _warm_up(trial: ScriptTrial) -> int:
    return max(_FEWEST_WARM_UP, trial.warmup_steps)


def _first(processes: Sequence[Process]) -> Process:
    return max(processes, key=lambda p: (-p.rank, p.steps))


def _steps(process: Process) -> list[Step]:
    return [r for r in records_of(process.path) if isinstance(r, Step)]


def _mismatch(trial: ScriptTrial, recording: Recording, processes: Sequence[Process]) -> str:
    """Return a sentence on how the recording contradicts the settings, or ""."""
    world = recording.ranks[0].world_size
    if trial.world_size not in (None, world):
        return (
            f"the settings say {trial.world_size} processes, but the script trained with {world}."
        )
    # Use the median: loaders prefetch in the first step, and an epoch's last batch may be small.
    samples = sum(median([s.samples for s in _steps(p)]) for p in processes)
    if samples and len(processes) == world and trial.global_batch not in (None, samples):
        return (
            f"the settings say {trial.global_batch:,} samples per step, but the script used"
            f" {samples:,.0f}: it does not read them as Trainpace does."
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
    """Return the trial's result from the counted steps of a recording."""
    rank_0 = recording.ranks[0]
    notes = [(process, Notes(records_of(process.path))) for process in processes]
    first = _first(processes)
    of_first, losses = dict(notes)[first], _losses(notes)
    peaks_gib = [gib for _, noted in notes for gib in noted.values("peak_allocated_gib")]
    return result_of(
        [ms(s) for s in counted],
        sum(r.samples_per_step for r in recording.ranks),
        "run",
        losses=losses,
        data_wait_ms=tuple((s.parts_ns[DATA] + s.parts_ns[LOADER_START]) / 1e6 for s in counted),
        peak_memory_gib=max(peaks_gib, default=None),
        reserved_memory_gib=max(r.reserved_gib for r in recording.ranks) or None,
        uneven=_are_uneven(of_first, counted),
        # The wall clock may jump.
        start_up_s=min(ran_s, max(0.0, _wall_s(first, steps[0].end_ns) - started)),
        world_size=rank_0.world_size,
        environment={"torch": rank_0.torch, "cores": str(rank_0.cpus), "cpu": cpu_name()}
        | _gpu_of(of_first),
        notes=() if losses else ("the script's losses are not known.",),
    )


def _wall_s(process: Process, at_ns: int) -> float:
    """Convert a time of a process's clock to seconds since 1970."""
    clock_ns: int = (header_of(process.path) or {}).get("clock_to_wall_ns", 0)
    return (at_ns + clock_ns) / 1e9


def _gpu_of(notes: Notes) -> dict[str, str]:
    gpu = notes.last("accelerator")
    return {"gpu": gpu} if gpu else {}


def _are_uneven(notes: Notes, counted: Sequence[Step]) -> bool:
    """Return True if the recorded inputs of these steps differ in size by more than UNEVEN."""
    numbers = {step.number for step in counted}
    inputs = notes.by_step("input_elements")
    held = [count for number, count in inputs.items() if number in numbers]
    return bool(held) and max(held) > UNEVEN * min(held)


def _losses(notes: Iterable[tuple[Process, Notes]]) -> tuple[float, ...]:
    """Return each step's mean loss over all ranks. Empty if a rank's losses are missing."""
    curves: dict[int, list[float]] = {}
    for process, noted in notes:
        losses: list[float] = noted.last("losses", [])
        if len(losses) >= len(curves.get(process.rank, [])):
            curves[process.rank] = losses
    return tuple(sum(losses) / len(curves) for losses in zip(*curves.values(), strict=False))


COMMAND = "command.sh"
"""File name of the command among the settings files."""
ENVIRONMENT = "environment.sh"
"""File name of the kept environment variables."""
SCRIPT_STEPS = 30
"""Default number of steps in a trial of a script."""


class Present(NamedTuple):
    """Current training setup of a script.

    `stated` holds the values of a setup that its files state, by the keys of a ladder.
    """

    execution: Execution
    workers: int
    stated: dict[str, Any]


def present(script: Script) -> Present:
    """Return the setup that the settings files and the command describe together.

    Raises:
        Contradiction: If they contradict each other.
        TrainpaceError: If the command does not read one of the files, or needs a shell.
    """
    words = configs.split_command(script.command).words
    texts = _texts(script)
    combined = configs.agreed([configs.parse_config(text, file) for file, text in texts.items()])
    for file in _copied(script):
        if not configs.names_file(texts, words, file, script.folder):
            raise TrainpaceError(
                (
                    f"neither the command nor another settings file names {file}, so its "
                    "changed copy would not be read."
                ),
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
    workers = int(values.get("dataloader_workers", 0))
    settings = configs.settings_of(e) | {"dataloader_workers": workers}
    stated = {name: value for name, value in settings.items() if name in values}
    if "dataloader_workers" in stated:
        stated["workers"] = stated.pop("dataloader_workers")
    return Present(e, workers, stated)


def prepare(
    ladder: Ladder, setup: Setup, folder: Path
) -> tuple[ScriptTrial, tuple[configs.Written, ...]]:
    """Write copies of the settings files with the changes of `setup` into `folder`.

    Returns:
        The trial that uses the copies, and the differences from the user's files.

    Raises:
        TrainpaceError: If no file can hold a change.
    """
    script, files = _script_of(ladder), changed_files(ladder, setup)
    folder = folder.absolute()
    output = str(folder / "output")
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
    trial = _trial_of(ladder, setup, command)
    words = configs.copied_command(trial.command, copies, script.folder, output)
    return replace(trial, command=words), files


def _trial_of(ladder: Ladder, setup: Setup, command: str) -> ScriptTrial:
    """Return the trial of a setup for a command, without writing files."""
    split, e, threads = configs.split_command(command), setup.execution, setup.threads
    own_threads = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return ScriptTrial(
        # With --standalone, each node would train alone.
        command=tuple(w for w in split.words if w != "--standalone" or e.nnodes == 1),
        cwd=str(Path(_script_of(ladder).folder).absolute()),
        steps=ladder.steps or SCRIPT_STEPS,
        warmup_steps=ladder.warmup_steps,
        environment=split.environment | setup.environment | own_threads,
        world_size=e.world_size,
        global_batch=e.global_batch,
        nnodes=e.nnodes,
        nproc_per_node=e.nproc_per_node,
        cpus_per_process=None if threads is None else threads + setup.loader.workers,
        gpus_per_node=e.nproc_per_node if ladder.device != "cpu" else 0,
        starts="node" if configs.launcher_of(command) else "rank",
    )


def changed_files(ladder: Ladder, setup: Setup) -> tuple[configs.Written, ...]:
    """Return the user's settings files and command with the changes of `setup`.

    Raises:
        TrainpaceError: If no file can hold a change.
    """
    start, script, loader = ladder.start, _script_of(ladder), setup.loader
    plain = LoaderSettings(workers=loader.workers, shards=loader.shards)
    if loader != plain or setup.engine != start.engine:
        raise TrainpaceError(
            "of a script's loader and engine, only the number of workers and the script's own"
            " settings can be changed from outside."
        )
    launcher = configs.launcher_of(script.command)
    if setup.execution.nnodes > 1 and launcher in ("accelerate", "deepspeed"):
        raise TrainpaceError(
            f"on several nodes {launcher} needs an address or a list of hosts, which only Slurm"
            " knows.",
            "Start the script with python (Lightning) or torchrun: Slurm's nodes then find each"
            " other.",
        )
    workers = loader.workers if loader.workers != start.loader.workers else None
    changes = configs.Changes(before=start.execution, after=setup.execution, workers=workers)
    done = configs.rewrite(_texts(script), changes)
    if done.left:
        why = "; ".join(f"{name} ({why})" for name, why in sorted(done.left.items()))
        raise TrainpaceError(f"its settings files cannot hold {why}.")
    return configs.with_own_keys(done.files, _own_settings(setup))


def _own_settings(setup: Setup) -> dict[str, Any]:
    """Return the script's own settings, with the shards' folder in place of "{shards}"."""
    folder = setup.loader.shards or ""
    folder = str(Path(folder).absolute()) if Path(folder).is_dir() and folder else folder
    return {
        key: value.replace(SHARDS, folder) if isinstance(value, str) else value
        for key, value in setup.settings.items()
    }


def keep_files(ladder: Ladder, setup: Setup, folder: Path) -> Path:
    """Write the settings files of a climb's last setup to FOLDER/kept for the user."""
    kept = folder / "kept"
    make_folder(kept)
    names = _names(_script_of(ladder))
    for written in changed_files(ladder, setup):
        if not configs.is_python(written.file):
            write_whole(kept / names.get(written.file, "command.txt"), written.text)
    (kept / ENVIRONMENT).unlink(missing_ok=True)  # An earlier climb may have left it.
    if setup.environment:
        lines = [
            f"export {name}={shlex.quote(value)}\n" for name, value in setup.environment.items()
        ]
        write_whole(kept / ENVIRONMENT, "".join(lines))
    return kept


def fingerprint(spec: str) -> str:
    """Return a hash of the Python files in the folder of a task's file, or "" for other models.

    If the code changes, earlier measurements do not count.

    Raises:
        UnreadableInput: If the file is missing.
    """
    named = ModelSpec.of(spec)
    if not named.runs_code:
        return ""
    path = Path(named.path).absolute()
    sources = _sources_of(path, path.parent)
    if path.name not in sources:
        raise UnreadableInput(f"cannot read {named.path}: no such file.")
    return _hash_of([named.name, sources])


def fingerprint_of_script(script: Script) -> str:
    """Return a hash of a script's settings files and Python files.

    The Python files are those in the folders of files that the command names, by path or with
    ``-m``.
    """
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
    """Return a hash of each Python file in the folder of `file`, by its path relative to `base`.

    Relative paths keep the hashes equal when the whole project is moved.
    """
    return {
        os.path.relpath(path, base): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(file.absolute().parent.glob("*.py"))
    }


def _file_of_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the file that ``python -m NAME`` runs, if one of the folders has it."""
    for folder in folders:
        inside = folder.joinpath(*name.split("."))
        for file in (inside.with_name(inside.name + ".py"), inside / "__main__.py"):
            if file.is_file():
                return file
    return None


def started_by(trial: ScriptTrial) -> str:
    """Return the trial's command as one line, with its environment variables."""
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
    """Return the settings files that trials copy.

    Python files are only read. They stay where they are, so that their imports work.
    """
    return tuple(file for file in script.configs if not configs.is_python(file))


def _names(script: Script) -> dict[str, str]:
    files = _copied(script)
    plain = [Path(file).name for file in files]
    return {
        file: name if plain.count(name) == 1 else f"{i}-{name}"
        for i, (file, name) in enumerate(zip(files, plain, strict=True))
    }
