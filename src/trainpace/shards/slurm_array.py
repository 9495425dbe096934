"""Precomputing over many nodes: each task of a Slurm array computes a part of the shards. Source: sbatch's manual, --array."""

import shlex
from collections.abc import Mapping

from trainpace.errors import TrainpaceError
from trainpace.shards.plan import parse_part


def part_of(given: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(part from 0, parts): as given (``2/8``), else this task's place in its Slurm array, else all of it."""
    if given is not None:
        return parse_part(given)
    try:
        count = int(environment["SLURM_ARRAY_TASK_COUNT"])
        number, first = int(environment["SLURM_ARRAY_TASK_ID"]), int(environment["SLURM_ARRAY_TASK_MIN"])
        step = int(environment.get("SLURM_ARRAY_TASK_STEP") or 1)
    except (KeyError, ValueError):
        return 0, 1
    part, odd = divmod(number - first, step)
    if odd or not 0 <= part < count:
        raise TrainpaceError("the Slurm array's tasks are not numbered evenly.", "Say which part this is: --part I/N.")
    return part, count


def array_script(target: str, folder: str, parts: int, workers: int, hours: float, options: str = "") -> str:
    """A batch script of `parts` array tasks with `workers` cores each, to be given to sbatch as it is.

    A task that is requeued computes only what it had not finished. The one that ends last writes the manifest.
    """
    minutes = max(10, round(60 * hours))
    command = f"trainpace precompute {shlex.quote(target)} --out {shlex.quote(folder)} --workers $SLURM_CPUS_PER_TASK"
    return f"""#!/bin/bash
#SBATCH --job-name=precompute
#SBATCH --array=1-{parts}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={workers}
#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00
#SBATCH --requeue
#SBATCH --output=precompute-%A_%a.log

srun {command}{" " + options if options else ""}
"""
