"""Data loaders: records of measurements, a model of the step time, advice, and comparison.

Data and compute form a pipeline, and its slowest stage determines the step time (DS-Analyzer:
Mohan, Phanishayee, Raniwala, Chidambaram, "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021, section 4). The model here also separates waiting from computing: all workers can wait
for storage at the same time, but they compute on no more cores than there are.

The modeled time is a lower bound. Queues of finite length (prefetch_factor) reach it only if all
samples cost about the same. The model ignores memory bandwidth, hyper-threads, and the lower clock
of a CPU with many busy cores.
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
"""Relative difference below which settings are equally good. It is noise on most machines."""
CROWDED = 4.0
"""Limit of the loading that slows down computing, in multiples of the computing time.

It applies if the compute threads fill all cores. Up to this limit, loading and computing take as
long as in series. The workers share the loading beyond the limit, up to one core each.

Measured with ResNets of 65 to 225 ms per step on two cores and 270 ms of loading: a step with two
workers took 0.93 to 1.18 times as long as without workers, and with one worker 1.03 to 1.22 times.
With a network of 5 ms and two workers, it took 0.3 to 0.8 times as long, on a noisier day. If a
training computes longer than it loads, two workers cost 34%.
"""
WORTH_SHARE = 0.05
"""Minimum share of a step that a worthwhile change saves."""
STARTUP_SHARE = 0.05
"""Share of an epoch for starting workers above which they should persist between epochs."""
_PER_SAMPLE = ("sample_wall_ms", "sample_cpu_ms")
_PER_BATCH = ("collate_ms", "send_ms", "handover_ms")


class LoaderCost(Record):
    """Cost of making a batch in ms, measured without other load.

    Attributes:
        sample_wall_ms: Wall time of one ``__getitem__``.
        sample_cpu_ms: CPU time of one ``__getitem__``. The rest of the wall time is waiting for
            storage, network or sleep.
        collate_ms: Time to collate the samples of a batch.
        send_ms: Time of a worker to put a batch into shared memory.
        handover_ms: Time of the main process to take a batch out of shared memory and pin it.
    """

    sample_wall_ms: float
    sample_cpu_ms: float
    collate_ms: float
    batch_size: int
    send_ms: float = 0.0
    handover_ms: float = 0.0

    def of_batch(self, batch_size: int) -> "LoaderCost":
        """Return the cost for another batch size. Costs per batch are scaled in proportion."""
        return self._scaled(batch_size / self.batch_size, _PER_BATCH, batch_size)

    def times(self, factor: float) -> "LoaderCost":
        return self._scaled(factor, _PER_SAMPLE + _PER_BATCH, self.batch_size)

    def _scaled(self, factor: float, fields: tuple[str, ...], batch_size: int) -> "LoaderCost":
        scaled = {field: getattr(self, field) * factor for field in fields}
        return replace(self, batch_size=batch_size, **scaled)


def batch_ms(cost: LoaderCost, workers: int, cores: float) -> float:
    """Return the time per batch in ms while only the loader runs."""
    return step_ms(cost, 0.0, workers, cores)


def step_ms(
    cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0
) -> float:
    """Predict the time of a training step with data loading, in ms.

    With 0 workers, data and compute run in series. Otherwise, the step takes as long as the longest
    of three: the main process (compute and handover), the workers in parallel, and all CPU work
    shared by `cores`.

    If the compute threads fill all cores, all of them wait for the thread that shares its core with
    a worker. Loading and computing then take as long as in series, except for loading beyond
    `CROWDED` times the compute.

    Args:
        cost: Cost of making a batch.
        compute_ms: Time of the step without data loading.
        workers: Number of loader workers.
        cores: Number of CPU cores.
        compute_cores: Number of cores that the compute keeps busy: the number of threads for
            training on the CPU, about 1 for the host of a GPU, or 0 if only the loader runs.
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
    """Return what limits the step time.

    The limit is "series" without workers, "compute", "workers" if more workers help, or "cores" if
    more workers do not help.
    """
    total = step_ms(cost, compute_ms, workers, cores, compute_cores)
    if workers == 0:
        return "series"
    if total <= compute_ms + cost.handover_ms:
        return "compute"
    more = step_ms(cost, compute_ms, workers + 1, cores, compute_cores)
    return "workers" if more < total else "cores"


def fewest_workers(step_ms_by_workers: Mapping[int, float]) -> int:
    """Return the smallest number of workers within `TOLERANCE` of the best step time."""
    best = min(step_ms_by_workers.values())
    return min(w for w, ms in step_ms_by_workers.items() if ms <= best * (1 + TOLERANCE))


class LoaderConditions(Record):
    """Settings of a loader measurement.

    Attributes:
        target: ``FILE.py:NAME`` of a Dataset, a DataLoader or (model, loss, optimizer, dataset).
        batch_size: Batch size. None means that of the DataLoader, or 32.
        workers: Numbers of workers to measure. None means from 0 until more do not help.
        compute_ms: Time of a step without its data. Once loading takes less than half of it, more
            workers are not measured.
        seconds: Timed part of one run of a loader.
        repeats: Number of runs for each setting.
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
    """Cost of one ``__getitem__`` in ms on one thread, with files in the page cache.

    All times are means over `samples` samples.

    Attributes:
        first_ms: Wall time of the first access, including waiting for a core.
        delayed_ms: Time waiting for a core that other processes used. The other times do not
            include it, except `first_ms`.
        cold_wall_ms: Wall time of the same samples after their files were dropped from the page
            cache, or None if no file could be dropped.
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
        """Time that storage adds per sample: cold minus warm (DS-Analyzer). None if unknown."""
        return None if self.cold_wall_ms is None else max(0.0, self.cold_wall_ms - self.wall_ms)

    @property
    def wait_ms(self) -> float:
        """Time spent waiting although files are in memory: sleep, locks or the network."""
        return max(0.0, self.wall_ms - self.cpu_ms)


class LoaderPoint(Record):
    """Measurement of a DataLoader without training, at one setting in steady state.

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
        """Return True if the time per sample of `other` is outside the interval of this point."""
        i, batch_ms = self.interval_ms, other.batch_ms * self.batch_size / other.batch_size
        return i is None or not i.low <= batch_ms <= i.high


class Stage(Record):
    """Part of ``__getitem__`` and its time in ms per sample, without nested parts.

    Attributes:
        random: True if the output depends on random numbers, so the part must run in training. None
            if that was not checked.
        offline: True if this part and everything before it are deterministic, so the part could be
            precomputed.
    """

    name: str
    kind: str
    wall_ms: float
    cpu_ms: float | None = None
    random: bool | None = None
    offline: bool = False


class LoaderMeasurement(Record):
    """Measurement of a data loader.

    `points` differ only in the number of workers. `variants` have the recommended number of workers
    and differ in one other setting.
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

    def epoch_s(self, step_ms: float) -> float:
        """Convert milliseconds per step to seconds per epoch."""
        return self.steps_per_epoch * step_ms / 1e3

    @property
    def offline_ms(self) -> float:
        """Time per sample that precomputing could save, without the time to read samples back."""
        return sum(s.wall_ms for s in self.stages if s.offline)

    def share_of(self, stage: Stage) -> float:
        """Return the share of a stage in the time of all stages."""
        total = sum(s.wall_ms for s in self.stages)
        return stage.wall_ms / total if total else 0.0

    def point(self, workers: int) -> LoaderPoint:
        """Return the measurement with this number of workers."""
        return next(p for p in self.points if p.workers == workers)


def measure_loader(conditions: LoaderConditions) -> LoaderMeasurement:
    """Measure a DataLoader without training, over its settings, and the parts of a sample.

    The measurement runs in a fresh process, so a dataset that crashes or hangs does not affect this
    process.

    Raises:
        TrainpaceError: If the target has no samples.
        UserCodeError: If the target's code raises an exception.
        TimedOut: If the target's code hangs.
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
    """Measure the cost of loading for each batch size.

    Args:
        task: Target with the dataset.
        shards: Folder of precomputed samples to read instead of the dataset, if given.
        batch_sizes: Batch sizes to measure.
        workers: True to measure sending a batch from a worker as well.
        seed: Seed for the choice of samples.
        timeout_s: Time limit of the measurement.
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
    """Advice on the number of workers: the smallest one within 5% of the best step time.

    Attributes:
        compute_ms: Time of a step without data. If None, only the loader was measured, times are
            per batch, and at least one worker is advised.
        workers_now: Current number of workers, 0 if not given.
        saved_s_per_epoch: Saving without the time to start workers.
        limit: What limits the step time with the advised workers (see `limit_of`).
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
    """Compare the measured numbers of workers, and advise one.

    Args:
        m: Measurement of the loader.
        compute_ms: Time of a step without data, if known.
        compute_cores: Number of cores that the compute keeps busy.
    """
    cores = min(compute_cores, m.cores) if compute_ms else 0.0
    compute = compute_ms or 0.0
    costs = {
        # Scale the cost so that the model gives the measured batch time.
        p.workers: m.cost.times(p.batch_ms / max(batch_ms(m.cost, p.workers, m.cores), 1e-9))
        for p in m.points
    }
    steps = {w: step_ms(cost, compute, w, m.cores, cores) for w, cost in costs.items()}
    now = m.given_workers or 0
    if now not in steps:
        now = min(steps)
    # Without workers, loading and computing do not overlap. The loader's time alone does not show
    # this, so advise at least one worker.
    needs_one = compute_ms is None and now > 0
    chosen, saved_s, worth_it = _choose_workers(m, steps, now, int(needs_one))
    startup_s = m.point(chosen).startup_s
    slow_start = startup_s > STARTUP_SHARE * m.epoch_s(steps[chosen])
    return LoaderAdvice(
        compute_ms=compute_ms,
        compute_cores=cores,
        workers_now=now,
        workers=chosen,
        now_ms=steps[now],
        step_ms=steps[chosen],
        step_ms_by_workers=steps,
        saved_s_per_epoch=saved_s,
        epoch_now_s=m.epoch_s(steps[now]),
        startup_s=startup_s,
        worth_it=worth_it,
        keep_workers=chosen > 0 and not m.given_persistent and slow_start,
        limit=limit_of(costs[chosen], compute, chosen, m.cores, cores),
        offline_ms=m.offline_ms,
        offline_share=sum(m.share_of(s) for s in m.stages if s.offline),
    )


def _choose_workers(
    m: LoaderMeasurement, steps: Mapping[int, float], now: int, least: int
) -> tuple[int, float, bool]:
    """Return (advised number of workers, seconds saved per epoch, True if that is worthwhile)."""
    fewest = fewest_workers({w: ms for w, ms in steps.items() if w >= least})
    extra_start_s = m.point(fewest).startup_s - m.point(now).startup_s
    saved_s = m.epoch_s(steps[now] - steps[fewest]) - extra_start_s
    worth_it = fewest != now and saved_s > WORTH_SHARE * m.epoch_s(steps[now])
    return fewest if worth_it or fewest < now else now, saved_s, worth_it


Pair = tuple[float, float]


class ComparedTimes(Record):
    """Times per sample in ms of one part in two loaders, with 0 for a missing part.

    `is_noise` is True if the difference is within the noise.
    """

    name: str
    ms: Pair
    is_noise: bool = False

    @property
    def more_ms(self) -> float:
        """Time that the second loader takes longer, in ms."""
        return self.ms[1] - self.ms[0]


class LoaderComparison(Record):
    """Comparison of two loaders by their times per sample in ms.

    Attributes:
        parts: Parts of a sample made on one thread. They decide which loader is slower, because
            they do not include the time of other processes.
        alone: Time of each loader without training, for the numbers of workers that both were
            measured with.
        slower: Index of the slower loader, 0 or 1.
        through: Part that causes most of the difference.
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
        """True if the times per sample differ by at most `TOLERANCE`."""
        return min(self.sample_ms) * (1 + TOLERANCE) >= max(self.sample_ms)

    @property
    def through(self) -> ComparedTimes:
        return max(self.parts, key=lambda part: part.more_ms if self.slower else -part.more_ms)


def compare_loaders(a: LoaderMeasurement, b: LoaderMeasurement) -> LoaderComparison:
    """Compare two loaders by the times of the parts of a sample."""
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
