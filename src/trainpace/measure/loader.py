"""Data loaders: the records of a measurement, a model of the step time from them, advice, and
comparison.

Data and compute form a pipeline, and the slowest stage sets its pace (DS-Analyzer: Mohan,
Phanishayee, Raniwala, Chidambaram, "Analyzing and Mitigating Data Stalls in DNN Training", VLDB
2021, section 4). The model here also separates waiting from computing: w workers wait for storage w
at a time, but compute on no more cores than there are. It is a lower bound. Queues of finite length
(prefetch_factor) reach it only if samples cost about the same. Memory bandwidth, hyper-threads and
lower clocks of many busy cores are not included.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Interval
from trainpace.core.records import Record, from_json
from trainpace.core.worker import run_isolated

TOLERANCE = 0.05
"""Settings within this share of the best are equally good: the difference is noise on most
machines."""
CROWDED = 4.0
"""Loading, in multiples of the compute, that overlaps with a compute whose threads fill all
cores.

The rest of the loading runs while the compute waits. Measured with ResNets of 65 to 225 ms on two
cores and 270 ms of loading: a step with two workers took 0.93 to 1.18 times as long as without, and
with one worker 1.03 to 1.22 times. With a net of 5 ms and two workers it took 0.3 to 0.8 times, on
a noisier day. If a training computes longer than it loads, two workers cost 34%.
"""
WORTH_SHARE = 0.05
"""Least share of a step for a change that is worth making."""
STARTUP_SHARE = 0.05
"""Least share of an epoch for the workers' start before they should stay alive between epochs."""
_PER_SAMPLE = ("sample_wall_ms", "sample_cpu_ms")
_PER_BATCH = ("collate_ms", "send_ms", "handover_ms")


class LoaderCost(Record):
    """The cost of making a batch in ms, measured without contention.

    `sample_wall_ms` and `sample_cpu_ms` are one ``__getitem__``; the difference is waiting
    (storage, network, sleep). `collate_ms` joins samples into a batch. With workers, `send_ms` is
    the worker's cost of putting a batch into shared memory, and `handover_ms` is the main process's
    cost of taking it out and pinning it.
    """

    sample_wall_ms: float
    sample_cpu_ms: float
    collate_ms: float
    batch_size: int
    send_ms: float = 0.0
    handover_ms: float = 0.0

    def of_batch(self, batch_size: int) -> "LoaderCost":
        """Return the cost of another batch size. The costs per batch grow with its size."""
        return self._scaled(batch_size / self.batch_size, _PER_BATCH, batch_size)

    def times(self, factor: float) -> "LoaderCost":
        return self._scaled(factor, _PER_SAMPLE + _PER_BATCH, self.batch_size)

    def _scaled(self, factor: float, fields: tuple[str, ...], batch_size: int) -> "LoaderCost":
        scaled = {field: getattr(self, field) * factor for field in fields}
        return replace(self, batch_size=batch_size, **scaled)


def batch_ms(cost: LoaderCost, workers: int, cores: float) -> float:
    """Return the time from one batch to the next while only the loader runs."""
    return step_ms(cost, 0.0, workers, cores)


def step_ms(
    cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0
) -> float:
    """Return the time of a training step that computes for `compute_ms` on its own.

    With 0 workers, data and compute run in series. Otherwise the step takes the longest of: the
    main process (compute and handover), the workers side by side, and all CPU work shared by
    `cores`.

    If several threads of the compute fill all cores, all of them wait for the one whose core a
    worker has. Loading and computing then take as long as in series, except for what is loaded
    beyond `CROWDED` times the compute.

    Args:
        compute_cores: how many cores the compute keeps busy: the threads of training on the CPU,
            about 1 for the host of a GPU, or 0 if the compute is elsewhere.
    """
    sample_ms = max(cost.sample_wall_ms, cost.sample_cpu_ms / cores)
    if workers == 0:
        return cost.batch_size * sample_ms + cost.collate_ms + compute_ms
    once_ms = cost.collate_ms + cost.send_ms
    cpu_ms = (
        cost.batch_size * cost.sample_cpu_ms
        + once_ms
        + cost.handover_ms
        + compute_ms * compute_cores
    )
    worker_ms = cost.batch_size * sample_ms + once_ms
    crowded_ms = 0.0
    if compute_cores >= cores > 1:
        loading_ms = cost.batch_size * cost.sample_cpu_ms + once_ms
        beside_ms = min(loading_ms, CROWDED * compute_ms)
        crowded_ms = compute_ms + beside_ms + (loading_ms - beside_ms) / min(workers, cores)
    return max(crowded_ms, compute_ms + cost.handover_ms, worker_ms / workers, cpu_ms / cores)


def limit_of(
    cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0
) -> str:
    """Return what sets the pace: series (no workers), compute, workers (more help) or cores (more
    do not)."""
    total = step_ms(cost, compute_ms, workers, cores, compute_cores)
    if workers == 0:
        return "series"
    if total <= compute_ms + cost.handover_ms:
        return "compute"
    more = step_ms(cost, compute_ms, workers + 1, cores, compute_cores)
    return "workers" if more < total else "cores"


def fewest_workers(step_ms_by_workers: Mapping[int, float]) -> int:
    best = min(step_ms_by_workers.values())
    return min(w for w, ms in step_ms_by_workers.items() if ms <= best * (1 + TOLERANCE))


class LoaderConditions(Record):
    """Settings of a loader measurement.

    `target` is ``FILE.py:NAME``: a Dataset, a DataLoader or (model, loss, optimizer, dataset).
    `batch_size` None means the DataLoader's own, or 32. `workers` None starts at 0 and stops when
    more do not help. `compute_ms` is a step without its data; more workers are not tried once data
    takes less than half of it. `seconds` is the timed part of one run of a loader, and each setting
    runs `repeats` times.
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
            raise TrainpaceError(
                "a loader run needs positive seconds, a positive time-out and at least 1 repeat."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise TrainpaceError("a batch needs at least 1 sample.")


class SampleCost(Record):
    """The cost of one ``__getitem__`` in ms on one thread: means over `samples`, with files in the
    page cache.

    `delayed_ms` is time without a core because other processes had it; only `first_ms` includes it
    too. `cold_wall_ms` is for the same samples after their files were dropped from the page cache,
    or None if no file could be dropped.
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
        """Return the time that storage adds: cold minus warm (DS-Analyzer), or None if it is
        unknown."""
        return None if self.cold_wall_ms is None else max(0.0, self.cold_wall_ms - self.wall_ms)

    @property
    def wait_ms(self) -> float:
        """Return the time spent waiting although files are in memory: sleeps, locks, the
        network."""
        return max(0.0, self.wall_ms - self.cpu_ms)


class LoaderPoint(Record):
    """A DataLoader alone at one setting, in steady state.

    `startup_s` is the time from ``iter()`` to the first batch, without the time to make that batch.
    """

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
        """Return True if one more run of this point should not give the time per sample of
        `other`."""
        i, batch_ms = self.interval_ms, other.batch_ms * self.batch_size / other.batch_size
        return i is None or not i.low <= batch_ms <= i.high


class Stage(Record):
    """One part of ``__getitem__`` in ms per sample, without parts that are listed themselves.

    `random`: its output depends on random numbers, so it must stay online; None if that was not
    checked. `offline`: it and everything before it are deterministic, so it could be precomputed.
    """

    name: str
    kind: str
    wall_ms: float
    cpu_ms: float | None = None
    random: bool | None = None
    offline: bool = False


class LoaderMeasurement(Record):
    """The measurement of a loader.

    `points` differ in workers alone; `variants` differ in one other setting, at the recommended
    workers.
    """

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
        return (
            self.length // self.batch_size
            if self.drop_last
            else math.ceil(self.length / self.batch_size)
        )

    @property
    def offline_ms(self) -> float:
        """Return the time per sample that precomputing could save, before the cost of reading it
        back."""
        return sum(s.wall_ms for s in self.stages if s.offline)

    def share_of(self, stage: Stage) -> float:
        total = sum(s.wall_ms for s in self.stages)
        return stage.wall_ms / total if total else 0.0

    def point(self, workers: int) -> LoaderPoint:
        return next(p for p in self.points if p.workers == workers)


def measure_loader(conditions: LoaderConditions) -> LoaderMeasurement:
    """Measure a DataLoader alone over its settings, and where the time of a sample goes.

    The measurement runs in a fresh process, so a dataset that crashes or hangs costs that process
    alone.

    Raises:
        TrainpaceError: the target has no samples.
        UserCodeError, TimedOut: its code raises or hangs.
    """
    what = f"measuring the loader of {conditions.target}"
    request = msgspec.to_builtins(conditions)
    answer = run_isolated("trainpace.measure.loader_worker", request, conditions.timeout_s, what)
    return from_json(answer, LoaderMeasurement, "the loader's measurement")


def loader_costs(
    task: str,
    shards: str | None,
    batch_sizes: Sequence[int],
    workers: bool,
    seed: int,
    timeout_s: float,
) -> list[LoaderCost]:
    """Measure loading for each batch size, from a task's dataset or from the folder of its
    `shards`.

    `workers`: also time sending a batch from a worker.
    """
    request = {
        "task": task,
        "shards": shards,
        "batch_sizes": batch_sizes,
        "workers": workers,
        "seed": seed,
    }
    answer = run_isolated(
        "trainpace.measure.loader_worker",
        {"costs": request},
        timeout_s,
        f"timing samples of {task}",
    )
    return msgspec.json.decode(answer, type=list[LoaderCost])


class LoaderAdvice(Record):
    """The fewest workers within 5% of the best step, compared with the current number (0 if not
    given).

    `compute_ms` None: only the loader was measured, times are of batches, and at least one worker
    is advised. `saved_s_per_epoch` is without the workers' start. `limit` is what then sets the
    pace (see `limit_of`).
    """

    compute_ms: float | None
    compute_cores: float
    workers_now: int
    workers: int
    now_ms: float
    step_ms: float
    step_ms_by_workers: dict[int, float]
    saved_s_per_epoch: float
    epoch_now_s: float
    startup_s: float
    limit: str
    worth_it: bool
    keep_workers: bool
    offline_ms: float
    offline_share: float


def advise(
    m: LoaderMeasurement, compute_ms: float | None = None, compute_cores: float = 1.0
) -> LoaderAdvice:
    """Compare the measured numbers of workers for a step that computes for `compute_ms` on its
    own."""
    cores = min(compute_cores, m.cores) if compute_ms else 0.0
    compute = compute_ms or 0.0
    costs = {
        # the cost under which the model gives the measured batch time
        p.workers: m.cost.times(p.batch_ms / max(batch_ms(m.cost, p.workers, m.cores), 1e-9))
        for p in m.points
    }
    steps = {w: step_ms(cost, compute, w, m.cores, cores) for w, cost in costs.items()}
    # without workers nothing is loaded while a step computes, which a loader alone does not show
    needs_one = compute_ms is None and m.given_workers
    workers = fewest_workers({w: ms for w, ms in steps.items() if w or not needs_one})
    now = m.given_workers if m.given_workers in steps else min(steps)
    assert now is not None
    extra_start_s = m.point(workers).startup_s - m.point(now).startup_s
    saved_s = m.steps_per_epoch * (steps[now] - steps[workers]) / 1e3 - extra_start_s
    epoch_s = m.steps_per_epoch * steps[now] / 1e3
    worth_it = workers != now and saved_s > WORTH_SHARE * epoch_s
    chosen = workers if worth_it or workers < now else now
    startup_s = m.point(chosen).startup_s
    slow_start = startup_s > STARTUP_SHARE * m.steps_per_epoch * steps[chosen] / 1e3
    return LoaderAdvice(
        compute_ms=compute_ms,
        compute_cores=cores,
        workers_now=now,
        workers=chosen,
        now_ms=steps[now],
        step_ms=steps[chosen],
        step_ms_by_workers=steps,
        saved_s_per_epoch=saved_s,
        epoch_now_s=epoch_s,
        startup_s=startup_s,
        worth_it=worth_it,
        keep_workers=chosen > 0 and not m.given_persistent and slow_start,
        limit=limit_of(costs[chosen], compute, chosen, m.cores, cores),
        offline_ms=m.offline_ms,
        offline_share=sum(m.share_of(s) for s in m.stages if s.offline),
    )


Pair = tuple[float, float]


class ComparedTimes(Record):
    """Times per sample in ms in both loaders, with 0 for a missing part.

    `is_noise`: one more run may give either.
    """

    name: str
    ms: Pair
    is_noise: bool = False

    @property
    def more_ms(self) -> float:
        """Return how much longer the second loader takes."""
        return self.ms[1] - self.ms[0]


class LoaderComparison(Record):
    """Times per sample in ms of two loaders.

    `parts` are of a sample made on one thread. They decide, since they do not include the time of
    other processes. `alone` is each loader run alone, by the numbers of workers that both were run
    with. `slower` is 0 or 1, and `through` is the part that makes most of the difference.
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
        """Return True if both are within `TOLERANCE` of each other."""
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
