"""A trial of an unchanged script, by its own launcher, under the recorder of `trainpace watch`, here or on Slurm's nodes.

The recorder ends the script after the steps that were wanted. It writes checkpoints beside their places while it runs
(torch.save to a path; they are removed at the end), leaves out those of transformers and DeepSpeed, and refuses to open, remove
or rename anything outside the trial's own folder (`watch.inside.start`), so that checkpoints and step counters of real runs
stay as they are.
"""

import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from trainpace.core.child import no_command
from trainpace.core.records import Record, write_whole
from trainpace.core.stats import median
from trainpace.measure import cpu_name
from trainpace.run.job import Ended, Job, Starts, run_here
from trainpace.run.slurm import Slurm
from trainpace.run.trial import FailedTrial, TrialResult, result_of
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
