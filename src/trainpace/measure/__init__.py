"""Measurements on this machine: training steps, batch-size sweeps, data loaders and hardware."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.measure.calibration import (
        AllReduce,
        MachineProfile,
        calibrate,
        measure_allreduce,
    )
    from trainpace.measure.changes import MeasuredJump
    from trainpace.measure.collectives import measure_host_links
    from trainpace.measure.detection import (
        Machine,
        cpu_name,
        detect,
        device_here,
        device_in,
        environment,
        measure_storage,
        warnings_of,
    )
    from trainpace.measure.device import (
        MemoryMeter,
        StepClock,
        accelerator_here,
        allocator_retries,
        check_device,
        collective_backend,
        count_devices,
        device_name,
        driver_id,
        finish_stream,
        free_gib,
        in_use,
        is_capturing,
        peak_allocated_gib,
        reserved_gib,
        set_up_device,
        synchronize,
        use_device,
        versions,
    )
    from trainpace.measure.engine import (
        DdpNoiseNorms,
        Loss,
        NoiseNorms,
        PlainEngine,
        move,
        place_batch,
    )
    from trainpace.measure.gpus import GpuMonitor, clock_in_words, run_in_words
    from trainpace.measure.kernels import (
        DATA_RANGE,
        KERNEL_KINDS,
        OPTIMIZER_RANGE,
        STEP_RANGE,
        device_work,
        is_collective,
        kind_of,
        kind_of_copy,
        short,
        waits_for_data,
        waits_for_device,
    )
    from trainpace.measure.loader import (
        LoaderAdvice,
        LoaderComparison,
        LoaderConditions,
        LoaderCost,
        LoaderMeasurement,
        LoaderPoint,
        Stage,
        advise,
        batch_ms,
        compare_loaders,
        fewest_workers,
        loader_costs,
        measure_loader,
        step_ms,
    )
    from trainpace.measure.suites import SuiteItem, suite
    from trainpace.measure.sweep import (
        Conditions,
        Outcome,
        SweepAnalysis,
        SweepPlan,
        SweepPoint,
        analyse,
        measure,
        measure_noise_scale,
        most_probes,
        probe,
        run_sweep,
    )

__getattr__, __all__ = exports(__name__, __file__)
