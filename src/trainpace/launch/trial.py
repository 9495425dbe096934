"""A trial: a few real steps of a task under one execution, and what they took."""

from typing import Literal

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.outcome import Interval
from trainpace.records import Record

EngineName = Literal["plain", "ddp", "fsdp2", "deepspeed"]
"""plain: one process and no engine. ddp, fsdp2, deepspeed: through Lightning Fabric's strategies."""


class LoaderSettings(Record):
    """The settings of a rank's data loader. `shards`: a folder that `precompute` wrote, read in place of the task's own
    dataset."""

    workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory: bool = False
    shards: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 0 or (self.prefetch_factor is not None and self.prefetch_factor < 1):
            raise TrainpaceError("a loader has 0 or more workers, which fetch 1 or more batches ahead.")


class Trial(Record):
    """`task` is FILE.py:FUNCTION or a model spec. Steps take the samples of a permutation of the dataset that `seed` and the
    global batch alone decide, so that the losses of two trials with the same global batch are of the same samples.

    The first `warmup_steps` are not counted; then `steps` are, or as many as `seconds` hold.
    """

    task: str
    execution: Execution
    engine: EngineName = "plain"
    loader: LoaderSettings = LoaderSettings()
    device: Literal["cpu", "cuda"] = "cpu"
    warmup_steps: int = 3
    steps: int | None = None
    seconds: float = 10.0
    seed: int = 0
    threads_per_process: int | None = None
    noise_scale: bool = False
    """Gather the gradient noise scale (`launch.noise`) in as many steps again as were timed, after them."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or (self.steps is not None and self.steps < 1) or not 0 < self.seconds < float("inf"):
            raise TrainpaceError("a trial has 0 or more steps of warm-up, and then 1 or more steps or above 0 seconds.")
        if self.threads_per_process is not None and self.threads_per_process < 1:
            raise TrainpaceError("a process has 1 or more threads.")


class FailedTrial(Record):
    """A trial that gave no result: one sentence of why, and where its log is. misuse: it could not have worked as it was asked
    for; the sentence says what to change."""

    kind: Literal["misuse", "out of memory", "timed out", "failed", "cancelled"]
    reason: str
    log: str = ""


class TrialResult(Record):
    """The result as rank 0 saw it. `step_ms`: whole steps, data waits included, after warm-up; `data_wait_ms`: of the same steps.

    `losses`: of every step from the first, averaged over the global batch; empty where a script keeps them to itself.
    `start_up_s`: from the worker's start to the end of its first step: imports, engine, loader's workers, compilation.
    `peak_memory_gib`: the largest rank's, on a CPU what its process grew by. `reserved_memory_gib`: what the allocator held.
    """

    step_ms: tuple[float, ...]
    data_wait_ms: tuple[float, ...]
    losses: tuple[float, ...]
    median_ms: float
    interval_ms: Interval
    samples_per_second: float
    peak_memory_gib: float | None
    start_up_s: float
    world_size: int
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    noise_scale: dict[str, float] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reserved_memory_gib: float | None = None
