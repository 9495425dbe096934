"""What this machine is: its processors, GPUs, links and disks, and what they can do. Importing this room imports no torch."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.machine.calibration import (
        AllReduce,
        MachineProfile,
        calibrate,
        measure_allreduce,
    )
    from trainpace.machine.detection import (
        Machine,
        cpu_name,
        detect,
        device_in,
        environment,
        warnings_of,
    )
    from trainpace.machine.gpu_monitor import GpuMonitor
    from trainpace.machine.host_links import measure_host_links
    from trainpace.machine.storage import (
        drop_from_cache,
        filesystem_of,
        measure_storage,
        share_in_cache,
    )

__getattr__, __all__ = exports(__name__, __file__)
