"""The options of the verbs as keywords, for editors and type checkers. Types, checks and defaults stand on the commands in cli/.

A name is the command line's with underscores: `--num-gpus` is `num_gpus`. What is left out takes the command's default. Durations
are seconds, or text such as "5min"; counts are numbers, or text such as "1.28M". Options that only say how an answer is shown or
where it is saved have no keyword.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from trainpace.execution import Checkpointing, Precision

Path = str | os.PathLike[str]
Count = int | str
Duration = float | str
Usd = float | str
Names = str | Iterable[str]
Batches = int | str | Iterable[int]
Offload = Literal["none", "optimizer", "parameters", "both"]
Mode = Literal["train", "forward_backward", "inference"]


class Live(TypedDict, total=False):
    """What goes with a model that is a live `nn.Module`; see `trace`."""

    example: Any
    loss: Any
    task_optimizer: Any


class Traced(Live, total=False):
    """How a model is traced."""

    optimizer: str
    sequence_length: Count
    image_size: Count
    timeout: Duration


class TraceOptions(Traced, total=False):
    """`trace`."""

    mode: Mode


class Training(Traced, total=False):
    """What a training does besides its steps."""

    epochs: float
    startup: Duration
    evaluation_samples: Count
    checkpoint_every: Duration
    mtbf: Duration
    step_variation: float
    data_gb: float
    download: float
    sample_bytes: Count
    storage: float


class ForecastOptions(Training, total=False):
    """`trainpace forecast --help` describes them."""

    mode: Mode
    gpu: Names
    num_gpus: Count
    nodes: Count
    network: float
    tp: Count
    pp: Count
    cp: Count
    sequence_parallel: bool
    async_tp: bool
    pipeline: Literal["gpipe", "1f1b", "interleaved"]
    virtual_stages: Count
    zero: Literal[0, 1, 2, 3]
    shard_size: Count
    keep_gathered: bool
    offload: Offload
    checkpointing: Checkpointing | bool
    batch: Batches
    accumulate: Count
    precision: Precision
    channels_last: bool
    compile: bool
    transfer_from: Path
    calibrated: Path
    journal: str
    no_journal: bool
    samples: Count
    price: Usd
    hardware: Path


class MatchOptions(Training, total=False):
    """`trainpace match --help` describes them."""

    samples: Count
    max_steps: Count
    global_batch: Count
    precision: Precision | Iterable[Precision]
    by: Literal["cost", "hours"]
    deadline: Duration
    budget: Usd
    provider: Names
    region: Names
    gpu: Names
    max_nodes: Count
    spot: bool
    preempted_every: Duration
    data_from: str
    loader_rate: float
    machines: Path
    only_machines: bool
    hardware: Path
    channels_last: bool
    compile: bool
    checkpointing: bool


class PlanOptions(Training, total=False):
    """`trainpace plan --help` describes them."""

    gpu: str
    num_gpus: Count
    nodes: Count
    network: float
    cluster: Path
    price: Usd
    config: Path | Iterable[Path]
    command: str
    watched: Path
    nodes_now: Count
    gpus_now: Count
    batch: Count
    accumulate: Count
    global_batch: Count
    precision: Precision
    tp: Count
    pp: Count
    cp: Count
    zero: Literal[0, 1, 2, 3]
    checkpointing: Checkpointing
    offload: Offload
    compile: bool
    channels_last: bool
    workers: Count
    sample_ms: float
    cores: Count
    samples: Count
    tokens: Count
    max_steps: Count
    allow_global_batch: bool
    noise_scale: float | Path
    allow_fp8: bool
    keep: Names
    simplest: bool
    hardware: Path


class MeasureOptions(TypedDict, total=False):
    """`trainpace measure --help` describes them."""

    batch: Batches
    every: bool
    repeats: Count
    until_oom: bool
    precision: Literal["fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]
    optimizer: str
    accumulate: Count
    device: Literal["cpu", "cuda"]
    sequence_length: Count
    image_size: Count
    channels_last: bool
    compile: bool
    seconds: Duration
    timeout: Duration
    memory_limit: float
    noise_scale: bool
    no_forecast: bool
    journal: str
    no_journal: bool
    fresh: bool
    notes: str
    keep_identity: bool


class ScheduleOptions(TypedDict, total=False):
    """`trainpace schedule --help` describes them."""

    config: Path | Iterable[Path]
    command: str
    samples: Count
    tokens: Count
    sequence_length: Count
    epochs: float
    max_steps: Count
    micro_batch: Count
    accumulate: Count
    global_batch: Count
    nnodes: Count
    nproc_per_node: Count
    tp: Count
    pp: Count
    cp: Count
    drop_last: bool
    drop_partial_accumulation: bool
    step_time: Duration
    throughput: float
    epoch_time: Duration
    startup: Duration
    evaluate_every: Count
    evaluation_time: Duration
    checkpoint_every: Count
    checkpoint_time: Duration
    mtbf: Duration
    restart_time: Duration
    repeats: Count
    deadline: Duration
    budget: Usd
    price: Usd
    solve_gpus: bool
    keep_global_batch: bool
    speedup: float | str | Iterable[float | str]
    learning_rate: float
    base_global_batch: Count


class WatchOptions(TypedDict, total=False):
    """`trainpace watch --help` describes them."""

    output: Path


class DiagnoseOptions(TypedDict, total=False):
    """`trainpace diagnose --help` describes them."""

    epochs: float
    rounds: Count
    block: Count
    warm_up: Count
    limit: Duration
    without: Names
    output: Path


class CalibrateOptions(TypedDict, total=False):
    """`trainpace calibrate --help` describes them."""

    seconds: Duration
    ranks: Count
    backend: Literal["gloo", "nccl"]
    storage: Path
    output: Path


class VerifyOptions(TypedDict, total=False):
    """`trainpace verify --help` describes them."""

    batch: Count
    accumulate: Count
    ranks: Count
    steps: Count
    way: Names
    precision: Literal["fp32", "bf16", "amp_bf16"]
    optimizer: str
    sequence_length: Count
    image_size: Count
    tolerance: float
    seed: int
    timeout: Duration


class ValidateOptions(TypedDict, total=False):
    """`trainpace validate --help` describes them."""

    file: Names
    models: Path
    traces: Path
    workers: Count


class RunOptions(TypedDict, total=False):
    """`trainpace run --help` describes them."""

    task: str
    command: str
    config: Path | Iterable[Path]
    precompute: str
    out: Path
    launcher: Literal["auto", "process", "torchrun", "slurm"]
    partition: str
    account: str
    sbatch: Names
    device: Literal["cpu", "cuda"]
    seconds: Duration
    steps: Count
    timeout: Duration
    price: Usd
    allow_global_batch: bool
    stop_early: bool
    no_forecast: bool
    fresh: bool
    journal: str
    no_journal: bool
    keep_identity: bool


class OffersOptions(TypedDict, total=False):
    """`trainpace offers --help` describes them."""

    provider: Names
    region: Names
    gpu: Names
    machines: Path
    hardware: Path
