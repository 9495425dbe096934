"""Intervals of forecasts, and corrections by measurements of the user.

Intervals: `intervals.json` contains a standard deviation of log(measured / forecast) for each part
of a step, for cards with runs in the fit and for other cards. The deviations are fitted on runs
whose card or model family was held out of the fit (`python -m benchmarks accuracy`).

Errors of the operators of one part are fully correlated. Errors of different parts are independent.
The variance of a step is the sum of (share * deviation)^2 over its parts, plus one term that all
steps have. The measured errors, in units of this deviation, give the quantiles of the interval
(split-conformal prediction; Vovk et al. 2005, Lei et al. 2018). The guarantee of this method only
holds for cases that are distributed like these runs.

Corrections: The error log(measured / forecast) of a step is a sum of several errors. Each of them
is shared with other steps:

- with all measurements of the user (same software, same way of timing),
- with measurements on the same device,
- with measurements of the same model,
- with the same run at other batch sizes, on the same device and on others.

`Relatedness` says which share of the variance each of these errors has. Errors of one user, device
or model are correlated if two steps consist of similar parts. They are correlated even more if the
steps also take about as long.

The correction and the remaining error are those of a Gaussian process (Rasmussen and Williams 2006,
section 2.2). A loosely related measurement changes a forecast only a little. Many measurements
narrow its interval. `--transfer-from`, the journal and `measure` all use this model.

Shapes: n is the number of steps or runs. Arrays of runs have shape (n,). Shares have shape (n,
parts), in the order of `PARTS`, or (parts,) for one step. Covariances have shape (n, m).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Forecast, Interval, Measurement, Provenance, StepTime
from trainpace.core.records import Record, from_package
from trainpace.core.stats import Z_95
from trainpace.workload import (
    ATTENTION_KINDS,
    CONV,
    CONVOLUTION_KINDS,
    Counts,
    Flags,
    Floats,
    Operators,
    Workload,
)

if TYPE_CHECKING:
    from trainpace.forecast.forecaster import Forecaster
    from trainpace.forecast.target import KernelModel

COVERAGE = 0.9
EXPERTS_SD = 0.28
"""Extra standard deviation of log(step time) for models with expert layers.

With it, 90 of 100 measured steps with expert parallelism lie in their intervals. With the models of
one maker left out of the fit, 88 of 100 of their steps do (`python -m benchmarks experts`). Most of
these runs were vendors' recipes on Hopper and Blackwell, in NVIDIA containers 25.11 to 26.08. The
cause is unknown. It may be routing, hosts or software releases.
"""
Part = Literal[
    "16-bit matmuls",
    "32-bit matmuls",
    "attention",
    "convolutions",
    "grouped convolutions",
    "memory traffic",
    "launches",
    "communication",
]
PARTS: tuple[Part, ...] = Part.__args__  # type: ignore[attr-defined]
"""Parts of a step's time: operators by kind, then host and communication."""
OPERATOR_PARTS = 6
"""Number of `PARTS` that are operators. They come first."""


class PartSpread(Record):
    """Standard deviations of log(measured / forecast) for one part of a step.

    `seen_card` is for cards with runs in the fit, and `new_card` for all others.
    """

    seen_card: float
    new_card: float


class Relatedness(Record):
    """Shares of the error variance that different steps have in common. The shares add up to 1.

    Attributes:
        user: Share common to all measurements of one user. `user`, `device` and `model` count fully
            only if two steps consist of the same parts.
        device: Share common to measurements on one device.
        model: Share common to measurements of one model.
        user_near: Further share for one user if two steps also take about as long.
        device_near: The same for one device.
        model_near: The same for one model.
        run: Share common to one run on one device, over batch sizes.
        run_elsewhere: Share common to one run on all devices, over batch sizes.
        batch_scale: Difference of log(batch size) at which errors of one run are correlated by 1/e.
        time_scale: Difference of log(step time) at which the `_near` shares fall to 1/sqrt(e).
        shares_scale: Distance between the parts of two steps at which the `_near` shares fall to
            1/sqrt(e).
    """

    user: float
    device: float
    model: float
    user_near: float
    device_near: float
    model_near: float
    run: float
    run_elsewhere: float
    batch_scale: float
    time_scale: float
    shares_scale: float


class Spreads(Record):
    """Fitted standard deviations.

    Attributes:
        devices: Cards with runs in the fit.
        parts: Standard deviations by part of the step.
        model_sd: Standard deviation that every step has, from its model and software.
        low: Lower quantile of errors divided by their step's standard deviation (negative).
        high: Upper quantile of these errors.
        n: Number of runs in the fit.
        relatedness: Correlation of errors between steps.
    """

    devices: tuple[str, ...]
    parts: dict[Part, PartSpread]
    model_sd: float
    low: float
    high: float
    n: int
    relatedness: Relatedness


class Spread(NamedTuple):
    """Ends of an interval, as factors on the forecast."""

    low: float
    high: float
    coverage: float
    basis: str


@cache
def fitted_spreads() -> Spreads:
    """Return the fitted standard deviations that ship with the package."""
    return from_package("forecast/intervals.json", Spreads)


def parts_of(operators: Operators) -> np.ndarray:
    """Return the index in `PARTS` of every operator row, shape (rows,)."""
    kind = np.array(operators.kind)
    grouped = operators.dims[:, CONV.groups].sum(axis=1) > 1
    convolution = np.isin(kind, CONVOLUTION_KINDS)
    conditions = [
        (kind == "gemm") & operators.half,
        kind == "gemm",
        np.isin(kind, ATTENTION_KINDS),
        convolution & ~grouped,
        convolution,
    ]
    return np.select(conditions, range(OPERATOR_PARTS - 1), OPERATOR_PARTS - 1)


def shares_of(step: StepTime, part: np.ndarray, device_s: Floats) -> Floats:
    """Return the share of each part in a step, in the order of `PARTS`.

    Args:
        step: The step.
        part: Index in `PARTS` of every operator row.
        device_s: Device seconds of every operator row.
    """
    total = step.total_ms
    outside = np.array([step.host_overhead_ms, step.communication_ms]) / total
    operators = np.bincount(part, device_s, minlength=OPERATOR_PARTS)
    inside = max(0.0, 1.0 - float(outside.sum())) * operators / max(float(operators.sum()), 1e-12)
    return np.concatenate([inside, outside])


def deviation(spreads: Spreads, shares: Floats | Sequence[float], seen: bool) -> Floats:
    """Return the standard deviations of log(measured / forecast) for steps, shape (n,) or ().

    Args:
        spreads: Fitted standard deviations.
        shares: Composition of the steps, shape (n, parts), or of one step, shape (parts,).
        seen: True if the card has runs in the fit.
    """
    parts = [spreads.parts[name] for name in PARTS]
    sd = np.array([part.seen_card if seen else part.new_card for part in parts])
    return np.asarray(np.sqrt(spreads.model_sd**2 + ((shares * sd) ** 2).sum(axis=-1)))


def card_deviation(spreads: Spreads, shares: Floats | Sequence[float], device: str) -> Floats:
    """Return how much standard deviation is added if the card has no runs in the fit, else 0.

    Shapes are those of `deviation`.
    """
    if device in spreads.devices:
        return np.zeros(np.shape(shares)[:-1])
    new, seen = (deviation(spreads, shares, known) for known in (False, True))
    # `high` deviations reach the end of the interval. A normal error reaches it at Z_95.
    return np.asarray(np.sqrt(new**2 - seen**2) * spreads.high / Z_95)


def interval_deviations(
    spreads: Spreads, shares: Floats, device: str, outside_sd: Floats | float = 0.0
) -> Floats:
    """Return the standard deviations of normal errors with the same 90% intervals as these steps.

    `outside_sd` is a further standard deviation that no part of the step accounts for.
    """
    sd = deviation(spreads, shares, device in spreads.devices)
    # hypot makes both ends positive, so their mean is half the width of the interval.
    ends = [np.hypot(end * sd, Z_95 * outside_sd) for end in (spreads.low, spreads.high)]
    return np.asarray((ends[0] + ends[1]) / (2 * Z_95))


def composed_spread(shares: Floats, device: Device) -> Spread:
    """Return the 90% interval of a step with these shares on a device."""
    spreads = fitted_spreads()
    seen = device.name in spreads.devices
    sd = float(deviation(spreads, shares, seen))
    largest = PARTS[int(np.argmax(shares))]
    card = "known card" if seen else "new card"
    basis = f"calibrated on {spreads.n:,} held-out runs ({card}, mostly {largest})"
    return Spread(math.exp(spreads.low * sd), math.exp(spreads.high * sd), COVERAGE, basis)


def widened(spread: Spread, log_sd: float) -> Spread:
    """Return a wider interval that includes another independent, log-normal error."""
    if not log_sd:
        return spread
    low, high = (math.log(end) for end in (spread.low, spread.high))
    return spread._replace(
        low=math.exp(-math.hypot(low, Z_95 * log_sd)),
        high=math.exp(math.hypot(high, Z_95 * log_sd)),
    )


# ---- corrections by measurements

LARGEST_RATIO = 5.0
"""Ratio of measured and forecast time above which the measurement must be of another workload."""
REPEAT_SD = 0.03
"""Standard deviation of log(step time) between two measurements of the same step.

It was measured with ten models on one CPU.
"""
MEASURING_SD = REPEAT_SD / math.sqrt(2)
"""Standard deviation of log(step time) of a single measurement."""
SURPRISE = 2.0
"""Number of standard deviations of the forecast that a measured error may plausibly reach.

If an error is larger, the standard deviation is raised until the error equals this many.
"""
PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


class Variant(NamedTuple):
    """Key of the runs that differ only in batch size and device.

    It consists of the execution without its batch, and of the size of a sample.
    """

    execution: Execution
    image_side: int | None = None
    sequence_length: int | None = None

    @classmethod
    def of(cls, execution: Execution, workload: Workload) -> Variant:
        alone = replace(execution, micro_batch=1, accumulation=1)
        return cls(alone, workload.image_side, workload.sequence_length)


class Run(NamedTuple):
    """Features of one forecast step that relate it to other steps.

    Attributes:
        model: Name of the model.
        device: Name of the device.
        variant: Everything else that identifies the run (see `Variant`).
        batch: Global batch.
        shares: Composition of the step, in the order of `PARTS`.
        log_sd: Standard deviation of log(measured / forecast) without measurements.
        card_sd: Part of `log_sd` that comes from a card without a run in the fit.
        step_ms: Forecast step time.
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
    """A run with its measurement.

    Attributes:
        run: Features of the run.
        log_ratios: log(measured / forecast) of the step, and of its forward, backward and optimizer
            phase.
        noise_sd: Standard deviation of the noise of this measurement.
        repeat_sd: Standard deviation of the noise of another measurement of the same run.
    """

    run: Run
    log_ratios: tuple[float, float, float, float]
    noise_sd: float = MEASURING_SD
    repeat_sd: float = MEASURING_SD


class Runs(NamedTuple):
    """n runs as arrays of shape (n,). `shares` has shape (n, parts).

    Models, devices and variants are the integers that `Posterior.number` gives them (-1 if not
    measured).
    """

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
        """Variances of the forecasts, without those of an unknown card and of measurement noise."""
        known_card = self.log_sd**2 - self.card_sd**2
        # At most three quarters are subtracted as noise, so that no variance vanishes.
        return np.maximum(np.maximum(known_card - MEASURING_SD**2, 0.25 * known_card), 1e-6)

    def same_run(self, other: Runs) -> Flags:
        """Return a mask of pairs that are the same run at any batch size, shape (n, m)."""
        pairs = zip(self[:3], other[:3], strict=True)
        return np.all([np.equal.outer(own, others) for own, others in pairs], axis=0)


class Posterior:
    """Predict the errors of forecasts from measurements of other runs.

    Args:
        known: The measurements. There must be at least one.
        relatedness: Shares of the variance. Defaults to those of the package.
    """

    def __init__(self, known: Sequence[Observed], relatedness: Relatedness | None = None) -> None:
        self._r = relatedness or fitted_spreads().relatedness
        names = [name for o in known for name in o.run[:3]]
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.known = known
        self._runs = self.runs_of([o.run for o in known])
        self._ratios = np.array([o.log_ratios for o in known])
        self._noise = np.array([o.noise_sd for o in known])
        self._repeat_sd = np.array([o.repeat_sd for o in known])
        # Forecasts of a run at other batch sizes are assumed to have errors as large as this one.
        self._surprises = (self._ratios[:, 0] / SURPRISE) ** 2
        self.least_variance = self._least_plausible_variance()
        self._known_variances = self._variances(self._runs, self.least_variance)
        between = self._between(self.least_variance)
        self._factor, self._weights = (
            np.linalg.cholesky(between),
            np.linalg.solve(between, self._ratios),
        )

    def _between(self, least: float) -> Floats:
        """Return the covariance of the measured errors, shape (n, n).

        Variances are raised to at least `least`.
        """
        variances = self._variances(self._runs, least)
        return covariance(self._runs, self._runs, variances, variances, self._r) + np.diag(
            self._noise**2
        )

    def _least_plausible_variance(self) -> float:
        """Return the smallest variance of forecasts that makes all measured errors plausible.

        The errors of one user may be larger than the fitted standard deviations predict.
        """
        # The sum of n squared normalized errors is n on average. One of them may be a surprise.
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
        """Return the number of a model, device or variant in `Runs`, or -1 if not measured."""
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
        """Return the expected log(measured / forecast) of steps and phases, shape (n, 4).

        The columns are those of `Observed.log_ratios`.
        """
        return np.asarray(
            self._with_known(runs, self._variances(runs, self.least_variance)).T @ self._weights
        )

    def _with_known(self, runs: Runs, variances: Floats) -> Floats:
        return covariance(self._runs, runs, self._known_variances, variances, self._r)

    def log_sd(self, runs: Runs) -> Floats:
        """Return the standard deviations of log(measured / corrected forecast), shape (n,)."""
        variances = self._variances(runs, self.least_variance)
        explained = np.linalg.solve(self._factor, self._with_known(runs, variances))
        left = np.maximum(variances + runs.card_sd**2 - (explained**2).sum(axis=0), 0.0)
        # The forecast predicts another measurement, which has as much noise as the earlier ones.
        noise = np.where(self._runs.same_run(runs), self._repeat_sd[:, None], MEASURING_SD).max(
            axis=0
        )
        return np.sqrt(left + np.maximum(noise, MEASURING_SD) ** 2)


class Knowledge(Protocol):
    """Source of measurements that correct forecasts on any target."""

    def posterior(self, forecaster: Forecaster) -> Posterior | None:
        """Return the posterior for a forecaster's target, or None without measurements."""

    def source(self, forecaster: Forecaster) -> str:
        """Return a description of the measurements, for the basis of the intervals."""


def covariance(a: Runs, b: Runs, of_a: Floats, of_b: Floats, r: Relatedness) -> Floats:
    """Return the covariance of the errors of runs `a` and runs `b`, shape (n, m).

    Measurement noise is not included.

    Args:
        a: n runs.
        b: m runs.
        of_a: Variances of `a` without the part of new cards, shape (n,).
        of_b: Variances of `b` without the part of new cards, shape (m,).
        r: Shares of the variance.
    """
    # The smaller of two variances is used below. A measurement then changes a forecast by at most
    # the error of the measurement.
    alike = _directions(a.shares) @ _directions(b.shares).T
    model, device, variant = (np.equal.outer(*pair) for pair in zip(a[:3], b[:3], strict=True))
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
    """Return the features of an uncorrected forecast.

    Args:
        plain: Forecast with a step time.
        shares: Composition of the step, in the order of `PARTS`.
        variant: Key of the run.
    """
    interval = plain.step_time_interval_ms
    assert interval is not None
    assert plain.step is not None
    device, batch = plain.device, plain.execution.global_batch
    deviations = _log_sd(interval), _card_sd(plain.provenance, shares, device)
    composition = tuple(shares.tolist())
    return Run(plain.model, device, variant, batch, composition, *deviations, plain.step.total_ms)


def run_of_stored(
    kernels: KernelModel,
    device: Device,
    model: str,
    variant: Hashable,
    batch: int,
    shares: Sequence[float],
    step_ms: float,
) -> Run:
    """Return the features of a stored forecast, of which only shares and step time are known.

    The kernel model gives the standard deviation for these shares.
    """
    composition = np.asarray(shares)
    spread = kernels.spread(composition, device, np.zeros(1), np.zeros(1))
    deviations = _log_sd(spread), _card_sd(kernels.provenance, composition, device.name)
    return Run(model, device.name, variant, batch, tuple(shares), *deviations, step_ms)


def observe(
    forecaster: Forecaster,
    execution: Execution,
    measured_ms: float,
    step: StepTime | None = None,
    interval: Interval | None = None,
) -> Observed | None:
    """Compare a measured step with its forecast.

    Args:
        forecaster: Forecaster of the workload on the measured cluster.
        execution: Measured execution.
        measured_ms: Measured step time.
        step: Measured parts of the step, if known.
        interval: Range of the repeated measurements, if known.

    Returns:
        The comparison, or None if the forecast or the measurement has no time.
    """
    table = forecaster.plain.at([execution])
    plain = table.brief(0)
    if plain.step is None or not 0 < measured_ms < math.inf:
        return None
    # Standard deviation of a log-normal with this half width. It is finite even if `low` is 0.
    noise = (
        0.0
        if interval is None
        else math.asinh((interval.high - interval.low) / (2 * measured_ms)) / Z_95
    )
    ratios = _log_ratios(plain.step, measured_ms, step)
    run = run_of(plain, table.shares()[0], Variant.of(execution, forecaster.workload))
    return Observed(run, ratios, max(noise, MEASURING_SD))


def observe_elsewhere(measurement: Measurement, there: Forecaster) -> Observed:
    """Compare a stored measurement with its forecast on the measured device.

    Args:
        measurement: The measurement.
        there: Forecaster for the measured device.

    Raises:
        TrainpaceError: If measurement and forecast cannot be of the same workload.
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
            f"measured {m.median_ms:.4g} ms, forecast {m.median_ms / ratio:.4g} ms: too far apart"
            " to transfer.",
            "Check that model, batch size and precision are the measured ones.",
        )
    return seen


class Measured(NamedTuple):
    """A `Knowledge` that uses the same measurements for every target."""

    observed: tuple[Observed, ...]
    words: str

    def posterior(self, forecaster: Forecaster) -> Posterior | None:  # implements Knowledge
        return Posterior(self.observed) if self.observed else None

    def source(self, forecaster: Forecaster) -> str:  # implements Knowledge
        return self.words


def _log_sd(ends: Interval | Spread) -> float:
    return math.log(ends.high / ends.low) / (2 * Z_95)


def _card_sd(provenance: Provenance, shares: Floats, device: str) -> float:
    """Return `Run.card_sd`. Only the fitted kernel model can lack runs of a card."""
    if provenance != "fitted":
        return 0.0
    return float(card_deviation(fitted_spreads(), shares, device))


def _directions(shares: Floats) -> Floats:
    """Return the shares of each run, scaled to a vector of length 1."""
    return np.asarray(shares / np.linalg.norm(shares, axis=1)[:, None])


def _log_ratios(
    forecast: StepTime, measured_ms: float, measured: StepTime | None
) -> tuple[float, float, float, float]:
    """Return `Observed.log_ratios` of a step.

    Time that belongs to no phase is split over the phases in proportion to their times.
    """
    ratio = measured_ms / forecast.total_ms
    expected = [getattr(forecast, name) for name in PHASES]
    observed = [0.0] * 3 if measured is None else [getattr(measured, name) for name in PHASES]
    if min(expected) <= 0 or min(observed) <= 0:
        return (math.log(ratio),) * 4
    # Scale the phases so that they add up to the median step. The sum of their medians differs.
    scale = (measured_ms / sum(observed)) * (sum(expected) / forecast.total_ms)
    forward, backward, optimizer = (
        math.log(scale * o / e) for o, e in zip(observed, expected, strict=True)
    )
    return math.log(ratio), forward, backward, optimizer
