"""The best of a space, and the simplest that is nearly as good."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainpace.plan.changes import Choice, DataPath
from trainpace.plan.evaluate import Evaluation, Floats, Setting, device_room_gib, evaluate, job_seconds, with_data_ms
from trainpace.plan.knobs import KNOBS
from trainpace.plan.space import Space

NEARLY = 0.02
"""Share of the best job's time that fewer changes are worth: below what a forecast can tell apart."""


class SearchResult(NamedTuple):
    """All choices: rows of the space times data paths.

    job_s: seconds of the whole job, rows x data paths, infinite where a choice cannot be made or does not fit.
    changes: how many knobs each is away from the start.
    """

    space: Space
    data: tuple[DataPath, ...]
    evaluation: Evaluation
    room_gib: float
    job_s: Floats
    changes: NDArray[np.int64]

    def choice(self, index: tuple[int, int]) -> Choice:
        """One of them."""
        return Choice(execution=self.space.execution(index[0]), data=self.data[index[1]])

    @property
    def fitting(self) -> int:
        """How many can be made."""
        return int(np.isfinite(self.job_s).sum())

    def best(self, among: NDArray[np.bool_] | None = None) -> tuple[int, int] | None:
        """The fastest choice, of equals the one with fewest changes; None where none can be made. `among`: rows."""
        times = self.job_s if among is None else np.where(among[:, None], self.job_s, np.inf)
        least = times.min(initial=np.inf)
        return _fewest_then_fastest(self, times, least) if np.isfinite(least) else None

    def simplest(self) -> tuple[int, int] | None:
        """The fewest changes within `NEARLY` of the best, of equals the fastest."""
        least = self.job_s.min(initial=np.inf)
        return _fewest_then_fastest(self, self.job_s, least * (1 + NEARLY)) if np.isfinite(least) else None

    def pareto(self) -> list[tuple[int, int]]:
        """The fastest choice of each number of devices that beats every smaller number."""
        devices = self.space.columns["nnodes"] * self.space.columns["nproc_per_node"]
        front: list[tuple[int, int]] = []
        fastest = np.inf
        for count in np.unique(devices):
            index = self.best(devices == count)
            if index is not None and self.job_s[index] < fastest:
                fastest = float(self.job_s[index])
                front.append(index)
        return front


def _fewest_then_fastest(result: SearchResult, times: Floats, limit: float) -> tuple[int, int]:
    rows, paths = np.nonzero(times <= limit)
    pick = np.lexsort((times[rows, paths], result.changes[rows, paths]))[0]
    return int(rows[pick]), int(paths[pick])


def search(setting: Setting, space: Space, data: tuple[DataPath, ...]) -> SearchResult:
    """Evaluate a whole space. The first data path is the present one."""
    evaluation = evaluate(setting, space)
    return search_result(setting, space, data, evaluation)


def search_result(setting: Setting, space: Space, data: tuple[DataPath, ...], evaluation: Evaluation) -> SearchResult:
    """What an evaluation says of a space's choices."""
    samples = space.columns["micro_batch"] * space.columns["accumulation"]
    room = device_room_gib(setting.cluster)
    possible = np.isfinite(evaluation.step_ms) & ~(evaluation.needed_gib > room)
    step_ms = np.stack([with_data_ms(evaluation.step_ms, samples, path) for path in data], axis=-1)
    job_s = np.where(possible[:, None], job_seconds(setting, space, evaluation, step_ms), np.inf)
    moved = changes_of(space)[:, None] + np.array([path != data[0] for path in data], dtype=np.int64)
    return SearchResult(space, data, evaluation, room, job_s, moved)


def changes_of(space: Space) -> NDArray[np.int64]:
    """Knobs between every row and the start."""
    c, start = space.columns, space.base
    total = np.zeros(len(space), dtype=np.int64)
    for knob in KNOBS:
        fields = [field for field in knob.fields if field in c]
        differs: NDArray[Any] = np.zeros(len(space), dtype=bool)
        for field in fields:
            differs |= c[field] != getattr(start, field)
        total += differs
    total += c["micro_batch"] * c["accumulation"] * space.data_parallel_size() != start.global_batch
    return total
