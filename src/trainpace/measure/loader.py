"""A loader's measurement: its conditions and results, a model of the step time from them, and what should be set.

Data and compute are a pipeline; the slowest stage sets its pace (DS-Analyzer: Mohan, Phanishayee, Raniwala, Chidambaram,
"Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, section 4). Beyond that model, waiting and computing are told
apart: w workers wait for storage w at a time, but compute on no more cores than there are. Known departures: it is a lower bound,
which queues of finite length (prefetch_factor) reach only where samples cost about the same; memory bandwidth, hyper-threads and
the clocks that many busy cores lower are not in it.
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
"""A setting within this share of the best is as good: the difference is noise on most machines."""
CROWDED = 4.0
"""Times the compute that workers load beside it where its threads fill all cores; the rest they load while it waits. By ResNets
of 65 to 225 ms on two cores beside 270 ms of loading: a step with two workers took 0.93 to 1.18 times as long as without, with
one 1.03 to 1.22 times; with a net of 5 ms and two workers 0.3 to 0.8 times, on a noisier day. Where a training computes longer
than it loads, two workers cost 34 %."""


class LoaderCost(Record):
    """What making a batch costs, in ms, measured without contention.

    `sample_wall_ms` and `sample_cpu_ms`: one ``__getitem__``; the difference is waiting (storage, network, sleep).
    `collate_ms`: samples into a batch, once a batch. With workers there are also `send_ms`, the worker's own cost of putting a
    batch into shared memory, and `handover_ms`, the main process' cost of taking it out (and pinning it).
    """

    sample_wall_ms: float
    sample_cpu_ms: float
    collate_ms: float
    batch_size: int
    send_ms: float = 0.0
    handover_ms: float = 0.0

    def __post_init__(self) -> None:
        times = (
            self.sample_wall_ms,
            self.sample_cpu_ms,
            self.collate_ms,
            self.send_ms,
            self.handover_ms,
        )
        if not all(0 <= t < float("inf") for t in times) or self.batch_size < 1:
            raise TrainpaceError(
                "the costs of a loader are times of 0 ms or more, and its batch size is 1 or more."
            )

    def of_batch(self, batch_size: int) -> "LoaderCost":
        """The cost of another batch: what is done once a batch grows with its size."""
        share = batch_size / self.batch_size
        return replace(
            self,
            batch_size=batch_size,
            collate_ms=self.collate_ms * share,
            send_ms=self.send_ms * share,
            handover_ms=self.handover_ms * share,
        )


def batch_ms(cost: LoaderCost, workers: int, cores: float) -> float:
    """Time from one batch to the next while only the loader runs; with 0 workers it runs in the main process."""
    return step_ms(cost, 0.0, workers, cores)


def step_ms(
    cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0
) -> float:
    """Time of a training step that computes for `compute_ms` on its own.

    0 workers: data and compute in series. Otherwise the latest of: the main process (compute and handover), the workers side by
    side, and all CPU work shared by `cores`. `compute_cores`: how many of the cores the compute itself keeps busy (the threads of
    training on the CPU; about 1 for the host of a GPU, 0 where the compute is elsewhere).

    Where several threads of the compute fill all cores, all of them wait for the one whose core a worker has: loading and
    computing then take as long as in series, but for what is loaded beyond `CROWDED` times the compute.
    """
    if not (workers >= 0 and cores > 0 and compute_ms >= 0 and 0 <= compute_cores <= cores):
        raise TrainpaceError(
            "a step needs workers and ms of 0 or more, and cores for its compute among those there"
            " are."
        )
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
    """What sets the pace: ``series`` (no workers), ``compute``, ``workers`` (more of them help) or ``cores`` (they do not)."""
    total = step_ms(cost, compute_ms, workers, cores, compute_cores)
    if workers == 0:
        return "series"
    if total <= compute_ms + cost.handover_ms:
        return "compute"
    more = step_ms(cost, compute_ms, workers + 1, cores, compute_cores)
    return "workers" if more < total else "cores"


def fewest_workers(step_ms_by_workers: Mapping[int, float]) -> int:
    if not step_ms_by_workers:
        raise TrainpaceError("no number of workers was measured.")
    best = min(step_ms_by_workers.values())
    return min(w for w, ms in step_ms_by_workers.items() if ms <= best * (1 + TOLERANCE))


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
            raise TrainpaceError(
                "a loader's run needs seconds and a time-out above 0, and 1 or more repeats."
            )
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
        return (
            self.length // self.batch_size
            if self.drop_last
            else math.ceil(self.length / self.batch_size)
        )

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
    """What loading costs for each batch size, from a task's own dataset or from the folder of its `shards`, in a fresh process.
    `workers`: time sending a batch from a worker as well."""
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


WORTH_SHARE = 0.05
"""Share of a step. A change that saves less is not worth making."""
STARTUP_SHARE = 0.05
"""Share of an epoch that starting the workers may take before they should stay alive from epoch to epoch."""


class LoaderAdvice(Record):
    """The fewest workers within 5 % of the best step, against the present number (0 where the user named none).

    `compute_ms` None: only the loader was measured, the times are those of batches, and at least one worker is advised.
    `saved_s_per_epoch` has the workers' start-up taken off. `limit`: what sets the pace then (see `limit_of`).
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
    """Weigh the measured numbers of workers for a step that computes for `compute_ms` on `compute_cores` cores."""
    cores_taken = min(compute_cores, m.cores) if compute_ms else 0.0
    compute = compute_ms or 0.0
    steps = {
        p.workers: step_ms(_as_measured(m, p.workers), compute, p.workers, m.cores, cores_taken)
        for p in m.points
    }
    # without workers nothing is loaded while a step computes, which a loader alone does not show
    beside = (
        {w: ms for w, ms in steps.items() if w} if compute_ms is None and m.given_workers else steps
    )
    workers = fewest_workers(beside)
    now = m.given_workers if m.given_workers in steps else 0 if 0 in steps else min(steps)
    assert now is not None
    startup_s = m.point(workers).startup_s
    saved_s = m.steps_per_epoch * (steps[now] - steps[workers]) / 1e3 - (
        startup_s - m.point(now).startup_s
    )
    epoch_s = m.steps_per_epoch * steps[now] / 1e3
    worth_it = workers != now and saved_s > WORTH_SHARE * epoch_s
    chosen = workers if worth_it or workers < now else now
    return LoaderAdvice(
        compute_ms=compute_ms,
        compute_cores=cores_taken,
        workers_now=now,
        workers=chosen,
        now_ms=steps[now],
        step_ms=steps[chosen],
        step_ms_by_workers=steps,
        saved_s_per_epoch=saved_s,
        epoch_now_s=epoch_s,
        startup_s=m.point(chosen).startup_s,
        worth_it=worth_it,
        keep_workers=chosen > 0
        and not m.given_persistent
        and m.point(chosen).startup_s > STARTUP_SHARE * m.steps_per_epoch * steps[chosen] / 1e3,
        limit=limit_of(_as_measured(m, chosen), compute, chosen, m.cores, cores_taken),
        offline_ms=m.offline_ms,
        offline_share=(
            m.offline_ms / total if (total := sum(s.wall_ms for s in m.stages)) > 0 else 0.0
        ),
    )


def _as_measured(m: LoaderMeasurement, workers: int) -> LoaderCost:
    """The cost of a sample under which the model gives the batch time that was measured with so many workers."""
    c = m.cost
    factor = m.point(workers).batch_ms / max(batch_ms(c, workers, m.cores), 1e-9)
    return replace(
        c,
        sample_wall_ms=c.sample_wall_ms * factor,
        sample_cpu_ms=c.sample_cpu_ms * factor,
        collate_ms=c.collate_ms * factor,
        send_ms=c.send_ms * factor,
        handover_ms=c.handover_ms * factor,
    )


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
