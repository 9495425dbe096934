"""`trainpace measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainpace.cli.options import BATCHES, COUNT, DURATION, echo_json


@click.command()
@click.argument("model")
@click.option(
    "--batch",
    "batches",
    type=BATCHES,
    default="8,16,32",
    help="Batch sizes: 32, or 1,2,4, or 8:64:8.",
    show_default=True,
)
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to train.")
@click.option("--seconds", type=DURATION, default="4s", show_default=True, help="Training time per batch size.")
@click.option("--sequence-length", type=COUNT, help="Tokens in a sample.")
@click.option(
    "--timeout", type=DURATION, default="10min", show_default=True, help="Give up on a batch size after this."
)
@click.option("--output", metavar="FILE.json", help="Save the measurements.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def measure(model: str, batches: list[int], **o: Any) -> int:
    """Train MODEL for some steps on this machine at several batch sizes, each in a process of its own, and time them.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json, or
    FILE.py:FUNCTION, where FUNCTION returns (model, loss, optimizer, dataset).

    \b
    trainpace measure resnet50 --batch 1,2,4
    trainpace measure examples/photo_tasks.py:cnn --batch 8:32:8 --output cnn.json
    """
    import json

    from trainpace.measure import measure as measure_batch
    from trainpace.records import to_jsonable, write_whole
    from trainpace.report.measurement import print_measurements

    if o["output"] and not Path(o["output"]).resolve().parent.is_dir():
        raise click.UsageError(f"the folder of {o['output']} does not exist.")
    results = []
    for i, batch in enumerate(batches):
        click.echo(f"measuring batch {batch} ({i + 1} of {len(batches)})", err=True)
        results.append(
            measure_batch(
                model, batch, o["optimizer"], o["device"], o["seconds"], o["sequence_length"], timeout_s=o["timeout"]
            )
        )
        if o["output"]:  # after every batch size, so that nothing measured is lost
            write_whole(o["output"], json.dumps([to_jsonable(m) for m in results], indent=1) + "\n")
    if o["as_json"]:
        echo_json([to_jsonable(m) for m in results])
    else:
        print_measurements(results)
    return 0
