"""`trainpace match`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import (
    ABOVE_0,
    ABOVE_0_S,
    AT_LEAST_1,
    COUNT,
    DEVICES,
    DURATION,
    EPOCHS,
    GB_PER_S,
    SAMPLE_BYTES,
    USD,
    echo_json,
    within,
)
from trainpace.cli.pictures import check_pictures, picture_options, save_pictures
from trainpace.execution import PRECISIONS

if TYPE_CHECKING:
    from trainpace.offers.match import Binding, Job, Match, Ranking, Rejected
    from trainpace.workload import Workload

    Nearest = tuple[Binding, str, Match | Rejected]


@click.command()
@click.argument("model")
@click.option("--samples", type=AT_LEAST_1, required=True, help="Samples in an epoch: 1281167, 1.28M.")
@click.option("--epochs", type=EPOCHS, help="Passes over the data.")
@click.option("--max-steps", type=AT_LEAST_1, help="Stop after this many optimizer updates, instead of --epochs.")
@click.option(
    "--global-batch", type=AT_LEAST_1, default=256, show_default=True, help="Samples per update, on every server."
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    help="Allowed number formats; each card takes its fastest.  [default: amp_bf16, amp_fp16]",
)
@click.option("--by", type=click.Choice(["cost", "hours"]), default="cost", show_default=True, help="What to rank by.")
@click.option("--deadline", type=DURATION, help="Time available: 24h, 3 days.")
@click.option("--budget", type=USD, help="Money available: 500, $2k.")
@click.option("--provider", "providers", multiple=True, help="Only this provider; several times if you like.")
@click.option("--region", "regions", multiple=True, help="Only regions with this in their name: us-east, eu.")
@click.option("--gpu", "gpus", multiple=True, help="Only this GPU.")
@click.option("--max-nodes", type=DEVICES, default=4, show_default=True, help="Join up to this many servers of a kind.")
@click.option("--spot", is_flag=True, help="Also spot prices, with what preemption costs.")
@click.option(
    "--preempted-every",
    type=ABOVE_0_S,
    help="Mean time between preemptions of one spot server.  [default: 24h, assumed]",
)
@click.option("--data-gb", type=within("GB", 0, 1e9), default=0.0, help="Data to copy to the servers first.")
@click.option("--data-from", default="", metavar="PROVIDER", help="Where the data lie; leaving a cloud costs egress.")
@click.option("--download", type=GB_PER_S, metavar="GB/S", help="Speed of that copy.  [default: 0.125, assumed]")
@click.option(
    "--sample-bytes", type=SAMPLE_BYTES, default=0, help="Bytes read per sample; slow storage then shows as data wait."
)
@click.option(
    "--storage", type=GB_PER_S, metavar="GB/S", help="Shared storage: checkpoints, samples.  [default: 1, assumed]"
)
@click.option(
    "--loader-rate", type=within("rate", ABOVE_0, 1e9), help="Samples per second that one CPU thread prepares."
)
@click.option("--evaluation-samples", type=COUNT, default=0, help="Samples evaluated after every epoch.")
@click.option("--startup", type=DURATION, default="60s", show_default=True, help="Until the first step.")
@click.option("--checkpoint-every", type=ABOVE_0_S, help="Between checkpoints.  [default: what loses least]")
@click.option(
    "--mtbf", type=ABOVE_0_S, help="Mean time between failures of one GPU.  [default: 50000h, arXiv:2407.21783]"
)
@click.option(
    "--step-variation", type=within("share", 0, 10), default=0.0, help="Deviation of a node's step over its mean: 0.03."
)
@click.option("--machines", metavar="FILE.toml", help="Also machines of your own, as below.")
@click.option("--only-machines", is_flag=True, help="Only those.")
@click.option("--hardware", metavar="FILE.toml", help="Also read devices of your own from this file.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--sequence-length", type=AT_LEAST_1, help="Tokens in a sample, for transformers.")
@click.option("--image-size", type=AT_LEAST_1, help="Side in pixels, for image models.")
@click.option("--channels-last", is_flag=True, help="NHWC tensors (memory_format=torch.channels_last).")
@click.option("--compile", "compiled", is_flag=True, help="Under torch.compile.")
@click.option(
    "--checkpointing", is_flag=True, help="Recompute activations block by block, for models with repeated blocks."
)
@click.option("--save-workload", metavar="FILE.json", help="Keep the trace, for answers in a moment.")
@click.option("--timeout", type=DURATION, default="5min", show_default=True, help="Give up tracing after this.")
@click.option("--top", type=COUNT, default=12, show_default=True, help="Rows to print, besides the Pareto front.")
@picture_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def match(model: str, **o: Any) -> int:
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
      price = 1.20
    """
    import datetime

    check_pictures(o)
    workload, ranking, job, close = ranking_of(model, o)
    if o["as_json"]:
        from trainpace.report.match_json import ranking_json
    else:
        from trainpace.report.match import print_ranking
    today = datetime.date.today()
    if o["as_json"]:
        echo_json(ranking_json(workload, ranking, job, close, today))
    else:
        print_ranking(workload, ranking, job, close, o["by"], o["top"], today, model)
    if o["page"] or o["figure"]:
        from trainpace.report.match_json import ranking_json
        from trainpace.report.pages.match import match_page, match_pictures

        why = "" if close is None else f"{close[1][:1].upper()}{close[1][1:]}."
        data = ranking_json(workload, ranking, job, close, today)
        page = (workload, ranking, job, o["by"], why, data, today)
        save_pictures(o, lambda: match_page(*page), lambda: match_pictures(ranking))
    return 0 if ranking.matches else 1


def ranking_of(model: str | Workload, o: dict[str, Any]) -> tuple[Workload, Ranking, Job, Nearest | None]:
    """(the workload, all servers ranked, the job, what is nearest where none matches), as the options ask."""
    from trainpace.cli.traced import variant_of, workload_started
    from trainpace.workload import form_of

    if (o["epochs"] is None) == (o["max_steps"] is None):
        raise click.UsageError("Give --epochs or --max-steps.")
    if o["only_machines"] and not o["machines"]:
        raise click.UsageError("--only-machines needs --machines FILE.toml.")
    if o["data_from"] and not o["data_gb"]:
        raise click.UsageError("--data-from needs --data-gb, the size of the data.")
    precisions: tuple[Any, ...] = o["precisions"] or ("amp_bf16", "amp_fp16")
    forms = tuple(dict.fromkeys(form_of(precision) for precision in precisions))
    every = ("fp32", "amp", "half") if o["save_workload"] else forms
    # what the model is to be matched with is imported and read while it is traced
    with workload_started(model, every, variant_of(o), o, o["checkpointing"]) as workload:
        return _matched(workload, precisions, o)


def _matched(
    traced: Callable[[], Workload], precisions: tuple[Any, ...], o: dict[str, Any]
) -> tuple[Workload, Ranking, Job, Nearest | None]:
    """Read the offers, wait for the workload, rank."""
    from trainpace.offers.match import Job, nearest, rank
    from trainpace.report.progress import TerminalProgress
    from trainpace.schedule import Schedule
    from trainpace.verbs.own_hardware import own_devices
    from trainpace.verbs.servers import check_provider, chosen_offers, known_offers

    if not o["as_json"]:  # a part of a second that the tracing process takes anyway
        import trainpace.report.match  # noqa: F401
    own = own_devices(o["hardware"])
    known = known_offers(o["machines"], TerminalProgress(), o["only_machines"])
    if o["data_from"]:
        check_provider(o["data_from"], known)
    offers, devices = chosen_offers(known, o["providers"], o["regions"], o["gpus"], own)
    job = Job(
        schedule=Schedule(samples=o["samples"], epochs=o["epochs"], max_steps=o["max_steps"]),
        global_batch=o["global_batch"], precisions=precisions, most_nodes=o["max_nodes"], spot=o["spot"],
        data_from=o["data_from"], deadline_s=o["deadline"], budget_usd=o["budget"], channels_last=o["channels_last"],
        compile=o["compiled"], checkpointing=o["checkpointing"], conditions=_conditions(o),
    )  # fmt: skip
    workload = traced()
    if o["save_workload"]:
        from trainpace.records import save

        save(workload, o["save_workload"])
    ranking = rank(workload, offers, devices, job, "usd" if o["by"] == "cost" else "hours")
    return workload, ranking, job, None if ranking.matches else nearest(ranking, job)


def _conditions(o: dict[str, Any]) -> Any:
    """The job's conditions: what was said, defaults for the rest."""
    from trainpace.job import ASSUMED, conditions_said
    from trainpace.units import hours_from_s

    said = {
        "startup_s": None if o["startup"] == ASSUMED.startup_s else o["startup"], "sample_bytes": float(o["sample_bytes"]),
        "samples_per_cpu_s": o["loader_rate"], "storage_gb_per_s": o["storage"],
        "evaluation_samples": o["evaluation_samples"], "step_variation": o["step_variation"],
        "checkpoint_every_s": o["checkpoint_every"], "data_gb": o["data_gb"], "download_gb_per_s": o["download"],
        "device_mtbf_h": None if o["mtbf"] is None else hours_from_s(o["mtbf"]),
        "preemption_mean_h": None if o["preempted_every"] is None else hours_from_s(o["preempted_every"]),
    }  # fmt: skip
    return conditions_said(said)
