"""`trainpace watch`."""

from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace

from trainpace.cli.command import View, command, echo_json, json_stdout
from trainpace.verbs.places import JournalPlace
from trainpace.verbs.request import Field, Misuse
from trainpace.verbs.units import within
from trainpace.verbs.watch import WatchRequest, pace_of, run

WHOLE_COMMAND: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
SHARE = within("tolerance", 0.0, 10.0)
JsonAlone = Annotated[bool, Field("Print JSON, and let the command's output go to stderr.")]


class WatchView(View):
    """How a recording is shown, and what it is compared with."""

    steps: Annotated[str | None, Field("Steps of the timeline.  [default: about ten in the middle]", metavar="A:B")] = (
        None
    )
    timeline: Annotated[bool, Field("Print the timeline: the loader's workers against the training steps.")] = False
    html: Annotated[str | None, Field("Save the timeline as a page.", metavar="FILE.html")] = None
    svg: Annotated[str | None, Field("Save the timeline as a picture.", metavar="FILE.svg")] = None
    trace: Annotated[
        str | None, Field("Save every span for ui.perfetto.dev (.json or .json.gz).", metavar="FILE.json")
    ] = None
    baseline: Annotated[
        str | None, Field("An earlier recording's folder, or a run of the journal: is this one slower?", metavar="RUN")
    ] = None
    tolerance: Annotated[
        float | None,
        Field("How much slower, beyond the noise, is no regression.  [default: 0.05]", SHARE, metavar="SHARE"),
    ] = None
    journal: JournalPlace = None
    json: JsonAlone = False


@command(WatchRequest, WatchView, **WHOLE_COMMAND)
def watch(request: WatchRequest, view: WatchView) -> int:
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
    from trainpace.journal import TOLERANCE, guard, pace_of_recording
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_guarded, print_recording

    if view.tolerance is not None and view.baseline is None:
        raise Misuse("--tolerance belongs to --baseline RUN.")
    baseline = None if view.baseline is None else pace_of(view.baseline, view.journal)
    watched = run(replace(request, stdout=json_stdout(view)), TerminalProgress())
    recording, folder, code = watched.recording, watched.folder, watched.exit_code
    if not recording.ranks and not request.recorded and code == 0:
        code = 2
    _save(folder, view)
    comparison = None
    if baseline is not None and recording.ranks and code == 0:
        tolerance = TOLERANCE if view.tolerance is None else view.tolerance
        comparison = guard(baseline, pace_of_recording(recording, str(folder)), tolerance)
        code = int(comparison.regressed)
    if view.json:
        compared = {} if comparison is None else {"baseline": to_jsonable(comparison)}
        echo_json({"folder": str(folder), **to_jsonable(recording), **compared})
        return code
    print_recording(recording, str(folder))
    if view.timeline and recording.ranks:
        from trainpace.report import print_timeline
        from trainpace.watch import timeline_of

        print_timeline(timeline_of(folder, _steps(view)))
    if comparison is not None:
        print_guarded(comparison)
    return code


def _save(folder: Path, view: WatchView) -> None:
    if view.trace:
        from trainpace.watch import write_trace

        write_trace(folder, Path(view.trace))
    if not (view.html or view.svg):
        return
    from trainpace.records import write_whole
    from trainpace.report import timeline_page, timeline_svg
    from trainpace.watch import timeline_of

    timeline = timeline_of(folder, _steps(view))
    if view.html:
        write_whole(view.html, timeline_page(timeline, f"Timeline of {folder.name}"))
    if view.svg:
        write_whole(view.svg, timeline_svg(timeline))


def _steps(view: WatchView) -> range | None:
    if view.steps is None:
        return None
    first, colon, last = view.steps.partition(":")
    if not (first.isdigit() and last.isdigit() and colon and int(first) < int(last)):
        raise Misuse(f"--steps {view.steps}: give two numbers, as in 20:30.")
    return range(int(first), int(last))
