"""`watch`: an unchanged training script, recorded."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainpace.errors import UnknownName
from trainpace.process import usable_cores
from trainpace.records import Record
from trainpace.verbs.places import data_place
from trainpace.verbs.request import Argument, Field, Misuse, Progress, Request
from trainpace.watch import Recording, read_recording, watch

if TYPE_CHECKING:
    from trainpace.journal import Pace

RecordingFolder = Annotated[
    str | None, Field("Where to record.  [default: a new folder in the user's data folder]", metavar="FOLDER")
]
Command = Annotated[tuple[str, ...], Argument("The command, with its arguments.", metavar="[COMMAND]...", rest=True)]


class WatchRequest(Request):
    """A command to run, or a recording to read again. `stdout`: where the command's output goes in place of our own."""

    command: Command = ()
    output: RecordingFolder = None
    recorded: Annotated[
        str | None, Field("Show a recording again, in place of running a command.", metavar="FOLDER", option="from")
    ] = None
    stdout: int | None = None


class Watched(Record):
    """A recording, the folder that it lies in, and the exit code of the command that was run for it (0 for an old one)."""

    recording: Recording
    folder: Path
    exit_code: int = 0


def run(request: WatchRequest, progress: Progress) -> Watched:
    if bool(request.command) == bool(request.recorded):
        raise Misuse("give a command, as in: trainpace watch -- python train.py, or `recorded` FOLDER.")
    if request.recorded:
        folder = Path(request.recorded)
        return Watched(recording=read_recording(folder), folder=folder)
    return record(request.command, request.output, request.stdout, progress)


def record(
    command: Sequence[str], output: str | None, stdout: int | None, progress: Progress,
    trials: Mapping[str, object] | None = None,
) -> Watched:  # fmt: skip
    """Run the command with the recorder in it. `trials`: interventions to try."""
    folder = _folder(output, command)
    load, cores = os.getloadavg()[0], usable_cores()
    if load > cores / 2:
        progress.note(
            f"note: other programs keep {load:.1f} of {cores} cores busy (load average), so the times of this recording may be"
            " too long."
        )
    code = watch(command, folder, trials, output=stdout)
    return Watched(recording=read_recording(folder), folder=folder, exit_code=code)


def pace_of(run: str, journal: str | None) -> Pace:
    from trainpace.journal import pace_of_entry, pace_of_recording

    if Path(run).is_dir():
        return pace_of_recording(read_recording(Path(run)), run)
    from trainpace.journal import Journal

    with Journal.open(journal) as opened:
        try:
            return pace_of_entry(opened.get(run))
        except UnknownName:
            raise UnknownName(
                "baseline", run, (), "Name the folder of a recording, or a run that trainpace journal list shows."
            ) from None


def _folder(output: str | None, command: Sequence[str]) -> Path:
    """The folder asked for, which must be new or empty, or one named after the script and the time."""
    if output is not None:
        folder = Path(output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Misuse(f"{folder} is there already; name a new folder.")
        return folder
    script = next((Path(part).stem for part in command if part.endswith(".py")), Path(command[0]).name)
    base = data_place("recordings") / f"{script}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 100)))
    return next(folder for folder in names if not folder.exists())
