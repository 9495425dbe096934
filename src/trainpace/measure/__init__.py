"""Real steps on this machine. This module itself imports no torch: the work runs in child processes."""

from trainpace.measure.conditions import Conditions
from trainpace.measure.probes import measure, probe

__all__ = ["Conditions", "measure", "probe"]
