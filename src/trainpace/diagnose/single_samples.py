"""A training that computes one sample at a time, as its matrix products say: no DataLoader has to be seen for that."""

from collections.abc import Iterator, Sequence

from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank

LARGER_BATCH = 4
ONE_ROW = 0.5
"""The share of a forward pass's FLOPs in products with a single vector from which on single samples are taken to be computed."""


def one_at_a_time(rank: Rank) -> bool:
    return 0 < ONE_ROW * rank.forward_flops <= rank.one_row_flops


def together(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Several samples where one alone is computed: products with single vectors take hardly longer for a few of them."""
    rank = ranks[0]
    if not one_at_a_time(rank):
        return
    optimizer, launch = split.by_cause["optimizer"], split.by_cause["launch"]
    share = rank.one_row_flops / rank.forward_flops
    shared = (
        min(rank.one_row_flops / rank.product_flops * rank.products_ms, split.by_cause["compute"]) + launch + optimizer
    )
    yield Advice(
        cause="launch" if launch > split.by_cause["compute"] else "compute",
        title=f"a batch of {LARGER_BATCH} instead of single samples",
        how=f"{share:.0%} of a forward pass's FLOPs are in products of a matrix with a single vector, so that one"
        " sample (or one position of a sequence) is computed at a time. Every step reads all weights for it, which would be read"
        " once for a whole batch. Collect several samples, padded to one length, and call the"
        " modules once for all of them (mind the learning rate); where no position depends on the one before it, give a module"
        " the whole sequence. The saving is for the same number of samples, in fewer steps. One at a time, torch.compile launches"
        " fewer operators.",
        saves_ms=shared * (1 - 1 / LARGER_BATCH), ceiling_ms=shared,
        basis="products by single vectors, launching and the optimizer, each once for several samples",
        settings={"batched": "yes"}, at_most=True,
    )  # fmt: skip
