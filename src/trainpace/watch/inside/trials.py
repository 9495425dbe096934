"""Interventions: blocks of steps with one cause of time removed, between blocks of plain steps."""

import contextlib
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from trainpace.watch.inside import event_log, observers
from trainpace.watch.inside.event_log import (
    CHECKPOINT,
    EVALUATION,
    FEW,
    LOADER_START,
    LOGGING,
    OF_TRIAL,
    TRAINPACE,
    TRIALS,
    Step,
)
from trainpace.watch.inside.loaders import copy_of, length_of, size_of
from trainpace.watch.inside.observers import (
    count_one_step,
    matmul_rate_gflops,
    note_optimizers,
    note_rate,
    profile_one_step,
)
from trainpace.watch.inside.ranks import agreed, is_distributed, process_group
from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns

PLAIN, SETTLING, CACHED_BATCH, BATCH_ON_DEVICE, NO_SYNC, FEW_SAMPLES, MUTED, FEWER_THREADS, BF16 = (
    range(len(TRIALS))
)
REPLACING = tuple(map(TRIALS.index, event_log.REPLACING))
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
                self.page_faults = observers.count()
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
                self.recorder.log.note(about)
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
            fewer = warm_up_steps(self.warm_up, self.budget_s, step_s)
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
            fewer = 0 if self.device is not None else observers.fewer_threads(self.recorder)
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
        if self.settling_of([PLAIN, *kinds]) * LEAST_ROUNDS > MOST_SETTLING * affordable:
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
                len(changed) * (SETTLE_STEPS + LEAST_BLOCK), affordable * MOST_FOR_BF16
            )
            self.block, self.rounds = fitted(
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
        if self.budget_s is None or self.rounds_made >= MOST_ROUNDS * self.rounds:
            return False
        steps = sum(count for *_, count in self.round + self.last)
        tried = {kind for kind, counted_as, _ in self.round if counted_as not in (SETTLING, PLAIN)}
        open_ = [kind for kind in tried if not settled(self.means_ms[PLAIN], self.means_ms[kind])]
        return bool(open_) and now_ns() + steps * self.step_ns < self.deadline_ns

    def note_page_faults(self, steps: int) -> None:
        """Those of a step, before large tensors of ours are freed: glibc keeps freed memory of a size that it has seen freed."""
        if self.page_faults is not None and (now := observers.count()) is not None:
            self.recorder.log.note({"page_faults": (now - self.page_faults) / steps})

    def look_around(self) -> None:
        """Time the best rates of the device and the optimizer, while there are gradients."""
        thread, self.recorder.thread = (
            self.recorder.thread,
            -1,
        )  # these steps are none of the script's
        with contextlib.suppress(Exception):
            note_rate(self.recorder)
        with contextlib.suppress(Exception):
            self.recorder.log.note({"page_fault_ns": observers.cost_ns() or 0.0})
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
            self.threads = observers.own_threads()
            observers.computes_with(min(self.threads, self.fewer_threads))
        elif before == FEWER_THREADS != self.recorder.active_trial:
            observers.computes_with(self.threads)

    def keep(self, batch: Any, iterator: Any) -> None:
        key, size = id(iterator._dataset), iterator._trainpace_size(batch)
        self._fetched_from.add(key)
        if key not in self.remembered or size >= self.remembered[key].size:
            self.remembered[key] = _RememberedBatch(iterator._dataset, copy_of(batch, -1, -1), size)
        if iterator._num_workers:
            self.stock = max(
                self.stock, int(iterator._num_workers * (iterator._prefetch_factor or 0))
            )

    def fetched(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """Return the loader's next batch, or the remembered one if the current trial replaces it."""
        if not self.gives(iterator):
            batch = fetch(iterator)
            if self.programme is None:
                with contextlib.suppress(
                    Exception
                ):  # the user's own kind of batch may not be copyable
                    self.keep(batch, iterator)
            return batch
        key, trial = id(iterator._dataset), self.recorder.active_trial
        _, batch, size = self.remembered[key]
        if trial == BATCH_ON_DEVICE:
            if key not in self.on_device:
                self.on_device[key] = copy_of(batch, size, size, self.device)
            batch = self.on_device[key]
        return copy_of(batch, size, FEW if trial == FEW_SAMPLES else size)

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
        recorder.log.note({"trials": "complete", "ended": now_ns()})
        recorder.before_end()
        recorder.log.flush()
        if with_workload:
            recorder.thread = -1  # the trace's calls are none of the script's
            recorder.capture.attempt(recorder.capture.write, os.environ["TRAINPACE_WATCH"])
            recorder.log.flush()
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


LEAST_BLOCK, LEAST_ROUNDS = 2, 2
"""Steps of a block, and rounds, below which a difference proves nothing."""
LEAST_WARM_UP = 3
WARM_UP_SHARE = 0.25
"""Of the time that interventions have, for the steps before them."""
MOST_ROUNDS = 4
"""Times as many as asked for, where noise leaves it open what an intervention saves."""
PRECISE = 0.03
"""Share of a step: where that much could have been told from noise, it is settled also that a cause takes no time."""
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
"""Student's t, one-sided 95 %, by degrees of freedom from 1; packages that know it may be missing where this runs."""


def warm_up_steps(asked: int, budget_s: float, step_s: float) -> int:
    """Steps before the first intervention: fewer than asked where each takes long."""
    affordable = math.floor(WARM_UP_SHARE * budget_s / step_s) if step_s > 0 else asked
    return max(LEAST_WARM_UP, min(asked, affordable))


def fitted(
    steps: float, blocks_a_round: int, settling: int, block: int, rounds: int
) -> tuple[int, int]:
    """(steps of a block, rounds) at most as asked for that `steps` suffice for. Blocks get shorter before rounds get fewer."""
    for fewer in range(rounds, 0, -1):
        each = math.floor(steps / (fewer * blocks_a_round)) - settling
        if each >= LEAST_BLOCK or fewer <= min(LEAST_ROUNDS, rounds):
            return max(LEAST_BLOCK, min(block, each)), fewer
    return block, rounds


def settled(plain_ms: Sequence[float], without_ms: Sequence[float]) -> bool:
    """Whether pairs of blocks tell if an intervention saves time: their difference's 90 % interval lies above 0, or is narrow."""
    saved = [a - b for a, b in zip(plain_ms, without_ms, strict=False)]
    if len(saved) < LEAST_ROUNDS:
        return False
    half = T_95[min(len(saved) - 1, len(T_95)) - 1] * stdev(saved) / math.sqrt(len(saved))
    return fmean(saved) > half or half <= PRECISE * fmean(plain_ms)


PAIRS = 3
"""Blocks in bf16, each followed by one of plain steps."""
LEAST_GAIN = 1.2
"""Times the rate of fp32 that a large matrix product has to reach in bf16. A judgement: converting costs something, so that with
less there is little to gain."""


class InBf16:
    """Calls modules under autocast to bf16 while `recorder.calls_as` is `calls`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen = self.refused = False

    @property
    def applies(self) -> bool:
        """Whether modules were called in bf16, and all of them bore it."""
        return self.seen and not self.refused

    def may_gain(self) -> bool:
        """Whether the model computes in fp32 and this CPU multiplies faster in bf16. Compiled models would be compiled anew, and
        engines have settings of their own."""
        from trainpace.measure import in_use

        torch, recorder = sys.modules["torch"], self.recorder
        if (
            in_use() != "cpu"
            or _is_sharded()
            or recorder.compiled
            or recorder.step_is_the_engines
            or recorder.matmul_dtype is not torch.float32
        ):
            return False
        try:
            return matmul_rate_gflops(torch.bfloat16) >= LEAST_GAIN * matmul_rate_gflops(
                torch.float32
            )
        except Exception:  # a build of torch without such products
            return False

    def calls(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A module's `__call__` in bf16."""
        torch: Any = sys.modules["torch"]

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.refused:
                return plain(module, *args, **kwargs)
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    output = plain(module, *args, **kwargs)
                self.seen = self.seen or any(p.requires_grad for p in module.parameters())
                return torch.utils._pytree.tree_map_only(torch.Tensor, _in_fp32, output)
            except Exception:  # whatever it is, either it is of bf16, or it is raised again
                self.refused = True
                self.recorder.log.note({"refuses_bf16": True})
                return plain(module, *args, **kwargs)

        return call


def _is_sharded() -> bool:
    """Whether FSDP may be in use, whose modules cannot be called again in the middle of a step."""
    return process_group() is not None and any(
        name.startswith("torch.distributed.fsdp") for name in sys.modules
    )


def _in_fp32(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype is sys.modules["torch"].bfloat16 else tensor


class _SkippedCollective:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def collective(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that is skipped under the trial without synchronisation, for tensors that only training exchanges."""

    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == NO_SYNC and _is_bulk(args, kwargs):
            with contextlib.suppress(Exception):
                _fill(function.__name__, args, kwargs)
            return (
                _SkippedCollective()
                if kwargs.get("async_op") or (args and args[-1] is True)
                else None
            )
        return function(*args, **kwargs)

    return maybe


def _fill(name: str, args: Any, kwargs: Any) -> None:
    """Fill the result with numbers of ordinary size: uninitialised memory may hold denormals, which are slow."""
    both: Any = (*args, *kwargs.values(), None)
    output, given = both[0], both[1]
    if "gather" in name and hasattr(output, "view"):
        output.view(-1, given.numel()).copy_(
            given.reshape(1, -1).expand(output.numel() // given.numel(), -1)
        )
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


def unsynchronised(recorder: Recorder, forward: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedDataParallel.forward, which decides whether the backward after it exchanges gradients."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial != NO_SYNC:
            if not self.require_backward_grad_sync and not recorder.skips_sync:
                recorder.skips_sync = True
                recorder.log.note({"skips_sync": True})
            return forward(self, *args, **kwargs)
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = False
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    return call


def muted(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == MUTED and get_ident() == recorder.thread:
            return None
        return function(*args, **kwargs)

    return maybe


def made_folders(recorder: Recorder) -> Callable[[str, Any], None]:
    """An audit hook that notes which folders are made under trials: those for checkpoints are empty once these are removed."""
    process = os.getpid()

    def hook(event: str, args: Any) -> None:
        if event == "os.mkdir" and args[2] == -1 and os.getpid() == process:
            with contextlib.suppress(Exception):
                place = os.path.abspath(os.fsdecode(args[0]))
                if not os.path.lexists(place):
                    recorder.log.note({"made_folder": place})

    return hook


def loads(load: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load under trials, which reads what the script, or another of its ranks, has written beside that place, such as its
    best checkpoint. What a killed run has left there is older than this one."""
    began = time.time() - 0.1  # a file's time comes from a coarser clock

    @functools.wraps(load)
    def maybe(f: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # such as a file that is open already
            beside = os.path.abspath(os.fspath(f)) + OF_TRIAL
            if os.stat(beside).st_mtime >= began:
                f = beside
        return load(f, *args, **kwargs)

    return maybe


def steps_beyond(scheduler: Any, recorder: Recorder) -> None:
    """Under trials, let OneCycleLR stay where it ends: repeated batches make more steps than the script has planned, and it
    refuses any beyond these."""
    plain = scheduler.step
    if recorder.trials is None:
        return

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.last_epoch >= self.total_steps else plain(self, *args, **kwargs)

    scheduler.step = step


def checkpoints(recorder: Recorder, save: Callable[..., Any], file: str) -> Callable[..., Any]:
    """Under trials, write a checkpoint beside its place, the argument `file`, so that the user's own stays. It is kept until the
    end, since overwriting costs more than removing a file before it reached the disk; `watch` removes it. Of a script that is
    only looked at, what lies in that place is moved aside."""
    import inspect  # which torch has imported by now, and other processes need not

    signature = inspect.signature(save)

    @functools.wraps(save)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.trials is None and recorder.earlier is None:
            return save(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        if not isinstance(call.arguments[file], str | os.PathLike):
            pass
        elif recorder.trials is None:
            with contextlib.suppress(Exception):  # such as a current folder that is gone
                recorder.earlier.keep(call.arguments[file])
            try:
                return save(*call.args, **call.kwargs)
            finally:
                with contextlib.suppress(Exception):
                    recorder.earlier.has_saved(call.arguments[file])
        else:
            beside = call.arguments[file] = (
                os.path.abspath(os.fspath(call.arguments[file])) + OF_TRIAL
            )
            if beside not in recorder.trials.checkpoints:
                recorder.trials.checkpoints.add(beside)
                recorder.log.note({"trial_checkpoint": beside})
                recorder.log.flush()  # so that they are removed also if this process is killed
        return save(*call.args, **call.kwargs)

    return maybe
