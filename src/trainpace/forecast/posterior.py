"""Forecasts corrected by measurements: of the same run, of others on the same device, of the same model elsewhere.

log(measured / forecast) of a step is a sum of errors, each shared with other steps: with all of one user's measurements (the same
software, the same way of timing), with those on the same device, with those of the same model, and with the same run at another
batch size. `Relatedness` says which share of an error's variance each has; errors of one user, device or model are correlated as
far as the two steps are made of the same parts. Given measurements, the correction and what stays unknown are those of a
Gaussian process (Rasmussen and Williams 2006, section 2.2): a loosely related measurement moves a forecast little, and many
narrow its interval. One model serves `--transfer-from`, the journal and `measure`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.forecast.intervals import Z_95, Relatedness, card_deviation, fitted_spreads
from trainpace.outcome import MFU_LIMIT, STEP_PARTS, Forecast, Interval, Measurement, StepTime
from trainpace.workload import Floats

if TYPE_CHECKING:
    from trainpace.execution import Execution
    from trainpace.forecast.forecaster import Forecaster

LARGEST_RATIO = 5.0
"""Beyond this the measurement is of another workload."""
AT_A_MEASURED_BATCH_SD = 0.03
"""Standard deviation of the logarithm of a step that was measured before and is measured again (ten models on one CPU)."""
MEASURING_SD = AT_A_MEASURED_BATCH_SD / math.sqrt(2)
"""Of one measurement alone."""
SURPRISE = 2.0
"""A measured error of more standard deviations than this says that the deviation is too small: it is taken to be so many."""
_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


class Run(NamedTuple):
    """A step as far as others can be related to it. variant: what of the execution, but for the batch, makes it the same run.
    shares: what the step is made of, by `intervals.PARTS`; empty where nobody knows. log_sd: the forecast's own standard
    deviation, and card_sd what of it a card adds that has no run in the fit."""

    model: str
    device: str
    variant: str
    batch: int
    shares: tuple[float, ...]
    log_sd: float
    card_sd: float = 0.0


class Observed(NamedTuple):
    """A run that was measured. log_ratios: log(measured / forecast) of the step, then of its forward, backward and optimizer
    phase. noise_sd: of the measurement alone. repeat_sd: of one more measurement of the same, where repeats told it."""

    run: Run
    log_ratios: tuple[float, float, float, float]
    noise_sd: float = MEASURING_SD
    repeat_sd: float = MEASURING_SD


def run_of(plain: Forecast, shares: Floats) -> Run:
    """The run of a forecast that has a time, made of `shares`, and is not yet corrected."""
    interval = plain.step_time_interval_ms
    assert interval is not None
    log_sd = math.log(interval.high / interval.low) / (2 * Z_95)
    e = plain.execution
    card_sd = card_deviation(fitted_spreads(), shares, plain.device) if plain.provenance == "fitted" else 0.0
    return Run(plain.model, plain.device, _variant(e), e.global_batch, tuple(shares.tolist()), log_sd, card_sd)


def observe(
    forecaster: Forecaster, execution: Execution, measured_ms: float, step: StepTime | None = None,
    interval: Interval | None = None,
) -> Observed | None:  # fmt: skip
    """A measured step beside its forecast; None where either has no time. `step`: its measured parts; `interval`: how far its
    repeats differ."""
    table = forecaster.at([execution])
    plain = table.brief(0)
    if plain.step is None or not 0 < measured_ms < math.inf:
        return None
    # of a log-normal with such a half width, also where the lower end is 0
    noise = 0.0 if interval is None else math.asinh((interval.high - interval.low) / (2 * measured_ms)) / Z_95
    ratios = _log_ratios(plain.step, measured_ms, step)
    return Observed(run_of(plain, table.shares()[0]), ratios, max(noise, MEASURING_SD))


def observe_elsewhere(measurement: Measurement, there: Forecaster) -> Observed:
    """A measurement beside its forecast, by a forecaster for the measured device. Raises where they cannot be of one workload."""
    if measurement.model != there.workload.model:
        raise TrainpaceError(
            f"the measurement is of {measurement.model}, and the forecast of {there.workload.model}.",
            "Give a measurement of the same model.",
        )
    m, length = measurement, there.workload.sequence_length
    if there.workload.mode != "train":
        raise TrainpaceError(f"the measurement is of training steps, and the forecast of {there.workload.mode}.")
    if m.sequence_length and length and m.sequence_length != length:
        raise TrainpaceError(f"the measurement has sequence length {m.sequence_length}, and the forecast {length}.")
    if not 0 < m.median_ms < math.inf:
        raise TrainpaceError(f"a measured step of {m.median_ms:.4g} ms cannot be.")
    seen = observe(there, m.execution, m.median_ms, m.step, m.interval_ms)
    if seen is None:
        reason = there.forecast(m.execution).reason
        raise TrainpaceError(f"the measured run cannot be forecast, so nothing can be compared: {reason}")
    ratio = math.exp(seen.log_ratios[0])
    if not 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO:
        raise TrainpaceError(
            f"measured {m.median_ms:.4g} ms where {m.median_ms / ratio:.4g} ms are forecast: too far apart to transfer.",
            "Check that model, batch size and precision are the measured ones.",
        )
    return seen


def corrected(
    forecaster: Forecaster, forecasts: Sequence[Forecast], known: Sequence[Observed], source: str
) -> list[Forecast]:
    """The forecasts of `forecaster` given measurements, which `source` names; phase by phase, since an optimizer's time does not
    grow with the batch and the others do."""
    timed = [i for i, plain in enumerate(forecasts) if plain.step is not None]
    answers = list(forecasts)
    if not known or not timed:
        return answers
    shares = forecaster.at([forecasts[i].execution for i in timed]).shares()
    for i, made_of in zip(timed, shares, strict=True):
        answers[i] = _corrected(forecasts[i], run_of(forecasts[i], made_of), known, source)
    return answers


def _corrected(plain: Forecast, run: Run, known: Sequence[Observed], source: str) -> Forecast:
    assert plain.step is not None
    assert plain.step_time_interval_ms is not None
    means, log_sd = posterior(run, known, fitted_spreads().relatedness)
    step = _scaled(plain.step, means)
    ratio = step.total_ms / plain.step.total_ms
    mfu = None if plain.mfu is None or plain.mfu / ratio > MFU_LIMIT else plain.mfu / ratio
    old_ms, new_ms = plain.step.communication_ms, step.communication_ms
    old, narrower = plain.step_time_interval_ms, log_sd / run.log_sd
    low, high = (step.total_ms * (end / plain.step.total_ms) ** narrower for end in (old.low, old.high))
    return replace(
        plain, step=step, provenance="transferred", mfu=mfu,
        exposed_ms={kind: ms * new_ms / old_ms for kind, ms in plain.exposed_ms.items()} if old_ms else plain.exposed_ms,
        step_time_interval_ms=Interval(low=low, high=high, coverage=old.coverage, basis=f"{old.basis}; {source}"),
        heaviest=tuple(replace(o, time_ms=o.time_ms * ratio) for o in plain.heaviest),
    )  # fmt: skip


def posterior(run: Run, known: Sequence[Observed], r: Relatedness) -> tuple[Floats, float]:
    """(expected logarithms of measured / forecast of the step and its phases, standard deviation of the step's)."""
    is_same = [o.run[:3] == run[:3] for o in known]
    least_sd = max((_surprising_sd(o) for o, same in zip(known, is_same, strict=True) if same), default=0.0)
    run = run._replace(log_sd=max(run.log_sd, least_sd))
    others = [
        o.run._replace(
            shares=o.run.shares or run.shares, log_sd=max(o.run.log_sd, least_sd if same else _surprising_sd(o))
        )
        for o, same in zip(known, is_same, strict=True)
    ]
    between = covariance(others, others, r) + np.diag([o.noise_sd**2 for o in known])
    with_run = covariance(others, [run], r)[:, 0]
    weights = np.linalg.solve(between, with_run)
    own = covariance([run], [run], r)[0, 0]
    # the forecast is of one more measurement, which is as noisy as those before
    noisiest = max((o.repeat_sd for o, same in zip(known, is_same, strict=True) if same), default=MEASURING_SD)
    left = max(own - float(weights @ with_run), 0.0) + run.log_sd**2 - own + max(noisiest**2 - MEASURING_SD**2, 0.0)
    return weights @ np.array([o.log_ratios for o in known]), math.sqrt(left)


def covariance(a: Sequence[Run], b: Sequence[Run], r: Relatedness) -> Floats:
    """The covariance of the errors of runs `a` (n) with those of runs `b` (m), n x m, without the noise of measuring."""
    # the smaller of two variances, so that no measurement moves a forecast by more than its own error
    errors, of_cards = (
        np.minimum.outer([of(run) for run in a], [of(run) for run in b]) for of in (_error, _card_error)
    )
    alike = _directions(a) @ _directions(b).T
    device = _same([run.device for run in a], [run.device for run in b])
    model = _same([run.model for run in a], [run.model for run in b])
    same_run = device & model & _same([run.variant for run in a], [run.variant for run in b])
    apart = np.abs(np.subtract.outer(np.log([run.batch for run in a]), np.log([run.batch for run in b])))
    shared = alike * (r.user + r.device * device + r.model * model) + same_run * r.run * np.exp(-apart / r.batch_scale)
    return np.asarray(errors * shared + of_cards * alike * device)


def _surprising_sd(seen: Observed) -> float:
    return abs(seen.log_ratios[0]) / SURPRISE


def _error(run: Run) -> float:
    """A forecast's variance without what a new card adds, and without the noise of the measurement that it is compared with."""
    known_card = run.log_sd**2 - run.card_sd**2
    return max(known_card - MEASURING_SD**2, 0.25 * known_card, 1e-6)


def _card_error(run: Run) -> float:
    return run.card_sd**2


def _directions(runs: Sequence[Run]) -> Floats:
    """What each run is made of, as a vector of length 1."""
    shares = np.array([run.shares for run in runs])
    return np.asarray(shares / np.linalg.norm(shares, axis=1)[:, None])


def _same(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
    number = {word: i for i, word in enumerate({*a, *b})}
    return np.equal.outer([number[word] for word in a], [number[word] for word in b])


def _variant(execution: Execution) -> str:
    return repr(replace(execution, micro_batch=1, accumulation=1))


def _log_ratios(forecast: StepTime, measured_ms: float, measured: StepTime | None) -> tuple[float, float, float, float]:
    """Of a step and its phases; a step's parts beside the phases count to each phase by its share."""
    ratio = measured_ms / forecast.total_ms
    expected = [getattr(forecast, name) for name in _PHASES]
    observed = [0.0] * 3 if measured is None else [getattr(measured, name) for name in _PHASES]
    if min(expected) <= 0 or min(observed) <= 0:
        return (math.log(ratio),) * 4
    # so that the phases add up to the median step, which is no sum of medians
    scale = (measured_ms / sum(observed)) * (sum(expected) / forecast.total_ms)
    forward, backward, optimizer = (math.log(scale * o / e) for o, e in zip(observed, expected, strict=True))
    return math.log(ratio), forward, backward, optimizer


def _scaled(step: StepTime, log_ratios: Floats) -> StepTime:
    """A step whose phases are scaled each by its own ratio, and its other parts as these together."""
    old = np.array([getattr(step, name) for name in _PHASES])
    new = old * np.exp(log_ratios[1:])
    rest = new.sum() / old.sum() if old.sum() > 0 else math.exp(log_ratios[0])
    parts = {name: float(rest * getattr(step, name)) for name in STEP_PARTS}
    return StepTime(**(parts | dict(zip(_PHASES, new.tolist(), strict=True))))
