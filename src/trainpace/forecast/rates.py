"""Achievable rates of a device: peaks of the datasheet, reduced if the power limit is reached.

A card that would need more power than its limit lowers its clock. The energy per FLOP falls with
the feature size of the process. The model therefore compares ``x = (TDP / peak) / feature size``
with a threshold x0 (Horowitz et al. 1994):

- Above x0, the card keeps its peak rate.
- Below x0, voltage and clock fall together, and power falls with the cube of the clock. The rate is
  proportional to the cube root of ``x / x0``.
- Below ``watts_floor * x0``, the voltage cannot fall further. The rate is proportional to x.

T4 (70 W) and A10 (150 W) lose most. The H100 with 500 W loses a little.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainpace.core.execution import NUMBER_FORMATS, Precision
from trainpace.core.hardware import Device
from trainpace.forecast.attention import (
    NO_ATTENTION,
    TF32_MATMULS,
    AttentionRates,
    Implementation,
    attention_rates,
)
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.matmul import (
    TYPICAL_L2_MIB,
    UNKNOWN,
    MatmulFigures,
    MatmulModel,
    Width,
    fitted_matmuls,
    matmul_figures,
)
from trainpace.workload import Floats

NO_RATE = 1e30
"""Placeholder for a rate that no operator of the table needs."""
TYPICAL_SMS = 80.0
TYPICAL_PROCESS_NM = 8.0
SHARPNESS = 8.0
"""Exponent of the smooth transition at the power limit. Larger is sharper."""
ISSUED_THREADS = 128.0
"""Threads that the four schedulers of a multiprocessor issue per clock, from Volta on.

Source: NVIDIA's Volta and Ampere white papers.
"""
CONSUMER_BOOST = 1.1
NARROW = 512.0
"""FLOP per clock and multiprocessor up to which matrix units reach their full rate.

These are the matrix units of GeForce cards with fp32 accumulation.
"""

EMULATED_BF16 = 0.54
"""Speed of emulated bf16 matmuls relative to fp32.

Measured on a GTX 1080 (github.com/kubeedge/ianvs/issues/888). A T4 is below 0.5
(github.com/openxla/xla/issues/12429).
"""

WIDTHS: dict[Precision, Width] = {"fp8": "8"}
"""Bits of the operands of matmuls with weights, if they are not 16."""
ON_ENGINES = {"Gaudi"}
"""Architectures that run all matmuls on matrix engines instead of fp32 cores."""


class Peak(NamedTuple):
    """Peak rate of matrix operators. `tensor_core` is True if it is the rate of a matrix unit."""

    flop_per_s: float
    tensor_core: bool


NO_PEAK = Peak(NO_RATE, False)
_KINDS = ((False, False), (True, False), (False, True))
"""(16-bit operands, convolution) of the rates `full`, `half` and `convolutions` of `Rates`."""


class Rates(NamedTuple):
    """Achievable rates of one device in one precision, as arrays that broadcast."""

    full: Floats
    """FLOP/s of matmuls whose operands are stored in fp32."""
    half: Floats
    """FLOP/s of matmuls whose operands are stored in 16 bits."""
    plain: Floats
    """FLOP/s of the CUDA cores in fp32."""
    full_on_tensor_cores: Floats
    convolutions: Floats
    """FLOP/s of convolutions whose operands are stored in fp32."""
    convolutions_on_tensor_cores: Floats
    half_on_tensor_cores: Floats
    bytes_per_s: Floats
    sms: Floats
    l2_bytes: Floats
    casts: Floats
    """1 if separate kernels cast the operands of matmuls to 8 bits, else 0."""
    aligned_only: Floats = np.asarray(0.0)
    """1 if batched 16-bit matmuls need rows of multiples of 16 bytes to run on matrix units."""
    weights: MatmulFigures = UNKNOWN
    """Parameters of matmuls with weights whose operands are stored in 16 bits."""
    batched: MatmulFigures = UNKNOWN
    """Parameters of matmuls of two activations. They stay in 16 bits if the precision is FP8."""
    attention: AttentionRates = NO_ATTENTION
    """Rates of fused attention. It stays in 16 bits if the precision is FP8."""
    issue: Floats = np.asarray(1.0)
    """FLOP/s if each issued instruction were an fp32 instruction of the CUDA cores.

    From Volta to A100, this is twice the fp32 rate. Their multiprocessors issue 128 threads per
    clock but have only 64 fp32 lanes.
    """
    products_boost: Floats = np.asarray(1.0)
    """Speed-up of matmuls in whole steps on GeForce cards without measured kernels."""


def matrix_peak(
    device: Device, precision: Precision, half: bool, convolves: bool = False
) -> Peak | str:
    """Return the peak rate of matrix operators, or the reason why the device cannot run them.

    Without tensor cores, 16-bit matmuls run on the CUDA cores with fp32 accumulation, at the fp32
    rate. TF32 on a device without it is plain fp32, as in torch. A job in bf16 or FP8 keeps a few
    matmuls in fp32 (positions, routers). They use the fp32 rate of the cores on all devices, even
    if the catalog has no fp32 rate of the matrix engines.

    Args:
        device: The device.
        precision: Precision of the training.
        half: True for operands stored in 16 bits.
        convolves: True for convolutions. torch lets them use TF32 by default.
    """
    number_format = NUMBER_FORMATS[precision]
    products = number_format.convolutions if convolves and not half else number_format.products
    figures = {
        (False, "tf32"): device.tf32_tensor_tflops,
        (True, "fp16"): device.fp16_tensor_tflops,
        (True, "bf16"): device.bf16_tensor_tflops,
        (True, "fp8"): device.fp8_tensor_tflops,
    }
    figure = figures.get((half, products))
    if figure is not None:
        return Peak(figure.value * 1e12, True)
    if half and products == "fp8":
        return f"{device.name} has no FP8 matrix rate."
    peak = _without_matrix_unit(device, precision, half)
    if half and not isinstance(peak, str) and emulates_bf16(device, precision):
        return peak._replace(flop_per_s=EMULATED_BF16 * peak.flop_per_s)
    return peak


def emulates_bf16(device: Device, precision: Precision) -> bool:
    """Return True if a GPU has no bf16 units. torch then converts bf16 operands to fp32."""
    products = NUMBER_FORMATS[precision].products
    no_units = device.bf16_tensor_tflops is None and device.vendor == "NVIDIA"
    return products == "bf16" and no_units


def _without_matrix_unit(device: Device, precision: Precision, half: bool) -> Peak | str:
    is_in_fp32 = NUMBER_FORMATS[precision].form == "fp32"
    if device.architecture in ON_ENGINES and (half or is_in_fp32):
        wanted = "fp16" if half else precision
        return (
            f"{device.name} has no {wanted} matrix rate in the catalogue: its maker publishes only"
            " bf16 and FP8."
        )
    if device.fp32_tflops is None:
        return f"{device.name} has no fp32 rate in the catalogue."
    return Peak(device.fp32_tflops.value * 1e12, False)


def sustained_rates(
    device: Device,
    precision: Precision,
    needs_full: bool,
    needs_half: bool,
    constants: KernelConstants,
    model: MatmulModel | None = None,
    attention: Implementation | None = None,
) -> Rates | str:
    """Return the rates of a device, or the reason if a required rate is unknown.

    Args:
        device: The device.
        precision: Precision of the training.
        needs_full: True if some operators have operands in fp32.
        needs_half: True if some operators have operands in 16 bits.
        constants: Fitted constants.
        model: Matmul model. Defaults to that of the package.
        attention: Implementation of fused attention, or None if there is none.
    """
    if device.memory_bandwidth_gb_per_s is None:
        return f"{device.name} has no memory bandwidth in the catalogue."
    if device.fp32_tflops is None:
        return f"{device.name} has no fp32 rate in the catalogue."
    c, generation = constants, device.generation
    # Since Volta, CUDA cores have enough issue slots and operand caches for matmuls to reach their
    # peak. Kepler has 192 lanes per multiprocessor, which are even harder to keep busy. Its ECC
    # also costs memory bandwidth.
    reached = {"3": c.kepler, "5": c.pre_volta, "6": c.pre_volta}.get(generation, 1.0)
    peaks = []
    for kind, needed in zip(_KINDS, (needs_full, needs_half, False), strict=True):
        peak = matrix_peak(device, precision, *kind)
        if isinstance(peak, str):
            if needed:
                return peak
            peak = NO_PEAK
        peaks.append(Peak(peak.flop_per_s * reached, peak.tensor_core))
    full, half, convolutions = peaks
    plain = Peak(device.fp32_tflops.value * 1e12, False)
    in_16_bits, width = half, WIDTHS.get(precision, "16")
    weights = _measured_matmuls(device, half, width, model)
    if width == "8":
        bf16 = matrix_peak(device, "bf16", half=True)
        in_16_bits = half if isinstance(bf16, str) else bf16
        # An 8-bit matmul needs about half the energy of a 16-bit one, so it does not need more
        # power.
        half = half._replace(flop_per_s=half.flop_per_s * c.fp8)
    sustained_plain = _sustained(device, plain, c)
    traffic = {"3": c.kepler_traffic}.get(generation, 1.0)
    figures = {
        "full": _sustained(device, full, c),
        "half": _sustained(device, in_16_bits, c) * half.flop_per_s / in_16_bits.flop_per_s,
        "plain": sustained_plain,
        "full_on_tensor_cores": float(full.tensor_core),
        "convolutions": _sustained(device, convolutions, c),
        "convolutions_on_tensor_cores": float(convolutions.tensor_core),
        "half_on_tensor_cores": float(half.tensor_core),
        "bytes_per_s": device.memory_bandwidth_gb_per_s.value * traffic * 1e9,
        "sms": device.sms.value if device.sms else TYPICAL_SMS,
        "l2_bytes": (device.l2_mib.value if device.l2_mib else TYPICAL_L2_MIB) * 2**20,
        "casts": float(width == "8"),
        "aligned_only": float(device.compute_capability == "8.0"),  # seen only on A100
        **_speed_ups(device, sustained_plain, model, c),
    }
    return Rates(
        **{name: np.asarray(figure) for name, figure in figures.items()},
        weights=weights,
        batched=_measured_matmuls(device, in_16_bits, "16", model),
        attention=_attention(device, attention, in_16_bits, plain) if attention else NO_ATTENTION,
    )


def _attention(
    device: Device, implementation: Implementation, in_16_bits: Peak, plain: Peak
) -> AttentionRates:
    boost, tf32 = consumer_boost(device), device.tf32_tensor_tflops
    full = plain.flop_per_s if tf32 is None else tf32.value * 1e12 / TF32_MATMULS
    peaks = (boost * rate for rate in (in_16_bits.flop_per_s, full, plain.flop_per_s))
    return attention_rates(device, implementation, *peaks)


def _speed_ups(
    device: Device, plain: float, model: MatmulModel | None, c: KernelConstants
) -> dict[str, float]:
    """Return `Rates.issue` and `Rates.products_boost`. `plain` is `Rates.plain`."""
    major, lanes = device.generation, device.fp32_lanes_per_sm
    issues_more = lanes is not None and major.isdigit() and int(major) >= 7
    parameters = (model or fitted_matmuls()).widths["16"].parameters
    boosted = device.is_consumer and parameters.familiarity(device) != "card"
    return {
        "issue": plain * (ISSUED_THREADS / lanes.value if lanes and issues_more else 1.0),
        "products_boost": c.consumer_products if boosted else 1.0,
    }


def _measured_matmuls(
    device: Device, peak: Peak, width: Width, model: MatmulModel | None
) -> MatmulFigures:
    if not peak.tensor_core or peak.flop_per_s >= NO_RATE:
        return UNKNOWN
    return matmul_figures(device, peak.flop_per_s, width, consumer_boost(device), model)


def _sustained(device: Device, peak: Peak, constants: KernelConstants) -> float:
    if device.tdp_w is None or peak.flop_per_s >= NO_RATE:
        return peak.flop_per_s
    nm = device.process_nm.value if device.process_nm else TYPICAL_PROCESS_NM
    fed = device.tdp_w.value / (peak.flop_per_s / 1e12) / nm
    enough = constants.watts_tensor if peak.tensor_core else constants.watts_plain
    boost = constants.consumer_boost if device.is_consumer else 1.0
    short = enough / fed
    cubic = (1 + short**SHARPNESS) ** (-1 / (3 * SHARPNESS))
    linear = (1 + (short * constants.watts_floor) ** SHARPNESS) ** (-2 / (3 * SHARPNESS))
    feeding = 1.0
    if peak.tensor_core and device.sms is not None and device.boost_clock_mhz is not None:
        # Matrix units have 1024 FLOP per clock and multiprocessor on V100, 2048 on A100 and 4096 on
        # H100. Registers, shared memory and issue slots grew less (Shah et al. 2024 on Hopper's).
        width = peak.flop_per_s / (device.sms.value * device.boost_clock_mhz.value * 1e6)
        feeding = max(1.0, width / NARROW) ** -constants.tensor_feeding
    return float(boost * peak.flop_per_s * feeding * cubic * linear)


def consumer_boost(device: Device) -> float:
    """Return the real clock of a card relative to its datasheet. It is above 1 for GeForce cards.

    An RTX 4090 reaches 2.7 GHz (datasheet: 2.52), and an RTX 3090 reaches 1.9 GHz (1.7).
    """
    return CONSUMER_BOOST if device.is_consumer else 1.0
