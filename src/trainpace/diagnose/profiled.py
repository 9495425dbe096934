"""Diagnosis of a training from profiler traces.

It contains the verdict, the parts of a step, and upper bounds of possible savings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import SQLITE, first_bytes
from trainpace.core.records import Record
from trainpace.diagnose.diagnosis import Share
from trainpace.diagnose.profiled_ranks import Kernel, RankShares, rank_shares
from trainpace.diagnose.shares import IN_WORDS
from trainpace.diagnose.trace_formats import NSIGHT, read_kineto, read_nsight
from trainpace.diagnose.traces import UNEXPORTED, Trace, joined, trace_files
from trainpace.measure import KERNEL_KINDS
from trainpace.watch import BEHIND

FEW_STEPS = 5


class Bound(Record):
    """Suggested change, and the upper bound of its saving per step.

    A step lasts at least as long as the work of the device, and as the work of the host. So a
    change on the host saves at most its own time, and at most the idle time of the device. A change
    on the device saves at most the time when nothing else runs there. Bounds overlap and must not
    be added.
    """

    cause: str
    title: str
    how: str
    at_most_ms: float


class ProfiledTraining(Record):
    """Diagnosis of the ranks of one training.

    Attributes:
        step_ms: Mean step time over all ranks.
        shares: Parts of the step. They sum to `step_ms`.
        compute: Computing by kind of kernel.
        straggler: Rank that the other ranks wait for.
    """

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


def read_profiled(
    path: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None
) -> ProfiledTraining:
    """Read and diagnose a trace, an exported report, or a folder with one of them per rank.

    The traces of one process are the cycles of its profiler and count together. If a rank has
    traces of several processes, the process with the most steps counts.

    Args:
        path: File or folder.
        tell: Callback that receives a message before each file.

    Raises:
        UnreadableInput: If no file could be read.
    """
    place = Path(path)
    files = trace_files(place) if place.is_dir() else [place]
    if not files:
        raise UnreadableInput(
            f"{place} contains no trace.",
            "Name a file, or a folder with one .json or .json.gz per rank.",
        )
    ranks: list[RankShares] = []
    unread: list[UnreadableInput] = []
    # Read one process at a time, because each may need much memory.
    for process in _processes(files, tell, unread):
        try:
            ranks.append(rank_shares(joined(process), len(ranks)))
        except UnreadableInput as error:
            unread.append(error)
    if not ranks:
        raise unread[0]
    chosen = _one_a_rank(ranks)
    return _together(chosen, [*_skipped(unread, len(ranks) - len(chosen))])


def _processes(
    files: Sequence[Path], tell: Callable[[str], None], unread: list[UnreadableInput]
) -> Iterator[list[Trace]]:
    """Yield the traces of each process. The files are in order of host, process and time."""
    held: list[Trace] = []
    for file in files:
        tell(f"reading {file.name}")
        try:
            for trace in _traces(file):
                same = held and trace.process and trace.process == held[-1].process
                if held and not (same and trace.rank == held[-1].rank):
                    yield held
                    held = []
                held.append(trace)
        except UnreadableInput as error:
            unread.append(error)
    if held:
        yield held


def _skipped(unread: Sequence[UnreadableInput], again: int) -> Iterator[str]:
    if unread:
        many = "1 file" if len(unread) == 1 else f"{len(unread)} files"
        yield f"{many} could not be read: {unread[0].message}"
    if again:
        yield f"{again} more trace{'s' if again > 1 else ''} of the same ranks skipped."


def _traces(file: Path) -> Iterator[Trace]:
    if file.name.endswith(UNEXPORTED):
        raise UnreadableInput(
            f"{file} is a report that only Nsight Systems reads.",
            f"Export it: nsys export --type sqlite {file.name}",
        )
    if first_bytes(file).startswith(SQLITE):
        yield from read_nsight(file)
    else:
        yield read_kineto(file)


def _one_a_rank(ranks: list[RankShares]) -> list[RankShares]:
    """Keep the trace with the most steps of each rank.

    Nsight Systems reports do not contain a rank, so all of them are kept and numbered.
    """
    if all(rank.made_by == NSIGHT for rank in ranks):
        return [replace(rank, rank=number) for number, rank in enumerate(ranks)]
    longest: dict[int, RankShares] = {}
    for rank in ranks:
        if rank.rank not in longest or rank.steps > longest[rank.rank].steps:
            longest[rank.rank] = rank
    return sorted(longest.values(), key=lambda rank: rank.rank)


def _together(ranks: Sequence[RankShares], skipped: Sequence[str]) -> ProfiledTraining:
    first = ranks[0]
    causes = {cause: _mean(ranks, "causes_ms", cause) for cause in first.causes_ms}
    causes["straggler"], straggler = _waiting_for_one(ranks)
    causes["communication"] -= causes["straggler"]
    step = math.fsum(causes.values())

    def share(cause: str, in_words: str, ms: float) -> Share:
        return Share(cause=cause, in_words=in_words, ms=ms, share=ms / step, proved=False)

    shares = [share(cause, _words(cause, first), ms) for cause, ms in causes.items()]
    shares.sort(key=lambda s: -s.ms)
    kinds = {kind: _mean(ranks, "compute_ms", kind) for kind in KERNEL_KINDS if first.on_device}
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
        compute=tuple(share(k, KERNEL_KINDS[k], ms) for k, ms in kinds.items() if ms > 0),
        bounds=_bounds(ranks, causes),
        warnings=(*skipped, *_warnings(ranks)),
    )


def _mean(ranks: Sequence[RankShares], field: str, part: str) -> float:
    return fmean(getattr(rank, field)[part] for rank in ranks)


def _words(cause: str, rank: RankShares) -> str:
    """Describe a cause in the words of `diagnose`, or more precisely if a trace shows more."""
    own = {
        "host_to_device": "copies between host and device",
        "logging": "waiting for the device, then launching again",
    }
    if rank.on_device:
        idle = (
            "the script's own code running" if rank.with_operators else "for reasons not recorded"
        )
        own["communication"] = "exposed communication between ranks"
        own["own_code"] = f"the device idle, {idle}"
    return own.get(cause, IN_WORDS[cause])


def _waiting_for_one(ranks: Sequence[RankShares]) -> tuple[float, int | None]:
    """Return (mean ms that ranks wait in collectives for the straggler, its rank).

    The straggler joins each collective last, so its communication is the shortest. Returns
    (0.0, None) if the wait is too short a part of the step.
    """
    if len(ranks) < 2:
        return 0.0, None
    last = min(ranks, key=lambda rank: rank.communication_ms)
    exposed = last.causes_ms["communication"]
    waiting = fmean(max(0.0, rank.causes_ms["communication"] - exposed) for rank in ranks)
    if waiting < BEHIND * fmean(rank.step_ms for rank in ranks):
        return 0.0, None
    return waiting, last.rank


def _warnings(ranks: Sequence[RankShares]) -> Iterator[str]:
    first = ranks[0]
    yield from _step_warnings(first, min(rank.steps for rank in ranks))
    world = max(rank.world_size or 0 for rank in ranks)
    if world > len(ranks):
        yield f"{len(ranks)} of {world} ranks are here."
    if not first.on_device:
        yield "No kernel of a GPU is in this trace; its times are the host's."
    elif any(rank.made_by.startswith("torch") for rank in ranks):
        yield "A profiler slows the host, so launching takes less time without it."
    if skipped := sum(rank.skipped for rank in ranks):
        yield f"{skipped:,} events with impossible times were skipped."


def _step_warnings(rank: RankShares, fewest: int) -> Iterator[str]:
    if not rank.told_by:
        yield (
            "The trace does not mark steps, so all of it counts as one. Call prof.step() after each"
            " step, or name the steps with NVTX."
        )
    elif fewest < FEW_STEPS:
        counted = "one step" if fewest == 1 else f"{fewest} steps"
        yield f"Only {counted} could be counted, so the times are rough."


_HOST_CHANGES = (
    (
        "data",
        "if the loader never made a step wait",
        "More loader workers, pin_memory=True, or samples prepared once; trainpace loader measures"
        " which.",
    ),
    (
        "launch",
        "if launches were free (CUDA graphs, torch.compile)",
        "The device waits for the host to launch. Both launch many kernels at once, and larger"
        " batches need fewer launches.",
    ),
    (
        "logging",
        "if nothing waited for the device",
        "Each .item(), print of a loss, or copy without non_blocking=True keeps the host from"
        " launching ahead.",
    ),
)
_DEVICE_CHANGES = (
    (
        "communication",
        "if all exposed communication were hidden",
        "Larger or earlier buckets, communication beside the backward pass, gradients in fewer"
        " bits, or a faster network.",
    ),
    (
        "straggler",
        "if no rank waited for the slowest",
        "Look at the slowest rank: a slower device, a busier host, or more work.",
    ),
    (
        "host_to_device",
        "if all copies were hidden",
        "pin_memory=True with non_blocking=True, and smaller types.",
    ),
    (
        "compute",
        "if memory-bound kernels were fused away (torch.compile)",
        "Fused kernels read and write each number once; some of that time remains.",
    ),
)


def _bounds(ranks: Sequence[RankShares], causes: Mapping[str, float]) -> tuple[Bound, ...]:
    """Return every change that the traces give a bound for, the largest bound first."""
    fused = {"compute": _mean(ranks, "compute_ms", "memory")}
    found = [(*change, fused.get(change[0], causes[change[0]])) for change in _DEVICE_CHANGES]
    if ranks[0].on_device:
        idle = max(0.0, math.fsum(causes.values()) - fmean(rank.busy_ms for rank in ranks))
        for change in _HOST_CHANGES:
            spent = max(_mean(ranks, "waits_ms", change[0]), causes[change[0]])
            found.append((*change, min(idle, spent)))
        how = "What the script does between operators: Python, files, other libraries."
        if not ranks[0].with_operators:
            how = (
                "torch.profiler with ProfilerActivity.CPU, or NVTX ranges, show what the host does"
                " meanwhile."
            )
        found.append(("own_code", "if the device were never idle", how, idle))
    else:
        found.append((*_HOST_CHANGES[0], causes["data"]))
    made = [Bound(cause=c, title=t, how=h, at_most_ms=ms) for c, t, h, ms in found if ms > 0]
    return tuple(sorted(made, key=lambda b: -fused.get(b.cause, causes[b.cause])))
