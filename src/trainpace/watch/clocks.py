"""How far the clocks of nodes are apart, by the collectives that all their ranks leave together.

Leaving a collective is one moment on all clocks, up to the time of the transfer. As NTP does with its packets, only the quarter
with the shortest transfers is taken, and the median of it; anew for every `CHUNK` steps, because clocks also run at different
speeds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainpace.core.records import Record
from trainpace.core.stats import median
from trainpace.watch.exchanges import RankStep

CHUNK = 50
"""Steps that share an offset: enough for a median, and few enough that a clock which is 20 ppm off drifts by little in them."""
SHORTEST, LEAST_TAKEN = 4, 8
"""One collective in so many is taken, and of few collectives at least so many."""


class Clock(Record):
    """A node's clock against that of the lowest rank's node: `offset_ms` ahead, known to `uncertainty_ms` either way. `wall_ms`:
    what the time of day is ahead there; the other clock counts from each node's own start."""

    node: str
    offset_ms: float
    uncertainty_ms: float
    wall_ms: float = 0.0


class Offsets(NamedTuple):
    """What a node's clock is ahead of the lowest rank's node: nanoseconds at each of the common steps, 0 for that node itself."""

    at_ns: tuple[int, ...]
    uncertainty_ns: float = 0.0


def offsets(
    steps: Mapping[int, Sequence[RankStep]], nodes: Mapping[int, str]
) -> dict[str, Offsets]:
    """By node. The uncertainty is the larger of two: half the range of what 9 in 10 of the collectives say, and the transfer,
    within which ranks may leave one after the other."""
    first = nodes[min(steps)]
    known = {first: Offsets((0,) * len(steps[min(steps)]))}
    transfers = _transfers_ns(list(steps.values()))
    zero = steps[min(steps)]
    for node in dict.fromkeys(nodes[rank] for rank in sorted(steps)):
        if node != first:
            mine = steps[min(r for r in steps if nodes[r] == node)]
            known[node] = _offsets(mine, zero, transfers)
    return known


def clocks(known: Mapping[str, Offsets]) -> tuple[Clock, ...]:
    """Of the nodes other than the lowest rank's."""
    _, *others = known.items()
    return tuple(
        Clock(
            node=node,
            offset_ms=o.at_ns[len(o.at_ns) // 2] / 1e6,
            uncertainty_ms=o.uncertainty_ns / 1e6,
        )
        for node, o in others
    )


def _transfers_ns(ranks: Sequence[Sequence[RankStep]]) -> list[list[int]]:
    """By step and collective, the time of the rank that waited least: about that of the transfer."""
    return [
        [
            min(e.leaves_ns - e.arrives_ns for e in same)
            for same in zip(*(s.together for s in at_once), strict=True)
        ]
        for at_once in zip(*ranks, strict=True)
    ]


def _offsets(
    mine: Sequence[RankStep], zero: Sequence[RankStep], transfers: Sequence[Sequence[int]]
) -> Offsets:
    pairs = [
        [
            (transfer, a.leaves_ns - b.leaves_ns)
            for transfer, a, b in zip(times, x.together, y.together, strict=True)
        ]
        for times, x, y in zip(transfers, mine, zero, strict=True)
    ]
    chunks = [pairs[i : i + CHUNK] for i in range(0, len(pairs), CHUNK)]
    if len(chunks) > 1 and len(chunks[-1]) < CHUNK // 2:
        chunks[-2:] = [chunks[-2] + chunks[-1]]
    at_ns: list[int] = []
    strays: list[int] = []
    least: list[int] = []
    for chunk in chunks:
        every = sorted(pair for step in chunk for pair in step)
        taken = every[: max(LEAST_TAKEN, len(every) // SHORTEST)]
        # nanoseconds since a node's start would lose digits as a float
        near = taken[0][1]
        offset = near + round(median([apart - near for _, apart in taken]))
        at_ns += [offset] * len(chunk)
        strays += [apart - offset for _, apart in taken]
        least += [transfer for transfer, _ in taken]
    strays.sort()
    cut = len(strays) // 20
    return Offsets(tuple(at_ns), max((strays[-1 - cut] - strays[cut]) / 2, median(least)))
