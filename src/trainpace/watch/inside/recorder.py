"""Time accounting of the training thread: each nanosecond is charged to the part that runs.

Thus the parts of a step add up to its duration.
"""

import contextlib
import functools
import os
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
"""Nanoseconds between writes to the event log."""
ASK_ALLOCATOR_NS, ASK_FIRST_STEPS = 100_000_000, 3
"""Interval between queries of the allocator, and number of first steps that are always queried.

A query seems to take longer than the rest of a step's recording. Recording cost 430 us per step on
an H200 with two queries. It cost 87 us, of a larger step, without queries.
"""
SPANS_FOR_STEPS = 100
SPANS_AGAIN_EVERY, SPANS_AGAIN_FOR = 1000, 10
"""Steps with recorded spans: the first 100 steps, and later 10 of every 1,000 steps.

Totals are recorded in all steps.
"""

COVERING = (EVALUATION, CHECKPOINT, TRAINPACE)
"""Parts that also cover everything that runs inside them."""


TRAINING, EVALUATING, AFTER_EVALUATION = range(3)
"""Phases of the training thread.

In `AFTER_EVALUATION`, the time belongs to the call that comes next.
"""


def warn(message: str) -> None:
    """Print one line on stderr. Errors are ignored, so that they do not affect the script."""
    with contextlib.suppress(Exception):  # stderr is closed.
        sys.stderr.write(f"trainpace: warning: {message}\n")


def around(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function by one that calls `act(function, *args, **kwargs)`.

    Nothing happens if the owner is None or lacks the name, as in other versions of a package.
    """
    plain = getattr(owner, name, None)
    if plain is None:
        return

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return act(plain, *args, **kwargs)

    setattr(owner, name, call)


class Recorder:
    """State of one process.

    Only time of the training thread is charged. Other threads only leave spans.
    """

    # Attributes that every step uses. Python finds them faster in slots than in the large __dict__.
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
        "fetched_from",
        "fetched_samples",
        "log",
        "micro_steps",
        "optimizer",
        "part",
        "phase",
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
        """References to all optimizers that made a step before the model was captured."""
        self.matmul_dtype: Any = None
        self.capture: Any = None
        self.step_is_the_engines = False
        self.compiled = self.skips_sync = False
        self.synchronizes: Callable[[], bool] | None = None
        self.before_end: Callable[[], None] = lambda: None
        self.note_written: Callable[[], None] = lambda: None
        self.peak_allocated_gib: Callable[[], float | None] | None = None
        self.allocator: Callable[[], tuple[float, int]] | None = None
        """Returns the GiB that a device's allocator holds, and the number of its retries."""
        self._allocator_says: tuple[float, int] = (0.0, 0)
        self._allocator_asked = 0
        self.after_step: list[Callable[[Step], None]] = []
        """Callbacks after every step.

        Each costs more than it seems, since its code is no longer in the processor's caches.
        """
        self.after_detailed_step: list[Callable[[Step], None]] = []
        """Callbacks after a step whose spans are recorded."""
        self.fetched_from = 0
        self.training_loaders: set[int] = set()
        """Loaders with at least one trained batch, by id."""
        self.begins_again: Callable[[], None] | None = None
        """Callback for a process that was forked before any step.

        It is called if the process trains.
        """
        self._evaluates_with_gradients = False
        self.sampler: Any = None
        self.epochs: Any = None
        self.thread_is_over = False
        """True if the training thread has ended, so that another thread may continue."""
        self.trains_in_thread: Callable[[], None] = lambda: None
        """Callback for a thread other than the main thread, called when it turns out to train."""
        self.begin()

    def begin(self) -> None:
        """Start timing the first step."""
        self.part = OTHER
        self.micro_steps = self.samples = self.fetched_samples = self.input_elements = 0
        self._stack: list[tuple[int, int]] = []
        self._mark = self._step_start = self._flushed = now_ns()
        self._pending: defaultdict[int, int] = defaultdict(int)
        self._spent = [0] * len(PARTS)
        self.phase = self._phase_before = TRAINING
        self.undecided = self.bears_backward = False
        self._held: defaultdict[int, int] = defaultdict(int)
        self.settled_ns = self._held_until = self._mark
        self._evaluation_start: int | None = None

    def _charge(self) -> int:
        """Charge the time since the last mark to the running part. Return the current time."""
        now = now_ns()
        self._pending[self.part] += now - self._mark
        self._mark = now
        return now

    def once(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` once, after step `number`. If it fails, other callbacks still run."""

        def callback(step: Step) -> None:
            if step.number == number:
                action()
                self.after_step.remove(callback)

        self.after_step.append(callback)

    # ---- spans
    #
    # This code runs about ten times per step. Thus `_charge` is written inline, and function calls
    # are few.

    def enter(self, part: int) -> int:
        """Begin a part on the training thread. Return the depth for `leave`."""
        now = now_ns()
        before = self.part
        self._pending[before] += now - self._mark
        self._mark = now
        self._stack.append((before, now))
        if before not in COVERING:
            self.part = part
            if part == EVALUATION:
                self._phase_before = self.phase
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
        if self.part == EVALUATION != before and self._phase_before != EVALUATING:
            self.decides(EVALUATING)
            self._settle()
            self.phase = TRAINING
        self.part = before

    def charged(
        self, part: int, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function with its time charged to `part`. Other threads only leave a span."""
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

    def wraps(self, function: Callable[..., Any], part: int, name: str) -> Callable[..., Any]:
        """Return a wrapper that charges the time of a function to `part`."""

        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            return self.charged(part, name, function, *args, **kwargs)

        return charged

    # ---- batches and calls
    #
    # They belong to training or to an evaluation. This is known only after the model is called.

    def enters_batch(self, part: int) -> int:
        """Begin to fetch a batch for training or an evaluation. Return the depth for `leave`."""
        depth = self.enter(part)
        if self.undecided:
            self.fetched_samples = 0
            self.decides(EVALUATING)
        if self.phase != AFTER_EVALUATION:
            self._settle()
        return depth

    def enters_training(self, part: int = FORWARD) -> int:
        """Begin a call of the model for training. Return the depth for `leave`.

        The fetch before the call counts as training too. A call that collects experience for the
        training is charged to another `part`.
        """
        depth = self.enter(part)
        if self.undecided:
            self.decides(EVALUATING if self.bears_backward else TRAINING)
        self.phase = TRAINING
        if self.fetched_samples:
            if self.fetched_from in self.training_loaders:
                self.samples += self.fetched_samples
                self.fetched_samples = 0
            else:
                self._count_samples()
        self._settle()
        return depth

    def begins_evaluation(self) -> None:
        """Begin a call of the trained model in an evaluation. The fetch before it counts too."""
        self._charge()
        self.decides(EVALUATING)
        self.phase = EVALUATING
        self.fetched_samples = 0
        self._settle()

    def leaves_evaluation(self) -> None:
        """Record that gradients are switched on again.

        The time until the next call, including the fetch for it, belongs to that call. It is
        evaluation if the call evaluates. Otherwise it is training, such as the preparation of an
        epoch.
        """
        if self.phase == EVALUATING and not self.undecided and self.part not in COVERING:
            self._charge()
            self._settle()
            self.phase = AFTER_EVALUATION

    def begins_undecided(self, with_gradients: bool) -> None:
        """Begin a call in evaluation mode with gradients, or in training mode without.

        The call is training if a backward pass follows or the step ends. It is an evaluation if a
        batch or another evaluation follows. If a call for training follows, it depends on the
        gradients. A call with gradients was never used, so it is an evaluation. A call without
        gradients is training: a GAN's generator makes images for its discriminator in this way.
        """
        self._charge()
        if self.bears_backward:
            self.decides(EVALUATING)
        if not self.undecided:
            if not self.fetched_samples and self.phase != AFTER_EVALUATION:
                self._settle()
            self._held_until = self.settled_ns
        self.undecided, self.bears_backward = True, with_gradients

    def decides(self, phase: int) -> None:
        """Count the undecided call, if there is one, as training or as evaluation.

        An evaluation continues until the next batch.
        """
        if not self.undecided:
            return
        if phase == EVALUATING and self.bears_backward and not self._evaluates_with_gradients:
            # It stored the activations that a backward pass would need.
            self._evaluates_with_gradients = True
            self.log.note(evaluates_with_gradients=True)
        self.undecided = self.bears_backward = False
        self.phase = phase
        if phase == TRAINING:
            self._count_samples()
        since, self._pending = self._pending, self._held
        self._settle(self._held_until)
        self._held, self._pending = self._pending, since

    def _count_samples(self) -> None:
        """Count the fetched samples as trained samples."""
        if self.fetched_samples and self.fetched_from not in self.training_loaders:
            self.training_loaders.add(self.fetched_from)
            self.log.note(feeds=self.fetched_from)
        self.samples += self.fetched_samples
        self.fetched_samples = 0

    def ends_forward(self) -> None:
        """End a call of the trained model.

        An evaluation's time is counted here, in case training follows without a batch.
        """
        if self.undecided:
            for part, ns in self._pending.items():
                self._held[part] += ns
            self._pending.clear()
            self._held_until = self._mark
        elif self.phase == EVALUATING:
            self._settle()

    def _settle(self, until_ns: int | None = None) -> None:
        """Count the time up to the last mark (or `until_ns`) as evaluation or by its own parts."""
        evaluates = self.phase == EVALUATING
        if evaluates != (self._evaluation_start is not None):
            self._mark_evaluation()
        self.settled_ns = self._mark if until_ns is None else until_ns
        spent, pending = self._spent, self._pending
        for part, ns in pending.items():
            spent[EVALUATION if evaluates and part not in COVERING else part] += ns
        pending.clear()

    def _mark_evaluation(self) -> None:
        """Begin an evaluation, or end it and write its span. One span covers a whole evaluation."""
        start, self._evaluation_start = self._evaluation_start, None
        if start is None:
            self._evaluation_start = self.settled_ns
        elif self.spans_on:
            self.log.span(EVALUATION, 0, "evaluation", 0, start, self.settled_ns)

    def since_last_step_ns(self) -> dict[str, int]:
        """Return the time by part since the last step ended, in nanoseconds."""
        self._charge()
        self.decides(EVALUATING)
        self._settle()
        return {name: ns for name, ns in zip(PARTS, self._spent, strict=True) if ns}

    def write_workload(self) -> None:
        """Trace the captured model after the script has ended, and write the workload."""
        self.thread = -1  # Calls during tracing are not the script's.
        self.capture.attempt(self.capture.write, os.environ["TRAINPACE_WATCH"])
        self.log.flush()

    # ---- steps

    def restart_step(self) -> None:
        """Begin the next step now, so that work at the end of a step is not charged to any step."""
        self._mark = self.settled_ns = self._step_start = now_ns()
        self._pending.clear()

    def ends_step(self) -> None:
        """End a step: write its record, run the callbacks, and start timing the next step."""
        now = now_ns()
        self._pending[self.part] += now - self._mark
        self._mark = now
        self.decides(TRAINING)
        self.phase = TRAINING
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
            self.flush_if_due()
        self.settled_ns = ended = now_ns()
        self._pending[TRAINPACE] += ended - self._mark
        self._mark = ended
        self.part = part

    def _calls(self, callbacks: list[Callable[[Step], None]], step: Step) -> None:
        for callback in tuple(callbacks):
            try:
                callback(step)
            except Exception as error:  # The script must continue.
                callbacks.remove(callback)
                warn(f"something of this step is not recorded ({type(error).__name__}: {error}).")

    def flush_if_due(self) -> None:
        """Write waiting records if nothing was written for a while."""
        now = now_ns()
        if now - self._flushed > FLUSH_NS:
            self._flushed = now
            self.log.flush()
