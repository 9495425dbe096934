"""Arithmetic time of matmuls and convolutions, modeled in tiles and waves.

Libraries cut the output of a matmul m x n x k into tiles. One thread block computes one tile. The
SMs run the blocks in rounds, called waves. A partly filled last wave can cost as much as a full
one. Large tiles load less data per FLOP, so their rate is higher. Small tiles give enough blocks to
fill the device. If there are few blocks and k is long, several blocks share one tile and split k.
The model uses the fastest tile, as the libraries' heuristics try to do. It follows NVIDIA's "Matrix
Multiplication Background User's Guide".

Three groups of kernels use this model:

- Matmuls and convolutions on CUDA cores, in TF32, and on the matrix units of cards without measured
  matmuls. All GPUs share their constants.
- 16-bit and 8-bit matmuls on NVIDIA's matrix units. Each card has its own constants (shared +
  generation + card), and memory traffic limits the rate. A small network then corrects the error of
  the formula. The network sees the sizes, the waves and the ratio of arithmetic to memory traffic,
  but not the card. With the card's figures as inputs it memorized the cards: its error was 57% on
  an A100 outside its training data, and is 12% without them (docs/log.md). fitting/products.py fits
  the constants and the network on single measured kernels: the tables of aiconfigurator, Vidur and
  LLMServingSim, and those of two GPUs.
- Convolutions. Most run as matmuls (implicit GEMM). Grouped, depthwise and Winograd convolutions
  have their own formulas. cuDNN pads the batch for one of its Winograd kernels.

Shapes: the functions are elementwise and broadcast their array arguments. An axis of operator rows
is always the last axis. Axes before it, for example devices or batch sizes, are optional.
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
"""Tile sizes of the output. The longer side lies along the longer side of the output.

Kernel names in gpu_ops_fp32 show sizes from 128x128 to 32x32.
"""
K_UNIT = 16.0
"""Multiple to which k is padded."""
MOST_SPLITS = 32.0
"""Largest number of blocks that share one tile by splitting k."""
SHORTEST_SPLIT = 128.0
"""Shortest part of a split k. Below it, adding up the parts costs more than the split gains."""


class TileModel(NamedTuple):
    """Constants of one family of matrix kernels, as arrays that broadcast.

    Attributes:
        efficiency: Share of the device's rate that very large tiles reach.
        half_intensity: Tile intensity m n / (m + n) at which the rate is half of that.
        prologue: Time of the start and end of a block, in units of k.
        quantisation: Cost of the idle part of the last wave, relative to the same part of a full
            wave. With 1, a partly filled wave costs as much as a full one.
    """

    efficiency: Floats
    half_intensity: Floats
    prologue: Floats
    quantisation: Floats


def tile_model(share: Floats, units: Flags, c: KernelConstants, family: str = "tile") -> TileModel:
    """Return the tile constants of a kernel family.

    Args:
        share: Share of the device's rate that very large tiles reach.
        units: Mask of kernels on matrix units. The others run on CUDA cores.
        c: Fitted constants.
        family: "tile" for matmuls or "conv_tile" for convolutions, whose windows change how they
            load data.
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
    """Return the time of batched matmuls with the fastest tile, and the waves of that tile.

    Args:
        batch: Number of matmuls that run at once.
        m: Rows of the output.
        n: Columns of the output.
        k: Length of the reduction.
        rate: Peak rate of the device in FLOP/s.
        sms: Number of SMs.
        model: Constants of the kernel family.
        tiles: Candidate tile sizes.

    Returns:
        Seconds, and waves as a fraction: 1.5 means one full and one half-filled wave.
    """
    padded_k = np.ceil(k / K_UNIT) * K_UNIT
    long, short = np.maximum(m, n), np.minimum(m, n)
    per_sm = rate / sms
    least_s = best_waves = np.asarray(np.inf)
    for big, small in tiles:
        # The longer side of the tile lies along the longer side of the output.
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
    """How the device divides the work of matmuls and convolutions, as arrays of one shape.

    This division makes the time a step function of the batch size.

    Attributes:
        algorithm: Value of `Algorithm`.
        images: Images of a convolution before padding, or 0 for a matmul.
        waves: Waves of tiles over the SMs, as a fraction. 0 if unknown.
        aligned: Largest of 8, 4, 2 and 1 that divides the row length of a 16-bit matmul. 8 for all
            other operators.
    """

    algorithm: Any
    images: Floats
    waves: Floats
    aligned: Floats


# ---- matmuls by the constants that all GPUs share


class OperatorSizes(NamedTuple):
    """Sizes of the rows of an operator table, and the rates at which they run.

    Attributes:
        shape: Shape of the result.
        dims: One array per size of the operator (see `GEMM` and `CONV` in `workload`).
        rate: Peak rate in FLOP/s.
        tensor: Mask of operators on matrix units.
        sms: Number of SMs.
        channels_last: Mask of convolutions in the NHWC layout.
    """

    shape: tuple[int, ...]
    dims: list[Floats]
    rate: Floats
    tensor: Flags
    sms: Floats
    channels_last: Flags

    def of(self, rows: Flags, *positions: int) -> tuple[Any, ...]:
        """Return the sizes at `positions` for some rows, followed by rate, tensor and sms.

        Args:
            rows: Mask of the rows.
            *positions: Indices in `dims`.
        """
        arrays = (*(self.dims[i] for i in positions), self.rate, self.tensor, self.sms)
        return tuple(part(array, rows) for array in arrays)


def part(array: Any, rows: Flags) -> Any:
    """Return some rows of an array along its last axis.

    A scalar, or an array with a last axis of length 1, applies to all rows and is unchanged.
    """
    return array if array.ndim == 0 or array.shape[-1] == 1 else array[..., rows]


MISALIGNED = 0.7
"""Share of the fp32 rate that misaligned, batched 16-bit matmuls reach on an A100's CUDA cores.

Misaligned means that rows are not multiples of 16 bytes. cuBLAS 11 seems to have no fp16 or bf16
kernels on matrix units for them. With this value, BigScience's runs with a head size of 150 have
the same errors as aligned runs. Its runs with a head size of 108 then do too (docs/log.md). The
value for later versions of cuBLAS is unknown.
"""


def alignment(n: Floats, k: Floats, eights: Any, fours: Any, twos: Any, odd: Any) -> Floats:
    """Select a value for each matmul by the alignment of its rows.

    Returns:
        `eights`, `fours` or `twos` if n and k are both multiples of 8, 4 or 2, otherwise `odd`.
    """
    multiples = [(n % width == 0) & (k % width == 0) for width in (8, 4, 2)]
    return np.select(multiples, [eights, fours, twos], odd)


def shared_matmul_s(
    sizes: OperatorSizes, rows: Flags, half: Flags, rates: Any, c: KernelConstants
) -> tuple[Floats, Floats]:
    """Return the seconds and the waves of matmuls, with the constants that all GPUs share.

    Matrix units load 16 bytes at a time. If rows are not multiples of 16 bytes, kernels load half,
    a quarter or an eighth of that at a time, which costs a part of the rate.

    Args:
        sizes: Sizes of all operators.
        rows: Mask of the matmuls.
        half: Mask of 16-bit operators among these matmuls.
        rates: `rates.Rates` of the device.
        c: Fitted constants.
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
"""Names of the fitted parameters of each card.

share: Share of the datasheet's rate that very large tiles reach.
half_intensity, prologue, quantisation: See `TileModel`.
bandwidth: Share of the datasheet's memory bandwidth.
latency_s: Start and end of a kernel, in seconds.
l2_gain: Relative increase of the bandwidth if all operands fit in L2.
"""
TYPICAL_FED = 0.2
"""Power per rate and process size of an A100 or an L40S: watts / (TFLOP/s) / nanometer."""
BEST_FED = 0.33
"""Value of the same ratio above which more power does not help."""
SHORT_K = 64.0
"""Length of k at which the prologue of a block counts half."""
LARGE_TILES = ((256, 256), *TILES)
SMOOTHNESS = 5.0
"""Exponent of the smooth maximum of arithmetic and memory time."""
LEAST_WORK = 0.3
"""Smallest factor by which the network may shorten a matmul, latency excluded."""
GROUPED_SPEED = {"16": 1.05, "8": 1.31}
"""Speed-up of grouped matmuls over the formula, by width.

It replaces the network's correction, because the network was fitted without grouped matmuls. It was
fitted on TensorRT-LLM's experts with at least 128 rows each (aiconfigurator's moe_gemm: both
matmuls, activation, permutation). On cards outside the fit, the mean error in 16 bits is 16% (H100)
to 28% (L40S), and the median 9 to 22% (n 5,832). In 8 bits the mean error is 21 to 31% (n 4,646).
"""
CLIPPED = 4.0
"""Standard deviations at which an input of the network is clipped."""
TYPICAL_L2_MIB = 6.0
"""Assumed L2 size of a device whose L2 size is unknown."""


class Layer(Record):
    """One linear layer of the network: out = weights @ in + biases.

    `weights` has shape (outputs, inputs).
    """

    weights: tuple[tuple[float, ...], ...]
    biases: tuple[float, ...]


class Network(Record):
    """A multilayer perceptron with tanh between its layers.

    Inputs are standardized with `means` and `deviations` first.
    """

    means: tuple[float, ...]
    deviations: tuple[float, ...]
    layers: tuple[Layer, ...]


class WidthModel(Record):
    """Fitted model of matmuls with operands of one width.

    Attributes:
        parameters: The values of `PARAMETERS`, pooled over cards and generations.
        fed_slope: Exponent that relates the reached share of the rate to the power ratio of `fed`.
        fed_slopes: Exponent by GPU generation, if the generation's cards determine it.
        network: Network that corrects the formula.
    """

    parameters: Pooled
    fed_slope: float
    fed_slopes: dict[str, float]
    network: Network


class MatmulModel(Record):
    """Fitted model of matmuls in both widths.

    Attributes:
        widths: Model by operand width.
        unaligned: Share of the rate that remains if rows are not multiples of 16 bytes, by
            generation. The three values are for odd multiples of 8, 4 and 2 bytes. Matrix units of
            Hopper and later cannot load such rows in bulk (measured on an H100 and an H200).
    """

    widths: dict[Width, WidthModel]
    unaligned: dict[str, tuple[float, float, float]]


class MatmulFigures(NamedTuple):
    """Parameters of a device, as arrays that broadcast against the matmuls.

    Attributes:
        known: 1 if the model covers the device, otherwise 0.
        eight_bits: 1 for 8-bit operands, 0 for 16-bit operands.
        flop_per_s: Rate that very large tiles reach.
        sms: Number of SMs.
        bytes_per_s: Memory bandwidth that matmuls reach.
        l2_bytes: Size of the L2 cache.
        half_intensity: See `TileModel`. The same holds for prologue and quantisation.
        latency_s: Start and end of a kernel, in seconds.
        l2_gain: Relative increase of the bandwidth if all operands fit in L2.
        fours: Share of the rate that remains if n and k are multiples of 4, but not of 8.
        twos: The same for multiples of 2.
        odd: The same for odd n or k.
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
    """Seconds of single matmuls: total, arithmetic, memory traffic and kernel latency."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    latency_s: Floats


UNKNOWN = MatmulFigures(*(np.asarray(x) for x in (0.0, 0.0, *(1.0,) * 12)))


@cache
def fitted_matmuls() -> MatmulModel:
    """Return the fitted model that ships with the package."""
    return from_package("forecast/kernel_models/products.json", MatmulModel)


def fed(device: Device, peak_flop_per_s: float) -> float:
    """Return log(power ratio of the device / TYPICAL_FED).

    The power ratio is watts / (TFLOP/s) / nanometers of the process, limited to `BEST_FED`. The
    result is 0 if the device's power or process size is unknown.
    """
    if not (device.tdp_w and device.process_nm):
        return 0.0
    watts = device.tdp_w.value / (peak_flop_per_s / 1e12) / device.process_nm.value
    return math.log(min(watts, BEST_FED) / TYPICAL_FED)


def is_modelled(device: Device) -> bool:
    """Return True if the matmul model covers the device.

    The device must be an NVIDIA GPU from Volta on, with known SM count and memory bandwidth.
    """
    major = device.generation
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
    """Return the matmul parameters of a device, or `UNKNOWN` if the model does not cover it.

    Args:
        device: The device.
        peak_flop_per_s: Rate of the datasheet for this width.
        width: Bits of the operands.
        boost: Clock of the device divided by the datasheet's clock.
        model: Fitted model. Defaults to the one in the package.
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
    """Matmul times of the formula, before the network corrects them.

    Attributes:
        seconds: Total time.
        compute_s: Arithmetic alone.
        memory_s: Memory traffic alone.
        waves: Waves of tiles over the SMs.
        l2_share: Bytes of operands and result divided by the size of L2.
    """

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    waves: Floats
    l2_share: Floats


def form_times(b: Floats, m: Floats, n: Floats, k: Floats, f: MatmulFigures) -> FormTimes:
    """Return the formula's times of `b` concurrent matmuls m x n x k. All arrays broadcast."""
    # With a short k, blocks hide each other's start and end.
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
    """Return the times of `b` matmuls m x n x k that run at once. All arrays broadcast.

    Args:
        b: Number of matmuls in the batch or group.
        m: Rows of the output.
        n: Columns of the output.
        k: Length of the reduction.
        f: Parameters of the device.
        model: Fitted model. Defaults to the one in the package.
        grouped: Mask of grouped matmuls, for example the experts of one layer.
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
    """Return the network's output, shape (rows,), for inputs of shape (rows, inputs).

    The output of a row is bit-identical, whatever the other rows are.
    """
    x = np.clip(
        (inputs - np.array(network.means)) / np.array(network.deviations), -CLIPPED, CLIPPED
    )
    *hidden, last = network.layers
    for layer in hidden:
        x = np.tanh(_through(layer, x))
    return _through(last, x)[:, 0]


def _through(layer: Layer, x: Floats) -> Floats:
    # `layer.weights @ x` would use BLAS. Its order of additions depends on the number of rows.
    out = np.tile(np.array(layer.biases), (len(x), 1))
    for column, weights in zip(x.T, np.array(layer.weights).T, strict=True):
        out += column[:, None] * weights
    return out


def network_inputs(
    b: Floats, m: Floats, n: Floats, k: Floats, form: FormTimes, latency_s: Floats
) -> Floats:
    """Return the network's inputs. The shape is the broadcast shape plus a last axis of inputs."""
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
"""Multiple of images to which cuDNN's unfused Winograd kernels pad the batch."""
WINOGRAD_FUSED_BLOCKS = ((1, 8, 16), (2, 8, 8), (4, 4, 8))
"""Images, rows and columns per block of cuDNN's fused Winograd kernels.

They come from the names and grids of the kernels in gpu_ops_fp32.parquet.
"""


def depthwise_s(
    kind: str, sizes: OperatorSizes, rows: Flags, flops: Floats, rates: Any, c: KernelConstants
) -> Floats:
    """Return the seconds of depthwise convolutions, which run on CUDA cores.

    The share of the rate that they reach depends on the pass (`kind`), the layout and the window.
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
    """Sizes of convolutions, as arrays. `inputs` and `outputs` are channels of one group."""

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
    """Return the arithmetic seconds and the tiling of convolutions that are not depthwise.

    Convolutions run as implicit GEMM. A 3x3 convolution with stride 1 on CUDA cores runs as
    Winograd if that is faster.
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
    # Matrix units process channels eight at a time.
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
    # Special kernels pad images of 3 channels to 4 or 8. Other odd channel counts are not padded.
    odd_channels = (np.mod(v.outputs, 8) != 0) | ((np.mod(v.inputs, 8) != 0) & (v.inputs > 4))
    tensor_share = np.where(odd_channels, tensor_share * c.conv_misaligned, tensor_share)
    share = np.where(v.units, tensor_share, getattr(c, f"conv_plain{suffix}"))
    model = tile_model(share, v.units, c, "conv_tile")
    if grouped.any():  # The shares of grouped convolutions were fitted with the tiles of matmuls.
        pairs = zip(tile_model(share, v.units, c), model, strict=True)
        model = TileModel(*(np.where(grouped, matmuls, dense) for matmuls, dense in pairs))
    return tiled(v.groups, m, n, k, v.speed, v.sms, model)


def _in_groups_s(kind: str, v: _Convolution, channels_last: Flags, c: KernelConstants) -> Floats:
    suffix = kind.removeprefix("conv")
    # cuDNN's fast NHWC kernels need a multiple of 32 groups. Each group must have as many inputs
    # as outputs, and their number must be a power of two.
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
    """Return the seconds of cuDNN's two Winograd variants for 3x3 convolutions with stride 1.

    The algorithm is from Lavin and Gray (2015). docs/jumps.md has the evidence from kernel grids.

    Returns:
        F(4x4, 3x3) in separate kernels: 36 matmuls of (tiles x inputs x outputs). cuDNN pads the
        batch to a multiple of 16 images.
        F(2x2, 3x3) in one fused kernel, with blocks of a few images. Infinite for weight gradients.
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
