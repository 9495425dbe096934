"""Commands for the journal, in the terminal and in the browser."""

import runpy
import shlex

import click

from trainpace import report, verbs
from trainpace.cli.command import Reply, View, command_of, typed_words
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, to_jsonable
from trainpace.journal import Entry, Scores
from trainpace.report import tell
from trainpace.verbs import journal as verb
from trainpace.verbs.request import Request


@click.group(invoke_without_command=True)
@click.pass_context
def journal(context: click.Context) -> int:
    """List, show, compare, import, export and share measured runs, and score their forecasts.

    Besides your own runs there is the public journal: packaged measurements of others with their
    sources (--public).

    \b
    trainpace journal list --model resnet --since 2026-11-01
    trainpace journal list --public --device 3090 --batch 64
    trainpace journal import benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv
    trainpace journal compare 3fa2 91bc
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


def _list(request: verb.ListRequest, view: View) -> Reply:
    """List runs, newest first."""
    listing = verb.list_runs(request)
    if request.public:
        public = listing.public
        return Reply(public, report.public_runs_sections(public, listing.total))
    if request.sweeps:
        return Reply(listing.sweeps, report.sweeps_sections(listing.sweeps, request))
    runs = listing.runs
    return Reply(runs, report.entries_sections(runs, listing.total, listing.place, request))


def show(request: verb.ShowRequest, view: View) -> Reply:
    """Show one run. ID is its id or the first digits of it; public:ID is a run of the public
    journal."""
    run = verb.show(request)
    if isinstance(run, Entry):
        return Reply(run, report.entry_sections(run, request))
    return Reply(run, report.public_run_sections(run, request))


def compare(request: verb.CompareRequest, view: View) -> Reply:
    """Compare two runs or two sweeps: differences, parts of the step, and whether the ratio is
    beyond the noise.

    public:ID is a run of the public journal, and mine your newest run that is most similar to the
    other one. Exit code 1 if no batch size was timed on both sides.
    """
    comparison = verb.compare_runs(request)
    code = 0 if comparison.ratios else 1
    return Reply(comparison, report.comparison_sections(comparison), code)


def _import(request: verb.ImportRequest, view: View) -> Reply:
    """Import runs from elsewhere; existing runs are not duplicated.

    FILE is an export of a journal, runs that others shared (see share), what `measure --output`
    wrote, a table with the columns of `trainpace validate`, timm's benchmark CSV, Hugging Face's
    all_results.json or trainer_state.json, MLflow's folder mlruns or its mlflow.db. An unreadable
    file is skipped completely, and the exit code is 2; 1 if a file has no runs. Shared runs are
    checked first: their format, whether their card could have done it, duplicates, and the distance
    from the forecast of this version.
    """
    imports, place = verb.import_runs(request, report.TerminalProgress())
    for refused in () if view.json else imports.refused:
        tell(f"trainpace: nothing imported: {refused.reason}", err=True)
    is_empty = not all(one.new + one.already_there for one in imports.files)
    return Reply(
        imports,
        report.imported_sections(imports.files, place, request),
        2 if imports.refused else int(is_empty),
        data=lambda: to_jsonable(imports) | {"files": to_jsonable(imports.files)},
    )


def export(request: verb.ExportRequest, view: View) -> Reply:
    """Write runs to a file, oldest first; without filters, all runs and sweeps. Importing the file
    restores them.

    With --to, runs go into an experiment tracker; runs with a known id are not added again.

    \b
    trainpace journal export runs.parquet
    trainpace journal export --to mlflow mlruns
    WANDB_MODE=offline trainpace journal export --to wandb my-project
    """
    done = verb.export_runs(request)
    into = (
        f"{done.records:,} runs added to {request.to}'s"
        if request.to
        else f"{done.records:,} records in"
    )
    return _done(done, f"{into} {done.file}")


def share(request: verb.ShareRequest, view: View) -> int:
    """Show, and with --output write, your own runs as an anonymous file. Nothing is sent anywhere.

    RUNS are ids of runs or sweeps; without them the filters choose. The file has numbers, settings,
    names of cards and public models, and versions, but no path, name, host, code, command line,
    note or time of day. docs/sharing.md lists every field. Runs from imported tables or shared
    files are not included; an imported or merged journal counts as yours.

    \b
    trainpace journal share --device T4
    trainpace journal share --output mine.json
    """
    shared = verb.share_runs(request)
    runs, written = len(shared.shared.runs), request.output is not None
    if view.json:
        tell(shared.text, nl=False)
        for note in report.shared_notes(runs, shared.left_out, written):
            tell(note, err=True)
    else:
        again = "" if written else shlex.join([*typed_words(), "--output", "mine.json"])
        sections = report.shared_sections(shared.text, runs, shared.left_out, written, again)
        report.show(sections)
    if request.output:
        verb.write_shared(shared, request.output)
        report.tell(f"Written to {request.output}.", err=True)
    return 0


def merge(request: verb.MergeRequest, view: View) -> Reply:
    """Merge all runs and sweeps of another journal, OTHER, a path or URL; existing runs do not
    change."""
    done = verb.merge(request)
    words = f"{done.new:,} new from {done.source}, {done.already_there:,} were there already"
    return _done(done, words)


def annotate(request: verb.AnnotateRequest, view: View) -> Reply:
    """Replace the notes of a run with TEXT."""
    entry = verb.annotate(request)
    return _done(entry, f"{entry.id[:8]}: {entry.notes}")


def delete(request: verb.DeleteRequest, view: View) -> Reply:
    """Delete runs permanently."""
    done = verb.delete(request)
    return _done(done, f"deleted {', '.join(id_[:8] for id_ in done.deleted)}")


def path(request: verb.JournalRequest, view: View) -> Reply:
    """Show the journal's place, schema version and number of runs."""
    facts = verb.path(request)
    words = (
        f"{facts.journal} ({facts.database}, schema version {facts.database_version},"
        f" {facts.runs:,} runs)"
    )
    return _done(facts, words)


def score(request: verb.ScoreRequest, view: View) -> Reply:
    """Score the forecasts that were made before their runs. Exit code 1 if there are none.

    With --public, score this version's forecasts of the public journal's runs, each under the
    conditions of its run.
    """
    scores = verb.score(request, report.TerminalProgress())
    code = 0 if scores.overall.n else 1
    if isinstance(scores, Scores):
        return Reply(scores, report.scores_sections(scores, request), code)
    return Reply(scores, report.public_score_sections(scores), code)


def _done(record: Record, words: str) -> Reply:
    return Reply(record, [report.Headline(words)])


for function in (
    _list,
    show,
    compare,
    _import,
    export,
    share,
    merge,
    annotate,
    delete,
    path,
    score,
):
    journal.add_command(command_of(function))


def serve(request: verbs.journal.ServeRequest, view: Request) -> int:
    """Show the journal and what-if in the browser.

    Listens on loopback, so that only this machine reaches it, and only reads the journal. Models
    are the built-in ones and the workloads from `trainpace forecast --save-workload` in the data
    folder's workloads/.

    \b
    trainpace serve
    trainpace serve --port 9000 --journal team.db
    """
    try:  # A separate program, because interfaces do not import each other.
        runpy.run_module("trainpace.web.server", {"REQUEST": request}, run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainpace"):
            raise
        raise TrainpaceError(
            f"The dashboard needs {error.name}.", "pip install 'trainpace[serve]'"
        ) from None
    return 0
