"""Where the steps of ranks that train together go, which of them is behind the others, by how much, and why."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from msgspec.structs import replace

from trainpace.core.records import Record
from trainpace.core.stats import consecutive_blocks, mean_and_half_width, median
from trainpace.watch.clocks import Clock, clocks, offsets
from trainpace.watch.exchanges import RankStep, common
from trainpace.watch.inside.trail import BACKWARD, DATA, FORWARD, LOADER_START, OPTIMIZER
from trainpace.watch.links import LinkRate, SlowLink, slow_links

LEAST_STEPS = 5
BEHIND = 0.05
"""A rank that is behind the others by a smaller share of a step is no straggler, nor is a smaller wait for it told."""
MORE = 1.1
"""Inputs hold more where they hold so many times the others'."""
ROUNDING_MS = 1e-6
COMPUTE, DATA_PARTS = (FORWARD, BACKWARD, OPTIMIZER), (DATA, LOADER_START)
Cause = Literal["data", "inputs", "compute", "host"]


class RankShare(Record):
    """The mean step of one rank by what it does; the parts add up to it. `waiting_ms`: for the last rank to arrive at a
    collective; `transfer_ms`: in collectives once all have arrived; `undivided_ms`: in exchange that cannot be divided so.
    `input_elements`: numbers in the largest input of the model, a step; for a language model, tokens.
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
    """One kind of collective, the mean over ranks: how often in a step, and what it exposes. `waiting_ms` and `transfer_ms` are
    None where they cannot be told apart: where not all ranks leave it together, or it is waited for later.
    """

    name: str
    per_step: float
    exposed_ms: float
    waiting_ms: float | None = None
    transfer_ms: float | None = None


class Straggler(Record):
    """A rank that comes later than the others: by `ms` a step, with its 90 % interval, of them `cause_ms` for this cause.

    Causes: its data; more numbers in its inputs, `elements` against the others' `usual_elements`; its computing, for the same
    inputs; or its host, which is all else. Milliseconds of the cause may be more than its own: another part may be shorter.
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
    """What ranks that train together do to each other, over `steps` steps. `uneven_ms`: a step's mean waiting where no rank is
    always behind, but the one with the most in its inputs is the last in most steps; None elsewhere.
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
"""By rank, step and collective: milliseconds of waiting for the last rank, and of transfer."""


def together(
    by_rank: Mapping[int, Mapping[int, RankStep]],
    nodes: Mapping[int, str],
    rates: Sequence[LinkRate],
) -> Together | None:
    """None for one rank alone, and where too few steps have collectives that all ranks leave together."""
    if len(by_rank) < 2:
        return None
    steps = common(by_rank)
    count = len(next(iter(steps.values())))
    if count < LEAST_STEPS:
        return None
    known = offsets(steps, nodes)
    divided = _divided(steps, nodes, {node: o.at_ns for node, o in known.items()})
    shares = tuple(_share(rank, nodes[rank], steps[rank], divided[rank]) for rank in sorted(steps))
    behind = _stragglers(steps, shares)
    return Together(
        steps=count,
        ranks=shares,
        collectives=_collectives(steps, divided),
        stragglers=behind,
        slow_links=_exposed(slow_links(rates), shares),
        links=tuple(rates),
        clocks=clocks(known),
        uneven_ms=None if behind else _uneven_ms(steps, shares),
    )


def _divided(steps: Steps, nodes: Mapping[int, str], known: Mapping[str, Sequence[int]]) -> Divided:
    """Every collective's time, divided where the last rank arrives."""
    divided: Divided = {rank: [] for rank in steps}
    for i in range(len(next(iter(steps.values())))):
        shift = {rank: known[nodes[rank]][i] for rank in steps}
        last = [
            max(steps[rank][i].together[k].arrives_ns - shift[rank] for rank in steps)
            for k in range(len(next(iter(steps.values()))[i].together))
        ]
        for rank in steps:
            parts = []
            for exchange, last_ns in zip(steps[rank][i].together, last, strict=True):
                whole = exchange.leaves_ns - exchange.arrives_ns
                waits = min(max(last_ns - (exchange.arrives_ns - shift[rank]), 0), whole)
                parts.append((waits / 1e6, (whole - waits) / 1e6))
            divided[rank].append(parts)
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
    exchange = fmean(s.exchange_ns for s in steps) / 1e6
    waiting, transfer = (
        fmean(math.fsum(parts[which] for parts in s) for s in divided) for which in (0, 1)
    )
    # a collective that does something else meanwhile, as turning an object into a tensor, has less time of its own
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
    """The one that exposes most first."""
    every = [
        (s, parts) for rank in steps for s, parts in zip(steps[rank], divided[rank], strict=True)
    ]
    found = []
    for name in {name for s, _ in every for name in s.by_name_ns}:
        of_name = [
            part
            for s, parts in every
            for e, part in zip(s.together, parts, strict=True)
            if e.name == name
        ]
        waiting, transfer = (
            math.fsum(part[which] for part in of_name) / len(every) for which in (0, 1)
        )
        found.append(
            CollectiveShare(
                name=name,
                per_step=sum(s.calls.get(name, 0) for s, _ in every) / len(every),
                exposed_ms=fmean(s.by_name_ns.get(name, 0) for s, _ in every) / 1e6,
                waiting_ms=waiting if of_name else None,
                transfer_ms=transfer if of_name else None,
            )
        )
    return tuple(sorted(found, key=lambda c: (-c.exposed_ms, c.name)))


def _stragglers(steps: Steps, shares: Sequence[RankShare]) -> tuple[Straggler, ...]:
    """Ranks whose own pace, which is the step without exchange, is behind that of the usual ones; the last one first."""
    own = {rank: [s.own_ns() / 1e6 for s in steps[rank]] for rank in steps}
    mean = {rank: fmean(times) for rank, times in own.items()}
    whole = fmean(s.step_ms for s in shares)
    middle = sorted(mean.values())[(len(mean) - 1) // 2]
    usual = [rank for rank in mean if mean[rank] - middle <= BEHIND * whole]
    of_usual = [s for s in shares if s.rank in usual]
    found = []
    for share in shares:
        if share.rank in usual:
            continue
        each = [
            a - fmean(b)
            for a, b in zip(
                own[share.rank], zip(*(own[r] for r in usual), strict=True), strict=True
            )
        ]
        _, half = mean_and_half_width([fmean(block) for block in consecutive_blocks(each, 10)])
        ms = fmean(each)
        if ms > max(half, BEHIND * whole):
            found.append(
                Straggler(
                    rank=share.rank,
                    node=share.node,
                    ms=ms,
                    ms_low=ms - half,
                    ms_high=ms + half,
                    **_cause(share, of_usual),
                )
            )
    return tuple(sorted(found, key=lambda s: -s.ms))


def _cause(share: RankShare, usual: Sequence[RankShare]) -> dict[str, Any]:
    more = {
        cause: getattr(share, f"{cause}_ms") - fmean(getattr(u, f"{cause}_ms") for u in usual)
        for cause in ("data", "compute", "host")
    }
    cause = max(more, key=lambda c: more[c])
    elements, usual_elements = share.input_elements, fmean(u.input_elements for u in usual)
    sizes = {"elements": elements, "usual_elements": usual_elements}
    # work that grows with its inputs takes at least half of what they hold more; else something else is slow as well
    expected = (
        fmean(u.compute_ms for u in usual) * (elements / usual_elements - 1)
        if usual_elements
        else 0.0
    )
    is_longer = elements > MORE * usual_elements > 0 and expected >= more["compute"] / 2
    return {
        "cause": "inputs" if cause == "compute" and is_longer else cause,
        "cause_ms": more[cause],
        **sizes,
    }


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
    """Those whose time is not hidden: at most as long as the transfer that ranks are seen to wait for."""
    transfer = median([s.transfer_ms + s.undivided_ms for s in shares])
    least = BEHIND * fmean(s.step_ms for s in shares)
    exposed = (replace(s, ms=min(s.ms, transfer)) for s in found)
    return tuple(s for s in exposed if s.ms > least)
