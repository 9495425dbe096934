"""Steps of many executions at once: kernel times of a stage, exchanges, the pipeline's bubble, the optimizer.

A pipeline of pp stages takes m times its slowest stage, and once all others' turn as a bubble, which v virtual stages cut to
1/v: (pp - 1) / (m + pp - 1) of the time for equal stages (Huang et al. 2019; Narayanan et al. 2021). The passes of
a step are those of a rank of the slowest stage; what a stage does once a step is that of the stage where it takes longest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainpace.execution import PRECISIONS, Execution
from trainpace.forecast.constants import KernelConstants
from trainpace.forecast.exchanges import (
    KINDS,
    Links,
    MissingLink,
    PassExchanges,
    StepExchanges,
    data_parallel_ms,
    exposed,
    micro_batch_exchanges,
    row_products,
    step_exchanges,
)
from trainpace.forecast.executions import (
    FULL,
    SELECTIVE,
    Counts,
    Flags,
    Floats,
    Grid,
    Groups,
    execution_at,
    grid_from,
    grid_of,
    groups_of,
)
from trainpace.forecast.layout import Stages, stages_of
from trainpace.forecast.memory import RankMemory, rank_memory
from trainpace.forecast.memory import fits as fits_in
from trainpace.forecast.shapes import CLASHES, clashes, contradiction
from trainpace.forecast.stages import StageCosts, stage_costs
from trainpace.forecast.step import PhaseTimes
from trainpace.forecast.timings import MachineModel
from trainpace.hardware.cluster import Cluster
from trainpace.outcome import STEP_PARTS
from trainpace.workload import TracedForm, Workload, form_of

__all__ = ["CLASHES", "Grid", "GridForecast", "contradiction", "execution_at", "forecast_grid", "grid_from", "grid_of"]

ACCUMULATE_SHARE = 0.8
"""Share of the memory bandwidth at which gradients are added up."""
HOST_MEMORY_GB_PER_S = 250.0
"""Of a node, for Adam on its CPUs: two sockets of eight channels of DDR4-3200 have 410 GB/s, of which STREAM reaches about
80 %, and updates that read and write in turn about 60. The cluster does not say what its hosts have."""
CPU_ADAM_BYTES = 30.0
"""A parameter: Adam reads gradient, weight and two moments in fp32, writes three, and a 16-bit copy (Ren et al. 2021)."""


class GridForecast(NamedTuple):
    """Forecasts of n executions, n each. Times are NaN where `clash` is not 0 or `reasons` has an entry.

    parts: milliseconds by the names of `StepTime`'s parts, which add up to step_ms. exposed: communication by kind.
    clash: a position in CLASHES; 0 is none. reasons: positions in `Grid`'s precisions to why those have no times.
    fits: within the device's memory (True where its size is not known). uneven: the stages hold unequal numbers of blocks.
    """

    step_ms: Floats
    parts: dict[str, Floats]
    exposed: dict[str, Floats]
    memory: RankMemory
    fits: Flags
    clash: Counts
    uneven: Flags
    reasons: dict[int, str]

    @property
    def feasible(self) -> Flags:
        """Could be run: sizes that go together, rates that are known, and enough memory."""
        possible: Flags = (self.clash == 0) & np.isfinite(self.step_ms) & self.fits
        return possible


def forecast_grid(
    workload: Workload,
    base: Execution,
    grid: Grid,
    cluster: Cluster,
    model: MachineModel | KernelConstants | None = None,
    host_factor: float = 1.0,
    host_to_device_ms: float = 0.0,
    memory: RankMemory | None = None,
) -> GridForecast:
    """Forecast every execution of a grid; `base` gives what a grid does not vary (engine, memory format).

    `memory` is that of these executions, where another cluster's forecast gave it: it depends on the device's kind alone.
    Kernels are evaluated once for each distinct tp, cp, sequence_parallel, precision, compile and micro-batch; the rest
    are array expressions. Raises `TrainpaceError` where the workload lacks a precision's form.
    """
    n = len(grid.tp)
    on_gpu = cluster.device.kind == "gpu"
    parts = {name: np.full(n, np.nan) for name in STEP_PARTS}
    exposed = {name: np.full(n, np.nan) for name in KINDS}
    known = memory is not None
    memory = memory or RankMemory(*(np.zeros(n) for _ in RankMemory._fields))
    clash = np.zeros(n, dtype=np.int64)
    uneven = np.zeros(n, dtype=bool)
    reasons: dict[int, str] = {}
    for code in np.unique(grid.precision).tolist():
        precision = PRECISIONS[code]
        form = workload.form(precision)
        rows = np.flatnonzero(grid.precision == code)
        some = grid.at(rows)
        clash[rows] = clashes(some, form.blocks, workload.sequence_length, cluster, base.engine)
        if not known:
            found = rank_memory(form, some, form_of(precision) == "half", on_gpu, base.engine, workload.checkpointed)
            for whole, part in zip(memory, found, strict=True):
                whole[rows] = part
        legal = clash[rows] == 0
        if form.blocks is not None:
            uneven[rows] = form.blocks.count % (some.pp * some.virtual_stages) != 0
        if not legal.any():
            continue
        one = _Assembly(workload, form, base, some.at(legal), cluster, model, host_factor, host_to_device_ms)
        result = one.steps()
        if isinstance(result, str):
            reasons[code] = result
            continue
        for target, source in ((parts, result[0]), (exposed, result[1])):
            for name, values in source.items():
                target[name][rows[legal]] = values
    capacity = cluster.device.memory_gib
    fits = np.ones(n, dtype=bool) if capacity is None else fits_in(memory, capacity.value)
    return GridForecast(sum(parts.values(), np.zeros(n)), parts, exposed, memory, fits, clash, uneven, reasons)


class _Assembly:
    """The steps of a grid of one precision, whose sizes all go together."""

    def __init__(
        self, workload: Workload, form: TracedForm, base: Execution, grid: Grid, cluster: Cluster,
        model: MachineModel | KernelConstants | None, host_factor: float, host_to_device_ms: float,
    ) -> None:  # fmt: skip
        self.workload, self.form, self.base, self.grid, self.cluster = workload, form, base, grid, cluster
        self.model, self.host_factor, self.host_to_device_ms = model, host_factor, host_to_device_ms
        self.precision = PRECISIONS[int(grid.precision[0])]
        self.half = form_of(self.precision) == "half"
        self.groups: Groups = groups_of(grid, cluster.devices_per_node)
        blocks = form.blocks
        self.total = 1.0 if blocks is None else float(blocks.count * blocks.parameters + blocks.outside_parameters)
        self.stages: Stages = stages_of(grid, blocks, self.total)
        self.held = self.stages.parameters / self.total

    def steps(self) -> tuple[dict[str, Floats], dict[str, Floats]] | str:
        """(parts of the step, exposed exchanges by kind), or the reason why there are none."""
        costs = stage_costs(
            self.form, self.grid, self.precision, self.cluster.device, self.model, self.host_factor, self.base.channels_last
        )  # fmt: skip
        if isinstance(costs, str):
            return costs
        passes = self._passes(costs)
        try:
            return self._assembled(costs, passes)
        except MissingLink as missing:
            return str(missing)

    def _passes(self, costs: StageCosts) -> PhaseTimes:
        """Device and host times of a micro-batch's two passes on each kind of stage (n x 3 x 2)."""
        s = self.stages

        def staged(block: Floats, first: Floats, last: Floats) -> Floats:
            result: Floats = (
                s.blocks[:, :, None] * block[:, None] + s.has_first[:, :, None] * first[:, None]
                + s.has_last[:, :, None] * last[:, None]
            )  # fmt: skip
            return result

        device = staged(costs.block_device, costs.first_device, costs.last_device)
        host = staged(costs.block_host, costs.first_host, costs.last_host)
        if self.form.blocks is not None:
            full, some = self._recomputes(FULL)[:, None], self._recomputes(SELECTIVE)[:, None]
            for times, block, repeated in (
                (device, costs.block_device, costs.repeated_device), (host, costs.block_host, costs.repeated_host)
            ):  # fmt: skip
                again = np.where(full, block[:, :1], 0.0) + np.where(some, repeated[:, None], 0.0)
                times[:, :, 1] += s.blocks * again
        return PhaseTimes(device, host)

    def _recomputes(self, what: int) -> Flags:
        """Executions that compute blocks again in the backward pass, where the trace does not do so itself."""
        plain = self.workload.mode != "inference" and not self.workload.checkpointed
        found: Flags = (self.grid.activation_checkpointing == what) & plain
        return found

    def _assembled(self, costs: StageCosts, passes: PhaseTimes) -> tuple[dict[str, Floats], dict[str, Floats]]:
        grid, cluster, stages, m = self.grid, self.cluster, self.stages, self.grid.accumulation.astype(np.float64)
        on_gpu = cluster.device.kind == "gpu"
        overhead = passes.together_ms() - passes.device_ms if on_gpu else np.array(passes.host_ms)
        if self.base.engine == "data_parallel":
            # one Python process drives all replicas: their forward passes launch one after the other
            overhead[:, :, 0] += passes.host_ms[:, :, 0] * (grid.data_parallel_size - 1)[:, None]
        took = passes.device_ms + overhead
        gradients, parameters = self._exchanged_bytes()
        links = Links(cluster)
        each, once = self._exchanges(costs, took, gradients, parameters, links)
        busy = took.sum(axis=2) + each.tensor + each.context + each.pipeline
        exists = stages.number > 0
        slowest = np.where(exists, busy, -1.0).argmax(axis=1)
        every = np.arange(len(slowest))

        def slow(values: Floats) -> Floats:
            picked: Floats = values[every, slowest]
            return picked

        turn = each.pipeline + (busy - each.pipeline) * stages.mean_share
        bubble = ((stages.number * turn * exists).sum(axis=1) - slow(busy)) / grid.virtual_stages
        optimizer, optimizer_overhead = self._optimizer(costs, on_gpu)
        bandwidth = cluster.device.memory_bandwidth_gb_per_s
        sharded = (grid.zero_stage >= 2) & ~grid.collects_gradients
        added = gradients / np.where(sharded, self.groups.shard, 1)[:, None]
        moved = 3 * added * (m - 1)[:, None]  # read both, write one
        accumulate = moved / (np.inf if bandwidth is None else bandwidth.value * 1e6 * ACCUMULATE_SHARE)
        # what each stage does besides its passes ends with the slowest of them, whichever stage that is
        tail = once.data_parallel + once.parameters + once.offload + optimizer + optimizer_overhead + accumulate
        last = np.where(exists, tail, -1.0).argmax(axis=1)
        exposed = {
            "data_parallel": once.data_parallel[every, last], "parameters": once.parameters[every, last],
            "tensor_parallel": m * slow(each.tensor), "context_parallel": m * slow(each.context),
            "pipeline": m * slow(each.pipeline), "offload": once.offload[every, last],
        }  # fmt: skip
        if self.base.engine == "data_parallel":
            exposed["data_parallel"] = data_parallel_ms(grid, self._gradient_bytes, self._parameter_bytes, cluster)
        parts = {
            "forward_ms": m * slow(passes.device_ms[:, :, 0]),
            "backward_ms": m * slow(passes.device_ms[:, :, 1]) + accumulate[every, last],
            "optimizer_ms": optimizer[every, last],
            "communication_ms": sum(exposed.values(), np.zeros(len(m))),
            "data_wait_ms": np.zeros(len(m)),
            "host_to_device_ms": self.host_to_device_ms * m,
            "host_overhead_ms": m * slow(overhead.sum(axis=2)) + optimizer_overhead[every, last] + costs.start,
            "idle_ms": np.maximum(bubble, 0.0),
        }  # fmt: skip
        return parts, exposed

    def _exchanges(
        self, costs: StageCosts, took: Floats, gradients: Floats, parameters: Floats, links: Links
    ) -> tuple[PassExchanges, StepExchanges]:
        grid, groups, blocks, mode = self.grid, self.groups, self.form.blocks, self.workload.mode
        products = row_products(self.form.operators, blocks)
        each = micro_batch_exchanges(
            grid, groups, blocks, self.stages, products, self._recomputes(FULL), costs.attention_device, mode, links
        )
        if self.base.engine == "megatron_core":
            beside = exposed(each.pipeline, np.zeros_like(each.pipeline), took[:, :, :2].sum(axis=2))
            each = each._replace(pipeline=np.where(grid.virtual_stages[:, None] > 1, beside, each.pipeline))
        if self.base.engine == "data_parallel":
            nothing = np.zeros_like(gradients)
            return each, StepExchanges(nothing, nothing, nothing)
        once = step_exchanges(
            grid, groups, self.stages, gradients, parameters, took[:, :, 0], took[:, :, 1], self.base.engine, mode, links
        )  # fmt: skip
        return each, once

    @property
    def _gradient_bytes(self) -> Floats:
        """Of the whole model, in the format in which gradients are exchanged (n)."""
        trained = 0 if self.workload.mode == "inference" else self.workload.trainable_parameters
        return trained * np.where(self.half & ~self.grid.fp32_gradients, 2.0, 4.0)

    @property
    def _parameter_bytes(self) -> Floats:
        """Of the whole model, as parameters are exchanged (n)."""
        return self.workload.parameters * np.where(self.half | self.grid.casts_shards, 2.0, 4.0)

    def _exchanged_bytes(self) -> tuple[Floats, Floats]:
        return self.held * self._gradient_bytes[:, None], self.held * self._parameter_bytes[:, None]

    def _optimizer(self, costs: StageCosts, on_gpu: bool) -> tuple[Floats, Floats]:
        """(device milliseconds, what the host adds) of the update on each kind of stage (n x 3): it moves what a rank holds,
        and with 16-bit weights twice as many bytes where its states are in fp32."""
        grid, blocks = self.grid, self.form.blocks
        sharded = (grid.zero_stage >= 1)[:, None]
        wide = self.half & (sharded | grid.is_megatron[:, None])
        device = costs.optimizer_device[:, None] * self.held * np.where(wide, 2.0, 1.0)
        device = np.where(sharded, device / self.groups.shard[:, None], device)
        share = np.ones_like(self.held) if blocks is None else self.stages.blocks / blocks.count
        host = costs.optimizer_host[:, None] * share
        overhead = PhaseTimes(device, host).together_ms() - device if on_gpu else host
        ranks = np.where(sharded, self.groups.shard[:, None], 1.0)
        on_host = (
            self.held * self.workload.trainable_parameters / ranks * CPU_ADAM_BYTES * self.cluster.devices_per_node
        )
        on_host = on_host / (HOST_MEMORY_GB_PER_S * 1e6)
        away = grid.offload_optimizer[:, None] & (self.workload.mode == "train")
        return np.where(away, on_host, device), np.where(away, 0.0, overhead)
