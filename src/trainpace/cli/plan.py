"""`trainpace plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT,
    DEVICES,
    DURATION,
    EPOCHS,
    GB_PER_S,
    NETWORK_HELP,
    USD,
    echo_json,
    within,
)
from trainpace.cli.pictures import check_pictures, picture_options, save_pictures
from trainpace.execution import PRECISIONS

if TYPE_CHECKING:
    from trainpace.diagnose import Advice
    from trainpace.plan import Plan, Setting
    from trainpace.workload import Workload

_OFFLOAD = ["none", "optimizer", "parameters", "both"]


@click.command()
@click.argument("model")
@click.option("--gpu", help="The GPU of the fleet, by name.")
@click.option("--num-gpus", type=DEVICES, help="GPUs of a node of the fleet.  [default: 1]")
@click.option("--nodes", type=DEVICES, help="Nodes of the fleet.  [default: 1]")
@click.option("--network", type=GB_PER_S, metavar="GB/S", help=NETWORK_HELP)
@click.option(
    "--cluster",
    "fleet",
    metavar="FILE.toml",
    help="The fleet from a file: gpu, num_gpus, nodes, network_gb_per_s, price.",
)
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option("--price", type=USD, help="Dollars per GPU and hour.")
@click.option("--config", "configs", multiple=True, metavar="FILE", help="How it trains now: a settings file; several.")
@click.option("--command", "launch", metavar="TEXT", help="How it trains now: a launch command.")
@click.option(
    "--watched", metavar="FOLDER", help="How it trains now: a recording (trainpace watch), its loader included."
)
@click.option("--batch", type=AT_LEAST_1, help="Samples per GPU and forward pass now.  [default: 32]")
@click.option("--accumulate", type=AT_LEAST_1, help="Micro-batches per update now.  [default: 1]")
@click.option("--global-batch", type=AT_LEAST_1, help="Samples per update over all GPUs, in place of --accumulate.")
@click.option("--gpus-now", type=DEVICES, help="GPUs of a node that it trains on now.  [default: the fleet's]")
@click.option("--nodes-now", type=DEVICES, help="Nodes that it trains on now.  [default: the fleet's]")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Number format now.  [default: fp32]")
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage now; 3 is FSDP's full sharding.  [default: 0]")
@click.option("--tp", type=AT_LEAST_1, help="Tensor-parallel size now.")
@click.option("--pp", type=AT_LEAST_1, help="Pipeline-parallel size now.")
@click.option("--cp", type=AT_LEAST_1, help="Context-parallel size now.")
@click.option("--checkpointing", type=click.Choice(["none", "selective", "full"]), help="What is recomputed now.")
@click.option("--offload", type=click.Choice(_OFFLOAD), help="What is kept in the host's memory now.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile is used now.")
@click.option("--channels-last", is_flag=True, help="NHWC tensors are used now.")
@click.option("--workers", type=COUNT, help="Loader workers now. Needs --sample-ms.")
@click.option(
    "--sample-ms",
    type=within("ms", ABOVE_0, 1e9),
    help="Milliseconds of a core for a sample (trainpace loader measures it).",
)
@click.option("--cores", type=AT_LEAST_1, help="Cores of a node that its loaders may use. With --sample-ms.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--sequence-length", type=AT_LEAST_1, help="Tokens in a sample, for transformers.")
@click.option("--image-size", type=AT_LEAST_1, help="Side in pixels, for image models.")
@click.option("--samples", type=AT_LEAST_1, help="Samples in an epoch.")
@click.option("--tokens", type=AT_LEAST_1, help="Tokens in an epoch, for transformers.")
@click.option("--epochs", type=EPOCHS, help="Passes over the data.")
@click.option("--max-steps", type=AT_LEAST_1, help="Updates, in place of --epochs or as their limit.")
@click.option("--allow-global-batch", is_flag=True, help="Also look at multiples of the global batch.")
@click.option(
    "--noise-scale",
    metavar="SAMPLES|FILE.json",
    help="With --allow-global-batch: count to the same loss, by this gradient noise scale (trainpace measure --noise-scale"
    " --output FILE.json, or the ladder.json of trainpace run).",
)
@click.option("--allow-fp8", is_flag=True, help="Also look at FP8.")
@click.option(
    "--keep",
    multiple=True,
    metavar="WHAT",
    help="Leave this as it is: GPUs, precision, compile, 'micro-batch', ...; several.",
)
@click.option("--simplest", is_flag=True, help="Order the changes to the simplest choice, not to the best.")
@click.option("--timeout", type=DURATION, default="5min", show_default=True, help="Give up tracing after this.")
@click.option("--output", metavar="FILE.json", help="Keep the plan.")
@click.option("--write", is_flag=True, help="Show the plan in the --config files, as a diff of what changes.")
@click.option("--new", multiple=True, metavar="FILE", help="With --write: also make this file, by its name DeepSpeed's .json,"
              " accelerate's .yaml, torchrun's .sh or a .sbatch script; several.")  # fmt: skip
@click.option("--yes", is_flag=True, help="With --write: write it, each old file kept as FILE.bak.")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(model: str, **o: Any) -> int:
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
    from trainpace.cli.plan_write import as_json, check_write, print_files, rewritten, save_all
    from trainpace.plan.evaluate import forecast_of
    from trainpace.records import save, to_jsonable
    from trainpace.report.plan import print_plan, print_plan_next, print_script_changes

    check_pictures(o)
    check_write(o)
    found, setting, also = planned(model, o)
    workload, cluster, noise_scale = setting.workload, setting.cluster, setting.noise_scale
    if o["output"]:
        save(found, o["output"])
    files = rewritten(o, found) if o["write"] else None
    backups = save_all(files) if files is not None and o["yes"] else {}
    if o["as_json"]:
        written = as_json(files, backups) if o["write"] else {}
        changes = [{**to_jsonable(advice), "saved_s": saved_s} for advice, saved_s in also]
        said = {"noise_scale": noise_scale, "saved_s": found.saved_s, "in_the_script": changes}
        echo_json({**to_jsonable(found), **said, **written})
    else:
        print_plan(found, workload, cluster, noise_scale)
        print_script_changes(also)
        if o["write"]:
            print_files(files, backups, o["yes"])
        if found.changes and sys.argv[1:2] == ["plan"]:
            print_plan_next(["trainpace", *sys.argv[1:]], o["output"], model if ".py:" in model else None)
    if o["page"] or o["figure"]:
        from trainpace.report.pages.plan import plan_page, plan_pictures

        ends = [forecast_of(setting, e) if found.best is not None else None for e in (found.start, found.end)]
        save_pictures(
            o,
            lambda: plan_page(found, workload, cluster, to_jsonable(found), *ends),
            lambda: plan_pictures(found, *ends),
        )
    return 0 if found.best is not None else 1


def planned(model: str | Workload, o: dict[str, Any]) -> tuple[Plan, Setting, list[tuple[Advice, float]]]:
    """(the plan, what was planned for, what to change in the script itself), as the options ask."""
    from msgspec.structs import replace

    from trainpace.cli.plan_inputs import Present, cluster_of, data_paths, noise_scale_of, schedule_of, script_changes
    from trainpace.cli.traced import workload_of
    from trainpace.plan import Freedom, Setting, plan_changes
    from trainpace.workload import Form, Variant, form_of

    if isinstance(model, str) and Path(model).is_dir():
        raise click.UsageError(f"{model} is a folder: name the model, and a recording's folder with --watched.")
    noise_scale = noise_scale_of(o)
    present = Present.read(o)
    freedom = Freedom(keep=o["keep"], allow_global_batch=o["allow_global_batch"], allow_fp8=o["allow_fp8"])
    cluster = cluster_of(o, present)
    schedule = schedule_of(o, present)
    forms: tuple[Form, ...] = ("half",) if form_of(present.precision(o)) == "half" else ("fp32", "amp")
    if o["allow_fp8"] and "half" not in forms:
        forms = (*forms, "half")
    variant = Variant(present.pick("optimizer", o["optimizer"]), schedule.sequence_length, o["image_size"])
    workload = workload_of(model, forms, variant, {**o, "optimizer": variant.optimizer})
    start = present.execution(o, cluster, workload)
    setting = Setting(workload, cluster, schedule, noise_scale=noise_scale)
    found = plan_changes(
        setting, start, data_paths(o, present, start, cluster), freedom,
        to="simplest" if o["simplest"] else "best",
    )  # fmt: skip
    found = replace(found, model=model if isinstance(model, str) else model.model)
    return found, setting, script_changes(present, start, schedule)
