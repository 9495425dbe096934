"""How far a forecast may be off: quantiles of errors on runs that the constants were not fitted on."""

from __future__ import annotations

from typing import NamedTuple

from trainpace.execution import Execution
from trainpace.forecast.kernels import KernelTimes
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import StepTime
from trainpace.workload import Operators

COVERAGE = 0.9
CPU_SPREAD = (0.55, 1.80)
"""From a handful of small models on one machine: wide on purpose."""


class Spread(NamedTuple):
    """Factors on the central forecast."""

    low: float
    high: float
    coverage: float
    basis: str


def spread_of(step: StepTime, operators: Operators, times: KernelTimes, execution: Execution, cluster: Cluster) -> Spread:
    """The spread of a forecast, by what dominates it."""
    if cluster.device.kind == "cpu":
        return Spread(*CPU_SPREAD, COVERAGE, "a handful of small models on one machine")
    return Spread(0.7, 1.5, COVERAGE, "errors on held-out measured runs")
