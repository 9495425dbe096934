"""`Forecaster(workload, target)`: the one entrance to forecasts of step times and memory.

It answers for whole arrays of executions: kernels are evaluated once for every distinct way to shard the operators and every
micro-batch, all else is array expressions. The heaviest operators, scaling and the largest micro-batch cost more a row, and are
computed only for full records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import (
    EXECUTION_FIELDS,
    NUMBER_FORMATS,
    PRECISIONS,
    Execution,
    Precision,
)
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import STEP_PARTS, Forecast, Jump, Memory
from trainpace.forecast.assembly import Assembly
from trainpace.forecast.cuts import Cut
from trainpace.forecast.exchanges import KINDS, MissingLink
from trainpace.forecast.explanations import Roofline
from trainpace.forecast.forecasts import ForecastTable
from trainpace.forecast.grid import Grid
from trainpace.forecast.jumps import Explained, explain, find_jumps, next_good
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.memory import RankMemory, fits
from trainpace.forecast.optimizer_limits import impossible_updates, paging_ms
from trainpace.forecast.ranks import StageCosts
from trainpace.forecast.shapes import CLASHES, clashes, doublings
from trainpace.forecast.tables import Tables
from trainpace.forecast.target import KernelKey, Sharding, Target, kernel_key
from trainpace.job import ASSUMED, JobConditions, Schedule
from trainpace.workload import GROUPED, Flags, Floats, Operators, Workload, form_of

if TYPE_CHECKING:
    from trainpace.forecast.posterior import Knowledge


AUTOCAST_EXPERTS = (
    "autocast leaves grouped products in fp32, which is not forecast: use bf16, or FSDP's mixed"
    " precision (ZeRO 3)"
)

ONE_BATCH = "{} could be traced at a batch of {} a GPU alone"


class Forecaster:
    """Forecasts of one workload on one target. Safe to share between threads.

    `workload` is the one that was traced, as the target's software runs it.
    """

    def __init__(
        self,
        workload: Workload,
        target: Target,
        tables: Tables | None = None,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.tables = (tables or Tables(workload)).under(target.software)
        self.workload, self.target, self.knowledge = self.tables.workload, target, knowledge

    def on(self, target: Target | Cluster) -> Forecaster:
        """The same workload on another target, or on another cluster whose devices the same kernel model answers for. The two
        share what they have worked out, and what is known."""
        target = self.target._replace(cluster=target) if isinstance(target, Cluster) else target
        return Forecaster(self.workload, target, self.tables, self.knowledge)

    def knowing(self, knowledge: Knowledge | None) -> Forecaster:
        """The same, its forecasts corrected by measurements."""
        return Forecaster(self.workload, self.target, self.tables, knowledge)

    @property
    def plain(self) -> Forecaster:
        """The same, its forecasts not corrected."""
        return self if self.knowledge is None else self.knowing(None)

    def forecast(
        self,
        execution: Execution,
        schedule: Schedule | None = None,
        conditions: JobConditions = ASSUMED,
    ) -> Forecast:
        """The full record of one execution. Raises `Contradiction` for sizes that do not go together."""
        return self.at([execution]).forecast(0, schedule, conditions)

    def over_batches(self, execution: Execution, batches: Sequence[int]) -> ForecastTable:
        """The same execution at every micro-batch of `batches`."""
        return self.at(Grid.vary(execution, micro_batch=list(batches)))

    def at(self, executions: Sequence[Execution] | Grid) -> ForecastTable:
        """Every execution. Raises `TrainpaceError` where the workload lacks a precision's form."""
        plain = self._plain(executions if isinstance(executions, Grid) else Grid.of(executions))
        if self.knowledge is None or (posterior := self.knowledge.posterior(self)) is None:
            return plain
        from trainpace.forecast.corrections import (
            CorrectedTable,
        )  # most forecasts know of no measurement

        return CorrectedTable(plain, posterior, self.knowledge.source(self))

    def _plain(self, grid: Grid) -> ForecastTable:
        n, cluster, workload = len(grid), self.target.cluster, self.workload
        parts = {name: np.full(n, np.nan) for name in STEP_PARTS}
        exposed = {name: np.full(n, np.nan) for name in KINDS}
        memory = RankMemory(*(np.zeros(n) for _ in RankMemory._fields))
        clash, why = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        uneven = np.zeros(n, dtype=bool)
        reasons = [""]

        def refuse(rows: NDArray[np.intp], reason: str) -> None:
            why[rows] = len(reasons)
            reasons.append(reason)

        kinds = (
            grid.precision * len(EXECUTION_FIELDS["engine"].choices) + grid.engine
        ) * 2 + grid.channels_last
        for kind in sorted(set(kinds.tolist())):
            rows = np.flatnonzero(kinds == kind)
            some = grid.at(rows)
            precision = PRECISIONS[int(some.precision[0])]
            form = workload.form(precision)
            clash[rows] = clashes(some, form.blocks, workload.sequence_length, cluster)
            clash[rows[workload.whole_step & (some.accumulation > 1) & (clash[rows] == 0)]] = (
                CLASHES.index("whole step")
            )
            held = self.tables.memory(form_of(precision), some, cluster.device.kind == "gpu")
            for whole, part in zip(memory, held, strict=True):
                whole[rows] = part
            able = clash[rows] == 0
            if NUMBER_FORMATS[precision].autocasts and GROUPED in form.operators.function:
                autocast = some.zero_stage < 3
                refuse(rows[autocast], AUTOCAST_EXPERTS)
                able &= ~autocast
            if workload.only_batch is not None:
                other = some.micro_batch != workload.only_batch
                refuse(rows[other], ONE_BATCH.format(workload.model, workload.only_batch))
                able &= ~other
            impossible = (
                impossible_updates(some, workload.optimizer) if workload.mode == "train" else []
            )
            for sizes, reason in [
                *impossible,
                *(_without_blocks(some, workload) if form.blocks is None else []),
            ]:
                refuse(rows[sizes], reason)
                able &= ~sizes
            if form.blocks is not None:
                uneven[rows] = form.blocks.count % (some.pp * some.virtual_stages) != 0
            if not able.any():
                continue
            legal = some.at(able)
            costs = self._by_kernels(legal, precision, self.tables.costs)
            if isinstance(costs, str):
                refuse(rows[able], costs)
                continue
            try:
                steps = Assembly(workload, form, legal, self.target).steps(StageCosts.of(costs))
            except MissingLink as missing:
                refuse(rows[able], str(missing))
                continue
            for columns, values in zip((parts, exposed), steps, strict=True):
                for name, column in values.items():
                    columns[name][rows[able]] = column
        capacity = cluster.device.memory_gib
        fit = np.ones(n, dtype=bool) if capacity is None else fits(memory, capacity.value)
        paged_ms = paging_ms(memory, None if capacity is None else capacity.value, cluster)
        exposed["offload"] += paged_ms
        parts["communication_ms"] += paged_ms
        step_ms = sum(parts.values(), np.zeros(n))
        return ForecastTable(
            self, grid, step_ms, parts, exposed, memory, fit, clash, uneven, why, tuple(reasons)
        )

    def least_gib(self, grid: Grid) -> Floats:
        """What every execution's fullest rank holds all the time: less than its peak, and quickly known."""
        least = np.zeros(len(grid))
        for precision in np.unique(grid.precision).tolist():
            rows = np.flatnonzero(grid.precision == precision)
            least[rows] = self.tables.memory_model(form_of(PRECISIONS[precision])).least_gib(
                grid.at(rows)
            )
        return least

    def memory(self, execution: Execution) -> Memory:
        """Peak memory of the fullest rank."""
        grid = Grid.of([execution])
        on_gpu = self.target.cluster.device.kind == "gpu"
        return self.tables.memory(form_of(execution.precision), grid, on_gpu).record(0)

    def largest_micro_batch(self, execution: Execution) -> int | None:
        """The largest micro-batch that fits, 0 where not even one does; None on a CPU and where the memory's size is unknown."""
        device = self.target.cluster.device
        if device.kind != "gpu" or device.memory_gib is None:
            return None
        model = self.tables.memory_model(form_of(execution.precision))
        largest = model.largest_micro_batch(execution, device.memory_gib.value)
        only = self.workload.only_batch
        return largest if only is None else only if largest >= only else 0

    def jumps(self, execution: Execution, batches: Sequence[int]) -> tuple[Jump, ...]:
        """Where the step grows out of proportion over ascending micro-batches, with the operators that do."""
        steps = self.over_batches(execution, batches)
        return self.jumps_in(execution, batches, steps.step_ms) if steps.timed.all() else ()

    def jumps_in(
        self, execution: Execution, batches: Sequence[int], step_ms: Floats
    ) -> tuple[Jump, ...]:
        """The jumps of step times that are known, why they are forecast, and the next size that fits with as much throughput."""
        jumps, largest = [], self.largest_micro_batch(execution)
        for i, excess in find_jumps(batches, step_ms):
            before, why = batches[i - 1], self._explained(execution, batches[i - 1], batches[i])
            stairs = self.over_batches(execution, [before, *why.stairs]).step_ms
            good = next_good(before, why.stairs, stairs) or next_good(
                before, batches[i + 1 :], np.delete(step_ms[i - 1 :], 1)
            )
            good = good if good is None or largest is None or good <= largest else None
            jumps.append(
                Jump(
                    before=before,
                    batch=batches[i],
                    before_ms=float(step_ms[i - 1]),
                    after_ms=float(step_ms[i]),
                    excess_ms=excess,
                    causes=why.causes,
                    mechanism=why.mechanism,
                    next_good=good,
                )
            )
        return tuple(jumps)

    def roofline(self, execution: Execution) -> Roofline | None:
        """The heaviest operators of one rank under the device's roofs; None where these are not known."""
        return self.at([execution]).roofline(0)

    def fewer_devices(self, execution: Execution) -> tuple[Forecast, ...]:
        """Forecasts on 1, 2, 4, ... devices up to the cluster's, whole nodes beyond one; those that have a time and fit.

        Per device nothing changes, so that the global batch grows with the devices (weak scaling).
        """
        cluster, forecasts = self.target.cluster, []
        shapes = [(1, n) for n in doublings(cluster.devices_per_node)]
        for nodes, per_node in shapes + [
            (n, cluster.devices_per_node) for n in doublings(cluster.nodes)[1:]
        ]:
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

    def part_ms(self, grid: Grid) -> Floats:
        """Device time by what it is spent on, of executions that have a time (n x the columns of `RankTable.parts`)."""
        parts = None
        kinds = grid.precision * 2 + grid.channels_last
        for kind in sorted(set(kinds.tolist())):
            rows = np.flatnonzero(kinds == kind)
            of_kind = self._by_kernels(grid.at(rows), PRECISIONS[kind // 2], self.tables.parts)
            assert not isinstance(of_kind, str), "steps were forecast with these times"
            parts = np.empty((len(grid), of_kind.shape[1])) if parts is None else parts
            parts[rows] = of_kind
        assert parts is not None
        return parts

    def _by_kernels(
        self, grid: Grid, precision: Precision, of: Callable[..., Floats | str]
    ) -> Floats | str:
        """The rows that `of` has for every execution of one precision and memory format."""
        rows = None
        sequence = grid.sequence_parallel & (grid.tp > 1)
        codes = ((grid.tp * (int(grid.cp.max()) + 1) + grid.cp) * 2 + sequence) * 2 + grid.compile
        _, load_of = np.unique(grid.expert_load, return_inverse=True)
        for more in (grid.ep, grid.experts_tp, load_of):
            codes = codes * (int(more.max()) + 1) + more
        _, firsts, table_of = np.unique(codes, return_index=True, return_inverse=True)
        for i, first in enumerate(firsts.tolist()):
            at = np.flatnonzero(table_of == i)
            experts = (
                int(grid.ep[first]),
                int(grid.experts_tp[first]),
                float(grid.expert_load[first]),
            )
            ranks = int(grid.tp[first]), int(grid.cp[first]), bool(sequence[first])
            sharding = Sharding(form_of(precision), *ranks, *experts)
            flags = bool(grid.channels_last[first]), bool(grid.compile[first])
            key = KernelKey(sharding, precision, *flags, self.target.software)
            batches, batch_of = np.unique(grid.micro_batch[at], return_inverse=True)
            found = of(key, self.target, batches.astype(np.float64))
            if isinstance(found, str):
                return found
            if rows is None:
                rows = np.empty((len(grid), found.shape[1]))
            rows[at] = found[batch_of]
        assert rows is not None
        return rows

    def _explained(self, execution: Execution, before: int, after: int) -> Explained:
        key, device = kernel_key(execution, self.target.software), self.target.cluster.device
        timed = self.tables.times(key, self.target, np.array([float(before), float(after)]))
        assert not isinstance(timed, str), "steps were forecast with these times"

        def cut_of(operators: Operators, sizes: Sequence[int]) -> Cut | None:
            return self.target.kernels.cut(
                KernelTable(operators), np.asarray(sizes, dtype=float), device, key
            )

        sms = None if device.sms is None else int(device.sms.value)
        return explain(
            self.tables.table(key.sharding).operators,
            timed.times.device_s,
            before,
            after,
            sms,
            cut_of,
        )


def _without_blocks(grid: Grid, workload: Workload) -> list[tuple[Flags, str]]:
    """The executions that a model without repeated blocks cannot have, with the reason."""
    wanted = {
        "tensor": grid.tp > 1,
        "pipeline": grid.pp > 1,
        "context": grid.cp > 1,
        "expert": grid.ep > 1,
    }
    cuts = sum(flags * 2**i for i, flags in enumerate(wanted.values()))
    refused = []
    for code in sorted(set(cuts[cuts > 0].tolist())):
        names = " and ".join(name for i, name in enumerate(wanted) if code >> i & 1)
        refused.append(
            (
                cuts == code,
                (
                    f"{names} parallelism: {workload.model} has no repeated blocks along which it"
                    " could be cut."
                ),
            )
        )
    recomputes = ~grid.has("activation_checkpointing", "none") & (cuts == 0)
    if recomputes.any() and not workload.checkpointed:
        refused.append(
            (
                recomputes,
                (
                    "activation checkpointing: this workload was traced without it, and has no"
                    " repeated blocks to recompute."
                ),
            )
        )
    return refused
