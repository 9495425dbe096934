"""Step time, memory, training time and cost of a workload on a cluster. Pure: no torch, no files, no clock."""

from trainpace.forecast.forecast import forecast
from trainpace.forecast.kernels import GPU_KERNELS, KernelModel

__all__ = ["GPU_KERNELS", "KernelModel", "forecast"]
