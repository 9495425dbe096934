"""Fused attention: the times of its kernels, by implementation and card.

A block of threads takes `block_rows` queries of one head past all keys that they see. A score (a
query and a key) costs two matmuls over the head's size, five in the backward pass, and one
exponential. Hopper's and Blackwell's wide matrix units wait for the exponentials most if heads are
small (Shah et al. 2024); the two overlap in part. Blocks go over the multiprocessors in waves.
Under a causal mask they are of unequal length, so the last ones run on. A device with few blocks
waits for the longest. Queries, keys, values and results move once through memory. After
FlashAttention-2 (Dao 2023, arXiv:2307.08691).

The figures of `kernel_models/attention.json` are fitted only on measured kernels, by
fitting/attention.py.
"""

from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from trainpace.core.hardware import Device
from trainpace.core.records import Record, from_package
from trainpace.forecast.constants import Pooled
from trainpace.workload import ATTENTION, Floats, attention_widths

Implementation = Literal["efficient", "flash1", "flash2", "flash3", "flash4", "cudnn"]
"""Kernels of 16-bit fused attention. efficient: torch's memory-efficient ones (xFormers'). flash1
to flash4: FlashAttention's versions; torch has the second, the third is Hopper's and the fourth
Blackwell's. cudnn: cuDNN's own. flash4 was only measured with heads of 64 to 80: with heads of 128
it is forecast a third slower than published (1,605 TFLOP/s on B200)."""
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
"""The parameters of a pass (see `AttentionFigures`), in the order of
`kernel_models/attention.json`."""

MASKED, FULL = "efficient", "efficient_full"
"""Implementations for 16-bit masks and biases of numbers, and for fp32: memory-efficient
attention."""
FIRST = 0.5
"""Speed of FlashAttention's first version as a share of its second ("about 2x", Dao 2023)."""
EXPONENTIALS_PER_CLOCK = 16.0
"""Exponentials of one multiprocessor, from Volta to Blackwell (CUDA C++ Programming Guide,
throughput of native arithmetic instructions)."""
NARROW_GENERATIONS = ("6.0", "7.0", "7.2", "7.5", "8.0")
"""Compute capabilities with 64 fp32 lanes per multiprocessor; the others have 128."""
HEAD_UNIT, KEY_UNIT = 32.0, 64.0
"""Heads and lengths are padded to multiples of these."""
USUAL_HEAD = 128.0
SMOOTHNESS = 5.0
"""Exponent of the p-norm that joins the compute and memory bounds. Larger is sharper."""
L2_GAIN = 0.5
"""Gain in memory rate for tensors much smaller than L2, as a share."""
OLD_INSTRUCTIONS = {"9": 0.63, "10": 0.31}
"""Share of Hopper's and Blackwell's matrix rate that the instructions of Ampere reach, by major
compute capability: 62.9% on H100 (Luo et al. 2024, arXiv:2402.13499); on Blackwell assumed to be as
many FLOP per multiprocessor and clock."""
AMPERE_KERNELS = ("efficient", "efficient_full", "flash1", "flash2")
"""Implementations that use Ampere's instructions everywhere."""
TAKES_UNEVEN = ("cudnn", "flash3", "flash4")
"""Implementations that take values of another width than queries and keys, as DeepSeek-V3's 192 and
128: cuDNN's from 9.10 on Hopper and 9.11 on Blackwell (`check_cudnn_tensor_shapes` in torch's
sdp_utils.cpp), FlashAttention-3 and 4. Memory-efficient attention replaces the others."""
TF32_MATMULS = 3.0
"""Memory-efficient attention makes one fp32 matmul of three in TF32, allowed or not (CUTLASS'
OpMultiplyAddFastF32)."""


class AttentionFigures(NamedTuple):
    """Achieved rates of one pass on one device. Each may be an array that broadcasts.

    flop_per_s: of the matmuls; wide: factor on it for each doubling of the head beyond 128.
    score_per_s: scores whose softmax is finished. overlap: how far the two hide each other, from 0,
    one after the other. prologue: start and end of a block, in keys. quantum: the share of the
    empty part of a last wave that is paid for. tail: what the unequal blocks of a causal mask add,
    in longest blocks. alone: what a longest block takes with at most one block per multiprocessor,
    in blocks of a full device; below 1 if keys are divided over several. bytes_per_s: of memory.
    start_s: start and end of the call. block_rows: queries per block.
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
    """The figures of both passes, each a tuple by operands.

    These are 16-bit operands; 16-bit operands with a mask or bias of numbers, which only
    memory-efficient attention takes; fp32 operands; and 16-bit operands with values that are not as
    wide as queries and keys.
    """

    forward: tuple[AttentionFigures, ...]
    backward: tuple[AttentionFigures, ...]

    def of(self, kind: str) -> tuple[AttentionFigures, ...]:
        """Return the figures of a kind of operators."""
        return self.forward if kind == "attention" else self.backward


_NONE = AttentionFigures(*(np.asarray(1.0) for _ in AttentionFigures._fields))
NO_ATTENTION = AttentionRates(*((_NONE,) * 4,) * 2)
"""A placeholder for figures that no operator needs."""


class AttentionTimes(NamedTuple):
    """Seconds of one operator of each row."""

    compute_s: Floats
    memory_s: Floats
    start_s: Floats


class AttentionModel(Record):
    """The fitted parameters of every implementation.

    `flash2` forward, `flash2_backward`, ..., `efficient_full` in fp32.
    """

    passes: dict[str, Pooled]


@cache
def attention_model() -> AttentionModel:
    """Return the package's parameters."""
    return from_package("forecast/kernel_models/attention.json", AttentionModel)


def default_implementation(device: Device) -> Implementation:
    """Return the default of today's torch for 16-bit operands.

    cuDNN's comes first on compute capability 9.x and 10.x with cuDNN 9.15 or newer, which torch's
    wheels include since 2.10; then FlashAttention-2, from 8.0 on; then memory-efficient attention
    (`check_prefer_cudnn_attention` and `priority_order` in pytorch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; torch 2.11 ran cuDNN's on the H100 of
    fitting/data). Torch 2.2 to 2.9 (except 2.5.0) chose FlashAttention-2 there too. Other vendors'
    builds have kernels of FlashAttention-2.
    """
    major, _, _ = device.compute_capability.partition(".")
    if major in ("9", "10"):
        return "cudnn"
    return "efficient" if major.isdigit() and int(major) < 8 else "flash2"


def implementation_on(device: Device, wanted: Implementation | None = None) -> Implementation:
    """Return the implementation that a device runs: the wanted one, or its default.

    A device without the wanted one runs its default: FlashAttention needs compute capability 8.0,
    its versions 3 and 4 and cuDNN's fast kernels need Hopper or later.
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
    device: Device, implementation: Implementation, half: float, full: float, plain: float
) -> AttentionRates:
    """Return the figures of a device.

    `half` and `full` are FLOP/s of matmuls by its datasheet, `plain` of its CUDA cores in fp32.
    """
    model = attention_model().passes
    name = "flash2" if implementation == "flash1" else implementation
    uneven = name if name in TAKES_UNEVEN else MASKED
    ways = (name, half), (MASKED, half), (FULL, full), (uneven, half)

    def of_pass(suffix: str) -> tuple[AttentionFigures, ...]:
        keys = [(way + suffix, peak) for way, peak in ways]
        first, *others = (
            figures(model[key].of(device), device, peak * instruction_share(device, key), plain)
            for key, peak in keys
        )
        if implementation == "flash1":
            slower = FIRST * first.flop_per_s, FIRST * first.score_per_s
            first = first._replace(flop_per_s=slower[0], score_per_s=slower[1])
        return first, *others

    return AttentionRates(of_pass(""), of_pass("_backward"))


def figures(
    parameters: dict[str, float], device: Device, peak: float, plain: float
) -> AttentionFigures:
    """Return a pass's figures from its parameters (`PARAMETERS`), which are shares of a datasheet.

    `peak` and `plain` are the datasheet's FLOP/s.
    """
    p = parameters
    exponentials = exponentials_per_s(device, plain)
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
    return OLD_INSTRUCTIONS.get(device.compute_capability.partition(".")[0], 1.0)


def exponentials_per_s(device: Device, plain: float) -> float:
    """Return the exponentials per second of a device with `plain` fp32 FLOP/s.

    A lane makes two FLOP per clock.
    """
    lanes = 64.0 if device.compute_capability in NARROW_GENERATIONS else 128.0
    return plain / (2.0 * lanes) * EXPONENTIALS_PER_CLOCK


def attention_s(
    kind: str,
    sizes: tuple[Floats, ...],
    moved_bytes: Floats,
    f: AttentionFigures,
    sms: Floats,
    l2_bytes: Floats,
) -> AttentionTimes:
    """Return the times of attention of `AttentionSizes`, the last of which may be absent.

    Arrays broadcast.
    """
    b, heads, queries, keys, head, causal, value, visible = (*sizes, np.zeros(()))[: len(ATTENTION)]
    value = np.where(value > 0, value, head)
    padded = attention_widths(
        kind, *(np.ceil(width / HEAD_UNIT) * HEAD_UNIT for width in (head, value))
    )
    head = (head + value) / 2
    keys, rows = (np.ceil(length / KEY_UNIT) * KEY_UNIT for length in (keys, queries))
    speed = f.flop_per_s * f.wide ** np.maximum(np.log2(np.maximum(head, 1.0) / USUAL_HEAD), 0.0)
    matmuls_s, softmax_s = 2.0 * padded * sms / speed, sms / f.score_per_s
    sharpness = 1.0 + f.overlap
    key_s = f.block_rows * (matmuls_s**sharpness + softmax_s**sharpness) ** (1.0 / sharpness)
    # a block takes every key that one of its queries sees: a window moves along with them
    taken = np.where(visible > 0, np.minimum(keys, visible + f.block_rows + 0.5 * KEY_UNIT), keys)
    longest = key_s * (taken + f.prologue)
    waves = b * heads * np.ceil(queries / f.block_rows) / sms
    even = longest * (waves + np.minimum(f.quantum, 1.0) * (np.ceil(waves) - waves))
    # the first queries see few keys, the last all of them; keys before the first query all see
    seen = np.minimum(
        keys, np.maximum(keys - 0.5 * (rows - f.block_rows), 0.5 * (keys + f.block_rows))
    )
    uneven = np.minimum(even, key_s * (seen + f.prologue) * waves + f.tail * longest)
    p = SMOOTHNESS
    compute = (np.where(causal > 0, uneven, even) ** p + (f.alone * longest) ** p) ** (1.0 / p)
    memory = moved_bytes / (f.bytes_per_s * (1.0 + L2_GAIN / (1.0 + (moved_bytes / l2_bytes) ** 2)))
    return AttentionTimes(compute, memory, np.broadcast_to(f.start_s, compute.shape))
