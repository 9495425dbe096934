"""The training thread's time: every nanosecond is charged to the part that runs, so that the parts add up to the step."""

import contextlib
import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.event_log import (
    CHECKPOINT,
    EVALUATION,
    FORWARD,
    OTHER,
    PARTS,
    TRAINPACE,
    EventLogWriter,
    Step,
)

now_ns = time.perf_counter_ns
get_ident = threading.get_ident

FLUSH_NS = 300_000_000
ASK_ALLOCATOR_NS, ASK_FIRST_STEPS = 100_000_000, 3
"""An allocator is asked after each of the first steps, and then now and then: its answer seems to take longer than all else of a
step, as watching cost 430 us of a step on an H200 where it was asked twice, and 87 us of a larger one where it was not."""
SPANS_FOR_STEPS = 100
SPANS_AGAIN_EVERY, SPANS_AGAIN_FOR = 1000, 10
"""Spans are kept for the first steps and periodically later; the totals of every step are kept."""

COVERING = (EVALUATION, CHECKPOINT, TRAINPACE)
"""Parts that also cover everything that runs inside them."""


def warn(message: str) -> None:
    """Print one line on stderr: a failure of ours must not become one of the script's."""
    with contextlib.suppress(Exception):  # a closed stderr
        sys.stderr.write(f"trainpace: warning: {message}\n")


class Recorder:
    """The state of one process. Only the training thread is charged; spans of other threads are kept as spans."""

    # what every step touches: with as many attributes as this has, Python finds others more slowly
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_evaluation_start",
        "_flushed",
        "_mark",
        "_pending",
        "_spent",
        "_stack",
        "_step_start",
        "after_detailed_step",
        "after_step",
        "allocator",
        "bears_backward",
        "calls_as",
        "evaluating",
        "fetched_from",
        "fetched_samples",
        "log",
        "micro_steps",
        "optimizer",
        "part",
        "samples",
        "settled_ns",
        "spans_on",
        "step_is_the_engines",
        "steps",
        "synchronizes",
        "thread",
        "training_loaders",
        "trial",
        "trials",
        "undecided",
    )

    def __init__(self, log: EventLogWriter) -> None:
        self.log = log
        self.thread = get_ident()
        self.spans_on = True
        self.steps = 0
        self.trial = self.active_trial = 0
        self.trials: Any = None
        self.earlier: Any = None
        self.scheduled: Any = None
        self.losses: Any = None
        self.optimizer: Any = None
        self.optimizers: list[Any] = []
        """References to all that made a step until the model was captured."""
        self.matmul_dtype: Any = None
        self.capture: Any = None
        self.step_is_the_engines = False
        self.compiled = self.skips_sync = False
        self.synchronizes: Callable[[], bool] | None = None
        self.before_end: Callable[[], None] = lambda: None
        self.note_written: Callable[[], None] = lambda: None
        self.peak_allocated_gib: Callable[[], float | None] | None = None
        self.allocator: Callable[[], tuple[float, int]] | None = None
        """GiB that a device's allocator holds, and how often it had to retry."""
        self._allocator_says: tuple[float, int] = (0.0, 0)
        self._allocator_asked = 0
        self.calls_as: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """Under an intervention: a module's `__call__` as it is called instead."""
        self.after_step: list[Callable[[Step], None]] = []
        """Called after every step. Each costs more than it seems: after a step nothing of ours is in the processor's caches."""
        self.after_detailed_step: list[Callable[[Step], None]] = []
        """Called after a step of which spans are kept."""
        self.fetched_from = 0
        self.training_loaders: set[int] = set()
        """The loaders, by their id, of which a batch was trained on."""
        self.begins_again: Callable[[], None] | None = None
        """In a process that was forked before any step: called where it trains."""
        self._evaluates_with_gradients = False
        self.thread_is_over = False
        """Whether the training thread has ended, so that another one may go on."""
        self.trains_in_thread: Callable[[], None] = lambda: None
        """Called in a thread that is no main thread, once it turns out to train."""
        self.begin()

    def begin(self) -> None:
        """Begin the first step here and now."""
        self.part = OTHER
        self.micro_steps = self.samples = self.fetched_samples = self.input_elements = 0
        self._stack: list[tuple[int, int]] = []
        self._mark = self._step_start = self._flushed = now_ns()
        self._pending: defaultdict[int, int] = defaultdict(int)
        self._spent = [0] * len(PARTS)
        self.evaluating: bool | None = False
        """None once an evaluation was left: what follows belongs to the call that comes next."""
        self._evaluating_before: bool | None = False
        self.undecided = self.bears_backward = False
        self._held: defaultdict[int, int] = defaultdict(int)
        self.settled_ns = self._held_until = self._mark
        self._evaluation_start: int | None = None

    def _charge(self) -> int:
        """Charge the time since the last mark to the part that runs; returns the present time."""
        now = now_ns()
        self._pending[self.part] += now - self._mark
        self._mark = now
        return now

    def once(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` after the step of this number, apart from all else, so that its failure is its own."""

        def callback(step: Step) -> None:
            if step.number == number:
                action()
                self.after_step.remove(callback)

        self.after_step.append(callback)

    # ---- spans; what follows runs some ten times a step, so that _charge is written out in it, and calls are few

    def enter(self, part: int) -> int:
        """Begin a part on the training thread; returns the depth for `leave`."""
        now = now_ns()
        before = self.part
        self._pending[before] += now - self._mark
        self._mark = now
        self._stack.append((before, now))
        if before not in COVERING:
            self.part = part
            if part == EVALUATION:
                self._evaluating_before = self.evaluating
        return len(self._stack) - 1

    def leave(self, depth: int, name: str) -> None:
        """End a part, and all parts inside it that an exception left open."""
        now = now_ns()
        self._pending[self.part] += now - self._mark
        self._mark = now
        stack = self._stack
        if depth >= len(stack):
            return
        before, start = stack[depth]
        del stack[depth:]
        if self.spans_on:
            self.log.span(self.part, depth, name, 0, start, now)
        if self.part == EVALUATION != before and not self._evaluating_before:
            self.decides(True)
            self._settle()
            self.evaluating = False
        self.part = before

    def charged(
        self, part: int, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        depth = self.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            self.leave(depth, name)

    def wraps(self, function: Callable[..., Any], part: int, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                start = now_ns()
                try:
                    return function(*args, **kwargs)
                finally:
                    if self.spans_on:
                        self.log.span(part, 0, name, get_ident(), start, now_ns())
            depth = self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(depth, name)

        return charged

    # ---- what belongs to an evaluation is known only once the model is called

    def enters_batch(self, part: int) -> int:
        """Begin to fetch a batch, for training or for an evaluation, as `part`; returns the depth for `leave`."""
        depth = self.enter(part)
        if self.undecided:
            self.fetched_samples = 0
            if self.bears_backward:
                self._notes_gradients()
            self.decides(True)
        if self.evaluating is not None:
            self._settle()
        return depth

    def enters_training(self) -> int:
        """Begin a call of the trained model for training: the fetch before it counts as training too. Returns the depth for
        `leave`."""
        depth = self.enter(FORWARD)
        if self.undecided:
            self.decides(self.bears_backward)
        self.evaluating = False
        if self.fetched_samples:
            if self.fetched_from in self.training_loaders:
                self.samples += self.fetched_samples
                self.fetched_samples = 0
            else:
                self._takes_samples()
        self._settle()
        return depth

    def begins_evaluation(self) -> None:
        """Begin a call of the trained model in an evaluation: the fetch before it counts as evaluation too."""
        self._charge()
        self.decides(True)
        self.evaluating = True
        self.fetched_samples = 0
        self._settle()

    def leaves_evaluation(self) -> None:
        """Gradients are switched on again. What follows, up to the next call and with the batch that is fetched for it, is part
        of the evaluation where that call is, and of the training else, as what prepares an epoch.
        """
        if self.evaluating and not self.undecided and self.part not in COVERING:
            self._charge()
            self._settle()
            self.evaluating = None

    def begins_undecided(self, with_gradients: bool) -> None:
        """Begin a call in evaluation mode but with gradients, or in training mode without: it is training once a backward pass
        uses it, or the step ends, and an evaluation where a batch or another evaluation follows.

        Where a call for training follows, one with gradients was never used. One without was, as where a GAN's generator makes
        images for its discriminator.
        """
        self._charge()
        if self.bears_backward:
            self.decides(True)
        if not self.undecided:
            if not self.fetched_samples and self.evaluating is not None:
                self._settle()
            self._held_until = self.settled_ns
        self.undecided, self.bears_backward = True, with_gradients

    def decides(self, evaluates: bool) -> None:
        """What the undecided call was, if there is one: an evaluation, as is what follows up to the next batch, or training."""
        if not self.undecided:
            return
        self.undecided = self.bears_backward = False
        self.evaluating = evaluates
        if not evaluates:
            self._takes_samples()
        since, self._pending = self._pending, self._held
        self._settle(self._held_until)
        self._held, self._pending = self._pending, since

    def _notes_gradients(self) -> None:
        """Once: an evaluation kept what a backward pass would need."""
        if not self._evaluates_with_gradients:
            self._evaluates_with_gradients = True
            self.log.note({"evaluates_with_gradients": True})

    def _takes_samples(self) -> None:
        """Count the fetched samples as trained on."""
        if self.fetched_samples and self.fetched_from not in self.training_loaders:
            self.training_loaders.add(self.fetched_from)
            self.log.note({"feeds": self.fetched_from})
        self.samples += self.fetched_samples
        self.fetched_samples = 0

    def ends_forward(self) -> None:
        """End a call of the trained model: that of an evaluation counts as such, also where training follows without a batch."""
        if self.undecided:
            for part, ns in self._pending.items():
                self._held[part] += ns
            self._pending.clear()
            self._held_until = self._mark
        elif self.evaluating:
            self._settle()

    def _settle(self, until_ns: int | None = None) -> None:
        """Count the time up to the last mark, or up to then, as an evaluation's or as its own parts'. A span covers every
        evaluation."""
        if self.evaluating and self._evaluation_start is None:
            self._evaluation_start = self.settled_ns
        elif not self.evaluating and self._evaluation_start is not None:
            if self.spans_on:
                self.log.span(
                    EVALUATION, 0, "evaluation", 0, self._evaluation_start, self.settled_ns
                )
            self._evaluation_start = None
        self.settled_ns = self._mark if until_ns is None else until_ns
        spent, pending = self._spent, self._pending
        if self.evaluating:
            for part, ns in pending.items():
                spent[part if part in COVERING else EVALUATION] += ns
        else:
            for part, ns in pending.items():
                spent[part] += ns
        pending.clear()

    def since_last_step_ns(self) -> dict[str, int]:
        """Time by part since the last step ended."""
        self._charge()
        self.decides(True)
        self._settle()
        return {name: ns for name, ns in zip(PARTS, self._spent, strict=True) if ns}

    # ---- steps

    def leave_out(self) -> None:
        """Begin the next step here, in what is called at the end of one: what was done there is no part of any."""
        self._mark = self.settled_ns = self._step_start = now_ns()
        self._pending.clear()

    def ends_step(self) -> None:
        now = now_ns()
        self._pending[self.part] += now - self._mark
        self._mark = now
        if self.undecided:
            self.decides(False)
        self.evaluating = False
        self._settle()
        if self.allocator is not None and (
            self.steps < ASK_FIRST_STEPS or now - self._allocator_asked >= ASK_ALLOCATOR_NS
        ):
            self._allocator_says, self._allocator_asked = self.allocator(), now
        step = (
            self.trial,
            min(self.micro_steps, 65535),
            self.steps,
            self._step_start,
            now,
            min(self.samples, 2**31),
            *self._allocator_says,
            tuple(self._spent),
        )
        self.log.step(step)
        self._spent = [0] * len(PARTS)
        self._step_start = now
        self.steps += 1
        self.micro_steps = self.samples = 0
        kept = self.spans_on
        self.spans_on = (
            self.steps < SPANS_FOR_STEPS or self.steps % SPANS_AGAIN_EVERY < SPANS_AGAIN_FOR
        )
        part, self.part = self.part, TRAINPACE
        if kept:
            self._calls(self.after_detailed_step, Step._make(step))
        if self.after_step:
            self._calls(self.after_step, Step._make(step))
        if now - self._flushed > FLUSH_NS:
            self.keeps_up()
        self.settled_ns = ended = now_ns()
        self._pending[TRAINPACE] += ended - self._mark
        self._mark = ended
        self.part = part

    def _calls(self, callbacks: list[Callable[[Step], None]], step: Step) -> None:
        for callback in tuple(callbacks):
            try:
                callback(step)
            except Exception as error:  # the script must go on
                callbacks.remove(callback)
                warn(f"something of this step is not recorded ({type(error).__name__}: {error}).")

    def keeps_up(self) -> None:
        """Write what waits, where nothing was written for a while."""
        now = now_ns()
        if now - self._flushed > FLUSH_NS:
            self._flushed = now
            self.log.flush()
