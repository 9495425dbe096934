"""What a rank's kernels cost, once for every distinct way to shard and every micro-batch: the numbers that steps are assembled
from, per repeated block and for what lies before and behind the blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Precision
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.executions import Grid
from trainpace.forecast.kernels import KernelTimes, kernel_table
from trainpace.forecast.rates import sustained_rates
from trainpace.forecast.recomputation import repeated_share
from trainpace.forecast.sharding import CONVOLUTIONS, rank_operators
from trainpace.forecast.step import host_us
from trainpace.forecast.timings import MachineModel, machine_times, step_factor
from trainpace.forecast.timings import host_us as machine_host_us
from trainpace.hardware.device import Device
from trainpace.workload import Blocks, Operators, TracedForm

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MOST_AT_ONCE = 64
"""Micro-batch sizes that are evaluated in one table, which bounds its memory."""


class RankTimes(NamedTuple):
    """Kernel times of one rank (batches x rows), the host's milliseconds a row, its milliseconds outside of the phases, and
    how unsure each row is (a calibrated machine's: the standard deviation of its logarithm)."""

    operators: Operators
    times: KernelTimes
    host_ms: Floats
    start_ms: float
    log_sd: Floats


class StageCosts(NamedTuple):
    """Milliseconds by execution (n, and n x 2 for forward and backward): device and host of one block, of what lies
    before the blocks and behind them; of the whole optimizer step; of a block's attention alone (device, forward), and of what
    selective recomputation repeats of a block."""

    block_device: Floats
    block_host: Floats
    first_device: Floats
    first_host: Floats
    last_device: Floats
    last_host: Floats
    optimizer_device: Floats
    optimizer_host: Floats
    attention_device: Floats
    repeated_device: Floats
    repeated_host: Floats
    start: Floats


def rank_times(
    operators: Operators,
    batches: Floats,
    precision: Precision,
    device: Device,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
    channels_last: bool,
    compiled: bool,
) -> RankTimes | str:
    """Kernel times of a rank's table at some micro-batch sizes, or the reason why there are none.

    The last few tables are kept: clusters of one device differ in everything but this, and it is most of the work.
    """
    key = (id(operators), id(device), id(model), precision, host_factor, channels_last, compiled)
    kept = _kept.get(key)
    rows = None if kept is None else _rows_of(batches, kept.batches)
    if kept is not None and rows is not None:
        times = KernelTimes(*(part if part.shape[0] == 1 else part[rows] for part in kept.timed.times))
        return kept.timed._replace(times=times)
    timed = _rank_times(operators, batches, precision, device, model, host_factor, channels_last, compiled)
    if not isinstance(timed, str) and bool((np.diff(batches) > 0).all()):
        while len(_kept) >= MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = _Kept(batches, timed._replace(times=KernelTimes(*map(np.atleast_2d, timed.times))), device, model)
    return timed


def _rows_of(batches: Floats, kept: Floats) -> NDArray[np.intp] | None:
    """Where these batches are among the kept ones, which ascend; None if one is not."""
    rows = np.minimum(np.searchsorted(kept, batches), len(kept) - 1)
    return rows if (kept[rows] == batches).all() else None


class _Kept(NamedTuple):
    """Times at ascending batches; it holds the device and the model too, so that their ids are not given to others."""

    batches: Floats
    timed: RankTimes
    device: Device
    model: MachineModel | KernelConstants | None


_kept: dict[tuple[object, ...], _Kept] = {}
MOST_KEPT = 6


def _rank_times(
    operators: Operators,
    batches: Floats,
    precision: Precision,
    device: Device,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
    channels_last: bool,
    compiled: bool,
) -> RankTimes | str:
    if isinstance(model, MachineModel) or device.kind == "cpu":
        if not isinstance(model, MachineModel):
            return f"{device.name} is a CPU: it has to be calibrated before it can be forecast."
        if bool((operators.half & (operators.launches > 0)).any()) and not bool(model.timings.half.any()):
            return f"{device.name} has been calibrated in fp32 only."
        found = [machine_times(operators, int(batch), model) for batch in batches]
        factor = step_factor(model)
        stacked = [np.stack([np.broadcast_to(t[i], (len(operators),)) for t, _ in found]) for i in range(4)]
        times = KernelTimes(stacked[0] * factor, *stacked[1:])
        host_ms = machine_host_us(operators, model) * 1e-3 * factor
        return RankTimes(operators, times, host_ms, 0.0, found[0][1])
    constants = model or fitted_constants()
    rates = sustained_rates(device, precision, bool((~operators.half).any()), bool(operators.half.any()), constants)
    if isinstance(rates, str):
        return rates
    times = kernel_table(operators).times(batches[:, None], rates, constants, channels_last, compiled)
    factor = host_factor * (constants.compile_host if compiled else 1.0)
    host_ms = host_us(operators, constants) * 1e-3 * factor
    return RankTimes(operators, times, host_ms, constants.host_step_us * 1e-3 * factor, np.zeros(len(operators)))


def stage_costs(
    form: TracedForm,
    grid: Grid,
    precision: Precision,
    device: Device,
    model: MachineModel | KernelConstants | None,
    host_factor: float,
    channels_last: bool,
) -> StageCosts | str:
    """The costs of every execution of a grid, whose kernels are evaluated once for each distinct table and batch."""
    result = StageCosts(*(np.zeros((len(grid.tp), 2)) for _ in range(6)), *(np.zeros(len(grid.tp)) for _ in range(6)))
    sequence = grid.sequence_parallel & (grid.tp > 1)
    widest = int(grid.cp.max()) + 1
    codes = ((grid.tp * widest + grid.cp) * 2 + sequence) * 2 + grid.compile
    _, firsts, table_of = np.unique(codes, return_index=True, return_inverse=True)
    for i, at in enumerate(firsts.tolist()):
        rows = np.flatnonzero(table_of == i)
        tp, cp, compiled = int(grid.tp[at]), int(grid.cp[at]), bool(grid.compile[at])
        operators = rank_operators(form.operators, form.blocks, tp, cp, bool(sequence[at]))
        batches, batch_of = np.unique(grid.micro_batch[rows], return_inverse=True)
        for start in range(0, len(batches), MOST_AT_ONCE):
            part = batches[start : start + MOST_AT_ONCE].astype(np.float64)
            timed = rank_times(operators, part, precision, device, model, host_factor, channels_last, compiled)
            if isinstance(timed, str):
                return timed
            costs = _split(timed, form.blocks)
            inside = (batch_of >= start) & (batch_of < start + len(part))
            for all_of_them, found in zip(result, costs, strict=True):
                all_of_them[rows[inside]] = found[batch_of[inside] - start]
    return result


def block_shares(operators: Operators, blocks: Blocks | None) -> Floats:
    """Share of each row's operators that run inside the repeated blocks."""
    if blocks is None:
        return np.zeros(len(operators))
    shares: Floats = blocks.operator_counts / operators.count
    return shares


def _split(timed: RankTimes, blocks: Blocks | None) -> StageCosts:
    operators = timed.operators
    device = 1e3 * timed.times.device_s
    host = np.broadcast_to(timed.host_ms, device.shape)
    kind, phase = np.array(operators.kind), np.array(operators.phase)
    inside = block_shares(operators, blocks)
    first = (kind == "embedding") | np.char.startswith(np.array(operators.function), "embedding")
    if blocks is None:
        first = np.ones(len(operators), dtype=bool)
    elif blocks.heads:
        first |= np.isin(kind, CONVOLUTIONS)  # that cut an image into patches
    share = {"block": inside / max(1, blocks.count if blocks else 1), "first": (1 - inside) * first,
             "last": (1 - inside) * ~first}  # fmt: skip
    core = np.zeros(len(operators), dtype=bool)
    if blocks is not None:
        core = attention_rows(operators, blocks) & (phase == "forward")

    passes = np.stack([phase == "forward", phase == "backward"], axis=1)

    def by_phase(values: Floats, weight: Floats) -> Floats:
        summed: Floats = values @ (weight[:, None] * passes)
        return summed

    updates = phase == "optimizer"
    repeated = repeated_share(operators, blocks)
    return StageCosts(
        block_device=by_phase(device, share["block"]),
        block_host=by_phase(host, share["block"]),
        first_device=by_phase(device, share["first"]),
        first_host=by_phase(host, share["first"]),
        last_device=by_phase(device, share["last"]),
        last_host=by_phase(host, share["last"]),
        optimizer_device=device[:, updates].sum(axis=1),
        optimizer_host=host[:, updates].sum(axis=1),
        attention_device=(device * share["block"])[:, core].sum(axis=1),
        repeated_device=(device * share["block"] * repeated).sum(axis=1),
        repeated_host=(host * share["block"] * repeated).sum(axis=1),
        start=np.full(len(device), timed.start_ms),
    )


def attention_rows(operators: Operators, blocks: Blocks) -> Flags:
    """The rows inside blocks that are attention's own: fused, or its products of two activations and their softmax."""
    kind = np.array(operators.kind)
    batched = (kind == "gemm") & (operators.dims[:, 0, 1] > 0)
    fused = np.isin(kind, ("attention", "attention_backward"))
    found: Flags = (blocks.operator_counts > 0) & (fused | batched | (kind == "softmax"))
    return found
