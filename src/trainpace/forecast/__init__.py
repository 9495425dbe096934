"""Step time, memory, training time and cost of a workload on a cluster. Pure: no torch, no files, no clock."""

from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.forecast import forecast
from trainpace.forecast.grid import Grid, GridForecast, execution_at, forecast_grid, grid_from, grid_of
from trainpace.forecast.timings import MachineModel

__all__ = [
    "Grid", "GridForecast", "KernelConstants", "MachineModel", "execution_at", "fitted_constants", "forecast", "forecast_grid",
    "grid_from", "grid_of",
]  # fmt: skip
