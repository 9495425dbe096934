"""`look`: the first answer about a training script, after half a minute of it: how long, why, what to change, and where else.

It asks the other verbs: `watch` for a recording that ends after some seconds of steps, `diagnose` for its shares and advice,
`match` for the same training on cards that can be rented.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, ending_with
from trainpace.core.execution import PRECISIONS, Precision
from trainpace.core.intake import last_bytes
from trainpace.core.outcome import Interval
from trainpace.core.records import Record, load, to_jsonable
from trainpace.core.stats import DRIFT
from trainpace.diagnose import Diagnosis, diagnose, is_trace, loader_cost
from trainpace.job import Question, Schedule, answer
from trainpace.measure import batch_ms
from trainpace.offers import Match, picks, with_front
from trainpace.verbs import match
from trainpace.verbs.request import ABOVE_0_S, AT_LEAST_1, EPOCHS, Field, Misuse, Progress, Request
from trainpace.verbs.watch import (
    Command,
    RecordingFolder,
    Watched,
    busy_words,
    check_one_task,
    new_folder,
)
from trainpace.watch import (
    Rank,
    StatedLength,
    batches_per_step,
    read_recording,
    stated_length,
    task_of,
    untraced_in_words,
    watch,
)
from trainpace.workload import Workload

OUTPUT_FILE = "output.txt"
"""What the script prints, in the recording's folder."""
WORKLOAD_FILE = "workload.json"
ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""What activating an environment sets; `python` is then the user's own."""
TAIL_LINES, TAIL_BYTES = 8, 4000
ROLES = {"cheapest": "cheapest", "knee": "between", "fastest": "fastest"}
USUAL_STEPS = 1000
"""Steps that are spoken of where nobody knows how many there will be."""


class LookRequest(Request):
    """A training command. Its output goes into a file of the recording."""

    command: Command = ()
    seconds: Annotated[
        float,
        Field(
            "How long to let it train, from its first step on.",
            ABOVE_0_S,
            metavar="DURATION",
            option="for",
        ),
    ] = 20.0
    epochs: Annotated[
        float | None,
        Field(
            "Epochs of the whole training.  [default: as the command or the script's variables"
            " say]",
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
            "Samples of a step over all ranks.  [default: as its loader or the model's input"
            " tells]",
            AT_LEAST_1,
        ),
    ] = None
    gpu: Annotated[
        tuple[str, ...],
        Field(
            "A card to rent, several times if you like.  [default: the cheapest, the fastest, one"
            " between]"
        ),
    ] = ()
    output: RecordingFolder = None


class Length(Record):
    """The steps that are spoken of. `of`: the whole training, one epoch of it where nobody says how many there are, or some steps
    where nobody knows an epoch's. `words`: who says so."""

    steps: int
    of: Literal["training", "epoch", "steps"]
    epochs: float | None = None
    words: str = ""


class Elsewhere(Record):
    """The same steps on a card that can be rented, with a loader worker for each core of its server; `role` says why this one is
    shown."""

    role: str
    match: Match


class Looked(Record):
    """`seconds`: of all steps of `length` on this machine, with the interval of the mean step. `elsewhere` is empty where the
    model could not be captured, or no card can train it: `not_elsewhere` says why. `loading_ms`: what the data of a step take
    with the script's own number of loader workers, on cores as fast as these; None where its loader was not seen. `busy`: that
    other programs kept this machine busy, in words."""

    watched: Watched
    diagnosis: Diagnosis
    length: Length
    seconds: float
    interval_s: Interval
    elsewhere: tuple[Elsewhere, ...] = ()
    not_elsewhere: str = ""
    loading_ms: float | None = None
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
            "loading_ms": self.loading_ms,
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
        "hours": m.mean_hours,
        "hours_low": m.hours.low,
        "hours_high": m.hours.high,
        "usd": m.mean_usd,
    }


def run(request: LookRequest, progress: Progress) -> Looked:
    r = request
    if not r.command:
        raise Misuse("give a training script, as in: trainpace train.py --epochs 30.")
    if len(r.command) == 1 and is_trace(r.command[0]):
        raise Misuse(f"{r.command[0]} is a profiler's trace, which trainpace diagnose reads.")
    check_one_task(task_of(os.environ), "look")
    command, busy = started_with_python(r.command), busy_words()
    folder = new_folder(r.output, command)
    watched = _watch(command, folder, r.seconds, busy, progress)
    ranks = watched.recording.ranks
    with ending_with(watched.exit_code or TrainpaceError.exit_code):
        if not ranks and watched.exit_code:
            raise TrainpaceError(
                _failure(watched), f"All that it printed is in {folder / OUTPUT_FILE}."
            )
        found = diagnose(watched.recording)
    stated = stated_length(command) or ranks[0].stated
    length = length_of(found, stated, r.epochs, r.max_steps)
    ms = found.step_ms
    # the rest of the training is at another time than the steps that were watched
    low_ms = ms - math.hypot(ms - found.step_ms_low, DRIFT * ms)
    high_ms = ms + math.hypot(found.step_ms_high - ms, DRIFT * ms)
    seconds, low, high = (_seconds(length.steps, each) for each in (ms, max(low_ms, 1e-6), high_ms))
    looked = Looked(
        watched=watched,
        diagnosis=found,
        length=length,
        seconds=seconds,
        busy=busy,
        loading_ms=_loading_ms(ranks[0]),
        interval_s=Interval(
            low=low,
            high=high,
            coverage=0.9,
            basis="blocks of the watched steps, and machines' drift",
        ),
    )
    try:
        with progress.work("forecasting the same training on cards for rent"):
            return replace(looked, elsewhere=elsewhere(looked, r.gpu, progress, r.global_batch))
    except TrainpaceError as error:
        if r.gpu:  # what was asked for by name
            raise
        return replace(looked, not_elsewhere=str(error))


def started_with_python(command: Sequence[str]) -> tuple[str, ...]:
    """The command, with a Python before a script that is named alone: that of the environment that is active, else this one."""
    if not command[0].endswith(".py"):
        return tuple(command)
    if not os.path.isfile(command[0]):
        raise Misuse(f"there is no file {command[0]} here.")
    active = any(os.environ.get(name) for name in ENVIRONMENTS) and shutil.which("python")
    return ("python" if active else sys.executable, *command)


def length_of(
    diagnosis: Diagnosis, stated: StatedLength | None, epochs: float | None, max_steps: int | None
) -> Length:
    """The training's length: as asked for, else as its command says, else one epoch, else some steps."""
    if max_steps is not None:
        return Length(steps=max_steps, of="training", words="as you say")
    each = diagnosis.steps_per_epoch
    if epochs is None and stated is not None and stated.steps is not None:
        return Length(steps=stated.steps, of="training", words=stated.words)
    if each is None:
        return Length(steps=USUAL_STEPS, of="steps")
    count = epochs if epochs is not None else stated.epochs if stated is not None else None
    if count is None:
        return Length(steps=max(1, round(each)), of="epoch", epochs=1.0)
    words = "as you say" if epochs is not None else stated.words if stated is not None else ""
    return Length(steps=max(1, round(count * each)), of="training", epochs=count, words=words)


def elsewhere(
    looked: Looked, gpus: Sequence[str], progress: Progress, global_batch: int | None = None
) -> tuple[Elsewhere, ...]:
    """The same steps on single cards that can be rented: the cheapest, the fastest and one between, or those asked for. The
    loader's cost of a sample is the recorded one, and so are the samples of a step, without a `global_batch`. Raises
    TrainpaceError where there is no forecast."""
    workload = looked.watched.folder / WORKLOAD_FILE
    first = looked.watched.recording.ranks[0]
    if not workload.is_file():
        raise TrainpaceError(untraced_in_words(first))
    whole = global_batch or samples_of_step(looked.watched.recording.ranks)
    if not whole:
        raise TrainpaceError(
            "neither a loader nor the model's input tells how many samples a step takes;"
            " --global-batch N says it."
        )
    cost = loader_cost(first)
    rate = None if cost is None else 1000 / (cost.sample_cpu_ms + cost.collate_ms / cost.batch_size)
    known = first.number_format in PRECISIONS
    if first.number_format and not known:
        raise TrainpaceError(
            f"the model computes in {first.number_format}, for which there is no forecast."
        )
    precision = cast(Precision, first.number_format) if known else "torch_fp32"
    only = load(workload, Workload).only_batch
    if only is not None:  # what it calls a batch need not be what the loader calls one
        own = only * max(1, round(batches_per_step(first))) * first.world_size
        rate = None if rate is None else rate * own / whole
        whole = own
    found = match.run(
        match.MatchRequest(
            model=str(workload),
            samples=whole * looked.length.steps,
            max_steps=looked.length.steps,
            startup=None if looked.length.of == "training" else 0.0,
            global_batch=whole,
            precision=(precision,),
            loader_rate=rate,
            gpu=tuple(gpus),
            max_nodes=1,
            evidence="none",
        ),
        progress,
    )
    single = [m for m in found.ranking.matches if m.offer.count == 1]
    # who does not say how many cores a server has cannot be asked how fast it loads
    single = [m for m in single if m.offer.vcpus] or single
    if not single:
        raise TrainpaceError(
            "no single card for rent can train it with this batch.",
            "trainpace match looks at servers.",
        )
    if gpus:
        by_card = {m.offer.device: m for m in reversed(single)}  # the cheapest of each
        return tuple(
            Elsewhere(role="", match=m)
            for m in sorted(by_card.values(), key=lambda m: m.mean_hours)
        )
    chosen = picks(with_front(single))
    alone = len(chosen) == 1
    return tuple(
        Elsewhere(role="cheapest and fastest" if alone else ROLES[p.name], match=p.match)
        for p in chosen
    )


def samples_of_step(ranks: Sequence[Rank]) -> int:
    """Samples of a step over all ranks, by their loaders, else by what the model was given; 0 where neither is known."""
    loaded = sum(round(rank.samples_per_step) for rank in ranks)
    return (
        loaded or round(ranks[0].model_batch * max(1.0, ranks[0].micro_steps)) * ranks[0].world_size
    )


def _loading_ms(rank: Rank) -> float | None:
    cost = loader_cost(rank)
    if cost is None or rank.loader is None:
        return None
    return batch_ms(cost, rank.loader.workers, max(1.0, float(rank.cpus))) * batches_per_step(rank)


def _watch(
    command: Sequence[str], folder: Path, seconds: float, busy: str, progress: Progress
) -> Watched:
    with progress.work(
        f"the script trains for {seconds:g} s; what it prints is in the recording's {OUTPUT_FILE}"
    ):
        code = watch(
            command, folder, output_file=folder / OUTPUT_FILE, stop_after_s=seconds, busy=busy
        )
    with ending_with(code):
        return Watched(recording=read_recording(folder), folder=folder, exit_code=code)


def _failure(watched: Watched) -> str:
    """What became of a script that failed before its second step, with the last lines that it printed."""
    lines = (
        last_bytes(watched.folder / OUTPUT_FILE, TAIL_BYTES)
        .decode(errors="replace")
        .splitlines()[-TAIL_LINES:]
    )
    printed = "\n".join(f"  {line}" for line in lines)
    return (
        f"the script ended with exit code {watched.exit_code} before its second training"
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
