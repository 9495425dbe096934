"""What a foreign trace says of a training: the verdict, the parts of a step, each rank, the heaviest kernels, and what a change
could save at most."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import SQLITE, first_bytes
from trainpace.core.records import Record
from trainpace.diagnose.diagnosis import Share
from trainpace.diagnose.kineto import read_kineto
from trainpace.diagnose.nsight import MADE_BY as NSIGHT
from trainpace.diagnose.nsight import read_nsight
from trainpace.diagnose.profiled_ranks import Kernel, RankShares, rank_shares
from trainpace.diagnose.shares import IN_WORDS
from trainpace.diagnose.traces import UNEXPORTED, Trace, trace_files
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


def read_profiled(
    path: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None
) -> ProfiledTraining:
    """The profile of a trace, of an exported report, or of a folder of them, one for each rank. `tell` hears which file is read.

    Of several traces of one rank the one with the most steps counts. Raises UnreadableInput for anything else.
    """
    place = Path(path)
    files = trace_files(place) if place.is_dir() else [place]
    if place.is_dir() and not files:
        raise UnreadableInput(
            f"{place} holds no trace.",
            "Name a file, or a folder with one .json or .json.gz for each rank.",
        )
    ranks: list[RankShares] = []
    unread = []
    for file in files:
        tell(f"reading {file.name}")
        try:
            # one at a time, so that no two traces are held
            ranks += [
                rank_shares(trace, len(ranks) + number)
                for number, trace in enumerate(_traces(file))
            ]
        except UnreadableInput as error:
            if not place.is_dir():
                raise
            unread.append(error)
    if not ranks:
        raise unread[0]
    chosen, again = _one_a_rank(ranks)
    left_out = []
    if unread:
        many = "1 file" if len(unread) == 1 else f"{len(unread)} files"
        left_out.append(f"{many} could not be read; {unread[0].message}")
    if again:
        left_out.append(
            f"{again} more"
            f" {'trace of the same rank is' if again == 1 else 'traces of the same ranks are'} left"
            " out."
        )
    return together(chosen, left_out)


def _traces(file: Path) -> Iterator[Trace]:
    if file.name.endswith(UNEXPORTED):
        raise UnreadableInput(
            f"{file} is a report that only Nsight Systems reads.",
            f"Export it: nsys export --type sqlite {file.name}",
        )
    begins = first_bytes(file)
    if begins.startswith(SQLITE):
        yield from read_nsight(file)
    else:
        yield read_kineto(file)


def _one_a_rank(ranks: list[RankShares]) -> tuple[list[RankShares], int]:
    """One of each rank, and how many were left out. Reports of Nsight Systems do not say which rank they are, so each counts."""
    if all(rank.made_by == NSIGHT for rank in ranks):
        return [replace(rank, rank=number) for number, rank in enumerate(ranks)], 0
    longest: dict[int, RankShares] = {}
    for rank in ranks:
        if rank.rank not in longest or rank.steps > longest[rank.rank].steps:
            longest[rank.rank] = rank
    return list(longest.values()), len(ranks) - len(longest)
