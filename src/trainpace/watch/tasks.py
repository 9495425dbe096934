"""`trainpace watch` as one of several: as the tasks of one step of srun, or before torchrun on each of several nodes. All record
into one folder, and the first reports for all.

Source of the variables: srun's manual. A batch script has SLURM_PROCID as well, but no step, and runs its command alone.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainpace.intake import read_json
from trainpace.records import write_whole

PATIENCE_S = 60.0
"""How long the first task waits for the others after its own command has ended."""
POLL_S = 0.2


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

    def file(self, folder: Path) -> Path:
        return folder / f"task-{self.number}.json"


def task_of(environment: Mapping[str, str]) -> Task | None:
    """The task of srun that this process is; None where it has the step to itself, or there is none."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    job, step, number, tasks = (environment.get(name, "") for name in names)
    if not (number.isdigit() and tasks.isdigit() and int(tasks) > 1 and job and step):
        return None
    started_again = environment.get("SLURM_RESTART_COUNT", "0")
    return Task(f"{job}.{step}" + (f"-{started_again}" if started_again != "0" else ""), int(number), int(tasks))


def node_of(command: Sequence[str]) -> Task | None:
    """The node that torchrun is told to be, by the options of its manual; None where it is told none, or is not asked for."""
    words = list(command)
    starts = [i + 1 for i, word in enumerate(words) if Path(word).name == "torchrun" or word == "torch.distributed.run"]
    if not starts:
        return None
    options: dict[str, str] = {}
    for word, after in zip(words[starts[0] :], [*words[starts[0] + 1 :], ""], strict=True):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            options[name[2:].replace("_", "-")] = value if equals else after
    nodes, number = (options.get(name, "") for name in ("nnodes", "node-rank"))
    if not (nodes.isdigit() and number.isdigit() and int(number) < int(nodes)) or int(nodes) < 2:
        return None
    return Task(f"torchrun-{nodes}-nodes", int(number), int(nodes), is_node=True)


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


def end(folder: Path, task: Task, exit_code: int) -> None:
    """Say that this task's command has ended."""
    write_whole(task.file(folder), json.dumps({"exit_code": exit_code}))


def missing_after(folder: Path, task: Task, patience_s: float | None = None) -> list[int]:
    """Wait until the commands of all tasks have ended; the tasks whose command has not by then."""
    until = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    others = [task._replace(number=number) for number in range(task.tasks)]
    while missing := [other.number for other in others if not other.file(folder).exists()]:
        if time.monotonic() > until:
            break
        time.sleep(POLL_S)
    return missing


def first_failure(folder: Path, task: Task) -> int:
    """The exit code of the first of the ended tasks that failed; 0 where none did."""
    for number in range(task.tasks):
        file = task._replace(number=number).file(folder)
        if file.exists() and (code := msgspec.convert(read_json(file), dict[str, int]).get("exit_code")):
            return code
    return 0


def unended_in_words(missing: list[int], tasks: int) -> str:
    """A sentence for the report; "" where every task has ended."""
    if not missing:
        return ""
    which = f"task{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"{which} of {tasks} had not ended {PATIENCE_S:.0f} s after the first one, so what they recorded may end early."
    )
