"""Possible changes for each cause, with the milliseconds per step that each should save. Pure arithmetic on a recording."""

import math
import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.changes import Advice
from trainpace.diagnose.device_advice import fuse, in_bf16, lower_precision
from trainpace.diagnose.dropout_advice import dropout_by_bytes
from trainpace.diagnose.launch_advice import fewer_launches, larger_batch, together
from trainpace.diagnose.loader_advice import (
    fewest_workers,
    no_workers,
    offline,
    whole_batches,
    worker_start,
)
from trainpace.diagnose.memory_advice import keep_memory
from trainpace.diagnose.padding_advice import less_padding
from trainpace.diagnose.shares import Split, part_ms, proof
from trainpace.diagnose.thread_advice import fewer_threads
from trainpace.watch import Rank, batches_per_step

WORTH = 0.03
"""A change that saves a smaller share of the step than this is reported as not worth making."""
LESS_OFTEN = 10
ONCE_AN_EPOCH = 1.5
"""Fewer times an epoch than this is once."""
ONE_LINE, MOST_LINES = 0.2, 2
"""Of the script's own code, what is seen at one line, from which on that line is worth a word; and of how many lines."""


def advise(ranks: Sequence[Rank], split: Split) -> list[Advice]:
    """All changes for which the recording supports a figure, the largest saving first, including those that save nothing."""
    # one rank may wait longer than the mean of all, which is what its cause takes
    changes = [
        replace(a, saves_ms=min(a.saves_ms, a.ceiling_ms))
        for advisor in ADVISORS
        for a in advisor(ranks, split)
    ]
    return sorted(changes, key=lambda a: -a.saves_ms)


def _transfers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    copies, tried = split.by_cause["host_to_device"], proof(ranks, "batch_on_device")
    if copies > 0:
        proved = tried is not None and tried.settles and tried.saved_ms > 0
        yield Advice(
            cause="host_to_device",
            title="copy less, and while the device computes",
            how=(
                "Send small types (uint8 images) and convert on the device; leave out copies of"
                " data that is already there. pin_memory=True and .to(device, non_blocking=True)"
                " copy faster and let the host go on; kernels run meanwhile only where the next"
                " batch is copied in a stream of its own."
            ),
            saves_ms=min(copies, tried.saved_ms) if tried is not None and proved else copies,
            ceiling_ms=copies,
            basis=(
                "steps with the batch left on the device"
                if proved
                else "time of the copies in the recorded steps"
            ),
        )


def _optimizer(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank, spent = ranks[0], split.by_cause["optimizer"]
    variants = dict(rank.optimizer_variants_ms)
    current = variants.pop("as it is", None)
    if current is None:
        return
    for name, ms in sorted(variants.items(), key=lambda item: item[1]):
        yield Advice(
            cause="optimizer",
            title=f"{rank.optimizer}({name})",
            how=(
                f"Measured on copies of these parameters: {format_number(ms)} ms a step against"
                f" {format_number(current)}."
            ),
            saves_ms=max(0.0, min(current - ms, spent)),
            ceiling_ms=spent,
            basis="the same optimizer's other implementations, timed in the script's own process",
            settings={"optimizer": name},
        )


def _exchange(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    exposed, micro = split.by_cause["communication"], batches_per_step(ranks[0])
    if len(ranks) < 2 and ranks[0].world_size < 2:
        return
    if micro >= 2 and not ranks[0].skips_sync:
        yield Advice(
            cause="communication",
            title="exchange gradients once a step, not once a micro-step",
            how=(
                f"Wrap the first {micro - 1:.0f} of {micro:.0f} micro-steps in model.no_sync()"
                " (accelerate: accelerator.accumulate(model))."
            ),
            saves_ms=exposed * (micro - 1) / micro,
            ceiling_ms=exposed,
            basis="steps without exchange",
            settings={"no_sync": "yes"},
        )
        return
    yield Advice(
        cause="communication",
        title="accumulate twice as many micro-steps between exchanges",
        how=(
            "With model.no_sync() in all but the last (DeepSpeed and Trainer:"
            " gradient_accumulation_steps); it doubles the global batch unless the micro-batch or"
            " the number of ranks is halved. A faster link, or gradients in bf16 (DDP's"
            " bf16_compress_hook: half the bytes), saves as much."
        ),
        saves_ms=exposed / 2,
        ceiling_ms=exposed,
        basis="steps without exchange; per step of today's size",
        settings={"accumulation_factor": 2},
    )


def _straggler(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    lost = split.by_cause["straggler"]
    if not lost:
        return
    slow = next((r for r in ranks if r.rank == split.slowest_rank), ranks[0])
    rest = [r for r in ranks if r is not slow]

    def spent(rank: Rank, part: str) -> float:
        alone = part_ms(rank, "no_sync", part)
        return (
            alone if alone is not None else 0.0 if part == "communication" else rank.parts_ms[part]
        )

    def more(part: str) -> float:
        return spent(slow, part) - (fmean(spent(r, part) for r in rest) if rest else 0.0)

    part = max(slow.parts_ms, key=more)
    spent_in = "the script's own code" if part == "other" else part.replace("_", " ")
    where = next((f", at {line.line}" for line in slow.lines if line.part == part), "")
    yield Advice(
        cause="straggler",
        title=f"repair straggler rank {slow.rank} on {slow.host}",
        how=(
            f"It takes {format_number(lost)} ms longer than the others, {format_number(more(part))}"
            f" of them in {spent_in}{where}. Look for a slower device, a busier host, or more work"
            " on that rank."
        ),
        saves_ms=lost,
        ceiling_ms=lost,
        basis=(
            "each rank's own pace in steps without exchange"
            if slow.blocks
            else "the others' waiting for it in collectives"
        ),
    )


def _less_often(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Of what comes once an epoch, every second one: ten times as few would leave a short training without any."""
    rank = ranks[0]
    batches = rank.loader.batches if rank.loader is not None else None
    steps_an_epoch = batches / batches_per_step(rank) if batches is not None else math.inf
    for cause, title, how in (
        (
            "logging",
            f"log every {LESS_OFTEN} steps",
            (
                "Each line to a file, a terminal or a server, and each .item() on a device, makes"
                " the step wait."
            ),
        ),
        (
            "checkpoint",
            f"checkpoints 1/{LESS_OFTEN} as often",
            "Or write them while training continues: torch.distributed.checkpoint.async_save.",
        ),
        ("evaluation", f"evaluation 1/{LESS_OFTEN} as often", "Or on fewer samples."),
    ):
        spent, factor = split.by_cause[cause], LESS_OFTEN
        if cause == "evaluation" and any(r.evaluates_with_gradients for r in ranks):
            how += (
                " It keeps in memory what a backward pass would need: under torch.no_grad() it"
                " takes less memory and time."
            )
        if rank.occasions.get(cause, 1.0) * steps_an_epoch < ONCE_AN_EPOCH:
            title, factor = f"{cause}{'s' if cause == 'checkpoint' else ''} every second epoch", 2
        if spent > 0:
            yield Advice(
                cause=cause,
                title=title,
                how=how,
                saves_ms=spent * (1 - 1 / factor),
                ceiling_ms=spent,
                basis="its time in the recorded steps",
                settings={"less_often": factor},
            )


def _own_code(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """For the lines that most of the script's own time is seen at, unless it calls what trains: all parts are seen at that."""
    rank, spent = ranks[0], split.by_cause["own_code"]
    whole = {line.line for line in rank.lines if line.part in ("forward", "backward", "optimizer")}
    lines = [line for line in rank.lines if line.part == "other" and line.line not in whole]
    for line in sorted(
        (line for line in lines if line.share >= ONE_LINE), key=lambda line: -line.share
    )[:MOST_LINES]:
        place, calls = os.path.basename(line.line), f", in {line.called}" if line.called else ""
        yield Advice(
            cause="own_code",
            title=f"less of {place}",
            how=(
                f"{line.share:.0%} of the script's own code between loading, model and optimizer"
                f" was seen at {line.line}{calls}. If it can be done less often, in a thread or"
                " process beside the training, or once before it, a step waits less for it."
            ),
            saves_ms=spent * line.share,
            ceiling_ms=spent * line.share,
            basis="the share of samples of the stack at that line",
        )


ADVISORS = (
    fewest_workers,
    no_workers,
    offline,
    whole_batches,
    worker_start,
    _transfers,
    fewer_launches,
    together,
    larger_batch,
    _optimizer,
    _exchange,
    _straggler,
    _less_often,
    _own_code,
    fewer_threads,
    lower_precision,
    in_bf16,
    fuse,
    less_padding,
    dropout_by_bytes,
    keep_memory,
)
