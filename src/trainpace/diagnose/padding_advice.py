"""Fewer positions that are only padding."""

from collections.abc import Iterator, Sequence

from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank

LEAST_PADDING = 0.1
"""Share of all positions from which on padding is worth a word."""


def less_padding(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Where a model computes for positions that its mask leaves out: each batch as long as its longest sample, and batches of
    similar samples. The time of computing is taken to grow with the number of positions; attention's grows faster.
    """
    tokens, to_longest, positions = ranks[0].tokens
    if not positions or tokens > (1 - LEAST_PADDING) * positions:
        return
    computing = split.by_cause["compute"]
    told = (
        f"{1 - tokens / positions:.0%} of the positions in a batch are padding, by the attention"
        " mask"
    )
    if to_longest <= (1 - LEAST_PADDING) * positions:
        yield Advice(
            cause="compute",
            title="padding to the longest sample of each batch",
            how=(
                f"{told}; padded only to the longest sample of each batch, there would be"
                f' {to_longest / positions:.0%} as many. Tokenize without padding="max_length" and'
                " let a collator pad (transformers: DataCollatorWithPadding)."
            ),
            saves_ms=computing * (1 - to_longest / positions),
            ceiling_ms=computing,
            basis="the time of computing, if it grows with the number of positions",
            settings={"padding": "longest"},
        )
    yield Advice(
        cause="compute",
        title="batches of samples of similar lengths",
        how=(
            f"{told}. A sampler that puts samples of similar lengths into one batch leaves little"
            ' of it (Hugging Face Trainer: train_sampling_strategy="group_by_length", in'
            " transformers before 5 group_by_length=True), with padding to the longest of each"
            " batch."
        ),
        saves_ms=computing * (1 - tokens / positions),
        ceiling_ms=computing,
        basis=(
            "the time of computing, if it grows with the number of positions and no padding remains"
        ),
        settings={"group_by_length": "true"},
        at_most=True,
    )
