"""Kernel times of fused attention, by implementation and card.

The model follows FlashAttention-2 (Dao 2023, arXiv:2307.08691). A thread block processes
`block_rows` queries of one head against all keys that they see. Each score (one query with one key)
takes part in two matmuls over the head size (five in the backward pass), and needs one exponential.
The wide matrix units of Hopper and Blackwell wait for the exponentials, most of all with small
heads (Shah et al. 2024). Matmuls and exponentials overlap in part. Blocks run on the
multiprocessors in waves. With a causal mask, blocks have unequal lengths, so the last ones end
late. If there are fewer blocks than multiprocessors, the longest block alone decides the time.
Queries, keys, values and results move through memory once.

fitting/attention.py fits the parameters in `kernel_models/attention.json` to measured times of
single kernels, not of whole steps.

Shapes: all functions are elementwise. Operators are on the last axis; axes before it are optional.
"""

from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.forecast.constants import Pooled
from trainpace.workload import ATTENTION, Floats, attention_widths

Implementation = Literal["efficient", "flash1", "flash2", "flash3", "flash4", "cudnn"]
"""Implementation of 16-bit fused attention.

efficient: torch's memory-efficient kernels (from xFormers). flash1 to flash4: versions of
FlashAttention. torch has flash2; flash3 is for Hopper and flash4 for Blackwell. cudnn: cuDNN's
kernels. flash4 was only measured with head sizes of 64 to 80. With a head size of 128, its forecast
is a third slower than published (1,605 TFLOP/s on B200).
"""
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

PARAMETERS = (
    "share",
    "exponentials",
    "prologue",
    "quantum",
    "tail",
    "alone",
    "memory",
    "start_us",
    "overlap",
    "wide",
    "block_rows",
)
"""Names of the fitted parameters of a pass, in the order of `kernel_models/attention.json`.

`figures` converts them to `AttentionFigures`. These four become rates and seconds there:

- share: Matmul rate, as a share of the datasheet's.
- exponentials: Time of one score in the softmax, in exponentials at full rate.
- memory: Memory bandwidth, as a share of the datasheet's.
- start_us: Start and end of the call, in microseconds.
"""

MASKED, FULL = "efficient", "efficient_full"
"""Memory-efficient attention in special cases.

`MASKED` is for 16-bit operands with a mask or bias tensor, and `FULL` is for fp32 operands.
"""
FLASH1_SPEED = 0.5
"""Speed of FlashAttention 1 relative to FlashAttention 2 ("about 2x", Dao 2023)."""
EXPONENTIALS_PER_CLOCK = 16.0
"""Exponentials per clock of one multiprocessor, from Volta to Blackwell.

Source: CUDA C++ Programming Guide, throughput of native arithmetic instructions.
"""
NARROW_GENERATIONS = ("6.0", "7.0", "7.2", "7.5", "8.0")
"""Compute capabilities with 64 fp32 lanes per multiprocessor. All others have 128."""
HEAD_UNIT, KEY_UNIT = 32.0, 64.0
"""Multiples to which head sizes and sequence lengths are padded."""
USUAL_HEAD = 128.0
SMOOTHNESS = 5.0
"""Exponent of the p-norm that joins two lower bounds. A larger exponent joins them more sharply.

The bounds are the time of all waves and the time of the longest block. fitting/attention.py joins
compute and memory time in the same way.
"""
L2_GAIN = 0.5
"""Relative gain in memory rate for tensors much smaller than L2."""
OLD_INSTRUCTIONS = {"9": 0.63, "10": 0.31}
"""Share of the matrix rate of Hopper and Blackwell that Ampere's instructions reach.

The key is the major compute capability. An H100 reaches 62.9% (Luo et al. 2024, arXiv:2402.13499).
With these instructions, Blackwell is assumed to reach as many FLOP per multiprocessor and clock as
Hopper.
"""
AMPERE_KERNELS = ("efficient", "efficient_full", "flash1", "flash2")
"""Implementations that use Ampere's instructions on all cards."""
TAKES_UNEVEN = ("cudnn", "flash3", "flash4")
"""Implementations that also work if values have another width than queries and keys.

In DeepSeek-V3, queries and keys have width 192, and values have width 128.

cuDNN supports this from 9.10 on Hopper and 9.11 on Blackwell (`check_cudnn_tensor_shapes` in
torch's sdp_utils.cpp). FlashAttention 3 and 4 also do. In place of any other implementation,
memory-efficient attention runs.
"""
TF32_MATMULS = 3.0
"""Number of TF32 matmuls by which memory-efficient attention computes one fp32 matmul.

It does so even if TF32 is not allowed (CUTLASS' OpMultiplyAddFastF32).
"""


class AttentionFigures(NamedTuple):
    """Rates that one pass reaches on one device, as arrays that broadcast.

    Attributes:
        flop_per_s: Rate of the matmuls.
        score_per_s: Rate of scores through the softmax.
        prologue: Time of the start and end of a block, as the number of keys that the block could
            process in this time.
        quantum: Cost of the last wave's idle multiprocessors. 0 means that they cost nothing, and 1
            that the last wave takes as long as a full one.
        tail: Extra time from the unequal blocks of a causal mask, in units of the longest block.
        alone: Time of the longest block if each multiprocessor has at most one, divided by its time
            on a busy device. Below 1 if the kernel then splits the keys over several blocks.
        bytes_per_s: Memory bandwidth.
        start_s: Start and end of the call, in seconds.
        overlap: Overlap of matmuls and softmax. 0 means one after the other.
        wide: Factor on `flop_per_s` for each doubling of the head size beyond 128.
        block_rows: Queries per block.
    """

    flop_per_s: Floats
    score_per_s: Floats
    prologue: Floats
    quantum: Floats
    tail: Floats
    alone: Floats
    bytes_per_s: Floats
    start_s: Floats
    overlap: Floats
    wide: Floats
    block_rows: Floats


class AttentionRates(NamedTuple):
    """Rates of the forward and the backward pass, each as a tuple over four kinds of operands.

    0. 16-bit operands.
    1. 16-bit operands with a mask or bias tensor. Only memory-efficient attention supports them.
    2. fp32 operands.
    3. 16-bit operands with values of another width than queries and keys.
    """

    forward: tuple[AttentionFigures, ...]
    backward: tuple[AttentionFigures, ...]

    def of(self, kind: str) -> tuple[AttentionFigures, ...]:
        """Return the rates for a kind of operator: "attention" or "attention_backward"."""
        return self.forward if kind == "attention" else self.backward


_NONE = AttentionFigures(*(np.asarray(1.0) for _ in AttentionFigures._fields))
NO_ATTENTION = AttentionRates(*((_NONE,) * 4,) * 2)
"""Placeholder for a table without attention."""


class AttentionTimes(NamedTuple):
    """Seconds of one operator of each row."""

    compute_s: Floats
    memory_s: Floats
    start_s: Floats


class AttentionModel(Record):
    """Fitted parameters by implementation and pass.

    Examples of keys are `flash2` (forward), `flash2_backward` and `efficient_full` (fp32).
    """

    passes: dict[str, Pooled]


@cache
def attention_model() -> AttentionModel:
    """Return the fitted parameters that ship with the package."""
    return from_package("forecast/kernel_models/attention.json", AttentionModel)


def default_implementation(device: Device) -> Implementation:
    """Return the implementation that today's torch uses for 16-bit operands.

    - Compute capability 9.x and 10.x: cuDNN, with cuDNN 9.15 or newer. torch's wheels include it
      since 2.10. torch 2.2 to 2.9 (except 2.5.0) used FlashAttention 2.
    - From 8.0 on: FlashAttention 2. Builds of other vendors have kernels of FlashAttention 2.
    - Older: memory-efficient attention.

    Source: `check_prefer_cudnn_attention` and `priority_order` in pytorch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. torch 2.11 ran cuDNN's kernels on the H100
    of fitting/data.
    """
    major = device.generation
    if major in ("9", "10"):
        return "cudnn"
    return "efficient" if major.isdigit() and int(major) < 8 else "flash2"


def implementation_on(device: Device, wanted: Implementation | None = None) -> Implementation:
    """Return the implementation that a device runs: the wanted one if it has it, or its default.

    FlashAttention needs compute capability 8.0. FlashAttention 3 and 4 and cuDNN's fast kernels
    need Hopper or later.
    """
    usual = default_implementation(device)
    if (
        wanted is None
        or usual == "efficient"
        or (usual == "flash2" and wanted not in AMPERE_KERNELS)
    ):
        return usual
    return wanted


def attention_rates(
    device: Device,
    implementation: Implementation,
    half_peak: float,
    fp32_peak: float,
    cuda_core_peak: float,
) -> AttentionRates:
    """Return the attention rates of a device.

    Args:
        device: The device.
        implementation: Implementation for plain 16-bit operands.
        half_peak: FLOP/s of 16-bit matmuls by the datasheet.
        fp32_peak: FLOP/s of fp32 matmuls on matrix units by the datasheet.
        cuda_core_peak: FLOP/s of the CUDA cores in fp32.
    """
    model = attention_model().passes
    name = "flash2" if implementation == "flash1" else implementation
    uneven = name if name in TAKES_UNEVEN else MASKED
    # In the order of the four kinds of operands in `AttentionRates`.
    ways = (name, half_peak), (MASKED, half_peak), (FULL, fp32_peak), (uneven, half_peak)

    def of_pass(suffix: str) -> tuple[AttentionFigures, ...]:
        keys = [(way + suffix, peak) for way, peak in ways]
        first, *others = (
            figures(
                model[key].of(device), device, peak * instruction_share(device, key), cuda_core_peak
            )
            for key, peak in keys
        )
        if implementation == "flash1":
            slower = FLASH1_SPEED * first.flop_per_s, FLASH1_SPEED * first.score_per_s
            first = first._replace(flop_per_s=slower[0], score_per_s=slower[1])
        return first, *others

    return AttentionRates(of_pass(""), of_pass("_backward"))


def figures(
    parameters: dict[str, float], device: Device, peak: float, cuda_core_peak: float
) -> AttentionFigures:
    """Return the rates of a pass.

    Args:
        parameters: Values of `PARAMETERS`, relative to the datasheet.
        device: The device.
        peak: FLOP/s of matmuls.
        cuda_core_peak: FLOP/s of the CUDA cores in fp32.
    """
    p = parameters
    exponentials = exponentials_per_s(device, cuda_core_peak)
    bandwidth = (
        device.memory_bandwidth_gb_per_s.value * 1e9 if device.memory_bandwidth_gb_per_s else 1.0
    )
    values = (
        min(p["share"], 1.0) * peak,
        exponentials / p["exponentials"],
        p["prologue"],
        p["quantum"],
        p["tail"],
        p["alone"],
        p["memory"] * bandwidth,
        p["start_us"] * 1e-6,
        p["overlap"],
        p["wide"],
        p["block_rows"],
    )
    return AttentionFigures(*map(np.asarray, values))


def instruction_share(device: Device, name: str) -> float:
    """Return the share of the matrix rate that the instructions of an implementation can reach."""
    if name.removesuffix("_backward") not in AMPERE_KERNELS:
        return 1.0
    return OLD_INSTRUCTIONS.get(device.generation, 1.0)


def exponentials_per_s(device: Device, cuda_core_peak: float) -> float:
    """Return the exponentials per second of a device with `cuda_core_peak` fp32 FLOP/s.

    A lane makes two FLOP per clock.
    """
    lanes = 64.0 if device.compute_capability in NARROW_GENERATIONS else 128.0
    return cuda_core_peak / (2.0 * lanes) * EXPONENTIALS_PER_CLOCK


def attention_s(
    kind: str,
    sizes: tuple[Floats, ...],
    moved_bytes: Floats,
    f: AttentionFigures,
    sms: Floats,
    l2_bytes: Floats,
) -> AttentionTimes:
    """Return the times of attention operators.

    Args:
        kind: "attention" or "attention_backward".
        sizes: One array per size, in the order of `AttentionSizes`. The last one, `visible`, may be
            left out.
        moved_bytes: Bytes read and written.
        f: Rates of the pass.
        sms: Number of multiprocessors.
        l2_bytes: Size of the L2 cache.
    """
    all_sizes = (*sizes, np.zeros(()))[: len(ATTENTION)]
    b, heads, queries, keys, head, causal, value_width, visible = all_sizes
    value_width = np.where(value_width > 0, value_width, head)
    padded = attention_widths(
        kind, *(np.ceil(width / HEAD_UNIT) * HEAD_UNIT for width in (head, value_width))
    )
    head = (head + value_width) / 2
    keys, padded_queries = (np.ceil(length / KEY_UNIT) * KEY_UNIT for length in (keys, queries))
    speed = f.flop_per_s * f.wide ** np.maximum(np.log2(np.maximum(head, 1.0) / USUAL_HEAD), 0.0)
    matmuls_s, softmax_s = 2.0 * padded * sms / speed, sms / f.score_per_s
    sharpness = 1.0 + f.overlap
    key_s = f.block_rows * (matmuls_s**sharpness + softmax_s**sharpness) ** (1.0 / sharpness)
    # A block processes every key that one of its queries sees. With a sliding window, the window
    # moves along with the queries of the block. Half a padding unit is added for tiles of keys that
    # the window covers only in part.
    taken = np.where(visible > 0, np.minimum(keys, visible + f.block_rows + 0.5 * KEY_UNIT), keys)
    longest = key_s * (taken + f.prologue)
    waves = b * heads * np.ceil(queries / f.block_rows) / sms
    even = longest * (waves + np.minimum(f.quantum, 1.0) * (np.ceil(waves) - waves))
    # Average number of keys that a block processes with a causal mask. If there are more keys than
    # queries, the first keys are a prefix that every query sees. Of the other keys, the first query
    # sees one and the last query sees all.
    seen = np.minimum(
        keys, np.maximum(keys - 0.5 * (padded_queries - f.block_rows), 0.5 * (keys + f.block_rows))
    )
    uneven = np.minimum(even, key_s * (seen + f.prologue) * waves + f.tail * longest)
    p = SMOOTHNESS
    compute = (np.where(causal > 0, uneven, even) ** p + (f.alone * longest) ** p) ** (1.0 / p)
    memory = moved_bytes / (f.bytes_per_s * (1.0 + L2_GAIN / (1.0 + (moved_bytes / l2_bytes) ** 2)))
    return AttentionTimes(compute, memory, np.broadcast_to(f.start_s, compute.shape))
