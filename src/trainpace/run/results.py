"""Results of a ladder: comparisons of trials, the stored record, and the table.

A rung is kept if it is faster beyond the noise of both setups and its loss does not diverge. A rung
and the baseline start from the same weights and read the same samples in the same order
(`Trial.seed`). Their loss curves therefore differ only by the effect of the rung. Some effects are
legitimate: bf16 rounding, batch statistics, augmentation.

The curves are smoothed and compared within a tolerance. The spread between two baseline trials with
different seeds is added to it. The tolerance is a share of the baseline's first loss, because a
loss may approach 0.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.outcome import Interval, JobTime
from trainpace.core.records import Record
from trainpace.core.stats import noise_of, repeat_interval, student_t_95
from trainpace.job import epoch_steps, training_of
from trainpace.journal import Entry, new_id, now_utc, printable
from trainpace.run.ladder import Ladder, Rung, Setup, words_of
from trainpace.run.step_forecasts import StepForecast
from trainpace.run.trial import TrialResult

BETWEEN_PROCESSES = 0.05
"""Assumed relative standard deviation of a median between processes, for single trials.

It decides nothing. A ratio nearer to 1 than `CLEAR` is measured again, and a clear ratio is far
beyond this noise.
"""
CLEAR = 1.5
"""Speed ratio from which a gain is not measured again. The inverse counts too."""
Verdict = Literal["ok", "drifts", "diverges", "not compared"]
WINDOWS = 4
"""Number of equal windows of a loss curve. The smoothed curve is the mean of each window."""
FEWEST_A_WINDOW = 2
"""Minimum number of steps per window. Shorter loss curves are not compared."""
SMALLEST_SCALE = 1e-6
"""Smallest first loss that differences are relative to."""
Floats = NDArray[np.float64]


class Gain(Record):
    """Ratio old time / new time with its 90% interval over trials. Above 1 is faster."""

    ratio: float
    low: float
    high: float
    trials: int

    @property
    def faster(self) -> bool:
        """True if the whole 90% interval is above 1."""
        return self.low > 1

    @property
    def clear(self) -> bool:
        """True if the ratio is so far from 1 that more trials would not change the decision."""
        return self.ratio >= CLEAR or self.ratio <= 1 / CLEAR


def gain_of(old_ms: Sequence[float], new_ms: Sequence[float]) -> Gain:
    """Return the gain from the median step times of trials. Each trial ran in its own process.

    With one trial per setup, the noise is assumed (`BETWEEN_PROCESSES`). With more, the noise of
    the logarithms is pooled from the repeats, and Student's t-test compares the means. Welch's test
    would need more trials than a ladder has.
    """
    noise = noise_of({0: old_ms, 1: new_ms})
    logs = [statistics.fmean(math.log(v) for v in values) for values in (old_ms, new_ms)]
    each = 1 / len(old_ms) + 1 / len(new_ms)
    if noise is None:
        half = 1.645 * BETWEEN_PROCESSES * math.sqrt(each)
    else:
        half = student_t_95(noise.degrees) * noise.relative * math.sqrt(each)
    middle = logs[0] - logs[1]
    return Gain(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        trials=len(old_ms) + len(new_ms),
    )


class LossCheck(Record):
    """Comparison of a rung's smoothed loss with the baseline's.

    Attributes:
        worst: Largest difference in any window, as a share of the baseline's first loss.
        at_end: Difference in the last window, as the same share.
        tolerance: Allowed difference. It includes the baseline's own spread.
        steps: Number of steps that both curves have.
        smoothed_over: Steps per window.
    """

    verdict: Verdict
    reason: str = ""
    worst: float = 0.0
    at_end: float = 0.0
    tolerance: float = 0.0
    steps: int = 0
    smoothed_over: int = 0


def own_spread(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the RMS difference between the smoothed losses of two baseline trials.

    The trials have different seeds.
    """
    difference = _difference(one, other)
    return 0.0 if difference is None else float(np.sqrt(np.mean(difference**2)))


def compare(
    baseline: Sequence[float], rung: Sequence[float], tolerance: float, spread: float = 0.0
) -> LossCheck:
    """Compare two loss curves over the steps that both have.

    - diverges: the rung's loss is not finite, or exceeds the baseline's by more than the tolerance
      in the last window.
    - drifts: another window differs by more than the tolerance, or the last one is better by more
      than the tolerance.
    """
    bad = next((i for i, loss in enumerate(rung) if not math.isfinite(loss)), None)
    if bad is not None:
        reason = f"the loss became {rung[bad]} at step {bad + 1}"
        return LossCheck(verdict="diverges", reason=reason)
    steps = min(len(baseline), len(rung))
    difference = _difference(baseline, rung)
    if difference is None:
        return LossCheck(verdict="not compared", reason="too few steps", steps=steps)
    worst = float(difference[np.argmax(np.abs(difference))])
    at_end, allowed = float(difference[-1]), tolerance + spread
    verdict: Verdict = "ok"
    reason = ""
    if at_end > allowed:
        verdict, reason = "diverges", f"the loss ends {at_end:.0%} of the first loss above"
    elif abs(worst) > allowed:
        verdict, reason = "drifts", f"the loss is up to {abs(worst):.0%} of the first loss off"
    if reason:
        reason += f" the baseline's ({allowed:.0%} allowed, over {steps} steps)"
    return LossCheck(
        verdict=verdict,
        reason=reason,
        worst=worst,
        at_end=at_end,
        tolerance=allowed,
        steps=steps,
        smoothed_over=steps // WINDOWS,
    )


def _difference(one: Sequence[float], other: Sequence[float]) -> Floats | None:
    """Return the second curve minus the first in each window, or None if there are too few steps.

    The differences are relative to the first window of the first curve. Steps that do not fill the
    last window are dropped.
    """
    width = min(len(one), len(other)) // WINDOWS
    if width < FEWEST_A_WINDOW:
        return None
    means = [
        np.asarray(c[: width * WINDOWS], dtype=float).reshape(WINDOWS, width).mean(1)
        for c in (one, other)
    ]
    scale = max(abs(float(means[0][0])), SMALLEST_SCALE)
    return np.asarray((means[1] - means[0]) / scale)


def decision(gain: Gain, check: LossCheck) -> tuple[bool, str]:
    """Return (True if the rung is kept, the reason)."""
    if check.verdict == "diverges":
        return False, check.reason
    figures = f"{gain.ratio:.2f}x ({gain.low:.2f} to {gain.high:.2f})"
    if gain.faster:
        return True, f"{figures}; {check.reason}" if check.reason else figures
    return False, f"{'slower' if gain.high < 1 else 'no gain beyond the noise'}: {figures}"


_OUTCOMES = {"out of memory": "out_of_memory", "timed out": "timeout"}
_MEASURED = (
    "step_time_ms interval_ms losses peak_memory_gib reserved_memory_gib environment loss".split()
)


_OF_THE_TRIAL = "losses peak_memory_gib start_up_s reserved_memory_gib notes environment".split()
_OF_THE_TRIAL += ["noise_scale", "loss"]


class Measured(Record):
    """Measurements of one setup.

    `trials_ms` holds the step time of every trial. All other fields are from the first trial.

    Attributes:
        compute_ms: Step time without the wait for data.
        noise_scale: Gradient noise scale: samples, low and high of its 90% interval, and steps.
            Empty if it was not measured.
    """

    trials_ms: tuple[float, ...]
    first_interval_ms: Interval
    data_wait_ms: float
    compute_ms: float
    losses: tuple[float, ...]
    peak_memory_gib: float | None
    start_up_s: float
    reserved_memory_gib: float | None = None
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    noise_scale: dict[str, float] = msgspec.field(default_factory=dict)
    loss: str | None = None

    @property
    def step_time_ms(self) -> float:
        """Median step time over all trials."""
        return statistics.median(self.trials_ms)

    @property
    def interval_ms(self) -> Interval:
        """Interval for the step time of one more trial.

        After a single trial, it is the interval over the trial's own steps.
        """
        noise = noise_of({0: self.trials_ms})
        return self.first_interval_ms if noise is None else repeat_interval(self.trials_ms, noise)


def measured_of(result: TrialResult) -> Measured:
    """Return the measurement of a setup from its first trial."""
    middle = statistics.fmean if result.uneven else statistics.median
    # Subtract step by step. A difference of medians would drown in the spread of long waits.
    compute_ms = [
        step - wait for step, wait in zip(result.step_ms, result.data_wait_ms, strict=True)
    ]
    return Measured(
        trials_ms=(result.step_time_ms,),
        first_interval_ms=result.interval_ms,
        data_wait_ms=middle(result.data_wait_ms),
        compute_ms=middle(compute_ms),
        **{name: getattr(result, name) for name in _OF_THE_TRIAL},
    )


class Attempt(Record):
    """One alternative of a rung: its forecast, and its measurement or the reason for none."""

    setup: Setup
    foreseen: StepForecast
    measured: Measured | None = None
    failure: str = ""


class RungResult(Record):
    """Result of one rung.

    Attributes:
        key: Key that is equal for rungs that would be measured the same way.
        chosen: Index in `tried` of the fastest alternative, or None if none could be measured.
        base_ms: Step times of the kept setup that `gain` compares with.
        seconds: Time spent on the rung.
        precompute_s: Time to make its shards, which happens once.
    """

    title: str
    key: str
    tried: tuple[Attempt, ...] = ()
    chosen: int | None = None
    kept: bool = False
    reason: str = ""
    base_ms: tuple[float, ...] = ()
    gain: Gain | None = None
    losses: LossCheck | None = None
    precompute_s: float = 0.0
    seconds: float = 0.0

    @property
    def lasting(self) -> bool:
        """True if another try would give the same result.

        False if an engine was missing or the code raised an error.
        """
        ended = any(t.failure.startswith(("timed out", "out of memory")) for t in self.tried)
        return self.chosen is not None or ended

    @property
    def best(self) -> Attempt | None:
        """Fastest alternative, or None if none could be measured."""
        return None if self.chosen is None else self.tried[self.chosen]


class EndToEnd(Record):
    """Comparison of the first setup and the last kept one, in alternating trials after the climb.

    Attributes:
        key: Key that is equal for setups that would be measured the same way.
        first_ms: Step time of each trial of the first setup.
        last_ms: Step time of each trial of the last setup.
        gain: Ratio of the times per sample.
    """

    key: str
    first_ms: tuple[float, ...]
    last_ms: tuple[float, ...]
    gain: Gain


class LadderResult(Record):
    """Results of a climb: the baseline and the rungs tried so far, in order.

    Attributes:
        loss_spread: Spread of the baseline's loss between two seeds.
        end_to_end: None before the climb ends, if fewer than two rungs were kept, or if it failed.
        others: Reusable rungs that earlier climbs measured. They are only in the stored state.
    """

    ladder: Ladder
    baseline: RungResult
    loss_spread: float = 0.0
    rungs: tuple[RungResult, ...] = ()
    end_to_end: EndToEnd | None = None
    finished: bool = False
    stopped: str = ""
    others: tuple[RungResult, ...] = ()

    @property
    def start(self) -> Measured:
        """Measurement of the baseline."""
        assert self.baseline.best is not None
        assert self.baseline.best.measured is not None
        return self.baseline.best.measured

    @property
    def kept_attempt(self) -> Attempt:
        """Alternative that was kept last, or the baseline."""
        best = next((r for r in reversed(self.rungs) if r.kept), self.baseline).best
        assert best is not None
        return best

    @property
    def kept(self) -> tuple[Setup, Measured]:
        """Setup that was kept last, with its measurement."""
        assert self.kept_attempt.measured is not None
        return self.kept_attempt.setup, self.kept_attempt.measured


def noise_scale_of(result: LadderResult) -> tuple[Setup, dict[str, float]] | None:
    """Return the gradient noise scale and the setup that it was measured with, or None.

    The noise scale has no key "samples" if there were too few steps.
    """
    attempts = [attempt for rung in (result.baseline, *result.rungs) for attempt in rung.tried]
    scales = [
        (a.setup, a.measured.noise_scale)
        for a in attempts
        if a.measured is not None and a.measured.noise_scale
    ]
    return next((scale for scale in scales if "samples" in scale[1]), scales[0] if scales else None)


def job_time(
    ladder: Ladder, attempt: Attempt, step_ms: float, precompute_s: float = 0.0
) -> JobTime | None:
    """Return the time of the whole job at `step_ms` per step, or None if the ladder has no job.

    The time to make shards is included.
    """
    if ladder.job is None:
        return None
    e, price = attempt.setup.execution, ladder.price_usd_per_hour
    per_device = None if price is None else price / e.nproc_per_node
    conditions = replace(
        ladder.conditions, price_usd_per_device_hour=per_device, preparing_s=precompute_s
    )
    training = training_of(ladder.job, e, conditions, attempt.foreseen.state_bytes)
    return training.time(step_ms / 1e3, step_ms / 1e3 * attempt.foreseen.evaluating_share)


def epoch_s(ladder: Ladder, attempt: Attempt, step_ms: float) -> float | None:
    """Return the seconds of one epoch with its validation, or None if its size is unknown."""
    job, c, e = ladder.job, ladder.conditions, attempt.setup.execution
    if job is None or job.samples_per_epoch is None:
        return None
    steps, step_s = epoch_steps(job, e).steps, step_ms / 1e3
    validation_s = (
        c.evaluation_samples / e.global_batch * step_s * attempt.foreseen.evaluating_share
    )
    if c.evaluate_every_steps is not None:
        validation_s += steps / c.evaluate_every_steps * c.evaluation_s
    return steps * step_s + validation_s


class LadderRow(Record):
    """One row of a ladder's table.

    Attributes:
        ratio: Old / new time per sample, compared with the setup kept before. None if not measured.
        total: Product of the ratios up to this row. None if not measured.
        forecast_ms: Forecast time per step.
        measured_ms: Measured time per step.
        epoch_s: Time of one epoch, with its validation.
        no_forecast: Reason why there is no forecast.
    """

    title: str
    forecast_ms: float | None = None
    forecast_interval_ms: Interval | None = None
    no_forecast: str = ""
    measured_ms: float | None = None
    measured_interval_ms: Interval | None = None
    epoch_s: float | None = None
    ratio: float | None = None
    total: float | None = None
    memory_gib: float | None = None
    job_s: float | None = None
    cost_usd: float | None = None
    losses: str = ""
    kept: bool = True
    why: str = ""


def rows_of(result: LadderResult) -> list[LadderRow]:
    """Return the rows of the baseline and of the rungs tried so far.

    The time to make shards that were kept counts in the jobs of all later rungs.
    """
    rows = [_row(result, result.baseline, result.baseline.title, 0.0, 1.0)]
    precompute_s, total = 0.0, 1.0
    # zip is not strict, because the climb may have stopped early.
    for rung, tried in zip(result.ladder.rungs, result.rungs, strict=False):
        spent_s = precompute_s + tried.precompute_s
        rows.append(_row(result, tried, _title(rung, tried), spent_s, total))
        if tried.kept:
            precompute_s, total = spent_s, rows[-1].total or total
    return rows


def _title(rung: Rung, result: RungResult) -> str:
    """Return the rung's title, with the chosen value if several were tried."""
    if result.chosen is None:
        return result.title
    values = rung.alternatives()[result.chosen]
    several = (
        key for key, value in rung.changes.items() if isinstance(value, tuple) and len(value) > 1
    )
    chosen = [f"{key} {values[key]}" for key in several]
    return f"{result.title} ({', '.join(chosen)})" if chosen else result.title


def _row(
    ladder: LadderResult, result: RungResult, title: str, precompute_s: float, total_before: float
) -> LadderRow:
    """Return the row of a rung. If nothing was measured, it shows the first alternative."""
    best = result.best or next(iter(result.tried), None)
    row = LadderRow(title=title, kept=False, why=result.reason)
    if best is None:
        return row
    row = replace(
        row,
        forecast_ms=best.foreseen.step_ms,
        forecast_interval_ms=best.foreseen.interval_ms,
        no_forecast=best.foreseen.reason,
    )
    measured, ratio = best.measured, result.gain.ratio if result.gain else None
    if measured is None:
        return row
    job = job_time(ladder.ladder, best, measured.step_time_ms, precompute_s)
    return replace(
        row,
        measured_ms=measured.step_time_ms,
        measured_interval_ms=measured.interval_ms,
        epoch_s=epoch_s(ladder.ladder, best, measured.step_time_ms),
        ratio=ratio,
        total=total_before * (ratio or 1.0),
        memory_gib=measured.peak_memory_gib,
        job_s=job.total_s if job else None,
        cost_usd=job.usd if job else None,
        losses=result.losses.verdict if result.losses else "",
        kept=result.kept,
    )


def entry_of_trial(attempt: Attempt, device: str, seed: int, model: str) -> Entry:
    """Return a trial and its forecast as a journal entry."""
    e, measured, foreseen = attempt.setup.execution, attempt.measured, attempt.foreseen
    fields: dict[str, Any] = {}
    if (interval := foreseen.interval_ms) is not None:
        fields = {
            "forecast_ms": foreseen.step_ms,
            "forecast_low_ms": interval.low,
            "forecast_high_ms": interval.high,
            "forecast_basis": foreseen.basis,
        }
    if measured is None:
        kind = attempt.failure.partition(":")[0]
        fields |= {"outcome": _OUTCOMES.get(kind, "crashed"), "reason": printable(attempt.failure)}
    else:
        fields |= {"outcome": "ok"} | {name: getattr(measured, name) for name in _MEASURED}
    return Entry(
        id=new_id(),
        created_at=now_utc(),
        kind="run",
        model=model,
        device=device,
        execution=e,
        num_devices=e.world_size,
        seed=seed,
        notes=words_of(attempt.setup),
        **fields,
    )
