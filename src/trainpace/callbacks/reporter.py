"""The part that the callbacks of all engines share: when to report, what to say, the run in the journal, and safety for
the training."""

import datetime
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from trainpace.callbacks.stopwatch import Stopwatch, Work
from trainpace.callbacks.time_left import Other, TimeLeft, time_left
from trainpace.execution import Execution
from trainpace.units import format_duration

EVERY_S = 30.0
FIRST_S = 5.0
FIRST_STEPS = 5
KEPT_IN_JOURNAL = 1000
FORWARD_SHARE = 1 / 3
"""The forward pass as a share of a sample's forward and backward pass: the backward pass has twice the products (Kaplan
et al. 2020, arXiv:2001.08361, section 2.1)."""

Self_ = TypeVar("Self_", bound="Reporter")
P = ParamSpec("P")


def harmless(hook: Callable[Concatenate[Self_, P], None]) -> Callable[Concatenate[Self_, P], None]:
    """A hook that cannot break the training: its first error is reported, and the callback is inactive from then on."""

    @functools.wraps(hook)
    def guarded(self: Self_, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.off:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.off = True
            say(
                f"trainpace: no time left from here on ({type(error).__name__}: {error}); the training is not affected."
            )

    return guarded


def say(words: str) -> None:
    """Print one line on stderr, above a progress bar where tqdm draws one."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    try:
        if tqdm is not None:
            tqdm.write(words, file=sys.stderr)
        else:
            print(words, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody listens any more
        pass


class Reporter:
    """Reports a training's remaining time every `every_s` seconds, and stores the run in the journal at its end.

    `tell` receives each `TimeLeft` in place of the line on stderr. `journal` is a path or URL, by default the user's
    own; with `no_journal` nothing is stored. `model` names the run, by default after the model's class or configuration.
    """

    counted = "step"
    """The unit that the engine's hooks count: optimizer steps, or batches."""

    def __init__(
        self, *, every_s: float = EVERY_S, tell: Callable[[TimeLeft], None] | None = None, journal: str | None = None,
        no_journal: bool = False, model: str | None = None, notes: str = "", keep_identity: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        super().__init__()
        self.every_s = every_s
        self.off = False
        self._tell = tell
        self._journal, self._no_journal = journal, no_journal
        self._name, self._notes, self._keep_identity = model, notes, keep_identity
        self._clock = clock
        self._watch: Stopwatch | None = None
        self._speaks = False
        self._next_s = 0.0
        self._step = self._total = self._begun_at = 0
        self._losses: list[float | None] = []

    # What an engine's hooks call

    def _begin(self, speaks: bool, step: int) -> None:
        """Begin or resume a training at `step`. Only one rank reports and stores."""
        self._watch = Stopwatch(self._clock)
        self._speaks, self._begun_at, self._step, self._losses = speaks, step, step, []
        self._next_s = self._watch.begun + min(FIRST_S, self.every_s)

    def _due(self, now: float) -> bool:
        watch = self._watch
        return self._speaks and now >= self._next_s and watch is not None and watch.count["step"] >= FIRST_STEPS

    def _report(self, now: float, left: TimeLeft | None) -> None:
        self._next_s = now + self.every_s
        if left is not None:
            (self._tell or (lambda it: say(words_of(it, counted=self.counted))))(left)

    def _left(self, steps_left: float, others: Sequence[Other]) -> TimeLeft | None:
        assert self._watch is not None
        return time_left(
            self._step, self._total, tuple(self._watch.times["step"]), steps_left, others, self._watch.since_s
        )

    def _guess_evaluation_s(self, samples: float | None, samples_per_step: float) -> float | None:
        """Seconds of an evaluation before the first one: the forward passes of its samples, as a share of a step's time."""
        watch = self._watch
        if samples is None or watch is None or not watch.times["step"]:
            return None
        return FORWARD_SHARE * statistics.median(watch.times["step"]) * samples / samples_per_step

    def _end(self, execution: Execution, device: str, ended: str = "", micro_steps: int = 1, **fields: Any) -> None:
        """End the training, for the reason `ended` where it was stopped: report its time, and store it.

        `micro_steps`: how many counted units make an optimizer step.
        """
        watch, self._watch = self._watch, None
        if watch is None or not self._speaks or not watch.times["step"]:
            return
        if self._tell is None:
            say(summary_of(watch, self._step - self._begun_at, self.counted, ended))
        if not self._no_journal:
            from trainpace.callbacks.keep import keep_run

            stopped = f"stopped by {ended} at {self.counted} {self._step} of {self._total}" if ended else ""
            steps = steps_of(tuple(watch.times["step"]), micro_steps)[-KEPT_IN_JOURNAL:]
            notes = "; ".join(filter(None, (self._notes, stopped)))
            keep_run(
                self._journal, execution, device, steps, tuple(self._losses),
                notes=notes, keep_identity=self._keep_identity, **fields,
            )  # fmt: skip


def steps_of(seconds: Sequence[float], micro_steps: int) -> tuple[float, ...]:
    """Seconds of optimizer steps from those of their micro-steps, counted from the end; one step where there are too few."""
    if micro_steps == 1 or not seconds:
        return tuple(seconds)
    first = len(seconds) % micro_steps if len(seconds) >= micro_steps else 0
    return tuple(math.fsum(seconds[i : i + micro_steps]) for i in range(first, len(seconds), micro_steps))


def words_of(left: TimeLeft, now: datetime.datetime | None = None, counted: str = "step") -> str:
    """One line: the step, the remaining time with its interval, the time of the end, and what is not included."""
    now = now or datetime.datetime.now()
    end = now + datetime.timedelta(seconds=left.seconds)
    at = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%a %d %b %H:%M}"
    low, high = format_duration(left.interval_s.low), format_duration(left.interval_s.high)
    without = f", without {' and '.join(f'{name}s' for name in left.unseen)}, none seen yet" if left.unseen else ""
    return (
        f"trainpace: {counted} {left.step:,} of {left.total_steps:,}, {format_duration(left.seconds)} left"
        f" ({low} to {high}, 90 %){without}, until about {at}"
    )


def summary_of(watch: Stopwatch, steps: int, counted: str = "step", ended: str = "") -> str:
    """One line at the end: the steps, the total time, and the time outside steps."""
    median = format_duration(statistics.median(watch.times["step"]))
    works: tuple[Work, ...] = ("evaluation", "checkpoint")
    beside = [f"{watch.count[w]} {w}s in {format_duration(watch.total_s[w])}" for w in works if watch.count[w]]
    stopped = f", stopped by {ended}" if ended else ""
    return (
        f"trainpace: {steps:,} {counted}{'e' if counted == 'batch' else ''}s in {format_duration(watch.elapsed_s)},"
        f" median {counted} {median}" + (f"; {', '.join(beside)}" if beside else "") + stopped
    )
