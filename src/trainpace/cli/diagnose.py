"""`trainpace diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import DURATION, echo_json
from trainpace.cli.pictures import check_pictures, picture_options, save_pictures
from trainpace.cli.watch import WHOLE_COMMAND, folder_for, run

if TYPE_CHECKING:
    from trainpace.diagnose import Diagnosis
    from trainpace.watch import Timeline


@click.command(context_settings=WHOLE_COMMAND)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    help="Epochs of the whole job, to say what a change saves in it.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=4, show_default=True, help="How often each intervention is tried."
)
@click.option("--block", type=click.IntRange(1), default=8, show_default=True, help="Steps of one try.")
@click.option("--warm-up", type=click.IntRange(1), default=10, show_default=True, help="Steps before the first try.")
@click.option(
    "--limit", type=DURATION, default="5min", show_default=True, help="Stop after so long, with what there is."
)
@click.option("--without", multiple=True, type=click.Choice(["cached_batch", "no_sync", "few_samples", "muted"]),
              help="Leave an intervention out.")  # fmt: skip
@click.option("--output", metavar="FOLDER", help="Where to record.  [default: a new folder in the user's data folder]")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and let the command's output go to stderr.")
def diagnose(command: tuple[str, ...], **o: Any) -> int:
    """Say what slows a training script down, prove it, and what a change would save.

    Runs the script for some hundred steps, and in blocks of them takes one cause away: the same batch in place of the loader, no
    exchange between ranks, a tiny batch, no output. The differences are the proof. The script then ends: its losses mean nothing
    in such a run, its checkpoints are not kept; what else it writes, it writes. The exit code is the command's own where it
    failed before anything was proved.

    In place of a command, the folder of a `trainpace watch`: then the shares are those seen, and unproved.

    \b
    trainpace diagnose -- python train.py
    trainpace diagnose --epochs 90 -- torchrun --nproc-per-node 2 train.py
    trainpace diagnose FOLDER
    """
    from trainpace.records import to_jsonable
    from trainpace.report.diagnosis import print_diagnosis

    check_pictures(o)
    found, folder, code = diagnosis_of(command, o)
    if o["as_json"]:
        echo_json({"folder": str(folder), **to_jsonable(found)})
    else:
        print_diagnosis(found, str(folder))
    if o["page"] or o["figure"]:
        from trainpace.report.pages.diagnosis import diagnosis_page, diagnosis_pictures
        from trainpace.watch import read_recording

        asked = " ".join(read_recording(folder).command)
        save_pictures(o, lambda: diagnosis_page(found, asked, _timeline(folder)), lambda: diagnosis_pictures(found))
    return 0 if found.proofs else code


def diagnosis_of(command: Sequence[str], o: dict[str, Any]) -> tuple[Diagnosis, Path, int]:
    """(what was found, the recording's folder, the command's exit code), as the options ask."""
    from trainpace.diagnose import diagnose as diagnose_recording
    from trainpace.watch import read_recording

    command = tuple(command)
    if not command:
        raise click.UsageError("give a command, as in: trainpace diagnose -- python train.py, or a recording's folder.")
    code = 0
    if len(command) == 1 and Path(command[0]).is_dir():
        folder = Path(command[0])
    else:
        folder = folder_for(o["output"], command)
        trials = {
            "block_steps": o["block"], "rounds": o["rounds"], "warm_up_steps": max(4, o["warm_up"]), "limit_s": o["limit"],
            "without": list(o["without"]),
        }  # fmt: skip
        code = run(command, folder, o["as_json"], trials)
    return diagnose_recording(read_recording(folder), o["epochs"]), folder, code


def _timeline(folder: Path) -> Timeline | None:
    """Of the recording, where steps of it were kept in detail."""
    from trainpace.errors import TrainpaceError
    from trainpace.watch import timeline_of

    try:
        return timeline_of(folder)
    except TrainpaceError:
        return None
