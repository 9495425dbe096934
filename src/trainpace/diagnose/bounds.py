"""What a change could save in a step at most.

A step cannot become shorter than the device's remaining work, nor than the host's remaining time, whichever is later. So a change
of the host saves at most the time that it takes away, and at most the device's idle time; a change of the device's work at most
the time in which nothing else runs there. Bounds overlap, and do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from trainpace.core.records import Record
from trainpace.diagnose.profiled_ranks import RankShares


class Bound(Record):
    """A change, and the most that it could save in a step."""

    cause: str
    title: str
    how: str
    at_most_ms: float


def bounds(ranks: Sequence[RankShares], causes: Mapping[str, float]) -> tuple[Bound, ...]:
    """Every change for which the traces give a bound, that of the largest cause first. `causes`: the mean step's milliseconds."""
    idle = max(0.0, math.fsum(causes.values()) - fmean(rank.busy_ms for rank in ranks))
    found = [*_of_device(ranks, causes)]
    if ranks[0].on_device:
        found += _of_host(ranks, causes, idle)
    elif causes["data"] > 0:
        found.append(Bound(cause="data", title=NO_WAIT, how=LOADER, at_most_ms=causes["data"]))
    weight = {"compute": fmean(rank.compute_ms["memory"] for rank in ranks)}
    return tuple(
        sorted(
            (b for b in found if b.at_most_ms > 0),
            key=lambda b: -weight.get(b.cause, causes[b.cause]),
        )
    )


NO_WAIT = "if the loader never made a step wait"
LOADER = (
    "More loader workers, pin_memory=True, or samples prepared once; trainpace loader measures"
    " which."
)


def _of_host(ranks: Sequence[RankShares], causes: Mapping[str, float], idle: float) -> list[Bound]:
    spent = {name: fmean(rank.waits_ms[name] for rank in ranks) for name in ranks[0].waits_ms}
    told = (
        ("data", NO_WAIT, LOADER),
        (
            "launch",
            "if launches were free (CUDA graphs, torch.compile)",
            (
                "The device waits for the host to launch; both launch many kernels at once, and"
                " larger batches need fewer launches."
            ),
        ),
        (
            "logging",
            "if nothing waited for the device",
            (
                "Each .item(), print of a loss, or copy without non_blocking=True keeps the host"
                " from launching ahead."
            ),
        ),
    )
    made = [
        Bound(cause=c, title=t, how=h, at_most_ms=min(idle, max(spent[c], causes[c])))
        for c, t, h in told
    ]
    how = "What the script does between operators: Python, files, other libraries."
    if not ranks[0].with_operators:
        how = (
            "torch.profiler with ProfilerActivity.CPU, or ranges of NVTX, tell what the host does"
            " meanwhile."
        )
    made.append(
        Bound(cause="own_code", title="if the device were never idle", how=how, at_most_ms=idle)
    )
    return made


def _of_device(ranks: Sequence[RankShares], causes: Mapping[str, float]) -> list[Bound]:
    fused = fmean(rank.compute_ms["memory"] for rank in ranks)
    return [
        Bound(
            cause="communication",
            title="if all exposed exchange were hidden",
            at_most_ms=causes["communication"],
            how=(
                "Larger or earlier buckets, exchange beside the backward pass, gradients in fewer"
                " bits, or a faster network."
            ),
        ),
        Bound(
            cause="straggler",
            title="if no rank waited for the slowest",
            at_most_ms=causes["straggler"],
            how="Look at the slowest rank: a slower device, a busier host, or more work.",
        ),
        Bound(
            cause="host_to_device",
            title="if all copies were hidden",
            at_most_ms=causes["host_to_device"],
            how="pin_memory=True with non_blocking=True, and smaller types.",
        ),
        Bound(
            cause="compute",
            title="if memory-bound kernels were fused away (torch.compile)",
            at_most_ms=fused,
            how="Fused kernels read and write each number once; some of that time remains.",
        ),
    ]
