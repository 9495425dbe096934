"""Seconds of arithmetic of matmuls and convolutions, in tiles and waves.

A matmul of m x n x k is cut into tiles of the output, one thread block each, and blocks into rounds
("waves") over the SMs; a last wave that is not full costs as much as a full one. Large tiles reuse
what they load (their rate is higher), small ones fill the device; if blocks are few and k is long,
k is split over several blocks. The fastest candidate counts, as the libraries' heuristics try to
choose it. Model after NVIDIA's "Matrix Multiplication Background User's Guide".

Three families use this form:

- matmuls and convolutions by constants that all GPUs share: on CUDA cores, in TF32, and on the
  matrix units of cards without measured matmuls;
- 16- and 8-bit matmuls on NVIDIA's matrix units, with constants of each card's own (shared +
  generation + card) under a roof of memory traffic, and a small network that corrects what the form
  leaves. The network sees sizes, waves and what bounds a matmul, but not the card: with the card's
  figures among its inputs it learnt the cards by heart, and was 57% off on an A100 that it had not
  seen, where it is 12% without them (docs/log.md). fitting/products.py fits all of it on single
  measured kernels: aiconfigurator's, Vidur's and LLMServingSim's tables, and those of two GPUs;
- convolutions: matmuls too (implicit GEMM), except in groups, depthwise, and by Winograd with the
  batch that cuDNN pads.
"""

import math
from enum import IntEnum
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.forecast.constants import KernelConstants, Pooled, generation_of
from trainpace.workload import CONV, GEMM, Flags, Floats

# ---- tiles and waves

TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64))
"""Tile sizes of the output, either way round. Kernel names in gpu_ops_fp32 show 128x128 to
32x32."""
K_UNIT = 16.0
MOST_SPLITS = 32.0
SHORTEST_SPLIT = 128.0
"""The reduction of a split k costs more than it gains below this length."""


class TileModel(NamedTuple):
    """Constants of one family of matrix kernels. Each may be an array that broadcasts.

    efficiency: share of the rate that very large tiles reach. half_intensity: m n / (m + n) of the
    tile at which the rate is half of that. prologue: start and end of a block, in units of k.
    quantisation: the share of the empty part of a last wave that is paid for, 1 for all of it.
    """

    efficiency: Floats
    half_intensity: Floats
    prologue: Floats
    quantisation: Floats


def tile_model(share: Floats, units: Flags, c: KernelConstants, family: str = "tile") -> TileModel:
    """Return the tile constants of a family on matrix units or CUDA cores, at a share of the rate.

    Convolutions have constants of their own ("conv_tile"): they load through their windows.
    """
    own = (
        np.where(units, getattr(c, f"{family}_tensor_{name}"), getattr(c, f"{family}_plain_{name}"))
        for name in TileModel._fields[1:]
    )
    return TileModel(share, *own)


def tiled(
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    rate: Floats,
    sms: Floats,
    model: TileModel,
    tiles: tuple[tuple[int, int], ...] = TILES,
) -> tuple[Floats, Floats]:
    """Return (seconds of `batch` matmuls m x n x k at `rate` FLOP/s, waves) of the best tile."""
    padded_k = np.ceil(k / K_UNIT) * K_UNIT
    long, short = np.maximum(m, n), np.minimum(m, n)
    per_sm = rate / sms
    least_s = best_waves = np.asarray(np.inf)
    for big, small in tiles:
        # the longer side of the tile lies along the longer side of the output
        blocks = batch * np.ceil(long / big) * np.ceil(short / small)
        most_splits = np.minimum(MOST_SPLITS, np.maximum(1.0, padded_k / SHORTEST_SPLIT))
        splits = np.clip(np.floor(sms / blocks), 1.0, most_splits)
        waves = blocks * splits / sms
        paid = np.maximum(waves + model.quantisation * (np.ceil(waves) - waves), 1.0)
        intensity = big * small / (big + small)
        speed = per_sm * model.efficiency * (intensity / (intensity + model.half_intensity))
        seconds = paid * (2.0 * big * small) * (padded_k / splits + model.prologue) / speed
        best_waves = np.where(seconds < least_s, waves, best_waves)
        least_s = np.minimum(least_s, seconds)
    return np.asarray(least_s), np.asarray(best_waves)


class Algorithm(IntEnum):
    """Algorithm of a matmul or convolution."""

    GEMM = 0
    PADDED_WINOGRAD = 1
    WINOGRAD = 2


class Tiling(NamedTuple):
    """Division of operators' work on a device, in arrays of one shape.

    It makes the time of a matmul or convolution a step function of the batch size. algorithm: of
    `Algorithm`. images: of a convolution, before padding; 0 for a matmul. waves: rounds of tiles
    over the multiprocessors, the last perhaps in part; 0 if unknown. aligned: the largest of 8, 4,
    2 and 1 that divides the rows of a 16-bit matmul; 8 for all others.
    """

    algorithm: Any
    images: Floats
    waves: Floats
    aligned: Floats


# ---- matmuls by the constants that all GPUs share


class OperatorSizes(NamedTuple):
    """The sizes of an operator table's rows, and the rates at which they run.

    rate: FLOP/s. tensor: whether a matrix unit gives it.
    """

    shape: tuple[int, ...]
    dims: list[Floats]
    rate: Floats
    tensor: Flags
    sms: Floats
    channels_last: Flags

    def of(self, rows: Flags, *positions: int) -> tuple[Any, ...]:
        """Return the sizes of some rows at these positions, then their rate, unit and SMs."""
        arrays = (*(self.dims[i] for i in positions), self.rate, self.tensor, self.sms)
        return tuple(part(array, rows) for array in arrays)


def part(array: Any, rows: Flags) -> Any:
    """Return some rows of an array, which may lack the operators' axis or have others before it."""
    return array if array.ndim == 0 or array.shape[-1] == 1 else array[..., rows]


MISALIGNED = 0.7
"""Share of the fp32 rate that batched 16-bit matmuls reach on an A100's CUDA cores if rows are not
multiples of 16 bytes: cuBLAS 11 seems to have no kernels on matrix units for them, in fp16 or bf16.
Set so that bigscience's runs with heads of 150 numbers err as aligned ones do; those with 108 then
do too (docs/log.md). Unknown for later versions of cuBLAS."""


def alignment(n: Floats, k: Floats, eights: Any, fours: Any, twos: Any, odd: Any) -> Floats:
    """Return the value for matmuls whose rows are multiples of 8, 4 or 2 numbers, or odd."""
    multiples = [(n % width == 0) & (k % width == 0) for width in (8, 4, 2)]
    return np.select(multiples, [eights, fours, twos], odd)


def shared_matmul_s(
    sizes: OperatorSizes, rows: Flags, half: Flags, rates: Any, c: KernelConstants
) -> tuple[Floats, Floats]:
    """Return (seconds, waves) of matmuls on a device with these `rates.Rates`.

    Matrix units load 16 bytes at a time: rows of another length are loaded in pieces of 8, 4 or 2
    numbers, each half as wide.
    """
    b, m, n, k, speed, units, sms = sizes.of(rows, *GEMM)
    scalar = (
        half & units & (b > 1) & (part(rates.aligned_only, rows) > 0) & ((n % 8 > 0) | (k % 8 > 0))
    )
    speed, units = np.where(scalar, MISALIGNED * part(rates.plain, rows), speed), units & ~scalar
    tensor_share = np.where(half, c.gemm_tensor, c.gemm_tf32)
    tensor_share = np.where(b > 1, c.batched_tensor * tensor_share, tensor_share)
    share = np.where(units, tensor_share, c.gemm_plain)
    halvings = alignment(n, k, 0.0, 1.0, 2.0, 3.0)
    share = share * np.where(units, c.misaligned**halvings, 1.0)
    return tiled(b, m, n, k, speed, sms, tile_model(share, units, c))


# ---- matmuls by kernels that were measured

Width = Literal["16", "8"]
"""Bits of a matmul's operands."""
PARAMETERS = (
    "share",
    "half_intensity",
    "prologue",
    "quantisation",
    "bandwidth",
    "latency_s",
    "l2_gain",
)
"""share: of the datasheet's rate that very large tiles reach. half_intensity, prologue,
quantisation: see `TileModel`. bandwidth: share of the memory's. latency_s: start and end of a
kernel. l2_gain: how much faster operands in L2 are."""
TYPICAL_FED = 0.2
"""Watts per TFLOP/s and nanometre of an A100 or an L40S."""
BEST_FED = 0.33
SHORT_K = 64.0
LARGE_TILES = ((256, 256), *TILES)
SMOOTHNESS = 5.0
LEAST_WORK = 0.3
"""Lowest share of the form's time, its start aside, to which the network may correct a matmul."""
GROUPED_SPEED = {"16": 1.05, "8": 1.31}
"""Speed-up of grouped matmuls over the formula, by width. The network has seen no
groups and does not correct them. Fitted on TensorRT-LLM's experts (aiconfigurator's moe_gemm: both
matmuls, activation, permutation) of 128 rows and more each. With the card left out of the fit, they
have 16 (H100) to 28% (L40S) mean error in 16 bits, median 9 to 22 (n 5,832), and 21 to 31% in 8 (n
4,646)."""
CLIPPED = 4.0
"""Standard deviations at which an input of the network is clipped."""
TYPICAL_L2_MIB = 6.0


class Layer(Record):
    """out = weights @ in + biases; weights: rows of outputs."""

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]


class Network(Record):
    """A multilayer perceptron with tanh between its layers, over standardised inputs."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    layers: tuple[Layer, ...]


class WidthModel(Record):
    """The matmuls of one width.

    `fed_slope`: exponent of the share of the rate by watts per FLOP/s and nanometre relative to
    TYPICAL_FED; `fed_slopes`: that of generations whose cards determine it.
    """

    parameters: Pooled
    fed_slope: float
    fed_slopes: dict[str, float]
    network: Network


class MatmulModel(Record):
    """Both widths, and what rows that are not multiples of 16 bytes keep of the rate.

    `unaligned`, by generation: rows of 8, 4 or 2 bytes times an odd number, which the matrix units
    of Hopper and later cannot load in bulk (measured on an H100 and an H200).
    """

    widths: dict[Width, WidthModel]
    unaligned: dict[str, tuple[float, float, float]]


class MatmulFigures(NamedTuple):
    """Device parameters of the model. Each may be an array that broadcasts against the matmuls.

    `known` is 0 for a device without measured matmuls, else 1; `eight_bits` likewise. fours, twos,
    odd: what is left of the rate if rows are only multiples of 4 or 2 numbers, or odd.
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


class MatmulTimes(NamedTuple):
    """Seconds of single matmuls: the whole, and its arithmetic, its traffic and its start alone."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


UNKNOWN = MatmulFigures(*(np.asarray(x) for x in (0.0, 0.0, *(1.0,) * 12)))


@cache
def fitted_matmuls() -> MatmulModel:
    """Return the package's model."""
    return from_package("forecast/kernel_models/products.json", MatmulModel)


def fed(device: Device, peak_flop_per_s: float) -> float:
    """Return the logarithm of watts per TFLOP/s and nanometre over TYPICAL_FED.

    It is at most BEST_FED's, beyond which more does not help, and 0 without figures for it.
    """
    if not (device.tdp_w and device.process_nm):
        return 0.0
    watts = device.tdp_w.value / (peak_flop_per_s / 1e12) / device.process_nm.value
    return math.log(min(watts, BEST_FED) / TYPICAL_FED)


def is_modelled(device: Device) -> bool:
    """Return True if the device has the figures that the model reads and matrix units like those
    that were measured, NVIDIA's from Volta on."""
    major = device.compute_capability.partition(".")[0]
    return (
        major.isdigit()
        and int(major) >= 7
        and device.sms is not None
        and device.memory_bandwidth_gb_per_s is not None
    )


def matmul_figures(
    device: Device,
    peak_flop_per_s: float,
    width: Width,
    boost: float = 1.0,
    model: MatmulModel | None = None,
) -> MatmulFigures:
    """Return the figures of a device whose datasheet promises `peak_flop_per_s` in this width.

    `boost` is how far its clock goes above the datasheet's.
    """
    if not is_modelled(device):
        return UNKNOWN
    assert device.sms is not None
    assert device.memory_bandwidth_gb_per_s is not None
    model = model or fitted_matmuls()
    of_width = model.widths[width]
    own = of_width.parameters.of(device)
    slope = of_width.fed_slopes.get(generation_of(device), of_width.fed_slope)
    share = own["share"] * math.exp(slope * fed(device, peak_flop_per_s))
    figures = (
        1.0,
        float(width == "8"),
        peak_flop_per_s * boost * share,
        device.sms.value,
        device.memory_bandwidth_gb_per_s.value * 1e9 * own["bandwidth"],
        (device.l2_mib.value if device.l2_mib else TYPICAL_L2_MIB) * 2**20,
        own["half_intensity"],
        own["prologue"],
        min(own["quantisation"], 1.0),
        own["latency_s"],
        own["l2_gain"],
        *model.unaligned.get(generation_of(device), (1.0, 1.0, 1.0)),
    )
    return MatmulFigures(*map(np.asarray, figures))


class FormTimes(NamedTuple):
    """The physical form before its correction.

    Seconds in all, of arithmetic and of traffic; waves; bytes as a share of those of L2.
    """

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    waves: Floats
    l2_share: Floats


def form_times(b: Floats, m: Floats, n: Floats, k: Floats, f: MatmulFigures) -> FormTimes:
    """Return the physical form of `b` matmuls m x n x k at once. All arrays broadcast."""
    # the blocks of short matmuls are many, and hide each other's start and end
    prologue = f.prologue * k / (k + SHORT_K)
    tiles = TileModel(np.asarray(1.0), f.half_intensity, prologue, f.quantisation)
    compute, waves = tiled(b, m, n, k, f.flop_per_s, f.sms, tiles, LARGE_TILES)
    moved = b * (np.where(f.eight_bits > 0, 1.0, 2.0) * (m * k + n * k) + 2.0 * m * n)
    memory = moved / (f.bytes_per_s * (1.0 + f.l2_gain / (1.0 + (moved / f.l2_bytes) ** 2)))
    formula = (compute**SMOOTHNESS + memory**SMOOTHNESS) ** (1 / SMOOTHNESS) + f.latency_s
    return FormTimes(formula, compute, memory, waves, moved / f.l2_bytes)


def matmul_times(
    b: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    f: MatmulFigures,
    model: MatmulModel | None = None,
    grouped: Flags | bool = False,
) -> MatmulTimes:
    """Return the times of `b` matmuls m x n x k at once. All arrays broadcast.

    `grouped` ones share no operand.
    """
    model = model or fitted_matmuls()
    form = form_times(b, m, n, k, f)
    inputs = network_inputs(b, m, n, k, form, f.latency_s)
    eight = np.broadcast_to(f.eight_bits > 0, form.seconds.shape)
    factor = np.ones(form.seconds.shape)
    widths: tuple[tuple[Flags, Width], ...] = ((~eight, "16"), (eight, "8"))
    for rows, width in widths:
        if rows.any():
            of_network = np.exp(evaluate(model.widths[width].network, inputs[rows]))
            in_groups = np.broadcast_to(grouped, rows.shape)[rows]
            factor[rows] = np.where(in_groups, 1 / GROUPED_SPEED[width], of_network)
    slower = alignment(n, k, np.ones(()), f.fours, f.twos, f.odd)
    work = form.seconds - f.latency_s
    work = np.maximum(form.seconds * factor - f.latency_s, LEAST_WORK * work) / slower
    latency = np.broadcast_to(f.latency_s, work.shape)
    return MatmulTimes(
        work + latency, form.compute_s * factor / slower, form.memory_s * factor, latency
    )


def evaluate(network: Network, inputs: Floats) -> Floats:
    """Return the network's output for inputs (rows x inputs).

    The output of a row is the same to the last bit whatever the other rows are.
    """
    x = np.clip(
        (inputs - np.array(network.means)) / np.array(network.deviations), -CLIPPED, CLIPPED
    )
    *hidden, last = network.layers
    for layer in hidden:
        x = np.tanh(_through(layer, x))
    return _through(last, x)[:, 0]


def _through(layer: Layer, x: Floats) -> Floats:
    # BLAS adds up in an order that depends on the number of rows, so this does not use it
    out = np.tile(np.array(layer.biases), (len(x), 1))
    for column, weights in zip(x.T, np.array(layer.weights).T, strict=True):
        out += column[:, None] * weights
    return out


def network_inputs(
    b: Floats, m: Floats, n: Floats, k: Floats, form: FormTimes, latency_s: Floats
) -> Floats:
    """Return the network's inputs on a last axis, behind the shape that the arguments broadcast
    to."""
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


# ---- convolutions

FP32_BYTES = 4.0
WINOGRAD_IMAGES = 16.0
WINOGRAD_FUSED_BLOCKS = ((1, 8, 16), (2, 8, 8), (4, 4, 8))
"""Images, rows and columns of a block, from the names and grids of cuDNN's kernels in
gpu_ops_fp32.parquet."""


def depthwise_s(
    kind: str, sizes: OperatorSizes, rows: Flags, flops: Floats, rates: Any, c: KernelConstants
) -> Floats:
    """Return the seconds of convolutions with one filter per channel, on CUDA cores.

    They reach a share of the cores' rate that depends on the pass, the layout and the window.
    """
    suffix = kind.removeprefix("conv")
    nhwc = sizes.channels_last[..., rows]
    share = np.where(nhwc, getattr(c, f"depthwise_nhwc{suffix}"), getattr(c, f"depthwise{suffix}"))
    depth, height, width, *_ = sizes.of(rows, CONV.kernel_d, CONV.kernel_h, CONV.kernel_w)
    name = "wgrad_window" if suffix == "_wgrad" else "window"
    power = np.where(nhwc, getattr(c, f"depthwise_nhwc_{name}"), getattr(c, f"depthwise_{name}"))
    share = share * (depth * height * width / 9.0) ** (power - 1.0)
    return np.asarray(flops / (part(rates.plain, rows) * share))


class _Convolution(NamedTuple):
    """The sizes of convolutions, as arrays. Channels are those of one group."""

    images: Floats
    groups: Floats
    inputs: Floats
    outputs: Floats
    positions_in: Floats
    positions_out: Floats
    height: Floats
    width: Floats
    window: Floats
    strides: Floats
    is_3x3: Flags
    speed: Floats
    units: Flags
    sms: Floats


def _convolution(sizes: OperatorSizes, rows: Flags) -> _Convolution:
    *dims, speed, units, sms = sizes.of(rows, *CONV[: CONV.channels_last])
    images, groups, c_in, c_out, in_d, in_h, in_w, out_d, out_h, out_w, k_d, k_h, k_w, *s = dims
    return _Convolution(
        images=images,
        groups=groups,
        inputs=c_in / groups,
        outputs=c_out / groups,
        positions_in=images * in_d * in_h * in_w,
        positions_out=images * out_d * out_h * out_w,
        height=out_h,
        width=out_w,
        window=k_d * k_h * k_w,
        strides=s[0] * s[1],
        is_3x3=(k_h == 3) & (k_w == 3) & (k_d == 1),
        speed=speed,
        units=units,
        sms=sms,
    )


def convolved(
    kind: str,
    sizes: OperatorSizes,
    rows: Flags,
    grouped: Flags,
    half: Flags,
    rates: Any,
    c: KernelConstants,
) -> tuple[Floats, Tiling]:
    """Return (seconds of arithmetic, tiling) of convolutions that are not depthwise.

    They run as implicit GEMM, or as Winograd for 3x3 at stride 1 on CUDA cores if that is faster.
    """
    v = _convolution(sizes, rows)
    direct, waves = _implicit_gemm(kind, v, grouped, half, c)
    if grouped.any():
        in_groups = _in_groups_s(kind, v, sizes.channels_last[..., rows], c)
        direct = np.where(grouped, np.maximum(direct, in_groups), direct)
    square = v.is_3x3 & (v.strides == 1) & ~grouped & ~np.asarray(v.units, dtype=bool)
    aligned = np.asarray(8.0)
    if not square.any():
        return direct, Tiling(np.asarray(Algorithm.GEMM), v.images, waves, aligned)
    padded, in_one = _winograd_s(kind, v, part(rates.bytes_per_s, rows), c)
    winograd = np.minimum(padded, in_one)
    pads = (padded <= in_one) & (kind != "conv_wgrad")
    by_winograd = np.where(pads, Algorithm.PADDED_WINOGRAD, Algorithm.WINOGRAD)
    algorithm = np.where(square & (winograd < direct), by_winograd, Algorithm.GEMM)
    waves = np.where(algorithm == Algorithm.GEMM, waves, 0.0)
    seconds = np.where(square, np.minimum(direct, winograd), direct)
    return seconds, Tiling(algorithm, v.images, waves, aligned)


def _implicit_gemm(
    kind: str, v: _Convolution, grouped: Flags, half: Flags, c: KernelConstants
) -> tuple[Floats, Floats]:
    suffix = kind.removeprefix("conv")
    # matrix units take channels eight at a time
    padded = np.where(v.units, np.ceil(v.inputs / 8) * 8, v.inputs)
    if kind == "conv":
        m, n, k = v.positions_out, v.outputs, padded * v.window
    elif kind == "conv_dgrad":
        m, n, k = v.positions_in, padded, v.outputs * np.maximum(1.0, v.window / v.strides)
    else:
        m, n, k = v.outputs, padded * v.window, v.positions_out
    tensor_share = np.where(
        half, getattr(c, f"conv_tensor{suffix}"), getattr(c, f"conv_tf32{suffix}")
    )
    # images of 3 channels are padded to 4 or 8 by kernels made for them; other odd numbers are not
    odd_channels = (np.mod(v.outputs, 8) != 0) | ((np.mod(v.inputs, 8) != 0) & (v.inputs > 4))
    tensor_share = np.where(odd_channels, tensor_share * c.conv_misaligned, tensor_share)
    share = np.where(v.units, tensor_share, getattr(c, f"conv_plain{suffix}"))
    model = tile_model(share, v.units, c, "conv_tile")
    if grouped.any():  # their own shares were fitted beside the tiles of matmuls
        pairs = zip(tile_model(share, v.units, c), model, strict=True)
        model = TileModel(*(np.where(grouped, matmuls, dense) for matmuls, dense in pairs))
    return tiled(v.groups, m, n, k, v.speed, v.sms, model)


def _in_groups_s(kind: str, v: _Convolution, channels_last: Flags, c: KernelConstants) -> Floats:
    suffix = kind.removeprefix("conv")
    # cuDNN's fast NHWC kernels take groups in 32s, of as many inputs as outputs, a power of two
    odd = (
        (np.mod(v.groups, 32) != 0)
        | (v.inputs != v.outputs)
        | (np.mod(np.log2(np.maximum(v.inputs, 1)), 1) != 0)
    )
    odd = odd & channels_last & (np.asarray(v.units) > 0)
    factor = np.where(v.units, getattr(c, f"grouped{suffix}"), getattr(c, f"grouped_plain{suffix}"))
    factor = np.where(odd, getattr(c, f"grouped_odd_nhwc{suffix}"), factor)
    power = np.where(odd, c.grouped_odd_nhwc_channels, c.grouped_channels)
    share = np.minimum(factor * (v.inputs / 16.0) ** power, 1.0)
    work = 2.0 * v.groups * v.inputs * v.outputs * v.window * v.positions_out
    return np.asarray(work / (v.speed * share))


def _winograd_s(
    kind: str, v: _Convolution, bytes_per_s: Floats, c: KernelConstants
) -> tuple[Floats, Floats]:
    """Return the seconds of cuDNN's two Winograd kernels for 3x3 at stride 1 (Lavin and Gray 2015).

    F(4x4, 3x3) in separate kernels: 36 matmuls of (tiles x inputs x outputs), whose tiles are those
    of a batch **padded to 16 images**; F(2x2, 3x3) in one kernel, in blocks of a few images.
    docs/jumps.md has the evidence from kernel grids.
    """
    suffix, is_wgrad = kind.removeprefix("conv"), kind == "conv_wgrad"
    padded = v.images if is_wgrad else np.ceil(v.images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES
    tiles = padded * np.ceil(v.height / 4) * np.ceil(v.width / 4)
    matmul = (v.outputs, v.inputs, tiles) if is_wgrad else (tiles, v.outputs, v.inputs)
    share = np.asarray(getattr(c, f"winograd{suffix}"))
    model = tile_model(share, np.asarray(False), c, "conv_tile")
    moved = 2.0 * FP32_BYTES * 36.0 * (tiles * (v.inputs + v.outputs) + v.inputs * v.outputs)
    separate = tiled(np.asarray(36.0), *matmul, v.speed, v.sms, model)[0]
    separate = separate + moved / (bytes_per_s * c.traffic_matrix)
    if is_wgrad:
        return separate, np.asarray(np.inf)
    blocks = [
        np.ceil(v.images / n)
        * n
        * np.ceil(v.height / rows)
        * rows
        * np.ceil(v.width / columns)
        * columns
        for n, rows, columns in WINOGRAD_FUSED_BLOCKS
    ]
    positions = np.minimum.reduce(blocks)
    work = 2.0 * 9.0 / 2.25 * positions * v.inputs * np.ceil(v.outputs / 32) * 32
    return separate, work / (v.speed * getattr(c, f"winograd_fused{suffix}"))
