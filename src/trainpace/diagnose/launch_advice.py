"""Fewer operators to launch, and more samples for each of them. That a training computes one sample at a time is known by its
matrix products: no DataLoader has to be seen for it."""

import math
from collections.abc import Iterator, Sequence

from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank, batches_per_step

LEAST_LAUNCH = 0.1
"""The least share of a step that launching takes, or what a larger batch shares, before there is advice about it. A judgement."""
LEAST_READ = 8
"""Values that a step may read, such as its loss and other figures for the log, before its forward pass counts as one that
torch.compile cannot take as a whole. A judgement."""
LARGER_BATCH = 4
ONE_ROW = 0.5
"""The share of a forward pass's FLOPs in products with a single vector from which on single samples are taken to be computed."""
LOOPED = 0.5
"""A script that loops over the samples of a batch launches at least this share of its operators for those beyond two of them."""


def fewer_launches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Fewer operators, or the same for more samples at once, with the batch as it is; `larger_batch` has the rest."""
    launch, rank = split.by_cause["launch"], ranks[0]
    if not _launches_much(split):
        return
    if _loops_over_samples(rank, split):
        samples = rank.samples_per_step / batches_per_step(rank)
        yield Advice(
            cause="launch",
            title="compute all samples of a batch at once",
            how=(
                f"{_small_operators(rank)}, and {rank.few_operators:,} for two samples: something"
                " loops over samples. Batched operators (or torch.vmap, torch.compile) replace"
                " many launches by one."
            ),
            saves_ms=launch * (1 - 1 / samples),
            ceiling_ms=launch,
            basis="forward and backward without their large operators",
            settings={"batched": "yes"},
        )
    elif one_at_a_time(rank):  # which is worth more together
        return
    elif not _makes_batches(rank):
        compiled = "torch.compile, or CUDA graphs" if rank.accelerator else "torch.compile"
        yield Advice(
            cause="launch",
            title=(
                "operators on whole tensors in place of loops" if _reads_values(rank) else compiled
            ),
            how=(
                f"{_small_operators(rank)}. {_compiled(rank)}."
                " No DataLoader was seen, so there is no advice about batches."
            ),
            saves_ms=launch,
            ceiling_ms=launch,
            basis="all of the time that launching takes, of which a part is saved",
            settings={"compile": "yes"},
        )
    elif (micro := round(batches_per_step(rank))) > 1:
        yield Advice(
            cause="launch",
            title=(
                f"one micro-batch of {rank.samples_per_step:.0f} samples instead of {micro}"
                " micro-batches"
            ),
            how=(
                f"{_small_operators(rank)}: where memory holds the {micro} micro-batches of a step"
                " as one, they are launched once. The update is the same, unless samples of a"
                " batch depend on each other: batch normalisation, contrastive losses, a mean over"
                " tokens of which micro-batches have different numbers."
            ),
            saves_ms=launch * (1 - 1 / micro),
            ceiling_ms=launch,
            basis="the line through steps with a full batch and with two samples",
            settings={"accumulation": 1},
        )


def _launches_much(split: Split) -> bool:
    return split.by_cause["launch"] >= LEAST_LAUNCH * math.fsum(split.by_cause.values())


def _loops_over_samples(rank: Rank, split: Split) -> bool:
    """Whether what launches is a loop over the samples of a batch, which a larger batch makes longer."""
    loops = 0 < rank.few_operators <= (
        1 - LOOPED
    ) * rank.operators and rank.samples_per_step > batches_per_step(rank)
    return loops and split.fixed_ms is not None and split.fixed_ms < 0.5 * split.by_cause["launch"]


def _makes_batches(rank: Rank) -> bool:
    return rank.loader is not None or rank.samples_per_step > 0


def _small_operators(rank: Rank) -> str:
    count = f"{rank.operators:,} operators a step" if rank.operators else "many small operators"
    small = (
        "too small to fill the device"
        if rank.accelerator
        else "so small that calling them takes longer than computing them"
    )
    return f"{count}, most {small}"


def _reads_values(rank: Rank) -> bool:
    """Whether a forward pass reads values at which torch.compile would break, beside a loss for the log."""
    return rank.values_read > LEAST_READ * batches_per_step(rank)


def _compiled(rank: Rank) -> str:
    """What torch.compile does about small operators, as a sentence without its full stop."""
    if _reads_values(rank):
        return (
            f"A step's forward pass reads {rank.values_read:,} tensor values in Python (by .item(),"
            " or an `if` on a tensor), and each causes a graph break in torch.compile: compiling"
            " helps once these values stay in tensors (torch.where, tensor indices)"
        )
    return (
        f"{'torch.compile or CUDA graphs launch' if rank.accelerator else 'torch.compile launches'}"
        " fewer operators"
    )


def larger_batch(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The same samples in fewer steps: per step of today's size, what does not grow with the batch is shared. Where launching is
    much of that, all of it; else the optimizer alone, as fast as it can be."""
    rank, updates = ranks[0], split.by_cause["optimizer"]
    step = math.fsum(split.by_cause.values())
    if (
        not _makes_batches(rank)
        or round(batches_per_step(rank)) > 1
        or _loops_over_samples(rank, split)
    ):
        return
    if one_at_a_time(rank):
        return
    if _launches_much(split):
        cause, shared = (
            "launch",
            min(split.by_cause["launch"] + updates + split.by_cause["communication"], step),
        )
        what = _small_operators(rank)
        instead = f" {_compiled(rank)}{'' if _reads_values(rank) else ', with the batch as it is'}."
        basis = "the line through steps with a full batch and with two samples"
    else:
        now = rank.optimizer_variants_ms.get("as it is", 0.0)
        fastest = min(rank.optimizer_variants_ms.values(), default=0.0) / now if now else 1.0
        cause, shared = "optimizer", updates * fastest if rank.samples_per_step else 0.0
        what, instead = "The optimizer updates all parameters once a batch, of whatever size", ""
        basis = "the time of its fastest implementation"
    if shared >= LEAST_LAUNCH * step:
        yield Advice(
            cause=cause,
            title=f"a batch {LARGER_BATCH} times as large",
            how=(
                f"{what}: larger batches share that among more samples (mind the learning rate)."
                f" The saving is that of as many samples in fewer steps.{instead}"
            ),
            saves_ms=shared * (1 - 1 / LARGER_BATCH),
            ceiling_ms=shared,
            basis=f"{basis}; a step's worth of samples",
            settings={"batch_factor": LARGER_BATCH},
        )


def one_at_a_time(rank: Rank) -> bool:
    return 0 < ONE_ROW * rank.forward_flops <= rank.one_row_flops


def together(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Several samples where one alone is computed: products with single vectors take hardly longer for a few of them."""
    rank = ranks[0]
    if not one_at_a_time(rank):
        return
    optimizer, launch = split.by_cause["optimizer"], split.by_cause["launch"]
    share = rank.one_row_flops / rank.forward_flops
    alone = "" if _reads_values(rank) else " One at a time, torch.compile launches fewer operators."
    shared = (
        min(rank.one_row_flops / rank.product_flops * rank.products_ms, split.by_cause["compute"])
        + launch
        + optimizer
    )
    yield Advice(
        cause="launch" if launch > split.by_cause["compute"] else "compute",
        title=f"a batch of {LARGER_BATCH} instead of single samples",
        how=(
            f"{share:.0%} of a forward pass's FLOPs are in products of a matrix with a single"
            " vector, so that one sample (or one position of a sequence) is computed at a time."
            " Every step reads all weights for it, which would be read once for a whole batch."
            " Collect several samples, padded to one length, and call the modules once for all of"
            " them (mind the learning rate); where no position depends on the one before it, give"
            " a module the whole sequence. The saving is for the same number of samples, in fewer"
            f" steps.{alone}"
        ),
        saves_ms=shared * (1 - 1 / LARGER_BATCH),
        ceiling_ms=shared,
        basis=(
            "products by single vectors, launching and the optimizer, each once for several samples"
        ),
        settings={"batched": "yes"},
        at_most=True,
    )
