"""The kernel model of a CPU, whose constants are measured on the spot: a smoothed roofline with an efficiency per
operator class, and a floor per launch.

    time = ((compute^4 + memory^4) ^ (1/4)) + latency        per kernel, in seconds
    compute = FLOPs / (peak x efficiency(class) x fill)
    memory  = bytes / (bandwidth x memory efficiency)

`fill` is the share of the device that the output's tiles keep busy. It knows no tile quantisation, algorithm choice, L2
or clocks that sag under load; the intervals say what that costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainpace.errors import TrainpaceError
from trainpace.execution import Precision
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.hardware.device import Device
from trainpace.records import Record
from trainpace.workload import MATRIX_KINDS, Operators, at_batch

Floats = NDArray[np.float64]

TILE_OUTPUTS = 128 * 64
"""Outputs of one thread block of a large matrix kernel; smaller blocks are chosen where they would fill the device."""


class KernelModel(Record):
    """Constants of the kernel model. Efficiencies are shares of the device's figures, for large operators."""

    gemm: float
    conv: float
    conv_grouped: float
    attention: float
    tensor_core_factor: float
    memory: float
    latency_us: float
    host_us_per_launch: float
    basis: str

    def __post_init__(self) -> None:
        for name in ("gemm", "conv", "conv_grouped", "attention", "tensor_core_factor", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise TrainpaceError(
                    f"{name} of the kernel model is {getattr(self, name)}; it is a share above 0, at most 1."
                )


def kernel_times(
    operators: Operators, batch: int, device: Device, precision: Precision, model: KernelModel
) -> KernelTimes | str:
    """Device time of every row at a batch size, or the reason why there is none."""
    if device.memory_bandwidth_gb_per_s is None:
        return f"{device.name} has no memory bandwidth in the catalogue."
    full, halved = matrix_peak(device, precision, half=False), matrix_peak(device, precision, half=True)
    for peak, needed in ((full, ~operators.half), (halved, operators.half)):
        if isinstance(peak, str) and bool(needed.any()):
            return peak
    matrix = np.array([kind in MATRIX_KINDS for kind in operators.kind])
    plain = device.fp32_tflops.value * 1e12 if device.fp32_tflops is not None else 1e30
    rate = np.full(len(operators), plain)
    for peak, rows in ((full, matrix & ~operators.half), (halved, matrix & operators.half)):
        if isinstance(peak, Peak):
            rate[rows] = peak.flop_per_s * (model.tensor_core_factor if peak.tensor_core else 1.0)
    dims = at_batch(operators.dims, batch)
    efficiency = np.where(matrix, _efficiency(operators, dims, model), 0.5)
    flops = at_batch(operators.flops, batch) * operators.count
    traffic = (at_batch(operators.read_bytes, batch) + at_batch(operators.written_bytes, batch)) * operators.count
    compute = flops / (rate * efficiency * _fill(operators, dims, device))
    memory = traffic / (device.memory_bandwidth_gb_per_s.value * 1e9 * model.memory)
    latency = operators.count * operators.launches * model.latency_us * 1e-6
    return KernelTimes((compute**4 + memory**4) ** 0.25 + latency, compute, memory, latency)


def _efficiency(operators: Operators, dims: Floats, model: KernelModel) -> Floats:
    by_kind = {"gemm": model.gemm, "attention": model.attention, "attention_backward": model.attention}
    efficiency = np.array([by_kind.get(kind, model.conv) for kind in operators.kind])
    convolution = np.array([kind.startswith("conv") for kind in operators.kind])
    # channels of one group decide how well a grouped convolution fills a tile: 1 is depthwise, 32 nearly dense
    channels = np.where(convolution, dims[:, 2] / np.maximum(dims[:, 1], 1), 1.0)
    grouped = convolution & (dims[:, 1] > 1)
    share = np.clip(np.log2(np.maximum(channels, 1.0)) / 6.0, 0.0, 1.0)
    efficiency[grouped] = (model.conv_grouped + (model.conv - model.conv_grouped) * share)[grouped]
    result: Floats = efficiency
    return result


def _fill(operators: Operators, dims: Floats, device: Device) -> Floats:
    """Share of the device that matrix operators keep busy: outputs in tiles, against the number of SMs."""
    if device.sms is None:
        return np.ones(len(operators))
    outputs = np.full(len(operators), np.inf)
    for i, kind in enumerate(operators.kind):
        if kind == "gemm":
            # split-K gives a tall product more blocks: 1024 of k count as one more
            outputs[i] = dims[i, 0] * dims[i, 1] * dims[i, 3] * max(1.0, dims[i, 2] / 1024)
        elif kind == "conv":
            outputs[i] = dims[i, 0] * dims[i, 3] * np.prod(dims[i, 7:10])
        elif kind == "conv_dgrad":
            outputs[i] = dims[i, 0] * dims[i, 2] * np.prod(dims[i, 4:7])
    filled = outputs / (TILE_OUTPUTS * device.sms.value)
    result: Floats = np.where(np.isinf(outputs), 1.0, np.clip(filled, 0.05, 1.0))
    return result
