"""`trainpace schedule`."""

from typing import Any

import click

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.schedule import ScheduleRequest, run


@command(ScheduleRequest, View)
def schedule(request: ScheduleRequest, view: View) -> int:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    \b
    How long does it take?
      trainpace schedule --samples 1281167 --epochs 90 --micro-batch 32 --nproc-per-node 8 --step-time 210ms
    How fast must a step be?
      trainpace schedule --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h
    How many epochs fit?
      trainpace schedule --samples 50k --global-batch 128 --step-time 80ms --budget '$20' --price 1.20
    What do my files say, and do they agree?
      trainpace schedule --config ds.json --config args.json --samples 1281167 --epochs 90 --step-time 210ms
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_answer

    answer, files = run(request, TerminalProgress())
    if view.json:
        total_s = None if answer.time is None else answer.time.total_s
        echo_json({**to_jsonable(answer), "total_s": total_s, **files.as_json()})
    else:
        _print_settings(files.combined)
        print_answer(answer)
    return 1 if answer.meets_limit is False else 0


def _print_settings(combined: Any) -> None:
    """What the files say, one line a setting."""
    if combined is None:
        return
    for setting in combined.values.values():
        click.echo(f"  {setting.name:22} {setting.value!s:14} {setting.file}: {setting.key}")
    for note in combined.notes:
        click.echo(f"  {'warning' if note.severity == 'warning' else 'note'}: {note.file}: {note.text}")
    click.echo()
