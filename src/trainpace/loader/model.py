"""Step time as the later of data and compute: what more workers can bring, from the cost of one sample.

Data and compute are a pipeline; the slowest stage sets its pace (DS-Analyzer: Mohan, Phanishayee, Raniwala, Chidambaram,
"Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, section 4). Beyond that model, waiting and computing are told
apart: w workers wait for storage w at a time, but compute on no more cores than there are. Known departures: it is a lower bound,
which queues of finite length (prefetch_factor) reach only where samples cost about the same; memory bandwidth, hyper-threads and
the clocks that many busy cores lower are not in it.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.records import Record

TOLERANCE = 0.05
"""A setting within this share of the best is as good: the difference is noise on most machines."""


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
        times = (self.sample_wall_ms, self.sample_cpu_ms, self.collate_ms, self.send_ms, self.handover_ms)
        if not all(0 <= t < float("inf") for t in times) or self.batch_size < 1:
            raise TrainpaceError("the costs of a loader are times of 0 ms or more, and its batch size is 1 or more.")

    def of_batch(self, batch_size: int) -> "LoaderCost":
        """The cost of another batch: what is done once a batch grows with its size."""
        share = batch_size / self.batch_size
        return replace(
            self, batch_size=batch_size, collate_ms=self.collate_ms * share, send_ms=self.send_ms * share,
            handover_ms=self.handover_ms * share,
        )  # fmt: skip


def batch_ms(cost: LoaderCost, workers: int, cores: float) -> float:
    """Time from one batch to the next while only the loader runs; with 0 workers it runs in the main process."""
    return step_ms(cost, 0.0, workers, cores)


def step_ms(cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0) -> float:
    """Time of a training step that computes for `compute_ms` on its own.

    0 workers: data and compute in series. Otherwise the latest of: the main process (compute and handover), the workers side by
    side, and all CPU work shared by `cores`. `compute_cores`: how many of the cores the compute itself keeps busy (the threads of
    training on the CPU; about 1 for the host of a GPU, 0 where the compute is elsewhere).
    """
    if not (workers >= 0 and cores > 0 and compute_ms >= 0 and 0 <= compute_cores <= cores):
        raise TrainpaceError(
            "a step needs workers and ms of 0 or more, and cores for its compute among those there are."
        )
    sample_ms = max(cost.sample_wall_ms, cost.sample_cpu_ms / cores)
    if workers == 0:
        return cost.batch_size * sample_ms + cost.collate_ms + compute_ms
    once_ms = cost.collate_ms + cost.send_ms
    cpu_ms = cost.batch_size * cost.sample_cpu_ms + once_ms + cost.handover_ms + compute_ms * compute_cores
    worker_ms = cost.batch_size * sample_ms + once_ms
    return max(compute_ms + cost.handover_ms, worker_ms / workers, cpu_ms / cores)


def limit_of(cost: LoaderCost, compute_ms: float, workers: int, cores: float, compute_cores: float = 0.0) -> str:
    """What sets the pace: ``series`` (no workers), ``compute``, ``workers`` (more of them help) or ``cores`` (they do not)."""
    total = step_ms(cost, compute_ms, workers, cores, compute_cores)
    if workers == 0:
        return "series"
    if total <= compute_ms + cost.handover_ms:
        return "compute"
    more = step_ms(cost, compute_ms, workers + 1, cores, compute_cores)
    return "workers" if more < total else "cores"


def fewest_workers(step_ms_by_workers: Mapping[int, float], tolerance: float = TOLERANCE) -> int:
    """The fewest workers whose step is within `tolerance` of the best."""
    if not step_ms_by_workers:
        raise TrainpaceError("no number of workers was measured.")
    best = min(step_ms_by_workers.values())
    return min(w for w, ms in step_ms_by_workers.items() if ms <= best * (1 + tolerance))
