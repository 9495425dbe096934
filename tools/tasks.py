"""Named tasks for `python -m benchmarks`, `python -m fitting` and `python -m tools`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Task:
    """Commands that are run one after another.

    Args:
        summary: One line for the list of tasks.
        commands: Arguments of this Python, such as "benchmarks/startup.py" or "-m fitting.fit".
            "{data}" and "{traces}" are replaced by the folders that the caller names.
        needs: Groups of packages from the lock, installed into `.GROUP` and put on PYTHONPATH.
        after: Names of tasks to run before this one.
    """

    summary: str
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def main(module: str, tasks: Mapping[str, Task]) -> None:
    """Run the task that the command line names, or list all of them."""
    listed = "\n".join(f"  {name:<20} {task.summary}" for name, task in tasks.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=f"python -m {module} NAME [--data FOLDER] [options of the task]",
        epilog=f"tasks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=tasks, metavar="NAME", help="a task below")
    parser.add_argument("--data", default="../shared/data", help="folder of measured runs")
    parser.add_argument("--traces", default="out/traces", help="folder of cached traces")
    known, extra = parser.parse_known_args()
    if known.name is None:
        parser.print_help()
        return
    folders = {"data": known.data, "traces": known.traces}
    sys.exit(_run(known.name, tasks, folders, extra))


def _run(name: str, tasks: Mapping[str, Task], folders: dict[str, str], extra: list[str]) -> int:
    """Run a task and those before it. Extra options go to the last command of the task itself."""
    task = tasks[name]
    for earlier in task.after:
        if code := _run(earlier, tasks, folders, []):
            return code
    for group in task.needs:
        subprocess.run(["make", f".{group}/installed"], cwd=ROOT, check=True)
    path = [".", *(f".{group}" for group in task.needs)]
    if "zoo" in task.needs:
        path.append("tests/shims")  # lets torchvision load beside a CPU build of torch
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    for place, command in enumerate(task.commands):
        words = [word.format(**folders) for word in command.split()]
        if place == len(task.commands) - 1:
            words += extra
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0
