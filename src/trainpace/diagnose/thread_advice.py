"""Fewer threads, where a training computes with more than it has cores for."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from trainpace.diagnose.changes import Advice
from trainpace.diagnose.shares import Split
from trainpace.watch import Rank


def fewer_threads(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Where ranks compute with more threads than their host has cores for, all of them wait for each other's."""
    rank, freed = ranks[0], split.by_cause["threads"]
    here = [r for r in ranks if r.host == rank.host]
    processes, threads = (
        sum(1 + r.beside for r in here),
        sum(r.threads * (1 + r.beside) for r in here),
    )
    if freed:
        fewer, cause, saves = rank.fewer_threads, "threads", freed
        basis, because = (
            "steps with fewer threads",
            ", and at the end of every operator all threads wait for the slowest",
        )
    else:
        fewer, cause = max(1, rank.cpus // processes), "compute"
        if rank.accelerator or threads <= rank.cpus or fewer >= rank.threads:
            return
        saves = (split.by_cause["compute"] + split.by_cause["launch"]) * min(
            1.0, fmean(r.delayed_share for r in here)
        )
        basis, because = "the time in which the processes waited for a core", ""
    yield Advice(
        cause=cause,
        title=f"{fewer} thread{'s' if fewer > 1 else ''} per process instead of {rank.threads}",
        how=(
            f"Set OMP_NUM_THREADS={fewer}, or call torch.set_num_threads({fewer})."
            f" {_sharing(rank, processes)}{because}."
        ),
        saves_ms=saves,
        ceiling_ms=saves,
        basis=basis,
        settings={"threads": fewer},
    )


def _sharing(rank: Rank, processes: int) -> str:
    if processes > 1:
        return f"{processes} processes of {rank.threads} threads each share {rank.cpus} cores"
    if rank.threads > rank.cpus:
        return f"{rank.threads} threads share {rank.cpus} core{'s' if rank.cpus > 1 else ''}"
    return f"Other programs use the {rank.cpus} cores too"
