"""`trainpace measure --launcher slurm`: a model or a suite as a Slurm job array, a task for each model.

A task measures all batch sizes of its model on one node, for points of several machines are no one curve. Tasks are judged by
their results, which a later call does not measure again; they go into the user's journal from here, since many nodes must not
write one file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec

from trainpace.cli.measuring import DEFAULT_BATCHES
from trainpace.errors import TrainpaceError
from trainpace.journal import Journal, import_file
from trainpace.ladder import fingerprint
from trainpace.launch import Ended, Job, Slurm, SlurmOptions, failure_file, file_name
from trainpace.measure import SuiteItem, suite
from trainpace.records import cannot_write_into, write_whole

MOST_IN_AN_ARRAY = 1000
"""Slurm's MaxArraySize is 1001 by default."""
PART = "trainpace.cli.suite_part"
_OF_A_PROBE = (
    "precision", "optimizer", "sequence_length", "device", "accumulate", "image_size", "channels_last", "compiled", "seconds",
    "timeout", "memory_limit", "until_oom", "repeats", "every", "no_forecast", "notes", "keep_identity",
)  # fmt: skip


def measure_on_nodes(model: str | None, batches: Sequence[int] | None, o: dict[str, Any]) -> int:
    """The model, or the suite of the options; exit code 0 where any was measured. Raises TrainpaceError where Slurm is not here,
    or does not take the array."""
    if model is None:
        items, name = suite(o["suite"], o["suite_size"], o["suite_seed"]), Path(o["suite"]).stem
    else:
        own = SuiteItem(spec=model, batches=DEFAULT_BATCHES, precision=o["precision"])
        items, name = (own,), model
    alone = "--exclusive"  # what shares a node slows the measurement down
    launcher = Slurm(options=SlurmOptions(
        partition=o["partition"], account=o["account"], extra=(alone, *o["sbatch"]), at_once=o["at_once"],
    ))  # fmt: skip
    launcher.check()
    folder = Path(o["folder"] or f"{file_name(name)}-measured").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [_job(item, i, batches, folder, o) for i, item in enumerate(items)]
    except OSError as error:
        raise cannot_write_into(folder, error) from None
    there = [job for job in jobs if Path(job.result).exists()]
    if there:
        click.echo(
            f"{len(there)} of {len(jobs)} are there from an earlier call; --fresh measures them again.", err=True
        )
    todo = [job for job in jobs if job not in there]
    try:
        for i in range(0, len(todo), MOST_IN_AN_ARRAY):
            array = todo[i : i + MOST_IN_AN_ARRAY]
            _tell_failures(array, launcher.run_all(array, _tell))
    except KeyboardInterrupt:
        click.echo("\nCancelled. What was measured is kept; the same command goes on from there.", err=True)
        raise
    finally:
        done = _collect(jobs, o)
    kept = "" if o["no_journal"] else " Kept in the journal: trainpace journal list"
    click.echo(f"{done} of {len(jobs)} models measured.{kept}")
    return 0 if done else 1


def _job(item: SuiteItem, number: int, batches: Sequence[int] | None, folder: Path, o: dict[str, Any]) -> Job:
    """With its request written. A result of other options, code or versions has another name."""
    options = {key: o[key] for key in _OF_A_PROBE} | {"fresh": False}
    versions = {package: version(package) for package in ("trainpace", "torch")}
    asked_for = {"item": msgspec.to_builtins(item), "batches": batches, "options": options, "code": _code(item.spec),
                 "versions": versions}  # fmt: skip
    name = f"{number}-{file_name(item.spec)}-{hashlib.sha256(json.dumps(asked_for).encode()).hexdigest()[:8]}"
    asked, result = folder / f"{name}.request.json", folder / f"{name}.json"
    if o["fresh"]:
        for old in (result, Path(f"{result}.db")):
            old.unlink(missing_ok=True)
    failure_file(str(result)).unlink(missing_ok=True)
    write_whole(asked, json.dumps(asked_for | {"command": o["command"]}))
    return Job(
        name=name, program=("-m", PART, str(asked), str(result)), folder=str(folder), result=str(result),
        cpus_per_process=o["cpus"], gpus_per_node=int(o["device"] == "cuda"), timeout_s=o["limit"],
    )  # fmt: skip


def _code(spec: str) -> str:
    try:
        return fingerprint(spec)
    except TrainpaceError:  # the task says the same, and the others are measured
        return ""


def _tell(line: str) -> None:
    if line.startswith("slurm:"):  # the rest stands in each task's log
        click.echo(line, err=True)


def _tell_failures(jobs: Sequence[Job], ended: Sequence[Ended]) -> None:
    for job, end in zip(jobs, ended, strict=True):
        if end.state != "done":
            said = failure_file(job.result)
            reason = said.read_text() if said.is_file() else end.reason
            click.echo(f"  {job.name} left out: {reason} Its log: {end.log}", err=True)


def _collect(jobs: Sequence[Job], o: dict[str, Any]) -> int:
    """Results into the journal, where each run is kept once; how many there are."""
    results = [Path(job.result) for job in jobs if Path(job.result).exists()]
    if results and not o["no_journal"]:
        with Journal.open(o["place"]) as journal:
            for result in results:
                import_file(journal, result, "trainpace")
    return len(results)
