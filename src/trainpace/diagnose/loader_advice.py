"""How the loader makes its batches: by how many workers, ready from shards, or as a whole."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.shares import Advice, Split
from trainpace.measure import LoaderCost, step_ms
from trainpace.watch import Rank, batches_per_step

MANY_WORKERS = 16
SEND_MS = HANDOVER_MS = 0.5
"""The least time for a worker to send a batch and for the training process to receive it (measured on two cores)."""
LEAST_BATCH_MS = 1.0
"""A batch that is made faster than this is not worth preparing offline."""
READ_BACK_MS = 0.05
"""A sample that takes less is not read back from shards any faster. A judgement: rows of three tensors, of 0.003 ms each, took
three times as long from shards, as trainpace precompute --estimate said."""
LEAST_WHOLE = 16
"""Samples of a batch from which on calling for each of them is worth a word."""
LEAST_CORES = 0.2
"""Workers that keep less of a core busy slow nothing down that could be noticed."""
WORKER_START_MS, SHORT_EPOCH = 50.0, 10
"""From a loader's iter() to the first sample in a worker, for each of them, and how many times as long an epoch is at least where
that can be left out. Judgements: ten workers took 200 ms to start beside PointNet, one took longer beside a graph network."""


def loader_cost(rank: Rank) -> LoaderCost | None:
    """The loader's cost of a batch, in workers or in the training process, as observed during training."""
    if rank.fetch is None:
        return None
    batch = (
        round(rank.samples_per_step / batches_per_step(rank))
        or (rank.loader and rank.loader.batch_size)
        or 1
    )
    return LoaderCost(
        sample_wall_ms=rank.fetch.sample_wall_ms,
        sample_cpu_ms=rank.fetch.sample_cpu_ms,
        collate_ms=rank.fetch.collate_ms,
        batch_size=batch,
    )


def compute_ms(rank: Rank, split: Split) -> float:
    """A micro-step without its data: measured with a cached batch, else the remainder after the other parts."""
    blocks = [b.step_ms for b in rank.blocks if b.trial == "cached_batch"]
    occasional = (
        split.by_cause["checkpoint"] + split.by_cause["evaluation"] + split.by_cause["trainpace"]
    )
    rest = rank.step_ms - occasional - rank.parts_ms["data"] - rank.parts_ms["loader_start"]
    return max(0.0, fmean(blocks) if blocks else rest) / batches_per_step(rank)


def _cores(ranks: Sequence[Rank]) -> float:
    return max(1.0, ranks[0].cpus / sum(r.host == ranks[0].host for r in ranks))


def with_workers_ms(ranks: Sequence[Rank], split: Split, workers: int) -> float:
    """A step, without occasional parts, if its loader had this many workers. The recording must have fetch costs."""
    cost = loader_cost(ranks[0])
    assert cost is not None
    if not ranks[0].loader or not ranks[0].loader.workers:
        cost = replace(cost, send_ms=SEND_MS, handover_ms=HANDOVER_MS)
    computing_ms, cores = compute_ms(ranks[0], split), _cores(ranks)
    # threads of a computation wait for each other at its ends, so that one core is what it keeps busy at least
    fills = not ranks[0].accelerator and ranks[0].threads >= cores
    return step_ms(cost, computing_ms, workers, cores, cores if fills else 1.0) * batches_per_step(
        ranks[0]
    )


def fewest_workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The fewest workers of those that make steps as short as any number can."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    # on cores that threads wait for already, a worker helps nobody
    if cost is None or rank.loader is None or split.by_cause["threads"]:
        return
    cores = _cores(ranks)
    compute, micro = compute_ms(rank, split), batches_per_step(rank)
    now = rank.loader.workers
    start = _worker_start_ms(rank) if not now else 0.0
    by_workers = {
        w: with_workers_ms(ranks, split, w) + w * start
        for w in range(1, max(MANY_WORKERS, now + 1) + 1)
    }
    waiting = rank.parts_ms["data"]
    measured = compute * micro + waiting
    best = min(by_workers.values())
    fewest = min(w for w, ms in by_workers.items() if ms <= 1.03 * best)
    if now and fewest <= now:
        fewest = now + 1
    # what the wait is longer than samples and workers explain, another worker does not shorten
    measured = min(measured, by_workers[now] if now else with_workers_ms(ranks, split, 0))
    limited = cost.sample_wall_ms * cost.batch_size / fewest < by_workers[fewest] * 0.97
    wall, cpu = format_number(cost.sample_wall_ms), format_number(cost.sample_cpu_ms)
    why = f"a sample takes {wall} ms, {cpu} of them on a core"
    if _joins_longer(cost):
        why = f"collating a batch takes {format_number(cost.collate_ms)} ms, more than its samples"
    if limited and best > 1.05 * compute * micro:
        why += (
            f"; then the {cores:g} cores of a rank are the limit"
            if cores != 1
            else "; then the rank's core is the limit"
        )
    yield Advice(
        cause="data",
        title=f"{fewest} loader worker{'s' if fewest > 1 else ''} instead of {now}",
        how=f"DataLoader(num_workers={fewest}): {why}.",
        saves_ms=max(0.0, min(measured - by_workers[fewest], waiting)),
        ceiling_ms=max(split.by_cause["data"], 0.0),
        basis=(
            "the slower of data and compute, from the times of samples and of steps with a cached"
            " batch"
        ),
        settings={"num_workers": fewest},
    )


def no_workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Batches made by the training process itself, where workers take longer: they start in every epoch, hand each batch over,
    and compute on the model's cores. Only where steps with a cached batch tell what a step takes without them.
    """
    rank, cost = ranks[0], loader_cost(ranks[0])
    now = rank.loader.workers if rank.loader is not None else 0
    if cost is None or not now or not any(b.trial == "cached_batch" for b in rank.blocks):
        return
    computing = compute_ms(rank, split) * batches_per_step(rank)
    alone = with_workers_ms(ranks, split, 0)
    beside = split.by_cause["data"] + split.by_cause["contention"]
    yield Advice(
        cause="data",
        title=f"no loader workers instead of {now}",
        how=(
            "DataLoader(num_workers=0): the training process would spend"
            f" {format_number(alone - computing)} ms a step on loading samples itself, if each"
            f" takes as long as it does now. With {now} worker{'s' if now > 1 else ''} a step loses"
            f" {format_number(beside)} ms: it waits for batches and for the workers to start, and"
            " they compete for its cores."
        ),
        saves_ms=max(0.0, computing + beside - alone),
        ceiling_ms=beside,
        basis="steps with a cached batch, and the time of samples",
        settings={"num_workers": 0},
    )


def offline(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Samples from shards, where making them takes longer than reading them back."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None or rank.loader.samples_in_dataset is None:
        return
    compute, micro = compute_ms(rank, split), batches_per_step(rank)
    joins_alone = not rank.loader.workers and not _joins_longer(cost)
    slowed = _slowed_by_workers(ranks, split)
    dataset = rank.loader.dataset.rpartition(".")[2]
    batch = cost.sample_wall_ms * cost.batch_size + cost.collate_ms
    # torch joins rows of shards no faster than any others
    cheap = cost.sample_wall_ms <= READ_BACK_MS and (
        rank.loader.one_by_one or not _joins_longer(cost)
    )
    if batch <= max(LEAST_BATCH_MS, 0.05 * compute) or cheap:
        return
    yield Advice(
        cause="data",
        title="prepare samples once, offline",
        how=(
            "Random steps such as augmentation must stay in the training, and their time is not"
            " saved. trainpace precompute FILE.py:NAME writes everything else to shards; NAME is a"
            f" function without arguments that returns your {dataset} without the random steps. Add"
            " --estimate to see the cost first."
        )
        + (
            " First move the work of the collate function on each sample into the dataset."
            if _joins_longer(cost)
            else ""
        ),
        saves_ms=max(0.0, rank.parts_ms["data"] - (cost.collate_ms * micro if joins_alone else 0.0))
        + slowed,
        ceiling_ms=max(split.by_cause["data"], 0.0) + slowed,
        basis=(
            "the wait for data minus collating, plus the time by which workers slow down computing;"
            " reading shards and random augmentation would still take time"
        ),
        settings={"precompute": "yes"},
        at_most=True,
    )


def whole_batches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """One call of the dataset for a batch, where samples take less than calling for each of them and joining them does."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None or not rank.loader.one_by_one:
        return
    waiting = rank.parts_ms["data"]
    if cost.sample_wall_ms >= READ_BACK_MS or cost.batch_size < LEAST_WHOLE:
        return
    yield Advice(
        cause="data",
        title="fetch a whole batch with one indexing call",
        how=(
            f"A sample takes {format_number(1000 * cost.sample_wall_ms)} us, joining"
            f" {cost.batch_size} of them {format_number(cost.collate_ms)} ms. Where samples are"
            " rows of tensors in memory, one indexing call can fetch the batch: give the dataset a"
            " __getitems__(self, indices) that returns those rows as tensors, and the DataLoader a"
            " collate_fn that returns its argument unchanged."
        ),
        saves_ms=waiting,
        ceiling_ms=waiting,
        basis="the wait for data, of which taking and copying the rows remains",
        settings={"whole_batches": "yes"},
        at_most=True,
    )


def _joins_longer(cost: LoaderCost) -> bool:
    """Whether collating a batch takes longer than its samples."""
    return cost.collate_ms > cost.sample_wall_ms * cost.batch_size


def _worker_start_ms(rank: Rank) -> float:
    """What starting a worker in each epoch adds to a step; 0 where epochs are long or nobody knows."""
    batches = rank.loader.batches if rank.loader is not None else None
    steps = batches / batches_per_step(rank) if batches else math.inf
    return WORKER_START_MS / steps if steps * rank.step_ms < SHORT_EPOCH * WORKER_START_MS else 0.0


def _slowed_by_workers(ranks: Sequence[Rank], split: Split) -> float:
    """What loader workers add to computing on their cores: as measured without them, or else by their share of the cores."""
    if any(b.trial == "cached_batch" for r in ranks for b in r.blocks):
        return split.by_cause["contention"]
    return split.by_cause["compute"] * crowding_cores(ranks) / ranks[0].cpus


def crowding_cores(ranks: Sequence[Rank]) -> float:
    """How many cores loader workers keep busy that the model's own threads need; 0 where there are cores for both."""
    busy, first = cores_of_workers(ranks), ranks[0]
    here = sum(r.threads for r in ranks if r.host == first.host)
    crowded = busy >= LEAST_CORES and busy + min(here, first.cpus) > first.cpus
    return min(busy, float(first.cpus)) if crowded else 0.0


def cores_of_workers(ranks: Sequence[Rank]) -> float:
    """How many cores loader workers keep busy beside computing on the same cores, of all ranks of the first one's host; 0 where
    there are no workers, or an accelerator computes."""
    here = [r for r in ranks if r.host == ranks[0].host]
    return math.fsum(_cores_of_its_workers(r) for r in here)


def _cores_of_its_workers(rank: Rank) -> float:
    cost = loader_cost(rank)
    if (
        cost is None
        or rank.loader is None
        or not rank.loader.workers
        or rank.accelerator
        or rank.step_ms <= 0
    ):
        return 0.0
    each_batch_ms = cost.batch_size * cost.sample_cpu_ms + cost.collate_ms
    return each_batch_ms * batches_per_step(rank) / rank.step_ms


def worker_start(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    starts = fmean(r.parts_ms["loader_start"] for r in ranks)
    loader = ranks[0].loader
    if loader is None or not loader.workers or loader.persistent_workers:
        return
    yield Advice(
        cause="data",
        title="keep the loader's workers between epochs",
        how="DataLoader(persistent_workers=True), on a loader that is made once, starts them once.",
        saves_ms=starts,
        ceiling_ms=starts,
        basis="time that starting the loader took in the recorded steps",
        settings={"persistent_workers": "true"},
    )
