"""Operators as ranks run them, their times and memory: shared by the forecasters of a workload, bounded, safe under threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from trainpace.core.execution import PRECISIONS, Form, widens
from trainpace.core.software import Software
from trainpace.forecast.grid import Grid
from trainpace.forecast.memory import MemoryModel, RankMemory
from trainpace.forecast.ranks import RankTable, rank_operators
from trainpace.forecast.software_rewrites import as_run
from trainpace.forecast.target import KernelKey, RankTimes, Sharding, Target
from trainpace.workload import Floats, Workload

MOST_AT_ONCE = 128
"""Batch sizes that are evaluated in one pass, which bounds its memory."""
MOST_BATCHES = 4096
MOST_TABLES, MOST_COSTS, MOST_TIMES, MOST_MEMORIES = 128, 512, 8, 64
MOST_REWRITES = 16
"""Kinds of software under which a workload is kept."""
MOST_REMEMBERED_ROWS = 4096
"""The memory of larger grids is not kept."""
V = TypeVar("V")


class Bounded(Generic[V]):
    """The values used last by their keys. Two threads may make the same value at the same time; all get the first."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where it is not there."""
        value = self.find(key)
        return self.put(key, make(), replace=False) if value is None else value

    def find(self, key: Hashable) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V, replace: bool = True) -> V:
        """The value that the key has now: this one, or with `replace` off the one that it had."""
        with self._lock:
            value = value if replace else self._values.get(key, value)
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


class ByBatch:
    """Rows of numbers by batch size, each worked out once, or the reason why there are none."""

    def __init__(self, rows_at: Callable[[Floats], Floats | str]) -> None:
        self._rows_at, self._lock = rows_at, Lock()
        self._batches: Floats = np.zeros(0)
        self._rows: Any = None

    def at(self, batches: Floats) -> Floats | str:
        """The rows of ascending batch sizes."""
        with self._lock:
            missing = np.setdiff1d(batches, self._batches, assume_unique=True)
            if len(self._batches) + len(missing) > MOST_BATCHES:
                self._batches, self._rows, missing = np.zeros(0), None, batches
            for start in range(0, len(missing), MOST_AT_ONCE):
                some = missing[start : start + MOST_AT_ONCE]
                rows = self._rows_at(some)
                if isinstance(rows, str):
                    return rows
                together = np.concatenate([self._batches, some])
                order = np.argsort(together)
                rows = rows if self._rows is None else np.concatenate([self._rows, rows])
                self._batches, self._rows = together[order], rows[order]
            return np.asarray(self._rows[np.searchsorted(self._batches, batches)])


class Tables:
    """The tables of one workload, whatever the targets of its forecasters are. `traced`: those of the workload as it was traced,
    where this is the same under other software."""

    def __init__(self, workload: Workload, traced: Tables | None = None) -> None:
        self.workload, self.traced = workload, traced or self
        self._under: Bounded[Tables] = Bounded(MOST_REWRITES)
        self._tables: Bounded[RankTable] = Bounded(MOST_TABLES)
        self._costs: Bounded[ByBatch] = Bounded(MOST_COSTS)
        self._times: Bounded[tuple[Floats, RankTimes]] = Bounded(MOST_TIMES)
        self._memory_models: Bounded[MemoryModel] = Bounded(len(PRECISIONS))
        self._memories: Bounded[RankMemory] = Bounded(MOST_MEMORIES)

    def under(self, software: Software) -> Tables:
        """The tables of the workload as that software runs it."""

        def make() -> Tables:
            workload = as_run(self.traced.workload, software.rewrites)
            return (
                self.traced if workload is self.traced.workload else Tables(workload, self.traced)
            )

        return self.traced._under.get(software.rewrites, make)

    def table(self, sharding: Sharding) -> RankTable:
        def make() -> RankTable:
            form = self.workload.forms[sharding.form]
            operators = rank_operators(form.operators, form.blocks, *sharding[1:])
            if sharding.ep == 1:
                return RankTable(operators, form.blocks)
            # dividing experts changes no chain of operators
            whole = self.table(sharding._replace(ep=1, expert_tp=sharding.tp, expert_load=1.0))
            return RankTable(operators, form.blocks, whole.kernels)

        return self._tables.get(sharding, make)

    def times(self, key: KernelKey, target: Target, batches: Floats) -> RankTimes | str:
        """Kernel times of a rank at ascending batch sizes."""
        device, kernels = target.cluster.device, target.kernels
        cached = self._times.find((key, device, kernels))
        if cached is not None:
            evaluated, timed = cached
            rows = np.minimum(np.searchsorted(evaluated, batches), len(evaluated) - 1)
            if (evaluated[rows] == batches).all():
                return timed.at(rows).hosted(target.host_factor)
        table = self.table(key.sharding).kernels
        answer = kernels.rank_times(table, batches, device, key)
        if isinstance(answer, str):
            return answer
        self._times.put((key, device, kernels), (batches, answer))
        return answer.hosted(target.host_factor)

    def costs(self, key: KernelKey, target: Target, batches: Floats) -> Floats | str:
        """The rows of `StageCosts.of` at ascending batch sizes."""
        return self._by_batch("costs", self.table(key.sharding).costs, key, target, batches)

    def parts(self, key: KernelKey, target: Target, batches: Floats) -> Floats | str:
        """The rows of `RankTable.parts` at ascending batch sizes."""
        return self._by_batch("parts", self.table(key.sharding).parts, key, target, batches)

    def _by_batch(
        self,
        what: str,
        of: Callable[[RankTimes], Floats],
        key: KernelKey,
        target: Target,
        batches: Floats,
    ) -> Floats | str:
        def rows_at(some: Floats) -> Floats | str:
            timed = self.times(key, target, some)
            return timed if isinstance(timed, str) else of(timed)

        made_for = what, key, target.cluster.device, target.kernels, target.host_factor
        return self._costs.get(made_for, lambda: ByBatch(rows_at)).at(batches)

    def memory_model(self, name: Form) -> MemoryModel:
        form, wide = self.workload.forms[name], not widens(self.workload.optimizer)
        adapted = bool(self.workload.adaptation)
        return self._memory_models.get(
            name,
            lambda: MemoryModel(form, name == "half", self.workload.checkpointed, wide, adapted),
        )

    def memory(self, name: Form, grid: Grid, on_gpu: bool) -> RankMemory:
        model = self.memory_model(name)
        if len(grid) > MOST_REMEMBERED_ROWS:
            return model.at(grid, on_gpu)
        return self._memories.get((name, on_gpu, grid.key()), lambda: model.at(grid, on_gpu))
