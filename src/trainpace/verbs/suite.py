"""`measure` of a list of models, here or as a Slurm job array with a task for each.

A task of an array measures all batch sizes of its model on one node, for points of several machines are no one curve. Tasks are
judged by their results, which a later call does not measure again; they go into the user's journal from here, since many nodes
must not write one file. A task is this module as a program: `python -m trainpace.verbs.suite REQUEST.json RESULT.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, cannot_write_into, write_whole
from trainpace.core.units import format_duration
from trainpace.measure import SuiteItem, suite
from trainpace.verbs.measure import DEFAULT_BATCHES, MeasureRequest, prepared, sweep_of
from trainpace.verbs.places import opened_journal
from trainpace.verbs.request import COUNT, DURATION, Field, Group, Misuse, Progress, Silent

if TYPE_CHECKING:
    from trainpace.run import Job

MOST_IN_AN_ARRAY = 1000
"""Slurm's MaxArraySize is 1001 by default."""


ON_SLURM = ("launcher=slurm",)


class SuiteRequest(MeasureRequest):
    suite: Annotated[
        str | None,
        Field(
            "Measure a list of models: classic, small, or a FILE.toml.",
            metavar="NAME",
            excludes=("model",),
            overrides=("batch",),
            group=Group.MODEL,
        ),
    ] = None
    launcher: Annotated[
        Literal["here", "slurm"],
        Field("slurm: a job array with one task and one node for each model.", group=Group.CHOICE),
    ] = "here"
    at_once: Annotated[
        int | None,
        Field("Most tasks of the array that run at the same time.", COUNT, needs=ON_SLURM),
    ] = None
    cpus: Annotated[int | None, Field("Cores per task.  [default: 1]", COUNT, needs=ON_SLURM)] = (
        None
    )
    limit: Annotated[
        float | None, Field("Time limit of a task.  [default: 1h]", DURATION, needs=ON_SLURM)
    ] = None
    partition: Annotated[str | None, Field("Slurm partition.", metavar="NAME", needs=ON_SLURM)] = (
        None
    )
    account: Annotated[str | None, Field("Slurm account.", metavar="NAME", needs=ON_SLURM)] = None
    sbatch: Annotated[
        tuple[str, ...],
        Field("Another option for sbatch: --sbatch=--qos=debug.", metavar="TEXT", needs=ON_SLURM),
    ] = ()
    out: Annotated[
        str | None,
        Field(
            "Folder for the array's results and logs.  [default: NAME-measured]",
            metavar="FOLDER",
            needs=ON_SLURM,
        ),
    ] = None

    @property
    def is_one_model_here(self) -> bool:
        return self.suite is None and self.launcher == "here"


class MeasuredSuite(Record):
    """How many models there are, and how many of them could be measured. `device`: this machine's, None for an array."""

    models: int
    measured: int
    device: str | None = None


def check(request: SuiteRequest) -> None:
    r = request
    if r.noise_scale and not r.is_one_model_here:
        raise Misuse(
            "`noise_scale` is for one model on this machine; trainpace journal export has the suite's runs."
        )


def run(request: SuiteRequest, progress: Progress) -> MeasuredSuite:
    """Measure every model into the journal; one that fails is told and left out.

    Raises TrainpaceError where Slurm is asked for and not here, or does not take the array.
    """
    check(request)
    if request.launcher == "slurm":
        return _on_nodes(request, progress)
    assert request.suite is not None
    items = suite(request.suite)
    limited, device = prepared(request, progress)
    failed, begin = 0, time.monotonic()
    with opened_journal(request.journal, request.no_journal) as journal:
        for i, item in enumerate(items):
            left = (
                ""
                if not i
                else (
                    f", about {format_duration((time.monotonic() - begin) / i * (len(items) - i))}"
                    " left"
                )
            )
            progress.note(f"{item.spec} ({i + 1} of {len(items)}{left})")
            try:
                best = sweep_of(_one(item, limited), device, journal, progress).analysis.best.best
                progress.note(
                    f"  best batch {best.batch}: {best.measured_samples_per_second:.4g} samples/s"
                )
            except TrainpaceError as error:
                failed += 1
                progress.note(f"  left out: {error}")
    return MeasuredSuite(models=len(items), measured=len(items) - failed, device=device)


def _one(item: SuiteItem, request: MeasureRequest) -> MeasureRequest:
    common = {name: getattr(request, name) for name in MeasureRequest.__struct_fields__}
    return MeasureRequest(
        **common
        | {
            "model": item.spec,
            "batch": request.batch or item.batches,
            "precision": item.precision,
            "optimizer": item.optimizer or request.optimizer,
            "sequence_length": item.sequence_length or request.sequence_length,
        }
    )


def _on_nodes(request: SuiteRequest, progress: Progress) -> MeasuredSuite:
    from trainpace.run import Slurm, SlurmOptions, failure_file, file_name

    r = request
    if r.suite is not None:
        items, name = suite(r.suite), Path(r.suite).stem
    else:
        assert r.model is not None
        items, name = (
            (SuiteItem(spec=r.model, batches=DEFAULT_BATCHES, precision=r.precision or "fp32"),),
            r.model,
        )
    extra = ("--exclusive", *r.sbatch)  # what shares a node slows the measurement down
    launcher = Slurm(
        options=SlurmOptions(
            partition=r.partition, account=r.account, extra=extra, at_once=r.at_once
        )
    )
    launcher.check()
    folder = Path(r.out or f"{file_name(name)}-measured").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [_job(item, i, folder, r) for i, item in enumerate(items)]
    except OSError as error:
        raise cannot_write_into(folder, error) from None
    todo = [job for job in jobs if not Path(job.result).exists()]
    if len(todo) < len(jobs):
        progress.note(
            f"{len(jobs) - len(todo)} of {len(jobs)} are there from an earlier call; --fresh"
            " measures them again."
        )

    def tell(line: str) -> None:
        if line.startswith("slurm:"):  # the rest stands in each task's log
            progress.note(line)

    try:
        for i in range(0, len(todo), MOST_IN_AN_ARRAY):
            array = todo[i : i + MOST_IN_AN_ARRAY]
            for job, end in zip(array, launcher.run_all(array, tell), strict=True):
                if end.state != "done":
                    written = failure_file(job.result)
                    reason = written.read_text() if written.is_file() else end.reason
                    progress.note(f"  {job.name} left out: {reason} Its log: {end.log}")
    except KeyboardInterrupt:
        progress.note(
            "\nCancelled. What was measured is kept; the same command goes on from there."
        )
        raise
    finally:
        done = _collect(jobs, r)
    return MeasuredSuite(models=len(jobs), measured=done)


def _job(item: SuiteItem, number: int, folder: Path, request: SuiteRequest) -> Job:
    """The task of one model, its request written. A result of other options, code or versions has another name."""
    from trainpace.run import Job, failure_file, file_name, fingerprint

    r, code = request, ""
    with contextlib.suppress(TrainpaceError):  # the task says the same, and the others are measured
        code = fingerprint(item.spec)
    probes = replace(_one(item, r), fresh=False, journal=None, no_journal=False, command="")
    versions = {package: version(package) for package in ("trainpace", "torch")}
    question = {"request": msgspec.to_builtins(probes), "code": code, "versions": versions}
    name = f"{number}-{file_name(item.spec)}-{hashlib.sha256(json.dumps(question).encode()).hexdigest()[:8]}"
    written, result = folder / f"{name}.request.json", folder / f"{name}.json"
    if r.fresh:
        for old in (result, Path(f"{result}.db")):
            old.unlink(missing_ok=True)
    failure_file(str(result)).unlink(missing_ok=True)
    write_whole(written, json.dumps(msgspec.to_builtins(replace(probes, command=r.command))))
    return Job(
        name=name,
        program=("-m", "trainpace.verbs.suite", str(written), str(result)),
        folder=str(folder),
        result=str(result),
        cpus_per_process=r.cpus or 1,
        gpus_per_node=int(r.device != "cpu"),
        timeout_s=r.limit or 3600.0,
    )


def _collect(jobs: Sequence[Job], request: SuiteRequest) -> int:
    """Put the results into the journal, which stores each run once; how many there are."""
    from trainpace.journal import Journal, import_file

    results = [Path(job.result) for job in jobs if Path(job.result).exists()]
    if results and not request.no_journal:
        with Journal.open(request.journal) as journal:
            for result in results:
                import_file(journal, result, "trainpace")
    return len(results)


class _Log(Silent):
    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def task() -> int:
    """Measure one model of a suite where this runs; the exit code is 0 where that went well.

    It stores its probes in a journal of its own beside the result, so that one that was requeued or cancelled goes on where it
    was; the result is that journal's export, written whole as its last act. What went wrong is one sentence beside it.
    """
    from trainpace.journal import Journal, export
    from trainpace.run import failure_file

    request, result, log = (
        msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MeasureRequest),
        sys.argv[2],
        _Log(),
    )
    try:
        request, device = prepared(request, log)
        with Journal.open(f"{result}.db") as journal:
            sweep_of(request, device, journal, log)
            export(Path(result), (*journal.sweeps(), *journal.every()))
    except TrainpaceError as error:
        write_whole(failure_file(result), str(error))
        Path(f"{result}.db").unlink(
            missing_ok=True
        )  # what failed throughout is tried anew by a later call
        log.note(f"Error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = task()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
