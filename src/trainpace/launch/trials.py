"""Run a trial by a launcher, in a folder of its own, and read what it gave."""

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainpace.launch.engines.rules import check_engine
from trainpace.launch.job import Ended, Job, Launcher, OnLine
from trainpace.launch.trial import FailedTrial, Trial, TrialResult
from trainpace.launch.trial_worker import failure_file
from trainpace.records import load, make_folder, save

WORKER = "trainpace.launch.trial_worker"
REQUEST, RESULT = "request.json", "result.json"


def run_trial(
    trial: Trial, launcher: Launcher, folder: Path, timeout_s: float, on_line: OnLine | None = None
) -> TrialResult | FailedTrial:
    """The trial's result, or why there is none. The folder takes the request, the result and logs; what lay there of an
    earlier trial is removed.

    Raises TrainpaceError where the launcher is missing, or the engine has no such execution: nothing is started then.
    """
    job = job_of(trial, folder, timeout_s)
    launcher.check()
    return outcome(job, launcher.run(job, on_line))


def job_of(trial: Trial, folder: Path, timeout_s: float) -> Job:
    """Write the request, and say what is to be started. Raises TrainpaceError as `run_trial` does."""
    check_engine(trial.engine, trial.execution)
    folder = folder.absolute()
    make_folder(folder)
    request, result = folder / REQUEST, str(folder / RESULT)
    for old in (Path(result), failure_file(result)):
        old.unlink(missing_ok=True)
    save(with_whole_paths(trial), request)
    e, threads = trial.execution, trial.threads_per_process
    return Job(
        name=f"trial-{folder.name}", program=("-m", WORKER, str(request), result), folder=str(folder), result=result,
        nnodes=e.nnodes, nproc_per_node=e.nproc_per_node,
        cpus_per_process=None if threads is None else threads + trial.loader.workers,
        gpus_per_node=e.nproc_per_node if trial.device == "cuda" else 0, timeout_s=timeout_s,
        environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip


def outcome(job: Job, ended: Ended) -> TrialResult | FailedTrial:
    """The result of a job that has ended, or its failure."""
    if ended.state == "done":
        return load(job.result, TrialResult)
    if ended.state == "failed" and (failure := failure_file(job.result)).is_file():
        answer: dict[str, Any] = json.loads(failure.read_text())
        sentence = f"{answer['error']} {answer['hint']}".strip()
        if answer.get("out_of_memory"):
            return FailedTrial(kind="out of memory", reason=sentence, log=ended.log)
        return FailedTrial(kind="misuse" if answer.get("misuse") else "failed", reason=sentence, log=ended.log)
    return FailedTrial(kind=ended.state, reason=ended.reason, log=ended.log)


def with_whole_paths(trial: Trial) -> Trial:
    """The trial with absolute paths: on another host it may be started from another folder."""
    file, colon, name = trial.task.rpartition(":")
    spec = f"{Path(file).absolute()}{colon}{name}" if file.endswith(".py") else trial.task
    if file == "transformers":
        spec = f"{file}{colon}{Path(name).absolute()}"
    shards = trial.loader.shards
    loader = trial.loader if shards is None else replace(trial.loader, shards=str(Path(shards).absolute()))
    return replace(trial, task=spec, loader=loader)
