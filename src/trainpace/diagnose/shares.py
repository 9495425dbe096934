"""A step's milliseconds by cause, from the parts of the trail and the interventions together: plain blocks of steps against
blocks with one cause removed, round by round. The causes add up to the step."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from trainpace.core.records import Record
from trainpace.core.stats import mean_and_half_width
from trainpace.core.units import format_number
from trainpace.measure import KERNEL_KINDS, kind_of
from trainpace.watch import (
    BEHIND,
    FEW,
    LEAST_ROUNDS,
    PRECISE,
    Block,
    Rank,
    Together,
    batches_per_step,
)

FEW_SAMPLES = "few_samples"
"""The one intervention that removes no cause: it shows what a smaller batch does not shorten. Not every script bears it."""

IN_WORDS = {
    "data": "waiting for data",
    "host_to_device": "copies to the device",
    "launch": "host overhead (launching operators)",
    "compute": "computing",
    "contention": "computing slowed down by loader workers",
    "threads": "waiting for cores (more threads than free cores)",
    "optimizer": "the optimizer",
    "communication": "exchange between ranks",
    "straggler": "waiting for the slowest rank",
    "logging": "logging and synchronisation",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "own_code": "the script's own code between these",
    "trainpace": "Trainpace's own overhead",
}


class Advice(Record):
    """One change: its description, the saving per step, and its ceiling, the whole time of its cause.

    `settings`: the values to set, where it is a setting; `basis`: the source of the figure. `at_most`: something remains of what
    the figure counts as saved, and nobody can say how much.
    """

    cause: str
    title: str
    how: str
    saves_ms: float
    ceiling_ms: float
    basis: str
    settings: dict[str, int | str] = msgspec.field(default_factory=dict)
    at_most: bool = False


class Proof(Record):
    """A step with and without one cause, from `rounds` interleaved blocks; `saved_ms` with its 90 % interval."""

    trial: str
    plain_ms: float
    without_ms: float
    saved_ms: float
    low_ms: float
    high_ms: float
    rounds: int

    @property
    def detects_ms(self) -> float:
        """The least time of a cause that this proof could have told from noise."""
        return (self.high_ms - self.low_ms) / 2

    @property
    def settles(self) -> bool:
        """Whether it proves anything: repeated, and either some time is saved beyond the noise or the noise is small."""
        return self.rounds >= LEAST_ROUNDS and (
            self.low_ms > 0 or self.detects_ms <= PRECISE * self.plain_ms
        )


def of_trial(rank: Rank, trial: str) -> list[Block]:
    return [b for b in rank.blocks if b.trial == trial]


def proof(ranks: Sequence[Rank], trial: str) -> Proof | None:
    """The mean over ranks of plain - trial, paired by rounds; None where it was not tried. A batch that stays on the device is
    compared with the same batch on the host, and bf16, which comes after all rounds, with the plain blocks between its own.
    """
    against = "cached_batch" if trial == "batch_on_device" else "plain"
    rounds = min(min(len(of_trial(r, against)), len(of_trial(r, trial))) for r in ranks)
    if rounds < 1 or (trial == "bf16" and any(r.refuses_bf16 for r in ranks)):
        return None
    from_the_end = trial == "bf16"
    plain, without = (
        [
            fmean(of_trial(r, name)[i - rounds if from_the_end else i].step_ms for r in ranks)
            for i in range(rounds)
        ]
        for name in (against, trial)
    )
    saved, half = mean_and_half_width([a - b for a, b in zip(plain, without, strict=True)])
    return Proof(
        trial=trial,
        plain_ms=fmean(plain),
        without_ms=fmean(without),
        saved_ms=saved,
        low_ms=saved - half,
        high_ms=saved + half,
        rounds=rounds,
    )


def _left_in_ms(rank: Rank, block: Block) -> float:
    """What a block without exchange exchanged all the same, as in collectives that Trainpace does not know. Beside a device the
    host may wait in them for its own computing, and nothing is known."""
    return 0.0 if rank.accelerator else block.parts_ms["communication"]


def leaves_exchange_out(ranks: Sequence[Rank], exchange: Proof) -> bool:
    """Whether most of the exchange was really left out in the steps without it."""
    left_in = fmean(_left_in_ms(r, b) for r in ranks for b in of_trial(r, "no_sync"))
    return left_in <= max(exchange.saved_ms, PRECISE * exchange.plain_ms)


def _alone_ms(rank: Rank) -> list[float]:
    """This rank's step in each block without exchange."""
    return [b.step_ms - _left_in_ms(rank, b) for b in of_trial(rank, "no_sync")]


def own_pace_ms(ranks: Sequence[Rank]) -> list[float] | None:
    """Each rank's step when no rank waits for another; None where that was not tried."""
    alone = [_alone_ms(rank) for rank in ranks]
    return [fmean(steps) for steps in alone] if all(alone) else None


def _behind_ms(ranks: Sequence[Rank], last: int) -> tuple[float, float]:
    """By how much one rank's own pace lies behind the mean of the others', and half its 90 % interval, from blocks in turns."""
    alone = [_alone_ms(rank) for rank in ranks]
    mine = alone.pop(last)
    return mean_and_half_width(
        [ms - fmean(others) for ms, *others in zip(mine, *alone, strict=False)]
    )


def part_ms(rank: Rank, trial: str, *parts: str) -> float | None:
    blocks = of_trial(rank, trial)
    return fmean(math.fsum(b.parts_ms[p] for p in parts) for b in blocks) if blocks else None


def fixed_ms(rank: Rank, not_compute_ms: float) -> float | None:
    """The part of forward and backward that does not depend on the batch: the line through a full batch and a small
    one, extrapolated to zero.

    `not_compute_ms`: time of backward spent waiting for other ranks. None where the small batch was not tried.
    """
    full = part_ms(rank, "cached_batch", "forward", "backward")
    few = part_ms(rank, FEW_SAMPLES, "forward", "backward")
    samples = rank.samples_per_step / batches_per_step(rank)
    if full is None or few is None or samples <= FEW:
        return None
    slope = max(0.0, (full - few) / (samples - FEW))
    return max(0.0, min(full, few - FEW * slope) - not_compute_ms)


def _quickest_computing_ms(rank: Rank) -> float:
    """Forward and backward in the quickest block of plain steps; without blocks, in all steps."""
    blocks = [b.parts_ms for b in of_trial(rank, "plain")] or [rank.parts_ms]
    return min(parts["forward"] + parts["backward"] for parts in blocks)


MOST_PER_OPERATOR_MS = 0.1
"""What the host needs for an operator beside computing it, at most, where other programs make everything late. A judgement: it
was 3 to 11 microseconds in scripts of others, and more in modules that do much in Python."""


def freed_ms(ranks: Sequence[Rank]) -> dict[str, float]:
    """What the parts of a step take longer with the script's own number of threads than with fewer, where that is proved."""
    tried = proof(ranks, "fewer_threads")
    if tried is None or not tried.settles or tried.low_ms <= 0:
        return {}
    longer = {
        part: fmean(
            (part_ms(r, "plain", part) or 0.0) - (part_ms(r, "fewer_threads", part) or 0.0)
            for r in ranks
        )
        for part in ranks[0].parts_ms
    }
    return {part: ms for part, ms in longer.items() if ms > 0}


def slowed_ms(ranks: Sequence[Rank]) -> float:
    """What forward and backward take longer while loader workers are busy on the same cores: blocks of plain steps against blocks
    with a cached batch, for which no worker does anything. 0 where noise or the script's own workers do not show it.
    """
    if not all(
        r.loader is not None and r.loader.workers and r.device_busy_ms is None for r in ranks
    ):
        return 0.0
    rounds = min(min(len(of_trial(r, "plain")), len(of_trial(r, "cached_batch"))) for r in ranks)
    if rounds < LEAST_ROUNDS:
        return 0.0

    def computing(trial: str, i: int) -> float:
        return fmean(
            math.fsum(of_trial(r, trial)[i].parts_ms[p] for p in ("forward", "backward"))
            for r in ranks
        )

    slowed, half = mean_and_half_width(
        [computing("plain", i) - computing("cached_batch", i) for i in range(rounds)]
    )
    return slowed if slowed - half > 0 else 0.0


CROWDED_NOISE = 2
"""Times the interval of equal ranks by which one is behind on a crowded machine, where other programs hold up now one of them and
now another for longer than a block of steps. A judgement: two equal ranks were 7.8 ms (2.4 to 13.1) apart there."""


class Split(NamedTuple):
    """Mean milliseconds per step by cause, over the ranks that wait for a straggler if there is one, else over all; and
    the causes that an intervention has shown. `fixed_ms`: the part of forward and backward that does not depend on the batch.
    """

    by_cause: dict[str, float]
    proved: frozenset[str]
    slowest_rank: int | None
    fixed_ms: float | None = None


def split(ranks: Sequence[Rank], together: Together | None = None, crowded: bool = False) -> Split:
    """Divide the step of these ranks by cause. Without interventions, a straggler is the one that the others were seen waiting
    for, communication that nobody saw is taken from DDP's own counters, and launch overhead cannot be told from computation.
    `crowded`: others took cores away, so that time beside operators need not be the host's own."""
    proved = set()
    paces = own_pace_ms(ranks)
    others, slowest, straggler = ranks, None, 0.0
    if paces is not None and len(ranks) > 1:
        last = paces.index(max(paces))
        behind, half = _behind_ms(ranks, last)
        if behind > max(BEHIND * paces[last], half * (CROWDED_NOISE if crowded else 1)):
            others, slowest, straggler = (
                [r for r in ranks if r is not ranks[last]],
                ranks[last].rank,
                behind,
            )
    elif together is not None and together.stragglers:
        slowest = together.stragglers[0].rank
        others = [r for r in ranks if r.rank != slowest]
        straggler = fmean(s.waiting_ms for s in together.ranks if s.rank != slowest)
    parts = {part: fmean(r.parts_ms[part] for r in others) for part in ranks[0].parts_ms}
    communication = parts["communication"]
    if paces is not None and len(ranks) > 1:
        plain = [fmean(b.step_ms for b in of_trial(r, "plain")) for r in ranks]
        exchange = proof(ranks, "no_sync")
        assert exchange is not None
        if (
            exchange.low_ms > 0 or straggler or not communication
        ):  # noise may hide what blocking calls show
            communication = max(0.0, fmean(plain) - max(paces))
            shown = exchange.settles and leaves_exchange_out(ranks, exchange)
            proved |= {"communication", "straggler"} if shown else set()
    else:
        if ranks[0].ddp:
            communication = max(communication, _exposed_by_ddp(ranks))
        straggler = min(straggler, communication)
        communication -= straggler
    waiting = communication + straggler
    forward, backward, optimizer = _take(
        waiting - parts["communication"], parts["forward"], parts["backward"], parts["optimizer"]
    )
    computing = forward + backward
    launch, fixed = 0.0, None
    hidden = max(0.0, waiting - parts["communication"])
    inside = [min(hidden, part_ms(r, "plain", "forward", "backward") or 0.0) for r in others]
    lines = [f for r, w in zip(others, inside, strict=True) if (f := fixed_ms(r, w)) is not None]
    large = [r.large_operators_ms for r in others if r.large_operators_ms is not None]
    if lines:
        fixed = min(fmean(lines), computing)
        launch = fixed
    if large:
        proved |= {"launch", "compute"}
        # counted in a few steps of the beginning: what others on the machine slow down later is no launching
        pace = min(computing, fmean(map(_quickest_computing_ms, others)))
        launch = computing * max(0.0, 1 - fmean(large) / pace) if pace else 0.0
        operators = fmean(r.operators for r in others)
        if crowded and operators and others[0].device_busy_ms is None:
            launch = min(launch, MOST_PER_OPERATOR_MS * operators)
    for cause, trial in (
        ("data", "cached_batch"),
        ("host_to_device", "batch_on_device"),
        ("logging", "muted"),
    ):
        tried = proof(ranks, trial)
        if tried is not None and tried.settles:
            proved.add(cause)
    slowed = 0.0 if waiting else min(slowed_ms(ranks), computing - launch)
    proved |= {"contention"} if slowed else set()
    by_cause = {
        "data": parts["data"] + parts["loader_start"],
        "host_to_device": parts["host_to_device"],
        "launch": launch,
        "compute": computing - launch - slowed,
        "contention": slowed,
        "threads": 0.0,
        "optimizer": optimizer,
        "communication": communication,
        "straggler": straggler,
        "logging": parts["logging"] + parts["synchronisation"],
        "checkpoint": parts["checkpoint"],
        "evaluation": parts["evaluation"],
        "own_code": parts["other"],
        "trainpace": parts["trainpace"],
    }
    if freed := freed_ms(others):
        proved.add("threads")
        by_cause["threads"] = _freed(by_cause, freed)
    surplus = math.fsum(by_cause.values()) - math.fsum(parts.values())
    if surplus > 0:  # ranks waited in parts that are not the model's
        by_cause["own_code"] = max(0.0, by_cause["own_code"] - surplus)
    busy = [r.device_busy_ms for r in others if r.device_busy_ms is not None]
    if busy:
        proved |= {"launch", "compute"}
        updates = [
            r.optimizer_variants_ms["as it is"]
            for r in others
            if "as it is" in r.optimizer_variants_ms
        ]
        by_cause = beside_a_device(
            by_cause,
            fmean(busy),
            fmean(r.device_copies_ms for r in others),
            parts["synchronisation"],
            fmean(updates) if updates else 0.0,
        )
        fixed = None
    return Split(by_cause, frozenset(proved), slowest, fixed)


def _freed(by_cause: dict[str, float], freed: dict[str, float]) -> float:
    """Take from the causes what their parts would need less with fewer threads; returns the sum."""
    total = 0.0
    for causes, parts in (
        (("compute", "launch", "contention"), ("forward", "backward")),
        (("optimizer",), ("optimizer",)),
        (("data",), ("data",)),
        (("own_code",), ("other",)),
    ):
        held = math.fsum(by_cause[c] for c in causes)
        taken = min(held, math.fsum(freed.get(part, 0.0) for part in parts))
        for cause in causes:
            by_cause[cause] -= taken * by_cause[cause] / held if held else 0.0
        total += taken
    return total


def _exposed_by_ddp(ranks: Sequence[Rank]) -> float:
    """Exposed communication by DistributedDataParallel's counters (nanoseconds per backward)."""
    exposed = []
    for rank in ranks:
        whole = rank.ddp.get("avg_backward_comm_time", 0) - rank.ddp.get(
            "avg_backward_compute_comm_overlap_time", 0
        )
        exposed.append(
            max(0.0, whole / 1e6) * (1.0 if rank.skips_sync else max(1.0, rank.micro_steps))
        )
    return min(fmean(exposed), fmean(r.parts_ms["backward"] for r in ranks))


def _take(
    waiting: float, forward: float, backward: float, optimizer: float
) -> tuple[float, float, float]:
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


INTERRUPTIONS = ("communication", "straggler", "checkpoint", "evaluation")
"""What interrupts training, and exchange between ranks."""
BUSY = 0.9
"""A device that is busy in a smaller share of the step is taken to wait for the host: a judgement that one training bore out."""
LEAST_KIND = 0.02
"""A kind of kernels that takes less of the device's time is not named."""


def beside_a_device(
    host: dict[str, float],
    busy_ms: float,
    copies_ms: float,
    synchronisation_ms: float,
    update_ms: float,
) -> dict[str, float]:
    """A step's causes where the host only launches what a device computes, from the host's own time by cause.

    The device's `busy_ms` are computing, but for `copies_ms`, in which it only took data from the host, and for the optimizer's
    `update_ms` at most. Without waiting for the device (`synchronisation_ms`, a part of logging, and copies) the step would take
    as long as the later of the two; what it takes longer is lost by waiting. The host's time beyond the device's is charged to
    what can be left out before launching, and the rest to the optimizer and to launching, as the host was seen in them.
    The parts that interrupt training, and exchange between ranks, stay as they are.
    """
    step = math.fsum(ms for cause, ms in host.items() if cause not in INTERRUPTIONS)
    waits = {
        "host_to_device": host["host_to_device"],
        "logging": min(synchronisation_ms, host["logging"]),
    }
    waiting = math.fsum(waits.values())
    computing = min(busy_ms, step)
    # the step that was recorded may be longer than the mean one
    copies = min(computing, copies_ms * computing / busy_ms) if busy_ms else 0.0
    lost = step - max(computing, step - waiting)
    left = max(0.0, step - computing - lost)
    by_cause = dict.fromkeys(host, 0.0) | {cause: host[cause] for cause in INTERRUPTIONS}
    for cause in ("data", "logging", "own_code", "trainpace"):
        by_cause[cause] = min(left, host[cause] - waits.get(cause, 0.0))
        left -= by_cause[cause]
    for cause, ms in waits.items():
        by_cause[cause] += lost * ms / waiting if waiting else 0.0
    by_cause["host_to_device"] += copies
    updating = min(update_ms, computing - copies)
    model = host["launch"] + host["compute"]
    launching_updates = (
        left * host["optimizer"] / (model + host["optimizer"]) if model + host["optimizer"] else 0.0
    )
    by_cause["launch"] = left - launching_updates
    by_cause["optimizer"] = updating + launching_updates
    by_cause["compute"] = max(0.0, computing - copies - updating)
    return by_cause


def kernels_ms(ranks: Sequence[Rank]) -> dict[str, float]:
    """Milliseconds of a mean step by kind of kernel (KERNEL_KINDS), the mean of these ranks; empty where none were recorded."""
    seen = [rank for rank in ranks if rank.device_kernels_ms and rank.device_busy_ms]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for rank in seen:
        assert rank.device_busy_ms is not None
        longer = max(1.0, rank.device_busy_ms / _uninterrupted_ms(rank))
        for name, ms in rank.device_kernels_ms.items():
            by_kind[kind_of(name)] += ms / longer
    return {kind: by_kind[kind] / len(seen) for kind in KERNEL_KINDS} if seen else {}


def _uninterrupted_ms(rank: Rank) -> float:
    return (
        math.fsum(ms for part, ms in rank.parts_ms.items() if part not in INTERRUPTIONS)
        or rank.step_ms
    )


def sets_the_pace(ranks: Sequence[Rank]) -> bool:
    """Whether a device is busy, copies included, in nearly all of the step, so that shorter kernels make it shorter.

    Several ranks are taken to be: their devices also wait for each other, and kernels that exchange are in no busy time.
    """
    busy_ms = fmean(r.device_busy_ms or 0.0 for r in ranks)
    return _exchange(ranks) or busy_ms >= BUSY * fmean(map(_uninterrupted_ms, ranks))


def _exchange(ranks: Sequence[Rank]) -> bool:
    return ranks[0].world_size > 1


def device_in_words(ranks: Sequence[Rank], step_ms: float) -> list[str]:
    """How much of the step the device is busy, and with what kinds of kernels, as sentences; empty where nobody looked."""
    busy = [r.device_busy_ms for r in ranks if r.device_busy_ms is not None]
    if not busy:
        return []
    share = min(1.0, fmean(busy) / step_ms)
    by_kind = [
        (ms, KERNEL_KINDS[kind])
        for kind, ms in kernels_ms(ranks).items()
        if ms >= LEAST_KIND * fmean(busy)
    ]
    kinds = [f"{format_number(ms)} ms in {words}" for ms, words in sorted(by_kind, reverse=True)]
    words = (
        f"The device is busy in {share:.0%} of the step{': ' if kinds else ''}{', '.join(kinds)}."
    )
    if _exchange(ranks):
        words += " The exchange between ranks is not counted in that."
    elif not sets_the_pace(ranks):
        words += " The host sets the pace: faster kernels alone shorten no step."
    return [words]
