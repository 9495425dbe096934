"""A trial: a few real steps of a task under one execution, and what they took."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainpace.execution import Execution
from trainpace.outcome import Interval
from trainpace.records import Record

EngineName = Literal["plain", "ddp", "fsdp2", "deepspeed"]
"""plain: one process and no engine. ddp, fsdp2, deepspeed: through Lightning Fabric's strategies."""


class LoaderSettings(Record):
    """How a rank's samples come. `shards`: a folder that `precompute` wrote, read in place of the task's own dataset."""

    workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory: bool = False
    shards: str | None = None


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
    """Gather what the gradient noise scale needs (`measure.noise_scale`)."""


class TrialResult(Record):
    """As rank 0 saw it. `step_ms`: whole steps, data waits included, after warm-up; `data_wait_ms`: of the same steps; `losses`:
    of every step from the first, averaged over the global batch. `model_step`: a Measurement's parts where they were taken."""

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
