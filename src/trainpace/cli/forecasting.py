"""Commands that compute forecasts, server rankings, plans, schedules and validations."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from trainpace import report, verbs
from trainpace.cli.command import PicturedView, Reply, View, typed_words
from trainpace.core.records import save, to_jsonable
from trainpace.report import tell
from trainpace.verbs.request import COUNT, NEW_FILE, Field, Misuse
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.configs import Rewritten


class TracedView(PicturedView):
    save_workload: Annotated[
        str | None,
        Field(
            "Save the trace in every number format, so that later answers are quick.",
            metavar="FILE.json",
        ),
    ] = None


def forecast(request: verbs.forecast.ForecastRequest, view: TracedView) -> Reply:
    """Forecast step time, memory and cost of MODEL on GPUs you don't have, from its code alone.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME,
    transformers:CONFIG.json, diffusers:CONFIG.json, FILE.py:FUNCTION (see docs/tasks.md), or a
    saved WORKLOAD.json.

    \b
    trainpace forecast resnet50 --gpu T4 --gpu H100 --batch 64 --precision amp_fp16
    trainpace forecast vgg16 --gpu "RTX 3090" --batch 1:70
    trainpace forecast transformers:config.json --gpu H100 --num-gpus 8 --zero 3
    trainpace forecast llama.json --gpu H100 --num-gpus 8 --nodes 8 --network 400 --tp 8
    trainpace forecast resnet50 --gpu H100 --samples 1281167 --epochs 90 --price 2.50
    """
    answer = verbs.forecast.run(
        replace(request, save_workload=view.save_workload), report.TerminalProgress()
    )
    if all(row.step is None for row in answer.rows):
        for reason in dict.fromkeys(row.reason for row in answer.rows if row.reason):
            tell(f"trainpace: not forecast: {reason}", err=True)
    fits = any(row.step is not None and row.may_fit for row in answer.rows)
    return Reply(
        answer,
        report.forecast_sections(answer, request),
        0 if fits else 1,
        report.forecast_title(answer),
        answer.as_json,
    )


class MatchView(TracedView):
    top: Annotated[
        int, Field("Rows of the ranking with --details, besides the Pareto front.", COUNT)
    ] = 6


def match(request: verbs.match.MatchRequest, view: MatchView) -> Reply:
    """Rank servers by what the whole training of MODEL costs, or how long it takes.

    Every server on offer, alone and joined by its network, at the same global batch: seconds and
    dollars per step, hours and dollars of the job with start-up, checkpoints and failures. Exit
    code 1: none meets the deadline or the budget.

    \b
    trainpace match resnet50 --samples 1281167 --epochs 90
    trainpace match resnet50 --samples 1.28M --epochs 90 --deadline 12h --spot --provider aws
    trainpace match WORKLOAD.json --samples 1.28M --epochs 90 --by hours --budget 100 --json

    \b
    A file for --machines; price is dollars per hour of one machine, network_gb_per_s joins several:
      [[machine]]
      name = "lab"
      device = "RTX 4090"
      count = 4
      nodes = 2
      network_gb_per_s = 1.25
      host = "EPYC 7742"
      price = 1.20
    """
    answer = verbs.match.run(
        replace(request, save_workload=view.save_workload), report.TerminalProgress()
    )
    today = datetime.date.today()

    def sections(top: int) -> Iterable[report.Section]:
        return report.match_sections(answer, request.by, top, today, request)

    return Reply(
        answer,
        sections(view.top),
        0 if answer.ranking.matches else 1,
        report.match_title(answer),
        lambda: answer.as_json(today),
        sections(report.PAGE_ROWS),
        lambda: report.match_page_json(answer, today),
    )


def offers(request: verbs.match.OffersRequest, view: View) -> Reply:
    """List servers on offer: GPUs, price, spot price, network, and where the price comes from.

    \b
    trainpace offers --gpu H100 --provider aws
    trainpace offers --refresh
    """
    answer = verbs.match.list_offers(request, report.TerminalProgress())
    return Reply(
        answer,
        report.offers_sections(answer.offers, datetime.date.today(), request),
        data=lambda: {"record": "Offers", "schema_version": 1, "rows": answer.to_dicts()},
    )


def gpus(request: verbs.machine.GpusRequest, view: View) -> Reply:
    """List the hardware catalogue, or one device with the source of every figure.

    \b
    trainpace gpus
    trainpace gpus "NVIDIA GeForce RTX 3090"
    """
    devices = verbs.machine.list_gpus(request, report.TerminalProgress())
    if request.name is None:
        return Reply(devices, report.catalogue_sections(devices, request))
    (device,) = devices
    return Reply(device, report.device_sections(device, request))


def schedule(request: verbs.schedule.ScheduleRequest, view: View) -> Reply:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    \b
    How long does it take?
      trainpace schedule --samples 1281167 --epochs 90 --micro-batch 32 --nproc-per-node 8 \\
        --step-time 210ms
    How fast must a step be?
      trainpace schedule --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h
    How many epochs fit?
      trainpace schedule --samples 50k --global-batch 128 --step-time 80ms --budget '$20' \\
        --price 1.20
    How many samples fit? Which batch size is needed?
      trainpace schedule --epochs 90 --global-batch 256 --step-time 210ms --deadline 24h
      trainpace schedule --samples 1281167 --epochs 90 --step-time 210ms --deadline 24h
    What do my files say, and do they agree?
      trainpace schedule job.sbatch ds.json --samples 1281167 --epochs 90 --step-time 210ms
    """
    answer, files = verbs.schedule.run(request, report.TerminalProgress())
    total_s = None if answer.time is None else answer.time.total_s
    return Reply(
        answer,
        chain(report.settings_sections(files.combined), report.schedule_sections(answer, request)),
        1 if answer.meets_limit is False else 0,
        data=lambda: {**to_jsonable(answer), "total_s": total_s, **files.as_json()},
    )


def validate(request: verbs.checks.ValidateRequest, view: View) -> Reply:
    """Forecast measured runs under their own conditions, and compare.

    RUNS is CSV or Parquet. Columns: model_spec (or model), gpu_canonical (or gpu), precision,
    batch_per_gpu, step_time_ms (or samples_per_sec), and where they apply num_gpus, num_nodes,
    interconnect, global_batch, grad_accum, seq_len, img_size, optimizer, parallelism, mode (train,
    forward_backward, inference), memory_format (nchw, nhwc), compile (eager, compile), framework,
    framework_version, peak_mem_gib, notes, file; and engine, attention, optimizer_implementation,
    cross_entropy, fp8_recipe, peak_memory_kind, host_copy, cudnn_benchmark, host, assumed
    (docs/verbs/validate.md). Leave unknown fields empty.

    With --json: `rows[]`, one per run with its forecast or the reason for its absence, and
    `summary`, the errors overall and by file, GPU and family.

    \b
    trainpace validate runs.csv
    trainpace validate measured_runs.parquet --file timm_train_rtx3090 --json
    """
    validated = verbs.checks.validate(request, report.TerminalProgress())
    overall, groups = validated.overall, validated.groups

    def data() -> dict[str, Any]:
        sums = {f"by_{name}": to_jsonable(group) for name, group in groups.items()}
        summary = {"overall": to_jsonable(overall), **sums}
        rows = to_jsonable(validated.rows)
        return {"record": "Validation", "schema_version": 1, "rows": rows, "summary": summary}

    return Reply(
        validated,
        report.validation_sections(validated.rows, overall, groups),
        0 if overall.n else 1,
        data=data,
    )


class PlanView(PicturedView):
    output: Annotated[str | None, Field("Save the plan.", NEW_FILE, metavar="FILE.json")] = None
    write: Annotated[
        bool,
        Field(
            "Plan only what the settings files can express, and show the changes as a diff.",
            needs="config|command|new",
        ),
    ] = False
    new: Annotated[
        tuple[str, ...],
        Field(
            "Also make this file: DeepSpeed's .json, accelerate's .yaml, torchrun's .sh or a"
            " .sbatch script; repeat for several.",
            metavar="FILE",
            needs="write",
        ),
    ] = ()
    yes: Annotated[
        bool, Field("Write the files; each old one is kept as FILE.bak.", needs="write")
    ] = False


def plan(request: verbs.plan.PlanRequest, view: PlanView) -> Reply:
    """Recommend what to change about a training, in which order, and how many seconds of the whole
    job each change saves.

    MODEL is given as in trainpace forecast. How it trains now comes from options, settings files or
    a recording; the global batch and the optimizer do not change. Exit code 1: nothing fits in
    memory.

    \b
    trainpace plan resnet50 --gpu A100 --num-gpus 4 --batch 64 --samples 1281167 --epochs 90
    trainpace plan transformers:config.json --gpu H100 --num-gpus 8 --nodes 64 --network 400 \\
        --precision bf16 --global-batch 1024 --tokens 1T --max-steps 100000 --optimizer adamw
    trainpace plan train.py:task --gpu T4 --watched recording --config args.json --config ds.json \\
        --write
    """
    _check_write(request, view)
    answer = verbs.plan.run(request, report.TerminalProgress(), view.write, view.new)
    plan = answer.plan
    if view.output:
        save(plan, view.output)
    files = verbs.settings.rewritten(request, plan, view.new) if view.write else None
    backups = verbs.settings.save_all(files) if files is not None and view.yes else {}
    written = _written(files, backups, view.yes) if view.write else ()
    code = verbs.settings.changes_in_code(plan, files)
    following = _following(request, view, bool(backups))
    return Reply(
        answer,
        report.plan_sections(answer, written, code, following),
        0 if plan.best is not None else 1,
        report.plan_title(answer),
        lambda: {**answer.as_json(), **(_files_json(files, backups) if view.write else {})},
        report.plan_sections(answer),
    )


def _following(request: verbs.plan.PlanRequest, view: PlanView, wrote: bool) -> list[Any]:
    typed, model = typed_words(), request.model_name
    if not typed:
        return []
    command = _without_write(typed) if wrote else typed
    task = model if ModelSpec.of(model).runs_code else None
    return [report.plan_next(command, view.output, task, request)]


def _without_write(typed: Sequence[str]) -> list[str]:
    """Return the command without its options for writing, because its new files now exist."""
    left: list[str] = []
    for word, before in zip(typed, ("", *typed), strict=False):
        if (
            word not in ("--write", "--yes", "--new")
            and before != "--new"
            and not word.startswith("--new=")
        ):
            left.append(word)
    return left


def _check_write(request: verbs.plan.PlanRequest, view: PlanView) -> None:
    """Raise Misuse for impossible options before anything is computed."""
    if (
        view.write
        and not (request.command or view.new)
        and all(file.endswith(".py") for file in request.config)
    ):
        raise Misuse("`write` needs a settings file to write; Python code is never changed.")
    for file in view.new:
        if Path(file).exists():
            raise Misuse(f"{file} already exists.", "To change it, pass it with `config`.")
        if Path(file).suffix not in verbs.settings.KIND_OF_NEW_FILE:
            raise Misuse(
                f"Cannot tell the format of {file} from its extension.",
                f"Known extensions: {', '.join(verbs.settings.KIND_OF_NEW_FILE)}.",
            )


def _files_json(files: Rewritten | None, backups: dict[str, str]) -> dict[str, Any]:
    if files is None:
        return {"files": [], "not_written": {}}
    shown = [
        {"file": f.file, "diff": f.diff, "notes": f.notes, "backup": backups.get(f.file)}
        for f in files.files
    ]
    return {"files": shown, "not_written": files.left}


def _written(
    files: Rewritten | None, backups: dict[str, str], wrote: bool
) -> Iterator[report.Section]:
    """Show the diffs, the settings that no file can express, and what to do next."""
    if files is None:
        nothing = "Nothing to write. Without --write the plan may also change other settings."
        yield report.Lines([nothing])
        return
    for f in files.files:
        yield report.Verbatim(f"\n{f.diff}" if f.diff else f"\n{f.file}: nothing changes.\n")
    yield report.named("Not expressible in these files; change your code", list(files.left.items()))
    notes = [f"Note: {note}." for note in dict.fromkeys(n for f in files.files for n in f.notes)]
    for file, backup in backups.items():
        old = f"; the old file is {backup}" if backup else ", which is new"
        notes.append(f"Wrote {file}{old}.")
    changed = [f.file for f in files.files if f.diff and f.file != verbs.settings.COMMAND]
    if changed and not wrote:
        notes.append("Nothing was written. Add --yes to write; old files are saved as FILE.bak.")
    yield report.Lines(notes)
