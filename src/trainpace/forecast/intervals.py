"""Prediction intervals from the parts of a step and the uncertainty of each part.

`intervals.json` contains a standard deviation of log(measured / forecast) for each part of a step,
for cards with runs in the fit and for other cards. The deviations are fitted on runs whose card or
model family was held out of the fit (`python -m benchmarks accuracy`).

Errors of the operators of one part are fully correlated. Errors of different parts are independent.
The variance of a step is the sum of (share * deviation)^2 over its parts, plus one term that all
steps have. The measured errors, in units of this deviation, give the quantiles of the interval
(split-conformal prediction; Vovk et al. 2005, Lei et al. 2018). The guarantee of this method only
holds for cases that are distributed like these runs.

Shapes: n is the number of steps. Shares have shape (n, parts), in the order of `PARTS`, or (parts,)
for one step.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from trainpace.core.hardware import Device
from trainpace.core.outcome import StepTime
from trainpace.core.records import Record, from_package
from trainpace.core.stats import Z_95
from trainpace.workload import ATTENTION_KINDS, CONV, CONVOLUTION_KINDS, Floats, Operators

COVERAGE = 0.9
EXPERTS_SD = 0.28
"""Extra standard deviation of log(step time) for models with expert layers.

With it, 90 of 100 measured steps with expert parallelism lie in their intervals. If it is fitted
without the models of the same maker, 88 do (`python -m benchmarks experts`; most were vendors'
recipes on Hopper and Blackwell, 25.11 to 26.08). The cause is unknown. It may be routing, hosts or
software releases.
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
        user: Share that all measurements of one user have in common, if steps consist of the same
            parts. device and model are the shares for one device and one model.
        user_near: Further share if two steps also take about as long. device_near and model_near
            likewise.
        run: Share that one run has in common on one device, over batch sizes.
        run_elsewhere: Share that one run has in common on all devices, over batch sizes.
        batch_scale: Difference of log(batch size) at which errors of one run are correlated by 1/e.
        time_scale: Difference of log(step time) at which the `_near` shares fall to 1/sqrt(e).
        shares_scale: Distance between two vectors of shares at which they fall to 1/sqrt(e).
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
        low: Lower quantile of the error, in units of a step's standard deviation. high likewise.
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


def deviations(spreads: Spreads, shares: Floats, seen: bool) -> Floats:
    """Return the standard deviations of log(measured / forecast) for steps, shape (n,).

    Args:
        spreads: Fitted standard deviations.
        shares: Composition of the steps, shape (n, parts).
        seen: True if the card has runs in the fit.
    """
    parts = [spreads.parts[name] for name in PARTS]
    sd = np.array([part.seen_card if seen else part.new_card for part in parts])
    return np.asarray(np.sqrt(spreads.model_sd**2 + ((shares * sd) ** 2).sum(axis=-1)))


def deviation(spreads: Spreads, shares: Floats | Sequence[float], seen: bool) -> float:
    """Return the result of `deviations` for one step."""
    return float(deviations(spreads, np.asarray(shares), seen))


def card_deviations(spreads: Spreads, shares: Floats, device: str) -> Floats:
    """Return the standard deviations that a card without runs in the fit adds, or 0."""
    if device in spreads.devices:
        return np.zeros(shares.shape[:-1])
    new, seen = (deviations(spreads, shares, known) for known in (False, True))
    return np.asarray(np.sqrt(new**2 - seen**2) * spreads.high / Z_95)


def card_deviation(spreads: Spreads, shares: Floats | Sequence[float], device: str) -> float:
    """Return the result of `card_deviations` for one step."""
    return float(card_deviations(spreads, np.asarray(shares), device))


def interval_deviations(
    spreads: Spreads, shares: Floats, device: str, outside_sd: Floats | float = 0.0
) -> Floats:
    """Return the standard deviations of normal errors with the same 90% intervals as these steps.

    `outside_sd` is a further standard deviation that no part of the step accounts for.
    """
    sd = deviations(spreads, shares, device in spreads.devices)
    ends = [np.hypot(end * sd, Z_95 * outside_sd) for end in (spreads.low, spreads.high)]
    return np.asarray((ends[0] + ends[1]) / (2 * Z_95))


def composed_spread(shares: Floats, device: Device) -> Spread:
    """Return the 90% interval of a step with these shares on a device."""
    spreads = fitted_spreads()
    seen = device.name in spreads.devices
    sd = deviation(spreads, shares, seen)
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
