"""Possible changes for each cause, with the milliseconds per step that each should save. Pure arithmetic on a recording."""

import math
import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.diagnose.changes import Advice
from trainpace.diagnose.device_advice import fuse, in_bf16, lower_precision
from trainpace.diagnose.dropout_advice import dropout_by_bytes
from trainpace.diagnose.launch_advice import fewer_launches, larger_batch
from trainpace.diagnose.padding_advice import less_padding
from trainpace.diagnose.shares import Split, part_ms, proof
from trainpace.diagnose.single_samples import together
from trainpace.diagnose.thread_advice import fewer_threads
from trainpace.loader import LoaderCost, step_ms
from trainpace.units import format_number
from trainpace.watch import Rank, batches_per_step

WORTH = 0.03
"""A change that saves a smaller share of the step than this is reported as not worth making."""
MANY_WORKERS = 16
SEND_MS = HANDOVER_MS = 0.5
"""The least time for a worker to send a batch and for the training process to receive it (measured on two cores)."""
LEAST_BATCH_MS = 1.0
"""A batch that is made faster than this is not worth preparing offline."""
LEAST_CORES = 0.2
"""Workers that keep less of a core busy slow nothing down that could be noticed."""
LESS_OFTEN = 10
ONCE_AN_EPOCH = 1.5
"""Fewer times an epoch than this is once."""
WORKER_START_MS, SHORT_EPOCH = 50.0, 10
"""From a loader's iter() to the first sample in a worker, for each of them, and how many times as long an epoch is at least where
that can be left out. Judgements: ten workers took 200 ms to start beside PointNet, one took longer beside a graph network."""
ONE_LINE, MOST_LINES = 0.2, 2
"""Of the script's own code, what is seen at one line, from which on that line is worth a word; and of how many lines."""


def advise(ranks: Sequence[Rank], split: Split) -> list[Advice]:
    """All changes for which the recording supports a figure, the largest saving first, including those that save nothing."""
    # one rank may wait longer than the mean of all, which is what its cause takes
    changes = [
        replace(a, saves_ms=min(a.saves_ms, a.ceiling_ms)) for advisor in ADVISORS for a in advisor(ranks, split)
    ]
    return sorted(changes, key=lambda a: -a.saves_ms)


def loader_cost(rank: Rank) -> LoaderCost | None:
    """The loader's cost of a batch, in workers or in the training process, as observed during training."""
    if rank.fetch is None:
        return None
    batch = round(rank.samples_per_step / batches_per_step(rank)) or (rank.loader and rank.loader.batch_size) or 1
    return LoaderCost(
        sample_wall_ms=rank.fetch.sample_wall_ms, sample_cpu_ms=rank.fetch.sample_cpu_ms,
        collate_ms=rank.fetch.collate_ms, batch_size=batch,
    )  # fmt: skip


def compute_ms(rank: Rank, split: Split) -> float:
    """A micro-step without its data: measured with a cached batch, else the remainder after the other parts."""
    blocks = [b.step_ms for b in rank.blocks if b.trial == "cached_batch"]
    occasional = split.by_cause["checkpoint"] + split.by_cause["evaluation"] + split.by_cause["trainpace"]
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
    return step_ms(cost, computing_ms, workers, cores, cores if fills else 1.0) * batches_per_step(ranks[0])


def _workers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank, cost = ranks[0], loader_cost(ranks[0])
    if cost is None or rank.loader is None:
        return
    cores = _cores(ranks)
    compute, micro = compute_ms(rank, split), batches_per_step(rank)
    now = rank.loader.workers
    start = _worker_start_ms(rank) if not now else 0.0
    by_workers = {w: with_workers_ms(ranks, split, w) + w * start for w in range(1, max(MANY_WORKERS, now + 1) + 1)}
    waiting = rank.parts_ms["data"]
    measured = compute * micro + waiting
    best = min(by_workers.values())
    fewest = min(w for w, ms in by_workers.items() if ms <= 1.03 * best)
    ceiling = max(split.by_cause["data"], 0.0)
    if now and fewest <= now:
        fewest = now + 1
    # what the wait is longer than samples and workers explain, another worker does not shorten
    measured = min(measured, by_workers[now] if now else with_workers_ms(ranks, split, 0))
    saves = max(0.0, min(measured - by_workers[fewest], waiting))
    limited = cost.sample_wall_ms * cost.batch_size / fewest < by_workers[fewest] * 0.97
    wall, cpu = format_number(cost.sample_wall_ms), format_number(cost.sample_cpu_ms)
    why = f"a sample takes {wall} ms, {cpu} of them on a core"
    if cost.collate_ms > cost.sample_wall_ms * cost.batch_size:
        why = f"collating a batch takes {format_number(cost.collate_ms)} ms, more than its samples"
    if limited and best > 1.05 * compute * micro:
        why += f"; then the {cores:g} core{'s' if cores != 1 else ''} of a rank are the limit"
    yield Advice(
        cause="data", title=f"{fewest} loader worker{'s' if fewest > 1 else ''} instead of {now}",
        how=f"DataLoader(num_workers={fewest}): {why}.",
        saves_ms=saves, ceiling_ms=ceiling,
        basis="the slower of data and compute, from the times of samples and of steps with a cached batch",
        settings={"num_workers": fewest},
    )  # fmt: skip
    stays = cost.collate_ms * micro if now == 0 and cost.collate_ms < cost.sample_wall_ms * cost.batch_size else 0.0
    slowed = _slowed_by_workers(ranks, split)
    offline = max(0.0, waiting - stays) + slowed
    dataset = rank.loader.dataset.rpartition(".")[2]
    batch = cost.sample_wall_ms * cost.batch_size + cost.collate_ms
    if rank.loader.samples_in_dataset is not None and batch > max(LEAST_BATCH_MS, 0.05 * compute):
        yield Advice(
            cause="data", title="prepare samples once, offline",
            how="What is random, such as augmentation, stays in the training and is not saved. trainpace precompute"
            f" FILE.py:NAME writes the rest into shards, where NAME is a function without arguments that returns your {dataset}"
            " without what is random; --estimate says first what that costs."
            + (" First move the work of the collate function on each sample into the dataset."
               if cost.collate_ms > cost.sample_wall_ms * cost.batch_size else ""),
            saves_ms=offline, ceiling_ms=ceiling + slowed,
            basis="the data wait without the remaining collate, and what workers slow down; reading shards and random"
            " augmentation remain as well",
            settings={"precompute": "yes"}, at_most=True,
        )  # fmt: skip


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
    if cost is None or rank.loader is None or not rank.loader.workers or rank.accelerator or rank.step_ms <= 0:
        return 0.0
    each_batch_ms = cost.batch_size * cost.sample_cpu_ms + cost.collate_ms
    return each_batch_ms * batches_per_step(rank) / rank.step_ms


def _worker_start(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    starts = fmean(r.parts_ms["loader_start"] for r in ranks)
    loader = ranks[0].loader
    if loader is None or not loader.workers or loader.persistent_workers:
        return
    yield Advice(
        cause="data", title="keep the loader's workers between epochs",
        how="DataLoader(persistent_workers=True), on a loader that is made once, starts them once.",
        saves_ms=starts, ceiling_ms=starts, basis="time that starting the loader took in the recorded steps",
        settings={"persistent_workers": "true"},
    )  # fmt: skip


def _transfers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    copies, tried = split.by_cause["host_to_device"], proof(ranks, "batch_on_device")
    if copies > 0:
        proved = tried is not None and tried.settles and tried.saved_ms > 0
        yield Advice(
            cause="host_to_device", title="copy less, and while the device computes",
            how="Send small types (uint8 images) and convert on the device; leave out copies of data that is already there."
            " pin_memory=True and .to(device, non_blocking=True) copy faster and let the host go on; kernels run meanwhile only"
            " where the next batch is copied in a stream of its own.",
            saves_ms=min(copies, tried.saved_ms) if tried is not None and proved else copies, ceiling_ms=copies,
            basis="steps with the batch left on the device" if proved else "time of the copies in the recorded steps",
        )  # fmt: skip


def _optimizer(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank, spent = ranks[0], split.by_cause["optimizer"]
    variants = dict(rank.optimizer_variants_ms)
    current = variants.pop("as it is", None)
    if current is None:
        return
    for name, ms in sorted(variants.items(), key=lambda item: item[1]):
        yield Advice(
            cause="optimizer", title=f"{rank.optimizer}({name})",
            how=f"Measured on copies of these parameters: {format_number(ms)} ms a step against {format_number(current)}.",
            saves_ms=max(0.0, min(current - ms, spent)), ceiling_ms=spent,
            basis="the same optimizer's other implementations, timed in the script's own process",
            settings={"optimizer": name},
        )  # fmt: skip


def _exchange(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    exposed, micro = split.by_cause["communication"], batches_per_step(ranks[0])
    if len(ranks) < 2 and ranks[0].world_size < 2:
        return
    if micro >= 2 and not ranks[0].skips_sync:
        yield Advice(
            cause="communication", title="exchange gradients once a step, not once a micro-step",
            how=f"Wrap the first {micro - 1:.0f} of {micro:.0f} micro-steps in model.no_sync() (accelerate: "
            "accelerator.accumulate(model)).",
            saves_ms=exposed * (micro - 1) / micro, ceiling_ms=exposed,
            basis="steps without exchange", settings={"no_sync": "yes"},
        )  # fmt: skip
        return
    yield Advice(
        cause="communication", title="accumulate twice as many micro-steps between exchanges",
        how="With model.no_sync() in all but the last (DeepSpeed and Trainer: gradient_accumulation_steps); it doubles the global"
        " batch unless the micro-batch or the number of ranks is halved. A faster link, or gradients in bf16 (DDP's"
        " bf16_compress_hook: half the bytes), saves as much.",
        saves_ms=exposed / 2, ceiling_ms=exposed, basis="steps without exchange; per step of today's size",
        settings={"accumulation_factor": 2},
    )  # fmt: skip


def _straggler(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    lost = split.by_cause["straggler"]
    if not lost:
        return
    slow = next((r for r in ranks if r.rank == split.slowest_rank), ranks[0])
    rest = [r for r in ranks if r is not slow]

    def spent(rank: Rank, part: str) -> float:
        alone = part_ms(rank, "no_sync", part)
        return alone if alone is not None else 0.0 if part == "communication" else rank.parts_ms[part]

    def more(part: str) -> float:
        return spent(slow, part) - (fmean(spent(r, part) for r in rest) if rest else 0.0)

    part = max(slow.parts_ms, key=more)
    spent_in = "the script's own code" if part == "other" else part.replace("_", " ")
    where = next((f", at {line.line}" for line in slow.lines if line.part == part), "")
    yield Advice(
        cause="straggler", title=f"repair straggler rank {slow.rank} on {slow.host}",
        how=f"It takes {format_number(lost)} ms longer than the others, {format_number(more(part))} of them in"
        f" {spent_in}{where}. "
        "Look for a slower device, a busier host, or more work on that rank.",
        saves_ms=lost, ceiling_ms=lost,
        basis="each rank's own pace in steps without exchange" if slow.blocks else "the others' waiting for it in collectives",
    )  # fmt: skip


def _less_often(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Of what comes once an epoch, every second one: ten times as few would leave a short training without any."""
    rank = ranks[0]
    batches = rank.loader.batches if rank.loader is not None else None
    steps_an_epoch = batches / batches_per_step(rank) if batches is not None else math.inf
    for cause, title, how in (
        ("logging", f"log every {LESS_OFTEN} steps",
         "Each line to a file, a terminal or a server, and each .item() on a device, makes the step wait."),
        ("checkpoint", f"checkpoints 1/{LESS_OFTEN} as often",
         "Or write them while training continues: torch.distributed.checkpoint.async_save."),
        ("evaluation", f"evaluation 1/{LESS_OFTEN} as often", "Or on fewer samples."),
    ):  # fmt: skip
        spent, factor = split.by_cause[cause], LESS_OFTEN
        if cause == "evaluation" and any(r.evaluates_with_gradients for r in ranks):
            how += " It keeps in memory what a backward pass would need: under torch.no_grad() it takes less memory and time."
        if rank.occasions.get(cause, 1.0) * steps_an_epoch < ONCE_AN_EPOCH:
            title, factor = f"{cause}{'s' if cause == 'checkpoint' else ''} every second epoch", 2
        if spent > 0:
            yield Advice(
                cause=cause, title=title, how=how, saves_ms=spent * (1 - 1 / factor), ceiling_ms=spent,
                basis="its time in the recorded steps", settings={"less_often": factor},
            )  # fmt: skip


def _own_code(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """For the lines that most of the script's own time is seen at, unless it calls what trains: all parts are seen at that."""
    rank, spent = ranks[0], split.by_cause["own_code"]
    whole = {line.line for line in rank.lines if line.part in ("forward", "backward", "optimizer")}
    lines = [line for line in rank.lines if line.part == "other" and line.line not in whole]
    for line in sorted((line for line in lines if line.share >= ONE_LINE), key=lambda line: -line.share)[:MOST_LINES]:
        place, calls = os.path.basename(line.line), f", in {line.called}" if line.called else ""
        yield Advice(
            cause="own_code", title=f"less of {place}",
            how=f"{line.share:.0%} of the script's own code between loading, model and optimizer was seen at {line.line}{calls}."
            " If it can be done less often, in a thread or process beside the training, or once before it, a step waits less for"
            " it.",
            saves_ms=spent * line.share, ceiling_ms=spent * line.share, basis="the share of samples of the stack at that line",
        )  # fmt: skip


ADVISORS = (
    _workers, _worker_start, _transfers, fewer_launches, together, larger_batch, _optimizer, _exchange, _straggler, _less_often,
    _own_code, fewer_threads, lower_precision, in_bf16, fuse, less_padding, dropout_by_bytes,
)  # fmt: skip
