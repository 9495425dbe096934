"""`trainpace watch` or `diagnose` as one of several: as the tasks of one step of srun, or before torchrun on each of several
nodes. All record into one folder, and the first reports for all.

Source of the variables: srun's manual. A batch script has SLURM_PROCID as well, but no step, and runs its command alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


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
