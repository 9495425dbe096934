"""`trainpace forecast`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import (
    AT_LEAST_1,
    BATCHES,
    DEVICES,
    DURATION,
    EPOCHS,
    GB_PER_S,
    NETWORK_HELP,
    USD,
    check_fleet,
    echo_json,
)
from trainpace.cli.pictures import check_pictures, picture_options, save_pictures
from trainpace.cli.sharding import sharding_of, sharding_options
from trainpace.execution import PRECISIONS
from trainpace.verbs.places import JOURNAL

if TYPE_CHECKING:
    from trainpace.outcome import Forecast, Jump
    from trainpace.workload import Workload


@click.command()
@click.argument("model")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    help="A GPU by name, several times if you like; 'cpu' is this machine's, by its profile (trainpace calibrate).",
)
@click.option(
    "--num-gpus",
    type=DEVICES,
    default=1,
    show_default=True,
    help="GPUs of a node; data parallel unless said otherwise.",
)
@click.option("--nodes", type=DEVICES, default=1, show_default=True, help="Nodes of that many GPUs each.")
@click.option("--network", type=GB_PER_S, metavar="GB/S", help=NETWORK_HELP)
@sharding_options
@click.option(
    "--batch",
    "batches",
    type=BATCHES,
    default="32",
    show_default=True,
    help="Samples per GPU: 32, or 1:70, or 8,16,32.",
)
@click.option("--accumulate", type=AT_LEAST_1, default=1, show_default=True, help="Micro-batches per update.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Number format.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--sequence-length", type=AT_LEAST_1, help="Tokens in a sample, for transformers.")
@click.option("--image-size", type=AT_LEAST_1, help="Side in pixels, for image models.")
@click.option(
    "--mode",
    type=click.Choice(["train", "forward_backward", "inference"]),
    help="How much of a step.  [default: train]",
)
@click.option("--channels-last", is_flag=True, help="NHWC tensors (memory_format=torch.channels_last).")
@click.option("--compile", "compiled", is_flag=True, help="Under torch.compile, which fuses element-wise operators.")
@click.option(
    "--transfer-from",
    type=click.Path(exists=True, dir_okay=False),
    metavar="MEASUREMENT.json",
    help="Sharpen by a measurement of the same model on another GPU (trainpace measure --output).",
)
@click.option(
    "--calibrated",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PROFILE.json",
    help="Also forecast the machine of this profile (trainpace calibrate --output).",
)
@click.option("--journal", "place", metavar="PATH|URL", help=JOURNAL)
@click.option("--no-journal", is_flag=True, help="Leave measurements in the journal out of account.")
@click.option(
    "--samples", type=AT_LEAST_1, help="Samples in an epoch: with --epochs, the whole training is forecast too."
)
@click.option("--epochs", type=EPOCHS, help="Passes over the data.")
@click.option("--price", type=USD, help="Dollars per GPU and hour, for the cost of --samples and --epochs.")
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option(
    "--save-workload", metavar="FILE.json", help="Keep the trace, in every number format, for forecasts in a moment."
)
@click.option("--timeout", type=DURATION, default="5min", show_default=True, help="Give up tracing after this.")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def forecast(model: str, gpus: tuple[str, ...], batches: list[int], **o: Any) -> int:
    """Forecast step time, memory and cost of MODEL on GPUs you don't have, from its code alone.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    FILE.py:FUNCTION (returning model, loss, optimizer, dataset), or a saved WORKLOAD.json.

    \b
    trainpace forecast resnet50 --gpu T4 --gpu A100 --gpu H100 --batch 64 --precision amp_fp16
    trainpace forecast vgg16 --gpu "RTX 3090" --batch 8:64:8
    trainpace forecast vgg16 --gpu T4 --batch 1:70
    trainpace forecast transformers:config.json --gpu H100 --num-gpus 8 --zero 3 --precision bf16 --checkpointing
    trainpace forecast llama.json --gpu H100 --num-gpus 8 --nodes 8 --network 400 --precision bf16 --tp 8 --pp 4
        (8 cards of 400 Gbit/s in each node are 400 GB/s)
    trainpace forecast resnet50 --gpu H100 --samples 1281167 --epochs 90 --price 2.50
    """
    from trainpace.records import to_jsonable
    from trainpace.report.forecast import print_forecasts, row_json

    check_pictures(o)
    workload, rows, jumps, said, asked = forecasts_of(model, gpus, batches, o)
    if o["as_json"]:
        echo_json({
            "record": "Forecasts", "schema_version": 1, "rows": [row_json(row) for row in rows],
            "journal": said, "jumps": {name: [to_jsonable(jump) for jump in found] for name, found in jumps.items()},
        })  # fmt: skip
    else:
        print_forecasts(workload, rows, jumps, said, model)
    if o["page"] or o["figure"]:
        from trainpace.report.pages.forecast import Asked, forecast_page, forecast_pictures

        of_each = [Asked(*one) for one in asked]
        save_pictures(o, lambda: forecast_page(of_each, jumps, said), lambda: forecast_pictures(of_each, jumps))
    if all(row.step is None for row in rows):
        for reason in dict.fromkeys(row.reason for row in rows if row.reason):
            click.echo(f"trainpace: not forecast: {reason}", err=True)
    return 0 if any(row.step is not None and row.fits is not False for row in rows) else 1


def forecasts_of(
    model: str | Workload, gpus: Sequence[str], batches: Sequence[int], o: dict[str, Any]
) -> tuple[Workload, list[Forecast], dict[str, tuple[Jump, ...]], list[str], list[Any]]:
    """(the workload, a forecast a GPU and batch, jumps by device, what the journal knew, and of each target what a page shows of
    it: its form, cluster, kernels and forecasts), as the options ask."""
    from msgspec.structs import replace

    from trainpace.cli.traced import variant_of, workload_of
    from trainpace.execution import Execution
    from trainpace.forecast import forecast as forecast_one
    from trainpace.forecast.jumps import jumps_of
    from trainpace.forecast.transfer import transfer_ratio, transferred
    from trainpace.job import JobConditions, with_job
    from trainpace.journal import foresee
    from trainpace.records import save
    from trainpace.schedule import Schedule
    from trainpace.verbs.own_hardware import own_devices
    from trainpace.workload import Form, form_of

    if (o["samples"] is None) != (o["epochs"] is None):
        raise click.UsageError("--samples and --epochs go together.")
    if o["price"] is not None and o["samples"] is None:
        raise click.UsageError("--price does nothing without --samples and --epochs, which say how long to pay.")
    if not gpus and not o["calibrated"]:
        raise click.UsageError("Name a GPU with --gpu, or a machine's profile with --calibrated.")
    plan = None if o["samples"] is None else Schedule(samples=o["samples"], epochs=o["epochs"])
    targets = _targets(gpus, own_devices(o["hardware"]), o)
    forms: tuple[Form, ...] = ("fp32", "amp", "half") if o["save_workload"] else (form_of(o["precision"]),)
    sharded = sharding_of(o)
    variant = variant_of(o)
    on_cpu = all(kernels is not None for _, kernels in targets)
    full = o["checkpointing"] == "full"
    workload = workload_of(model, forms, variant._replace(cpu=on_cpu), o, full)
    # a CPU runs other operators than a GPU does, so beside GPUs it needs a trace of its own
    mixed = not on_cpu and any(kernels is not None for _, kernels in targets)
    of_cpu = workload_of(model, forms, variant._replace(cpu=True), o, full) if mixed else workload
    if o["save_workload"]:
        save(workload, o["save_workload"])
    run = Execution(
        micro_batch=batches[0], accumulation=o["accumulate"], nnodes=o["nodes"], nproc_per_node=o["num_gpus"],
        precision=o["precision"], optimizer=workload.optimizer, compile=o["compiled"], channels_last=o["channels_last"],
        **{**sharded, **({"activation_checkpointing": "full"} if workload.checkpointed else {})},
    )  # fmt: skip
    ratio, source = 1.0, ""
    if o["transfer_from"]:
        from trainpace.hardware import Cluster, find_device

        measured = _nearest_measurement(o["transfer_from"], batches[0])
        source = measured.device
        there = Cluster(device=find_device(source, own_devices(o["hardware"])))
        ratio = transfer_ratio(workload, measured, there)
    rows: list[Forecast] = []
    jumps: dict[str, tuple[Jump, ...]] = {}
    asked: list[Any] = []
    said: list[str] = []
    with _journal_if_there(o) as journal:
        for cluster, kernels in targets:
            traced = workload if kernels is None else of_cpu
            runs = [replace(run, micro_batch=batch) for batch in batches]
            if source:
                priced = JobConditions(price_usd_per_device_hour=o["price"])
                swept = [transferred(forecast_one(traced, e, cluster, None, kernels), ratio, source) for e in runs]
                swept = [with_job(f, traced, plan, priced) for f in swept]
            else:
                known = foresee(
                    traced, run, cluster, kernels, journal, o["sequence_length"], o["image_size"]
                )  # fmt: skip
                swept = [known.at(e, plan) for e in runs]
                said += [f"{cluster.device.name}: {known.in_words()}"] if known.in_words() else []
            rows += swept
            asked.append((traced, cluster, kernels, swept))
            step_ms = [row.step.total_ms for row in swept if row.step is not None]
            if kernels is None and len(step_ms) == len(batches):
                jumps[cluster.device.name] = jumps_of(workload, run, cluster.device, batches, step_ms)
    return workload, rows, jumps, said, asked


def _targets(gpus: Sequence[str], own: Any, o: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(cluster, the machine's own kernel model or None) for every GPU and profile that was named."""
    from trainpace.hardware import Cluster, find_device

    machines: list[tuple[Any, Any, Any]] = []
    for gpu in gpus:
        if gpu.casefold() == "cpu":
            from trainpace.cli.machine import profile_or_brief

            profile = profile_or_brief()
            machines.append((profile.device, profile.kernels, profile.host_links))
        else:
            machines.append((find_device(gpu, own), None, None))
    if o["calibrated"]:
        from trainpace.machine.profile import MachineProfile
        from trainpace.records import load

        profile = load(o["calibrated"], MachineProfile)
        machines.append((profile.device, profile.kernels, profile.host_links))
    for _, _, links in machines:
        check_fleet(o["num_gpus"], o["nodes"], o["network"], links is not None)
    network = None if o["network"] is None else o["network"] / o["num_gpus"]
    return [
        (Cluster(device=device, devices_per_node=o["num_gpus"], nodes=o["nodes"], price_usd_per_device_hour=o["price"],
                 network_gb_per_s_per_device=network, host_links=links), kernels)
        for device, kernels, links in machines
    ]  # fmt: skip


@contextlib.contextmanager
def _journal_if_there(o: dict[str, Any]) -> Iterator[Any]:
    """The journal, if there is one: a forecast makes none."""
    from trainpace.journal import is_there

    if o["no_journal"] or (o["place"] is None and not is_there()):
        yield None
        return
    from trainpace.journal import Journal

    with Journal.open(o["place"], create=False) as journal:
        yield journal


def _nearest_measurement(path: str, batch: int) -> Any:
    """The measurement at the batch size nearest to the asked one, of a file that `measure --output` wrote."""
    import json

    from trainpace.errors import UnreadableInput
    from trainpace.outcome import Measurement
    from trainpace.records import from_json, read_bytes

    try:
        entries = json.loads(read_bytes(path))
    except ValueError as error:
        raise UnreadableInput(f"{path} is not valid JSON ({error}).") from None
    entries = entries if isinstance(entries, list) else [entries]
    measured = [from_json(json.dumps(entry), Measurement, path) for entry in entries]
    if not measured:
        raise UnreadableInput(f"{path} holds no measurement.")
    return min(measured, key=lambda m: abs(m.execution.micro_batch - batch))
