"""A forecast scaled by one measurement of the same workload on another device.

What a forecast gets wrong for a model (fusions, layouts, an operator that the constants do not suit), it may get wrong on every
card; the ratio measured / forecast on one card corrects that part on another. It cannot correct what is wrong with the card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.forecast.forecast import forecast
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import STEP_PARTS, Forecast, Interval, Measurement, StepTime
from trainpace.workload import Workload

LARGEST_RATIO = 5.0
"""Beyond this the measurement is of another workload."""
SHRINKAGE = 2.0
"""So many models that were forecast rightly are assumed beside those that were measured."""


def transfer_ratio(workload: Workload, measurement: Measurement, source: Cluster) -> float:
    """measured / forecast on the measured device. Raises where the two cannot be of one workload."""
    if measurement.model != workload.model:
        raise TrainpaceError(
            f"the measurement is of {measurement.model}, and the forecast of {workload.model}.",
            "Give a measurement of the same model.",
        )
    there = forecast(workload, measurement.execution, source)
    if there.step is None:
        raise TrainpaceError(
            f"the measured run cannot be forecast, so there is nothing to compare with: {there.reason}"
        )
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
    scaled = {
        "mfu": None if f.mfu is None else f.mfu / ratio,
        "heaviest": tuple(replace(o, time_ms=o.time_ms * ratio) for o in f.heaviest),
    }
    return replace(f, step=step, step_time_interval_ms=interval, provenance="transferred", **scaled)


AT_A_MEASURED_BATCH_SD = 0.03
"""Of the logarithm of a step that was measured before and is measured again ..."""
PER_LOG_BATCH_SD = 0.03
"""... and what every factor of e between batch sizes adds: a forecast's shape over the batch is better than its level."""


class MeasuredRatio(NamedTuple):
    """At one batch size, measured / forecast."""

    batch: int
    ratio: float


def sharpened(f: Forecast, known: Sequence[MeasuredRatio], source: str) -> Forecast:
    """The forecast scaled by measurements of the same workload on the same device at one batch size or more.

    Between two of them the ratio is interpolated over the logarithm of the batch; beyond the last it stays.
    """
    if f.step is None or f.step_time_interval_ms is None or not known:
        return f
    known = sorted(known)
    at = math.log(f.execution.global_batch)
    places = [math.log(k.batch) for k in known]
    ratio = math.exp(float(np.interp(at, places, [math.log(k.ratio) for k in known])))
    distance = min(abs(at - place) for place in places)
    half = 1.645 * math.hypot(AT_A_MEASURED_BATCH_SD, PER_LOG_BATCH_SD * distance)
    basis = f"measured here at batch {', '.join(str(k.batch) for k in known[:6])} ({source})"
    scaled = transferred(f, ratio, source)
    assert scaled.step is not None
    middle = scaled.step.total_ms
    interval = Interval(low=middle * math.exp(-half), high=middle * math.exp(half), coverage=0.9, basis=basis)
    return replace(scaled, step_time_interval_ms=interval)


def shifted(f: Forecast, ratios: Sequence[float], source: str) -> Forecast:
    """The forecast scaled by how far forecasts of other models were off on the same device, drawn towards 1 where few.

    The interval is as wide as before: other models say little about this one.
    """
    if not ratios:
        return f
    logs = np.log(ratios)
    return transferred(f, math.exp(float(np.median(logs)) * len(logs) / (len(logs) + SHRINKAGE)), source)
