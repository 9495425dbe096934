"""`trainpace journal`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import COUNT, echo_json

if TYPE_CHECKING:
    from trainpace.journal import Journal

MOST = 2**31
FORMATS = ["auto", "trainpace", "runs", "timm", "hf", "mlflow"]


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every subcommand has."""
    place = click.option(
        "--journal",
        "place",
        metavar="PATH|URL",
        help="A file, or postgresql://user@host/database. Default: $TRAINPACE_JOURNAL, else the user's data folder.",
    )
    return place(click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command))


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose runs."""
    options = (
        click.option("--model", default="", help="A part of the model's name."),
        click.option("--device", default="", help="A part of the device's name."),
        click.option("--exact", is_flag=True, help="--model and --device are whole names."),
        click.option("--batch", "micro_batch", type=COUNT, help="Micro-batch size."),
        click.option("--precision", default="", help="fp32, tf32, amp_fp16, amp_bf16, ..."),
        click.option("--optimizer", default="", help="sgd, sgd_momentum, adam, adamw, ..."),
        click.option("--kind", default="", help="measure, watch, run or import."),
        click.option("--outcome", default="", help="ok, out_of_memory, timeout or crashed."),
        click.option("--sweep", default="", metavar="ID", help="Runs of this sweep."),
        click.option("--since", default="", metavar="DATE", help="Runs from this time on (UTC): 2026-11-21."),
        click.option("--text", default="", help="In names, notes, reasons, commands and sources."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _opened(place: str | None) -> Journal:
    """The journal; one that is named must be there."""
    from trainpace.journal import Journal

    return Journal.open(place, create=place is None)


@click.group(invoke_without_command=True)
@click.pass_context
def journal(context: click.Context) -> int:
    """Every measured run: list, show, compare, import, export, and how good the forecasts were.

    \b
    trainpace journal list --model resnet --since 2026-11-01
    trainpace journal import benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv
    trainpace journal compare 3fa2 91bc
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


@journal.command("list")
@_filters
@click.option("--limit", type=COUNT, default="20", show_default=True, help="Runs to show.")
@click.option("--offset", type=COUNT, default="0", help="Runs to leave out first.")
@click.option("--sweeps", "list_sweeps", is_flag=True, help="List sweeps instead of runs.")
@_place
def list_(place: str | None, as_json: bool, limit: int, offset: int, list_sweeps: bool, **filters: Any) -> int:
    """List runs, the newest first."""
    from trainpace.journal import Query
    from trainpace.records import to_jsonable
    from trainpace.report import journal as report

    limit, offset = min(limit, MOST), min(offset, MOST)
    with _opened(place) as opened:
        if list_sweeps:
            sweeps = opened.sweeps()[::-1][offset : offset + limit]
            echo_json([to_jsonable(s) for s in sweeps]) if as_json else report.print_sweeps(sweeps)
            return 0
        query = Query(**filters)
        entries = opened.find(query, limit, offset)
        if as_json:
            echo_json([to_jsonable(entry) for entry in entries])
        else:
            report.print_entries(entries, opened.count(query), opened.place)
    return 0


@journal.command()
@click.argument("id_", metavar="ID")
@_place
def show(id_: str, place: str | None, as_json: bool) -> int:
    """Show all of one run. ID is its id, or the first digits of it."""
    from trainpace.records import to_jsonable
    from trainpace.report.journal import print_entry

    with _opened(place) as opened:
        entry = opened.get(id_)
    echo_json(to_jsonable(entry)) if as_json else print_entry(entry)
    return 0


@journal.command()
@click.argument("a")
@click.argument("b")
@_place
def compare(a: str, b: str, place: str | None, as_json: bool) -> int:
    """Compare two runs or two sweeps: what differs, the parts of the step, and whether the ratio is beyond the noise.

    Exit code 1 if they have no batch size in common that was timed on both sides.
    """
    from trainpace.journal import compare as compare_runs
    from trainpace.records import to_jsonable
    from trainpace.report.journal import print_comparison

    with _opened(place) as opened:
        comparison = compare_runs(opened.run_or_sweep(a), opened.run_or_sweep(b))
    echo_json(to_jsonable(comparison)) if as_json else print_comparison(comparison)
    return 0 if comparison.ratios else 1


@journal.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), default="auto", show_default=True, help="What they are."
)
@click.option("--device", default="", help="Where they ran, if they do not say.")
@click.option("--precision", default="", help="Their precision, if they do not say.")
@click.option("--keep-identity", is_flag=True, help="Keep paths, user and host names.")
@_place
def import_(
    files: tuple[Path, ...],
    format_: str,
    device: str,
    precision: str,
    keep_identity: bool,
    place: str | None,
    as_json: bool,
) -> int:
    """Bring in runs from elsewhere; what is there already is not doubled.

    FILE is an export of a journal, what `measure --output` wrote, a table with the columns of `trainpace validate`, timm's
    benchmark CSV, Hugging Face's all_results.json or trainer_state.json, MLflow's folder mlruns or its mlflow.db.
    A file that cannot be read is left out whole, and the exit code is 2; 1 if a file held no run.
    """
    from trainpace.errors import TrainpaceError
    from trainpace.journal import Given, Journal, as_precision, import_file
    from trainpace.records import to_jsonable
    from trainpace.report.journal import print_imported

    given = Given(device, as_precision(precision) if precision else None, keep_identity)
    imported, refused = [], []
    with Journal.open(place) as opened:
        for file in files:
            try:
                imported.append(import_file(opened, file, format_, given))
            except TrainpaceError as error:
                refused.append((str(file), str(error)))
        if as_json:
            reasons = [{"file": file, "reason": reason} for file, reason in refused]
            echo_json(
                {
                    "record": "Imports",
                    "schema_version": 1,
                    "files": [to_jsonable(one) for one in imported],
                    "refused": reasons,
                }
            )
        else:
            print_imported(imported, opened.place)
    for _, reason in refused if not as_json else ():
        click.echo(f"trainpace: nothing imported: {reason}", err=True)
    if refused:
        return 2
    return 0 if all(one.new + one.already_there for one in imported) else 1


@journal.command("export")
@click.argument("where", metavar="FILE.{parquet,csv,json}|PLACE")
@click.option(
    "--to", "tracker", type=click.Choice(["mlflow", "wandb"]),
    help="Into a tracker in place of a file: PLACE is MLflow's folder or address, or a project of Weights & Biases.",
)  # fmt: skip
@_filters
@_place
def export(where: str, tracker: str | None, place: str | None, as_json: bool, **filters: Any) -> int:
    """Write runs to a file, the oldest first; without filters, all runs and sweeps. Importing it gives the same again.

    With --to, runs go into an experiment tracker; those that are there already, by their id, are not added again.

    \b
    trainpace journal export runs.parquet
    trainpace journal export --to mlflow mlruns
    WANDB_MODE=offline trainpace journal export --to wandb my-project
    """
    from itertools import chain

    from trainpace.journal import Query
    from trainpace.journal import export as write

    query = Query(**filters)
    with _opened(place) as opened:
        if tracker == "mlflow":
            from trainpace.journal import export_mlflow

            count = export_mlflow(where, opened.every(query))
        elif tracker == "wandb":
            from trainpace.journal import export_wandb

            count = export_wandb(where, opened.every(query))
        else:
            if Path(where).is_dir():
                raise click.UsageError(f"{where} is a folder: name a file, or a tracker with --to.")
            count = write(Path(where), chain(opened.sweeps() if query == Query() else (), opened.every(query)))
    done = f"{count:,} runs added to {tracker}'s {where}" if tracker else f"{count:,} records in {where}"
    _answer({"record": "Export", "file": where, "records": count}, done, as_json)
    return 0


@journal.command()
@click.argument("other")
@_place
def merge(other: str, place: str | None, as_json: bool) -> int:
    """Bring in all runs and sweeps of another journal, OTHER, a path or URL; those that are here already stay as they are."""
    from itertools import chain

    from trainpace.errors import TrainpaceError
    from trainpace.journal import Journal

    with Journal.open(place) as opened, Journal.open(other, create=False) as source:
        if source.place == opened.place:
            raise TrainpaceError("a journal cannot be merged with itself.")
        sweeps, total = source.sweeps(), source.count()
        new = opened.add_many(chain(sweeps, source.every()))
        already = total + len(sweeps) - new
        shown = (source.place, opened.place)
    facts = {"record": "Merge", "from": shown[0], "into": shown[1], "new": new, "already_there": already}
    _answer(facts, f"{new:,} new from {shown[0]}, {already:,} were there already", as_json)
    return 0


@journal.command()
@click.argument("id_", metavar="ID")
@click.argument("text")
@_place
def annotate(id_: str, text: str, place: str | None, as_json: bool) -> int:
    """Write TEXT as the notes of a run, in place of what was there."""
    from trainpace.records import to_jsonable

    with _opened(place) as opened:
        entry = opened.annotate(id_, text)
    echo_json(to_jsonable(entry)) if as_json else click.echo(f"{entry.id[:8]}: {entry.notes}")
    return 0


@journal.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@_place
def delete(ids: tuple[str, ...], place: str | None, as_json: bool) -> int:
    """Delete runs for good."""
    with _opened(place) as opened:
        chosen = [opened.get(id_).id for id_ in ids]  # a wrong id deletes nothing
        for id_ in dict.fromkeys(chosen):
            opened.delete(id_)
    _answer({"record": "Deletion", "deleted": chosen}, f"deleted {', '.join(id_[:8] for id_ in chosen)}", as_json)
    return 0


@journal.command()
@_place
def path(place: str | None, as_json: bool) -> int:
    """Say where the journal is, its schema version, and how many runs it holds."""
    from trainpace.journal import VERSION

    with _opened(place) as opened:
        facts = {
            "record": "JournalPlace",
            "journal": opened.place,
            "database": opened.database,
            "database_version": VERSION,
            "runs": opened.count(),
        }
    said = f"{facts['journal']} ({facts['database']}, schema version {VERSION}, {facts['runs']:,} runs)"
    _answer(facts, said, as_json)
    return 0


@journal.command()
@_filters
@_place
def score(place: str | None, as_json: bool, **filters: Any) -> int:
    """Say how good the forecasts were that were made before their runs. Exit code 1 if there are none."""
    from trainpace.journal import Query, scores
    from trainpace.records import to_jsonable
    from trainpace.report.journal import print_scores

    with _opened(place) as opened:
        result = scores(opened.every(Query(**filters, with_forecast=True)))
    echo_json(to_jsonable(result)) if as_json else print_scores(result)
    return 0 if result.overall.n else 1


def _answer(facts: dict[str, Any], words: str, as_json: bool) -> None:
    from trainpace.report.terminal import print_verdict

    echo_json({**facts, "schema_version": 1}) if as_json else print_verdict(words)
