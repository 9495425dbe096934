"""Changes to data loading: the number of workers, samples prepared offline, and whole batches."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.shares import Advice, Split, advice, of_trial
from trainpace.measure import LoaderCost, step_ms
from trainpace.watch import Rank, batches_per_step

MANY_WORKERS = 16
SEND_MS = HANDOVER_MS = 0.5
"""Least time for a worker to send a batch and for the training process to receive it (on two
cores)."""
LEAST_BATCH_MS = 1.0
"""Batches that are made faster are not worth preparing offline."""
READ_BACK_MS = 0.05
"""Samples that take less are not read back from shards any faster. A judgement: rows of three
tensors, of 0.003 ms each, took three times as long from shards, as trainpace precompute
--estimate predicted."""
LEAST_WHOLE = 16
"""Least number of samples in a batch for advice on calls per sample."""
LEAST_CORES = 0.2
"""Workers that keep less of a core busy do not slow anything down noticeably."""
WORKER_START_MS, SHORT_EPOCH = 50.0, 10
"""Time from a loader's iter() to a worker's first sample, per worker, and how many times longer an
epoch is if that can be ignored. Judgements: ten workers took 200 ms to start beside PointNet,
one took longer beside a graph network."""


def loader_cost(rank: Rank) -> LoaderCost | None:
    """Return the cost of a batch as observed in workers or in the training process."""
    if rank.fetch is None:
        return None
    batch = round(rank.samples_per_step / batches_per_step(rank))
    return LoaderCost(
        sample_wall_ms=rank.fetch.sample_wall_ms,
        sample_cpu_ms=rank.fetch.sample_cpu_ms,
        collate_ms=rank.fetch.collate_ms,
        batch_size=batch or (rank.loader and rank.loader.batch_size) or 1,
    )


def _compute_ms(rank: Rank, split: Split) -> float:
    """Return a micro-step without its data: with a cached batch, or the rest after the other
    parts."""
    cached = [b.step_ms for b in of_trial(rank, "cached_batch")]
    occasional = sum(split.by_cause[c] for c in ("checkpoint", "evaluation", "trainpace"))
    rest = rank.step_ms - occasional - rank.parts_ms["data"] - rank.parts_ms["loader_start"]
    return max(0.0, fmean(cached) if cached else rest) / batches_per_step(rank)


def _cores(ranks: Sequence[Rank]) -> float:
    return max(1.0, ranks[0].cpus / sum(r.host == ranks[0].host for r in ranks))


def with_workers_ms(ranks: Sequence[Rank], split: Split, workers: int) -> float:
    """Return a step, without occasional parts, with this number of workers.

    Fetch costs must be known.
    """
    rank, cost = ranks[0], loader_cost(ranks[0])
    assert cost is not None
    if not rank.loader or not rank.loader.workers:
        cost = replace(cost, send_ms=SEND_MS, handover_ms=HANDOVER_MS)
    cores = _cores(ranks)
    # threads wait for each other at the end of every operator, so they keep at least one core busy
    fills = not rank.accelerator and rank.threads >= cores
    one = step_ms(cost, _compute_ms(rank, split), workers, cores, cores if fills else 1.0)
    return one * batches_per_step(rank)


def fewest_workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The fewest workers that make steps as short as any number of workers can."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    # a worker does not help if threads already wait for the cores
    if cost is None or rank.loader is None or split.by_cause["threads"]:
        return
    now, waiting = rank.loader.workers, rank.parts_ms["data"]
    computing = _compute_ms(rank, split) * batches_per_step(rank)
    start = 0.0 if now else _worker_start_ms(rank)
    by_workers = {
        w: with_workers_ms(ranks, split, w) + w * start
        for w in range(1, max(MANY_WORKERS, now + 1) + 1)
    }
    best = min(by_workers.values())
    fewest = max(min(w for w, ms in by_workers.items() if ms <= 1.03 * best), now + 1)
    # another worker does not shorten a wait that samples and workers do not explain
    measured = min(
        computing + waiting, by_workers[now] if now else with_workers_ms(ranks, split, 0)
    )
    yield advice(
        split,
        "data",
        max(0.0, min(measured - by_workers[fewest], waiting)),
        title=f"{fewest} loader worker{'s' if fewest > 1 else ''} instead of {now}",
        how=(
            f"DataLoader(num_workers={fewest}):"
            f" {_limits(ranks, cost, fewest, by_workers[fewest], best > 1.05 * computing)}."
        ),
        basis=(
            "the slower of data and compute, from the times of samples and of steps with a cached"
            " batch"
        ),
        num_workers=fewest,
    )


def _limits(
    ranks: Sequence[Rank], cost: LoaderCost, workers: int, step_ms: float, data_bound: bool
) -> str:
    wall, cpu = format_number(cost.sample_wall_ms), format_number(cost.sample_cpu_ms)
    why = f"a sample takes {wall} ms, {cpu} of them on a core"
    if _joins_longer(cost):
        why = f"collating a batch takes {format_number(cost.collate_ms)} ms, more than its samples"
    cores = _cores(ranks)
    if data_bound and cost.sample_wall_ms * cost.batch_size / workers < step_ms * 0.97:
        why += f"; then the rank's {'core is' if cores == 1 else f'{cores:g} cores are'} the limit"
    return why


def no_workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Batches made by the training process, if workers cost more than they save.

    Workers start in every epoch, hand each batch over, and compute on the model's cores. Only steps
    with a cached batch show what a step takes without them.
    """
    rank, cost = ranks[0], loader_cost(ranks[0])
    now = rank.loader.workers if rank.loader is not None else 0
    if cost is None or not now or not of_trial(rank, "cached_batch"):
        return
    computing = _compute_ms(rank, split) * batches_per_step(rank)
    alone = with_workers_ms(ranks, split, 0)
    beside = split.by_cause["data"] + split.by_cause["contention"]
    yield advice(
        split,
        "data",
        max(0.0, computing + beside - alone),
        title=f"no loader workers instead of {now}",
        how=(
            "DataLoader(num_workers=0): the training process would spend"
            f" {format_number(alone - computing)} ms per step on loading samples itself, if each"
            f" takes as long as it does now. With {now} worker{'s' if now > 1 else ''} a step loses"
            f" {format_number(beside)} ms: it waits for batches and for the workers to start, and"
            " they compete for its cores."
        ),
        basis="steps with a cached batch, and the time of samples",
        ceiling_ms=beside,
        num_workers=0,
    )


def offline(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Samples from shards, if making them takes longer than reading them back."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None or rank.loader.samples_in_dataset is None:
        return
    joins_longer, slowed = _joins_longer(cost), _slowed_by_workers(ranks, split)
    batch = cost.sample_wall_ms * cost.batch_size + cost.collate_ms
    # torch joins rows of shards no faster than any others
    cheap = cost.sample_wall_ms <= READ_BACK_MS and (rank.loader.one_by_one or not joins_longer)
    if cheap or batch <= max(LEAST_BATCH_MS, 0.05 * _compute_ms(rank, split)):
        return
    joining = cost.collate_ms * batches_per_step(rank)
    remains = 0.0 if rank.loader.workers or joins_longer else joining
    first = " First move the work of the collate function on each sample into the dataset."
    yield advice(
        split,
        "data",
        max(0.0, rank.parts_ms["data"] - remains) + slowed,
        title="prepare samples once, offline",
        how=(
            "Random steps such as augmentation must stay in the training, and their time is not"
            " saved. trainpace precompute FILE.py:NAME writes everything else to shards; NAME is a"
            " function without arguments that returns your"
            f" {rank.loader.dataset.rpartition('.')[2]} without the random steps. Add --estimate to"
            f" see the cost first.{first if joins_longer else ''}"
        ),
        basis=(
            "the wait for data minus collating, plus the time by which workers slow down computing;"
            " reading shards and random augmentation would still take time"
        ),
        ceiling_ms=max(split.by_cause["data"], 0.0) + slowed,
        at_most=True,
        precompute="yes",
    )


def whole_batches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """One call of the dataset per batch, if samples take less than the calls and collating do."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None or not rank.loader.one_by_one:
        return
    if cost.sample_wall_ms >= READ_BACK_MS or cost.batch_size < LEAST_WHOLE:
        return
    yield advice(
        split,
        "data",
        rank.parts_ms["data"],
        title="fetch a whole batch with one indexing call",
        how=(
            f"A sample takes {format_number(1000 * cost.sample_wall_ms)} us, joining"
            f" {cost.batch_size} of them {format_number(cost.collate_ms)} ms. If samples are rows"
            " of tensors in memory, one indexing call can fetch the batch: give the dataset a"
            " __getitems__(self, indices) that returns those rows as tensors, and the DataLoader a"
            " collate_fn that returns its argument unchanged."
        ),
        basis="the wait for data; the time to read and copy the rows remains",
        ceiling_ms=rank.parts_ms["data"],
        at_most=True,
        whole_batches="yes",
    )


def worker_start(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    starts, loader = fmean(r.parts_ms["loader_start"] for r in ranks), ranks[0].loader
    if loader is not None and loader.workers and not loader.persistent_workers:
        yield advice(
            split,
            "data",
            starts,
            title="keep the loader's workers between epochs",
            how=(
                "DataLoader(persistent_workers=True), on a loader that is made once, starts them"
                " once."
            ),
            basis="time that starting the loader took in the recorded steps",
            ceiling_ms=starts,
            persistent_workers="true",
        )


def _joins_longer(cost: LoaderCost) -> bool:
    """Return True if collating a batch takes longer than making its samples."""
    return cost.collate_ms > cost.sample_wall_ms * cost.batch_size


def _worker_start_ms(rank: Rank) -> float:
    """Return what starting a worker in each epoch adds to a step, or 0 for long or unknown
    epochs."""
    batches = rank.loader.batches if rank.loader is not None else None
    steps = batches / batches_per_step(rank) if batches else math.inf
    return WORKER_START_MS / steps if steps * rank.step_ms < SHORT_EPOCH * WORKER_START_MS else 0.0


def _slowed_by_workers(ranks: Sequence[Rank], split: Split) -> float:
    """Return what loader workers add to computing: as measured without them, or by their share of
    cores."""
    if any(of_trial(r, "cached_batch") for r in ranks):
        return split.by_cause["contention"]
    return split.by_cause["compute"] * crowding_cores(ranks) / ranks[0].cpus


def crowding_cores(ranks: Sequence[Rank]) -> float:
    """Return how many cores loader workers keep busy that the model's threads need, or 0 if all
    fit."""
    first = ranks[0]
    here = [r for r in ranks if r.host == first.host]
    busy = math.fsum(map(_worker_cores, here))
    threads = min(sum(r.threads for r in here), first.cpus)
    crowded = busy >= LEAST_CORES and busy + threads > first.cpus
    return min(busy, float(first.cpus)) if crowded else 0.0


def _worker_cores(rank: Rank) -> float:
    """Return how many cores a rank's workers keep busy beside a model that computes on the CPU."""
    cost = loader_cost(rank)
    if cost is None or not rank.loader or not rank.loader.workers or rank.accelerator:
        return 0.0
    batch_ms = cost.batch_size * cost.sample_cpu_ms + cost.collate_ms
    return batch_ms * batches_per_step(rank) / rank.step_ms if rank.step_ms > 0 else 0.0
