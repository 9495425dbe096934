"""Interventions: blocks of steps with one cause of time removed, between blocks of plain steps.

Only `trainpace diagnose` uses them: the losses of such a run are meaningless, it writes no checkpoints, and it ends
with the last block. All ranks change at the same step, because they count the same steps.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainpace.watch.inside import crowding, page_faults, rounds, trail
from trainpace.watch.inside.batches import copy_of, length_of, size_of
from trainpace.watch.inside.in_bf16 import PAIRS, InBf16
from trainpace.watch.inside.observers import (
    count_one_step,
    note_optimizers,
    note_rate,
    profile_one_step,
)
from trainpace.watch.inside.recorder import Recorder, now_ns
from trainpace.watch.inside.together import agreed, is_distributed
from trainpace.watch.inside.trail import (
    CHECKPOINT,
    EVALUATION,
    FEW,
    LOADER_START,
    LOGGING,
    TRAINPACE,
    TRIALS,
    Step,
)

PLAIN, SETTLING, CACHED_BATCH, BATCH_ON_DEVICE, NO_SYNC, FEW_SAMPLES, MUTED, FEWER_THREADS, BF16 = (
    range(len(TRIALS))
)
REPLACING = tuple(map(TRIALS.index, trail.REPLACING))
SETTLE_STEPS = 2
COUNTED_STEPS = 4
"""An even number, since every second step may update more than the others."""
COUNTING_SLOWS = 7
"""Times as long as usual that a step may take in which every operator is counted. Measured on one thread: 6.7 for an LSTM cell of
999 calls a sequence with a batch of one and 3.8 with one of 97, 4.3 for 20 linear layers of 64, 2.0 for a small transformer, 1.4
for convolutions. The smaller the operators, the more."""
MOST_SETTLING = 0.5
MOST_FOR_BF16 = 0.3
"""Of the steps that there is time for."""
LOOKING = 0.1
"""Of the time that is left, what the optimizer's variants may take: a slow one would use all of it up."""
LEAST_LOGGING_NS = 100_000
INTERRUPTING = (LOADER_START, CHECKPOINT, EVALUATION, TRAINPACE)
"""Parts that come now and then, and are no part of what a block of steps takes."""


class _RememberedBatch(NamedTuple):
    """A dataset's largest batch of the warm-up, since the last one of an epoch may be smaller."""

    dataset: Any
    batch: Any
    size: int


class Trials:
    """The programme of one process: (trial, steps) blocks, made once the first steps have shown which trials apply."""

    def __init__(self, recorder: Recorder, settings: dict[str, Any]) -> None:
        self.recorder = recorder
        self.block: int = settings["block_steps"]
        self.rounds: int = settings["rounds"]
        self.warm_up: int = settings["warm_up_steps"]
        self.limit_s: float = settings["limit_s"]
        self.budget_s: float | None = settings.get("budget_s")
        """From the first step on; the deadline stands from the start where there is none."""
        self.deadline_ns: float = (
            math.inf if self.budget_s is not None else now_ns() + int(self.limit_s * 1e9)
        )
        self.without: list[str] = settings.get("without", [])
        self.only_steps: bool = settings.get("only_steps", False)
        self.remembered: dict[int, _RememberedBatch] = {}
        self._fetched_from: set[int] = set()
        self._steps_fed: Counter[int] = Counter()
        self.device: Any = None
        self.on_device: dict[int, Any] = {}
        self.checkpoints: set[str] = set()
        self.stock = self.threads = self.fewer_threads = 0
        self.in_bf16 = InBf16(recorder)
        self.programme: list[tuple[int, int, int]] | None = None
        self.round: list[tuple[int, int, int]] = []
        self.last: list[tuple[int, int, int]] = []
        self.rounds_made = 0
        self.block_ns: list[int] = []
        self.means_ms: dict[int, list[float]] = defaultdict(list)
        self.left = self.changes = 0
        self.step_ns = self.logging_ns = 0
        self.counting: Callable[[], None] | None = None
        self.page_faults: int | None = None
        """Of this process up to its second step: the first one takes memory that is kept."""

    def at_step(self, step: Step) -> None:
        if self.counting is not None:
            with contextlib.suppress(Exception):
                self.counting()
            self.counting = None
        took_ns = step.end_ns - step.start_ns
        if (
            not is_distributed() and now_ns() + took_ns // 2 > self.deadline_ns
        ):  # nearer than one more step would end
            end(self.recorder)
        self.paces(step)
        if self.programme is None:
            self._steps_fed.update(self._fetched_from)
            self._fetched_from.clear()
            steps_left = self.warm_up - step.number - 1
            can_count = now_ns() + COUNTING_SLOWS * took_ns < self.deadline_ns
            if 0 < steps_left <= COUNTED_STEPS and can_count and not self.only_steps:
                with contextlib.suppress(Exception):
                    self.counting = count_one_step(self.recorder)
            elif (
                steps_left == COUNTED_STEPS + 1
                and not self.only_steps
                and self.elsewhere() is not None
            ):
                with contextlib.suppress(Exception):
                    self.counting = profile_one_step(self.recorder)
            self.logging_ns += step.parts_ns[LOGGING] if step.number else 0
            if step.number == 1:
                self.page_faults = page_faults.count()
            if step.number:  # the first step does more, and steps that are counted take longer
                self.step_ns = min(self.step_ns or took_ns, took_ns)
            if step.number + 1 >= self.warm_up:
                a_round, last, self.rounds = agreed("plan", self.planned(step.number), self.limit_s)
                self.round, self.last = (
                    [tuple(block) for block in a_round],
                    [tuple(block) for block in last],
                )
                self.programme, self.rounds_made = self.round * self.rounds, self.rounds
                if not self.only_steps:
                    self.note_page_faults(step.number - 1)
                    self.look_around()
                names = [TRIALS[counted_as] for _, counted_as, _ in self.programme + self.last]
                about = {
                    "programme": names,
                    "warm_up_steps": self.warm_up,
                    "fewer_threads": self.fewer_threads,
                }
                self.recorder.trail.note(about)
                self.advance()
            return
        self.left -= 1
        settles_on_few = (
            self.recorder.trial == SETTLING and self.recorder.active_trial == FEW_SAMPLES
        )
        if settles_on_few and self.left == 1 and not self.only_steps:  # a step that is not timed
            with contextlib.suppress(Exception):
                self.counting = count_one_step(self.recorder, "counted_few")
        if self.recorder.trial != SETTLING:
            self.block_ns.append(
                step.end_ns - step.start_ns - sum(step.parts_ns[part] for part in INTERRUPTING)
            )
        if self.left <= 0:
            if self.block_ns:
                self.means_ms[self.recorder.trial].append(statistics.fmean(self.block_ns) / 1e6)
                self.block_ns = []
            self.advance()

    def paces(self, step: Step) -> None:
        """Take the time from the first step on, and fewer steps before the first intervention where they take long."""
        if self.budget_s is None or step.number > 1:
            return
        if step.number == 0:
            self.deadline_ns = step.end_ns + int(self.budget_s * 1e9)
        else:
            step_s = (step.end_ns - step.start_ns) / 1e9
            fewer = rounds.warm_up_steps(self.warm_up, self.budget_s, step_s)
            self.warm_up = agreed("warm-up", fewer, self.limit_s)

    def planned(
        self, steps: int
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], int]:
        """The blocks of a round, those after the last round, and how many rounds there are. A block: (trial, the trial as which
        steps are counted, steps). Settling steps come before each, and before one with data as many more as the loader had
        prefetched."""
        most = max(
            self._steps_fed.values(), default=0
        )  # an evaluation's dataset is not read for every step
        self.remembered = {
            key: batch for key, batch in self.remembered.items() if 2 * self._steps_fed[key] >= most
        }
        self.device = self.elsewhere()
        if "fewer_threads" not in self.without:
            fewer = 0 if self.device is not None else crowding.fewer_threads(self.recorder)
            self.fewer_threads = agreed("threads", fewer, self.limit_s)
        kinds = [NO_SYNC] if is_distributed() else []
        if self.remembered:
            kinds += [CACHED_BATCH] if self.device is None else [CACHED_BATCH, BATCH_ON_DEVICE]
        kinds += [MUTED] if self.logging_ns > LEAST_LOGGING_NS * max(1, steps) else []
        kinds += [FEWER_THREADS] if self.fewer_threads else []
        kinds = [k for k in kinds if TRIALS[k] not in self.without]
        affordable = (
            (self.deadline_ns - now_ns()) / max(1, self.step_ns)
            if self.budget_s is not None
            else math.inf
        )
        if self.settling_of([PLAIN, *kinds]) * rounds.LEAST_ROUNDS > MOST_SETTLING * affordable:
            # a loader's workers have prepared more than there is time to train on: its wait is seen, and not proved
            kinds, self.stock = [kind for kind in kinds if kind not in REPLACING], 0
        few = CACHED_BATCH in kinds and "few_samples" not in self.without
        # last, since a script may not bear them
        bf16 = "bf16" not in self.without and self.device is None and self.in_bf16.may_gain()
        changed = [BF16, PLAIN] * PAIRS if bf16 else []
        last = (
            [FEW_SAMPLES, CACHED_BATCH] * 2
            if few and all(map(_may_be_few, self.remembered.values()))
            else []
        )
        if self.budget_s is not None:
            affordable -= min(
                len(changed) * (SETTLE_STEPS + rounds.LEAST_BLOCK), affordable * MOST_FOR_BF16
            )
            self.block, self.rounds = rounds.fitted(
                affordable, 1 + len(kinds), SETTLE_STEPS + self.stock, self.block, self.rounds
            )
        return (
            self.blocks_of([PLAIN, *kinds]),
            self.blocks_of(last) + self.blocks_of(changed),
            self.rounds,
        )

    def settling_of(self, kinds: Sequence[int]) -> int:
        return sum(
            steps for _, counted_as, steps in self.blocks_of(kinds) if counted_as == SETTLING
        )

    def blocks_of(self, kinds: Sequence[int]) -> list[tuple[int, int, int]]:
        blocks: list[tuple[int, int, int]] = []
        stocked = any(kind in REPLACING for kind in kinds)
        for i, kind in enumerate(kinds):
            settling = SETTLE_STEPS + (
                self.stock if kind not in REPLACING and (stocked or not i) else 0
            )
            blocks += [(kind, SETTLING, settling), (kind, kind, self.block)]
        return blocks

    def has_another_round(self) -> bool:
        """Whether noise leaves it open what an intervention saves, and there is time to look again."""
        if self.budget_s is None or self.rounds_made >= rounds.MOST_ROUNDS * self.rounds:
            return False
        steps = sum(count for *_, count in self.round + self.last)
        tried = {kind for kind, counted_as, _ in self.round if counted_as not in (SETTLING, PLAIN)}
        open_ = [
            kind for kind in tried if not rounds.settled(self.means_ms[PLAIN], self.means_ms[kind])
        ]
        return bool(open_) and now_ns() + steps * self.step_ns < self.deadline_ns

    def note_page_faults(self, steps: int) -> None:
        """Those of a step, before large tensors of ours are freed: glibc keeps freed memory of a size that it has seen freed."""
        if self.page_faults is not None and (now := page_faults.count()) is not None:
            self.recorder.trail.note({"page_faults": (now - self.page_faults) / steps})

    def look_around(self) -> None:
        """Time the best rates of the device and the optimizer, while there are gradients."""
        thread, self.recorder.thread = (
            self.recorder.thread,
            -1,
        )  # these steps are none of the script's
        with contextlib.suppress(Exception):
            note_rate(self.recorder)
        with contextlib.suppress(Exception):
            self.recorder.trail.note({"page_fault_ns": page_faults.cost_ns() or 0.0})
        with contextlib.suppress(Exception):
            note_optimizers(self.recorder, (self.deadline_ns - now_ns()) * LOOKING / 1e9)
        self.recorder.thread = thread
        self.recorder.leave_out()

    def elsewhere(self) -> Any:
        """The training device, None where it is the host."""
        with contextlib.suppress(Exception):
            device = self.recorder.optimizer().param_groups[0]["params"][0].device
            return None if device.type == "cpu" else device
        return None

    def advance(self) -> None:
        if not self.programme:
            if self.budget_s is not None and agreed(
                f"more-{self.rounds_made}", self.has_another_round(), self.limit_s
            ):
                self.programme, self.rounds_made = list(self.round), self.rounds_made + 1
            else:
                self.programme, self.last, self.budget_s = self.last, [], None
        self.changes += 1
        if not self.programme or agreed(
            f"end-{self.changes}", now_ns() > self.deadline_ns, self.limit_s
        ):
            end(self.recorder)
            return
        before = self.recorder.active_trial
        self.recorder.active_trial, self.recorder.trial, self.left = self.programme.pop(0)
        self.recorder.calls_as = self.in_bf16.calls if self.recorder.active_trial == BF16 else None
        if self.recorder.trial == BF16 and not self.in_bf16.applies:
            self.recorder.trial = SETTLING
        if before != FEWER_THREADS == self.recorder.active_trial:
            self.threads = crowding.own_threads()
            crowding.computes_with(min(self.threads, self.fewer_threads))
        elif before == FEWER_THREADS != self.recorder.active_trial:
            crowding.computes_with(self.threads)

    def keep(self, batch: Any, iterator: Any) -> None:
        key, size = id(iterator._dataset), iterator._trainpace_size(batch)
        self._fetched_from.add(key)
        if key not in self.remembered or size >= self.remembered[key].size:
            self.remembered[key] = _RememberedBatch(iterator._dataset, copy_of(batch, -1, -1), size)
        if iterator._num_workers:
            self.stock = max(
                self.stock, int(iterator._num_workers * (iterator._prefetch_factor or 0))
            )

    def gives(self, iterator: Any) -> bool:
        """Whether this iterator is to give a remembered batch. Raises StopIteration after as many as it has of its own, so that
        an evaluation in such a block ends. Its own are not used up by that: a short script has steps for all interventions.
        """
        if (
            self.recorder.active_trial not in REPLACING
            or id(iterator._dataset) not in self.remembered
        ):
            return False
        if iterator._trainpace_length is None:
            length = length_of(iterator)
            iterator._trainpace_length = sys.maxsize if length is None else length
        if iterator._trainpace_given >= iterator._trainpace_length:
            iterator._trainpace_given = 0
            raise StopIteration
        iterator._trainpace_given += 1
        return True


def _may_be_few(remembered: _RememberedBatch) -> bool:
    with contextlib.suppress(Exception):
        return (
            remembered.size >= 4 * FEW
            and size_of(copy_of(remembered.batch, remembered.size, FEW)) == FEW
        )
    return False


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """The requested trials from the command's environment; empty where there are none."""
    settings: dict[str, Any] = json.loads(environment.get("TRAINPACE_TRIALS") or "{}")
    return settings


def end(recorder: Recorder, with_workload: bool = False) -> None:
    """Exit without the script's own ending: all ranks have come this far, or soon will. `with_workload`: trace its model."""
    try:
        recorder.trail.note({"trials": "complete", "ended": now_ns()})
        recorder.before_end()
        recorder.trail.flush()
        if with_workload:
            recorder.thread = -1  # the trace's calls are none of the script's
            recorder.capture.attempt(recorder.capture.write, os.environ["TRAINPACE_WATCH"])
            recorder.trail.flush()
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


# ---- the batch


def batch(recorder: Recorder, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
    """The loader's next batch, or under one of the recorder's trials the remembered one."""
    trials = recorder.trials
    if trials.gives(iterator):
        key = id(iterator._dataset)
        _, remembered, size = trials.remembered[key]
        if recorder.active_trial == BATCH_ON_DEVICE:
            if key not in trials.on_device:
                trials.on_device[key] = copy_of(remembered, size, size, trials.device)
            remembered = trials.on_device[key]
        return copy_of(remembered, size, FEW if recorder.active_trial == FEW_SAMPLES else size)
    fetched = fetch(iterator)
    if trials.programme is None:
        with contextlib.suppress(
            Exception
        ):  # a batch of the user's own kind may not bear being copied
            trials.keep(fetched, iterator)
    return fetched
