"""`Forecaster(workload, target)`: the entry point to forecasts of step times and memory.

It answers for whole arrays of executions: kernels are evaluated once for every different way to
shard the operators and every micro-batch, all else is array expressions. The heaviest operators,
scaling and the largest micro-batch take longer, and are computed only for full records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import PRECISIONS, Execution, Form, widens
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import Forecast, Jump, Memory
from trainpace.core.software import Rewrites
from trainpace.forecast.communication import MissingLink
from trainpace.forecast.explanations import Roofline
from trainpace.forecast.forecasts import CorrectedTable, ForecastTable
from trainpace.forecast.grid import Grid
from trainpace.forecast.jumps import Explained, explain, find_jumps, next_good
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.memory import MemoryModel, RankMemory
from trainpace.forecast.ranks import RankTable, StageCosts, rank_operators
from trainpace.forecast.shapes import Facts, clashes, doublings, unsupported
from trainpace.forecast.software import as_run
from trainpace.forecast.step import StepModel
from trainpace.forecast.target import Sharding, Target, kernel_groups, kernel_key
from trainpace.job import ASSUMED, JobConditions, Schedule
from trainpace.workload import Floats, Workload, form_of

if TYPE_CHECKING:
    from trainpace.forecast.posterior import Knowledge

V = TypeVar("V")
MOST_TABLES, MOST_COSTS, MOST_MEMORIES = 128, 1024, 64
MOST_REWRITES = 16
"""Number of software variants cached per workload."""
MOST_REMEMBERED_ROWS = 4096
"""Size of the largest grid, in executions, whose memory is cached."""


class Evaluated:
    """Results computed for one workload, shared by forecasters of all targets.

    Two threads may compute the same value at the same time, which costs time and does no harm.
    `traced` belongs to the workload as it was traced, if this is the same under other software.
    """

    def __init__(self, workload: Workload, traced: Evaluated | None = None) -> None:
        self.workload, self.traced = workload, traced or self
        self.under: Callable[[Rewrites], Evaluated] = (
            lru_cache(MOST_REWRITES)(self._under) if traced is None else traced.under
        )
        self.table = lru_cache(MOST_TABLES)(self._table)
        self.memory_model = lru_cache(len(PRECISIONS))(self._memory_model)
        self.costs: dict[Hashable, Floats] = {}
        self.memories: dict[Hashable, RankMemory] = {}

    def _under(self, rewrites: Rewrites) -> Evaluated:
        workload = as_run(self.workload, rewrites)
        return self if workload is self.workload else Evaluated(workload, self)

    def _table(self, sharding: Sharding) -> RankTable:
        form = self.workload.forms[sharding.form]
        operators = rank_operators(form.operators, form.blocks, *sharding[1:])
        if sharding.ep == 1:
            return RankTable(operators, form.blocks)
        # dividing experts changes no chain of operators
        whole = self.table(sharding._replace(ep=1, expert_tp=sharding.tp, expert_load=1.0))
        return RankTable(operators, form.blocks, whole)

    def _memory_model(self, name: Form) -> MemoryModel:
        w = self.workload
        flags = w.checkpointed, not widens(w.optimizer), bool(w.adaptation)
        return MemoryModel(w.forms[name], name == "half", *flags)

    def memory(self, name: Form, grid: Grid, on_gpu: bool) -> RankMemory:
        if len(grid) > MOST_REMEMBERED_ROWS:
            return self.memory_model(name).at(grid, on_gpu)
        key = name, on_gpu, grid.key()
        memory = self.memories.get(key)
        if memory is None:
            memory = self.memory_model(name).at(grid, on_gpu)
            remember(self.memories, key, memory, MOST_MEMORIES)
        return memory


def remember(values: dict[Hashable, V], key: Hashable, value: V, most: int) -> None:
    """Keep a value by its key. All older ones are forgotten if there are too many."""
    if len(values) >= most:
        values.clear()
    values[key] = value


class Forecaster:
    """Forecasts of one workload on one target. Safe to share between threads.

    `workload` is as the target's software runs the one that was traced.
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

        Another cluster keeps kernel model and software. Both forecasters share what they computed
        and what is known.
        """
        target = self.target._replace(cluster=target) if isinstance(target, Cluster) else target
        return Forecaster(self.workload, target, self.evaluated, self.knowledge)

    def knowing(self, knowledge: Knowledge | None) -> Forecaster:
        """Return a forecaster whose forecasts are corrected by measurements."""
        return Forecaster(self.workload, self.target, self.evaluated, knowledge)

    @property
    def plain(self) -> Forecaster:
        """The same forecaster without corrections."""
        return self if self.knowledge is None else self.knowing(None)

    def forecast(
        self,
        execution: Execution,
        schedule: Schedule | None = None,
        conditions: JobConditions = ASSUMED,
    ) -> Forecast:
        """Return the full record of one execution.

        Raises:
            Contradiction: if its sizes contradict each other, the model or the cluster.
        """
        return self.at([execution]).forecast(0, schedule, conditions)

    def over_batches(self, execution: Execution, batches: Sequence[int]) -> ForecastTable:
        """Return the same execution at every micro-batch of `batches`."""
        return self.at(Grid.vary(execution, micro_batch=list(batches)))

    def at(self, executions: Sequence[Execution] | Grid) -> ForecastTable:
        """Return the forecasts of all executions.

        Raises:
            TrainpaceError: if the workload was not traced in a precision's format.
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
        """Evaluate some rows of a table, which have one precision and engine."""
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
        """Return the kernel times of executions that can run, or why there are none."""
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
                remember(kept, made_for, found, MOST_COSTS)
            if not len(whole):
                whole = np.empty((len(grid), found.shape[1]))
            whole[rows] = found[batch_of]
        return StageCosts.of(whole)

    def least_gib(self, grid: Grid) -> Floats:
        """Return what the fullest rank of every execution holds all the time.

        It is less than its peak, and quickly computed.
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
        """Return the largest micro-batch that fits, 0 if not even one sample does.

        None on a CPU, or if the size of the memory is unknown.
        """
        device, only = self.target.cluster.device, self.workload.only_batch
        if device.kind != "gpu" or device.memory_gib is None:
            return None
        model = self.evaluated.memory_model(form_of(execution.precision))
        largest = model.largest_micro_batch(execution, device.memory_gib.value)
        if only is None:
            return largest
        return only if largest >= only else 0

    def jumps(self, execution: Execution, batches: Sequence[int]) -> tuple[Jump, ...]:
        """Return where the step grows out of proportion over ascending micro-batches, and why."""
        steps = self.over_batches(execution, batches)
        return self.jumps_in(execution, batches, steps.step_ms) if steps.timed.all() else ()

    def jumps_in(
        self, execution: Execution, batches: Sequence[int], step_ms: Floats
    ) -> tuple[Jump, ...]:
        """Return the jumps of step times that are known.

        Each has its causes and the next size that fits with as much throughput.
        """
        jumps, largest = [], self.largest_micro_batch(execution)
        for i, excess in find_jumps(batches, step_ms):
            before, why = batches[i - 1], self._explained(execution, batches[i - 1], batches[i])
            at_stairs = self.over_batches(execution, [before, *why.full]).step_ms
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
        """Return the heaviest operators of one rank under the device's roofs, or None."""
        return self.at([execution]).roofline(0)

    def fewer_devices(self, execution: Execution) -> tuple[Forecast, ...]:
        """Return forecasts on 1, 2, 4, ... devices up to the cluster's that have a time and fit.

        Beyond one node they use whole nodes. Each device does the same work, so the global batch
        grows with the devices (weak scaling).
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
            except TrainpaceError:  # too few for its tensor or pipeline parallelism
                continue
            if one.step is not None and one.fits is not False:
                forecasts.append(one)
        return tuple(forecasts)
