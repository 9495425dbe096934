"""Explanations of forecasts: heavy operators, layer roles, roofline, memory and jumps.

The roofline (Williams, Waterman and Patterson 2009) shows FLOP per byte and reached FLOP/s of
operators, below the peak rate and the memory bandwidth of the device.

Jumps: Each further sample adds about the same time to a step. If one sample adds far more, there is
a jump. Causes are another wave of tiles, a padded batch or another algorithm. The batch before the
jump is a better choice, or a larger batch that fills the next wave.

Shapes: times, shares and repeats of operators have one value per row of the table. With several
batch sizes, times and tilings have shape (batches, rows).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Memory, OperatorShare, RoleShare, StepTime
from trainpace.core.stats import FEWEST_BATCHES, excesses
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.matmul import WINOGRAD_IMAGES, Algorithm, Tiling
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.workload import (
    CONV,
    CONVOLUTION_KINDS,
    Counts,
    Floats,
    Operators,
    TracedForm,
    at_batch,
)

MOST_HEAVIEST = 10
MOST_POINTS = 40
AGREES = 0.02
"""Largest relative difference between the maximum of a memory curve and the forecast peak.

A curve that differs more is not shown.
"""


def heaviest(
    operators: Operators, times: KernelTimes, repeats: Counts
) -> tuple[OperatorShare, ...]:
    """Return the rows with the most device time in a step, and the bound of each.

    Args:
        operators: Table of operators.
        times: Seconds of each row.
        repeats: Number of times that each row runs per step.
    """
    shares = []
    for i in np.argsort(-times.device_s * repeats)[:MOST_HEAVIEST]:
        device_s = float(times.device_s[i])
        if device_s <= 0:
            break
        bounds = {"compute": times.compute_s, "memory": times.memory_s, "launch": times.latency_s}
        shares.append(
            OperatorShare(
                module=operators.module[i],
                kind=operators.kind[i],
                phase=operators.phase[i],
                count=int(operators.count[i]),
                time_ms=1e3 * float(times.device_s[i] * repeats[i]),
                bound=max(bounds, key=lambda name: bounds[name][i]),  # type: ignore[arg-type]
                share_of_roof=max(float(times.compute_s[i]), float(times.memory_s[i])) / device_s,
            )
        )
    return tuple(shares)


class RooflinePoint(NamedTuple):
    """One row of equal operators: FLOP per byte, forecast TFLOP/s, milliseconds per step."""

    name: str
    intensity: float
    tflops: float
    time_ms: float


class Roofline(NamedTuple):
    """Heaviest operators with arithmetic, and the datasheet's peak rate and bandwidth.

    `points` are sorted by time, longest first. `share` is their share of the device time.
    """

    points: tuple[RooflinePoint, ...]
    peak_tflops: float
    bandwidth_gb_per_s: float
    share: float


def peak_flop_per_s(device: Device, operators: Operators, execution: Execution) -> float | None:
    """Return the peak FLOP/s of the fastest format that the operators use, or None if unknown."""
    matrix, convolution = operators.is_matrix, np.isin(operators.kind, CONVOLUTION_KINDS)
    used = set(zip(operators.half[matrix].tolist(), convolution[matrix].tolist(), strict=True))
    used = used or {(False, False)}
    peaks = [matrix_peak(device, execution.precision, *kind) for kind in used]
    return max((peak.flop_per_s for peak in peaks if isinstance(peak, Peak)), default=None)


def roofline_of(
    table: Operators,
    seconds: Floats,
    held: Floats,
    repeats: Counts,
    execution: Execution,
    device: Device,
) -> Roofline | None:
    """Return the roofline of one rank, or None if the peak rate or bandwidth is unknown.

    Args:
        table: Table of operators.
        seconds: Seconds of each row on the rank.
        held: Share of each row that the rank computes, from 0 to 1.
        repeats: Number of times that each row runs per step.
        execution: The execution.
        device: The device.
    """
    peak = peak_flop_per_s(device, table, execution)
    if peak is None or device.memory_bandwidth_gb_per_s is None:
        return None
    batch, count = execution.micro_batch, table.count
    flops = at_batch(table.flops, batch) * count * held
    moved = table.moved_bytes(batch) * count * held
    in_step = seconds * repeats
    works = (flops > 0) & (moved > 0) & (seconds > 0)
    rows = [int(i) for i in np.argsort(-in_step) if works[i]][:MOST_POINTS]
    points = tuple(
        RooflinePoint(
            name=(
                f"{alike(table.module[i], int(count[i])) or table.function[i]}, {table.kind[i]},"
                f" {table.phase[i]}"
            ),
            intensity=float(flops[i] / moved[i]),
            tflops=float(flops[i] / seconds[i] / 1e12),
            time_ms=1e3 * float(in_step[i]),
        )
        for i in rows
    )
    if not points:
        return None
    share = float(in_step[rows].sum() / in_step.sum())
    return Roofline(points, peak / 1e12, device.memory_bandwidth_gb_per_s.value, share)


class MemoryOverStep(NamedTuple):
    """Memory over the time of the last micro-batch and the update.

    `at_ms` is ascending. The arrays have one value per moment. Parameters and optimizer states are
    constant.
    """

    at_ms: Floats
    gradients_gib: Floats
    activations_gib: Floats
    parameters_gib: float
    optimizer_states_gib: float

    @property
    def total_gib(self) -> Floats:
        lasting = self.parameters_gib, self.optimizer_states_gib
        return self.gradients_gib + self.activations_gib + lasting[0] + lasting[1]


def memory_over_step(
    form: TracedForm, execution: Execution, step: StepTime, memory: Memory
) -> MemoryOverStep | None:
    """Return the memory at the moments of the trace.

    The time of a moment in a phase is estimated from the bytes that were moved before it. This is
    nearly exact for a memory-bound model.

    Returns:
        The curve, or None if the trace has no moments, or if they do not apply because the
        execution shards, divides or recomputes.
    """
    moments = form.memory.moments
    divides = execution.world_size != execution.data_parallel_size
    if not len(moments) or divides or execution.zero_stage:
        return None
    m = execution.accumulation
    ends = np.cumsum([step.forward_ms / m, step.backward_ms / m, step.optimizer_ms])
    phase, starts = moments[:, 0].astype(int), np.concatenate([[0.0], ends[:-1]])
    at_ms = starts[phase] + (ends - starts)[phase] * np.clip(moments[:, 1], 0.0, 1.0)
    gradients = moments[:, 2]
    whole = float(form.memory.peaks[:, 0].max())
    if execution.accumulation > 1:
        gradients = np.full_like(gradients, whole)
    if execution.data_parallel_size > 1 and execution.engine != "data_parallel":
        gradients = gradients + whole  # DDP's buckets are a second copy of the gradients.
    activations = np.maximum(moments[:, 3] + moments[:, 4] * execution.micro_batch, 0.0)
    alive = gradients / BYTES_PER_GIB, activations / BYTES_PER_GIB
    curve = MemoryOverStep(at_ms, *alive, memory.parameters_gib, memory.optimizer_states_gib)
    error = abs(float(curve.total_gib.max()) - memory.allocated_gib)
    return curve if error <= AGREES * memory.allocated_gib else None


# ---- roles of layers

UP = "MLP up projections"
UP_AND_GATE = "MLP up and gate projections"
DOWN = "MLP down projections"
INPUTS = "attention query, key and value projections"
OUTPUT = "attention output projections"
HEAD = "output head"
LINEAR = "linear layers"
_GATES = {"gate_proj", "gate_up_proj", "w3", "wi_1"}
_LAST: dict[str, frozenset[str]] = {
    UP: frozenset(
        "up_proj gate_proj gate_up_proj w1 w3 fc1 c_fc dense_h_to_4h wi wi_0 wi_1 lin1 linear1"
        " up".split()
    ),
    DOWN: frozenset("down_proj w2 fc2 dense_4h_to_h wo lin2 linear2 down c_proj".split()),
    INPUTS: frozenset(
        "q_proj k_proj v_proj qkv_proj qkv wqkv query key value c_attn query_key_value in_proj to_q"
        " to_k to_v q_lin k_lin v_lin q k v q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split()
    ),
    OUTPUT: frozenset("o_proj out_proj to_out out_lin o".split()),
    HEAD: frozenset("lm_head head classifier score fc output_projection embed_out cls".split()),
}
"""Names of layers in transformers, timm, torchtitan and torchvision, by role."""
_BY_KIND = {
    "attention": "attention",
    "attention_backward": "attention",
    "norm": "normalisation",
    "softmax": "softmax and loss",
    "pool": "pooling",
    "embedding": "embeddings",
    "optimizer": "optimizer",
}
_REST = "element-wise operators and copies"
_NORM = re.compile(r"(ln|bn)(_?\w)?")
_NAME = re.compile(r"[^.]*[^.\d][^.]*")
"""Part of the name of a module that is not a number."""
_NUMBER = re.compile(r"\.(\d+)\.(?=[\w.]*[a-zA-Z_])")
"""Number of a block in the name of a module, such as `.3.` in `layers.3.attn`."""


def by_role(operators: Operators, times: KernelTimes, repeats: Counts) -> tuple[RoleShare, ...]:
    """Return the device milliseconds per step by role of layers, longest first.

    For example, the MLP projections of all layers of a transformer are one entry.

    Args:
        operators: Table of operators.
        times: Seconds of each row.
        repeats: Number of times that each row runs per step.
    """
    ms: defaultdict[str, float] = defaultdict(float)
    layers: defaultdict[str, int] = defaultdict(int)
    around = _layers_around(operators)
    gated = any(name.lower().split(".")[-1] in _GATES for name in operators.module)
    spent = 1e3 * times.device_s * repeats
    for i in np.flatnonzero(spent > 0):
        kind = operators.kind[i]
        role = role_of(operators.module[i], kind, operators.phase[i])
        role = UP_AND_GATE if role == UP and gated else role
        ms[role] += float(spent[i])
        if kind == "gemm" or kind.startswith("attention"):
            layers[role] = max(layers[role], around[i])
    shares = [
        RoleShare(role=role, layers=layers[role], time_ms=total) for role, total in ms.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.time_ms))


def _layers_around(operators: Operators) -> list[int]:
    """Return the number of layers in the list of layers that each row is in, or 0 without a list.

    Equal operators of all layers are one row. Its module is the layer that ran first: the first
    layer in the forward pass, and the last layer in the backward pass.
    """
    lists = [_NUMBER.split(module, maxsplit=1) for module in operators.module]
    lengths: defaultdict[str, int] = defaultdict(int)
    for name, *number in lists:
        if number:
            lengths[name] = max(lengths[name], int(number[0]) + 1)
    return [lengths[name] if number and lengths[name] > 1 else 0 for name, *number in lists]


def alike(module: str, count: int) -> str:
    """Return the name of a module, with a star as layer number if it stands for several layers."""
    return _NUMBER.sub(".*.", module) if count > 1 else module


def role_of(module: str, kind: str, phase: str) -> str:
    if phase == "optimizer":
        return "optimizer"
    names = _NAME.findall(module.lower())
    if kind in CONVOLUTION_KINDS:
        return "convolutions" if len(names) < 2 else f"convolutions of {names[0]}"
    if kind == "gemm":
        return _matmul_role(names)
    last = names[-1] if names else ""
    normalises = "norm" in last or _NORM.fullmatch(last)
    return _BY_KIND.get(kind) or ("normalisation" if normalises else _REST)


def _matmul_role(names: list[str]) -> str:
    *inside, last = names or [""]
    if last in ("c_proj", "dense", "proj") and any("att" in name for name in inside):
        return OUTPUT
    if last == "dense":  # In BERT, the name of the parent module tells the role.
        parents = {"intermediate": UP, "output": DOWN}
        return next((role for name, role in parents.items() if name in inside), LINEAR)
    return next((role for role, known in _LAST.items() if last in known), LINEAR)


# ---- jumps of the step time over the batch size

LEAST_SHARE = 0.02
"""Smallest extra time of a jump, as a share of the step before it."""
LEAST_OVER_SLOPE = 3.0
"""Smallest time per sample at a jump, as a multiple of the usual time per sample around it."""
MOST_CAUSES = 2
LEAST_CAUSE = 0.25
"""Minimum contribution of a second cause, as a share of the first."""
MOST_FULL_SIZES = 6
SMALLER_TILES = 1.2
"""Growth of the waves, relative to the growth of the batch, above which tiles became smaller."""
AS_GOOD = 0.999
"""Smallest throughput after a jump, relative to before it, that counts as equally good."""


def find_jumps(batches: Sequence[int], step_ms: Floats) -> list[tuple[int, float]]:
    """Return the jumps in a list of step times.

    Args:
        batches: Ascending batch sizes.
        step_ms: Step time of each batch size.

    Returns:
        Pairs of the index of the first batch after the jump, and the milliseconds beyond the usual
        slope.
    """
    if len(batches) < FEWEST_BATCHES:
        return []
    excess, usual = excesses(batches, step_ms)
    width = np.diff(batches)
    jumps = (excess > LEAST_SHARE * step_ms[:-1]) & (
        excess + usual * width > LEAST_OVER_SLOPE * usual * width
    )
    return [(int(i) + 1, float(excess[i])) for i in np.flatnonzero(jumps)]


class Explained(NamedTuple):
    """Explanation of a jump.

    Attributes:
        causes: Causes as phrases, most important first.
        mechanism: The main cause in a few words.
        full: Batch sizes after the jump that fill the waves or the padding of the main operator.
    """

    causes: tuple[str, ...]
    mechanism: str
    full: tuple[int, ...]


TilingOf = Callable[[Operators, Sequence[int]], Tiling | None]
"""Function that returns the tiling of a table's rows at some batch sizes, shape (batches, rows)."""


def explain(
    operators: Operators,
    device_s: Floats,
    before: int,
    after: int,
    multiprocessors: int | None,
    tiling_of: TilingOf,
) -> Explained:
    """Return the causes of a jump from one batch size to another.

    Rows are weighted by their growth beyond the growth of the batch.

    Args:
        operators: Table of operators.
        device_s: Seconds of every row at the two sizes, shape (2, rows).
        before: Batch size before the jump.
        after: Batch size after the jump.
        multiprocessors: Number of multiprocessors of the device, if known.
        tiling_of: Function that returns the tiling of operators.
    """
    growth = device_s[1] - device_s[0] * after / before
    tiling = tiling_of(operators, [before, after])
    groups: dict[str, list[int]] = {}
    for j in np.argsort(-growth).tolist():
        if growth[j] > 0:
            groups.setdefault(_mechanism(tiling, j), []).append(j)
    weight = {name: float(growth[rows].sum()) for name, rows in groups.items()}
    order = sorted(groups, key=lambda name: -weight[name])[:MOST_CAUSES]
    if not order:
        return Explained((), "", ())
    main, *others = order
    least = LEAST_CAUSE * weight[main]
    named = [main, *(name for name in others if name != OTHER and weight[name] >= least)]
    causes = tuple(
        _cause(name, operators, groups[name], tiling, after, multiprocessors) for name in named
    )
    full = _full_sizes(main, operators, groups[main][0], before, after, tiling_of)
    return Explained(causes, _SHORT[main], full)


PADDED, ALGORITHM, UNALIGNED, WAVES, OTHER = "padded", "algorithm", "unaligned", "waves", "other"
_SHORT = {
    PADDED: "padded batch",
    ALGORITHM: "another algorithm",
    UNALIGNED: "batch not a multiple of 8",
    WAVES: "another wave of tiles",
    OTHER: "",
}
_ALGORITHMS = {
    Algorithm.GEMM: "implicit GEMM",
    Algorithm.PADDED_WINOGRAD: "Winograd with a padded batch",
    Algorithm.WINOGRAD: "Winograd without padding",
}


def _padded(images: Any) -> Any:
    return np.ceil(images / WINOGRAD_IMAGES) * WINOGRAD_IMAGES


def _mechanism(tiling: Tiling | None, j: int) -> str:
    """Return why row `j` grows more than the batch does from the first size to the second."""
    if tiling is None:
        return OTHER
    algorithm, images, waves, aligned = (column[:, j] for column in tiling)
    if Algorithm.PADDED_WINOGRAD in algorithm and _padded(images[0]) < _padded(images[1]):
        return PADDED
    if algorithm[0] != algorithm[1]:
        return ALGORITHM
    if aligned[1] < aligned[0]:
        return UNALIGNED
    return WAVES if np.ceil(waves[0]) < np.ceil(waves[1]) else OTHER


def _cause(
    name: str,
    operators: Operators,
    rows: list[int],
    tiling: Tiling | None,
    after: int,
    multiprocessors: int | None,
) -> str:
    where = _where(operators, rows, after)
    if tiling is None or name == OTHER:
        return f"more time than in proportion in {where}"
    algorithm, images, waves, _ = (column[:, rows[0]] for column in tiling)
    if name == PADDED:
        slower = "" if algorithm[1] == Algorithm.PADDED_WINOGRAD else " or a slower algorithm"
        return (
            f"cuDNN's Winograd algorithm pads the batch to a multiple of {WINOGRAD_IMAGES:.0f}, so"
            f" {images[1]:.0f} images take the work of {_padded(images[1]):.0f}{slower}, in {where}"
        )
    if name == ALGORITHM:
        old, new = (_ALGORITHMS[Algorithm(int(code))] for code in algorithm)
        return f"cuDNN uses another algorithm ({new} in place of {old}) in {where}"
    if name == UNALIGNED:
        return (
            "the batch is not a multiple of 8, so matrix units load 16-bit numbers in smaller"
            f" pieces, in {where}"
        )
    old, new = np.ceil(waves)
    smaller = images[0] and waves[1] > SMALLER_TILES * waves[0] * images[1] / images[0]
    on = f" on the {multiprocessors} multiprocessors" * bool(multiprocessors)
    return (
        f"the tiles of the output need more waves in {where}: {new:.0f} waves of"
        f" {'smaller ' * bool(smaller)}tiles{on} in place of {old:.0f}"
    )


def _where(operators: Operators, rows: list[int], batch: int) -> str:
    """Return the number of operators in some rows, and the name of the first row."""
    count, most = int(operators.count[rows].sum()), _named(operators, rows[0], batch)
    if count == 1:
        return f"the {most}"
    convolve = all(operators.kind[j] in CONVOLUTION_KINDS for j in rows)
    return f"{count} {'convolutions' if convolve else 'operators'}, most in the {most}"


def _named(operators: Operators, j: int, batch: int) -> str:
    """Return a row as "3x3 convolution 12.body.3 (256 to 256 channels at 14x14), forward"."""
    kind, module, phase = operators.kind[j], operators.module[j], operators.phase[j]
    name = f" {module}" if module else ""
    if kind not in CONVOLUTION_KINDS:
        return f"{'matmul' if kind == 'gemm' else kind.replace('_', ' ')}{name}, {phase}"
    d = at_batch(operators.dims[j], batch)
    size = f"{d[CONV.kernel_h]:.0f}x{d[CONV.kernel_w]:.0f}"
    shape = (
        f"{d[CONV.c_in]:.0f} to {d[CONV.c_out]:.0f} channels at"
        f" {d[CONV.out_h]:.0f}x{d[CONV.out_w]:.0f}"
    )
    passes = {
        "conv": phase,
        "conv_dgrad": "gradient of its input",
        "conv_wgrad": "gradient of its weights",
    }
    return f"{size} convolution{name} ({shape}), {passes[kind]}"


def _full_sizes(
    name: str, operators: Operators, j: int, before: int, after: int, tiling_of: TilingOf
) -> tuple[int, ...]:
    """Return the batch sizes from `after` on that use row `j` well.

    These are the last sizes before another wave or more padding, or the aligned sizes.
    """
    if name in (OTHER, ALGORITHM):
        return ()
    sizes = range(after, 4 * after + 2 * int(WINOGRAD_IMAGES))
    tiling = tiling_of(one_row(operators, j), [before, *sizes])
    if tiling is None:
        return ()
    if name == UNALIGNED:
        full = np.flatnonzero(tiling.aligned[1:, 0] >= tiling.aligned[0, 0])
    else:
        is_padded = name == PADDED
        level = _padded(tiling.images[1:, 0]) if is_padded else np.ceil(tiling.waves[1:, 0])
        full = np.flatnonzero(np.diff(level) > 0)
    return tuple(int(sizes[i]) for i in full[:MOST_FULL_SIZES])


def one_row(operators: Operators, j: int) -> Operators:
    """Return a table with only row `j`."""
    fields = operators.__struct_fields__
    return replace(operators, **{name: getattr(operators, name)[j : j + 1] for name in fields})


def next_good(before: int, sizes: Sequence[int], step_ms: Floats) -> int | None:
    """Return the first of `sizes` with as much throughput as before the jump, or None.

    Args:
        before: Batch size before the jump.
        sizes: Candidate batch sizes.
        step_ms: Step time of `before`, followed by those of `sizes`.
    """
    rate = np.asarray(sizes, dtype=float) / step_ms[1:]
    good = np.flatnonzero(rate >= AS_GOOD * before / step_ms[0])
    return int(sizes[int(good[0])]) if len(good) else None
