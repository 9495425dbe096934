"""Run a command with the recorder in every Python process that it starts, and put back the files that it wrote over."""

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainpace.core.child import no_command, start_in_foreground
from trainpace.core.errors import ending_with
from trainpace.core.host import temporary_environment
from trainpace.core.records import make_folder, write_whole
from trainpace.watch import tasks
from trainpace.watch.event_logs import Notes, header_of, records_of
from trainpace.watch.inside.event_log import OF_TRIAL, STOP_AFTER, TASK, aside_of, state_of
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
        tasks.arrive(folder, task)
    if keeps:
        write_whole(folder / COMMAND_FILE, json.dumps(note))
    around = environment(folder, os.environ, trials, stop_after_s, task)
    lookout = (
        tasks.Lookout(folder, task, _limit_s(trials))
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
        code = tasks.first_failure(tasks.ends(folder, task)) or code
    tidies = trials is not None or stop_after_s is not None
    if tidies and task is None:
        note |= _tidy(
            folder, notes_in(folder), trials, whole=stop_after_s is not None and code == 0
        )
    note |= {"seconds": time.monotonic() - begun, "exit_code": code}
    shown = code if code >= 0 else 128 - code
    with ending_with(shown):
        make_folder(folder)  # the command may have removed it
        if task is not None:
            tasks.end(folder, task, code)
            if keeps or tidies:
                missing = tasks.missing_after(folder, task)
            if tidies:
                note |= _tidy_in_turn(folder, task, trials, missing)
            if keeps:
                gave_up = "" if lookout is None else lookout.gave_up
                note["unended"] = tasks.ends_in_words(folder, task, missing, gave_up)
                note["exit_code"] = code or tasks.first_failure(tasks.ends(folder, task))
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
    remove_trial_checkpoints(noted)
    if trials is None or "writes_in" not in trials:
        return put_back(folder, noted, whole, accounts)
    return {}


def _tidy_in_turn(
    folder: Path, task: Task, trials: Mapping[str, object] | None, missing: Sequence[int]
) -> dict[str, list[str]]:
    """Each task tidies up after its own processes, since what they wrote may be on its node's disk; one that wrote over the same
    files as earlier tasks comes after these. For the first task, what all of them put back."""
    mine = notes_in(folder, lambda header: header.get("task") == task.number)
    if copied := set(mine.values("copied")):
        before = [
            n for n in range(task.number) if n not in missing and copied & _copied_by(folder, n)
        ]
        tasks.await_tidied(folder, task, before)
    host = socket.gethostname()
    of_host = notes_in(folder, lambda header: header.get("host") == host)
    tasks.tidied(folder, task, _tidy(folder, mine, trials, False, of_host))
    if not task.reports:
        return {}
    tasks.await_tidied(folder, task, [n for n in range(task.tasks) if n not in missing])
    return tasks.put_back_by_all(folder, task)


def _copied_by(folder: Path, number: int) -> set[str]:
    return set(notes_in(folder, lambda header: header.get("task") == number).values("copied"))


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
    lookout: tasks.Lookout | None = None,
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


def _wait(process: subprocess.Popen[bytes], lookout: tasks.Lookout) -> int:
    """Its exit code; it is ended where there is nothing to wait for any more."""
    patience_s = tasks.LOOK_S
    while True:
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            if lookout.gave_up:
                process.kill()
            elif lookout.gives_up():
                process.terminate()
                patience_s = END_S


NOT_RESTORED = "earlier"
"""The folder of a recording with files of earlier runs that were not put back."""
_PATIENCE_S = 1.0
"""Loader workers that were killed have a log open for a moment longer."""


def notes_in(folder: Path, of: Callable[[dict[str, Any]], bool] | None = None) -> Notes:
    """What the command's processes have noted; with `of`, those whose trail has a header of that kind."""
    paths = [
        path for path in folder.glob("process-*.trail") if of is None or of(header_of(path) or {})
    ]
    return Notes(record for path in paths for record in records_of(path))


def put_back(
    folder: Path, notes: Notes, whole: bool, accounts: Notes | None = None
) -> dict[str, list[str]]:
    """Put back the files of earlier runs over which a script wrote that was ended or failed: names of those `restored`, and of
    those `left` as they are, since another program writes them too; their earlier content is then kept in the recording's folder.
    Where the script came to its own end (`whole`: with exit code 0), what it wrote stays, as it does alone. `accounts`: notes of
    all processes on this host that may have written the same files, where `notes` are of some."""
    whole = whole and not any(notes.values("stopped"))
    saved = {(place, tuple(state)) for states in notes.values("saved") for place, state in states}
    copied = [str(place) for place in notes.values("copied")]
    shared = set() if whole else _written_by_others((accounts or notes).values("written"), copied)
    done: dict[str, list[str]] = {"restored": [], "left": []}
    for place in dict.fromkeys((*map(str, notes.values("earlier")), *copied)):
        aside = aside_of(place, str(folder.resolve()))
        if not os.path.lexists(aside):
            continue
        with contextlib.suppress(OSError):
            if whole:
                _remove(aside)
            elif place in shared or (place not in copied and _is_anothers(place, saved)):
                kept = _unused(folder / NOT_RESTORED / os.path.basename(place))
                kept.parent.mkdir(exist_ok=True)
                shutil.move(aside, kept)
                done["left"].append(place)
            else:
                _remove(place)
                os.rename(aside, place)
                done["restored"].append(place)
    return {name: places for name, places in done.items() if places}


def remove_trial_checkpoints(notes: Notes) -> None:
    """Remove checkpoints that were written under trials, beside the script's own, and the folders made for them that are empty
    then: a script that resumes from its newest folder would find nothing there."""
    written = [
        place for place in map(str, notes.values("trial_checkpoint")) if place.endswith(OF_TRIAL)
    ]
    for place in written:
        Path(place).unlink(missing_ok=True)
    for folder in sorted(map(str, notes.values("made_folder")), key=len, reverse=True):
        if any(place.startswith(folder + os.sep) for place in written):
            with contextlib.suppress(OSError):  # which holds something else, or is gone
                os.rmdir(folder)


def _is_anothers(place: str, saved: Collection[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether a checkpoint is another one than this run left there."""
    states = {state for name, state in saved if name == place}
    return bool(states) and os.path.lexists(place) and state_of(place) not in states


def _written_by_others(written: Collection[Any], places: Collection[str]) -> set[str]:
    """Files that other programs have written meanwhile or have open, and those of which nobody can say it, since a process was
    killed before it could give its account (`written`: those of all processes)."""
    accounts = [account for found in written for account in found]
    shared = set()
    for place in set(places):
        own = [account for account in accounts if account["place"] == place]
        closed = max((account["closed"] for account in own), default=0)
        mine = sum(account["opened"] - account["open"] for account in own)
        is_same = os.path.exists(place) and all(
            account["inode"] == os.stat(place).st_ino for account in own
        )
        if not own or closed > mine or not is_same:
            shared.add(place)
    until = time.monotonic() + _PATIENCE_S
    while (held := _held(set(places) - shared)) and time.monotonic() < until:
        time.sleep(0.1)
    return shared | held


def _held(places: Collection[str]) -> set[str]:
    """Those of the files that some process, of those that we may ask, has open for writing."""
    if not places:
        return set()
    import psutil

    real = {os.path.realpath(place): place for place in places}
    held = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            held |= {
                real[f.path]
                for f in process.open_files()
                if f.path in real and getattr(f, "mode", "w") != "r"
            }
    return held


def _unused(path: Path) -> Path:
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _remove(place: str) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)
