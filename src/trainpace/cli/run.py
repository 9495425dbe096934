"""`trainpace run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainpace.cli.options import ABOVE_0_S, COUNT, USD, echo_json
from trainpace.cli.pictures import check_pictures, picture_options
from trainpace.verbs.places import JOURNAL


@click.command()
@click.argument("ladder")
@click.option("--task", metavar="SPEC", help="FILE.py:FUNCTION or a model, in place of the file's own.")
@click.option("--command", metavar="TEXT", help="An unchanged script's own launch command, to climb with it.")
@click.option(
    "--config", "configs", multiple=True, metavar="FILE", help="A settings file that the script reads; several."
)
@click.option("--precompute", default="", metavar="FILE.py:NAME", help="The dataset that a plan's shards are made of.")
@click.option("--out", "folder", metavar="FOLDER", help="Where state, logs and shards go.  [default: NAME-run]")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "process", "torchrun", "slurm"]),
    default="auto",
    show_default=True,
    help="auto: one process, torchrun for several, Slurm for several nodes.",
)
@click.option("--partition", metavar="NAME", help="Slurm's partition.")
@click.option("--account", metavar="NAME", help="Slurm's account.")
@click.option("--sbatch", multiple=True, metavar="TEXT", help="A further option of sbatch, as --sbatch=--qos=debug.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to train.  [default: the file's]")
@click.option("--seconds", type=ABOVE_0_S, help="Training time of a trial.  [default: the file's, or 8s]")
@click.option("--steps", type=COUNT, help="Steps of a trial, in place of --seconds.  [default for a script: 30]")
@click.option(
    "--timeout",
    type=ABOVE_0_S,
    default="10min",
    show_default=True,
    help="A trial that takes longer is ended and undone.",
)
@click.option("--price", type=USD, help="Dollars per node and hour.  [default: the file's]")
@click.option("--allow-global-batch", is_flag=True, help="Rungs may change the global batch: another training.")
@click.option("--stop-early", is_flag=True, help="Stop after the first rung that does not help.")
@click.option("--dry-run", is_flag=True, help="Show setups, commands and forecasts; train nothing.")
@click.option("--no-forecast", is_flag=True, help="Do not forecast: saves a brief look at machine, model and samples.")
@click.option("--fresh", is_flag=True, help="Begin anew where an earlier run could be taken up.")
@click.option("--journal", "place", metavar="PATH|URL", help=JOURNAL)
@click.option("--no-journal", is_flag=True, help="Keep nothing in the journal.")
@click.option("--keep-identity", is_flag=True, help="Keep paths and names in the journal as they are.")
@click.option("--markdown", metavar="FILE.md", help="Write the table in Markdown.")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(ladder: str, **o: Any) -> int:
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
    from trainpace.cli.running import Options, run_ladder

    if o["configs"] and not o["command"]:
        raise click.UsageError("--config belongs to --command.")
    check_pictures(o)
    if o["dry_run"] and (o["page"] or o["figure"]):
        raise click.UsageError("--html and --figure show what was measured, and --dry-run measures nothing.")
    if o["markdown"] and not Path(o["markdown"]).resolve().parent.is_dir():
        raise click.UsageError(f"the folder of {o['markdown']} does not exist.")
    result, code = run_ladder(Path(ladder), Options(**{name: o[name] for name in Options._fields}))
    if o["as_json"]:
        echo_json(result)
    return code
