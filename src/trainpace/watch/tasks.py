"""Several `trainpace watch` as one: the tasks of a job step of srun, or torchrun on several nodes."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.core.child import ending_of
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.intake import read_json
from trainpace.core.records import write_whole
from trainpace.watch.event_logs import records_of
from trainpace.watch.inside.event_log import Step


class Task(NamedTuple):
    """One of `tasks` tasks. `step` names the job, the step in it, and which start of the job it is; `is_node`: that of torchrun
    on one of several nodes, whose names may come again in another run."""

    step: str
    number: int
    tasks: int
    is_node: bool = False

    @property
    def reports(self) -> bool:
        return self.number == 0

    @property
    def word(self) -> str:
        return "node" if self.is_node else "task"


def task_of(environment: Mapping[str, str]) -> Task | None:
    """The task of srun that this process is; None where it has the step to itself, or there is none."""
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
    """The node that torchrun is told to be, by the options of its manual; None where it is told none, or is not asked for."""
    nodes, number = (_torchrun_options(command).get(name, "") for name in ("nnodes", "node-rank"))
    if not (nodes.isdigit() and number.isdigit() and int(number) < int(nodes)) or int(nodes) < 2:
        return None
    return Task(f"torchrun-{nodes}-nodes", int(number), int(nodes), is_node=True)


def is_one_of_unnumbered_nodes(command: Sequence[str]) -> bool:
    """Whether torchrun is one of several, and it is not said which, since they agree on that themselves."""
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
    """Make the folder the step's own, as each of its tasks does, in any order; False where something else is in it, or, for a
    node, its own earlier recording."""
    mark = folder / f"step-{task.step}"
    if folder.exists() and not folder.is_dir():
        return False
    # looked for last: what is in the folder may be another task's mark, made meanwhile
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
"""How long the first task waits for the others after its own command has ended."""
MEET_S, NODES_MEET_S = 120.0, 600.0
"""How long tasks wait for each other before they begin: srun starts them at once, nodes of torchrun are started by hand."""
SLACK_S = 10.0
"""How much longer the others wait for the first one's word."""
GRACE_S = 15.0
"""How long a command may go on after that of another task has failed; most end by themselves, when a connection is gone."""
POLL_S = 0.2
LOOK_S, REFRESH_S = 1.0, 5.0
BEGIN_FILE = "begin.json"
ON_ALL_NODES = "Give all of them the same new `output` folder, on a disk that every node sees."


class Ended(NamedTuple):
    """How a task's command ended. `after`: tasks that had failed by then."""

    number: int
    host: str
    exit_code: int
    after: tuple[int, ...] = ()


# ---- the beginning


def arrive(folder: Path, task: Task) -> None:
    """Say that this task is here."""
    _write(_here(folder, task.number), {"host": socket.gethostname()})


def meet(folder: Path, task: Task, patience_s: float | None = None) -> None:
    """Return once all tasks are at the folder. Raises TrainpaceError in each of them where one does not come in time: it does not
    see the folder or was not started, and interventions that only some ranks make would leave the others waiting.
    """
    patience_s = (NODES_MEET_S if task.is_node else MEET_S) if patience_s is None else patience_s
    arrive(folder, task)
    try:
        missing = _who_does_not_come(folder, task, patience_s)
        if missing:
            was, does = ("it was", "it does") if len(missing) == 1 else ("they were", "they do")
            raise TrainpaceError(
                f"{_which(missing, task)} did not come to {folder} within {patience_s:g} s. Either"
                f" {was} not started, or {does} not see this folder. Nothing is run.",
                ON_ALL_NODES,
            )
    except BaseException:  # Ctrl-C as well: one that comes later must not take this task to be here
        with contextlib.suppress(OSError):
            os.unlink(_here(folder, task.number))
        raise


def _who_does_not_come(folder: Path, task: Task, patience_s: float) -> list[int]:
    if task.reports:
        missing = _awaited(
            folder,
            task,
            patience_s,
            lambda: [n for n in range(task.tasks) if not _is_there(_here(folder, n))],
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
    """Looks whether a command that runs under interventions waits for what will never come: for the ranks of a task that has
    failed, or, once steps were made, for a step longer than all ranks have patience (`still_s`)."""

    def __init__(self, folder: Path, task: Task, still_s: float) -> None:
        self.folder, self.task, self.still_s = folder, task, still_s
        self.failed_since = self.grown = time.monotonic()
        self.sizes: dict[str, int] = {}
        self.steps = False
        self.gave_up = ""

    def gives_up(self) -> bool:
        """Whether the command is to be ended; `gave_up` then says why."""
        now = time.monotonic()
        if not any(e.exit_code for e in ends(self.folder, self.task)):
            self.failed_since = now
        with contextlib.suppress(OSError):  # a network's disk that does not answer now
            logs = list(self.folder.glob("process-*.trail"))
            self.steps = self.steps or any(map(_has_steps, logs))
            sizes = {path.name: _size(path) for path in logs}
            if sizes != self.sizes:
                self.sizes, self.grown = sizes, now
        if now - self.failed_since > GRACE_S:
            self.gave_up = "since it waited for ranks that had failed"
        elif self.steps and now - self.grown > self.still_s:
            self.gave_up = f"since no rank completed a step for {self.still_s:.0f} s"
        return bool(self.gave_up)


# ---- the end


def end(folder: Path, task: Task, exit_code: int) -> None:
    """Say that this task's command has ended, and how long its trails are, so that others know when they see all of them."""
    failed = [e.number for e in ends(folder, task) if e.exit_code]
    host = socket.gethostname()
    logs = {path.name: _size(path) for path in folder.glob(f"*-{host}*.trail")}
    _write(
        _end(folder, task.number),
        {"exit_code": exit_code, "host": host, "after": failed, "trails": logs},
    )


def ends(folder: Path, task: Task) -> list[Ended]:
    """How those tasks ended that have ended by now."""
    said = {number: _read(_end(folder, number)) for number in range(task.tasks)}
    return [
        Ended(
            n,
            str(about.get("host", "")),
            int(about.get("exit_code", 0)),
            tuple(about.get("after", ())),
        )
        for n, about in said.items()
        if about is not None
    ]


def missing_after(folder: Path, task: Task, patience_s: float | None = None) -> list[int]:
    """Wait until the commands of all tasks have ended and what they recorded is seen; the tasks of which it is not by then."""

    def missing() -> list[int]:
        said = {number: _read(_end(folder, number)) for number in range(task.tasks)}
        return [n for n, about in said.items() if about is None or not _all_seen(folder, about)]

    return _awaited(folder, task, PATIENCE_S if patience_s is None else patience_s, missing)


def first_failure(ended: Sequence[Ended]) -> int:
    """The exit code of the one that failed first, as far as that can be told; 0 where none did."""
    return next((e.exit_code for e in _failed_first(ended)), 0)


def ends_in_words(folder: Path, task: Task, missing: Sequence[int], gave_up: str = "") -> str:
    """Who failed, and whose recording may end early; "" where all ended well. `gave_up`: why this task's command was ended."""
    first = [
        e for e in _failed_first(ends(folder, task)) if not (gave_up and e.number == task.number)
    ]
    words = []
    if first:
        hosts = " and ".join(dict.fromkeys(e.host for e in first if e.host))
        how = " and ".join(dict.fromkeys(ending_of(e.exit_code) for e in first))
        words.append(
            f"{_which([e.number for e in first], task)}{f' (on {hosts})' if hosts else ''} {how}."
        )
    if gave_up:
        words.append(f"Trainpace ended the command of {task.word} {task.number}, {gave_up}.")
    never = [
        n for n in missing if not _is_there(_here(folder, n)) and not _is_there(_end(folder, n))
    ]
    late = [n for n in missing if n not in never]
    if never:
        words.append(
            f"{_which(never, task)} left nothing in {folder}, which every node has to see."
        )
    if late:
        words.append(
            f"{_which(late, task)} had not ended {PATIENCE_S:.0f} s after the first one, so what"
            f" {'it' if len(late) == 1 else 'they'} recorded may end early."
        )
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}" for sentence in words)


# ---- putting back what was written over, in turn


def tidied(folder: Path, task: Task, done: dict[str, list[str]]) -> None:
    """Say what this task has put back and what it has left."""
    _write(_tidied(folder, task.number), done)


def await_tidied(
    folder: Path, task: Task, numbers: Sequence[int], patience_s: float | None = None
) -> None:
    """Wait until these tasks have put back what they wrote over. Two of them that put back one file at once would lose it."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    _awaited(
        folder, task, patience_s, lambda: [n for n in numbers if not _is_there(_tidied(folder, n))]
    )


def put_back_by_all(folder: Path, task: Task) -> dict[str, list[str]]:
    """What all tasks have put back and left, without repetition."""
    done: dict[str, list[str]] = {}
    for about in (_read(_tidied(folder, number)) or {} for number in range(task.tasks)):
        for name, places in about.items():
            done[name] = list(dict.fromkeys((*done.get(name, []), *places)))
    return done


# ---- files


def _here(folder: Path, number: int) -> Path:
    return folder / f"task-{number}.here"


def _end(folder: Path, number: int) -> Path:
    return folder / f"task-{number}.json"


def _tidied(folder: Path, number: int) -> Path:
    return folder / f"task-{number}.tidied"


def _write(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, json.dumps(content))


def _read(file: Path) -> dict[str, Any] | None:
    """None where it is not there, or not whole yet."""
    with contextlib.suppress(UnreadableInput, OSError):
        said = read_json(file) if file.exists() else None
        return said if isinstance(said, dict) else None
    return None


def _is_there(file: Path) -> bool:
    with contextlib.suppress(OSError):  # a network's disk that does not answer now
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
    """Look until nobody is missing, or the time is over; who is missing then."""
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
