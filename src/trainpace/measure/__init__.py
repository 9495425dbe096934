"""Real steps, sweeps and data loaders on this machine, and the machine itself."""

from typing import TYPE_CHECKING

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.core.host import drop_from_cache, filesystem_of, share_in_cache
    from trainpace.measure.adaptive import most_probes
    from trainpace.measure.analysis import SweepAnalysis, SweepPoint, analyse
    from trainpace.measure.calibration import (
        AllReduce,
        MachineProfile,
        calibrate,
        measure_allreduce,
    )
    from trainpace.measure.changes import MeasuredJump
    from trainpace.measure.detection import (
        Machine,
        cpu_name,
        detect,
        device_in,
        environment,
        warnings_of,
    )
    from trainpace.measure.device_clock import StepClock
    from trainpace.measure.device_description import DeviceHere, device_here
    from trainpace.measure.device_memory import (
        MemoryMeter,
        allocator_retries,
        free_gib,
        peak_allocated_gib,
        reserved_gib,
    )
    from trainpace.measure.devices import (
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
    from trainpace.measure.engine import Loss, PlainEngine, move, place_batch
    from trainpace.measure.gpu_monitor import GpuMonitor
    from trainpace.measure.host_links import measure_host_links
    from trainpace.measure.kernel_names import (
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
    from trainpace.measure.kernels import DeviceWork, device_work, work_of
    from trainpace.measure.loader_comparison import LoaderComparison, compare_loaders
    from trainpace.measure.loader_measurement import (
        LoaderAdvice,
        LoaderConditions,
        LoaderCost,
        LoaderMeasurement,
        LoaderPoint,
        advise,
        batch_ms,
        fewest_workers,
        loader_costs,
        measure_loader,
        step_ms,
    )
    from trainpace.measure.noise_scale import DdpNoiseNorms, NoiseNorms
    from trainpace.measure.queued_launches import launch_ms, queued_ms
    from trainpace.measure.running import clock_in_words, run_in_words
    from trainpace.measure.storage import measure_storage
    from trainpace.measure.suites import SuiteItem, suite
    from trainpace.measure.sweep import (
        Conditions,
        Outcome,
        SweepPlan,
        measure,
        measure_noise_scale,
        probe,
        run_sweep,
    )

__getattr__, __all__ = exports(__name__, __file__)
