"""Old names; see `Forecaster`."""

from trainpace.forecast.old import BatchCurve, batch_curve

__all__ = ["BatchCurve", "batch_curve"]
