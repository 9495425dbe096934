"""The part that the callbacks of all engines share: timing, when to report and what to say, the run in the journal, and
safety for the training."""

import datetime
import functools
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal, get_args

from trainpace.callbacks.time_left import Other, TimeLeft, time_left
from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval
from trainpace.core.stats import median_interval, warmup_steps
from trainpace.core.units import format_duration

FIRST_S = 5.0
FIRST_STEPS = 5
KEPT_IN_JOURNAL = 1000
FORWARD_SHARE = 1 / 3
"""The forward pass as a share of a sample's forward and backward pass: the backward pass has twice the products (Kaplan
et al. 2020, arXiv:2001.08361, section 2.1)."""

Work = Literal["step", "evaluation", "checkpoint", "epoch"]
Hook = Callable[..., None]


class Stopwatch:
    """Collects the times of the latest steps and of other work between them. `clock` gives monotonic seconds.

    The time between two marks is charged to the work that ends at the second. A step may be charged in pieces (its data
    before an evaluation, its computation after); `done` completes it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = self.begun = clock()
        self.pending: dict[Work, float] = {}
        """Seconds charged to work that is not complete."""
        works: tuple[Work, ...] = get_args(Work)
        self.times = {work: deque[float](maxlen=4096 if work == "step" else 64) for work in works}
        self.total_s: dict[Work, float] = dict.fromkeys(self.times, 0.0)
        self.count: dict[Work, int] = dict.fromkeys(self.times, 0)

    def mark(self, work: Work) -> float:
        """Charge the time since the last mark to `work`; returns the present time."""
        now = self._clock()
        self.pending[work] = self.pending.get(work, 0.0) + now - self._last
        self._last = now
        return now

    def done(self, work: Work) -> None:
        """Complete one `work` with all time charged to it since the last one."""
        seconds = self.pending.pop(work, None)
        if seconds is not None:
            self.times[work].append(seconds)
            self.total_s[work] += seconds
            self.count[work] += 1

    @property
    def since_s(self) -> float:
        return self._clock() - self._last

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.begun


def harmless(hook: Hook) -> Hook:
    """A hook that cannot break the training: its first error is reported, and the callback is inactive from then on."""

    @functools.wraps(hook)
    def guarded(self: Reporter, *args: Any, **kwargs: Any) -> None:
        if self.off:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.off = True
            why = f"{type(error).__name__}: {error}"
            say(f"trainpace: no time left from here on ({why}); the training is not affected.")

    return guarded


def in_training(hook: Hook) -> Hook:
    """A harmless hook that does nothing before a training has begun and after it has ended."""

    @functools.wraps(hook)
    def timed(self: Reporter, *args: Any, **kwargs: Any) -> None:
        if self._running:
            hook(self, *args, **kwargs)

    return harmless(timed)


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
        self,
        *,
        every_s: float = 30.0,
        tell: Callable[[TimeLeft], None] | None = None,
        journal: str | None = None,
        no_journal: bool = False,
        model: str | None = None,
        notes: str = "",
        keep_identity: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.every_s = every_s
        self.off = False
        self._tell = tell
        self._journal, self._no_journal = journal, no_journal
        self._name, self._notes, self._keep_identity = model, notes, keep_identity
        self._clock = clock
        self._watch = Stopwatch(clock)
        self._running = self._speaks = False
        self._next_s = 0.0
        self._step = self._total = self._begun_at = 0
        self._losses: list[float] = []

    # What an engine's hooks call

    def _begin(self, speaks: bool, step: int) -> None:
        """Begin or resume a training at `step`. Only one rank reports and stores."""
        self._watch = Stopwatch(self._clock)
        self._running = True
        self._speaks, self._begun_at, self._step, self._losses = speaks, step, step, []
        self._next_s = self._watch.begun + min(FIRST_S, self.every_s)

    def _done(self, step: int, left: Callable[[], TimeLeft | None]) -> None:
        """Complete one step, the `step`-th of the training, and report what is `left` when it is time to."""
        now = self._watch.mark("step")
        self._watch.done("step")
        self._step = step
        if self._speaks and now >= self._next_s and self._watch.count["step"] >= FIRST_STEPS:
            self._next_s = now + self.every_s
            estimate = left()
            if estimate is not None and self._tell is not None:
                self._tell(estimate)
            elif estimate is not None:
                say(report_line(estimate, counted=self.counted))

    def _left(
        self,
        steps_left: float,
        evaluations: float,
        guess_s: float | None,
        checkpoints: float,
        epochs: float,
    ) -> TimeLeft | None:
        """The remaining time. `guess_s`: seconds of an evaluation before the first one."""
        times = self._watch.times
        others = [
            Other("evaluation", times["evaluation"], evaluations, guess_s),
            Other("checkpoint", times["checkpoint"], checkpoints),
            Other("epoch", times["epoch"], epochs if times["epoch"] else 0),
        ]
        return time_left(
            self._step, self._total, tuple(times["step"]), steps_left, others, self._watch.since_s
        )

    def _guess_evaluation_s(self, samples: float | None, samples_per_step: float) -> float | None:
        """Seconds of an evaluation before the first one: the forward passes of its samples, as a share of a step's time."""
        step_s = self._watch.times["step"]
        if samples is None or not step_s:
            return None
        return FORWARD_SHARE * statistics.median(step_s) * samples / samples_per_step

    def _end(
        self,
        execution: Execution,
        device: str,
        ended: str = "",
        micro_steps: int = 1,
        **fields: Any,
    ) -> None:
        """End the training, for the reason `ended` where it was stopped: report its time, and store it.

        `micro_steps`: how many counted units make an optimizer step.
        """
        self._running = False
        step_s = tuple(self._watch.times["step"])
        if not self._speaks or not step_s:
            return
        if self._tell is None:
            say(summary_line(self._watch, self._step - self._begun_at, self.counted, ended))
        if not self._no_journal:
            stopped = (
                f"stopped by {ended} at {self.counted} {self._step} of {self._total}"
                if ended
                else ""
            )
            notes = "; ".join(filter(None, (self._notes, stopped)))
            self._store(
                execution,
                device,
                steps_of(step_s, micro_steps)[-KEPT_IN_JOURNAL:],
                notes=notes,
                **fields,
            )

    def _store(
        self,
        execution: Execution,
        device: str,
        step_s: tuple[float, ...],
        *,
        engine: str,
        **fields: Any,
    ) -> None:
        """Store the training's latest steps in the journal; `device` is "cpu" or "cuda". Imports torch."""
        from trainpace.journal import Entry, Journal, anonymous_entry, new_id, now_utc
        from trainpace.measure import device_in, environment

        warm = warmup_steps(step_s)
        step_ms = tuple(1e3 * s for s in step_s)
        low, high = median_interval(step_ms[warm:])
        around = environment(device) | {"engine": f"{engine} {version(engine)}"}
        entry = Entry(
            id=new_id(),
            created_at=now_utc(),
            kind="watch",
            outcome="ok",
            model=self._name or "",
            execution=execution,
            device=device_in(around),
            num_devices=execution.world_size,
            step_time_ms=statistics.median(step_ms[warm:]),
            step_times_ms=step_ms[warm:],
            warmup_ms=step_ms[:warm],
            interval_ms=Interval(
                low=low, high=high, coverage=0.9, basis="order of this run's steps"
            ),
            losses=tuple(loss if math.isfinite(loss) else None for loss in self._losses),
            environment=around,
            **fields,
        )
        with Journal.open(self._journal) as journal:
            journal.add(entry if self._keep_identity else anonymous_entry(entry))


def steps_of(seconds: Sequence[float], micro_steps: int) -> tuple[float, ...]:
    """Seconds of optimizer steps from those of their micro-steps, counted from the end; one step where there are too few."""
    first = len(seconds) % micro_steps if len(seconds) >= micro_steps else 0
    return tuple(
        math.fsum(seconds[i : i + micro_steps]) for i in range(first, len(seconds), micro_steps)
    )


def report_line(left: TimeLeft, counted: str = "step") -> str:
    """One line: the step, the remaining time with its interval, the time of the end, and what is not included."""
    now = datetime.datetime.now()
    end = now + datetime.timedelta(seconds=left.seconds)
    at = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%a %d %b %H:%M}"
    low, high = format_duration(left.interval_s.low), format_duration(left.interval_s.high)
    without = (
        f", without {' and '.join(f'{name}s' for name in left.unseen)}, none seen yet"
        if left.unseen
        else ""
    )
    return (
        f"trainpace: {counted} {left.step:,} of {left.total_steps:,},"
        f" {format_duration(left.seconds)} left ({low} to {high}, 90 %){without}, until about {at}"
    )


def summary_line(watch: Stopwatch, steps: int, counted: str = "step", ended: str = "") -> str:
    """One line at the end: the steps, the total time, and the time outside steps."""
    median = format_duration(statistics.median(watch.times["step"]))
    works: tuple[Work, ...] = ("evaluation", "checkpoint")
    beside = [
        f"{watch.count[w]} {w}s in {format_duration(watch.total_s[w])}"
        for w in works
        if watch.count[w]
    ]
    stopped = f", stopped by {ended}" if ended else ""
    return (
        f"trainpace: {steps:,} {counted}{'e' if counted == 'batch' else ''}s in"
        f" {format_duration(watch.elapsed_s)}, median {counted} {median}"
        + (f"; {', '.join(beside)}" if beside else "")
        + stopped
    )
