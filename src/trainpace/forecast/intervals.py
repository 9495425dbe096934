"""Prediction intervals from the parts of a step and the uncertainty of each part.

`intervals.json` has a standard deviation of log(measured / forecast) for each part of a step
(matmuls, attention, convolutions, memory traffic, launches, communication), on cards with runs in
the fit and on others. They are fitted on runs whose card, or whose family of models, was left out
of the fit (`python -m benchmarks accuracy`). Errors of one part are fully correlated over its
operators, those of different parts are independent: a step's variance is the sum of squared shares
times deviations, plus one of the model's own. The error in units of this deviation gives the
interval's quantiles (split-conformal prediction; Vovk et al. 2005, Lei et al. 2018). Its guarantee
holds for cases drawn like these runs, which cannot be promised.
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
"""Standard deviation of the logarithm of a step with layers of experts, beside that of its parts:
90 of 100 measured steps with divided experts lie in the intervals that it makes, 88 if it is fitted
without the maker's models (`python -m benchmarks experts`; most were vendors' recipes on Hopper and
Blackwell, 25.11 to 26.08). Its causes are unknown: routing, hosts or releases."""
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
"""The number of PARTS that are operators, which come first."""


class PartSpread(Record):
    """Standard deviations of the logarithm, on cards with runs in the fit and on others."""

    seen_card: float
    new_card: float


class Relatedness(Record):
    """Shares of the variance of a forecast's error that different steps have in common.

    They are common to one user, to a device and to a model: as far as two steps are made of the
    same parts, and once more (`_near`) as far as they also take about as long; and to one run at
    several batch sizes, on its device and elsewhere. They add up to 1.

    batch_scale: the factors of e between two batch sizes over which errors of one run fade to 1 /
    e. time_scale, shares_scale: the factors of e between two step times, and the distance between
    two vectors of shares, at which `_near` has faded to 1 / sqrt(e).
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
    """The fitted deviations.

    model_sd: deviation of every model and software. low, high: quantiles of the error in a step's
    own deviations. n: runs that they come from. devices: the cards with runs in the fit.
    """

    devices: tuple[str, ...]
    parts: dict[Part, PartSpread]
    model_sd: float
    low: float
    high: float
    n: int
    relatedness: Relatedness


class Spread(NamedTuple):
    """The ends of an interval, as factors on the central forecast."""

    low: float
    high: float
    coverage: float
    basis: str


@cache
def fitted_spreads() -> Spreads:
    """Return the package's deviations."""
    return from_package("forecast/intervals.json", Spreads)


def parts_of(operators: Operators) -> np.ndarray:
    """Return the position in PARTS of every row."""
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
    """Return the share of each of PARTS in a step whose rows take `device_s`."""
    total = step.total_ms
    outside = np.array([step.host_overhead_ms, step.communication_ms]) / total
    operators = np.bincount(part, device_s, minlength=OPERATOR_PARTS)
    inside = max(0.0, 1.0 - float(outside.sum())) * operators / max(float(operators.sum()), 1e-12)
    return np.concatenate([inside, outside])


def deviations(spreads: Spreads, shares: Floats, seen: bool) -> Floats:
    """Return the standard deviations of the logarithms of steps with these shares (n x parts).

    `seen`: their card has runs in the fit.
    """
    parts = [spreads.parts[name] for name in PARTS]
    sd = np.array([part.seen_card if seen else part.new_card for part in parts])
    return np.asarray(np.sqrt(spreads.model_sd**2 + ((shares * sd) ** 2).sum(axis=-1)))


def deviation(spreads: Spreads, shares: Floats | Sequence[float], seen: bool) -> float:
    """Return `deviations` of one step."""
    return float(deviations(spreads, np.asarray(shares), seen))


def card_deviations(spreads: Spreads, shares: Floats, device: str) -> Floats:
    """Return the standard deviations that a card without runs in the fit adds; else 0."""
    if device in spreads.devices:
        return np.zeros(shares.shape[:-1])
    new, seen = (deviations(spreads, shares, known) for known in (False, True))
    return np.asarray(np.sqrt(new**2 - seen**2) * spreads.high / Z_95)


def card_deviation(spreads: Spreads, shares: Floats | Sequence[float], device: str) -> float:
    """Return `card_deviations` of one step."""
    return float(card_deviations(spreads, np.asarray(shares), device))


def interval_deviations(
    spreads: Spreads, shares: Floats, device: str, outside_sd: Floats | float = 0.0
) -> Floats:
    """Return the standard deviations that the fitted intervals of steps stand for.

    `outside_sd` comes from causes outside of a step's parts.
    """
    sd = deviations(spreads, shares, device in spreads.devices)
    ends = [np.hypot(end * sd, Z_95 * outside_sd) for end in (spreads.low, spreads.high)]
    return np.asarray((ends[0] + ends[1]) / (2 * Z_95))


def composed_spread(shares: Floats, device: Device) -> Spread:
    """Return the spread of a step with these shares on a device."""
    spreads = fitted_spreads()
    seen = device.name in spreads.devices
    sd = deviation(spreads, shares, seen)
    largest = PARTS[int(np.argmax(shares))]
    card = "known card" if seen else "new card"
    basis = f"calibrated on {spreads.n:,} held-out runs ({card}, mostly {largest})"
    return Spread(math.exp(spreads.low * sd), math.exp(spreads.high * sd), COVERAGE, basis)


def widened(spread: Spread, log_sd: float) -> Spread:
    """Return a spread with one more independent normal error of the step's logarithm."""
    if not log_sd:
        return spread
    low, high = (math.log(end) for end in (spread.low, spread.high))
    return spread._replace(
        low=math.exp(-math.hypot(low, Z_95 * log_sd)),
        high=math.exp(math.hypot(high, Z_95 * log_sd)),
    )
