"""How fast the links between nodes carry what ranks send, by the kernel's counts of their connections, and a slow one among them.

A collective is as slow as its slowest link, and from its time alone nobody can say which that is: all ranks wait alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trainpace.core.records import Record
from trainpace.watch.inside.trail import TRIALS, Step

LEAST_BYTES = 1_000_000
"""A connection that sent less says nothing about its link; those of a rendezvous do."""
LITTLE = 20
"""A connection carries little that carries less than one part in so many of what the largest to the same peer does."""
LEAST_BUSY_US = 20_000
"""The kernel counts in ticks of up to 10 ms."""
SLOW = 1.5
"""A link is slow that takes so many times as long as the usual one for the same bytes."""


class LinkRate(Record):
    """What `sender` sent to `receiver` in a step, and how fast while something was on its way: a slow link, or a sender that
    its network holds back, shows in it, a receiver that computes does not."""

    sender: str
    receiver: str
    mb_per_step: float
    mbit_per_s: float


class SlowLink(Record):
    """`ms`: how much longer a step takes than if the link were as fast as the usual one, if nothing hides it. `at_least`: the
    usual one is held back by this one too, as between two nodes, so that it costs more."""

    sender: str
    receiver: str
    mbit_per_s: float
    usual_mbit_per_s: float
    ms: float
    at_least: bool = False


def link_rates(
    trails: Mapping[int, Sequence[Any]], nodes: Mapping[int, str]
) -> tuple[LinkRate, ...]:
    """The links between nodes, from the records of each rank's trail; the connections of two nodes' ranks together."""
    counted = {
        rank: [r for r in records if isinstance(r, dict) and "links" in r]
        for rank, records in trails.items()
    }
    at = {
        own: nodes[rank] for rank, notes in counted.items() for n in notes for own, *_ in n["links"]
    }
    exchanging = {
        r: _steps_between(trails[r], notes[0], notes[-1]) for r, notes in counted.items() if notes
    }
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    steps: dict[tuple[str, str], int] = {}
    for rank, notes in counted.items():
        if len(notes) < 2:
            continue
        first, last = _by_peer(notes[0]["links"]), _by_peer(notes[-1]["links"])
        for peer, (sent, busy_us) in last.items():
            before = first.get(peer, (0, 0))
            if peer in at and at[peer] != nodes[rank]:
                link = nodes[rank], at[peer]
                sums[link][0] += sent - before[0]
                sums[link][1] += busy_us - before[1]
                steps[link] = max(steps.get(link, 1), exchanging[rank])
    return tuple(
        LinkRate(
            sender=sender,
            receiver=receiver,
            mb_per_step=sent / 1e6 / steps[sender, receiver],
            mbit_per_s=8 * sent / busy,
        )
        for (sender, receiver), (sent, busy) in sorted(sums.items())
        if sent >= LEAST_BYTES and busy >= LEAST_BUSY_US
    )


def _steps_between(records: Sequence[Any], first: dict[str, Any], last: dict[str, Any]) -> int:
    """Those after one look at the links up to another, without those whose exchange an intervention left out; settling steps are
    of the intervention that follows."""
    begin, end = int(first["link_steps"]), int(last["link_steps"])
    left_out, settling = 0, 0
    for step in (r for r in records if isinstance(r, Step) and begin < r.number <= end):
        if TRIALS[step.trial] == "settling":
            settling += 1
        else:
            left_out += settling + 1 if TRIALS[step.trial] == "no_sync" else 0
            settling = 0
    return end - begin - left_out


def _by_peer(connections: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Of several connections to one peer those that carry much: what a rendezvous says now and then is acknowledged late, and so
    would count as slow."""
    to_peer = defaultdict(list)
    for _, peer, sent, busy_us in connections:
        to_peer[peer].append((int(sent), int(busy_us)))
    sums = {}
    for peer, counts in to_peer.items():
        carry = [count for count in counts if count[0] * LITTLE >= max(counts)[0]]
        sums[peer] = sum(sent for sent, _ in carry), sum(busy_us for _, busy_us in carry)
    return sums


def slow_links(rates: Sequence[LinkRate]) -> tuple[SlowLink, ...]:
    """Links that are slower than the usual one, the slowest first. The usual one is the slowest of the fastest quarter, since a
    slow link also holds back the acknowledgements of what is sent to its sender; that other direction is not told.
    """
    if len(rates) < 2:
        return ()
    usual = sorted(rates, key=lambda r: -r.mbit_per_s)[(len(rates) - 1) // 4]
    slow: list[SlowLink] = []
    for r in sorted(rates, key=lambda r: r.mbit_per_s):
        if r.mbit_per_s * SLOW < usual.mbit_per_s and r.receiver not in {s.sender for s in slow}:
            slow.append(
                SlowLink(
                    sender=r.sender,
                    receiver=r.receiver,
                    mbit_per_s=r.mbit_per_s,
                    usual_mbit_per_s=usual.mbit_per_s,
                    ms=8e3 * r.mb_per_step * (1 / r.mbit_per_s - 1 / usual.mbit_per_s),
                    at_least=usual.receiver == r.sender,
                )
            )
    return tuple(slow)
