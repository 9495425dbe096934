"""A forecast scaled by one measurement of the same workload on another device.

What a forecast gets wrong for a model (fusions, layouts, an operator that the constants do not suit), it may get wrong on every
card; the ratio measured / forecast on one card corrects that part on another. It cannot correct what is wrong with the card.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.forecast.forecaster import Forecaster
from trainpace.outcome import STEP_PARTS, Forecast, Interval, Measurement, StepTime

LARGEST_RATIO = 5.0
"""Beyond this the measurement is of another workload."""
SHRINKAGE = 2.0
"""Number of exact forecasts that are assumed beside the measured models."""


def transfer_ratio(measurement: Measurement, source: Forecaster) -> float:
    """measured / forecast, by a forecaster for the measured device. Raises where the two cannot be of one workload."""
    model = source.workload.model
    if measurement.model != model:
        raise TrainpaceError(
            f"the measurement is of {measurement.model}, and the forecast of {model}.",
            "Give a measurement of the same model.",
        )
    there = source.forecast(measurement.execution)
    if there.step is None:
        raise TrainpaceError(f"the measured run cannot be forecast, so nothing can be compared: {there.reason}")
    ratio = measurement.median_ms / there.step.total_ms
    if not 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO:
        raise TrainpaceError(
            f"measured {measurement.median_ms:.4g} ms where {there.step.total_ms:.4g} ms are forecast: too far apart to"
            " transfer.",
            "Check that model, batch size and precision are the measured ones.",
        )
    return ratio


def transferred(f: Forecast, ratio: float, source: str) -> Forecast:
    """The forecast with all times scaled by the ratio."""
    if f.step is None or f.step_time_interval_ms is None:
        return f
    step = StepTime(**{name: getattr(f.step, name) * ratio for name in STEP_PARTS})
    old = f.step_time_interval_ms
    # no narrower: on held-out runs a measurement elsewhere did not make the errors smaller (docs/accuracy.md)
    interval = Interval(
        low=old.low * ratio, high=old.high * ratio, coverage=old.coverage,
        basis=f"{old.basis}; scaled by a measurement on {source}",
    )  # fmt: skip
    return replace(
        f, step=step, step_time_interval_ms=interval, provenance="transferred", mfu=None if f.mfu is None else f.mfu / ratio,
        heaviest=tuple(replace(o, time_ms=o.time_ms * ratio) for o in f.heaviest),
    )  # fmt: skip


AT_A_MEASURED_BATCH_SD = 0.03
"""Standard deviation of the logarithm of a step that was measured before and is measured again ..."""
PER_LOG_BATCH_SD = 0.08
"""... and what every factor of e between batch sizes adds (the root mean square over ten models on one CPU)."""
_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


class MeasuredRatio(NamedTuple):
    """At one batch size, measured / forecast of the whole step, and of its phases where both have them."""

    batch: int
    ratio: float
    phases: tuple[float, float, float]


def measured_ratio(batch: int, there: StepTime, measured_ms: float, measured: StepTime | None = None) -> MeasuredRatio:
    """Compare a forecast step with a measured one. Its parts beside the phases count to each phase by its share."""
    ratio = measured_ms / there.total_ms
    expected = [getattr(there, name) for name in _PHASES]
    observed = [0.0] * 3 if measured is None else [getattr(measured, name) for name in _PHASES]
    if min(expected) <= 0 or min(observed) <= 0:
        return MeasuredRatio(batch, ratio, (ratio, ratio, ratio))
    # so that the phases add up to the median step, which is no sum of medians
    scale = (measured_ms / sum(observed)) * (sum(expected) / there.total_ms)
    forward, backward, optimizer = (scale * o / e for o, e in zip(observed, expected, strict=True))
    return MeasuredRatio(batch, ratio, (forward, backward, optimizer))


def sharpened(f: Forecast, known: Sequence[MeasuredRatio], source: str) -> Forecast:
    """The forecast scaled, phase by phase, by measurements of the same workload on the same device at one batch size or more.

    By phases, since an optimizer's time does not grow with the batch and the others do. Between two batch sizes ratios
    are interpolated over the logarithm of the batch; beyond the last they stay.
    """
    if f.step is None or f.step_time_interval_ms is None or not known:
        return f
    known = sorted(known)
    at = math.log(f.execution.global_batch)
    places = [math.log(k.batch) for k in known]
    phases = [float(np.exp(np.interp(at, places, [math.log(k.phases[i]) for k in known]))) for i in range(3)]
    old = [getattr(f.step, name) for name in _PHASES]
    new = [ratio * ms for ratio, ms in zip(phases, old, strict=True)]
    rest = sum(new) / sum(old) if sum(old) > 0 else known[0].ratio
    parts = {name: rest * getattr(f.step, name) for name in STEP_PARTS}
    step = StepTime(**(parts | dict(zip(_PHASES, new, strict=True))))
    distance = min(abs(at - place) for place in places)
    half = 1.645 * math.hypot(AT_A_MEASURED_BATCH_SD, PER_LOG_BATCH_SD * distance)
    basis = f"measured here at batch {', '.join(str(k.batch) for k in known[:6])} ({source})"
    middle = step.total_ms
    interval = Interval(low=middle * math.exp(-half), high=middle * math.exp(half), coverage=0.9, basis=basis)
    return replace(transferred(f, middle / f.step.total_ms, source), step=step, step_time_interval_ms=interval)


def shifted(f: Forecast, ratios: Sequence[float], source: str) -> Forecast:
    """The forecast scaled by how far forecasts of other models were off on the same device, drawn towards 1 where few.

    The interval is as wide as before: other models say little about this one.
    """
    if f.step is None or not ratios:
        return f
    logs = np.log(ratios)
    return transferred(f, math.exp(float(np.median(logs)) * len(logs) / (len(logs) + SHRINKAGE)), source)
