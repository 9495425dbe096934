"""`trainpace watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import echo_json, within
from trainpace.verbs.places import JOURNAL

if TYPE_CHECKING:
    from trainpace.journal import Pace

WHOLE_COMMAND = {"ignore_unknown_options": True, "allow_interspersed_args": False}
BUSY = 0.5
"""Of the cores that others may use before it is said."""


@click.command(context_settings=WHOLE_COMMAND)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--output", metavar="FOLDER", help="Where to record.  [default: a new folder in the user's data folder]")
@click.option("--from", "recorded", metavar="FOLDER", help="Show a recording again, in place of running a command.")
@click.option("--steps", metavar="A:B", help="Steps of the timeline.  [default: about ten in the middle]")
@click.option("--timeline", is_flag=True, help="Print the timeline: the loader's workers against the training steps.")
@click.option("--html", metavar="FILE.html", help="Save the timeline as a page.")
@click.option("--svg", metavar="FILE.svg", help="Save the timeline as a picture.")
@click.option("--trace", metavar="FILE.json", help="Save every span for ui.perfetto.dev (.json or .json.gz).")
@click.option(
    "--baseline", metavar="RUN", help="An earlier recording's folder, or a run of the journal: is this one slower?"
)
@click.option(
    "--tolerance", type=within("tolerance", 0.0, 10.0), metavar="SHARE",
    help="How much slower, beyond the noise, is no regression.  [default: 0.05]",
)  # fmt: skip
@click.option("--journal", "place", metavar="PATH|URL", help=JOURNAL)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and let the command's output go to stderr.")
def watch(command: tuple[str, ...], **o: Any) -> int:
    """Run an unchanged training script and record where its steps' time goes.

    Plain PyTorch, Lightning, Hugging Face Trainer, accelerate, DeepSpeed; one process, or the ranks that torchrun or
    accelerate start. Losses stay the same bit for bit. The exit code is the command's own; what was recorded of a command that
    was killed is kept. With --baseline, exit code 1 says that the command worked and its median step is slower beyond the noise.

    \b
    trainpace watch -- python train.py --epochs 1
    trainpace watch --timeline -- torchrun --nproc-per-node 2 train.py
    trainpace watch --from FOLDER --trace trace.json
    trainpace watch --baseline FOLDER --tolerance 0.1 -- python train.py
    """
    from trainpace.records import to_jsonable
    from trainpace.report.watch import print_guarded, print_recording
    from trainpace.watch import read_recording

    if bool(command) == bool(o["recorded"]):
        raise click.UsageError("give a command, as in: trainpace watch -- python train.py, or --from FOLDER.")
    if o["tolerance"] is not None and o["baseline"] is None:
        raise click.UsageError("--tolerance belongs to --baseline RUN.")
    baseline = None if o["baseline"] is None else _pace_of(o["baseline"], o["place"])
    code = 0
    if o["recorded"]:
        folder = Path(o["recorded"])
    else:
        folder = folder_for(o["output"], command)
        code = run(command, folder, as_json=o["as_json"])
    recording = read_recording(folder)
    if not recording.ranks and not o["recorded"] and code == 0:
        code = 2
    _save(folder, o)
    guarded = None
    if baseline is not None and recording.ranks and code == 0:
        from trainpace.journal import TOLERANCE, guard, pace_of_recording

        tolerance = TOLERANCE if o["tolerance"] is None else o["tolerance"]
        guarded = guard(baseline, pace_of_recording(recording, str(folder)), tolerance)
        code = int(guarded.regressed)
    if o["as_json"]:
        compared = {} if guarded is None else {"baseline": to_jsonable(guarded)}
        echo_json({"folder": str(folder), **to_jsonable(recording), **compared})
    else:
        print_recording(recording, str(folder))
        if o["timeline"] and recording.ranks:
            from trainpace.report.timeline import print_timeline
            from trainpace.watch import timeline_of

            print_timeline(timeline_of(folder, _steps(o["steps"])))
        if guarded is not None:
            print_guarded(guarded)
    return code


def _pace_of(run: str, place: str | None) -> Pace:
    """Of a recording's folder, else of the journal's run; read before anything is started."""
    from trainpace.journal import pace_of_entry, pace_of_recording
    from trainpace.watch import read_recording

    if Path(run).is_dir():
        return pace_of_recording(read_recording(Path(run)), run)
    from trainpace.errors import UnknownName
    from trainpace.journal import Journal

    with Journal.open(place) as journal:
        try:
            return pace_of_entry(journal.get(run))
        except UnknownName:
            raise UnknownName(
                "baseline", run, (), "Name the folder of a recording, or a run that trainpace journal list shows."
            ) from None


def folder_for(output: str | None, command: tuple[str, ...]) -> Path:
    """The folder asked for, which must be new or empty, or one named after the script and the time."""
    import datetime

    from trainpace.verbs.places import default_recordings_folder

    if output is not None:
        folder = Path(output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise click.UsageError(f"{folder} is there already; name a new folder.")
        return folder
    script = next((Path(part).stem for part in command if part.endswith(".py")), Path(command[0]).name)
    base = default_recordings_folder() / f"{script}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    tries = (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 100)))
    return next(folder for folder in tries if not folder.exists())


def run(command: tuple[str, ...], folder: Path, as_json: bool, trials: dict[str, object] | None = None) -> int:
    """Run the command; with `as_json` its output goes to stderr, so that ours alone is on stdout."""
    import os
    import sys

    from trainpace.process import usable_cores
    from trainpace.watch import watch as watch_command

    load, cores = os.getloadavg()[0], usable_cores()
    if load > BUSY * cores:
        busy = f"other programs keep {load:.1f} of {cores} cores busy"
        click.echo(f"note: {busy} (load average), so the times of this recording may be too long.", err=True)
    return watch_command(command, folder, trials, output=sys.stderr.fileno() if as_json else None)


def _save(folder: Path, o: dict[str, Any]) -> None:
    if not (o["html"] or o["svg"] or o["trace"]):
        return
    from trainpace.records import write_whole
    from trainpace.report import timeline_page, timeline_svg
    from trainpace.watch import timeline_of, write_trace

    if o["trace"]:
        write_trace(folder, Path(o["trace"]))
    if o["html"] or o["svg"]:
        timeline = timeline_of(folder, _steps(o["steps"]))
        if o["html"]:
            write_whole(o["html"], timeline_page(timeline, f"Timeline of {folder.name}"))
        if o["svg"]:
            write_whole(o["svg"], timeline_svg(timeline))


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and colon and int(first) < int(last)):
        raise click.UsageError(f"--steps {text}: give two numbers, as in 20:30.")
    return range(int(first), int(last))
