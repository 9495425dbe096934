"""Old names; see `Forecaster`."""

from trainpace.forecast.grid import Grid
from trainpace.forecast.old import CHECKPOINTINGS, SCHEDULES, execution_at, grid_from

__all__ = ["CHECKPOINTINGS", "SCHEDULES", "Grid", "execution_at", "grid_from"]
