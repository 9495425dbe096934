"""Real steps on this machine. This module itself imports no torch: the work runs in child processes."""

from trainpace.measure.probes import measure, profile_this_cpu
from trainpace.measure.profile import MachineProfile

__all__ = ["MachineProfile", "measure", "profile_this_cpu"]
