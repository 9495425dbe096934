"""Constants of the GPU kernel models, shared by all GPUs or by generation and card.

fitting/fit.py writes `constants.json`, which all GPUs share. Only the datasheet differs between
GPUs.

Kernels that were measured on single cards also have constants per card. They are estimated with
partial pooling (Gelman and Hill 2007, chapter 12). The logarithm of a parameter is ``shared +
generation + card``. The last two are drawn toward 0, depending on their spread over generations and
cards. A measured card uses its own constants. Other cards of a measured generation use those of the
generation. All other cards use the shared constants.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.workload import ROW_WORK, TRAFFIC_SHARES, WORK


class _Constants(Record):
    """Constants of the kernel models, for large operators. The defaults are the start of the fit.

    Most constants are shares of a rate of the device, from 0 to 1.

    Clock and power (see `rates`):
        watts_plain, watts_tensor: Watts per TFLOP/s and nanometer above which the clock stays up.
        watts_floor: Share of these watts below which the voltage cannot fall further.
        tensor_feeding: Exponent of the loss of matrix units that are wider than GeForce's.
        consumer_boost: Real clock of GeForce and Titan cards relative to the datasheet.

    Matmuls and convolutions:
        tile_plain_*, tile_tensor_*: See `matmul.TileModel`, for CUDA cores and matrix units.
            conv_tile_* are those of convolutions.
        gemm_*, conv_*: Share of the rate that large tiles reach, by operator and unit.
        misaligned: Factor for each halving of 8 until it divides the sizes of a matmul.
        conv_misaligned: Factor if channels are not a multiple of 8.
        products_sustained: Rate of 16-bit and 8-bit matmuls in long steps, over that of bursts.
        consumer_products: Speed-up of matmuls on GeForce cards without measured kernels.
        fp8: Reached share of the FP8 rate relative to 16 bits, if the matmul model does not cover
            the card.
        winograd*: 3x3 convolutions on CUDA cores by F(4x4, 3x3) in three kernels.
            winograd_fused* are F(2x2, 3x3) in one kernel.
        transposes: Passes over the tensors of an NCHW convolution on matrix units, which need NHWC.
        grouped*: Share of the rate at 16 channels per group. grouped_*channels is the exponent of
            the channels. odd_nhwc is cuDNN's slow path.
        depthwise*: Share of the rate of CUDA cores for a 3x3 window. depthwise_*window is the
            exponent of the window, where 1 means no effect.

    Memory traffic:
        traffic_*: Share of the memory bandwidth, by class of operator.
        work_*, row_work_*: FLOPs of CUDA cores per element, and per normalized row.
        l2_gain: Relative speed-up of a tensor that stays in L2.

    torch.compile:
        compile_traffic, compile_launches: Factors on the result of `fusion`.
        compile_host: Factor on the host time per launch.
        compile_old_*: Further factors of torch before 2.2, whose Inductor fused less.

    Launches:
        latency_us: Start and end of a kernel on the device.
        host_launch_us, host_view_us, host_module_us: Host time per launch, view and entered module.
        host_library_us: Host time per launch of `target.LIBRARY_KINDS`.
        host_optimizer_us: Host time per launch of the optimizer, for dozens of tensors.
        host_step_us: Host time once per step.
        host_old_torch, host_tensorflow: Factors on host times of torch before 1.10, and of Keras.
    """

    watts_plain: float = 0.8
    watts_tensor: float = 0.10
    watts_floor: float = 0.5
    tensor_feeding: float = 0.15
    consumer_boost: float = 1.1
    tile_plain_half_intensity: float = 8.0
    tile_plain_prologue: float = 32.0
    tile_plain_quantisation: float = 0.7
    tile_tensor_half_intensity: float = 20.0
    tile_tensor_prologue: float = 64.0
    tile_tensor_quantisation: float = 0.7
    conv_tile_plain_half_intensity: float = 8.0
    conv_tile_plain_prologue: float = 32.0
    conv_tile_plain_quantisation: float = 0.7
    conv_tile_tensor_half_intensity: float = 20.0
    conv_tile_tensor_prologue: float = 64.0
    conv_tile_tensor_quantisation: float = 0.7
    gemm_plain: float = 0.95
    gemm_tensor: float = 0.9
    gemm_tf32: float = 0.7
    batched_tensor: float = 0.6
    products_sustained: float = 0.9
    consumer_products: float = 1.1
    misaligned: float = 0.8
    conv_misaligned: float = 0.8
    conv_plain: float = 0.85
    conv_plain_dgrad: float = 0.8
    conv_plain_wgrad: float = 0.7
    conv_tensor: float = 0.7
    conv_tensor_dgrad: float = 0.6
    conv_tensor_wgrad: float = 0.5
    conv_tf32: float = 0.7
    conv_tf32_dgrad: float = 0.6
    conv_tf32_wgrad: float = 0.5
    pre_volta: float = 0.8
    kepler: float = 0.45
    kepler_traffic: float = 0.6
    winograd: float = 0.55
    winograd_dgrad: float = 0.55
    winograd_wgrad: float = 0.45
    winograd_fused: float = 0.7
    winograd_fused_dgrad: float = 0.7
    transposes: float = 1.0
    grouped: float = 0.09
    grouped_dgrad: float = 0.09
    grouped_wgrad: float = 0.09
    grouped_channels: float = 0.85
    grouped_plain: float = 0.3
    grouped_plain_dgrad: float = 0.3
    grouped_plain_wgrad: float = 0.2
    grouped_odd_nhwc: float = 0.015
    grouped_odd_nhwc_dgrad: float = 0.015
    grouped_odd_nhwc_wgrad: float = 0.015
    grouped_odd_nhwc_channels: float = 0.7
    depthwise: float = 0.3
    depthwise_dgrad: float = 0.2
    depthwise_wgrad: float = 0.1
    depthwise_nhwc: float = 0.3
    depthwise_nhwc_dgrad: float = 0.2
    depthwise_nhwc_wgrad: float = 0.1
    depthwise_window: float = 1.0
    depthwise_wgrad_window: float = 1.0
    depthwise_nhwc_window: float = 1.0
    depthwise_nhwc_wgrad_window: float = 1.5
    traffic_matrix: float = 0.8
    l2_gain: float = 0.5
    fp8: float = 0.9
    compile_traffic: float = 1.0
    compile_launches: float = 1.0
    compile_host: float = 1.0
    compile_old_traffic: float = 1.98
    compile_old_host: float = 8.9
    latency_us: float = 2.4
    host_launch_us: float = 6.0
    host_library_us: float = 20.0
    host_view_us: float = 2.0
    host_module_us: float = 4.0
    host_optimizer_us: float = 15.0
    host_step_us: float = 300.0
    host_old_torch: float = 1.5
    host_tensorflow: float = 4.0


if TYPE_CHECKING:

    class KernelConstants(_Constants):
        """All constants: those of `_Constants`, and those of each class of memory traffic.

        The kinds of operators declare `traffic_*`, `work_*` and `row_work_*`.
        """

        def __getattr__(self, name: str) -> float: ...

else:
    KernelConstants = msgspec.defstruct(
        "KernelConstants",
        [(f"traffic_{name}", float, share) for name, share in TRAFFIC_SHARES.items()]
        + [(f"work_{name}", float, float(flops)) for name, flops in WORK.items()]
        + [(f"row_work_{name}", float, float(flops)) for name, flops in ROW_WORK.items()],
        bases=(_Constants,),
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


@cache
def fitted_constants() -> KernelConstants:
    """Return the fitted constants that ship with the package."""
    return from_package("forecast/constants.json", KernelConstants)


Familiarity = Literal["card", "generation", "none"]
"""Basis of a card's constants: measured kernels of the card, of its generation, or neither."""


def generation_of(device: Device) -> str:
    """Return the generation of a device. Devices of one generation have similar multiprocessors.

    For NVIDIA, this is the compute capability up to 9.x, and its major version from 10 on. For
    other vendors, it is the name of the instruction set or architecture.
    """
    major, _, minor = device.compute_capability.partition(".")
    if not major.isdigit():
        return device.compute_capability or device.architecture
    return major if int(major) >= 10 else f"{major}.{minor}"


class Pooled(Record):
    """Logarithms of the parameters `names`: shared, by measured generation and by card."""

    names: tuple[str, ...]
    shared: tuple[float, ...]
    generations: dict[str, tuple[float, ...]]
    devices: dict[str, tuple[float, ...]]

    def of(self, device: Device) -> dict[str, float]:
        """Return the parameters of a device by name, without logarithm."""
        none = (0.0,) * len(self.names)
        own = self.devices.get(device.name, none)
        generation = self.generations.get(generation_of(device), none)
        logs = map(sum, zip(self.shared, generation, own, strict=True))
        return {name: math.exp(log) for name, log in zip(self.names, logs, strict=True)}

    def familiarity(self, device: Device) -> Familiarity:
        if device.name in self.devices:
            return "card"
        return "generation" if generation_of(device) in self.generations else "none"


class CardConstants(Record):
    """Constants of measured cards, by kernel family (for example "conv_plain", "batch_norm").

    They replace the shared constants for cards of a generation with measured kernels of the family.
    All other cards keep the shared `KernelConstants`, which were also fitted on whole steps.
    """

    families: dict[str, Pooled]

    @lru_cache(maxsize=512)  # noqa: B019  # Few instances exist, and they live as long as the process.
    def of(self, c: KernelConstants, device: Device) -> KernelConstants:
        """Return the constants of a device."""
        own: dict[str, float] = {}
        for family in self.families.values():
            if family.familiarity(device) != "none":
                own |= family.of(device)
        return msgspec.structs.replace(c, **own) if own else c

    def __hash__(self) -> int:
        return id(self)


NO_CARDS = CardConstants(families={})


@cache
def measured_cards() -> CardConstants:
    """Return the constants of measured cards that ship with the package."""
    return from_package("forecast/kernel_models/cards.json", CardConstants)
