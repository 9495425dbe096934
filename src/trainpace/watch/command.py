"""Runs a command with the recorder in every Python process that it starts, and otherwise unchanged."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainpace.core.child import no_command, start_in_foreground
from trainpace.core.errors import ending_with
from trainpace.core.host import temporary_environment
from trainpace.core.records import make_folder, write_whole
from trainpace.watch import meeting, restoring
from trainpace.watch.inside.trail import STOP_AFTER, TASK
from trainpace.watch.notes import Notes
from trainpace.watch.tasks import Task

INJECT = Path(__file__).parent / "inject"
COMMAND_FILE = "command.json"
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which a job's scheduler tells a script to save its state; they are passed on to the command."""
END_S = 40.0
"""How long a command that is ended may take for it: torchrun gives its workers 30 s."""


def environment(
    folder: Path,
    before: Mapping[str, str],
    trials: Mapping[str, object] | None = None,
    stop_after_s: float | None = None,
    task: Task | None = None,
) -> dict[str, str]:
    """The command's environment: the recorder's folder first on Python's path, and where to record."""
    path = os.pathsep.join(p for p in (str(INJECT), before.get("PYTHONPATH", "")) if p)
    changed = {**before, "PYTHONPATH": path, "TRAINPACE_WATCH": str(folder.resolve())}
    number = None if task is None else task.number
    for name, value in (("TRAINPACE_TRIALS", trials), (STOP_AFTER, stop_after_s), (TASK, number)):
        changed.pop(name, None)
        if value is not None:
            changed[name] = json.dumps(value)
    return changed


def watch(
    command: Sequence[str],
    folder: Path,
    trials: Mapping[str, object] | None = None,
    output: int | None = None,
    task: Task | None = None,
    output_file: Path | None = None,
    stop_after_s: float | None = None,
    busy: str = "",
) -> int:
    """Run the command to its end, recording into `folder`; returns its exit code, 128 + n where signal n ended it. As a `task`
    of several the first one waits for the others' ends, for a bounded time, and keeps how they ended; under `trials` each of them
    does, and where one fails the others' commands are ended, with its exit code. With `stop_after_s` its
    training ends after so many seconds of steps, and files of earlier runs that it wrote over are put back. `busy`: what is
    kept in the recording of other programs, in words.

    The command keeps its input, its output (unless `output` is another file descriptor for what it prints, or `output_file` takes
    that and its errors) and its signals: an interrupt reaches it as usual, others are passed on, and the recording so far is
    kept. Raises TrainpaceError where the command cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise no_command(command[0])
    begun = time.monotonic()
    note = {
        "command": list(command),
        "started": time.time(),
        "seconds": None,
        "exit_code": None,
        "trials": trials,
    }
    note |= {"busy": busy} if busy else {}
    note |= {"together_by": "torchrun" if task.is_node else "srun"} if task is not None else {}
    make_folder(folder)
    keeps = task is None or task.reports
    if task is not None:
        meeting.arrive(folder, task)
    if keeps:
        write_whole(folder / COMMAND_FILE, json.dumps(note))
    around = environment(folder, os.environ, trials, stop_after_s, task)
    lookout = (
        meeting.Lookout(folder, task, _limit_s(trials))
        if task is not None and trials is not None
        else None
    )
    with contextlib.ExitStack() as stack:
        errors = None
        if output_file is not None:
            output = errors = stack.enter_context(output_file.open("wb")).fileno()
        if trials is not None:
            around |= stack.enter_context(temporary_folder())
        code = _run(command, around, output, errors, lookout)
    if lookout is not None and lookout.gave_up and task is not None:
        code = meeting.first_failure(meeting.ends(folder, task)) or code
    tidies = trials is not None or stop_after_s is not None
    if tidies and task is None:
        note |= _tidy(
            folder, restoring.notes_in(folder), trials, whole=stop_after_s is not None and code == 0
        )
    note |= {"seconds": time.monotonic() - begun, "exit_code": code}
    shown = code if code >= 0 else 128 - code
    with ending_with(shown):
        make_folder(folder)  # the command may have removed it
        if task is not None:
            meeting.end(folder, task, code)
            if keeps or tidies:
                missing = meeting.missing_after(folder, task)
            if tidies:
                note |= _tidy_in_turn(folder, task, trials, missing)
            if keeps:
                gave_up = "" if lookout is None else lookout.gave_up
                note["unended"] = meeting.ends_in_words(folder, task, missing, gave_up)
                note["exit_code"] = code or meeting.first_failure(meeting.ends(folder, task))
        if keeps:
            write_whole(folder / COMMAND_FILE, json.dumps(note))
    return shown


def _limit_s(trials: Mapping[str, object] | None) -> float:
    """How long ranks wait for the first one's word."""
    limit = (trials or {}).get("limit_s")
    return float(limit) if isinstance(limit, int | float) else float("inf")


def _tidy(
    folder: Path,
    noted: Notes,
    trials: Mapping[str, object] | None,
    whole: bool,
    accounts: Notes | None = None,
) -> dict[str, list[str]]:
    restoring.remove_trial_checkpoints(noted)
    if trials is None or "writes_in" not in trials:
        return restoring.put_back(folder, noted, whole, accounts)
    return {}


def _tidy_in_turn(
    folder: Path, task: Task, trials: Mapping[str, object] | None, missing: Sequence[int]
) -> dict[str, list[str]]:
    """Each task tidies up after its own processes, since what they wrote may be on its node's disk; one that wrote over the same
    files as earlier tasks comes after these. For the first task, what all of them put back."""
    mine = restoring.notes_in(folder, lambda header: header.get("task") == task.number)
    if copied := set(mine.values("copied")):
        before = [
            n for n in range(task.number) if n not in missing and copied & _copied_by(folder, n)
        ]
        meeting.await_tidied(folder, task, before)
    host = socket.gethostname()
    of_host = restoring.notes_in(folder, lambda header: header.get("host") == host)
    meeting.tidied(folder, task, _tidy(folder, mine, trials, False, of_host))
    if not task.reports:
        return {}
    meeting.await_tidied(folder, task, [n for n in range(task.tasks) if n not in missing])
    return meeting.put_back_by_all(folder, task)


def _copied_by(folder: Path, number: int) -> set[str]:
    return set(
        restoring.notes_in(folder, lambda header: header.get("task") == number).values("copied")
    )


@contextlib.contextmanager
def temporary_folder() -> Iterator[dict[str, str]]:
    """Environment variables that give a script under trials a temporary folder: it is ended before it can remove its
    own. The compiler's cache stays where it was."""
    # not beside the recording: sockets have short names
    with tempfile.TemporaryDirectory(
        prefix="trainpace-trial-", ignore_cleanup_errors=True
    ) as folder:
        yield temporary_environment(folder)


def _run(
    command: Sequence[str],
    around: Mapping[str, str],
    output: int | None,
    errors: int | None,
    lookout: meeting.Lookout | None = None,
) -> int:
    process = start_in_foreground(command, around, stdout=output, stderr=errors)
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, lambda n, _: process.send_signal(n)) for n in PASSED_ON}
        # the terminal sends it to the command as well
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait() if lookout is None else _wait(process, lookout)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _wait(process: subprocess.Popen[bytes], lookout: meeting.Lookout) -> int:
    """Its exit code; it is ended where there is nothing to wait for any more."""
    patience_s = meeting.LOOK_S
    while True:
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            if lookout.gave_up:
                process.kill()
            elif lookout.gives_up():
                process.terminate()
                patience_s = END_S
