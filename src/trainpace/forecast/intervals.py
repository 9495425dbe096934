"""How far a forecast may be off, by split-conformal prediction on held-out runs.

`intervals.json` holds, for each class of runs, quantiles of log(measured / forecast) over runs whose card, or whose
family of models, was left out of the fit (`make fit`). A new case gets the quantiles of the runs most like it: has
its card been fitted on, and does the host, do grouped and depthwise convolutions, or dense products decide its time?
(Vovk et al. 2005; Lei et al. 2018. The guarantee holds for cases drawn as these runs were, which nobody can promise.)
"""

import math
from functools import cache
from typing import NamedTuple

from trainpace.execution import Execution
from trainpace.hardware import Device
from trainpace.outcome import StepTime
from trainpace.records import Record, from_package
from trainpace.workload import Flags, Floats

COVERAGE = 0.9
HOST_SHARE = 0.3
GROUPED_SHARE = 0.25
COMMUNICATION_SHARE = 0.1
Z_95 = 1.6448536
"""The 95th percentile of the standard normal distribution."""


class Quantiles(Record):
    """5 % and 95 % of measured / forecast, over n runs."""

    low: float
    high: float
    n: int


class Spreads(Record):
    """Quantiles by class of runs, and the cards that were fitted on."""

    devices: tuple[str, ...]
    classes: dict[str, Quantiles]


class Spread(NamedTuple):
    """Factors on the central forecast."""

    low: float
    high: float
    coverage: float
    basis: str


@cache
def fitted_spreads() -> Spreads:
    """The quantiles that the package brings."""
    return from_package("forecast/intervals.json", Spreads)


def class_spread(run_class: str, device: Device) -> Spread:
    """The spread of runs of a class on a device."""
    spreads = fitted_spreads()
    seen = "seen card" if device.name in spreads.devices else "new card"
    name = f"{seen}, {run_class}"
    quantiles = spreads.classes.get(name) or spreads.classes[f"{seen}, any"]
    return Spread(quantiles.low, quantiles.high, COVERAGE, f"{name}: {quantiles.n} held-out runs")


def with_host_spread(spread: Spread, sensitivity: float, log_sd: float) -> Spread:
    """A spread widened by what is not known of the host: a normal error of the logarithm of its time, independent of the other
    errors, of which the step takes over the share `sensitivity`."""
    low, high = math.log(spread.low), math.log(spread.high)
    middle, half = (low + high) / 2, math.hypot((high - low) / 2, Z_95 * sensitivity * log_sd)
    return spread._replace(low=math.exp(middle - half), high=math.exp(middle + half))


def run_class(step: StepTime, execution: Execution, device_s: Floats, grouped: Flags, half: bool) -> str:
    """What decides the time of a run whose rows take `device_s`; else the width of its numbers. `grouped`: which rows are
    convolutions in groups; `half`: some rows compute in 16 bits."""
    if step.host_overhead_ms > HOST_SHARE * step.total_ms:
        return "launches"
    exchanges = execution.engine != "ddp" or step.communication_ms > COMMUNICATION_SHARE * step.total_ms
    if execution.world_size > 1 and exchanges:
        return "communication"
    if device_s[grouped].sum() > GROUPED_SHARE * device_s.sum():
        return "grouped convolutions"
    return "16 bits" if half else "32 bits"


def student_t_95(degrees: int) -> float:
    """The 95th percentile of Student's t (Abramowitz and Stegun 26.7.5, exact to 1 % from 3 degrees on; below, tabled)."""
    tabled = {1: 6.314, 2: 2.920}
    if degrees in tabled:
        return tabled[degrees]
    z, v = Z_95, degrees
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + math.fsum(term / float(v) ** (i + 1) for i, term in enumerate(terms))
