"""Step time, memory, training time and cost of a workload on a cluster. Pure: no torch, no files, no clock."""

from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.forecast import forecast
from trainpace.forecast.timings import MachineModel

__all__ = ["KernelConstants", "MachineModel", "fitted_constants", "forecast"]
