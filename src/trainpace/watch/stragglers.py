"""Effects of ranks on each other: stragglers, collectives, clocks and links.

A collective is as slow as its slowest link, and all ranks wait equally long. Thus its time alone
does not show the slow link. The kernel's byte counts of each connection do.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median_low
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.core.stats import consecutive_blocks, mean_and_half_width, median
from trainpace.watch.event_logs import Notes
from trainpace.watch.inside.event_log import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    LOADER_START,
    NO_SYNC,
    OPTIMIZER,
    PLAIN,
    SETTLING,
    Span,
    Step,
)
from trainpace.watch.inside.ranks import GRADIENTS

WARM_UP_STEPS = 3
"""Number of first steps that count as warm-up."""
LEAVE_TOGETHER = (
    GRADIENTS,
    "all_reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_gather",
    "all_to_all_single",
    "all_to_all",
    "barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_object",
)
"""Recorded names of the collectives that no rank can leave before all ranks have arrived."""
HOST_WAITS = frozenset(("gloo", "mpi"))
"""Backends whose collectives end when the call returns.

With other backends, a device waits, and the host does not know when the collective ends.
"""


class Collective(NamedTuple):
    """One collective on one rank, with times of its host's clock."""

    name: str
    arrives_ns: int
    leaves_ns: int


class RankStep(NamedTuple):
    """One step of one rank.

    Attributes:
        together: Collectives that all ranks leave together.
        by_name_ns: Time in collectives by name, for all collectives.
        calls: Number of calls by name, for all collectives.
        input_elements: Size of the model's largest input, or 0 if it was not counted.
    """

    number: int
    parts_ns: tuple[int, ...]
    together: tuple[Collective, ...]
    by_name_ns: dict[str, int]
    calls: dict[str, int]
    input_elements: int

    @property
    def communication_ns(self) -> int:
        return self.parts_ns[COMMUNICATION]

    def own_ns(self) -> int:
        """Return the time of the step without communication, which is the rank's own pace."""
        return sum(self.parts_ns) - self.communication_ns


def rank_steps(records: Iterable[Any]) -> dict[int, RankStep]:
    """Return the steps of one event log that can be compared between ranks, by step number.

    These are plain steps after the warm-up, with spans and without an evaluation. Evaluations are
    excluded because their collectives do not occur in every step. The result is empty if the host
    does not wait for collectives.
    """
    steps: list[tuple[Step, list[Span]]] = []
    notes, spans = Notes(), list[Span]()
    for r in records:
        if isinstance(r, Span):
            if r.thread == 0:
                spans.append(r)
            continue
        notes.add(r)
        if isinstance(r, Step):
            is_plain = r.trial == PLAIN and not r.parts_ns[EVALUATION]
            if spans and is_plain and r.number >= WARM_UP_STEPS:
                steps.append((r, [s for s in spans if s.part == COMMUNICATION]))
            spans = []
    if any(notes.values("accelerator")) or not set(notes.values("backend")) <= HOST_WAITS:
        return {}
    sizes = notes.by_step("input_elements")
    names = notes.span_names
    return {
        step.number: _rank_step(step, found, names, sizes.get(step.number, 0))
        for step, found in steps
    }


def _rank_step(step: Step, spans: Sequence[Span], names: Mapping[int, str], size: int) -> RankStep:
    together, by_name, calls, until = [], Counter[str](), Counter[str](), step.start_ns
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        if until < span.end_ns <= step.end_ns:
            name = names.get(span.name, "")
            by_name[name] += span.end_ns - max(span.start_ns, until)
            calls[name] += 1
            until = span.end_ns
            if name in LEAVE_TOGETHER:
                together.append(Collective(name, span.start_ns, span.end_ns))
    return RankStep(step.number, step.parts_ns, tuple(together), dict(by_name), dict(calls), size)


def common(ranks: Mapping[int, Mapping[int, RankStep]]) -> dict[int, list[RankStep]]:
    """Return, by rank, the steps with the same collectives in the same order on all ranks."""
    first, *rest = ranks.values()

    def alike(number: int) -> bool:
        names = [[e.name for e in steps[number].together] for steps in ranks.values()]
        return bool(names[0]) and all(n == names[0] for n in names)

    numbers = [n for n in sorted(first) if all(n in steps for steps in rest) and alike(n)]
    return {rank: [steps[n] for n in numbers] for rank, steps in ranks.items()}


class Clock(Record):
    """Clock of a node, compared with the clock of the first rank's node.

    Attributes:
        offset_ms: How far the clock is ahead, in milliseconds. Event logs use this clock, which
            counts from each node's own start.
        uncertainty_ms: Transfer time, within which ranks may leave a collective one after the
            other.
        wall_ms: How far the node's time of day is ahead.
    """

    node: str
    offset_ms: float
    uncertainty_ms: float
    wall_ms: float = 0.0


def offsets_ns(steps: Mapping[int, Sequence[RankStep]], nodes: Mapping[int, str]) -> dict[str, int]:
    """Return how far the clock of each node is ahead of the lowest rank's node, in ns.

    Ranks leave a collective at about the same moment. The offset is the median over collectives.
    """
    zero = steps[min(steps)]
    first_of: dict[str, Sequence[RankStep]] = {}
    for rank in sorted(steps):
        first_of.setdefault(nodes[rank], steps[rank])
    return {node: _offset_ns(mine, zero) for node, mine in first_of.items()}


def _offset_ns(mine: Sequence[RankStep], zero: Sequence[RankStep]) -> int:
    return median_low(
        a.leaves_ns - b.leaves_ns
        for x, y in zip(mine, zero, strict=True)
        for a, b in zip(x.together, y.together, strict=True)
    )


# ---- links

LEAST_BYTES = 1_000_000
"""Least number of bytes for a rate.

Connections that sent less, such as rendezvous connections, do not show the speed of a link.
"""
LITTLE = 20
"""Ratio below which a connection is ignored.

A connection is ignored if the largest connection to the same peer carries more than this many times
as much.
"""
LEAST_BUSY_US = 20_000
"""Least busy time for a rate. The kernel counts in ticks of up to 10 ms."""
SLOW = 1.5
"""Ratio to the usual link's time for the same bytes above which a link is slow."""


class LinkRate(Record):
    """Bytes that `sender` sent to `receiver` per step, and the rate while data was in flight.

    The rate shows a slow link, or a sender that its network limits. It does not depend on a
    receiver that is busy computing.
    """

    sender: str
    receiver: str
    mb_per_step: float
    mbit_per_s: float


class SlowLink(Record):
    """A slow link between two nodes.

    Attributes:
        ms: Time per step that the link costs compared with the usual link, if nothing hides it.
        at_least: The link also slows down the usual link, as between two nodes, so the cost is
            higher.
    """

    sender: str
    receiver: str
    mbit_per_s: float
    usual_mbit_per_s: float
    ms: float
    at_least: bool = False


def link_rates(logs: Mapping[int, Sequence[Any]], nodes: Mapping[int, str]) -> tuple[LinkRate, ...]:
    """Return the rates of the links between nodes, over all connections between their ranks.

    Args:
        logs: Records of each rank's event log.
        nodes: Node of each rank.
    """
    counted = {
        rank: [r for r in records if isinstance(r, dict) and "links" in r]
        for rank, records in logs.items()
    }
    node_at = {
        own: nodes[rank] for rank, notes in counted.items() for n in notes for own, *_ in n["links"]
    }
    links: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, notes in counted.items():
        for peer, counts in _sent(logs[rank], notes):
            links[nodes[rank], node_at.get(peer, nodes[rank])].append(counts)
    rates = []
    for (sender, receiver), sums in sorted(links.items()):
        sent, busy_us = (sum(counts[which] for counts in sums) for which in (0, 1))
        if sender != receiver and sent >= LEAST_BYTES and busy_us >= LEAST_BUSY_US:
            steps = max(1, *(counts[2] for counts in sums))
            rates.append(
                LinkRate(
                    sender=sender,
                    receiver=receiver,
                    mb_per_step=sent / 1e6 / steps,
                    mbit_per_s=8 * sent / busy_us,
                )
            )
    return tuple(rates)


def _sent(
    records: Sequence[Any], notes: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield (peer, (bytes, busy microseconds, steps)) between the first and the last count."""
    if len(notes) < 2:
        return
    before, steps = _by_peer(notes[0]["links"]), _steps_between(records, notes[0], notes[-1])
    for peer, (sent, busy_us) in _by_peer(notes[-1]["links"]).items():
        sent_before, busy_before_us = before.get(peer, (0, 0))
        yield peer, (sent - sent_before, busy_us - busy_before_us, steps)


def _steps_between(records: Sequence[Any], first: dict[str, Any], last: dict[str, Any]) -> int:
    """Return the number of steps between two counts of the links.

    Steps without gradient communication are excluded. Settling steps count like the intervention
    that follows them.
    """
    begin, end = int(first["link_steps"]), int(last["link_steps"])
    silent = settling = 0
    for step in (r for r in records if isinstance(r, Step) and begin < r.number <= end):
        if step.trial == SETTLING:
            settling += 1
        else:
            silent += settling + 1 if step.trial == NO_SYNC else 0
            settling = 0
    return end - begin - silent


def _by_peer(connections: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Return (bytes, busy microseconds) for each peer, summed over connections that carry much.

    Rendezvous messages are acknowledged late, and would make a link seem slow.
    """
    to_peer = defaultdict(list)
    for _, peer, sent, busy_us in connections:
        to_peer[peer].append((int(sent), int(busy_us)))
    sums = {}
    for peer, counts in to_peer.items():
        carry = [count for count in counts if count[0] * LITTLE >= max(counts)[0]]
        sums[peer] = sum(sent for sent, _ in carry), sum(busy_us for _, busy_us in carry)
    return sums


def slow_links(rates: Sequence[LinkRate]) -> tuple[SlowLink, ...]:
    """Return the links that are slower than the usual link, slowest first.

    The usual link is the slowest link of the fastest quarter. A slow link also delays the
    acknowledgements of data sent in the other direction. That direction is not reported.
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


LEAST_STEPS = 5
"""Least number of common steps for a comparison of ranks."""
BEHIND = 0.05
"""Least share of a step for a straggler's delay or a waiting time to be reported."""
MORE = 1.1
"""Least ratio of input sizes that counts as a larger input."""
ROUNDING_MS = 1e-6
"""Smaller times are rounding errors."""
COMPUTE, DATA_PARTS = (FORWARD, BACKWARD, OPTIMIZER), (DATA, LOADER_START)
Cause = Literal["data", "inputs", "compute", "host"]


class RankShare(Record):
    """Mean step of one rank, divided by activity. The parts add up to the step.

    Attributes:
        waiting_ms: Time at collectives until the last rank arrives.
        transfer_ms: Time in collectives after all ranks have arrived.
        undivided_ms: Communication that cannot be divided in this way.
        input_elements: Size of the model's largest input per step. For a language model, the number
            of tokens.
    """

    rank: int
    node: str
    step_ms: float
    compute_ms: float
    data_ms: float
    host_ms: float
    waiting_ms: float
    transfer_ms: float
    undivided_ms: float
    input_elements: float


class CollectiveShare(Record):
    """One kind of collective, as the mean over ranks.

    `waiting_ms` and `transfer_ms` are None if they cannot be separated. Then ranks do not leave the
    collective together, or the script waits for it later.
    """

    name: str
    per_step: float
    exposed_ms: float
    waiting_ms: float | None = None
    transfer_ms: float | None = None


class Straggler(Record):
    """A rank that arrives later than the others.

    Attributes:
        ms: Delay per step.
        ms_low: Lower end of the delay's 90% interval.
        ms_high: Upper end of the delay's 90% interval.
        cause: Main reason for the delay. "data": waiting for data. "inputs": larger inputs.
            "compute": slower computing on the same inputs. "host": the rest.
        cause_ms: Part of the delay from this cause. It exceeds `ms` if another part is shorter.
        elements: Size of the rank's inputs.
        usual_elements: Size of the other ranks' inputs.
    """

    rank: int
    node: str
    ms: float
    ms_low: float
    ms_high: float
    cause: Cause
    cause_ms: float
    elements: float = 0.0
    usual_elements: float = 0.0


class Together(Record):
    """Effects of ranks on each other, over `steps` steps.

    Attributes:
        uneven_ms: Mean waiting per step because input sizes differ. Set if no rank is always late,
            but the rank with the largest inputs is last in most steps. Otherwise None.
    """

    steps: int
    ranks: tuple[RankShare, ...]
    collectives: tuple[CollectiveShare, ...]
    stragglers: tuple[Straggler, ...]
    slow_links: tuple[SlowLink, ...]
    links: tuple[LinkRate, ...]
    clocks: tuple[Clock, ...]
    uneven_ms: float | None = None


Steps = Mapping[int, Sequence[RankStep]]
Divided = dict[int, list[list[tuple[float, float]]]]
"""Milliseconds of (waiting for the last rank, transfer), by rank, step and collective."""


def together(
    by_rank: Mapping[int, Mapping[int, RankStep]],
    nodes: Mapping[int, str],
    rates: Sequence[LinkRate],
) -> Together | None:
    """Compare the ranks.

    Args:
        by_rank: Steps of each rank by number, from `rank_steps`.
        nodes: Node of each rank.
        rates: Rates of the links between nodes.

    Returns:
        The comparison. None for a single rank, or if too few steps have common collectives.
    """
    if len(by_rank) < 2:
        return None
    steps = common(by_rank)
    count = len(next(iter(steps.values())))
    if count < LEAST_STEPS:
        return None
    divided = _divided(steps)
    transfer_ms = median([ms for parts in divided[min(steps)] for _, ms in parts])
    shares = tuple(_share(rank, nodes[rank], steps[rank], divided[rank]) for rank in sorted(steps))
    behind = _stragglers(steps, shares)
    return Together(
        steps=count,
        ranks=shares,
        collectives=_collectives(steps, divided),
        stragglers=behind,
        slow_links=_exposed(slow_links(rates), shares),
        links=tuple(rates),
        clocks=tuple(
            Clock(node=node, offset_ms=ns / 1e6, uncertainty_ms=transfer_ms)
            for node, ns in list(offsets_ns(steps, nodes).items())[1:]
        ),
        uneven_ms=None if behind else _uneven_ms(steps, shares),
    )


def _divided(steps: Steps) -> Divided:
    """Divide the time of every collective at the moment when the last rank arrives.

    All ranks leave at the same moment, so the rank with the shortest time arrives last. This needs
    no common clock.
    """
    divided: Divided = {rank: [] for rank in steps}
    for at_once in zip(*steps.values(), strict=True):
        times = [[e.leaves_ns - e.arrives_ns for e in step.together] for step in at_once]
        transfers = [min(same) for same in zip(*times, strict=True)]
        for rank, spent in zip(steps, times, strict=True):
            divided[rank].append(
                [((ns - t) / 1e6, t / 1e6) for ns, t in zip(spent, transfers, strict=True)]
            )
    return divided


def _share(
    rank: int,
    node: str,
    steps: Sequence[RankStep],
    divided: Sequence[Sequence[tuple[float, float]]],
) -> RankShare:
    compute, data, step = (
        _mean_ms(steps, parts) for parts in (COMPUTE, DATA_PARTS, range(len(steps[0].parts_ns)))
    )
    exchange = fmean(s.communication_ns for s in steps) / 1e6
    waiting, transfer = (
        fmean(math.fsum(parts[which] for parts in s) for s in divided) for which in (0, 1)
    )
    # A collective that also converts an object to a tensor has less communication time of its own.
    waiting = min(waiting, exchange)
    transfer = min(transfer, exchange - waiting)
    undivided = exchange - waiting - transfer
    return RankShare(
        rank=rank,
        node=node,
        step_ms=step,
        compute_ms=compute,
        data_ms=data,
        host_ms=step - compute - data - exchange,
        waiting_ms=waiting,
        transfer_ms=transfer,
        undivided_ms=undivided if undivided > ROUNDING_MS else 0.0,
        input_elements=fmean(s.input_elements for s in steps),
    )


def _mean_ms(steps: Sequence[RankStep], parts: Sequence[int]) -> float:
    return fmean(sum(s.parts_ns[part] for part in parts) for s in steps) / 1e6


def _collectives(steps: Steps, divided: Divided) -> tuple[CollectiveShare, ...]:
    """Return the collectives, sorted by exposed time, the largest first."""
    every = [
        (s, parts) for rank in steps for s, parts in zip(steps[rank], divided[rank], strict=True)
    ]
    of_name: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for s, parts in every:
        for collective, part in zip(s.together, parts, strict=True):
            of_name[collective.name].append(part)
    count = len(every)

    def share(name: str) -> CollectiveShare:
        waits, transfers = zip(*of_name.get(name, [(0.0, 0.0)]), strict=True)
        is_divided = name in of_name
        return CollectiveShare(
            name=name,
            per_step=sum(s.calls.get(name, 0) for s, _ in every) / count,
            exposed_ms=fmean(s.by_name_ns.get(name, 0) for s, _ in every) / 1e6,
            waiting_ms=math.fsum(waits) / count if is_divided else None,
            transfer_ms=math.fsum(transfers) / count if is_divided else None,
        )

    found = map(share, {name for s, _ in every for name in s.by_name_ns})
    return tuple(sorted(found, key=lambda c: (-c.exposed_ms, c.name)))


def _stragglers(steps: Steps, shares: Sequence[RankShare]) -> tuple[Straggler, ...]:
    """Return the ranks whose own pace is slower than usual, slowest first."""
    own = {rank: [s.own_ns() / 1e6 for s in steps[rank]] for rank in steps}
    mean = {rank: fmean(times) for rank, times in own.items()}
    least = BEHIND * fmean(s.step_ms for s in shares)
    middle = sorted(mean.values())[(len(mean) - 1) // 2]
    usual = [share for share in shares if mean[share.rank] - middle <= least]
    usual_ms = [fmean(times) for times in zip(*(own[s.rank] for s in usual), strict=True)]
    found = []
    for share in (share for share in shares if share not in usual):
        behind = [a - b for a, b in zip(own[share.rank], usual_ms, strict=True)]
        half, ms = half_width_ms(behind), fmean(behind)
        if ms > max(half, least):
            found.append(_straggler(share, usual, ms, half))
    return tuple(sorted(found, key=lambda s: -s.ms))


def half_width_ms(times: Sequence[float]) -> float:
    """Return half the width of the mean's 90% interval.

    It comes from means of consecutive blocks, since neighboring steps are correlated.
    """
    return mean_and_half_width([fmean(block) for block in consecutive_blocks(times, 10)])[1]


def _straggler(share: RankShare, usual: Sequence[RankShare], ms: float, half: float) -> Straggler:
    means = {
        name: fmean(getattr(u, name) for u in usual)
        for name in ("data_ms", "compute_ms", "host_ms", "input_elements")
    }
    more: dict[Cause, float] = {
        "data": share.data_ms - means["data_ms"],
        "compute": share.compute_ms - means["compute_ms"],
        "host": share.host_ms - means["host_ms"],
    }
    cause = max(more, key=lambda c: more[c])
    cause_ms = more[cause]
    elements, usual_elements = share.input_elements, means["input_elements"]
    if cause == "compute" and elements > MORE * usual_elements > 0:
        # If the work grows with the inputs, larger inputs explain at least half of the difference.
        # Otherwise something else is slow as well.
        expected_ms = means["compute_ms"] * (elements / usual_elements - 1)
        cause = "inputs" if expected_ms >= cause_ms / 2 else cause
    return Straggler(
        rank=share.rank,
        node=share.node,
        ms=ms,
        ms_low=ms - half,
        ms_high=ms + half,
        cause=cause,
        cause_ms=cause_ms,
        elements=elements,
        usual_elements=usual_elements,
    )


def _uneven_ms(steps: Steps, shares: Sequence[RankShare]) -> float | None:
    waiting = fmean(s.waiting_ms for s in shares)
    if waiting < BEHIND * fmean(s.step_ms for s in shares):
        return None
    at_once = list(zip(*steps.values(), strict=True))
    fit = [
        max(ranks, key=RankStep.own_ns).input_elements == most
        for ranks in at_once
        if (most := max(s.input_elements for s in ranks))
        > MORE * min(s.input_elements for s in ranks)
    ]
    return waiting if 2 * len(fit) > len(at_once) and 2 * sum(fit) > len(fit) else None


def _exposed(found: Sequence[SlowLink], shares: Sequence[RankShare]) -> tuple[SlowLink, ...]:
    """Return the slow links whose time is not hidden.

    The cost of a link is limited to the transfer time that ranks are seen to wait for.
    """
    transfer = median([s.transfer_ms + s.undivided_ms for s in shares])
    least = BEHIND * fmean(s.step_ms for s in shares)
    exposed = (replace(s, ms=min(s.ms, transfer)) for s in found)
    return tuple(s for s in exposed if s.ms > least)
