"""`trainpace schedule`."""

from __future__ import annotations

from typing import Any

import click

from trainpace.cli.options import COUNT, DURATION, RATIO, USD, echo_json


@click.command()
@click.option(
    "--config", "configs", multiple=True, metavar="FILE", help="Read a settings file; may be given several times."
)
@click.option(
    "--command", "launch", metavar="TEXT", help="Read a launch command, such as 'torchrun --nproc-per-node 4 train.py'."
)
@click.option("--samples", type=COUNT, help="Samples in an epoch: 50000, 1.28M.")
@click.option("--tokens", type=COUNT, help="Tokens in an epoch: 300B. Needs --sequence-length.")
@click.option("--sequence-length", type=COUNT, help="Tokens in a sample.")
@click.option("--epochs", type=float, help="Passes over the data; may be fractional.")
@click.option("--max-steps", type=COUNT, help="Stop after this many optimizer updates.")
@click.option("--micro-batch", type=COUNT, help="Samples per GPU and forward pass.")
@click.option("--accumulate", type=COUNT, help="Micro-batches per optimizer update.")
@click.option("--global-batch", type=COUNT, help="Samples per optimizer update, over all GPUs.")
@click.option("--nnodes", type=COUNT, help="Nodes.")
@click.option("--nproc-per-node", type=COUNT, help="Processes (GPUs) per node.")
@click.option("--tp", type=COUNT, default=1, help="Tensor-parallel size.")
@click.option("--pp", type=COUNT, default=1, help="Pipeline-parallel size.")
@click.option("--cp", type=COUNT, default=1, help="Context-parallel size.")
@click.option("--drop-last", is_flag=True, help="Leave out the last micro-batch of an epoch where it is not full.")
@click.option("--drop-partial-accumulation", is_flag=True, help="Leave out micro-batches that do not fill an update.")
@click.option("--step-time", type=DURATION, help="Time of one update: 210ms.")
@click.option("--throughput", type=float, help="Samples per second, over all GPUs.")
@click.option("--epoch-time", type=DURATION, help="Time of one epoch: 10.7h.")
@click.option("--startup", type=DURATION, default="0s", help="Once per run: imports, compilation, loading.")
@click.option("--evaluate-every", type=COUNT, help="Steps between evaluations.")
@click.option("--evaluation-time", type=DURATION, default="0s", help="Time of one evaluation.")
@click.option("--checkpoint-every", type=COUNT, help="Steps between checkpoints.")
@click.option("--checkpoint-time", type=DURATION, default="0s", help="Time of one checkpoint.")
@click.option("--mtbf", type=DURATION, help="Mean time between failures of the whole job.")
@click.option("--restart-time", type=DURATION, default="0s", help="Time to restart after a failure.")
@click.option("--repeats", type=COUNT, default=1, help="Models, folds or seeds trained one after another.")
@click.option("--deadline", type=DURATION, help="Time available. With one number missing, that number is solved for.")
@click.option("--budget", type=USD, help="Money available. Needs --price.")
@click.option("--price", type=USD, help="Dollars per GPU and hour.")
@click.option("--solve-gpus", is_flag=True, help="Solve for the number of data-parallel GPUs that meets the deadline.")
@click.option("--keep-global-batch", is_flag=True, help="With --solve-gpus: more GPUs take over accumulation steps.")
@click.option(
    "--speedup", "speedups", type=RATIO, multiple=True, help="Apply a measured speed-up: 3.63x or 363% (the same)."
)
@click.option("--learning-rate", type=float, help="Learning rate that was tuned at --base-global-batch.")
@click.option("--base-global-batch", type=COUNT, help="Global batch that the learning rate was tuned at.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def schedule(**options: Any) -> int:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    \b
    How long does it take?
      trainpace schedule --samples 1281167 --epochs 90 --micro-batch 32 --nproc-per-node 8 --step-time 210ms
    How fast must a step be?
      trainpace schedule --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h
    How many epochs fit?
      trainpace schedule --samples 50k --global-batch 128 --step-time 80ms --budget '$20' --price 1.20
    What do my files say, and do they agree?
      trainpace schedule --config ds.json --config args.json --samples 1281167 --epochs 90 --step-time 210ms
    """
    from trainpace.job import answer
    from trainpace.records import to_jsonable
    from trainpace.report.schedule import print_answer

    question, files = question_of(options)
    result = answer(question)
    if options["as_json"]:
        echo_json(
            {**to_jsonable(result), "total_s": None if result.time is None else result.time.total_s, **files.as_json()}
        )
    else:
        _print_settings(files.combined)
        print_answer(result)
    return 1 if result.meets_limit is False else 0


def question_of(o: dict[str, Any]) -> tuple[Any, Any]:
    """(the question that the options and settings files ask, those files)."""
    from msgspec.structs import replace

    from trainpace.job import ONLY_STEPS, Question
    from trainpace.schedule import Schedule, SpeedUp
    from trainpace.verbs.settings import SettingsSource

    files = SettingsSource.read(o["configs"], o["launch"])
    pick = files.pick
    run = Schedule(
        samples=o["samples"],
        tokens=o["tokens"],
        sequence_length=pick("sequence_length", o["sequence_length"]),
        epochs=pick("epochs", o["epochs"]),
        max_steps=pick("max_steps", o["max_steps"]),
        drop_last=bool(pick("drop_last", o["drop_last"] or None)),
        partial_accumulation="drop" if o["drop_partial_accumulation"] else "step",
    )
    conditions = replace(
        ONLY_STEPS,
        startup_s=o["startup"],
        evaluate_every_steps=pick("evaluate_every_steps", o["evaluate_every"]),
        evaluation_s=o["evaluation_time"],
        checkpoint_every_steps=pick("checkpoint_every_steps", o["checkpoint_every"]),
        checkpoint_s=o["checkpoint_time"],
        mean_time_between_failures_s=o["mtbf"],
        restart_s=o["restart_time"],
        repeats=o["repeats"],
        price_usd_per_device_hour=o["price"],
    )
    nnodes, nproc = files.world(o["nnodes"], o["nproc_per_node"])
    question = Question(
        schedule=run,
        conditions=conditions,
        micro_batch=pick("micro_batch", o["micro_batch"]),
        accumulation=pick("accumulation", o["accumulate"]),
        global_batch=pick("global_batch", o["global_batch"]),
        nnodes=nnodes,
        nproc_per_node=nproc,
        tp=pick("tp", None if o["tp"] == 1 else o["tp"]) or 1,
        pp=pick("pp", None if o["pp"] == 1 else o["pp"]) or 1,
        cp=pick("cp", None if o["cp"] == 1 else o["cp"]) or 1,
        step_time_s=o["step_time"],
        throughput_samples_per_s=o["throughput"],
        epoch_time_s=o["epoch_time"],
        deadline_s=o["deadline"] if o["deadline"] is not None else files.value("time_limit_s"),
        budget_usd=o["budget"],
        speedups=tuple(SpeedUp(ratio=ratio) for ratio in o["speedups"]),
        solve_gpus=o["solve_gpus"],
        keep_global_batch=o["keep_global_batch"],
        learning_rate=pick("learning_rate", o["learning_rate"]),
        base_global_batch=o["base_global_batch"],
    )
    return question, files


def _print_settings(combined: Any) -> None:
    """What the files say, one line a setting."""
    if combined is None:
        return
    for setting in combined.values.values():
        click.echo(f"  {setting.name:22} {setting.value!s:14} {setting.file}: {setting.key}")
    for note in combined.notes:
        click.echo(f"  {'warning' if note.severity == 'warning' else 'note'}: {note.file}: {note.text}")
    click.echo()
