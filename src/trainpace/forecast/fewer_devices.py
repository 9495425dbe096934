"""Old names; see `Forecaster`."""

from trainpace.forecast.old import fewer_devices

__all__ = ["fewer_devices"]
