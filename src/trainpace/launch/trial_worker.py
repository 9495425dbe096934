"""``python -m trainpace.launch.trial_worker REQUEST.json RESULT.json``: one rank of a trial.

Under a plain process, torchrun or srun: ranks come from the environment. Rank 0 writes the result as its last act; a rank that
fails writes one sentence beside it (`failure_file`), the first of them counts. The working directory is the one that the
launcher was called from, since a task's file may read relative paths; nothing is written but these two files. A trial calls the
task's function and no more of the user's code, so checkpoints and step counters of a real run stay as they are.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from trainpace.errors import TrainpaceError, UserCodeError  # noqa: E402
from trainpace.launch.logs import complains_of_a_peer  # noqa: E402
from trainpace.launch.trial import Trial, TrialResult  # noqa: E402
from trainpace.outcome import Interval  # noqa: E402
from trainpace.process import failure_of  # noqa: E402
from trainpace.records import load, save, write_whole  # noqa: E402

if TYPE_CHECKING:
    import torch

    from trainpace.launch.engines.engine import Engine
    from trainpace.launch.noise import Norms
    from trainpace.launch.samples import NextBatch
    from trainpace.trace import Task

FEWEST_STEPS, MOST_STEPS, FEWEST_NOISE_STEPS = 5, 1000, 12
MOST_BETWEEN_AGREEMENTS = 10
AGREE_EVERY_MS = 500.0
"""Ranks agree whether the time is over now and then, not in every step: it costs an exchange."""


def failure_file(result: str) -> Path:
    """The file in which a rank says why it failed."""
    return Path(f"{result}.failed")


def train(trial: Trial) -> TrialResult:
    """Run the trial as the rank that this process is; the result is rank 0's view."""
    import torch

    from trainpace.launch import ranks
    from trainpace.launch.engines import check_engine, load_engine
    from trainpace.launch.engines.rules import why_no_noise_scale
    from trainpace.launch.noise import estimate, norms_of
    from trainpace.launch.samples import batches_of
    from trainpace.machine import environment
    from trainpace.measure import MemoryMeter, allow_tf32, check_device
    from trainpace.medians import median, median_interval
    from trainpace.trace import build_task, make_optimizer

    e = trial.execution
    check_engine(trial.engine, e)
    if trial.noise_scale and (why := why_no_noise_scale(trial.engine, e)):
        raise TrainpaceError(why)
    check_device(trial.device, e.precision)
    place = ranks.find_place(e)
    if trial.threads_per_process is not None:
        torch.set_num_threads(trial.threads_per_process)
    if trial.device == "cuda":
        torch.cuda.set_device(place.local_rank)
    allow_tf32(e.precision)
    make_engine = load_engine(trial)
    meter = MemoryMeter(trial.device)
    torch.manual_seed(trial.seed)
    task = build_task(trial.task)
    task.model.train()
    optimizer = task.optimizer or make_optimizer(e.optimizer, task.model)
    engine = make_engine(trial, task.model, optimizer)
    next_batch, notes = batches_of(trial, task, place.rank, engine.place)
    torch.manual_seed(trial.seed + 1 + place.rank)  # dropout differs between ranks
    steps = _Steps(trial, task, engine, next_batch)
    steps.run()
    noise_scale, noise_notes = estimate(steps.gathered(norms_of(trial, engine))) if trial.noise_scale else ({}, ())
    losses = ranks.mean_over_ranks(torch.stack(steps.losses).double() / e.accumulation).tolist()
    _check_losses(losses, task.name)
    peak = ranks.largest(peak if (peak := meter.peak_gib()[0]) is not None else -1.0, engine.device)
    middle = median(steps.step_ms)
    low, high = median_interval(steps.step_ms)
    return TrialResult(
        step_ms=tuple(steps.step_ms),
        data_wait_ms=tuple(steps.data_wait_ms),
        losses=tuple(losses),
        median_ms=middle,
        interval_ms=Interval(
            low=low, high=high, coverage=0.9, basis="order statistics of the counted steps of one trial"
        ),
        samples_per_second=1e3 * e.global_batch / middle,
        peak_memory_gib=peak if peak >= 0 else None,
        start_up_s=steps.start_up_s,
        world_size=place.world_size,
        environment=environment(trial.device) | _versions(),
        noise_scale=noise_scale,
        notes=(*engine.notes, *notes, *_optimizer_note(task, trial), *noise_notes),
    )


class _Steps:
    """Steps, the first of them not counted. Times are of whole steps: data, place, forward, backward, exchange, update."""

    def __init__(self, trial: Trial, task: Task, engine: Engine, next_batch: NextBatch) -> None:
        from trainpace.measure import marks_of

        self._trial, self._task, self._engine = trial, task, engine
        self._next_batch = next_batch
        self._noise: Norms | None = None
        self._marks = marks_of(trial.device)
        self._unsettled: list[tuple[Any, Any, float]] = []
        self.start_up_s = 0.0
        self.step_ms: list[float] = []
        self.data_wait_ms: list[float] = []
        self.losses: list[torch.Tensor] = []

    def run(self) -> None:
        """Warm up, then as many steps as were asked for, or fit into the time."""
        from trainpace.launch.ranks import of_the_first

        t, device = self._trial, self._engine.device
        warm_up_ms = [self._settled(1)[0] for _ in range(t.warmup_steps)]
        self.step_ms.clear()
        self.data_wait_ms.clear()
        if t.steps is not None:
            wanted = t.steps
            while len(self.step_ms) < wanted:
                self._settled(min(MOST_BETWEEN_AGREEMENTS, wanted - len(self.step_ms)))
            return
        last_ms = of_the_first(warm_up_ms[-1] if warm_up_ms else AGREE_EVERY_MS, device)
        end = time.perf_counter() + t.seconds
        over = 0.0
        while len(self.step_ms) < MOST_STEPS and (not over or len(self.step_ms) < FEWEST_STEPS):
            block = self._settled(max(1, min(MOST_BETWEEN_AGREEMENTS, int(AGREE_EVERY_MS / last_ms))))
            last_ms = of_the_first(block[-1], device)
            over = of_the_first(float(time.perf_counter() > end), device)

    def gathered(self, norms: Norms) -> Norms:
        """Run as many steps again, neither timed nor counted in the losses, and gather the norms of their gradients."""
        before = list(self.losses)
        self._noise = norms
        for _ in range(max(FEWEST_NOISE_STEPS, len(self.step_ms))):
            self._step()
        self._noise, self.losses = None, before
        self._unsettled.clear()
        return norms

    def _settled(self, count: int) -> list[float]:
        """Run `count` more steps, and return their ms. Waiting for the device after each would keep the host from running
        ahead."""
        for _ in range(count):
            self._step()
            if len(self.losses) == 1:
                self._marks.wait()
                self.start_up_s = time.perf_counter() - _STARTED
        self._marks.wait()
        for first, second, waited_ms in self._unsettled:
            self.step_ms.append(self._marks.span_ms(first, second))
            self.data_wait_ms.append(waited_ms)
        self._unsettled.clear()
        return self.step_ms[-count:]

    def _step(self) -> None:
        accumulation = self._trial.execution.accumulation
        start, waited, losses = self._marks.now(), 0.0, []
        for i in range(accumulation):
            wait_begins = time.perf_counter()
            batch = self._next_batch()
            waited += time.perf_counter() - wait_begins
            losses.append(
                self._engine.micro_step(self._task.loss, self._engine.place(batch), last=i == accumulation - 1)
            )
            if self._noise is not None and i == 0 < accumulation - 1:
                self._noise.after_first()
        if self._noise is not None:
            self._noise.after_last()
        self._engine.update()
        self._unsettled.append((start, self._marks.now(), 1e3 * waited))
        self.losses.append(losses[0] if accumulation == 1 else sum(losses[1:], losses[0]))


def _check_losses(losses: list[float], name: str) -> None:
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        hint = "Lower the learning rate, or try a wider precision."
        raise UserCodeError(f"the loss of {name} became {losses[bad]} at step {bad + 1}.", hint)


def _optimizer_note(task: Task, trial: Trial) -> tuple[str, ...]:
    own = None if task.optimizer is None else type(task.optimizer).__name__.lower()
    if own is None or trial.execution.optimizer.partition("_")[0] == own:
        return ()
    return (f"trained with the task's own {own}, not {trial.execution.optimizer}.",)


def _versions() -> dict[str, str]:
    return {name: str(module.__version__) for name in ("lightning", "deepspeed")
            if (module := sys.modules.get(name)) is not None}  # fmt: skip


def main() -> None:
    """Run the trial and end the process, which threads of engines and of users' code would keep or abort."""
    request, result = sys.argv[1:3]
    code = 0
    try:
        done = train(load(request, Trial))
        from trainpace.launch.ranks import wait_for_all

        wait_for_all()
        if os.environ.get("RANK", "0") == "0":
            save(done, result)
    except (Exception, SystemExit) as error:
        code = 1
        answer = failure_of(error)
        # ranks that fail for want of one that failed, or was killed, have nothing to add
        if not (failure_file(result).exists() or complains_of_a_peer(str(error))):
            write_whole(failure_file(result), json.dumps(answer))
        sys.stderr.write(f"trainpace: rank {os.environ.get('RANK', '0')}: {answer['error']} {answer['hint']}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
