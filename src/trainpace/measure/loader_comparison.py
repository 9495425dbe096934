"""Two loaders side by side, such as the training's and the test's: which is slower a sample, and in which part of it."""

from collections import defaultdict

from trainpace.core.records import Record
from trainpace.measure.loader_measurement import TOLERANCE, LoaderMeasurement

Pair = tuple[float, float]


class ComparedTimes(Record):
    """ms a sample in each of the two; 0 where a loader does not have the part. `is_noise`: one more run may give either."""

    name: str
    ms: Pair
    is_noise: bool = False

    @property
    def more_ms(self) -> float:
        """How much longer the second one takes."""
        return self.ms[1] - self.ms[0]


class LoaderComparison(Record):
    """ms a sample of two loaders. `parts`: of a sample made on one thread, which decides: it is free of other processes' time;
    `alone`: of the loaders run alone, by the numbers of workers that both were run with.

    `slower`: 0 or 1; `through`: the part that makes most of the difference.
    """

    names: tuple[str, str]
    samples: tuple[int, int]
    parts: tuple[ComparedTimes, ...]
    alone: dict[int, ComparedTimes]

    @property
    def sample_ms(self) -> Pair:
        first, second = (sum(part.ms[i] for part in self.parts) for i in (0, 1))
        return first, second

    @property
    def slower(self) -> int:
        first, second = self.sample_ms
        return int(second > first)

    @property
    def are_alike(self) -> bool:
        """Within `TOLERANCE` of each other."""
        return min(self.sample_ms) * (1 + TOLERANCE) >= max(self.sample_ms)

    @property
    def through(self) -> ComparedTimes:
        return max(self.parts, key=lambda part: part.more_ms if self.slower else -part.more_ms)


def compare_loaders(a: LoaderMeasurement, b: LoaderMeasurement) -> LoaderComparison:
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for i, m in enumerate((a, b)):
        for stage in m.stages:
            parts[stage.name][i] += stage.wall_ms
        if not m.stages:
            parts["__getitem__"][i] += m.sample.wall_ms
        parts["collating"][i] += m.cost.collate_ms / m.cost.batch_size
    alone = {}
    for workers in sorted({p.workers for p in a.points} & {p.workers for p in b.points}):
        here, there = a.point(workers), b.point(workers)
        alone[workers] = ComparedTimes(
            name="loader alone",
            ms=(1e3 / here.samples_per_second, 1e3 / there.samples_per_second),
            is_noise=not (here.differs_from(there) and there.differs_from(here)),
        )
    return LoaderComparison(
        names=(a.target, b.target),
        samples=(a.length, b.length),
        alone=alone,
        parts=tuple(
            ComparedTimes(name=name, ms=(first, second)) for name, (first, second) in parts.items()
        ),
    )
