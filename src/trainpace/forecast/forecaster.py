"""Entry point to forecasts of step time and memory: `Forecaster(workload, target)`.

A forecaster evaluates many executions at once. Kernel times are computed once for every micro-batch
and every different way to shard the operators. Everything else is array expressions of shape (n,)
for n executions. The heaviest operators, scaling efficiency and the largest micro-batch take
longer, so only full records contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import PRECISIONS, Execution, Form, widens
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import Forecast, Jump, Memory
from trainpace.core.software import Rewrites
from trainpace.forecast.communication import MissingLink
from trainpace.forecast.explanations import Explained, Roofline, explain, find_jumps, next_good
from trainpace.forecast.forecasts import CorrectedTable, ForecastTable
from trainpace.forecast.grid import Facts, Grid, clashes, doublings, unsupported
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.memory import MemoryModel, RankMemory
from trainpace.forecast.ranks import RankTable, StageCosts, rank_operators
from trainpace.forecast.software import as_run
from trainpace.forecast.step import StepModel
from trainpace.forecast.target import Sharding, Target, kernel_groups, kernel_key
from trainpace.workload import Floats, Workload, form_of

if TYPE_CHECKING:
    from trainpace.forecast.uncertainty import Knowledge

MOST_TABLES, MOST_COSTS, MOST_MEMORIES = 128, 1024, 64
MOST_REWRITES = 16
"""Number of software variants cached per workload."""
MOST_REMEMBERED_ROWS = 4096
"""Size of the largest grid, in executions, whose memory is cached."""


class Evaluated:
    """Cache of results of one workload, shared by the forecasters of all targets.

    Two threads may compute the same value at the same time. This is harmless.

    Args:
        workload: Workload, perhaps rewritten for other software.
        traced: Cache of the workload as traced, if this one is rewritten.
        saves_as_eager: True for an old torch.compile, which saves what eager mode saves.
    """

    def __init__(
        self, workload: Workload, traced: Evaluated | None = None, saves_as_eager: bool = False
    ) -> None:
        self.workload, self.traced, self.saves_as_eager = workload, traced or self, saves_as_eager
        self.under: Callable[[Rewrites], Evaluated] = (
            lru_cache(MOST_REWRITES)(self._under) if traced is None else traced.under
        )
        self.table = lru_cache(MOST_TABLES)(self._table)
        self.memory_model = lru_cache(len(PRECISIONS))(self._memory_model)
        self.costs: dict[Hashable, Floats] = {}
        self.memories: dict[Hashable, RankMemory] = {}

    def _under(self, rewrites: Rewrites) -> Evaluated:
        workload = as_run(self.workload, rewrites)
        if workload is self.workload and not rewrites.saves_as_eager:
            return self
        return Evaluated(workload, self, rewrites.saves_as_eager)

    def _table(self, sharding: Sharding) -> RankTable:
        form = self.workload.forms[sharding.form]
        operators = rank_operators(form.operators, form.blocks, *sharding[1:])
        if sharding.ep == 1:
            return RankTable(operators, form.blocks)
        # Expert parallelism does not change the chains that torch.compile fuses. Reuse them.
        whole = self.table(sharding._replace(ep=1, expert_tp=sharding.tp, expert_load=1.0))
        return RankTable(operators, form.blocks, whole)

    def _memory_model(self, name: Form) -> MemoryModel:
        w = self.workload
        flags = w.checkpointed, not widens(w.optimizer), bool(w.adaptation)
        return MemoryModel(w.forms[name], name == "half", *flags, self.saves_as_eager)

    def memory(self, name: Form, grid: Grid, on_gpu: bool) -> RankMemory:
        key = name, on_gpu, grid.key()
        memory = self.memories.get(key) or self.memory_model(name).at(grid, on_gpu)
        if len(grid) <= MOST_REMEMBERED_ROWS:
            if len(self.memories) >= MOST_MEMORIES:
                self.memories.clear()
            self.memories[key] = memory
        return memory


class Forecaster:
    """Forecasts of one workload on one target. Safe to share between threads.

    The attribute `workload` is the traced workload, rewritten for the software of the target.
    """

    def __init__(
        self,
        workload: Workload,
        target: Target,
        evaluated: Evaluated | None = None,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.evaluated = (evaluated or Evaluated(workload)).under(target.software.rewrites)
        self.workload, self.target, self.knowledge = self.evaluated.workload, target, knowledge

    def on(self, target: Target | Cluster) -> Forecaster:
        """Return a forecaster of the same workload on another target.

        A `Cluster` replaces only the cluster, and keeps the kernel model and the software. Both
        forecasters share their cache and their measurements.
        """
        target = self.target._replace(cluster=target) if isinstance(target, Cluster) else target
        return Forecaster(self.workload, target, self.evaluated, self.knowledge)

    def knowing(self, knowledge: Knowledge | None) -> Forecaster:
        """Return a forecaster whose forecasts are corrected by measurements."""
        return Forecaster(self.workload, self.target, self.evaluated, knowledge)

    @property
    def plain(self) -> Forecaster:
        """Forecaster of the same workload and target, without corrections by measurements."""
        return self if self.knowledge is None else self.knowing(None)

    def forecast(self, execution: Execution) -> Forecast:
        """Return the full record of one execution.

        Raises:
            Contradiction: If its sizes contradict each other, the model or the cluster.
        """
        return self.at([execution]).forecast(0)

    def at(self, executions: Sequence[Execution] | Grid) -> ForecastTable:
        """Return the forecasts of all executions.

        Raises:
            TrainpaceError: If the workload was not traced in the form of a precision.
        """
        grid = executions if isinstance(executions, Grid) else Grid.of(executions)
        table = ForecastTable(self, grid)
        for rows in grid.groups(grid.precision, grid.engine):
            self._fill(table, rows)
        table.page_states()
        if self.knowledge is None or (posterior := self.knowledge.posterior(self)) is None:
            return table
        return CorrectedTable(table, posterior, self.knowledge.source(self))

    def _fill(self, table: ForecastTable, rows: NDArray[np.intp]) -> None:
        """Evaluate some rows of a table. They must share one precision and engine."""
        grid, workload, cluster = table.grid.at(rows), self.workload, self.target.cluster
        precision = PRECISIONS[int(grid.precision[0])]
        form = workload.form(precision)
        table.clash[rows] = clashes(grid, Facts.of(workload, form.blocks, cluster))
        on_gpu = cluster.device.kind == "gpu"
        memory = self.evaluated.memory(form_of(precision), grid, on_gpu)
        for whole, of_rows in zip(table.memory, memory, strict=True):
            whole[rows] = of_rows
        if form.blocks is not None:
            table.uneven[rows] = form.blocks.count % (grid.pp * grid.virtual_stages) != 0
        for refused, reason in unsupported(grid, workload, precision):
            table.refuse(rows[refused], reason)
        able = table.timed[rows]
        if not able.any():
            return
        legal, rows = grid.at(able), rows[able]
        costs = self.costs(legal)
        if isinstance(costs, str):
            table.refuse(rows, costs)
            return
        try:
            steps = StepModel(workload, form, legal, self.target).steps(costs)
        except MissingLink as missing:
            table.refuse(rows, str(missing))
            return
        for columns, values in zip((table.parts, table.exposed), steps, strict=True):
            for name, column in values.items():
                columns[name][rows] = column

    def costs(self, grid: Grid) -> StageCosts | str:
        """Return the kernel times of valid executions, or the reason if they are unknown."""
        target, kept = self.target, self.evaluated.costs
        device, kernels, host_factor = target.cluster.device, target.kernels, target.host_factor
        whole: Floats = np.empty((0, 0))
        for key, batches, rows, batch_of in kernel_groups(grid, target.software):
            made_for = key, device, kernels, host_factor, batches
            found = kept.get(made_for)
            if found is None:
                table = self.evaluated.table(key.sharding)
                timed = kernels.rank_times(table, batches, device, key)
                if isinstance(timed, str):
                    return timed
                host = timed.host_ms * host_factor, timed.start_ms * host_factor
                found = table.costs(timed.times.device_s, *host)
                if len(kept) >= MOST_COSTS:
                    kept.clear()
                kept[made_for] = found
            if not len(whole):
                whole = np.empty((len(grid), found.shape[1]))
            whole[rows] = found[batch_of]
        return StageCosts.of(whole)

    def least_gib(self, grid: Grid) -> Floats:
        """Return the GiB of parameters and states on the fullest rank, shape (n,).

        This is a lower bound of the peak, and fast to compute.
        """
        least = np.zeros(len(grid))
        for rows in grid.groups(grid.precision):
            form = form_of(PRECISIONS[int(grid.precision[rows[0]])])
            least[rows] = self.evaluated.memory_model(form).least_gib(grid.at(rows))
        return least

    def memory(self, execution: Execution) -> Memory:
        """Return the peak memory of the fullest rank."""
        on_gpu = self.target.cluster.device.kind == "gpu"
        grid = Grid.of([execution])
        return self.evaluated.memory(form_of(execution.precision), grid, on_gpu).record(0)

    def largest_micro_batch(self, execution: Execution) -> int | None:
        """Return the largest micro-batch that fits, or 0 if not even one sample fits.

        The result is None on a CPU, or if the memory size is unknown.
        """
        device, only = self.target.cluster.device, self.workload.only_batch
        if device.kind != "gpu" or device.memory_gib is None:
            return None
        model = self.evaluated.memory_model(form_of(execution.precision))
        shape = replace(execution, micro_batch=1)
        largest: int = model.largest_micro_batch(shape, device.memory_gib.value)
        if only is None:
            return largest
        return only if largest >= only else 0

    def jumps(
        self, execution: Execution, batches: Sequence[int], step_ms: Floats | None = None
    ) -> tuple[Jump, ...]:
        """Return the jumps of the step time over micro-batches.

        Each jump has its causes, and the next micro-batch that fits and has as much throughput as
        before the jump.

        Args:
            execution: Execution of all step times, except for the micro-batch.
            batches: Ascending micro-batches.
            step_ms: Step time of each micro-batch, if it is known already.
        """
        if step_ms is None:
            steps = self.at(Grid.vary(execution, micro_batch=batches))
            if not steps.timed.all():
                return ()
            step_ms = steps.step_ms
        jumps, largest = [], self.largest_micro_batch(execution)
        for i, excess in find_jumps(batches, step_ms):
            before, why = batches[i - 1], self._explained(execution, batches[i - 1], batches[i])
            at_stairs = self.at(Grid.vary(execution, micro_batch=[before, *why.full])).step_ms
            good = next_good(before, why.full, at_stairs) or next_good(
                before, batches[i + 1 :], np.delete(step_ms[i - 1 :], 1)
            )
            jumps.append(
                Jump(
                    before=before,
                    batch=batches[i],
                    before_ms=float(step_ms[i - 1]),
                    after_ms=float(step_ms[i]),
                    excess_ms=excess,
                    causes=why.causes,
                    mechanism=why.mechanism,
                    next_good=None if good and largest is not None and good > largest else good,
                )
            )
        return tuple(jumps)

    def _explained(self, execution: Execution, before: int, after: int) -> Explained:
        key = kernel_key(execution, self.target.software)
        device, kernels = self.target.cluster.device, self.target.kernels
        table = self.evaluated.table(key.sharding)
        timed = kernels.rank_times(table, (float(before), float(after)), device, key)
        assert not isinstance(timed, str), "steps were forecast with these times"
        return explain(
            table.operators,
            timed.times.device_s,
            before,
            after,
            None if device.sms is None else int(device.sms.value),
            lambda operators, sizes: kernels.tiling(
                KernelTable(operators), np.asarray(sizes, dtype=float), device, key
            ),
        )

    def roofline(self, execution: Execution) -> Roofline | None:
        """Return the roofline of the heaviest operators of one rank, or None if unknown."""
        return self.at([execution]).roofline(0)

    def fewer_devices(self, execution: Execution) -> tuple[Forecast, ...]:
        """Return forecasts on 1, 2, 4, ... devices, up to all devices of the cluster.

        Several nodes are used completely. Each device does the same work, so the global batch grows
        with the number of devices (weak scaling). Forecasts without a time, or that do not fit in
        memory, are omitted.
        """
        cluster, forecasts = self.target.cluster, []
        shapes = [(1, n) for n in doublings(cluster.devices_per_node)]
        shapes += [(n, cluster.devices_per_node) for n in doublings(cluster.nodes)[1:]]
        for nodes, per_node in shapes:
            whole = (nodes, per_node) == (cluster.nodes, cluster.devices_per_node)
            shard_size = execution.shard_size if whole else None
            try:
                e = replace(execution, nnodes=nodes, nproc_per_node=per_node, shard_size=shard_size)
                one = self.on(replace(cluster, nodes=nodes, devices_per_node=per_node)).forecast(e)
            except TrainpaceError:  # Too few devices for its tensor or pipeline parallelism.
                continue
            if one.can_run:
                forecasts.append(one)
        return tuple(forecasts)
