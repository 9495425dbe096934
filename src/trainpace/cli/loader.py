"""`trainpace loader`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainpace.cli.options import COUNT, DURATION, WORKERS, echo_json


@click.command()
@click.argument("target", metavar="FILE.py:NAME")
@click.option("--batch", "batch_size", type=COUNT, help="Samples in a batch.  [default: the DataLoader's own, or 32]")
@click.option("--workers", type=WORKERS, help="4, or 0,2,4, or 0:4.  [default: 0 up to where more stop gaining]")
@click.option(
    "--compute-ms",
    type=click.FloatRange(min=0),
    help="Step time with its data at hand.  [default: measured for a task]",
)
@click.option(
    "--seconds", type=DURATION, default="500ms", show_default=True, help="Timed part of one run of the loader."
)
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Runs of each setting.")
@click.option("--timeout", type=DURATION, default="10min", show_default=True, help="Give up after this.")
@click.option("--output", metavar="FILE.json", help="Also save the measurement here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def loader(target: str, batch_size: int | None, workers: Any, compute_ms: float | None, **o: Any) -> int:
    """Measure a DataLoader alone: samples/s over workers, where a sample's time goes, and the settings for this machine.

    NAME is a Dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a function that returns it. Of a
    task the compute is measured too, and a step is the later of data and compute. With --compute-ms the compute is taken to
    keep one core busy, as a GPU's host does.

    \b
    trainpace loader train.py:make_dataset --batch 64
    trainpace loader train.py:make_loader --compute-ms 40 --workers 0:8
    """
    from trainpace.loader.advice import advise
    from trainpace.loader.probe import measure_loader
    from trainpace.loader.records import LoaderConditions
    from trainpace.records import save
    from trainpace.report.loader import loader_json, print_loader
    from trainpace.report.progress import Bar

    if o["output"] and not Path(o["output"]).resolve().parent.is_dir():
        raise click.UsageError(f"the folder of {o['output']} does not exist.")
    conditions = LoaderConditions(
        target=target, batch_size=batch_size, workers=None if workers is None else tuple(workers), compute_ms=compute_ms,
        seconds=o["seconds"], repeats=o["repeats"], timeout_s=o["timeout"],
    )  # fmt: skip
    click.echo("measuring the loader alone, for half a minute or so; let nothing else run", err=True)
    with Bar(f"measuring {target}"):
        found = measure_loader(conditions)
    compute_cores = 1.0
    if compute_ms is None and found.is_task:
        compute_ms, compute_cores = _compute(target, found.batch_size, o["timeout"])
    advice = advise(found, compute_ms, compute_cores)
    if o["output"]:
        save(found, o["output"])
    if o["as_json"]:
        echo_json(loader_json(found, advice))
    else:
        print_loader(found, advice)
    return 0


def _compute(target: str, batch_size: int, timeout_s: float) -> tuple[float | None, float]:
    """(ms of a step that has its data, cores that it keeps busy), or no ms where the task does not train by itself."""
    from trainpace.errors import TrainpaceError
    from trainpace.measure import Conditions, measure

    click.echo("measuring the task's compute", err=True)
    try:
        measured = measure(Conditions(model=target, timeout_s=timeout_s), batch_size)
    except TrainpaceError as error:
        click.echo(f"note: the compute was not measured: {error}", err=True)
        return None, 1.0
    return measured.median_ms, float(measured.environment["threads"])
