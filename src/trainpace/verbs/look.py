"""`look`: estimate a script's training time, bottlenecks and rental alternatives in half a minute.

It combines other commands. `watch` records a few seconds of steps, `diagnose` finds bottlenecks and
gives advice, and `match` forecasts the same training on rented GPUs.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, ending_with
from trainpace.core.execution import PRECISIONS
from trainpace.core.hardware import find_device
from trainpace.core.intake import last_bytes
from trainpace.core.outcome import Interval
from trainpace.core.records import Record, load, to_jsonable
from trainpace.core.stats import DRIFT
from trainpace.diagnose import Diagnosis, diagnose, is_trace
from trainpace.job import Question, Schedule, answer
from trainpace.offers import Match, picks, with_front
from trainpace.verbs import match
from trainpace.verbs.request import ABOVE_0_S, AT_LEAST_1, EPOCHS, Field, Misuse, Progress, Request
from trainpace.verbs.traced import recorded_batch
from trainpace.verbs.watch import (
    Command,
    RecordingFolder,
    Watched,
    busy_words,
    check_one_task,
    kept,
    new_folder,
)
from trainpace.watch import read_recording, task_of, untraced_in_words, watch
from trainpace.workload import Workload

OUTPUT_FILE = "output.txt"
"""Name of the file in the recording folder that captures the script's output."""
WORKLOAD_FILE = "workload.json"
ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""Environment variables that mark an active virtual environment, whose `python` runs the script."""
TAIL_LINES, TAIL_BYTES = 8, 4000
ROLES = {"cheapest": "cheapest", "knee": "between", "fastest": "fastest"}
USUAL_STEPS = 1000
"""Number of steps to report if the length of the training is unknown."""


class LookRequest(Request):
    """Request to watch a training command. Its output goes to a file in the recording folder."""

    command: Command = ()
    seconds: Annotated[
        float,
        Field(
            "Training time, from its first step on.", ABOVE_0_S, metavar="DURATION", option="for"
        ),
    ] = 20.0
    epochs: Annotated[
        float | None,
        Field(
            "Epochs of the whole training.  [default: from the command or the script's variables]",
            EPOCHS,
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        Field("Optimizer updates of the whole training, in place of epochs.", AT_LEAST_1),
    ] = None
    global_batch: Annotated[
        int | None,
        Field(
            "Samples per step over all ranks.  [default: from its loader or the model's input]",
            AT_LEAST_1,
        ),
    ] = None
    gpu: Annotated[
        tuple[str, ...],
        Field(
            "A card to compare; repeat for several.  [default: for rent: the cheapest, the fastest,"
            " one between]"
        ),
    ] = ()
    output: RecordingFolder = None


class Length(Record):
    """Number of steps to report: the whole training, or else one epoch, or else `USUAL_STEPS`.

    `words` says where the length comes from.
    """

    steps: int
    of: Literal["training", "epoch", "steps"]
    epochs: float | None = None
    words: str = ""


class Elsewhere(Record):
    """Forecast of the same steps on a rented GPU. `role` is why it is shown, such as the cheapest.

    `included` says which work of the host the steps include.
    """

    role: str
    match: Match
    included: tuple[str, ...] = ()


class Looked(Record):
    """The result of a look.

    Attributes:
        seconds: Time of all `length` steps on this machine. `interval_s` is its 90% interval.
        elsewhere: Forecasts on rented GPUs. Empty if the model was not traced or no GPU can train
            it; `not_elsewhere` gives the reason.
        busy: Warning that other programs kept this machine busy, or "".
    """

    watched: Watched
    diagnosis: Diagnosis
    length: Length
    seconds: float
    interval_s: Interval
    elsewhere: tuple[Elsewhere, ...] = ()
    not_elsewhere: str = ""
    busy: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what `trainpace look --json` prints."""
        return {
            "folder": str(self.watched.folder),
            "command": list(self.watched.recording.command),
            "seconds": self.seconds,
            "seconds_low": self.interval_s.low,
            "seconds_high": self.interval_s.high,
            "length": to_jsonable(self.length),
            "elsewhere": [_elsewhere_json(chosen) for chosen in self.elsewhere],
            "not_elsewhere": self.not_elsewhere,
            "busy": self.busy,
            "diagnosis": to_jsonable(self.diagnosis),
        }


def _elsewhere_json(chosen: Elsewhere) -> dict[str, Any]:
    m = chosen.match
    assert m.forecast.step is not None
    return {
        "role": chosen.role,
        "gpu": m.offer.device,
        "provider": m.offer.provider,
        "instance_type": m.offer.instance_type,
        "vcpus": m.offer.vcpus,
        "step_time_ms": m.forecast.step.total_ms,
        "included": list(chosen.included),
        "hours": m.mean_hours,
        "hours_low": m.hours.low,
        "hours_high": m.hours.high,
        "usd": m.mean_usd or None,
    }


def run(request: LookRequest, progress: Progress) -> Looked:
    """Watch a script for a few seconds, diagnose it, and forecast it on rented GPUs.

    Without forecasts, `not_elsewhere` gives the reason. If the request names a GPU, the error is
    raised instead.
    """
    r = request
    check_one_task(task_of(os.environ), "look")
    for name in r.gpu:  # Before the training, which takes much longer.
        find_device(name)
    command, busy = started_with_python(r.command), busy_words()
    folder = new_folder(r.output, command)
    watched = _watch(command, folder, r.seconds, busy, progress)
    ranks = watched.recording.ranks
    with ending_with(watched.exit_code or TrainpaceError.exit_code):
        if not ranks and watched.exit_code:
            raise TrainpaceError(
                _failure(watched), f"Its whole output is in {folder / OUTPUT_FILE}."
            )
        found = diagnose(watched.recording, r.epochs)
    length = length_of(found, r.max_steps)
    ms = found.step_ms
    # The rest of the training runs later than the watched steps, and machine speed drifts.
    low_ms = ms - math.hypot(ms - found.step_ms_low, DRIFT * ms)
    high_ms = ms + math.hypot(found.step_ms_high - ms, DRIFT * ms)
    seconds, low, high = (_seconds(length.steps, each) for each in (ms, max(low_ms, 1e-6), high_ms))
    looked = Looked(
        watched=watched,
        diagnosis=found,
        length=length,
        seconds=seconds,
        busy=busy,
        interval_s=Interval(
            low=low,
            high=high,
            coverage=0.9,
            basis="blocks of the watched steps, and machines' drift",
        ),
    )
    try:
        with progress.work("forecasting the same training on rented cards"):
            return replace(looked, elsewhere=elsewhere(looked, r.gpu, progress, r.global_batch))
    except TrainpaceError as error:
        if r.gpu:  # The user asked for this GPU.
            raise
        return replace(looked, not_elsewhere=str(error))


def started_with_python(command: Sequence[str]) -> tuple[str, ...]:
    """Prepend the interpreter to a script: the active environment's Python or the current one.

    IPython runs notebooks.
    """
    if not command:
        raise Misuse("Give a training script, as in: trainpace train.py --epochs 30.")
    if len(command) == 1 and is_trace(command[0]):
        raise Misuse(f"{command[0]} is a profiler's trace.", "Read it with trainpace diagnose.")
    if not command[0].endswith((".py", ".ipynb")):
        return tuple(command)
    if not os.path.isfile(command[0]):
        raise Misuse(f"There is no file {command[0]} here.")
    if command[0].endswith(".ipynb"):
        return ("ipython", *command)
    active = any(os.environ.get(name) for name in ENVIRONMENTS) and shutil.which("python")
    return ("python" if active else sys.executable, *command)


def length_of(diagnosis: Diagnosis, max_steps: int | None) -> Length:
    """Return the length of the training, or one epoch or `USUAL_STEPS` if it is unknown."""
    d = diagnosis
    if max_steps is not None:
        return Length(steps=max_steps, of="training", words="as given")
    if d.job_steps is not None:
        steps, words = max(1, round(d.job_steps)), d.job_by or "as given"
        return Length(steps=steps, of="training", epochs=d.epochs, words=words)
    if d.steps_per_epoch is None:
        return Length(steps=USUAL_STEPS, of="steps")
    return Length(steps=max(1, round(d.steps_per_epoch)), of="epoch", epochs=1.0)


def elsewhere(
    looked: Looked, gpus: Sequence[str], progress: Progress, global_batch: int | None = None
) -> tuple[Elsewhere, ...]:
    """Forecast the same steps on single rented GPUs.

    These are the given GPUs, rented or not, or else the cheapest, the fastest and one in between.
    The host's work comes from the recording. So does the number of samples per step if
    `global_batch` is None.

    Raises:
        TrainpaceError: There is no forecast.
    """
    request = replace(_request_elsewhere(looked, global_batch), gpu=tuple(gpus))
    found = match.run(request, progress, looked.watched.recording)
    single = [m for m in found.ranking.matches if m.offer.count == 1]
    if gpus:
        _note_rejected(found, single, progress)
    if not single:
        raise TrainpaceError(
            "No single rented card can train it with this batch.",
            "trainpace match considers whole servers.",
        )
    shown = _by_card(single) if gpus else _by_role(single)
    return tuple(Elsewhere(role=role, match=m, included=found.recorded[:1]) for role, m in shown)


def _note_rejected(found: match.Matches, single: Sequence[Match], progress: Progress) -> None:
    """Say why the user's other cards cannot train it."""
    shown = {m.offer.device for m in single}
    reasons = {r.offer.device: r.reason for r in found.ranking.rejected}
    for card in reasons.keys() - shown:
        progress.note(f"trainpace: {card}: {reasons[card]}")


def _by_card(matches: Sequence[Match]) -> list[tuple[str, Match]]:
    """Return the cheapest offer of each card without a role, the fastest card first."""
    cheapest = {m.offer.device: m for m in reversed(matches)}
    return [("", m) for m in sorted(cheapest.values(), key=lambda m: m.mean_hours)]


def _by_role(matches: list[Match]) -> list[tuple[str, Match]]:
    """Return the cheapest match, the fastest one, and one in between, with their roles."""
    chosen = picks(with_front(matches))
    roles = ROLES if len(chosen) > 1 else dict.fromkeys(ROLES, "cheapest and fastest")
    return [(roles[pick.name], pick.match) for pick in chosen]


def _request_elsewhere(looked: Looked, global_batch: int | None) -> match.MatchRequest:
    workload = looked.watched.folder / WORKLOAD_FILE
    first = looked.watched.recording.ranks[0]
    if not workload.is_file():
        raise TrainpaceError(untraced_in_words(first))
    if first.number_format and first.number_format not in PRECISIONS:
        raise TrainpaceError(f"Cannot forecast models in {first.number_format}.")
    only = load(workload, Workload).only_batch if global_batch is None else None
    whole = global_batch or recorded_batch(looked.watched.recording, only)
    if not whole:
        raise TrainpaceError(
            "Neither a loader nor the model's input shows how many samples a step has.",
            "Give --global-batch N.",
        )
    return match.MatchRequest(
        model=str(workload),
        samples=whole * looked.length.steps,
        max_steps=looked.length.steps,
        startup=None if looked.length.of == "training" else 0.0,
        global_batch=whole,
        max_nodes=1,
        evidence="none",
    )


def _watch(
    command: Sequence[str], folder: Path, seconds: float, busy: str, progress: Progress
) -> Watched:
    with progress.work(f"training for {seconds:g} s; output goes to the recording's {OUTPUT_FILE}"):
        code = watch(
            command, folder, output_file=folder / OUTPUT_FILE, stop_after_s=seconds, busy=busy
        )
    with ending_with(code):
        watched = Watched(recording=read_recording(folder), folder=folder, exit_code=code)
        return kept(watched, progress)


def _failure(watched: Watched) -> str:
    """Describe why a script failed before its second step, with the last lines of its output."""
    lines = (
        last_bytes(watched.folder / OUTPUT_FILE, TAIL_BYTES)
        .decode(errors="replace")
        .splitlines()[-TAIL_LINES:]
    )
    printed = "\n".join(f"  {line}" for line in lines)
    return (
        f"The script ended with exit code {watched.exit_code} before its second training"
        f" step:\n{printed}\n"
    )


def _seconds(steps: int, step_ms: float) -> float:
    time = answer(
        Question(
            schedule=Schedule(max_steps=steps),
            micro_batch=1,
            nnodes=1,
            nproc_per_node=1,
            step_time_s=step_ms / 1e3,
        )
    ).time
    assert time is not None
    return time.total_s
