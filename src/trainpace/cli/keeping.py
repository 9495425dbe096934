"""Commands for the journal, in the terminal and in the browser."""

import runpy
import shlex

import click

from trainpace import report, verbs
from trainpace.cli.command import View, command_of, echo_json, print_answer, typed_words
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

    Besides your own runs there is the public journal: packaged measurements of others with their sources (--public).

    \b
    trainpace journal list --model resnet --since 2026-11-01
    trainpace journal list --public --device 3090 --batch 64
    trainpace journal import benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv
    trainpace journal compare 3fa2 91bc
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


def _list(request: verb.ListRequest, view: View) -> int:
    """List runs, newest first."""
    listing = verb.list_runs(request)
    if view.json:
        echo_json([to_jsonable(row) for row in listing.sweeps or listing.public or listing.runs])
    elif request.public:
        print_answer(view, report.public_runs_sections(listing.public, listing.total))
    elif request.sweeps:
        print_answer(view, report.sweeps_sections(listing.sweeps, request))
    else:
        print_answer(
            view, report.entries_sections(listing.runs, listing.total, listing.place, request)
        )
    return 0


def show(request: verb.ShowRequest, view: View) -> int:
    """Show one run. ID is its id or the first digits of it; public:ID is a run of the public journal."""
    run = verb.show(request)
    if view.json:
        echo_json(to_jsonable(run))
    elif isinstance(run, Entry):
        print_answer(view, report.entry_sections(run, request))
    else:
        print_answer(view, report.public_run_sections(run, request))
    return 0


def compare(request: verb.CompareRequest, view: View) -> int:
    """Compare two runs or two sweeps: differences, parts of the step, and whether the ratio is beyond the noise.

    public:ID is a run of the public journal, and mine your newest run that is most similar to the other one.
    Exit code 1 if no batch size was timed on both sides.
    """
    comparison = verb.compare_runs(request)
    if view.json:
        echo_json(to_jsonable(comparison))
    else:
        print_answer(view, report.comparison_sections(comparison))
    return 0 if comparison.ratios else 1


def _import(request: verb.ImportRequest, view: View) -> int:
    """Import runs from elsewhere; existing runs are not duplicated.

    FILE is an export of a journal, runs that others shared (see share), what
    `measure --output` wrote, a table with the columns of `trainpace validate`, timm's
    benchmark CSV, Hugging Face's all_results.json or trainer_state.json, MLflow's folder mlruns or its mlflow.db.
    An unreadable file is skipped completely, and the exit code is 2; 1 if a file has no runs. Shared runs are checked first: their
    format, whether their card could have done it, duplicates, and the distance from the forecast of this version.
    """
    imports, place = verb.import_runs(request, report.TerminalProgress())
    if view.json:
        echo_json({**to_jsonable(imports), "files": [to_jsonable(one) for one in imports.files]})
    else:
        print_answer(view, report.imported_sections(imports.files, place, request))
        for refused in imports.refused:
            tell(f"trainpace: nothing imported: {refused.reason}", err=True)
    if imports.refused:
        return 2
    return 0 if all(one.new + one.already_there for one in imports.files) else 1


def export(request: verb.ExportRequest, view: View) -> int:
    """Write runs to a file, oldest first; without filters, all runs and sweeps. Importing the file restores them.

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
    return _answer(done, f"{into} {done.file}", view)


def share(request: verb.ShareRequest, view: View) -> int:
    """Show, and with --output write, your own runs as an anonymous file. Nothing is sent anywhere.

    RUNS are ids of runs or sweeps; without them the filters choose. The file has numbers, settings, names of cards and public
    models, and versions, but no path, name, host, code, command line, note or time of day. docs/sharing.md lists every field. Runs
    from imported tables or shared files are not included; an imported or merged journal counts as yours.

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


def merge(request: verb.MergeRequest, view: View) -> int:
    """Merge all runs and sweeps of another journal, OTHER, a path or URL; existing runs do not change."""
    done = verb.merge(request)
    return _answer(
        done,
        f"{done.new:,} new from {done.source}, {done.already_there:,} were there already",
        view,
    )


def annotate(request: verb.AnnotateRequest, view: View) -> int:
    """Replace the notes of a run with TEXT."""
    entry = verb.annotate(request)
    return _answer(entry, f"{entry.id[:8]}: {entry.notes}", view)


def delete(request: verb.DeleteRequest, view: View) -> int:
    """Delete runs permanently."""
    done = verb.delete(request)
    return _answer(done, f"deleted {', '.join(id_[:8] for id_ in done.deleted)}", view)


def path(request: verb.JournalRequest, view: View) -> int:
    """Show the journal's place, schema version and number of runs."""
    facts = verb.path(request)
    words = (
        f"{facts.journal} ({facts.database}, schema version {facts.database_version},"
        f" {facts.runs:,} runs)"
    )
    return _answer(facts, words, view)


def score(request: verb.ScoreRequest, view: View) -> int:
    """Score the forecasts that were made before their runs. Exit code 1 if there are none.

    With --public, score this version's forecasts of the public journal's runs, each under the conditions of its run.
    """
    scores = verb.score(request, report.TerminalProgress())
    if view.json:
        echo_json(to_jsonable(scores))
    elif isinstance(scores, Scores):
        print_answer(view, report.scores_sections(scores, request))
    else:
        print_answer(view, report.public_score_sections(scores))
    return 0 if scores.overall.n else 1


def _answer(done: Record, words: str, view: View) -> int:
    if view.json:
        echo_json(to_jsonable(done))
    else:
        print_answer(view, [report.Headline(words)])
    return 0


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

    Listens on loopback, so that only this machine reaches it, and only reads the journal. Models are the built-in ones and the
    workloads from `trainpace forecast --save-workload` in the data folder's workloads/.

    \b
    trainpace serve
    trainpace serve --port 9000 --journal team.db
    """
    try:  # A separate program, because interfaces do not import each other.
        runpy.run_module("trainpace.web", {"REQUEST": request}, run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainpace"):
            raise
        raise TrainpaceError(
            f"The dashboard needs {error.name}.", "pip install 'trainpace[serve]'"
        ) from None
    return 0
