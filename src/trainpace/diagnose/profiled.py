"""What a foreign trace says of a training: the verdict, the parts of a step, each rank, the heaviest kernels, and what a change
could save at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from trainpace.core.records import Record
from trainpace.diagnose.bounds import Bound, bounds
from trainpace.diagnose.diagnosis import Share
from trainpace.diagnose.profiled_ranks import Kernel, RankShares
from trainpace.diagnose.shares import IN_WORDS
from trainpace.measure import KERNEL_KINDS
from trainpace.watch import BEHIND

FEW_STEPS = 5


class ProfiledTraining(Record):
    """Ranks that trained together. `shares` add up to `step_ms`, the mean step of all ranks; `compute` says what computing
    consists of. `straggler`: the rank for which the others wait."""

    verdict: str
    step_ms: float
    median_ms: float
    median_ms_low: float
    median_ms_high: float
    shares: tuple[Share, ...]
    compute: tuple[Share, ...]
    bounds: tuple[Bound, ...]
    kernels: tuple[Kernel, ...]
    ranks: tuple[RankShares, ...]
    straggler: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def on_device(self) -> bool:
        return self.ranks[0].on_device


def together(ranks: Sequence[RankShares], left_out: Sequence[str] = ()) -> ProfiledTraining:
    """The ranks together. `left_out`: what was not read, as sentences."""
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    first = ranks[0]
    causes: dict[str, float] = {
        cause: fmean(rank.causes_ms[cause] for rank in ranks) for cause in first.causes_ms
    }
    causes["straggler"], straggler = _waiting_for_one(ranks)
    causes["communication"] -= causes["straggler"]
    step = math.fsum(causes.values())
    shares = sorted(
        (_share(cause, words(cause, first), ms, step) for cause, ms in causes.items()),
        key=lambda s: -s.ms,
    )
    kinds = {kind: fmean(rank.compute_ms[kind] for rank in ranks) for kind in KERNEL_KINDS}
    compute = [
        _share(kind, KERNEL_KINDS[kind], ms, step)
        for kind, ms in kinds.items()
        if ms > 0 and first.on_device
    ]
    return ProfiledTraining(
        verdict=shares[0].cause,
        step_ms=step,
        median_ms=fmean(r.median_ms for r in ranks),
        median_ms_low=fmean(r.median_ms_low for r in ranks),
        median_ms_high=fmean(r.median_ms_high for r in ranks),
        shares=tuple(shares),
        kernels=first.heaviest,
        ranks=tuple(ranks),
        straggler=straggler,
        compute=tuple(compute),
        bounds=bounds(ranks, causes),
        warnings=(*left_out, *_warnings(ranks)),
    )


def words(cause: str, rank: RankShares) -> str:
    """A cause in words, as `diagnose` has them, but that a trace knows copies in both directions and waiting for what it is."""
    own = {
        "host_to_device": "copies between host and device",
        "logging": "waiting for the device, then launching anew",
    }
    if rank.on_device and cause == "communication":
        return "exchange between ranks, not hidden"
    if rank.on_device and cause == "own_code":
        own_code = (
            "the script's own code running" if rank.with_operators else "for reasons not recorded"
        )
        return f"the device idle, {own_code}"
    return own.get(cause, IN_WORDS[cause])


def _share(cause: str, in_words: str, ms: float, step: float) -> Share:
    return Share(cause=cause, in_words=in_words, ms=ms, share=ms / step, proved=False)


def _waiting_for_one(ranks: Sequence[RankShares]) -> tuple[float, int | None]:
    """The mean time of the ranks in an exchange that another has not joined yet, and that other: the one whose own exchange,
    hidden or not, is the shortest, since it comes last."""
    if len(ranks) < 2:
        return 0.0, None
    last = min(ranks, key=lambda rank: rank.communication_ms)
    exposed = last.causes_ms["communication"]
    waiting = fmean(max(0.0, rank.causes_ms["communication"] - exposed) for rank in ranks)
    if waiting < BEHIND * fmean(rank.step_ms for rank in ranks):
        return 0.0, None
    return waiting, last.rank


def _warnings(ranks: Sequence[RankShares]) -> list[str]:
    first, lines = ranks[0], []
    if not first.told_by:
        lines.append(
            "No steps can be told in this trace, so that all of it counts as one; call prof.step()"
            " after each step, or name them with NVTX."
        )
    elif (fewest := min(rank.steps for rank in ranks)) < FEW_STEPS:
        counted = "one step" if fewest == 1 else f"{fewest} steps"
        lines.append(f"Only {counted} could be counted, so that the times are rough.")
    worlds: set[Any] = {rank.world_size for rank in ranks} - {None}
    if worlds and max(worlds) > len(ranks):
        lines.append(f"{len(ranks)} of {max(worlds)} ranks are here.")
    if not first.on_device:
        lines.append("No kernel of a GPU is in this trace; its times are the host's.")
    elif any(rank.made_by.startswith("torch") for rank in ranks):
        lines.append("A profiler slows the host, so that launching takes less time without it.")
    if skipped := sum(rank.skipped for rank in ranks):
        lines.append(f"{skipped:,} events had no time that can be right, and are left out.")
    return lines
