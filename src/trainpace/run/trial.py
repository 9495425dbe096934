"""Trials: a few real training steps of a task under one execution, and their result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.intake import read_json
from trainpace.core.outcome import Interval
from trainpace.core.records import Record, load, make_folder, save
from trainpace.core.stats import mean_and_half_width, median, median_interval
from trainpace.run.job import Ended, Job, Launcher
from trainpace.workload import ModelSpec

WORKER = "trainpace.run.trial_worker"

EngineName = Literal["plain", "ddp", "fsdp2", "deepspeed"]
"""Engine of a trial. "plain" is one process with a plain loop.

"ddp", "fsdp2" and "deepspeed" are strategies of Lightning Fabric.
"""
FailureKind = Literal["misuse", "out of memory", "timed out", "failed", "cancelled"]
"""Kind of a trial's failure."""
_ENGINE_IN_WORDS = {
    "plain": "one plain process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
}
_ZERO_STAGES = {"plain": (0,), "ddp": (0,), "fsdp2": (3,), "deepspeed": (0, 1, 2, 3)}


class LoaderSettings(Record):
    """Settings of a rank's data loader.

    `shards` is a folder made by `precompute`, which is read instead of the task's dataset.
    """

    workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory: bool = False
    shards: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 0 or (self.prefetch_factor is not None and self.prefetch_factor < 1):
            raise TrainpaceError(
                "a loader needs 0 or more workers, each prefetching 1 or more batches."
            )


class Trial(Record):
    """Request to train a task for some steps under one execution.

    The order of samples depends only on `seed` and the global batch. Two trials with the same
    global batch therefore read the same samples.

    Attributes:
        task: FILE.py:FUNCTION or a model spec.
        warmup_steps: Steps that run first and are not counted.
        steps: Number of counted steps. None runs as many as fit in `seconds`.
        noise_scale: If True, measure the gradient noise scale in about as many extra steps.
    """

    task: str
    execution: Execution
    engine: EngineName = "plain"
    loader: LoaderSettings = LoaderSettings()
    device: str = "cpu"
    warmup_steps: int = 3
    steps: int | None = None
    seconds: float = 10.0
    seed: int = 0
    threads_per_process: int | None = None
    noise_scale: bool = False

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or (self.steps is not None and self.steps < 1):
            raise TrainpaceError("a trial needs 0 or more warm-up steps, and 1 or more steps.")
        if not 0 < self.seconds < float("inf"):
            raise TrainpaceError("a trial needs seconds above 0.")
        if self.threads_per_process is not None and self.threads_per_process < 1:
            raise TrainpaceError("a process needs 1 or more threads.")


class FailedTrial(Record):
    """Trial without a result, with the reason and the log.

    The kind "misuse" means that the trial cannot work as requested. Its reason says what to change.
    """

    kind: FailureKind
    reason: str
    log: str = ""


class TrialResult(Record):
    """Result of a trial as rank 0 saw it.

    Attributes:
        step_ms: Time of each step after the warm-up, including the wait for data.
        data_wait_ms: Wait for data in each of these steps.
        losses: Loss of every step, warm-up included, averaged over the global batch. Empty if a
            script does not show its loss.
        step_time_ms: Median step time, which one delayed step does not change. It is the mean if
            batches hold different amounts of data (`uneven`).
        peak_memory_gib: Largest peak of all ranks. On a CPU, the growth of the process.
        start_up_s: Time from the worker's start to the end of its first step: imports, engine,
            loader workers, compilation.
        reserved_memory_gib: Memory held by the allocator.
        loss: Name of the loss, if known.
    """

    step_ms: tuple[float, ...]
    data_wait_ms: tuple[float, ...]
    losses: tuple[float, ...]
    step_time_ms: float
    interval_ms: Interval
    samples_per_second: float
    peak_memory_gib: float | None
    start_up_s: float
    world_size: int
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    noise_scale: dict[str, float] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reserved_memory_gib: float | None = None
    loss: str | None = None
    uneven: bool = False


def result_of(
    step_ms: Sequence[float], samples_per_step: float, run: str, uneven: bool = False, **fields: Any
) -> TrialResult:
    """Return the result of the counted steps.

    `run` is the word for the measured run in the interval's basis, such as "trial".
    """
    if uneven:
        middle, half = mean_and_half_width(step_ms)
        low, high, basis = (
            max(0.0, middle - half),
            middle + half,
            f"the mean of the counted steps of one {run}",
        )
    else:
        middle, basis = median(step_ms), f"order statistics of the counted steps of one {run}"
        low, high = median_interval(step_ms)
    return TrialResult(
        step_ms=tuple(step_ms),
        step_time_ms=middle,
        uneven=uneven,
        samples_per_second=1e3 * samples_per_step / middle,
        interval_ms=Interval(low=low, high=high, coverage=0.9, basis=basis),
        **fields,
    )


def engine_for(execution: Execution) -> EngineName:
    """Return the usual engine for an execution.

    DeepSpeed runs ZeRO 1 and 2, and offload of only the parameters or only the optimizer states.
    FSDP2 runs ZeRO 3.
    """
    if (
        execution.zero_stage in (1, 2)
        or execution.offload_optimizer != execution.offload_parameters
    ):
        return "deepspeed"
    if execution.zero_stage == 3:
        return "fsdp2"
    return "plain" if execution.world_size == 1 else "ddp"


def check_engine(engine: EngineName, execution: Execution) -> None:
    """Raise Contradiction if the engine does not support the execution."""
    for broken, sentence, hint in _rules(engine, execution):
        if broken:
            raise Contradiction(sentence, hint)


def _rules(engine: EngineName, e: Execution) -> tuple[tuple[bool, str, str], ...]:
    """Return all rules of an engine as (True if the rule is broken, sentence, hint)."""
    name = _ENGINE_IN_WORDS[engine]
    deepspeed, fsdp2 = engine == "deepspeed", engine == "fsdp2"
    offloads_one = e.offload_optimizer != e.offload_parameters
    return (
        (
            e.ranks_per_copy > 1,
            f"trials run data parallelism only; tp {e.tp}, pp {e.pp}, cp {e.cp} need model code.",
            "Try it in your script, started by its own launcher.",
        ),
        (
            engine == "plain" and e.world_size > 1,
            f"{name} cannot run {e.world_size} ranks.",
            "Use the engine ddp, fsdp2 or deepspeed.",
        ),
        (e.engine == "data_parallel", "trials do not support nn.DataParallel.", "Use DDP."),
        (
            e.zero_stage not in _ZERO_STAGES[engine],
            f"{name} has no ZeRO stage {e.zero_stage}.",
            "Use deepspeed for stages 1 and 2, fsdp2 or deepspeed for 3, ddp for none.",
        ),
        (e.precision == "fp8", "trials do not support fp8.", "Use amp_bf16 or bf16."),
        (
            fsdp2 and e.precision == "amp_fp16",
            "FSDP2 has no gradient scaler, which amp_fp16 needs.",
            "Use amp_bf16, or deepspeed.",
        ),
        (
            fsdp2 and offloads_one,
            "FSDP2 offloads parameters, gradients and optimizer states together.",
            "Offload both, or use deepspeed.",
        ),
        (
            engine in ("plain", "ddp") and (e.offload_optimizer or e.offload_parameters),
            f"{name} cannot offload.",
            "Use deepspeed with a ZeRO stage, or fsdp2.",
        ),
        (
            deepspeed and e.offload_optimizer and e.zero_stage == 0,
            "DeepSpeed needs ZeRO stage 1 or higher to offload the optimizer.",
            "Use ZeRO stage 1, 2 or 3.",
        ),
        (
            deepspeed and e.offload_parameters and e.zero_stage != 3,
            "DeepSpeed needs ZeRO stage 3 to offload parameters.",
            "Use ZeRO stage 3.",
        ),
        (
            deepspeed and e.shard_size not in (None, e.data_parallel_size),
            "DeepSpeed's ZeRO shards over all ranks.",
            "Use fsdp2 for hybrid sharding.",
        ),
        (
            not e.reshard_after_forward and not fsdp2,
            f"{name} has no gathered parameters to keep.",
            "Use fsdp2 to turn reshard_after_forward off.",
        ),
        (
            e.activation_checkpointing == "selective",
            "trials do not support selective checkpointing, which needs model code.",
            "Use full, or none.",
        ),
    )


def why_no_noise_scale(engine: EngineName, execution: Execution) -> str:
    """Return why the gradient noise scale cannot be measured, or "".

    The measurement needs the gradient of a part of a batch.
    """
    e = execution
    if engine == "deepspeed":
        return "DeepSpeed does not show the gradients of a part of a batch: use ddp or fsdp2."
    if e.accumulation > 1 or (engine == "ddp" and e.world_size > 1 and e.precision != "amp_fp16"):
        return ""
    return (
        "the gradient noise scale compares a part of the batch with the whole: use "
        "accumulation of 2 or more, or ranks under DDP (in a precision other than "
        "amp_fp16)."
    )


def run_trial(
    trial: Trial, launcher: Launcher, folder: Path, timeout_s: float
) -> TrialResult | FailedTrial:
    """Run a trial, and return its result or the reason for its failure.

    `folder` holds the request, the result and the logs.

    Raises:
        TrainpaceError: If the launcher is not installed, or the engine does not support the
            execution. Nothing has started then.
    """
    job = job_of(trial, folder, timeout_s)
    launcher.check()
    return outcome(job, launcher.run(job))


def job_of(trial: Trial, folder: Path, timeout_s: float) -> Job:
    """Write the request of a trial, and return its job.

    Raises:
        Contradiction: If the engine does not support the execution.
    """
    check_engine(trial.engine, trial.execution)
    folder = folder.absolute()
    make_folder(folder)
    request, result = folder / "request.json", str(folder / "result.json")
    for old in (Path(result), failure_file(result)):
        old.unlink(missing_ok=True)
    save(_with_absolute_paths(trial), request)
    e, threads = trial.execution, trial.threads_per_process
    return Job(
        name=f"trial-{folder.name}",
        program=("-m", WORKER, str(request), result),
        folder=str(folder),
        result=result,
        nnodes=e.nnodes,
        nproc_per_node=e.nproc_per_node,
        cpus_per_process=None if threads is None else threads + trial.loader.workers,
        gpus_per_node=e.nproc_per_node if trial.device != "cpu" else 0,
        timeout_s=timeout_s,
        environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
    )


def failure_file(result: str) -> Path:
    """Return the file in which a failed rank reports its error."""
    return Path(f"{result}.failed")


def outcome(job: Job, ended: Ended) -> TrialResult | FailedTrial:
    """Return the result of a job that has ended, or the reason for its failure."""
    if ended.state == "done":
        return load(job.result, TrialResult)
    if ended.state == "failed" and (failure := failure_file(job.result)).is_file():
        answer: dict[str, Any] = read_json(failure)
        kinds: dict[str, FailureKind] = {"out_of_memory": "out of memory", "misuse": "misuse"}
        kind: FailureKind = next((kind for key, kind in kinds.items() if answer.get(key)), "failed")
        return FailedTrial(
            kind=kind, reason=f"{answer['error']} {answer['hint']}".strip(), log=ended.log
        )
    return FailedTrial(kind=ended.state, reason=ended.reason, log=ended.log)


def _with_absolute_paths(trial: Trial) -> Trial:
    """Return the trial with absolute paths. Another host may run it in another folder."""
    spec = ModelSpec.of(trial.task)
    task = spec.with_path(Path(spec.path).absolute())
    shards = trial.loader.shards and str(Path(trial.loader.shards).absolute())
    return replace(trial, task=task, loader=replace(trial.loader, shards=shards))
