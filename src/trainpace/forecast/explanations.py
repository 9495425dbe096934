"""Explanation of a forecast: heaviest operators, layer roles, roofline, memory over a step.

The roofline (Williams, Waterman and Patterson 2009) shows FLOP per byte and reached FLOP/s of
operators, below the peak rate and the memory bandwidth of the device.

Shapes: times, shares and repeats of operators have one value per row of the table.
"""

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from trainpace.core.execution import Execution
from trainpace.core.hardware import Device
from trainpace.core.outcome import Memory, OperatorShare, RoleShare, StepTime
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast.kernels import KernelTimes
from trainpace.forecast.rates import Peak, matrix_peak
from trainpace.workload import CONVOLUTION_KINDS, Counts, Floats, Operators, TracedForm, at_batch

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
        "up_proj gate_proj gate_up_proj w1 w3 fc1 c_fc dense_h_to_4h wi wi_0 wi_1 lin1 linear1 up".split()
    ),
    DOWN: frozenset("down_proj w2 fc2 dense_4h_to_h wo lin2 linear2 down".split()),
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
    deepest = _layers(operators)
    gated = any(_names(module)[-1:] and _names(module)[-1] in _GATES for module in operators.module)
    spent = 1e3 * times.device_s * repeats
    for i in np.flatnonzero(spent > 0):
        module, kind = operators.module[i], operators.kind[i]
        role = role_of(module, kind, operators.phase[i])
        role = UP_AND_GATE if role == UP and gated else role
        ms[role] += float(spent[i])
        if kind == "gemm" or kind.startswith("attention"):
            layers[role] = max(layers[role], deepest.get(_stack(module), 0))
    shares = [
        RoleShare(role=role, layers=layers[role], time_ms=total) for role, total in ms.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.time_ms))


def alike(module: str, count: int) -> str:
    """Return the name of a module, with a star as layer number if it stands for several layers."""
    return _NUMBER.sub(".*.", module) if count > 1 else module


def role_of(module: str, kind: str, phase: str) -> str:
    if phase == "optimizer":
        return "optimizer"
    names = _names(module)
    if kind in CONVOLUTION_KINDS:
        return "convolutions" if len(names) < 2 else f"convolutions of {names[0]}"
    if kind == "gemm":
        return _matmul_role(names)
    normalises = any("norm" in name or _NORM.fullmatch(name) for name in names[-1:])
    return _BY_KIND.get(kind) or ("normalisation" if normalises else _REST)


def _matmul_role(names: list[str]) -> str:
    *inside, last = names or [""]
    attends = any("att" in name for name in inside)
    if attends and last in ("c_proj", "dense", "proj"):
        return OUTPUT
    if last == "c_proj":
        return DOWN
    if last == "dense":  # In BERT, the name of the parent module tells the role.
        parents = {"intermediate": UP, "output": DOWN}
        return next((parents[name] for name in parents if name in inside), LINEAR)
    return next((role for role, known in _LAST.items() if last in known), LINEAR)


def _names(module: str) -> list[str]:
    return [name for name in module.lower().split(".") if name and not name.isdecimal()]


def _stack(module: str) -> str:
    """Return the list of layers that a module is in: its name up to the first number."""
    found = _NUMBER.search(module)
    return module[: found.start()] if found else ""


def _layers(operators: Operators) -> dict[str, int]:
    """Return the number of layers in each list of layers.

    Equal operators of all layers are one row. Its module is the layer that ran first: the first
    layer in the forward pass, and the last layer in the backward pass.
    """
    most: dict[str, int] = {}
    for module in operators.module:
        if found := _NUMBER.search(module):
            stack = module[: found.start()]
            most[stack] = max(most.get(stack, 0), int(found[1]) + 1)
    return {stack: n for stack, n in most.items() if n > 1}
