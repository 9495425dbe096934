"""A plan in the settings files of other tools: what would change in them, and writing it."""

import math
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from trainpace import configs
from trainpace.configs import Changes, Rewritten, Written
from trainpace.errors import Contradiction
from trainpace.plan import Plan
from trainpace.records import read_text, write_whole
from trainpace.verbs.plan import PlanRequest

NEW = {".json": "DeepSpeed", ".yaml": "accelerate", ".yml": "accelerate", ".sh": "torchrun", ".sbatch": "sbatch"}
JOB_MARGIN = 1.2
"""Slurm's limit for a whole job over its forecast."""
COMMAND = "command.sh"
"""The name under which a launch command given as text stands in the diff; it is shown and never saved."""


def rewritten(request: PlanRequest, plan: Plan, new: Sequence[str]) -> Rewritten | None:
    """The files with all changes of the plan in them, and `new` ones; None where there is nothing to change."""
    if plan.best is None or not (plan.changes or new):
        return None
    added = tuple(_new_file(file, plan, plan.best.job_s) for file in new)
    if not plan.changes or not (request.config or request.command):
        return Rewritten(files=added, left={})
    texts = {path: read_text(path) for path in request.config}
    if request.command:
        texts[COMMAND] = request.command + "\n"
    last = plan.changes[-1].data
    now = plan.now.choice.data if plan.now is not None else last
    workers = last.workers if last.workers != now.workers else None
    files = configs.rewrite(texts, Changes(before=plan.start, after=plan.end, workers=workers))
    return replace(files, files=(*files.files, *added))


def _new_file(file: str, plan: Plan, job_s: float) -> Written:
    """The plan's end in a file that is not there yet. A batch job may take as long as it is forecast to, and some more."""
    kind = NEW[Path(file).suffix]
    time_limit_s = 60 * math.ceil(JOB_MARGIN * job_s / 60) if kind == "sbatch" else None
    return configs.new_file(kind, plan.end, file, time_limit_s)


def save_all(files: Rewritten) -> dict[str, str]:
    """Write the files, each beside a backup of the old one: {file: backup}, "" for a new file. Raises Contradiction, with nothing
    written, where they would contradict each other."""

    clashes = configs.combine([configs.parse_config(f.text, f.file) for f in files.files]).clashes
    if clashes:
        text = " ".join(clash.text for clash in clashes)
        raise Contradiction(f"nothing was written, for then {text}", "Change what is left by hand first.")
    backups: dict[str, str | None] = {}
    for f in files.files:
        if not f.before:
            write_whole(f.file, f.text)
            backups[f.file] = ""
        elif f.file != COMMAND:
            backups[f.file] = configs.save(f)
    return {file: backup for file, backup in backups.items() if backup is not None}
