"""The commands that compute: forecasts, servers, plans, and forecasts against measured runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from trainpace import report, verbs
from trainpace.cli.command import (
    PicturedView,
    View,
    echo_json,
    save_pictures,
    save_shared,
    typed_words,
)
from trainpace.core.records import save, to_jsonable
from trainpace.report import tell
from trainpace.verbs.request import COUNT, NEW_FILE, Field, Group, Misuse
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.configs import Rewritten


class TracedView(PicturedView):
    save_workload: Annotated[
        str | None,
        Field(
            "Keep the trace, in every number format, so that later answers take a moment.",
            metavar="FILE.json",
        ),
    ] = None


def forecast(request: verbs.forecast.ForecastRequest, view: TracedView) -> int:
    """Forecast step time, memory and cost of MODEL on GPUs you don't have, from its code alone.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    diffusers:CONFIG.json, FILE.py:FUNCTION (returning model, loss, optimizer, dataset, or a Trainer, a LightningModule, a step of
    several models: docs/tasks.md), or a saved WORKLOAD.json.

    \b
    trainpace forecast resnet50 --gpu T4 --gpu A100 --gpu H100 --batch 64 --precision amp_fp16
    trainpace forecast vgg16 --gpu "RTX 3090" --batch 8:64:8
    trainpace forecast vgg16 --gpu T4 --batch 1:70
    trainpace forecast transformers:config.json --gpu H100 --num-gpus 8 --zero 3 --precision bf16 --checkpointing
    trainpace forecast transformers:config.json --gpu H100 --batch 1 --sequence-length 1024,4096,16384
    trainpace forecast llama.json --gpu H100 --num-gpus 8 --nodes 8 --network 400 --precision bf16 --tp 8 --pp 4
        (8 cards of 400 Gbit/s in each node are 400 GB/s)
    trainpace forecast resnet50 --gpu H100 --samples 1281167 --epochs 90 --price 2.50
    """
    answer = verbs.forecast.run(
        replace(request, save_workload=view.save_workload), report.TerminalProgress()
    )
    rows, jumps, sweeps = answer.rows, answer.jumps, answer.sweeps
    if view.json:
        echo_json(answer.as_json())
    else:
        workload = sweeps[0].forecaster.workload
        report.print_forecasts(
            workload,
            rows,
            jumps,
            answer.notes,
            request,
            answer.trends,
            answer.padded,
            answer.evidence,
            answer.recorded,
        )
    save_shared(view, answer)
    save_pictures(
        view,
        lambda: report.forecast_page(answer),
        lambda: report.forecast_pictures(sweeps, jumps, answer.evidence),
    )
    if all(row.step is None for row in rows):
        for reason in dict.fromkeys(row.reason for row in rows if row.reason):
            tell(f"trainpace: not forecast: {reason}", err=True)
    return 0 if any(row.step is not None and row.fits is not False for row in rows) else 1


class MatchView(TracedView):
    top: Annotated[
        int, Field("Rows of the ranking that --details prints, besides the Pareto front.", COUNT)
    ] = 6


def match(request: verbs.match.MatchRequest, view: MatchView) -> int:
    """Rank servers by what the whole training of MODEL costs, or how long it takes.

    Every server on offer, alone and joined by its network, at the same global batch: seconds and dollars per step, hours and
    dollars of the job with start-up, checkpoints and failures. Exit code 1: none meets the deadline or the budget.

    \b
    trainpace match resnet50 --samples 1281167 --epochs 90
    trainpace match resnet50 --samples 1.28M --epochs 90 --deadline 12h --spot --provider aws
    trainpace match WORKLOAD.json --samples 1.28M --epochs 90 --by hours --budget 100 --json

    \b
    A file for --machines; price is dollars an hour for one machine, network_gb_per_s joins several:
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
    ranking, close = answer.ranking, answer.nearest
    today = datetime.date.today()
    if view.json:
        echo_json(report.ranking_json(answer, today))
    else:
        report.print_ranking(answer, request.by, view.top, today, request)
    why = "" if close is None else f"{close[1][:1].upper()}{close[1][1:]}."
    save_shared(view, ranking)
    save_pictures(
        view,
        lambda: report.match_page(
            answer, request.by, why, report.ranking_json(answer, today), today
        ),
        lambda: report.match_pictures(ranking, answer.picks),
    )
    return 0 if ranking.matches else 1


def offers(request: verbs.offers.OffersRequest, view: View) -> int:
    """List servers on offer: GPUs, price, spot price, network, and where the price comes from.

    \b
    trainpace offers --gpu H100 --provider aws
    trainpace offers --refresh
    """
    answer = verbs.offers.run(request, report.TerminalProgress())
    if view.json:
        echo_json({"record": "Offers", "schema_version": 1, "rows": answer.to_dicts()})
    else:
        report.print_offers(list(answer.offers), datetime.date.today(), request)
    return 0


def gpus(request: verbs.gpus.GpusRequest, view: View) -> int:
    """List the hardware catalogue, or one device with the source of every figure.

    \b
    trainpace gpus
    trainpace gpus "NVIDIA GeForce RTX 3090"
    """
    devices = verbs.gpus.run(request, report.TerminalProgress())
    if view.json:
        rows = [to_jsonable(device) for device in devices]
        echo_json(rows if request.name is None else rows[0])
    elif request.name is None:
        report.print_catalogue(devices, request)
    else:
        report.print_device(devices[0], request)
    return 0


def schedule(request: verbs.schedule.ScheduleRequest, view: View) -> int:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    \b
    How long does it take?
      trainpace schedule --samples 1281167 --epochs 90 --micro-batch 32 --nproc-per-node 8 --step-time 210ms
    How fast must a step be?
      trainpace schedule --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h
    How many epochs fit?
      trainpace schedule --samples 50k --global-batch 128 --step-time 80ms --budget '$20' --price 1.20
    How many samples fit? Which batch size is needed?
      trainpace schedule --epochs 90 --global-batch 256 --step-time 210ms --deadline 24h
      trainpace schedule --samples 1281167 --epochs 90 --step-time 210ms --deadline 24h
    What do my files say, and do they agree?
      trainpace schedule --config ds.json --config args.json --samples 1281167 --epochs 90 --step-time 210ms
    """
    answer, files = verbs.schedule.run(request, report.TerminalProgress())
    if view.json:
        total_s = None if answer.time is None else answer.time.total_s
        echo_json({**to_jsonable(answer), "total_s": total_s, **files.as_json()})
    else:
        _print_settings(files.combined)
        report.print_answer(answer, request)
    return 1 if answer.meets_limit is False else 0


def _print_settings(combined: Any) -> None:
    if combined is None:
        return
    for setting in combined.values.values():
        tell(f"  {setting.name:22} {setting.value!s:14} {setting.file}: {setting.key}")
    for note in combined.notes:
        tell(f"  {'warning' if note.severity == 'warning' else 'note'}: {note.file}: {note.text}")
    tell()


def validate(request: verbs.validate.ValidateRequest, view: View) -> int:
    """Forecast measured runs under their own conditions, and compare.

    RUNS is CSV or Parquet. Columns: model_spec (or model), gpu_canonical (or gpu), precision, batch_per_gpu,
    step_time_ms (or samples_per_sec), and where they apply num_gpus, num_nodes, interconnect, global_batch, grad_accum,
    seq_len, img_size, optimizer, parallelism, mode (train, forward_backward, inference), memory_format (nchw, nhwc),
    compile (eager, compile), framework, framework_version, peak_mem_gib, notes, file; and engine, attention,
    optimizer_implementation, cross_entropy, fp8_recipe, peak_memory_kind, host_copy, cudnn_benchmark, host, assumed
    (docs/verbs/validate.md). An empty field was not stated.

    With --json: `rows[]`, one for each run with its forecast or why there is none, and `summary`, the errors overall and by file,
    GPU and family.

    \b
    trainpace validate runs.csv
    trainpace validate measured_runs.parquet --file timm_train_rtx3090 --json
    """
    validated = verbs.validate.run(request, report.TerminalProgress())
    if view.json:
        sums = {
            f"by_{name}": [to_jsonable(s) for s in group]
            for name, group in validated.groups.items()
        }
        summary = {"overall": to_jsonable(validated.overall), **sums}
        rows = [to_jsonable(row) for row in validated.rows]
        echo_json({"record": "Validation", "schema_version": 1, "rows": rows, "summary": summary})
    else:
        groups = {name: list(group) for name, group in validated.groups.items()}
        report.print_validation(list(validated.rows), validated.overall, groups)
    return 0 if validated.overall.n else 1


class PlanView(PicturedView):
    output: Annotated[str | None, Field("Keep the plan.", NEW_FILE, metavar="FILE.json")] = None
    write: Annotated[
        bool,
        Field(
            "Plan only what the settings files can express, and show the changes as a diff.",
            needs=("config|command|new",),
            group=Group.OUTPUT,
        ),
    ] = False
    new: Annotated[
        tuple[str, ...],
        Field(
            "Also make this file: DeepSpeed's .json, accelerate's .yaml, torchrun's .sh or a .sbatch"
            " script; repeat for several.",
            metavar="FILE",
            needs=("write",),
            group=Group.OUTPUT,
        ),
    ] = ()
    yes: Annotated[
        bool,
        Field(
            "Write the files; each old one is kept as FILE.bak.",
            needs=("write",),
            group=Group.OUTPUT,
        ),
    ] = False


def plan(request: verbs.plan.PlanRequest, view: PlanView) -> int:
    """Say what to change about a training, in which order, and how many seconds of the whole job each change saves.

    MODEL is named as in trainpace forecast. How it trains now comes from options, from config files or from a recording; the
    global batch and the optimizer stay. Exit code 1: nothing fits in memory.

    \b
    trainpace plan resnet50 --gpu A100 --num-gpus 4 --batch 64 --samples 1281167 --epochs 90
    trainpace plan transformers:config.json --gpu H100 --num-gpus 8 --nodes 64 --network 400 --precision bf16 \\
        --global-batch 1024 --tokens 1T --max-steps 100000 --optimizer adamw
        (8 cards of 400 Gbit/s in each node are 400 GB/s)
    trainpace plan train.py:task --gpu T4 --watched recording --config args.json --config ds.json --write
    """
    from trainpace.plan import forecast_of, layouts_of

    _check_write(request, view)
    answer = verbs.plan.run(request, report.TerminalProgress(), view.write, view.new)
    plan, setting = answer.plan, answer.setting
    if view.output:
        save(plan, view.output)
    files = verbs.settings.rewritten(request, plan, view.new) if view.write else None
    backups = verbs.settings.save_all(files) if files is not None and view.yes else {}
    if view.json:
        echo_json({**answer.as_json(), **(_files_json(files, backups) if view.write else {})})
    else:
        report.print_plan(
            plan, setting.workload, setting.cluster, setting.noise_scale, answer.evidence
        )
        report.print_script_changes(answer.script_changes)
        if view.write:
            _print_files(files, backups, view.yes)
        report.print_code(verbs.settings.changes_in_code(plan, files))
        if plan.changes and (typed := typed_words()):
            model = request.model_name if ModelSpec.of(request.model_name).runs_code else None
            report.print_plan_next(
                _without_write(typed) if backups else typed, view.output, model, request
            )
    save_shared(view, plan)
    if view.html or view.figure:
        before, after = (
            forecast_of(setting, e) if plan.best is not None else None
            for e in (plan.start, plan.end)
        )
        layouts = layouts_of(setting, plan.end) if plan.best is not None else ()
        save_pictures(
            view,
            lambda: report.plan_page(
                plan,
                setting.workload,
                setting.cluster,
                to_jsonable(plan),
                before,
                after,
                answer.evidence,
                layouts,
            ),
            lambda: report.plan_pictures(plan, before, after, layouts),
        )
    return 0 if plan.best is not None else 1


def _without_write(typed: Sequence[str]) -> list[str]:
    """The command without what it has written: it would find its new files there already."""
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
    """Refuse options that cannot mean anything, before anything is computed."""
    if (
        view.write
        and not (request.command or view.new)
        and all(file.endswith(".py") for file in request.config)
    ):
        raise Misuse("`write` needs a settings file to write; Python code is never changed.")
    for file in view.new:
        if Path(file).exists():
            raise Misuse(f"{file} already exists.", "To change it, pass it with `config`.")
        if Path(file).suffix not in verbs.settings.NEW:
            raise Misuse(
                f"Cannot tell the format of {file} from its extension.",
                f"Known: {', '.join(verbs.settings.NEW)}.",
            )


def _files_json(files: Rewritten | None, backups: dict[str, str]) -> dict[str, Any]:
    if files is None:
        return {"files": [], "not_written": {}}
    shown = [
        {"file": f.file, "diff": f.diff, "notes": f.notes, "backup": backups.get(f.file)}
        for f in files.files
    ]
    return {"files": shown, "not_written": files.left}


def _print_files(files: Rewritten | None, backups: dict[str, str], wrote: bool) -> None:
    """The diffs, what no file takes, and what to do next."""
    if files is None:
        tell(
            "Nothing to write. Without --write the plan may also change what these files cannot"
            " state."
        )
        return
    for f in files.files:
        tell(f"\n{f.diff}" if f.diff else f"\n{f.file}: nothing changes.\n", nl=False)
    tell()
    report.print_named("Not expressible in these files; change your code", files.left.items())
    for note in dict.fromkeys(note for f in files.files for note in f.notes):
        tell(f"Note: {note}.")
    for file, backup in backups.items():
        tell(f"Wrote {file}; as it was: {backup}" if backup else f"Wrote {file}, which is new.")
    if not wrote and any(f.diff for f in files.files if f.file != verbs.settings.COMMAND):
        tell("Nothing was written: add --yes to write it. Each old file is kept as FILE.bak.")
