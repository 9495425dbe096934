"""`trainpace forecast`."""

from __future__ import annotations

from typing import Any

import click

from trainpace.cli.options import BATCHES, COUNT, DURATION, USD, echo_json

_PRECISIONS = ["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]


@click.command()
@click.argument("model")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    required=True,
    help="A GPU by name, several times if you like; 'cpu' is this machine's.",
)
@click.option("--num-gpus", type=COUNT, default=1, show_default=True, help="GPUs of one node, data parallel.")
@click.option(
    "--batch",
    "batches",
    type=BATCHES,
    default="32",
    show_default=True,
    help="Samples per GPU: 32, or 1:70, or 8,16,32.",
)
@click.option("--accumulate", type=COUNT, default=1, show_default=True, help="Micro-batches per update.")
@click.option("--precision", type=click.Choice(_PRECISIONS), default="fp32", show_default=True, help="Number format.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--sequence-length", type=COUNT, help="Tokens in a sample, for transformers.")
@click.option("--samples", type=COUNT, help="Samples in an epoch: with --epochs, the whole training is forecast too.")
@click.option("--epochs", type=float, help="Passes over the data.")
@click.option("--price", type=USD, help="Dollars per GPU and hour.")
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option(
    "--save-workload", metavar="FILE.json", help="Keep the trace, in every number format, for forecasts in a moment."
)
@click.option("--timeout", type=DURATION, default="5min", show_default=True, help="Give up tracing after this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def forecast(model: str, gpus: tuple[str, ...], batches: list[int], **o: Any) -> int:
    """Forecast step time, memory and cost of MODEL on GPUs you don't have, from its code alone.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    FILE.py:FUNCTION (returning model, loss, optimizer, dataset), or a saved WORKLOAD.json.

    \b
    trainpace forecast resnet50 --gpu T4 --gpu A100 --gpu H100 --batch 64 --precision amp_fp16
    trainpace forecast vgg16 --gpu "RTX 3090" --batch 8:64:8
    trainpace forecast resnet50 --gpu H100 --samples 1281167 --epochs 90 --price 2.50
    """
    from trainpace.cli.hardware import devices_of
    from trainpace.execution import Execution
    from trainpace.forecast import forecast as forecast_one
    from trainpace.hardware import Cluster, find_device
    from trainpace.records import save
    from trainpace.report.forecast import print_forecasts, row_json
    from trainpace.schedule import Schedule
    from trainpace.trace import load_workload
    from trainpace.workload import Form, Variant, form_of

    if (o["samples"] is None) != (o["epochs"] is None):
        raise click.UsageError("--samples and --epochs go together.")
    plan = None if o["samples"] is None else Schedule(samples=o["samples"], epochs=o["epochs"])
    own = devices_of(o["hardware"])
    named = [None if gpu.casefold() == "cpu" else find_device(gpu, own) for gpu in gpus]
    forms: tuple[Form, ...] = ("fp32", "amp", "half") if o["save_workload"] else (form_of(o["precision"]),)
    workload = load_workload(model, forms, Variant(o["optimizer"], o["sequence_length"]), o["timeout"])
    if o["save_workload"]:
        save(workload, o["save_workload"])
    rows = []
    for device in named:
        kernels = None
        if device is None:
            from trainpace.measure import profile_this_cpu

            click.echo("measuring this machine's CPU", err=True)
            profile = profile_this_cpu()
            device, kernels = profile.device, profile.kernels
        cluster = Cluster(device=device, devices_per_node=o["num_gpus"], price_usd_per_device_hour=o["price"])
        for batch in batches:
            execution = Execution(
                micro_batch=batch,
                accumulation=o["accumulate"],
                nproc_per_node=o["num_gpus"],
                precision=o["precision"],
                optimizer=workload.optimizer,
            )
            rows.append(forecast_one(workload, execution, cluster, plan, kernels))
    if o["as_json"]:
        echo_json({"record": "Forecasts", "schema_version": 1, "rows": [row_json(row) for row in rows]})
    else:
        print_forecasts(workload, rows)
    return 0 if any(row.step is not None and row.fits is not False for row in rows) else 1
