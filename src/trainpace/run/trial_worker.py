"""``python -m trainpace.run.trial_worker REQUEST.json RESULT.json``: one rank of a trial.

Under a plain process, torchrun or srun: ranks come from the environment. Rank 0 writes the result as its last act; a rank that
fails writes one sentence beside it (`failure_file`), the first of them counts. The working directory is the one that the
launcher was called from, since a task's file may read relative paths; nothing is written but these two files. A trial calls the
task's function and no more of the user's code, so checkpoints and step counters of a real run stay as they are.
"""

import time

_STARTED = time.perf_counter()

import contextlib
import json
import math
import os
import sys
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from trainpace.core.errors import Contradiction, TrainpaceError, UserCodeError
from trainpace.core.execution import Execution
from trainpace.core.records import load, save, write_whole
from trainpace.core.worker import end, failure_of
from trainpace.job import noise_scale
from trainpace.measure import (
    DdpNoiseNorms,
    MemoryMeter,
    NoiseNorms,
    StepClock,
    environment,
    set_up_device,
    use_device,
)
from trainpace.run.engines import ENGINES, Engine, import_engine, recompute_blocks
from trainpace.run.job import ONE_RANK, complains_of_a_peer
from trainpace.run.trial import (
    Trial,
    TrialResult,
    check_engine,
    failure_file,
    result_of,
    why_no_noise_scale,
)
from trainpace.run.trial_samples import NextBatch, batches_of
from trainpace.workload import Task, build_task, make_optimizer, optimizer_name

FEWEST_STEPS, MOST_STEPS, FEWEST_NOISE_STEPS = 5, 1000, 12
MOST_BETWEEN_AGREEMENTS = 10
AGREE_EVERY_MS = 500.0
"""Ranks agree whether the time is over now and then, not in every step: it costs an exchange."""


def train(trial: Trial) -> TrialResult:
    """Run the trial as the rank that this process is; the result is rank 0's view."""
    e = trial.execution
    check_engine(trial.engine, e)
    if trial.noise_scale and (why := why_no_noise_scale(trial.engine, e)):
        raise TrainpaceError(why)
    set_up_device(trial.device, e.precision)
    rank, local_rank = _ranks(e)
    if trial.threads_per_process is not None:
        torch.set_num_threads(trial.threads_per_process)
    use_device(trial.device, local_rank)
    import_engine(trial.engine, trial.device)
    meter = MemoryMeter(trial.device)
    torch.manual_seed(trial.seed)
    task = build_task(trial.task)
    task.model.train()
    optimizer = task.optimizer or make_optimizer(e.optimizer, task.model)
    notes = recompute_blocks(task.model) if e.activation_checkpointing == "full" else ()
    engine = ENGINES[trial.engine](e, trial.device, task.model, optimizer)
    next_batch, data_notes = batches_of(trial, task, rank, engine.place)
    torch.manual_seed(trial.seed + 1 + rank)  # dropout differs between ranks
    steps = _Steps(trial, task, engine, next_batch)
    steps.run()
    losses = torch.stack(steps.losses).double() / e.accumulation
    step_ms, data_wait_ms = steps.step_ms, tuple(steps.data_wait_ms)
    noise, noise_notes = steps.noise_scale() if trial.noise_scale else ({}, ())
    if _many_ranks():
        dist.all_reduce(losses)
        losses /= e.world_size
    curve = tuple(losses.tolist())
    bad = next((i for i, loss in enumerate(curve) if not math.isfinite(loss)), None)
    if bad is not None:
        hint = "Lower the learning rate, or try a wider precision."
        raise UserCodeError(f"the loss of {task.name} became {curve[bad]} at step {bad + 1}.", hint)
    peak = meter.peak_gib()[0]
    peak = _of_ranks("largest", -1.0 if peak is None else peak, engine.device)
    versions = {
        name: str(sys.modules[name].__version__)
        for name in ("lightning", "deepspeed")
        if name in sys.modules
    }
    return result_of(
        step_ms,
        e.global_batch,
        "trial",
        data_wait_ms=data_wait_ms,
        losses=curve,
        peak_memory_gib=peak if peak >= 0 else None,
        start_up_s=steps.start_up_s,
        world_size=e.world_size,
        environment=environment(trial.device) | versions,
        noise_scale=noise,
        notes=(*notes, *data_notes, *_optimizer_note(task, trial), *noise_notes),
        loss=task.loss_name,
    )


class _Steps:
    """Steps, the first of them not counted. Times are of whole steps: data, place, forward, backward, exchange, update."""

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
        """Warm up, then as many steps as were asked for, or fit into the time."""
        t, device, steps = self._trial, self._engine.device, self._clock.spans_ms
        last_ms = AGREE_EVERY_MS
        for _ in range(t.warmup_steps):
            last_ms = self._timed(1)
        steps.clear()
        self.data_wait_ms.clear()
        if t.steps is not None:
            while (left := t.steps - len(steps)) > 0:
                self._timed(min(MOST_BETWEEN_AGREEMENTS, left))
            return
        deadline = time.perf_counter() + t.seconds
        over = 0.0
        while len(steps) < MOST_STEPS and (not over or len(steps) < FEWEST_STEPS):
            last_ms = _of_ranks("first", last_ms, device)
            last_ms = self._timed(
                max(1, min(MOST_BETWEEN_AGREEMENTS, int(AGREE_EVERY_MS / last_ms)))
            )
            over = _of_ranks("first", float(time.perf_counter() > deadline), device)

    def noise_scale(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """(samples, low, high (90 %) and steps, as far as they can be told; notes), from as many steps again. They are not timed,
        since the norms cost two passes over the gradients."""
        norms = _norms_of(self._trial, self._engine)
        for _ in range(max(FEWEST_NOISE_STEPS, len(self._clock.spans_ms))):
            self._step(norms)
        try:
            scale = noise_scale(norms.norms())
        except TrainpaceError as error:
            return {}, (str(error),)
        values = {
            "samples": scale.samples,
            "low": scale.low,
            "high": scale.high,
            "steps": float(scale.steps),
        }
        notes = (scale.reason,) if scale.reason else ()
        return {name: value for name, value in values.items() if value is not None}, notes

    def _timed(self, count: int) -> float:
        """Run `count` more steps, wait for the device, which the host runs ahead of, and return the last one's ms."""
        for _ in range(count):
            self._step()
            if len(self.losses) == 1:
                self._clock.wait()
                self.start_up_s = time.perf_counter() - _STARTED
        self._clock.settle()
        return self.step_ms[-1]

    def _step(self, norms: NoiseNorms | None = None) -> None:
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
    """What gathers gradients of a part of the batch beside the whole's: of the first micro-batch (under FSDP2, whose gradients
    are reduced in every one, all ranks'); under DDP without accumulation, of each rank's share."""
    e = trial.execution
    if e.accumulation > 1:
        samples = e.micro_batch * (e.data_parallel_size if trial.engine == "fsdp2" else 1)
        return NoiseNorms(
            engine.model, samples, e.accumulation, e.global_batch, lambda: engine.loss_scale
        )
    # inside of Fabric's module, and of a compiled one
    ddp = next(
        m for m in engine.model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)
    )
    return DdpNoiseNorms(ddp, e.micro_batch)


def _ranks(e: Execution) -> tuple[int, int]:
    """The rank of this process, among all and on its node, by torchrun's environment variables; one that was started alone is
    rank 0 of 1. Raises Contradiction where the number of processes is not the execution's."""
    if "RANK" not in os.environ:
        os.environ.update(ONE_RANK)
    rank, local_rank, world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    if world != e.world_size:
        raise Contradiction(
            f"{world} process{'es were' if world > 1 else ' was'} started for an execution of"
            f" {e.world_size} (nnodes {e.nnodes} x nproc_per_node {e.nproc_per_node}).",
            "Start as many as nnodes x nproc_per_node.",
        )
    return rank, local_rank


def _many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _of_ranks(which: Literal["first", "largest"], value: float, device: torch.device) -> float:
    if not _many_ranks():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    if which == "first":
        dist.broadcast(shared, 0)
    else:
        dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def _optimizer_note(task: Task, trial: Trial) -> tuple[str, ...]:
    own = None if task.optimizer is None else optimizer_name(task.optimizer)
    if own is None or trial.execution.optimizer.partition("_")[0] == own.partition("_")[0]:
        return ()
    return (f"trained with the task's own {own}, not {trial.execution.optimizer}.",)


def main() -> None:
    """Run the trial and end the process, which threads of engines and of users' code would keep or abort."""
    request, result = sys.argv[1:3]
    rank = os.environ.get("RANK", "0")
    try:
        done = train(load(request, Trial))
        if _many_ranks():
            with contextlib.suppress(RuntimeError):  # a rank that has gone already was here
                dist.barrier()
        if rank == "0":
            save(done, result)
    except (Exception, SystemExit) as error:
        answer = failure_of(error)
        # ranks that fail for want of one that failed, or was killed, have nothing to add
        if not (failure_file(result).exists() or complains_of_a_peer(str(error))):
            write_whole(failure_file(result), json.dumps(answer))
        sys.stderr.write(f"trainpace: rank {rank}: {answer['error']} {answer['hint']}\n")
        end(1)
    end()


if __name__ == "__main__":
    main()
