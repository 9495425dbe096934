"""Run a command with the recorder in each of its Python processes, and clean up after it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.child import no_command, start_in_foreground
from trainpace.core.errors import ending_with
from trainpace.core.records import make_folder, write_whole
from trainpace.watch import tasks
from trainpace.watch.event_logs import Notes, header_of, records_of
from trainpace.watch.inside.event_log import OF_TRIAL, STOP_AFTER, TASK, aside_of, state_of
from trainpace.watch.tasks import Task

INJECT = Path(__file__).parent / "inject"
COMMAND_FILE = "command.json"
CANARY_S = 0.3
"""Time for another process of the group to end after an interrupt, in seconds."""
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to ask a script to save its state. They are forwarded."""
END_S = 40.0
"""Seconds that a command may take to end. torchrun gives its workers 30 s."""


def environment(
    folder: Path,
    before: Mapping[str, str],
    trials: Mapping[str, object] | None = None,
    stop_after_s: float | None = None,
    task: Task | None = None,
) -> dict[str, str]:
    """Return the environment for the command, with the recorder's folder first on Python's path.

    Args:
        folder: Folder for the recording.
        before: The current environment.
        trials: Settings of interventions, or None.
        stop_after_s: Seconds of steps after which the training ends, or None.
        task: This task if several record into one folder.
    """
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
    """Run a command to its end and record it.

    The command keeps its input, output and signals. Signals to this process alone are forwarded. If
    the command is killed, the recording so far survives.

    If this process is one of several tasks, the first task waits for the others to end, for a
    limited time. It then stores how they ended. With `trials` or `stop_after_s`, every task waits.
    With `trials`, if one task fails, the commands of the others are ended, with its exit code.

    Args:
        command: The program and its arguments.
        folder: Folder for the recording.
        trials: Settings of interventions, or None.
        output: File descriptor for the command's output.
        task: This task if several record into one folder.
        output_file: File for the command's output and errors.
        stop_after_s: Seconds of steps after which the training ends. Files of earlier runs that the
            training overwrote are put back.
        busy: Sentence on other programs that keep the machine busy, for the recording.

    Returns:
        The exit code, or 128 + n if signal n ended the command.

    Raises:
        TrainpaceError: The command cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise no_command(command[0])
    begun, run = time.monotonic(), _Run(folder, trials, stop_after_s, task)
    make_folder(folder)
    if task is not None:
        tasks.arrive(folder, task)
    note = run.first_note(command, busy)
    run.write(note)
    code, gave_up = run.execute(command, output, output_file)
    if run.cleans_up and task is None:
        ended_by_itself = stop_after_s is not None and code == 0
        note |= run.clean_up(notes_in(folder), ended_by_itself)
    note |= {"seconds": time.monotonic() - begun, "exit_code": code}
    shown = code if code >= 0 else 128 - code
    with ending_with(shown):
        make_folder(folder)  # The command may have removed the folder.
        if task is not None:
            note |= run.end_of_task(task, code, gave_up)
        run.write(note)
    return shown


class _Run(NamedTuple):
    """Arguments of `watch` that its parts need."""

    folder: Path
    trials: Mapping[str, Any] | None
    stop_after_s: float | None
    task: Task | None

    @property
    def cleans_up(self) -> bool:
        return self.trials is not None or self.stop_after_s is not None

    def first_note(self, command: Sequence[str], busy: str) -> dict[str, Any]:
        note: dict[str, Any] = {
            "command": list(command),
            "started": time.time(),
            "seconds": None,
            "exit_code": None,
            "trials": self.trials,
        }
        if busy:
            note["busy"] = busy
        if self.task is not None:
            note["together_by"] = "torchrun" if self.task.is_node else "srun"
        return note

    def write(self, note: dict[str, Any]) -> None:
        """Write the note, unless another task reports."""
        if self.task is None or self.task.reports:
            write_whole(self.folder / COMMAND_FILE, json.dumps(note))

    def execute(
        self, command: Sequence[str], output: int | None, output_file: Path | None
    ) -> tuple[int, str]:
        """Run the command.

        Returns:
            Its exit code, or the code of the task that failed first, and the reason if Trainpace
            ended the command.
        """
        around = environment(self.folder, os.environ, self.trials, self.stop_after_s, self.task)
        lookout = None
        if self.task is not None and self.trials is not None:
            # Ranks wait this long for rank 0's decisions.
            still_s = float(self.trials.get("limit_s", "inf"))
            lookout = tasks.Lookout(self.folder, self.task, still_s)
        with contextlib.ExitStack() as stack:
            errors = None
            if output_file is not None:
                output = errors = stack.enter_context(output_file.open("wb")).fileno()
            code = _run(command, around, output, errors, lookout)
        if lookout is None or not lookout.gave_up:
            return code, ""
        return tasks.first_failure(tasks.ends(self.folder, lookout.task)) or code, lookout.gave_up

    def end_of_task(self, task: Task, code: int, gave_up: str) -> dict[str, Any]:
        """Report the end of this task, wait for the others if necessary, and clean up in turn."""
        tasks.end(self.folder, task, code)
        if not (task.reports or self.cleans_up):
            return {}
        missing = tasks.missing_after(self.folder, task)
        done: dict[str, Any] = self._clean_up_in_turn(task, missing) if self.cleans_up else {}
        if task.reports:
            done["unended"] = tasks.ends_in_words(self.folder, task, missing, gave_up)
            done["exit_code"] = code or tasks.first_failure(tasks.ends(self.folder, task))
        return done

    def clean_up(
        self, notes: Notes, ended_by_itself: bool, accounts: Notes | None = None
    ) -> dict[str, list[str]]:
        remove_trial_checkpoints(notes)
        stays = ended_by_itself and not any(notes.values("stopped"))
        if not stays:
            remove_temporary(notes)
        if self.trials is None or "writes_in" not in self.trials:
            return put_back(self.folder, notes, stays, accounts)
        return {}

    def _clean_up_in_turn(self, task: Task, missing: Sequence[int]) -> dict[str, list[str]]:
        """Clean up after the processes of this task.

        Each task cleans up itself, because its files may be on its node's own disk. A task that
        overwrote the same files as earlier tasks waits for them.

        Returns:
            For the first task, the files that all tasks have put back. Empty for other tasks.
        """
        folder, host = self.folder, socket.gethostname()
        present = [n for n in range(task.tasks) if n not in missing]

        def of_task(number: int) -> Notes:
            return notes_in(folder, lambda header: header.get("task") == number)

        mine = of_task(task.number)
        copied = set(mine.values("copied"))
        earlier = [n for n in present if n < task.number] if copied else []
        same = [n for n in earlier if copied & set(of_task(n).values("copied"))]
        tasks.await_tidied(folder, task, same)
        of_host = notes_in(folder, lambda header: header.get("host") == host)
        tasks.tidied(folder, task, self.clean_up(mine, False, of_host))
        if not task.reports:
            return {}
        tasks.await_tidied(folder, task, present)
        return tasks.put_back_by_all(folder, task)


def _run(
    command: Sequence[str],
    around: Mapping[str, str],
    output: int | None,
    errors: int | None,
    lookout: tasks.Lookout | None = None,
) -> int:
    process = start_in_foreground(command, around, stdout=output, stderr=errors)
    if threading.current_thread() is not threading.main_thread():
        return process.wait() if lookout is None else _wait(process, lookout)
    none = subprocess.DEVNULL
    canary = start_in_foreground(["sleep", "1000000"], around, stdin=none, stdout=none, stderr=none)

    def interrupt(number: int, _: object) -> None:
        # A terminal sends the interrupt to the whole process group, and so to the command as well.
        time.sleep(CANARY_S)
        if canary.poll() is None:
            process.send_signal(number)

    before = {n: signal.signal(n, lambda n, _: process.send_signal(n)) for n in PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        return process.wait() if lookout is None else _wait(process, lookout)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
        canary.kill()
        canary.wait()


def _wait(process: subprocess.Popen[bytes], lookout: tasks.Lookout) -> int:
    """Return the exit code of the process. The process is ended if `lookout` gives up."""
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
"""Subfolder of a recording for files of earlier runs that were not put back."""
_PATIENCE_S = 1.0
"""Seconds to wait until loader workers that were killed have closed their files."""


def notes_in(folder: Path, of: Callable[[dict[str, Any]], bool] | None = None) -> Notes:
    """Return the notes of the command's processes.

    With `of`, only logs with an accepted header count.
    """
    paths = [
        path for path in folder.glob("process-*.trail") if of is None or of(header_of(path) or {})
    ]
    return Notes(record for path in paths for record in records_of(path))


def put_back(
    folder: Path, notes: Notes, stays: bool, accounts: Notes | None = None
) -> dict[str, list[str]]:
    """Put back the files of earlier runs that the script overwrote.

    Args:
        folder: Folder of the recording.
        notes: Notes of the processes whose files are put back.
        stays: The script's own files stay, because it ended by itself.
        accounts: Notes of all processes on this host that may have written the same files.

    Returns:
        The paths that were `restored`, and the paths that were `left` because another program
        writes them too. Earlier contents of `left` paths are moved into the recording's folder.
    """
    copied = [str(place) for place in notes.values("copied")]
    others = set() if stays else _written_by_others((accounts or notes).values("written"), copied)
    places = dict.fromkeys((*map(str, notes.values("earlier")), *copied))
    if not stays:
        others |= _anothers(notes, places.keys() - set(copied))
    done: dict[str, list[str]] = {}
    for place in places:
        aside = aside_of(place, str(folder.resolve()))
        if not os.path.lexists(aside):
            continue
        with contextlib.suppress(OSError):
            if stays:
                _remove(aside)
            elif place in others:
                unused = _unused(folder / NOT_RESTORED / os.path.basename(place))
                unused.parent.mkdir(exist_ok=True)
                shutil.move(aside, unused)
                done.setdefault("left", []).append(place)
            else:
                _remove(place)
                os.rename(aside, place)
                done.setdefault("restored", []).append(place)
    return done


def remove_temporary(notes: Notes) -> None:
    """Remove temporary files and folders of a script that was ended before it could do so."""
    for place in map(str, notes.values("temporary")):
        with contextlib.suppress(OSError):  # The script has removed its folder.
            _remove(place)


def remove_trial_checkpoints(notes: Notes) -> None:
    """Remove checkpoints written under trials, and the folders that become empty.

    Only folders that the script created for these checkpoints are removed. A script that resumes
    from its newest folder would find nothing in an empty one.
    """
    written = [
        place for place in map(str, notes.values("trial_checkpoint")) if place.endswith(OF_TRIAL)
    ]
    for place in written:
        Path(place).unlink(missing_ok=True)
    for folder in sorted(map(str, notes.values("made_folder")), key=len, reverse=True):
        if any(place.startswith(folder + os.sep) for place in written):
            with contextlib.suppress(OSError):  # The folder holds something else, or is gone.
                os.rmdir(folder)


def _anothers(notes: Notes, places: Collection[str]) -> set[str]:
    """Return the checkpoints that differ from what this run saved."""
    states: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for saved in notes.values("saved"):
        for place, state in saved:
            states[place].add(tuple(state))
    return {
        place
        for place in places
        if states[place] and os.path.lexists(place) and state_of(place) not in states[place]
    }


def _written_by_others(written: Collection[Any], places: Collection[str]) -> set[str]:
    """Return the files that other programs wrote meanwhile, or have open.

    If a process was killed before it could log its counts, its files are returned too.

    Args:
        written: Counts of all processes.
        places: Paths of the files.
    """
    accounts = [account for found in written for account in found]
    shared = {place for place in places if _may_be_shared(place, accounts)}
    until = time.monotonic() + _PATIENCE_S
    while (held := _held(set(places) - shared)) and time.monotonic() < until:
        time.sleep(0.1)
    return shared | held


def _may_be_shared(place: str, accounts: Sequence[dict[str, Any]]) -> bool:
    own = [account for account in accounts if account["place"] == place]
    if not own or not os.path.exists(place):
        return True
    inode = os.stat(place).st_ino
    closed = max(account["closed"] for account in own)
    mine = sum(account["opened"] - account["open"] for account in own)
    return closed > mine or any(account["inode"] != inode for account in own)


def _held(places: Collection[str]) -> set[str]:
    """Return the files that any visible process has open for writing."""
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
