"""`trainpace journal`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs import journal as verb

if TYPE_CHECKING:
    from trainpace.records import Record


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


@command(verb.ListRequest, View, "list", journal)
def _list(request: verb.ListRequest, view: View) -> int:
    """List runs, the newest first."""
    from trainpace.records import to_jsonable
    from trainpace.report import print_entries, print_sweeps

    listing = verb.list_runs(request)
    if view.json:
        echo_json([to_jsonable(row) for row in (listing.sweeps if request.sweeps else listing.runs)])
    elif request.sweeps:
        print_sweeps(listing.sweeps)
    else:
        print_entries(listing.runs, listing.total, listing.place)
    return 0


@command(verb.ShowRequest, View, group=journal)
def show(request: verb.ShowRequest, view: View) -> int:
    """Show all of one run. ID is its id, or the first digits of it."""
    from trainpace.records import to_jsonable
    from trainpace.report import print_entry

    entry = verb.show(request)
    echo_json(to_jsonable(entry)) if view.json else print_entry(entry)
    return 0


@command(verb.CompareRequest, View, group=journal)
def compare(request: verb.CompareRequest, view: View) -> int:
    """Compare two runs or two sweeps: what differs, the parts of the step, and whether the ratio is beyond the noise.

    Exit code 1 if they have no batch size in common that was timed on both sides.
    """
    from trainpace.records import to_jsonable
    from trainpace.report import print_comparison

    comparison = verb.compare_runs(request)
    echo_json(to_jsonable(comparison)) if view.json else print_comparison(comparison)
    return 0 if comparison.ratios else 1


@command(verb.ImportRequest, View, "import", journal)
def _import(request: verb.ImportRequest, view: View) -> int:
    """Bring in runs from elsewhere; what is there already is not doubled.

    FILE is an export of a journal, what `measure --output` wrote, a table with the columns of `trainpace validate`, timm's
    benchmark CSV, Hugging Face's all_results.json or trainer_state.json, MLflow's folder mlruns or its mlflow.db.
    A file that cannot be read is left out whole, and the exit code is 2; 1 if a file held no run.
    """
    from trainpace.records import to_jsonable
    from trainpace.report import print_imported

    imports, place = verb.import_runs(request)
    if view.json:
        echo_json({**to_jsonable(imports), "files": [to_jsonable(one) for one in imports.files]})
    else:
        print_imported(list(imports.files), place)
        for refused in imports.refused:
            click.echo(f"trainpace: nothing imported: {refused.reason}", err=True)
    if imports.refused:
        return 2
    return 0 if all(one.new + one.already_there for one in imports.files) else 1


@command(verb.ExportRequest, View, group=journal)
def export(request: verb.ExportRequest, view: View) -> int:
    """Write runs to a file, the oldest first; without filters, all runs and sweeps. Importing it gives the same again.

    With --to, runs go into an experiment tracker; those that are there already, by their id, are not added again.

    \b
    trainpace journal export runs.parquet
    trainpace journal export --to mlflow mlruns
    WANDB_MODE=offline trainpace journal export --to wandb my-project
    """
    done = verb.export_runs(request)
    into = f"{done.records:,} runs added to {request.to}'s" if request.to else f"{done.records:,} records in"
    return _answer(done, f"{into} {done.file}", view)


@command(verb.MergeRequest, View, group=journal)
def merge(request: verb.MergeRequest, view: View) -> int:
    """Bring in all runs and sweeps of another journal, OTHER, a path or URL; those that are here already stay as they are."""
    done = verb.merge(request)
    return _answer(done, f"{done.new:,} new from {done.source}, {done.already_there:,} were there already", view)


@command(verb.AnnotateRequest, View, group=journal)
def annotate(request: verb.AnnotateRequest, view: View) -> int:
    """Write TEXT as the notes of a run, in place of what was there."""
    entry = verb.annotate(request)
    return _answer(entry, f"{entry.id[:8]}: {entry.notes}", view)


@command(verb.DeleteRequest, View, group=journal)
def delete(request: verb.DeleteRequest, view: View) -> int:
    """Delete runs for good."""
    done = verb.delete(request)
    return _answer(done, f"deleted {', '.join(id_[:8] for id_ in done.deleted)}", view)


@command(verb.JournalRequest, View, group=journal)
def path(request: verb.JournalRequest, view: View) -> int:
    """Say where the journal is, its schema version, and how many runs it holds."""
    facts = verb.path(request)
    words = f"{facts.journal} ({facts.database}, schema version {facts.database_version}, {facts.runs:,} runs)"
    return _answer(facts, words, view)


@command(verb.FilteredRequest, View, group=journal)
def score(request: verb.FilteredRequest, view: View) -> int:
    """Say how good the forecasts were that were made before their runs. Exit code 1 if there are none."""
    from trainpace.records import to_jsonable
    from trainpace.report import print_scores

    scores = verb.score(request)
    echo_json(to_jsonable(scores)) if view.json else print_scores(scores)
    return 0 if scores.overall.n else 1


def _answer(done: Record, words: str, view: View) -> int:
    from trainpace.records import to_jsonable
    from trainpace.report import print_verdict

    echo_json(to_jsonable(done)) if view.json else print_verdict(words)
    return 0
