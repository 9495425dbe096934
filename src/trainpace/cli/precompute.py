"""`trainpace precompute`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from trainpace.cli.options import COUNT, DURATION, echo_json


@click.command()
@click.argument("target", required=False)
@click.option("--out", "folder", required=True, metavar="FOLDER", help="Where the shards are, or are to be.")
@click.option("--workers", type=COUNT, help="Processes.  [default: as many as cores]")
@click.option("--shard-samples", type=COUNT, help="Samples in a shard.  [default: about 64 MiB of them]")
@click.option(
    "--max-bad", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Share that may be set aside."
)
@click.option("--part", metavar="I/N", help="Compute the I-th of N parts.  [default: this task of a Slurm array]")
@click.option("--again", is_flag=True, help="Throw away what the folder holds, and begin anew.")
@click.option("--verify", is_flag=True, help="Read every byte of every shard, and name the damaged ones.")
@click.option("--repair", is_flag=True, help="Verify, then compute the damaged shards again, and only those.")
@click.option(
    "--estimate", is_flag=True, help="Say what it costs and saves, from some samples, and compute nothing else."
)
@click.option(
    "--seconds", type=DURATION, default="20s", show_default=True, help="Time for --estimate to compute samples."
)
@click.option("--step-ms", type=click.FloatRange(min=0), help="For --estimate: a training step without its data.")
@click.option("--batch", type=COUNT, help="For --estimate: samples in that step.")
@click.option("--epochs", type=float, help="For --estimate: epochs that will be trained.")
@click.option("--sbatch", "parts", type=COUNT, metavar="N", help="Print a Slurm batch script of N array tasks.")
@click.option("--time", "limit_s", type=DURATION, default="24h", show_default=True, help="For --sbatch: of each task.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def precompute(target: str | None, folder: str, workers: int | None, part: str | None, as_json: bool, **o: Any) -> int:
    """Compute the samples of TARGET once, in parallel processes, into Parquet shards that ShardDataset reads back.

    TARGET is FILE.py:NAME, a dataset with __len__ and __getitem__, its class, or a function that returns it; of a DataLoader or
    a task (model, loss, optimizer, dataset) its dataset is taken. Samples must be the same whenever they are computed: random
    augmentation stays online, as ShardDataset's transform. What is finished survives a kill, and the same command goes on
    from there. Samples that raise are set aside in bad_samples.jsonl.

    \b
    trainpace precompute faces.py:Faces --out shards --estimate
    trainpace precompute faces.py:Faces --out shards
    trainpace precompute --verify --out shards
    """
    from trainpace.records import to_jsonable
    from trainpace.report.progress import Bar
    from trainpace.shards import precompute as work
    from trainpace.shards.slurm_array import array_script, part_of

    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    damaged: list[work.Damage] = []
    if o["verify"] or o["repair"]:
        plan, damaged = work.verify(Path(folder))
        if o["verify"] or not damaged:
            if as_json:
                found = [{"number": d.number, "file": d.file, "problem": d.problem} for d in damaged]
                echo_json({"record": "Verified", "schema_version": 1, "shards": plan.shards, "damaged": found})
            else:
                from trainpace.report.precompute import print_damage

                print_damage(plan.shards, damaged, folder)
            return 1 if damaged else 0
        for one in damaged:
            click.echo(f"{one.file}: {one.problem}; computed again", err=True)
        target, part = target or plan.target, "1/1"
        if not Path(target.rpartition(":")[0]).is_file():
            raise click.UsageError(f"the shards were computed by {target}, which is gone: name it as it is now.")
    if target is None:
        raise click.UsageError("Name a TARGET: FILE.py:NAME.")
    if o["estimate"]:
        if (o["step_ms"] is None) != (o["batch"] is None):
            raise click.UsageError("--step-ms and --batch belong together.")
        step_s = None if o["step_ms"] is None else o["step_ms"] / 1e3
        estimate = work.estimate(
            target, folder, workers, o["seconds"], step_s=step_s, batch=o["batch"] or 1, epochs=o["epochs"]
        )
        if as_json:
            echo_json(to_jsonable(estimate))
        else:
            from trainpace.report.precompute import print_estimate

            print_estimate(estimate)
        return 0 if estimate.pays else 1
    if o["parts"]:
        click.echo(array_script(target, folder, o["parts"], workers, o["limit_s"] / 3600), nl=False)
        return 0
    number, parts = part_of(part, os.environ)
    if o["again"] and parts > 1:
        raise click.UsageError("--again is for the whole, not for one part: empty the folder first.")
    settings = work.Settings(
        target=target, folder=folder, workers=workers, shard_samples=o["shard_samples"], max_bad=o["max_bad"],
        part=number, parts=parts, again=o["again"], repair=tuple(one.number for one in damaged),
    )  # fmt: skip
    with Bar("precomputing", unit="samples") as bar:
        try:
            tell = lambda p: bar.to(p.done, p.wanted, f"{p.bad:,} bad" if p.bad else "", p.new)  # noqa: E731
            done = work.precompute(settings, tell, lambda words: bar.say(f"note: {words}"))
        except KeyboardInterrupt:
            bar.say("note: finished shards are kept; the same command goes on from there")
            raise
    if as_json:
        echo_json(to_jsonable(done))
    else:
        from trainpace.report.precompute import print_precomputed

        print_precomputed(done, work.read_plan(Path(folder)).shards)
    return 0
