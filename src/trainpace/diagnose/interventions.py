"""The effect of each intervention: plain blocks against blocks with one cause removed, round by round."""

import math
from collections.abc import Sequence
from statistics import fmean

from trainpace.medians import mean_and_half_width
from trainpace.records import Record
from trainpace.watch import Block, Rank, batches_per_step

FORWARD_AND_BACKWARD = ("forward", "backward")
FEW_SAMPLES = 2


class Proof(Record):
    """A step with and without one cause, from `rounds` interleaved blocks; `saved_ms` with its 90 % interval."""

    trial: str
    plain_ms: float
    without_ms: float
    saved_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def of_trial(rank: Rank, trial: str) -> list[Block]:
    """One rank's blocks of a trial, in order."""
    return [b for b in rank.blocks if b.trial == trial]


def proof(ranks: Sequence[Rank], trial: str) -> Proof | None:
    """The mean over ranks of plain - trial, paired by rounds; None where it was not tried."""
    rounds = min(min(len(of_trial(r, "plain")), len(of_trial(r, trial))) for r in ranks)
    if rounds < 1:
        return None
    plain = [_over_ranks(ranks, "plain", i) for i in range(rounds)]
    without = [_over_ranks(ranks, trial, i) for i in range(rounds)]
    differences = [a - b for a, b in zip(plain, without, strict=True)]
    saved, half = mean_and_half_width(differences)
    return Proof(
        trial=trial, plain_ms=fmean(plain), without_ms=fmean(without), saved_ms=saved, low_ms=saved - half,
        high_ms=saved + half, rounds=rounds,
    )  # fmt: skip


def _over_ranks(ranks: Sequence[Rank], trial: str, i: int) -> float:
    return fmean(of_trial(r, trial)[i].step_ms for r in ranks)


def own_pace_ms(ranks: Sequence[Rank]) -> list[float] | None:
    """Each rank's step when no rank waits for another; None where that was not tried."""
    paces = []
    for rank in ranks:
        blocks = of_trial(rank, "no_sync")
        if not blocks:
            return None
        paces.append(fmean(b.step_ms for b in blocks))
    return paces


def part_ms(rank: Rank, trial: str, *parts: str) -> float | None:
    """The mean time of some parts under a trial."""
    blocks = of_trial(rank, trial)
    return fmean(math.fsum(b.parts_ms[p] for p in parts) for b in blocks) if blocks else None


def fixed_ms(rank: Rank, not_compute_ms: float) -> float | None:
    """The part of forward and backward that does not depend on the batch: the line through a full batch and a small
    one, extrapolated to zero.

    `not_compute_ms`: time of backward spent waiting for other ranks. None where the small batch was not tried.
    """
    full = part_ms(rank, "cached_batch", *FORWARD_AND_BACKWARD)
    few = part_ms(rank, "few_samples", *FORWARD_AND_BACKWARD)
    samples = rank.samples_per_step / batches_per_step(rank)
    if full is None or few is None or samples <= FEW_SAMPLES:
        return None
    slope = max(0.0, (full - few) / (samples - FEW_SAMPLES))
    return max(0.0, min(full, few - FEW_SAMPLES * slope) - not_compute_ms)
