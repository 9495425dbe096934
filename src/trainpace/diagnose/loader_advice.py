"""Rules that suggest changes to data loading.

The changes are the number of workers, samples prepared offline, and fetching whole batches.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.shares import Advice, Split, advice, of_trial, same_host
from trainpace.measure import LoaderCost, step_ms
from trainpace.watch import Rank, batches_per_step, steps_per_epoch

MANY_WORKERS = 16
SEND_MS = HANDOVER_MS = 0.5
"""Time for a worker to send a batch and for the training process to receive it, in milliseconds.

These are lower limits, measured on two cores.
"""
LEAST_BATCH_MS = 1.0
"""Minimum time to make a batch for advice to prepare samples offline."""
READ_BACK_MS = 0.05
"""Time to read a sample back from a shard, in milliseconds. Chosen by hand.

Samples that take less time to make are not faster from shards. Rows of three tensors, of 0.003 ms
each, took three times as long from shards, as trainpace precompute --estimate predicted.
"""
LEAST_WHOLE = 16
"""Minimum number of samples in a batch for advice on fetching whole batches."""
LEAST_CORES = 0.2
"""Minimum number of busy cores at which loader workers slow down the training noticeably."""
WORKER_START_MS, SHORT_EPOCH = 50.0, 10
"""Start time of one loader worker, and the length of a short epoch in multiples of that time.

The start lasts from the loader's iter() to the worker's first sample. In longer epochs, it is
ignored. Chosen by hand: with PointNet, ten workers took 200 ms to start; with a graph network, one
worker took longer than that.
"""


def loader_cost(rank: Rank) -> LoaderCost | None:
    """Return the measured cost of loading a batch, or None if fetches were not timed.

    If the training process loads the data, waits for a core are subtracted, because they depend on
    the machine. Loader workers' waits for a core are included.
    """
    if rank.fetch is None:
        return None
    batch = round(rank.samples_per_step / batches_per_step(rank))
    return LoaderCost(
        sample_wall_ms=rank.fetch.sample_wall_ms - core_wait_ms(rank),
        sample_cpu_ms=rank.fetch.sample_cpu_ms,
        collate_ms=rank.fetch.collate_ms,
        batch_size=batch or (rank.loader and rank.loader.batch_size) or 1,
    )


def core_wait_ms(rank: Rank) -> float:
    """Return the time per sample that the training process waits for a core while it loads."""
    fetch, share = rank.fetch, min(rank.delayed_share, 0.999)
    if fetch is None or fetch.in_workers:
        return 0.0
    waiting_ms = max(0.0, fetch.sample_wall_ms - fetch.sample_cpu_ms)
    return min(waiting_ms, fetch.sample_cpu_ms * share / (1 - share))


def _compute_ms(rank: Rank, split: Split) -> float:
    """Return the time of a micro-step without data loading, in ms.

    It comes from steps with a cached batch. Without them, data loading and occasional parts are
    subtracted from the mean step.
    """
    cached = [b.step_ms for b in of_trial(rank, "cached_batch")]
    occasional = sum(split.by_cause[c] for c in ("checkpoint", "evaluation", "trainpace"))
    rest = rank.step_ms - occasional - rank.parts_ms["data"] - rank.parts_ms["loader_start"]
    return max(0.0, fmean(cached) if cached else rest) / batches_per_step(rank)


def _cores(ranks: Sequence[Rank]) -> float:
    return max(1.0, ranks[0].cpus / len(same_host(ranks)))


def with_workers_ms(ranks: Sequence[Rank], split: Split, workers: int) -> float:
    """Predict the step time in ms with this number of loader workers.

    Evaluation and other occasional parts are not included. `loader_cost` must be known.
    """
    rank, cost = ranks[0], loader_cost(ranks[0])
    assert cost is not None
    if not rank.loader or not rank.loader.workers:
        # Workers share the wait for storage, but each waits for a core as long as now.
        wait_ms = core_wait_ms(rank)
        cost = replace(
            cost,
            sample_wall_ms=cost.sample_wall_ms + wait_ms,
            sample_cpu_ms=cost.sample_cpu_ms + wait_ms,
            send_ms=SEND_MS,
            handover_ms=HANDOVER_MS,
        )
    cores = _cores(ranks)
    # Threads wait for each other at the end of every operator. If there are as many threads as
    # cores, a worker therefore slows the model down on any core.
    fills = not rank.accelerator and rank.threads >= cores
    one = step_ms(cost, _compute_ms(rank, split), workers, cores, cores if fills else 1.0)
    return one * batches_per_step(rank)


def fewest_workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Suggest the smallest number of workers with a step within 3% of the shortest."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    # A worker does not help if threads already wait for the cores.
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
    # If the measured wait exceeds the model's prediction, more workers do not shorten the excess.
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
    """Suggest loading in the training process, if workers cost more than they save.

    Workers start in every epoch, hand each batch over, and compute on the model's cores. The rule
    needs steps with a cached batch, which show the step time without workers.
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
    """Suggest to store samples in shards, if making them takes longer than reading them back."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None or rank.loader.samples_in_dataset is None:
        return
    joins_longer, slowed = _joins_longer(cost), _slowed_by_workers(ranks, split)
    batch = cost.sample_wall_ms * cost.batch_size + cost.collate_ms
    # Collating samples takes equally long if they come from shards.
    cheap = cost.sample_wall_ms <= READ_BACK_MS and (rank.loader.one_by_one or not joins_longer)
    if cheap or batch <= max(LEAST_BATCH_MS, 0.05 * _compute_ms(rank, split)):
        return
    how = _how_to_precompute(rank)
    remains = 0.0 if rank.loader.workers else cost.collate_ms * batches_per_step(rank)
    if joins_longer:
        remains = 0.0
        how += " First move the work of the collate function on each sample into the dataset."
    yield advice(
        split,
        "data",
        max(0.0, rank.parts_ms["data"] - remains) + slowed,
        title="prepare samples once, offline",
        how=how,
        basis=(
            "the wait for data minus collating, plus the time by which workers slow down computing;"
            " reading shards and random augmentation would still take time"
        ),
        ceiling_ms=max(split.by_cause["data"], 0.0) + slowed,
        at_most=True,
        precompute="yes",
    )


def _how_to_precompute(rank: Rank) -> str:
    random, rest, without = "", "the samples", ""
    if rank.random_samples is not False:
        rest, without = "everything else", " without the random steps"
        random = (
            "Random steps such as augmentation must stay in the training, and their time is not"
            " saved. "
        )
    dataset = "" if rank.loader is None else rank.loader.dataset.rpartition(".")[2]
    return (
        f"{random}trainpace precompute FILE.py:NAME writes {rest} to shards; NAME is a function"
        f" without arguments that returns your {dataset}{without}. Add --estimate to see the cost"
        " first."
    )


def arrays(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Suggest arrays in place of Python lists, if collating turns long lists into tensors."""
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or not rank.listed_numbers:
        return
    yield advice(
        split,
        "data",
        rank.parts_ms["data"],
        title="arrays instead of Python lists in a sample",
        how=(
            f"A sample holds {rank.listed_numbers:,} numbers in Python lists, and collate_fn"
            " converts them one by one. Return NumPy arrays or tensors from the dataset"
            ' (Hugging Face datasets: dataset.with_format("numpy")).'
        ),
        basis="the wait for data; reading and copying the arrays remains",
        ceiling_ms=rank.parts_ms["data"],
        at_most=True,
        arrays="yes",
    )


def whole_batches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Suggest one dataset call per batch, if calls and collating cost more than the samples."""
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
    """Suggest to keep the workers between epochs."""
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
    """Return the time that starting a worker in each epoch adds to a step, in ms.

    Returns 0 if the epoch is long or its length is unknown.
    """
    steps = steps_per_epoch(rank) or math.inf
    return WORKER_START_MS / steps if steps * rank.step_ms < SHORT_EPOCH * WORKER_START_MS else 0.0


def _slowed_by_workers(ranks: Sequence[Rank], split: Split) -> float:
    """Return the time that loader workers add to computing, in ms per step.

    It was measured if steps with a cached batch ran. Otherwise, it is estimated from the share of
    cores that the workers keep busy.
    """
    if any(of_trial(r, "cached_batch") for r in ranks):
        return split.by_cause["contention"]
    return split.by_cause["compute"] * crowding_cores(ranks) / ranks[0].cpus


def crowding_cores(ranks: Sequence[Rank]) -> float:
    """Return the number of cores that loader workers keep busy on the host of the first rank.

    Returns 0 if the cores suffice for the workers and the model's threads.
    """
    first, here = ranks[0], same_host(ranks)
    busy = math.fsum(map(_worker_cores, here))
    threads = min(sum(r.threads for r in here), first.cpus)
    crowded = busy >= LEAST_CORES and busy + threads > first.cpus
    return min(busy, float(first.cpus)) if crowded else 0.0


def _worker_cores(rank: Rank) -> float:
    """Return the number of cores that a rank's loader workers keep busy.

    Returns 0 if the rank trains on an accelerator, because its host cores are free for the workers.
    """
    cost = loader_cost(rank)
    if cost is None or not rank.loader or not rank.loader.workers or rank.accelerator:
        return 0.0
    batch_ms = cost.batch_size * cost.sample_cpu_ms + cost.collate_ms
    return batch_ms * batches_per_step(rank) / rank.step_ms if rank.step_ms > 0 else 0.0
