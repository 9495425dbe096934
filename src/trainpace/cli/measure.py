"""`trainpace measure`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trainpace.cli.options import BATCHES, COUNT, DURATION, echo_json
from trainpace.cli.pictures import check_pictures, picture_options
from trainpace.verbs.places import JOURNAL

_PRECISIONS = ["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]


@click.command()
@click.argument("model", required=False)
@click.option(
    "--batch", "batches", type=BATCHES, help="Batch sizes: 32, or 1,2,4, or 1:70, or 8:64:8.  [default: 8,16,32]"
)
@click.option("--every", is_flag=True, help="Measure every size of a long range; without it those that tell most.")
@click.option(
    "--repeats", type=COUNT, help="Probes of each size where all are measured.  [default: 2; 3 for one or two sizes]"
)
@click.option("--until-oom", is_flag=True, help="Find the largest batch that fits (up to the largest of --batch).")
@click.option("--precision", type=click.Choice(_PRECISIONS), default="fp32", show_default=True, help="Number format.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--accumulate", type=COUNT, default=1, show_default=True, help="Micro-batches per update.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to train.")
@click.option("--sequence-length", type=COUNT, help="Tokens in a sample.")
@click.option("--image-size", type=COUNT, help="Side in pixels, for image models.")
@click.option("--channels-last", is_flag=True, help="NHWC tensors (memory_format=torch.channels_last).")
@click.option("--compile", "compiled", is_flag=True, help="Under torch.compile.")
@click.option("--seconds", type=DURATION, default="2s", show_default=True, help="Training time of a probe.")
@click.option("--timeout", type=DURATION, default="10min", show_default=True, help="Give up on a probe after this.")
@click.option("--memory-limit", type=float, metavar="GIB", help="A probe on the CPU may take no more than this.")
@click.option(
    "--suite", metavar="NAME", help="Measure a list in place of MODEL: classic, random, small, or a FILE.toml."
)
@click.option("--suite-size", type=COUNT, help="How many models --suite random draws.")
@click.option("--suite-seed", type=int, help="Other models for another seed.")
@click.option(
    "--launcher",
    type=click.Choice(["here", "slurm"]),
    default="here",
    show_default=True,
    help="slurm: a job array, a task for each model, with a node to itself.",
)
@click.option("--at-once", type=COUNT, help="Most tasks of the array that run at the same time.")
@click.option("--cpus", type=COUNT, help="Cores of a task.  [default: 1]")
@click.option("--limit", type=DURATION, help="A task that takes longer is ended.  [default: 1h]")
@click.option("--partition", metavar="NAME", help="Slurm's partition.")
@click.option("--account", metavar="NAME", help="Slurm's account.")
@click.option("--sbatch", multiple=True, metavar="TEXT", help="A further option of sbatch, as --sbatch=--qos=debug.")
@click.option(
    "--out", "folder", metavar="FOLDER", help="Where the array's results and logs go.  [default: NAME-measured]"
)
@click.option(
    "--noise-scale", is_flag=True, help="Also the gradient noise scale, of FILE.py:FUNCTION at the largest batch."
)
@click.option("--no-forecast", is_flag=True, help="Do not lay a forecast beside the measurements.")
@click.option("--journal", "place", metavar="PATH|URL", help=JOURNAL)
@click.option("--no-journal", is_flag=True, help="Keep nothing in the journal; an interrupted sweep is then lost.")
@click.option("--fresh", is_flag=True, help="Begin anew where an interrupted sweep could be taken up.")
@click.option("--notes", default="", help="A remark kept with the runs.")
@click.option("--keep-identity", is_flag=True, help="Keep paths and names in the journal as they are.")
@click.option("--output", metavar="FILE.json", help="Also save the measurements here.")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def measure(model: str | None, batches: list[int] | None, **o: Any) -> int:
    """Train MODEL for some steps on this machine at several batch sizes, each probe in a process of its own, and time them.

    Prints the step time with the interval that a repeat should fall into, the jumps, the batch with the best throughput and
    the largest that fits, beside the forecast. Every probe goes into the journal at once: Ctrl-C keeps what is done, and
    the same command takes it up again.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    random:cnn:SEED (or mlp, rnn, transformer), or FILE.py:FUNCTION, where FUNCTION returns (model, loss, optimizer, dataset).

    \b
    trainpace measure resnet50 --batch 1,2,4
    trainpace measure examples/photo_tasks.py:cnn --batch 1:70
    trainpace measure train.py:task --batch 64 --noise-scale
    trainpace measure vgg16 --device cuda --batch 1:70 --html vgg16.html
    trainpace measure resnet50 --device cuda --until-oom
    trainpace measure --suite random --suite-size 100
    trainpace measure --suite classic --launcher slurm --partition gpu --device cuda
    """
    from trainpace.cli.measuring import measure_one, measure_suite

    if (model is None) == (o["suite"] is None):
        raise click.UsageError("Name a MODEL, or a list of them with --suite.")
    check_pictures(o)
    o["command"] = " ".join(["trainpace", *sys.argv[1:]])
    if o["output"] and not Path(o["output"]).resolve().parent.is_dir():
        raise click.UsageError(f"the folder of {o['output']} does not exist.")
    slurm = {key: o[key] for key in ("at_once", "cpus", "limit", "partition", "account", "sbatch", "folder")}
    if o["launcher"] == "here" and any(slurm.values()):
        raise click.UsageError(
            "--at-once, --cpus, --limit, --partition, --account, --sbatch and --out are for --launcher slurm."
        )
    if o["suite"] or o["launcher"] == "slurm":
        for option, name in (
            ("output", "--output"),
            ("page", "--html"),
            ("figure", "--figure"),
            ("as_json", "--json"),
            ("noise_scale", "--noise-scale"),
        ):
            if o[option]:
                raise click.UsageError(f"{name} is for one model here; trainpace journal export has the suite's runs.")
        if o["launcher"] == "slurm":
            from trainpace.cli.suite_nodes import measure_on_nodes

            return measure_on_nodes(model, batches, o | {"cpus": o["cpus"] or 1, "limit": o["limit"] or 3600.0})
        return measure_suite(batches, o)
    assert model is not None
    result = measure_one(model, batches, o)
    if o["as_json"]:
        echo_json(result)
    return 0 if result is not None else 1
