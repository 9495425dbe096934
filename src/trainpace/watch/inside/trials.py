"""Interventions: blocks of steps without one suspected cause, between blocks of plain steps.

Only `trainpace diagnose` uses them. The losses of such a run are meaningless. The run ends with the
last block, and its checkpoints are removed. All ranks switch at the same step, because they count
the same steps.
"""

import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainpace.watch.inside import observers
from trainpace.watch.inside.event_log import (
    BATCH_ON_DEVICE,
    CACHED_BATCH,
    CHECKPOINT,
    EVALUATION,
    FEW,
    FEW_SAMPLES,
    FEWER_THREADS,
    LOADER_START,
    LOGGING,
    MUTED,
    NO_SYNC,
    PLAIN,
    REPLACING,
    SETTLING,
    TRAINPACE,
    TRIALS,
    Step,
)
from trainpace.watch.inside.loaders import copy_of, length_of, size_of
from trainpace.watch.inside.ranks import agreed, is_distributed
from trainpace.watch.inside.recorder import Recorder, around, get_ident, now_ns

SETTLE_STEPS = 2
"""Settling steps before each block."""
FIRST_ALONE = 2
"""First step after which a step may be left alone. Earlier steps allocate and are captured."""
COUNTED_STEPS = 4
"""Number of steps whose operators are counted.

It is even, since every second step may make more updates.
"""
COUNTING_SLOWS = 7
"""Largest slowdown of a step whose operators are counted.

Measured on one thread: 6.7 for an LSTM cell of 999 calls per sequence with a batch of one and 3.8
with one of 97, 4.3 for 20 linear layers of 64, 2.0 for a small transformer, 1.4 for convolutions.
Smaller operators are slowed down more.
"""
MOST_SETTLING = 0.5
"""Largest share of the affordable steps that may be settling steps."""
LOOKING = 0.1
"""Share of the remaining time for timing the optimizer's implementations, which may be slow."""
LEAST_LOGGING_NS = 100_000
"""Least mean logging time per step, in ns, for the trial `muted`."""
WATCHED_STEPS, WATCHED_SHARE = 250, 0.2
"""Steps of the script that are watched in all, and the largest share of the budget for the rest.

The interventions may need fewer steps. Work that comes once in 100 updates is then seen twice in
plain steps at the end.
"""
INTERRUPTING = (LOADER_START, CHECKPOINT, EVALUATION, TRAINPACE)
"""Occasional parts. They do not count in the time of a block of steps."""


class Block(NamedTuple):
    """Consecutive steps under one trial. For settling steps, `counted_as` is `SETTLING`."""

    trial: int
    counted_as: int
    steps: int


class RememberedBatch(NamedTuple):
    """Largest batch of a dataset in the warm-up. The last batch of an epoch is smaller."""

    dataset: Any
    batch: Any
    size: int


class Trials:
    """Blocks of one process, planned after the first steps have shown which trials apply."""

    def __init__(self, recorder: Recorder, settings: dict[str, Any]) -> None:
        self.recorder = recorder
        self.block: int = settings["block_steps"]
        self.rounds: int = settings["rounds"]
        self.warm_up: int = settings["warm_up_steps"]
        self.limit_s: float = settings["limit_s"]
        self.budget_s: float | None = settings.get("budget_s")
        """Seconds for all trials, counted from the first step.

        If None, `limit_s` counts from the start of the recorder.
        """
        self.watching_s = WATCHED_SHARE * (self.budget_s or 0.0)
        self.deadline_ns: float = (
            math.inf if self.budget_s is not None else now_ns() + int(self.limit_s * 1e9)
        )
        self.without: list[str] = settings.get("without", [])
        self.only_steps: bool = settings.get("only_steps", False)
        self.remembered: dict[int, RememberedBatch] = {}
        self._fetched_from: set[int] = set()
        self._steps_fed: Counter[int] = Counter()
        self.device: Any = None
        self.on_device: dict[int, Any] = {}
        self.checkpoints: set[str] = set()
        self.stock = self.threads = self.fewer_threads = 0
        self.programme: list[Block] | None = None
        self.round: list[Block] = []
        self.last: list[Block] = []
        self.rounds_made = 0
        self.block_ns: list[int] = []
        self.means_ms: dict[int, list[float]] = defaultdict(list)
        self.left = self.changes = 0
        self.step_ns = self.logging_ns = 0
        self.counting: Callable[[], None] | None = None
        self.page_faults = observers.PageFaults(recorder)

    # ---- steps

    def at_step(self, step: Step) -> None:
        """Handle the end of a step, and count page faults in steps that are left alone."""
        self.page_faults.ends_step()
        self.handle(step)
        plain = self.recorder.trial == PLAIN == self.recorder.active_trial
        if step.number >= FIRST_ALONE and plain and self.counting is None and not self.only_steps:
            self.page_faults.begins_step()

    def handle(self, step: Step) -> None:
        """Observe the warm-up, or count the step in its block."""
        if self.counting is not None:
            with contextlib.suppress(Exception):
                self.counting()
            self.counting = None
        took_ns = step.end_ns - step.start_ns
        # End now if this is closer to the deadline than the end of one more step.
        if not is_distributed() and now_ns() + took_ns // 2 > self.deadline_ns:
            end(self.recorder)
        self.adapt_to_pace(step)
        if self.programme is not None:
            self.count_in_block(step)
            return
        self.observe_warm_up(step, took_ns)
        if step.number + 1 >= self.warm_up:
            self.begin_programme(step.number)

    def adapt_to_pace(self, step: Step) -> None:
        """Start the budget after the first step, and shorten the warm-up if steps are long."""
        if self.budget_s is None or step.number > 1:
            return
        if step.number == 0:
            self.deadline_ns = step.end_ns + int(self.budget_s * 1e9)
            return
        fewer = warm_up_steps(self.warm_up, self.budget_s, (step.end_ns - step.start_ns) / 1e9)
        self.warm_up = agreed("warm-up", fewer, self.limit_s)

    def observe_warm_up(self, step: Step, took_ns: int) -> None:
        """Learn from a step before the first intervention, and observe the next step closely."""
        self._steps_fed.update(self._fetched_from)
        self._fetched_from.clear()
        if not self.only_steps:
            steps_left = self.warm_up - step.number - 1
            can_count = now_ns() + COUNTING_SLOWS * took_ns < self.deadline_ns
            with contextlib.suppress(Exception):
                if 0 < steps_left <= COUNTED_STEPS and can_count:
                    self.counting = observers.count_one_step(self.recorder)
                elif steps_left == COUNTED_STEPS + 1 and self.accelerator() is not None:
                    self.counting = observers.profile_one_step(self.recorder)
        if step.number:  # The first step does more, and steps that are counted take longer.
            self.logging_ns += step.parts_ns[LOGGING]
            self.step_ns = min(self.step_ns or took_ns, took_ns)

    def begin_programme(self, number: int) -> None:
        """Agree on the blocks with the other ranks, and begin the first block."""
        a_round, last, self.rounds = agreed("plan", self.planned(number), self.limit_s)
        self.round, self.last = ([Block(*block) for block in blocks] for blocks in (a_round, last))
        self.programme, self.rounds_made = self.round * self.rounds, self.rounds
        if not self.only_steps:
            self.measure_alone()
        self.recorder.log.note(
            programme=[TRIALS[block.counted_as] for block in self.programme + self.last],
            warm_up_steps=self.warm_up,
            fewer_threads=self.fewer_threads,
        )
        self.advance()

    def measure_alone(self) -> None:
        """Measure the best rates of the device and the optimizer, while there are gradients.

        Page faults are logged first, because after freeing memory of some size, glibc keeps later
        memory of that size.
        """
        recorder = self.recorder
        self.page_faults.note()
        thread, recorder.thread = recorder.thread, -1  # These steps are not the script's.
        for measure in (
            lambda: observers.note_rate(recorder),
            lambda: recorder.log.note(page_fault_ns=observers.page_fault_ns() or 0.0),
            lambda: observers.note_optimizers(
                recorder, (self.deadline_ns - now_ns()) * LOOKING / 1e9
            ),
        ):
            with contextlib.suppress(Exception):
                measure()
        recorder.thread = thread
        recorder.restart_step()

    def count_in_block(self, step: Step) -> None:
        """Count a step of the current block, and begin the next block after its last step."""
        self.left -= 1
        trial = self.recorder.trial
        if trial != SETTLING:
            interrupted_ns = sum(step.parts_ns[part] for part in INTERRUPTING)
            self.block_ns.append(step.end_ns - step.start_ns - interrupted_ns)
        elif self.recorder.active_trial == FEW_SAMPLES and self.left == 1 and not self.only_steps:
            # Operators are counted in a step that is not timed.
            with contextlib.suppress(Exception):
                self.counting = observers.count_one_step(self.recorder, "counted_few")
        if self.left <= 0:
            if self.block_ns:
                self.means_ms[trial].append(statistics.fmean(self.block_ns) / 1e6)
                self.block_ns = []
            self.page_faults.note()
            self.advance()

    # ---- the plan

    def planned(self, steps: int) -> tuple[list[Block], list[Block], int]:
        """Return the blocks of a round, the blocks after the last round, and the number of rounds.

        Settling steps come before each block. If a block reads from the loader, there are
        additional settling steps, as many as the loader had prefetched batches.
        """
        self._forget_evaluations()
        self.device = self.accelerator()
        if "fewer_threads" not in self.without:
            fewer = 0 if self.device is not None else observers.fewer_threads(self.recorder)
            self.fewer_threads = agreed("threads", fewer, self.limit_s)
        kinds = [kind for kind in self.applicable(steps) if TRIALS[kind] not in self.without]
        affordable = self._affordable_steps()
        if self._settling_steps([PLAIN, *kinds]) * LEAST_ROUNDS > MOST_SETTLING * affordable:
            # The workers have prefetched more batches than there is time to train on. Without these
            # trials, the wait for data is visible but not proved.
            kinds, self.stock = [kind for kind in kinds if kind not in REPLACING], 0
        few = [FEW_SAMPLES, CACHED_BATCH] * 2 if self._may_be_few(kinds) else []
        if self.budget_s is not None:
            self.block, self.rounds = fitted(
                affordable, 1 + len(kinds), SETTLE_STEPS + self.stock, self.block, self.rounds
            )
        return self.blocks_of([PLAIN, *kinds]), self.blocks_of(few), self.rounds

    def _affordable_steps(self) -> float:
        if self.budget_s is None:
            return math.inf
        return (self.deadline_ns - now_ns()) / max(1, self.step_ns)

    def _settling_steps(self, kinds: Sequence[int]) -> int:
        return sum(b.steps for b in self.blocks_of(kinds) if b.counted_as == SETTLING)

    def _forget_evaluations(self) -> None:
        """Forget batches of an evaluation's dataset, which is not read in every step."""
        most = max(self._steps_fed.values(), default=0)
        self.remembered = {
            key: batch for key, batch in self.remembered.items() if 2 * self._steps_fed[key] >= most
        }

    def applicable(self, steps: int) -> Iterator[int]:
        """Yield the trials that can remove something from the steps of this training."""
        if is_distributed():
            yield NO_SYNC
        if self.remembered:
            yield CACHED_BATCH
            if self.device is not None:
                yield BATCH_ON_DEVICE
        if self.logging_ns > LEAST_LOGGING_NS * max(1, steps):
            yield MUTED
        if self.fewer_threads:
            yield FEWER_THREADS

    def _may_be_few(self, kinds: Sequence[int]) -> bool:
        """Return True if the trial with few samples per batch is possible."""
        if CACHED_BATCH not in kinds or "few_samples" in self.without:
            return False
        return all(map(_may_be_few, self.remembered.values()))

    def blocks_of(self, kinds: Sequence[int]) -> list[Block]:
        """Return the blocks for these trials, each after its settling steps."""
        blocks: list[Block] = []
        stocked = any(kind in REPLACING for kind in kinds)
        for i, kind in enumerate(kinds):
            reads = kind not in REPLACING and (stocked or not i)
            blocks.append(Block(kind, SETTLING, SETTLE_STEPS + (self.stock if reads else 0)))
            blocks.append(Block(kind, kind, self.block))
        return blocks

    def needs_another_round(self) -> bool:
        """Return True if noise hides a saving, and there is time for another round."""
        if self.budget_s is None or self.rounds_made >= MOST_ROUNDS * self.rounds:
            return False
        tried = {block.counted_as for block in self.round} - {SETTLING, PLAIN}
        steps = sum(block.steps for block in self.round + self.last)
        return now_ns() + steps * self.step_ns < self.deadline_ns and not all(
            settled(self.means_ms[PLAIN], self.means_ms[kind]) for kind in tried
        )

    def advance(self) -> None:
        """Begin the next block, or end the script after the last one."""
        if not self.programme:
            name = f"more-{self.rounds_made}"
            if self.budget_s is not None and agreed(name, self.needs_another_round(), self.limit_s):
                self.programme, self.rounds_made = list(self.round), self.rounds_made + 1
            else:
                self.programme, self.budget_s = self.last or self.watching(), None
                self.last = []
        self.changes += 1
        is_late = now_ns() > self.deadline_ns
        if not self.programme or agreed(f"end-{self.changes}", is_late, self.limit_s):
            end(self.recorder)
            return
        self._switch_to(self.programme.pop(0))

    def watching(self) -> list[Block]:
        """Return a last block of plain steps, for work that comes seldom."""
        if not self.watching_s:
            return []
        affordable, self.watching_s = self.watching_s * 1e9 / max(1, self.step_ns), 0.0
        steps = min(WATCHED_STEPS - self.recorder.steps, math.floor(affordable))
        steps = agreed("watching", steps, self.limit_s)
        if steps < SETTLE_STEPS:
            return []
        self.recorder.log.note(trials="complete")
        return [Block(PLAIN, SETTLING, SETTLE_STEPS), Block(PLAIN, PLAIN, steps)]

    def _switch_to(self, block: Block) -> None:
        recorder, before = self.recorder, self.recorder.active_trial
        recorder.active_trial, recorder.trial, self.left = block
        if before != FEWER_THREADS == block.trial:
            self.threads = observers.own_threads()
            observers.computes_with(min(self.threads, self.fewer_threads))
        elif before == FEWER_THREADS != block.trial:
            observers.computes_with(self.threads)

    def accelerator(self) -> Any:
        """Return the training device, or None if it is the CPU."""
        with contextlib.suppress(Exception):
            device = self.recorder.optimizer().param_groups[0]["params"][0].device
            return None if device.type == "cpu" else device
        return None

    # ---- batches

    def fetched(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """Return the loader's next batch, or the remembered batch if the trial replaces it."""
        if not self.replaces(iterator):
            batch = fetch(iterator)
            if self.programme is None:
                # A batch of the user's own class may not be copyable.
                with contextlib.suppress(Exception):
                    self.remember(batch, iterator)
            return batch
        key, trial = id(iterator._dataset), self.recorder.active_trial
        _, batch, size = self.remembered[key]
        if trial == BATCH_ON_DEVICE:
            if key not in self.on_device:
                self.on_device[key] = copy_of(batch, size, size, self.device)
            batch = self.on_device[key]
        return copy_of(batch, size, FEW if trial == FEW_SAMPLES else size)

    def remember(self, batch: Any, iterator: Any) -> None:
        """Keep a copy of the largest batch of each dataset, and note how far workers prefetch."""
        key, size = id(iterator._dataset), iterator._trainpace_size(batch)
        self._fetched_from.add(key)
        if key not in self.remembered or size >= self.remembered[key].size:
            self.remembered[key] = RememberedBatch(iterator._dataset, copy_of(batch, -1, -1), size)
        if workers := iterator._num_workers:
            self.stock = max(self.stock, int(workers * (iterator._prefetch_factor or 0)))

    def replaces(self, iterator: Any) -> bool:
        """Return True if the iterator must return a remembered batch.

        Raises StopIteration after as many batches as the iterator has, so that an evaluation in
        such a block ends. The iterator's own batches are not used up. Thus a short script has
        enough steps for all interventions.
        """
        key = id(iterator._dataset)
        if self.recorder.active_trial not in REPLACING or key not in self.remembered:
            return False
        if iterator._trainpace_length is None:
            length = length_of(iterator)
            iterator._trainpace_length = sys.maxsize if length is None else length
        if iterator._trainpace_given >= iterator._trainpace_length:
            iterator._trainpace_given = 0
            raise StopIteration
        iterator._trainpace_given += 1
        return True


def _may_be_few(remembered: RememberedBatch) -> bool:
    with contextlib.suppress(Exception):
        few = copy_of(remembered.batch, remembered.size, FEW)
        return remembered.size >= 4 * FEW and size_of(few) == FEW
    return False


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the requested trials from the command's environment. Empty if there are none."""
    settings: dict[str, Any] = json.loads(environment.get("TRAINPACE_TRIALS") or "{}")
    return settings


def end(recorder: Recorder, with_workload: bool = False) -> None:
    """Exit without the script's own ending. All ranks have reached this step, or will soon.

    Args:
        recorder: The recorder of this process.
        with_workload: Trace the script's model first.
    """
    try:
        recorder.log.note(trials="complete", ended=now_ns())
        recorder.before_end()
        recorder.log.flush()
        if with_workload:
            recorder.write_workload()
        with contextlib.suppress(Exception):
            if is_distributed():
                sys.modules["torch.distributed"].barrier()
                time.sleep(0.2)
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


# ---- the number of rounds, and of steps per block

LEAST_BLOCK, LEAST_ROUNDS = 2, 2
"""Least number of steps per block and of rounds. Below it, a difference proves nothing."""
LEAST_WARM_UP = 3
"""Least number of steps before the first intervention."""
WARM_UP_SHARE = 0.25
"""Share of the budget for the steps before the first intervention."""
MOST_ROUNDS = 4
"""Largest number of rounds, as a multiple of the requested rounds."""
PRECISE = 0.03
"""Uncertainty, as a share of a step, below which "no time saved" is a valid result."""
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
"""Student's t, one-sided 95%, by degrees of freedom from 1.

It is listed here because the script's environment may lack the packages that `core.stats` needs.
"""


def warm_up_steps(asked: int, budget_s: float, step_s: float) -> int:
    """Return the number of steps before the first intervention.

    It is smaller than `asked` if steps are long.
    """
    affordable = math.floor(WARM_UP_SHARE * budget_s / step_s) if step_s > 0 else asked
    return max(LEAST_WARM_UP, min(asked, affordable))


def fitted(
    steps: float, blocks_per_round: int, settling: int, block: int, rounds: int
) -> tuple[int, int]:
    """Return (steps per block, rounds) that fit into `steps`, at most the requested numbers.

    Blocks get shorter before rounds get fewer. The minimum values are `LEAST_BLOCK` and
    `LEAST_ROUNDS`.

    Args:
        steps: Affordable number of steps.
        blocks_per_round: Number of blocks in a round.
        settling: Settling steps before each block.
        block: Requested steps per block.
        rounds: Requested rounds.
    """
    for fewer in range(rounds, 0, -1):
        each = math.floor(steps / (fewer * blocks_per_round)) - settling
        if each >= LEAST_BLOCK or fewer <= min(LEAST_ROUNDS, rounds):
            return max(LEAST_BLOCK, min(block, each)), fewer
    return block, rounds


def settled(plain_ms: Sequence[float], without_ms: Sequence[float]) -> bool:
    """Return True if pairs of blocks show whether an intervention saves time.

    The 90% interval of their difference must be above 0, or narrow.
    """
    saved = [a - b for a, b in zip(plain_ms, without_ms, strict=False)]
    if len(saved) < LEAST_ROUNDS:
        return False
    t = T_95[min(len(saved) - 1, len(T_95)) - 1]
    half = t * statistics.stdev(saved) / math.sqrt(len(saved))
    return statistics.fmean(saved) > half or half <= PRECISE * statistics.fmean(plain_ms)


# ---- functions that trials skip


class _SkippedCollective:
    def wait(self, *args: Any) -> bool:
        return True

    is_completed = wait


def skips_collective(recorder: Recorder) -> Callable[..., Any]:
    """Skip a collective of large float tensors under `no_sync`."""

    def act(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial != NO_SYNC or not _is_bulk(args, kwargs):
            return function(*args, **kwargs)
        with contextlib.suppress(Exception):
            _fill(function.__name__, args, kwargs)
        is_async = kwargs.get("async_op") or (args and args[-1] is True)
        return _SkippedCollective() if is_async else None

    return act


def _fill(name: str, args: Any, kwargs: Any) -> None:
    """Fill the output with ordinary numbers. Uninitialised memory may hold slow denormals."""
    both: Any = (*args, *kwargs.values(), None)
    output, given = both[0], both[1]
    if "gather" in name and hasattr(output, "view"):
        copies = output.numel() // given.numel()
        output.view(-1, given.numel()).copy_(given.reshape(1, -1).expand(copies, -1))
    elif "gather" in name:
        for part in output:
            part.copy_(given)
    elif "scatter" in name and hasattr(given, "view"):
        output.view(-1).copy_(given.reshape(-1, output.numel())[0])
    elif "scatter" in name:
        output.copy_(given[0])


def _is_bulk(args: Any, kwargs: Any) -> bool:
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, list) and value else value
        if hasattr(first, "is_floating_point"):
            return bool(first.is_floating_point() and first.numel() > 1024)
    return False


def unsynchronised(recorder: Recorder) -> Callable[..., Any]:
    """Keep DistributedDataParallel.forward from synchronizing the next backward pass."""

    def act(forward: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial != NO_SYNC:
            if not module.require_backward_grad_sync and not recorder.skips_sync:
                recorder.skips_sync = True
                recorder.log.note(skips_sync=True)
            return forward(module, *args, **kwargs)
        before = module.require_backward_grad_sync, module.require_forward_param_sync
        module.require_backward_grad_sync = module.require_forward_param_sync = False
        try:
            return forward(module, *args, **kwargs)
        finally:
            module.require_backward_grad_sync, module.require_forward_param_sync = before

    return act


def charges_output(recorder: Recorder, name: str) -> Callable[..., Any]:
    """Charge an output function to logging. Under `muted`, the training thread skips it."""

    def act(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == MUTED and get_ident() == recorder.thread:
            return None
        return recorder.charged(LOGGING, name, function, *args, **kwargs)

    return act


def steps_beyond(module: Any, recorder: Recorder) -> None:
    """Let OneCycleLR stay at its end under trials.

    Repeated batches make more steps than the script has planned, and OneCycleLR would raise an
    error.
    """

    def act(step: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_over = scheduler.last_epoch >= scheduler.total_steps
        return None if is_over else step(scheduler, *args, **kwargs)

    if recorder.trials is not None:
        around(module.OneCycleLR, "step", act)
