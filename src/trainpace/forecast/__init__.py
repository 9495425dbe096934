"""Step time and memory of a workload on a cluster. Pure: no torch, no files, no clock."""

from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.forecaster import Forecaster
from trainpace.forecast.forecasts import ForecastTable
from trainpace.forecast.gloo import TCP_SHARE, meets_itself, steps, wire_bytes
from trainpace.forecast.grid import Grid
from trainpace.forecast.intervals import student_t_95
from trainpace.forecast.memory import CONTEXT_GIB, needed_gib, room_gib
from trainpace.forecast.over_step import MemoryOverStep, memory_over_step
from trainpace.forecast.roofline import Roofline
from trainpace.forecast.shapes import CLASHES, divisors
from trainpace.forecast.target import CalibratedKernels, FittedKernels, KernelModel, Target
from trainpace.forecast.timings import (
    FUSED,
    ClassFit,
    MachineModel,
    MachineRoofline,
    OperatorTimings,
    fit_classes,
    step_factor,
)
from trainpace.forecast.transfer import (
    AT_A_MEASURED_BATCH_SD,
    LARGEST_RATIO,
    PER_LOG_BATCH_SD,
    MeasuredRatio,
    measured_ratio,
    sharpened,
    shifted,
    transfer_ratio,
    transferred,
)

__all__ = [
    "AT_A_MEASURED_BATCH_SD",
    "CLASHES",
    "CONTEXT_GIB",
    "FUSED",
    "LARGEST_RATIO",
    "PER_LOG_BATCH_SD",
    "TCP_SHARE",
    "CalibratedKernels",
    "ClassFit",
    "FittedKernels",
    "ForecastTable",
    "Forecaster",
    "Grid",
    "KernelConstants",
    "KernelModel",
    "MachineModel",
    "MachineRoofline",
    "MeasuredRatio",
    "MemoryOverStep",
    "OperatorTimings",
    "Roofline",
    "Target",
    "divisors",
    "fit_classes",
    "fitted_constants",
    "measured_ratio",
    "meets_itself",
    "memory_over_step",
    "needed_gib",
    "room_gib",
    "sharpened",
    "shifted",
    "step_factor",
    "steps",
    "student_t_95",
    "transfer_ratio",
    "transferred",
    "wire_bytes",
]  # fmt: skip
