"""What ranks that train together do to each other, in sentences: the straggler and why, slow links, uneven lengths."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from trainpace.core.units import format_duration, format_number
from trainpace.diagnose.shares import own_pace_ms, proof
from trainpace.watch import Rank, Recording, SlowLink, Straggler, Together

MOST_NAMED = 3
SET_OTHERWISE_MS = 1000.0
"""Clocks that a network keeps differ by some milliseconds."""


def faults_in_words(recording: Recording) -> list[str]:
    """The one that costs most first; none for one rank alone, and where nothing stands out."""
    found = recording.together
    if found is None:
        return []
    stragglers = [
        (s.ms, _straggler(s, recording.ranks) + _proved(s, recording.ranks))
        for s in found.stragglers[:MOST_NAMED]
    ]
    links = [(s.ms, _link(s)) for s in found.slow_links[:MOST_NAMED]]
    lines = [line for _, line in sorted([*stragglers, *links], key=lambda pair: -pair[0])]
    return lines + list(_rest(found))


def _straggler(s: Straggler, ranks: Sequence[Rank]) -> str:
    between = f"{format_number(max(0.0, s.ms_low))} to {format_number(s.ms_high)}"
    says = (
        f"Rank {s.rank} on {s.node} is a straggler, {format_number(s.ms)} ms a step behind"
        f" ({between})"
    )
    part = f"{format_number(s.cause_ms)} ms more"
    if s.cause == "inputs":
        return (
            f"{says}: {part} in computing, since its inputs hold {s.elements:,.0f} elements a step"
            f" and the others' {s.usual_elements:,.0f}, as with longer sequences."
        )
    if s.cause == "compute":
        same = ", with inputs as large as the others'" if s.elements else ""
        where = "node is" if len({r.host for r in ranks}) > 1 else "device or cores are"
        return f"{says}: {part} in computing{same}: its {where} probably slower, or busy."
    if s.cause == "data":
        mine, usual = _sample_ms(ranks, s.rank)
        reads = (
            f"; a sample takes {format_number(mine)} ms there, elsewhere {format_number(usual)}"
            if mine and usual
            else ""
        )
        return (
            f"{says}: {part} in waiting for its data, probably from a slower disk or loader{reads}."
        )
    return (
        f"{says}: {part} neither computing nor waiting for data, as in output, checkpoints or the"
        " script's own code."
    )


def _proved(s: Straggler, ranks: Sequence[Rank]) -> str:
    """What the interventions say of it: each rank's own pace where nobody waits for another, and a step for which no rank waits
    for data. Empty where they were not tried."""
    paces = own_pace_ms(ranks)
    own = {} if paces is None else {r.rank: ms for r, ms in zip(ranks, paces, strict=True)}
    if s.rank not in own:
        return ""
    mine = own.pop(s.rank)
    says = (
        f" With the exchange between ranks left out, its step took {format_number(mine)} ms and the"
        f" others' {format_number(fmean(own.values()))} ms."
    )
    cached = proof(ranks, "cached_batch") if s.cause == "data" else None
    if cached is not None and cached.low_ms > 0:
        says += (
            f" With one cached batch on every rank, a step took {format_number(cached.without_ms)}"
            f" ms instead of {format_number(cached.plain_ms)}."
        )
    return says


def _sample_ms(ranks: Sequence[Rank], number: int) -> tuple[float, float]:
    mine = [r.fetch.sample_wall_ms for r in ranks if r.fetch is not None and r.rank == number]
    others = [r.fetch.sample_wall_ms for r in ranks if r.fetch is not None and r.rank != number]
    return (mine[0], fmean(others)) if mine and others else (0.0, 0.0)


def _link(s: SlowLink) -> str:
    costs = f"{'at least ' if s.at_least else ''}{format_number(s.ms)} ms a step"
    return (
        f"The link from {s.sender} to {s.receiver} is slow: {format_number(s.mbit_per_s)} Mbit/s"
        f" where the fastest give {format_number(s.usual_mbit_per_s)}; that costs {costs}."
    )


def clocks_in_words(found: Together | None) -> list[str]:
    """Nodes on which it is another time of day."""
    others = (
        [c for c in found.clocks if abs(c.wall_ms) > max(SET_OTHERWISE_MS, c.uncertainty_ms)]
        if found
        else []
    )
    return [
        f"the clock of {c.node} is {format_duration(abs(c.wall_ms) / 1000)}"
        f" {'ahead of' if c.wall_ms > 0 else 'behind'} that of the first rank's node. Trainpace's"
        " results allow for that; times in logs and of files do not."
        for c in others[:MOST_NAMED]
    ]


def _rest(found: Together) -> Iterator[str]:
    if found.uneven_ms is not None:
        yield (
            f"No rank is always behind, but ranks wait {format_number(found.uneven_ms)} ms a step"
            " for the one with the largest inputs: batches of like length, or packed sequences,"
            " would save that."
        )
