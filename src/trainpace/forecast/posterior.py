"""Forecasts corrected by measurements of the same run, the same device or the same model.

log(measured / forecast) of a step is a sum of errors, each shared with other steps: with all of one
user's measurements (the same software, the same way of timing), with those on the same device, with
those of the same model, and with the same run at other batch sizes, on its device and on others.
`Relatedness` has the share of each in an error's variance. Errors of one user, device or model are
correlated as far as the two steps are made of the same parts, and once more if they also take about
as long. Given measurements, the correction and the remaining error are those of a Gaussian process
(Rasmussen and Williams 2006, section 2.2): a loosely related measurement moves a forecast little,
and many narrow its interval. One model serves `--transfer-from`, the journal and `measure`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.outcome import Forecast, Interval, Measurement, StepTime
from trainpace.core.stats import Z_95
from trainpace.forecast.intervals import Relatedness, Spread, card_deviation, fitted_spreads
from trainpace.workload import Counts, Flags, Floats, Workload

if TYPE_CHECKING:
    from trainpace.core.hardware import Device
    from trainpace.forecast.forecaster import Forecaster
    from trainpace.forecast.target import KernelModel

LARGEST_RATIO = 5.0
"""Ratio of measured and forecast above which the measurement is of another workload."""
AT_A_MEASURED_BATCH_SD = 0.03
"""Standard deviation of the logarithm of a step between two measurements (ten models on one
CPU)."""
MEASURING_SD = AT_A_MEASURED_BATCH_SD / math.sqrt(2)
"""The same of one measurement."""
SURPRISE = 2.0
"""Standard deviations above which a measured error shows that the deviation is too small. It is
then raised until the error has this many."""
PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


class Variant(NamedTuple):
    """Identity of a workload's runs over batch sizes and devices.

    It is the execution without its batch, and the size of a sample.
    """

    execution: Execution
    image_side: int | None = None
    sequence_length: int | None = None

    @classmethod
    def of(cls, execution: Execution, workload: Workload) -> Variant:
        alone = replace(execution, micro_batch=1, accumulation=1)
        return cls(alone, workload.image_side, workload.sequence_length)


class Run(NamedTuple):
    """Features that relate a step to others.

    variant: what makes it the same run, apart from model, device and batch. shares: what the step
    is made of, by `intervals.PARTS`. log_sd: the forecast's own standard deviation; card_sd: the
    part of it that a card without a run in the fit adds. step_ms: as forecast.
    """

    model: str
    device: str
    variant: Hashable
    batch: int
    shares: tuple[float, ...]
    log_sd: float
    card_sd: float = 0.0
    step_ms: float = 1.0


class Observed(NamedTuple):
    """A run that was measured.

    log_ratios: log(measured / forecast) of the step, then of its forward, backward and optimizer
    phase. noise_sd: of the measurement alone. repeat_sd: of one more measurement of the same.
    """

    run: Run
    log_ratios: tuple[float, float, float, float]
    noise_sd: float = MEASURING_SD
    repeat_sd: float = MEASURING_SD


class Runs(NamedTuple):
    """n runs as arrays of n. Models, devices and variants are numbers; shares: n x parts."""

    model: Counts
    device: Counts
    variant: Counts
    batch: Floats
    shares: Floats
    log_sd: Floats
    card_sd: Floats
    step_ms: Floats

    @property
    def variances(self) -> Floats:
        """Variances of the forecasts, without what a new card adds and the noise of measuring."""
        known_card = self.log_sd**2 - self.card_sd**2
        return np.maximum(np.maximum(known_card - MEASURING_SD**2, 0.25 * known_card), 1e-6)

    def same_run(self, other: Runs) -> Flags:
        """Return which of these are the same run as which of others, at any batch (n x m)."""
        return (
            _same(self.model, other.model)
            & _same(self.device, other.device)
            & _same(self.variant, other.variant)
        )


class Posterior:
    """Prediction of other runs from measurements."""

    def __init__(self, known: Sequence[Observed], relatedness: Relatedness | None = None) -> None:
        self._r = relatedness or fitted_spreads().relatedness
        names = [name for o in known for name in o.run[:3]]
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.known = known
        self._runs = self.runs_of([o.run for o in known])
        self._ratios = np.array([o.log_ratios for o in known])
        self._noise, self._repeat_sd = (np.array([o[i] for o in known]) for i in (2, 3))
        # other batch sizes of a run are assumed to err as much as its largest error
        self._surprises = (self._ratios[:, 0] / SURPRISE) ** 2
        self.least_variance = self._no_surprise()
        self._known_variances = self._variances(self._runs, self.least_variance)
        between = self._between(self.least_variance)
        self._factor, self._weights = (
            np.linalg.cholesky(between),
            np.linalg.solve(between, self._ratios),
        )

    def _between(self, least: float) -> Floats:
        """Return the covariance of the measured errors (n x n), with variances from `least` on."""
        variances = self._variances(self._runs, least)
        return covariance(self._runs, self._runs, variances, variances, self._r) + np.diag(
            self._noise**2
        )

    def _no_surprise(self) -> float:
        """Return the least variance of a forecast at which all errors together are plausible.

        A user's forecasts may err by more than their deviations predict.
        """
        errors, most = self._ratios[:, 0], len(self.known) - 1 + SURPRISE**2
        low, high = 0.0, max(float((errors**2).max()), 1e-6)

        def surprises(least: float) -> bool:
            return float(errors @ np.linalg.solve(self._between(least), errors)) > most

        if not surprises(low):
            return low
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if surprises(middle) else (low, middle)
        return high

    def _variances(self, runs: Runs, least: float) -> Floats:
        own = np.where(self._runs.same_run(runs), self._surprises[:, None], 0.0).max(axis=0)
        return np.maximum(np.maximum(runs.variances, own), least)

    @property
    def variants(self) -> tuple[Hashable, ...]:
        """Variants of the measurements."""
        return tuple(dict.fromkeys(o.run.variant for o in self.known))

    def number(self, name: Hashable) -> int:
        """Return the number of a model, device or variant in `Runs`; -1 if it was not measured."""
        return self._numbers.get(name, -1)

    def runs_of(self, runs: Sequence[Run]) -> Runs:
        """Return runs as arrays."""
        model, device, variant, batch, shares, log_sd, card_sd, step_ms = zip(*runs, strict=True)
        numbers = (
            np.array([self.number(name) for name in names]) for names in (model, device, variant)
        )
        floats = (
            np.array(column, dtype=np.float64)
            for column in (batch, shares, log_sd, card_sd, step_ms)
        )
        return Runs(*numbers, *floats)

    def means(self, runs: Runs) -> Floats:
        """Return the expected log(measured / forecast) of steps and of their phases (n x 4)."""
        return np.asarray(
            self._with_known(runs, self._variances(runs, self.least_variance)).T @ self._weights
        )

    def _with_known(self, runs: Runs, variances: Floats) -> Floats:
        return covariance(self._runs, runs, self._known_variances, variances, self._r)

    def log_sd(self, runs: Runs) -> Floats:
        """Return the standard deviations of log(measured / corrected forecast) (n)."""
        variances = self._variances(runs, self.least_variance)
        explained = np.linalg.solve(self._factor, self._with_known(runs, variances))
        left = np.maximum(variances + runs.card_sd**2 - (explained**2).sum(axis=0), 0.0)
        # the forecast is of one more measurement, which is as noisy as those before
        noise = np.where(self._runs.same_run(runs), self._repeat_sd[:, None], MEASURING_SD).max(
            axis=0
        )
        return np.sqrt(left + np.maximum(noise, MEASURING_SD) ** 2)


class Knowledge(Protocol):
    """Measurements for forecasts on any target."""

    def posterior(self, forecaster: Forecaster) -> Posterior | None:
        """Return what is known for a forecaster's target, or None."""

    def source(self, forecaster: Forecaster) -> str:
        """Return the source in words, for the intervals' basis."""


def covariance(a: Runs, b: Runs, of_a: Floats, of_b: Floats, r: Relatedness) -> Floats:
    """Return the covariance of the errors of runs `a` (n) with those of runs `b` (m), n x m.

    It is without the noise of measuring. `of_a` and `of_b` are their variances without that of new
    cards.
    """
    # the smaller of two variances, so that a measurement moves a forecast by its own error at most
    alike = _directions(a.shares) @ _directions(b.shares).T
    device, model, variant = (
        _same(x, y) for x, y in ((a.device, b.device), (a.model, b.model), (a.variant, b.variant))
    )
    times_apart = np.subtract.outer(np.log(a.step_ms), np.log(b.step_ms)) / r.time_scale
    lengths = np.add.outer((a.shares**2).sum(axis=1), (b.shares**2).sum(axis=1))
    parts_apart = np.maximum(lengths - 2 * a.shares @ b.shares.T, 0.0) / r.shares_scale**2
    near = np.exp(-0.5 * (times_apart**2 + parts_apart))
    batches = np.exp(-np.abs(np.subtract.outer(np.log(a.batch), np.log(b.batch))) / r.batch_scale)
    shared = alike * (r.user + r.device * device + r.model * model)
    shared += near * (r.user_near + r.device_near * device + r.model_near * model)
    shared += (model & variant) * batches * (r.run_elsewhere + r.run * device)
    cards = np.minimum.outer(a.card_sd, b.card_sd) ** 2
    return np.asarray(np.minimum.outer(of_a, of_b) * shared + cards * alike * device)


def run_of(plain: Forecast, shares: Floats, variant: Hashable) -> Run:
    """Return the run of an uncorrected forecast with a time, which is made of `shares`."""
    interval = plain.step_time_interval_ms
    assert interval is not None
    assert plain.step is not None
    e = plain.execution
    card_sd = (
        card_deviation(fitted_spreads(), shares, plain.device)
        if plain.provenance == "fitted"
        else 0.0
    )
    return Run(
        plain.model,
        plain.device,
        variant,
        e.global_batch,
        tuple(shares.tolist()),
        _log_sd(interval),
        card_sd,
        plain.step.total_ms,
    )


def run_beside(
    kernels: KernelModel,
    device: Device,
    model: str,
    variant: Hashable,
    batch: int,
    shares: Sequence[float],
    step_ms: float,
) -> Run:
    """Return the run of a forecast that was stored with only its shares and its time.

    Its deviation is that of the kernel model for these shares.
    """
    made_of = np.asarray(shares)
    spread = kernels.spread(made_of, device, np.zeros(1), np.zeros(1))
    card_sd = (
        card_deviation(fitted_spreads(), made_of, device.name)
        if kernels.provenance == "fitted"
        else 0.0
    )
    return Run(model, device.name, variant, batch, tuple(shares), _log_sd(spread), card_sd, step_ms)


def observe(
    forecaster: Forecaster,
    execution: Execution,
    measured_ms: float,
    step: StepTime | None = None,
    interval: Interval | None = None,
) -> Observed | None:
    """Return a measured step beside its forecast, or None if either has no time.

    `step` are its measured parts; `interval` is how far its repeats differ.
    """
    table = forecaster.plain.at([execution])
    plain = table.brief(0)
    if plain.step is None or not 0 < measured_ms < math.inf:
        return None
    # of a log-normal with this half width, also if the lower end is 0
    noise = (
        0.0
        if interval is None
        else math.asinh((interval.high - interval.low) / (2 * measured_ms)) / Z_95
    )
    ratios = _log_ratios(plain.step, measured_ms, step)
    run = run_of(plain, table.shares()[0], Variant.of(execution, forecaster.workload))
    return Observed(run, ratios, max(noise, MEASURING_SD))


def observe_elsewhere(measurement: Measurement, there: Forecaster) -> Observed:
    """Return a measurement beside its forecast, by a forecaster for the measured device.

    Raises:
        TrainpaceError: if they cannot be of one workload.
    """
    if measurement.model != there.workload.model:
        raise TrainpaceError(
            f"the measurement is of {measurement.model}, and the forecast of"
            f" {there.workload.model}.",
            "Give a measurement of the same model.",
        )
    m, length = measurement, there.workload.sequence_length
    if there.workload.mode != "train":
        raise TrainpaceError(
            f"the measurement is of training steps, and the forecast of {there.workload.mode}."
        )
    if m.sequence_length and length and m.sequence_length != length:
        raise TrainpaceError(
            f"the measurement has sequence length {m.sequence_length}, and the forecast {length}."
        )
    if not 0 < m.median_ms < math.inf:
        raise TrainpaceError(f"a measured step of {m.median_ms:.4g} ms is impossible.")
    seen = observe(there, m.execution, m.median_ms, m.step, m.interval_ms)
    if seen is None:
        reason = there.forecast(m.execution).reason
        raise TrainpaceError(
            f"the measured run cannot be forecast, so nothing can be compared: {reason}"
        )
    ratio = math.exp(seen.log_ratios[0])
    if not 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO:
        raise TrainpaceError(
            f"measured {m.median_ms:.4g} ms, forecast {m.median_ms / ratio:.4g} ms: too far apart to"
            " transfer.",
            "Check that model, batch size and precision are the measured ones.",
        )
    return seen


class Measured(NamedTuple):
    """The same measurements for every target."""

    observed: tuple[Observed, ...]
    words: str

    def posterior(self, forecaster: Forecaster) -> Posterior | None:  # implements Knowledge
        return Posterior(self.observed) if self.observed else None

    def source(self, forecaster: Forecaster) -> str:  # implements Knowledge
        return self.words


def _log_sd(ends: Interval | Spread) -> float:
    return math.log(ends.high / ends.low) / (2 * Z_95)


def _directions(shares: Floats) -> Floats:
    """Return what each run is made of, as a vector of length 1."""
    return np.asarray(shares / np.linalg.norm(shares, axis=1)[:, None])


def _same(a: NDArray[np.int64], b: NDArray[np.int64]) -> Flags:
    return np.equal.outer(a, b)


def _log_ratios(
    forecast: StepTime, measured_ms: float, measured: StepTime | None
) -> tuple[float, float, float, float]:
    """Return the log ratios of a step and its phases.

    A step's parts besides the phases count to each phase by its share.
    """
    ratio = measured_ms / forecast.total_ms
    expected = [getattr(forecast, name) for name in PHASES]
    observed = [0.0] * 3 if measured is None else [getattr(measured, name) for name in PHASES]
    if min(expected) <= 0 or min(observed) <= 0:
        return (math.log(ratio),) * 4
    # so that the phases add up to the median step, which is not the sum of medians
    scale = (measured_ms / sum(observed)) * (sum(expected) / forecast.total_ms)
    forward, backward, optimizer = (
        math.log(scale * o / e) for o, e in zip(observed, expected, strict=True)
    )
    return math.log(ratio), forward, backward, optimizer
