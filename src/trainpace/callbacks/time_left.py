"""Estimate of a training's remaining time, and the reporter that all engine callbacks share.

    remaining time = remaining steps x mean step
                     + for each other kind of work: remaining count x its mean

The current pace comes from looking back in doubling blocks. The first block with a different median
ends the window (the smallest of the windows that agree, after Lepski 1991). The window then starts
where two levels fit best.

A pace that has held for w steps is expected to hold for as long again. Of R remaining steps,
w ln(1 + R / w) run at that pace (Gott 1993, doi:10.1038/363315a0). The rest run at the mean of all
steps.
Thus a lasting change soon counts, and ten quick steps do not.

The first steps, which may compile, are skipped as warm-up. Rare spikes are winsorised (Tukey 1962):
the slowest hundredth counts as the slowest of the other steps. Thus a single stall of half a minute
is not expected again, but a pause at every fiftieth step is.
"""

import datetime
import functools
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, get_args

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval
from trainpace.core.records import Record
from trainpace.core.stats import (
    DRIFT,
    consecutive_blocks,
    median_interval,
    student_t_95,
    warmup_steps,
)
from trainpace.core.units import format_duration

COVERAGE = 0.9
"""Coverage of all intervals."""
LEAST_BLOCK = 8
"""Steps in the first of the doubling blocks."""
BLOCKS = 8
"""Number of blocks of steps, and of latest durations of other work, for an interval."""
SHIFT = 0.08
"""Smallest relative change between medians of neighbouring blocks that counts as a new pace.

The change must also exceed the noise.
"""
UNSEEN = 2.0
"""Factor by which work that was never timed may take more or less time than estimated."""
SEEN_ONCE = 0.25
"""Expected relative spread of a second evaluation if only one was timed."""


class Other(NamedTuple):
    """Work outside steps: evaluations, checkpoints, or the starts of epochs.

    Attributes:
        seconds: Durations so far, oldest first.
        times_left: Number of remaining occurrences.
        guess_s: Estimated seconds per occurrence before the first one, or None without an estimate.
    """

    name: str
    seconds: Sequence[float]
    times_left: float
    guess_s: float | None = None


class TimeLeft(Record):
    """Estimate of the seconds until the end of a training, made at `step` of `total_steps`.

    Attributes:
        other_s: Part of `seconds` for each kind of work outside steps.
        unseen: Kinds of future work without an estimate. `seconds` does not include them.
    """

    step: int
    total_steps: int
    seconds: float
    interval_s: Interval
    step_time_ms: float
    other_s: dict[str, float]
    unseen: tuple[str, ...] = ()


class Pace(NamedTuple):
    """Mean seconds per remaining step, the interval's half-width, and steps at this pace."""

    mean_s: float
    half_width_s: float
    window: int


def time_left(
    step: int,
    total_steps: int,
    step_s: Sequence[float],
    steps_left: float,
    others: Sequence[Other] = (),
    since_s: float = 0.0,
) -> TimeLeft | None:
    """Estimate the seconds until the end of a training.

    Args:
        step: Number of the current step, for display.
        total_steps: Number of all steps, for display.
        step_s: Seconds of the latest timed steps without other work, oldest first.
        steps_left: Remaining steps for the estimate. They may be micro-steps.
        others: Work outside steps.
        since_s: Seconds since the last timed step ended.

    Returns:
        The estimate, or None before any step was timed.

    Raises:
        TrainpaceError: A time or a remaining count is negative.
    """
    if min(steps_left, since_s, *step_s, *(o.times_left for o in others)) < 0:
        raise TrainpaceError("Steps, times and remaining counts must be 0 or more.")
    if not step_s:
        return None
    pace = pace_of(step_s, steps_left)
    middle = pace.mean_s * steps_left
    below = above = pace.half_width_s * steps_left
    other_s: dict[str, float] = {}
    unseen = []
    for other in others:
        if not other.times_left:
            continue
        if (each := _each(other)) is None:
            unseen.append(other.name)
            continue
        mean, less, more = (seconds * other.times_left for seconds in each)
        other_s[other.name] = mean
        middle += mean
        # Errors are independent, so their squares add up.
        below, above = math.hypot(below, less), math.hypot(above, more)
    passed = min(since_s, pace.mean_s) if steps_left else 0.0
    basis = f"{len(step_s)} steps"
    if pace.window < len(step_s):
        basis += f", the last {pace.window} at another pace"
    low, high = max(0.0, middle - below - passed), max(0.0, middle + above - passed)
    return TimeLeft(
        step=step,
        total_steps=total_steps,
        seconds=max(0.0, middle - passed),
        step_time_ms=1e3 * pace.mean_s,
        other_s=other_s,
        unseen=tuple(unseen),
        interval_s=Interval(low=low, high=high, coverage=COVERAGE, basis=basis),
    )


def pace_of(step_s: Sequence[float], steps_left: float) -> Pace:
    """Return the expected pace of the next `steps_left` steps, given the seconds of past steps."""
    # Skip the first steps, which may compile, allocate and open files.
    steady = list(step_s[warmup_steps(step_s) if len(step_s) >= 6 else len(step_s) // 2 :])
    recent = _latest(steady)
    n, holds = len(recent), 1.0
    if steps_left and n < len(steady):
        holds = n * math.log1p(steps_left / n) / steps_left
    whole = statistics.fmean(_winsorised(steady))
    mean = holds * statistics.fmean(_winsorised(recent)) + (1 - holds) * whole
    if n < 3:
        return Pace(mean, mean / 2, n)
    # A pace that has changed may change again.
    chance = max(_chance(recent, steps_left), _chance(steady, steps_left))
    return Pace(mean, math.hypot(chance, DRIFT * mean), n)


def _chance(values: Sequence[float], steps_left: float) -> float:
    """Return the half-width of the interval for the mean of `steps_left` more steps.

    It is computed from means of blocks, because neighbouring steps are correlated.
    """
    blocks = [statistics.fmean(block) for block in consecutive_blocks(_winsorised(values), BLOCKS)]
    # The mean so far has an error of spread / sqrt(seen), and the mean of the coming blocks an
    # error of spread / sqrt(coming).
    coming = max(1.0, steps_left / (len(values) / len(blocks)))
    return (
        student_t_95(len(blocks) - 1)
        * statistics.stdev(blocks)
        * math.sqrt(1 / len(blocks) + 1 / coming)
    )


def multiples_in(every: int, after: int, last: int) -> int:
    """Count the multiples of `every` in (after, last]. 0 if `every` is not positive."""
    return 0 if every <= 0 or last <= after else last // every - after // every


def _latest(values: list[float]) -> list[float]:
    """Return the longest run of latest values with equal medians in doubling blocks."""
    window = LEAST_BLOCK
    while 2 * window <= len(values) + window // 2:
        if _differ(values[-window:], values[-2 * window : -window]):
            both = values[-2 * window :]
            return both[_change(_winsorised(both)) :]
        window *= 2
    return values


def _change(values: Sequence[float]) -> int:
    """Return the index that splits the values into two levels with the least squared error.

    The index is at least a few values away from either end.
    """
    edge = min(LEAST_BLOCK // 2, len(values) // 2)
    total, best, at = math.fsum(values), -1.0, edge
    before = math.fsum(values[: edge - 1])
    for i in range(edge, len(values) - edge + 1):
        before += values[i - 1]
        explained = before**2 / i + (total - before) ** 2 / (len(values) - i)
        if explained > best:
            best, at = explained, i
    return at


def _differ(recent: Sequence[float], older: Sequence[float]) -> bool:
    a, b = statistics.median(recent), statistics.median(older)
    quartiles = [(len(values), *statistics.quantiles(values, n=4)) for values in (recent, older)]
    # In a normal sample, the standard error of a median is 1.2533 sigma / sqrt(n), and sigma is
    # 0.7413 x the interquartile range.
    noise = math.hypot(
        *(1.2533 * 0.7413 * (high - low) / math.sqrt(n) for n, low, _, high in quartiles)
    )
    return abs(a - b) > max(SHIFT * min(a, b), 3 * noise)


def _winsorised(values: Sequence[float]) -> list[float]:
    n = len(values)
    if n < 5:
        return list(values)
    ceiling = sorted(values)[n - math.ceil(n / 100) - 1]
    return [min(value, ceiling) for value in values]


def _each(other: Other) -> tuple[float, float, float] | None:
    """Return the mean seconds of one occurrence, and the interval's widths below and above it.

    None without an estimate.
    """
    guess_s = other.guess_s
    if not other.seconds:
        return (
            None
            if guess_s is None
            else (guess_s, guess_s - guess_s / UNSEEN, guess_s * UNSEEN - guess_s)
        )
    latest = list(other.seconds)[-BLOCKS:]
    if 2 < len(other.seconds) <= BLOCKS:
        del latest[0]  # The first occurrence is the slowest.
    mean = statistics.fmean(latest)
    if len(latest) == 1:
        return mean, mean * SEEN_ONCE, mean * SEEN_ONCE
    spread = statistics.stdev(latest) * math.sqrt(1 / len(latest) + 1 / max(1.0, other.times_left))
    half = math.hypot(student_t_95(len(latest) - 1) * spread, DRIFT * mean)
    return mean, min(half, mean), half


class FitState(NamedTuple):
    """State of Lightning's fit loop after a batch, before the validation that may follow it.

    Batches are counted instead of optimizer steps: with manual optimization, a batch may step
    several optimizers or none.

    Attributes:
        epoch: Current epoch, from 0.
        batch: Batches that are done in this epoch.
        total_batch: Batches that are done in the whole run.
        epoch_batches: Batches per epoch, or None if unknown.
        max_epochs: Limit of epochs, or None without a limit.
        global_step: Optimizer steps that are done.
        max_steps: Limit of optimizer steps, or None without a limit.
        steps_per_batch: Optimizer steps per batch with manual optimization, else 1.
        accumulation: Batches per optimizer step.
        val_every_batches: Batches of an epoch between validations. None validates at the end of
            epochs, 0 never.
        val_every_epochs: Only every n-th epoch validates. If None, `val_every_batches` counts
            batches of the whole run.
    """

    epoch: int
    batch: int
    total_batch: int
    epoch_batches: int | None
    max_epochs: int | None
    global_step: int = 0
    max_steps: int | None = None
    steps_per_batch: float = 1.0
    accumulation: int = 1
    val_every_batches: int | None = 0
    val_every_epochs: int | None = 1


class Remaining(NamedTuple):
    """Remaining counts of a fit. `total_batches` includes completed batches."""

    batches: int
    evaluations: int
    epochs: int
    total_batches: int


def remaining_counts(s: FitState) -> Remaining | None:
    """Return the remaining counts, or None if the end is unknown.

    The end is unknown without a limit, or for a stream of unknown length. The rules are those of
    lightning 2.6, loops/training_epoch_loop.py and loops/fit_loop.py.
    """
    if s.epoch_batches == 0:  # Lightning skips a fit without batches.
        return Remaining(0, 0, 0, s.total_batch)
    limits = []
    if s.max_epochs is not None and s.epoch_batches is not None:
        limits.append((s.max_epochs - s.epoch) * s.epoch_batches - s.batch)
    if s.max_steps is not None:
        limits.append(_batches_by_steps(s, s.max_steps))
    if not limits:
        return None
    batches = max(0, min(limits))
    if s.epoch_batches is None:
        return Remaining(batches, 0, 0, s.total_batch + batches)
    last = s.batch + batches  # Counted from the start of the current epoch.
    epochs = max(0, math.ceil(last / s.epoch_batches) - 1)
    return Remaining(batches, _evaluations(s, batches), epochs, s.total_batch + batches)


def _batches_by_steps(s: FitState, max_steps: int) -> int:
    """Return the number of batches until `max_steps` optimizer steps.

    The last batches of an epoch make an optimizer step even if they are fewer than `accumulation`.
    """
    steps = max_steps - s.global_step
    if steps <= 0:
        return 0
    if s.accumulation == 1 or s.epoch_batches is None:
        return math.ceil(steps * s.accumulation / s.steps_per_batch - s.batch % s.accumulation)
    per_epoch = math.ceil(s.epoch_batches / s.accumulation)
    done = per_epoch if s.batch == s.epoch_batches else s.batch // s.accumulation
    whole, rest = divmod(done + steps, per_epoch)
    return whole * s.epoch_batches + min(s.epoch_batches, rest * s.accumulation) - s.batch


def _evaluations(s: FitState, batches: int) -> int:
    assert s.epoch_batches is not None
    every = s.epoch_batches if s.val_every_batches is None else s.val_every_batches
    if every <= 0:
        return 0
    if s.val_every_epochs is None:
        return multiples_in(every, s.total_batch - 1, s.total_batch + batches)
    last = s.batch + batches
    whole, rest = divmod(last, s.epoch_batches)

    def validates(epoch: int) -> bool:
        return (epoch + 1) % (s.val_every_epochs or 1) == 0

    done = (s.batch - 1) // every if validates(s.epoch) and s.batch else 0
    # Epochs that end before the run does.
    full_epochs = multiples_in(s.val_every_epochs, s.epoch, s.epoch + whole)
    return (
        full_epochs * (s.epoch_batches // every)
        + (rest // every if validates(s.epoch + whole) else 0)
        - done
    )


FIRST_S = 5.0
"""Seconds until the first report, or less if reports are more frequent."""
FIRST_STEPS = 5
"""Least number of steps before the first report."""
KEPT_IN_JOURNAL = 1000
"""Largest number of step times that are stored."""
FORWARD_SHARE = 1 / 3
"""Forward pass as a share of a sample's forward and backward pass.

The backward pass has twice the matmuls (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
"""

Work = Literal["step", "evaluation", "checkpoint", "epoch"]
Hook = Callable[..., None]


class Stopwatch:
    """Collects the times of the latest steps and of other work between them.

    The time between two marks is charged to the work that ends at the second mark. A step may be
    charged in parts, such as its data before an evaluation and its computation after it. `done`
    completes the step.

    Args:
        clock: Returns monotonic seconds.
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
        """Charge the time since the last mark to `work` and return the current time."""
        now = self._clock()
        self.pending[work] = self.pending.get(work, 0.0) + now - self._last
        self._last = now
        return now

    def done(self, work: Work) -> None:
        """Complete one occurrence of `work` with all time charged to it since the last one."""
        seconds = self.pending.pop(work, None)
        if seconds is not None:
            self.times[work].append(seconds)
            self.total_s[work] += seconds
            self.count[work] += 1

    @property
    def since_s(self) -> float:
        """Seconds since the last mark."""
        return self._clock() - self._last

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.begun


def harmless(hook: Hook, in_training: bool = False) -> Hook:
    """Wrap a hook so that it cannot break the training.

    The first error is reported and turns the callback off.

    Args:
        hook: Method of a `Reporter`.
        in_training: Skip the hook before and after a training.
    """

    @functools.wraps(hook)
    def guarded(self: Reporter, *args: Any, **kwargs: Any) -> None:
        if self.off or (in_training and not self._running):
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.off = True
            why = f"{type(error).__name__}: {error}"
            say(
                f"trainpace: the remaining time is no longer reported ({why}). The training is not"
                " affected."
            )

    return guarded


in_training = functools.partial(harmless, in_training=True)
"""Wrap a hook like `harmless`, and skip it before and after a training."""


def say(words: str) -> None:
    """Print one line on stderr, above a tqdm progress bar if there is one."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    try:
        if tqdm is not None:
            tqdm.write(words, file=sys.stderr)
        else:
            print(words, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # stderr is closed.
        pass


class Reporter:
    """Reports a training's remaining time and stores the run in the journal at its end.

    Args:
        every_s: Seconds between reports.
        tell: Function that receives each `TimeLeft`. By default, a line is printed on stderr.
        journal: Path or URL of the journal. By default, the user's own.
        no_journal: If True, the run is not stored.
        model: Name of the run. By default, the model's class or configuration.
        notes: Text to store with the run.
        keep_identity: If True, the run is stored without being anonymised.
        clock: Returns monotonic seconds.
    """

    counted = "step"
    """Unit that the engine's hooks count: "step" for optimizer steps, or "batch"."""

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

    # ---- methods for the hooks of an engine

    def _begin(self, speaks: bool, step: int) -> None:
        """Begin or resume a training at `step`. Only the rank with `speaks` reports and stores."""
        self._watch = Stopwatch(self._clock)
        self._running = True
        self._speaks, self._begun_at, self._step, self._losses = speaks, step, step, []
        self._next_s = self._watch.begun + min(FIRST_S, self.every_s)

    def _done(self, step: int, left: Callable[[], TimeLeft | None]) -> None:
        """Complete step number `step`, and report if a report is due.

        Args:
            step: Number of the completed step.
            left: Returns the remaining time.
        """
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
        """Return the remaining time. `guess_s` estimates an evaluation before the first has run."""
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
        """Return the estimated seconds of an evaluation before the first one has run.

        The estimate is the time of the forward passes of its samples, as a share of the step time.
        """
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
        *,
        engine: str,
        **fields: Any,
    ) -> None:
        """End the training: print a summary line and store the run. Imports torch.

        Args:
            execution: Settings of the run, for the journal.
            device: "cpu" or "cuda".
            ended: Reason for an early end, or empty.
            micro_steps: Counted units per optimizer step.
            engine: Name of the engine's package.
            fields: Further fields of the journal entry.
        """
        from trainpace.journal import Journal, anonymous_entry
        from trainpace.measure import environment

        self._running = False
        seconds = tuple(self._watch.times["step"])
        if not self._speaks or not seconds:
            return
        if self._tell is None:
            say(summary_line(self._watch, self._step - self._begun_at, self.counted, ended))
        if self._no_journal:
            return
        stopped = f"stopped by {ended} at {self.counted} {self._step} of {self._total}"
        entry = self._entry(
            steps_of(seconds, micro_steps)[-KEPT_IN_JOURNAL:],
            environment(device) | {"engine": f"{engine} {version(engine)}"},
            execution=execution,
            notes="; ".join(filter(None, (self._notes, stopped if ended else ""))),
            **fields,
        )
        with Journal.open(self._journal) as journal:
            journal.add(entry if self._keep_identity else anonymous_entry(entry))

    def _entry(self, step_s: tuple[float, ...], around: dict[str, str], **fields: Any) -> Any:
        """Return the journal entry of the latest steps, given the seconds of each."""
        from trainpace.journal import Entry, new_id, now_utc
        from trainpace.measure import device_in

        warm = warmup_steps(step_s)
        step_ms = tuple(1e3 * s for s in step_s)
        low, high = median_interval(step_ms[warm:])
        return Entry(
            id=new_id(),
            created_at=now_utc(),
            kind="watch",
            outcome="ok",
            model=self._name or "",
            device=device_in(around),
            num_devices=fields["execution"].world_size,
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


def steps_of(seconds: Sequence[float], micro_steps: int) -> tuple[float, ...]:
    """Add up seconds of micro-steps to seconds of optimizer steps, counted from the end.

    Fewer than `micro_steps` values give one step.
    """
    first = len(seconds) % micro_steps if len(seconds) >= micro_steps else 0
    return tuple(
        math.fsum(seconds[i : i + micro_steps]) for i in range(first, len(seconds), micro_steps)
    )


def report_line(left: TimeLeft, counted: str = "step") -> str:
    """Return one line with the step, the remaining time and its interval, and the time of the end.

    The line also names the work that the estimate does not include.
    """
    now = datetime.datetime.now()
    end = now + datetime.timedelta(seconds=left.seconds)
    at = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%a %d %b %H:%M}"
    low, high = format_duration(left.interval_s.low), format_duration(left.interval_s.high)
    without = ""
    if left.unseen:
        without = f", without {' and '.join(f'{name}s' for name in left.unseen)}, none seen yet"
    return (
        f"trainpace: {counted} {left.step:,} of {left.total_steps:,},"
        f" {format_duration(left.seconds)} left ({low} to {high}, 90 %){without}, until about {at}"
    )


def summary_line(watch: Stopwatch, steps: int, counted: str = "step", ended: str = "") -> str:
    """Return one line for the end: the steps, the total time, and the time outside steps."""
    median = format_duration(statistics.median(watch.times["step"]))
    works: tuple[Work, ...] = ("evaluation", "checkpoint")
    beside = [
        f"{watch.count[w]} {w}s in {format_duration(watch.total_s[w])}"
        for w in works
        if watch.count[w]
    ]
    unit = {"batch": "batches", "step": "steps"}[counted]
    line = f"trainpace: {steps:,} {unit} in {format_duration(watch.elapsed_s)}"
    parts = [f"{line}, median {counted} {median}", ", ".join(beside)]
    return "; ".join(filter(None, parts)) + (f", stopped by {ended}" if ended else "")
