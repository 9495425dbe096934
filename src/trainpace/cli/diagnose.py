"""`trainpace diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, json_stdout, save_pictures
from trainpace.cli.watch import WHOLE_COMMAND, JsonAlone
from trainpace.errors import TrainpaceError
from trainpace.verbs.diagnose import DiagnoseRequest, run

if TYPE_CHECKING:
    from trainpace.watch import Timeline


class DiagnoseView(PicturedView):
    """How a diagnosis is shown."""

    json: JsonAlone = False


@command(DiagnoseRequest, DiagnoseView, **WHOLE_COMMAND)
def diagnose(request: DiagnoseRequest, view: DiagnoseView) -> int:
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
    from trainpace.report import TerminalProgress, print_diagnosis

    check_pictures(view)
    answer = run(replace(request, stdout=json_stdout(view)), TerminalProgress())
    diagnosis, watched = answer.diagnosis, answer.watched
    if view.json:
        echo_json({"folder": str(watched.folder), **to_jsonable(diagnosis)})
    else:
        print_diagnosis(diagnosis, str(watched.folder))
    if view.html or view.figure:
        from trainpace.report import diagnosis_page, diagnosis_pictures

        words = " ".join(watched.recording.command)
        save_pictures(
            view,
            lambda: diagnosis_page(diagnosis, words, _timeline(watched.folder)),
            lambda: diagnosis_pictures(diagnosis),
        )
    return 0 if diagnosis.proofs else watched.exit_code


def _timeline(folder: Path) -> Timeline | None:
    """The timeline of the recording, where steps of it were recorded in detail."""
    from trainpace.watch import timeline_of

    try:
        return timeline_of(folder)
    except TrainpaceError:
        return None
