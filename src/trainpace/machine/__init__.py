"""What this machine is: its processors, GPUs, links and disks, and what they can do."""

from trainpace.machine.calibration import calibrate
from trainpace.machine.detect import Machine, detect
from trainpace.machine.profile import MachineProfile

__all__ = ["Machine", "MachineProfile", "calibrate", "detect"]
