"""The ranks in a file or a folder of traces, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import SQLITE, first_bytes
from trainpace.diagnose.kineto import read_kineto
from trainpace.diagnose.nsight import MADE_BY as NSIGHT
from trainpace.diagnose.nsight import read_nsight
from trainpace.diagnose.profiled import ProfiledTraining, together
from trainpace.diagnose.profiled_ranks import RankShares, rank_shares
from trainpace.diagnose.spans import Trace
from trainpace.diagnose.trace_recognising import UNEXPORTED, trace_files


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
