"""Step time in milliseconds by cause. The causes sum to the step time.

Two sources are combined: the parts of the event log, and interventions. An intervention runs blocks
of steps with one cause removed, interleaved with blocks of plain steps. In code, `trial` is the
name of an intervention (a key of `INTERVENTIONS`) or "plain".
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
"""Name of the intervention that shrinks the batch. It removes no cause.

It measures the time that does not depend on the batch size.
"""
INTERRUPTIONS = ("communication", "straggler", "checkpoint", "evaluation")
"""Parts that interrupt training, and communication between ranks."""
BUSY = 0.9
"""Share of the step that the device is busy. Below this value, the device waits for the host.

The value is based on a single training.
"""
MOST_PER_OPERATOR_MS = 0.1
"""Upper limit of host overhead per operator on a machine with other load, in milliseconds.

Chosen by hand: recorded scripts needed 3 to 11 microseconds. Modules with much Python code needed
more.
"""
CROWDED_NOISE = 2
"""Factor that widens the equal-speed interval of ranks on a machine with other load.

Other programs slow down one rank and then another, each time for longer than a block of steps.
Chosen by hand: two identical ranks differed by 7.8 ms (2.4 to 13.1).
"""

IN_WORDS = {
    "data": "waiting for data",
    "host_to_device": "copies to the device",
    "launch": "host overhead (launching operators)",
    "compute": "computing",
    "contention": "computing slowed down by loader workers",
    "threads": "waiting for cores (more threads than free cores)",
    "optimizer": "the optimizer",
    "communication": "communication between ranks",
    "straggler": "waiting for the slowest rank",
    "logging": "logging and synchronization",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "own_code": "the script's own code between these",
    "trainpace": "Trainpace's own overhead",
}


class Intervention(NamedTuple):
    """Settings of an intervention: the steps to compare and the causes that they isolate.

    Attributes:
        steps_with: Description of the changed steps for the report.
        causes: Causes that the intervention removes.
        against: Name of the blocks that serve as the baseline.
        proves: True if a conclusive result (`Proof.settles`) proves the causes. If False, `split`
            checks further conditions.
    """

    steps_with: str = ""
    causes: tuple[str, ...] = ()
    against: str = "plain"
    proves: bool = True


INTERVENTIONS = {
    "cached_batch": Intervention("the same batch again and again", ("data",)),
    "batch_on_device": Intervention(
        "the batch already on the device", ("host_to_device",), against="cached_batch"
    ),
    "no_sync": Intervention(
        "no communication between ranks", ("communication", "straggler"), proves=False
    ),
    FEW_SAMPLES: Intervention(f"batches of {FEW} samples"),
    "muted": Intervention("its output discarded", ("logging",)),
    "fewer_threads": Intervention("{threads} per process", ("threads",), proves=False),
}


class Advice(Record):
    """Suggested change and its saving per step.

    Attributes:
        saves_ms: Saving in milliseconds per step.
        ceiling_ms: Upper limit of the saving, usually the total time of the cause.
        basis: Source of the figure.
        settings: Values to set, if the change is a setting.
        at_most: True if `saves_ms` is an upper bound. The real saving may be smaller.
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
    """Step times with and without one cause, from `rounds` pairs of interleaved blocks.

    `low_ms` and `high_ms` are the 90% interval of `saved_ms`.
    """

    trial: str
    plain_ms: float
    without_ms: float
    saved_ms: float
    low_ms: float
    high_ms: float
    rounds: int

    @property
    def detects_ms(self) -> float:
        """Smallest saving that this proof can distinguish from noise, in milliseconds."""
        return (self.high_ms - self.low_ms) / 2

    @property
    def settles(self) -> bool:
        """True if the result is conclusive: enough rounds, and a clear saving or low noise."""
        return self.rounds >= LEAST_ROUNDS and (
            self.low_ms > 0 or self.detects_ms <= PRECISE * self.plain_ms
        )


def proof_in_words(p: Proof) -> str:
    """Describe the step times of a proof and the saving with its 90% interval."""
    return (
        f"a step took {format_number(p.without_ms)} ms instead of {format_number(p.plain_ms)}:"
        f" {format_number(p.saved_ms)} less"
        f" ({format_number(p.low_ms)} to {format_number(p.high_ms)})"
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def of_trial(rank: Rank, trial: str) -> list[Block]:
    """Return the blocks of steps that a rank ran with this intervention ("plain" for none)."""
    return [b for b in rank.blocks if b.trial == trial]


def same_host(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks on the host of the first rank."""
    return [r for r in ranks if r.host == ranks[0].host]


def proof(
    ranks: Sequence[Rank], trial: str, value: Callable[[Block], float] = lambda b: b.step_ms
) -> Proof | None:
    """Compare the step times with and without an intervention.

    Args:
        ranks: Ranks of one training. Their means are compared.
        trial: Name of the intervention.
        value: Function that returns the time to compare, by default the whole step.

    Returns:
        None if the intervention was not run.
    """
    how = INTERVENTIONS[trial]
    plain, without = (_by_round(ranks, name, value) for name in (how.against, trial))
    pairs = list(zip(plain, without, strict=False))
    if not pairs:
        return None
    saved, half = mean_and_half_width([a - b for a, b in pairs])
    return Proof(
        trial=trial,
        plain_ms=fmean(a for a, _ in pairs),
        without_ms=fmean(b for _, b in pairs),
        saved_ms=saved,
        low_ms=saved - half,
        high_ms=saved + half,
        rounds=len(pairs),
    )


def _by_round(ranks: Sequence[Rank], trial: str, value: Callable[[Block], float]) -> list[float]:
    """Return `value` of the blocks with an intervention, averaged over ranks for each round."""
    blocks = (of_trial(r, trial) for r in ranks)
    return [fmean(map(value, each)) for each in zip(*blocks, strict=False)]


def removes_its_cause(ranks: Sequence[Rank], tried: Proof) -> bool:
    """Return True if the intervention removed most of its cause.

    Only `no_sync` can fail to do so: collectives that Trainpace does not know still run.
    """
    if tried.trial != "no_sync":
        return True
    remaining = fmean(_still_communicating_ms(r, b) for r in ranks for b in of_trial(r, "no_sync"))
    return remaining <= max(tried.saved_ms, PRECISE * tried.plain_ms)


def _still_communicating_ms(rank: Rank, block: Block) -> float:
    # With a GPU, the host may wait in a collective for its own kernels, so the time is unknown.
    return 0.0 if rank.accelerator else block.parts_ms["communication"]


def own_pace_ms(ranks: Sequence[Rank]) -> list[list[float]] | None:
    """Return each rank's step times (ms) without communication, one value per `no_sync` block.

    Returns None if a rank has no such block.
    """
    alone = [
        [b.step_ms - _still_communicating_ms(rank, b) for b in of_trial(rank, "no_sync")]
        for rank in ranks
    ]
    return alone if all(alone) else None


def part_ms(rank: Rank, trial: str, *parts: str) -> float | None:
    """Return the mean ms per step in these parts, over the blocks with this intervention.

    Returns None if the rank has no such blocks.
    """
    blocks = of_trial(rank, trial)
    return fmean(math.fsum(b.parts_ms[p] for p in parts) for b in blocks) if blocks else None


class Split(NamedTuple):
    """Mean milliseconds per step by cause, and the causes that are proved.

    The mean is over the ranks that wait for a straggler, or over all ranks if there is none.
    `fixed_ms` is the part of forward and backward that does not depend on the batch.
    """

    by_cause: dict[str, float]
    proved: frozenset[str]
    slowest_rank: int | None
    fixed_ms: float | None = None


def advice(
    split: Split,
    cause: str,
    saves_ms: float,
    *,
    title: str,
    how: str,
    basis: str,
    ceiling_ms: float | None = None,
    at_most: bool = False,
    **settings: int | str,
) -> Advice:
    """Return an `Advice`. Its ceiling is the time of its cause, unless `ceiling_ms` is given."""
    return Advice(
        cause=cause,
        title=title,
        how=how,
        saves_ms=saves_ms,
        ceiling_ms=split.by_cause[cause] if ceiling_ms is None else ceiling_ms,
        basis=basis,
        settings=settings,
        at_most=at_most,
    )


def split(ranks: Sequence[Rank], together: Together | None = None, crowded: bool = False) -> Split:
    """Split the step time of these ranks by cause.

    Interventions are optional. Without them, the straggler is the rank that the other ranks waited
    for, and DDP's counters give the exposed communication. Launch overhead is then part of
    computing, unless the operators were timed.

    Args:
        ranks: Recordings of the ranks of one training.
        together: Collective timings of ranks that train together.
        crowded: True if other programs used the cores. The time between operators may then belong
            to those programs.
    """
    paces = own_pace_ms(ranks) if len(ranks) > 1 else None
    others, slowest, straggler = _straggler(ranks, paces, together, crowded)
    parts = {part: fmean(r.parts_ms[part] for r in others) for part in ranks[0].parts_ms}
    seen = parts["communication"]  # time in blocking calls
    communication, straggler, proved = _waiting(ranks, paces, seen, straggler)
    waiting = communication + straggler
    model = _without_hidden(waiting - seen, parts)
    computing = model["forward"] + model["backward"]
    launch, fixed = _launching(others, computing, max(0.0, waiting - seen), crowded)
    slowed = 0.0 if waiting else min(_slowed_ms(ranks), computing - launch)
    by_cause = {
        "data": parts["data"] + parts["loader_start"],
        "host_to_device": parts["host_to_device"],
        "launch": launch,
        "compute": computing - launch - slowed,
        "contention": slowed,
        "threads": 0.0,
        "optimizer": model["optimizer"],
        "communication": communication,
        "straggler": straggler,
        "logging": parts["logging"] + parts["synchronisation"],
        "checkpoint": parts["checkpoint"],
        "evaluation": parts["evaluation"],
        "own_code": parts["other"],
        "trainpace": parts["trainpace"],
    }
    by_cause["threads"] = _take_freed(by_cause, _freed_ms(others))
    surplus = math.fsum(by_cause.values()) - math.fsum(parts.values())
    if surplus > 0:  # ranks also waited outside forward, backward and optimizer
        by_cause["own_code"] = max(0.0, by_cause["own_code"] - surplus)
    proved |= _proved(ranks) | {c for c in ("contention", "threads") if by_cause[c]}
    if _known(r.large_operators_ms for r in others):
        proved |= {"launch", "compute"}
    busy = _known(r.device_busy_ms for r in others)
    if busy:
        updates = _known(r.optimizer_variants_ms.get("as it is") for r in others)
        by_cause = beside_a_device(
            by_cause,
            fmean(busy),
            fmean(r.device_copies_ms for r in others),
            parts["synchronisation"],
            fmean(updates) if updates else 0.0,
        )
        return Split(by_cause, proved | {"launch", "compute"}, slowest)
    return Split(by_cause, proved, slowest, fixed)


def _straggler(
    ranks: Sequence[Rank], paces: list[list[float]] | None, together: Together | None, crowded: bool
) -> tuple[Sequence[Rank], int | None, float]:
    """Find the straggler. Return (the other ranks, its rank, the milliseconds it lags behind).

    If no rank is clearly slower, return (all ranks, None, 0.0).
    """
    slowest, behind = None, 0.0
    if paces is not None:
        means = [fmean(steps) for steps in paces]
        last = means.index(max(means))
        lag, half = _lag(paces, last)
        if lag > max(BEHIND * means[last], half * (CROWDED_NOISE if crowded else 1)):
            slowest, behind = ranks[last].rank, lag
    elif together is not None and together.stragglers:
        slowest = together.stragglers[0].rank
        behind = fmean(s.waiting_ms for s in together.ranks if s.rank != slowest)
    return [r for r in ranks if slowest is None or r.rank != slowest], slowest, behind


def _lag(paces: list[list[float]], last: int) -> tuple[float, float]:
    """Return the lag of one rank behind the mean of the others, and half of its 90% interval."""
    rest = [steps for i, steps in enumerate(paces) if i != last]
    return mean_and_half_width(
        [ms - fmean(others) for ms, *others in zip(paces[last], *rest, strict=False)]
    )


def _waiting(
    ranks: Sequence[Rank], paces: list[list[float]] | None, seen_ms: float, straggler_ms: float
) -> tuple[float, float, frozenset[str]]:
    """Return (communication ms, ms of waiting for the straggler, the causes that are proved).

    With `no_sync` blocks, communication is the plain step time minus the step time that the
    slowest rank reaches without communication. Otherwise it is the time in blocking calls
    (`seen_ms`), or the exposed time in DDP's counters if that is longer. Waiting for the straggler
    is then a part of that time.
    """
    tried = proof(ranks, "no_sync") if paces is not None else None
    if paces is None or tried is None:
        if ranks[0].ddp:
            seen_ms = max(seen_ms, _exposed_by_ddp(ranks))
        straggler_ms = min(straggler_ms, seen_ms)
        return seen_ms - straggler_ms, straggler_ms, frozenset()
    if tried.low_ms <= 0 and not straggler_ms and seen_ms:  # noise hides the time of blocking calls
        return seen_ms, 0.0, frozenset()
    plain_ms = fmean(fmean(b.step_ms for b in of_trial(r, "plain")) for r in ranks)
    shown = tried.settles and removes_its_cause(ranks, tried)
    return (
        max(0.0, plain_ms - max(map(fmean, paces))),
        straggler_ms,
        frozenset(("communication", "straggler") if shown else ()),
    )


def _exposed_by_ddp(ranks: Sequence[Rank]) -> float:
    """Return the communication that DDP does not overlap with backward, in ms per step."""
    exposed = []
    # DDP's counters are nanoseconds per backward pass.
    for rank in ranks:
        whole = rank.ddp.get("avg_backward_comm_time", 0) - rank.ddp.get(
            "avg_backward_compute_comm_overlap_time", 0
        )
        passes = 1.0 if rank.skips_sync else max(1.0, rank.micro_steps)
        exposed.append(max(0.0, whole / 1e6) * passes)
    return min(fmean(exposed), fmean(r.parts_ms["backward"] for r in ranks))


def _without_hidden(hidden_ms: float, parts: dict[str, float]) -> dict[str, float]:
    """Return backward, forward and optimizer time without the waiting that they contain.

    `hidden_ms` is the time of waiting minus the time in blocking calls. A rank also waits inside
    these parts, for example in forward for gathered parameters. So the difference is subtracted
    from backward first, then from forward, then from the optimizer.

    If the blocking calls took longer than the waiting, `hidden_ms` is negative. Computing went on
    during these calls, and the difference is added to backward.
    """
    model = {part: parts[part] for part in ("backward", "forward", "optimizer")}
    if hidden_ms < 0:
        model["backward"] -= hidden_ms
        return model
    for part, ms in model.items():
        model[part] = ms - min(ms, hidden_ms)
        hidden_ms -= min(ms, hidden_ms)
    return model


def _launching(
    ranks: Sequence[Rank], computing_ms: float, hidden_ms: float, crowded: bool
) -> tuple[float, float | None]:
    """Return (launch overhead, fixed time), both in ms per step.

    The fixed time is the part of forward and backward that does not depend on the batch size, or
    None if it is unknown. It also serves as the launch overhead if no operators were timed.
    """
    lines = _known(_fixed_ms(r, hidden_ms) for r in ranks)
    fixed = min(fmean(lines), computing_ms) if lines else None
    large = _known(r.large_operators_ms for r in ranks)
    if not large:
        return fixed or 0.0, fixed
    return _beside_operators(ranks, computing_ms, fmean(large), crowded), fixed


def _beside_operators(
    ranks: Sequence[Rank], computing_ms: float, large_ms: float, crowded: bool
) -> float:
    """Return the part of computing that is not spent in large operators."""
    # Operators are timed in a few early steps. Later slowdown by other programs is not overhead.
    pace = min(computing_ms, fmean(map(_quickest_computing_ms, ranks)))
    launch = computing_ms * max(0.0, 1 - large_ms / pace) if pace else 0.0
    operators = fmean(r.operators for r in ranks)
    if crowded and operators and ranks[0].device_busy_ms is None:
        launch = min(launch, MOST_PER_OPERATOR_MS * operators)
    return launch


def _fixed_ms(rank: Rank, hidden_ms: float) -> float | None:
    """Extrapolate the time of forward and backward to an empty batch.

    The line goes through the full batch and the batch of FEW samples. Returns None if the small
    batch was not run, or if the full batch has no more than FEW samples.
    """
    full = part_ms(rank, "cached_batch", "forward", "backward")
    few = part_ms(rank, FEW_SAMPLES, "forward", "backward")
    samples = rank.samples_per_step / batches_per_step(rank)
    if full is None or few is None or samples <= FEW:
        return None
    slope = max(0.0, (full - few) / (samples - FEW))
    waiting = min(hidden_ms, part_ms(rank, "plain", "forward", "backward") or 0.0)
    return max(0.0, min(full, few - FEW * slope) - waiting)


def _quickest_computing_ms(rank: Rank) -> float:
    """Return the time of forward and backward in the fastest block of plain steps.

    Without such blocks, return the mean over all steps.
    """
    blocks = [b.parts_ms for b in of_trial(rank, "plain")] or [rank.parts_ms]
    return min(parts["forward"] + parts["backward"] for parts in blocks)


def _slowed_ms(ranks: Sequence[Rank]) -> float:
    """Return the time that forward and backward lose to loader workers on the same cores, in ms.

    The loader workers are idle in blocks with a cached batch, so these blocks are the comparison.
    Returns 0 if the difference is within the noise, a device computes, or no worker runs.
    """
    if not all(r.loader and r.loader.workers and r.device_busy_ms is None for r in ranks):
        return 0.0
    tried = proof(
        ranks, "cached_batch", lambda b: math.fsum(b.parts_ms[p] for p in ("forward", "backward"))
    )
    if tried is None or tried.rounds < LEAST_ROUNDS or tried.low_ms <= 0:
        return 0.0
    return tried.saved_ms


def _freed_ms(ranks: Sequence[Rank]) -> dict[str, float]:
    """Return the milliseconds that fewer threads save in each part of the step.

    Returns an empty dict if no saving is proved.
    """
    tried = proof(ranks, "fewer_threads")
    if tried is None or not tried.settles or tried.low_ms <= 0:
        return {}
    return {
        part: max(
            0.0,
            fmean(
                (part_ms(r, "plain", part) or 0.0) - (part_ms(r, "fewer_threads", part) or 0.0)
                for r in ranks
            ),
        )
        for part in ranks[0].parts_ms
    }


def _take_freed(by_cause: dict[str, float], freed: dict[str, float]) -> float:
    """Subtract what fewer threads save (`freed`) from `by_cause` in place. Return the sum.

    The causes of one group share the saving in proportion to their time.
    """
    total = 0.0
    for causes, parts in (
        (("compute", "launch", "contention"), ("forward", "backward")),
        (("optimizer",), ("optimizer",)),
        (("data",), ("data",)),
        (("own_code",), ("other",)),
    ):
        spent = math.fsum(by_cause[c] for c in causes)
        saved = min(spent, math.fsum(freed.get(part, 0.0) for part in parts))
        for cause in causes:
            by_cause[cause] -= saved * by_cause[cause] / spent if spent else 0.0
        total += saved
    return total


def _proved(ranks: Sequence[Rank]) -> frozenset[str]:
    tried = {trial: proof(ranks, trial) for trial in INTERVENTIONS}
    return frozenset(
        cause
        for trial, found in tried.items()
        if found is not None and found.settles and INTERVENTIONS[trial].proves
        for cause in INTERVENTIONS[trial].causes
    )


def beside_a_device(
    host: dict[str, float],
    busy_ms: float,
    copies_ms: float,
    synchronisation_ms: float,
    update_ms: float,
) -> dict[str, float]:
    """Split a step by cause if a device computes and the host only launches kernels.

    The time of `INTERRUPTIONS` is copied from `host`. The rest of the step is divided in three:

    1. Busy time of the device. It counts as computing, except `copies_ms` and `update_ms`.
    2. Time lost in synchronization. The host waits for the device in copies and in
       `synchronisation_ms`. Without these waits, the step would take as long as the slower of host
       and device. The lost time is the difference. It goes to copies and logging.
    3. The remainder, when the device waits for a slower host. It goes to data, logging, own code
       and Trainpace's overhead, each up to its host time. The optimizer and launching share the
       time that is left, in proportion to their host time.

    Args:
        host: Milliseconds per step by cause, as the host saw them.
        busy_ms: Time per step that the device works.
        copies_ms: Part of `busy_ms` when the device only receives copies from the host.
        synchronisation_ms: Part of logging when the host waits for the device.
        update_ms: Part of `busy_ms` for the optimizer.
    """
    step = math.fsum(ms for cause, ms in host.items() if cause not in INTERRUPTIONS)
    waits = {
        "host_to_device": host["host_to_device"],
        "logging": min(synchronisation_ms, host["logging"]),
    }
    waiting = math.fsum(waits.values())
    computing = min(busy_ms, step)
    # The profiled step may be longer than the mean step, so scale the copies to the mean step.
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
    launching = host["launch"] + host["compute"] + host["optimizer"]
    launching_updates = left * host["optimizer"] / launching if launching else 0.0
    by_cause["launch"] = left - launching_updates
    by_cause["optimizer"] = updating + launching_updates
    by_cause["compute"] = max(0.0, computing - copies - updating)
    return by_cause


def kernels_ms(ranks: Sequence[Rank]) -> dict[str, float]:
    """Return milliseconds per step by kind of kernel.

    The mean is over the ranks that recorded kernels. Returns an empty dict if no rank did.
    """
    seen = [rank for rank in ranks if rank.device_kernels_ms and rank.device_busy_ms]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for rank in seen:
        longer = max(1.0, (rank.device_busy_ms or 0.0) / _uninterrupted_ms(rank))
        for name, ms in rank.device_kernels_ms.items():
            by_kind[kind_of(name)] += ms / longer
    return {kind: by_kind[kind] / len(seen) for kind in KERNEL_KINDS} if seen else {}


def _uninterrupted_ms(rank: Rank) -> float:
    parts = [ms for part, ms in rank.parts_ms.items() if part not in INTERRUPTIONS]
    return math.fsum(parts) or rank.step_ms


def sets_the_pace(ranks: Sequence[Rank]) -> bool:
    """Return True if faster kernels shorten the step.

    This holds if the device is busy for nearly the whole step. The answer is always True for
    several ranks: their devices also wait for each other, and the busy time does not include
    communication kernels.
    """
    busy_ms = fmean(r.device_busy_ms or 0.0 for r in ranks)
    return ranks[0].world_size > 1 or busy_ms >= BUSY * fmean(map(_uninterrupted_ms, ranks))
