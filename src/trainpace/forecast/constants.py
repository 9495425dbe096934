"""The constants of the GPU kernel models, shared by all GPUs or by generation and card.

`constants.json` is written by fitting/fit.py with the residuals of its fit; a GPU adds only its
datasheet. Kernels that were measured on single cards have constants of their own, estimated with
partial pooling (Gelman and Hill 2007, chapter 12): in logarithms a parameter is ``shared +
generation + card``, and the last two are drawn towards 0 by their spread over generations and
cards. A measured card uses its own figures; another card of a measured generation that
generation's; any other card the shared ones.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.workload import ROW_WORK, TRAFFIC_SHARES, WORK


class _Constants(Record):
    """Shares of the device's achievable figures, for large operators. Defaults start the fit.

    watts_*: watts per TFLOP/s and nanometre at which a card is fed well enough to keep its clock;
    watts_floor: the share of them below which its voltage falls no further. tensor_feeding:
    exponent by which matrix units that are wider than GeForce's lose. consumer_boost: how far
    GeForce and Titan cards clock above their datasheet (see `rates`).

    tile_*: see `matmul.TileModel`; plain on CUDA cores, tensor on matrix units; conv_tile_* those
    of convolutions. gemm_*, conv_*: shares by operator and unit. misaligned: factor for each time
    that 8 numbers have to be halved to divide a matmul's sizes; conv_misaligned if channels are not
    a multiple of 8. products_sustained: what long steps leave of the rate that short bursts of 16-
    and 8-bit matmuls reach; consumer_products: how much faster the matmuls of GeForce cards without
    measured kernels are than their relatives'. fp8: share of the FP8 rate that matmuls reach,
    relative to 16 bits, if the fitted matmul model does not include the card.

    winograd_*: 3x3 convolutions on CUDA cores by F(4x4, 3x3) in three kernels, winograd_fused_* by
    F(2x2, 3x3) in one. transposes: passes over a convolution's tensors that NCHW costs on matrix
    units, which need NHWC. grouped_*: share of the rate at 16 channels per group,
    grouped_*channels: how it grows with them; odd_nhwc is cuDNN's slow path. depthwise_*: share of
    the CUDA cores' rate for a 3x3 window, depthwise_*window: how it grows with the window, 1 for
    not at all.

    traffic_*: share of the memory bandwidth by class of operator. work_*, row_work_*: FLOPs of the
    CUDA cores for each element read or written, and for each normalised row. l2_gain: how much
    faster a tensor is that stays in L2.

    compile_*: factors on the traffic and the launches that torch.compile leaves by `fusion`, and on
    the host's time for each of these launches; compile_old_*: further factors of torch before 2.2,
    whose Inductor fused less.

    latency_us: start and end of a kernel on the device. host_*_us: the host's time per launch, per
    view and per module entered; host_library_us per launch of matmuls, convolutions, attention and
    normalisations (`target.LIBRARY_KINDS`); host_optimizer_us per launch of the optimizer, for
    dozens of tensors; host_step_us once per step. host_old_torch, host_tensorflow: factors on the
    host's times under torch before 1.10, and under Keras.
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

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 1e7:
                raise TrainpaceError(f"{name} of the kernel constants is {getattr(self, name)}.")


if TYPE_CHECKING:

    class KernelConstants(_Constants):
        """All constants: those above, and three for each class of memory traffic.

        `traffic_*`, `work_*` and `row_work_*` are declared by the kinds of operators.
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
    """Return the package's constants."""
    return from_package("forecast/constants.json", KernelConstants)


Familiarity = Literal["card", "generation", "none"]
"""Basis of a card's constants: its own measured kernels, its generation's, or neither."""


def generation_of(device: Device) -> str:
    """Return the generation of a device, whose multiprocessors are alike.

    NVIDIA's is the compute capability up to 9.x and its major version from 10 on; other vendors' is
    the name of their instruction set or architecture.
    """
    major, _, minor = device.compute_capability.partition(".")
    if not major.isdigit():
        return device.compute_capability or device.architecture
    return major if int(major) >= 10 else f"{major}.{minor}"


class Pooled(Record):
    """Logarithms of parameters by `names`: shared, and for each measured generation and card."""

    names: tuple[str, ...]
    shared: tuple[float, ...]
    generations: dict[str, tuple[float, ...]]
    devices: dict[str, tuple[float, ...]]

    def of(self, device: Device) -> dict[str, float]:
        """Return the parameters of a device, as factors."""
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
    """Constants of measured cards, by family of kernels ("conv_plain", "batch_norm").

    A card of a generation whose kernels of a family were measured takes the family's constants from
    here. Any other card keeps the shared ones of `KernelConstants`, which whole steps decide too.
    """

    families: dict[str, Pooled]

    def of(self, c: KernelConstants, device: Device) -> KernelConstants:
        """Return the constants of a device."""
        return _of_device(self, c, device) if self.families else c

    def __hash__(self) -> int:
        return id(self)


NO_CARDS = CardConstants(families={})


@lru_cache(maxsize=512)
def _of_device(cards: CardConstants, c: KernelConstants, device: Device) -> KernelConstants:
    own: dict[str, float] = {}
    for family in cards.families.values():
        if family.familiarity(device) != "none":
            own |= family.of(device)
    return msgspec.structs.replace(c, **own) if own else c


@cache
def measured_cards() -> CardConstants:
    """Return the cards whose kernels the package's fit measured."""
    return from_package("forecast/kernel_models/cards.json", CardConstants)
