"""`trainpace plan --write`: the plan in the settings files, as a diff first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trainpace.errors import Contradiction

if TYPE_CHECKING:
    from trainpace.configs.write import Rewritten
    from trainpace.plan import Plan

COMMAND = "command.sh"
"""The name under which a launch command given as text stands in the diff; it is shown and never saved."""


def check_write(o: dict[str, Any]) -> None:
    """Refuse options that cannot mean anything, before anything is computed."""
    if o["yes"] and not o["write"]:
        raise click.UsageError("--yes is for --write.")
    if o["write"] and not (o["configs"] or o["launch"]):
        raise click.UsageError("--write needs the files to write into: name them with --config.")


def rewritten(o: dict[str, Any], found: Plan) -> Rewritten | None:
    """The files with all changes of the plan in them; None where there is nothing to change."""
    from trainpace.configs.changes import Changes
    from trainpace.configs.write import read_texts, rewrite

    if found.best is None or not found.changes:
        return None
    texts = read_texts(o["configs"])
    if o["launch"]:
        texts[COMMAND] = o["launch"] + "\n"
    last = found.changes[-1].data
    now = found.now.choice.data if found.now is not None else last
    workers = last.workers if last.workers != now.workers else None
    return rewrite(texts, Changes(before=found.start, after=found.end, workers=workers))


def save_all(files: Rewritten) -> dict[str, str]:
    """Write the files, each beside a backup of the old one: {file: backup}. Raises Contradiction, with nothing written, where
    the new files would contradict each other."""
    from trainpace.configs import combine, parse_config
    from trainpace.configs.write import save

    clashes = combine([parse_config(f.text, f.file) for f in files.files]).clashes
    if clashes:
        text = " ".join(clash.text for clash in clashes)
        raise Contradiction(f"nothing was written, for then {text}", "Change what is left by hand first.")
    kept = {f.file: save(f) for f in files.files if f.file != COMMAND}
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
        click.echo(f"Wrote {file}; as it was: {backup}")
    if not wrote and any(f.diff for f in files.files if f.file != COMMAND):
        click.echo("Nothing was written: add --yes to write it. Each old file is kept as FILE.bak.")
