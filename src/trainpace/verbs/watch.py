"""`watch`: record an unchanged training script."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainpace.core.errors import TrainpaceError, UnknownName, ending_with
from trainpace.core.host import core_numbers, usable_cores, user_folder
from trainpace.core.records import Record
from trainpace.diagnose import is_trace
from trainpace.verbs.request import Argument, Field, Misuse, Progress, Request
from trainpace.watch import (
    Recording,
    Task,
    is_one_of_unnumbered_nodes,
    meet,
    node_of,
    read_recording,
    take,
    task_of,
    watch,
)

if TYPE_CHECKING:
    from trainpace.journal import Pace

BUSY_S = 0.3
"""Duration of the CPU load check before a command starts, in seconds."""
RecordingFolder = Annotated[
    str | None,
    Field("Where to record.  [default: a new folder in the user's data folder]", metavar="FOLDER"),
]
Command = Annotated[
    tuple[str, ...], Argument("The command, with its arguments.", metavar="[COMMAND]...", rest=True)
]


class WatchRequest(Request):
    """Request to run and record a command, or to read an earlier recording.

    `stdout` is the file descriptor that receives the command's output; None means this process's
    own stdout.
    """

    command: Command = ()
    output: RecordingFolder = None
    recorded: Annotated[
        str | None,
        Field(
            "Show a recording instead of running a command.",
            metavar="FOLDER",
            option="from",
            excludes="command",
        ),
    ] = None
    stdout: int | None = None


class Watched(Record):
    """A recording, its folder, and the exit code of the recorded command.

    The exit code is 0 for an earlier recording. `reports` is False for an srun task or a node that
    leaves the report to the first one. Its recording has no ranks.
    """

    recording: Recording
    folder: Path
    exit_code: int = 0
    reports: bool = True


def run(request: WatchRequest, progress: Progress) -> Watched:
    if not (request.command or request.recorded):
        raise Misuse(
            "Give a command, as in: trainpace watch -- python train.py, or `recorded` FOLDER."
        )
    if request.recorded:
        folder = Path(request.recorded)
        if is_trace(folder):
            raise Misuse(f"{folder} is a profiler's trace.", "Read it with trainpace diagnose.")
        return Watched(recording=read_recording(folder), folder=folder)
    return record(request.command, request.output, request.stdout, progress)


def record(
    command: Sequence[str],
    output: str | None,
    stdout: int | None,
    progress: Progress,
    trials: Mapping[str, object] | None = None,
) -> Watched:
    """Run a command with the recorder attached.

    All tasks of one srun record together and start interventions together. The same holds for
    torchrun on several nodes with a shared folder.

    Args:
        command: The command to run.
        output: Recording folder; None creates one.
        stdout: File descriptor for the command's output.
        progress: Receives notes and progress.
        trials: Settings of the interventions; None runs none.
    """
    task = _task(command, output, trials is not None)
    folder = new_folder(output, command) if task is None else _shared_folder(output, command, task)
    if trials is not None and task is not None:
        try:
            with progress.work(f"waiting for all {task.tasks} {task.word}s at {folder}"):
                meet(folder, task)
        except TrainpaceError as error:
            if task.reports or task.is_node:
                raise
            return _reported_elsewhere(command, folder, error.exit_code)
    reports, busy = task is None or task.reports, busy_words()
    if busy and reports:
        progress.note(f"note: {busy}")
    code = watch(command, folder, trials, stdout, task, busy=busy)
    if reports:
        with ending_with(code):
            watched = Watched(recording=read_recording(folder), folder=folder, exit_code=code)
            return kept(watched, progress)
    if task is not None and task.is_node:  # This node's user does not see the output of node 0.
        progress.note(f"note: node 0 prints the report for all nodes; recorded in {folder}")
    return _reported_elsewhere(command, folder, code)


def kept(watched: Watched, progress: Progress) -> Watched:
    """Store the pace of a recording in the user's journal, if there are training steps."""
    from trainpace.journal import Journal, anonymous_entry, entry_of_recording

    if watched.recording.ranks:
        try:
            with Journal.open() as journal:
                entry = entry_of_recording(watched.recording, watched.folder)
                journal.add(anonymous_entry(entry))
        except (TrainpaceError, OSError) as error:
            progress.note(f"note: the recording is not in the journal: {error}")
    return watched


def _task(command: Sequence[str], output: str | None, with_trials: bool) -> Task | None:
    """Return the task or node that this process is, or None if it is the only one.

    Raises:
        Misuse: The tasks could not start interventions together.
    """
    task = task_of(os.environ)
    if task is None and (output is not None or with_trials):
        task = node_of(command)
    if not with_trials:
        return task
    if task is None and is_one_of_unnumbered_nodes(command):
        raise Misuse(
            "torchrun has several nodes and no --node-rank.",
            "Add it: 0 on the first node, 1 on the second, ...",
        )
    if task is not None and task.is_node and output is None:
        raise Misuse(
            f"diagnose over {task.tasks} nodes needs a shared folder.",
            "Give the same `output` folder on every node, on a disk that all of them see.",
        )
    return task


def _reported_elsewhere(command: Sequence[str], folder: Path, exit_code: int) -> Watched:
    own = Recording(command=tuple(command), seconds=None, exit_code=exit_code, ranks=())
    return Watched(recording=own, folder=folder, exit_code=exit_code, reports=False)


def busy_words() -> str:
    """Return a warning if other programs keep this machine busy now, else "".

    A load average would also count programs that have just ended.
    """
    return busy_in_words(busy_cores(core_numbers()), usable_cores())


def busy_cores(usable: Sequence[int] | None) -> float:
    """Return the number of busy cores over the next `BUSY_S` seconds.

    `usable` lists the cores to count; None counts all.
    """
    import psutil

    shares = psutil.cpu_percent(interval=BUSY_S, percpu=True)
    return (
        math.fsum(shares if usable is None else [shares[i] for i in usable if i < len(shares)])
        / 100
    )


def busy_in_words(busy: float, cores: int) -> str:
    if busy <= cores / 2:
        return ""
    kept = (
        f"{busy:.1f} of {cores} cores busy" if round(busy, 1) < cores else f"all {cores} cores busy"
    )
    return f"other programs keep {kept}, so the times of this recording may be too long."


def check_one_task(task: Task | None, verb: str) -> None:
    """Raise Misuse under srun, because every task would start the command."""
    if task is not None:
        raise Misuse(
            f"This is task {task.number} of {task.tasks} of srun.",
            f"Put srun after trainpace: trainpace {verb} -- srun COMMAND.",
        )


def pace_of(run: str, journal: str | None) -> Pace:
    """Return the pace of a baseline: a recording's folder, or a run in the journal."""
    from trainpace.journal import pace_of_entry, pace_of_recording

    if Path(run).is_dir():
        return pace_of_recording(read_recording(Path(run)), run)
    from trainpace.journal import Journal

    with Journal.open(journal) as opened:
        try:
            return pace_of_entry(opened.get(run))
        except UnknownName:
            raise UnknownName(
                "baseline",
                run,
                (),
                "Name the folder of a recording, or a run that trainpace journal list shows.",
            ) from None


def _shared_folder(output: str | None, command: Sequence[str], task: Task) -> Path:
    """Return the recording folder of a multi-task job.

    It is the requested folder, or one named after the script and the step, which is the same for
    all tasks.
    """
    folder = (
        Path(output)
        if output is not None
        else user_folder("data") / "recordings" / f"{_stem(command)}-slurm-{task.step}"
    )
    if not take(folder, task):
        raise Misuse(f"{folder} already exists.", "Give a new folder.")
    return folder


def _stem(command: Sequence[str]) -> str:
    return next(
        (Path(part).stem for part in command if part.endswith(".py")), Path(command[0]).name
    )


def new_folder(output: str | None, command: Sequence[str]) -> Path:
    """Return the requested folder, or one named after the script and the time.

    A requested folder must be new or empty.
    """
    if output is not None:
        folder = Path(output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Misuse(f"{folder} already exists.", "Give a new folder.")
        return folder
    base = (
        user_folder("data")
        / "recordings"
        / f"{_stem(command)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    names = (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 100)))
    return next(folder for folder in names if not folder.exists())
