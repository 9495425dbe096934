"""Step time and memory of a workload on a cluster. Pure: no torch, no files, no clock."""

from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.forecaster import Forecaster
from trainpace.forecast.forecasts import Forecasts
from trainpace.forecast.grid import Grid
from trainpace.forecast.target import CalibratedKernels, FittedKernels, KernelModel, Target
from trainpace.forecast.timings import MachineModel

__all__ = [
    "CalibratedKernels", "FittedKernels", "Forecaster", "Forecasts", "Grid", "KernelConstants", "KernelModel", "MachineModel",
    "Target", "fitted_constants",
]  # fmt: skip
