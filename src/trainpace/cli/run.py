"""`trainpace run`."""

from typing import Annotated

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, save_pictures
from trainpace.verbs.places import check_writable
from trainpace.verbs.request import Field, Misuse
from trainpace.verbs.run import RunRequest, dry_run
from trainpace.verbs.run import run as carry_out


class RunView(PicturedView):
    dry_run: Annotated[bool, Field("Show setups, commands and forecasts; train nothing.")] = False
    markdown: Annotated[str | None, Field("Write the table in Markdown.", metavar="FILE.md")] = None


@command(RunRequest, RunView)
def run(request: RunRequest, view: RunView) -> int:
    """Carry a list of changes out rung by rung: forecast, measure, keep what helps, undo what does not.

    LADDER is a ladder.toml (a task, how it trains now, and rungs to try), or a plan that trainpace plan --output kept. Every rung
    is a few real steps in processes of its own, on engines that exist (DDP, FSDP2, DeepSpeed); your checkpoints are not touched.
    With --command an unchanged script climbs, by its own launcher on changed copies of its settings files.
    Interrupted, the same command goes on where it stopped. Exit code 1: no rung helped.

    \b
    trainpace run examples/ladder/ladder.toml
    trainpace run plan.json --task train.py:task --dry-run
    trainpace run plan.json --command "torchrun train.py args.json" --config args.json --config ds.json
    """
    from trainpace.records import write_whole
    from trainpace.report import (
        TerminalProgress,
        ahead_json,
        ladder_json,
        markdown,
        print_ahead,
        print_ladder,
        table_of,
    )

    check_pictures(view)
    if view.dry_run:
        if view.html or view.figure:
            raise Misuse("--html and --figure show what was measured, and --dry-run measures nothing.")
        ahead = dry_run(request, TerminalProgress())
        echo_json(ahead_json(*ahead)) if view.json else print_ahead(*ahead)
        return 0
    if view.markdown:
        check_writable(view.markdown)
    climbed = carry_out(request, TerminalProgress())
    table, answer = table_of(climbed), ladder_json(climbed)
    if view.markdown:
        write_whole(view.markdown, markdown(table))
    if view.html or view.figure:
        from trainpace.report import ladder_page, ladder_pictures

        save_pictures(view, lambda: ladder_page(table, answer), lambda: ladder_pictures(table))
    echo_json(answer) if view.json else print_ladder(table)
    return 0 if any(rung.kept for rung in climbed.rungs) else 1
