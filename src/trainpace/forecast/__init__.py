"""Step time and memory of a workload on a cluster. Pure: no torch, no files, no clock."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.forecast.attention import (
        IMPLEMENTATIONS,
        Implementation,
        default_implementation,
        implementation_on,
    )
    from trainpace.forecast.cards import CardConstants
    from trainpace.forecast.collectives import TCP_SHARE, meets_itself, steps, wire_bytes
    from trainpace.forecast.constants import KernelConstants, fitted_constants
    from trainpace.forecast.explanations import MemoryOverStep, Roofline, memory_over_step
    from trainpace.forecast.forecaster import Forecaster
    from trainpace.forecast.forecasts import ForecastTable
    from trainpace.forecast.grid import Grid
    from trainpace.forecast.intervals import PARTS, Z_95, student_t_95
    from trainpace.forecast.memory import CONTEXT_GIB, needed_gib, room_gib
    from trainpace.forecast.packing import packed
    from trainpace.forecast.posterior import (
        AT_A_MEASURED_BATCH_SD,
        LARGEST_RATIO,
        Knowledge,
        Measured,
        Observed,
        Posterior,
        Run,
        Variant,
        observe,
        observe_elsewhere,
        run_beside,
    )
    from trainpace.forecast.product_model import ProductModel
    from trainpace.forecast.roles import alike
    from trainpace.forecast.shapes import CLASHES, divisors, doublings
    from trainpace.forecast.software_rewrites import RunningSoftware, running_software
    from trainpace.forecast.target import FITTED, CalibratedKernels, FittedKernels, Target
    from trainpace.forecast.timings import (
        FUSED,
        MachineModel,
        MachineRoofline,
        OperatorTimings,
        fit_classes,
        step_factor,
    )

__getattr__, __all__ = exports(__name__, __file__)
