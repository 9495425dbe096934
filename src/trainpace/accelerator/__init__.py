"""A device under training: which kinds there are, steps of one process, the device's own clock, and its memory.

Everything goes through torch.accelerator and torch.Event, which know CUDA, ROCm (as "cuda"), Intel's XPU, Apple's MPS and what
other packages register. What only one kind has stands in `devices`, and nothing outside this room names a kind's own module.
"""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.accelerator.clock import StepClock
    from trainpace.accelerator.describe import DeviceHere, device_here
    from trainpace.accelerator.devices import (
        accelerator_here,
        check_device,
        collective_backend,
        count_devices,
        device_name,
        driver_id,
        finish_stream,
        in_use,
        is_capturing,
        set_up_device,
        synchronize,
        use_device,
        versions,
    )
    from trainpace.accelerator.engine import Loss, PlainEngine, move, place_batch
    from trainpace.accelerator.kernel_names import (
        DATA_RANGE,
        KERNEL_KINDS,
        OPTIMIZER_RANGE,
        STEP_RANGE,
        exchanges,
        kind_of,
        kind_of_copy,
        short,
        waits_for_data,
        waits_for_device,
    )
    from trainpace.accelerator.kernels import DeviceWork, device_work, work_of
    from trainpace.accelerator.memory import (
        MemoryMeter,
        allocator_retries,
        free_gib,
        peak_allocated_gib,
        reserved_gib,
    )
    from trainpace.accelerator.queued import launch_ms, queued_ms

__getattr__, __all__ = exports(__name__, __file__)
