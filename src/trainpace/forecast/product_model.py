"""Measured matrix products: the kernel model of 16- and 8-bit products on NVIDIA's matrix units.

The tile-and-wave form of `trainpace.forecast.tiles` under a roof of memory traffic, with constants of each card's own (shared +
generation + card), and on top of it a small network that corrects what the form leaves. The network sees sizes, waves and
what bounds a product, and not which card it is: with the card's figures among its inputs it learnt the cards by heart, and was
57 % off on an A100 that it had not seen, where it is 12 % without them (docs/log.md). `fitting/products.py` fits all of
it on single measured kernels: aiconfigurator's, Vidur's and LLMServingSim's tables, and those of two lent GPUs.
"""

import math
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.forecast.pooling import Pooled, generation_of
from trainpace.forecast.tiles import TILES, TileModel, tiled
from trainpace.workload import Flags, Floats

Width = Literal["16", "8"]
"""Bits of a product's operands."""
PARAMETERS = (
    "share",
    "half_intensity",
    "prologue",
    "quantisation",
    "bandwidth",
    "latency_s",
    "l2_gain",
)
"""share: of the datasheet's rate that very large tiles reach; half_intensity, prologue, quantisation: see `TileModel`;
bandwidth: share of the memory's; latency_s: start and end of a kernel; l2_gain: how much faster operands in L2 are."""
TYPICAL_FED = 0.2
"""Watts per TFLOP/s and nanometre of an A100 or an L40S."""
BEST_FED = 0.33
SHORT_K = 64.0
LARGE_TILES = ((256, 256), *TILES)
SMOOTHNESS = 5.0
LEAST_WORK = 0.3
"""Share of the form's time, its start aside, below which the network may not bring a product."""
GROUPED_SPEED = {"16": 1.05, "8": 1.31}
"""How much faster grouped products are than the form says, by width; the network has seen no groups, and does not correct them.
Fitted on TensorRT-LLM's experts (aiconfigurator's moe_gemm: both products, activation, permutation) of 128 rows and more each.
Card left out, they come to 16 (H100) to 28 % (L40S) mean error in 16 bits, median 9 to 22 (n 5,832), and to 21 to 31 % in 8 (n
4,646)."""
CLIPPED = 4.0
"""Standard deviations beyond which an input of the network says no more."""


class Layer(Record):
    """out = weights @ in + biases; weights: rows of outputs."""

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]


class Network(Record):
    """A multilayer perceptron with tanh between its layers, over inputs that are brought to mean 0 and deviation 1."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    layers: tuple[Layer, ...]


class WidthModel(Record):
    """The products of one width. `fed_slope`: exponent of the share of the rate by watts per FLOP/s and nanometre relative to
    TYPICAL_FED, `fed_slopes` that of a generation whose cards told it."""

    parameters: Pooled
    fed_slope: float
    fed_slopes: dict[str, float]
    network: Network


class ProductModel(Record):
    """Both widths, and what products keep of their rate by generation where rows are 8, 4 or 2 bytes times an odd number long,
    which the matrix units of Hopper and later cannot load in bulk (measured on an H100 and an H200).
    """

    widths: dict[Width, WidthModel]
    unaligned: dict[str, tuple[float, float, float]]


class ProductFigures(NamedTuple):
    """What the model needs to know of a device. Each may be an array that broadcasts against the products.

    `known` is 0 for a device whose products the model does not hold, else 1; `eight_bits` likewise. fours, twos, odd: what is
    kept of the rate where rows are only multiples of 4 or 2 numbers, or odd.
    """

    known: Floats
    eight_bits: Floats
    flop_per_s: Floats
    sms: Floats
    bytes_per_s: Floats
    l2_bytes: Floats
    half_intensity: Floats
    prologue: Floats
    quantisation: Floats
    latency_s: Floats
    l2_gain: Floats
    fours: Floats
    twos: Floats
    odd: Floats


class ProductTimes(NamedTuple):
    """Seconds of single products: all of it, and its arithmetic, its traffic and its start alone."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


UNKNOWN = ProductFigures(*(np.asarray(x) for x in (0.0, 0.0, *(1.0,) * 12)))


@cache
def fitted_products() -> ProductModel:
    """The model that the package brings."""
    return from_package("forecast/kernel_models/products.json", ProductModel)


def fed(device: Device, peak_flop_per_s: float) -> float:
    """Logarithm of watts per TFLOP/s and nanometre over TYPICAL_FED, at most what helps; 0 where the sheet does not say."""
    if not (device.tdp_w and device.process_nm):
        return 0.0
    watts = device.tdp_w.value / (peak_flop_per_s / 1e12) / device.process_nm.value
    return math.log(min(watts, BEST_FED) / TYPICAL_FED)


def is_modelled(device: Device) -> bool:
    """Does the device have the matrix units that were measured, NVIDIA's from Volta on, and the figures that the model reads?"""
    major = device.compute_capability.partition(".")[0]
    return (
        major.isdigit()
        and int(major) >= 7
        and device.sms is not None
        and device.memory_bandwidth_gb_per_s is not None
    )


def product_figures(
    device: Device,
    peak_flop_per_s: float,
    width: Width,
    boost: float = 1.0,
    model: ProductModel | None = None,
) -> ProductFigures:
    """The figures of a device whose sheet promises `peak_flop_per_s` in this width, and whose clock goes `boost` times as high
    as the sheet says."""
    if not is_modelled(device):
        return UNKNOWN
    assert device.sms is not None
    assert device.memory_bandwidth_gb_per_s is not None
    model = model or fitted_products()
    of_width = model.widths[width]
    own = of_width.parameters.of(device)
    slope = of_width.fed_slopes.get(generation_of(device), of_width.fed_slope)
    share = own["share"] * math.exp(slope * fed(device, peak_flop_per_s))
    unaligned = model.unaligned.get(generation_of(device), (1.0, 1.0, 1.0))
    figures = (
        1.0,
        float(width == "8"),
        peak_flop_per_s * boost * share,
        device.sms.value,
        device.memory_bandwidth_gb_per_s.value * 1e9 * own["bandwidth"],
        (device.l2_mib.value if device.l2_mib else 6.0) * 2**20,
        own["half_intensity"],
        own["prologue"],
        min(own["quantisation"], 1.0),
        own["latency_s"],
        own["l2_gain"],
        *unaligned,
    )
    return ProductFigures(*map(np.asarray, figures))


class FormTimes(NamedTuple):
    """The physical form before its correction: seconds in all, of arithmetic, of traffic, waves, and bytes over those of L2."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    waves: Floats
    l2_share: Floats


def form_times(b: Floats, m: Floats, n: Floats, k: Floats, f: ProductFigures) -> FormTimes:
    """The physical form of `b` products m x n x k at once. All arrays broadcast."""
    # the blocks of short products are many, and hide each other's start and end
    prologue = f.prologue * k / (k + SHORT_K)
    tiles = TileModel(np.asarray(1.0), f.half_intensity, prologue, f.quantisation)
    compute, waves = tiled(b, m, n, k, f.flop_per_s, f.sms, tiles, LARGE_TILES)
    moved = b * (np.where(f.eight_bits > 0, 1.0, 2.0) * (m * k + n * k) + 2.0 * m * n)
    memory = moved / (f.bytes_per_s * (1.0 + f.l2_gain / (1.0 + (moved / f.l2_bytes) ** 2)))
    formula = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS) + f.latency_s
    return FormTimes(formula, compute, memory, waves, moved / f.l2_bytes)


def product_times(
    b: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    f: ProductFigures,
    model: ProductModel | None = None,
    grouped: Flags | bool = False,
) -> ProductTimes:
    """Seconds of `b` products m x n x k at once, which share nothing where they are `grouped`. All arrays broadcast."""
    model = model or fitted_products()
    form = form_times(b, m, n, k, f)
    inputs = network_inputs(b, m, n, k, form, f.latency_s)
    eight = np.broadcast_to(f.eight_bits > 0, form.seconds.shape)
    factor = np.ones(form.seconds.shape)
    widths: tuple[tuple[Flags, Width], ...] = ((~eight, "16"), (eight, "8"))
    for rows, width in widths:
        if rows.any():
            of_network = np.exp(evaluate(model.widths[width].network, inputs[rows]))
            factor[rows] = np.where(
                np.broadcast_to(grouped, rows.shape)[rows], 1 / GROUPED_SPEED[width], of_network
            )
    slower = np.select(
        [(n % number == 0) & (k % number == 0) for number in (8, 4, 2)],
        [np.ones(()), f.fours, f.twos],
        f.odd,
    )
    work = form.seconds - f.latency_s
    work = np.maximum(form.seconds * factor - f.latency_s, LEAST_WORK * work) / slower
    latency = np.broadcast_to(f.latency_s, work.shape)
    return ProductTimes(
        work + latency, form.compute_s * factor / slower, form.memory_s * factor, latency
    )


def evaluate(network: Network, inputs: Floats) -> Floats:
    """The output (rows) for inputs (rows x inputs), of each row the same to the last bit whatever the others are."""
    x = np.clip(
        (inputs - np.array(network.means)) / np.array(network.deviations), -CLIPPED, CLIPPED
    )
    *hidden, last = network.layers
    for layer in hidden:
        x = np.tanh(_through(layer, x))
    return _through(last, x)[:, 0]


def _through(layer: Layer, x: Floats) -> Floats:
    # BLAS adds up in an order that depends on the number of rows
    out = np.tile(np.array(layer.biases), (len(x), 1))
    for column, weights in zip(x.T, np.array(layer.weights).T, strict=True):
        out += column[:, None] * weights
    return out


def network_inputs(
    b: Floats, m: Floats, n: Floats, k: Floats, form: FormTimes, latency_s: Floats
) -> Floats:
    """The shape of what broadcasts together, and the inputs on a last axis."""
    few, bounded = np.minimum(form.waves, 8.0), form.compute_s + form.memory_s
    inputs = (
        np.log(m),
        np.log(n),
        np.log(k),
        np.log(b),
        np.log(form.compute_s / form.memory_s),
        np.log(form.waves + 1e-3),
        few - np.floor(few),
        np.log(form.l2_share),
        np.log(latency_s / bounded),
        m % 128 == 0,
        n % 128 == 0,
        n % 256 == 0,
        k % 64 == 0,
    )
    return np.stack(np.broadcast_arrays(*inputs), axis=-1).astype(np.float64)
