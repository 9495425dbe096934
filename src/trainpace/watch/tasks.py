"""Coordinate several `trainpace watch` processes: tasks of srun, or nodes of torchrun.

All tasks record into one shared folder, and the first task reports for all. With interventions, the
tasks begin together. Each task writes a file when it ends, and the others wait for that file, for a
limited time.

A network file system may cache a folder's listing for up to a minute. Then a node sees late what
another node writes, unless it changes the folder itself.

The environment variables are those of srun's manual. A batch script also has SLURM_PROCID, but no
step, so it runs its command alone.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.child import ending_of
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.intake import read_json
from trainpace.core.records import write_whole
from trainpace.watch.event_logs import records_of
from trainpace.watch.inside.event_log import Step


class Task(NamedTuple):
    """Identity of this task among `tasks` tasks.

    Attributes:
        step: Names of the job and its step, and the number of the restart.
        number: Number of this task, from 0.
        is_node: The task is torchrun on one of several nodes. Another run may have the same `step`.
    """

    step: str
    number: int
    tasks: int
    is_node: bool = False

    @property
    def reports(self) -> bool:
        """True for the first task, which reports for all tasks."""
        return self.number == 0

    @property
    def word(self) -> str:
        """Word for a task in messages: "node" or "task"."""
        return "node" if self.is_node else "task"


def task_of(environment: Mapping[str, str]) -> Task | None:
    """Return this process's task of srun. None for a single task, or without srun."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    job, step, number, tasks = (environment.get(name, "") for name in names)
    if not (number.isdigit() and tasks.isdigit() and int(tasks) > 1 and job and step):
        return None
    started_again = environment.get("SLURM_RESTART_COUNT", "0")
    return Task(
        f"{job}.{step}" + (f"-{started_again}" if started_again != "0" else ""),
        int(number),
        int(tasks),
    )


def node_of(command: Sequence[str]) -> Task | None:
    """Return the node that the options of torchrun name, or None."""
    nodes, number = (_torchrun_options(command).get(name, "") for name in ("nnodes", "node-rank"))
    if not (nodes.isdigit() and number.isdigit() and int(number) < int(nodes)) or int(nodes) < 2:
        return None
    return Task(f"torchrun-{nodes}-nodes", int(number), int(nodes), is_node=True)


def is_one_of_unnumbered_nodes(command: Sequence[str]) -> bool:
    """Return True if torchrun runs on one of several nodes without a node number in its options.

    Such nodes agree on their numbers themselves.
    """
    options = _torchrun_options(command)
    nodes = options.get("nnodes", "").partition(":")[0]
    return nodes.isdigit() and int(nodes) > 1 and node_of(command) is None


def _torchrun_options(command: Sequence[str]) -> dict[str, str]:
    words = list(command)
    starts = [
        i + 1
        for i, word in enumerate(words)
        if Path(word).name == "torchrun" or word == "torch.distributed.run"
    ]
    options: dict[str, str] = {}
    if not starts:
        return options
    for word, after in zip(words[starts[0] :], [*words[starts[0] + 1 :], ""], strict=True):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            options[name[2:].replace("_", "-")] = value if equals else after
    return options


def take(folder: Path, task: Task) -> bool:
    """Claim the folder for this job step. All tasks of the step claim it, in any order.

    Returns:
        False if the folder holds anything else, or an earlier recording of this node.
    """
    mark = folder / f"step-{task.step}"
    if folder.exists() and not folder.is_dir():
        return False
    # The mark is checked last, because another task may create it meanwhile.
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    if task.is_node:
        try:
            (folder / f"node-{task.number}").touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


PATIENCE_S = 60.0
"""Seconds that the first task waits for the others after its own command has ended."""
MEET_S, NODES_MEET_S = 120.0, 600.0
"""Seconds that tasks wait for each other before they begin.

srun starts its tasks at once. Nodes of torchrun are started by hand.
"""
SLACK_S = 10.0
"""Additional seconds that the other tasks wait for the first task's decision."""
GRACE_S = 15.0
"""Seconds that a command may continue after another task's command has failed.

Most commands end by themselves when a connection breaks.
"""
POLL_S = 0.2
LOOK_S, REFRESH_S = 1.0, 5.0
BEGIN_FILE = "begin.json"
ON_ALL_NODES = "Give all of them the same new `output` folder, on a disk that every node sees."


class Ended(NamedTuple):
    """End of a task's command. `after` lists the tasks that had failed before."""

    number: int
    host: str
    exit_code: int
    after: tuple[int, ...] = ()


# ---- the beginning


def arrive(folder: Path, task: Task) -> None:
    """Write a file that shows that this task has joined."""
    _write(_file(folder, task.number, HERE), {"host": socket.gethostname()})


def meet(folder: Path, task: Task, patience_s: float | None = None) -> None:
    """Wait until all tasks have joined in the folder.

    Args:
        folder: The shared folder.
        task: This task.
        patience_s: Seconds to wait. By default, 120 for srun and 600 for nodes of torchrun.

    Raises:
        TrainpaceError: A task does not join in time, because it was not started or does not see the
            folder. All tasks raise this error: interventions on only some ranks would leave the
            others waiting.
    """
    patience_s = (NODES_MEET_S if task.is_node else MEET_S) if patience_s is None else patience_s
    arrive(folder, task)
    try:
        missing = _missing_at_start(folder, task, patience_s)
        if missing:
            raise TrainpaceError(
                f"{_which(missing, task)} did not join in {folder} within {patience_s:g} s. The"
                " command was not started.",
                f"Start all of them. {ON_ALL_NODES}",
            )
    except BaseException:  # Also after Ctrl-C. A late task must not count this one as present.
        with contextlib.suppress(OSError):
            os.unlink(_file(folder, task.number, HERE))
        raise


def _missing_at_start(folder: Path, task: Task, patience_s: float) -> list[int]:
    if task.reports:
        missing = _awaited(
            folder,
            task,
            patience_s,
            lambda: [n for n in range(task.tasks) if not _is_there(_file(folder, n, HERE))],
        )
        _write(folder / BEGIN_FILE, {"missing": missing})
        return missing
    _awaited(
        folder, task, patience_s + SLACK_S, lambda: [] if _is_there(folder / BEGIN_FILE) else [0]
    )
    said = _read(folder / BEGIN_FILE)
    return [0] if said is None else list(said["missing"])


# ---- while the command runs


class Lookout:
    """Detects that a command with interventions waits in vain.

    The command waits in vain if a task has failed, or if no log has grown for `still_s` seconds
    after the first step.
    """

    def __init__(self, folder: Path, task: Task, still_s: float) -> None:
        self.folder, self.task, self.still_s = folder, task, still_s
        self.failed_since = self.grown = time.monotonic()
        self.sizes: dict[str, int] = {}
        self.steps = False
        self.gave_up = ""

    def gives_up(self) -> bool:
        """Return True if the command has to be ended. `gave_up` then holds the reason."""
        now = time.monotonic()
        if not any(e.exit_code for e in ends(self.folder, self.task)):
            self.failed_since = now
        with contextlib.suppress(OSError):  # The network file system does not answer now.
            logs = list(self.folder.glob("process-*.trail"))
            self.steps = self.steps or any(map(_has_steps, logs))
            sizes = {path.name: _size(path) for path in logs}
            if sizes != self.sizes:
                self.sizes, self.grown = sizes, now
        if now - self.failed_since > GRACE_S:
            self.gave_up = "because it waited for failed ranks"
        elif self.steps and now - self.grown > self.still_s:
            self.gave_up = f"because no rank completed a step for {self.still_s:.0f} s"
        return bool(self.gave_up)


# ---- the end


def end(folder: Path, task: Task, exit_code: int) -> None:
    """Write that this task's command has ended.

    The file includes the sizes of this host's logs. With them, other tasks can check that they see
    the whole logs.
    """
    failed = [e.number for e in ends(folder, task) if e.exit_code]
    host = socket.gethostname()
    logs = {path.name: _size(path) for path in folder.glob(f"*-{host}*.trail")}
    _write(
        _file(folder, task.number, END),
        {"exit_code": exit_code, "host": host, "after": failed, "trails": logs},
    )


def ends(folder: Path, task: Task) -> list[Ended]:
    """Return the ends of the tasks that have ended so far."""
    return [
        Ended(
            number,
            str(about.get("host", "")),
            int(about.get("exit_code", 0)),
            tuple(about.get("after", ())),
        )
        for number, about in _reported(folder, task).items()
        if about is not None
    ]


def _reported(folder: Path, task: Task) -> dict[int, dict[str, Any] | None]:
    return {number: _read(_file(folder, number, END)) for number in range(task.tasks)}


def missing_after(folder: Path, task: Task, patience_s: float | None = None) -> list[int]:
    """Wait until all tasks have ended and their logs are visible.

    Returns:
        The numbers of the tasks that are missing after the time limit.
    """

    def missing() -> list[int]:
        return [
            number
            for number, about in _reported(folder, task).items()
            if about is None or not _all_seen(folder, about)
        ]

    return _awaited(folder, task, PATIENCE_S if patience_s is None else patience_s, missing)


def first_failure(ended: Sequence[Ended]) -> int:
    """Return the exit code of the task that failed first, or 0 if none failed."""
    return next((e.exit_code for e in _failed_first(ended)), 0)


def ends_in_words(folder: Path, task: Task, missing: Sequence[int], gave_up: str = "") -> str:
    """Describe which tasks failed, and whose recordings may end early.

    Args:
        folder: The shared folder.
        task: This task.
        missing: Tasks that had not ended in time.
        gave_up: Reason why the command of this task was ended, or empty.

    Returns:
        Sentences, or an empty string if all tasks ended well.
    """
    words = list(_failed_in_words(folder, task, task.number if gave_up else None))
    if gave_up:
        words.append(f"Trainpace ended the command of {task.word} {task.number}, {gave_up}.")
    words += _missing_in_words(folder, task, missing)
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}" for sentence in words)


def _failed_in_words(folder: Path, task: Task, own: int | None) -> Iterator[str]:
    """Yield a sentence on the tasks that failed first, without the task `own`."""
    if first := [e for e in _failed_first(ends(folder, task)) if e.number != own]:
        hosts = " and ".join(dict.fromkeys(e.host for e in first if e.host))
        how = " and ".join(dict.fromkeys(ending_of(e.exit_code) for e in first))
        on = f" (on {hosts})" if hosts else ""
        yield f"{_which([e.number for e in first], task)}{on} {how}."


def _missing_in_words(folder: Path, task: Task, missing: Sequence[int]) -> Iterator[str]:
    came = {n for n in missing for kind in (HERE, END) if _is_there(_file(folder, n, kind))}
    if never := [n for n in missing if n not in came]:
        yield f"{_which(never, task)} left nothing in {folder}. Every node has to see it."
    if late := sorted(came):
        yield (
            f"{_which(late, task)} had not ended {PATIENCE_S:.0f} s after the first one. Their"
            " recordings may end early."
        )


# ---- files of earlier runs are put back in turn


def tidied(folder: Path, task: Task, done: dict[str, list[str]]) -> None:
    """Write which files this task has put back, and which it has left."""
    _write(_file(folder, task.number, TIDIED), done)


def await_tidied(
    folder: Path, task: Task, numbers: Sequence[int], patience_s: float | None = None
) -> None:
    """Wait until these tasks have put back their files.

    Two tasks that work at the same time would lose a shared file.
    """
    _awaited(
        folder,
        task,
        PATIENCE_S if patience_s is None else patience_s,
        lambda: [n for n in numbers if not _is_there(_file(folder, n, TIDIED))],
    )


def put_back_by_all(folder: Path, task: Task) -> dict[str, list[str]]:
    """Return the files that all tasks have put back and left, without duplicates."""
    done: dict[str, list[str]] = {}
    for about in (_read(_file(folder, number, TIDIED)) or {} for number in range(task.tasks)):
        for name, places in about.items():
            done[name] = list(dict.fromkeys((*done.get(name, []), *places)))
    return done


# ---- files


HERE, END, TIDIED = "here", "json", "tidied"


def _file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"task-{number}.{kind}"


def _write(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, json.dumps(content))


def _read(file: Path) -> dict[str, Any] | None:
    """Return the content of a file, or None if it is missing or incomplete."""
    with contextlib.suppress(UnreadableInput, OSError):
        said = read_json(file) if file.exists() else None
        return said if isinstance(said, dict) else None
    return None


def _is_there(file: Path) -> bool:
    with contextlib.suppress(OSError):  # The network file system does not answer now.
        return file.exists()
    return False


def _has_steps(log: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TrainpaceError):
        return any(isinstance(record, Step) for record in records_of(log))
    return False


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _all_seen(folder: Path, about: dict[str, Any]) -> bool:
    return all(_size(folder / name) >= size for name, size in about.get("trails", {}).items())


def _awaited(
    folder: Path, task: Task, patience_s: float, missing: Callable[[], list[int]]
) -> list[int]:
    """Wait until no task is missing or the time is over. Return the missing tasks."""
    until, refreshed = time.monotonic() + patience_s, time.monotonic()
    while found := missing():
        now = time.monotonic()
        if now > until:
            return found
        if now - refreshed > REFRESH_S:
            refreshed = now
            with contextlib.suppress(OSError):
                mine = folder / f"task-{task.number}.looks"
                mine.touch()
                os.unlink(mine)
        time.sleep(POLL_S)
    return []


def _failed_first(ended: Sequence[Ended]) -> list[Ended]:
    failed = [e for e in ended if e.exit_code]
    return [e for e in failed if not e.after] or failed


def _which(numbers: Sequence[int], task: Task) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{task.word}{'s' if len(numbers) > 1 else ''} {listed} of {task.tasks}"
