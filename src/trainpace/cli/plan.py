"""`trainpace plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, save_pictures, typed_words
from trainpace.verbs.plan import PlanRequest, run
from trainpace.verbs.request import Field, Misuse

if TYPE_CHECKING:
    from trainpace.configs import Rewritten


class PlanView(PicturedView):
    """How a plan is shown, and into which files it is written."""

    output: Annotated[str | None, Field("Keep the plan.", metavar="FILE.json")] = None
    write: Annotated[bool, Field("Show the plan in the `config` files, as a diff of what changes.")] = False
    new: Annotated[
        tuple[str, ...],
        Field("With `write`: also make this file, by its name DeepSpeed's .json, accelerate's .yaml, torchrun's .sh or a"
              " .sbatch script; several.", metavar="FILE"),
    ] = ()  # fmt: skip
    yes: Annotated[bool, Field("With `write`: write it, each old file kept as FILE.bak.")] = False


@command(PlanRequest, PlanView)
def plan(request: PlanRequest, view: PlanView) -> int:
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
    from trainpace.plan import forecast_of
    from trainpace.records import save, to_jsonable
    from trainpace.report import TerminalProgress, print_plan, print_plan_next, print_script_changes
    from trainpace.verbs.settings import rewritten, save_all

    check_pictures(view)
    _check_write(request, view)
    answer = run(request, TerminalProgress())
    plan, setting = answer.plan, answer.setting
    if view.output:
        save(plan, view.output)
    files = rewritten(request, plan, view.new) if view.write else None
    backups = save_all(files) if files is not None and view.yes else {}
    if view.json:
        changes = [{**to_jsonable(advice), "saved_s": saved_s} for advice, saved_s in answer.script_changes]
        more = {"noise_scale": setting.noise_scale, "saved_s": plan.saved_s, "in_the_script": changes}
        echo_json({**to_jsonable(plan), **more, **(_files_json(files, backups) if view.write else {})})
    else:
        print_plan(plan, setting.workload, setting.cluster, setting.noise_scale)
        print_script_changes(answer.script_changes)
        if view.write:
            _print_files(files, backups, view.yes)
        if plan.changes and (typed := typed_words()):
            print_plan_next(typed, view.output, request.model_name if ".py:" in request.model_name else None)
    if view.html or view.figure:
        from trainpace.report import plan_page, plan_pictures

        ends = [forecast_of(setting, e) if plan.best is not None else None for e in (plan.start, plan.end)]
        save_pictures(
            view,
            lambda: plan_page(plan, setting.workload, setting.cluster, to_jsonable(plan), *ends),
            lambda: plan_pictures(plan, *ends),
        )
    return 0 if plan.best is not None else 1


def _check_write(request: PlanRequest, view: PlanView) -> None:
    """Refuse options that cannot mean anything, before anything is computed."""
    from trainpace.verbs.settings import NEW

    if view.yes and not view.write:
        raise Misuse("`yes` is for `write`.")
    if view.new and not view.write:
        raise Misuse("`new` is for `write`.")
    if view.write and not (request.config or request.command or view.new):
        raise Misuse("`write` needs the files to write into: name them with `config`, or `new`.")
    for file in view.new:
        if Path(file).exists():
            raise Misuse(f"{file} is there already: name it with `config`.")
        if Path(file).suffix not in NEW:
            raise Misuse(f"{file} tells no format by its name. Known: {', '.join(NEW)}.")


def _files_json(files: Rewritten | None, backups: dict[str, str]) -> dict[str, Any]:
    if files is None:
        return {"files": [], "not_written": {}}
    shown = [
        {"file": f.file, "diff": f.diff, "notes": list(f.notes), "backup": backups.get(f.file)} for f in files.files
    ]
    return {"files": shown, "not_written": files.left}


def _print_files(files: Rewritten | None, backups: dict[str, str], wrote: bool) -> None:
    """The diffs, what no file takes, and what to do next."""
    from trainpace.verbs.settings import COMMAND

    if files is None:
        click.echo("Nothing to write.")
        return
    for f in files.files:
        click.echo(f"\n{f.diff}" if f.diff else f"\n{f.file}: nothing changes.\n", nl=False)
    click.echo()
    for name, why in files.left.items():
        click.echo(f"Not written: {name} ({why}).")
    for note in dict.fromkeys(note for f in files.files for note in f.notes):
        click.echo(f"Note: {note}.")
    for file, backup in backups.items():
        click.echo(f"Wrote {file}; as it was: {backup}" if backup else f"Wrote {file}, which is new.")
    if not wrote and any(f.diff for f in files.files if f.file != COMMAND):
        click.echo("Nothing was written: add --yes to write it. Each old file is kept as FILE.bak.")
