"""Commands that train, time or record something on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from trainpace import report, verbs
from trainpace.cli.command import (
    PicturedView,
    Reply,
    SharedView,
    View,
    give,
    json_stdout,
    typed_words,
)
from trainpace.core.errors import TrainpaceError, ending_with
from trainpace.core.records import save, to_jsonable, write_whole
from trainpace.report import tell
from trainpace.verbs.places import JournalPlace
from trainpace.verbs.request import GB_PER_S, NEW_FILE, Field, Misuse, Unit, within

if TYPE_CHECKING:
    from trainpace.watch import Timeline


def _parse_steps(text: str) -> range:
    first, _, last = text.partition(":")
    if not (
        first.isdecimal()
        and last.isdecimal()
        and len(text) <= LONGEST_RANGE
        and int(first) < int(last)
    ):
        raise TrainpaceError(f"{text!r} is not a range of steps: give two numbers, as in 20:30.")
    return range(int(first), int(last))


LONGEST_RANGE = 32
STEPS = Unit("steps", _parse_steps)
FEWEST_MEASURED = 2
"""Minimum number of measured sizes for a sweep to count as successful if other sizes crashed."""
JsonAlone = Annotated[bool, Field("Print JSON, and send the command's output to stderr.")]


class MeasureView(PicturedView):
    output: Annotated[
        str | None, Field("Also save the measurements here.", NEW_FILE, metavar="FILE.json")
    ] = None


def measure(request: verbs.measure.SuiteRequest, view: MeasureView) -> Reply | int:
    """Train MODEL for some steps on this machine at several batch sizes, each in its own process,
    and time them.

    Prints the step time with the interval of a repeat, the jumps, the batch with the best
    throughput and the largest that fits, beside the forecast. Every probe is saved in the journal
    at once, so the same command continues after Ctrl-C.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME,
    transformers:CONFIG.json, diffusers:CONFIG.json, or FILE.py:FUNCTION, where FUNCTION returns
    (model, loss, optimizer, dataset), or a Trainer, a LightningModule, a step of several models
    (docs/tasks.md).

    \b
    trainpace measure resnet50 --batch 1,2,4
    trainpace measure examples/photo_tasks.py:cnn --batch 1:70
    trainpace measure train.py:task --batch 64 --noise-scale
    trainpace measure vgg16 --device cuda --batch 1:70 --html vgg16.html
    trainpace measure resnet50 --device cuda --until-oom
    trainpace measure --suite small
    """
    verbs.measure.check_suite(request)
    request = replace(request, command=" ".join(typed_words()))
    if request.suite is not None:
        return _measure_suite(request, view)
    sweep = verbs.measure.run(request, report.TerminalProgress())
    if view.output:
        write_whole(view.output, json.dumps(to_jsonable(sweep.rows), indent=1) + "\n")
    crashed = any(failed.failure == "crashed" for failed in sweep.failed)
    return Reply(
        sweep,
        report.sweep_sections(sweep, request),
        1 if crashed and len(sweep.analysis.points) < FEWEST_MEASURED else 0,
        report.sweep_title(sweep),
        lambda: report.sweep_json(sweep),
    )


def _measure_suite(request: verbs.measure.SuiteRequest, view: MeasureView) -> int:
    for name in ("output", "html", "figure", "share", "json"):
        if getattr(view, name):
            raise Misuse(
                f"--{name} needs one model.", "trainpace journal export has the suite's runs."
            )
    answer = verbs.measure.run_suite(request, report.TerminalProgress())
    stored = "" if request.no_journal else " Kept in the journal: trainpace journal list"
    tell(f"{answer.measured} of {answer.models} models measured on {answer.device}.{stored}")
    return 0 if answer.measured else 1


class CalibrateView(View):
    hosts: Annotated[
        bool, Field("Under torchrun: only add the links between hosts to the profile.")
    ] = False
    network: Annotated[
        float | None, Field("Bandwidth of the link, if known.", GB_PER_S, needs="hosts")
    ] = None
    detect_only: Annotated[bool, Field("Describe this machine without measuring.")] = False


def calibrate(request: verbs.machine.CalibrateRequest, view: CalibrateView) -> Reply | int:
    """Measure what this machine's CPU can do, for a minute, and save it for forecasts.

    Small blocks of layers are trained with every operator timed, then whole random networks for the
    time between operators. `trainpace forecast MODEL --gpu cpu` and `trainpace measure` use the
    profile from then on. Nothing else should run meanwhile; the answer shows how steady the machine
    was.

    \b
    trainpace calibrate
    trainpace calibrate --ranks 2 --storage /data
    torchrun --nnodes 2 ... -m trainpace calibrate --hosts
    """
    file, progress = str(request.profile_file), report.TerminalProgress()
    if view.hosts:
        links = verbs.machine.run_hosts(request, view.network)
        if links is None:
            return 0
        return Reply(links, report.host_links_sections(links, file, request))
    machine = verbs.machine.machine_of(request, progress)
    found = Reply(machine, report.machine_sections(machine))
    if view.detect_only:
        return found
    if not view.json:
        give(found, view)
    profile = verbs.machine.calibrate_machine(request, progress, machine)
    return Reply(profile, report.profile_sections(profile, file, request))


class DoctorView(SharedView):
    trace: Annotated[
        str | None,
        Field(
            "File for stack traces of failed parts, to send to us.", NEW_FILE, metavar="FILE.txt"
        ),
    ] = None
    html: Annotated[
        str | None, Field("Save the answer as a page: one file.", NEW_FILE, metavar="FILE.html")
    ] = None


def doctor(request: verbs.machine.DoctorRequest, view: DoctorView) -> Reply:
    """Examine this machine and whether it can be measured, in about a minute.

    Driver, torch build, clocks, other programs, copies, memory, a known training step beside its
    forecast, the recorder of watch, a DataLoader and the disk. Each part runs in its own process,
    so that failures are independent. Exit code 0: no problems. 1: a part failed, the driver is
    broken, or something costs speed, each with a remedy. 2: this torch has no device of the
    requested kind.

    \b
    trainpace doctor
    trainpace doctor --device cuda --html doctor.html --trace failed.txt
    """
    examination = verbs.machine.examine_machine(request, report.TerminalProgress())
    if examination.traces and view.trace:
        write_whole(
            view.trace, "".join(f"{part}\n{trace}\n" for part, trace in examination.traces.items())
        )
    return Reply(
        examination,
        report.examination_sections(examination, view.trace),
        0 if examination.is_well else 1,
        f"Examination of {examination.device}",
        lambda: report.examination_json(examination),
        report.examination_sections(examination),
    )


class LoaderView(View):
    output: Annotated[
        str | None, Field("Also save the measurement here.", NEW_FILE, metavar="FILE.json")
    ] = None


def loader(request: verbs.data.LoaderRequest, view: LoaderView) -> Reply:
    """Measure a DataLoader alone: samples/s over workers, where a sample's time goes, and settings
    for this machine.

    NAME is a Dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a
    function that returns it. For a task, compute is measured too, and a step takes the slower of
    the two. With --compute-ms, compute is assumed to keep one core busy, as a GPU's host does.

    \b
    trainpace loader train.py:make_dataset --batch 64
    trainpace loader train.py:make_loader --compute-ms 40 --workers 0:8
    trainpace loader train.py:train_loader --compare train.py:test_loader
    """
    answer = verbs.data.time_loader(request, report.TerminalProgress())
    if view.output:
        save(answer.measurement, view.output)
    measured, comparison = (answer.measurement, answer.advice), answer.comparison
    if comparison is None:
        sections = report.loader_sections(*measured)
        return Reply(answer, sections, data=lambda: report.loader_json(*measured))
    return Reply(
        answer,
        report.loader_comparison_sections(comparison),
        data=lambda: to_jsonable(answer) | {"verdict": report.comparison_verdict(comparison)},
    )


def precompute(request: verbs.data.PrecomputeRequest, view: View) -> Reply:
    """Compute the samples of TARGET once, in parallel processes, into Parquet shards that
    ShardDataset reads back.

    TARGET is FILE.py:NAME: a dataset with __len__ and __getitem__, its class, or a function that
    returns it. A DataLoader or a task (model, loss, optimizer, dataset) stands for its dataset.
    Samples must be deterministic: random augmentation stays online, as ShardDataset's transform.
    Finished shards survive a kill, and the same command continues from there. Samples that raise
    are listed in bad_samples.jsonl.

    \b
    trainpace precompute faces.py:Faces --out shards --estimate
    trainpace precompute faces.py:Faces --out shards
    trainpace precompute --verify --out shards
    """
    from trainpace.shards import Estimate

    answer = verbs.data.precompute(request, report.TerminalProgress())
    if isinstance(answer, verbs.data.Verified):
        damage = report.damage_sections(answer.shards, answer.damaged, request.out)
        return Reply(answer, damage, 1 if answer.damaged else 0)
    if isinstance(answer, Estimate):
        return Reply(answer, report.estimate_sections(answer), 0 if answer.pays else 1)
    return Reply(answer, report.precomputed_sections(answer))


def verify(request: verbs.checks.VerifyRequest, view: View) -> Reply:
    """Train MODEL for some steps as one big batch, by accumulation and on ranks, and compare the
    resulting weights.

    All trainings start with the same weights and samples, on the CPU. If weights differ by more
    than rounding, one thing at a time is changed on both sides until they agree; that is the cause.
    MODEL is given as in trainpace measure. Exit code 1: they differ.

    \b
    trainpace verify train.py:task
    trainpace verify resnet18 --image-size 64 --batch 16 --accumulate 4
    trainpace verify train.py:task --batch 10 --accumulate 4 --way accumulate
    """
    equivalence = verbs.checks.verify(request, report.TerminalProgress())
    return Reply(
        equivalence,
        report.equivalence_sections(equivalence, request),
        0 if equivalence.equal else 1,
        data=lambda: report.equivalence_json(equivalence),
    )


PICTURES = ("html", "figure", "share")


class RunView(PicturedView):
    dry_run: Annotated[
        bool,
        Field("Show setups, commands and forecasts; train nothing.", excludes="html figure share"),
    ] = False
    markdown: Annotated[
        str | None, Field("Write the table in Markdown.", NEW_FILE, metavar="FILE.md")
    ] = None


def run(request: verbs.run.RunRequest, view: RunView) -> Reply:
    """Try a list of changes step by step: forecast, measure, keep what helps, undo what does not.

    LADDER is a ladder.toml (a task, how it trains now, and rungs to try), or a plan from trainpace
    plan --output. Every rung is a few real steps in separate processes, on existing engines (DDP,
    FSDP2, DeepSpeed); your checkpoints are not touched. With --command, an unchanged script runs
    with its own launcher on changed copies of its settings files. After an interrupt, the same
    command continues. Exit code 1: no rung helped.

    \b
    trainpace run examples/ladder/ladder.toml
    trainpace run plan.json --task train.py:task --dry-run
    trainpace run plan.json --command "torchrun train.py args.json" --config args.json --config
    ds.json
    """
    if view.dry_run:
        preview = verbs.run.dry_run(request, report.TerminalProgress())
        sections = report.ahead_sections(*preview)
        return Reply(preview, sections, data=lambda: report.ahead_json(*preview))
    climbed = verbs.run.run(request, report.TerminalProgress())
    table = report.table_of(climbed)
    if view.markdown:
        write_whole(view.markdown, report.markdown(table))
    return Reply(
        climbed,
        report.ladder_sections(table),
        0 if any(rung.kept for rung in climbed.rungs) else 1,
        table.title,
        lambda: report.ladder_json(climbed),
    )


class WatchView(SharedView):
    steps: Annotated[
        range | None,
        Field("Steps of the timeline.  [default: about ten in the middle]", STEPS, metavar="A:B"),
    ] = None
    timeline: Annotated[bool, Field("Print the timeline of loader workers and training steps.")] = (
        False
    )
    html: Annotated[
        str | None, Field("Save the timeline as a page.", NEW_FILE, metavar="FILE.html")
    ] = None
    svg: Annotated[
        str | None, Field("Save the timeline as a picture.", NEW_FILE, metavar="FILE.svg")
    ] = None
    trace: Annotated[
        str | None,
        Field(
            "Save every span for ui.perfetto.dev (.json or .json.gz).",
            NEW_FILE,
            metavar="FILE.json",
        ),
    ] = None
    baseline: Annotated[
        str | None,
        Field(
            "An earlier recording's folder or a run in the journal to compare with.", metavar="RUN"
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Field(
            "Slowdown beyond the noise that is not a regression.  [default: 0.05]",
            within("tolerance", 0.0, 10.0),
            metavar="SHARE",
            needs="baseline",
        ),
    ] = None
    journal: JournalPlace = None
    json: JsonAlone = False


def watch(request: verbs.watch.WatchRequest, view: WatchView) -> int:
    """Run an unchanged training script and record where its steps' time goes.

    Plain PyTorch, Lightning, Hugging Face Trainer, accelerate, DeepSpeed; one process, or the ranks
    that torchrun, accelerate or srun start (srun trainpace watch -- ... is one recording of all
    tasks, and the first one reports). Losses stay the same bit for bit. The exit code is the
    command's own, also where the report fails; what was recorded of a command that was killed is
    kept. With --baseline, exit code 1 says that the command worked and its median step is slower
    beyond the noise, and 2 that it worked and could not be compared.

    \b
    trainpace watch -- python train.py --epochs 1
    trainpace watch --timeline -- torchrun --nproc-per-node 2 train.py
    srun --nodes 4 trainpace watch -- python train.py
    trainpace watch --from FOLDER --trace trace.json
    trainpace watch --baseline FOLDER --tolerance 0.1 -- python train.py
    """
    from trainpace.journal import TOLERANCE, guard, pace_of_recording
    from trainpace.watch import timeline_of, write_trace

    baseline = None if view.baseline is None else verbs.watch.pace_of(view.baseline, view.journal)
    if (
        request.command and sys.stderr.isatty()
    ):  # A progress bar would interfere with the command's own output.
        tell("Recording. The command's output follows, and the report when it ends.", err=True)
    watched = verbs.watch.run(replace(request, stdout=json_stdout(view)), report.TerminalProgress())
    recording, folder, code = watched.recording, watched.folder, watched.exit_code
    if not watched.reports:
        return code
    # The exit code is that of the command, even if there is nothing to show.
    own = bool(request.command) and baseline is None
    with ending_with(code if own else code or TrainpaceError.exit_code):
        comparison = None
        if baseline is not None and code == 0:
            tolerance = TOLERANCE if view.tolerance is None else view.tolerance
            comparison = guard(baseline, pace_of_recording(recording, str(folder)), tolerance)
        compared = {} if comparison is None else {"baseline": to_jsonable(comparison)}

        def timeline() -> Timeline:
            return timeline_of(folder, view.steps)

        def sections() -> Iterable[report.Section]:
            yield from report.recording_sections(recording, str(folder))
            if view.timeline and recording.ranks:
                yield from report.timeline_sections(timeline())
            if comparison is not None:
                yield from report.guarded_sections(comparison)

        def page() -> Iterable[report.Section]:
            yield from report.timeline_sections(timeline())

        reply = Reply(
            recording,
            sections(),
            code if comparison is None else int(comparison.regressed),
            f"Timeline of {folder.name}",
            lambda: {"folder": str(folder), **to_jsonable(recording), **compared},
            page(),
            lambda: to_jsonable(timeline()),
        )
        give(reply, view)
        if view.trace:
            write_trace(folder, Path(view.trace))
        if view.svg:
            write_whole(view.svg, report.timeline_svg(timeline()))
    return reply.code


class DiagnoseView(PicturedView):
    json: JsonAlone = False


def diagnose(request: verbs.diagnose.DiagnoseRequest, view: DiagnoseView) -> Reply | int:
    """Find what slows a training script down, prove it, and estimate what changes save.

    Runs the script for some hundred steps and removes one suspect at a time in blocks of them: the
    same batch instead of the loader, no communication between ranks, a batch of two samples, no
    output. The differences are the proof. The script then ends; its losses mean nothing in such a
    run, and its checkpoints are discarded. Other overwritten files are restored, as after a `look`;
    new ones stay. The exit code is the command's own if it failed before anything was proved, or a
    signal ended it. As tasks of srun, or before torchrun on each node with one shared --output
    folder, it is one diagnosis of the whole job.

    Instead of a command, give the folder of a `trainpace watch`: shares are then as recorded,
    without proof. Or give a profiler's trace: torch.profiler's (.json, .json.gz, or a folder with
    one per rank) or Nsight Systems' (nsys export --type sqlite). Savings are then upper bounds.

    \b
    trainpace diagnose -- python train.py
    trainpace diagnose --epochs 90 -- torchrun --nproc-per-node 2 train.py
    srun --nodes 4 trainpace diagnose --output SHARED -- python train.py
    trainpace diagnose FOLDER
    trainpace diagnose trace.json.gz
    """
    from trainpace.watch import timeline_of

    answer = verbs.diagnose.run(
        replace(request, stdout=json_stdout(view)), report.TerminalProgress()
    )
    if isinstance(answer, verbs.diagnose.Profiled):
        return _profiled(answer)
    if isinstance(answer, verbs.watch.Watched):
        return answer.exit_code
    diagnosis, watched = answer.diagnosis, answer.watched
    recording, folder = watched.recording, str(watched.folder)

    def page() -> Iterable[report.Section]:
        timeline: Iterable[report.Section] = ()
        with contextlib.suppress(TrainpaceError):  # Not every recording has detailed steps.
            timeline = report.timeline_sections(timeline_of(watched.folder))
        yield from report.diagnosis_sections(diagnosis, folder, timeline=timeline)

    tried = any(rank.blocks for rank in recording.ranks)
    again = recording.proved_by if answer.was_read and not tried else ()
    restored = report.restored_notes(recording, watched.folder)
    stopped = watched.exit_code > 128
    ours = any(r.ended_in_the_last for r in recording.ranks)
    reply = Reply(
        diagnosis,
        report.diagnosis_sections(diagnosis, folder, again, restored),
        watched.exit_code if stopped or not (diagnosis.proofs or ours) else 0,
        f"What slows it down: {' '.join(recording.command)}",
        lambda: {"folder": folder, **to_jsonable(diagnosis)},
        page(),
    )
    with ending_with(reply.code or TrainpaceError.exit_code):
        return give(reply, view)


def _profiled(answer: verbs.diagnose.Profiled) -> Reply:
    training, place = answer.training, str(answer.place)
    return Reply(
        training,
        report.profiled_sections(training, place),
        title=report.profiled_title(place),
        data=lambda: {"trace": place, **to_jsonable(training)},
    )


def look(request: verbs.look.LookRequest, view: View) -> Reply:
    """Let a training script train for some seconds and report how long it will take, what slows it
    down, and its cost elsewhere.

    `trainpace train.py --epochs 30` is short for `trainpace look python train.py --epochs 30`.
    Options of trainpace come before the script, and the script's own after it. The script trains as
    usual and is ended after some seconds of steps. Files of earlier runs that it overwrites, such
    as checkpoints and logs, are then restored, unless another program has changed them. Its output
    goes to output.txt in the recording's folder. The number of epochs or steps comes from the
    command, the script's variables, --epochs or --max-steps. Savings are estimates; trainpace
    diagnose proves them.

    \b
    trainpace train.py --epochs 30
    trainpace look --epochs 30 --gpu T4 --gpu A100 python train.py
    trainpace look --for 60s torchrun --nproc-per-node 2 train.py
    """
    looked = verbs.look.run(request, report.TerminalProgress())
    return Reply(looked, report.look_sections(looked, request), data=looked.as_json)
