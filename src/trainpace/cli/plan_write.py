"""`trainpace plan --write`: the plan in the settings files, as a diff first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.errors import Contradiction

if TYPE_CHECKING:
    from trainpace.configs import Rewritten, Written
    from trainpace.plan import Plan

NEW = {".json": "DeepSpeed", ".yaml": "accelerate", ".yml": "accelerate", ".sh": "torchrun", ".sbatch": "sbatch"}
JOB_MARGIN = 1.2
"""Slurm's limit for a whole job over its forecast."""
COMMAND = "command.sh"
"""The name under which a launch command given as text stands in the diff; it is shown and never saved."""


def check_write(o: dict[str, Any]) -> None:
    """Refuse options that cannot mean anything, before anything is computed."""
    if o["yes"] and not o["write"]:
        raise click.UsageError("--yes is for --write.")
    if o["new"] and not o["write"]:
        raise click.UsageError("--new is for --write.")
    if o["write"] and not (o["configs"] or o["launch"] or o["new"]):
        raise click.UsageError("--write needs the files to write into: name them with --config, or --new.")
    for file in o["new"]:
        if Path(file).exists():
            raise click.UsageError(f"{file} is there already: name it with --config.")
        if Path(file).suffix not in NEW:
            raise click.UsageError(f"{file} tells no format by its name. Known: {', '.join(NEW)}.")


def rewritten(o: dict[str, Any], found: Plan) -> Rewritten | None:
    """The files with all changes of the plan in them; None where there is nothing to change."""
    from msgspec.structs import replace

    from trainpace.configs import Changes, Rewritten, read_texts, rewrite

    if found.best is None or not (found.changes or o["new"]):
        return None
    added = tuple(_new_file(file, found, found.best.job_s) for file in o["new"])
    if not found.changes or not (o["configs"] or o["launch"]):
        return Rewritten(files=added, left={})
    texts = read_texts(o["configs"])
    if o["launch"]:
        texts[COMMAND] = o["launch"] + "\n"
    last = found.changes[-1].data
    now = found.now.choice.data if found.now is not None else last
    workers = last.workers if last.workers != now.workers else None
    files = rewrite(texts, Changes(before=found.start, after=found.end, workers=workers))
    return replace(files, files=(*files.files, *added))


def _new_file(file: str, found: Plan, job_s: float) -> Written:
    """The plan's end in a file that is not there yet. A batch job may take as long as it is forecast to, and some more."""
    from trainpace.configs import new_accelerate, new_deepspeed, new_sbatch, new_torchrun

    kind = NEW[Path(file).suffix]
    if kind == "sbatch":
        return new_sbatch(found.end, file=file, time_limit_s=60 * math.ceil(JOB_MARGIN * job_s / 60))
    if kind == "torchrun":
        return new_torchrun(found.end, file=file)
    make = new_deepspeed if kind == "DeepSpeed" else new_accelerate
    return make(found.end, file)


def save_all(files: Rewritten) -> dict[str, str]:
    """Write the files, each beside a backup of the old one: {file: backup}, "" for a new file. Raises Contradiction, with nothing
    written, where they would contradict each other."""
    from trainpace.configs import combine, parse_config, save
    from trainpace.records import write_whole

    clashes = combine([parse_config(f.text, f.file) for f in files.files]).clashes
    if clashes:
        text = " ".join(clash.text for clash in clashes)
        raise Contradiction(f"nothing was written, for then {text}", "Change what is left by hand first.")
    kept: dict[str, str | None] = {}
    for f in files.files:
        if not f.before:
            write_whole(f.file, f.text)
            kept[f.file] = ""
        elif f.file != COMMAND:
            kept[f.file] = save(f)
    return {file: backup for file, backup in kept.items() if backup is not None}


def as_json(files: Rewritten | None, backups: dict[str, str]) -> dict[str, Any]:
    """For the JSON answer."""
    if files is None:
        return {"files": [], "not_written": {}}
    shown = [
        {"file": f.file, "diff": f.diff, "notes": list(f.notes), "backup": backups.get(f.file)} for f in files.files
    ]
    return {"files": shown, "not_written": files.left}


def print_files(files: Rewritten | None, backups: dict[str, str], wrote: bool) -> None:
    """The diffs, what no file takes, and what to do next."""
    if files is None:
        click.echo("Nothing to write.")
        return
    for f in files.files:
        click.echo(f"\n{f.diff}" if f.diff else f"\n{f.file}: nothing changes.\n", nl=False)
    click.echo()
    for name, why in files.left.items():
        click.echo(f"Not written: {name} ({why}).")
    for note in dict.fromkeys(note for f in files.files for note in f.notes):
        click.echo(f"Note: {note}.")
    for file, backup in backups.items():
        click.echo(f"Wrote {file}; as it was: {backup}" if backup else f"Wrote {file}, which is new.")
    if not wrote and any(f.diff for f in files.files if f.file != COMMAND):
        click.echo("Nothing was written: add --yes to write it. Each old file is kept as FILE.bak.")
