"""The verbs as functions, with every keyword.

Generated from their requests by tools/api_stub.py: do not edit.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from trainpace.core.hardware import Device
from trainpace.diagnose import Diagnosis, Examination, ProfiledTraining
from trainpace.job import Answer
from trainpace.journal import Journal
from trainpace.measure import MachineProfile
from trainpace.offers import Offer, Ranking
from trainpace.plan import Plan
from trainpace.run import Equivalence, LadderResult
from trainpace.shards import Estimate, Precomputed
from trainpace.verbs.checks import ValidatedRuns
from trainpace.verbs.data import MeasuredLoader, Verified
from trainpace.verbs.forecast import Forecasts
from trainpace.verbs.look import Looked
from trainpace.verbs.measure import MeasuredSweep
from trainpace.watch import Recording
from trainpace.workload import Form, Workload

Model = str | os.PathLike[str] | Workload | nn.Module

def trace(
    model: Model,
    *,
    forms: Sequence[Form] = ...,
    mode: Literal["train", "forward_backward", "inference"] | None = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    sequence_length: int | str | None = ...,
    image_size: int | str | None = ...,
    adapter: Literal["lora", "dora"] | None = ...,
    lora_rank: int | str | None = ...,
    lora_targets: str | os.PathLike[str] | None = ...,
    weights: Literal["nf4", "fp4", "nf4_double", "int8", "gptq"] | None = ...,
    fp32_weights: Literal["all", "norms", "none"] | None = ...,
    whole_modules: str | os.PathLike[str] | None = ...,
    timeout: float | str = ...,
    example: Any = ...,
    loss: Any = ...,
    task_optimizer: Any = ...,
) -> Workload:
    """Return the operators of one micro-batch, for forecasts at any batch size. A spec is traced in
    its own process.

    A live `nn.Module` is traced here, without its weights, and stays as it is. It needs `example`,
    a batch of at least one sample as its training has it, and `loss`: of an example (input, ...,
    target) it takes (output, target); of a dict it may be left out where `model(**example)` returns
    something with a `.loss`. `task_optimizer`: its own optimizer, where it has one.
    """

def forecast(
    model: Model,
    *,
    sequence_length: int | str | Iterable[int] = ...,
    gpu: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    host: str | os.PathLike[str] | None = ...,
    mode: Literal["train", "forward_backward", "inference"] | None = ...,
    transfer_from: str | os.PathLike[str] | None = ...,
    calibrated: str | os.PathLike[str] | None = ...,
    journal: str | os.PathLike[str] | None = ...,
    no_journal: bool = ...,
    samples: int | str | None = ...,
    tokens: int | str | None = ...,
    max_steps: int | str | None = ...,
    price: float | str | None = ...,
    loader_rate: float | str | None = ...,
    workers: int | str | None = ...,
    cores: int | str | None = ...,
    packed: bool = ...,
    lengths: str | os.PathLike[str] | None = ...,
    mean_length: float | str | None = ...,
    hardware: str | os.PathLike[str] | None = ...,
    evidence: Literal["nearest", "none"] = ...,
    network: float | str | None = ...,
    network_latency: float | str | None = ...,
    host_copy: float | str | None = ...,
    batch: int | str | Iterable[int] | None = ...,
    global_batch: int | str | None = ...,
    num_gpus: int | str = ...,
    nodes: int | str = ...,
    accumulate: int | str | None = ...,
    precision: Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
    | None = ...,
    channels_last: bool = ...,
    compile: bool = ...,
    tp: int | str = ...,
    pp: int | str = ...,
    cp: int | str = ...,
    sequence_parallel: bool = ...,
    partition_activations: bool = ...,
    async_tp: bool = ...,
    clip_gradients: bool = ...,
    pure_16_bit: bool = ...,
    pipeline: Literal["gpipe", "1f1b", "interleaved"] = ...,
    virtual_stages: int | str = ...,
    ep: int | str = ...,
    expert_tp: int | str | None = ...,
    expert_exchange: Literal["all_to_all", "deep_ep", "overlapped"] = ...,
    expert_nodes: int | str | None = ...,
    expert_load: float | str = ...,
    engine: Literal["ddp", "unoverlapped", "data_parallel", "megatron_core"] = ...,
    zero: Literal[0, 1, 2, 3] = ...,
    shard_size: int | str | None = ...,
    keep_gathered: bool = ...,
    offload: Literal["none", "optimizer", "parameters", "both"] = ...,
    checkpointing: Literal["none", "selective", "full"] | bool | None = ...,
    epochs: float | str | None = ...,
    startup: float | str | None = ...,
    evaluation_samples: int | str = ...,
    checkpoint_every: float | str | None = ...,
    mtbf: float | str | None = ...,
    step_variation: float | str = ...,
    data_gb: float | str = ...,
    download: float | str | None = ...,
    sample_bytes: int | str = ...,
    storage: float | str | None = ...,
    software: str | os.PathLike[str] | None = ...,
    attention: str | os.PathLike[str] | None = ...,
    optimizer_implementation: Literal["foreach", "fused", "for_loop"] | None = ...,
    cross_entropy: Literal["plain", "uncompiled", "fused", "fused_fp32", "chunked"] | None = ...,
    fp8_recipe: Literal["per_tensor", "block", "mxfp8"] | None = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    image_size: int | str | None = ...,
    adapter: Literal["lora", "dora"] | None = ...,
    lora_rank: int | str | None = ...,
    lora_targets: str | os.PathLike[str] | None = ...,
    weights: Literal["nf4", "fp4", "nf4_double", "int8", "gptq"] | None = ...,
    fp32_weights: Literal["all", "norms", "none"] | None = ...,
    whole_modules: str | os.PathLike[str] | None = ...,
    timeout: float | str = ...,
    example: Any = ...,
    loss: Any = ...,
    task_optimizer: Any = ...,
) -> Forecasts:
    """Forecast step time, memory and cost of a model on GPUs you don't have, for each `gpu` and
    `batch`.

    trainpace.forecast("resnet50", gpu=["T4", "A100"], batch=64, precision="amp_fp16").to_pandas()
    """

def match(
    model: Model,
    *,
    samples: int | str | None = ...,
    tokens: int | str | None = ...,
    max_steps: int | str | None = ...,
    global_batch: int | str | None = ...,
    precision: Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
    | Iterable[
        Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
    ] = ...,
    by: Literal["cost", "hours"] = ...,
    deadline: float | str | None = ...,
    budget: float | str | None = ...,
    provider: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    region: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    gpu: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    max_nodes: int | str = ...,
    spot: bool = ...,
    preempted_every: float | str | None = ...,
    data_from: str | os.PathLike[str] = ...,
    loader_rate: float | str | None = ...,
    machines: str | os.PathLike[str] | None = ...,
    only_machines: bool = ...,
    hardware: str | os.PathLike[str] | None = ...,
    host: str | os.PathLike[str] | None = ...,
    journal: str | os.PathLike[str] | None = ...,
    no_journal: bool = ...,
    channels_last: bool = ...,
    compile: bool = ...,
    checkpointing: bool = ...,
    evidence: Literal["nearest", "none"] = ...,
    epochs: float | str | None = ...,
    startup: float | str | None = ...,
    evaluation_samples: int | str = ...,
    checkpoint_every: float | str | None = ...,
    mtbf: float | str | None = ...,
    step_variation: float | str = ...,
    data_gb: float | str = ...,
    download: float | str | None = ...,
    sample_bytes: int | str = ...,
    storage: float | str | None = ...,
    software: str | os.PathLike[str] | None = ...,
    attention: str | os.PathLike[str] | None = ...,
    optimizer_implementation: Literal["foreach", "fused", "for_loop"] | None = ...,
    cross_entropy: Literal["plain", "uncompiled", "fused", "fused_fp32", "chunked"] | None = ...,
    fp8_recipe: Literal["per_tensor", "block", "mxfp8"] | None = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    sequence_length: int | str | None = ...,
    image_size: int | str | None = ...,
    adapter: Literal["lora", "dora"] | None = ...,
    lora_rank: int | str | None = ...,
    lora_targets: str | os.PathLike[str] | None = ...,
    weights: Literal["nf4", "fp4", "nf4_double", "int8", "gptq"] | None = ...,
    fp32_weights: Literal["all", "norms", "none"] | None = ...,
    whole_modules: str | os.PathLike[str] | None = ...,
    timeout: float | str = ...,
    example: Any = ...,
    loss: Any = ...,
    task_optimizer: Any = ...,
) -> Ranking:
    """Rank servers by what the whole training costs or how long it takes.

    trainpace.match("resnet50", samples="1.28M", epochs=90, deadline="24h").matches[0].offer
    """

def plan(
    model: Model,
    *,
    gpu: str | os.PathLike[str] | None = ...,
    num_gpus: int | str | None = ...,
    nodes: int | str | None = ...,
    network: float | str | None = ...,
    host: str | os.PathLike[str] | None = ...,
    cluster: str | os.PathLike[str] | None = ...,
    hardware: str | os.PathLike[str] | None = ...,
    price: float | str | None = ...,
    config: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    command: str | os.PathLike[str] | None = ...,
    watched: str | os.PathLike[str] | None = ...,
    global_batch: int | str | None = ...,
    gpus_now: int | str | None = ...,
    nodes_now: int | str | None = ...,
    workers: int | str | None = ...,
    sample_ms: float | str | None = ...,
    offline_share: float | str | None = ...,
    loader: str | os.PathLike[str] | None = ...,
    cores: int | str | None = ...,
    samples: int | str | None = ...,
    tokens: int | str | None = ...,
    max_steps: int | str | None = ...,
    allow_global_batch: bool = ...,
    noise_scale: str | os.PathLike[str] | None = ...,
    allow_fp8: bool = ...,
    keep: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    fastest: bool = ...,
    journal: str | os.PathLike[str] | None = ...,
    no_journal: bool = ...,
    evidence: Literal["nearest", "none"] = ...,
    batch: int | str | None = ...,
    accumulate: int | str | None = ...,
    precision: Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16", "fp8"]
    | None = ...,
    zero: Literal[0, 1, 2, 3] | None = ...,
    tp: int | str | None = ...,
    pp: int | str | None = ...,
    cp: int | str | None = ...,
    checkpointing: Literal["none", "selective", "full"] | None = ...,
    offload: Literal["none", "optimizer", "parameters", "both"] | None = ...,
    compile: bool = ...,
    channels_last: bool = ...,
    epochs: float | str | None = ...,
    startup: float | str | None = ...,
    evaluation_samples: int | str = ...,
    checkpoint_every: float | str | None = ...,
    mtbf: float | str | None = ...,
    step_variation: float | str = ...,
    data_gb: float | str = ...,
    download: float | str | None = ...,
    sample_bytes: int | str = ...,
    storage: float | str | None = ...,
    software: str | os.PathLike[str] | None = ...,
    attention: str | os.PathLike[str] | None = ...,
    optimizer_implementation: Literal["foreach", "fused", "for_loop"] | None = ...,
    cross_entropy: Literal["plain", "uncompiled", "fused", "fused_fp32", "chunked"] | None = ...,
    fp8_recipe: Literal["per_tensor", "block", "mxfp8"] | None = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    sequence_length: int | str | None = ...,
    image_size: int | str | None = ...,
    adapter: Literal["lora", "dora"] | None = ...,
    lora_rank: int | str | None = ...,
    lora_targets: str | os.PathLike[str] | None = ...,
    weights: Literal["nf4", "fp4", "nf4_double", "int8", "gptq"] | None = ...,
    fp32_weights: Literal["all", "norms", "none"] | None = ...,
    whole_modules: str | os.PathLike[str] | None = ...,
    timeout: float | str = ...,
    example: Any = ...,
    loss: Any = ...,
    task_optimizer: Any = ...,
) -> Plan:
    """Recommend what to change about a training, in which order, and what each change saves of the
    whole job.

    trainpace.plan("resnet50", gpu="A100", num_gpus=4, batch=64, samples="1.28M", epochs=90).changes
    """

def measure(
    model: str,
    *,
    batch: int | str | Iterable[int] | None = ...,
    every: bool = ...,
    repeats: int | str | None = ...,
    until_oom: bool = ...,
    precision: Literal["fp32", "torch_fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16"]
    | None = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    accumulate: int | str = ...,
    device: str | os.PathLike[str] = ...,
    sequence_length: int | str | None = ...,
    image_size: int | str | None = ...,
    channels_last: bool = ...,
    compile: bool = ...,
    seconds: float | str = ...,
    timeout: float | str = ...,
    memory_limit: float | None = ...,
    noise_scale: bool = ...,
    no_forecast: bool = ...,
    journal: str | os.PathLike[str] | None = ...,
    no_journal: bool = ...,
    fresh: bool = ...,
    notes: str | os.PathLike[str] = ...,
    keep_identity: bool = ...,
) -> MeasuredSweep:
    """Measure real steps of a model on this machine over batch sizes, each in its own process, into
    the journal.

    trainpace.measure("train.py:task", batch=[8, 16, 32]).to_pandas()
    """

def schedule(
    *,
    config: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    command: str | os.PathLike[str] | None = ...,
    samples: int | str | None = ...,
    tokens: int | str | None = ...,
    sequence_length: int | str | None = ...,
    epochs: float | None = ...,
    max_steps: int | str | None = ...,
    micro_batch: int | str | None = ...,
    accumulate: int | str | None = ...,
    global_batch: int | str | None = ...,
    nnodes: int | str | None = ...,
    nproc_per_node: int | str | None = ...,
    tp: int | str = ...,
    pp: int | str = ...,
    cp: int | str = ...,
    drop_last: bool = ...,
    drop_partial_accumulation: bool = ...,
    step_time: float | str | None = ...,
    throughput: float | None = ...,
    epoch_time: float | str | None = ...,
    startup: float | str = ...,
    evaluate_every: int | str | None = ...,
    evaluation_time: float | str = ...,
    checkpoint_every: int | str | None = ...,
    checkpoint_time: float | str = ...,
    mtbf: float | str | None = ...,
    restart_time: float | str = ...,
    repeats: int | str = ...,
    deadline: float | str | None = ...,
    budget: float | str | None = ...,
    price: float | str | None = ...,
    solve_gpus: bool = ...,
    keep_global_batch: bool = ...,
    speedup: float | str | Iterable[float | str] = ...,
    learning_rate: float | None = ...,
    base_global_batch: int | str | None = ...,
) -> Answer:
    """Compute steps, hours and dollars of a training run, or whichever number is missing.

    trainpace.schedule(samples=1_281_167, epochs=90, global_batch=256, deadline="24h").step_time_s
    """

def look(
    command: str | Sequence[str],
    *,
    seconds: float | str = ...,
    epochs: float | str | None = ...,
    max_steps: int | str | None = ...,
    global_batch: int | str | None = ...,
    gpu: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    output: str | os.PathLike[str] | None = ...,
) -> Looked:
    """Let a script train for some seconds and report how long it will take, what slows it down, and
    its cost elsewhere.

    trainpace.look("train.py --epochs 30").interval_s
    """

def watch(
    command: str | Sequence[str],
    *,
    output: str | os.PathLike[str] | None = ...,
    recorded: str | os.PathLike[str] | None = ...,
) -> Recording:
    """Run an unchanged training script and record where its steps' time goes.

    trainpace.watch("python train.py --epochs 1").ranks[0]
    """

def diagnose(
    command: str | Sequence[str] | os.PathLike[str],
    *,
    epochs: float | str | None = ...,
    rounds: int | str = ...,
    block: int | str = ...,
    warm_up: int | str = ...,
    budget: float | str = ...,
    without: Literal["cached_batch", "no_sync", "few_samples", "muted", "fewer_threads"]
    | Iterable[Literal["cached_batch", "no_sync", "few_samples", "muted", "fewer_threads"]] = ...,
    output: str | os.PathLike[str] | None = ...,
) -> Diagnosis | ProfiledTraining:
    """Find what slows a training script down and prove it by removing one suspect at a time. Of a
    profiler's trace, or a folder with one for each rank: a `ProfiledTraining`, with what each
    change could save at most.

    trainpace.diagnose("trace.json.gz").bounds
    """

def loader(
    target: str,
    *,
    batch: int | str | None = ...,
    workers: int | str | Iterable[int] | None = ...,
    compute_ms: float | str | None = ...,
    seconds: float | str = ...,
    repeats: int | str = ...,
    timeout: float | str = ...,
    compare: str | os.PathLike[str] | None = ...,
) -> MeasuredLoader:
    """Measure a DataLoader alone: samples/s over workers, the cost of a sample, and settings for
    this machine.

    trainpace.loader("train.py:make_dataset", batch=64).advice
    """

def precompute(
    target: str | None = ...,
    *,
    out: str | os.PathLike[str] = ...,
    workers: int | str | None = ...,
    shard_samples: int | str | None = ...,
    max_bad: float | str = ...,
    part: str | os.PathLike[str] | None = ...,
    again: bool = ...,
    verify: bool = ...,
    repair: bool = ...,
    estimate: bool = ...,
    seconds: float | str = ...,
    step_ms: float | str | None = ...,
    batch: int | str | None = ...,
    epochs: float | None = ...,
) -> Precomputed | Estimate | Verified:
    """Compute a dataset's samples once, in parallel processes, into Parquet shards that
    `ShardDataset` reads back.

    trainpace.precompute("faces.py:Faces", out="shards").samples

    With `estimate=True` an `Estimate` of what that costs and saves; with `verify=True` which shards
    are damaged, as `Verified`.
    """

def calibrate(
    *,
    seconds: float | str = ...,
    ranks: int | str | None = ...,
    backend: Literal["gloo", "nccl"] = ...,
    storage: str | os.PathLike[str] | None = ...,
    output: str | os.PathLike[str] | None = ...,
) -> MachineProfile:
    """Measure what this machine's CPU can do, for a minute, and save it for forecasts."""

def doctor(*, device: str | os.PathLike[str] | None = ...) -> Examination:
    """Examine this machine and whether it can be measured: `checks`, and `is_well`."""

def verify(
    model: str,
    *,
    batch: int | str = ...,
    accumulate: int | str = ...,
    ranks: int | str = ...,
    steps: int | str = ...,
    way: Literal["accumulate", "data_parallel", "ddp", "fsdp2", "deepspeed"]
    | Iterable[Literal["accumulate", "data_parallel", "ddp", "fsdp2", "deepspeed"]] = ...,
    precision: Literal["fp32", "bf16", "amp_bf16"] = ...,
    optimizer: str | os.PathLike[str] | None = ...,
    sequence_length: int | str | None = ...,
    image_size: int | str | None = ...,
    tolerance: float | str = ...,
    seed: int = ...,
    timeout: float | str = ...,
) -> Equivalence:
    """Compare accumulation, ranks and one big batch: the largest difference and its cause."""

def validate(
    runs: str | os.PathLike[str],
    *,
    file: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    models: str | os.PathLike[str] | None = ...,
    traces: str | os.PathLike[str] | None = ...,
    run_code: bool = ...,
    workers: int | str | None = ...,
) -> ValidatedRuns:
    """Forecast measured runs, of a CSV or Parquet file, under their own conditions, and compare.

    trainpace.validate("runs.csv").overall.median
    """

def run(
    ladder: str | os.PathLike[str],
    *,
    task: str | os.PathLike[str] | None = ...,
    command: str | os.PathLike[str] | None = ...,
    config: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    precompute: str | os.PathLike[str] = ...,
    out: str | os.PathLike[str] | None = ...,
    launcher: Literal["auto", "process", "torchrun", "slurm"] = ...,
    partition: str | os.PathLike[str] | None = ...,
    account: str | os.PathLike[str] | None = ...,
    sbatch: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    device: str | os.PathLike[str] | None = ...,
    seconds: float | str | None = ...,
    steps: int | str | None = ...,
    timeout: float | str = ...,
    price: float | str | None = ...,
    allow_global_batch: bool = ...,
    stop_early: bool = ...,
    no_forecast: bool = ...,
    fresh: bool = ...,
    journal: str | os.PathLike[str] | None = ...,
    no_journal: bool = ...,
    keep_identity: bool = ...,
) -> LadderResult:
    """Try a ladder or a plan step by step: forecast, measure, keep what helps, undo what does
    not."""

def offers(
    *,
    provider: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    region: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    gpu: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ...,
    machines: str | os.PathLike[str] | None = ...,
    hardware: str | os.PathLike[str] | None = ...,
    refresh: bool = ...,
) -> list[Offer]:
    """List servers on offer with their prices."""

def gpus(hardware: str | None = ...) -> list[Device]:
    """List the devices of your own file and the hardware catalogue, with the source of each
    figure."""

def journal(where: str | None = ..., create: bool = ...) -> Journal:
    """Open the journal at a path or URL, by default the user's own, for a ``with`` block."""
