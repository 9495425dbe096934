"""What forecasters of one workload share: its operators as ranks run them, their times, and memory."""

from typing import NamedTuple

import numpy as np

from trainpace.execution import PRECISIONS, Execution, Form, Precision
from trainpace.forecast.cache import Bounded, ByBatch
from trainpace.forecast.grid import Floats, Grid
from trainpace.forecast.memory import MemoryModel, RankMemory
from trainpace.forecast.sharding import rank_operators
from trainpace.forecast.stages import RankTable
from trainpace.forecast.target import RankTimes, Target
from trainpace.workload import Workload, form_of

MOST_TABLES, MOST_COSTS, MOST_TIMES, MOST_MEMORIES = 128, 512, 8, 64
MOST_REMEMBERED_ROWS = 4096
"""The memory of larger grids is not kept."""


class Sharding(NamedTuple):
    """What decides which operators a rank runs."""

    form: Form
    tp: int
    cp: int
    sequence_parallel: bool


class KernelKey(NamedTuple):
    """What decides their times, besides the device and its kernel model."""

    sharding: Sharding
    precision: Precision
    channels_last: bool
    compiled: bool


def kernel_key(e: Execution) -> KernelKey:
    sharding = Sharding(form_of(e.precision), e.tp, e.cp, e.sequence_parallel and e.tp > 1)
    return KernelKey(sharding, e.precision, e.channels_last, e.compile)


class Tables:
    """What forecasters of one workload share, whatever their targets are."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._tables: Bounded[RankTable] = Bounded(MOST_TABLES)
        self._costs: Bounded[ByBatch] = Bounded(MOST_COSTS)
        self._times: Bounded[tuple[Floats, RankTimes]] = Bounded(MOST_TIMES)
        self._memory_models: Bounded[MemoryModel] = Bounded(len(PRECISIONS))
        self._memories: Bounded[RankMemory] = Bounded(MOST_MEMORIES)

    def table(self, sharding: Sharding) -> RankTable:
        def make() -> RankTable:
            form = self.workload.forms[sharding.form]
            operators = rank_operators(form.operators, form.blocks, *sharding[1:])
            return RankTable(operators, form.blocks)

        return self._tables.get(sharding, make)

    def times(self, key: KernelKey, target: Target, batches: Floats) -> RankTimes | str:
        """Kernel times of a rank at ascending batch sizes."""

        device, kernels = target.cluster.device, target.kernels
        cached = self._times.find((key, device, kernels))
        if cached is not None:
            evaluated, timed = cached
            rows = np.minimum(np.searchsorted(evaluated, batches), len(evaluated) - 1)
            if (evaluated[rows] == batches).all():
                return timed.at(rows)
        table = self.table(key.sharding).kernels
        answer = kernels.rank_times(table, batches, device, key.precision, key.channels_last, key.compiled)
        if not isinstance(answer, str):
            self._times.put((key, device, kernels), (batches, answer))
        return answer

    def costs(self, key: KernelKey, target: Target, batches: Floats) -> Floats | str:
        """The rows of `StageCosts.of` at ascending batch sizes."""
        table = self.table(key.sharding)

        def rows_at(some: Floats) -> Floats | str:
            timed = self.times(key, target, some)
            return timed if isinstance(timed, str) else table.costs(timed)

        return self._costs.get((key, target.cluster.device, target.kernels), lambda: ByBatch(rows_at)).at(batches)

    def memory_model(self, name: Form) -> MemoryModel:
        form = self.workload.forms[name]
        return self._memory_models.get(name, lambda: MemoryModel(form, name == "half", self.workload.checkpointed))

    def memory(self, name: Form, grid: Grid, on_gpu: bool) -> RankMemory:
        model = self.memory_model(name)
        if len(grid) > MOST_REMEMBERED_ROWS:
            return model.at(grid, on_gpu)
        return self._memories.get((name, on_gpu, grid.key()), lambda: model.at(grid, on_gpu))
