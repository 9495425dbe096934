"""A step's milliseconds by cause, from the parts of the trail and the interventions together. They add up to the step."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from trainpace.diagnose.interventions import fixed_ms, of_trial, own_pace_ms, part_ms, proof
from trainpace.watch import Rank

STRAGGLES = 0.05
"""A rank slower than the others' mean by this share is a straggler that makes them wait."""

IN_WORDS = {
    "data": "waiting for data",
    "host_to_device": "copies to the device",
    "launch": "host overhead (launching operators)",
    "compute": "computing",
    "optimizer": "the optimizer",
    "communication": "exchange between ranks",
    "straggler": "waiting for the slowest rank",
    "logging": "logging and synchronisation",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "own_code": "the script's own code between these",
    "trainpace": "this recording",
}
CAUSES = tuple(IN_WORDS)


class Split(NamedTuple):
    """Mean milliseconds per step by cause, over the ranks that wait for a straggler if there is one, else over all; and
    the causes that an intervention has shown. `fixed_ms`: the part of forward and backward that does not depend on the batch."""

    by_cause: dict[str, float]
    proved: frozenset[str]
    slowest_rank: int | None
    fixed_ms: float | None = None


def split(ranks: Sequence[Rank]) -> Split:
    """Divide the step of these ranks by cause. Without interventions, overlapped communication is taken from DDP's own
    counters, and launch overhead cannot be told from computation."""
    proved = set()
    paces = own_pace_ms(ranks)
    others, slowest, straggler = ranks, None, 0.0
    if paces is not None and len(ranks) > 1:
        last = paces.index(max(paces))
        rest = [pace for i, pace in enumerate(paces) if i != last]
        behind = paces[last] - fmean(rest)
        if behind > STRAGGLES * paces[last]:
            others, slowest, straggler = [r for r in ranks if r is not ranks[last]], ranks[last].rank, behind
    parts = {part: fmean(r.parts_ms[part] for r in others) for part in ranks[0].parts_ms}
    communication = parts["communication"]
    if paces is not None and len(ranks) > 1:
        plain = [fmean(b.step_ms for b in of_trial(r, "plain")) for r in ranks]
        exchange = proof(ranks, "no_sync")
        assert exchange is not None
        if exchange.low_ms > 0 or not communication:  # noise may hide what blocking calls show
            communication = max(0.0, fmean(plain) - max(paces))
            proved |= {"communication", "straggler"}
    elif ranks[0].ddp:
        communication += _exposed_by_ddp(ranks)
    waiting = communication + straggler
    forward, backward, optimizer = _take(
        waiting - parts["communication"], parts["forward"], parts["backward"], parts["optimizer"]
    )
    computing = forward + backward
    launch, fixed = 0.0, None
    in_backward = [_waiting_in_blocks(r, waiting - parts["communication"]) for r in others]
    lines = [f for r, w in zip(others, in_backward, strict=True) if (f := fixed_ms(r, w)) is not None]
    large = [r.large_operators_ms for r in others if r.large_operators_ms is not None]
    if lines:
        fixed = min(fmean(lines), computing)
        launch = fixed
    if large:
        proved |= {"launch", "compute"}
        launch = max(0.0, computing - fmean(large))
    for cause, trial in (("data", "cached_batch"), ("logging", "muted")):
        if proof(ranks, trial) is not None:
            proved.add(cause)
    by_cause = {
        "data": parts["data"] + parts["loader_start"], "host_to_device": parts["host_to_device"], "launch": launch,
        "compute": computing - launch, "optimizer": optimizer, "communication": communication, "straggler": straggler,
        "logging": parts["logging"] + parts["synchronisation"], "checkpoint": parts["checkpoint"],
        "evaluation": parts["evaluation"], "own_code": parts["other"], "trainpace": parts["trainpace"],
    }  # fmt: skip
    surplus = math.fsum(by_cause.values()) - math.fsum(parts.values())
    if surplus > 0:  # ranks waited in parts that are not the model's
        by_cause["own_code"] = max(0.0, by_cause["own_code"] - surplus)
    return Split(by_cause, frozenset(proved), slowest, fixed)


def _waiting_in_blocks(rank: Rank, waiting_ms: float) -> float:
    """The waiting of a step that remains in its forward and backward."""
    inside = part_ms(rank, "plain", "forward", "backward")
    return min(max(0.0, waiting_ms), inside or 0.0)


def _exposed_by_ddp(ranks: Sequence[Rank]) -> float:
    """Exposed communication by DistributedDataParallel's counters (nanoseconds per backward)."""
    exposed = []
    for rank in ranks:
        whole = rank.ddp.get("avg_backward_comm_time", 0) - rank.ddp.get("avg_backward_compute_comm_overlap_time", 0)
        exposed.append(max(0.0, whole / 1e6) * (1.0 if rank.skips_sync else max(1.0, rank.micro_steps)))
    return min(fmean(exposed), fmean(r.parts_ms["backward"] for r in ranks))


def _take(waiting: float, forward: float, backward: float, optimizer: float) -> tuple[float, float, float]:
    """Waiting that has no part of its own lies first in backward, then in forward (all-gathered parameters) and the
    optimizer. A negative value is collectives' own time that would have been spent computing anyway, and is given back
    to backward."""
    if waiting < 0:
        return forward, backward - waiting, optimizer
    values = []
    for part in (backward, forward, optimizer):
        taken = min(part, waiting)
        waiting -= taken
        values.append(part - taken)
    return values[1], values[0], values[2]
