"""`diagnose`: find what slows a training script down, by experiments or from a profiler trace."""

from pathlib import Path
from typing import Annotated, Literal

from trainpace.core.errors import TrainpaceError, ending_with
from trainpace.core.records import Record
from trainpace.diagnose import Diagnosis, ProfiledTraining, diagnose, is_trace, read_profiled
from trainpace.verbs.request import (
    COUNT,
    DURATION,
    EPOCHS,
    Field,
    Misuse,
    Progress,
    Request,
    within,
)
from trainpace.verbs.watch import Command, RecordingFolder, Watched, record
from trainpace.watch import read_recording

STEPS = within("count", 1, 1e9, COUNT.parse)
PATIENCE_S = 600.0
"""Seconds that ranks wait for rank 0's decision, in addition to the time for interventions."""
Intervention = Literal["cached_batch", "no_sync", "few_samples", "muted", "fewer_threads"]


class DiagnoseRequest(Request):
    """Request to diagnose a command, a recording folder, or a profiler trace.

    `stdout` is the file descriptor that receives the command's output; None means this process's
    own stdout.
    """

    command: Command = ()
    epochs: Annotated[
        float | None,
        Field(
            "Epochs of the whole job, to say what a change saves in it.  [default: as the command"
            " or the script's variables say]",
            EPOCHS,
        ),
    ] = None
    rounds: Annotated[
        int,
        Field(
            "How often each intervention is tried: more often where noise hides what it saves, less"
            " often where steps take long.",
            STEPS,
        ),
    ] = 4
    block: Annotated[int, Field("Steps of one try, at most.", STEPS)] = 8
    warm_up: Annotated[int, Field("Steps before the first try, at most.", STEPS)] = 10
    budget: Annotated[
        float, Field("Time for all of this, from the script's first step on.", DURATION)
    ] = 120.0
    without: Annotated[tuple[Intervention, ...], Field("Leave an intervention out.")] = ()
    output: RecordingFolder = None
    stdout: int | None = None


class Diagnosed(Record):
    """A diagnosis. `was_read` is True if it comes from an earlier recording and nothing was run."""

    diagnosis: Diagnosis
    watched: Watched
    was_read: bool = False


class Profiled(Record):
    """A diagnosed profiler trace, and its file or folder."""

    training: ProfiledTraining
    place: Path


def run(request: DiagnoseRequest, progress: Progress) -> Diagnosed | Profiled | Watched:
    """Diagnose a command, a recording or a profiler trace.

    In a job of several tasks, the first task reports. The other tasks return a `Watched` without
    ranks.
    """
    r, command = request, request.command
    if not command:
        raise Misuse(
            "Give a command, as in: trainpace diagnose -- python train.py, a recording's folder, or"
            " a profiler's trace."
        )
    if is_trace(command[0]):
        if len(command) > 1:
            raise Misuse(f"{command[0]} is a profiler's trace, which takes no further arguments.")
        place = Path(command[0])
        with progress.work(f"reading {place}"):
            return Profiled(training=read_profiled(place), place=place)
    was_read = len(command) == 1 and Path(command[0]).is_dir()
    if was_read:
        folder = Path(command[0])
        watched = Watched(recording=read_recording(folder), folder=folder)
    else:
        trials = {
            "block_steps": r.block,
            "rounds": r.rounds,
            "warm_up_steps": max(5, r.warm_up),
            "budget_s": r.budget,
            "limit_s": r.budget + PATIENCE_S,
            "without": list(r.without),
        }
        watched = record(command, r.output, r.stdout, progress, trials)
        if not watched.reports:
            return watched
    with ending_with(watched.exit_code or TrainpaceError.exit_code):
        return Diagnosed(
            diagnosis=diagnose(watched.recording, r.epochs), watched=watched, was_read=was_read
        )
