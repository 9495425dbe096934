"""Real steps on this machine. This module itself imports no torch: the work runs in child processes."""

from trainpace.measure.conditions import Conditions
from trainpace.measure.probes import calibrate, measure, probe
from trainpace.measure.profile import MachineProfile

__all__ = ["Conditions", "MachineProfile", "calibrate", "measure", "probe"]
