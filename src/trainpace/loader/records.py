"""The conditions and the results of a loader measurement, which runs in a process of its own."""

import math
from collections.abc import Sequence

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.loader.model import LoaderCost
from trainpace.outcome import Interval
from trainpace.process import run_isolated
from trainpace.records import Record, from_json


class LoaderConditions(Record):
    """What to measure. `target`: ``FILE.py:NAME``, a Dataset, a DataLoader or (model, loss, optimizer, dataset).

    `batch_size` None takes the DataLoader's own, or 32. `workers` None begins at 0 and stops where more bring nothing.
    `compute_ms`: a step without its data; where data takes less than half of it, more workers are not tried. `seconds` is the
    timed part of one run of a loader; each setting is run `repeats` times.
    """

    target: str
    batch_size: int | None = None
    workers: tuple[int, ...] | None = None
    compute_ms: float | None = None
    seconds: float = 0.5
    repeats: int = 3
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.timeout_s > 0 and self.repeats >= 1):
            raise TrainpaceError("a loader's run needs seconds and a time-out above 0, and 1 or more repeats.")
        if self.batch_size is not None and self.batch_size < 1:
            raise TrainpaceError("a batch has 1 sample or more.")


class SampleCost(Record):
    """One ``__getitem__`` in ms, a mean over `samples` of them with their files in the page cache, on one thread.

    `delayed_ms`: time without a core because other processes had it; only `first_ms` includes it too.
    `cold_wall_ms`: the same samples after their files were dropped from the page cache; None where no file could be dropped.
    """

    samples: int
    wall_ms: float
    cpu_ms: float
    first_ms: float
    delayed_ms: float = 0.0
    cold_wall_ms: float | None = None
    files: float = 0.0
    file_bytes: float = 0.0
    note: str = ""

    @property
    def fetch_ms(self) -> float | None:
        """What storage adds, by DS-Analyzer's difference of cold and warm; None where it is not known."""
        return None if self.cold_wall_ms is None else max(0.0, self.cold_wall_ms - self.wall_ms)

    @property
    def wait_ms(self) -> float:
        """Time spent waiting although the files are in memory: sleeps, locks, the network."""
        return max(0.0, self.wall_ms - self.cpu_ms)


class LoaderPoint(Record):
    """A DataLoader alone at one setting, in steady state. `startup_s`: from ``iter()`` to the first batch, less that batch."""

    workers: int
    batch_size: int
    prefetch_factor: int | None
    pin_memory: bool
    batch_ms: float
    interval_ms: Interval | None
    predicted_ms: float | None
    startup_s: float
    runs: int

    @property
    def samples_per_second(self) -> float:
        return 1e3 * self.batch_size / self.batch_ms

    def differs_from(self, other: "LoaderPoint") -> bool:
        """Whether one more run of this point, at its own batch size, should not give what `other` gave a sample."""
        i, batch_ms = self.interval_ms, other.batch_ms * self.batch_size / other.batch_size
        return i is None or not i.low <= batch_ms <= i.high


class Stage(Record):
    """One part of ``__getitem__``: a transform, a function, or the rest; ms a sample, without parts that are listed themselves.

    `random`: its output depends on random numbers, so it must stay online; None where that was not checked.
    `offline`: it and everything before it are deterministic, so it could be precomputed.
    """

    name: str
    kind: str
    wall_ms: float
    cpu_ms: float | None = None
    random: bool | None = None
    offline: bool = False


class LoaderMeasurement(Record):
    """A loader, measured. `points` differ in workers alone; `variants` in one other setting, at the recommended workers."""

    target: str
    dataset: str
    length: int
    batch_size: int
    drop_last: bool
    given_workers: int | None
    given_persistent: bool
    is_task: bool
    cores: float
    memory_gib: float | None
    sample: SampleCost
    cost: LoaderCost
    points: tuple[LoaderPoint, ...]
    variants: tuple[LoaderPoint, ...]
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]
    environment: dict[str, str]

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch_size if self.drop_last else math.ceil(self.length / self.batch_size)

    @property
    def offline_ms(self) -> float:
        """What precomputing could take out of every sample, before the cost of reading it back."""
        return sum(s.wall_ms for s in self.stages if s.offline)

    def share_of(self, stage: Stage) -> float:
        total = sum(s.wall_ms for s in self.stages)
        return stage.wall_ms / total if total else 0.0

    def point(self, workers: int) -> LoaderPoint:
        return next(p for p in self.points if p.workers == workers)


def measure_loader(conditions: LoaderConditions) -> LoaderMeasurement:
    """Samples/s of a DataLoader alone over its settings, and where the time of a sample goes.

    In a fresh process, so that a dataset that crashes or hangs costs that process alone. Raises `TrainpaceError` for a target
    without samples, and `UserCodeError` or `TimedOut` where its code raises or hangs.
    """
    what = f"measuring the loader of {conditions.target}"
    request = msgspec.to_builtins(conditions)
    answer = run_isolated("trainpace.loader.worker", request, conditions.timeout_s, what)
    return from_json(answer, LoaderMeasurement, "the loader's measurement")


def loader_costs(
    task: str, shards: str | None, batch_sizes: Sequence[int], workers: bool, seed: int, timeout_s: float
) -> list[LoaderCost]:
    """What loading costs for each batch size, from a task's own dataset or from the folder of its `shards`, in a fresh process.
    `workers`: time sending a batch from a worker as well."""
    request = {"task": task, "shards": shards, "batch_sizes": batch_sizes, "workers": workers, "seed": seed}
    answer = run_isolated("trainpace.loader.worker", {"costs": request}, timeout_s, f"timing samples of {task}")
    return msgspec.json.decode(answer, type=list[LoaderCost])
