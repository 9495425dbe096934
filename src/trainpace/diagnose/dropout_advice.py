"""Dropout's random numbers, which one thread of a CPU draws."""

import os
from collections.abc import Iterator, Sequence

from trainpace.core.units import format_number
from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank

DRAWS = "aten.bernoulli_"
LEAST_SHARE = 0.1
"""Of the time of a step's operators, from which on random numbers are worth a word. A judgement."""
BYTES_A_NUMBER = 8
CODE = (
    "kept = min(255, round(256 * (1 - p)));"
    " numbers = torch.empty(x.numel() // 8 + 1, dtype=torch.int64).random_(-2**63, None);"
    " mask = numbers.view(torch.uint8)[:x.numel()].view(x.shape).lt_(kept);"
    " x = x * (mask.to(x.dtype) * (256 / kept))"
)
"""Dropout of `x` with the probability `p`."""


def dropout_by_bytes(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """A random byte for each element of a dropout's mask, in place of a number of 64 bits: an eighth as many numbers. On an EPYC,
    1.7 million elements took 10 ms, and 0.6 that way (docs/log.md, 2026-11-26)."""
    rank, computing = ranks[0], split.by_cause["compute"]
    drawn = [
        (os.path.basename(line), share)
        for name, line, share in rank.slow_operators
        if name == DRAWS and line
    ]
    share = sum(share for _, share in drawn)
    # on a device every element has a thread; threads that wait for cores make any operator long
    if rank.accelerator or split.by_cause["threads"] or share < LEAST_SHARE:
        return
    spent = computing * share
    yield Advice(
        cause="compute",
        title="dropout masks from random bytes",
        how=(
            f"Random masks, such as dropout's, take {format_number(spent)} ms of a step"
            f" ({drawn[0][0]}): one thread draws 64 bits for each element. Draw one byte for each"
            f" instead, only in training mode; this rounds p to a multiple of 1/256: {CODE}. Fused"
            " attention (scaled_dot_product_attention with dropout_p) must be replaced by explicit"
            " operations to use it (examples/characters/train.py shows both)."
        ),
        saves_ms=spent * (1 - 1 / BYTES_A_NUMBER),
        ceiling_ms=spent,
        basis="an eighth as many random numbers",
        settings={"dropout": "bytes"},
        at_most=True,
    )
