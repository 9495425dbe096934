"""Worker process for one rank of a trial.

Usage: ``python -m trainpace.run.trial_worker REQUEST.json RESULT.json``.

An engine wraps a model and its optimizer, runs micro-batches, and updates the weights after the
last micro-batch of a step. `PlainEngine` defines the interface and runs one process with a plain
loop. All other engines use Lightning Fabric. Their ranks read RANK, WORLD_SIZE and the other
variables that torchrun or srun sets.

Data order: trials with the same seed and global batch read the same samples in step k, however a
step is divided. Each epoch is a permutation of the dataset, and each step is a slice of the
permutation. A rank reads a contiguous part of the step and divides it into micro-batches. The
samples left over at the end of an epoch are dropped (drop_last). If the dataset is smaller than the
global batch, samples repeat within a step. Random augmentation in loader workers still differs
between trials.

Rank 0 writes the result as its last action. A rank that fails writes its error to `failure_file`,
beside the result; only the first error is kept. The worker keeps the launcher's working directory,
because a task's file may read relative paths. It writes no other files. The worker calls only the
task's function, so it does not touch checkpoints or step counters of a real run.
"""

import time

_STARTED = time.perf_counter()

import abc
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

from trainpace.core.errors import Contradiction, TrainpaceError, UserCodeError
from trainpace.core.execution import Execution, Precision
from trainpace.core.records import load, save, write_whole
from trainpace.core.worker import end, failure_of
from trainpace.job import noise_scale
from trainpace.measure import (
    DdpNoiseNorms,
    Loss,
    MemoryMeter,
    NoiseNorms,
    PlainEngine,
    StepClock,
    collective_backend,
    environment,
    place_batch,
    set_up_device,
    use_device,
)
from trainpace.run.job import ONE_RANK, complains_of_a_peer
from trainpace.run.trial import (
    EngineName,
    LoaderSettings,
    Trial,
    TrialResult,
    check_engine,
    failure_file,
    result_of,
    why_no_noise_scale,
)
from trainpace.shards import ShardDataset
from trainpace.workload import (
    Task,
    build_task,
    import_package,
    longest_chain,
    make_optimizer,
    map_tensors,
    optimizer_name,
    recomputes_itself,
)

PRECISIONS: dict[Precision, Any] = {
    "fp32": "32-true",
    "torch_fp32": "32-true",
    "tf32": "32-true",
    "amp_fp16": "16-mixed",
    "amp_bf16": "bf16-mixed",
    "bf16": "bf16-true",
    "fp16": "16-true",
}
"""Fabric's name for each precision. 16-mixed adds a gradient scaler.

torch_fp32 and tf32 share a name, because TF32 is a global setting of torch.
"""


class FabricEngine(abc.ABC):
    """Base class of engines that run a model and its optimizer in a Lightning Fabric strategy."""

    precisions = PRECISIONS
    skips_synchronisation = True
    """True if gradients are synchronized only in the last micro-batch of a step (no_sync)."""
    scales_loss_itself = False

    def __init__(self, execution: Execution, device: str, model: Any, optimizer: Any) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        e = self._execution = execution
        precision, plugins = self.precisions[e.precision], [TorchElasticEnvironment()]
        if device == "cpu" and precision == "16-mixed" and not self.scales_loss_itself:
            # On a CPU, Fabric maps 16-mixed to bf16 (lightning 2.6), but torch supports fp16 there.
            from lightning.fabric.plugins.precision import MixedPrecision

            precision, plugins = None, [*plugins, MixedPrecision("16-mixed", device)]
        if e.channels_last:
            model = model.to(memory_format=torch.channels_last)
        with warnings.catch_warnings():
            # Hides warnings about srun on the PATH and the number of loader workers.
            warnings.simplefilter("ignore")
            self.fabric = Fabric(
                accelerator=device,
                strategy=self._strategy(e, device),
                devices=e.nproc_per_node,
                num_nodes=e.nnodes,
                precision=precision,
                plugins=plugins,
            )
            self.fabric.launch()
        self.device = self.fabric.device
        self.model, self._optimizer = self._set_up(
            torch.compile(model) if e.compile else model, optimizer
        )

    @abc.abstractmethod
    def _strategy(self, e: Execution, device: str) -> Any: ...

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped: tuple[Any, Any] = self.fabric.setup(model, optimizer)
        return wrapped

    @property
    def loss_scale(self) -> float:
        """Current factor of the gradient scaler, or 1.0 without one."""
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def place(self, batch: Any) -> Any:
        """Move the batch to the device. Fabric casts the model's inputs."""
        return place_batch(batch, self.device, "fp32", self._execution.channels_last)

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        """Run forward and backward of one micro-batch, and return its detached loss."""
        quiet = self.skips_synchronisation and not last
        with self.fabric.no_backward_sync(self.model) if quiet else contextlib.nullcontext():
            value = loss(self.model, batch)
            self.fabric.backward(
                value if self.scales_loss_itself else value / self._execution.accumulation
            )
        return value.detach()

    def update(self) -> None:
        """Update the weights and clear the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Ddp(FabricEngine):
    """DistributedDataParallel. Gradients are all-reduced in the last backward pass of a step."""

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import DDPStrategy

        return DDPStrategy(process_group_backend=collective_backend(device))


class Fsdp2(FabricEngine):
    """FSDP2 with `fully_shard` on every repeated block and on the root module.

    Gradients are reduced after every micro-batch, as forecasts assume. With no_sync, unsharded
    gradients would use the memory that sharding saves. For amp_bf16, FSDP2's own mixed precision
    applies: parameters are gathered in bf16 and gradients are reduced in fp32. Norms and softmax
    then run in bf16 too.
    """

    precisions = PRECISIONS | {"amp_bf16": "32-true"}
    skips_synchronisation = False

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import ModelParallelStrategy

        def shard(module: Any, _: Any) -> Any:
            return _sharded(module, e, device)

        backend = collective_backend(device)
        if device != "cpu" and e.offload_parameters:
            backend = f"cpu:gloo,{device}:{backend}"
        return ModelParallelStrategy(
            parallelize_fn=shard,
            data_parallel_size=e.world_size,
            tensor_parallel_size=1,
            process_group_backend=backend,
        )

    def _set_up(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        whole = getattr(model, "_orig_mod", model)
        names = {id(parameter): name for name, parameter in whole.named_parameters()}
        # Only the shards move to the device. The whole model may not fit.
        model = self.fabric.setup_module(model, move_to_device=False)
        follow_shards(optimizer, names, whole)
        optimizer.state.clear()
        return model, self.fabric.setup_optimizers(optimizer)


def follow_shards(optimizer: Any, names: dict[int, str], model: Any) -> None:
    """Give an optimizer the sharded parameters in place of the full ones.

    `names` holds the names of the full parameters by their identity.
    """
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]


class DeepSpeed(FabricEngine):
    """DeepSpeed with ZeRO stages 0 to 3 and offload. It accumulates and scales the loss itself.

    The engine uses the task's own Python optimizer, so no C++ optimizer of DeepSpeed is compiled.
    """

    skips_synchronisation = False
    scales_loss_itself = True

    def _strategy(self, e: Execution, device: str) -> Any:
        from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy

        class OnCpu(DeepSpeedStrategy):
            """Fabric's DeepSpeed strategy without its check for CUDA devices (lightning 2.6).

            It allows ZeRO trials on a machine without a GPU.
            """

            def setup_environment(self) -> None:
                # DeepSpeed needs a device index, which CPU devices lack by default.
                self.parallel_devices = [torch.device("cpu", i) for i in range(e.nproc_per_node)]
                DDPStrategy.setup_environment(self)

            def _setup_distributed(self) -> None:
                self._set_world_ranks()
                self._init_deepspeed_distributed()
                self._format_config()
                self._config_initialized = True

        on_cpu = device == "cpu"
        return (OnCpu if on_cpu else DeepSpeedStrategy)(
            config=deepspeed_config(e),
            process_group_backend="gloo" if on_cpu else None,
            logging_level=logging.WARNING,
        )

    def micro_step(self, loss: Loss, batch: Any, last: bool) -> torch.Tensor:
        value = super().micro_step(loss, batch, last)
        # DeepSpeed's engine counts micro-batches and updates after the last one of a step. Fabric's
        # optimizer would bypass the engine (lightning 2.6, deepspeed 0.19).
        self.fabric.strategy.model.step()
        return value

    def update(self) -> None:
        pass


Engine = PlainEngine | FabricEngine
ENGINES: dict[EngineName, Callable[[Execution, str, Any, Any], Engine]] = {
    "plain": PlainEngine,
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
}
"""Constructor of each engine: (execution, device, model, optimizer) -> engine."""


def import_engine(engine: EngineName, device: str) -> None:
    """Import the packages of an engine, and configure DeepSpeed for a CPU if necessary.

    Raises:
        TrainpaceError: If a package is missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if engine != "plain":
                import_package("lightning.fabric", "lightning")
            if engine == "deepspeed":
                import_deepspeed(device)
        except TrainpaceError as error:
            raise TrainpaceError(
                f"the engine {engine} cannot start: {error.message}", error.hint
            ) from None


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed, configured for a CPU if necessary.

    Raises:
        TrainpaceError: If DeepSpeed is missing.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed, operators = (
        import_package(name, "deepspeed") for name in ("deepspeed", "deepspeed.ops")
    )
    if device == "cpu":
        # Without this entry, DeepSpeed compiles a C++ operator for a minute.
        operators.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def recompute_blocks(model: Any) -> tuple[str, ...]:
    """Enable full activation checkpointing and return notes for the user.

    The model's own switch is used if it has one (transformers, timm, diffusers). Otherwise the
    blocks of its longest chain of similar blocks are wrapped, and those outside the chain. If the
    model has neither, nothing is recomputed, and a note says so.
    """
    if recomputes_itself(model):
        return ()
    chain = longest_chain(model)
    if chain is None:
        name = type(model).__name__
        return (
            (
                f"activation checkpointing has no effect: {name} has no switch for it and "
                "no chain of similar blocks."
            ),
        )
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    members = {id(module) for module in (*chain.modules, *chain.units)}
    wrappers.apply_activation_checkpointing(
        model, wrappers.checkpoint_wrapper, check_fn=lambda module: id(module) in members
    )
    return (
        (f"activation checkpointing recomputes {len(members)} blocks (starting at {chain.name})."),
    )


def _sharded(model: Any, e: Execution, device: str) -> Any:
    """Shard a model with FSDP2: first each repeated block, then the root module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    size = e.shard_size or e.data_parallel_size
    copies = e.data_parallel_size // size
    axes = {"shard": size} if copies == 1 else {"replicate": copies, "shard": size}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    }
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if e.precision == "amp_bf16":
        options["mp_policy"] = mixed
    if e.offload_parameters:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    chain = longest_chain(model)
    for block in (*chain.modules, *chain.units) if chain is not None else ():
        fully_shard(block, reshard_after_forward=e.reshard_after_forward, **options)
    if e.precision == "amp_bf16":
        options["mp_policy"] = dataclasses.replace(
            mixed, output_dtype=torch.float32
        )  # The loss is computed in fp32.
    # Backward needs the root's parameters first. With None, torch keeps them gathered.
    fully_shard(model, reshard_after_forward=None if e.reshard_after_forward else False, **options)
    return model


def deepspeed_config(e: Execution) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Fabric adds the precision."""
    offloads = {"offload_optimizer": e.offload_optimizer, "offload_param": e.offload_parameters}
    zero = {"stage": e.zero_stage} | {
        name: {"device": "cpu"} for name, wanted in offloads.items() if wanted
    }
    return {
        "train_micro_batch_size_per_gpu": e.micro_batch,
        "gradient_accumulation_steps": e.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed 0.19 clips gradients at 1.0 by default. No other engine clips.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


MADE_SAMPLES = 64
"""Number of synthetic samples for a task without a dataset, generated once from the seed."""
MADE_STEPS = 4
"""Number of steps with distinct synthetic batches, which are generated before timing and reused."""

NextBatch = Callable[[], Any]
"""Function that returns the next micro-batch of a rank."""


def positions(samples: int, seed: int, global_batch: int, step: int) -> np.ndarray:
    """Return the sample indices of one step. `step` counts from 0 across epochs."""
    epoch, number = divmod(step, steps_per_epoch(samples, global_batch))
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    return np.resize(order, max(samples, global_batch))[
        number * global_batch : (number + 1) * global_batch
    ]


def steps_per_epoch(samples: int, global_batch: int) -> int:
    """Return the number of whole steps in one epoch, at least 1."""
    return max(1, samples // global_batch)


def of_rank(step: np.ndarray, execution: Execution, rank: int) -> np.ndarray:
    """Return the sample indices of one rank in a step, with shape (accumulation, micro_batch)."""
    return step.reshape(
        execution.data_parallel_size, execution.accumulation, execution.micro_batch
    )[rank]


class RankBatches(Sampler[list[int]]):
    """Batch sampler that yields one rank's micro-batches. Each iteration covers the next epoch."""

    def __init__(self, samples: int, seed: int, execution: Execution, rank: int) -> None:
        self._samples, self._seed, self._execution, self._rank = samples, seed, execution, rank
        self._epoch = 0

    def __len__(self) -> int:
        return (
            steps_per_epoch(self._samples, self._execution.global_batch)
            * self._execution.accumulation
        )

    def __iter__(self) -> Iterator[list[int]]:
        e, epoch = self._execution, self._epoch
        self._epoch += 1
        count = steps_per_epoch(self._samples, e.global_batch)
        for step in range(epoch * count, (epoch + 1) * count):
            yield from of_rank(
                positions(self._samples, self._seed, e.global_batch, step), e, self._rank
            ).tolist()


def batches_of(
    trial: Trial, task: Task, rank: int, place: Callable[[Any], Any]
) -> tuple[NextBatch, tuple[str, ...]]:
    """Return a function that returns the rank's next micro-batch, and notes for the user.

    `place` moves synthetic batches to the device before the steps are timed.

    Raises:
        TrainpaceError: If shards are given but the task has no dataset.
    """
    batches: Iterable[Any]
    notes: tuple[str, ...] = ()
    if task.dataset is None:
        if trial.loader.shards is not None:
            raise TrainpaceError(f"{task.name} has no dataset that shards could replace.")
        notes = ("no dataset: samples are generated once, so steps include no loading.",)
        torch.manual_seed(trial.seed)
        pool, e = task.make_batch(MADE_SAMPLES), trial.execution
        steps = [
            positions(MADE_SAMPLES, trial.seed, e.global_batch, step) for step in range(MADE_STEPS)
        ]
        parts = [torch.as_tensor(part) for step in steps for part in of_rank(step, e, rank)]
        batches = [place(map_tensors(operator.itemgetter(part), pool)) for part in parts]
    elif trial.loader.shards is not None:
        shards, notes = _shards(trial.loader.shards, task)
        batches = _loader(shards, trial, task, rank)
    else:
        batches = _loader(task.dataset, trial, task, rank)
    endless = (batch for _ in itertools.count() for batch in batches)
    return lambda: next(endless), notes


def _loader(dataset: Any, trial: Trial, task: Task, rank: int) -> DataLoader[Any]:
    """Return the data loader for one rank's micro-batches."""
    s: LoaderSettings = trial.loader
    order = RankBatches(len(dataset), trial.seed, trial.execution, rank)
    # Without its own generator, the loader would draw from the model's random state.
    own_generator = torch.Generator().manual_seed(trial.seed + rank)
    options: dict[str, Any] = {
        "num_workers": s.workers,
        "prefetch_factor": s.prefetch_factor if s.workers else None,
        "persistent_workers": s.persistent_workers and s.workers > 0,
        "pin_memory": s.pin_memory and trial.device != "cpu",
        "generator": own_generator,
    }
    if isinstance(dataset, ShardDataset) and not hasattr(task.dataset, "collate_fn"):
        # Shards return whole micro-batches here, so each sample is copied only once.
        return DataLoader(dataset, sampler=order, batch_size=None, **options)
    return DataLoader(dataset, batch_sampler=order, collate_fn=task.collate, **options)


def _shards(folder: str, task: Task) -> tuple[ShardDataset, tuple[str, ...]]:
    """Return the shards that replace the task's dataset, and notes for the user.

    The dataset may have an attribute `online`: a function (sample -> sample) that was not
    precomputed. It is applied to each sample that is read from the shards.

    Raises:
        Contradiction: If shard samples and dataset samples differ in structure or dtype.
    """
    online = getattr(task.dataset, "online", None)
    online = online if callable(online) else None
    shards = ShardDataset(folder, transform=online)
    assert task.collate is not None, "a task with a dataset knows how to make batches of it"
    form, own = (_form(task.collate([samples[0]])) for samples in (shards, task.dataset))
    if form != own:
        raise Contradiction(
            f"the samples of {folder} are {form}, but those of {task.name} are {own}.",
            (
                "Give the task's dataset an attribute `online`: the function (sample -> sample)"
                " that was not precomputed."
            ),
        )
    if online is None:
        return shards, (
            f"shards are used as stored: the dataset of {task.name} has no attribute `online`.",
        )
    return shards, ()


def _form(batch: Any) -> str:
    """Return the structure and dtypes of a batch as text, to compare and to print."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of {max(0, batch.dim() - 1)} dims"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {_form(part)}" for key, part in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(_form, batch)) + ")"
    return type(batch).__name__


FEWEST_STEPS, MOST_STEPS, FEWEST_NOISE_STEPS = 5, 1000, 12
MOST_BETWEEN_AGREEMENTS = 10
"""Maximum number of steps between two checks of the time limit."""
AGREE_EVERY_MS = 500.0
"""Milliseconds between checks of the time limit. Each check costs one collective."""


def train(trial: Trial) -> TrialResult:
    """Run the trial as this process's rank and return the result as this rank saw it.

    Losses are averaged over all ranks, and the peak memory is the largest of all ranks.

    Raises:
        Contradiction: If the engine does not support the execution, or the number of processes is
            wrong.
        TrainpaceError: If a package is missing, or the noise scale cannot be measured.
        UserCodeError: If the loss becomes NaN or infinite.
    """
    e = trial.execution
    check_engine(trial.engine, e)
    if trial.noise_scale and (why := why_no_noise_scale(trial.engine, e)):
        raise TrainpaceError(why)
    rank = _start(trial)
    meter = MemoryMeter(trial.device)
    torch.manual_seed(trial.seed)
    task = build_task(trial.task)
    task.model.train()
    optimizer = task.optimizer or make_optimizer(e.optimizer, task.model)
    notes = recompute_blocks(task.model) if e.activation_checkpointing == "full" else ()
    engine = ENGINES[trial.engine](e, trial.device, task.model, optimizer)
    next_batch, data_notes = batches_of(trial, task, rank, engine.place)
    torch.manual_seed(trial.seed + 1 + rank)  # Each rank draws its own dropout masks.
    steps = _Steps(trial, task, engine, next_batch)
    steps.run()
    losses = torch.stack(steps.losses).double() / e.accumulation
    step_ms, data_wait_ms = steps.step_ms, tuple(steps.data_wait_ms)
    noise, noise_notes = steps.noise_scale() if trial.noise_scale else ({}, ())
    peak = meter.peak_gib()[0]
    peak = _of_ranks("largest", -1.0 if peak is None else peak, engine.device)
    return result_of(
        step_ms,
        e.global_batch,
        "trial",
        data_wait_ms=data_wait_ms,
        losses=_loss_curve(losses, e, task),
        peak_memory_gib=peak if peak >= 0 else None,
        start_up_s=steps.start_up_s,
        world_size=e.world_size,
        environment=environment(trial.device) | _engine_versions(),
        noise_scale=noise,
        notes=(*notes, *data_notes, *_optimizer_note(task, trial), *noise_notes),
        loss=task.loss_name,
    )


def _start(trial: Trial) -> int:
    """Set up the device, import the engine's packages, and return this process's global rank."""
    set_up_device(trial.device, trial.execution.precision)
    rank, local_rank = _ranks(trial.execution)
    if trial.threads_per_process is not None:
        torch.set_num_threads(trial.threads_per_process)
    use_device(trial.device, local_rank)
    import_engine(trial.engine, trial.device)
    return rank


def _loss_curve(losses: torch.Tensor, e: Execution, task: Task) -> tuple[float, ...]:
    """Return each step's loss, averaged over all ranks.

    Raises:
        UserCodeError: If a loss is NaN or infinite.
    """
    if _many_ranks():
        dist.all_reduce(losses)
        losses /= e.world_size
    curve = tuple(losses.tolist())
    bad = next((i for i, loss in enumerate(curve) if not math.isfinite(loss)), None)
    if bad is not None:
        hint = "Lower the learning rate, or try a wider precision."
        raise UserCodeError(f"the loss of {task.name} became {curve[bad]} at step {bad + 1}.", hint)
    return curve


def _engine_versions() -> dict[str, str]:
    engines = {name: sys.modules.get(name) for name in ("lightning", "deepspeed")}
    return {name: str(m.__version__) for name, m in engines.items() if m is not None}


class _Steps:
    """Runner of timed steps.

    A step time covers loading, the copy to the device, forward, backward, collectives and update.
    """

    def __init__(self, trial: Trial, task: Task, engine: Engine, next_batch: NextBatch) -> None:
        self._trial, self._task, self._engine, self._next_batch = trial, task, engine, next_batch
        self._clock = StepClock(trial.device)
        self.start_up_s = 0.0
        self.data_wait_ms: list[float] = []
        self.losses: list[torch.Tensor] = []

    @property
    def step_ms(self) -> list[float]:
        return [ms for (ms,) in self._clock.spans_ms]

    def run(self) -> None:
        """Run the warm-up steps, then the timed steps.

        `Trial.steps` sets their number. If it is None, as many steps run as fit in `Trial.seconds`.
        """
        t, device, steps = self._trial, self._engine.device, self._clock.spans_ms
        last_ms = AGREE_EVERY_MS
        for _ in range(t.warmup_steps):
            last_ms = self._timed(1)
        steps.clear()
        self.data_wait_ms.clear()
        most, fewest = (MOST_STEPS, FEWEST_STEPS) if t.steps is None else (t.steps, t.steps)
        deadline = time.perf_counter() + t.seconds
        over = 0.0
        while len(steps) < most and (not over or len(steps) < fewest):
            last_ms = _of_ranks("first", last_ms, device)
            count = min(MOST_BETWEEN_AGREEMENTS, int(AGREE_EVERY_MS / last_ms), most - len(steps))
            last_ms = self._timed(max(1, count))
            over = _of_ranks("first", float(time.perf_counter() > deadline), device)

    def noise_scale(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Measure the gradient noise scale in extra steps that are not timed.

        At least FEWEST_NOISE_STEPS steps are run.

        Returns:
            Two values: the estimate and notes for the user. The estimate has the keys samples (the
            noise scale, in samples), low and high (its 90% interval) and steps. A key without a
            known value is missing. If the noise scale cannot be computed, the estimate is empty and
            a note says why.
        """
        norms = _norms_of(self._trial, self._engine)
        for _ in range(max(FEWEST_NOISE_STEPS, len(self._clock.spans_ms))):
            self._step(norms)
        try:
            scale = noise_scale(norms.norms())
        except TrainpaceError as error:
            return {}, (str(error),)
        values = {name: getattr(scale, name) for name in ("samples", "low", "high", "steps")}
        known = {name: float(value) for name, value in values.items() if value is not None}
        return known, (scale.reason,) if scale.reason else ()

    def _timed(self, count: int) -> float:
        """Run `count` steps, wait for the device, and return the time of the last step in ms."""
        for _ in range(count):
            self._step()
            if len(self.losses) == 1:
                self._clock.wait()
                self.start_up_s = time.perf_counter() - _STARTED
        self._clock.settle()
        return self.step_ms[-1]

    def _step(self, norms: NoiseNorms | None = None) -> None:
        """Run one step. With `norms`, also collect gradient norms."""
        accumulation = self._trial.execution.accumulation
        waited, losses = 0.0, []
        self._clock.start_step()
        for i in range(accumulation):
            wait_begins = time.perf_counter()
            batch = self._next_batch()
            waited += time.perf_counter() - wait_begins
            batch = self._engine.place(batch)
            losses.append(
                self._engine.micro_step(self._task.loss, batch, last=i == accumulation - 1)
            )
            if norms is not None and i == 0 < accumulation - 1:
                norms.after_first()
        if norms is not None:
            norms.after_last()
        self._engine.update()
        self._clock.mark()
        self.data_wait_ms.append(1e3 * waited)
        self.losses.append(sum(losses[1:], losses[0]))


def _norms_of(trial: Trial, engine: Engine) -> NoiseNorms:
    """Return a collector of the gradient norms that the noise scale is computed from.

    The noise scale compares the gradient of the whole batch with the gradient of a part of it. With
    accumulation, the part is the first micro-batch. Under FSDP2 it covers the first micro-batch of
    all ranks, because FSDP2 reduces gradients in every micro-batch. Under DDP without accumulation,
    the part is one rank's share of the batch.
    """
    e = trial.execution
    if e.accumulation > 1:
        samples = e.micro_batch * (e.data_parallel_size if trial.engine == "fsdp2" else 1)
        return NoiseNorms(
            engine.model, samples, e.accumulation, e.global_batch, lambda: engine.loss_scale
        )
    # Fabric wraps the DDP module. torch.compile may wrap it too.
    ddp = next(
        m for m in engine.model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)
    )
    return DdpNoiseNorms(ddp, e.micro_batch)


def _ranks(e: Execution) -> tuple[int, int]:
    """Return this process's global and local rank from torchrun's environment variables.

    A process started without a launcher is rank 0 of 1.

    Raises:
        Contradiction: If the number of processes differs from the execution's world size.
    """
    if "RANK" not in os.environ:
        os.environ.update(ONE_RANK)
    rank, local_rank, world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    if world != e.world_size:
        raise Contradiction(
            f"{world} process{'es were' if world > 1 else ' was'} started for an execution of"
            f" {e.world_size} (nnodes {e.nnodes} x nproc_per_node {e.nproc_per_node}).",
            "Start nnodes x nproc_per_node processes.",
        )
    return rank, local_rank


def _many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _of_ranks(which: Literal["first", "largest"], value: float, device: torch.device) -> float:
    """Return the value of rank 0, or the largest value of all ranks."""
    if not _many_ranks():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    if which == "first":
        dist.broadcast(shared, 0)
    else:
        dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def _optimizer_note(task: Task, trial: Trial) -> tuple[str, ...]:
    """Return a note if the task's own optimizer differs from the execution's."""
    own = None if task.optimizer is None else optimizer_name(task.optimizer)
    if own is None or trial.execution.optimizer.partition("_")[0] == own.partition("_")[0]:
        return ()
    return (f"trained with the task's own optimizer {own}, not {trial.execution.optimizer}.",)


def main() -> None:
    """Run the trial, then exit without cleanup.

    Threads of the engine or of user code may hang or crash a normal exit.
    """
    request, result = sys.argv[1:3]
    rank = os.environ.get("RANK", "0")
    try:
        done = train(load(request, Trial))
        if _many_ranks():
            with contextlib.suppress(
                RuntimeError
            ):  # A peer that has already exited has passed the barrier.
                dist.barrier()
        if rank == "0":
            save(done, result)
    except (Exception, SystemExit) as error:
        answer = failure_of(error)
        # Skip errors that only say that another rank exited. That rank reports the cause.
        if not (failure_file(result).exists() or complains_of_a_peer(str(error))):
            write_whole(failure_file(result), json.dumps(answer))
        sys.stderr.write(f"trainpace: rank {rank}: {answer['error']} {answer['hint']}\n")
        end(1)
    end()


if __name__ == "__main__":
    main()
